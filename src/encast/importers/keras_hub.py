"""KerasHub's presets (``save_to_preset``), seen as a folder in the Hugging Face layout.

A preset has ``config.json`` (the class of the backbone and its sizes), ``model.weights.h5``, and perhaps ``task.json``
with ``task.weights.h5`` (a head), ``tokenizer.json`` (settings of a tokenizer, and not what the tokenizers library has
under this name), ``preprocessor.json`` and ``assets/tokenizer``. Configuration and tokenizer are made of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.files import CONFIG_LIMIT, Folder, parse_json, quote
from encast.importers.hdf5_file import read_hdf5
from encast.importers.keras_hub_names import (
    FAMILIES,
    PADDING_ROWS,
    HubFamily,
    backbone_tensors,
    head_tensors,
    split_task,
)
from encast.importers.weights import StoredTensor, TensorSource

__all__ = ["HUB_FILES", "KerasHubFolder", "find_preset"]

_WEIGHTS, _TASK, _TASK_WEIGHTS = "model.weights.h5", "task.json", "task.weights.h5"
_TOKENIZER, _PREPROCESSOR, _ASSETS = "tokenizer.json", "preprocessor.json", "assets/tokenizer"
HUB_FILES = (
    _WEIGHTS, _TASK, _TASK_WEIGHTS, _TOKENIZER, _PREPROCESSOR,
    *(f"{_ASSETS}/{name}" for name in ("vocabulary.txt", "vocabulary.json", "merges.txt")),
)  # fmt: skip
"""What is read beside ``config.json``."""

_TASKS = {"TextClassifier": "classify", "Classifier": "classify", "MaskedLM": "fill_mask"}
"""The second name is KerasNLP's."""
_SUFFIXES = {"features": "Model", "classify": "ForSequenceClassification", "fill_mask": "ForMaskedLM"}
_SHOWN = {"vocab.txt": "vocabulary.txt", "vocab.json": "vocabulary.json", "merges.txt": "merges.txt"}
"""Files of the Hugging Face layout → what they are called in ``assets/tokenizer``."""
_WORD_PIECE = {"split": True, "split_on_cjk": True, "suffix_indicator": "##", "oov_token": "[UNK]"}
"""Settings that the tokenizer of the Hugging Face layout has as well, and no others."""


def find_preset(path: Path) -> KerasHubFolder | None:
    """The preset that the folder is, None for other folders; raises what ``KerasHubFolder`` does."""
    if not path.is_dir():
        return None
    folder = Folder(path)
    # A preset of a model in shards has model.weights.json.
    if not folder.has("config.json") or not folder.names & {_WEIGHTS, "model.weights.json"}:
        return None
    if folder.pick(("model.safetensors", "pytorch_model.bin", "tf_model.h5")):
        return None
    return KerasHubFolder(path)


