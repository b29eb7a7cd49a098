"""Every architecture and head against what transformers answered (``tests/golden``), in float64."""

from __future__ import annotations

import numpy as np
import pytest
from bounds import allowed_difference, largest_excess
from cases import CASES, GOLDEN, Opened, keys_of, open_case

# Both sides are float64; a few hundred operations deep, rounding leaves some 1e-15. gelu_fast writes sqrt(2 / pi) with
# ten digits, which shows at 1e-12.
TIGHT = 1e-11


@pytest.fixture(params=CASES)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return open_case(request.param, tmp_path_factory)


def test_every_case_has_a_golden_file() -> None:
    assert {path.stem for path in GOLDEN.glob("*.npz")} == set(CASES)
    assert sum(path.stat().st_size for path in GOLDEN.glob("*.npz")) < 13_200 * len(CASES)


def test_matches_transformers_float64(opened: Opened) -> None:
    wanted = opened.golden("f64")
    got = opened.evaluate()
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= TIGHT * np.abs(wanted).max()


def test_transformers_float32_is_within_the_derived_bound(opened: Opened) -> None:
    """The bound that engines are held to must hold for float32 as transformers computes it, and mean something."""
    exact, allowed = allowed_difference(opened.graph, opened.output, opened.batch, opened.select)
    exact, allowed = opened.kept(exact), opened.kept(allowed)
    assert largest_excess(opened.golden("f64"), exact, allowed) < 1e-5
    assert largest_excess(opened.golden("f32"), exact, allowed) <= 1.0
    assert allowed.max() < 2e-5 * np.abs(exact).max()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.head == "features"])
def test_keys_match_transformers(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No output shows the bias of a key (softmax takes it away again), so the keys themselves are compared."""
    opened = open_case(name, tmp_path_factory)
    wanted = opened.golden_array("key_f64")
    values = opened.values()
    begin, end = opened.batch.cu_seqlens[1:3]
    got = np.stack([values[name][begin:end] for name in keys_of(opened.graph)])
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= TIGHT * np.abs(wanted).max()
