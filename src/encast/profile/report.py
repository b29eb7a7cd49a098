"""The profile: a row for each step or position in the layers, what is left over, and the bottom line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

import encast._core as _core
from encast._core import Plan, PlanStep, PlanValue, PlanWeight
from encast.ceilings import Ceilings
from encast.profile.account import CHUNK, DENSE, HEADS, ROWS, STEP
from encast.profile.bounds import Bound, Homes, bound_of, peak_of, product_dtype
from encast.profile.measure import Measured, Traced
from encast.profile.work import Chunk, Work, chunks_of, product_weights, work_of
from encast.profile.workload import Workload

__all__ = ["HAND_OFF", "LAYER", "NOISY", "Kernel", "Limit", "Profile", "Row", "build_profile", "step_kernels"]

HAND_OFF = "hand-off"
NOISY = 0.1
"""Quartiles further apart than this part of the median make a measurement noisy."""

LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""The number of a layer in the path of a module."""


@dataclass(frozen=True)
class Kernel:
    """A row of the catalog as far as it matters here."""

    name: str
    isa: str
    min_rows: int


@dataclass(frozen=True)
class Row:
    """A step, or the same step of all layers added up.

    ``steps``: their indices in the plan. ``shape``: rows x outputs x inputs of a product, tokens x heads x head size
    of attention, rows x columns of the rest; rows are those of the whole workload, and of each of the steps.
    ``seconds``: at work, the mean of the threads. ``waiting``: for others, after it. ``share``: of the whole
    forward. ``head_rows``: how many of the rows ran in tasks of heads; None outside of the plan's stages of heads.
    ``rate`` is in ``unit``: operations of products, or bytes, a second. ``fraction``: how much of the bound is
    reached. ``holds``: ``arithmetic``, a level of memory, or ``hand-off``, where waiting is longer than the bound.
    """

    name: str
    kind: str
    kernel: str
    shape: tuple[int, ...]
    dtype: str
    steps: tuple[int, ...]
    seconds: float
    waiting: float
    share: float
    head_rows: int | None
    work: Work
    bound: Bound

    @property
    def unit(self) -> str:
        return "GFLOP/s" if self.work.products else "GB/s"

    @property
    def rate(self) -> float:
        if self.seconds <= 0:
            return 0.0
        return (self.work.products or self.work.bytes) / self.seconds / 1e9

    @property
    def fraction(self) -> float:
        return self.bound.seconds / self.seconds if self.seconds > 0 else 0.0

    @property
    def holds(self) -> str:
        return HAND_OFF if self.waiting > self.bound.seconds else self.bound.holds


@dataclass(frozen=True)
class Limit:
    """The least time of the workload: the larger of its products at the measured peaks and its weights, read once a
    batch, at the bandwidth of the level that they can live in."""

    arithmetic: float
    weights: float
    level: str

    @property
    def seconds(self) -> float:
        return max(self.arithmetic, self.weights)

    @property
    def holds(self) -> str:
        return "arithmetic" if self.arithmetic >= self.weights else f"weights from {self.level}"


@dataclass(frozen=True)
class Profile:
    """Everything that was found. ``waiting`` and ``outside`` are seconds of the forward beside the rows' ``seconds``:
    together they make ``total``."""

    artifact: str
    output: str
    workload: Workload
    threads: int
    ceilings: Ceilings
    ceilings_note: str | None
    rows: tuple[Row, ...]
    step_names: tuple[str, ...]  # of all steps of the plan
    waiting: float
    outside: float
    total: float
    limit: Limit
    measured: Measured

    @property
    def busy(self) -> float:
        """The part of the forward in which the threads work on steps."""
        return sum(row.seconds for row in self.rows) / self.total

    @property
    def tokens_per_second(self) -> float:
        return self.workload.tokens / self.measured.forward.median

    @property
    def fraction(self) -> float:
        """How much of the workload's limit is reached."""
        return self.limit.seconds / self.measured.forward.median

    @property
    def warnings(self) -> tuple[str, ...]:
        found = []
        if self.measured.forward.spread > NOISY:
            found.append(
                f"half of the runs lie {self.measured.forward.spread:.0%} apart: something else uses this machine, or "
                "its clock changes; what follows is not to be trusted"
            )
        if self.ceilings.doubts:
            found.append(
                "the machine was noisy when its ceilings were measured: "
                + "; ".join(self.ceilings.doubts)
                + "; measure again: encast doctor --measure"
            )
        if self.fraction > 1.02:
            found.append(
                "the forward is faster than its limit, so a ceiling is too low: the machine was busy when it was "
                "measured, or weights that are slightly too large for a cache stay in it in part; measure again: "
                "encast doctor --measure"
            )
        return tuple(found)


