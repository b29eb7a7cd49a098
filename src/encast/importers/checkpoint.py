"""Opening a checkpoint: a folder in the Hugging Face layout, a hub id, or a parameter file of GluonNLP."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from encast.errors import CheckpointError, InputError
from encast.importers.files import Folder, quote
from encast.importers.gluon import GluonFolder, is_params_file
from encast.importers.hub import looks_like_hub_id, resolve_hub
from encast.importers.model_files import read_tensors
from encast.importers.sentence_modules import (
    SentenceModules,
    TransformerSettings,
    read_modules,
    read_transformer_settings,
    transformer_folder,
)
from encast.importers.tokenizer import TokenizerFiles, read_tokenizer
from encast.importers.weights import TensorSource

__all__ = ["Checkpoint", "checkpoint_name", "open_checkpoint"]


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says, validated, with its tensors still in the files.

    ``root``: the folder that was opened, or that of the ``.params`` file; ``path``: that with config.json, the same one
    or inside of it; ``config``: its content; ``modules``: sentence-transformers' modules, None when there are none.
    ``tokenizer`` is made when first asked for.
    """

    root: Path
    path: Path
    config: dict[str, Any]
    tensors: TensorSource
    modules: SentenceModules | None
    source: str
    revision: str | None = None
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
        return read_tokenizer(self._folder, self.config, self._settings)

    def need_folder(self, use: str) -> None:
        """Raises ``InputError`` for a parameter file of GluonNLP: ``use`` needs a folder in the Hugging Face layout."""
        if isinstance(self._folder, GluonFolder):
            raise InputError(
                f"{self.source}: {use} needs a folder in the Hugging Face layout; this is a file of GluonNLP"
            )

    @property
    def provenance(self) -> dict[str, Any]:
        """``source`` as given, hub ``revision`` (or None) and ``files``: name → SHA-256 of every file read.

        Files of the tokenizer count once ``tokenizer`` was asked for. Reads the weights from start to end.
        """
        return {"source": self.source, "revision": self.revision, "files": self._folder.ledger.digests()}


def open_checkpoint(source: str | os.PathLike[str], *, revision: str | None = None) -> Checkpoint:
    """Opens a folder, a ``.params`` file or, when ``source`` is no existing path, a model of the hub (``owner/name``).

    ``revision``: branch, tag or commit of a hub model. Validates every file's structure without reading
    tensors. Raises ``CheckpointError`` when something is missing, damaged or contradicts itself, and
    ``UnsupportedModelError`` on modules that encast does not have.
    """
    given = os.fspath(source)
    path, commit = _locate(given, revision)
    gluon = GluonFolder(path) if is_params_file(path) else None
    root = gluon or Folder(path)
    folder = gluon or transformer_folder(root)
    if not folder.has("config.json"):
        hint = ""
        if folder.has("adapter_config.json"):
            hint = " (it has a PEFT adapter; merge it into its base model first)"
        elif params := sorted(name for name in folder.names if name.endswith(".params")):
            hint = f" (of GluonNLP give the parameter file itself, {quote(params[0])})"
        raise CheckpointError(
            f"{folder.root}: no config.json{hint}; a folder in the Hugging Face layout is needed, as "
            "save_pretrained of transformers or sentence-transformers writes it"
        )
    config = folder.object("config.json")
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise CheckpointError(f"{folder.path('config.json')}: architectures must be a list of strings")
    settings = read_transformer_settings(folder)
    modules = read_modules(root, settings)
    tensors = read_tensors(folder) if gluon is None else gluon.tensors
    return Checkpoint(
        root.root, folder.root, config, tensors, modules, given, commit, _folder=folder, _settings=settings
    )


def checkpoint_name(source: str | os.PathLike[str]) -> str:
    """What a file made of the checkpoint is called: the name of its folder or file, or of the hub's model without its
    owner.

    Raises ``InputError`` where there is none.
    """
    text = os.fspath(source)
    name = Path(os.path.abspath(text)).name if os.path.lexists(text) else text.rstrip("/").rsplit("/", 1)[-1]
    name = name.removesuffix(".params")
    if not name or "\0" in name:
        raise InputError(f"{text!r} gives the result no name; say where it should go with out")
    return name


def _locate(source: str, revision: str | None) -> tuple[Path, str | None]:
    if not source or "\0" in source:
        raise CheckpointError(f"{quote(source)} names no checkpoint; a folder or a hub id (owner/name) is needed")
    path = Path(source)
    try:
        exists = os.path.lexists(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{quote(source)}: {error}; a folder or a hub id (owner/name) is needed") from None
    if exists:
        return path, None
    if path.suffix == ".params":
        raise CheckpointError(f"{quote(source)}: no such file; a parameter file of GluonNLP is needed")
    if not looks_like_hub_id(source):
        raise CheckpointError(f"{quote(source)}: no such folder; a folder or a hub id (owner/name) is needed")
    return resolve_hub(source, revision)
