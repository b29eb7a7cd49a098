"""What sentence-transformers stores beside a model: ``modules.json`` and the folders it names.

A folder is a ``SentenceTransformer`` (pooling, dense layers, norm), a ``SparseEncoder`` (``SpladePooling`` of a
masked-LM head), a ``ColBERT`` of PyLate (dense layers on every token) or a ``CrossEncoder`` (the transformer alone).

Both layouts are read: up to version 5.3 (``sentence_transformers.models.Pooling``, a boolean
flag a pooling mode) and from 5.4 (``sentence_transformers.sentence_transformer.modules.pooling.Pooling``,
one ``pooling_mode``). Whatever would change the arithmetic and is not understood is an
``UnsupportedModelError`` that names the module and the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.dense_module import DenseModule, check_fields, check_names, flag, read_dense
from encast.importers.files import Folder, quote, shown
from encast.importers.late_interaction import LateInteraction, read_pylate
from encast.ir.meta import SIMILARITIES, SPLADE_ACTIVATIONS
from encast.ir.ops import POOLING_MODES

__all__ = [
    "DenseModule",
    "SentenceModules",
    "SpladePooling",
    "TransformerSettings",
    "has_own_transformer",
    "read_modules",
    "read_transformer_settings",
]

_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Flags of the older layout → mode, in the order in which their results stand side by side."""

_OWN_TRANSFORMER = "custom_st.Transformer"
_MODEL_SETTINGS = "config_sentence_transformers.json"

_TRANSFORMER_CONFIGS = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
)


_LOADING = ("model_args", "config_args", "tokenizer_args", "model_kwargs", "config_kwargs", "processor_kwargs")
"""Fields that sentence-transformers passes on when it loads the model, its config and its tokenizer."""

_NO_NUMBERS = {
    "add_pooling_layer",
    "attn_implementation",
    "cache_dir",
    "device_map",
    "dtype",
    "local_files_only",
    "low_cpu_mem_usage",
    "revision",
    "torch_dtype",
    "trust_remote_code",
    "unpad_inputs",
    "use_cache",
    "use_fast",
    "use_memory_efficient_attention",
    "use_safetensors",
}
"""What says where a model comes from and how it is run, among those fields or inside of them."""

_TRANSFORMER_FIELDS = {
    "architecture",
    "do_lower_case",
    "max_seq_length",
    "modality_config",
    "module_output_name",
    "processing_kwargs",
    "transformer_task",
    *_LOADING,
    *_NO_NUMBERS,
}


@dataclass(frozen=True)
class SpladePooling:
    """``activation``: one of ``SPLADE_ACTIVATIONS``; ``max_active_dims``: weights of a text that stay, None: all."""

    activation: str
    max_active_dims: int | None

    def within(self, vocab: int) -> SpladePooling:
        """Of a vocabulary, of which no more weights than it has tokens can stay."""
        return replace(self, max_active_dims=None if self.max_active_dims is None else min(self.max_active_dims, vocab))


@dataclass(frozen=True)
class TransformerSettings:
    """``sentence_bert_config.json``: how texts are cut and lowered before the model sees them."""

    max_seq_length: int | None = None
    do_lower_case: bool = False
    task: str = "feature-extraction"


@dataclass(frozen=True)
class SentenceModules:
    """Everything after the transformer of a sentence embedding model.

    ``pooling_modes`` in the order of their results; then ``dense`` in order; then the Euclidean norm if
    ``normalize``. ``splade``: of a sparse encoder, ``late``: of a model of token embeddings, which have none of these.
    ``prompts``: name → text put before an input; ``default_prompt_name`` names the one that sentence-transformers uses
    unless told otherwise.
    """

    pooling_modes: tuple[str, ...]
    dense: tuple[DenseModule, ...] = ()
    normalize: bool = False
    max_seq_length: int | None = None
    do_lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: str | None = None
    splade: SpladePooling | None = None
    late: LateInteraction | None = None


def transformer_folder(root: Folder) -> Folder:
    """Where config.json and the weights lie: the root, or what ``modules.json`` names (``0_Transformer``)."""
    if not root.has("modules.json"):
        return root
    kind, path, where = _entries(root)[0]
    if kind not in ("Transformer", "MLMTransformer"):
        raise UnsupportedModelError(f"{where} is a {kind}; the first module must be a Transformer")
    return root.child(path, where) if path else root


