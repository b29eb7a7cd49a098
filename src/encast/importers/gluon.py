"""GluonNLP's parameter files, seen as a folder in the Hugging Face layout.

A ``.params`` file has arrays and names, nothing else. Sizes follow from the shapes. What shapes cannot tell (heads,
activation, epsilon) follows from the sizes that GluonNLP publishes, or stands in a ``config.json`` beside the file,
whose fields win. What reads folders reads these files too: configuration and tokenizer are made when asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.files import CONFIG_LIMIT, Folder, quote
from encast.importers.gluon_names import LAYOUTS, parts_of
from encast.importers.gluon_vocabulary import tokenizer_files
from encast.importers.mxnet_file import read_params
from encast.importers.weights import DTYPES, StoredTensor, TensorSource

__all__ = ["GluonFolder", "is_params_file"]

# Layers, hidden and inner sizes -> heads, activation, epsilon: ``bert_hparams`` in src/gluonnlp/model/bert.py.
_BASE, _LARGE, _HALF = (12, 768, 3072), (24, 1024, 4096), (6, 768, 3072)
_PUBLISHED: Mapping[str, Mapping[tuple[int, int, int], tuple[int, str, float]]] = {
    "bert": {_BASE: (12, "gelu", 1e-12), _LARGE: (16, "gelu", 1e-12)},
    "roberta": {_BASE: (12, "gelu", 1e-5), _LARGE: (16, "gelu", 1e-5)},
    # GluonNLP gives DistilBERT this epsilon, the model that it was converted from has 1e-12.
    "distilbert": {_HALF: (12, "gelu", 1e-5)},
}
_ERNIE_POSITIONS, _ERNIE = 513, (12, "relu", 1e-5)
"""ernie_12_768_12 has the sizes of BERT-base and one position more."""

_PADDING_ROWS = 2
"""fairseq numbers positions from 2, behind the padding id 1; GluonNLP leaves out those rows, transformers has them."""

_NAMES = {
    "heads": ("num_attention_heads", "n_heads"),
    "activation": ("hidden_act", "activation"),
    "eps": ("layer_norm_eps", "gluon_layer_norm_eps"),
}
"""Fields of config.json: those of BERT and RoBERTa, and of DistilBERT."""


def is_params_file(path: Path) -> bool:
    """Whether the path is meant as a parameter file."""
    return path.suffix == ".params" and not path.is_dir()


class GluonFolder(Folder):
    """The folder of a ``.params`` file, with the files that the Hugging Face layout would have.

    ``tensors`` has that layout's names. Raises ``CheckpointError`` and ``UnsupportedModelError`` as it is made.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path.parent)
        self.file = path.name
        self._beside = Folder(path.parent, self.ledger)
        stored = read_params(self._beside.map(self.file))
        self.where = str(path)
        parts = parts_of(stored, self.where)
        given = self._beside.object("config.json") if self._beside.has("config.json") else {}
        model = _Model({part: stored[name] for part, name in parts.items()}, (*stored, self.file), given, self.where)
        self.model_type = model.model_type
        self.tensors = TensorSource(model.tensors(), self.where)
        self._config = json.dumps({**model.config(), **given}).encode()
        self._rows = model.vocab
        if self._beside.has("tokenizer.json"):
            settings = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
            shown = {"tokenizer.json"} | (settings & self.names)
        else:
            # The vocabulary says which tokens are special: the two other files may be of another model.
            shown = {"tokenizer_config.json"}
            shown |= {"vocab.json", "merges.txt"} if self.model_type == "roberta" else {"vocab.txt"}
        self.names = frozenset({"config.json"} | shown)

    @cached_property
    def _tokenizer(self) -> dict[str, bytes]:
        if self._beside.has("tokenizer.json"):
            return {}
        return tokenizer_files(self._beside, self.file, self.model_type, self._rows)

    def read(self, name: str, limit: int = CONFIG_LIMIT) -> bytes:
        """As ``Folder.read``, and what is made is not recorded: it comes from files that are."""
        if name == "config.json":
            return self._config
        if name in self._tokenizer:
            return self._tokenizer[name]
        return self._beside.read(name, limit)


