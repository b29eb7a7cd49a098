"""How encast's time grows with the tokens of a batch, and with engines beside each other.

    python benchmarks/scaling.py --models minilm bert-base
    python benchmarks/scaling.py --instances

First table: packed batches of 512 to 65,536 tokens, sequences of 128, int8; the sizes take turns. The line is
proportional, through the median time per token; a size's deviation is how far its own lies above it. (Sequences of one
length keep attention's square the same share of every size.) Second table: texts of 8x128 answered by one caller of a
1-thread engine, and by two callers of two such instances, by turns.
"""

from __future__ import annotations

import argparse
import functools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from peers import prepare
from peers.models import MODELS, Model, inputs
from peers.placement import placement
from peers.rounds import spread

LENGTH = 128
TOKENS = tuple(512 << power for power in range(8))
BAR_ABOVE_LINE = 0.05
BAR_INSTANCES = 1.9
INSTANCE_SHAPE = (8, 128)


def packed(tokens: int) -> tuple[Any, Any]:
    ids = inputs((tokens // LENGTH, LENGTH)).reshape(-1)
    return ids, np.arange(0, tokens + 1, LENGTH, dtype=np.int32)


def seconds_of(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_tokens(model: Model, args: argparse.Namespace) -> dict[str, Any]:
    import encast

    batches = {tokens: packed(tokens) for tokens in TOKENS}
    per_token: dict[int, list[float]] = {tokens: [] for tokens in TOKENS}
    places: list[str] = []
    with encast.load(prepare.encast_artifact(model, args.work, "int8"), threads=args.threads) as engine:
        for tokens in TOKENS[:5]:
            engine.forward_packed(*batches[tokens])
        begin = time.perf_counter()
        while len(places) < 3 or time.perf_counter() - begin < args.seconds:
            places.append(placement())
            for tokens, batch in batches.items():
                # Small batches are repeated, so that all sizes see the same moments.
                repeats = max(1, min(8, 8192 // tokens))
                times = [seconds_of(functools.partial(engine.forward_packed, *batch)) for _ in range(repeats)]
                per_token[tokens].append(float(np.median(times)) / tokens)
    medians = {tokens: float(np.median(times)) for tokens, times in per_token.items()}
    line = float(np.median(list(medians.values())))
    print(f"\n{model.name} int8, {args.threads} threads, {len(places)} rounds, caches {', '.join(sorted(set(places)))}")
    print("| tokens | microseconds a token | above the line | bar |\n| --- | --- | --- | --- |")
    for tokens, median in medians.items():
        above = median / line - 1
        bar = ""
        if tokens in (TOKENS[0], TOKENS[-1]):
            bar = f"{BAR_ABOVE_LINE:.0%} {'met' if above <= BAR_ABOVE_LINE else 'missed'}"
        print(
            f"| {tokens} | {spread([t * 1e6 for t in per_token[tokens]]).text(3)} | {above:+.1%} | {bar} |", flush=True
        )
    return {"model": model.name, "seconds_per_token": per_token, "line": line, "places": places}


def calls_in(engine: Any, batch: Any, seconds: float, counts: list[int], index: int) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        engine.forward_packed(*batch)
        counts[index] += 1


def throughput(engine: Any, batch: Any, callers: int, seconds: float) -> float:
    """Calls a second of ``callers`` threads together."""
    counts = [0] * callers
    team = [threading.Thread(target=calls_in, args=(engine, batch, seconds, counts, index)) for index in range(callers)]
    start = time.perf_counter()
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    elapsed = time.perf_counter() - start
    return sum(counts) / elapsed


def measure_instances(model: Model, args: argparse.Namespace) -> dict[str, Any]:
    import encast

    batch = packed(INSTANCE_SHAPE[0] * INSTANCE_SHAPE[1])
    rates: dict[int, list[float]] = {1: [], 2: []}
    places: list[str] = []
    with encast.load(prepare.encast_artifact(model, args.work, "int8"), threads=1, instances=2) as engine:
        throughput(engine, batch, 2, 0.3)
        begin = time.perf_counter()
        while len(places) < 3 or time.perf_counter() - begin < args.seconds:
            places.append(placement())
            for callers in rates if len(places) % 2 else reversed(rates):
                rates[callers].append(throughput(engine, batch, callers, 0.7))
    gain = spread([two / one for one, two in zip(rates[1], rates[2], strict=True)])
    met = "met" if gain.median >= BAR_INSTANCES else "missed"
    print(
        f"\n{model.name} int8 8x128, 1-thread instances, {len(places)} rounds, caches {', '.join(sorted(set(places)))}"
    )
    print("| one, calls/s | two, calls/s | gain | bar |\n| --- | --- | --- | --- |")
    print(f"| {spread(rates[1]).text(2)} | {spread(rates[2]).text(2)} | {gain.text(3)} | {BAR_INSTANCES} {met} |")
    return {"model": model.name, "calls_per_second": rates, "places": places}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=[])
    parser.add_argument("--instances", action="store_true", help="measure two 1-thread instances of MiniLM")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a table (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    prepare.add_options(parser)
    args = parser.parse_args()
    if not args.models and not args.instances:
        args.models, args.instances = ["minilm", "bert-base"], True
    if args.prepare:
        for name in {*args.models, *(["minilm"] if args.instances else [])}:
            prepare.encast_artifact(MODELS[name], args.work, "int8")
        return
    found = [measure_tokens(MODELS[name], args) for name in args.models]
    if args.instances:
        found.append(measure_instances(MODELS["minilm"], args))
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
