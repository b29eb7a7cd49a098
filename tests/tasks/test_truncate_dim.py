"""The first numbers of embeddings, for models that were trained for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import make_checkpoint

import encast
from encast.cli.main import main
from encast.errors import InputError
from encast.tasks.embed import normalized

TEXTS = ["a b c", "c", "b a b"]


@pytest.fixture(scope="module", params=[True, False], ids=["normalises", "does-not"])
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    base = tmp_path_factory.mktemp("embedder")
    folder = make_checkpoint(
        base / "bert", "bert", "embed", layers=1, hidden=32, heads=2, pooling=("mean",), normalize=request.param
    )
    return encast.compile(folder, base / "model.encast", dtype="int8"), request.param


def test_the_first_numbers_are_of_length_one_where_all_are(artifact: tuple[Path, bool]) -> None:
    path, normalises = artifact
    with encast.load(path, threads=1) as engine:
        whole = engine.embed(TEXTS)
        short = engine.embed(TEXTS, truncate_dim=5)
        assert short.shape == (3, 5)
        assert short.dtype == np.float32
        lengths = np.linalg.norm(short.astype(np.float64), axis=1)
        if normalises:
            np.testing.assert_allclose(lengths, 1, atol=1e-6)
            scale = np.linalg.norm(whole[:, :5].astype(np.float64), axis=1, keepdims=True)
            np.testing.assert_allclose(short, whole[:, :5] / scale, rtol=1e-6)
        else:
            assert np.abs(lengths - 1).min() > 1e-3
            np.testing.assert_array_equal(short, whole[:, :5])
        np.testing.assert_array_equal(engine.embed(TEXTS, truncate_dim=32), whole)


@pytest.mark.parametrize("wrong", [0, -1, 33, 2.5, True, "8"])
def test_what_cannot_be_kept_is_refused(artifact: tuple[Path, bool], wrong: object) -> None:
    with (
        encast.load(artifact[0], threads=1) as engine,
        pytest.raises(InputError, match=r"truncate_dim is .*32 numbers a text"),
    ):
        engine.embed(TEXTS, truncate_dim=wrong)  # type: ignore[arg-type]


def test_the_command_line_keeps_them(artifact: tuple[Path, bool], tmp_path: Path) -> None:
    texts, out = tmp_path / "texts.txt", tmp_path / "out.jsonl"
    texts.write_text("\n".join(TEXTS) + "\n")
    assert main(["run", str(artifact[0]), str(texts), "-o", str(out), "--truncate-dim", "5"]) == 0
    rows = [json.loads(line)["embedding"] for line in out.read_text().splitlines()]
    with encast.load(artifact[0], threads=1) as engine:
        np.testing.assert_array_equal(np.array(rows, np.float32), engine.embed(TEXTS, truncate_dim=5))


def test_rows_of_length_one_and_of_zeros_stay() -> None:
    rows = np.array([[0.6, 0.8], [0, 0], [3, 4]], np.float32)
    np.testing.assert_array_equal(normalized(rows), np.array([[0.6, 0.8], [0, 0], [0.6, 0.8]], np.float32))
    assert rows[2, 0] == 3
