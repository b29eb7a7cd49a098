"""The real MiniLM on the STS-B dev sentences: what bf16 and int8 cost, against bounds that users were promised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from compiled import minilm_folder

import encast
from encast.data.datasets import open_dataset
from encast.metrics.correlation import spearman
from encast.metrics.vectors import cosines

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.fixture(scope="module")
def sts() -> tuple[list[str], list[str], list[float]]:
    path = DATA / "glue" / "STS-B" / "dev.tsv.gz"
    if not path.exists():
        pytest.skip(f"the STS-B dev set is not at {path}")
    rows = open_dataset(path).rows
    return [row.text[0] for row in rows], [row.text[1] for row in rows], [float(row.gold) for row in rows]


@pytest.fixture(scope="module")
def embedded(
    sts: tuple[list[str], list[str], list[float]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[np.ndarray, float]]:
    """By dtype the embeddings of all 3,000 sentences, and the Spearman correlation of the pairs' cosines."""
    left, right, scores = sts
    folder = tmp_path_factory.mktemp("minilm")
    answers = {}
    for dtype in ("f32", "bf16", "int8"):
        with encast.load(encast.compile(minilm_folder(), folder / f"{dtype}.encast", dtype=dtype)) as engine:
            rows = engine.embed(left + right)
        answers[dtype] = rows, spearman(cosines(rows[: len(left)], rows[len(left) :]), scores)
    return answers


def test_f32_is_the_known_model(embedded: dict[str, tuple[np.ndarray, float]]) -> None:
    # sentence-transformers publishes 0.82 on the test split; the dev split is somewhat easier.
    assert 0.85 < embedded["f32"][1] < 0.88


def test_bf16(embedded: dict[str, tuple[np.ndarray, float]]) -> None:
    assert cosines(embedded["f32"][0], embedded["bf16"][0]).mean() >= 0.9999


def test_int8(embedded: dict[str, tuple[np.ndarray, float]]) -> None:
    close = cosines(embedded["f32"][0], embedded["int8"][0])
    assert close.mean() >= 0.995
    assert close.min() >= 0.98
    assert abs(embedded["int8"][1] - embedded["f32"][1]) * 100 <= 0.15
