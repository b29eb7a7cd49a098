"""KerasHub's presets (``save_to_preset``), seen as a folder in the Hugging Face layout.

A preset has ``config.json`` (the class of the backbone and its sizes), ``model.weights.h5``, and perhaps ``task.json``
with ``task.weights.h5`` (a head), ``tokenizer.json`` (settings of a tokenizer, and not what the tokenizers library has
under this name), ``preprocessor.json`` and ``assets/tokenizer``. Configuration and tokenizer are made of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.files import CONFIG_LIMIT, Folder, parse_json, quote, shown
from encast.importers.hdf5_file import read_hdf5
from encast.importers.keras_hub_names import (
    FAMILIES,
    PADDING_ROWS,
    HubFamily,
    backbone_tensors,
    head_tensors,
    same_backbone,
    split_task,
)
from encast.importers.keras_hub_settings import (
    BACKBONES,
    PREPROCESSOR,
    TASKS,
    TOKENIZERS,
    need_same,
    read_settings,
    registered,
)
from encast.importers.weights import StoredTensor, TensorSource

__all__ = ["HUB_FILES", "HUB_SHARDS", "KerasHubFolder", "find_preset"]

_WEIGHTS, _TASK, _TASK_WEIGHTS = "model.weights.h5", "task.json", "task.weights.h5"
_TOKENIZER, _PREPROCESSOR, _ASSETS = "tokenizer.json", "preprocessor.json", "assets/tokenizer"
HUB_FILES = (
    _WEIGHTS, _TASK, _TASK_WEIGHTS, _TOKENIZER, _PREPROCESSOR,
    *(f"{_ASSETS}/{name}" for name in ("vocabulary.txt", "vocabulary.json", "merges.txt")),
)  # fmt: skip
"""What is read beside ``config.json``."""
HUB_SHARDS = "model.weights.json"
"""The list of shards of a model that has no ``model.weights.h5``."""

_KINDS = {"TextClassifier": "classify", "Classifier": "classify", "MaskedLM": "fill_mask"}
"""The second name is KerasNLP's."""
_PREPROCESSORS = ("TextClassifierPreprocessor", "MaskedLMPreprocessor", "TextEmbedderPreprocessor", "Preprocessor")
"""The last name is KerasNLP's. They make the same ids, up to what a masked LM is trained with."""
_SUFFIXES = {"features": "Model", "classify": "ForSequenceClassification", "fill_mask": "ForMaskedLM"}
_SHOWN = {"vocab.txt": "vocabulary.txt", "vocab.json": "vocabulary.json", "merges.txt": "merges.txt"}
"""Files of the Hugging Face layout → what they are called in ``assets/tokenizer``."""
_ROBERTA_TOKENS = ("<s>", "</s>", "<mask>", "<unk>")


def find_preset(folder: Folder) -> KerasHubFolder | None:
    """The preset that the folder is, None for other folders; raises what ``KerasHubFolder`` does."""
    if not folder.has("config.json") or not folder.names & {_WEIGHTS, HUB_SHARDS}:
        return None
    if "registered_name" not in folder.object("config.json"):
        return None
    return KerasHubFolder(folder.root)


