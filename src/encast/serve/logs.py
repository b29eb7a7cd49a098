"""The log: a line of JSON for every request and for every event in the life of the server.

A thread writes. What it is given waits in a queue bounded in bytes; what does not fit, or cannot be written because the
disk is full, is dropped and counted. So the log never holds a request up. There is no library behind it:
python-json-logger and structlog format records, which msgspec does here, and neither writes without blocking.
"""

from __future__ import annotations

import datetime
import logging
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from encast.errors import InputError
from encast.serve.service import Finished

__all__ = ["Log", "QuietFormatter"]

_MOST_BYTES = 32 << 20
_ABOUT = 512
"""Of memory for a line, beside the body that it may hold."""

_OURS = frozenset(("failed", "unavailable", "overloaded", "expired"))
"""Refusals whose words are the server's alone; those of others may quote the request."""


class Log:
    """``path``: a file, which is appended to, or ``-`` for standard output. ``texts``: whether to write what clients
    sent. ``process`` names the writer in every line. ``dropped`` is told why a line was: "full" or "error".

    Several processes may write to one file: a line is one write. Raises ``InputError`` when it cannot be opened.
    """

    def __init__(
        self, path: str, *, texts: bool = False, process: str = "", dropped: Callable[[str], None] = lambda _: None
    ) -> None:
        self._path, self._texts, self._process, self._dropped = path, texts, process, dropped
        self._fd = self._open()
        self._queue: queue.SimpleQueue[tuple[int, dict[str, Any]] | Callable[[], None] | None] = queue.SimpleQueue()
        self._given = self._done = 0
        """Bytes: each number is changed by one thread alone."""
        self._torn = False
        self._failures = 0
        self._failures_told = 0
        self._thread = threading.Thread(target=self._work, name="log", daemon=True)
        self._thread.start()

    def finished(self, request: Finished) -> None:
        """Writes the line of a request; belongs into ``Service.finished``."""
        call, timing = request.call, request.call.timing
        line: dict[str, Any] = {
            "id": request.request_id, "operation": request.operation, "protocol": request.protocol,
            "status": request.status, "kind": request.kind, "key": request.key,
            "model": "" if call.model is None else call.model.name, "texts": timing.texts, "tokens": timing.tokens,
            "batch_tokens": timing.batch_tokens, "total_ms": _ms(request.total_s),
            "tokenize_ms": _ms(timing.tokenize_s), "queue_ms": _ms(timing.queue_s),
            "inference_ms": _ms(timing.inference_s), "bytes_in": len(call.body), "bytes_out": request.bytes_out,
        }  # fmt: skip
        if request.message and (self._texts or request.kind in _OURS):
            line["message"] = request.message
        if self._texts:
            line["body"] = call.body
        self._put("request", line, len(call.body) if self._texts else 0)

    def event(self, event: str, **fields: Any) -> None:
        """Writes the line of an event. May be called by any one thread, always the same."""
        self._put(event, fields, 0)

    def reopen(self) -> None:
        """Opens the file by its name again, after what was given so far is written: logrotate has moved it away."""
        self._queue.put(self._reopen)

    def close(self) -> None:
        """Writes what waits, within a second."""
        self._queue.put(None)
        self._thread.join(1)

    def _put(self, event: str, fields: dict[str, Any], size: int) -> None:
        while self._failures_told < self._failures:  # told here, so that counters belong to one thread
            self._failures_told += 1
            self._dropped("error")
        if self._given - self._done + size + _ABOUT > _MOST_BYTES:
            self._dropped("full")
            return
        self._given += size + _ABOUT
        now = datetime.datetime.now(datetime.timezone.utc)
        self._queue.put((size + _ABOUT, {"time": now, "event": event, "process": self._process, **fields}))

    # In the thread

    def _open(self) -> int:
        if self._path == "-":
            return os.dup(sys.stdout.fileno())
        try:
            return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise InputError(f"{self._path}: the log cannot be written: {error.strerror}") from None

    def _reopen(self) -> None:
        try:
            fd = self._open()
        except InputError:  # the old one is better than none
            return
        os.close(self._fd)
        self._fd = fd

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if callable(item):
                item()
                continue
            size, fields = item
            try:
                self._write(fields)
            except Exception:  # a log that cannot be written must not disturb those who are served
                self._failures += 1
            self._done += size

    def _write(self, fields: dict[str, Any]) -> None:
        body = fields.get("body")
        if body is not None:
            fields["body"] = body.decode("utf-8", "replace")
        line = msgspec.json.encode(fields) + b"\n"
        data = b"\n" + line if self._torn else line
        written = os.write(self._fd, data)
        self._torn = written < len(data)
        if self._torn:
            raise OSError("only a part of the line was written")


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


class QuietFormatter(logging.Formatter):
    """Says where an exception arose and of which type it is. Its words, which may quote texts, only with ``texts``."""

    def __init__(self, *, texts: bool = False) -> None:
        super().__init__("encast: %(message)s")
        self._texts = texts

    def formatException(self, ei: Any) -> str:  # noqa: N802  # the name in logging
        kind, error, where = ei
        last = traceback.format_exception_only(kind, error) if self._texts else [f"{kind.__name__}\n"]
        return "".join([*traceback.format_tb(where), *last]).rstrip()
