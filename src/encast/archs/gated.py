"""What encoders since 2024 share: positions within attention, a gated feed-forward, norms behind or before.

``gated_layer`` has layer norms behind (NomicBERT, GTE, JinaBERT), ``pre_norm_layer`` norms by the root mean square
before (EuroBERT, NeoBERT); ModernBERT takes attention alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from encast.archs.base import Architecture
from encast.archs.config import Config
from encast.archs.encoder import MOST_LAYERS, Sizes
from encast.archs.heads import classify_first_token
from encast.archs.modules import Modules
from encast.errors import CheckpointError
from encast.ir import FusionPromise, Graph

__all__ = [
    "MOST_POSITIONS",
    "OWN_NAMES",
    "Biases",
    "GatedEncoder",
    "GatedPaths",
    "PreNormEncoder",
    "Rotary",
    "attend",
    "gate",
    "gated_layer",
    "need_pairs",
    "packed_projections",
    "pre_norm_layer",
    "projections_of_heads",
    "read_flash_rotary",
    "read_rotary",
    "read_sizes",
]

MOST_POSITIONS = 1 << 17
"""No tensor bounds the positions of these models, and tables of angles or distances are made for all of them."""
OWN_NAMES = (
    "these tensors have the names of the model's own code; open it with transformers, and save it with "
    "save_pretrained(..., save_original_format=False)"
)
"""Why transformers does not train a checkpoint as it is, for ``Architecture.foreign``."""
_PARTS = ("query", "key", "value")


@dataclass(frozen=True)
class Rotary:
    """The numbers of op ``rotary``: the base of the angles, and what all angles are multiplied by."""

    theta: float
    rate: float = 1.0


@dataclass(frozen=True)
class GatedPaths:
    """Where the parts of a layer stand below the layer's own path.

    ``attention``: queries, keys and values, or one tensor that has them in this order. ``inner``: the gate and what it
    is multiplied with, or one tensor that has both, the gate first unless ``up_first``; with ``gated`` False a single
    product with an activation.
    """

    attention: tuple[str, ...]
    attention_output: str
    attention_norm: str
    inner: tuple[str, ...]
    output: str
    output_norm: str
    up_first: bool = False
    gated: bool = True


@dataclass(frozen=True)
class Biases:
    """Which products of a layer have a bias."""

    attention: bool = False
    attention_output: bool = False
    inner: bool = False
    output: bool = False


class GatedEncoder(Architecture):
    """Layers with their norms behind, a gated feed-forward, and BERT's pooler before the classifier."""

    told_by_graph = False

    def promises(self, graph: Graph) -> dict[str, FusionPromise]:
        # A gate is a step of its own: only activations without one become part of a product.
        inside = [node.layer for node in graph.nodes if node.op == "activation" and node.layer >= 0]
        promised = super().promises(graph)
        return {**promised, "linear_activation": FusionPromise(int(bool(inside)), promised["linear_activation"].other)}

    def classify(self, encoder: Modules, head: Modules, x: str, labels: int) -> str:
        hidden = self.sizes.hidden
        return classify_first_token(
            encoder, head, x, hidden, labels, dense_path="pooler.dense", out_path="classifier", activation="tanh"
        )


class PreNormEncoder(Architecture):
    """Layers of ``pre_norm_layer`` over words without a norm of their own."""

    told_by_graph = False
    position_types = ()

    def promises(self, graph: Graph) -> dict[str, FusionPromise]:
        # A layer's sum goes on to the next one as it is, and products add it; words have no norm of their own.
        return {
            **super().promises(graph),
            "linear_activation": FusionPromise(0, sum(node.op == "activation" for node in graph.nodes)),
            "add_layer_norm": FusionPromise(0, 0),
            "embed_layer_norm": FusionPromise(0, 0),
        }


