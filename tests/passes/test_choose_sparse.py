"""Weights as blocks without their zeros, and the pass that puts them in."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import open_case

from encast import _core
from encast.crossover import DENSE_ROWS, GAIN, MANY_ROWS, MEASURED_ZEROS, DenseRows, dense_rows, faster_form
from encast.errors import GraphError, StrictError
from encast.ir import Graph, verify
from encast.ir.blocks import (
    BLOCK_OUTPUTS,
    GROUP_INPUTS,
    MOST_INPUTS,
    block_count,
    pack_blocks,
    shares,
    unpack_blocks,
)
from encast.passes import optimise
from encast.quant import QuantSpec

Array = np.ndarray[Any, Any]


def test_the_core_has_the_same_sizes() -> None:
    assert (_core.BLOCK_OUTPUTS, _core.GROUP_INPUTS) == (BLOCK_OUTPUTS, GROUP_INPUTS)
    assert _core.MOST_SPARSE_INPUTS == MOST_INPUTS
    assert block_count(1) == _core.PANEL // BLOCK_OUTPUTS
    assert block_count(_core.PANEL + 1) == 2 * block_count(1)


def weight_of(n: int, k: int, density: float, seed: int = 0) -> Array:
    """s8 with that share of blocks, each with some zeros in it."""
    rng = np.random.default_rng(seed)
    left = (rng.random((-(-n // 4), k)) < density).repeat(4, axis=0)[:n]
    return (rng.integers(-127, 128, (n, k)) * left).astype(np.int8)


@pytest.mark.parametrize("density", [0.0, 0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 5), (4, 4), (64, 16), (65, 33), (130, 70)])
class TestBlocks:
    def test_packing_and_back(self, n: int, k: int, density: float) -> None:
        weight = weight_of(n, k, density)
        values, columns, starts = pack_blocks(weight)
        assert (values.dtype, columns.dtype, starts.dtype) == (np.int8, np.uint16, np.int32)
        np.testing.assert_array_equal(unpack_blocks(values, columns, starts, (n, k)), weight)

    def test_the_form_is_that_of_the_contract(self, n: int, k: int, density: float) -> None:
        weight = weight_of(n, k, density, seed=1)
        values, columns, starts = pack_blocks(weight)
        assert len(starts) == block_count(n) + 1
        assert starts[0] == 0
        assert len(values) == len(columns) == max(1, starts[-1])
        padded = np.zeros((block_count(n) * BLOCK_OUTPUTS, k), np.int8)
        padded[:n] = weight
        for block, (begin, end) in enumerate(itertools.pairwise(starts)):
            rows = padded[block * BLOCK_OUTPUTS : (block + 1) * BLOCK_OUTPUTS]
            used = np.flatnonzero(rows.any(axis=0)).tolist()
            assert end - begin == -(-len(used) // GROUP_INPUTS)
            fill = (end - begin) * GROUP_INPUTS - len(used)
            assert columns[begin:end].ravel().tolist() == used + used[-1:] * fill
            stored = (
                values[begin:end].reshape(-1, BLOCK_OUTPUTS, GROUP_INPUTS).swapaxes(0, 1).reshape(BLOCK_OUTPUTS, -1)
            )
            np.testing.assert_array_equal(stored[:, : len(used)], rows[:, used])
            assert not stored[:, len(used) :].any()


def test_more_inputs_than_columns_can_name_are_refused() -> None:
    weight = np.zeros((1, MOST_INPUTS), np.int8)
    weight[0, -1] = 3
    np.testing.assert_array_equal(unpack_blocks(*pack_blocks(weight), weight.shape), weight)
    with pytest.raises(GraphError, match="65536 are the most"):
        pack_blocks(np.zeros((1, MOST_INPUTS + 1), np.int8))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda v, c, s: s.__setitem__(0, 1), "do not rise"),
        (lambda v, c, s: s.__setitem__(1, 99), "do not rise"),
        (lambda v, c, s: s.__setitem__(-1, len(v) + 1), "do not rise"),
        (lambda v, c, s: c.__setitem__((0, 0), 33), "column 33"),
        (lambda v, c, s: c.__setitem__(0, c[0, ::-1].copy()), "columns do not rise"),
        (lambda v, c, s: c.__setitem__((0, 1), c[0, 0]), "columns do not rise"),
    ],
)
def test_damaged_blocks_are_refused(damage: Any, words: str) -> None:
    values, columns, starts = pack_blocks(weight_of(65, 33, 0.5))
    damage(values, columns, starts)
    with pytest.raises(GraphError, match=words):
        unpack_blocks(values, columns, starts, (65, 33))


def pruned(graph: Graph) -> Graph:
    """Most blocks of every weight of a product are zero."""
    graph = graph.copy()
    rng = np.random.default_rng(3)
    for name in sorted({node.inputs[1] for node in graph.nodes if node.op == "linear" and node.layer >= 0}):
        constant = graph.constants[name]
        n, k = constant.array.shape
        stays = (rng.random((-(-n // 4), k)) < 0.25).repeat(4, axis=0)[:n]
        graph.constants[name] = dataclasses.replace(constant, array=constant.array * stays)
    return graph


NAMES = ["bert-embed", "distilbert-classify", "albert-odd", "roberta-tag", "electra-answer", "mpnet-fill_mask"]


@pytest.mark.parametrize("case", NAMES)
def test_int8_products_become_sparse_and_the_answers_stay(case: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    opened = open_case(case, tmp_path_factory)
    plain = pruned(opened.graph)
    dense, _ = optimise(plain, QuantSpec("int8"), strict=True)
    sparse, report = optimise(plain, QuantSpec("int8"), strict=True, sparse="always")
    ops = [node.op for node in dense.nodes]
    assert [node.op.replace("sparse_", "") for node in sparse.nodes] == ops
    assert "linear_int8" not in {node.op for node in sparse.nodes}
    assert "linear_int8" in ops
    assert {dtype for dtype in report.linears.values() if dtype != "f32"} == {"sparse_int8"}
    read = {value for node in sparse.nodes for value in node.inputs}
    assert set(sparse.constants) <= read  # nothing is stored that nobody reads
    np.testing.assert_array_equal(opened.evaluate(dense), opened.evaluate(sparse))


@pytest.mark.parametrize("density", [0.0, 0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 5), (64, 16), (65, 33), (130, 70)])
def test_the_share_that_is_left_is_what_is_stored(n: int, k: int, density: float) -> None:
    weight = weight_of(n, k, density, seed=2)
    stored = pack_blocks(weight)[2][-1] * BLOCK_OUTPUTS * GROUP_INPUTS
    assert shares(weight).left == stored / (n * k)
    padded = np.zeros((-(-n // BLOCK_OUTPUTS) * BLOCK_OUTPUTS, k), np.int8)
    padded[:n] = weight
    zero = ~padded.reshape(-1, BLOCK_OUTPUTS, k).any(axis=1)
    assert shares(weight).zero == pytest.approx(zero.mean())


def test_auto_takes_what_is_sparse_enough_for_the_level(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = pruned(open_case("bert-embed", tmp_path_factory).graph)
    whole = [node.inputs[1] for node in plain.nodes if node.op == "linear" and node.layer >= 0][-1]
    plain.constants[whole] = open_case("bert-embed", tmp_path_factory).graph.constants[whole]
    ops = {}
    for share in (0.0, 0.2, 0.5, 2.0):
        monkeypatch.setitem(DENSE_ROWS, "avx2", (DenseRows(share, 0, 0),))
        graph, _ = optimise(plain, QuantSpec("int8"), sparse="auto", isa="avx2")
        ops[share] = sum(node.op == "linear_sparse_int8" for node in graph.nodes)
    products = sum(node.op == "linear_int8" for node in optimise(plain, QuantSpec("int8"))[0].nodes)
    assert ops[0.0] == ops[0.2] == 0
    assert 0 < ops[0.5] < ops[2.0] == products
    with pytest.raises(KeyError):
        optimise(plain, QuantSpec("int8"), sparse="auto", isa="mmx")


def with_zeros(plain: Graph, zeros: float) -> Graph:
    """Each block of four outputs loses as many of its inputs."""
    graph = plain.copy()
    for name in {node.inputs[1] for node in graph.nodes if node.op == "linear" and node.layer >= 0}:
        constant = graph.constants[name]
        n, k = constant.array.shape
        order = np.random.default_rng(3).permuted(np.tile(np.arange(k), (-(-n // 4), 1)), axis=1)
        stays = (order >= int(zeros * k)).repeat(4, axis=0)[:n]
        graph.constants[name] = dataclasses.replace(constant, array=constant.array * stays)
    return graph


@pytest.mark.parametrize(
    ("isa", "zeros", "form"),
    [
        ("avx512vnni", 0.75, "sparse"), ("avx512vnni", 0.7, "both"), ("avx512bf16", 0.5, "both"),
        ("avx512vnni", 0.1, "dense"), ("avx2", 0.5, "sparse"), ("avx2", 0.4, "dense"),
        ("amx", 0.9, "sparse"), ("amx", 0.75, "dense"),
    ],
)  # fmt: skip
def test_auto_takes_the_faster_form(
    isa: str, zeros: float, form: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    graph = with_zeros(open_case("bert-embed", tmp_path_factory).graph, zeros)
    dense, _ = optimise(graph, QuantSpec("int8"))
    weights = [constant.array for constant in dense.constants.values() if constant.array.dtype == np.int8]
    if zeros == 0.7:
        assert min(shares(weight).left for weight in weights) > 1 - zeros, "a share is no whole number of blocks"
    made, report = optimise(graph, QuantSpec("int8"), sparse="auto", isa=isa, strict=True)
    layers = [node for node in made.nodes if node.op.startswith("linear") and node.layer >= 0]
    ops = {(node.op, len(node.inputs)) for node in layers}
    assert ops == {{"sparse": ("linear_sparse_int8", 7), "both": ("linear_int8", 7), "dense": ("linear_int8", 4)}[form]}
    counted = {layer: pair for layer, pair in report.counts.get("sparse", {}).items() if layer >= 0}
    assert counted == ({} if form == "dense" else dict.fromkeys(range(made.meta.layers), (4, 4)))
    if form == "both":
        for node in layers:
            weight, *blocks = (made.constants[node.inputs[place]].array for place in (1, 4, 5, 6))
            np.testing.assert_array_equal(unpack_blocks(*blocks, weight.shape), weight)


def test_blocks_of_a_dense_product_are_checked(tmp_path_factory: pytest.TempPathFactory) -> None:
    graph = with_zeros(open_case("bert-embed", tmp_path_factory).graph, 0.5)
    made, _ = optimise(graph, QuantSpec("int8"), sparse="auto", isa="avx512vnni")
    node = next(node for node in made.nodes if node.op == "linear_int8")
    for place in (4, 5, 6):
        for wrong in ("", node.inputs[2]):
            broken = made.copy()
            inputs = next(other for other in broken.nodes if other.name == node.name).inputs
            inputs[place] = wrong
            with pytest.raises(GraphError, match=r"values|columns|starts"):
                verify(broken)


def test_there_is_a_crossover_for_each_level() -> None:
    assert list(DENSE_ROWS) == [name for name, *_ in _core.isa_levels()]


@pytest.mark.parametrize("isa", DENSE_ROWS)
def test_with_more_left_dense_products_are_faster_for_more_rows(isa: str) -> None:
    for cached in (True, False):
        rows = [dense_rows(isa, left / 100, cached=cached) for left in range(101)]
        assert rows[0] == 0
        known = [_core.SPARSE_TILE_ROWS if most is None else most for most in rows]
        assert known == sorted(known)
        assert all(most < _core.SPARSE_TILE_ROWS for most in rows if most is not None), "more are whole tiles"
    forms = [faster_form(isa, left / 100) for left in range(101)]
    assert forms == sorted(forms, key=["sparse", "both", "dense"].index)
    with pytest.raises(KeyError):
        dense_rows("mmx", 0.5, cached=True)


def test_never_is_the_graph_as_it_was(tmp_path_factory: pytest.TempPathFactory) -> None:
    graph = open_case("bert-embed", tmp_path_factory).graph
    assert str(optimise(graph, QuantSpec("int8"))[0]) == str(optimise(graph, QuantSpec("int8"), sparse="never")[0])


def test_shared_weights_are_stored_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    graph, _ = optimise(open_case("albert-odd", tmp_path_factory).graph, QuantSpec("int8"), sparse="always")
    products = [node for node in graph.nodes if node.op == "linear_sparse_int8"]
    assert len({node.inputs[1] for node in products}) < len(products)


def test_the_report_has_the_zeros_of_every_int8_product(tmp_path_factory: pytest.TempPathFactory) -> None:
    plain = pruned(open_case("bert-embed", tmp_path_factory).graph)
    reports = [optimise(plain, QuantSpec("int8"), sparse=sparse)[1] for sparse in ("never", "always")]
    for report in reports:
        assert list(report.zeros) == [name for name, dtype in report.linears.items() if dtype.endswith("int8")]
        assert all(0.6 < found.zero < 0.9 and found.left >= 1 - found.zero for found in report.zeros.values())
    assert reports[0].zeros == reports[1].zeros
    assert "sparse" not in reports[0].counts, "nothing was asked for"
    layers = {layer: pair for layer, pair in reports[1].counts["sparse"].items() if layer >= 0}
    assert layers == dict.fromkeys(range(plain.meta.layers), (4, 4))
    assert optimise(plain, QuantSpec("f32"))[1].zeros == {}


def test_a_product_that_leaves_nothing_out_is_a_miss(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of those in layers: nothing else is pruned."""
    case = open_case("mpnet-fill_mask", tmp_path_factory)
    whole = case.graph
    plain = pruned(whole)
    assert optimise(plain, QuantSpec("int8"), strict=True, sparse="always")[1].misses == ()
    weight = [node.inputs[1] for node in plain.nodes if node.op == "linear" and node.layer == 1][-1]
    plain.constants[weight] = whole.constants[weight]
    graph, report = optimise(plain, QuantSpec("int8"), sparse="always")
    (miss,) = report.misses
    assert (miss.fusion, miss.layer) == ("sparse", 1)
    assert report.counts["sparse"][1] == (4, 3)
    assert any(node.name == miss.node and node.op == "linear_sparse_int8" for node in graph.nodes)
    with pytest.raises(
        StrictError, match=r"or --sparse asks for were not made:\n  layer 1: sparse at .*no block of four"
    ):
        optimise(plain, QuantSpec("int8"), strict=True, sparse="always")
    for sparse in ("never", "auto"):  # nobody asked for it
        assert optimise(plain, QuantSpec("int8"), strict=True, sparse=sparse, isa="avx2")[1].misses == ()


