"""Names of parameters in GluonNLP 0.x, and those of the same tensors in the Hugging Face layout.

GluonNLP has two schemes. ``save_parameters`` writes the path of attributes (``bert.encoder.transformer_cells.0.proj.
weight``). ``collect_params().save`` and ``export`` write the parameter's own name, which is made of the numbered names
of classes (``bertencoder0_transformer0_proj_weight``, in an export behind ``arg:``). Both become *parts* here:
``words.weight``, ``3.query.bias`` for a layer, ``classify1.weight`` for the second dense layer of a classifier. The
models are ``src/gluonnlp/model/bert.py`` and ``scripts/bert/model`` of releases 0.5 to 0.10, where classes had other
names before 0.9 (``BERTLayerNorm``, ``MultiHeadAttentionCell``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.files import quote

__all__ = ["LAYOUTS", "Layout", "parts_of"]

_WB, _GB = "(weight|bias)", "(gamma|beta)"
_OWNER = r"(?:\w+\.)?"
_CELL = _OWNER + r"encoder\.transformer_cells\.(\d{1,4})\."
_OLD_CELL = r"\w*transformer(\d{1,4})_"
_NORM = r"(?:bert)?layernorm\d+_" + _GB

_RULES = [
    (re.compile(pattern), part)
    for pattern, part in (
        (_OWNER + r"word_embed\.0\.weight", "words.weight"),
        (_OWNER + r"token_type_embed\.0\.weight", "types.weight"),
        (_OWNER + r"encoder\.position_weight", "positions.weight"),
        (_OWNER + r"encoder\.layer_norm\." + _GB, r"norm.\1"),
        (_CELL + r"attention_cell\.proj_(query|key|value)\." + _WB, r"\1.\2.\3"),
        (_CELL + r"proj\." + _WB, r"\1.proj.\2"),
        (_CELL + r"layer_norm\." + _GB, r"\1.norm.\2"),
        (_CELL + r"ffn\.(ffn_[12])\." + _WB, r"\1.\2.\3"),
        (_CELL + r"ffn\.layer_norm\." + _GB, r"\1.ffn_norm.\2"),
        (_OWNER + r"pooler\." + _WB, r"pooler.\1"),
        (_OWNER + r"classifier\." + _WB, r"next.\1"),
        (_OWNER + r"decoder\.0\." + _WB, r"mlm_dense.\1"),
        (_OWNER + r"decoder\.2\." + _GB, r"mlm_norm.\1"),
        (_OWNER + r"decoder\.3\.weight", r"mlm_words.weight"),
        (_OWNER + r"decoder\.3\.bias", r"mlm.bias"),
        (r"(?:classifier|regression)\.(\d)\." + _WB, r"classify\1.\2"),
        (r"span_classifier\." + _WB, r"answer.\1"),
        (r"tag_classifier\." + _WB, r"tag.\1"),
        (r"\w*token_type_embed_embedding\d+_weight", "types.weight"),
        (r"\w*word_embed_embedding\d+_weight", "words.weight"),
        # The decoder takes its parameters from the table of words, and so does the name of its bias.
        (r"\w*word_embed_embedding\d+_bias", "mlm.bias"),
        (r"\w*encoder\d+_position_weight", "positions.weight"),
        (r"\w*encoder\d+_" + _NORM, r"norm.\1"),
        (_OLD_CELL + r"[a-z]+cell\d+_(query|key|value)_" + _WB, r"\1.\2.\3"),
        (_OLD_CELL + r"proj_" + _WB, r"\1.proj.\2"),
        (_OLD_CELL + _NORM, r"\1.norm.\2"),
        (_OLD_CELL + r"(?:bert)?positionwiseffn\d+_(ffn_[12])_" + _WB, r"\1.\2.\3"),
        (_OLD_CELL + r"(?:bert)?positionwiseffn\d+_" + _NORM, r"\1.ffn_norm.\2"),
        (r"\w*model\d+_pooler_" + _WB, r"pooler.\1"),
        (r"\w*model\d+_cls_" + _WB, r"next.\1"),
        (r"\w*model\d+_dense\d+_" + _WB, r"mlm_dense.\1"),
        (r"\w*model\d+_" + _NORM, r"mlm_norm.\1"),
        (r"\w*(?:classifier|regression)\d+_dense(\d)_" + _WB, r"classify\1.\2"),
        (r"\w*forqa\d+_dense\d+_" + _WB, r"answer.\1"),
        (r"\w*tagger\d+_dense\d+_" + _WB, r"tag.\1"),
    )
]

_UNKNOWN_SHOWN = 3
"""No more names are looked at: an unknown one is compared with every rule."""


def parts_of(names: Iterable[str], where: str) -> dict[str, str]:
    """Part → the name that it has in the file.

    Raises ``UnsupportedModelError`` for names that no model here has, ``CheckpointError`` for two names of one part.
    """
    parts: dict[str, str] = {}
    unknown: list[str] = []
    for name in names:
        bare = re.sub(r"^(arg|aux):", "", name)
        found = next((match.expand(part) for rule, part in _RULES if (match := rule.fullmatch(bare))), None)
        if found is None:
            unknown.append(name)
            if len(unknown) == _UNKNOWN_SHOWN:
                break
        elif found in parts:
            raise CheckpointError(
                f"{where}: {quote(parts[found])} and {quote(name)} are one parameter of a model; save one model a file"
            )
        else:
            parts[found] = name
    if unknown:
        raise UnsupportedModelError(
            f"{where}: has parameters that belong to no model of GluonNLP that encast has "
            f"({', '.join(map(quote, unknown))}); it has BERTModel, RoBERTaModel and DistilBERTModel, alone or in "
            "BERTClassifier, RoBERTaClassifier, BERTRegression, BertForQA and BERTTagger"
        )
    # With deduplicate=True a table that the decoder shares stands in the file once, under the decoder's name.
    if "words.weight" not in parts and "mlm_words.weight" in parts:
        parts["words.weight"] = parts.pop("mlm_words.weight")
    # A dropout that stands before a dense layer takes a number too: order counts, not the number.
    dense = sorted({part.split(".")[0] for part in parts if part.startswith("classify")})
    for old, new in zip(dense, ("out",) if len(dense) == 1 else ("dense", "out"), strict=False):
        for kind in ("weight", "bias"):
            if f"{old}.{kind}" in parts:
                parts[f"{new}.{kind}"] = parts.pop(f"{old}.{kind}")
    return parts


@dataclass(frozen=True)
class Layout:
    """Where the Hugging Face layout of a family has the parts: ``stem`` begins its class names, ``cell`` is the path of
    the layers."""

    stem: str
    cell: str
    cells: Mapping[str, str]
    parts: Mapping[str, str]

    def name(self, part: str) -> str | None:
        """The tensor's name there, None where the family has no such part."""
        path, _, kind = part.rpartition(".")
        kind = {"gamma": "weight", "beta": "bias"}.get(kind, kind)
        layer, dot, inner = path.partition(".")
        if dot:
            return f"{self.cell}.{layer}.{self.cells[inner]}.{kind}"
        return f"{self.parts[path]}.{kind}" if path in self.parts else None


