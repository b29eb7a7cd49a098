"""Which instance may start: instances share cores, and one runs only while its cores are free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from encast.backends.groups import InstanceGroup

__all__ = ["Place", "Places"]


@dataclass(frozen=True)
class Place:
    """An instance. ``cpus``: those that its threads are bound to, empty where they are not bound."""

    group: int
    instance: int
    threads: int
    cpus: frozenset[int]


class Places:
    """The instances of ``groups``, bound to ``cpus`` (as ``CpuRunnable.cpus``), on ``cores`` usable cores."""

    def __init__(self, groups: Sequence[InstanceGroup], cpus: Sequence[Sequence[Sequence[int]]], cores: int) -> None:
        self.groups, self.cores = tuple(groups), cores
        self.by_group = [
            [Place(index, number, group.threads, frozenset(own)) for number, own in enumerate(cpus[index])]
            for index, group in enumerate(groups)
        ]
        places = [place for group in self.by_group for place in group]
        alone = [place for place in places if place.threads == 1]
        self.between = {
            place: place
            if place.threads == 1
            else next((one for one in alone if one.cpus and one.cpus <= place.cpus), None)
            for place in places
        }
        """For each place the one of a single thread on which batches run while its own stops: itself, or one that is
        bound to a core of it and can run nothing else meanwhile."""
        self.running: set[Place] = set()
        # The last one freed first: its threads may still be awake, its memory in the cache.
        self._free = [list(reversed(places)) for places in self.by_group]
        self._busy_cpus: set[int] = set()
        self._busy_threads = 0

    def covering(self, longest: int) -> list[int]:
        """The groups that take texts of so many tokens, in their order."""
        return [index for index, group in enumerate(self.groups) if group.longest is None or group.longest >= longest]

    def choose(self, covering: Sequence[int], *, widest: bool, held: Held) -> tuple[Place | None, int]:
        """A place of those groups that may start now and touches nothing that is held; and how many such could run side
        by side. It is of the first group that has one, or with ``widest`` of the one with most threads.
        """
        order = sorted(covering, key=lambda index: -self.groups[index].threads) if widest else covering
        chosen: Place | None = None
        abreast = 0
        taken = Held(set(held.cpus), held.threads)
        for index in order:
            for place in reversed(self._free[index]):
                if self._may_start(place, taken):
                    chosen = chosen or place
                    abreast += 1
                    taken.cpus |= place.cpus
                    taken.threads += place.threads
        return chosen, abreast

    def hold(self, covering: Sequence[int], held: Held) -> None:
        """Keeps what a place of the first of those groups needs: others leave its cores idle until it can start."""
        waiting = [place for place in self._free[covering[0]] if not place.cpus & held.cpus]
        if waiting:
            place = min(waiting, key=lambda place: len(place.cpus & self._busy_cpus))
            held.cpus |= place.cpus
            held.threads += place.threads

    def start(self, place: Place) -> None:
        """The place is in use from now on."""
        self._free[place.group].remove(place)
        self.running.add(place)
        self._busy_cpus |= place.cpus
        self._busy_threads += place.threads

    def end(self, place: Place) -> None:
        """The place is free again."""
        self._free[place.group].append(place)
        self.running.remove(place)
        self._busy_cpus -= place.cpus
        self._busy_threads -= place.threads

    def _may_start(self, place: Place, held: Held) -> bool:
        if not self.running and not held.threads:
            return True
        if place.cpus & self._busy_cpus or place.cpus & held.cpus:
            return False
        return bool(place.cpus) or self._busy_threads + held.threads + place.threads <= self.cores


@dataclass
class Held:
    """What is kept for work that came first and cannot start yet."""

    cpus: set[int]
    threads: int = 0
