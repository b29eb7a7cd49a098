"""Starts the instances of a command, watches over them, and leaves none behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from encast.errors import ResourceError
from encast.launch.memory import MemoryBinding
from encast.launch.output import LineBuffer, Output
from encast.launch.placement import Placement
from encast.launch.process import adopt_orphans, descendants, preexec, signal_name

__all__ = ["ENDING", "FORWARDED", "Instance", "supervise"]

# What these ask for is the end: instances that do not follow are killed after a while.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
# A server may take these for other things, such as reading its configuration again.
FORWARDED = (*ENDING, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_READ = 1 << 16
# To learn of a child that has ended, without reaping it.
_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT
# By which a process tells whose it is when its parent has ended: unique to an instance, and inherited.
_MARK = "ENCAST_LAUNCHED_AS"
# What even SIGKILL does not end within this many seconds waits for a device, and is left.
_AFTER_KILL_S = 5.0
# Some send a signal to a process and to its whole group, or to all of a service: that is no second request.
_SECOND_REQUEST_S = 1.0


@dataclass(frozen=True)
class Instance:
    """A command and the place where it runs; ``environment`` comes on top of the launcher's."""

    command: Sequence[str]
    placement: Placement
    environment: Mapping[str, str]


def supervise(
    instances: Sequence[Instance], output: Output, *, memory: MemoryBinding | None = None, grace_s: float = 10.0
) -> int:
    """Runs all instances until the last has ended, and returns an exit code as a shell counts it.

    That is the code of the first instance that failed (128 + N for one that signal N ended), whose failure ends the
    others; else 128 + N when signal N ended the launcher; 141 when nobody reads the output any more; 74 when it cannot
    be written for another reason, which the other stream says; else 0. Signals of ``FORWARDED`` go to every instance's
    process group, those that ask for the end once. An end that is asked for, by a signal or a failure, is ``SIGTERM``,
    and ``SIGKILL`` after ``grace_s`` seconds, or at the second signal. Processes that an instance leaves behind end
    with it, also those that made themselves daemons.

    To be called on the main thread of a process that has no other children: it takes over ``SIGCHLD`` and reaps
    whatever ends. Standard input goes to a single instance, unless it is a terminal; several have none. Raises
    ``ResourceError`` when an instance cannot be started, after those that could have ended.
    """
    return _Supervisor(instances, output, memory, grace_s).run()


@dataclass
class _Child:
    """A running instance."""

    index: int
    process: subprocess.Popen[bytes]
    streams: dict[int, tuple[str, LineBuffer]] = field(default_factory=dict)
    code: int | None = None  # as a shell counts it
    kill_left_at: float | None = None  # when what it has left behind is killed


