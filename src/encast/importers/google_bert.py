"""The names and the config of google-research/bert, as the Hugging Face layout has them.

Sources: ``modeling.py``, ``run_classifier.py``, ``run_squad.py`` and ``run_pretraining.py`` of that repository, and
transformers' ``load_tf_weights_in_bert``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenizers.normalizers import BertNormalizer

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.files import Folder, quote
from encast.importers.meta_graph import MetaGraph, Shape
from encast.importers.tokenizer_settings import read_tokenizer_settings
from encast.importers.weights import StoredTensor, transposed

__all__ = ["GOOGLE_CONFIG", "check_case", "complete_config", "rename"]

GOOGLE_CONFIG = "bert_config.json"

_DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 16,
}
"""Of ``BertConfig``, for fields that the file leaves out."""

# Slots and counters that no forward reads: of AdamWeightDecayOptimizer, tf.train.AdamOptimizer, LAMB, mixed precision
# and Estimator's early stopping.
_TRAINING = re.compile(
    r"(.*/)?(adam_[mv]|lamb_[mv]|(AdamWeightDecay|LAMB)Optimizer(_1)?|Adam(_1)?|global_step|beta[12]_power"
    r"|(current_)?loss_scale|(num_)?(good|bad)_steps|signal_early_stopping)(/.*)?"
)
_HEADS = {
    "output_weights": "classifier.weight",
    "output_bias": "classifier.bias",
    "cls/squad/output_weights": "qa_outputs.weight",
    "cls/squad/output_bias": "qa_outputs.bias",
}
_LAST = {
    "kernel": "weight",
    "gamma": "weight",
    "output_weights": "weight",
    "beta": "bias",
    "bias": "bias",
    "output_bias": "bias",
}
_TABLES = ("word_embeddings", "position_embeddings", "token_type_embeddings")


def rename(variables: Mapping[str, StoredTensor], where: str) -> dict[str, StoredTensor]:
    """The model's variables under the names that transformers gives them, kernels transposed; those of training are
    left out. What is of no known name keeps it, and the architecture will say that it has no place for it.

    Raises ``CheckpointError`` when nothing in it is BERT's, and for names with dots, which could pass for renamed ones.
    """
    tensors: dict[str, StoredTensor] = {}
    for variable, stored in variables.items():
        if _TRAINING.fullmatch(variable):
            continue
        if "." in variable:
            raise CheckpointError(f"{where}: variable {quote(variable)} has dots in its name; bert/... has slashes")
        name = _name(variable)
        if name in tensors:
            raise CheckpointError(f"{where}: two variables would be {quote(name)}, one of them {quote(variable)}")
        tensors[name] = transposed(stored) if variable.endswith("/kernel") and name != variable else stored
    if not any(name.startswith("bert.") for name in tensors):
        shown = ", ".join(quote(variable) for variable in list(variables)[:3])
        raise CheckpointError(
            f"{where}: no variable is named bert/..., as google-research/bert names them"
            + (f"; there is {shown}" if shown else "; it is empty")
        )
    return tensors


def _name(variable: str) -> str:
    if variable in _HEADS:
        return _HEADS[variable]
    scope, _, last = variable.rpartition("/")
    if variable.startswith(("bert/", "cls/predictions/", "cls/seq_relationship/")) and (
        last in _LAST or last in _TABLES
    ):
        path = re.sub(r"(^|\.)layer_(\d+)(?=\.|$)", r"\1layer.\2", scope.replace("/", "."))
        return f"{path}.{last}.weight" if last in _TABLES else f"{path}.{_LAST[last]}"
    return variable


def complete_config(
    folder: Folder, name: str, tensors: Mapping[str, StoredTensor], graph: MetaGraph | None
) -> dict[str, Any]:
    """The config file ``name`` of the folder, with what the Hugging Face layout would also say there.

    That is ``model_type``, ``architectures`` and ``num_labels`` by the head's variables, and in place of ``gelu`` the
    form by tanh where the ``graph`` computes that. Raises ``CheckpointError`` and ``UnsupportedModelError``.
    """
    where = str(folder.path(name))
    found = folder.object(name)
    config: dict[str, Any] = {**(_DEFAULTS if name == GOOGLE_CONFIG else {}), "model_type": "bert", **found}
    if config["model_type"] != "bert":
        raise UnsupportedModelError(
            f"{where}: model_type is {quote(config['model_type'])}; of TensorFlow's checkpoints, bert is read"
        )
    outputs = _outputs(graph)
    if "classifier.weight" in tensors:
        labels = tensors["classifier.weight"].shape[0] if tensors["classifier.weight"].shape else 0
        other = [shape[-1] for shape in outputs if shape and shape[-1] not in (None, labels)]
        if other:
            raise CheckpointError(
                f"{where}: output_weights is for {labels} labels, the graph's signature gives {other[0]}; "
                "graph and variables are not of the same model"
            )
        if "id2label" not in config:
            config.setdefault("num_labels", labels)
    if config.get("architectures") is None:
        if {"classifier.weight", "qa_outputs.weight"} <= set(tensors):
            raise CheckpointError(
                f"{where}: the checkpoint has two heads, output_weights and cls/squad/output_weights; write "
                '"architectures": ["BertForSequenceClassification"] or ["BertForQuestionAnswering"] there'
            )
        config["architectures"] = [_architecture(tensors, any(shape and len(shape) == 3 for shape in outputs))]
    if isinstance(config.get("hidden_act"), str):
        config["hidden_act"] = config["hidden_act"].lower()  # as get_activation of modeling.py
    if config.get("hidden_act") == "gelu" and graph is not None:
        config["hidden_act"] = _gelu(graph, where)
    return config


def _gelu(graph: MetaGraph, where: str) -> str:
    """modeling.py computed "gelu" by erf until 2019, as transformers does, and by tanh since."""
    if len(graph.activations) != 1:
        found = "both Tanh and Erf" if graph.activations else "neither Tanh nor Erf"
        raise CheckpointError(
            f"{where}: hidden_act is 'gelu', and the graph has {found} in its layers intermediate/dense, so nothing "
            'says which form it is; write "hidden_act": "gelu_new" for that by tanh, "gelu_python" for that by erf'
        )
    return "gelu_new" if "Tanh" in graph.activations else "gelu"


def _outputs(graph: MetaGraph | None) -> list[Shape]:
    """The shapes of the scores that signatures over token ids give."""
    return [
        signature.outputs[name]
        for signature in (graph.signatures.values() if graph is not None else ())
        if "input_ids" in signature.inputs
        for name in ("probabilities", "logits")
        if name in signature.outputs
    ]


def _architecture(tensors: Mapping[str, StoredTensor], per_token: bool) -> str:
    if "classifier.weight" in tensors:
        return "BertForTokenClassification" if per_token else "BertForSequenceClassification"
    if "qa_outputs.weight" in tensors:
        return "BertForQuestionAnswering"
    return "BertForPreTraining" if "cls.predictions.transform.dense.weight" in tensors else "BertModel"


def check_case(folder: Folder) -> None:
    """Raises ``CheckpointError`` when only a guess could tell whether texts are lowered: run_classifier.py and its like
    take ``do_lower_case`` from the command line, and no file of theirs keeps it.

    Lowering also decomposes letters and strips their marks. A vocabulary that this leaves as it is was made of lowered
    texts, or of scripts to which it does nothing. Any other may be of either kind.
    """
    if folder.has("tokenizer.json") or not folder.has("vocab.txt"):
        return
    if isinstance(read_tokenizer_settings(folder).config.get("do_lower_case"), bool):
        return
    lowered = BertNormalizer(lowercase=True, clean_text=False, handle_chinese_chars=False)
    for line in folder.read("vocab.txt").decode("utf-8", "replace").split("\n"):
        if not line.startswith("[") and lowered.normalize_str(line) != line:
            raise CheckpointError(
                f"{folder.path('vocab.txt')}: has tokens that lowering and stripping accents would change "
                f"({quote(line.strip())}), and no file says whether texts are lowered; "
                f"write {json.dumps({'do_lower_case': False})} to "
                f"{folder.path('tokenizer_config.json')}, or true if the model was trained with do_lower_case"
            )