def read_sizes(
    config: Config, *, positions: int, types: int, activation: str, least_types: int = 0, eps: float = 1e-12
) -> Sizes:
    """The fields as BERT's config names them; ``positions``, ``types``, ``activation`` and ``eps`` where it says
    nothing.

    ``least_types``: the least that ``type_vocab_size`` may be; 0 is a model without token types.
    """
    return Sizes(
        vocab=config.count("vocab_size"),
        hidden=config.count("hidden_size"),
        layers=config.count("num_hidden_layers", most=MOST_LAYERS),
        heads=config.count("num_attention_heads"),
        inner=config.count("intermediate_size"),
        positions=config.count("max_position_embeddings", default=positions, most=MOST_POSITIONS),
        type_vocab=config.count("type_vocab_size", default=types, least=least_types),
        eps=config.eps("layer_norm_eps", eps),
        activation=config.activation("hidden_act", default=activation),
    ).checked(config)


_QUICKEST = 1e6
"""Radians; angles far beyond have no digit left of their turn."""


def need_pairs(config: Config, sizes: Sizes) -> None:
    """Raises ``CheckpointError`` unless the columns of a head are pairs, and ``UnsupportedModelError`` where
    ``head_dim`` says another size than the hidden one gives.
    """
    size = sizes.hidden // sizes.heads
    config.refuse_unless("head_dim", size)
    if size % 2:
        raise CheckpointError(
            f"{config.where}: {sizes.heads} heads of {size} columns; rotary positions need pairs, an even number: "
            "correct the hidden size or the number of heads"
        )


def read_rotary(
    config: Config, theta: float, size: int, kinds: tuple[str, ...] = ("default", "linear", "ntk")
) -> Rotary:
    """``rope_scaling``, else ``rope_parameters``, with the base in either or in ``rope_theta``, else ``theta``.

    ``size``: columns of a head. ``kinds`` of angles that the model's code has: ``default``; ``linear``, which
    divides all angles by ``factor``; ``ntk`` as Alibaba-NLP/new-impl has it (a factor above 1 multiplies the base, and
    all angles by ``factor ** (-2 / size)``: "fixed" of https://kexue.fm/archives/9706). Raises
    ``UnsupportedModelError`` for other kinds and fields.
    """
    base = config.above_zero("rope_theta", theta) if config.given("rope_theta") else theta
    fields = next(
        (part for name in ("rope_scaling", "rope_parameters") if (part := config.part(name)) and part.names()), None
    )
    if fields is None:
        return Rotary(base)
    # Both spellings of the kind are in use, and transformers writes both into one file.
    for name in ("rope_type", "type"):
        fields.refuse_unless(name, *kinds)
    fields.refuse_unless("partial_rotary_factor", 1.0, 1)
    for name in fields.names():
        if name not in ("rope_type", "type", "rope_theta", "factor", "partial_rotary_factor"):
            fields.refuse_unless(name)
    kind = fields.text("rope_type") or fields.text("type") or "default"
    fields.refuse_unless("type", kind)
    if fields.given("rope_theta"):
        base = fields.above_zero("rope_theta", base)
    if kind == "default":
        fields.refuse_unless("factor", 1.0, 1)
        return Rotary(base)
    factor = fields.above_zero("factor")
    rotary = Rotary(base)
    if kind == "linear":
        rotary = Rotary(base, 1.0 / factor)
    elif factor > 1.0:
        rotary = Rotary(base * factor, factor ** (-2.0 / size))
    # A base below 1 makes the last pair the quickest.
    if not max(rotary.rate, rotary.rate * rotary.theta ** (2.0 / size - 1.0)) <= _QUICKEST:
        raise CheckpointError(
            f"{fields.where}: factor is {factor:g} and the base {base:g}; a position turns a pair by {_QUICKEST:g} at "
            "most: correct the file"
        )
    return rotary


