"""Groups of instances: how many executors of how many threads serve texts of which lengths, and on which cores."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from encast.errors import InputError
from encast.machine import Machine, quota_alone_limits, usable_cores

__all__ = ["MOST_THREADS", "InstanceGroup", "Setup", "check_groups", "place_groups", "read_setup", "setup_to_json"]

MOST_THREADS = 4096
"""Of an instance, and the most instances of a group."""

_MOST_GROUPS = 64
_MOST_TOKENS = (1 << 31) - 1

Cpus = tuple[int, ...]


@dataclass(frozen=True)
class InstanceGroup:
    """``instances`` executors of ``threads`` threads each, for texts of at most ``longest`` tokens (None: of any)."""

    instances: int
    threads: int
    longest: int | None = None

    @property
    def cores(self) -> int:
        """Cores that the group keeps busy when all of its instances run."""
        return self.instances * self.threads


@dataclass(frozen=True)
class Setup:
    """How an engine lies on a machine. A run goes to the first group that covers the longest of its texts.

    ``groups`` stand in the order of rising ``longest``. ``batch_tokens`` bounds the tokens of one run. With
    ``shared_cores`` every group has all of the machine's cores to lay its instances on; without, a core belongs to one
    instance of one group.
    """

    groups: tuple[InstanceGroup, ...]
    batch_tokens: int
    shared_cores: bool = False

    @property
    def cores(self) -> int:
        """Cores that the set-up needs."""
        busy = [group.cores for group in self.groups]
        return max(busy) if self.shared_cores else sum(busy)

    @property
    def text(self) -> str:
        """In a few words: ``2x1 up to 64, 1x2 on shared cores, 1024 tokens``."""
        groups = ", ".join(
            f"{group.instances}x{group.threads}" + ("" if group.longest is None else f" up to {group.longest}")
            for group in self.groups
        )
        return f"{groups}{' on shared cores' if self.shared_cores else ''}, {self.batch_tokens} tokens"


def check_groups(groups: Sequence[InstanceGroup], *, longest_text: int, where: str) -> None:
    """Raises ``InputError`` unless the groups stand in order and cover every length from 1 to ``longest_text``."""
    if not 1 <= len(groups) <= _MOST_GROUPS:
        raise InputError(f"{where}: {len(groups)} groups; give 1 to {_MOST_GROUPS}")
    bounds = [group.longest for group in groups]
    for before, after in itertools.pairwise(bounds):
        if before is None or (after is not None and after <= before):
            raise InputError(
                f"{where}: the groups' longest are {_shown(bounds)}; each must be greater than the one before, and "
                "null stand last: a run of texts goes to the first group that covers its longest"
            )
    last = bounds[-1]
    if last is not None and last < longest_text:
        raise InputError(
            f"{where}: the groups' longest are {_shown(bounds)}, and this model takes texts of up to {longest_text} "
            "tokens, which no group covers; make the last group's longest null"
        )


def place_groups(
    groups: Sequence[InstanceGroup], machine: Machine, *, shared_cores: bool
) -> tuple[tuple[Cpus, ...], ...]:
    """The CPUs of every instance of every group; empty ones where there are fewer usable cores than threads.

    All are empty where a quota pays for fewer cores than there are to choose from: other containers choose the same.

    Wide instances choose first, each the cores that share a last-level cache, or else the memory node, on which it
    leaves the fewest over; only one that fits no node spreads over several. With ``shared_cores`` each group chooses
    anew, the widest from the first core on and the others from the last, so that groups that leave cores free meet on
    as few as can be.
    """
    if quota_alone_limits(machine):
        return tuple(((),) * group.instances for group in groups)
    cores = usable_cores(machine)
    home = {cpu: (core.node, core.domain) for core in machine.cores for cpu in core.cpus}
    by_width = sorted(range(len(groups)), key=lambda index: -groups[index].threads)
    placed: dict[int, tuple[Cpus, ...]] = {}
    free = list(cores)
    for turn, index in enumerate(by_width):
        group = groups[index]
        if shared_cores:
            free = list(cores) if turn == 0 else cores[::-1]
        if group.cores > len(free):
            placed[index] = ((),) * group.instances
            continue
        placed[index] = tuple(_take(free, group.threads, home) for _ in range(group.instances))
    return tuple(placed[index] for index in range(len(groups)))


def _take(free: list[int], threads: int, home: Mapping[int, tuple[int, int]]) -> Cpus:
    """Takes ``threads`` CPUs out of ``free``; ``home`` says the memory node and the last-level cache of a CPU."""
    caches: dict[tuple[int, int], list[int]] = {}
    nodes: dict[int, list[int]] = {}
    for cpu in free:
        node, domain = home.get(cpu, (0, 0))
        caches.setdefault((node, domain), []).append(cpu)
        nodes.setdefault(node, []).append(cpu)
    # min and sorted keep the order of the machine among equals.
    for places in (caches.values(), nodes.values()):
        roomy = [cpus for cpus in places if len(cpus) >= threads]
        if roomy:
            chosen = min(roomy, key=len)
            break
    else:
        chosen = [cpu for cpus in sorted(nodes.values(), key=len, reverse=True) for cpu in cpus]
    taken = tuple(chosen[:threads])
    for cpu in taken:
        free.remove(cpu)
    return taken


def setup_to_json(setup: Setup) -> dict[str, Any]:
    """The ``chosen`` of a configuration file; ``read_setup`` reads it."""
    return {
        "groups": [
            {"instances": group.instances, "threads": group.threads, "longest": group.longest} for group in setup.groups
        ],
        "batch_tokens": setup.batch_tokens,
        "shared_cores": setup.shared_cores,
    }


def read_setup(document: object, where: str, *, batch_tokens: int) -> Setup:
    """A set-up from plain JSON; ``batch_tokens`` is for one that says none. Raises ``InputError`` naming the field.

    Groups may stand in any order and are put into that of their ``longest``.
    """
    fields = _fields(document, where, needed=("groups",), optional=("batch_tokens", "shared_cores"))
    rows = fields["groups"]
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{where}.groups is {_shown(rows)}; a list of at least one group is needed")
    groups = []
    for index, row in enumerate(rows):
        at = f"{where}.groups[{index}]"
        group = _fields(row, at, needed=("instances", "threads"), optional=("longest",))
        longest = group.get("longest")
        groups.append(
            InstanceGroup(
                _count(group["instances"], f"{at}.instances", MOST_THREADS),
                _count(group["threads"], f"{at}.threads", MOST_THREADS),
                None if longest is None else _count(longest, f"{at}.longest", _MOST_TOKENS, "; or null for any length"),
            )
        )
    groups.sort(key=lambda group: _MOST_TOKENS + 1 if group.longest is None else group.longest)
    shared = fields.get("shared_cores", False)
    if not isinstance(shared, bool):
        raise InputError(f"{where}.shared_cores is {_shown(shared)}; true or false is needed")
    tokens = _count(fields.get("batch_tokens", batch_tokens), f"{where}.batch_tokens", _MOST_TOKENS)
    return Setup(tuple(groups), tokens, shared)


def _fields(document: object, where: str, *, needed: Sequence[str], optional: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(document, Mapping):
        raise InputError(f"{where} is {_shown(document)}; an object with {', '.join(needed)} is needed")
    known = (*needed, *optional)
    for name in document:
        if name not in known:
            raise InputError(f"{where} has the unknown field {_shown(name)}; known are {', '.join(known)}")
    for name in needed:
        if name not in document:
            raise InputError(f"{where} lacks {name!r}; needed are {', '.join(needed)}")
    return document


def _count(value: object, where: str, most: int, otherwise: str = "") -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InputError(f"{where} is {_shown(value)}; a whole number from 1 to {most} is needed{otherwise}")
    return value


def _shown(value: object) -> str:
    text = repr(value).replace("None", "null")
    return text if len(text) <= 60 else f"{text[:60]}..."
