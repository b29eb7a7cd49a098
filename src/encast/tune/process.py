"""The parent's end of a worker: starts it, asks it, and ends it, whatever it does."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import encast.errors as errors
from encast.backends.groups import Setup, setup_to_json
from encast.errors import EncastError, ResourceError
from encast.launch import signal_name
from encast.measure.processes import family, resident_bytes

__all__ = ["Worker"]

_OPEN_SECONDS = 300.0
_SHOWN_LINES = 3


class Worker:
    """A process that has one set-up open; a context manager.

    Methods raise the worker's own ``EncastError``, and ``ResourceError`` when it died or did not answer in time; it
    is dead then.
    """

    def __init__(
        self, setup: Setup, job: Mapping[str, Any], prefix: Sequence[str] = (), words: str | None = None
    ) -> None:
        """``job``: artifact, requests, output, selects, see ``encast.tune.worker``. ``prefix``: what starts it.
        ``words``: what messages call it, by default the set-up.
        """
        self.setup, self.words = setup, words or setup.text
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115, closed with the worker
        # The parent's own encast, wherever it was imported from.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        try:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "encast.tune.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
                # So that an interrupt at the terminal is the parent's alone, and its descendants can be found.
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise ResourceError(
                f"a process to measure with cannot be started ({error.strerror}); end some, or free memory"
            ) from None
        self._pending = b""
        try:
            self.opened = self.ask({**job, "setup": setup_to_json(setup)}, _OPEN_SECONDS)
        except BaseException:
            self.close()
            raise

    def ask(self, command: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a command, within that many seconds."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # ValueError: it was closed before
            raise self._died(command) from None
        answer = self._line(command, seconds)
        if "error" in answer:
            kind = getattr(errors, str(answer.get("kind")), ResourceError)
            known = isinstance(kind, type) and issubclass(kind, EncastError)
            raise (kind if known else ResourceError)(f"{self.words}: {answer['error']}")
        return answer

    @property
    def closed(self) -> bool:
        """Whether it was closed, or died."""
        return self._stderr.closed

    def memory_bytes(self) -> int | None:
        """What a service alone with this set-up would hold: shared pages, such as the weights, count in full, however
        many others have them mapped just now. None where the kernel does not say."""
        return resident_bytes(family(self._process.pid)) or None

    def close(self) -> None:
        """Ends the process and all that it started. Closing twice is fine."""
        if self.closed:
            return
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._stderr.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _line(self, command: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        end = time.monotonic() + seconds
        while b"\n" not in self._pending:
            left = end - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                what = self._what(command)
                self.close()
                raise ResourceError(f"{self.words}: {what} did not end within {seconds:.0f} s; it was stopped")
            block = os.read(descriptor, 1 << 16)
            if not block:
                raise self._died(command)
            self._pending += block
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _died(self, command: Mapping[str, Any]) -> ResourceError:
        """What is known of the end of the process."""
        try:
            code: int | None = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = None
        said = f"with exit code {code}"
        if code is not None and code < 0:
            said = f"by {signal_name(-code)}"
        lines: list[str] = []
        if not self._stderr.closed:
            self._stderr.seek(0)
            lines = [line for line in self._stderr.read().decode("utf-8", "replace").splitlines() if line.strip()]
        last = f": {' | '.join(lines[-_SHOWN_LINES:])}" if lines else ""
        memory = "; the kernel kills with SIGKILL what needs too much memory" if code == -signal.SIGKILL else ""
        error = ResourceError(f"{self.words}: the process ended {said} during {self._what(command)}{last}{memory}")
        self.close()
        return error

    @staticmethod
    def _what(command: Mapping[str, Any]) -> str:
        return str(command.get("do", "opening the artifact"))


def requests_file(folder: Path, token_ids: Any, cu_seqlens: Any, token_type_ids: Any | None) -> Path:
    """Writes the requests of a workload for workers to read; raises ``ResourceError``."""
    import numpy as np

    path = folder / "requests.npz"
    arrays = {"token_ids": token_ids, "cu_seqlens": cu_seqlens}
    if token_type_ids is not None:
        arrays["token_type_ids"] = token_type_ids
    try:
        np.savez(path, **arrays)
    except OSError as error:
        raise ResourceError(f"{path}: cannot be written ({error.strerror}); make room, or set TMPDIR") from None
    return path
