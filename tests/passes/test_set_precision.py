"""Narrow products: which ones, sharing, and the narrow copies that norms write."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from graphs import Builder, batch, encoder, masked_lm

from encast.backends.reference import Reference
from encast.ir import Graph
from encast.passes import optimise
from encast.quant import QuantSpec
from encast.quant.rounding import bf16_bits, quantize_rows


def ops(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes)


def narrow(graph: Graph, spec: QuantSpec) -> Graph:
    return optimise(graph, spec, strict=True)[0]


@pytest.mark.parametrize(("dtype", "copy"), [("int8", "quantize"), ("bf16", "cast_bf16")])
def test_every_product_of_the_layers_is_narrow(dtype: str, copy: str) -> None:
    graph = narrow(encoder(layers=2), QuantSpec(dtype))
    counts = ops(graph)
    assert counts[f"linear_{dtype}"] == 8
    assert counts["linear"] == 0
    # Embedding norm and three more; the last norm feeds no product. Context and inner have copies of their own.
    assert counts["embed_layer_norm_narrow"] == 1
    assert counts["add_layer_norm_narrow"] == 3
    assert counts["add_layer_norm"] == 1
    assert counts[copy] == 4


def test_attention_computes_in_the_dtype_of_the_spec_or_of_the_first_pattern() -> None:
    def products(spec: QuantSpec) -> list[str]:
        return [node.attrs["products"] for node in narrow(encoder(layers=2), spec).nodes if node.op == "attention"]

    assert products(QuantSpec("f32")) == ["f32", "f32"]
    assert products(QuantSpec("bf16")) == ["bf16", "bf16"]
    assert products(QuantSpec()) == ["int8", "int8"]
    assert products(QuantSpec(keep=(("*.0.attention.context", "bf16"), ("*.attention.*", "f32")))) == ["bf16", "f32"]
    assert products(QuantSpec(rows=("selected",))) == ["f32", "f32"]


def test_f32_has_no_narrow_op() -> None:
    assert not {op for op in ops(narrow(encoder(), QuantSpec("f32"))) if "narrow" in op or "int8" in op}


def test_weights_are_those_of_the_rounding_and_the_wide_ones_go() -> None:
    graph = encoder(layers=1)
    wide = graph.constants["encoder.layer.0.inner.weight"].array
    int8 = narrow(graph, QuantSpec())
    values, scale = quantize_rows(wide)
    assert (int8.constants["encoder.layer.0.inner.weight.int8"].array == values).all()
    assert (int8.constants["encoder.layer.0.inner.weight.int8.scale"].array == scale).all()
    assert "encoder.layer.0.inner.weight" not in int8.constants
    bf16 = narrow(graph, QuantSpec("bf16"))
    assert bf16.type_of("encoder.layer.0.inner.weight.bf16").dtype == "bf16"
    assert (bf16.constants["encoder.layer.0.inner.weight.bf16"].array == bf16_bits(wide)).all()


def test_products_of_one_value_share_its_narrow_copy() -> None:
    builder = Builder()
    x = builder.embeddings()
    parts = [builder.linear(x, name, 32) for name in ("a", "b", "c")]
    total = builder.graph.add("add", parts[0], parts[1], name="ab")
    builder.graph.outputs["last_hidden_state"] = builder.graph.add("add", total, parts[2], name="abc")
    builder.graph.meta = replace(builder.graph.meta, layers=0)
    graph, _ = optimise(builder.graph, QuantSpec())
    assert ops(graph)["linear_int8"] == 3
    assert ops(graph)["quantize"] == 0
    assert len({node.inputs[0] for node in graph.nodes if node.op == "linear_int8"}) == 1


def test_layers_that_share_weights_share_the_narrow_ones() -> None:
    graph = narrow(encoder(layers=4, shared=True), QuantSpec())
    assert ops(graph)["linear_int8"] == 16
    assert len([constant for constant in graph.constants.values() if constant.type.dtype == "s8"]) == 4


def test_the_tied_decoder_is_narrow_and_the_embedding_is_not() -> None:
    graph = narrow(masked_lm(), QuantSpec())
    decoder = next(node for node in graph.nodes if node.name == "cls.decoder")
    assert decoder.op == "linear_int8"
    assert graph.type_of("embeddings.word.weight").dtype == "f32"


@pytest.mark.parametrize(
    ("zero_point", "wanted"),
    [
        ("always", {"norm": "q8_zero_point", "context": True, "activation": True}),
        ("after_activation", {"norm": "q8", "context": False, "activation": True}),
        ("never", {"norm": "q8", "context": False, "activation": False}),
    ],
)
def test_zero_points_go_where_the_spec_says(zero_point: str, wanted: dict[str, object]) -> None:
    graph = narrow(encoder(), QuantSpec(zero_point=zero_point))
    assert {node.attrs["also"] for node in graph.nodes if node.op.endswith("_narrow")} == {wanted["norm"]}
    copies = [node for node in graph.nodes if node.op == "quantize"]
    for copy in copies:
        kind = "context" if "context" in copy.name else "activation"
        assert copy.attrs["zero_point"] is wanted[kind]
    assert len(copies) == 4


def test_rows_a_sequence_and_few_outputs_stay_wide() -> None:
    builder = Builder()
    x = builder.embeddings()
    builder.graph.outputs["last_hidden_state"] = x
    pooled = builder.graph.add("first_token", x, name="first")
    builder.graph.outputs["pooled"] = builder.linear(pooled, "pooler", 64)
    builder.graph.outputs["spans"] = builder.linear(x, "spans", 2)
    builder.graph.outputs["tags"] = builder.linear(x, "tags", 32)
    builder.graph.meta = replace(builder.graph.meta, layers=0)
    _, report = optimise(builder.graph, QuantSpec())
    assert report.linears == {"pooler": "f32", "spans": "f32", "tags": "int8"}
    _, report = optimise(builder.graph, QuantSpec(rows=("seqs", "tokens"), min_outputs=0))
    assert report.linears == {"pooler": "int8", "spans": "int8", "tags": "int8"}


def test_kept_products_are_wider() -> None:
    keep = (("*.0.inner", "bf16"), ("*.0.*", "f32"))
    graph, report = optimise(encoder(layers=2), QuantSpec(keep=keep))
    assert report.linears == {
        "encoder.layer.0.attention.self.qkv": "f32",
        "encoder.layer.0.attention.output": "f32",
        "encoder.layer.0.inner": "bf16",
        "encoder.layer.0.output": "f32",
        **{f"encoder.layer.1.{part}": "int8" for part in ("attention.self.qkv", "attention.output", "inner", "output")},
    }
    requests = batch(graph)
    plain = Reference(encoder(layers=2)).evaluate("embedding", requests)
    assert (Reference(graph).evaluate("embedding", requests) * plain).sum(1).min() > 0.999


def test_a_norm_read_in_two_dtypes_writes_one_copy_and_keeps_the_other_node() -> None:
    builder = Builder()
    x = builder.embeddings()
    a, b = builder.linear(x, "a", 32), builder.linear(x, "b", 32)
    builder.graph.outputs["last_hidden_state"] = builder.graph.add("add", a, b, name="ab")
    builder.graph.meta = replace(builder.graph.meta, layers=0)
    graph, _ = optimise(builder.graph, QuantSpec(keep=(("b", "bf16"),)))
    assert ops(graph)["embed_layer_norm_narrow"] == 1
    assert ops(graph)["cast_bf16"] == 1
    assert ops(graph)["quantize"] == 0


def test_narrow_norms_change_no_bit() -> None:
    """Fusing the copy into the norm is a matter of speed alone."""
    from encast.passes.set_precision import set_precision

    plain = encoder()
    unfused = plain.copy()
    set_precision(unfused, QuantSpec(rows=("tokens",)))
    requests = batch(plain)
    graph = unfused.copy()
    from encast.passes.fuse_narrow import fuse_narrow

    # Plain layer norms: layer_norm_narrow.
    assert fuse_narrow(graph).changes == 4
    wanted = Reference(unfused).evaluate("embedding", requests)
    assert np.array_equal(Reference(graph).evaluate("embedding", requests), wanted)