def _embeddings(prefix: str) -> dict[str, str]:
    return {
        "words": f"{prefix}.embeddings.word_embeddings",
        "positions": f"{prefix}.embeddings.position_embeddings",
        "norm": f"{prefix}.embeddings.LayerNorm",
    }


_CELLS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "proj": "attention.output.dense",
    "norm": "attention.output.LayerNorm",
    "ffn_1": "intermediate.dense",
    "ffn_2": "output.dense",
    "ffn_norm": "output.LayerNorm",
}

LAYOUTS: Mapping[str, Layout] = {
    "bert": Layout(
        "Bert",
        "bert.encoder.layer",
        _CELLS,
        {
            **_embeddings("bert"),
            "types": "bert.embeddings.token_type_embeddings",
            "pooler": "bert.pooler.dense",
            "next": "cls.seq_relationship",
            "answer": "qa_outputs",
            "tag": "classifier",
            "mlm_dense": "cls.predictions.transform.dense",
            "mlm_norm": "cls.predictions.transform.LayerNorm",
            "mlm_words": "cls.predictions.decoder",
            "mlm": "cls.predictions",
            "out": "classifier",
        },
    ),
    "roberta": Layout(
        "Roberta",
        "roberta.encoder.layer",
        _CELLS,
        {
            **_embeddings("roberta"),
            "types": "roberta.embeddings.token_type_embeddings",
            "mlm_dense": "lm_head.dense",
            "mlm_norm": "lm_head.layer_norm",
            "mlm_words": "lm_head.decoder",
            "mlm": "lm_head",
            "dense": "classifier.dense",
            "out": "classifier.out_proj",
        },
    ),
    "distilbert": Layout(
        "DistilBert",
        "distilbert.transformer.layer",
        {
            "query": "attention.q_lin",
            "key": "attention.k_lin",
            "value": "attention.v_lin",
            "proj": "attention.out_lin",
            "norm": "sa_layer_norm",
            "ffn_1": "ffn.lin1",
            "ffn_2": "ffn.lin2",
            "ffn_norm": "output_layer_norm",
        },
        _embeddings("distilbert"),
    ),
}
"""By ``model_type``. GluonNLP's ``BertForQA`` and ``BERTTagger`` call a model with token types, so theirs is BERT; for
DistilBERT it has no head."""
