"""Writes docs/status.md: what runs, found out by running it.

    python docs/make_status.py

For every architecture and head a small random checkpoint (tests/checkpoints.py) is compiled strictly to each dtype
and run on every ISA level that this machine has, one process a level. A cell is "ok" when the answer agrees with the
float64 reference:

- f32 within the bound that tests/bounds.py derives from epsilon, the inner sizes and the norms;
- bf16 within that bound of the compiled graph, evaluated with exact rounding; a value that stands on the edge between
  two bf16, as near as f32 errs, may have been rounded to either (tests/edges.py);
- int8: the reference evaluates the compiled graph with exact rounding and exact sums. The root mean square of the
  engine's difference from that is at most 0.7 of what the dtype itself costs against the plain graph (an f32 value on
  the edge of two integers may fall to either side).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from bounds import allowed_difference, largest_excess  # noqa: E402
from checkpoints import Case, inputs_of, make_case  # noqa: E402
from edges import largest_unexplained  # noqa: E402
from late_checkpoints import make_late_checkpoint  # noqa: E402
from m3_checkpoints import make_m3_checkpoint  # noqa: E402

import encast  # noqa: E402
from encast import _core, artifact  # noqa: E402
from encast.archs import TASKS, build_graph, model_types  # noqa: E402
from encast.backends.cpu import CpuRunnable  # noqa: E402
from encast.backends.reference import Reference  # noqa: E402
from encast.batch import Batch  # noqa: E402
from encast.importers import open_checkpoint  # noqa: E402
from encast.ir.meta import HEADS  # noqa: E402
from encast.passes import optimise  # noqa: E402
from encast.quant import QuantSpec  # noqa: E402

DTYPES = ("f32", "bf16", "int8")
ELEMENTARY = 16 * 2.0**-24
"""What the polynomials of exp, erf and tanh may be off by; see core/simd/README.md."""

LEVELS = {name: missing for name, _, missing, *_ in _core.isa_levels()}
Array = np.ndarray[Any, Any]


@dataclass
class Cell:
    """One artifact, the answers that are expected of it, and what every level made of it."""

    arch: str
    head: str
    dtype: str
    levels: dict[str, str]

    @property
    def key(self) -> str:
        return f"{self.arch}-{self.head}-{self.dtype}"


def cells_of(arch: str, head: str, folder: Path) -> Iterator[Cell]:
    """Compiles the artifacts, writes the requests and the references beside them."""
    options: dict[str, Any] = {"layers": 2, "seed": 30}
    if head == "embed":
        options |= {"pooling": ("mean",), "normalize": True}
    case = Case(f"{arch}-{head}", arch, head, options)
    if head == "embed_tokens":
        # DeBERTa has no masks that no token sees, and local attention has to reach over them.
        more = {"config": {"local_attention": 24}} if arch == "modernbert" else {}
        checkpoint = make_late_checkpoint(folder / case.name, arch, attend=arch == "deberta-v2", **options, **more)
    elif head == "embed_m3":
        checkpoint = folder / case.name
        make_m3_checkpoint(checkpoint, arch, **options)
    else:
        checkpoint = make_case(folder, case)
    inputs = inputs_of(case)
    batch = Batch.of(inputs.token_ids, inputs.token_type_ids)
    select = np.array(inputs.select, np.int32) if head == "fill_mask" else None
    output = (HEADS[head] or ("last_hidden_state",))[0]
    request: dict[str, Any] = {"token_ids": batch.token_ids, "cu_seqlens": batch.cu_seqlens, "output": np.array(output)}
    if batch.token_type_ids is not None:
        request["token_type_ids"] = batch.token_type_ids
    if select is not None:
        request["select"] = select
    for dtype in DTYPES:
        cell = Cell(arch, head, dtype, {})
        try:
            plain = build_graph(open_checkpoint(checkpoint), head)
            graph, _ = optimise(plain, QuantSpec(dtype))
            encast.compile(checkpoint, folder / f"{cell.key}.encast", dtype=dtype, task=head, strict=True)
        except encast.EncastError as error:
            cell.levels = dict.fromkeys(here(), f"{type(error).__name__}: {error}")
        else:
            exact, allowed = allowed_difference(plain, output, batch, select, elementary=ELEMENTARY)
            value = graph.outputs[output]
            same = Reference(graph).values([value], batch, select)[value]
            np.savez(folder / f"{cell.key}.npz", exact=exact, allowed=allowed, same=same, **request)
        yield cell


def here() -> list[str]:
    """The ISA levels that this machine can run."""
    return [level for level, missing in LEVELS.items() if not missing]


def fault(path: Path, expected: Any) -> str:
    """What is wrong with the artifact's answer on the level of this process; empty when it is right."""
    dtype = path.stem.rpartition("-")[2]
    opened = artifact.open(path)
    types, select = (expected.get(name) for name in ("token_type_ids", "select"))
    batch = Batch(expected["token_ids"], expected["cu_seqlens"], types)
    output, exact, same = str(expected["output"]), expected["exact"], expected["same"]
    cpu = CpuRunnable(opened, threads=2)
    got = cpu.run(output, batch, select)
    answers = {output: got}
    if dtype == "bf16":
        answers["last_hidden_state"] = cpu.run("last_hidden_state", batch)
    cpu.close()
    if got.shape != exact.shape:
        return f"shape {got.shape}, {exact.shape} expected"
    if dtype == "f32":
        excess = largest_excess(got, exact, expected["allowed"])
        return "" if excess <= 1 else f"{excess:.3g} times the bound"
    if dtype == "bf16":
        excess = largest_unexplained(opened.load_graph(), answers, batch, select, elementary=ELEMENTARY)
        return "" if excess <= 1 else f"{excess:.3g} times the bound, however values on an edge are rounded"
    of_engine, of_dtype = (np.sqrt(np.mean(part**2)) for part in (got - same, same - exact))
    limit = 0.7 * of_dtype + 1e-6 * np.sqrt(np.mean(exact**2))
    return "" if of_engine <= limit else f"off by {of_engine:.3g}, {limit:.3g} allowed"


