"""Carries out a plan: one event loop, one process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import itertools
import math
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import quote, urlsplit

import orjson

from encast.errors import InputError, ResourceError, need_modules
from encast.loadtest import kserve_grpc, protocols
from encast.loadtest.answers import BadAnswerError, Target
from encast.loadtest.kserve_grpc import Grpc
from encast.loadtest.plan import ClosedLoop, OpenLoop, Plan, Ramp
from encast.loadtest.protocols import GRPC, Protocol, protocol_of
from encast.loadtest.records import ANSWERED, REJECTED, WRONG, Records
from encast.loadtest.reference import Reference, read_reference
from encast.loadtest.requests import Request, prepare
from encast.loadtest.result import Result, Step, judge, second_line
from encast.loadtest.timer import Timer
from encast.loadtest.transport import FailedError, Http, Reply

__all__ = ["run"]

_SPARE_FILES = 64
_BROKEN_STEPS = 2
"""In a row end a ramp: a stop of the machine can break one."""


def run(plan: Plan, say: Callable[[str], None] | None = None) -> Result:
    """Sends what the plan says and returns what came of it; ``say`` gets a line a second.

    SIGINT and SIGTERM end it early with the figures so far (``Result.interrupted``) when it runs in the main thread.
    Raises ``InputError`` for what cannot be sent, or a server that refuses it, and ``ResourceError`` for a server that
    is not there.
    """
    need_modules("serve", "httptools", "orjson", *(("grpc", "google.protobuf") if plan.protocol == GRPC else ()))
    protocol = protocol_of(plan.protocol)
    _check(plan)
    reference = None
    if plan.reference:
        reference = read_reference(plan.reference, protocol, plan.sources, plan.tolerance)
    _allow_files((plan.load.clients if isinstance(plan.load, ClosedLoop) else plan.connections) + _SPARE_FILES)
    loop = _new_loop()
    try:
        return loop.run_until_complete(_Test(plan, protocol, reference, say or (lambda line: None)).run())
    finally:
        loop.close()


def _check(plan: Plan) -> None:
    try:
        parts = urlsplit(plan.url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        good = good and not parts.query and not parts.fragment
    except ValueError:
        good = False
    if not good:
        raise InputError(f"{plan.url}: no address of a server; give one such as http://127.0.0.1:8080")
    if not plan.sources or plan.batch < 1 or plan.connections < 1 or not 0 < plan.timeout < math.inf:
        raise InputError("a load test needs texts, and batch, connections and timeout above 0 and finite")
    if not plan.tolerance >= 0:
        raise InputError(f"the tolerance {plan.tolerance} is no number from 0")
    if plan.fields and plan.protocol == GRPC:
        raise InputError(f"--protocol {GRPC} has no JSON that fields could be added to; leave them out")
    names = [source.name for source in plan.sources]
    if len(set(names)) < len(names):
        raise InputError(f"{', '.join(names)}: latencies are reported by name; give each source once")


def _new_loop() -> asyncio.AbstractEventLoop:
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def _allow_files(needed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise InputError(f"{needed} open files are needed and {hard} are allowed (ulimit -n); give fewer connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class _Test:
    """One test: its records, and what was noticed besides."""

    def __init__(self, plan: Plan, protocol: Protocol, reference: Reference | None, say: Callable[[str], None]) -> None:
        self.plan, self.protocol, self.reference, self.say = plan, protocol, reference, say
        self.records = Records()
        self.retry_after: list[int] = []
        self.examples: dict[str, str] = {}
        self.first_wrong = ""
        self.steps: list[Step] = []
        self.in_flight = 0
        self.interrupted = ""
        self.numbers: Iterator[int] = itertools.count()
        self.requests: Sequence[Request] = ()

    async def run(self) -> Result:
        plan = self.plan
        target = await _target(plan, self.protocol)
        async with _server(plan, self.protocol.path.format(model=quote(target.model, safe=""))) as server:
            self.server = server
            count = int(min(plan.load.most_requests, 1 << 32))
            self.requests = prepare(self.protocol, target, plan.sources, plan.batch, count)
            await self._warm_up()
            load = asyncio.ensure_future(self._load())
            with _uncollected(), self._interruptible(load):
                self.begun = time.perf_counter_ns()
                cpu = time.process_time()
                ticking = asyncio.ensure_future(self._tick())
                with contextlib.suppress(asyncio.CancelledError):
                    await load
                seconds = (time.perf_counter_ns() - self.begun) / 1e9
                cpu = time.process_time() - cpu
                ticking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await ticking
        return Result(
            plan=plan,
            model=target.model,
            columns=self.records.since(0),
            kinds=tuple(self.records.kinds),
            seconds=seconds,
            cpu_seconds=cpu,
            unfinished=self.in_flight,
            distinct=len(self.requests),
            retry_after=tuple(self.retry_after),
            examples=self.examples,
            first_wrong=self.first_wrong,
            steps=tuple(self.steps),
            interrupted=self.interrupted,
        )

    async def _warm_up(self) -> None:
        """The first one also says whether this server answers such requests at all."""
        request = self.requests[-1]
        where = f"{self.plan.url.rstrip('/')}{self.protocol.path}"
        with _said_of(self.plan, where):
            reply = await self.server.send(request.body)
            if reply.fault:
                raise _refused(where, reply, self.plan)
            if not reply.refusal:
                self.protocol.decode(reply.body, request.texts)
        left = iter(range(1, self.plan.warmup))

        async def some() -> None:
            for number in left:
                with contextlib.suppress(FailedError):
                    await self.server.send(self.requests[-1 - number % len(self.requests)].body)

        load = self.plan.load
        await asyncio.gather(*(some() for _ in range(load.clients if isinstance(load, ClosedLoop) else 16)))

    async def _load(self) -> None:
        load = self.plan.load
        if isinstance(load, ClosedLoop):
            await asyncio.gather(*(self._client(load) for _ in range(load.clients)))
        elif isinstance(load, OpenLoop):
            await self._stream(load.due, 0)
        else:
            await self._ramp(load)

    async def _client(self, load: ClosedLoop) -> None:
        end = math.inf if load.seconds is None else self.begun + load.seconds * 1e9
        for _ in itertools.count() if load.requests is None else range(load.requests):
            if time.perf_counter_ns() >= end:
                return
            await self._ask(None, contextlib.nullcontext())

    async def _stream(self, due: Sequence[int], offset: int) -> None:
        """Requests at their times, counted from ``offset`` after the begin; returns when all have ended."""
        slots = asyncio.Semaphore(self.plan.connections)
        timer = Timer()
        asked: set[asyncio.Task[None]] = set()
        try:
            for moment in due:
                await timer.until(self.begun + offset + moment)
                task = asyncio.ensure_future(self._ask(offset + moment, slots))
                asked.add(task)
                task.add_done_callback(asked.discard)
            await asyncio.gather(*asked)
        finally:
            timer.close()
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _ramp(self, load: Ramp) -> None:
        broken = 0
        for number, rate in enumerate(load.rates):
            offset, first = self._now(), len(self.records)
            await self._stream(load.due(number), offset)
            step = judge(self.records.since(first), rate, load.step_seconds, offset, load.limit_ms)
            self.steps.append(step)
            self.say(step.line())
            broken = 0 if step.served else broken + 1
            if broken == _BROKEN_STEPS:
                return

    def _now(self) -> int:
        return time.perf_counter_ns() - self.begun

    async def _ask(self, due: int | None, slots: contextlib.AbstractAsyncContextManager[None]) -> None:
        """``due``: None where it is when it is sent."""
        request = self.requests[next(self.numbers) % len(self.requests)]
        self.in_flight += 1
        tokens: int | None = None
        async with slots:
            begun = self._now()
            try:
                reply = await self.server.send(request.body)
            except FailedError as failed:
                ended = self._now()
                outcome = self.records.error(str(failed))
            else:
                ended = self._now()  # before the answer is read: that is the client's work
                outcome, tokens = self._outcome(request, reply)
        self.in_flight -= 1
        self.records.add((begun if due is None else due, begun, ended), request.source, request.texts, tokens, outcome)

    def _outcome(self, request: Request, reply: Reply) -> tuple[int, int | None]:
        if reply.rejected:
            if (seconds := _whole(reply.retry_after)) is not None:  # else a date, or none
                self.retry_after.append(seconds)
            return REJECTED, None
        if reply.refusal:
            self.examples.setdefault(reply.refusal, _shown(reply.body))
            return self.records.error(reply.refusal), None
        try:
            answers = self.protocol.decode(reply.body, request.texts)
            if self.reference is not None and (wrong := self.reference.wrong(request, answers)):
                self.first_wrong = self.first_wrong or wrong
                return WRONG, None
        except BadAnswerError as error:
            self.examples.setdefault("bad answer", str(error))
            return self.records.error("bad answer"), None
        return ANSWERED, _whole(reply.tokens if answers.tokens is None else answers.tokens)

    async def _tick(self) -> None:
        timer = Timer()
        try:
            seen = 0
            for second in itertools.count(1):
                await timer.until(self.begun + second * 1_000_000_000)
                new = self.records.since(seen)
                seen += len(new)
                self.say(second_line(second, new, self.in_flight))
        finally:
            timer.close()

    @contextlib.contextmanager
    def _interruptible(self, load: asyncio.Future[None]) -> Iterator[None]:
        """The first signal ends the load, a second one does what it did before."""
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def stop(number: signal.Signals) -> None:
            self.interrupted = number.name
            load.cancel()
            release()

        def release() -> None:
            for number, handler in before.items():
                if loop.remove_signal_handler(number):
                    signal.signal(number, handler)  # the loop sets the default

        try:
            for number, handler in before.items():
                if handler not in (signal.SIG_IGN, None):
                    loop.add_signal_handler(number, stop, number)
        except (ValueError, RuntimeError):  # not in the main thread, where signals arrive
            yield
            return
        try:
            yield
        finally:
            release()


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Keeps what was prepared out of garbage collections: a pass over it would look like a slow server."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _server(plan: Plan, path: str) -> Http | Grpc:
    if plan.protocol == GRPC:
        return Grpc(plan.url, plan.headers, plan.timeout)
    return Http(plan.url, path, plan.headers, plan.timeout)


async def _target(plan: Plan, protocol: Protocol) -> Target:
    """The model, by the server's own list of them where none is given, and its input by its metadata."""
    model, url = plan.model or "", plan.url.rstrip("/")
    async with _server(plan, "") as server:
        if not model and protocol.needs_model:
            if isinstance(server, Grpc):
                raise InputError(f"--protocol {protocol.name} needs the name of the model; give --model")
            with _said_of(plan, f"{url}/v1/models"):
                reply = await server.get("/v1/models")
            if reply.refusal not in ("", "HTTP 404"):
                raise _refused(f"{url}/v1/models", reply, plan)
            try:
                model = str(orjson.loads(reply.body)["data"][0]["id"])
            except (ValueError, KeyError, IndexError, TypeError):
                advice = "the address without /v1" if url.endswith("/v1") else "--model"
                raise InputError(f"{url}/v1/models names no model; give {advice}") from None
        if not protocol.named_inputs:
            return Target(model, fields=plan.fields)
        where = f"{url}, metadata of {model}"
        with _said_of(plan, where):
            if isinstance(server, Grpc):
                reply = await server.metadata(model)
            else:
                reply = await server.get(f"/v2/models/{quote(model, safe='')}")
            if reply.refusal:
                raise _refused(where, reply, plan)
            name = (kserve_grpc if isinstance(server, Grpc) else protocols).text_input(reply.body)
    if name is None:
        raise InputError(f"{where}: no input of type BYTES; a model that takes texts is needed")
    return Target(model, name, plan.fields)


def _refused(where: str, reply: Reply, plan: Plan) -> InputError:
    return InputError(
        f"{where}: {reply.refusal}: {_shown(reply.body)}; check the address, --protocol {plan.protocol}, --model and "
        "--api-key"
    )


@contextlib.contextmanager
def _said_of(plan: Plan, where: str) -> Iterator[None]:
    """What fails before the test begins, as errors that say where."""
    try:
        yield
    except FailedError as failed:
        raise ResourceError(f"{where}: {failed}; is a server running there?") from None
    except BadAnswerError as error:
        raise InputError(f"{where}: no answer of --protocol {plan.protocol}: {error}") from None


def _whole(said: object) -> int | None:
    """What a server says, if it is a whole number from 0."""
    shown = str(said)
    return int(shown) if shown.isascii() and shown.isdigit() and len(shown) < 16 else None


def _shown(body: bytes) -> str:
    return " ".join(body[:300].decode("utf-8", "replace").split())
