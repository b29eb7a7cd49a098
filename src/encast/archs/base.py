"""The table of architectures, and how one of them becomes a graph."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from encast.archs.checkpoint_like import CheckpointLike
from encast.archs.class_names import SUFFIXES, stem_of, task_of
from encast.archs.config import Config
from encast.archs.encoder import Sizes
from encast.archs.expansion import hide_expansion
from encast.archs.export_like import ExportLike
from encast.archs.exported import Empty, show_export
from encast.archs.heads import (
    LateInteraction,
    M3Heads,
    SentenceModules,
    embed_m3,
    pool_sentences,
    project_tokens,
    weigh_tokens,
)
from encast.archs.modules import Modules
from encast.archs.relative_keys import RELATIVE_KEYS
from encast.archs.shown import Shown
from encast.archs.weights import Weights
from encast.errors import CheckpointError, UnsupportedModelError
from encast.ir import FusionPromise, Graph, GraphMeta, verify
from encast.ir.meta import HEADS
from encast.ir.types import ValueType

__all__ = ["TASKS", "Architecture", "architecture", "build_graph", "model_types", "need_transformers"]

TASKS = tuple(HEADS)
"""What a graph can be built for; ``features`` is the encoder alone."""

_PROJECTION = r"linear\.weight"
"""Of token embeddings, which other tasks do not read."""


class Architecture(ABC):
    """One family of encoders with its heads.

    Subclasses declare where things stand in a checkpoint and write ``encode`` and the heads that differ.
    """

    prefix: ClassVar[str]
    """What stands before the encoder's tensors in a checkpoint that has a head, with its dot."""

    other_prefixes: ClassVar[tuple[str, ...]] = ()
    """What stands there in checkpoints of other code."""

    stem: ClassVar[tuple[str, ...]]
    """The class names in ``architectures`` without their suffix, the usual one first."""

    suffixes: ClassVar[Mapping[str, str]] = {}
    """Further suffixes of class names, and the task that they stand for."""

    classes: ClassVar[Mapping[str, str]] = {}
    """Class names without such a suffix, and their task."""

    markers: ClassVar[Mapping[str, str]]
    """For every task with a head of its own: a tensor that only a checkpoint with this head has."""

    unread: ClassVar[tuple[str, ...]]
    """Patterns of tensors that may stay unread: parts of heads, and poolers that a task does not use."""

    position_types: ClassVar[tuple[str, ...]] = ("absolute",)
    """Values of ``position_embedding_type`` that are this architecture's own positions."""

    code: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the class names in ``auto_map`` whose arithmetic this is. The code itself is never run."""

    variants: ClassVar[Mapping[tuple[str, str], str]] = {}
    """Fields with a value that make the checkpoint one of another ``model_type`` than it says."""

    coded: ClassVar[Mapping[str, str]] = {}
    """Names of the config's class in ``auto_map`` that do the same."""

    @classmethod
    def foreign(cls, config: Config, weights: Weights) -> str:
        """Why the tensors of such a checkpoint are no parameters of transformers' modules; empty where they are."""
        kind = config.text("position_embedding_type")
        if kind in RELATIVE_KEYS:
            return f"since version 5 transformers leaves out position_embedding_type {kind!r} without a word"
        return ""

    exported: ClassVar[bool] = True
    """Whether exports of it (ONNX) are read; where not, ``told_by_graph`` is False too."""

    told_by_graph: ClassVar[bool] = True
    """Whether an export alone says which one it is and how long its texts may be; else config.json must be there."""

    def __init__(self, config: Config) -> None:
        config.refuse_unless("position_embedding_type", *self.position_types)
        self.config = config
        self.sizes = self.read_sizes()

    @abstractmethod
    def read_sizes(self) -> Sizes:
        """The sizes that the config gives."""

    @abstractmethod
    def encode(self, encoder: Modules) -> str:
        """Adds the encoder; returns the last hidden state, f32[tokens, hidden]."""

    @abstractmethod
    def classify(self, encoder: Modules, head: Modules, x: str, labels: int) -> str:
        """Adds the sequence classification head; returns f32[seqs, labels]."""

    @abstractmethod
    def fill_mask(self, encoder: Modules, head: Modules, x: str) -> str:
        """Adds the masked-LM head; returns f32[rows, vocab] of ``x: f32[rows, hidden]``."""

    def tag(self, head: Modules, x: str, labels: int) -> str:
        """Adds the token classification head; returns f32[tokens, labels]."""
        return head.linear(x, "classifier", labels, self.sizes.hidden)

    def answer(self, head: Modules, x: str) -> str:
        """Adds the question answering head; returns f32[tokens, 2], start and end."""
        return head.linear(x, "qa_outputs", 2, self.sizes.hidden)

    def promises(self, graph: Graph) -> dict[str, FusionPromise]:
        """The fusions that the config promises for the plain graph, by name: see ``GraphMeta.expected``."""
        return {
            "qkv": FusionPromise(1, 0),
            "attention": FusionPromise(1, 0),
            "linear_activation": FusionPromise(1, sum(_is_head_activation(node) for node in graph.nodes)),
            "add_layer_norm": FusionPromise(2, 0),
            "embed_layer_norm": FusionPromise(0, 1),
        }

    @classmethod
    def has_head(cls, task: str, weights: Weights) -> bool:
        """Whether a checkpoint has the head of a task of ``markers``."""
        return cls.markers[task] in weights

    def max_len(self) -> int:
        """The longest sequence that the position table allows."""
        return self.sizes.positions


