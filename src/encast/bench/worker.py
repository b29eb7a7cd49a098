"""A peer in a process of its own, driven from here; whatever it does, this process goes on.

The other side is ``worker_process``. Requests and answers are JSON lines on a socket that only the two know, since
libraries print what they please on standard output; arrays are ``.npy`` files in a folder that is removed at the end.
Only one worker is asked at a time (the instances of one system: all at once); between requests it sleeps.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil  # type: ignore[import-untyped]

from encast.batch import Batch
from encast.bench.peers.base import BackendSpec, ModelFiles
from encast.bench.timing import Limits
from encast.errors import EncastError, ResourceError
from encast.launch import MemoryBinding, Placement, preexec, signal_name
from encast.machine import this_machine
from encast.measure import processes

__all__ = ["Limits", "Worker", "WorkerError", "prepare", "receive", "temporary_files", "write_batch"]

_POLL_SECONDS = 0.2
_CLOSE_SECONDS = 5.0
_STDERR_LINES = 6


class WorkerError(EncastError):
    """A backend failed. ``status`` is one of ``rows.STATUSES``: unavailable, crashed, timed_out, leaked or failed."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Worker:
    """One instance of a backend. Methods raise ``WorkerError``; after any but ``failed`` the process is gone."""

    def __init__(
        self,
        backend: BackendSpec,
        model: ModelFiles,
        threads: int,
        *,
        cache: Path,
        placement: Placement | None = None,
        environment: Mapping[str, str] | None = None,
        memory: MemoryBinding | None = None,
        limits: Limits | None = None,
    ) -> None:
        """``placement``: where it may run (None: where this process may).

        Raises ``WorkerError`` where ``backend.python`` cannot be started, and ``ResourceError`` for what the machine
        refuses whatever the backend is.
        """
        place = placement or Placement(tuple(sorted(os.sched_getaffinity(0))), None, threads)
        self.backend, self.limits = backend, limits or Limits()
        self._most = self.limits.memory_share * _memory_bytes()
        self._ceiling = math.inf
        self._known: set[psutil.Process] = set()
        self._unread = b""
        self._cpu_ns = 0
        self.answered_ns = 0
        """When the last answer was there, of ``time.perf_counter_ns``."""
        with contextlib.ExitStack() as undo:
            with temporary_files():
                self.folder = Path(tempfile.mkdtemp(prefix="encast-bench-"))
                undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
                self._log = self.folder / "stderr"
                with self._log.open("wb") as log:
                    self._start(log, place, environment or {}, memory)
            # The calibration alone may be longer than a command line.
            self.send(
                "begin",
                peer=backend.peer,
                dtype=backend.dtype,
                threads=threads,
                cache=str(cache),
                options=dict(backend.options),
                model={**asdict(model), "checkpoint": str(model.checkpoint)},
            )
            undo.pop_all()

    def _start(
        self, log: IO[bytes], place: Placement, environment: Mapping[str, str], memory: MemoryBinding | None
    ) -> None:
        backend, path = self.backend, self._python_path()
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(self.limits.open_seconds)
        command = [backend.python or sys.executable, "-m", "encast.bench.worker_process", str(theirs.fileno())]
        try:
            self._process = subprocess.Popen(
                [*(memory.prefix(place.node) if memory else ()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment, "PYTHONPATH": path},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for this process alone
                # A worker that outlives its parent would take the processors from what is measured next.
                # And what it starts stays below it, daemons too, where it is counted.
                preexec_fn=preexec(place, memory, adopt=True),
            )
        except OSError as error:
            self._socket.close()
            if backend.python is not None and error.filename == backend.python:  # the program's fault
                raise WorkerError(
                    "unavailable",
                    f"{backend.name}: {backend.python} cannot be started ({error.strerror}); correct `python` in the "
                    "backend's YAML",
                ) from None
            raise ResourceError(
                f"{backend.name}: its process cannot be started ({error.strerror}); free memory, end other processes, "
                "or raise `ulimit -n`"
            ) from None
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def family(self) -> list[psutil.Process]:
        """The process and what it has started; these are remembered, since when it ends they are no longer below it."""
        found = processes.family(self.pid)
        self._known.update(found)
        return found

    def cpu_ns(self) -> int:
        """Processor time of the family; the most that was seen, since nobody can ask a process that has ended."""
        self._cpu_ns = max(self._cpu_ns, processes.cpu_time(self.family()).cpu)
        return self._cpu_ns

    def ask(self, do: str, *, seconds: float, **fields: Any) -> Any:
        """One request and its answer, for which at most ``seconds`` are waited."""
        self.send(do, **fields)
        return receive([self], do, seconds)[0]

    def send(self, do: str, **fields: Any) -> None:
        """A request whose answer ``receive`` will wait for."""
        try:
            self._socket.sendall(json.dumps({"do": do, **fields}).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            pass  # ``receive`` finds out why it ended
        except TimeoutError:
            self.kill()
            raise self._failure("timed_out", f"took no request within {self.limits.open_seconds:g} s") from None

    def fileno(self) -> int:
        """For ``select``: readable once the answer begins to come, or the process has ended."""
        return self._socket.fileno()

    def read(self, do: str) -> bool:
        """Takes what there is of an answer; whether it is whole."""
        received = b""
        with contextlib.suppress(ConnectionResetError):
            received = self._socket.recv(1 << 20)
        if not received:
            raise self._crash(do)
        self._unread += received
        self.answered_ns = time.perf_counter_ns()
        return b"\n" in received

    def check(self, do: str, late: bool, seconds: float) -> None:
        """Raises where no answer can come, or where it is ``late``."""
        if self._process.poll() is not None:  # what it started may hold the connection open
            raise self._crash(do)
        self.check_memory()
        if late:
            self.kill()
            raise self._failure("timed_out", f"no answer to {do!r} within {seconds:g} s")

    def answer(self, do: str) -> Any:
        """The answer that ``read`` has taken."""
        line, _, self._unread = self._unread.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise self._failure("failed", f"{do}: {answer['error']}")
        return answer["value"]

    def limit_growth(self, limited: bool) -> None:
        """From now on resident memory may grow by ``limits.growth_mib``, or as far as ``limits.memory_share`` says."""
        resident = processes.resident_bytes(self.family()) if limited else math.inf
        self._ceiling = resident + self.limits.growth_mib * 2**20

    def check_memory(self) -> None:
        """Ends the process, and raises, when it has grown beyond what it may."""
        resident = processes.resident_bytes(self.family())
        if resident > self._ceiling:
            beyond = (
                f"{self.limits.growth_mib:g} MiB more than after its warm-up; it leaks, or give it more with "
                "limits.growth_mib"
            )
        elif resident > self._most:
            beyond = (
                f"more than {self.limits.memory_share:.0%} of the memory there is; ask for less, or raise "
                "limits.memory_share"
            )
        else:
            return
        self.kill()
        raise self._failure("leaked", f"{resident / 2**20:.0f} MiB resident, {beyond}")

    def leave(self) -> None:
        """Lets the process end by itself, without waiting for that as ``close`` does."""
        self.family()
        self._socket.close()

    def close(self) -> None:
        """Lets the process end by itself, and ends it when it does not; removes the folder."""
        try:
            self.leave()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_SECONDS)
        finally:  # also at Ctrl-C
            self.kill()
            shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        """Ends the process and everything that it has started."""
        self.cpu_ns()
        processes.end(self._known, self.pid)
        self._process.wait()

    def _crash(self, do: str) -> WorkerError:
        self.cpu_ns()  # until it is waited for
        try:
            code = self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # it closed the socket and lives on
            self.kill()
            return self._failure("crashed", f"closed its connection during {do!r}")
        how = f"signal {signal_name(-code)}" if code < 0 else f"exit code {code}"
        return self._failure("crashed", f"ended by {how} during {do!r}")

    def _failure(self, status: str, what: str) -> WorkerError:
        said = ""
        if status != "failed":
            with contextlib.suppress(OSError):
                lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
                said = "".join(f"\n  {line}" for line in lines[-_STDERR_LINES:])
        return WorkerError(status, f"{self.backend.name}: {what}" + (f"; it said last:{said}" if said else ""))

    def _python_path(self) -> str:
        """Where the process finds encast, and, in another environment, nothing else of this one."""
        package = Path(__file__).resolve().parents[1]
        if self.backend.python is None:
            return os.pathsep.join(filter(None, (str(package.parent), os.environ.get("PYTHONPATH"))))
        (self.folder / "path").mkdir()
        (self.folder / "path" / "encast").symlink_to(package)
        return str(self.folder / "path")


def receive(
    workers: Sequence[Worker], do: str, seconds: float, meanwhile: Callable[[], None] | None = None
) -> list[Any]:
    """The answers to the request sent last to each of the workers, for which at most ``seconds`` are waited.

    ``meanwhile`` is called again and again as long as one is missing.
    """
    deadline = time.monotonic() + seconds
    waiting = list(workers)
    while waiting:
        if meanwhile is not None:
            meanwhile()
        left = deadline - time.monotonic()
        ready = select.select(waiting, [], [], 0 if meanwhile else max(0, min(_POLL_SECONDS, left)))[0]
        waiting = [worker for worker in waiting if not (worker in ready and worker.read(do))]
        if left <= 0 or not (ready or meanwhile):  # late is also who writes for ever and never ends its answer
            for worker in waiting:
                worker.check(do, left <= 0, seconds)
    return [worker.answer(do) for worker in workers]


def prepare(
    backend: BackendSpec, model: ModelFiles, threads: int, cache: Path, limits: Limits | None = None
) -> tuple[str | None, Mapping[str, Any]]:
    """Why the backend cannot be used here, or None and the peer's facts about the checkpoint that it has converted.

    In a process of its own, on all processors, so that nothing of it is left when calls are timed.
    """
    limits = limits or Limits()
    worker = Worker(backend, model, threads, cache=cache, limits=limits)
    try:
        reason: str | None = worker.ask("missing", seconds=limits.open_seconds)
        return reason, {} if reason is not None else worker.ask("export", seconds=limits.export_seconds)
    finally:
        worker.close()


def _memory_bytes() -> int:
    machine = this_machine()
    known = [size for size in (machine.memory_bytes, machine.cgroup.memory_bytes) if size]
    return min(known, default=sys.maxsize)


@contextlib.contextmanager
def temporary_files() -> Iterator[None]:
    """Raises ``ResourceError`` where files of a worker's folder cannot be written: no backend is to blame for that."""
    try:
        yield
    except OSError as error:
        folder = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
        descriptors = error.errno in (errno.EMFILE, errno.ENFILE)
        advice = "raise `ulimit -n`" if descriptors else "make room, or name another folder with TMPDIR"
        raise ResourceError(
            f"{folder}: temporary files cannot be written ({error.strerror or error}); {advice}"
        ) from None


def write_batch(batch: Batch, file: Path) -> str:
    """Writes the batch as ``worker_process`` reads it, and returns the file's name. Raises ``ResourceError``."""
    types = np.empty(0, np.int32) if batch.token_type_ids is None else batch.token_type_ids
    with temporary_files(), file.open("wb") as stream:
        np.savez(stream, token_ids=batch.token_ids, cu_seqlens=batch.cu_seqlens, token_type_ids=types)
    return str(file)
