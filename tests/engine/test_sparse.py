"""Sparse products: the bits of the dense ones, whatever the batch and the threads (test_isa.py: the level)."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import open_case, task_of
from checkpoints import CASES, make_checkpoint
from compiled import same_bits

import encast
from encast import _core, artifact
from encast.artifact.card import CARD, seal
from encast.backends.cpu import CpuRunnable
from encast.batch import Batch
from encast.crossover import DENSE_ROWS, DenseRows
from encast.errors import ArtifactError, EncastError, InputError
from encast.ir.blocks import BLOCK_OUTPUTS, GROUP_INPUTS
from encast.lower import Target, lower
from encast.sparsity import Pattern, prune_checkpoint

NAMES = (
    "bert-embed",
    "distilbert-classify",
    "albert-odd",
    "roberta-tag",
    "mpnet-fill_mask",
    "modernbert-tag",
    "deberta-v2-tag",
)
LENGTHS = (1, 2, 31, 40, 7, 16, 17, 40, 33, 1, 40, 25, 12)


def compiled(name: str, sparsity: float, folder: Path, factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The case with zeros, compiled dense and sparse."""
    task = task_of(CASES[name])
    prune_checkpoint(open_case(name, factory).folder, folder / "pruned", pattern=Pattern(4, 1), sparsity=sparsity)
    dense, sparse = (
        encast.compile(folder / "pruned", folder / f"{choice}.encast", task=task, sparse=choice, strict=sparsity > 0)
        for choice in ("never", "always")
    )
    return dense, sparse