class KerasHubFolder(Folder):
    """The folder of a preset, with the files that the Hugging Face layout would have.

    ``tensors`` has that layout's names. Raises ``CheckpointError`` and ``UnsupportedModelError`` as it is made.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._beside = Folder(path, self.ledger)
        self._family, self._sizes = self._backbone()
        if not self._beside.has(_WEIGHTS):
            raise UnsupportedModelError(
                f"{path}: the weights are in shards ({HUB_SHARDS}), which are not read; save the preset with "
                f"all of them in one {_WEIGHTS}"
            )
        self._task: Mapping[str, Any] = {}
        task, labels = self._read_task()
        self.tensors = self._tensors(task, labels)
        config = _config(self._family, self._sizes) | labels
        config["architectures"] = [self._family.stem + _SUFFIXES[task]]
        self._made = {"config.json": json.dumps(config).encode()}
        self._vocabulary = ("vocab.json", "merges.txt") if self._family.model_type == "roberta" else ("vocab.txt",)
        self.names = frozenset({"config.json"})
        if self._beside.has(_TOKENIZER):
            self.names |= {"tokenizer_config.json", *self._vocabulary}

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
            self._check_roberta(data)
        return data

    def need_tokenizer(self) -> None:
        """Raises ``CheckpointError`` where files of the tokenizer are missing, by the names that a preset has."""
        wanted = [f"{_ASSETS}/{_SHOWN[name]}" for name in self._vocabulary]
        missing = [name for name in (_TOKENIZER, *wanted) if not os.path.lexists(self.root / name)]
        if missing:
            raise CheckpointError(
                f"{self.root}: no {' and no '.join(missing)}; a preset has its tokenizer in {_TOKENIZER} (of KerasHub, "
                f"and not of the tokenizers library) and {' and '.join(wanted)}, which save_to_preset of a task, a "
                "preprocessor or a tokenizer writes"
            )

    def _backbone(self) -> tuple[HubFamily, dict[str, Any]]:
        where = str(self._beside.path("config.json"))
        name, config = registered(self._beside.object("config.json"), where)
        family = FAMILIES.get(name.removesuffix("Backbone")) if name.endswith("Backbone") else None
        if family is None:
            raise UnsupportedModelError(
                f"{where}: is {quote(name)}; of KerasHub {', '.join(f'{known}Backbone' for known in FAMILIES)} are read"
            )
        sizes = read_settings(config, BACKBONES[family.stem], where)
        if sizes["hidden_dim"] % sizes["num_heads"]:
            raise CheckpointError(
                f"{where}: hidden_dim is {sizes['hidden_dim']} and num_heads {sizes['num_heads']}, which must divide it"
            )
        return family, sizes

    def _read_task(self) -> tuple[str, dict[str, Any]]:
        """What the head is for, and what the config says of its labels."""
        if not self._beside.has(_TASK):
            return "features", {}
        family = self._family
        where = str(self._beside.path(_TASK))
        name, self._task = registered(self._beside.object(_TASK), where)
        without = f"remove {_TASK} to use the backbone alone"
        task = _KINDS.get(name.removeprefix(family.stem)) if name.startswith(family.stem) else None
        if task is None:
            raise UnsupportedModelError(
                f"{where}: is {quote(name)}; of {family.stem}Backbone the tasks "
                f"{', '.join(family.stem + known for known, of in _KINDS.items() if of in family.heads)} are read: "
                f"{without}"
            )
        if task not in family.heads:
            raise UnsupportedModelError(f"{where}: {name} is not read: {family.reasons[task]}; {without}")
        found = read_settings(self._task, TASKS[task], where)
        if self._task.get("backbone") is not None:
            fields, inner = BACKBONES[family.stem], f"{where}, backbone"
            self._need_same(self._task["backbone"], inner, f"{family.stem}Backbone", fields, self._sizes, "config.json")
        if found.get("hidden_dim") not in (None, self._sizes["hidden_dim"]):
            raise UnsupportedModelError(
                f"{where}: hidden_dim of the head is {found['hidden_dim']} and that of the backbone "
                f"{self._sizes['hidden_dim']}; they must be the same"
            )
        if found.get("num_classes") == 1 and found["activation"] == "softmax":
            raise UnsupportedModelError(
                f"{where}: num_classes is 1 and activation softmax, whose one score is always 1; with activation "
                "linear it is read as a regression"
            )
        if not self._beside.has(_TASK_WEIGHTS):
            raise CheckpointError(
                f"{where}: there is no {_TASK_WEIGHTS} beside it; the preset is incomplete, or {without}"
            )
        return task, {"num_labels": found["num_classes"]} if task == "classify" else {}

    def _tensors(self, task: str, labels: Mapping[str, int]) -> TensorSource:
        family, sizes = self._family, dict(self._sizes)
        where = str(self._beside.path(_WEIGHTS))
        stored, prefix = read_hdf5(self._beside.map(_WEIGHTS)), ""
        head: dict[str, StoredTensor] = {}
        if task != "features":
            task_where, prefix = str(self._beside.path(_TASK_WEIGHTS)), f"{family.model_type}."
            nested, rest = split_task(read_hdf5(self._beside.map(_TASK_WEIGHTS)))
            stored = same_backbone(stored, nested, task_where)
            sizes["num_classes"] = labels.get("num_labels", 0)
            head = head_tensors(family.heads[task], rest, sizes, task_where)
        tensors = backbone_tensors(family, stored, sizes, where)
        return TensorSource({prefix + name: tensor for name, tensor in tensors.items()} | head, where)

    def _need_same(
        self,
        nested: object,
        where: str,
        class_name: str,
        fields: Mapping[str, Any],
        found: Mapping[str, Any],
        file: str,
    ) -> None:
        """Raises ``CheckpointError`` unless what is ``nested`` has the class and the settings of its own ``file``."""
        name, config = registered(nested, where)
        own = str(self._beside.path(file))
        if name != class_name:
            raise CheckpointError(
                f"{where} is {quote(name)}, and {own} is {quote(class_name)}; the files are of different models, so "
                "save the preset anew"
            )
        need_same(found, own, read_settings(config, fields, where), where)

    def _tokenizer(self) -> dict[str, Any]:
        """``tokenizer_config.json`` of KerasHub's settings; raises ``UnsupportedModelError`` for other tokenizers."""
        where = str(self._beside.path(_TOKENIZER))
        name, config = registered(self._beside.object(_TOKENIZER), where)
        stem = self._family.stem
        if name != f"{stem}Tokenizer":
            raise UnsupportedModelError(f"{where}: is {quote(name)}; {stem}Tokenizer goes with {stem}Backbone")
        found = read_settings(config, TOKENIZERS[stem], where)
        length = self._preprocessor(found)
        made: dict[str, Any] = {"tokenizer_class": name, "model_max_length": length}
        if self._family.model_type == "roberta":
            return made | {"add_prefix_space": found["add_prefix_space"]}
        # The Hugging Face layout strips accents where it lowers texts, unless it is told not to.
        return made | {"do_lower_case": found["lowercase"], "strip_accents": found["strip_accents"]}

    def _preprocessor(self, tokenizer: Mapping[str, Any]) -> int:
        """The longest text, of ``preprocessor.json`` or else of ``task.json``; the tokenizer in either must have the
        settings of ``tokenizer``."""
        stem = self._family.stem
        found: dict[str, Any] = {}
        own = str(self._beside.path(_PREPROCESSOR))
        places = [(self._task.get("preprocessor"), f"{self._beside.path(_TASK)}, preprocessor")]
        if self._beside.has(_PREPROCESSOR):
            places.insert(0, (self._beside.object(_PREPROCESSOR), own))
        for stored, where in places:
            if stored is None:
                continue
            name, config = registered(stored, where)
            if name not in [stem + known for known in _PREPROCESSORS]:
                raise UnsupportedModelError(
                    f"{where}: is {quote(name)}; {', '.join(stem + known for known in _PREPROCESSORS)} are read"
                )
            settings = read_settings(config, PREPROCESSOR, where)
            if found:
                need_same(found, own, settings, where)
            found = settings
            if config.get("tokenizer") is not None:
                inner = f"{where}, tokenizer" if where == own else f"{where}.tokenizer"
                nested = config["tokenizer"]
                self._need_same(nested, inner, f"{stem}Tokenizer", TOKENIZERS[stem], tokenizer, _TOKENIZER)
        return int(found.get("sequence_length", self._sizes["max_sequence_length"]))

    def _check_roberta(self, vocabulary: bytes) -> None:
        where = str(self.path("vocab.json"))
        vocab = parse_json(vocabulary, where)
        if not isinstance(vocab, dict):
            return
        if vocab.get("<pad>") != 1:
            raise UnsupportedModelError(
                f"{where}: <pad> has id {shown(vocab.get('<pad>'))}; RoBERTa's positions begin behind the padding id 1"
            )
        for token in _ROBERTA_TOKENS:
            if token not in vocab:
                raise UnsupportedModelError(
                    f"{where}: lacks {token}, which RoBERTa's tokenizer in the Hugging Face layout has to have; "
                    "KerasHub does without <unk>"
                )


def _config(family: HubFamily, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of the Hugging Face layout; activation and epsilon are those that KerasHub's classes have."""
    distil, roberta = family.model_type == "distilbert", family.model_type == "roberta"
    names = {
        "vocabulary_size": "vocab_size",
        "hidden_dim": "dim" if distil else "hidden_size",
        "num_layers": "n_layers" if distil else "num_hidden_layers",
        "num_heads": "n_heads" if distil else "num_attention_heads",
        "intermediate_dim": "hidden_dim" if distil else "intermediate_size",
        "max_sequence_length": "max_position_embeddings",
    }
    config: dict[str, Any] = {here: sizes[name] for name, here in names.items()}
    config["model_type"] = family.model_type
    if distil:
        return config | {"activation": "gelu"}
    if roberta:
        config["max_position_embeddings"] += PADDING_ROWS
        return config | {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "type_vocab_size": 1, "pad_token_id": 1}
    return config | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-12, "type_vocab_size": sizes["num_segments"]}
