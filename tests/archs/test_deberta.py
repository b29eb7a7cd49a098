"""What DeBERTa's config says, field by field, what is refused of it, and its two masked-LM heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_build_graph import build, made, with_config

from encast.batch import Batch
from encast.bench.roofline import Sizes
from encast.errors import CheckpointError, GraphError, UnsupportedModelError
from encast.ir import Graph, Node
from encast.ir.relative import distance_columns, distance_origin, distance_rows, pack_distances, unpack_distances

DEBERTA = "deberta-v2"


def nodes(graph: Graph, op: str) -> list[Node]:
    return [node for node in graph.nodes if node.op == op]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pos_att_type": "c2p|p2p"}, UnsupportedModelError, "pos_att_type has 'p2p'"),
        ({"pos_att_type": ["c2p", "p2p"]}, UnsupportedModelError, "pos_att_type has 'p2p'"),
        ({"pos_att_type": ["C2P"]}, UnsupportedModelError, "pos_att_type has 'C2P'"),  # transformers knows none
        ({"pos_att_type": 3}, CheckpointError, "pos_att_type is 3; a list of strings, or one with"),
        ({"norm_rel_ebd": "layer_norm|batch_norm"}, UnsupportedModelError, "norm_rel_ebd has 'batch_norm'"),
        ({"attention_head_size": 8}, UnsupportedModelError, "attention_head_size is 8"),
        ({"pooler_hidden_size": 8}, UnsupportedModelError, "pooler_hidden_size is 8"),
        ({"conv_kernel_size": 3, "conv_groups": 2}, UnsupportedModelError, "conv_groups is 2"),
        ({"conv_kernel_size": 4}, UnsupportedModelError, "conv_kernel_size is 4"),
        ({"position_buckets": 2}, UnsupportedModelError, "position_buckets is 2"),
        ({"position_buckets": 64, "max_relative_positions": 33}, UnsupportedModelError, "position_buckets is 64"),
        ({"max_position_embeddings": 1 << 14}, CheckpointError, "max_position_embeddings is 16384; an integer"),
        ({"position_buckets": 0.5}, CheckpointError, "position_buckets is 0.5"),
        ({"relative_attention": "yes"}, CheckpointError, "relative_attention is 'yes'"),
        ({"share_att_key": False}, CheckpointError, r"pos_key_proj\.weight' is missing"),
        ({"position_biased_input": True}, CheckpointError, r"position_embeddings\.weight' is missing"),
        ({"type_vocab_size": 2}, CheckpointError, r"token_type_embeddings\.weight' is missing"),
        ({"norm_rel_ebd": "none"}, CheckpointError, r"have no place .*'encoder\.LayerNorm\.bias'"),
        ({"relative_attention": False}, CheckpointError, "have no place"),
        ({"hidden_act": "mish"}, UnsupportedModelError, "hidden_act is 'mish'"),
    ],
)
def test_configs_of_deberta(changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        build(with_config(made(tmp_path, DEBERTA, layers=2, hidden=64), **changes))


def test_an_activation_of_the_convolution_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = made(tmp_path, DEBERTA, config={"conv_kernel_size": 3})
    with pytest.raises(UnsupportedModelError, match="conv_act is 'mish'"):
        build(with_config(folder, conv_act="mish"))


@pytest.mark.parametrize("words", ["p2c|c2p", " P2C | c2p ", ["c2p", "p2c"]])
def test_pos_att_type_is_a_list_or_a_text(words: object, tmp_path: Path) -> None:
    graph = build(with_config(made(tmp_path, DEBERTA, layers=1), pos_att_type=words))
    assert [node.attrs["of"] for node in nodes(graph, "relative_scores")] == ["query", "key"]


@pytest.mark.parametrize(("words", "terms"), [("c2p", 2), ("p2c", 2), ("c2p|p2c", 3)])
def test_scores_are_scaled_by_the_number_of_their_terms(words: str, terms: int, tmp_path: Path) -> None:
    (scale,) = nodes(build(with_config(made(tmp_path, DEBERTA, layers=1), pos_att_type=words)), "scale")
    assert scale.attrs["factor"] == pytest.approx((4 * terms) ** -0.5)


def test_deberta_defaults_are_those_of_its_config(tmp_path: Path) -> None:
    """What transformers takes where the config says nothing (DebertaV2Config)."""
    folder = made(tmp_path, DEBERTA, "classify", layers=1)
    silent = ["layer_norm_eps", "hidden_act", "pooler_hidden_act", "type_vocab_size", "max_relative_positions"]
    graph = build(with_config(folder, **dict.fromkeys(silent, ...), tie_word_embeddings=...))
    assert {node.attrs["eps"] for node in nodes(graph, "layer_norm")} == {1e-7}
    assert {node.attrs["kind"] for node in nodes(graph, "activation")} == {"gelu"}
    assert {node.attrs["max_distance"] for node in nodes(graph, "relative_scores")} == {48}
    assert graph.meta.type_vocab == 0
    assert "token_type_ids" not in graph.inputs
    # Without a word of it attention is that of BERT, with absolute positions.
    words = ["relative_attention", "position_biased_input", "pos_att_type", "norm_rel_ebd", "share_att_key"]
    plain = {"relative_attention": False, "position_biased_input": True, "pos_att_type": [], "norm_rel_ebd": "none"}
    graph = build(with_config(made(tmp_path / "plain", DEBERTA, layers=1, config=plain), **dict.fromkeys(words, ...)))
    assert not nodes(graph, "relative_scores")
    assert nodes(graph, "position_ids")
    assert nodes(graph, "scale")[0].attrs["factor"] == 0.5


@pytest.mark.parametrize("words", [..., None, [], "", " | "])
def test_without_types_of_positions_the_table_and_its_norm_stay_unread(words: object, tmp_path: Path) -> None:
    """transformers saves both with ``relative_attention``, and the norm without it."""
    folder = made(tmp_path, DEBERTA, layers=1)
    graph = build(with_config(folder, pos_att_type=words))
    assert not nodes(graph, "relative_scores")
    assert not any("rel_embeddings" in name or name.startswith("encoder.LayerNorm") for name in graph.constants)
    with pytest.raises(CheckpointError, match=r"have no place .*'encoder\.LayerNorm\.bias'"):
        build(with_config(folder, pos_att_type=words, norm_rel_ebd=""))
    with pytest.raises(CheckpointError, match=r"have no place .*'encoder\.rel_embeddings\.weight'"):
        build(with_config(folder, pos_att_type=words, relative_attention=False))


def test_tables_of_positions_that_nothing_adds_may_be_there(tmp_path: Path) -> None:
    """transformers too ignores them."""
    from safetensors.numpy import load_file, save_file

    folder = made(tmp_path, DEBERTA, layers=1)
    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings.position_embeddings.weight"] = np.zeros((48, 8), np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert not nodes(build(folder), "position_ids")


@pytest.mark.parametrize("legacy", [True, False])
def test_the_other_masked_lm_head_is_named(legacy: bool, tmp_path: Path) -> None:
    folder = made(tmp_path, DEBERTA, "fill_mask", layers=1, config={"legacy": legacy})
    assert build(folder).meta.task == "fill_mask"
    with pytest.raises(UnsupportedModelError, match=f"legacy is {str(not legacy).lower()}.*set legacy to"):
        build(with_config(folder, legacy=not legacy))


def test_the_released_masked_lm_head_needs_tables_as_wide_as_the_layers(tmp_path: Path) -> None:
    folder = made(tmp_path, DEBERTA, "fill_mask", layers=1, embedding=24, config={"legacy": False})
    with pytest.raises(UnsupportedModelError, match="embedding_size is 24 and hidden_size 8"):
        build(folder)


# Rows of distances


def test_buckets_by_hand() -> None:
    """Eight buckets up to distance 48: exact up to 4, then ends at 4 * (47 / 4) ** (j / 3): 9.09, 20.7, 47."""
    rows = distance_rows(np.array([0, 1, 4, 5, 9, 10, 20, 21, 47, 48, 500]), 8, 48)
    assert rows.tolist() == [8, 9, 12, 13, 13, 14, 14, 15, 15, 15, 15]
    back = distance_rows(-np.array([0, 1, 4, 5, 9, 10, 20, 21, 47, 48, 500]), 8, 48)
    assert back.tolist() == [8, 7, 4, 3, 3, 2, 2, 1, 1, 0, 0]
    assert distance_rows(np.array([-9, -3, 0, 2, 3]), 3, 0).tolist() == [0, 0, 3, 5, 5]


@pytest.mark.parametrize(("span", "furthest"), [(3, 48), (8, 5), (8, 4)])
def test_numbers_without_a_rule_are_refused(span: int, furthest: int) -> None:
    with pytest.raises(GraphError, match="no logarithmic rule"):
        distance_rows(np.zeros(1, np.int64), span, furthest)


@pytest.mark.parametrize("furthest", [10**30, 10**400])
def test_a_graph_of_absurd_distances_is_refused_at_once(furthest: int, tmp_path: Path) -> None:
    graph = build(made(tmp_path, DEBERTA, layers=1))
    nodes(graph, "relative_scores")[0].attrs["max_distance"] = furthest
    with pytest.raises(GraphError, match=r"attribute max_distance=10+ is not acceptable"):
        Graph.from_json(graph.to_json(), {name: constant.type for name, constant in graph.constants.items()})


def test_the_projections_of_tables_are_no_work_of_tokens(tmp_path: Path) -> None:
    with_them, without = (
        Sizes.of(
            build(
                made(
                    tmp_path / str(known),
                    DEBERTA,
                    layers=2,
                    config={"norm_rel_ebd": "none", "relative_attention": known},
                )
            )
        )
        for known in (True, False)
    )
    assert (with_them.weights, with_them.distances, without.distances) == (without.weights, 4, 0)
    batch = Batch.of([[1] * 5, [1] * 3])
    extra = with_them.operations(batch) - without.operations(batch)
    assert extra == 2 * 4 * with_them.hidden * (25 + 9)


@pytest.mark.parametrize("longest", [1, 2, 15, 16, 17, 48])
def test_packed_vectors_of_distances_are_found_again(longest: int) -> None:
    rows = np.arange((2 * longest - 1) * 6, dtype=np.float32).reshape(-1, 6) + 1
    columns = distance_columns(longest)
    table = unpack_distances(pack_distances(rows, 2), 2, 3)
    assert table.shape == (2, columns, 3)
    for distance in range(1 - longest, longest):
        np.testing.assert_array_equal(
            table[:, distance_origin(columns) + distance], rows[distance + longest - 1].reshape(2, 3)
        )
    assert np.count_nonzero(table) == rows.size
