"""Fixed ranges of a quantised checkpoint come through a calibration exactly."""

from __future__ import annotations

import numpy as np
import pytest

from encast.errors import InputError
from encast.quant import Calibration, QuantSpec


def test_scale_and_zero_point_come_back_exactly() -> None:
    random = np.random.RandomState(0)
    scales = np.exp2(random.uniform(-126, 119, 2000)).astype(np.float32)
    ranges = {f"v{place}": (float(scale), int(place % 256)) for place, scale in enumerate(scales)}
    ranges |= {"least": (float(np.finfo(np.float32).tiny), 255), "most": (float(np.finfo(np.float32).max), 0)}
    held = Calibration.of_fixed(ranges)
    spec = QuantSpec("int8", activations="static", ranges="minmax")
    assert {name: held.fixed(name, spec, zero_point=True) for name in ranges} == ranges
    with pytest.raises(InputError, match="the calibration has not seen 'other'"):
        held.fixed("other", spec, zero_point=True)
