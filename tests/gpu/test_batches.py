"""Packed batches: what a text's answer owes to its neighbours, one token, long texts, padding for a CUDA graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-gpu")

from bounds import allowed_difference, largest_excess
from checkpoints import make_checkpoint
from late_checkpoints import make_late_checkpoint
from models import FAST_ELEMENTARY, compiled_graph, open_gpu

from encast.archs import build_graph
from encast.backends.gpu.packed import TILE, pack
from encast.backends.gpu.program import build
from encast.backends.gpu.runnable import GpuRunnable
from encast.backends.gpu.steps import STEPS
from encast.backends.reference import Reference
from encast.batch import Batch
from encast.importers import open_checkpoint
from encast.passes import optimise
from encast.quant import QuantSpec

CPU = torch.device("cpu")
LENGTHS = (1, 2, 31, 48, 7, 16, 17, 40, 33, 1, 48, 25, 12)


def texts(meta: Any, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(0, meta.vocab, min(length, meta.max_len)).tolist() for length in lengths]


@pytest.mark.parametrize(
    "name",
    ["bert-features", "mpnet-features", "roberta-tag", "modernbert-features", "deberta-v2-conv", "bert-embed"],
)
def test_neighbours_move_an_answer_by_rounding_alone(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    opened, graph = compiled_graph(name, "f32", tmp_path_factory)
    gpu = GpuRunnable(graph, "torch-cpu")
    ids = texts(graph.meta)
    batch = Batch.of(ids)
    exact, allowed = allowed_difference(opened.graph, opened.output, batch, elementary=FAST_ELEMENTARY)
    together = gpu.run(opened.output, batch)
    alone = np.concatenate([gpu.run(opened.output, Batch.of([one])) for one in ids])
    assert largest_excess(together, exact, allowed) <= 1
    assert largest_excess(alone, exact, allowed) <= 1


def test_sums_of_int8_products_owe_nothing_to_neighbours() -> None:
    from encast.backends.gpu.steps.context import Context
    from encast.backends.gpu.steps.narrow import quantize
    from encast.backends.gpu.steps.products import Int8Weight, integer_sums

    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((50, 70), np.float32))
    weight = Int8Weight(torch.from_numpy(rng.integers(-127, 128, (33, 70)).astype(np.int8)))
    context: Context = Context(None, torch.float32)  # type: ignore[arg-type]
    whole = integer_sums(quantize(context, x, zero_point=True), weight)
    for row in (0, 17, 49):
        alone = integer_sums(quantize(context, x[row : row + 1], zero_point=True), weight)
        assert torch.equal(alone, whole[row : row + 1])


@pytest.mark.parametrize("arch", ["bert", "mpnet", "modernbert", "deberta-v2"])
def test_texts_of_several_blocks_of_queries(arch: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = {"local_attention": 40} if arch == "modernbert" else {}
    folder = make_checkpoint(
        tmp_path_factory.mktemp("long") / arch, arch, "features", layers=2, hidden=16, heads=2, positions=700,
        config=config,
    )  # fmt: skip
    plain = build_graph(open_checkpoint(folder), None)
    graph, _ = optimise(plain, QuantSpec("f32"))
    batch = Batch.of(texts(graph.meta, (600, 1, 257, 600, 256, 3)))
    exact, allowed = allowed_difference(plain, "last_hidden_state", batch, elementary=FAST_ELEMENTARY)
    assert largest_excess(GpuRunnable(graph, "torch-cpu").run("last_hidden_state", batch), exact, allowed) <= 1


@pytest.mark.parametrize(("arch", "config"), [("bert", {}), ("modernbert", {"local_attention": 18}), ("mpnet", {})])
def test_masks_at_the_end_are_hidden(
    arch: str, config: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = make_late_checkpoint(tmp_path_factory.mktemp("late") / arch, arch, config=config)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.token_form is not None
    mask = checkpoint.token_form.expansion
    plain = build_graph(checkpoint, None)
    batch = Batch.of(
        [[5, 9, 8, 6, *[mask] * 9], [5, *[mask] * 30], [mask] * 5, [5, mask, 9, mask, 6], [7], [5, 9, mask]]
    )
    exact, allowed = allowed_difference(plain, "token_embedding", batch, elementary=FAST_ELEMENTARY)
    graph, _ = optimise(plain, QuantSpec("f32"))
    assert any(node.op == "seen_tokens" for node in graph.nodes)
    assert largest_excess(GpuRunnable(graph, "torch-cpu").run("token_embedding", batch), exact, allowed) <= 1


def test_nothing_in_gives_nothing_out(tmp_path_factory: pytest.TempPathFactory) -> None:
    gpu = open_gpu("bert-fill_mask", "f32", tmp_path_factory)
    assert gpu.run("last_hidden_state", Batch.of([])).shape == (0, 64)
    assert gpu.run("logits", Batch.of([[1, 2]]), np.empty(0, np.int32)).shape == (0, 200)


def test_rows_may_be_selected_in_any_order_and_twice(tmp_path_factory: pytest.TempPathFactory) -> None:
    opened, graph = compiled_graph("bert-fill_mask", "f32", tmp_path_factory)
    batch, select = Batch.of([[1, 2, 3], [4, 5]]), np.array([4, 0, 0, 3], np.int32)
    got = GpuRunnable(graph, "torch-cpu").run("logits", batch, select)
    np.testing.assert_allclose(got, Reference(opened.graph).evaluate("logits", batch, select), rtol=1e-4, atol=1e-4)


def test_a_packed_batch_by_hand() -> None:
    batch = Batch.of([[7, 8, 9], [5], list(range(TILE + 1))], [[0, 1, 1], [1], [0] * (TILE + 1)])
    packed = pack(batch, np.array([2, 0], np.int32), CPU)
    assert packed.token_ids.tolist() == [7, 8, 9, 5, *range(TILE + 1)]
    assert packed.token_type_ids.tolist() == [0, 1, 1, 1, *[0] * (TILE + 1)]
    assert packed.positions.tolist() == [0, 1, 2, 0, *range(TILE + 1)]
    assert packed.sequence.tolist() == [0, 0, 0, 1, *[2] * (TILE + 1)]
    assert packed.offsets.tolist() == [0, 3, 4, TILE + 5]
    assert packed.tiles.tolist() == [[0, 0], [1, 0], [2, 0], [2, TILE]]
    assert packed.select is not None
    assert packed.select.tolist() == [2, 0]
    padded = pack(batch, None, CPU, tokens=TILE + 8, seqs=6)
    assert padded.select is None
    assert padded.token_ids.tolist() == [*packed.token_ids.tolist(), 0, 0, 0]
    assert padded.sequence.tolist()[-4:] == [2, 5, 5, 5]
    assert padded.offsets.tolist() == [0, 3, 4, *[TILE + 5] * 4]
    assert padded.tiles.tolist() == [*packed.tiles.tolist(), *[[5, 0]] * 3]


@pytest.mark.parametrize("name", ["roberta-pad-5", "mpnet-embed-every-mode", "modernbert-embed", "deberta-v2-conv"])
def test_padding_for_a_cuda_graph_changes_no_real_row(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """More tokens of padding than there are positions. Steps but attention see them; those of attention without a
    kernel are in no CUDA graph, and go by real lengths.
    """
    opened, graph = compiled_graph(name, "f32", tmp_path_factory)
    programs, _ = build(graph, STEPS, torch.float32, CPU)
    batch = Batch.of(texts(graph.meta))
    exact, allowed = allowed_difference(opened.graph, opened.output, batch, elementary=FAST_ELEMENTARY)
    made = programs[opened.output].run(pack(batch, None, CPU, tokens=batch.tokens + 600, seqs=batch.seqs + 3))
    assert largest_excess(made[: len(exact)].numpy(), exact, allowed) <= 1
