"""Opening a checkpoint: a folder in the Hugging Face layout, a hub id, what TensorFlow, Keras or GluonNLP wrote."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from encast.errors import CheckpointError, InputError, UnsupportedModelError
from encast.importers.adapters import adapted_modules, adapted_tensors, adapters_of, find_adapter
from encast.importers.files import Folder, quote
from encast.importers.gluon import GluonFolder, is_params_file
from encast.importers.google_bert import check_case
from encast.importers.hub import looks_like_hub_id, resolve_hub
from encast.importers.keras_hub import KerasHubFolder, find_preset
from encast.importers.late_interaction import STANFORD, read_stanford, token_form
from encast.importers.m3_heads import M3Heads, read_m3_heads, unweighted_tokens
from encast.importers.model_files import PYTORCH_FILES, WEIGHT_FILES, ModelFiles, read_folder
from encast.importers.onnx import Export, read_export
from encast.importers.saved_model import SavedModel
from encast.importers.sentence_modules import (
    SentenceModules,
    TransformerSettings,
    has_own_transformer,
    read_modules,
    read_transformer_settings,
    transformer_folder,
)
from encast.importers.tensorflow_files import find_prefix, read_tensorflow, refuse_table_file, split_prefix
from encast.importers.tokenizer import TokenizerFiles, read_tokenizer
from encast.importers.tokenizer_settings import read_tokenizer_settings
from encast.importers.weights import TensorSource
from encast.ir.meta import TokenForm

__all__ = ["Checkpoint", "checkpoint_name", "open_checkpoint"]


_BESIDE_ONNX = ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "modules.json")


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says, validated, with its tensors still in the files.

    ``root``: the folder that was opened, or that of the ``.params`` file; ``path``: that with config.json, the same one
    or inside of it; ``config``: its content; ``modules``: sentence-transformers' modules, None when there are none.
    ``tokenizer`` and ``token_form`` are made when first asked for. ``config_file``: what config.json is called;
    ``tensorflow``: whether the files are TensorFlow's, whose names and config are given as the Hugging Face layout has
    them. ``onnx``: the ONNX file that it is, below ``path``, "" for others; ``config`` is then empty where there is no
    config.json, and ``tensors`` are empty. ``saved_model``: how TensorFlow runs it, where it is one. ``keras``:
    whether the weights are Keras's, whose names are given as the Hugging Face layout has them. ``adapter``: as it was
    asked for, the one that is in the weights, or none.
    """

    root: Path
    path: Path
    config: dict[str, Any]
    tensors: TensorSource
    modules: SentenceModules | None
    source: str
    revision: str | None = None
    config_file: str = "config.json"
    tensorflow: bool = False
    onnx: str = ""
    keras: bool = False
    saved_model: SavedModel | None = None
    adapter: str | None = None
    _folder: Folder = field(kw_only=True, repr=False)
    _settings: TransformerSettings = field(kw_only=True, repr=False)

    @property
    def architecture(self) -> str:
        """The first of config.json's ``architectures``, "" if it names none."""
        names = self.config.get("architectures") or [""]
        return str(names[0])

    @cached_property
    def tokenizer(self) -> TokenizerFiles:
        """Raises ``CheckpointError`` or ``UnsupportedModelError`` when there is no usable tokenizer."""
        if self.tensorflow:
            check_case(self._folder)
        if isinstance(self._folder, KerasHubFolder):
            self._folder.need_tokenizer()
        found = read_tokenizer(self._folder, self.config, self._settings)
        # The lengths of queries and documents take the place of all others, in each layout.
        late = None if self.modules is None else self.modules.late
        return found if late is None else replace(found, max_length=late.longest)

    @cached_property
    def token_form(self) -> TokenForm | None:
        """How a model of token embeddings reads texts, None for others; raises as ``tokenizer`` does, and where that
        lacks a token that the model needs."""
        late = None if self.modules is None else self.modules.late
        if late is None:
            return None if self.m3 is None else TokenForm(None, None, None, None, None, 0, (), drop_first=True)
        side = read_tokenizer_settings(self._folder).config.get("padding_side", "right")
        if late.expand and side != "right":
            raise UnsupportedModelError(
                f"{self._folder.path('tokenizer_config.json')}: padding_side is {quote(side)}, so that queries are "
                "filled up at their beginning; supported: right"
            )
        return token_form(late, self.tokenizer.json, self.tokenizer.special_tokens, str(self._folder.root))

    @cached_property
    def m3(self) -> M3Heads | None:
        """The heads of BGE-M3, None for others; raises as ``read_m3_heads`` does."""
        return read_m3_heads(self._folder)

    @property
    def unweighted(self) -> tuple[int, ...]:
        """Of BGE-M3, the tokens without a weight in sparse embeddings; raises as ``tokenizer`` does."""
        return unweighted_tokens(self.tokenizer.json, self.tokenizer.special_tokens, str(self._folder.root))

    @cached_property
    def export(self) -> Export | None:
        """The graph of an ONNX file, None for other checkpoints; raises as ``read_export`` does."""
        return read_export(*_inside(self._folder, self.onnx)) if self.onnx else None

    @property
    def other_format(self) -> str | None:
        """What this is, where it is no folder in the Hugging Face layout with weights of PyTorch."""
        if isinstance(self._folder, GluonFolder):
            return "a file of GluonNLP"
        if isinstance(self._folder, KerasHubFolder):
            return "a preset of KerasHub"
        if self.onnx:
            return "an ONNX file"
        if self.tensorflow:
            return "a checkpoint of TensorFlow"
        if self.keras:
            return "a folder with weights of Keras (tf_model.h5) and none of PyTorch"
        return None

    def need_hugging_face(self, use: str) -> None:
        """Raises ``InputError`` where ``other_format`` says what else it is."""
        if self.other_format is not None:
            raise InputError(
                f"{self.source}: {use} needs a folder in the Hugging Face layout; this is {self.other_format}. `encast "
                "compile` takes it as it is"
            )

    @property
    def provenance(self) -> dict[str, Any]:
        """``source`` as given, hub ``revision`` (or None), ``files``: name → SHA-256 of every file read, and
        ``adapter`` where one was asked for.

        Files of the tokenizer count once ``tokenizer`` was asked for. Reads the weights from start to end.
        """
        found = {"source": self.source, "revision": self.revision, "files": self._folder.ledger.digests()}
        return found if self.adapter is None else {**found, "adapter": self.adapter}