class KerasHubFolder(Folder):
    """The folder of a preset, with the files that the Hugging Face layout would have.

    ``tensors`` has that layout's names. Raises ``CheckpointError`` and ``UnsupportedModelError`` as it is made.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._beside = Folder(path, self.ledger)
        family, sizes = self._backbone()
        if not self._beside.has(_WEIGHTS):
            raise UnsupportedModelError(
                f"{path}: the weights are in shards (model.weights.json), which are not read; save the preset with "
                f"all of them in one {_WEIGHTS}"
            )
        task, labels = self._task(family, sizes)
        file, prefix = self._beside.map(_WEIGHTS), ""
        backbone: dict[str, StoredTensor] = {}
        head: dict[str, StoredTensor] = {}
        if task != "features":
            task_file, prefix = self._beside.map(_TASK_WEIGHTS), f"{family.model_type}."
            backbone, stored = split_task(read_hdf5(task_file))
            head = head_tensors(family.heads[task], stored, str(task_file.path))
            file = task_file if backbone else file
        tensors = backbone_tensors(family, backbone or read_hdf5(file), str(file.path))
        tensors = {prefix + name: tensor for name, tensor in tensors.items()} | head
        self.tensors = TensorSource(tensors, str(file.path))
        self._sizes = sizes
        self._family = family
        config = _config(family, sizes) | labels | {"architectures": [family.stem + _SUFFIXES[task]]}
        self._made = {"config.json": json.dumps(config).encode()}
        vocabulary = ("vocab.json", "merges.txt") if family.model_type == "roberta" else ("vocab.txt",)
        self.names = frozenset({"config.json"})
        if self._beside.has(_TOKENIZER):
            self.names |= {"tokenizer_config.json", *vocabulary}

    def path(self, name: str) -> Path:
        """Where it lies, or what it is made of."""
        if name in _SHOWN:
            return self.root / _ASSETS / _SHOWN[name]
        return self.root / (_TOKENIZER if name == "tokenizer_config.json" else name)

    def read(self, name: str, limit: int = CONFIG_LIMIT) -> bytes:
        """As ``Folder.read``, and what is made is not recorded: it comes from files that are."""
        if name == "tokenizer_config.json" and name not in self._made:
            self._made[name] = json.dumps(self._tokenizer()).encode()
        if name in self._made:
            return self._made[name]
        data = self._beside.child(_ASSETS, str(self.root)).read(_SHOWN[name], limit)
        if name == "vocab.json":
            self._check_padding(data)
        return data

    def _backbone(self) -> tuple[HubFamily, Mapping[str, Any]]:
        where = str(self._beside.path("config.json"))
        name, config = _registered(self._beside, "config.json")
        family = FAMILIES.get(name.removesuffix("Backbone")) if name.endswith("Backbone") else None
        if family is None:
            raise UnsupportedModelError(
                f"{where}: is {quote(name)}; of KerasHub {', '.join(f'{known}Backbone' for known in FAMILIES)} are read"
            )
        return family, config

    def _task(self, family: HubFamily, sizes: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """What the head is for, and what the config says of its labels."""
        if not self._beside.has(_TASK):
            return "features", {}
        where = str(self._beside.path(_TASK))
        name, config = _registered(self._beside, _TASK)
        without = f"remove {_TASK} to use the backbone alone"
        task = _TASKS.get(name.removeprefix(family.stem)) if name.startswith(family.stem) else None
        if task is None:
            raise UnsupportedModelError(
                f"{where}: is {quote(name)}; of {family.stem}Backbone the tasks "
                f"{', '.join(family.stem + known for known, of in _TASKS.items() if of in family.heads)} are read: "
                f"{without}"
            )
        if task not in family.heads:
            raise UnsupportedModelError(f"{where}: {name} is not read: {family.reasons[task]}; {without}")
        labels: dict[str, Any] = {}
        if task == "classify":
            activation = config.get("activation", "linear")
            if activation not in ("linear", "softmax", None):
                raise UnsupportedModelError(
                    f"{where}: activation is {quote(activation)}; linear and softmax are read, and scores are a softmax"
                )
            hidden = config.get("hidden_dim", sizes.get("hidden_dim"))
            if hidden not in (None, sizes.get("hidden_dim")):
                raise UnsupportedModelError(
                    f"{where}: hidden_dim of the head is {hidden} and that of the backbone {sizes.get('hidden_dim')}; "
                    "they must be the same"
                )
            labels["num_labels"] = config.get("num_classes")
        if not self._beside.has(_TASK_WEIGHTS):
            raise CheckpointError(
                f"{where}: there is no {_TASK_WEIGHTS} beside it; the preset is incomplete, or {without}"
            )
        return task, labels

    def _tokenizer(self) -> dict[str, Any]:
        """``tokenizer_config.json`` of KerasHub's settings; raises ``UnsupportedModelError`` for other tokenizers."""
        where = str(self._beside.path(_TOKENIZER))
        name, config = _registered(self._beside, _TOKENIZER)
        stem = self._family.stem
        if name != f"{stem}Tokenizer":
            raise UnsupportedModelError(f"{where}: is {quote(name)}; {stem}Tokenizer goes with {stem}Backbone")
        length = self._sizes.get("max_sequence_length")
        if self._beside.has(_PREPROCESSOR):
            _, preprocessor = _registered(self._beside, _PREPROCESSOR)
            length = preprocessor.get("sequence_length", length)
        made: dict[str, Any] = {"tokenizer_class": f"{stem}Tokenizer", "model_max_length": length}
        if self._family.model_type == "roberta":
            return made | {"add_prefix_space": config.get("add_prefix_space", False)}
        for field, value in _WORD_PIECE.items():
            if config.get(field, value) != value:
                raise UnsupportedModelError(
                    f"{where}: {field} is {json.dumps(config[field])[:80]}; {json.dumps(value)} is read"
                )
        # The Hugging Face layout strips accents where it lowers texts, unless it is told not to.
        return made | {
            "do_lower_case": config.get("lowercase", False),
            "strip_accents": config.get("strip_accents", False),
        }

    def _check_padding(self, vocabulary: bytes) -> None:
        where = str(self.path("vocab.json"))
        vocab = parse_json(vocabulary, where)
        if isinstance(vocab, dict) and vocab.get("<pad>") != 1:
            raise UnsupportedModelError(
                f"{where}: <pad> has id {vocab.get('<pad>')}; RoBERTa's positions begin behind the padding id 1"
            )


def _registered(folder: Folder, name: str) -> tuple[str, Mapping[str, Any]]:
    """Class and config of what Keras serialised."""
    where = str(folder.path(name))
    stored = folder.object(name)
    registered, config = stored.get("registered_name"), stored.get("config")
    match = re.fullmatch(r"keras_(?:hub|nlp)>(\w+)", registered) if isinstance(registered, str) else None
    if match is None or not isinstance(config, dict):
        raise CheckpointError(
            f"{where}: registered_name is {quote(registered)}; a preset of KerasHub has keras_hub>CLASS, with a config"
        )
    return match[1], config


def _config(family: HubFamily, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of the Hugging Face layout; activation and epsilon are those that KerasHub's classes have."""
    distil, roberta = family.model_type == "distilbert", family.model_type == "roberta"
    names = {
        "vocabulary_size": "vocab_size",
        "hidden_dim": "dim" if distil else "hidden_size",
        "num_layers": "n_layers" if distil else "num_hidden_layers",
        "num_heads": "n_heads" if distil else "num_attention_heads",
        "intermediate_dim": "hidden_dim" if distil else "intermediate_size",
    }
    config: dict[str, Any] = {shown: sizes[name] for name, shown in names.items() if name in sizes}
    config["model_type"] = family.model_type
    positions = sizes.get("max_sequence_length", 512)
    if type(positions) is int:
        config["max_position_embeddings"] = positions + (PADDING_ROWS if roberta else 0)
    if distil:
        return config | {"activation": "gelu"}
    if roberta:
        return config | {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "type_vocab_size": 1, "pad_token_id": 1}
    return config | {
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-12,
        "type_vocab_size": sizes.get("num_segments", 2),
    }
