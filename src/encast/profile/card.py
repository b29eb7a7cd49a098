"""The profile of a card: every step beside its bound, by the card's own clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from encast.backends.gpu.program import Signature
from encast.backends.gpu.runnable import GpuRunnable
from encast.ceilings.card import CardCeilings
from encast.errors import InputError
from encast.ir.types import ValueType
from encast.profile.document import quartiles_document
from encast.profile.measure import Quartiles
from encast.profile.report import LAYER
from encast.profile.table import align, figure, time_unit
from encast.profile.work import Chunk, chunks_of
from encast.profile.workload import Workload

__all__ = ["CardProfile", "CardRow", "profile_card", "work_of_step"]

_PRODUCTS = {"linear_bf16": "bf16", "linear_int8": "int8", "linear_f8": "f8"}
_WARM_UPS, _LEAST_ROUNDS = 3, 5
_HEADER = ("step", "by", "shape", "dtype", "{unit}", "share", "rate", "", "of bound", "held by")
_LEFT = {0, 1, 2, 3, 7, 9}


@dataclass(frozen=True)
class CardRow:
    """A step, or the same step of ``count`` layers added up.

    ``shape``: rows x outputs x inputs of a product, rows x columns of the rest. ``dtype``: of its products, else of its
    values. ``operations``: multiplications and additions of products; ``bytes``: of operands, results and weights, each
    moved once. ``arithmetic`` and ``memory``: seconds that these take at the card's ceilings.
    """

    name: str
    op: str
    maker: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    seconds: float
    operations: int
    bytes: int
    arithmetic: float
    memory: float

    @property
    def bound(self) -> float:
        return max(self.arithmetic, self.memory)

    @property
    def holds(self) -> str:
        return "arithmetic" if self.arithmetic >= self.memory else "memory"


@dataclass(frozen=True)
class CardProfile:
    """``forward``: seconds of whole calls, from ids on the host to the answer on the host, as ``encast.load`` runs
    them. ``rows``: of runs step by step, in which ``ahead`` says that no step waited for the host. ``report``: that
    of the runnable."""

    artifact: str
    output: str
    workload: Workload
    ceilings: CardCeilings
    forward: Quartiles
    rows: tuple[CardRow, ...]
    report: tuple[str, ...]
    ahead: bool

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return sum(row.seconds for row in self.rows)

    @property
    def arithmetic(self) -> float:
        """Seconds that all products take at the card's ceilings."""
        return sum(row.arithmetic for row in self.rows)

    def lines(self) -> Iterator[str]:
        unit, scale = time_unit(self.seconds)
        yield f"{self.artifact}: {self.output} of {self.workload.what} on {self.ceilings.card}"
        yield from self.report
        if not self.ahead:
            yield "WARNING: steps waited for the host in some runs; their times hold that too"
        yield ""
        yield from align([tuple(cell.format(unit=unit) for cell in _HEADER), *map(self._cells, self.rows)], _LEFT)
        yield ""
        forward = self.forward
        yield (
            f"forward     {figure(forward.median * scale)} {unit} [{figure(forward.low * scale)}, "
            f"{figure(forward.high * scale)}], median and quartiles of {forward.count} calls; "
            f"{self.workload.tokens / forward.median:,.0f} tokens/s"
        )
        yield f"steps       {figure(self.seconds * scale)} {unit}, one after the other, without a CUDA graph"
        yield (
            f"products    {figure(self.arithmetic * scale)} {unit} at the card's ceilings: "
            f"{self.arithmetic / self.forward.median:.1%} of the forward"
        )

    def _cells(self, row: CardRow) -> tuple[str, ...]:
        _, scale = time_unit(self.seconds)
        amount, unit = (row.operations / 1e12, "Top/s") if row.operations else (row.bytes / 1e9, "GB/s")
        return (
            row.name + (f" (x{row.count})" if row.count > 1 else ""),
            row.maker,
            "x".join(map(str, row.shape)),
            row.dtype,
            figure(row.seconds * scale),
            f"{row.seconds / (self.seconds or 1.0):.1%}",
            figure(amount / row.seconds) if row.seconds else "",
            unit,
            f"{row.bound / row.seconds:.0%}" if row.seconds else "",
            row.holds,
        )

    def document(self) -> dict[str, Any]:
        """Plain JSON: seconds, operations, bytes."""
        return {
            "artifact": self.artifact,
            "output": self.output,
            "workload": {"what": self.workload.what, "tokens": self.workload.tokens, "seqs": self.workload.seqs},
            "card": self.ceilings.card,
            "ceilings": self.ceilings.to_json(),
            "steps_without_the_host": self.ahead,
            "report": list(self.report),
            "forward_seconds": quartiles_document(self.forward),
            "steps_seconds": self.seconds,
            "rows": [
                {
                    "name": row.name,
                    "op": row.op,
                    "maker": row.maker,
                    "shape": list(row.shape),
                    "dtype": row.dtype,
                    "steps": row.count,
                    "seconds": row.seconds,
                    "operations": row.operations,
                    "bytes": row.bytes,
                    "bound_seconds": row.bound,
                    "held_by": row.holds,
                }
                for row in self.rows
            ],
        }


