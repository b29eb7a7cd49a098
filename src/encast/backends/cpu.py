"""The CPU backend: executors of the native core over one shared mapping of the weights."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import encast.knobs as knobs
import encast.machine as machine
from encast.artifact import Artifact
from encast.backends.base import Float32, check_request
from encast.backends.groups import InstanceGroup, check_groups, place_groups
from encast.batch import Batch, Int32
from encast.errors import InputError, ResourceError
from encast.lower import Target, lower

__all__ = ["CpuRunnable", "Opening", "Pause"]

Int64 = np.ndarray[Any, np.dtype[np.int64]]

_INT32 = np.dtype(np.int32)
"""One object for all arrays of it; where another one says the same, ``check_request`` sees it."""


class Pause:
    """Stops a run for other work on its thread: after each ``ask``, from any thread, ``between`` is called once, soon,
    where the run stands between two blocks of rows. ``between`` may run an instance of one thread of a runnable that is
    ``apart``, also the one that stops. What it raises is raised when the run has ended. An ``ask`` while nothing runs
    counts for the next run.
    """

    def __init__(self, between: Callable[[], None]) -> None:
        import encast._core as _core

        interrupt = _core.Interrupt()
        self.ask = interrupt.ask
        self.arguments = (interrupt, between)


class Opening:
    """What can begin before the rest of an artifact is looked at: its weights are mapped (with ``ENCAST_COPY_WEIGHTS``
    copied), and their checksums verified on other threads until ``weights`` is asked for. A context manager, after
    which no thread is left. Raises ``ArtifactError`` and ``ResourceError``.
    """

    def __init__(self, artifact: Artifact, here: machine.Machine | None = None) -> None:
        import encast._core as _core

        self.machine = machine.this_machine() if here is None else here
        self._weights = _core.Weights(str(artifact.weights_path), copy=knobs.get("ENCAST_COPY_WEIGHTS"))
        self._verification = _core.Verification(
            self._weights,
            [(name, tensor.offset, tensor.nbytes, tensor.xxh64) for name, tensor in artifact.tensors.items()],
            max(1, len(machine.usable_cores(self.machine)) - 1),  # this thread goes on
        )

    def __enter__(self) -> Opening:
        return self

    def __exit__(self, *error: object) -> None:
        self._verification.close()

    def weights(self) -> Any:
        """Waits for the checksums; raises ``ArtifactError`` for a tensor that differs."""
        self._verification.wait()
        return self._weights


class CpuRunnable:
    """Groups of executors; a call takes a free one of its group or waits for it.

    Without ``groups`` there is one, of ``instances`` executors of ``threads`` threads. A call belongs to the first of
    ``groups`` that covers the longest sequence of its batch; answers do not depend on the group. All executors read one
    mapping of the weights (with ``ENCAST_COPY_WEIGHTS`` one copy), whose checksums are verified first. ``pin``
    binds every executor's workers to cores of their own (with ``shared_cores``: of their own within the group), as far
    as the affinity mask and the cgroup leave cores; with fewer cores than threads it is off, which ``groups`` do not
    accept, and where a CPU quota pays for fewer cores than the mask has. With ``apart`` the caller, and not the pool,
    knows which instances are free: a run names its own, and may stop for another one on an instance of one thread
    (``Pause``). ``target``: what the plan is made for, if not this machine as it is; ``opening``: of ``artifact``, if
    it has begun. Raises ``ArtifactError``, ``InputError`` and ``ResourceError``.
    """

    def __init__(
        self,
        artifact: Artifact,
        *,
        threads: int | None = None,
        instances: int = 1,
        groups: Sequence[InstanceGroup] | None = None,
        shared_cores: bool = False,
        pin: bool = True,
        apart: bool = False,
        target: Target | None = None,
        opening: Opening | None = None,
    ) -> None:
        import encast._core as _core

        here = machine.this_machine() if opening is None else opening.machine
        cores = len(machine.usable_cores(here))
        if groups is None:
            if instances < 1 or (threads is not None and threads < 1):
                raise InputError(f"threads={threads} and instances={instances} must be at least 1")
            threads = threads or knobs.get("ENCAST_THREADS") or max(1, cores // instances)
            groups = (InstanceGroup(instances, threads),)
        else:
            if threads is not None or instances != 1:
                raise InputError("groups say how many threads and instances there are; leave threads and instances out")
            check_groups(groups, longest_text=artifact.graph.meta.max_len, where="groups")
            _need_cores(groups, cores, shared_cores)
        self.groups = tuple(groups)
        self.at_once = sum(group.instances for group in groups)
        self._apart = apart
        self.threads = max(group.threads for group in groups)
        """Of the widest instance."""
        with Opening(artifact, here) if opening is None else opening as opening:
            self.plan = lower(artifact.graph, artifact.tensors, target or Target.here(here))
            weights = opening.weights()
        spin_us, idle_spin_us = knobs.get("ENCAST_SPIN_US"), knobs.get("ENCAST_IDLE_SPIN_US")
        self.cpus = place_groups(groups, here, shared_cores=shared_cores)
        """The CPUs of every instance of every group; empty where it is not pinned."""
        if not pin:
            self.cpus = tuple(((),) * group.instances for group in groups)
        self._executors = [
            [
                _core.ExecutorPool(self.plan, weights, group.threads, own, spin_us, idle_spin_us)
                for own in ([[cpus] * (2 if group.threads == 1 else 1) for cpus in placed] if apart else [placed])
            ]
            for group, placed in zip(groups, self.cpus, strict=True)
        ]
        self._meta = artifact.graph.meta
        self._outputs = {public: artifact.graph.type_of(value) for public, value in artifact.graph.outputs.items()}
        self._selected = {public for public, type in self._outputs.items() if type.shape[0] == "selected"}
        self._bounds = [group.longest for group in groups[:-1] if group.longest is not None]
        self._pid = os.getpid()

    def _group(self, batch: Batch, group: int | None = None) -> list[Any]:
        """The pools of executors for this batch: one, or with ``apart`` one an instance."""
        if group is not None and not 0 <= group < len(self.groups):
            raise InputError(f"group is {group}; there are groups 0 to {len(self.groups) - 1}")
        if not self._bounds or batch.cu_seqlens.ndim != 1:
            return self._executors[-1]
        # The core checks the batch; a malformed one is refused by every group alike.
        longest = int(np.max(batch.cu_seqlens[1:] - batch.cu_seqlens[:-1], initial=0))
        first = bisect_left(self._bounds, longest)
        if group is not None and group < first:
            raise InputError(
                f"group {group} is for texts of at most {self._bounds[group]} tokens, the batch's longest has "
                f"{longest}; give group {first} or a later one"
            )
        return self._executors[first if group is None else group]

    def run(
        self,
        output: str,
        batch: Batch,
        select: Int32 | None = None,
        *,
        group: int | None = None,
        instance: int = 0,
        pause: Pause | None = None,
    ) -> Float32:
        """See ``Runnable.run``. Releases the GIL while the model runs.

        ``group`` is the index of the group that runs it (default: the first that covers the batch's longest sequence);
        raises ``InputError`` for one that does not cover it. ``instance``: of that group, if they are ``apart``.
        ``pause``: what the run stops for; only then, since an instance has no second executor otherwise.
        """
        self._need_own_process()
        if pause is not None and not self._apart:
            raise InputError("pause: instances that are not apart cannot run what they would stop for")
        types = batch.token_type_ids
        if (
            (select is None) == (output in self._selected)
            or batch.token_ids.dtype is not _INT32
            or batch.cu_seqlens.dtype is not _INT32
            or (types is not None and types.dtype is not _INT32)
            or (select is not None and select.dtype is not _INT32)
        ):
            # The binding converts other numbers, and the core takes no choice of rows for one of none.
            check_request(self._meta, self._outputs, output, batch, select)
        rising, order = select, None
        if select is not None and select.size > 1 and not bool(np.all(select[1:] > select[:-1])):
            # The core takes rising rows, each once.
            rising, order = np.unique(select, return_inverse=True)
        pools = self._group(batch, group)
        if not 0 <= instance < len(pools):
            raise InputError(f"instance is {instance}; a caller may name instances 0 to {len(pools) - 1} of this group")
        executors = pools[instance]
        try:
            rows: Float32 = executors.run(
                output, batch.token_ids, batch.cu_seqlens, types, rising, *(pause.arguments if pause else ())
            )
        except (InputError, TypeError):
            # The core is quick to refuse and brief about it; this says the same with sequence, token and remedy.
            check_request(self._meta, self._outputs, output, batch, select)
            raise
        return rows if order is None else rows[order]

    def trace(self, output: str, batch: Batch, select: Int32 | None = None) -> tuple[Float32, int, Int64]:
        """As ``run``, for rising ``select``, and what every thread did.

        The run's nanoseconds in the core, and ``i64[events, 9]``: thread, step of the plan, chunk, first row, rows,
        begin and end in nanoseconds from the run's begin, 1 where it was a task of heads, and the rows of a sparse
        product that its dense form multiplied; thread by thread in the order of time.
        """
        self._need_own_process()
        traced: tuple[Float32, int, Int64] = self._group(batch)[0].trace(
            output, batch.token_ids, batch.cu_seqlens, batch.token_type_ids, select
        )
        return traced

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
        return list(zip(steps, self._executors[0][0].kernels(), strict=True))

    def numbers(self) -> dict[str, Any]:
        """What the bits of an answer depend on besides the text and the artifact."""
        import encast._core as _core

        classes = {step.keys.get("arithmetic") for step in _core.Plan(self.plan).steps} - {None}
        return {"arithmetic": sorted(classes)}

    def close(self) -> None:
        """Waits for running calls, then frees arenas, threads and the mapping.

        In a forked child it frees nothing: a call that ran in the parent at the fork never ends here.
        """
        if os.getpid() == self._pid:
            for pools in self._executors:
                for pool in pools:
                    pool.close()


def _need_cores(groups: Sequence[InstanceGroup], cores: int, shared_cores: bool) -> None:
    """Raises ``InputError`` where groups need more cores than the process may use."""
    for group in groups:
        if group.cores > cores:
            raise InputError(
                f"a group of {group.instances} x {group.threads} threads needs {group.cores} cores, and this process "
                f"may use {cores} (affinity mask and cgroup included); give it fewer, or tune on this machine"
            )
    together = sum(group.cores for group in groups)
    if not shared_cores and together > cores:
        raise InputError(
            f"the groups need {together} cores together, and this process may use {cores} (affinity mask and cgroup "
            "included); give them fewer, or let them share cores with shared_cores: true"
        )