def open_checkpoint(
    source: str | os.PathLike[str], *, revision: str | None = None, adapter: str | None = None
) -> Checkpoint:
    """Opens a folder, the prefix of a TensorFlow checkpoint, a ``.params`` file of GluonNLP, an ``.onnx`` file or, when
    ``source`` is no existing path, a model of the hub (``owner/name``).

    A folder has the Hugging Face layout, one ONNX file, a preset of KerasHub, TensorFlow checkpoints of
    google-research/bert, or a SavedModel of such a model. ``revision``: branch, tag or commit of a hub model.
    ``adapter``: of a checkpoint that holds adapters (``lora_adaptations`` in config.json) the name of the one that goes
    into the weights, its text becoming the default prompt, or ``none``. Validates every file's structure without
    reading tensors; an ONNX graph is read when it is asked for. Raises ``InputError`` for an adapter that is not there
    or not given, ``CheckpointError`` when something is missing, damaged or contradicts itself, and
    ``UnsupportedModelError`` on what encast does not have.
    """
    given = os.fspath(source)
    path, prefix, commit = _locate(given, revision)
    onnx = ""
    if _is_onnx_file(path):
        path, onnx = _folder_of_onnx(path)
    root = GluonFolder(path) if is_params_file(path) else Folder(path)
    named = isinstance(root, GluonFolder) or prefix is not None or bool(onnx)
    folder = root if named else transformer_folder(root)
    if not named:
        prefix = find_prefix(folder)
        onnx = "" if prefix is not None else _find_onnx(folder)
        if prefix is None and not onnx and not folder.pick(WEIGHT_FILES):
            folder = find_preset(folder) or folder
            root = folder if isinstance(folder, KerasHubFolder) else root
    settings = read_transformer_settings(folder)
    modules = read_modules(root, settings)
    if onnx:
        model = _read_onnx(folder, onnx)
    else:
        model = _read_folder(folder) if prefix is None else read_tensorflow(folder, prefix)
    names = model.config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise CheckpointError(f"{model.folder.path(model.config_file)}: architectures must be a list of strings")
    if modules is None and names and names[0] == STANFORD:
        modules = SentenceModules((), do_lower_case=settings.do_lower_case, late=read_stanford(model.folder))
    config, tensors = model.config, model.tensors
    where = str(model.folder.path(model.config_file))
    adapters = () if onnx else adapters_of(config, where)
    if has_own_transformer(root) and not adapters:
        raise UnsupportedModelError(
            f"{root.path('modules.json')}: the first module is code of the model's own (custom_st), which encast knows "
            "for models with lora_adaptations alone (jina-embeddings-v3); where it does what a Transformer does, let "
            "the type be sentence_transformers.models.Transformer"
        )
    if adapters or adapter is not None:
        index = find_adapter(adapters, adapter, where)
        modules = adapted_modules(modules, config, adapters, index, where)
        tensors = adapted_tensors(tensors, config, len(adapters), index, where)
        config = {**config, "lora_adaptations": None}
    return Checkpoint(
        root=root.root,
        path=model.folder.root,
        config=config,
        tensors=tensors,
        modules=modules,
        source=given,
        revision=commit,
        config_file=model.config_file,
        tensorflow=prefix is not None,
        onnx=onnx,
        keras=model.keras,
        saved_model=model.saved,
        adapter=adapter,
        _folder=model.vocabulary,
        _settings=settings,
    )


