"""Runs the supervisor in a child process, so that one of the two is left to clean up when the other is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from encast.errors import EncastError
from encast.launch.process import adopt_orphans, descendants, die_with_parent
from encast.launch.supervise import FORWARDED

__all__ = ["guarded"]

_CLEAN_UP_S = 5.0


def guarded(work: Callable[[], int]) -> int:
    """Returns what ``work`` returns, which runs in a forked child that gets the signals that this process is sent.

    Instances die with the supervisor, as the kernel sees to; but nothing ends what *they* have started when the
    supervisor is killed with ``SIGKILL``. Hence two processes, each of which adopts the orphans of the other: when the
    child is killed, this one kills all that it leaves; when this one is killed, the child is sent ``SIGTERM`` and ends
    everything in order. An ``EncastError`` of ``work`` is raised again here.
    """
    adopt_orphans()
    parent = os.getpid()
    taken = [s for s in FORWARDED if signal.getsignal(s) is not signal.SIG_IGN]
    # Until both are ready for them, signals wait.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, taken)
    problem, reporter = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(problem)
        _supervise(work, parent, reporter)
    os.close(reporter)
    before = {s: signal.signal(s, lambda number, _: os.kill(child, number)) for s in taken}
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    try:
        # The child ends after all others, unless it is killed: then what it leaves is ours.
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT) is None:
            pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _end_orphans()
    with os.fdopen(problem, encoding="utf-8") as report:
        text = report.read()
    if text:
        raise _known_error(text)
    return code if code >= 0 else 128 - code


def _supervise(work: Callable[[], int], parent: int, reporter: int) -> None:
    """The child's life; it never returns."""
    code = 1
    try:
        # A group of its own: what a terminal sends to ours it would otherwise get twice. Such a group may write to the
        # terminal even where background processes may not.
        os.setpgid(0, 0)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        die_with_parent(signal.SIGTERM, parent)
        code = work()
    except EncastError as error:
        os.write(reporter, f"{type(error).__name__} {error}".encode())
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _known_error(text: str) -> EncastError:
    name, _, message = text.partition(" ")
    kinds = {kind.__name__: kind for kind in EncastError.__subclasses__()}
    return kinds.get(name, EncastError)(message)


def _end_orphans() -> None:
    """Kills and reaps what the child has left."""
    end = time.monotonic() + _CLEAN_UP_S
    while time.monotonic() < end:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(0.01)
