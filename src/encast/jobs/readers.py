"""The inputs of a worker: open while neighbouring shards are read, and the same from first to last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from encast.data import BadRow, Row, RowReader, open_rows
from encast.data.inputs import State, state_of
from encast.jobs.job import Shard, changed, need_unchanged

__all__ = ["OpenInput", "OpenInputs"]


@dataclass
class OpenInput:
    """A reader of the file that was in ``state`` when it was opened; ``last``: the shard that it has read."""

    path: str
    reader: RowReader
    state: State
    last: int

    def rows(self, shard: Shard, passed: Callable[[], None]) -> Iterator[Row | BadRow]:
        """``passed``: see ``RowReader.at``."""
        self.last = shard.number
        return self.reader.at(shard.span, passed)

    def need_unchanged(self, shard: Shard) -> None:
        """Raises ``InputError`` where the rows that were read may be of two files."""
        now = state_of(self.path)
        need_unchanged(shard.input, now, shard.mark)
        if now != self.state:  # another one of the same size and time
            raise changed(shard.input)

    def close(self) -> None:
        self.reader.close()


class OpenInputs:
    """Readers that are kept for the shards behind those that they have read, ``most`` of them; for several threads."""

    def __init__(self, reached: Callable[[Shard], str], columns: Sequence[str], most: int) -> None:
        """``reached``: the path of a shard's input, or its URL with credentials."""
        self._reached, self._columns, self._most = reached, columns, most
        self._idle: list[OpenInput] = []
        self._lock = threading.Lock()

    def take(self, shard: Shard) -> OpenInput:
        """Raises ``InputError`` where the input cannot be read, or is not the one that the job began with."""
        path = self._reached(shard)
        state = state_of(path)
        need_unchanged(shard.input, state, shard.mark)
        with self._lock:
            fitting = [one for one in self._idle if (one.path, one.state) == (path, state)]
            if fitting:
                # The one that has least to pass over; one that is too far has to begin again.
                found = max(fitting, key=lambda one: (one.last < shard.number, one.last))
                self._idle.remove(found)
                return found
        return OpenInput(path, open_rows(path, self._columns, shard.input.format), state, -1)

    def give_back(self, one: OpenInput) -> None:
        with self._lock:
            self._idle.append(one)
            spare = self._idle.pop(0) if len(self._idle) > self._most else None
        if spare is not None:
            spare.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for one in idle:
            one.close()