def _is_onnx_file(path: Path) -> bool:
    return path.suffix == ".onnx" and not path.is_dir()


def _folder_of_onnx(path: Path) -> tuple[Path, str]:
    """The folder with the files that go with an ONNX file, and the file's name below it.

    On the hub the file lies in a folder ``onnx`` inside of it.
    """
    folder = Path(os.path.abspath(path.parent))
    here, above = (any(os.path.lexists(one / name) for name in _BESIDE_ONNX) for one in (folder, folder.parent))
    if folder.name == "onnx" and above and not here:
        return folder.parent, f"onnx/{path.name}"
    return path.parent, path.name


def _find_onnx(folder: Folder) -> str:
    """The one ONNX file of a folder that has no weights of PyTorch, "" if there is none."""
    names = sorted(name for name in folder.names if name.endswith(".onnx"))
    if not names or folder.pick(PYTORCH_FILES) is not None:
        return ""
    if len(names) > 1:
        raise CheckpointError(
            f"{folder.root}: has {len(names)} ONNX files, {', '.join(quote(name) for name in names[:4])}; give the "
            "one that "
            "is meant"
        )
    return names[0]


def _inside(folder: Folder, name: str) -> tuple[Folder, str]:
    """The folder that an ONNX file itself lies in, where its data may lie too, and its name there."""
    above, _, lone = name.rpartition("/")
    return (folder.child(above, str(folder.root)) if above else folder), lone


def _read_onnx(folder: Folder, name: str) -> ModelFiles:
    """The export's graph is read when it is asked for."""
    inside, lone = _inside(folder, name)
    inside.map(lone)
    config = folder.object("config.json") if folder.has("config.json") else {}
    return ModelFiles(folder, "config.json", config, TensorSource({}, str(folder.path(name))), folder)


def _read_folder(folder: Folder) -> ModelFiles:
    if not folder.has("config.json"):
        hint = ""
        if folder.has("adapter_config.json"):
            hint = " (it has a PEFT adapter; merge it into its base model first)"
        elif folder.has("card.json") and folder.has("graph.json"):
            hint = " (it is an artifact already; compile the checkpoint that its card.json names)"
        elif params := sorted(name for name in folder.names if name.endswith(".params")):
            hint = f" (of GluonNLP give the parameter file itself, {quote(params[0])})"
        raise CheckpointError(
            f"{folder.root}: no config.json{hint}; a folder in the Hugging Face layout is needed, as "
            "save_pretrained of transformers or sentence-transformers writes it, or a TensorFlow checkpoint of BERT"
        )
    if folder.has("adapter_config.json"):
        raise UnsupportedModelError(
            f"{folder.path('adapter_config.json')}: an adapter of PEFT lies beside the model, and transformers would "
            "add it to the weights; merge it into them (merge_and_unload), or remove the file"
        )
    if isinstance(folder, (GluonFolder, KerasHubFolder)):
        keras = isinstance(folder, KerasHubFolder)
        return ModelFiles(folder, "config.json", folder.object("config.json"), folder.tensors, folder, keras)
    return read_folder(folder)


def checkpoint_name(source: str | os.PathLike[str]) -> str:
    """What a file made of the checkpoint is called: the name of its folder or file, or of the hub's model without its
    owner.

    Raises ``InputError`` where there is none.
    """
    text = os.fspath(source)
    name = Path(os.path.abspath(text)).name if os.path.lexists(text) else text.rstrip("/").rsplit("/", 1)[-1]
    if is_params_file(Path(text)):
        name = name.removesuffix(".params")
    if _is_onnx_file(Path(text)):
        name = name.removesuffix(".onnx")
    if not name or "\0" in name:
        raise InputError(f"{text!r} gives the result no name; say where it should go with out")
    return name


def _locate(source: str, revision: str | None) -> tuple[Path, str | None, str | None]:
    """The folder, the prefix in it if ``source`` names one of TensorFlow, the commit of a hub's model."""
    wanted = "a folder, the prefix of a TensorFlow checkpoint or a hub id (owner/name) is needed"
    if not source or "\0" in source:
        raise CheckpointError(f"{quote(source)} names no checkpoint; {wanted}")
    path = Path(source)
    try:
        exists = os.path.lexists(path)
        split = split_prefix(source)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{quote(source)}: {error}; {wanted}") from None
    if split is not None and not path.is_dir():
        return *split, None
    if exists:
        if path.is_file() and path.suffix not in (".params", ".onnx"):
            refuse_table_file(path)
        return path, None, None
    if path.suffix == ".params":
        raise CheckpointError(f"{quote(source)}: no such file; a parameter file of GluonNLP is needed")
    if path.suffix == ".onnx":
        raise CheckpointError(f"{quote(source)}: no such file; an ONNX file is needed")
    if not looks_like_hub_id(source):
        raise CheckpointError(f"{quote(source)}: no such folder; {wanted}")
    folder, commit = resolve_hub(source, revision)
    return folder, None, commit