def work(folder: Path) -> None:
    """A process of one ISA level: runs every artifact, and prints what is wrong as JSON."""
    faults = {}
    for path in sorted(folder.glob("*.encast")):
        try:
            with np.load(folder / f"{path.stem}.npz") as expected:
                faults[path.stem] = fault(path, expected)
        except encast.EncastError as error:
            faults[path.stem] = f"{type(error).__name__}: {error}"
    print(json.dumps({"level": _core.isa_best(), "faults": faults}))


def run_level(level: str, folder: Path) -> dict[str, str]:
    environment = {**os.environ, "ENCAST_ISA": level}
    command = [sys.executable, __file__, "--worker", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{level} ended with {done.returncode}:\n{done.stderr}")
    answer = json.loads(done.stdout)
    assert answer["level"] == level, f"{answer['level']} ran for {level}"
    faults: dict[str, str] = answer["faults"]
    return faults


def document(cells: list[Cell]) -> Iterator[str]:
    misses = [(cell, level, why) for cell in cells for level, why in cell.levels.items() if why]
    yield "# Status"
    yield ""
    yield "Written by `python docs/make_status.py`; do not edit. Each cell is the outcome of compiling a small random"
    yield "checkpoint strictly and comparing its answers with the float64 reference; the script says how close they"
    yield "must be. A level runs the kernels of its own and, where it has none, those of the levels before it."
    yield ""
    yield f"The machine that ran it has {', '.join(here())}."
    yield "`.` means not run here: the machine lacks the level. The kernels of AMX are tested on every machine with a"
    yield "stand-in for the tile instructions (`core/testing/amx_stand_in.h`)."
    yield ""
    yield f"{sum(not why for cell in cells for why in cell.levels.values())} ok, {len(misses)} miss."
    for dtype in DTYPES:
        yield ""
        yield f"## {dtype}"
        yield ""
        yield f"| architecture | head | {' | '.join(LEVELS)} |"
        yield "| --- | --- |" + " --- |" * len(LEVELS)
        for cell in cells:
            if cell.dtype == dtype:
                marks = [
                    "." if level not in cell.levels else ("miss" if cell.levels[level] else "ok") for level in LEVELS
                ]
                yield f"| {cell.arch} | {cell.head} | {' | '.join(marks)} |"
    if misses:
        yield ""
        yield "## Misses"
        yield ""
        yield from (f"- {cell.arch}, {cell.head}, {cell.dtype}, {level}: {why}" for cell, level, why in misses)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cells = [cell for arch in model_types() for head in TASKS for cell in cells_of(arch, head, folder)]
        for level in here():
            faults = run_level(level, folder)
            for cell in cells:
                cell.levels.setdefault(level, faults.get(cell.key, "no answer"))
    (ROOT / "docs" / "status.md").write_text("\n".join(document(cells)) + "\n", encoding="utf-8")
    if any(why for cell in cells for why in cell.levels.values()):
        sys.exit("docs/status.md has misses")


if __name__ == "__main__":
    main()
