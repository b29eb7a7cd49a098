"""An exported graph, shown as the checkpoint that it was exported from.

The reader of exports gives a graph of plain ops whose constants have the names of a file, or none. Which architecture
it is follows from the graph: each architecture writes its own graph for the sizes that were found, with constants
that are named and empty, and the two are compared node by node. Where they are the same, every constant has its
name, and the model is built as from any checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from encast.archs.comparison import Comparison, NoFitError, alike, same_number
from encast.archs.config import ACTIVATION_NAMES
from encast.archs.encoder import MOST_LAYERS
from encast.archs.heads import SentenceModules
from encast.archs.modules import tensors_of
from encast.archs.shown import Arrays, Dense, Pooled, Shown, Stored
from encast.archs.weights import Float32, Weights
from encast.errors import CheckpointError, EncastError, UnsupportedModelError
from encast.ir import Graph, Node

__all__ = ["ExportLike", "OutputLike", "show_export"]


class OutputLike(Protocol):
    """An output of the export: rows of ``kind`` tokens (``rows``), ``sequences``, or one ``column`` of them."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def value(self) -> str: ...

    @property
    def column(self) -> int: ...


class ExportLike(Protocol):
    """The part of ``importers``' ``Export`` that is read here."""

    @property
    def graph(self) -> Graph: ...

    @property
    def outputs(self) -> Sequence[OutputLike]: ...

    @property
    def where(self) -> str: ...

    @property
    def rounding(self) -> float: ...

    @property
    def angles(self) -> float: ...

    @property
    def fixed(self) -> Mapping[str, tuple[float, int]]: ...

    @property
    def quantised(self) -> str: ...

    @property
    def cut(self) -> int: ...

    @property
    def distances(self) -> Mapping[str, np.ndarray[Any, Any]]: ...


_POSITIONS = ("relative_scores", "rotary")
"""Ops of attention that know of positions: a graph with them may have no table."""


class Empty(Weights):
    """Weights that have every tensor, of zeros, in no memory; ``untied``: as of a decoder with weights of its own."""

    def __init__(self, untied: bool) -> None:
        super().__init__(Arrays({}), "")
        self.untied = untied

    def __contains__(self, name: str) -> bool:
        # Checkpoints with a decoder of their own have its bias under the decoder's name.
        return self.untied and name.endswith("decoder.bias")

    def take(self, name: str, shape: tuple[int, ...]) -> Float32:
        return np.broadcast_to(np.float32(0.0), shape)


_APPROXIMATED = (
    " (optimisers of ONNX Runtime may put the tanh form in the place of GELU, as O3 and O4 do: write gelu_new for it, "
    "or compile the checkpoint)"
)

_UNTYPED = (
    " (perhaps the model was exported without token_type_ids, and the file holds the row of type 0 alone: export it "
    "with them among its inputs)"
)


class _ContradictedError(CheckpointError):
    """config.json is not that of an output; another output of the graph may still be the one that it describes."""


Build = Callable[[str, Mapping[str, Any], str], Graph]
"""The graph with empty constants of a model type, a config and a task."""


@dataclass(frozen=True)
class Facts:
    """The sizes of an exported graph, by the names of ``Sizes``; ``positions`` is 0 where there is no table of them."""

    vocab: int
    embedding: int
    hidden: int
    layers: int
    heads: int
    inner: int
    positions: int
    skip_id: int
    type_vocab: int
    eps: float
    activation: str
    distinct: tuple[int, ...] = field(default=())
    """For each layer the first one with the same weights."""

    def config(self, model_type: str) -> dict[str, Any]:
        """The fields of config.json that say so."""
        shared: dict[str, Any] = {"vocab_size": self.vocab}
        if self.positions:
            shared["max_position_embeddings"] = self.positions
        if model_type == "distilbert":
            return shared | {
                "dim": self.hidden,
                "n_layers": self.layers,
                "n_heads": self.heads,
                "hidden_dim": self.inner,
                "activation": self.activation,
                # What DistilBERT's layer norms have in transformers is fixed; the graph is compared with that.
            }
        fields = shared | {
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.inner,
            "hidden_act": self.activation,
            "layer_norm_eps": self.eps,
        }
        if model_type == "eurobert":
            fields["rms_norm_eps"] = fields.pop("layer_norm_eps")
        elif model_type == "modernbert":
            fields["norm_eps"] = fields.pop("layer_norm_eps")
            fields["hidden_activation"] = fields.pop("hidden_act")
        elif model_type != "mpnet":
            fields["type_vocab_size"] = self.type_vocab
        if model_type in ("electra", "albert"):
            fields["embedding_size"] = self.embedding
        if model_type in ("roberta", "xlm-roberta", "camembert") and self.skip_id >= 0:
            fields["pad_token_id"] = self.skip_id
        return fields