def has_own_transformer(root: Folder) -> bool:
    """Whether the first module is the class that jina-embeddings-v3 has in ``custom_st.py``: a transformer whose words
    are ``task``, an adapter's name. The code itself is never run."""
    return root.has("modules.json") and root.array("modules.json")[0].get("type") == _OWN_TRANSFORMER


def read_transformer_settings(folder: Folder) -> TransformerSettings:
    """``sentence_bert_config.json`` (or one of its older names) of the transformer's folder, if there is one.

    Raises ``CheckpointError`` on malformed fields and ``UnsupportedModelError`` on those that may change numbers.
    """
    name = folder.pick(_TRANSFORMER_CONFIGS)
    if name is None:
        return TransformerSettings()
    where = str(folder.path(name))
    config = folder.object(name)
    max_seq_length = config.get("max_seq_length")
    if max_seq_length is not None and not (type(max_seq_length) is int and max_seq_length > 0):
        raise CheckpointError(f"{where}: max_seq_length must be a positive integer or null")
    do_lower_case = flag(config, "do_lower_case", False, where)
    for name in ("query_expansion", "query_length", "document_length"):
        if config.get(name) is not None:
            raise UnsupportedModelError(f"{where}: {name} is set (late interaction), which is not supported")
    check_fields(config, _TRANSFORMER_FIELDS, where)
    for name in _LOADING:
        _check_loading(name, config.get(name), max_seq_length, where)
    processing = config.get("processing_kwargs")
    if processing:
        raise UnsupportedModelError(
            f"{where}: processing_kwargs change how texts are tokenised; remove or bake them in"
        )
    task = config.get("transformer_task", "feature-extraction")
    output = {"feature-extraction": "last_hidden_state", "sequence-classification": "logits", "fill-mask": "logits"}
    if not isinstance(task, str) or task not in output:
        raise UnsupportedModelError(f"{where}: transformer_task is {quote(task)}; supported are {', '.join(output)}")
    modalities = config.get("modality_config")
    if modalities is not None:
        text = modalities.get("text") if isinstance(modalities, dict) else None
        if (
            not isinstance(text, dict)
            or text.get("method") != "forward"
            or text.get("method_output_name") != output[task]
        ):
            raise UnsupportedModelError(
                f"{where}: modality_config must give for text method forward and method_output_name {output[task]}"
            )
    return TransformerSettings(max_seq_length, do_lower_case, task)


def _check_loading(name: str, value: Any, max_seq_length: int | None, where: str) -> None:
    """Raises for what the field ``name`` of ``_LOADING`` says of the model itself, which belongs into its own files."""
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{where}: {name} must be an object or null")
    for key, given in (value or {}).items():
        same_length = key == "model_max_length" and given is not None and given == max_seq_length
        if key not in _NO_NUMBERS and not same_length:
            raise UnsupportedModelError(
                f"{where}: {name} sets {quote(key)}, with which sentence-transformers loads another model than the "
                "files beside it are; write it into config.json or tokenizer_config.json, whichever it belongs to (for "
                "model_max_length: as max_seq_length into this file), and remove it here"
            )


