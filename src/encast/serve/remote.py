"""A front's client of an engine: a ``Runner`` over the engine's Unix socket that outlives the engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from typing import cast

import msgspec
import numpy as np

from encast.errors import InputError
from encast.serve.errors import RefusalError
from encast.serve.models import Timing
from encast.serve.wire import Cancel, Failed, Frames, FromEngine, Rows, Submit, frame, peer_uid
from encast.tasks.session import F32, Run

__all__ = ["RemoteEngine"]

_FIRST_RETRY_S = 0.01
_LONGEST_RETRY_S = 0.5

_GRACE_S = 0.1
"""After a deadline, for the engine to say so itself."""

_GATE_S = 0.2
"""Without new runs like it, at most, after the engine refused one; then the next one asks again."""

_LIKE = 0.5
"""Of the bytes of a request that was refused: smaller ones may have room where it had none."""

_MOST_UNSENT = 16 << 20
"""Bytes that the engine has not read, beyond which new requests are refused: more than a burst of requests makes."""

_TOGETHER_BYTES = 4096
"""Of a run; a larger one leaves at once, so that ``_paused`` is right when the next one asks."""


class _Pending:
    """A run without an answer, of a request with a body of ``size`` bytes, and how many engines it was sent to."""

    __slots__ = ("data", "future", "sent", "size")

    def __init__(self, data: bytearray, size: int, future: asyncio.Future[Rows | Failed]) -> None:
        self.data, self.size, self.future, self.sent = data, size, future, 0


class RemoteEngine:
    """Answers by the engine behind the listening Unix socket at ``address``, an abstract name without its leading NUL.

    When the connection breaks it connects again, and sends the runs that had no answer once more: a run under which two
    engines ended gets ``RefusalError`` "failed". All methods belong to one event loop.
    """

    def __init__(self, address: str) -> None:
        self._gate = (0.0, 0)
        """Until when new requests are refused at once, because the engine was full; and from how many bytes on."""
        self._address = "\0" + address
        self._pending: dict[int, _Pending] = {}
        self._unsent: list[_Pending] = []
        """Runs that leave together, in the event loop's next turn: a write costs 10 us and wakes the engine."""
        self._number = 0
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._paused = False
        self._closed = False
        self._heard = (0.0, 0.0)

    @property
    def backlog_s(self) -> float:
        """How long a run would now wait: as last heard, less the time since then."""
        backlog, at = self._heard
        return max(0.0, backlog - (time.monotonic() - at))

    @property
    def unanswered(self) -> int:
        """Runs under way."""
        return len(self._pending)

    def full(self, size: int) -> bool:
        """See ``Runner.full``."""
        until, least = self._gate
        return size >= least and time.monotonic() < until

    async def run(self, run: Run, *, arrived: float, deadline: float, before: int, size: int, timing: Timing) -> F32:
        """See ``Runner.run``."""
        now = time.monotonic()
        if self._closed:
            raise RefusalError("unavailable", "the model is being replaced", retry_after=1)
        if now >= deadline:
            raise RefusalError("expired", "the deadline passed before the run was submitted")
        if not before and self.full(size):
            raise RefusalError("overloaded", "the engine is full; try again later", retry_after=self.backlog_s)
        if not before and self._paused:
            raise RefusalError("overloaded", "the engine does not keep up; try again later", retry_after=1)
        batch = run.piece.batch
        self._number += 1
        number = self._number
        types = batch.token_type_ids
        data = frame(
            Submit(
                number, run.output, batch.token_ids.data, batch.cu_seqlens.data,
                None if types is None else types.data, None if run.select is None else run.select.data,
                arrived, deadline, before,
            )
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        pending = self._pending[number] = _Pending(data, size, loop.create_future())
        timer = loop.call_later(deadline - now + _GRACE_S, self._expire, number)
        try:
            self._send(pending)
            answer = await pending.future
        except asyncio.CancelledError:
            self._withdraw(number)
            raise
        finally:
            timer.cancel()
            self._pending.pop(number, None)
        if isinstance(answer, Failed):
            if answer.kind == "unprocessable":
                raise InputError(answer.message)
            raise RefusalError(answer.kind, answer.message, retry_after=answer.retry_after)
        timing.queue_s += answer.queued_s
        timing.inference_s += answer.run_s
        timing.batch_tokens = max(timing.batch_tokens, answer.batch_tokens)
        rows: F32 = np.frombuffer(answer.rows, np.float32).reshape(-1, answer.columns)
        return rows

    async def close(self) -> None:
        """Refuses what has no answer yet as "unavailable", and disconnects."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._connecting
        if self._connection is not None:
            self._connection.transport.close()
        for number in list(self._pending):
            self._answer(Failed(number, "unavailable", "the model is being replaced", 1.0, 0.0))
        self._pending.clear()

    # Sending

    def _send(self, pending: _Pending) -> None:
        if self._connection is None:
            self._connect()
            return
        self._unsent.append(pending)
        if len(pending.data) > _TOGETHER_BYTES:
            self._flush()
        elif len(self._unsent) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        wanted = [pending for pending in self._unsent if not pending.future.done()]
        self._unsent.clear()
        if self._connection is not None and wanted:
            for pending in wanted:
                pending.sent += 1
            self._connection.transport.writelines([pending.data for pending in wanted])

    def _withdraw(self, number: int) -> None:
        pending = self._pending.get(number)
        if pending is not None and pending.sent and self._connection is not None:
            self._connection.transport.write(frame(Cancel(number)))

    def _expire(self, number: int) -> None:
        self._withdraw(number)
        self._answer(Failed(number, "expired", "the deadline passed before the engine answered", None, 0.0))

    # The connection

    def _connect(self) -> None:
        if self._connecting is None and not self._closed:
            self._connecting = asyncio.get_running_loop().create_task(self._reach())
            self._connecting.add_done_callback(self._reached)

    async def _reach(self) -> None:
        """Connects, however often it takes. An engine that is being replaced accepts later; until then the system keeps
        what is sent.
        """
        pause = _FIRST_RETRY_S
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                # A Unix socket connects at once or not at all.
                sock.connect(self._address)
                if peer_uid(sock) != os.geteuid():
                    raise PermissionError("another user has taken the address of an engine that ended")
                await asyncio.get_running_loop().create_unix_connection(lambda: _Connection(self), sock=sock)
                return
            except OSError:
                sock.close()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_RETRY_S)

    def _reached(self, task: asyncio.Task[None]) -> None:
        self._connecting = None
        if self._pending and self._connection is None:  # lost before this was called
            self._connect()

    def _connected(self, connection: _Connection) -> None:
        self._connection = connection
        self._paused = False
        self._unsent = list(self._pending.values())
        self._flush()

    def _lost(self, connection: _Connection) -> None:
        if self._connection is not connection:
            return
        self._connection = None
        for number, pending in list(self._pending.items()):
            if pending.sent >= 2:
                self._answer(Failed(number, "failed", "the engine ended twice while it ran this", None, 0.0))
        if self._pending:
            self._connect()

    def _answer(self, answer: FromEngine) -> None:
        pending = self._pending.get(answer.id)
        if pending is not None and not pending.future.done():
            pending.future.set_result(answer)

    def _hear(self, answer: FromEngine) -> None:
        now = time.monotonic()
        self._heard = (answer.backlog_s, now)
        pending = self._pending.get(answer.id)
        if isinstance(answer, Failed) and answer.full and pending is not None:
            until, least = self._gate
            size = int(pending.size * _LIKE)
            self._gate = now + min(_GATE_S, answer.retry_after or _GATE_S), min(size, least) if now < until else size
        self._answer(answer)


class _Connection(asyncio.Protocol):
    """One connection to one engine process."""

    transport: asyncio.Transport

    def __init__(self, remote: RemoteEngine) -> None:
        self._remote, self._frames = remote, Frames()
        self._decoder = msgspec.msgpack.Decoder(Rows | Failed)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=_MOST_UNSENT)
        self._remote._connected(self)

    def data_received(self, data: bytes) -> None:
        try:
            for one in self._frames.feed(data):
                self._remote._hear(self._decoder.decode(one))
        except (msgspec.MsgspecError, ValueError):
            self.transport.abort()

    def pause_writing(self) -> None:
        self._remote._paused = True

    def resume_writing(self) -> None:
        self._remote._paused = False

    def connection_lost(self, error: Exception | None) -> None:
        self._remote._lost(self)