def show_export(
    export: ExportLike,
    given: Mapping[str, Any],
    path: Path,
    modules: SentenceModules | None,
    model_types: Mapping[str, Any],
    class_name: Callable[[str, str], str],
    build: Build,
) -> Shown:
    """The checkpoint of an export; ``given`` is the config.json beside it, ``{}`` if there is none.

    ``class_name`` gives the class of a model type and a task. Raises ``CheckpointError`` where config.json
    contradicts the graph, ``UnsupportedModelError`` where no architecture is the graph.
    """
    model_type = given.get("model_type")
    if model_type is not None and model_type not in model_types:
        raise UnsupportedModelError(
            f"{path / 'config.json'}: model_type is {model_type!r}; encast has {sorted(model_types)}"
        )
    best: NoFitError | None = None
    failed: EncastError | None = None
    found: dict[str, Facts | UnsupportedModelError] = {}
    for output, tasks in _candidates(export):
        if output.value not in found:
            try:
                found[output.value] = _facts(export, output)
            except UnsupportedModelError as error:
                found[output.value] = error
        facts = found[output.value]
        if isinstance(facts, UnsupportedModelError):
            failed = failed or facts
            continue
        if model_type is None and not facts.positions:
            failed = failed or UnsupportedModelError(
                f"{export.where}: the graph has no table of positions, so it does not say how long texts may be: put "
                "the model's config.json, with its model_type, beside it"
            )
            continue
        for task in tasks:
            names = [str(model_type)] if model_type is not None else _order(model_types, facts)
            for name, fields in itertools.product(names, _configs(export, given)):
                try:
                    return _fit(export, output, task, name, facts, fields, path, modules, class_name, build)
                except NoFitError as error:
                    if best is None or error.depth > best.depth:
                        best = error
                except _ContradictedError as error:
                    failed = failed if isinstance(failed, _ContradictedError) else error
    if failed is not None and (best is None or isinstance(failed, _ContradictedError)):
        raise failed
    raise UnsupportedModelError(
        f"{export.where}: the graph is none of {model_type or sorted(model_types)} with a head that encast has; it "
        f"comes nearest to {best}. Export the unchanged model of transformers, or compile its checkpoint"
    )