def read_modules(root: Folder, settings: TransformerSettings) -> SentenceModules | None:
    """The modules after the transformer; None without ``modules.json`` and for cross-encoders.

    Raises ``CheckpointError`` on damaged files and ``UnsupportedModelError`` on modules, fields or orders
    that encast does not have.
    """
    if not root.has("modules.json"):
        return None
    entries = _entries(root)
    kinds = [kind for kind, _, _ in entries]
    if len(entries) == 1 and settings.task != "feature-extraction":
        return None
    if "SpladePooling" in kinds:
        return _splade(root, entries, settings)
    if "pylate" in kinds:
        return _late(root, entries, settings)
    if kinds[:2] != ["Transformer", "Pooling"] or settings.task != "feature-extraction":
        raise UnsupportedModelError(
            f"{root.path('modules.json')}: a Pooling module must follow the Transformer for feature-extraction; there "
            f"is {', '.join(kinds)}, for {settings.task}"
        )
    modes = _pooling_modes(root.child(entries[1][1], entries[1][2]))
    dense: list[DenseModule] = []
    normalize = False
    for kind, path, where in entries[2:]:
        if kind == "Normalize":
            if path and root.has(path.split("/")[0]):
                check_names(root.child(path, where), optional=True)
            normalize = True
        elif kind == "Dense":
            if normalize:
                raise UnsupportedModelError(f"{where}: a Dense module after Normalize is not supported")
            dense.append(read_dense(root.child(path, where)))
        elif kind != "Dropout":  # which does nothing at inference
            raise UnsupportedModelError(f"{where}: a second {kind} module is not supported")
    prompts, default, similarity = _model_settings(root)
    return SentenceModules(
        modes, tuple(dense), normalize, settings.max_seq_length, settings.do_lower_case, prompts, default, similarity
    )


def _splade(root: Folder, entries: list[tuple[str, str, str]], settings: TransformerSettings) -> SentenceModules:
    kinds = [kind for kind, _, _ in entries]
    masked = kinds[0] == "MLMTransformer" or settings.task == "fill-mask"
    if len(kinds) != 2 or kinds[1] != "SpladePooling" or not masked:
        raise UnsupportedModelError(
            f"{root.path('modules.json')}: a SpladePooling module must follow a Transformer for fill-mask, or an "
            f"MLMTransformer, and be the last; there is {', '.join(kinds)}, for {settings.task}"
        )
    folder = root.child(*entries[1][1:])
    where = str(folder.path("config.json"))
    config = folder.object("config.json")
    # chunk_size says how many tokens are pooled at a time, which changes no number.
    known = {"pooling_strategy", "activation_function", "word_embedding_dimension", "embedding_dimension", "chunk_size"}
    check_fields(config, known, where)
    for name, default, supported in (
        ("pooling_strategy", "max", ("max",)),
        ("activation_function", "relu", tuple(SPLADE_ACTIVATIONS)),
    ):
        if config.get(name, default) not in supported:
            raise UnsupportedModelError(f"{where}: {name} is {quote(config[name])}; supported: {', '.join(supported)}")
    prompts, default_prompt, _ = _model_settings(root)
    most = root.object(_MODEL_SETTINGS).get("max_active_dims") if root.has(_MODEL_SETTINGS) else None
    if most is not None and not (type(most) is int and most > 0):
        raise CheckpointError(f"{root.path(_MODEL_SETTINGS)}: max_active_dims must be a positive integer or null")
    return SentenceModules(
        (),
        max_seq_length=settings.max_seq_length,
        do_lower_case=settings.do_lower_case,
        prompts=prompts,
        default_prompt_name=default_prompt,
        splade=SpladePooling(config.get("activation_function", "relu"), most),
    )


def _late(root: Folder, entries: list[tuple[str, str, str]], settings: TransformerSettings) -> SentenceModules:
    kinds = [kind for kind, _, _ in entries]
    if kinds[0] != "Transformer" or {*kinds[1:]} != {"pylate"} or settings.task != "feature-extraction":
        raise UnsupportedModelError(
            f"{root.path('modules.json')}: Dense modules of pylate follow a Transformer for feature-extraction, and "
            f"nothing else; there is {', '.join(kinds)}, for {settings.task}"
        )
    late = read_pylate(root, _MODEL_SETTINGS, [root.child(path, where) for _, path, where in entries[1:]])
    prompts, default = _prompts(root, root.object(_MODEL_SETTINGS))
    return SentenceModules(
        (), do_lower_case=settings.do_lower_case, prompts=prompts, default_prompt_name=default, late=late
    )


