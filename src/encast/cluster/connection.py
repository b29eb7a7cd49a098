"""Reaching a Ray cluster, with clear words where that fails."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import threading
from typing import Any

from encast.errors import InputError, ResourceError, need_modules

__all__ = ["connect", "head_answers"]

_REACH_S = 5.0


def connect(address: str) -> Any:
    """The module ``ray``, as a driver of the cluster at ``address``: "auto" or HOST:PORT.

    Raises ``InputError`` for another form of address and without the extra, ``ResourceError`` where no cluster answers.
    """
    need_modules("ray", "ray")
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not host or not re.fullmatch(r"\d{1,5}", port) or "/" in host:
            raise InputError(
                f"--ray is {address!r}; give auto, or HOST:PORT of the cluster's head (6379 is Ray's usual port). The "
                "command runs on a node of the cluster: ray:// does not reach one, `ray job submit` does"
            )
        try:
            _need_server(_bare(host), int(port))
        except (OSError, OverflowError) as error:
            raise ResourceError(
                f"no Ray cluster answers at {address} ({error}); start one with `ray start --head`, or give the "
                "address that `ray status` shows"
            ) from None
    import ray

    stops = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:
        with contextlib.suppress(Exception):
            ray.shutdown()
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        raise ResourceError(
            f"the Ray cluster at {address} cannot be joined: {reason}; run this on a node of the cluster, with its "
            "versions of Ray and Python"
        ) from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stops)  # Ray's own would end the process without a word
    return ray


def head_answers(ray: Any) -> bool:
    """Whether somebody listens where the cluster's head does. Without one most calls of Ray wait for a minute, then end
    the process."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    try:
        socket.create_connection((_bare(host), int(port)), _REACH_S).close()
    except OSError:
        return False
    return True


def _bare(host: str) -> str:
    """[::1]:6379 is the port 6379 of ::1."""
    return host.removeprefix("[").removesuffix("]")


def _need_server(host: str, port: int) -> None:
    """Raises ``OSError`` where nothing speaks HTTP/2, as a head does: Ray itself takes minutes to give up."""
    with socket.create_connection((host, port), _REACH_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        if connection.recv(9, socket.MSG_WAITALL)[3:4] != b"\4":  # the type of a frame of settings (RFC 9113, 3.4)
            raise OSError("it is no Ray cluster")
