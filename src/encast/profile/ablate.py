"""What each optimisation is worth: the same workload without it, by turns with the normal one.

Every row is run for real: plans lowered without the optimisation, the same checkpoint compiled with another dtype, or
the same sequences padded.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import encast.artifact as artifacts
from encast.artifact import Artifact
from encast.backends.cpu import CpuRunnable
from encast.compile import compile
from encast.errors import EncastError
from encast.lower import ABLATIONS, Target
from encast.profile.measure import Quartiles, Runner, settle
from encast.profile.workload import Workload, padded

__all__ = ["ANSWER_BOUNDS", "Ablated", "ablate", "checkpoint_of", "difference"]

_Float32 = np.ndarray[Any, np.dtype[np.float32]]

ANSWER_BOUNDS = {"f32": 1e-4, "bf16": 0.05, "int8": 0.25}
"""How far answers may move, as a part of their norm, when arithmetic changes in an artifact of a dtype: what is left
after a change of one rounding has gone through all of the roundings that follow."""

_SAME_BITS = {"qkv_fusion", "norm_fusion", "head_tasks", "row_blocks"}

_GROUP_SECONDS = 0.004
_LEAST_ROUNDS = 7


@dataclass(frozen=True)
class Ablated:
    """``ratio``: time without the optimisation by the time with it, a pair of neighbouring groups of runs each.

    ``difference``: of the answers, as a part of their norm; 0 for the same bits, None where they are not those of
    the model. ``bound``: the most that it may be. ``note``: why there is no ratio, or what the row leaves open.
    """

    name: str
    what: str
    ratio: Quartiles | None = None
    difference: float | None = None
    bound: float = 0.0
    note: str = ""

    @property
    def wrong(self) -> bool:
        return self.difference is not None and not self.difference <= self.bound


def difference(answers: Sequence[_Float32], expected: Sequence[_Float32]) -> float:
    """The norm of all differences over the norm of what was expected; exactly 0 for the same bits only."""
    if all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in zip(answers, expected, strict=True)):
        return 0.0
    moved = sum(float(np.sum((a.astype(np.float64) - b) ** 2)) for a, b in zip(answers, expected, strict=True))
    size = sum(float(np.sum(b.astype(np.float64) ** 2)) for b in expected)
    # Zeros may differ in their sign, which is a difference of bits all the same.
    return max(math.sqrt(moved / size) if size else math.inf, sys.float_info.min)


def ablate(
    opened: Artifact,
    base: Runner,
    *,
    selected: bool,
    checkpoint: Path | None,
    seconds: float,
    rounds: int | None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Ablated]:
    """A row an optimisation, as soon as it is measured.

    ``base`` runs the artifact as it is. ``selected``: its output has rows of selected tokens. ``checkpoint``: what the
    artifact was compiled from, instead of the place that its card names. ``seconds`` or ``rounds`` for each row; at
    least seven rounds without. ``say`` hears what is run next.
    """
    expected = base.answers()
    dtype = opened.graph.meta.dtype
    bound = ANSWER_BOUNDS[dtype]

    def against(other: Runner) -> Quartiles:
        return _ratio(base, other, seconds, rounds)

    here = Target.here()
    threads = base.runnable.threads
    for name, what in ABLATIONS.items():
        say(name)
        target = replace(here, without=frozenset((name,)))
        runnable = CpuRunnable(opened, threads=threads, target=target)
        with _closing(runnable):
            if _steps(runnable.plan) == _steps(getattr(base.runnable, "plan", "")) and name != "row_blocks":
                yield Ablated(name, what, note="not done here anyway, for the artifact, the machine or a knob")
                continue
            other = Runner(runnable, base.output, base.workload, selected=selected)
            moved = difference(other.answers(), expected)
            yield Ablated(name, what, against(other), moved, 0.0 if name in _SAME_BITS else bound)
    say("padding removal")
    yield _padding(base, selected, against)
    if dtype == "f32":
        return
    source, reason = checkpoint_of(opened.card, checkpoint)
    for other_dtype in ("bf16", "f32") if dtype == "int8" else ("f32",):
        name, what = f"{dtype}_over_{other_dtype}", f"the same model in {other_dtype}"
        if source is None:
            yield Ablated(name, what, note=reason)
            continue
        say(f"{what}, compiling")
        yield _other_dtype(source, opened, base, other_dtype, Ablated(name, what, bound=bound), selected, against)


def checkpoint_of(card: Any, given: Path | None) -> tuple[Path | None, str]:
    """The folder that an artifact was compiled from, if it is there and its files are still the same; else the reason
    why not, and what to do."""
    source = card.get("source")
    files = source.get("files") if isinstance(source, dict) else None
    if not isinstance(files, dict) or not files:
        return None, "needs the checkpoint that it was compiled from, whose files its card does not list"
    named = source.get("source")
    if given is None and not (isinstance(named, str) and named):
        return None, "needs the checkpoint that it was compiled from, which its card does not name; give --checkpoint"
    folder = given if given is not None else Path(named)
    if not folder.is_dir():
        return None, f"needs the checkpoint that it was compiled from, and {folder} is no folder; give --checkpoint"
    root = folder.resolve()
    for name, digest in files.items():
        path = (folder / str(name)).resolve()
        try:
            # The card may name anything: only files of the folder are opened, and hubs keep theirs behind links.
            inside = not Path(str(name)).is_absolute() and ".." not in Path(str(name)).parts
            found = _sha256(path) if inside and path.is_file() else None
        except OSError:
            found = None
        if found != digest:
            missing = "lacks" if found is None else "has another"
            return None, f"needs the checkpoint that it was compiled from: {root} {missing} {name}; give --checkpoint"
    return folder, ""


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _padding(base: Runner, selected: bool, against: Callable[[Runner], Quartiles]) -> Ablated:
    what = "every sequence is as long as the longest of its batch"
    longer: Workload = padded(base.workload)
    if longer.tokens == base.workload.tokens:
        return Ablated("padding_removal", what, note="all sequences of a batch are of one length here: nothing to pad")
    other = Runner(base.runnable, base.output, longer, selected=selected)
    more = longer.tokens / base.workload.tokens
    return Ablated(
        "padding_removal", what, against(other), note=f"{more:.2f} times the tokens, computed as any other, unmasked"
    )


def _other_dtype(
    source: Path,
    opened: Artifact,
    base: Runner,
    dtype: str,
    row: Ablated,
    selected: bool,
    against: Callable[[Runner], Quartiles],
) -> Ablated:
    with tempfile.TemporaryDirectory(prefix="encast-ablate-") as folder:
        try:
            path = compile(
                source,
                Path(folder) / "other.encast",
                dtype=dtype,
                task=opened.graph.meta.task,
                exact=opened.graph.meta.math == "exact",
            )
            runnable = CpuRunnable(artifacts.open(path), threads=base.runnable.threads)
        except EncastError as error:
            return replace(row, note=str(error))
        with _closing(runnable):
            other = Runner(runnable, base.output, base.workload, selected=selected)
            moved = difference(base.answers(), other.answers())
            return replace(row, ratio=against(other), difference=moved)


def _ratio(base: Runner, other: Runner, seconds: float, rounds: int | None) -> Quartiles:
    for runner in (base, other):
        settle(runner)
    group = max(1, min(50, round(_GROUP_SECONDS / max(base.seconds(), 1e-9))))
    ratios: list[float] = []
    end = time.monotonic() + seconds
    while len(ratios) < (rounds or _LEAST_ROUNDS) or (rounds is None and time.monotonic() < end):
        # Each after a run that does not count, which finds its threads asleep and the caches full of the other's.
        order = (base, other) if len(ratios) % 2 == 0 else (other, base)
        times = {id(runner): _group(runner, group) for runner in order}
        ratios.append(times[id(other)] / times[id(base)])
    return Quartiles.of(ratios)


def _group(runner: Runner, count: int) -> float:
    return statistics.median([runner.seconds() for _ in range(count + 1)][1:])


def _steps(plan: str) -> list[str]:
    """What distinguishes two plans: their steps, how these are cut into stages, and the limit ``exact``."""
    lines = plan.splitlines()
    limits = [word for word in lines[1].split() if word.startswith("exact=")]
    return [line for line in lines if line.startswith(("step ", "stage "))] + limits


@contextmanager
def _closing(runnable: CpuRunnable) -> Iterator[None]:
    try:
        yield
    finally:
        runnable.close()
