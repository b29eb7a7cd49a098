"""Whether time grows linearly with tokens: encast int8 on 512 to 65,536 packed tokens, in sequences of 128, by turns.

    python benchmarks/linearity.py --model bert-base
    python benchmarks/linearity.py --model all-minilm-l6-v2 --rounds 15

Each size is a process of its own, and in a round each is asked for as many tokens as the others, small batches in many
calls, so that a host with other guests disturbs all alike in the long run. The line goes through the origin, its slope
is the median over sizes of a round's time a token; "off the line" is taken within each round. Medians of rounds with
95 % intervals. Where the processors are is not looked at: a round takes longer than they stay.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np

from encast.bench.cache import default_cache
from encast.bench.config import load_jobs
from encast.bench.models import make_model
from encast.bench.system import System
from encast.bench.worker import prepare
from encast.launch import Placement
from encast.measure.statistics import FEWEST_ROUNDS, median_interval
from encast.measure.workloads import make_workload

LENGTH = 128
SIZES = (4, 8, 16, 32, 64, 128, 256, 512)
"""Sequences of a call."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-base", help="as of encast bench (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help=f"at least {FEWEST_ROUNDS} (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=default_cache(), help="of converted models (%(default)s)")
    args = parser.parse_args()
    if args.rounds < FEWEST_ROUNDS:
        parser.error(f"--rounds is {args.rounds}; an interval needs {FEWEST_ROUNDS}")
    (job,) = load_jobs([f"model={args.model}", "backend=encast-int8", f"workload.length={LENGTH}"])
    (backend,) = job.backends
    model = make_model(job.model, args.cache)
    reason, _ = prepare(backend, model, args.threads, args.cache)
    if reason is not None:
        raise SystemExit(f"{backend.name}: {reason}")
    workload = make_workload(job.workload, model.checkpoint)
    whole = Placement(tuple(sorted(os.sched_getaffinity(0))), None, args.threads)
    systems = {size: System(backend, model, [whole], cache=args.cache) for size in SIZES}
    calls = {size: max(SIZES) // size for size in SIZES}
    per_token: list[list[float]] = []  # microseconds, by round and size
    try:
        for size, system in systems.items():
            system.open()
            system.bind(workload.draw(1, batch=size))
            system.burst(calls=2)
        for number in range(args.rounds):
            taken = {}
            for size in SIZES if number % 2 == 0 else SIZES[::-1]:
                (times,) = systems[size].burst(calls=calls[size])
                taken[size] = sum(times) / 1e3 / (len(times) * size * LENGTH)
            per_token.append([taken[size] for size in SIZES])
    finally:
        for system in systems.values():
            system.close()
    measured = np.asarray(per_token)
    off = 100 * (measured / np.median(measured, axis=1, keepdims=True) - 1)
    print(f"{args.model} int8, {args.rounds} rounds of {max(SIZES) * LENGTH:,} tokens a size")
    for index, size in enumerate(SIZES):
        interval = median_interval(off[:, index])
        assert interval is not None
        print(
            f"{size * LENGTH:7,} tokens: {np.median(measured[:, index]):8.2f} us a token, "
            f"{np.median(off[:, index]):+5.1f} % [{interval[0]:+.1f}, {interval[1]:+.1f}] off the line",
            flush=True,
        )


if __name__ == "__main__":
    main()
