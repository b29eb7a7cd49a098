"""One side of a comparison: a backend in one or more processes, each on cores of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from encast.batch import Batch
from encast.bench.peers.base import BackendSpec, ModelFiles

if TYPE_CHECKING:
    from encast.launch import Placement

__all__ = ["ColdStart", "Contender", "Memory", "Usage"]

Float32 = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class ColdStart:
    """Seconds until the first answer, of the slowest instance (all start together)."""

    import_s: float
    load_s: float
    first_call_s: float


@dataclass(frozen=True)
class Memory:
    """Bytes of all instances together: peak resident, and proportional (shared pages count once)."""

    peak_rss_bytes: int
    pss_bytes: int


@dataclass(frozen=True)
class Usage:
    """What the processes did during a burst, read from /proc by the parent."""

    threads_ran: float
    cpu_s: float
    wall_s: float


class Contender:
    """A context manager: closing it ends the processes. A failing one raises ``worker.WorkerFailure``."""

    def __init__(
        self, backend: BackendSpec, model: ModelFiles, placements: Sequence[Placement], *, cache: Path
    ) -> None: ...

    def open(self) -> ColdStart: ...

    def bind(self, batches: Sequence[Batch], *, split: bool = False) -> None:
        """Readies every instance for the batches, which ``burst`` calls in turn.

        ``split``: each batch is divided over the instances by whole sequences, as evenly as they go.
        """

    def burst(
        self, *, calls: int | None = None, seconds: float | None = None, in_step: bool = False
    ) -> list[list[int]]:
        """Nanoseconds of every call, a list an instance; all instances begin at one moment.

        ``in_step``: no instance begins a call before all have ended the one before, so that the time of a divided
        batch is the largest of the instances' times of the same call.
        """
        raise NotImplementedError

    def stream(self, arrivals_ns: Sequence[int], batches: Sequence[Batch]) -> list[tuple[int, int, int]]:
        """Open loop: (due, begun, ended) of every request in nanoseconds since the stream began.

        Request i is due at ``arrivals_ns[i]`` (rising) and asks ``batches[i % len(batches)]``. An idle instance
        takes the oldest request that nobody has taken, so one that waits is counted as waiting.
        """
        raise NotImplementedError

    def outputs(self) -> list[tuple[int, Float32]]:
        """(index of a bound batch, its ``f32[tokens, hidden]``): kept from calls of the bursts since ``bind``."""
        raise NotImplementedError

    def memory(self) -> Memory: ...

    def usage(self) -> Usage: ...

    def facts(self) -> Mapping[str, Any]: ...