class _Model:
    """What the parts of a file are: family, sizes, head."""

    def __init__(
        self, parts: Mapping[str, StoredTensor], names: Iterable[str], given: Mapping[str, Any], where: str
    ) -> None:
        self.parts = parts
        self.where = where
        self.given = given
        self.vocab, self.hidden = self._table("words")
        self.positions, _ = self._table("positions")
        cells = {part.split(".")[0] for part in parts if part[0].isdigit()}
        if cells != {str(layer) for layer in range(len(cells))} or not cells:
            raise CheckpointError(
                f"{where}: layers {sorted(cells)[:20]} are there; 0, 1, 2, ... without a gap are needed"
            )
        self.layers = len(cells)
        self.inner, _ = self._table("0.ffn_1")
        self.model_type = self._family(" ".join(names))
        self.layout = LAYOUTS[self.model_type]
        self._check_whole()

    def _table(self, path: str) -> tuple[int, int]:
        tensor = self.parts.get(f"{path}.weight")
        if tensor is None:
            raise CheckpointError(f"{self.where}: has no parameter for {path}; the file is not of a whole model")
        if len(tensor.shape) != 2:
            raise CheckpointError(f"{self.where}: {path} has shape {list(tensor.shape)}; a matrix is needed")
        return tensor.shape[0], tensor.shape[1]

    def _family(self, names: str) -> str:
        given = self.given.get("model_type")
        if given is not None:
            if given not in LAYOUTS:
                raise UnsupportedModelError(
                    f"{self._config_json}: model_type is {quote(given)}; here it is one of {list(LAYOUTS)}"
                )
            return str(given)
        has = {part.split(".")[0] for part in self.parts}
        if has & {"types", "pooler", "next"}:
            return "bert"
        for family in ("distilbert", "roberta"):
            if family in names.lower():
                return family
        if has & {"mlm", "dense"}:
            return "roberta"
        size = (self.layers, self.hidden, self.inner)
        for family in ("distilbert", "roberta"):
            if size in _PUBLISHED[family]:
                return family
        raise CheckpointError(
            f"{self.where}: without token types it is RoBERTa or DistilBERT, and neither names nor sizes tell which; "
            'write a config.json beside it with "model_type": "roberta" or "distilbert"'
        )

    @property
    def _config_json(self) -> Path:
        return Path(self.where).parent / "config.json"

    def _check_whole(self) -> None:
        """That no parameter of the encoder is missing, and that the family has each."""
        wanted = ["words.weight", "positions.weight", "norm.gamma", "norm.beta"]
        for layer in range(self.layers):
            for path in self.layout.cells:
                kinds = ("gamma", "beta") if "norm" in path else ("weight", "bias")
                wanted += [f"{layer}.{path}.{kind}" for kind in kinds]
        missing = [part for part in wanted if part not in self.parts]
        if missing:
            raise CheckpointError(
                f"{self.where}: {len(missing)} parameters of its {self.layers} layers are missing "
                f"({', '.join(missing[:5])}); save the whole model"
            )
        foreign = sorted({part for part in self.parts if self.layout.name(part) is None})
        if foreign:
            raise UnsupportedModelError(
                f"{self.where}: is {self.model_type}, and has {', '.join(foreign[:4])}; GluonNLP has none for it"
            )
        heads = [head for head in ("out", "answer", "tag") if f"{head}.weight" in self.parts]
        if len(heads) > 1:
            names = ", ".join(quote(str(self.layout.name(f"{head}.weight"))) for head in heads)
            raise CheckpointError(f"{self.where}: has {len(heads)} heads, {names}; save one model a file")

    def tensors(self) -> dict[str, StoredTensor]:
        """Name in the Hugging Face layout → tensor."""
        tensors = {str(self.layout.name(part)): tensor for part, tensor in self.parts.items()}
        positions = str(self.layout.name("positions.weight"))
        if self.model_type == "roberta":
            tensors[positions] = _with_rows_before(tensors[positions], _PADDING_ROWS)
        types = self.layout.name("types.weight")
        if types is not None and types not in tensors:
            # A model without token types is one whose rows for them are zero.
            shape = (self._type_rows, self.hidden)
            tensors[types] = StoredTensor("F32", shape, self.where, lambda: np.zeros(shape, np.float32))
        return tensors

    @property
    def _type_rows(self) -> int:
        if "types.weight" in self.parts:
            return self._table("types")[0]
        return 1 if self.model_type == "roberta" else 2

    def config(self) -> dict[str, Any]:
        """The fields of config.json that names and shapes tell; raises ``CheckpointError`` where ``given`` lacks one
        that they do not.
        """
        distil = self.model_type == "distilbert"
        config: dict[str, Any] = {
            "model_type": self.model_type,
            "architectures": [self.layout.stem + self._head()],
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions + (_PADDING_ROWS if self.model_type == "roberta" else 0),
        }
        if distil:
            config |= {"dim": self.hidden, "n_layers": self.layers, "hidden_dim": self.inner}
        else:
            config |= {"hidden_size": self.hidden, "num_hidden_layers": self.layers, "intermediate_size": self.inner}
            config["type_vocab_size"] = self._type_rows
        for head in ("out", "tag"):
            if f"{head}.weight" in self.parts:
                config["num_labels"] = self._table(head)[0]
        fields = [names[distil] for names in _NAMES.values()]
        size = (self.layers, self.hidden, self.inner)
        values = _PUBLISHED[self.model_type].get(size)
        if self.model_type == "bert" and size == _BASE and self.positions == _ERNIE_POSITIONS:
            values = _ERNIE
        missing = [field for field in fields if field not in self.given]
        if values is None and missing:
            raise CheckpointError(
                f"{self.where}: {self.layers} layers of {self.hidden} and {self.inner} columns are not of a size of "
                f"{self.model_type} that GluonNLP publishes, so they do not tell {', '.join(missing)}; write a "
                f"config.json beside it with {'these fields' if len(missing) > 1 else 'this field'}"
            )
        config |= dict(zip(fields, values or (), strict=False))
        self._check_given({**config, **self.given})
        return config

    def _check_given(self, config: Mapping[str, Any]) -> None:
        """Raises for fields that GluonNLP's classes do not follow, or that would change what a parameter means."""
        if self.model_type == "distilbert" and "layer_norm_eps" in self.given:
            raise CheckpointError(
                f"{self._config_json}: layer_norm_eps has no effect for DistilBERT; for GluonNLP's files the field is "
                "gluon_layer_norm_eps: rename it or leave it out"
            )
        if self.model_type == "roberta" and config.get("pad_token_id", 1) != 1:
            raise CheckpointError(
                f"{self._config_json}: pad_token_id is {quote(str(config['pad_token_id']))}; GluonNLP's RoBERTa has 1, "
                "behind which its positions begin: leave the field out"
            )
        # RoBERTa's head is GELU in the Hugging Face layout too.
        if self.model_type == "bert" and "mlm_dense.weight" in self.parts and config["hidden_act"] != "gelu":
            raise UnsupportedModelError(
                f"{self.where}: has a masked-LM head, which in GluonNLP is GELU, and the layers' activation is "
                f"{quote(str(config['hidden_act']))}; encast has both alike: save the model with use_decoder=False"
            )

    def _head(self) -> str:
        if "out.weight" in self.parts:
            return "ForSequenceClassification"
        if "answer.weight" in self.parts:
            return "ForQuestionAnswering"
        if "tag.weight" in self.parts:
            return "ForTokenClassification"
        return "ForMaskedLM" if "mlm_dense.weight" in self.parts else "Model"


def _with_rows_before(table: StoredTensor, rows: int) -> StoredTensor:
    """The table behind rows of zeros."""

    def elements() -> np.ndarray[Any, Any]:
        return np.concatenate([np.zeros((rows, table.shape[1]), DTYPES[table.dtype]), table.elements()])

    return StoredTensor(table.dtype, (table.shape[0] + rows, *table.shape[1:]), table.where, elements)
