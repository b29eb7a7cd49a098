"""The executor of a job on a Ray cluster: one actor an engine, shards handed to whoever is free.

Ray starts the actors, starts them again where their process dies, and says when one is gone with its node. Which shard
is tried again, and where, is decided here: a shard that kills its worker must not be tried for ever, a node on which
shards fail that others finish is given no more, and a worker that stands still is ended.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from encast.cluster.cards import count_of, need_cards
from encast.cluster.connection import connect, head_answers
from encast.cluster.replica import Replica, Said, count, error_of
from encast.data.inputs import InputFile
from encast.data.remote import scrubbed
from encast.errors import EncastError, InputError, ResourceError
from encast.jobs.job import Cut, Shards, find_cut
from encast.jobs.layout import Done
from encast.jobs.run import Agree, Failed
from encast.jobs.waiting import Waiting

__all__ = ["RayExecutor"]

TRIES = 4
"""Of a shard, on other nodes where there are some."""

BLAMES = 3
"""So many shards that failed on a node and that others finished, while it finished none, are the node's fault."""

COUNT_HERE_BYTES = 1 << 26
"""Inputs of less are counted by the driver, before the cluster would have started a process for it."""

_LOOK_S = 2.0
"""Nodes that join are found so soon."""
_WAIT_S = 300.0
"""How long a job waits for a node when it has none: an autoscaler may bring one."""
_HEAD_S = 30.0
"""A head that answers nobody for so long is lost: Ray itself ends the process after a minute, with words of its own."""
_LEAVE_S = 5.0
_ASK_S = 1.0
_GIVE_UP_S = 120.0
"""A node on which no engine starts for so long lacks something. Ray takes some 30 s to notice that one is dead."""
_BUSY_S = 15.0
"""After so long without a replica the user is told what is waited for."""
_WATCH_S = 30.0
"""So often replicas are asked how far they are."""
_STILL_S = 600.0
"""A replica that has done nothing for so long hangs: a row takes milliseconds, and so does a piece of a file that is
passed over."""


@dataclass(eq=False)
class _Member:
    """A replica: where it is, and the shards that it was given, oldest first."""

    actor: Any
    node: str
    where: str
    probe: Any
    """The call that says whether it is there, while one is under way."""
    first: bool
    """On a node that was there when the job began, and not ready yet: what is wrong with it ends the job, so that the
    user can mend it."""
    ready: bool = False
    """It has answered, and is given shards."""
    ask_at: float = 0.0
    """When it is asked again, where it could not be reached."""
    shards: dict[Any, int] = field(default_factory=dict)
    watch: Any = None
    """The call that says how far it is, while one is under way."""
    watched: float = 0.0
    moved: float = 0.0
    """When it was last seen to have done something."""
    steps: dict[int, tuple[int, float]] = field(default_factory=dict)
    """What the shards that run have done, see ``Worker.progress``, and since when it is so much."""

    def still_since(self) -> float:
        """When the shard that stands still longest last moved, or the replica as a whole."""
        return min([self.moved, *(since for _, since in self.steps.values())])