def batch_of(path: Path, lengths: tuple[int, ...], seed: int = 0) -> tuple[str, Batch, Any]:
    meta = artifact.open(path).graph.meta
    rng = np.random.default_rng(seed)
    lengths = tuple(min(length, meta.max_len) for length in lengths)
    ids = rng.integers(0, meta.vocab, sum(lengths)).astype(np.int32)
    batch = Batch(ids, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    output = {"embed": "embedding", "features": "last_hidden_state"}.get(meta.task, "logits")
    return output, batch, np.arange(len(ids), dtype=np.int32) if meta.task == "fill_mask" else None


@pytest.mark.parametrize("sparsity", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_bits_are_those_of_dense_products(
    name: str,
    sparsity: float,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dense, sparse = compiled(name, sparsity, tmp_path, tmp_path_factory)
    output, batch, select = batch_of(dense, LENGTHS)
    wanted = CpuRunnable(artifact.open(dense), threads=1).run(output, batch, select)
    assert np.isfinite(wanted).all()
    opened = artifact.open(sparse)
    knobs: list[dict[str, str]] = [
        {},
        {"ENCAST_CHUNK_TOKENS": "1"},
        {"ENCAST_BLOCK_ROWS": "32", "ENCAST_STREAM_ROWS": "1"},
        {"ENCAST_BLOCK_ROWS": "48"},
        {"ENCAST_HEAD_TOKENS": "0"},
        {"ENCAST_HEAD_TOKENS": "64"},
        {"ENCAST_BLOCK_ROWS": "1024", "ENCAST_STREAM_ROWS": "1024"},
    ]
    for threads in (1, 2):
        for values in knobs:
            for knob, value in values.items():
                monkeypatch.setenv(knob, value)
            cpu = CpuRunnable(opened, threads=threads)
            for knob in values:
                monkeypatch.delenv(knob)
            assert same_bits(cpu.run(output, batch, select), wanted), (threads, values)


def columns_of(path: Path) -> bool:
    """Whether products of the artifact may stay columns; on processors without such kernels that is skipped."""
    if _core.select_kernel("sparse_q8s8_columns", "s8", 64) is None:
        pytest.skip("no kernel of this machine keeps columns")
    cpu = CpuRunnable(artifact.open(path), threads=1)
    return any("_columns_" in kernel for _, kernels in cpu.kernels() for kernel in kernels)


def test_feed_forwards_stay_columns(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, sparse = compiled("bert-embed", 0.8, tmp_path, tmp_path_factory)
    assert columns_of(sparse)
    assert not columns_of(dense)
    exact = encast.compile(tmp_path / "pruned", tmp_path / "exact.encast", task="embed", sparse="always", exact=True)
    assert not columns_of(exact)
    monkeypatch.setenv("ENCAST_BLOCK_ROWS", "48")  # too few for a tile
    assert not columns_of(sparse)


@pytest.mark.parametrize("rows", [33, 40, 63, 64, 65, 96, 97, 127, 128, 161])
def test_tiles_of_any_rows(rows: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    dense, sparse = compiled("bert-embed", 0.8, tmp_path, tmp_path_factory)
    lengths = (*(32 for _ in range(rows // 32)), *((rows % 32,) if rows % 32 else ()))
    output, batch, _ = batch_of(dense, lengths)
    for threads in (1, 2, 3):
        wanted, found = (
            CpuRunnable(artifact.open(path), threads=threads).run(output, batch) for path in (dense, sparse)
        )
        assert same_bits(found, wanted), threads


def test_the_text_alone_decides(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    _, sparse = compiled("bert-embed", 0.8, tmp_path, tmp_path_factory)
    output, batch, _ = batch_of(sparse, LENGTHS)
    cpu = CpuRunnable(artifact.open(sparse), threads=2)
    together = cpu.run(output, batch)
    for row, (begin, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        alone = Batch(batch.token_ids[begin:end], np.array([0, end - begin], np.int32))
        assert same_bits(cpu.run(output, alone)[0], together[row])


def test_the_reference_agrees(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    dense, sparse = compiled("bert-embed", 0.8, tmp_path, tmp_path_factory)
    texts = ["a text", "another one"]
    rows = [encast.load(path, device="reference").embed(texts) for path in (dense, sparse)]
    np.testing.assert_array_equal(*rows)


def test_the_file_shrinks_as_the_density_says(tmp_path: Path) -> None:
    def product_bytes(path: Path) -> int:
        opened = artifact.open(path)
        return sum(
            tensor.nbytes for name, tensor in opened.tensors.items()
            if tensor.dtype in ("s8", "u16") or name.endswith(".starts")
        )  # fmt: skip

    source = make_checkpoint(tmp_path / "dense", "bert", "features", layers=1, hidden=256, heads=4, inner=1024)
    prune_checkpoint(source, tmp_path / "pruned", pattern=Pattern(4, 1), sparsity=0.8)
    dense, sparse = (
        encast.compile(tmp_path / "pruned", tmp_path / f"{choice}.encast", sparse=choice)
        for choice in ("never", "always")
    )
    assert product_bytes(sparse) <= 0.35 * product_bytes(dense)


def test_the_plan_says_which_products_are_sparse(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    _, sparse = compiled("bert-embed", 0.8, tmp_path, tmp_path_factory)
    opened = artifact.open(sparse)
    text = lower(opened.graph, opened.tensors, Target.here())
    plan = _core.Plan(text)
    kinds = [step.kind for step in plan.steps]
    assert kinds.count("sparse") == 4 * opened.graph.meta.layers
    assert "linear" not in kinds
    products = [step for step in plan.steps if step.kind == "sparse"]
    assert all(step.keys["w"].cols == BLOCK_OUTPUTS * GROUP_INPUTS for step in products)


def _rewritten(path: Path, tensor: str, change: Callable[[np.ndarray[Any, Any]], None]) -> None:
    """Changes a tensor's numbers in place, and all checksums with them: a file that was made to mislead."""
    opened = artifact.open(path)
    stored = opened.tensors[tensor]
    dtype = {"u16": np.uint16, "i32": np.int32, "s8": np.int8}[stored.dtype]
    raw = bytearray(opened.weights_path.read_bytes())
    view = np.frombuffer(raw, dtype, int(np.prod(stored.shape)), stored.offset).reshape(stored.shape)
    change(view)
    opened.weights_path.write_bytes(raw)
    card = json.loads((path / CARD).read_text())
    data = bytes(raw[stored.offset : stored.offset + stored.nbytes])
    card["tensors"][tensor] = struct.pack(">Q", _core.xxh64(data)).hex()
    (path / CARD).write_bytes(seal(card))


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("columns", lambda a: a.__setitem__((0, 0), 65535), "is 65535, there are 64 inputs"),
        ("columns", lambda a: a.__setitem__((0, slice(None)), a[0, ::-1].copy()), "do not rise"),
        ("starts", lambda a: a.__setitem__(0, 7), "begin at 0"),
        ("starts", lambda a: a.__setitem__(-1, 2**31 - 1), "end with the groups"),
        ("starts", lambda a: a.__setitem__(1, -(2**31)), "ends before it begins"),
        ("starts", lambda a: a.__setitem__(1, 2**31 - 1), "ends before it begins"),
    ],
)
def test_files_made_to_mislead_are_refused(
    part: str, change: Any, words: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, sparse = compiled("bert-embed", 0.5, tmp_path, tmp_path_factory)
    name = next(name for name in artifact.open(sparse).tensors if name.endswith(f".{part}"))
    _rewritten(sparse, name, change)
    with pytest.raises(ArtifactError, match=rf"sparse weight of .*{words}.*compile the artifact again"):
        CpuRunnable(artifact.open(sparse))


def test_options(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="one of never, auto, always"):
        encast.compile(tmp_path, sparse="sometimes")
    with pytest.raises(InputError, match="sparse products are int8"):
        encast.compile(tmp_path, dtype="f32", sparse="always")


# Both forms of a weight: dense for few rows, sparse for many


def in_both_forms(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: int | None = 24, task: str = "embed") -> Path:
    """The pruned checkpoint of ``folder``, compiled for any level so that its weights have both forms; ``rows``: what
    it is lowered with here."""
    with monkeypatch.context() as compiling:
        compiling.setitem(DENSE_ROWS, _core.isa_best(), (DenseRows(2.0, 1, 0),))
        path = encast.compile(folder / "pruned", folder / "both.encast", task=task, sparse="auto")
    lowered = () if rows is None else (DenseRows(2.0, rows, rows),)
    monkeypatch.setitem(DENSE_ROWS, _core.isa_best(), lowered)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_tell_which_form_was_used(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(CASES[name])
    dense, _ = compiled(name, 0.5, tmp_path, tmp_path_factory)
    both = artifact.open(in_both_forms(tmp_path, monkeypatch, task=task))
    output, batch, select = batch_of(dense, LENGTHS)
    wanted = CpuRunnable(artifact.open(dense), threads=1).run(output, batch, select)
    for rows in (0, 1, 8, 24, 40, 63, None):
        limits = () if rows is None else (DenseRows(2.0, rows, rows),)
        monkeypatch.setitem(DENSE_ROWS, _core.isa_best(), limits)
        for threads, head_tokens in ((1, "128"), (1, "40"), (2, "128"), (2, "0"), (3, "40")):
            monkeypatch.setenv("ENCAST_HEAD_TOKENS", head_tokens)
            cpu = CpuRunnable(both, threads=threads)
            assert same_bits(cpu.run(output, batch, select), wanted), (rows, threads, head_tokens)


@pytest.mark.parametrize("rows", [8, 40, 63])
def test_any_number_of_rows_in_both_forms(
    rows: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both sides of every limit: of a thread alone, of two that share, of columns, of a tile and its rest."""
    dense, _ = compiled("bert-embed", 0.5, tmp_path, tmp_path_factory)
    both = artifact.open(in_both_forms(tmp_path, monkeypatch, rows))
    for threads in (1, 2):
        pair = [CpuRunnable(opened, threads=threads) for opened in (artifact.open(dense), both)]
        for tokens in (1, 7, 8, 9, 16, 17, 32, 33, 40, 41, 63, 64, 65, 72, 73, 80, 81, 104, 105, 127, 128, 200):
            lengths = (*(32 for _ in range(tokens // 32)), *((tokens % 32,) if tokens % 32 else ()))
            output, batch, _ = batch_of(dense, lengths)
            wanted, found = (cpu.run(output, batch) for cpu in pair)
            assert same_bits(found, wanted), (threads, tokens)


@pytest.mark.parametrize("block_rows", ["48", "192"])
def test_steps_of_one_plan_may_change_forms_at_other_rows(
    block_rows: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one step makes as rows or columns the next one reads as such."""
    dense, _ = compiled("bert-embed", 0.5, tmp_path, tmp_path_factory)
    both = artifact.open(in_both_forms(tmp_path, monkeypatch))
    monkeypatch.setenv("ENCAST_BLOCK_ROWS", block_rows)
    for first in range(6):
        limits = itertools.cycle([63, 0, 40, None, 8, 63, 24][first:])
        monkeypatch.setattr(Target, "dense_rows", lambda *_, limits=limits: next(limits))
        for threads in (1, 2):
            pair = [CpuRunnable(opened, threads=threads) for opened in (artifact.open(dense), both)]
            for tokens in (8, 9, 33, 40, 41, 48, 63, 64, 65, 104, 127, 160):
                output, batch, _ = batch_of(dense, (*(32 for _ in range(tokens // 32)), tokens % 32 or 1))
                wanted, found = (cpu.run(output, batch) for cpu in pair)
                assert same_bits(found, wanted), (first, threads, tokens)


def test_the_machine_that_runs_decides_between_forms(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled("bert-embed", 0.5, tmp_path, tmp_path_factory)
    both = artifact.open(in_both_forms(tmp_path, monkeypatch))
    layers = 4 * both.graph.meta.layers

    def steps(**limits: Any) -> list[Any]:
        target = replace(Target.here(), isa="avx512vnni", **limits)
        return list(_core.Plan(lower(both.graph, both.tensors, target)).steps)

    def kinds(made: list[Any]) -> tuple[int, int, set[int]]:
        sparse = [step for step in made if step.kind == "sparse"]
        panels = {step.keys["dense_rows"] for step in sparse}
        assert all(("dense" in step.keys) == (step.keys["dense_rows"] > 0) for step in sparse)
        return len(sparse), sum(step.kind == "linear" for step in made), panels

    monkeypatch.setitem(DENSE_ROWS, "avx512vnni", (DenseRows(0.3, 1, 1), DenseRows(0.7, 24, 0)))
    assert kinds(steps()) == (layers, 0, {24})
    assert kinds(steps(shared_cache_bytes=1)) == (layers, 0, {0}), "weights come from memory"
    monkeypatch.setitem(DENSE_ROWS, "avx512vnni", (DenseRows(0.3, 1, 1),))
    assert kinds(steps()) == (0, layers, set()), "too much is left"
    monkeypatch.setitem(DENSE_ROWS, "avx512vnni", (DenseRows(0.7, 24, 24),))
    assert kinds(steps(without=frozenset({"qkv_fusion"}))) == (layers, 0, {24}), "an ablation changes no forms"


def test_the_kernels_of_both_forms_are_named(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled("bert-embed", 0.5, tmp_path, tmp_path_factory)
    cpu = CpuRunnable(artifact.open(in_both_forms(tmp_path, monkeypatch)), threads=1)
    products = [kernels for _, kernels in cpu.kernels() if any(name.startswith("sparse_q8") for name in kernels)]
    assert products
    assert all(any(name.startswith("gemm_q8_s8") for name in kernels) for kernels in products)


def test_the_reference_knows_weights_of_two_forms(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, _ = compiled("bert-embed", 0.5, tmp_path, tmp_path_factory)
    both = in_both_forms(tmp_path, monkeypatch)
    texts = ["a text", "another one"]
    rows = [encast.load(path, device="reference").embed(texts) for path in (dense, both)]
    np.testing.assert_array_equal(*rows)
    tensor = next(name for name in artifact.open(both).tensors if name.endswith(".values"))
    _rewritten(both, tensor, lambda values: np.negative(values, out=values))
    with pytest.raises(EncastError, match="are not one weight"):
        encast.load(both, device="reference").embed(texts)
