"""The server's certificate."""

from __future__ import annotations

import ssl

from encast.errors import InputError

__all__ = ["tls_context"]


def tls_context(cert: str, key: str | None, context: ssl.SSLContext | None = None) -> ssl.SSLContext:
    """A context with the certificate chain of the file ``cert``, and its key, which may be in the same file.

    With ``context`` that one, for connections from now on. Raises ``InputError``; what it had then stays.
    """
    fresh = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        fresh.load_cert_chain(cert, key, _no_passphrase)
        if context is not None:
            context.load_cert_chain(cert, key, _no_passphrase)
    except OSError as error:  # an ssl.SSLError is one
        raise InputError(
            f"{cert}{f' and {key}' if key else ''} cannot be used for TLS: {error.strerror or error}; give PEM files of "
            "a certificate and its key, which has no passphrase"
        ) from None
    return fresh if context is None else context


def _no_passphrase() -> str:
    return ""  # OpenSSL would ask the terminal
