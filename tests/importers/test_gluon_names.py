"""Names of parameters that GluonNLP itself has written.

``gluon_names.json`` has those of models with one layer (``BERTModel``: two), from the files that GluonNLP 0.8.3 and
0.10.0 wrote on MXNet 1.9.1 by ``save_parameters`` and ``collect_params().save``. ``export`` wrote the latter behind
``arg:``, for all classes but ``BERTTagger``, which has no ``export``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from encast.importers.gluon_names import LAYOUTS, parts_of

NAMES = json.loads((Path(__file__).parent / "gluon_names.json").read_text())

DENSE = ("query", "key", "value", "proj", "ffn_1", "ffn_2")
POOLER = {"types": ("weight",), "pooler": ("weight", "bias")}
MASKED = {"mlm_dense": ("weight", "bias"), "mlm_norm": ("gamma", "beta"), "mlm": ("bias",)}
HEADS = {
    "BERTModel": POOLER | MASKED | {"next": ("weight", "bias")},
    "BERTClassifier": POOLER | {"out": ("weight", "bias")},
    "BERTRegression": POOLER | {"out": ("weight", "bias")},
    "BertForQA": {"types": ("weight",), "answer": ("weight", "bias")},
    "BERTTagger": {"types": ("weight",), "tag": ("weight", "bias")},
    "RoBERTaModel": MASKED,
    "RoBERTaClassifier": {"dense": ("weight", "bias"), "out": ("weight", "bias")},
    "DistilBERTModel": {},
}


def expected(model: str) -> set[str]:
    paths = {"words": ("weight",), "positions": ("weight",), "norm": ("gamma", "beta"), **HEADS[model]}
    for layer in range(2 if model == "BERTModel" else 1):
        paths |= {f"{layer}.{path}": ("weight", "bias") for path in DENSE}
        paths |= {f"{layer}.{path}": ("gamma", "beta") for path in ("norm", "ffn_norm")}
    return {f"{path}.{kind}" for path, kinds in paths.items() for kind in kinds}


@pytest.mark.parametrize("case", NAMES)
def test_every_name_is_a_part(case: str) -> None:
    model = case.split()[1]
    saved, collected = NAMES[case]["save_parameters"], NAMES[case]["collect_params"]
    # Only save_parameters writes the table of words under the decoder's name too.
    shared = {"mlm_words.weight"} if "mlm_dense" in HEADS[model] else set()
    assert set(parts_of(saved, "net.params")) == expected(model) | shared
    assert set(parts_of(collected, "net.params")) == expected(model)
    assert set(parts_of([f"arg:{name}" for name in collected], "net.params")) == expected(model)
    family = next(family for family in ("distilbert", "roberta", "bert") if family in model.lower())
    layout = LAYOUTS[family]
    assert None not in {layout.name(part) for part in expected(model) | shared}
