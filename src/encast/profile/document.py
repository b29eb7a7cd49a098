"""The profile as a JSON document, and a run as a Chrome trace. ``docs/howto/profile.md`` describes both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from encast.ceilings import to_json as ceilings_to_json
from encast.profile.ablate import Ablated
from encast.profile.measure import Quartiles, Traced
from encast.profile.report import Profile, Row

__all__ = ["FORMAT", "chrome_trace", "quartiles_document", "to_document"]

FORMAT = 1


def to_document(profile: Profile, ablations: Sequence[Ablated] | None = None) -> dict[str, Any]:
    """Plain JSON; all times in seconds, summed over the threads and divided by their number. ``ablations``: None
    when they were not asked for."""
    return {
        "format": FORMAT,
        "artifact": profile.artifact,
        "output": profile.output,
        "workload": {
            "what": profile.workload.what,
            "batches": len(profile.workload.batches),
            "sequences": profile.workload.seqs,
            "tokens": profile.workload.tokens,
        },
        "threads": profile.threads,
        "forward": quartiles_document(profile.measured.forward),
        "tokens_per_second": profile.tokens_per_second,
        "limit": {
            "seconds": profile.limit.seconds,
            "arithmetic_seconds": profile.limit.arithmetic,
            "weights_seconds": profile.limit.weights,
            "weights_level": profile.limit.level,
            "holds": profile.limit.holds,
            "fraction": profile.fraction,
        },
        "total_seconds": profile.total,
        "waiting_seconds": profile.waiting,
        "outside_seconds": profile.outside,
        "busy_share": profile.busy,
        "trace_cost": profile.measured.trace_cost,
        "steps": [_row(row) for row in profile.rows],
        "ceilings": ceilings_to_json(profile.ceilings),
        "warnings": list(profile.warnings),
        "ablations": None if ablations is None else [_ablated(one) for one in ablations],
    }


def _ablated(one: Ablated) -> dict[str, Any]:
    return {
        "without": one.name,
        "what": one.what,
        "time_ratio": None if one.ratio is None else quartiles_document(one.ratio),
        "answers_difference": one.difference,
        "answers_bound": one.bound,
        "note": one.note,
    }


def quartiles_document(quartiles: Quartiles) -> dict[str, Any]:
    """Seconds, or whatever the sample holds, and how many runs it has."""
    return {
        "lower_quartile": quartiles.low,
        "median": quartiles.median,
        "upper_quartile": quartiles.high,
        "runs": quartiles.count,
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "kind": row.kind,
        "kernel": row.kernel,
        "shape": list(row.shape),
        "dtype": row.dtype,
        "plan_steps": list(row.steps),
        "seconds": row.seconds,
        "waiting_seconds": row.waiting,
        "share": row.share,
        "head_rows": row.head_rows,
        "rate": row.rate,
        "unit": row.unit,
        "product_operations": row.work.products,
        "element_operations": row.work.elements,
        "bytes": {"weights": row.work.weight_bytes, "tables": row.work.table_bytes, **row.work.value_bytes},
        "bound": {
            "seconds": row.bound.seconds,
            "arithmetic_seconds": row.bound.arithmetic,
            "memory_seconds": dict(row.bound.memory),
        },
        "fraction": row.fraction,
        "holds": row.holds,
    }


def chrome_trace(profile: Profile) -> dict[str, Any]:
    """One run from the middle of the measured ones, in the Trace Event Format: a track a thread, a slice a step.

    chrome://tracing and Perfetto open it. Times are microseconds from the first call; gaps are waiting.
    """
    rows = {step: row for row in profile.rows for step in row.steps}
    names = {step: profile.step_names[step] for step in rows}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": f"encast {profile.artifact}"}},
        *(
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": thread, "args": {"name": f"thread {thread}"}}
            for thread in range(profile.threads)
        ),
    ]
    sample: list[Traced] = profile.measured.sample
    for number, traced in enumerate(sample):
        offset = traced.called - sample[0].called
        for thread, step, chunk, first_row, count, begin, end, heads, dense in traced.events.tolist():
            row = rows[step]
            events.append(
                {
                    "ph": "X",
                    "name": names[step],
                    "cat": row.kind,
                    "pid": 1,
                    "tid": thread,
                    "ts": (offset + begin) / 1e3,
                    "dur": (end - begin) / 1e3,
                    "args": {
                        "kernel": row.kernel,
                        "dtype": row.dtype,
                        "shape": "x".join(map(str, row.shape)),
                        "step": step,
                        "batch": number,
                        "chunk": chunk,
                        "first_row": first_row,
                        "rows": count,
                        "head_task": bool(heads),
                        "dense_rows": dense,
                    },
                }
            )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"artifact": profile.artifact, "output": profile.output, "workload": profile.workload.what},
    }