README = Path(__file__).parents[2] / "core" / "kernels" / "sparse" / "README.md"
LEVELS = {
    "AVX2": "avx2",
    "AVX-VNNI": "avxvnni",
    "AVX-512": "avx512",
    "AVX-512 VNNI": "avx512vnni",
    "AMX dense, sparse by VNNI": "amx",
}


def test_expected_gains_are_those_that_were_measured() -> None:
    """The table of the kernels' page, number by number."""
    level, found = "", {}
    for line in README.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and cells[1].replace(",", "").isdigit():
            level = LEVELS[cells[0]] if cells[0] else level
            ends = tuple(tuple(map(float, re.findall(r"[\d.]+", cell))) for cell in cells[2:])
            found[level, int(cells[1].replace(",", ""))] = ends
    assert {level for level, _ in found} == set(GAIN) - {"avx512bf16"}
    for level, gain in GAIN.items():
        known = "avx512vnni" if level == "avx512bf16" else level
        assert gain.few == found[known, gain.few_rows]
        assert gain.many == found[known, MANY_ROWS]


@pytest.mark.parametrize("level", GAIN)
def test_expected_gains_lie_between_what_was_measured(level: str) -> None:
    gain = GAIN[level]
    for at, zeros in enumerate(MEASURED_ZEROS):
        for ends, measured in zip(gain.expected(zeros), (gain.few, gain.many), strict=True):
            assert ends == pytest.approx(measured[at])
    assert gain.expected(0.1) == gain.expected(MEASURED_ZEROS[0]), "nothing was measured there"
    assert gain.expected(1.0) == gain.expected(MEASURED_ZEROS[-1])
    (worst, best), _ = gain.expected(0.75)
    assert gain.few[2][0] < worst < gain.few[3][0]
    assert gain.few[2][1] < best < gain.few[3][1]
    # A time that is a constant and a part for what is left: half way in time, not in speed.
    assert 1 / worst == pytest.approx((1 / gain.few[2][0] + 1 / gain.few[3][0]) / 2)