def read_flash_rotary(config: Config, size: int) -> Rotary:
    """``rotary_emb_base``, the word of flash-attention's BERT; its pairs are halves of a head, and no xPos.

    transformers writes the words of its own models into the same file: raises ``CheckpointError`` where those say
    something else.
    """
    config.refuse_unless("rotary_emb_interleaved", False)
    config.refuse_unless("rotary_emb_scale_base")
    rotary = Rotary(config.above_zero("rotary_emb_base", 10_000.0))
    again = read_rotary(config, rotary.theta, size)
    if again != rotary:
        raise CheckpointError(
            f"{config.where}: rotary_emb_base is {rotary.theta:g}, and rope_theta, rope_scaling or rope_parameters say "
            f"{again.theta:g}, times {again.rate:g}: two spellings of one field: remove one"
        )
    return rotary


def packed_projections(encoder: Modules, x: str, path: str, hidden: int, *, layer: int, bias: bool) -> list[str]:
    """Queries, keys and values of ``x`` by module ``path``, whose tensors have the rows of all three."""
    weights = encoder.parts(f"{path}.weight", _PARTS, hidden, hidden)
    biases = encoder.parts(f"{path}.bias", _PARTS, hidden) if bias else ["", "", ""]
    return [
        encoder.graph.add("linear", x, weight, added, name=f"{path}.{part}", layer=layer, activation="none")
        for part, weight, added in zip(_PARTS, weights, biases, strict=True)
    ]


def projections_of_heads(encoder: Modules, x: str, path: str, sizes: Sizes, *, layer: int) -> list[str]:
    """Queries, keys and values of ``x`` by module ``path``, whose one weight has the rows of all three head by head,
    and rotary pairs of queries and keys as neighbours.
    """
    hidden, size = sizes.hidden, sizes.hidden // sizes.heads
    weights = encoder.parts_of_heads(f"{path}.weight", _PARTS, sizes.heads, size, hidden, pairs=_PARTS[:2])
    return [
        encoder.graph.add("linear", x, weight, "", name=f"{path}.{part}", layer=layer, activation="none")
        for part, weight in zip(_PARTS, weights, strict=True)
    ]


