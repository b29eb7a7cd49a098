"""What a sweep is over: the fields in which jobs of one experiment differ although their rows have the same names."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from encast.bench.config import Job
from encast.bench.rows import flatten
from encast.bench.scenarios.base import Label

__all__ = ["columns", "swept"]


def swept(jobs: Sequence[Job], models: Sequence[str], workloads: Sequence[str]) -> list[Label]:
    """Of every job, such fields by their dotted names: ``launcher.allocator``, ``backend.NAME.graph``.

    ``models`` and ``workloads``: what rows of each job call its model, by its content, and its workload. What follows
    from all jobs of a command line is the same when it is resumed.
    """
    found = [dict(_sections(*names)) for names in zip(jobs, models, workloads, strict=True)]
    values: dict[tuple[str, str, str], set[str]] = {}
    for sections in found:
        for (section, name), fields in sections.items():
            for field, value in fields.items():
                values.setdefault((section, name, field), set()).add(_text(value))
    return [
        {
            f"{section}.{field}": value if _is_label(value) else _text(value)
            for (section, name), fields in sections.items()
            for field, value in fields.items()
            if len(values[section, name, field]) > 1
        }
        for sections in found
    ]


def columns(fields: Label, backends: Iterable[str], shown: Container[str]) -> Label:
    """Those of a job's ``fields`` that rows of the backends have beside the columns ``shown``, which say some of them
    already: ``length`` what ``workload.length`` is."""
    own = tuple(f"backend.{backend}." for backend in backends)
    return {
        name: value
        for name, value in fields.items()
        if (name.startswith(own) if name.startswith("backend.") else name.partition(".")[2] not in shown)
    }


def _sections(job: Job, model: str, workload: str) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    yield ("model", model), _fields(job.model)
    yield ("workload", workload), _fields(job.workload)
    yield ("scenario", str(job.scenario["name"])), _fields(job.scenario)
    yield ("launcher", job.launcher.name), _fields(asdict(job.launcher))
    for spec in job.backends:
        yield (f"backend.{spec.name}", spec.dtype), _fields({"peer": spec.peer, "python": spec.python, **spec.options})


def _fields(section: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in flatten(section).items() if field != "name"}


def _text(value: Any) -> str:
    return json.dumps(value, default=str)


def _is_label(value: Any) -> bool:
    return isinstance(value, str) or (type(value) in (int, float) and -math.inf < value < math.inf)
