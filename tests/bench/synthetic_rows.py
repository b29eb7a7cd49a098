"""Rows as ``encast bench`` writes them, from a seed: figures that look like measurements and are none."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Made-up speeds relative to the first, by family and dtype.
SPEEDS = {
    "pytorch": {"f32": 1.0, "bf16": 2.1, "int8": 3.1},
    "pytorch-onednn": {"f32": 1.1},
    "torchscript": {"f32": 1.05, "bf16": 2.2, "int8": 3.2},
    "torch-compile": {"f32": 1.3, "bf16": 2.9, "int8": 3.3},
    "sentence-transformers": {"f32": 0.95, "bf16": 1.9},
    "onnxruntime": {"f32": 1.35, "int8": 3.4},
    "onnxruntime-plain": {"f32": 1.2},
    "onnxruntime-static": {"int8": 3.0},
    "openvino": {"f32": 1.4, "bf16": 3.2, "int8": 5.6},
    "tensorflow": {"f32": 0.8, "bf16": 1.2},
    "tensorflow-xla": {"f32": 0.85, "bf16": 1.1},
    "jax": {"f32": 0.9, "bf16": 1.0},
    "ctranslate2": {"f32": 1.3, "int8": 3.05},
    "encast": {"f32": 1.5, "bf16": 3.6, "int8": 7.1},
}
LOSSES = {"f32": 3e-8, "bf16": 2e-5, "int8": 4e-3}
BOUNDS = {"f32": 0.999999, "bf16": 0.9995, "int8": 0.97}
BACKENDS = tuple(f"{family}-{dtype}" for family, dtypes in SPEEDS.items() for dtype in dtypes)
ROUNDS = 11


class Experiment:
    """Makes rows. ``speedup``: family to a factor on its speed, for an experiment that is to be compared."""

    def __init__(
        self,
        name: str,
        seed: int = 0,
        backends: Sequence[str] = BACKENDS,
        speedup: Mapping[str, float] | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.backends = name, tuple(backends)
        self.random = random.Random(seed)
        self.speedup, self.versions = dict(speedup or {}), dict(versions or {})

    def point(
        self,
        scenario: str,
        label: Mapping[str, int | float | str],
        *,
        model: str = "bert-base",
        noisy: float = 0.03,
        metrics: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """A row for every backend at one point. ``metrics`` are added to what each has."""
        found = []
        for backend in self.backends:
            family, dtype = backend.rsplit("-", 1)
            rate = self._rate(family, dtype, model, label)
            rounds = [rate * math.exp(self.random.gauss(0, 0.012)) for _ in range(ROUNDS)]
            found.append((backend, family, dtype, sorted(rounds)[ROUNDS // 2], rounds))
        rows = []
        for backend, family, dtype, rate, rounds in found:
            batch, instances = int(label.get("batch", 1)), int(label.get("instances", 1))
            p50 = 1e3 * batch * instances / rate
            row = self._row(backend, family, dtype, scenario, label, model)
            row["metrics"] = {
                "latency_ms": {
                    "mean": p50 * 1.01,
                    "p50": p50,
                    "p90": p50 * 1.05,
                    "p95": p50 * 1.08,
                    "p99": p50 * 1.2 if p50 < 60 else None,
                    "p99_9": None,
                },
                "latency_ms_interval": [p50 * 0.99, p50 * 1.012],
                "sequences_per_s": rate,
                "sequences_per_s_interval": [rate * 0.988, rate * 1.01],
                "tokens_per_s": rate * float(label.get("length", 128)),
                **(metrics or {}),
            }
            row["ratio_to"] = {
                other: {"ratio": rate / its, "low": rate / its * 0.985, "high": rate / its * 1.016}
                for other, _, _, its, _ in found
                if other != backend
            }
            loss = LOSSES[dtype] * math.exp(self.random.gauss(0, 0.4))
            row["agreement"] = {
                "cosine_mean": 1 - loss,
                "cosine_least": 1 - 9 * loss,
                "sequence_least": 1 - 2 * loss,
                "largest_difference": math.sqrt(loss),
                "bound": BOUNDS[dtype],
                "sequence_bound": 1 - 3 * (1 - BOUNDS[dtype]),
                "tokens": 2048,
            }
            row["samples"] = {"figure": rounds, "place": ["shared"] * ROUNDS}
            is_noisy = self.random.random() < noisy
            row["noise"] = {
                "steal": 0.031 if is_noisy else 0.002,
                "other_cpu": 0.004,
                "spread": 0.02,
                "placement": "near",
                "noisy": is_noisy,
                "why": ["the host took 3.1% of the processors' time"] if is_noisy else [],
            }
            rows.append(row)
        return rows

    def failed(self, backend: str, status: str, reason: str, scenario: str = "latency") -> dict[str, Any]:
        family, dtype = backend.rsplit("-", 1)
        row = self._row(
            backend, family, dtype, scenario, {"instances": 1, "threads": 2, "batch": 1, "length": 128}, "bert-base"
        )
        return {**row, "status": status, "reason": reason, "metrics": {}, "ratio_to": {}, "cold": None, "memory": None}

    def _rate(self, family: str, dtype: str, model: str, label: Mapping[str, Any]) -> float:
        """Sequences a second, of all instances: a fixed cost a call, a cost a token, and what threads lose."""
        length, batch = float(label.get("length", 128)), float(label.get("batch", 1))
        instances, threads = float(label.get("instances", 1)), float(label.get("threads", 2))
        speed = SPEEDS[family][dtype] * self.speedup.get(family, 1.0) * (4.0 if model != "bert-base" else 1.0)
        tokens = batch * length * (1 + length / 2000)
        one = 1.0 / (0.002 + tokens * 0.0021 / speed) * batch
        return one * threads**0.88 * instances**0.95

    def _row(
        self, backend: str, family: str, dtype: str, scenario: str, label: Mapping[str, Any], model: str
    ) -> dict[str, Any]:
        threads = int(label.get("threads", 2)) * int(label.get("instances", 1))
        return {
            "schema": 1,
            "key": f"{self.name} {backend} {scenario} {model} {sorted(label.items())}",
            "time": "2026-01-02T03:04:05+00:00",
            "experiment": self.name,
            "status": "ok",
            "reason": None,
            "backend": {
                "name": backend,
                "dtype": dtype,
                "version": self.versions.get(family, "1.2.3"),
                "facts": {"install": f"pip install 'encast[bench-{family}]'", "threads": threads, "graph": "exported"},
            },
            "model": {"name": model, "sha": "0f" * 32, "hidden": 768, "layers": 12},
            "workload": {"name": "grid", "sequences": 4, "tokens": 512, "lengths": [128, 128, 128]},
            "scenario": scenario,
            "launcher": "one",
            "point": {"instances": 1, "threads": 2, **label},
            "metrics": {},
            "ratio_to": {},
            "agreement": None,
            "cold": {
                "export_s": 12.5 if family != "encast" else 1.4,
                "import_s": 1.9,
                "load_s": 2.4,
                "first_call_ms": 180.0,
            },
            "memory": {"peak_rss_bytes": 812_000_000, "pss_bytes": 640_000_000},
            "fairness": {
                "threads_budget": threads,
                "threads_ran": threads * 0.97,
                "cpu_per_wall": 1.94,
                "ok": True,
                "notes": [],
            },
            "noise": None,
            "limit": {"bound": "arithmetic", "fraction": 0.5},
            "cost": None,
            "samples": {},
            "machine": {
                "processor": "Imagined Processor 9000",
                "cores": 2,
                "threads_per_core": 1,
                "virtual": True,
                "fingerprint": "feedc0de",
            },
        }


def everything(seed: int = 0, **options: Any) -> Iterator[dict[str, Any]]:
    """Every scenario, and backends that could not run."""
    first = Experiment("out-of-the-box", seed, **options)
    for model in ("bert-base", "minilm"):
        yield from first.point("latency", {"batch": 1, "length": 128}, model=model)
    yield first.failed(
        "mxnet-f32", "unavailable", "not installed: the last wheel is for Python 3.8; pip install mxnet==1.9.1"
    )
    yield first.failed("tvm-f32", "timed_out", "no answer within 600 s of opening; its build was still tuning")
    yield first.failed("deepsparse-int8", "crashed", "ended by signal 4 (illegal instruction) in its first call")
    unfair = first.failed("cheat-f32", "unfair", "ran 8 threads on a budget of 2")
    unfair["fairness"] = {
        "threads_budget": 2,
        "threads_ran": 8,
        "cpu_per_wall": 1.99,
        "ok": False,
        "notes": ["ran 8 threads on a budget of 2"],
    }
    yield unfair
    grid = Experiment("grid", seed + 1, **options)
    for batch in (1, 8, 32):
        for length in (8, 16, 32, 64, 128, 256, 512):
            yield from grid.point("latency", {"batch": batch, "length": length})
    scaling = Experiment("scaling", seed + 2, **options)
    for threads in (1, 2):
        yield from scaling.point("core_scaling", {"batch": 1, "length": 128, "instances": 1, "threads": threads})
    for instances in (1, 2):
        yield from scaling.point("instance_scaling", {"batch": 1, "length": 128, "instances": instances, "threads": 1})
    for instances in (1, 2):
        label = {"batch": 8, "length": 128, "instances": instances, "threads": 2 // instances}
        yield from scaling.point("batch_scaling", label)
    production = Experiment("production", seed + 3, **options)
    for length in range(16, 129, 16):
        for instances in (1, 2):
            for batch in (1, 2, 4, 8):
                label = {"batch": batch, "length": length, "instances": instances, "threads": 2 // instances}
                for row in production.point("slo_throughput", label):
                    p99 = row["metrics"]["latency_ms"]["p50"] * 1.2
                    met = p99 < 60
                    row["metrics"]["slo"] = {"limit_ms": 60, "percentile": "p99", "latency_ms": p99, "met": met}
                    row["metrics"]["sequences_per_s_within_slo"] = row["metrics"]["sequences_per_s"] if met else None
                    yield row
    stream = Experiment("stream", seed + 4, **options)
    for load in (0.3, 0.5, 0.8):
        extra = {"wait_ms": {"mean": 3.2, "p50": 1.0}, "utilisation": load, "offered_per_s": 40 * load}
        yield from stream.point(
            "open_loop", {"batch": 1, "length": 32, "arrivals": "poisson", "load": load}, metrics=extra
        )
    for row in stream.point("cold_start", {"batch": 1, "length": 128}):
        row["metrics"] = {
            "cold_start_s": {"import": 1.9, "load": 2.2, "first_call": 0.2, "total": 4.3},
            "cold_start_s_interval": [4.1, 4.6],
            "starts": 5,
        }
        yield row


def write(folder: Path, rows: Sequence[Mapping[str, Any]], settings: str = "backend: [encast-int8]\n") -> Path:
    """An experiment's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(settings)
    return folder