class RayExecutor:
    """See ``jobs.run.Executor``. ``threads`` of each of ``instances`` are CPUs of Ray that a replica takes; by default
    it takes all of its node. With another ``device`` than "cpu" a replica takes a card, with its share of the node's
    CPUs, and computes ``instances`` shards side by side. ``say`` is told what the user should know while the job runs.

    Raises what ``connect`` raises.
    """

    def __init__(
        self,
        address: str,
        folder: Path,
        artifact: Path,
        inputs: Sequence[str],
        *,
        device: str = "cpu",
        threads: int | None,
        instances: int,
        say: Callable[[str], None],
    ) -> None:
        self._made = (str(folder), str(artifact), list(inputs))
        self._on_cards, self._threads, self._instances, self._say = device != "cpu", threads, instances, say
        self._ray = connect(address)
        self._head_seen = time.monotonic()
        self._head_lost = False
        self._members: list[_Member] = []
        self._failing_since: dict[str, float] = {}
        self._left_out: set[str] = set()
        self._waiting: Waiting[_Member] = Waiting(())
        self._failed_on: dict[int, list[tuple[str, int]]] = {}
        """Of shards that failed, the nodes, and how many shards each had finished then."""
        self._finished_on: Counter[str] = Counter()
        self._blamed: Counter[str] = Counter()
        self._last_error: dict[str, EncastError] = {}
        """Of every node on which a shard failed."""

    def find_cuts(self, files: Sequence[InputFile], columns: Sequence[str], rows: int) -> Iterator[Cut]:
        self._need_room(self._nodes())
        inputs = self._made[2]
        if sum(file.bytes for file in files) < COUNT_HERE_BYTES:
            yield from (find_cut(file, file.reached(inputs), columns, rows) for file in files)
            return
        task = self._ray.remote(num_cpus=1)(count)
        calls = [task.remote(file, file.reached(inputs), list(columns), rows) for file in files]
        for at, (file, call) in enumerate(zip(files, calls, strict=True)):
            self._wait_for(call, first=at == 0)
            try:
                found = self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                raise self._explained(error, f"{file.name} cannot be read on the cluster") from None
            if isinstance(found, Said):
                raise error_of(found, "that was to count its rows")
            yield found

    def _wait_for(self, call: Any, *, first: bool) -> None:
        """Returns when a count has ended. Ray itself would wait for ever where no node is left to start it on."""
        alone = told = time.monotonic()
        while not self._ray.wait([call], num_returns=1, timeout=1.0)[0]:
            now = time.monotonic()
            if not self._head_answers(now):
                continue
            if any(map(self._cpus, self._nodes())):
                alone = now
            elif now - alone > _WAIT_S:
                raise _no_node()
            if first and now - told > _BUSY_S:
                told = now
                self._say("waiting for the first file to be counted; other jobs may have the cluster's CPUs")

    def run(self, shards: Shards, left: Sequence[int], agree: Agree) -> Iterator[Done | Failed]:
        self._waiting = Waiting(left)
        looked = told = 0.0
        alone = begun = time.monotonic()
        while self._waiting or any(member.shards for member in self._members):
            now = time.monotonic()
            if now - looked > _LOOK_S and self._head_answers(now):
                self._adopt(first=looked == 0.0)
                looked = now
            ready = {member.node for member in self._members if member.ready}
            for member in self._members:
                if member.ready:
                    self._hand_out(member, ready, now)
                    self._watch(member, now)
                elif member.probe is None and now >= member.ask_at:
                    member.probe = member.actor.numbers.remote()
            if not self._members:
                if now - alone > _WAIT_S:
                    raise _no_node()
                time.sleep(0.2)
                continue
            alone = now
            calls = {
                call: member
                for member in self._members
                for call in (member.probe, member.watch, *member.shards)
                if call is not None
            }
            if not calls:
                time.sleep(0.2)
                continue
            if not ready and now - max(begun, told) > _BUSY_S:
                told = now
                what = "CPUs or cards" if self._on_cards else "CPUs"
                self._say(
                    f"waiting for {len(self._members)} replicas to start; other jobs may have the cluster's {what}"
                )
            for call in self._ray.wait(list(calls), num_returns=1, timeout=1.0)[0]:
                member = calls[call]
                if call == member.probe:
                    self._probed(member, agree)
                elif call == member.watch:
                    self._watched(member)
                else:
                    yield from self._ended(member, call, shards)

    def _ended(self, member: _Member, call: Any, shards: Shards) -> Iterator[Done | Failed]:
        """A call that was given a shard has ended, well or not."""
        try:
            said = self._ray.get(call)
        except self._ray.exceptions.RayError:
            # Calls start in the order in which they were made, so that those at its head are who may have done it.
            lost = self._take_from(member)
            running = lost[: self._instances] if self._alive(member.node) else []
            member.ready = False
            self._waiting.put_back(lost[len(running) :])
            for number in running:
                error = ResourceError(
                    f"the process that computed it died (on the node {member.where}): out of memory, a defect of "
                    "encast, or it hung and was ended; see Ray's logs"
                )
                yield from self._again(number, member, error, shards, died=True)
            return
        member.moved = time.monotonic()
        number = member.shards.pop(call)
        member.steps.pop(number, None)
        if isinstance(said, Done):
            yield said
            self._blame(member, number)
        else:
            yield from self._again(number, member, error_of(said, member.where), shards, died=False)

    def _take_from(self, member: _Member) -> list[int]:
        """What a replica was given and has not ended."""
        lost, member.shards, member.steps = list(member.shards.values()), {}, {}
        self._waiting.leave(member)
        return lost

    def _again(
        self, number: int, member: _Member, error: EncastError, shards: Shards, *, died: bool
    ) -> Iterator[Failed]:
        self._last_error[member.node] = error
        failed_on = self._failed_on.setdefault(number, [])
        failed_on.append((member.node, self._finished_on[member.node]))
        if len(failed_on) >= TRIES:
            yield Failed(shards[number], error, died)
        else:
            self._waiting.again(number, {node for node, _ in failed_on})

    def _blame(self, member: _Member, number: int) -> None:
        """A replica has finished a shard: where it failed and nothing was finished since, something may be wrong."""
        self._finished_on[member.node] += 1
        self._blamed.pop(member.node, None)
        for node, finished in set(self._failed_on.pop(number, ())):
            if finished == self._finished_on[node] and node not in self._left_out:
                self._blamed[node] += 1
                if self._blamed[node] >= BLAMES:
                    self._leave_out(node)

    def _leave_out(self, node: str) -> None:
        self._left_out.add(node)
        where = node
        for member in [one for one in self._members if one.node == node]:
            where = member.where
            self._waiting.put_back(self._take_from(member))
            self._drop(member)
        # What failed there says nothing of the shards.
        for failed_on in self._failed_on.values():
            failed_on[:] = [one for one in failed_on if one[0] != node]
        self._say(
            f"the node {where} is left out: {self._blamed.pop(node)} shards failed there that other nodes have "
            f"finished, the last with: {self._last_error[node]}; see its memory, its disks and Ray's logs"
        )

    def _hand_out(self, member: _Member, ready: set[str], now: float) -> None:
        """Gives a replica shards to compute, and one more for when it has finished one; near the end, where it would
        wait there while others are idle, no more."""
        more = 1 if len(self._waiting) > self._instances * len(self._members) else 0
        while len(member.shards) < self._instances + more:
            number = self._waiting.take(member, member.node, ready - {member.node})
            if number is None:
                return
            if not member.shards:
                member.moved = now
            member.shards[member.actor.run.remote(number)] = number

    def _watch(self, member: _Member, now: float) -> None:
        """Asks a replica how far it is, and ends one that hangs: Ray starts it again."""
        if not member.shards:
            return
        if now - member.still_since() > _STILL_S:
            self._say(
                f"a replica on the node {member.where} has done nothing for {_STILL_S:.0f} s; it is started again"
            )
            member.moved, member.steps = now, {}
            self._ray.kill(member.actor, no_restart=False)
        elif member.watch is None and now - max(member.watched, member.moved) > _WATCH_S:
            member.watched = now
            member.watch = member.actor.progress.options(concurrency_group="watch").remote()

    def _watched(self, member: _Member) -> None:
        call, member.watch = member.watch, None
        try:
            told: dict[int, int] = self._ray.get(call)
        except self._ray.exceptions.RayError:
            return  # the calls that compute say what became of it
        now = time.monotonic()
        before, member.steps = member.steps, {}
        for number, steps in told.items():
            same = number in before and before[number][0] == steps
            member.steps[number] = before[number] if same else (steps, now)
            if not same:
                member.moved = now

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
            problem = self._explained(error, f"no engine can be started on the node {member.where}")
        else:
            if isinstance(said, dict):
                try:
                    agree(said)
                except ResourceError as error:
                    problem = ResourceError(f"on the node {member.where} {error}")
            else:
                problem = error_of(said, member.where)
        if problem is None:
            member.ready, member.first = True, False
            self._failing_since.pop(member.node, None)
            return
        self._drop(member)
        self._left_out.add(member.node)
        if member.first or not self._members:
            raise problem
        self._say(f"the node {member.where} is left out: {problem}")

    def _drop(self, member: _Member) -> None:
        self._members.remove(member)
        self._waiting.leave(member)
        self._ray.kill(member.actor)

    # Nodes

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _head_answers(self, now: float) -> bool:
        """Raises ``ResourceError`` where the head is lost."""
        if head_answers(self._ray):
            self._head_seen = now
            return True
        if now - self._head_seen > _HEAD_S:
            self._head_lost = True
            raise ResourceError(
                f"the head of the Ray cluster has not answered for {_HEAD_S:.0f} s; start the cluster again, then the "
                "same command goes on"
            )
        return False

    def _alive(self, node: str) -> bool:
        return any(one["NodeID"] == node for one in self._nodes())

    def _cpus(self, node: dict[str, Any]) -> int:
        return int(node["Resources"].get("CPU", 0))

    def _need_room(self, nodes: list[dict[str, Any]]) -> None:
        """Raises ``InputError`` when no node that is there is large enough for a replica, ``ResourceError`` when none
        has a card and one is needed."""
        if self._on_cards:
            need_cards(nodes)
            return
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
            self._need_room(nodes)
        here = Counter(member.node for member in self._members)
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        for node in nodes:
            if node["NodeID"] in self._left_out:
                continue
            threads, taken, fit = self._share(node)
            for _ in range(fit - here[node["NodeID"]]):
                kind = self._ray.remote(
                    **taken,
                    max_restarts=-1,
                    max_concurrency=self._instances,
                    concurrency_groups={"watch": 1},
                    scheduling_strategy=strategy(node["NodeID"], soft=False),
                )(Replica)
                actor = kind.remote(*self._made, threads, self._instances)
                where = str(node["NodeManagerAddress"])
                self._members.append(_Member(actor, node["NodeID"], where, actor.numbers.remote(), first))

    def _share(self, node: dict[str, Any]) -> tuple[int | None, dict[str, int], int]:
        """Of a replica on a node: the threads of an instance, None on a card, and what Ray holds for it; and how many
        fit there."""
        cpus = self._cpus(node)
        if self._on_cards:
            cards = count_of(node)
            return None, {"num_cpus": cpus // max(1, cards), "num_gpus": 1}, cards
        threads = self._threads or cpus // self._instances
        taken = threads * self._instances
        return threads, {"num_cpus": taken}, cpus // taken if taken else 0

    def _explained(self, error: Exception, what: str) -> ResourceError:
        """A failure of Ray in words."""
        text = scrubbed(" ".join(str(error).split()), self._made[2])
        if "No module named 'encast" in text:
            return ResourceError(f"{what}: encast is not installed there; install the same version on every node")
        return ResourceError(f"{what}: {text[:500]}; see Ray's logs")

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._head_lost:
            self._leave()
            return
        # Without a head, leaving may wait for it; the replicas end with this process.
        leaving = threading.Thread(target=self._leave, daemon=True)
        leaving.start()
        leaving.join(_LEAVE_S)

    def _leave(self) -> None:
        for member in self._members:
            self._ray.kill(member.actor)
        self._ray.shutdown()


def _no_node() -> ResourceError:
    return ResourceError(f"the cluster has no node that can run the job, for {_WAIT_S:.0f} s; start some")