def profile_card(
    artifact: str,
    runnable: GpuRunnable,
    output: str,
    workload: Workload,
    ceilings: CardCeilings,
    *,
    seconds: float,
    repeats: int | None,
    layers: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> CardProfile:
    """Rounds of whole calls and of runs step by step, by turns, for so long or so often; five at least.

    A row's seconds are the median of its rounds. ``layers``: a row for every step, instead of one for the same step of
    all layers.
    """
    selected = runnable.outputs[output].shape[0] == "selected"
    selects = workload.selects() if selected else [None] * len(workload.batches)
    requests = list(zip(workload.batches, selects, strict=True))
    whole: list[float] = []
    steps: list[list[list[tuple[Signature, float]]]] = []
    ahead = True
    least, end = _WARM_UPS + (repeats or _LEAST_ROUNDS), 0.0
    while len(steps) < least or (repeats is None and clock() < end):
        begin = time.perf_counter()
        for batch, select in requests:
            runnable.run(output, batch, select)
        whole.append(time.perf_counter() - begin)
        traces = [runnable.trace(output, batch, select) for batch, select in requests]
        steps.append([made for _, made, _ in traces])
        ahead = all(one for _, _, one in traces) and (ahead or len(steps) <= _WARM_UPS)
        if len(steps) == _WARM_UPS:  # kernels are compiled and graphs captured
            end = clock() + seconds
    chunks = [chunks_of(batch, batch.tokens, select)[0] for batch, select in requests]
    stored = _STORED[str(runnable.stored)]
    rows = []
    for number, (signature, _) in enumerate(steps[0][0]):
        parts = []
        for place, chunk in enumerate(chunks):
            taken = statistics.median(round_[place][number][1] for round_ in steps[_WARM_UPS:])
            parts.append(_row(signature, chunk, taken, stored, ceilings))
        rows.append(replace(_added(parts), count=1, shape=(sum(part.shape[0] for part in parts), *parts[0].shape[1:])))
    return CardProfile(
        artifact,
        output,
        workload,
        ceilings,
        Quartiles.of(whole[_WARM_UPS:]),
        tuple(rows if layers else _grouped(rows)),
        tuple(runnable.report()),
        ahead,
    )


def _row(signature: Signature, chunk: Chunk, seconds: float, stored: str, ceilings: CardCeilings) -> CardRow:
    shape, dtype, operations, moved = work_of_step(signature, chunk, stored)
    if operations and dtype not in ceilings.ops_per_second:
        raise InputError(
            f"the ceilings of {ceilings.card} have no product of {dtype}; measure them again: encast doctor --measure "
            "--device cuda"
        )
    return CardRow(
        signature.name,
        signature.op,
        signature.maker,
        shape,
        dtype,
        1,
        seconds,
        operations,
        moved,
        operations / ceilings.ops_per_second[dtype] if operations else 0.0,
        moved / ceilings.bytes_per_second,
    )


_STORED = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16"}
_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i32": 4, "u16": 2, "q8": 1, "s8": 1, "f8": 1, "int8": 1}


def work_of_step(signature: Signature, chunk: Chunk, stored: str) -> tuple[tuple[int, ...], str, int, int]:
    """Shape, dtype, operations of products, and bytes of a step on a batch; see ``CardRow``.

    ``stored``: the dtype of floating values. Of a table the rows that are looked up count.
    """
    op = signature.op.removesuffix("_narrow")
    out = signature.results[0]
    rows, columns = chunk.rows(str(out.shape[0])), int(out.shape[1]) if len(out.shape) > 1 else 1
    shape: tuple[int, ...] = (rows, columns)
    dtype, operations = _value_dtype(out.dtype, stored), 0
    if op.startswith("linear"):
        weight = signature.operands[1]
        assert weight is not None
        inputs = int(weight.shape[1])
        shape, operations = (rows, columns, inputs), 2 * rows * columns * inputs
        dtype = _product_dtype(_PRODUCTS.get(op, stored), stored)
    elif op.endswith("attention"):
        tables = sum(signature.operands[place] is not None for place in (1, 2) if place < len(signature.operands))
        products = 4 + (2 * tables if op == "disentangled_attention" else 0)
        operations = products * columns * chunk.pairs(signature.attrs.get("reach", 0))
        dtype = _product_dtype("bf16" if signature.attrs["products"] == "bf16" else stored, stored)
    moved = sum(_bytes(result, chunk, stored) for result in signature.results)
    for place, operand in enumerate(signature.operands):
        if operand is None:
            continue
        if place not in signature.fixed:
            moved += _bytes(operand, chunk, stored)
        elif op.startswith("embed") and len(operand.shape) == 2:
            moved += chunk.tokens * int(operand.shape[1]) * _BYTES[stored]
        else:
            size = _BYTES[dtype] if op.startswith("linear") and place == 1 else _BYTES[operand.dtype]
            moved += size * _count(operand)
    return shape, dtype, operations, moved


def _product_dtype(dtype: str, stored: str) -> str:
    """bf16 products are those of the values where these have 16 bits."""
    return stored if dtype == "bf16" and stored != "f32" else dtype


def _value_dtype(dtype: str, stored: str) -> str:
    return stored if dtype == "f32" else dtype


def _bytes(value: ValueType, chunk: Chunk, stored: str) -> int:
    rows = chunk.rows(str(value.shape[0]))
    return rows * (int(value.shape[1]) if len(value.shape) > 1 else 1) * _BYTES[_value_dtype(value.dtype, stored)]


def _count(constant: ValueType) -> int:
    count = 1
    for size in constant.shape:
        count *= int(size)
    return count


def _added(rows: Sequence[CardRow]) -> CardRow:
    """The first of them, with the times and the work of all."""
    return replace(
        rows[0],
        count=sum(row.count for row in rows),
        seconds=sum(row.seconds for row in rows),
        operations=sum(row.operations for row in rows),
        bytes=sum(row.bytes for row in rows),
        arithmetic=sum(row.arithmetic for row in rows),
        memory=sum(row.memory for row in rows),
    )


def _grouped(rows: Sequence[CardRow]) -> list[CardRow]:
    """The same step of all layers as one row: the same module but for numbers in its path, and the same work."""
    groups: dict[tuple[object, ...], list[CardRow]] = {}
    for row in rows:
        groups.setdefault((LAYER.sub("*", row.name), row.op, row.maker, row.shape, row.dtype), []).append(row)
    return [
        replace(_added(members), name=str(key[0])) if len(members) > 1 else members[0]
        for key, members in groups.items()
    ]
