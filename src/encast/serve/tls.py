"""The server's certificate."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from encast.errors import InputError

__all__ = ["grpc_certificate", "grpc_credentials", "tls_context"]


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
        files = cert if key is None else f"{cert} and {key}"
        raise InputError(
            f"{files} cannot be used for TLS: {error.strerror or error}; give PEM files of a certificate and its key, "
            "which has no passphrase"
        ) from None
    return fresh if context is None else context


def _no_passphrase() -> str:
    return ""  # OpenSSL would ask the terminal


def grpc_certificate(cert: str, key: str | None) -> Any:
    """The same for gRPC: files that ``tls_context`` takes."""
    import grpc

    chain = Path(cert).read_bytes()
    return grpc.ssl_server_certificate_configuration([(chain if key is None else Path(key).read_bytes(), chain)])


def grpc_credentials(now: Callable[[], Any]) -> Any:
    """Credentials of a server; ``now`` gives the ``grpc_certificate`` for each new connection."""
    import grpc

    return grpc.dynamic_ssl_server_credentials(now(), now, False)
