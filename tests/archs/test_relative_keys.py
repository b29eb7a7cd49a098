"""``relative_key`` and ``relative_key_query``: what configs say, and what is refused. Cases give the answers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_files import CASES as EXPORTS
from onnx_files import checkpoint_of
from test_build_graph import build, made, with_config, with_tensors

from encast.archs import need_transformers
from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.ir import Graph, Node
from encast.ir.relative import distance_origin, unpack_distances
from encast.passes import optimise
from encast.quant import QuantSpec

GOLDEN = Path(__file__).parent.parent / "golden" / "onnx"
KINDS = ("relative_key", "relative_key_query")
ARCHS = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "albert")


def of_kind(folder: Path, arch: str = "bert", kind: str = "relative_key_query", **options: Any) -> Path:
    return made(folder, arch, config={"position_embedding_type": kind}, **options)


def nodes(graph: Graph, op: str) -> list[Node]:
    return [node for node in graph.nodes if node.op == op]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ARCHS)
def test_no_token_has_a_place_of_its_own(arch: str, kind: str, tmp_path: Path) -> None:
    """And texts are as long as distances reach, also where padding ids take places of a table of positions."""
    graph = build(of_kind(tmp_path, arch, kind))
    assert not nodes(graph, "position_ids")
    assert [node.attrs["of"] for node in nodes(graph, "relative_scores")] == ["query", "key"][: KINDS.index(kind) + 1]
    assert graph.meta.max_len == 48


def test_a_table_of_positions_may_be_absent(tmp_path: Path) -> None:
    """transformers writes one that nothing reads."""
    name = "embeddings.position_embeddings.weight"
    folder = of_kind(tmp_path)
    with_tensors(folder, lambda tensors: tensors.pop(name))
    assert name not in build(folder).constants


def test_all_distances_of_the_longest_text(tmp_path: Path) -> None:
    """A key behind the query has a row before the middle; keys meet the same vectors as queries."""
    folder = of_kind(tmp_path, positions=5)
    graph, _ = optimise(build(folder), QuantSpec("f32"), strict=True, exact=True)
    (attention,) = nodes(graph, "disentangled_attention")
    assert attention.attrs["shared"]
    vectors = open_checkpoint(folder).tensors.f32("encoder.layer.0.attention.self.distance_embedding.weight")
    assert vectors.shape == (9, 4)
    keys, queries = (unpack_distances(graph.constants[name].array, 1, 4)[0] for name in attention.inputs[1:])
    middle = distance_origin(len(keys))
    np.testing.assert_array_equal(keys[middle - 4 : middle + 5], vectors[::-1])
    # Queries have taken in the scale, a power of two; what keys are multiplied by has too.
    np.testing.assert_array_equal(queries[middle - 4 : middle + 5], vectors * 0.5)


def test_layers_of_a_group_share_their_tables(tmp_path: Path) -> None:
    graph, _ = optimise(build(of_kind(tmp_path, "albert", layers=4, groups=2)), QuantSpec("f32"), strict=True)
    tables = [tuple(node.inputs[1:]) for node in nodes(graph, "disentangled_attention")]
    assert tables[0] == tables[1]
    assert tables[2] == tables[3]
    assert len({name for pair in tables for name in pair}) == 4


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"position_embedding_type": "absolute"}, CheckpointError, r"have no place .*distance_embedding\.weight"),
        ({"position_embedding_type": None}, CheckpointError, r"have no place .*distance_embedding\.weight"),
        ({"position_embedding_type": "relative"}, UnsupportedModelError, r"is 'relative', which .* 'relative_key'"),
        ({"max_position_embeddings": 47}, CheckpointError, r"distance_embedding\.weight' has shape \[95, 4\]"),
        ({"num_attention_heads": 4}, CheckpointError, r"distance_embedding\.weight' has shape \[95, 4\]"),
        (
            {"max_position_embeddings": (1 << 13) + 1},
            UnsupportedModelError,
            "max_position_embeddings is 8193 with position_embedding_type 'relative_key_query'; encast has tables",
        ),
    ],
)
def test_configs_that_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        build(with_config(of_kind(tmp_path), **changes))


def test_missing_vectors_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"distance_embedding\.weight' is missing"):
        build(with_config(made(tmp_path), position_embedding_type="relative_key"))


@pytest.mark.parametrize("arch", ["distilbert", "mpnet", "modernbert", "nomic_bert", "gte", "deberta-v2"])
def test_other_architectures_have_none(arch: str, tmp_path: Path) -> None:
    folder = with_config(made(tmp_path, arch), position_embedding_type="relative_key")
    with pytest.raises(UnsupportedModelError, match="position_embedding_type is 'relative_key', which changes"):
        build(folder)


@pytest.mark.parametrize("arch", ARCHS)
def test_training_is_refused(arch: str, tmp_path: Path) -> None:
    """transformers would open it, without positions of any kind, and without a word."""
    message = "training needs a model of transformers, and since version 5 .* 'relative_key_query'"
    with pytest.raises(UnsupportedModelError, match=message):
        need_transformers(open_checkpoint(of_kind(tmp_path, arch)), "training")


def test_exports_are_not_read(tmp_path: Path) -> None:
    case = next(case for case in EXPORTS if case.file == "bert-features-torchscript-11.onnx")
    checkpoint_of(case, tmp_path / "export")
    (tmp_path / "export" / "model.safetensors").unlink()
    shutil.copy(GOLDEN / case.file, tmp_path / "export" / "model.onnx")
    with_config(tmp_path / "export", position_embedding_type="relative_key")
    with pytest.raises(UnsupportedModelError, match=r"position_embedding_type is 'relative_key', of which no exports"):
        build(tmp_path / "export")
