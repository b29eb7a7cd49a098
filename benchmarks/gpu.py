"""Exactness and speed of the GPU backend: answers beside those of the CPU's kernels, then times of whole calls.

``benchmarks/gpu.sh`` calls it. Of every artifact and option it first compares the answers to texts of unlike lengths
with the CPU's, and counts texts whose bits depend on their neighbours; then it times whole calls, from token ids on the
host to f32 embeddings on the host. Toy models of other architectures are compared, not timed. Last, f16 and f8 run by
turns with PyTorch (``gpu_peers.py``). Rows for which no time is left, and those that fail, say so. Prints tables, and
writes ``gpu.json`` beside the models after every row.
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
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import encast
from encast import artifact
from encast.backends.cpu import CpuRunnable
from encast.batch import Batch
from encast.errors import EncastError, ResourceError, need_modules

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]
from checkpoints import make_checkpoint  # noqa: E402
from gpu_peers import NO_TIME, against_pytorch, ceilings, lines_of_peers  # noqa: E402

BASE = {"name": "bert-base", "layers": 12, "hidden": 768, "inner": 3072, "heads": 12}
LARGE = {"name": "bert-large", "layers": 24, "hidden": 1024, "inner": 4096, "heads": 16}
TOY = {"name": "toy", "layers": 2, "hidden": 64, "inner": 128, "heads": 2}
OTHERS = tuple({**TOY, "name": f"toy {arch}", "arch": arch} for arch in ("modernbert", "mpnet"))

VARIANTS = (
    ("f32", None),
    ("f32", "f16"),
    ("f32", "f8"),
    ("bf16", None),
    ("bf16", "bf16"),
    ("int8", None),
    ("int8", "f16"),
)
"""The dtype that an artifact is compiled to, and the option ``dtype``."""

FAR = {("f32", None): 1e-4, ("f32", "f16"): 0.02, ("f32", "f8"): 0.3, ("bf16", None): 0.03, ("bf16", "bf16"): 0.1,
       ("int8", None): 0.1, ("int8", "f16"): 0.1}  # fmt: skip
"""How far answers may be from those of the CPU's kernels for the same artifact, root mean squares. int8: its codes
depend on all before them, and the products inside attention are bf16 here. f8 has a bit of 16, and no CPU's kernels."""

SQUAD = (
    39, 56, 67, 78, 88, 95, 99, 101, 103, 106, 109, 111, 113, 115, 117, 118, 119, 121, 122, 124, 126, 128, 129, 131,
    133, 135, 137, 139, 141, 142, 145, 147, 149, 152, 154, 156, 158, 160, 162, 165, 167, 169, 172, 175, 178, 181, 185,
    187, 190, 195, 199, 203, 207, 212, 218, 225, 234, 243, 253, 265, 277, 299, 338, 440,
)  # fmt: skip
"""64 lengths, spread as those of the paragraphs of SQuAD 1.1's dev set in BERT's word pieces."""

SHAPES = {"1 x 128": (128,), "8 x 128": (128,) * 8, "64 x 128": (128,) * 64, "1 x 512": (512,), "64 of SQuAD": SQUAD}
TOY_SHAPES = {"1 x 8": (8,), "4 of 1 to 20": (1, 7, 20, 16)}
COMPARED = ((1, 7, 20, 16), (63, 64, 65, 130, 512), (512, 130, 1, 512))
"""Lengths of the texts of a batch: short ones, those about the sizes of the kernels' tiles, and more than a tile of a
product."""

STATES, EMBEDDING = "last_hidden_state", "embedding"
GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    """What is run: on a card, or small on the CPU. ``compared`` are models that are not timed."""

    kind: str
    compared: tuple[dict[str, Any], ...]
    models: tuple[dict[str, Any], ...]
    shapes: dict[str, tuple[int, ...]]
    vocab: int
    seconds: float
    kernels: tuple[str, ...]
    largest_product: int


CARD = Plan("cuda", OTHERS, (BASE, LARGE), SHAPES, 30522, 0.3, ("triton",), 8192)
DRY = Plan("torch-cpu", OTHERS, (TOY,), TOY_SHAPES, 500, 0.02, ("torch",), 64)


def check(plan: Plan, out: Path) -> list[str]:
    """What this machine is; raises ``EncastError`` where it lacks what the plan needs."""
    triton = ("triton",) if "triton" in plan.kernels else ()
    need_modules("cuda", "torch", *triton)
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
        encast.compile(checkpoint(plan, sizes, out / "checkpoints"), made, dtype=dtype)
    return made


def checkpoint(plan: Plan, sizes: dict[str, Any], folder: Path) -> Path:
    made = folder / sizes["name"].replace(" ", "-")
    if not made.exists():
        options = {key: value for key, value in sizes.items() if key not in ("name", "arch")}
        arch = sizes.get("arch", "bert")
        make_checkpoint(made, arch, "embed", vocab=plan.vocab, positions=520, pooling=("mean",), **options)
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
    """A row for each variant and kind of kernels, whatever happens to it."""
    for dtype, option in VARIANTS:
        wanted: list[Any] = []
        for kernels in plan.kernels:
            row: dict[str, Any] = {"model": sizes["name"], "artifact": dtype, "dtype": option or "as compiled"}
            row["kernels"] = kernels
            if time.monotonic() > deadline:
                row["left out"] = NO_TIME
            else:
                try:
                    opened = artifact.open(compiled(plan, sizes, dtype, out))
                    wanted = wanted or on_the_cpu(opened, plan)
                    fill(row, plan, sizes, opened, wanted, FAR[dtype, option], deadline)
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {error}"
            yield row


