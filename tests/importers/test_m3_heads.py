"""The files of BGE-M3's heads: read as they are, and refused where they are damaged or do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import torch_zip
from checkpoints import make_checkpoint
from late_checkpoints import make_late_checkpoint
from m3_checkpoints import make_m3_checkpoint

import encast
from encast.archs import build_graph
from encast.cli.main import main
from encast.errors import EncastError, UnsupportedModelError
from encast.importers import open_checkpoint


def linear(rows: int, columns: int) -> dict[str, np.ndarray]:
    return {"weight": np.ones((rows, columns), np.float32), "bias": np.ones(rows, np.float32)}


@pytest.mark.parametrize(
    ("name", "arrays", "match"),
    [
        ("sparse", linear(2, 32), r"weight has shape \[2, 32\]; one row is needed"),
        ("sparse", linear(1, 31), r"weight of shape \[1, 31\], what comes before it is 32 wide"),
        ("colbert", linear(8, 31), r"weight of shape \[8, 31\], what comes before it is 32 wide"),
        ("colbert", linear(0, 32), r"weight of shape \[0, 32\].*one or more rows of 32"),
        ("colbert", {**linear(8, 32), "bias": np.ones(7, np.float32)}, r"bias \[7\]; \[out, in\] and \[out\]"),
        ("colbert", {"weight": np.ones((8, 32), np.float32)}, "no tensor is named 'bias'"),
        ("colbert", {**linear(8, 32), "scale": np.ones(8, np.float32)}, "'scale' is none of weight, bias"),
        ("colbert", {**linear(8, 32), "bias": np.full(8, np.nan, np.float32)}, "nan"),
    ],
)
def test_heads_that_are_refused(name: str, arrays: dict[str, np.ndarray], match: str, tmp_path: Path) -> None:
    make_m3_checkpoint(tmp_path)
    (tmp_path / f"{name}_linear.pt").write_bytes(torch_zip(arrays))
    with pytest.raises(EncastError, match=match):
        build_graph(open_checkpoint(tmp_path), "embed_sparse" if name == "sparse" else "embed_tokens")
    # Dense embeddings need none of it.
    build_graph(open_checkpoint(tmp_path))


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    make_m3_checkpoint(tmp_path)
    (tmp_path / "colbert_linear.pt").write_bytes(b"no archive")
    with pytest.raises(EncastError, match=r"colbert_linear\.pt: not a zip archive.*torch\.save\(.*'colbert_l"):
        build_graph(open_checkpoint(tmp_path), "embed_tokens")
    build_graph(open_checkpoint(tmp_path), "embed")
    (tmp_path / "colbert_linear.pt").unlink()
    with pytest.raises(EncastError, match=r"colbert_linear\.pt is missing; BGE-M3 has"):
        build_graph(open_checkpoint(tmp_path), "embed_tokens")
    (tmp_path / "sparse_linear.pt").unlink()
    with pytest.raises(UnsupportedModelError, match="or BGE-M3 with"):
        build_graph(open_checkpoint(tmp_path), "embed_tokens")
    bare = make_checkpoint(tmp_path / "bare", "bert", "features")
    with pytest.raises(UnsupportedModelError, match="'embed_sparse' needs a head"):
        build_graph(open_checkpoint(bare), "embed_sparse")


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_narrow_heads_are_near_the_wide_ones(dtype: str, tmp_path: Path) -> None:
    make_m3_checkpoint(tmp_path / "m3")
    texts = ["the cat sat on the mat", "b c d e f", "of and to in " * 9]
    for task in ("embed_sparse", "embed_tokens"):
        made = []
        for kind in ("f32", dtype):
            path = encast.compile(tmp_path / "m3", tmp_path / f"{task}-{kind}.encast", dtype=kind, task=task)
            with encast.load(path, threads=1) as engine:
                if task == "embed_tokens":
                    made.append([one.vectors for one in engine.embed_tokens(texts)])
                else:
                    rows = np.zeros((len(texts), engine.meta.vocab), np.float32)
                    for row, one in zip(rows, engine.embed_sparse(texts), strict=True):
                        row[one.indices] = one.values
                    made.append(list(rows))
        wide, narrow = map(np.concatenate, made)
        assert (wide * narrow).sum() > 0.97 * np.linalg.norm(wide) * np.linalg.norm(narrow) > 0
        assert not np.array_equal(wide, narrow)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
def test_one_run_has_the_bits_of_three(dtype: str, tmp_path: Path) -> None:
    make_m3_checkpoint(tmp_path / "m3")
    texts = ["the cat sat on the mat", "a", "b c d e f", "", "of and to in " * 9]
    engines = {}
    for task in ("embed", "embed_sparse", "embed_tokens", "embed_m3"):
        path = encast.compile(tmp_path / "m3", tmp_path / f"{task}.encast", dtype=dtype, task=task)
        engines[task] = encast.load(path, threads=1, batch_tokens=50)
    whole = engines["embed_m3"]
    found = whole.embed_m3(texts, max_active_dims=4)
    assert len(found) == len(texts)
    for engine in (engines["embed"], whole):
        assert np.array_equal([one.embedding for one in found], engine.embed(texts))
    for engine in (engines["embed_sparse"], whole):
        for one, sparse in zip(found, engine.embed_sparse(texts, max_active_dims=4), strict=True):
            assert np.array_equal(one.sparse.indices, sparse.indices)
            assert np.array_equal(one.sparse.values, sparse.values)
    for engine in (engines["embed_tokens"], whole):
        for one, tokens in zip(found, engine.embed_tokens(texts), strict=True):
            assert np.array_equal(one.tokens.token_ids, tokens.token_ids)
            assert np.array_equal(one.tokens.vectors, tokens.vectors)
            assert one.tokens.vectors.flags.c_contiguous
    assert whole.rerank(texts[0], texts) == engines["embed"].rerank(texts[0], texts)
    assert whole.embed_m3([]) == []
    with pytest.raises(EncastError, match="embed_m3 needs an artifact of the task 'embed_m3'"):
        engines["embed"].embed_m3(texts)
    with encast.load(tmp_path / "embed_m3.encast", device="reference") as reference:
        near = reference.embed_m3(texts[:2])
    for one, other in zip(found, near, strict=False):
        assert float((one.embedding * other.embedding).sum()) > 0.99
        assert np.einsum("td,td->t", one.tokens.vectors, other.tokens.vectors).min(initial=1) > 0.97
    for engine in engines.values():
        engine.close()


def test_one_run_needs_all_of_m3(tmp_path: Path) -> None:
    make_m3_checkpoint(tmp_path / "m3")
    modules = tmp_path / "m3/1_Pooling/config.json"
    modules.write_text(modules.read_text().replace('"pooling_mode_cls_token": true', '"pooling_mode_cls_token": false'))
    modules.write_text(
        modules.read_text().replace('"pooling_mode_mean_tokens": false', '"pooling_mode_mean_tokens": true')
    )
    with pytest.raises(UnsupportedModelError, match=r"pooling of the first token \(cls\)"):
        build_graph(open_checkpoint(tmp_path / "m3"), "embed_m3")
    bare = make_checkpoint(tmp_path / "bare", "bert", "features")
    with pytest.raises(UnsupportedModelError, match=r"needs a head, that of BGE-M3: sparse_linear\.pt"):
        build_graph(open_checkpoint(bare), "embed_m3")


def test_another_head_in_modules_json_comes_first(tmp_path: Path) -> None:
    """Files of BGE-M3 that lie in a folder of another kind change nothing of it."""
    late = make_late_checkpoint(tmp_path / "late", "bert")
    form = open_checkpoint(late).token_form
    for name in ("sparse", "colbert"):
        (late / f"{name}_linear.pt").write_bytes(b"anything")
    assert open_checkpoint(late).token_form == form
    build_graph(open_checkpoint(late))
    with pytest.raises(UnsupportedModelError, match=r"it can be built for \['embed_tokens', 'features'\]"):
        build_graph(open_checkpoint(late), "classify")


def test_tasks_that_it_can_be_built_for(tmp_path: Path) -> None:
    make_m3_checkpoint(tmp_path)
    with pytest.raises(
        UnsupportedModelError, match=r"\['embed', 'embed_m3', 'embed_sparse', 'embed_tokens', 'features'\]"
    ):
        build_graph(open_checkpoint(tmp_path), "classify")


def test_pruning_keeps_the_heads(tmp_path: Path) -> None:
    make_m3_checkpoint(tmp_path / "model")
    assert main(["prune", str(tmp_path / "model"), "--sparsity", "0.5", "-o", str(tmp_path / "pruned")]) == 0
    for name in ("sparse_linear.pt", "colbert_linear.pt"):
        assert (tmp_path / "pruned" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    build_graph(open_checkpoint(tmp_path / "pruned"), "embed_tokens")
