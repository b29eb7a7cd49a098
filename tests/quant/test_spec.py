"""QuantSpec: what it accepts, what it says of a product, and its JSON form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from encast.errors import InputError
from encast.quant import QuantSpec


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int4"}, "dtype is 'int4'; one of f32, bf16, int8"),
        ({"dtype": ["int8"]}, "one of f32, bf16, int8"),
        ({"zero_point": True}, "one of never, after_activation, always"),
        ({"rows": ("words",)}, "'words'; one of tokens, selected, seqs"),
        ({"rows": "tokens"}, "sequences, not strings"),
        ({"keep": "*"}, "sequences, not strings"),
        ({"keep": (("*",),)}, "pairs"),
        ({"keep": 3}, "pairs"),
        ({"keep": (("", "f32"),)}, "non-empty"),
        ({"keep": (("*", "int4"),)}, "one of f32, bf16, int8"),
        ({"dtype": "bf16", "keep": (("*", "int8"),)}, "narrower than the rest"),
        ({"min_outputs": -1}, "count"),
        ({"min_outputs": True}, "count"),
        ({"min_outputs": 1.5}, "count"),
        ({"activations": "fixed"}, "one of dynamic, static"),
        ({"ranges": "max"}, "one of minmax, percentile, entropy"),
        ({"percentile": 50}, "over 50 and up to 100"),
        ({"percentile": float("nan")}, "over 50 and up to 100"),
        ({"percentile": True}, "over 50 and up to 100"),
        ({"move_outliers": 1.1}, "from 0 to 1"),
        ({"move_outliers": "half"}, "from 0 to 1"),
        ({"dtype": "bf16", "activations": "static"}, "static activations are for int8"),
        ({"dtype": "f32", "move_outliers": 0.5}, "move_outliers are for int8"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("*", r"\*")):
        QuantSpec(**fields)


def test_the_first_matching_pattern_counts() -> None:
    spec = QuantSpec(keep=(("*.layer.1.output", "bf16"), ("*.layer.1.*", "f32")))
    assert spec.dtype_of("e.layer.1.output", "tokens", 64) == "bf16"
    assert spec.dtype_of("e.layer.1.inner", "tokens", 64) == "f32"
    assert spec.dtype_of("e.layer.11.inner", "tokens", 64) == "int8"


def test_a_pattern_beats_rows_and_outputs() -> None:
    assert QuantSpec(keep=(("pooler", "int8"),)).dtype_of("pooler", "seqs", 2) == "int8"
    assert QuantSpec().dtype_of("pooler", "seqs", 768) == "f32"
    assert QuantSpec().dtype_of("spans", "tokens", 2) == "f32"
    assert QuantSpec().dtype_of("decoder", "selected", 30522) == "int8"


@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec(),
        QuantSpec("bf16", keep=(("*.0.*", "f32"),)),
        QuantSpec(zero_point="never", rows=("tokens",), min_outputs=0),
        QuantSpec(activations="static", ranges="entropy", percentile=99.5, move_outliers=0.25),
    ],
)
def test_json_round_trip(spec: QuantSpec) -> None:
    assert QuantSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize("data", [[], "int8", None, {"dtyp": "int8"}, {"keep": "x"}, {"rows": {"tokens": 1}}])
def test_foreign_json_is_refused(data: Any) -> None:
    with pytest.raises(InputError):
        QuantSpec.from_json(data)


def test_absent_fields_get_defaults() -> None:
    assert QuantSpec.from_json({"dtype": "bf16"}) == QuantSpec("bf16")