def _entries(root: Folder) -> list[tuple[str, str, str]]:
    """(kind, path, description for messages) of every module, in order."""
    where = str(root.path("modules.json"))
    entries: list[tuple[str, str, str]] = []
    for index, entry in enumerate(root.array("modules.json")):
        which = f"{where}: module {index}"
        type_name = entry.get("type") if isinstance(entry, dict) else None
        path = entry.get("path", "") if isinstance(entry, dict) else None
        if not isinstance(type_name, str) or not isinstance(path, str):
            raise CheckpointError(f"{which} must be an object with the strings type and path")
        kind = type_name.rpartition(".")[2]
        known = ("Transformer", "MLMTransformer", "Pooling", "Dense", "Normalize", "Dropout", "SpladePooling")
        if type_name.startswith("pylate.") and kind == "Dense":
            kind = "pylate"
        elif type_name == _OWN_TRANSFORMER:
            if entry.get("kwargs") not in (None, [], ["task"]):
                raise UnsupportedModelError(f"{which} ({kind}): kwargs is {quote(entry['kwargs'])}; supported: task")
            entry = {**entry, "kwargs": None}
        elif not type_name.startswith("sentence_transformers.") or kind not in known:
            raise UnsupportedModelError(
                f"{which} has type {quote(type_name)}; supported are {', '.join(known)} of "
                "sentence_transformers and Dense of pylate"
            )
        if entry.get("kwargs"):
            raise UnsupportedModelError(f"{which} ({kind}): the field kwargs is set, which is not supported")
        entries.append((kind, path, f"{which} ({kind})"))
    if not entries:
        raise CheckpointError(f"{where}: no modules; at least Transformer and Pooling are needed")
    return entries


def _pooling_modes(folder: Folder) -> tuple[str, ...]:
    where = str(folder.path("config.json"))
    config = folder.object("config.json")
    sizes = {"word_embedding_dimension", "embedding_dimension"}
    check_fields(config, {*_POOLING_FLAGS, *sizes, "pooling_mode", "include_prompt"}, where)
    if not flag(config, "include_prompt", True, where):
        raise UnsupportedModelError(f"{where}: include_prompt is false; pooling without the prompt is not supported")
    if "pooling_mode" in config:
        named = config["pooling_mode"]
        modes = tuple(named) if isinstance(named, list) else (named,)
        for mode in modes:
            if not isinstance(mode, str) or mode not in POOLING_MODES:
                raise UnsupportedModelError(
                    f"{where}: pooling_mode is {quote(mode)}; supported are {', '.join(POOLING_MODES)}"
                )
    else:
        modes = tuple(mode for name, mode in _POOLING_FLAGS.items() if flag(config, name, False, where))
        if "pooling_mode_mean_tokens" not in config:
            # Version 5.3 takes an absent flag for the mean as on, whatever else is on; 5.4 takes the mean if none is.
            if modes:
                raise UnsupportedModelError(
                    f"{where}: {', '.join(modes)} is on and pooling_mode_mean_tokens is absent: sentence-transformers "
                    "up to 5.3 adds the mean, later versions do not; write pooling_mode_mean_tokens, true or false"
                )
            modes = ("mean",)
    if not modes or len(set(modes)) != len(modes):
        raise CheckpointError(f"{where}: every pooling mode must be named at most once, and at least one be on")
    return modes


def _model_settings(root: Folder) -> tuple[dict[str, str], str | None, str | None]:
    if not root.has(_MODEL_SETTINGS):
        return {}, None, None
    where = str(root.path(_MODEL_SETTINGS))
    config = root.object(_MODEL_SETTINGS)
    prompts, default = _prompts(root, config)
    similarity = config.get("similarity_fn_name")
    if similarity is not None and similarity not in SIMILARITIES:
        raise UnsupportedModelError(
            f"{where}: similarity_fn_name is {quote(similarity)}; supported are {', '.join(SIMILARITIES)}"
        )
    if config.get("truncate_dim") is not None:
        raise UnsupportedModelError(
            f"{where}: truncate_dim is {shown(config['truncate_dim'])}; an artifact gives whole embeddings unless "
            "asked: remove the field, and give truncate_dim where you embed (embed(texts, truncate_dim=N), encast run "
            "--truncate-dim N)"
        )
    return prompts, default, similarity


def _prompts(root: Folder, config: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    where = str(root.path(_MODEL_SETTINGS))
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"{where}: prompts must be an object from names to texts")
    default = config.get("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise CheckpointError(f"{where}: default_prompt_name is {quote(default)}; prompts have {sorted(prompts)}")
    return prompts, default
