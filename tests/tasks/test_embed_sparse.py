"""Sparse embeddings: what SPLADE makes of the masked-LM's logits."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from checkpoints import ARCHS, make_checkpoint
from fake_engine import fake_engine

import encast
from encast.batch import Batch
from encast.cli.main import main
from encast.errors import InputError, UnsupportedModelError
from encast.tasks import SparseVector, drive
from encast.tasks.embed_sparse import embed_sparse, embed_sparse_ids

TEXTS = ["a b c", "", "c b a b the cat"]
LARGEST = np.array([3.0, 0.0, 0.0, 0.5, 3.0, 1e-9, 2.0, 0.0], np.float32)


def dense(vectors: list[SparseVector], size: int) -> np.ndarray:
    rows = np.zeros((len(vectors), size), np.float32)
    for row, vector in zip(rows, vectors, strict=True):
        assert (vector.indices.dtype, vector.values.dtype) == (np.int32, np.float32)
        assert (np.diff(vector.indices) > 0).all()
        assert (vector.values > 0).all()
        row[vector.indices] = vector.values
    return rows


def test_weights_are_logarithms_of_what_is_above_zero() -> None:
    engine = fake_engine("embed_sparse", lambda ids: LARGEST)
    (found,) = engine.embed_sparse(["cat"])
    assert found.indices.tolist() == [0, 3, 4, 5, 6]
    np.testing.assert_allclose(found.values, np.log1p([3.0, 0.5, 3.0, 1e-9, 2.0]), rtol=1e-7)
    assert engine.embed_sparse([]) == []


@pytest.mark.parametrize(
    ("most", "kept"), [(1, [0]), (2, [0, 4]), (3, [0, 4, 6]), (5, [0, 3, 4, 5, 6]), (10**9, [0, 3, 4, 5, 6])]
)
def test_the_largest_weights_stay_and_of_equals_the_first(most: int, kept: list[int]) -> None:
    engine = fake_engine("embed_sparse", lambda ids: LARGEST)
    (found,) = engine.embed_sparse(["cat"], max_active_dims=most)
    assert found.indices.tolist() == kept


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "8"])
def test_what_cannot_be_kept_is_refused(wrong: object) -> None:
    engine = fake_engine("embed_sparse", lambda ids: LARGEST)
    with pytest.raises(InputError, match="max_active_dims is"):
        engine.embed_sparse(["cat"], max_active_dims=wrong)  # type: ignore[arg-type]


def test_other_artifacts_and_logits_without_a_value_are_refused() -> None:
    with pytest.raises(InputError, match=r"compiled for 'embed'.*--task embed_sparse"):
        fake_engine("embed").embed_sparse(["cat"])
    with pytest.raises(InputError, match="not a finite number"):
        fake_engine("embed_sparse", lambda ids: np.full(8, np.nan)).embed_sparse(["cat"])


@pytest.mark.parametrize("batch_tokens", [64, 100, 127, 8192])
def test_a_run_is_bounded_by_rows(batch_tokens: int) -> None:
    engine = fake_engine("embed_sparse", lambda ids: LARGEST, batch_tokens=batch_tokens)
    engine.embed_sparse([""] * 70)
    drive(engine.session, engine.runnable, embed_sparse_ids(engine.session, [[2]] * 70))
    counts = [batch.seqs for batch in engine.runnable.batches]  # type: ignore[attr-defined]
    assert max(counts) <= 32
    assert (sum(counts), len(counts)) == (140, 2 * -(-70 // max(counts)))


def test_an_answer_is_bounded_by_its_weights() -> None:
    engine = fake_engine("embed_sparse", lambda ids: LARGEST)
    assert len(drive(engine.session, engine.runnable, embed_sparse(engine.session, ["cat"] * 3, most_weights=15))) == 3
    for steps in (
        embed_sparse(engine.session, ["cat"] * 3, most_weights=14),
        embed_sparse_ids(engine.session, [[2, 3]] * 3, most_weights=14),
    ):
        with pytest.raises(InputError, match=r"more than 14 weights together.*max_active_dims"):
            drive(engine.session, engine.runnable, steps)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["f32", "int8"])
def test_they_are_the_largest_logits_of_the_masked_lm(arch: str, dtype: str, tmp_path: Path) -> None:
    """Bit by bit: the same products, over all tokens instead of the masks."""
    folder = make_checkpoint(tmp_path / arch, arch, "fill_mask", layers=2, hidden=32, heads=2)
    masked = encast.compile(folder, tmp_path / "masked.encast", dtype=dtype)
    sparse = encast.compile(folder, tmp_path / "sparse.encast", dtype=dtype, task="embed_sparse")
    with encast.load(masked, threads=1) as lm, encast.load(sparse, threads=2, pin=False) as engine:
        ids = [encoding.ids for encoding in engine.session.tokenizer.encode(TEXTS)]
        batch = Batch.of(ids)
        logits = lm.runnable.run("logits", batch, np.arange(batch.tokens, dtype=np.int32))
        largest = np.stack([part.max(axis=0) for part in np.split(logits, batch.cu_seqlens[1:-1])])
        wanted = np.log1p(np.maximum(largest, 0).astype(np.float64)).astype(np.float32)
        np.testing.assert_array_equal(dense(engine.embed_sparse(TEXTS), engine.meta.vocab), wanted)
        of_ids = drive(engine.session, engine.runnable, embed_sparse_ids(engine.session, ids))
        np.testing.assert_array_equal(dense(of_ids, engine.meta.vocab), wanted)


def test_a_sparse_encoder_says_how(tmp_path: Path) -> None:
    """Activation, prompts and max_active_dims of its folder."""
    made = {}
    for name in ("relu", "log1p_relu"):
        folder = make_checkpoint(tmp_path / name, "bert", "embed_sparse", layers=1, hidden=32, heads=2, splade=name)
        settings = {"prompts": {"query": "the "}, "default_prompt_name": "query", "similarity_fn_name": "dot"}
        if name == "log1p_relu":
            settings |= {"max_active_dims": 9, "default_prompt_name": None}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
        with encast.load(encast.compile(folder, tmp_path / f"{name}.encast", dtype="f32"), threads=1) as engine:
            assert (engine.task, engine.max_length) == ("embed_sparse", 40)
            made[name] = [
                dense(engine.embed_sparse(["cat"], prompt_name=prompt, max_active_dims=most), engine.meta.vocab)
                for prompt, most in ((None, None), ("", None), ("query", 150))
            ]
    once, twice = made["relu"], made["log1p_relu"]
    np.testing.assert_array_equal(once[0], once[2])
    np.testing.assert_allclose(np.log1p(once[2]), twice[2], rtol=1e-6)
    assert [np.count_nonzero(rows) for rows in twice[:2]] == [9, 9]
    kept = twice[1] > 0
    np.testing.assert_allclose(np.log1p(once[1][kept]), twice[1][kept], rtol=1e-6)
    assert once[1][~kept].max() <= once[1][kept].min()


def test_more_weights_than_the_vocabulary_has_are_all(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "bert", "bert", "embed_sparse", layers=1, hidden=32, heads=2, splade="relu")
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"max_active_dims": 1 << 40}))
    with encast.load(encast.compile(folder, tmp_path / "model.encast"), threads=1) as engine:
        assert engine.session.max_active_dims == engine.meta.vocab
        assert len(engine.embed_sparse(["cat"])[0].indices) > 9


def test_a_sparse_encoder_gives_no_dense_embeddings(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "bert", "bert", "embed_sparse", layers=1, hidden=32, heads=2, splade="relu")
    with pytest.raises(UnsupportedModelError, match="sparse embeddings; ask for 'embed_sparse'"):
        encast.compile(folder, tmp_path / "out.encast", task="embed")
    bare = make_checkpoint(tmp_path / "bare", "bert", "features", layers=1, hidden=32, heads=2)
    with pytest.raises(UnsupportedModelError, match="'embed_sparse' needs a head"):
        encast.compile(bare, tmp_path / "out.encast", task="embed_sparse")
    classifier = make_checkpoint(tmp_path / "classifier", "bert", "classify", layers=1, hidden=32, heads=2)
    with pytest.raises(UnsupportedModelError, match="'embed_sparse' needs a head"):
        encast.compile(classifier, tmp_path / "out.encast", task="embed_sparse")
    with pytest.raises(
        UnsupportedModelError, match=r"can be built for \['embed', 'embed_sparse', 'features', 'fill_mask'\]"
    ):
        encast.compile(
            make_checkpoint(tmp_path / "lm", "bert", "fill_mask", layers=1, hidden=32, heads=2),
            tmp_path / "out.encast",
            task="tag",
        )


def test_the_command_line_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "bert", "bert", "embed_sparse", layers=1, hidden=32, heads=2, splade="relu")
    path = encast.compile(folder, tmp_path / "model.encast", dtype="int8")
    texts, out = tmp_path / "texts.txt", tmp_path / "out.jsonl"
    texts.write_text("\n".join(TEXTS) + "\n")
    assert main(["run", str(path), str(texts), "-o", str(out), "--max-active-dims", "5"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert main(["run", str(path), str(texts), "-o", str(tmp_path / "out.parquet"), "--max-active-dims", "5"]) == 0
    columns = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert columns["indices"] == [row["indices"] for row in rows]
    np.testing.assert_array_equal(columns["values"], [np.float32(row["values"]) for row in rows])
    assert main(["run", str(path), str(texts), "-o", str(tmp_path / "out.csv"), "--max-active-dims", "5"]) == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [json.loads(row["indices"]) for row in csv.DictReader(file)] == [row["indices"] for row in rows]
    with encast.load(path, threads=1) as engine:
        for row, vector in zip(rows, engine.embed_sparse(TEXTS, max_active_dims=5), strict=True):
            assert row["indices"] == vector.indices.tolist()
            np.testing.assert_array_equal(np.float32(row["values"]), vector.values)
    assert main(["run", str(path), str(texts), "-o", str(tmp_path / "out.npy")]) == 2
    assert "npy cannot be written here" in capsys.readouterr().err
    assert not (tmp_path / "out.npy").exists()