_TABLE: dict[str, type[Architecture]] = {}
_Class = TypeVar("_Class", bound=type[Architecture])


def architecture(*names: str) -> Callable[[_Class], _Class]:
    """Registers a class for these values of ``model_type``."""

    def register(cls: _Class) -> _Class:
        _TABLE.update(dict.fromkeys(names, cls))
        return cls

    return register


def _table() -> dict[str, type[Architecture]]:
    package = importlib.import_module("encast.archs")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"encast.archs.{module.name}")
    return _TABLE


def model_types() -> dict[str, type[Architecture]]:
    """Every supported ``model_type`` and its architecture."""
    return dict(sorted(_table().items()))


def build_graph(checkpoint: CheckpointLike, task: str | None = None) -> Graph:
    """The graph of plain ops for a checkpoint.

    ``task`` is one of ``TASKS``; without it, the checkpoint says it itself (``modules.json``, else
    ``architectures``). Raises ``CheckpointError`` for a checkpoint that contradicts itself and
    ``UnsupportedModelError`` for arithmetic or a head that is not there.
    """
    stored = None
    if checkpoint.export is not None:
        checkpoint = _show(checkpoint, checkpoint.export, task)
        stored = checkpoint.stored
    config = Config(checkpoint.config, f"{checkpoint.path}/{checkpoint.config_file}")
    model_type, cls = _find_architecture(config, checkpoint.architecture)
    _refuse_other_arithmetic(config, cls)
    weights = Weights(checkpoint.tensors, str(checkpoint.path))
    chosen = _choose_task(cls, checkpoint, weights, task, config.where)
    arch = cls(config)

    prefixes = (cls.prefix, *cls.other_prefixes)
    prefix = next((one for one in prefixes if weights.any_below(one)), "")
    m3 = m3_of(checkpoint) if chosen in ("embed_sparse", "embed_tokens", "embed_m3") else None
    graph, labels = _write(arch, weights, prefix, chosen, checkpoint.modules, m3)
    if chosen == "embed_tokens" and (form := checkpoint.token_form) is not None and form.most_unseen:
        assert form.expansion is not None
        hide_expansion(graph, form.expansion, form.most_unseen, str(checkpoint.path))
    weights.check_all_used(cls.unread if _late(checkpoint) is None else (*cls.unread, _PROJECTION))
    if stored is not None:
        stored.attach(graph)
    graph.meta = _meta(arch, graph, model_type, chosen, labels, checkpoint)
    verify(graph)
    return graph


def m3_of(checkpoint: CheckpointLike) -> M3Heads | None:
    """BGE-M3's heads; None for other checkpoints, also where modules.json says another head of these kinds."""
    modules = checkpoint.modules
    return None if modules is not None and (modules.splade or modules.late) else checkpoint.m3


def _late(checkpoint: CheckpointLike) -> LateInteraction | None:
    return None if checkpoint.modules is None else checkpoint.modules.late