def step_kernels(names: Sequence[Sequence[str]], catalog: Mapping[str, Kernel]) -> list[list[Kernel]]:
    """The kernels of every step of the plan, for one row and upwards."""
    return [[catalog[name] for name in step] for step in names]


def build_profile(
    artifact: str,
    output: str,
    plan: Plan,
    kernels: Sequence[Sequence[Kernel]],
    workload: Workload,
    ceilings: Ceilings,
    threads: int,
    measured: Measured,
    *,
    layers: bool = False,
    ceilings_note: str | None = None,
) -> Profile:
    """Puts the times of a measurement beside the bounds of its steps.

    ``kernels``: of every step of the plan. ``layers``: a row for every step, instead of one for the same step of all
    layers.
    ``ceilings_note``: where the ceilings come from, if that is to be said.
    """
    needed = plan.needed(output)
    selected = plan.outputs[output].rows == "selected"
    chunks = {
        (batch, number): chunk
        for batch, (packed, select) in enumerate(zip(workload.batches, workload.selects(), strict=True))
        for number, chunk in enumerate(chunks_of(packed, plan.chunk_tokens, select if selected else None))
    }
    every = list(chunks.values())
    account = measured.account
    total = account.wall / 1e9 + measured.outside
    names = [step.name for step in plan.steps]
    rows_at_once = _rows_at_once(measured, len(names))
    dense = _dense(measured, len(names))
    homes = _homes(plan, needed, dense, every, threads)
    ran = _ran(measured.sample)
    in_heads = {step for kind, begin, end in plan.stages if kind == "heads" for step in range(begin, end)}
    rows = []
    for step in needed:
        work, head_rows = Work(), 0
        for place, chunk in chunks.items():
            heads, by_panels = ran.get((*place, step.index), (None, 0.0))
            if heads is not None:
                work = work + work_of(step, chunk, heads=heads, dense=by_panels)
                head_rows += chunk.tokens if heads else 0
        # A sparse product has kernels of both of its forms: named is that of most rows.
        able = [
            one
            for one in kernels[step.index]
            if step.kind != "sparse" or one.name.startswith("gemm") == (dense[step.index] > 0.5)
        ]
        kernel = _chosen(able, rows_at_once[step.index])
        seconds, waiting = account.busy[step.index] / 1e9, account.waiting[step.index] / 1e9
        rows.append(
            Row(
                step.name,
                step.kind,
                kernel.name,
                _shape(step, every),
                _dtype(step),
                (step.index,),
                seconds,
                waiting,
                seconds / total,
                head_rows if step.index in in_heads else None,
                work,
                bound_of(work, _peak_dtype(step), kernel.isa, homes, ceilings, threads),
            )
        )
    limit = _limit(needed, rows, kernels, homes, ceilings, threads, len(workload.batches))
    return Profile(
        artifact,
        output,
        workload,
        threads,
        ceilings,
        ceilings_note,
        tuple(rows if layers else _grouped(rows)),
        tuple(names),
        (float(account.waiting.sum()) + account.idle) / 1e9,
        account.between / 1e9 + measured.outside,
        total,
        limit,
        measured,
    )


