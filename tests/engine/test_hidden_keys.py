"""Masks at the end of a sequence that no token sees: what is hidden, whatever ids a caller sends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from late_checkpoints import make_late_checkpoint

import encast
from encast.backends.reference import EVALUATORS, Context
from encast.batch import Batch
from encast.importers import open_checkpoint

MASK = 4
SEQUENCES = [
    [2, 9, 8, 3, *[MASK] * 9],
    [2, 3, *[MASK] * 30],  # more than a query has: only the last nine are hidden
    [MASK] * 5,  # the first token is always seen
    [2, MASK, 9, MASK, 3],  # none is at the end
    [7],
    [2, 9, MASK],
]


def test_the_definition() -> None:
    lengths = [len(one) for one in SEQUENCES]
    context = Context(np.cumsum([0, *lengths]).astype(np.int32))
    ids = np.concatenate(SEQUENCES).astype(np.int32)
    seen = EVALUATORS["seen_tokens"](context, ids, token=MASK, most=9)
    assert seen.tolist() == [4, 23, 1, 5, 1, 2]
    assert seen.dtype == np.int32
    scores = np.zeros((2, sum(length**2 for length in lengths)))
    hidden = EVALUATORS["hide_keys"](context, scores, seen)
    for (_, pairs, length), count in zip(context.sequences(), seen, strict=True):
        rows = hidden[:, pairs].reshape(2, length, length)
        assert np.isneginf(rows[:, :, count:]).all()
        assert (rows[:, :, :count] == 0).all()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize(("arch", "config"), [("bert", {}), ("modernbert", {"local_attention": 18}), ("mpnet", {})])
def test_the_engine_hides_what_the_reference_hides(
    arch: str, config: dict[str, int], dtype: str, tmp_path: Path
) -> None:
    folder = make_late_checkpoint(tmp_path / arch, arch, config=config)
    form = open_checkpoint(folder).token_form
    assert form is not None
    mask = form.expansion
    sequences = [[mask if token == MASK else token + 3 for token in one] for one in SEQUENCES]
    batch = Batch.of(sequences)
    path = encast.compile(folder, tmp_path / "model.encast", dtype=dtype)
    # A reference that hides nothing: the same checkpoint with masks that are seen.
    seen = make_late_checkpoint(tmp_path / "seen", arch, attend=True, config=config)
    other = encast.compile(seen, tmp_path / "seen.encast", dtype=dtype)
    found = []
    for artifact, device in ((path, "cpu"), (path, "reference"), (other, "reference")):
        with encast.load(artifact, device=device) as engine:
            found.append(engine.runnable.run("token_embedding", batch))
    cpu, reference, unhidden = found
    cosines = (cpu * reference).sum(axis=1)
    assert cosines.min() > (1 - 1e-5 if dtype == "f32" else 0.97)
    ends = batch.cu_seqlens[1:-1]
    differ = [not np.allclose(a, b, atol=1e-3) for a, b in zip(*(np.split(x, ends) for x in found[1:]), strict=True)]
    del differ[2]  # of equal tokens every mean is the same, where positions are in the keys alone
    assert differ == [True, True, False, False, True]
    assert unhidden.shape == reference.shape


def test_a_plan_says_what_it_hides(tmp_path: Path) -> None:
    folder = make_late_checkpoint(tmp_path / "late")
    with encast.load(encast.compile(folder, tmp_path / "model.encast"), threads=1) as engine:
        steps = [line for line in engine.runnable.plan.splitlines() if line.startswith("step attention")]  # type: ignore[attr-defined]
    assert len(steps) == 2
    assert all(f"unseen={MASK} most_unseen=9" in step for step in steps)