def _configs(export: ExportLike, given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What config.json may mean, as it stands first.

    DeBERTa's projections of positions read a constant, and quantisers leave such products in f32: their weights are
    then no more those of queries and keys, as ``share_att_key`` says, but weights of their own.
    """
    apart = export.quantised and given.get("share_att_key") is True
    return [given, *([{**given, "share_att_key": False}] if apart else [])]


def _order(model_types: Mapping[str, Any], facts: Facts) -> list[str]:
    """Types in the order in which they are tried; types of one class are the same graph.

    ELECTRA's encoder may be BERT's, or ALBERT's without shared weights.
    """
    shares = len(set(facts.distinct)) < facts.layers
    first = ["albert"] if shares else ["bert", "roberta", "electra"]
    names: dict[Any, str] = {}
    for name in (*first, "bert", "roberta", *model_types):
        if model_types[name].told_by_graph:
            names.setdefault(model_types[name], name)
    return list(names.values())


# What the graph says


def _candidates(export: ExportLike) -> Iterator[tuple[OutputLike, list[str]]]:
    """Outputs, and the tasks that they may be of, heads before bare encoders, and the last of all layers first."""
    graph = export.graph
    layers = {
        one.value: sum(node.op == "attention_scores" for node in _above(graph, one.value)) for one in export.outputs
    }
    outputs = sorted(export.outputs, key=lambda one: -layers[one.value])
    columns = [one for one in export.outputs if one.kind == "column"]
    if columns:
        if len(columns) == 2 and "end" in columns[0].name and "start" in columns[1].name:
            columns = columns[::-1]  # sorted by name, as TensorFlow does it
        if [one.column for one in columns] != [0, 1] or len({one.value for one in columns}) != 1:
            raise UnsupportedModelError(
                f"{export.where}: the outputs {[one.name for one in columns]} are single columns; question answering "
                "has two, the start and then the end of one product"
            )
        yield columns[0], ["answer"]
    for one in outputs:
        if one.kind == "sequences":
            pools = any(node.op == "pooling" for node in _above(graph, one.value))
            if pools or graph.producer(one.value).op in ("normalize", "first_token"):  # type: ignore[union-attr]
                yield one, ["embed"]
    for one in outputs:
        if one.kind == "sequences":
            yield one, ["classify"]
    for one in outputs:
        if one.kind == "rows":
            yield one, ["fill_mask", "tag", "answer"]
    for one in outputs:
        if one.kind == "rows":
            yield one, ["features"]


def _above(graph: Graph, value: str) -> list[Node]:
    """The nodes that a value depends on, in order."""
    needed = {value}
    kept = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    return kept[::-1]


def _facts(export: ExportLike, output: OutputLike) -> Facts:
    graph = export.graph
    nodes = _above(graph, output.value)

    def table(ids: Callable[[str], bool]) -> tuple[int, int]:
        shapes = [
            graph.type_of(node.inputs[1]).shape for node in nodes if node.op == "embedding" and ids(node.inputs[0])
        ]
        return (int(shapes[0][0]), int(shapes[0][1])) if shapes else (0, 0)

    positions = {node.outputs[0]: node for node in nodes if node.op == "position_ids"}
    scores = [node for node in nodes if node.op == "attention_scores"]
    norms = [node for node in nodes if node.op in ("layer_norm", "rms_norm")]
    words, _ = table(lambda ids: ids == "token_ids")
    rows, _ = table(lambda ids: ids in positions)
    inside = any(node.op in _POSITIONS for node in nodes)
    missing = [
        what
        for what, there in (
            ("a table of words", words),
            ("a table of positions", rows or inside),
            ("attention", scores),
            ("layer norms", norms),
        )
        if not there
    ]
    if missing:
        raise UnsupportedModelError(
            f"{export.where}: the output {output.name!r} is made without {', '.join(missing)}; encoders of the BERT "
            "family have words, positions, attention and layer norms"
        )
    if len(scores) > MOST_LAYERS:
        raise UnsupportedModelError(
            f"{export.where}: the output {output.name!r} is made with {len(scores)} attentions; encoders have at most "
            f"{MOST_LAYERS} layers"
        )
    # The first activation behind the first attention is that of the feed-forward part.
    after = nodes[nodes.index(scores[0]) :]
    acts = [node for node in after if node.op in ("activation", "gated_activation")]
    inner = int(graph.type_of(acts[0].outputs[0]).shape[1]) if acts else 1
    weights = [graph.constants[_producer(graph, node.inputs[0]).inputs[1]].array for node in scores]
    distinct = tuple(
        next(first for first in range(layer + 1) if alike(weights[first], weights[layer]))
        for layer in range(len(scores))
    )
    return Facts(
        vocab=words,
        embedding=table(lambda ids: ids == "token_ids")[1],
        hidden=int(graph.type_of(scores[0].inputs[0]).shape[1]),
        layers=len(scores),
        heads=int(scores[0].attrs["heads"]),
        inner=inner,
        positions=rows,
        skip_id=int(next(iter(positions.values())).attrs["skip_id"]) if positions else -1,
        type_vocab=table(lambda ids: ids == "token_type_ids")[0],
        eps=float(norms[0].attrs["eps"]),
        activation=str(acts[0].attrs["kind"]) if acts else "gelu",
        distinct=distinct,
    )


def _producer(graph: Graph, value: str) -> Node:
    node = graph.producer(value)
    while node is not None and node.op != "linear":
        node = graph.producer(node.inputs[0])
    if node is None:
        raise UnsupportedModelError("the queries of an attention are made by no product with a weight")
    return node


def _pooled(graph: Graph, value: str) -> tuple[Pooled, str]:
    """Pooling, dense layers and normalisation from a value up, and the rows that are pooled."""
    normalize, dense = False, []
    node = graph.producer(value)
    if node is not None and node.op == "normalize":
        normalize, node = True, graph.producer(node.inputs[0])
    while node is not None and node.op in ("linear", "activation"):
        activation = "none"
        if node.op == "activation":
            activation, node = str(node.attrs["kind"]), graph.producer(node.inputs[0])
        if node is None or node.op != "linear":
            raise NoFitError(f"a sentence embedding, where {activation} comes behind a dense layer only", 0)
        bias = graph.constants[node.inputs[2]].array if node.inputs[2] else None
        dense.append(Dense(np.ascontiguousarray(graph.constants[node.inputs[1]].array), bias, activation))
        node = graph.producer(node.inputs[0])
    if node is None or node.op not in ("pooling", "first_token"):
        raise NoFitError(f"a sentence embedding, which is pooled, and not made by {node.op if node else 'an input'}", 0)
    modes = ("cls",) if node.op == "first_token" else tuple(node.attrs["modes"])
    return Pooled(modes, dense[::-1], normalize), node.inputs[0]


# Comparing


def _fit(
    export: ExportLike,
    output: OutputLike,
    task: str,
    model_type: str,
    facts: Facts,
    given: Mapping[str, Any],
    path: Path,
    modules: SentenceModules | None,
    class_name: Callable[[str, str], str],
    build: Build,
) -> Shown:
    graph = export.graph
    fields = facts.config(model_type)
    said_positions = given.get("max_position_embeddings")
    if export.cut and type(said_positions) is int and said_positions > facts.positions:
        # The file was made for one length and holds the rows of that one alone; the model has more.
        given = {**given, "max_position_embeddings": facts.positions}
    if model_type == "albert":
        fields |= _groups(facts, given)
    config = _merged(fields, given, path / "config.json", export.rounding)
    labels = int(graph.type_of(output.value).shape[1])
    said: Any = None
    if task in ("classify", "tag"):
        names = given.get("id2label")
        said = len(names) if isinstance(names, Mapping) else given.get("num_labels")
        if said != labels:
            if isinstance(names, Mapping):
                del config["id2label"]
            config["num_labels"] = labels
    config["model_type"] = model_type
    top, pooled = output.value, None
    if task == "embed":
        pooled, top = _pooled(graph, output.value)
        if modules is not None:
            _compare_modules(pooled, modules, path)
    if task == "fill_mask":
        config["tie_word_embeddings"] = _tied(graph, output.value)
    built = "features" if task == "embed" else task
    try:
        template = build(model_type, config, built)
    except (UnsupportedModelError, CheckpointError) as error:
        raise NoFitError(f"{model_type}, of which {error}", 0) from None
    wanted = template.outputs["last_hidden_state" if built == "features" else "logits"]
    what = f"{model_type} for {task}"
    comparison = Comparison(graph, template, what, export.rounding, export.distances, export.angles)
    bound = comparison.run(top, wanted)
    if said is not None and said != labels:
        raise CheckpointError(
            f"{path / 'config.json'}: has {said} labels, the exported graph {labels}: config.json and the ONNX file "
            "are not of the same model; take the right one, or remove it"
        )
    name = class_name(model_type, built)
    config["architectures"] = [name]
    stored = Stored(comparison.integers, comparison.read_by_products(export.fixed))
    # In the order in which the architecture asks for them.
    # Of heads that share keys and values the file has one copy each.
    shared = config.get("num_key_value_heads") or facts.heads
    tensors = tensors_of({name: bound[name] for name in template.constants if name in bound}, shared, facts.heads)
    return Shown(path, config, "config.json", name, Arrays(tensors), modules if modules is not None else pooled, stored)


def _merged(facts: dict[str, Any], given: Mapping[str, Any], where: Path, rounding: float) -> dict[str, Any]:
    """config.json with what the graph says, where that is not rounded; raises ``_ContradictedError`` if they differ."""
    aliases = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
    merged = dict(given)
    for name, value in facts.items():
        for key in (name, aliases.get(name, name)):
            said = given.get(key)
            if said is None:
                continue
            same = said == value
            if isinstance(value, str):
                same = ACTIVATION_NAMES.get(str(said)) == value
            elif isinstance(value, float) and isinstance(said, (int, float)):
                same = np.float32(said) == np.float32(value) or (rounding > 0.0 and same_number(value, said, rounding))
            if not same:
                hint = ""
                if value == "gelu_tanh" and ACTIVATION_NAMES.get(str(said)) == "gelu":
                    hint = _APPROXIMATED
                elif key == "type_vocab_size" and value == 1:
                    hint = _UNTYPED
                raise _ContradictedError(
                    f"{where}: {key} is {said!r}, the exported graph has {value!r}: config.json and the ONNX file are "
                    f"not of the same model; take the right one, or remove it{hint}"
                )
        if all(given.get(key) is None for key in (name, aliases.get(name, name))):
            names = [known for known, meant in ACTIVATION_NAMES.items() if meant == value]
            merged[name] = names[0] if names else value
    return merged


def _groups(facts: Facts, given: Mapping[str, Any]) -> dict[str, int]:
    """How ALBERT's layers share weights."""
    said = given.get("inner_group_num")
    # The graph does not tell how layers are counted: two that alternate are a group of two, or two groups by turns.
    repeats = said if type(said) is int and 0 < said <= facts.layers and facts.layers % said == 0 else 1
    groups = max(1, len(set(facts.distinct)) // repeats)
    return {"num_hidden_layers": facts.layers // repeats, "num_hidden_groups": groups, "inner_group_num": repeats}


def _compare_modules(pooled: Pooled, modules: SentenceModules, path: Path) -> None:
    said = (tuple(modules.pooling_modes), len(modules.dense), modules.normalize)
    found = (pooled.pooling_modes, len(pooled.dense), pooled.normalize)
    # A normalisation that sentence-transformers adds behind the graph is no contradiction.
    if said[:2] != found[:2] or (found[2] and not said[2]):
        raise CheckpointError(
            f"{path / 'modules.json'}: says pooling, dense layers, normalisation {said}, the exported graph has "
            f"{found}; "
            "take the files of the same model, or remove modules.json"
        )
    for index, (mine, theirs) in enumerate(zip(pooled.dense, modules.dense, strict=True)):
        none = np.zeros(len(mine.weight), np.float32)
        biases = [none if one.bias is None else one.bias for one in (mine, theirs)]
        if not alike(mine.weight, theirs.weight) or not alike(*biases) or mine.activation != theirs.activation:
            raise CheckpointError(
                f"{path}: dense layer {index} of modules.json is not that of the exported graph, perhaps quantised; "
                "take the files of the same model, or remove modules.json"
            )


def _tied(graph: Graph, value: str) -> bool:
    node = graph.producer(value)
    words = next((one.inputs[1] for one in graph.nodes if one.op == "embedding" and one.inputs[0] == "token_ids"), "")
    if node is None or node.op != "linear" or not words:
        return True
    return alike(graph.constants[node.inputs[1]].array, graph.constants[words].array)
