"""How long a compiled BERT-base takes to open, and how much memory a batch of 65,536 packed tokens needs.

    python benchmarks/opening_and_memory.py

Weights are random and made with NumPy alone; neither time nor memory depends on them. Opening is everything from
encast.load to an engine that can answer, checksums of all tensors verified, page cache warm; the interpreter has
imported encast before, as a server has. Memory is what the process's peak resident set grows by during the call,
outputs not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def peak_kb() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])


def measure(artifact: str, tokens: int) -> dict[str, float]:
    import encast

    with encast.load(artifact) as engine:  # warms the page cache and every lazy import
        engine.forward([[1, 2, 3]])
    times = []
    for _ in range(15):
        start = time.perf_counter()
        with encast.load(artifact) as engine:
            times.append((time.perf_counter() - start) * 1e3)
    with encast.load(artifact) as engine:
        ids = np.random.default_rng(0).integers(0, engine.meta.vocab, tokens).astype(np.int32)
        cu_seqlens = np.arange(0, tokens + 1, 128, dtype=np.int32)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
        before = peak_kb()
        output = engine.forward_packed(ids, cu_seqlens)
        grown = (peak_kb() - before) / 1024 - output.nbytes / 2**20
    return {"open_ms": statistics.median(times), "open_worst_ms": max(times), "memory_mib": grown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.tokens)))
        return
    import encast
    from encast.bench.config import load_jobs
    from encast.bench.models import make_model

    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (job,) = load_jobs(["model=bert-base"])
        model = make_model(job.model, folder)
        for dtype in ("f32", "bf16", "int8"):
            path = encast.compile(model.checkpoint, folder / f"{dtype}.encast", dtype=dtype)
            size = sum(file.stat().st_size for file in path.iterdir()) / 2**20
            command = [sys.executable, __file__, "--measure", str(path), "--tokens", str(args.tokens)]
            answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rows.append({"dtype": dtype, "artifact_mib": size, **answer})
            if not args.json:
                print(
                    f"BERT-base {dtype:5} {size:6.0f} MiB  opens in {answer['open_ms']:6.1f} ms "
                    f"(worst of 15: {answer['open_worst_ms']:.1f})  {args.tokens} tokens: "
                    f"{answer['memory_mib']:6.1f} MiB beyond the weights and outputs",
                    flush=True,
                )
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
