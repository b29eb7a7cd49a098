"""An exported graph, shown as the checkpoint that it was exported from.

The reader of exports gives a graph of plain ops whose constants have the names of a file, or none. Which architecture
it is follows from the graph: each architecture writes its own graph for the sizes that were found, with constants
that are named and empty, and the two are compared node by node. Where they are the same, every constant has its
name, and the model is built as from any checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from encast.archs.comparison import Comparison, NoFitError, alike, same_number
from encast.archs.config import ACTIVATION_NAMES
from encast.archs.export_like import ExportLike, OutputLike
from encast.archs.exported_facts import Facts, facts_of
from encast.archs.exported_heads import Candidates, candidates, refuse_several
from encast.archs.heads import SentenceModules
from encast.archs.modules import tensors_of
from encast.archs.shown import Arrays, Dense, Pooled, Shown, Stored
from encast.archs.weights import Float32, Weights
from encast.errors import CheckpointError, EncastError, UnsupportedModelError
from encast.ir import Graph

__all__ = ["Empty", "show_export"]


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


class _ContradictedError(CheckpointError):
    """config.json is not that of an output; another output of the graph may still be the one that it describes."""


Build = Callable[[str, Mapping[str, Any], str], Graph]
"""The graph with empty constants of a model type, a config and a task."""


def show_export(
    export: ExportLike,
    given: Mapping[str, Any],
    path: Path,
    modules: SentenceModules | None,
    model_types: Mapping[str, Any],
    class_name: Callable[[str, str], str],
    build: Build,
    task: str | None,
    declared: str | None,
) -> Shown:
    """The checkpoint of an export; ``given`` is the config.json beside it, ``{}`` if there is none.

    ``class_name`` gives the class of a model type and a task. ``task``: what is asked for; ``declared``: that of
    ``architectures`` in ``given``. Raises ``CheckpointError`` where config.json contradicts the graph,
    ``UnsupportedModelError`` where no architecture is the graph, or where it has several heads of which neither says
    one.
    """
    model_type = given.get("model_type")
    if model_type is not None and model_type not in model_types:
        raise UnsupportedModelError(
            f"{path / 'config.json'}: model_type is {model_type!r}; encast has {sorted(model_types)}"
        )
    asked = task if task is not None or modules is None else "embed"
    # Any head shows the encoder that it stands on.
    encoder = asked in ("features", "embed")
    meant = {"embed_sparse": "fill_mask"}.get(asked, asked) if asked is not None else declared
    attempts = _Attempts(export, given, path, modules, model_types, class_name, build)
    chosen, heads, bare = candidates(export, meant)
    for group in (chosen, heads, bare):
        fits = attempts.fits(group)
        if group is chosen or (group is heads and not encoder):
            refuse_several(export, [(output, task) for output, task, _ in fits])
            if not fits and attempts.refused is not None:
                raise attempts.refused
        if fits:
            return fits[0][2]
    raise attempts.error()


class _Attempts:
    """Fits architectures to outputs, and keeps what stood against them."""

    def __init__(
        self,
        export: ExportLike,
        given: Mapping[str, Any],
        path: Path,
        modules: SentenceModules | None,
        model_types: Mapping[str, Any],
        class_name: Callable[[str, str], str],
        build: Build,
    ) -> None:
        self.export, self.given, self.path, self.modules = export, given, path, modules
        self.model_types, self.class_name, self.build = model_types, class_name, build
        self.facts: dict[str, Facts | None] = {}
        self.best: NoFitError | None = None
        self.failed: EncastError | None = None
        self.refused: CheckpointError | None = None
        """That the graph is understood, but labels or modules beside it are another model's."""

    def fits(self, group: Candidates) -> list[tuple[OutputLike, str, Shown]]:
        """What fits, once for each value of the graph."""
        found: dict[str, tuple[OutputLike, str, Shown]] = {}
        for output, tasks in group:
            if output.value in found:
                continue
            for task in tasks:
                shown = self._fit(output, task)
                if shown is not None:
                    found[output.value] = (output, task, shown)
                    break
        return list(found.values())

    def _facts(self, output: OutputLike) -> Facts | None:
        """None where the output is that of no encoder, or config.json is missing."""
        if output.value not in self.facts:
            facts = None
            try:
                facts = facts_of(self.export, output)
            except UnsupportedModelError as error:
                self.failed = self.failed or error
            if facts is not None and self.given.get("model_type") is None and not facts.positions:
                facts = None
                self.failed = self.failed or UnsupportedModelError(
                    f"{self.export.where}: the graph has no table of positions, so it does not say how long texts may "
                    "be: put the model's config.json, with its model_type, beside it"
                )
            self.facts[output.value] = facts
        return self.facts[output.value]

    def _fit(self, output: OutputLike, task: str) -> Shown | None:
        facts, model_type = self._facts(output), self.given.get("model_type")
        if facts is None:
            return None
        names = [str(model_type)] if model_type is not None else _order(self.model_types, facts)
        for name, fields in itertools.product(names, _configs(self.export, self.given)):
            try:
                return _fit(
                    self.export,
                    output,
                    task,
                    name,
                    facts,
                    fields,
                    self.path,
                    self.modules,
                    self.class_name,
                    self.build,
                )
            except NoFitError as error:
                if self.best is None or error.depth > self.best.depth:
                    self.best = error
            except _ContradictedError as error:
                self.failed = self.failed if isinstance(self.failed, _ContradictedError) else error
            except CheckpointError as error:
                self.refused = self.refused or error
        return None

    def error(self) -> EncastError:
        """Why no output fits."""
        if self.refused is not None:
            return self.refused
        if self.failed is not None and (self.best is None or isinstance(self.failed, _ContradictedError)):
            return self.failed
        return UnsupportedModelError(
            f"{self.export.where}: the graph is none of {self.given.get('model_type') or sorted(self.model_types)} "
            f"with a head that encast has; it comes nearest to {self.best}. Export the unchanged model of "
            "transformers, or compile its checkpoint"
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
    said_types = given.get("type_vocab_size")
    if facts.type_vocab == 1 and type(said_types) is int and said_types > 1:
        # The model was exported without token_type_ids, and reads the row of type 0 alone.
        given = {**given, "type_vocab_size": 1}
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
