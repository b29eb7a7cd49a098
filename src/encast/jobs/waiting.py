"""The shards that nobody computes yet, and who is given which.

Whoever asks gets the shard behind his last one, so that he reads on in a file that he has open: a group of rows of a
Parquet file is fetched by him once, and a gzipped file unpacked once. Who has none left takes half of what is left of
the one who has most. Every step takes time that does not grow with the shards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence, Set
from typing import Generic, TypeVar

__all__ = ["Waiting"]

W = TypeVar("W")


class Waiting(Generic[W]):
    """``len`` of it are left. ``W``: who computes."""

    def __init__(self, numbers: Iterable[int]) -> None:
        """``numbers`` rise."""
        self._free: deque[list[int]] = deque()
        """Stretches of numbers, as their begin and end."""
        for number in numbers:
            if self._free and self._free[-1][1] == number:
                self._free[-1][1] += 1
            else:
                self._free.append([number, number + 1])
        self._mine: dict[W, list[int]] = {}
        self._again: dict[frozenset[str], deque[int]] = {}
        self._left = sum(end - begin for begin, end in self._free)

    def __len__(self) -> int:
        return self._left

    def take(self, who: W, node: str = "", others: Set[str] = frozenset()) -> int | None:
        """A shard for ``who``; of those that failed on his node one only where it failed on all ``others`` too. None
        where there is none for him."""
        number = self._fresh(who)
        if number is None:
            number = self._failed(node, others)
        self._left -= number is not None
        return number

    def _fresh(self, who: W) -> int | None:
        mine = self._mine.get(who)
        if mine is None or mine[0] == mine[1]:
            mine = self._stretch()
            if mine is None:
                return None
            self._mine[who] = mine
        mine[0] += 1
        return mine[0] - 1

    def _stretch(self) -> list[int] | None:
        if self._free:
            return self._free.popleft()
        most = max(self._mine.values(), key=lambda one: one[1] - one[0], default=[0, 0])
        if most[0] == most[1]:
            return None
        middle = (most[0] + most[1]) // 2
        taken = [middle, most[1]]
        most[1] = middle
        return taken

    def _failed(self, node: str, others: Set[str]) -> int | None:
        for nodes, numbers in self._again.items():
            if node not in nodes or others <= nodes:
                number = numbers.popleft()
                if not numbers:
                    del self._again[nodes]
                return number
        return None

    def leave(self, who: W) -> None:
        """He takes no more; what he would have had is anyone's."""
        mine = self._mine.pop(who, None)
        if mine and mine[0] < mine[1]:
            self._free.appendleft(mine)

    def put_back(self, numbers: Sequence[int]) -> None:
        """These were taken, and nobody is to blame."""
        self._left += len(numbers)
        self._free.extendleft([number, number + 1] for number in reversed(numbers))

    def again(self, number: int, failed_on: Iterable[str]) -> None:
        """This one failed on these nodes."""
        self._left += 1
        self._again.setdefault(frozenset(failed_on), deque()).append(number)