def need_transformers(checkpoint: CheckpointLike, what: str) -> None:
    """Raises ``UnsupportedModelError`` for a checkpoint whose tensors are no parameters of a module of transformers.

    ``what``: what needs them, as the subject of the message.
    """
    if checkpoint.export is not None:
        return
    config = Config(checkpoint.config, f"{checkpoint.path}/{checkpoint.config_file}")
    _, cls = _find_architecture(config, checkpoint.architecture)
    reason = cls.foreign(config, Weights(checkpoint.tensors, str(checkpoint.path)))
    if reason:
        raise UnsupportedModelError(f"{config.where}: {what} needs a model of transformers, and {reason}")


def _write(
    arch: Architecture,
    weights: Weights,
    prefix: str,
    task: str,
    modules: SentenceModules | None,
    m3: M3Heads | None = None,
) -> tuple[Graph, list[str] | None]:
    """The graph without its facts, and the labels; ``prefix`` stands before the encoder's tensors."""
    graph = Graph()
    graph.add_input("token_ids", ValueType("i32", ("tokens",)))
    if arch.sizes.type_vocab:
        graph.add_input("token_type_ids", ValueType("i32", ("tokens",)))
    encoder = Modules(graph, weights, prefix)
    head = Modules(graph, weights)
    hidden = arch.encode(encoder)
    graph.outputs["last_hidden_state"] = hidden
    return graph, _add_head(arch, graph, encoder, head, hidden, task, modules, m3, weights.where)


def _show(checkpoint: CheckpointLike, export: ExportLike, task: str | None) -> Shown:
    """An export as the checkpoint that it was made of."""
    table = model_types()
    where = f"{checkpoint.path}/{checkpoint.config_file}"
    config = Config(checkpoint.config, where)
    kind, named = config.text("position_embedding_type"), config.text("model_type")
    if named in table:
        named = _variant(config, named)
    if named in table and not table[named].exported:
        raise UnsupportedModelError(
            f"{where}: the model is of type {named!r}, of which no exports are read; compile its checkpoint"
        )
    if kind in RELATIVE_KEYS:
        raise UnsupportedModelError(
            f"{where}: position_embedding_type is {kind!r}, of which no exports are read; compile its checkpoint"
        )
    if _late(checkpoint) is not None:
        raise UnsupportedModelError(
            f"{checkpoint.path}: embeddings of tokens are made of a checkpoint; of an ONNX file they are not supported"
        )

    def build(model_type: str, config: Mapping[str, Any], task: str) -> Graph:
        untied = config.get("tie_word_embeddings") is False
        return _write(table[model_type](Config(config, where)), Empty(untied), "", task, None)[0]

    def class_name(model_type: str, task: str) -> str:
        names = table[model_type].stem
        stem = next((name for name in names if name.lower() == model_type.replace("-", "")), names[0])
        return stem + next(suffix for suffix, meant in SUFFIXES.items() if meant == task)

    name, modules = checkpoint.architecture, checkpoint.modules
    cls = table.get(named or _type_of(name))
    declared = None if cls is None else task_of(name, cls.suffixes, cls.classes)
    return show_export(export, checkpoint.config, checkpoint.path, modules, table, class_name, build, task, declared)