@pytest.mark.parametrize("level", sorted(set(GAIN) - {"amx"}))
def test_at_the_crossover_the_typical_shape_gains(level: str) -> None:
    """Where it was measured: with fewer zeros the figures are those of the nearest share."""
    for left, *rows in DENSE_ROWS[level]:
        few, many = GAIN[level].expected(1 - left)
        if 1 - left >= MEASURED_ZEROS[0]:
            for worst, best in (many,) if any(rows) else (few, many):
                assert worst * best > 1


def test_with_amx_the_crossover_is_that_of_whole_models() -> None:
    """The page's table: each model gains on average where zeros are left out, and not all do where they are not."""
    table = README.read_text().partition("Whole models with AMX")[2].partition("\n\n  Few rows")[0]
    rows = re.findall(r"\| (\d+) % \| \S+ \|(.*)\|", table)
    gains = {
        zeros: [math.prod(map(float, re.findall(r"[\d.]+", row))) for at, row in rows if at == zeros]
        for zeros, _ in rows
    }
    forms = {zeros: faster_form("amx", 1.005 - int(zeros) / 100) for zeros in gains}
    assert list(forms.values()) == ["dense", "dense", "sparse", "sparse", "sparse"]
    for zeros, form in forms.items():
        assert (min(gains[zeros]) > 1) == (form == "sparse"), zeros