def on_the_cpu(opened: Any, plan: Plan) -> list[Any]:
    with closing(CpuRunnable(opened)) as cpu:
        return [cpu.run(STATES, batch_of(lengths, plan.vocab)) for lengths in COMPARED]


def fill(
    row: dict[str, Any], plan: Plan, sizes: dict[str, Any], opened: Any, wanted: list[Any], most: float, deadline: float
) -> None:
    """Puts into the row what is found, as it is found: what an exception ends is not lost."""
    from encast.backends.gpu.runnable import GpuRunnable

    dtype = None if row["dtype"] == "as compiled" else row["dtype"]
    try:
        gpu = GpuRunnable(opened.load_graph(), plan.kind, dtype=dtype, kernels=row["kernels"])
    except EncastError as error:
        row["left out"] = str(error)
        return
    with closing(gpu):
        row["report"] = gpu.report()
        far, moved, texts = 0.0, 0, 0
        for lengths, same in zip(COMPARED, wanted, strict=True):
            batch = batch_of(lengths, plan.vocab)
            got = gpu.run(STATES, batch)
            # A NaN is far too.
            far = float(np.fmax(far, np.nan_to_num(rms(got - same) / rms(same), nan=np.inf)))
            for begin, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
                alone = gpu.run(STATES, Batch.of([batch.token_ids[begin:end].tolist()]))
                moved += alone.tobytes() != got[begin:end].tobytes()
            texts += batch.seqs
        row |= {"far": far, "right": far <= most, "texts moved by neighbours": f"{moved} of {texts}"}
        for shape, lengths in ({} if sizes in plan.compared else plan.shapes).items():
            if time.monotonic() > deadline:
                row[shape] = None
                continue
            batch = batch_of(lengths, plan.vocab)
            taken = median_seconds(lambda batch=batch: gpu.run(EMBEDDING, batch), plan.seconds)
            row[shape] = {"milliseconds": 1000 * taken, "tokens a second": batch.tokens / taken}
        row["report"] = gpu.report()  # again: now it is known which graphs could not be captured


def rms(x: Any) -> float:
    return float(np.sqrt(np.square(x, dtype=np.float64).mean()))


def right(row: dict[str, Any]) -> bool:
    return "failed" not in row and bool(row.get("right", True))


def lines_of(rows: list[dict[str, Any]], shapes: list[str]) -> Iterator[str]:
    yield f"| model | artifact | dtype | kernels | off by | moved | {' | '.join(shapes)} |"
    yield "|" + " --- |" * (6 + len(shapes))
    for row in rows:
        cells = [row["model"], row["artifact"], row["dtype"], row["kernels"]]
        if "far" in row:
            cells += [f"{row['far']:.1e}{'' if row['right'] else ' WRONG'}", row["texts moved by neighbours"]]
        else:
            cells += [row.get("left out", "FAILED"), ""]
        for shape in shapes:
            taken = row.get(shape, "")
            cells.append(f"{taken['tokens a second']:,.0f}" if taken else "" if taken == "" else "no time")
        yield f"| {' | '.join(cells)} |"
    for row in rows:
        if "failed" in row:
            yield f"\nFAILED: {row['model']} {row['artifact']} {row['dtype']} {row['kernels']}: {row['failed']}"


def write(path: Path, content: dict[str, Any]) -> None:
    """All of it or nothing: it is written again after every row."""
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    beside.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="all of it at toy size on the CPU")
    parser.add_argument("--out", type=Path, help="where models and gpu.json go (default: a temporary folder)")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which nothing more is begun (default: 9)")
    parser.add_argument("--dollars", type=float, help="what the card costs an hour, for dollars per million texts")
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
        found: dict[str, Any] = {"machine": machine, "ceilings": ceilings(plan.kind, plan.largest_product)}
        rows: list[dict[str, Any]] = found.setdefault("rows", [])
        peers: list[dict[str, Any]] = found.setdefault("peers", [])

        def note(one: dict[str, Any], of: list[dict[str, Any]]) -> None:
            of.append(one)
            said = "failed" if "failed" in one else "done"
            print(
                f"{one['model']} {one.get('artifact', one.get('shape'))} {one.get('dtype', '')} {said}", file=sys.stderr
            )
            if arguments.out:
                write(out / "gpu.json", found)

        try:
            for sizes in (*plan.compared, *plan.models):
                for row in rows_of(plan, sizes, out, deadline):
                    note(row, rows)
            for sizes in plan.models:
                if time.monotonic() > deadline:
                    note({"model": sizes["name"], "shape": "all", "times": {}, "left out": {"all": NO_TIME}}, peers)
                    continue
                opened = artifact.open(compiled(plan, sizes, "f32", out))
                batches = {name: batch_of(lengths, plan.vocab) for name, lengths in plan.shapes.items()}
                model = checkpoint(plan, sizes, out / "checkpoints")
                for row in against_pytorch(plan.kind, sizes, model, opened, batches, plan.seconds, deadline):
                    note(row, peers)
        finally:
            print("\nTokens a second of whole calls, from ids to embeddings on the host\n")
            print(*lines_of(rows, list(plan.shapes)), sep="\n")
            print("\nBy turns with PyTorch, median of rounds [least, most]\n")
            print(*lines_of_peers(peers, found["ceilings"], arguments.dollars), sep="\n")
    return 0 if all(map(right, (*rows, *peers))) else 1


if __name__ == "__main__":
    sys.exit(main())