def _add_head(
    arch: Architecture,
    graph: Graph,
    encoder: Modules,
    head: Modules,
    hidden: str,
    task: str,
    modules: SentenceModules | None,
    m3: M3Heads | None,
    where: str,
) -> list[str] | None:
    """Adds what ``task`` needs on top of the last hidden state; returns the names of the labels, if it has any."""
    if task == "embed":
        graph.outputs["embedding"] = pool_sentences(graph, hidden, arch.sizes.hidden, modules, where)
    elif task == "answer":
        graph.outputs["logits"] = arch.answer(head, hidden)
    elif task == "fill_mask":
        graph.add_input("select", ValueType("i32", ("selected",)))
        selected = graph.add("select_rows", hidden, "select", name="selected")
        graph.outputs["logits"] = arch.fill_mask(encoder, head, selected)
    elif task == "embed_sparse" and m3 is not None:
        graph.outputs["sparse_embedding"] = weigh_tokens(graph, hidden, arch.sizes.hidden, m3, where)
    elif task == "embed_sparse":
        logits = arch.fill_mask(encoder, head, hidden)
        positive = graph.add("activation", logits, name="activation", kind="relu")
        graph.outputs["sparse_embedding"] = graph.add("pooling", positive, name="pooling", modes=["max"])
    elif task == "embed_tokens":
        late = None if modules is None else modules.late
        graph.outputs["token_embedding"] = project_tokens(head, hidden, arch.sizes.hidden, late, m3, where)
    elif task == "embed_m3":
        assert m3 is not None  # _choose_task has seen to both
        assert modules is not None
        embed_m3(graph, head, hidden, arch.sizes.hidden, modules, m3, where)
    elif task in ("classify", "tag"):
        labels = arch.config.labels()
        if task == "classify":
            graph.outputs["logits"] = arch.classify(encoder, head, hidden, len(labels))
        else:
            graph.outputs["logits"] = arch.tag(head, hidden, len(labels))
        return labels
    return None


def _find_architecture(config: Config, name: str) -> tuple[str, type[Architecture]]:
    table = _table()
    model_type = config.text("model_type") or None
    if model_type is None:
        # Configs of 2019, and of code that names none, have no model_type; the class name tells it.
        model_type = _type_of(name) or None
    if model_type not in table:
        said = f"model_type is {config.text('model_type')!r}" + (f" (architectures: {name})" if name else "")
        raise UnsupportedModelError(f"{config.where}: {said}; encast has {sorted(table)}")
    model_type = _variant(config, model_type)
    return model_type, table[model_type]


def _type_of(name: str) -> str:
    """The ``model_type`` of a class name, "" if there is none."""
    return next((key for key, cls in _table().items() if stem_of(name) in cls.stem), "")


def _variant(config: Config, model_type: str) -> str:
    """The ``model_type`` whose architecture reads a checkpoint that says this one."""
    cls = _table()[model_type]
    if (other := cls.coded.get(config.own_class())) is not None:
        return other
    return next((other for (name, value), other in cls.variants.items() if config.is_text(name, value)), model_type)


def _refuse_other_arithmetic(config: Config, cls: type[Architecture]) -> None:
    for switch in ("is_decoder", "add_cross_attention", "is_encoder_decoder"):
        config.refuse_unless(switch, False)
    config.refuse_unless("pruned_heads", {})
    # Weights stored in a quantised form, and models whose code is in the checkpoint, unless it is known what that does.
    config.refuse_unless("quantization_config")
    known = "|".join((*(rf"{one}(Config|Model|For\w+)" for one in cls.code), *cls.classes))
    if not (known and config.all_texts_match("auto_map", rf"(.*\.)?({known})")):
        config.refuse_unless("auto_map")


def _choose_task(
    cls: type[Architecture], checkpoint: CheckpointLike, weights: Weights, task: str | None, where: str
) -> str:
    name = checkpoint.architecture
    declared = task_of(name, cls.suffixes, cls.classes)
    splade = checkpoint.modules is not None and checkpoint.modules.splade is not None
    late = _late(checkpoint) is not None
    if task is None and (splade or late):
        task = "embed_sparse" if splade else "embed_tokens"
    if task is not None:
        if task == "embed" and splade:
            raise UnsupportedModelError(
                f"{checkpoint.path}: modules.json describes sparse embeddings; ask for 'embed_sparse', not 'embed'"
            )
        if late and task == "embed":
            raise UnsupportedModelError(
                f"{checkpoint.path}: the checkpoint describes embeddings of tokens; ask for 'embed_tokens', not 'embed'"
            )
        if task == "embed_tokens":
            if not late and m3_of(checkpoint) is None:
                raise UnsupportedModelError(
                    f"{checkpoint.path}: task 'embed_tokens' needs a head, a projection of every token: a folder of "
                    "PyLate (modules.json with its Dense), an HF_ColBERT with artifact.metadata, or BGE-M3 with "
                    "colbert_linear.pt"
                )
            return task
        if task == "embed_sparse" and m3_of(checkpoint) is not None:
            return task
        if task == "embed_m3":
            _need_m3(checkpoint)
            return task
        return _check_task(cls, declared, weights, task, name, where, checkpoint)
    if checkpoint.modules is not None:
        return "embed"
    if declared is None:
        known = sorted({**SUFFIXES, **cls.suffixes})
        raise UnsupportedModelError(
            f"{where}: architectures is {name!r}, a head that encast does not have; it has {cls.stem[0]} with {known}. "
            "Ask for task 'features' or 'embed' to use the encoder alone"
        )
    if declared in cls.markers and not name and not cls.has_head(declared, weights):
        return "features"
    return declared


