"""The CPU backend: executors of the native core over one shared mapping of the weights."""

from __future__ import annotations

import os
import queue
import threading
from typing import Any

import numpy as np

from encast import knobs, machine
from encast.artifact import Artifact
from encast.batch import Batch
from encast.errors import InputError, ResourceError
from encast.lower import Target, lower

__all__ = ["CpuRunnable"]

Float32 = np.ndarray[Any, np.dtype[np.float32]]
Int32 = np.ndarray[Any, np.dtype[np.int32]]
Int64 = np.ndarray[Any, np.dtype[np.int64]]


class CpuRunnable:
    """``instances`` executors of ``threads`` threads each; a call takes a free one or waits for it.

    Verifies the checksums of all tensors when made. ``pin`` binds every executor's workers to cores of their
    own, as far as the affinity mask and the cgroup leave cores; with fewer cores than threads it is off. ``target``:
    what the plan is made for, if not this machine as it is.
    Raises ``ArtifactError``, ``InputError`` and ``ResourceError``.
    """

    def __init__(
        self,
        artifact: Artifact,
        *,
        threads: int | None = None,
        instances: int = 1,
        pin: bool = True,
        target: Target | None = None,
    ) -> None:
        from encast import _core

        if instances < 1 or (threads is not None and threads < 1):
            raise InputError(f"threads={threads} and instances={instances} must be at least 1")
        cores = machine.usable_cores()
        if threads is None:
            threads = knobs.get("ENCAST_THREADS") or max(1, len(cores) // instances)
        self.plan = lower(artifact.graph, artifact.tensors, target or Target.here())
        self.threads, self.instances = threads, instances
        weights = _core.Weights(str(artifact.weights_path))
        weights.verify(
            [(name, tensor.offset, tensor.nbytes, tensor.xxh64) for name, tensor in artifact.tensors.items()],
            max(1, len(cores)),
        )
        spin_us, idle_spin_us = knobs.get("ENCAST_SPIN_US"), knobs.get("ENCAST_IDLE_SPIN_US")
        pinned = pin and threads * instances <= len(cores)
        self._executors = [
            _core.Executor(
                self.plan,
                weights,
                threads,
                cores[index * threads : (index + 1) * threads] if pinned else [],
                spin_us,
                idle_spin_us,
            )
            for index in range(instances)
        ]
        self._free: queue.LifoQueue[Any] = queue.LifoQueue()
        for executor in reversed(self._executors):
            self._free.put(executor)
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()

    def run(self, output: str, batch: Batch, select: Int32 | None = None) -> Float32:
        """See ``Runnable.run``. Releases the GIL while the model runs."""
        order = None
        if select is not None and select.size > 1 and not bool(np.all(select[1:] > select[:-1])):
            # The core takes rising rows, each once.
            select, order = np.unique(select, return_inverse=True)
        executor = self._take()
        try:
            rows: Float32 = executor.run(output, batch.token_ids, batch.cu_seqlens, batch.token_type_ids, select)
        finally:
            self._free.put(executor)
        return rows if order is None else rows[order]

    def trace(self, output: str, batch: Batch, select: Int32 | None = None) -> tuple[Float32, int, Int64]:
        """As ``run``, for rising ``select``, and what every thread did.

        The run's nanoseconds in the core, and ``i64[events, 7]``: thread, step of the plan, chunk, first row, rows,
        begin and end in nanoseconds from the run's begin, thread by thread in the order of time.
        """
        executor = self._take()
        try:
            traced: tuple[Float32, int, Int64] = executor.trace(
                output, batch.token_ids, batch.cu_seqlens, batch.token_type_ids, select
            )
        finally:
            self._free.put(executor)
        return traced

    def _take(self) -> Any:
        """A free executor; the caller puts it back."""
        if os.getpid() != self._pid:
            raise ResourceError(
                f"this engine was loaded in process {self._pid}, and a forked child has none of its threads; load the "
                "artifact in the child: the weights are shared all the same"
            )
        executor = self._free.get()
        if executor is None:
            self._free.put(None)
            raise ResourceError("the engine is closed; load the artifact again")
        return executor

    def kernels(self) -> list[tuple[str, list[str]]]:
        """For every step of the plan its text and the names of the kernels that it runs."""
        steps = [line for line in self.plan.splitlines() if line.startswith("step ")]
        return list(zip(steps, self._executors[0].kernels(), strict=True))

    def close(self) -> None:
        """Waits for running calls, then frees arenas, threads and the mapping.

        In a forked child it frees nothing: a call that ran in the parent at the fork never ends here.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            for _ in self._executors:
                self._free.get()
            self._executors.clear()
        finally:
            # Every later call finds the mark that the engine is closed, and leaves it for the next.
            self._free.put(None)
