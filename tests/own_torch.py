"""Compiled models beside a model of torch that a test has written, where transformers has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bounds import allowed_difference, largest_excess
from cases import CASES, open_case
from checkpoints import inputs_of

from encast import artifact, compile
from encast.archs import build_graph
from encast.backends.cpu import CpuRunnable
from encast.backends.reference import Reference
from encast.batch import Batch
from encast.importers import open_checkpoint
from encast.passes import optimise
from encast.quant import QuantSpec

__all__ = ["check_compiled", "check_golden", "padded_rows"]

TIGHT = 1e-11
FAST_ELEMENTARY = 16 * 2.0**-24
Array = np.ndarray[Any, Any]
Answers = Callable[[Path, str, list[list[int]], Any], Array]
"""Of a checkpoint, its head, texts and a dtype of torch: the rows of all texts, one text after another."""


def padded_rows(model: Any, head: str, texts: list[list[int]], dtype: Any) -> Array:
    """Of all texts in one batch, padded and masked, their rows one after another."""
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    mask = torch.tensor([[True] * len(text) + [False] * (longest - len(text)) for text in texts])
    with torch.no_grad():
        rows: Array = model.eval().to(dtype)(ids, mask).numpy()
    if head == "classify":
        return rows
    return np.concatenate([row[: len(text)] for row, text in zip(rows, texts, strict=True)])


def check_golden(name: str, answers: Answers, tmp_path_factory: Any) -> None:
    """That the golden file of a case is what the model of torch answers."""
    opened, inputs = open_case(name, tmp_path_factory), inputs_of(CASES[name])
    wanted = answers(opened.folder, opened.case.head, inputs.token_ids, torch.float64)
    wanted = opened.kept(wanted[inputs.select] if opened.case.head == "fill_mask" else wanted)
    assert np.abs(opened.golden("f64") - wanted).max() <= TIGHT * np.abs(wanted).max()


def check_compiled(folder: Path, head: str, dtype: str, longest: int, answers: Answers, work: Path) -> None:
    """From one token to ``longest``. f32 within its bound; others no further than the dtype itself goes and what the
    engine may add to that (``tests/engine/test_exactness.py``), which says nothing of the architecture.
    """
    rng = np.random.default_rng(5)
    texts = [rng.integers(6, 200, length).tolist() for length in (1, longest, 17, 2)]
    batch, output = Batch.of(texts), "logits" if head == "classify" else "last_hidden_state"
    wanted = answers(folder, head, texts, torch.float64)
    made = artifact.open(compile(folder, work / "made.encast", dtype=dtype, strict=True))
    got = CpuRunnable(made, threads=2).run(output, batch)
    plain = build_graph(open_checkpoint(folder))
    off = float(np.sqrt(((got - wanted) ** 2).mean() / (wanted**2).mean()))
    print(f"{head}, {dtype}: {off:.1e} relatively, {np.abs(got - wanted).max():.1e} at most")
    if dtype == "f32":
        exact, allowed = allowed_difference(plain, output, batch, elementary=FAST_ELEMENTARY)
        assert np.abs(exact - wanted).max() <= TIGHT * np.abs(wanted).max()
        assert largest_excess(got, wanted, allowed) <= 1.0
        return
    graph, _ = optimise(plain, QuantSpec(dtype))
    same = Reference(graph).evaluate(output, batch)
    limit = 1.7 * float(np.sqrt(((same - wanted) ** 2).mean() / (wanted**2).mean()))
    assert off <= limit + 1e-6
