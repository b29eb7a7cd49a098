"""The CPU backend: executors of the native core over one shared mapping of the weights."""

from __future__ import annotations

import os
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
        self._executors = _core.ExecutorPool(
            self.plan,
            weights,
            threads,
            [cores[index * threads : (index + 1) * threads] if pinned else [] for index in range(instances)],
            spin_us,
            idle_spin_us,
        )
        self._pid = os.getpid()

    def run(self, output: str, batch: Batch, select: Int32 | None = None) -> Float32:
        """See ``Runnable.run``. Releases the GIL while the model runs."""
        self._need_own_process()
        order = None
        if select is not None and select.size > 1 and not bool(np.all(select[1:] > select[:-1])):
            # The core takes rising rows, each once.
            select, order = np.unique(select, return_inverse=True)
        rows: Float32 = self._executors.run(output, batch.token_ids, batch.cu_seqlens, batch.token_type_ids, select)
        return rows if order is None else rows[order]

    def trace(self, output: str, batch: Batch, select: Int32 | None = None) -> tuple[Float32, int, Int64]:
        """As ``run``, for rising ``select``, and what every thread did.

        The run's nanoseconds in the core, and ``i64[events, 7]``: thread, step of the plan, chunk, first row, rows,
        begin and end in nanoseconds from the run's begin, thread by thread in the order of time.
        """
        self._need_own_process()
        return self._executors.trace(output, batch.token_ids, batch.cu_seqlens, batch.token_type_ids, select)

    def _need_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise ResourceError(
                f"this engine was loaded in process {self._pid}, and a forked child has none of its threads; load the "
                "artifact in the child: the weights are shared all the same"
            )

    def kernels(self) -> list[tuple[str, list[str]]]:
        """For every step of the plan its text and the names of the kernels that it runs."""
        self._need_own_process()
        steps = [line for line in self.plan.splitlines() if line.startswith("step ")]
        return list(zip(steps, self._executors.kernels(), strict=True))

    def close(self) -> None:
        """Waits for running calls, then frees arenas, threads and the mapping.

        In a forked child it frees nothing: a call that ran in the parent at the fork never ends here.
        """
        if os.getpid() == self._pid:
            self._executors.close()