def _need_m3(checkpoint: CheckpointLike) -> None:
    """Raises ``UnsupportedModelError`` unless it is BGE-M3, whose embedding of a text is that of its first token."""
    modules = checkpoint.modules
    if m3_of(checkpoint) is None:
        raise UnsupportedModelError(
            f"{checkpoint.path}: task 'embed_m3' needs a head, that of BGE-M3: sparse_linear.pt and colbert_linear.pt"
        )
    if modules is None or modules.pooling_modes != ("cls",) or modules.dense or not modules.normalize:
        raise UnsupportedModelError(
            f"{checkpoint.path}: task 'embed_m3' needs a modules.json with pooling of the first token (cls), then "
            "Normalize, as BGE-M3 has them; the tasks embed, embed_sparse and embed_tokens do without"
        )


def _check_task(
    cls: type[Architecture],
    declared: str | None,
    weights: Weights,
    task: str,
    name: str,
    where: str,
    checkpoint: CheckpointLike,
) -> str:
    if task not in TASKS:
        raise UnsupportedModelError(f"no task is named {task!r}; encast has {list(TASKS)}")
    head = "fill_mask" if task == "embed_sparse" else task
    if head in ("features", "embed", declared):
        if head in cls.markers and not cls.has_head(head, weights):
            raise UnsupportedModelError(
                f"{where}: task {task!r} needs a head, and the checkpoint has no tensor {cls.markers[head]!r}; "
                "take a checkpoint that was fine-tuned for it, or ask for 'features' or 'embed'"
            )
        return task
    # Heads of different tasks may have the same tensors; so a class name that says one rules out the others.
    if declared in (None, "features") and cls.has_head(head, weights):
        return task
    hint = "" if declared in (None, "features") else f". If the head is another one, say so by architectures in {where}"
    able = {"features", "embed" if _late(checkpoint) is None else "embed_tokens"}
    able |= set() if m3_of(checkpoint) is None else {"embed_sparse", "embed_tokens", "embed_m3"}
    able |= {declared} if declared else set()
    able |= {"embed_sparse"} if declared == "fill_mask" else set()
    if isinstance(checkpoint, Shown):
        raise UnsupportedModelError(
            f"{checkpoint.path}: task {task!r} needs a head that no output of the exported graph has; it can be built "
            f"for {sorted(able)}"
        )
    raise UnsupportedModelError(
        f"{where}: task {task!r} needs a head that the checkpoint does not have (architectures: {name!r}); "
        f"it can be built for {sorted(able)}{hint}"
    )


def _meta(
    arch: Architecture,
    graph: Graph,
    model_type: str,
    task: str,
    labels: list[str] | None,
    checkpoint: CheckpointLike,
) -> GraphMeta:
    sizes = arch.sizes
    if arch.max_len() < 1:
        raise CheckpointError(
            f"{arch.config.where}: max_position_embeddings is {sizes.positions}, which leaves no position for a token"
        )
    modules = checkpoint.modules
    return GraphMeta(
        arch=model_type,
        task=task,
        hidden=sizes.hidden,
        layers=max(node.layer for node in graph.nodes) + 1,
        heads=sizes.heads,
        vocab=sizes.vocab,
        type_vocab=sizes.type_vocab,
        max_len=arch.max_len(),
        labels=None if labels is None else tuple(labels),
        problem_type=arch.config.problem_type(len(labels or [])) if task == "classify" else None,
        similarity=modules.similarity if task == "embed" and modules is not None else None,
        expected=arch.promises(graph),
        math="exact",
        dtype="f32",
    )


def _is_head_activation(node: Any) -> bool:
    return bool(node.op == "activation" and node.layer < 0)