class _Supervisor:
    def __init__(
        self, instances: Sequence[Instance], output: Output, memory: MemoryBinding | None, grace_s: float
    ) -> None:
        self.instances, self.output, self.memory, self.grace_s = instances, output, memory, grace_s
        self.children: list[_Child] = []
        self.received: list[int] = []
        self.failure: int | None = None  # the exit code, once there is something to tell
        self.asked_at: float | None = None  # when a signal asked for the end
        self.asked: set[int] = set()  # the signals that did
        self.kill_at: float | None = None
        self.give_up_at: float | None = None

    def run(self) -> int:
        adopt_orphans()
        wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # A signal that was ignored stays so: nohup, and shells for what they run in the background.
        taken = [s for s in FORWARDED if signal.getsignal(s) is not signal.SIG_IGN]
        before = {s: signal.signal(s, lambda number, _: self.received.append(number)) for s in taken}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        before_wakeup = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        unblocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, taken)
        try:
            problem = self._start()
            while self._busy():
                self._turn(wake)
            if problem is not None:
                raise ResourceError(problem)
            return self.failure or 0
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            signal.set_wakeup_fd(before_wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(wake)
            os.close(waker)

    def _start(self) -> str | None:
        """Starts the instances one after the other; what is in the way ends those that run already."""
        stdin = 0 if len(self.instances) == 1 and not os.isatty(0) else subprocess.DEVNULL
        for index, instance in enumerate(self.instances):
            if self.received:
                break
            prefix = self.memory.prefix(instance.placement.node) if self.memory is not None else []
            try:
                process = subprocess.Popen(
                    [*prefix, *instance.command],
                    env={**os.environ, **instance.environment, _MARK: _mark(index)},
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    preexec_fn=preexec(instance.placement, self.memory, group=True),
                )
            except OSError as error:
                self._end(126)
                return f"instance {index} ({instance.command[0]}) cannot be started: {error.strerror}"
            child = _Child(index, process)
            for stream, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
                assert pipe is not None
                child.streams[pipe.fileno()] = (stream, LineBuffer())
            self.children.append(child)
        return None

    def _busy(self) -> bool:
        """Whether something is left to wait for: a process, or output on its way to a reader who may be slow."""
        given_up = self.give_up_at is not None and time.monotonic() >= self.give_up_at
        if not given_up and (any(child.code is None for child in self.children) or self._have_children()):
            return True
        pending = any(sink.pending for sink in self.output.sinks)
        if given_up:
            return pending and self.asked_at is None
        return pending or any(child.streams for child in self.children)

    def _turn(self, wake: int) -> None:
        """Waits for something to happen, and sees to it."""
        ready = self._wait(wake)
        for number in self._take_signals():
            self._forward(number)
        self._reap()
        sinks = {sink.descriptor: sink for sink in self.output.sinks}
        for descriptor in ready:
            if descriptor in sinks and (error := sinks[descriptor].write()) is not None:
                code = self.output.lost(sinks[descriptor], error)
                if self.failure is None:
                    self._end(code)
        for child in self.children:
            for descriptor in [d for d in child.streams if d in ready]:
                self._read(child, descriptor)
        self._keep_time()

    def _wait(self, wake: int) -> set[int]:
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        for sink in self.output.sinks:
            if sink.pending:
                poll.register(sink.descriptor, select.POLLOUT)
        if not any(sink.full for sink in self.output.sinks):
            for child in self.children:
                for descriptor in child.streams:
                    poll.register(descriptor, select.POLLIN)
        now = time.monotonic()
        moments = (self.kill_at, self.give_up_at, *(child.kill_left_at for child in self.children))
        ahead = [at - now for at in moments if at is not None and at > now]
        ready = {descriptor for descriptor, _ in poll.poll(min(ahead) * 1e3 + 1 if ahead else None)}
        if wake in ready:
            os.read(wake, _READ)
        return ready

    def _take_signals(self) -> list[int]:
        taken = self.received[:]
        del self.received[: len(taken)]
        return taken

    def _forward(self, number: int) -> None:
        if number in ENDING:
            now = time.monotonic()
            if self.asked_at is not None and now - self.asked_at > _SECOND_REQUEST_S:
                self.kill_at = now
                return
            if number in self.asked:
                return
            self.asked.add(number)
            self.asked_at = self.asked_at or now
            self._set_deadline()
            if self.failure is None:
                self.failure = 128 + number
        self._signal_groups(number)

    def _reap(self) -> None:
        """Collects what has ended: instances, and processes that they left to us."""
        leaders = {child.process.pid: child for child in self.children if child.code is None}
        while self._have_children() and (ended := os.waitid(os.P_ALL, 0, _ENDED)) is not None:
            child = leaders.get(ended.si_pid)
            if child is not None:
                # Not reaped yet, so that its group's number is not another one's.
                _signal_group(ended.si_pid, signal.SIGTERM)
            _, status = os.waitpid(ended.si_pid, 0)
            if child is not None:
                self._note_end(child, os.waitstatus_to_exitcode(status))

    def _note_end(self, child: _Child, code: int) -> None:
        child.process.returncode = code  # reaped here, not by the object
        child.code = code if code >= 0 else 128 - code
        self._tell_end(child)
        others = [other for other in self.children if other.code is None]
        if child.code != 0 and self.failure is None:
            how = f"ended with exit code {code}" if code >= 0 else f"was ended by {signal_name(-code)}"
            self.output.note(f"instance {child.index} {how}" + ("; ending the others" if others else ""))
            self._end(child.code)
        if not others:
            # What instances left behind has no reason to stay.
            for pid in descendants(os.getpid()):
                _signal(pid, signal.SIGTERM)
            self._set_deadline()
        elif left := _left_by(child.index):
            for pid in left:
                _signal(pid, signal.SIGTERM)
            child.kill_left_at = time.monotonic() + self.grace_s

    def _end(self, code: int) -> None:
        """Asks all to end; ``code`` tells why."""
        if self.failure is None:
            self.failure = code
        self._set_deadline()
        self._signal_groups(signal.SIGTERM)

    def _set_deadline(self) -> None:
        if self.kill_at is None:
            self.kill_at = time.monotonic() + self.grace_s

    def _keep_time(self) -> None:
        now = time.monotonic()
        for child in self.children:
            if child.kill_left_at is not None and now >= child.kill_left_at:
                child.kill_left_at = None
                for pid in _left_by(child.index):
                    _signal(pid, signal.SIGKILL)
        if self.kill_at is None or now < self.kill_at:
            return
        # Again whenever something has ended: what was being killed may have started more.
        late = descendants(os.getpid())
        for pid in late:
            _signal(pid, signal.SIGKILL)
        if self.give_up_at is None:
            self.give_up_at = now + _AFTER_KILL_S
            if late:
                count = f"{len(late)} process{'es' if len(late) > 1 else ''}"
                self.output.note(f"killed {count} that did not end within {self.grace_s:g} s")

    def _signal_groups(self, number: int) -> None:
        for child in self.children:
            if child.code is None:
                _signal_group(child.process.pid, number)

    def _read(self, child: _Child, descriptor: int) -> None:
        stream, buffer = child.streams[descriptor]
        data = os.read(descriptor, _READ)
        for line in buffer.feed(data) if data else buffer.finish():
            self.output.line(child.index, stream, line)
        if not data:
            del child.streams[descriptor]
            pipe = child.process.stdout if stream == "stdout" else child.process.stderr
            assert pipe is not None
            pipe.close()
            self._tell_end(child)

    def _tell_end(self, child: _Child) -> None:
        """After the last of its lines."""
        if child.code is not None and not child.streams:
            self.output.ended(child.index, child.code)

    @staticmethod
    def _have_children() -> bool:
        try:
            os.waitid(os.P_ALL, 0, _ENDED)
        except ChildProcessError:
            return False
        return True


def _mark(index: int) -> str:
    return f"{os.getpid()}.{index}"


def _left_by(index: int) -> list[int]:
    """The processes of an instance that has ended, by the environment that they began with.

    One that has cleared it, or runs as another user, cannot be told from another instance's: it ends with the last.
    """
    mark, found = f"{_MARK}={_mark(index)}".encode(), []
    for pid in descendants(os.getpid()):
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
        except OSError:  # ended meanwhile, or not ours to read
            continue
    return found


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # ended, or has become another user's
        return


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return
