"""The kernels' tables of coarse activations are the reference's, and as near to the true functions as both say."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from encast.backends.reference.coarse import BUMPS, coarse
from encast.backends.reference.ops import _activated
from encast.ir.ops import COARSE_ACTIVATIONS

HEADER = Path(__file__).parents[2] / "core" / "simd" / "activation.h"


@pytest.mark.parametrize(("kind", "name"), [("gelu_coarse", "kGeluBump"), ("gelu_tanh_coarse", "kGeluTanhBump")])
def test_tables_are_the_kernels(kind: str, name: str) -> None:
    table = re.search(rf"constexpr Bump {name} = {{{{(.*?)}}}};", HEADER.read_text(), re.DOTALL)
    assert table is not None
    rows = re.findall(r"{([^{}]*)}", table[1])
    numbers = [[float.fromhex(number.strip().removesuffix("f")) for number in row.split(",")] for row in rows]
    assert np.array_equal(np.array(numbers), BUMPS[kind])


@pytest.mark.parametrize(("fine", "kind"), COARSE_ACTIVATIONS.items())
def test_coarse_forms_are_within_a_ten_thousandth(fine: str, kind: str) -> None:
    x = np.linspace(-12.0, 12.0, 240_001)
    assert np.abs(coarse(x, kind) - _activated(x, fine)).max() <= 1e-4
    assert np.isnan(coarse(np.array([np.nan]), kind)).all()
