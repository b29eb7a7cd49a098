"""Exactness and speed of the GPU backend: answers beside those of the CPU's kernels, then tokens a second.

``benchmarks/gpu.sh`` calls it. Of every artifact and option it first compares the answers to texts of unlike lengths
with the CPU's, and counts texts whose bits depend on their neighbours; then it times whole calls, from token ids on the
host to f32 rows on the host. Rows for which no time is left say so. Prints a table, and writes ``gpu.json`` beside the
models.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import encast
from encast import artifact
from encast.backends.cpu import CpuRunnable
from encast.batch import Batch
from encast.bench.models import make_model
from encast.errors import EncastError, ResourceError

BASE = {"name": "bert-base", "layers": 12, "hidden": 768, "inner": 3072, "heads": 12}
LARGE = {"name": "bert-large", "layers": 24, "hidden": 1024, "inner": 4096, "heads": 16}
TOY = {"name": "toy", "layers": 2, "hidden": 64, "inner": 128, "heads": 2}

VARIANTS = (("f32", None), ("f32", "f16"), ("bf16", None), ("bf16", "bf16"), ("int8", None), ("int8", "f16"))
"""The dtype that an artifact is compiled to, and the option ``dtype``."""

FAR = {("f32", None): 1e-4, ("f32", "f16"): 0.02, ("bf16", None): 0.03, ("bf16", "bf16"): 0.1, ("int8", None): 0.1,
       ("int8", "f16"): 0.1}  # fmt: skip
"""How far answers may be from those of the CPU's kernels for the same artifact, root mean squares. int8: its codes
depend on all before them, and the products inside attention are bf16 here."""

SHAPES = {"1 x 32": (32,), "8 x 128": (128,) * 8, "64 x 128": (128,) * 64, "64 of 8 to 512": tuple(range(8, 513, 8))}
TOY_SHAPES = {"1 x 8": (8,), "4 of 1 to 20": (1, 7, 20, 16)}
GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    """What is run: on a card, or small on the CPU."""

    kind: str
    models: tuple[dict[str, Any], ...]
    shapes: dict[str, tuple[int, ...]]
    vocab: int
    seconds: float
    kernels: tuple[str, ...]


CARD = Plan("cuda", (BASE, LARGE), SHAPES, 30522, 1.0, ("triton", "torch"))
DRY = Plan("torch-cpu", (TOY,), TOY_SHAPES, 500, 0.02, ("torch",))


def check(plan: Plan, out: Path) -> list[str]:
    """What this machine is; raises ``EncastError`` where it lacks what the plan needs."""
    if absent := [name for name in ("torch", *plan.kernels) if find_spec(name) is None]:
        raise ResourceError(f"not installed: {', '.join(absent)}; pip install 'encast[cuda]'")
    from encast.backends.gpu.device import choose_device

    device = choose_device(plan.kind, None)
    if plan.kind == "torch-cpu":
        return ["the CPU, at toy size: no figure here means anything"]
    import torch

    free, total = torch.cuda.mem_get_info(device)
    if free < 8 * GIB:
        raise ResourceError(f"the card has {free / GIB:.1f} GiB free of {total / GIB:.1f}; 8 are needed")
    if (disk := shutil.disk_usage(out).free) < 8 * GIB:
        raise ResourceError(f"{out} has {disk / GIB:.1f} GiB free; the models need 8, so give another --out")
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return [
        f"{torch.cuda.get_device_name(device)}, compute capability {capability}, {total / GIB:.0f} GiB",
        f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}",
    ]


def batch_of(lengths: tuple[int, ...], vocab: int) -> Batch:
    rng = np.random.default_rng(0)
    return Batch.of([rng.integers(0, vocab, length).tolist() for length in lengths])


def compiled(plan: Plan, sizes: dict[str, Any], dtype: str, out: Path) -> Path:
    made = out / f"{sizes['name']}-{dtype}.encast"
    if not made.exists():
        config = {"kind": "random", "arch": "bert", "vocab": plan.vocab, "positions": 512, "seed": 0, **sizes}
        encast.compile(make_model(config, out / "checkpoints").checkpoint, made, dtype=dtype)
    return made


def median_seconds(run: Any, seconds: float) -> float:
    """Of at least three calls, after two that compile kernels and fill caches."""
    run()
    run()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def rows_of(plan: Plan, sizes: dict[str, Any], out: Path, deadline: float) -> Iterator[dict[str, Any]]:
    from encast.backends.gpu.runnable import GpuRunnable

    mixed = batch_of(TOY_SHAPES["4 of 1 to 20"], plan.vocab)
    states = "last_hidden_state"
    for dtype, option in VARIANTS:
        row: dict[str, Any] = {"model": sizes["name"], "artifact": dtype, "dtype": option or "as compiled"}
        if time.monotonic() > deadline:
            yield {**row, "left out": "no time was left"}
            continue
        opened = artifact.open(compiled(plan, sizes, dtype, out))
        cpu = CpuRunnable(opened)
        wanted = cpu.run(states, mixed)
        cpu.close()
        for kernels in plan.kernels:
            try:
                gpu = GpuRunnable(opened.load_graph(), plan.kind, dtype=option, kernels=kernels)
            except EncastError as error:
                yield {**row, "kernels": kernels, "left out": str(error)}
                continue
            got = gpu.run(states, mixed)
            far = float(np.sqrt(((got - wanted) ** 2).mean() / (wanted**2).mean()))
            alone = [
                gpu.run(states, Batch.of([mixed.token_ids[begin:end].tolist()]))
                for begin, end in zip(mixed.cu_seqlens[:-1], mixed.cu_seqlens[1:], strict=True)
            ]
            moved = sum(
                one.tobytes() != rows.tobytes()
                for one, rows in zip(alone, np.split(got, mixed.cu_seqlens[1:-1]), strict=True)
            )
            made = {
                **row, "kernels": kernels, "report": gpu.report(), "far": far, "right": far <= FAR[dtype, option],
                "texts moved by neighbours": f"{moved} of {mixed.seqs}",
            }  # fmt: skip
            for shape, lengths in plan.shapes.items():
                if time.monotonic() > deadline:
                    break
                batch = batch_of(lengths, plan.vocab)
                taken = median_seconds(lambda batch=batch, gpu=gpu: gpu.run(states, batch), plan.seconds)
                made[shape] = {"milliseconds": 1000 * taken, "tokens a second": batch.tokens / taken}
            gpu.close()
            yield made


def lines_of(rows: list[dict[str, Any]], shapes: list[str]) -> Iterator[str]:
    yield f"| model | artifact | dtype | kernels | off by | moved | {' | '.join(shapes)} |"
    yield "|" + " --- |" * (6 + len(shapes))
    for row in rows:
        cells = [row["model"], row["artifact"], row["dtype"], row.get("kernels", "")]
        if "left out" in row:
            yield f"| {' | '.join([*cells, row['left out'], ''])} |" + " |" * len(shapes)
            continue
        cells += [f"{row['far']:.1e}{'' if row['right'] else ' WRONG'}", row["texts moved by neighbours"]]
        for shape in shapes:
            cells.append(f"{row[shape]['tokens a second']:,.0f}" if shape in row else "no time")
        yield f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="all of it at toy size on the CPU")
    parser.add_argument("--out", type=Path, help="where models and gpu.json go (default: a temporary folder)")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which nothing more is begun (default: 9)")
    arguments = parser.parse_args()
    plan = DRY if arguments.dry_run else CARD
    deadline = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="encast-gpu-") as temporary:
        out = arguments.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        try:
            machine = check(plan, out)
        except EncastError as error:
            print(f"gpu: {error}", file=sys.stderr)
            return 2
        print(*machine, sep="\n", flush=True)
        rows: list[dict[str, Any]] = []
        for sizes in plan.models:
            for row in rows_of(plan, sizes, out, deadline):
                rows.append(row)
                print(f"{row['model']} {row['artifact']} {row['dtype']} {row.get('kernels', '')} done", file=sys.stderr)
        print("\nTokens a second of whole calls, from ids to rows on the host\n")
        print(*lines_of(rows, list(plan.shapes)), sep="\n")
        if arguments.out:
            (out / "gpu.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    return 0 if all(row.get("right", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