def attend(
    graph: Graph,
    projections: list[str],
    sizes: Sizes,
    *,
    at: str,
    layer: int,
    rotary: Rotary | None = None,
    slopes: str = "",
    reach: int | None = None,
) -> str:
    """Attention of queries, keys and values, ``f32[tokens, hidden]`` each; the nodes are named below ``at``.

    ``rotary`` turns queries and keys (Su et al. 2021); ``slopes``, a constant ``f32[heads]``, takes from scores what
    distance costs (Press et al. 2022); ``reach`` hides what is further.
    """
    query, key, value = projections

    def add(op: str, *inputs: str, name: str, **attrs: Any) -> str:
        return graph.add(op, *inputs, name=f"{at}.{name}", layer=layer, **attrs)

    if rotary is not None:
        angles = {"heads": sizes.heads, "theta": rotary.theta, "rate": rotary.rate}
        query = add("rotary", query, name="rotary.query", **angles)
        key = add("rotary", key, name="rotary.key", **angles)
    scores = add("attention_scores", query, key, name="scores", heads=sizes.heads)
    scores = add("scale", scores, name="scaled_scores", factor=1.0 / math.sqrt(sizes.hidden // sizes.heads))
    if slopes:
        scores = add("linear_bias", scores, slopes, name="biased_scores")
    if reach is not None:
        scores = add("local_mask", scores, name="near_scores", reach=reach)
    return add("attention_context", add("softmax", scores, name="probs"), value, name="context")


def gated_layer(
    encoder: Modules,
    x: str,
    sizes: Sizes,
    paths: GatedPaths,
    biases: Biases,
    *,
    layer: int,
    path: str,
    rotary: Rotary | None = None,
    slopes: str = "",
) -> str:
    """Attention, add, norm, gated feed-forward (Shazeer 2020), add, norm; ``rotary``, ``slopes``: see ``attend``."""
    graph, hidden = encoder.graph, sizes.hidden

    def linear(x: str, part: str, size: int, inner: int, bias: bool) -> str:
        return encoder.linear(x, f"{path}.{part}", size, inner, layer=layer, bias=bias)

    def add_and_norm(x: str, residual: str, part: str) -> str:
        total = graph.add("add", x, residual, name=f"{path}.{part}.sum", layer=layer)
        return encoder.layer_norm(total, f"{path}.{part}", hidden, sizes.eps, layer=layer)

    if len(paths.attention) == 1:
        at = f"{path}.{paths.attention[0]}"
        projections = packed_projections(encoder, x, at, hidden, layer=layer, bias=biases.attention)
    else:
        projections = [linear(x, part, hidden, hidden, biases.attention) for part in paths.attention]
    context = attend(graph, projections, sizes, at=f"{path}.attention", layer=layer, rotary=rotary, slopes=slopes)
    context = linear(context, paths.attention_output, hidden, hidden, biases.attention_output)
    attended = add_and_norm(context, x, paths.attention_norm)
    if paths.gated:
        inner = gate(encoder, attended, sizes, paths, biases.inner, layer=layer, path=path)
    else:
        inner = linear(attended, paths.inner[0], sizes.inner, hidden, biases.inner)
        inner = encoder.activation(inner, sizes.activation, name=f"{path}.{paths.inner[0]}.activation", layer=layer)
    return add_and_norm(linear(inner, paths.output, hidden, sizes.inner, biases.output), attended, paths.output_norm)


def pre_norm_layer(
    encoder: Modules,
    x: str,
    sizes: Sizes,
    paths: GatedPaths,
    biases: Biases,
    project: Callable[[str], list[str]],
    *,
    layer: int,
    path: str,
    at: str,
    rotary: Rotary,
) -> str:
    """Norm, attention, add; norm, gated feed-forward, add; norms by the root mean square.

    ``project`` makes queries, keys and values of what it is given; ``at`` names the nodes of attention.
    """
    graph, hidden = encoder.graph, sizes.hidden

    def norm(x: str, part: str) -> str:
        return encoder.rms_norm(x, f"{path}.{part}", hidden, sizes.eps, layer=layer)

    def linear(x: str, part: str, inner: int, bias: bool) -> str:
        return encoder.linear(x, f"{path}.{part}", hidden, inner, layer=layer, bias=bias)

    projections = project(norm(x, paths.attention_norm))
    context = attend(graph, projections, sizes, at=at, layer=layer, rotary=rotary)
    attended = linear(context, paths.attention_output, hidden, biases.attention_output)
    x = graph.add("add", x, attended, name=f"{at}.sum", layer=layer)
    inner = gate(encoder, norm(x, paths.output_norm), sizes, paths, biases.inner, layer=layer, path=path)
    made = linear(inner, paths.output, sizes.inner, biases.output)
    return graph.add("add", x, made, name=f"{path}.{paths.output.rpartition('.')[0]}.sum", layer=layer)


def gate(encoder: Modules, x: str, sizes: Sizes, paths: GatedPaths, bias: bool, *, layer: int, path: str) -> str:
    """A gate and what it is multiplied with (Shazeer 2020): f32[tokens, inner] of the layer's modules ``paths.inner``.

    One product makes the gate's columns and then the others, as op ``gated_activation`` reads them, however the
    checkpoint holds its rows.
    """

    def rows(part: str, *shape: int) -> str:
        names = [f"{path}.{one}.{part}" for one in paths.inner]
        if len(names) > 1:
            return encoder.stack(names, sizes.inner, *shape)
        if paths.up_first:
            return encoder.halves_swapped(names[0], 2 * sizes.inner, *shape)
        return encoder.constant(names[0], 2 * sizes.inner, *shape)

    name = f"{path}.{paths.inner[0]}" if len(paths.inner) == 1 else f"{path}.{paths.inner[0].rpartition('.')[0]}.gated"
    weight, added = rows("weight", sizes.hidden), rows("bias") if bias else ""
    inner = encoder.graph.add("linear", x, weight, added, name=name, layer=layer, activation="none")
    return encoder.graph.add("gated_activation", inner, name=f"{name}.activation", layer=layer, kind=sizes.activation)