def _ran(sample: Sequence[Traced]) -> dict[tuple[int, int, int], tuple[bool, float]]:
    """(batch, chunk, step) of all that ran, whether in tasks of heads, and the share of rows in a dense form."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for batch, traced in enumerate(sample):
        for chunk, step, heads, rows, dense in traced.events[:, [CHUNK, STEP, HEADS, ROWS, DENSE]].tolist():
            sums = found.setdefault((batch, chunk, step), [heads, 0, 0])
            sums[1] += rows
            sums[2] += dense
    return {place: (bool(heads), dense / max(rows, 1)) for place, (heads, rows, dense) in found.items()}


def _dense(measured: Measured, steps: int) -> list[float]:
    """Of each step the share of all rows that the dense form of a sparse product multiplied."""
    rows, dense = np.zeros(steps), np.zeros(steps)
    for traced in measured.sample:
        np.add.at(rows, traced.events[:, STEP], traced.events[:, ROWS])
        np.add.at(dense, traced.events[:, STEP], traced.events[:, DENSE])
    shares: list[float] = (dense / np.maximum(rows, 1)).tolist()
    return shares


def _homes(
    plan: Plan, needed: Sequence[PlanStep], dense: Sequence[float], chunks: Sequence[Chunk], threads: int
) -> Homes:
    # A weight of several layers is one place in the file.
    weights: dict[int, int] = {}
    for step in needed:
        if step.kind in ("linear", "sparse"):
            read = product_weights(step, dense=dense[step.index])
            weights |= {weight.offset: weight.nbytes for weight in read}
    tokens = max(chunk.tokens for chunk in chunks)
    rows = min(plan.block_rows, -(-tokens // threads))
    word: PlanWeight | None = next((step.keys["word"] for step in needed if "word" in step.keys), None)
    return Homes(
        weights=sum(weights.values()),
        tables=max(chunk.words for chunk in chunks) * word.cols * 4 if word is not None else 0,
        block=plan.block * -(-rows // _core.BLOCK_UNIT),
        arena=plan.arena * tokens // plan.chunk_tokens,
    )


def _limit(
    needed: Sequence[PlanStep],
    rows: Sequence[Row],
    kernels: Sequence[Sequence[Kernel]],
    homes: Homes,
    ceilings: Ceilings,
    threads: int,
    batches: int,
) -> Limit:
    arithmetic = 0.0
    for step, row in zip(needed, rows, strict=True):
        if row.work.products:
            isa = next(kernel.isa for kernel in kernels[step.index] if kernel.name == row.kernel)
            arithmetic += row.work.products / peak_of(ceilings, _peak_dtype(step), isa, threads)
    seconds = batches * homes.weights / ceilings.read(homes.weights, threads) if homes.weights else 0.0
    return Limit(arithmetic, seconds, ceilings.level_of(homes.weights, threads))


def _peak_dtype(step: PlanStep) -> str:
    return product_dtype(step.keys["arithmetic"]) if "arithmetic" in step.keys else "f32"


def _dtype(step: PlanStep) -> str:
    if "arithmetic" in step.keys:
        return product_dtype(step.keys["arithmetic"])
    made = [step.keys[key].dtype for key in ("out", "also") if key in step.keys]
    return "+".join({"q8": "int8"}.get(dtype, dtype) for dtype in made)


def _shape(step: PlanStep, chunks: Sequence[Chunk]) -> tuple[int, ...]:
    out: PlanValue = step.keys["out"]
    rows = sum(chunk.rows(out.rows) for chunk in chunks)
    if step.kind == "sparse":
        return rows, out.cols, step.keys["x"].cols
    if "w" in step.keys:
        return rows, step.keys["w"].rows, step.keys["w"].cols
    if step.kind == "attention":
        heads = step.keys["heads"]
        return rows, heads, out.cols // heads
    return rows, out.cols


def _rows_at_once(measured: Measured, steps: int) -> list[int]:
    most = np.ones(steps, np.int64)
    for traced in measured.sample:
        np.maximum.at(most, traced.events[:, STEP], traced.events[:, ROWS])
    return [int(rows) for rows in most]


def _chosen(kernels: Sequence[Kernel], rows: int) -> Kernel:
    return max((one for one in kernels if one.min_rows <= rows), key=lambda one: one.min_rows, default=kernels[0])


def _grouped(rows: Sequence[Row]) -> list[Row]:
    """The same step of all layers as one row: the same module but for numbers in its path, and the same work."""
    groups: dict[tuple[object, ...], Row] = {}
    for row in rows:
        name = LAYER.sub("*", row.name)
        key = (name, row.kind, row.kernel, row.shape, row.dtype, row.head_rows)
        if key not in groups:
            groups[key] = replace(row, name=name)
            continue
        one = groups[key]
        groups[key] = replace(
            one,
            steps=(*one.steps, *row.steps),
            seconds=one.seconds + row.seconds,
            waiting=one.waiting + row.waiting,
            share=one.share + row.share,
            work=one.work + row.work,
            bound=_added(one.bound, row.bound),
        )
    # A layer's only step keeps the name of its module.
    return [
        replace(row, name=next(one.name for one in rows if one.steps == row.steps)) if len(row.steps) == 1 else row
        for row in groups.values()
    ]


def _added(a: Bound, b: Bound) -> Bound:
    levels = {*a.memory, *b.memory}
    return Bound(
        a.arithmetic + b.arithmetic, {level: a.memory.get(level, 0) + b.memory.get(level, 0) for level in levels}
    )
