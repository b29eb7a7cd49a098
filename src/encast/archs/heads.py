"""The parts of heads that more than one architecture has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from encast.archs.encoder import Sizes
from encast.archs.modules import Modules
from encast.archs.weights import Float32
from encast.errors import CheckpointError, UnsupportedModelError
from encast.ir import Graph
from encast.ir.ops import ACTIVATIONS, POOLING_MODES

__all__ = [
    "DenseModule",
    "LateInteraction",
    "M3Heads",
    "SentenceModules",
    "classify_first_token",
    "embed_m3",
    "pool_sentences",
    "predict_tokens",
    "project_tokens",
    "transform",
    "weigh_tokens",
]


class DenseModule(Protocol):
    """A dense layer behind the pooling, or on every token.

    ``weight: f32[out, in]``, ``bias: f32[out]``, an activation or "none".
    """

    @property
    def weight(self) -> Float32: ...

    @property
    def bias(self) -> Float32 | None: ...

    @property
    def activation(self) -> str: ...


class LateInteraction(Protocol):
    """What stands behind the encoder of a model of token embeddings: ``dense``, or with ``dim`` the tensor
    ``linear.weight: f32[dim, hidden]``.
    """

    @property
    def dense(self) -> Sequence[DenseModule]: ...

    @property
    def dim(self) -> int | None: ...


class M3Heads(Protocol):
    """The layers that BGE-M3 has on every token: of its weight, and of its embedding."""

    @property
    def weigh(self) -> DenseModule: ...

    @property
    def embed(self) -> DenseModule: ...


class SentenceModules(Protocol):
    """What a sentence-transformers ``modules.json`` says, see ARCHITECTURE.md."""

    @property
    def pooling_modes(self) -> tuple[str, ...]: ...

    @property
    def dense(self) -> Sequence[DenseModule]: ...

    @property
    def normalize(self) -> bool: ...

    @property
    def similarity(self) -> str | None: ...

    @property
    def splade(self) -> object | None: ...

    @property
    def late(self) -> LateInteraction | None: ...


def pool_sentences(graph: Any, x: str, width: int, modules: SentenceModules | None, where: str) -> str:
    """Pooling, dense layers and normalisation as ``modules`` say: f32[seqs, dim].

    Without them (a bare encoder) it is the mean over the tokens, not normalised, which is what
    sentence-transformers makes of a bare encoder.
    """
    if modules is None:
        return str(graph.add("pooling", x, name="pooling", modes=["mean"]))
    modes = list(modules.pooling_modes)
    wrong = [mode for mode in modes if mode not in POOLING_MODES]
    if wrong or not modes:
        raise UnsupportedModelError(
            f"{where}: the pooling modes are {modes}; encast has one or several of {list(POOLING_MODES)}"
        )
    x = graph.add("pooling", x, name="pooling", modes=modes)
    x = _dense_layers(graph, x, width * len(modes), modules.dense, where)
    return str(graph.add("normalize", x, name="normalize")) if modules.normalize else x


def project_tokens(
    head: Modules, x: str, width: int, late: LateInteraction | None, m3: M3Heads | None, where: str
) -> str:
    """A vector of length 1 for every token: f32[tokens, dim] of f32[tokens, width]."""
    if late is not None and late.dim is not None:
        x, width = head.linear(x, "linear", late.dim, width, bias=False), late.dim
    dense = late.dense if late is not None else [m3.embed] if m3 is not None else []
    x = _dense_layers(head.graph, x, width, dense, where, stem="dense" if m3 is None else "colbert")
    return head.graph.add("normalize", x, name="normalize" if m3 is None else "colbert.normalize")


def weigh_tokens(graph: Graph, x: str, width: int, m3: M3Heads, where: str) -> str:
    """A weight for every token, 0 or more: f32[tokens, 1] of f32[tokens, width]."""
    x = _dense_layers(graph, x, width, [m3.weigh], where, stem="sparse")
    return graph.add("activation", x, name="sparse.activation", kind="relu")


def embed_m3(
    graph: Graph, head: Modules, x: str, width: int, modules: SentenceModules, m3: M3Heads, where: str
) -> None:
    """Adds the three outputs of BGE-M3, and all of them in the rows of one: a token's vector, its last hidden state
    scaled to length 1, which of the first token is the embedding of the text, and its weight.
    """
    states = graph.add("normalize", x, name="states")
    weights = weigh_tokens(graph, x, width, m3, where)
    vectors = project_tokens(head, x, width, None, m3, where)
    graph.outputs["embedding"] = pool_sentences(graph, x, width, modules, where)
    graph.outputs["sparse_embedding"], graph.outputs["token_embedding"] = weights, vectors
    graph.outputs["m3_embedding"] = graph.add("concat", vectors, states, weights, name="m3_embedding")


def _dense_layers(
    graph: Any, x: str, width: int, modules: Sequence[DenseModule], where: str, *, stem: str = "dense"
) -> str:
    for index, module in enumerate(modules):
        path = f"{stem}.{index}.linear"
        if module.weight.ndim != 2 or module.weight.shape[1] != width or not len(module.weight):
            raise CheckpointError(
                f"{where}: dense module {index} has a weight of shape {list(module.weight.shape)}, what comes "
                f"before it is {width} wide, so one or more rows of {width} numbers are needed; the files of the "
                "checkpoint do not fit together"
            )
        weight = graph.add_constant(f"{path}.weight", module.weight)
        if module.bias is not None and module.bias.shape != module.weight.shape[:1]:
            raise CheckpointError(
                f"{where}: dense module {index} has a bias of shape {list(module.bias.shape)}, its weight has "
                f"{module.weight.shape[0]} rows; modules.json and the weights do not fit"
            )
        bias = graph.add_constant(f"{path}.bias", module.bias) if module.bias is not None else ""
        x = graph.add("linear", x, weight, bias, name=path, activation="none")
        if module.activation != "none":
            if module.activation not in ACTIVATIONS:
                raise UnsupportedModelError(
                    f"{where}: dense module {index} has activation {module.activation!r}; "
                    f"encast has {['none', *ACTIVATIONS]}"
                )
            x = graph.add("activation", x, name=f"{path}.activation", kind=module.activation)
        width = module.weight.shape[0]
    return x


def classify_first_token(
    dense: Modules, out: Modules, x: str, hidden: int, labels: int, *, dense_path: str, out_path: str, activation: str
) -> str:
    """First token, dense layer, activation, projection to the labels: f32[seqs, labels]."""
    first = out.graph.add("first_token", x, name="first_token")
    inner = dense.linear(first, dense_path, hidden, hidden)
    inner = dense.activation(inner, activation, name=f"{dense_path}.activation")
    return out.linear(inner, out_path, labels, hidden)


def transform(
    head: Modules, x: str, sizes: Sizes, width: int, *, dense: str, norm: str, activation: str, bias: bool = True
) -> str:
    """The part of a masked-LM head before its decoder: f32[rows, width] of f32[rows, hidden]."""
    x = head.linear(x, dense, width, sizes.hidden, bias=bias)
    x = head.activation(x, activation, name=f"{dense}.activation")
    return head.layer_norm(x, norm, width, sizes.eps)


def predict_tokens(
    encoder: Modules,
    head: Modules,
    x: str,
    sizes: Sizes,
    width: int,
    *,
    decoder: str,
    bias: str | None,
    tied: bool,
    words: str = "embeddings.word_embeddings",
) -> str:
    """The decoder of a masked-LM head: f32[rows, vocab] of f32[rows, width].

    ``tied``: what the config says of ``tie_word_embeddings``. A checkpoint that holds its own decoder weights keeps
    them where they differ from the word embeddings, whatever the config says, as transformers does. ``bias`` is an
    older name of the decoder's bias, None of one that has none; ``words`` is the module of the word embeddings.
    """
    words = f"{words}.weight"
    weight = f"{decoder}.weight"
    if head.has(weight) and not head.same(weight, (sizes.vocab, width), words):
        weight = head.constant(weight, sizes.vocab, width)
    elif head.has(weight) or tied:
        weight = encoder.constant(words, sizes.vocab, width)
    else:
        weight = head.constant(weight, sizes.vocab, width)
    if bias is None:
        return head.graph.add("linear", x, weight, "", name=decoder, activation="none")
    names = [name for name in (f"{decoder}.bias", bias) if name and head.has(name)] or [bias or f"{decoder}.bias"]
    added = head.constant(names[0], sizes.vocab)
    for other in names[1:]:
        head.array(other, sizes.vocab)
    return head.graph.add("linear", x, weight, added, name=decoder, activation="none")
