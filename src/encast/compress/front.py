"""What artifacts cost and what they are worth, measured side by side: the Pareto front of a run."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import encast.engine as engines
from encast.batch import Batch
from encast.budget.race import race, ratio
from encast.budget.sample import Recorder, Sample
from encast.data.datasets import Dataset
from encast.engine import Engine
from encast.errors import ResourceError
from encast.measure.price import usd_per_million
from encast.measure.statistics import percentile
from encast.scoring import score

__all__ = ["Entry", "Judged", "judge", "measure_front"]

_RACE_TOKENS = 2048
_TEXTS = 50
_ROUNDS = 4

_PEAK = r"""
import re, sys
import numpy as np
import encast
path, file, output, threads = sys.argv[1:]
with np.load(file) as data, encast.load(path, threads=int(threads)) as engine:
    types = data["types"] if "types" in data else None
    engine.runnable.run(output, encast.Batch(data["ids"], data["cu_seqlens"], types))
print(int(re.search("VmHWM:\s+([0-9]+) kB", open("/proc/self/status").read())[1]) * 1024)
"""


@dataclass(frozen=True)
class Judged:
    """An artifact with its metrics on the dev set, in points of 100, and texts of it to be timed with."""

    name: str
    artifact: Path
    metrics: Mapping[str, float]
    sample: Sample


@dataclass(frozen=True)
class Entry:
    """A row of the front.

    ``drop``: the share of the reference's metric that is lost; None where that is not above 0. ``speed``: rows a second
    over those of the reference, the median over interleaved rounds. ``rows_per_second``: in one batch of about 2,048
    tokens. ``p99_ms``: of single rows, one after the other. ``bytes``: of the artifact's files; ``peak_bytes``: the
    largest resident size of a process that loads it and runs the batch. ``best``: no other is at least as good in all
    of metric, throughput, p99 and peak, and better in one.
    """

    name: str
    metric: float
    drop: float | None
    speed: float
    rows_per_second: float
    p99_ms: float
    bytes: int
    peak_bytes: int
    usd_per_million: float | None
    best: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(name: str, artifact: Path, data: Dataset, threads: int) -> Judged:
    """Answers the dev set with an artifact."""
    with engines.load(artifact, threads=threads) as engine:
        recorder = Recorder(engine.runnable)
        found = score(Engine(engine.session, recorder), data)
        return Judged(name, artifact, found.metrics, recorder.sample(_RACE_TOKENS))


def measure_front(
    judged: Sequence[Judged], metric: str, threads: int, usd_per_hour: float | None, work: Path
) -> list[Entry]:
    """Measures all on the texts of the first, which is the reference. Raises ``ResourceError``."""
    reference, sample = judged[0], judged[0].sample
    seconds = race([one.artifact for one in judged], sample, threads)
    p99s = _p99s([one.artifact for one in judged], sample, threads)
    entries = []
    for one, times, p99 in zip(judged, seconds, p99s, strict=True):
        rate = sample.batch.seqs / float(np.median(times))
        entries.append(
            Entry(
                one.name,
                metric=one.metrics[metric],
                drop=drop_of(one.metrics[metric], reference.metrics[metric]),
                speed=ratio(seconds[0], times),
                rows_per_second=rate,
                p99_ms=1e3 * p99,
                bytes=sum(file.stat().st_size for file in one.artifact.iterdir()),
                peak_bytes=_peak(one.artifact, sample, threads, work),
                usd_per_million=None if usd_per_hour is None else usd_per_million(usd_per_hour, rate),
            )
        )
    return [Entry(**{**asdict(one), "best": not any(_beats(other, one) for other in entries)}) for one in entries]


def drop_of(value: float, reference: float) -> float | None:
    """The share of a reference that is lost; None where the reference is not above 0."""
    return 1.0 - value / reference if reference > 0 else None


def _beats(a: Entry, b: Entry) -> bool:
    """Whether ``a`` is nowhere worse than ``b``, and better somewhere."""
    pairs = [(a.metric, b.metric), (a.speed, b.speed), (-a.p99_ms, -b.p99_ms), (-a.peak_bytes, -b.peak_bytes)]
    return all(x >= y for x, y in pairs) and any(x > y for x, y in pairs)


def _p99s(artifacts: Sequence[Path], sample: Sample, threads: int) -> list[float]:
    """Seconds that 99 of 100 single rows take at most, of each artifact; the artifacts take turns."""
    texts = _singles(sample)[:_TEXTS]
    times: list[list[float]] = [[] for _ in artifacts]
    with ExitStack() as opened:
        systems = [opened.enter_context(engines.load(path, threads=threads)) for path in artifacts]
        for round_ in range(_ROUNDS + 1):
            for own, engine in zip(times, systems, strict=True):
                for batch in texts:
                    began = time.perf_counter()
                    engine.runnable.run(sample.output, batch)
                    if round_:
                        own.append(time.perf_counter() - began)
    return [percentile(own, 99.0) or max(own) for own in times]


def _singles(sample: Sample) -> list[Batch]:
    batch = sample.batch
    parts = []
    for begin, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        types = None if batch.token_type_ids is None else batch.token_type_ids[begin:end]
        parts.append(Batch(batch.token_ids[begin:end], np.array([0, end - begin], np.int32), types))
    return parts


def _peak(artifact: Path, sample: Sample, threads: int, work: Path) -> int:
    """In a process of its own, as its VmHWM: ru_maxrss is inherited from this one, which holds torch and models."""
    file = work / "sample.npz"
    batch = sample.batch
    arrays: dict[str, Any] = {"ids": batch.token_ids, "cu_seqlens": batch.cu_seqlens}
    if batch.token_type_ids is not None:
        arrays["types"] = batch.token_type_ids
    np.savez(file, **arrays)
    command = [sys.executable, "-c", _PEAK, str(artifact.resolve()), str(file.resolve()), sample.output, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=work)
    if done.returncode:
        raise ResourceError(f"{artifact} does not run in a process of its own: {done.stderr.strip()[-300:]}")
    return int(done.stdout)
