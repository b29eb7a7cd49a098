"""BGE-M3 against torch: dense, sparse and token embeddings, by the formulas of FlagEmbedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="compares with transformers, which needs torch")
transformers = pytest.importorskip("transformers", reason="compares with transformers")

from m3_checkpoints import make_m3_checkpoint  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

import encast  # noqa: E402

TEXTS = ["the cat sat on the mat the cat", "a", "", "b c <mask> d \u4e2d", "the of and to in " * 20]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[Any]]:
    """The folder, its heads, and for every text the ids and the last hidden state in float64."""
    folder = tmp_path_factory.mktemp("m3") / "bge-m3"
    heads = make_m3_checkpoint(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(40)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    read = []
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        with torch.no_grad():
            read.append((ids, model(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()))
    return folder, heads, read


def test_dense(made: Any, tmp_path: Path) -> None:
    folder, _, read = made
    with encast.load(encast.compile(folder, tmp_path / "m.encast", dtype="f32", exact=True), threads=1) as engine:
        assert engine.task == "embed"
        for (_, states), found in zip(read, engine.embed(TEXTS), strict=True):
            np.testing.assert_allclose(found, states[0] / np.linalg.norm(states[0]), atol=2e-5)


def test_sparse(made: Any, tmp_path: Path) -> None:
    folder, heads, read = made
    path = encast.compile(folder, tmp_path / "m.encast", dtype="f32", exact=True, task="embed_sparse")
    with encast.load(path, threads=1) as engine:
        assert engine.session.unweighted == (0, 1, 2, 3)
        counts = []
        for (ids, states), found in zip(read, engine.embed_sparse(TEXTS), strict=True):
            weights = np.maximum(states @ heads["sparse"]["weight"].T + heads["sparse"]["bias"], 0)[:, 0]
            wanted: dict[int, float] = {}
            for token, weight in zip(ids, weights, strict=True):
                if token > 3 and weight > wanted.get(token, 0):
                    wanted[token] = weight
            assert found.indices.tolist() == sorted(wanted)
            np.testing.assert_allclose(found.values, [wanted[token] for token in sorted(wanted)], atol=2e-5)
            counts.append(len(wanted))
        assert counts[0] > 2
        (most,) = engine.embed_sparse(TEXTS[:1], max_active_dims=2)
        (every,) = engine.embed_sparse(TEXTS[:1])
        assert sorted(most.values) == sorted(every.values)[-2:]


def test_all_three_in_one_run(made: Any, tmp_path: Path) -> None:
    folder, heads, read = made
    path = encast.compile(folder, tmp_path / "m.encast", dtype="f32", exact=True, task="embed_m3")
    with encast.load(path, threads=1) as engine:
        for (ids, states), found in zip(read, engine.embed_m3(TEXTS), strict=True):
            np.testing.assert_allclose(found.embedding, states[0] / np.linalg.norm(states[0]), atol=2e-5)
            weights = np.maximum(states @ heads["sparse"]["weight"].T + heads["sparse"]["bias"], 0)[:, 0]
            wanted = {token: 0.0 for token in ids if token > 3}
            for token, weight in zip(ids, weights, strict=True):
                if token > 3:
                    wanted[token] = max(wanted[token], weight)
            heavy = sorted(token for token, weight in wanted.items() if weight > 0)
            assert found.sparse.indices.tolist() == heavy
            np.testing.assert_allclose(found.sparse.values, [wanted[token] for token in heavy], atol=2e-5)
            assert found.tokens.token_ids.tolist() == ids[1:]
            vectors = states[1:] @ heads["colbert"]["weight"].T + heads["colbert"]["bias"]
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            np.testing.assert_allclose(found.tokens.vectors, vectors / lengths, atol=2e-5)


def test_tokens(made: Any, tmp_path: Path) -> None:
    folder, heads, read = made
    path = encast.compile(folder, tmp_path / "m.encast", dtype="f32", exact=True, task="embed_tokens")
    with encast.load(path, threads=1) as engine:
        for kind in ("query", "document"):
            for (ids, states), found in zip(read, engine.embed_tokens(TEXTS, kind=kind), strict=True):
                vectors = states[1:] @ heads["colbert"]["weight"].T + heads["colbert"]["bias"]
                assert found.token_ids.tolist() == ids[1:]
                lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
                np.testing.assert_allclose(found.vectors, vectors / lengths, atol=2e-5)
