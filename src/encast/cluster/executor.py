"""The executor of a job on a Ray cluster: one actor an engine, shards handed to whoever is free.

Ray starts the actors, starts them again where their process dies, and says when one is gone with its node. Which shard
is tried again, and where, is decided here: a shard that kills its worker must not be tried for ever.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from encast.cluster.connection import connect
from encast.cluster.replica import Replica, Said, count, error_of
from encast.data.inputs import InputFile
from encast.data.rows import Span
from encast.errors import EncastError, InputError, ResourceError
from encast.jobs.folder import Done
from encast.jobs.job import Shard, find_spans
from encast.jobs.run import Agree, Failed

__all__ = ["RayExecutor"]

TRIES = 4
"""Of a shard, on other nodes where there are some."""

COUNT_HERE_BYTES = 1 << 26
"""Inputs of less are counted by the driver, before the cluster would have started a process for it."""

_LOOK_S = 2.0
"""Nodes that join are found so soon."""
_WAIT_S = 300.0
"""How long a job waits for a node when it has none: an autoscaler may bring one."""
_ASK_S = 1.0
_GIVE_UP_S = 120.0
"""A node on which no engine starts for so long lacks something. Ray takes some 30 s to notice that one is dead."""
_BUSY_S = 15.0
"""After so long without a replica the user is told what is waited for."""


@dataclass
class _Member:
    """A replica: where it is, and the shards that it was given, oldest first."""

    actor: Any
    node: str
    where: str
    probe: Any
    """The call that says whether it is there, while one is under way."""
    first: bool
    """On a node that was there when the job began: what is wrong with it ends the job, so that the user can mend it."""
    ready: bool = False
    """It has answered, and is given shards."""
    ask_at: float = 0.0
    """When it is asked again, where it could not be reached."""
    shards: dict[Any, Shard] = field(default_factory=dict)


class RayExecutor:
    """See ``jobs.run.Executor``. ``threads`` of each of ``instances`` are CPUs of Ray that a replica takes; by default
    it takes all of its node. ``say`` is told what the user should know while the job runs.

    Raises what ``connect`` raises.
    """

    def __init__(
        self,
        address: str,
        folder: Path,
        artifact: Path,
        *,
        threads: int | None,
        instances: int,
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._artifact = str(folder), str(artifact)
        self._threads, self._instances, self._say = threads, instances, say
        self._ray = connect(address)
        self._members: list[_Member] = []
        self._failing_since: dict[str, float] = {}
        self._left_out: set[str] = set()

    def find_spans(self, files: Sequence[InputFile], columns: Sequence[str], rows: int) -> Iterator[tuple[Span, ...]]:
        self._need_cpus(self._nodes())
        if sum(file.bytes for file in files) < COUNT_HERE_BYTES:
            yield from (find_spans(file, columns, rows) for file in files)
            return
        task = self._ray.remote(num_cpus=1)(count)
        calls = [task.remote(file, list(columns), rows) for file in files]
        for file, call in zip(files, calls, strict=True):
            try:
                found = self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                raise _explained(error, f"{file.name} cannot be read on the cluster") from None
            if isinstance(found, Said):
                raise error_of(found, "that was to count its rows")
            yield found

    def run(self, shards: Sequence[Shard], agree: Agree) -> Iterator[Done | Failed]:
        waiting = deque(shards)
        failed_on: dict[int, list[str]] = defaultdict(list)
        looked = told = 0.0
        alone = begun = time.monotonic()
        while waiting or any(member.shards for member in self._members):
            now = time.monotonic()
            if now - looked > _LOOK_S:
                self._adopt(first=looked == 0.0)
                looked = now
            for member in self._members:
                if member.ready:
                    self._hand_out(member, waiting, failed_on)
                elif member.probe is None and now >= member.ask_at:
                    member.probe = member.actor.numbers.remote()
            calls = {call: member for member in self._members for call in (member.probe, *member.shards) if call}
            if not self._members:
                if now - alone > _WAIT_S:
                    raise ResourceError(
                        f"the cluster has no node that can run the job, for {_WAIT_S:.0f} s; start some"
                    )
                time.sleep(0.2)
                continue
            alone = now
            if not calls:
                time.sleep(0.2)
                continue
            if not any(member.ready for member in self._members) and now - max(begun, told) > _BUSY_S:
                told = now
                self._say(f"waiting for {len(self._members)} replicas to start; other jobs may have the cluster's CPUs")
            for call in self._ray.wait(list(calls), num_returns=1, timeout=1.0)[0]:
                member = calls[call]
                if call == member.probe:
                    self._probed(member, agree)
                else:
                    yield from self._ended(member, call, waiting, failed_on)

    def _ended(
        self, member: _Member, call: Any, waiting: deque[Shard], failed_on: dict[int, list[str]]
    ) -> Iterator[Done | Failed]:
        """A call that was given a shard has ended, well or not."""
        try:
            said = self._ray.get(call)
        except self._ray.exceptions.RayError:
            # Calls start in the order in which they were made, so that those at its head are who may have done it.
            lost, member.shards = list(member.shards.values()), {}
            running = lost[: self._instances] if self._alive(member.node) else []
            member.ready = False
            waiting.extendleft(shard for shard in reversed(lost) if shard not in running)
            for shard in running:
                error = EncastError(
                    f"the process that computed it died (on the node {member.where}): out of memory, or a defect of "
                    "encast, see Ray's logs"
                )
                yield from self._again(shard, member, error, waiting, failed_on)
            return
        shard = member.shards.pop(call)
        if isinstance(said, Done):
            yield said
        else:
            yield from self._again(shard, member, error_of(said, member.where), waiting, failed_on)

    def _again(
        self,
        shard: Shard,
        member: _Member,
        error: EncastError,
        waiting: deque[Shard],
        failed_on: dict[int, list[str]],
    ) -> Iterator[Failed]:
        failed_on[shard.number].append(member.node)
        if len(failed_on[shard.number]) >= TRIES:
            yield Failed(shard, error)
        else:
            waiting.append(shard)

    def _hand_out(self, member: _Member, waiting: deque[Shard], failed_on: dict[int, list[str]]) -> None:
        """Gives a replica shards to compute, and one more for when it has finished one; near the end, where it would
        wait there while others are idle, no more."""
        others = {other.node for other in self._members if other.ready} - {member.node}
        more = 1 if len(waiting) > self._instances * len(self._members) else 0
        while len(member.shards) < self._instances + more:
            for shard in waiting:
                if member.node not in failed_on[shard.number] or others <= set(failed_on[shard.number]):
                    break
            else:
                return
            waiting.remove(shard)
            member.shards[member.actor.run.remote(shard.number)] = shard

    def _probed(self, member: _Member, agree: Agree) -> None:
        """A replica has opened the artifact, or could not."""
        problem: EncastError | None = None
        call, member.probe = member.probe, None
        now = time.monotonic()
        try:
            said = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            if not self._alive(member.node):
                self._drop(member)
                return
            since = self._failing_since.setdefault(member.node, now)
            if now - since < _GIVE_UP_S and "No module named" not in str(error):
                if isinstance(error, self._ray.exceptions.ActorUnavailableError):
                    member.ask_at = now + _ASK_S  # it is started again, or its node is about to be found dead
                else:
                    self._drop(member)  # a new one is started when nodes are looked at
                return
            problem = _explained(error, f"no engine can be started on the node {member.where}")
        else:
            if isinstance(said, dict):
                try:
                    agree(said)
                except ResourceError as error:
                    problem = ResourceError(f"on the node {member.where} {error}")
            else:
                problem = error_of(said, member.where)
        if problem is None:
            member.ready = True
            self._failing_since.pop(member.node, None)
            return
        self._drop(member)
        self._left_out.add(member.node)
        if member.first or not self._members:
            raise problem
        self._say(f"the node {member.where} is left out: {problem}")

    def _drop(self, member: _Member) -> None:
        self._members.remove(member)
        self._ray.kill(member.actor)

    # Nodes

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _alive(self, node: str) -> bool:
        return any(one["NodeID"] == node for one in self._nodes())

    def _cpus(self, node: dict[str, Any]) -> int:
        return int(node["Resources"].get("CPU", 0))

    def _need_cpus(self, nodes: list[dict[str, Any]]) -> None:
        """Raises ``InputError`` when no node that is there is large enough for a replica."""
        needed = (self._threads or 1) * self._instances
        most = max(map(self._cpus, nodes), default=0)
        if most < needed:
            raise InputError(
                f"a replica takes {needed} CPUs, the largest node of the cluster has {most}; lower --threads or "
                "--instances, or start larger nodes"
            )

    def _adopt(self, *, first: bool) -> None:
        """Starts replicas on nodes that have fewer than fit there."""
        nodes = self._nodes()
        if first:
            self._need_cpus(nodes)
        here = Counter(member.node for member in self._members)
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        for node in nodes:
            if node["NodeID"] in self._left_out:
                continue
            threads = self._threads or self._cpus(node) // self._instances
            taken = threads * self._instances
            fit = self._cpus(node) // taken if taken else 0
            for _ in range(fit - here[node["NodeID"]]):
                kind = self._ray.remote(
                    num_cpus=taken,
                    max_restarts=-1,
                    max_concurrency=self._instances,
                    scheduling_strategy=strategy(node["NodeID"], soft=False),
                )(Replica)
                actor = kind.remote(self._folder, self._artifact, threads, self._instances)
                where = str(node["NodeManagerAddress"])
                self._members.append(_Member(actor, node["NodeID"], where, actor.numbers.remote(), first))

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for member in self._members:
            self._ray.kill(member.actor)
        self._ray.shutdown()


def _explained(error: Exception, what: str) -> ResourceError:
    """A failure of Ray in words."""
    text = str(error)
    if "No module named 'encast" in text:
        return ResourceError(f"{what}: encast is not installed there; install the same version on every node")
    return ResourceError(f"{what}: {' '.join(text.split())[:500]}; see Ray's logs")
