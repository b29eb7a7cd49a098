"""The coarse forms of gelu, as core/simd/activation.h computes them in f32: tests compare the two tables.

``max(x, 0)`` minus an even bump, of which ``|x|`` from 0 to 30 / 7 sees one of sixteen parabolas
``c0 + |x| (c1 + |x| c2)``: the one whose centre, a multiple of 2 / 7, is nearest. Within 1e-4 of the true value,
for outputs that are rounded to q8 or bf16 next.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["BUMPS", "coarse"]

Float64 = np.ndarray[Any, np.dtype[np.float64]]

_STEPS = 3.5


def _table(*rows: str) -> Float64:
    return np.array([[float.fromhex(number) for number in row.split()] for row in rows])


BUMPS = {
    "gelu_coarse": _table(
        "0x0p+0 0x1.19574cp-10 0x1.1a80a4p-6 0x1.2a0144p-4 0x1.64e2cep-3 0x1.2f31e6p-2 0x1.92c766p-2 "
        "0x1.b8b5e8p-2 0x1.98a8eap-2 0x1.482d7cp-2 0x1.ce5224p-3 0x1.205ep-3 0x1.40cc1cp-4 0x1.3ff3fp-5 "
        "0x1.1f48e2p-6 0x0p+0",
        "0x1.ffdd4ep-2 0x1.f40d8p-2 0x1.a94894p-2 0x1.0b0ap-2 0x1.d5161cp-5 -0x1.1185dap-3 -0x1.08f2a4p-2 "
        "-0x1.32d748p-2 -0x1.1573f4p-2 -0x1.a69998p-3 -0x1.176dp-3 -0x1.463f34p-4 -0x1.53c3bp-5 "
        "-0x1.3dc3c6p-6 -0x1.0c2a98p-7 0x0p+0",
        "-0x1.964978p-2 -0x1.76be96p-2 -0x1.21a8eap-2 -0x1.6658a2p-3 -0x1.2a2554p-4 0x1.066f42p-9 "
        "0x1.5a994cp-5 0x1.b72118p-5 0x1.813c5p-5 0x1.1474b8p-5 0x1.5592dp-6 0x1.740f5cp-7 0x1.69f0b8p-8 "
        "0x1.3cf0ccp-9 0x1.f63e94p-11 0x0p+0",
    ),
    "gelu_tanh_coarse": _table(
        "0x0p+0 0x1.1a7b94p-10 0x1.1b1292p-6 0x1.29bcaap-4 0x1.639494p-3 0x1.2dc3cp-2 0x1.91bc0cp-2 "
        "0x1.b9f67p-2 0x1.9d53dp-2 0x1.4e1bdap-2 0x1.d60a78p-3 0x1.200d5cp-3 0x1.32ba7ep-4 0x1.1a4a8ep-5 "
        "0x1.be2024p-7 0x0p+0",
        "0x1.ffdd22p-2 0x1.f400d6p-2 0x1.a9150cp-2 0x1.0b1a38p-2 0x1.dede34p-5 -0x1.0c9f9cp-3 -0x1.06f4dcp-2 "
        "-0x1.33513ep-2 -0x1.1924eep-2 -0x1.b01d94p-3 -0x1.1dec1cp-3 -0x1.4886a6p-4 -0x1.47e32p-5 "
        "-0x1.1b345ap-6 -0x1.a4dfe2p-8 0x0p+0",
        "-0x1.9646aep-2 -0x1.769998p-2 -0x1.215458p-2 -0x1.660682p-3 -0x1.2bcd5p-4 0x1.26da4ap-10 "
        "0x1.547ea8p-5 0x1.b654aep-5 0x1.867e12p-5 0x1.1b8332p-5 0x1.5f490ep-6 0x1.7931f4p-7 0x1.601b98p-8 "
        "0x1.1d040ap-9 0x1.8dec24p-11 0x0p+0",
    ),
}
"""For each form the coefficients ``f64[3, 16]``: c0, c1 and c2 of every parabola."""


def coarse(x: Float64, kind: str) -> Float64:
    """The form ``kind``, a key of ``BUMPS``, of every element."""
    magnitude = np.minimum(np.abs(x), 15 / _STEPS)
    piece = np.where(np.isnan(magnitude), 0.0, np.rint(magnitude * _STEPS)).astype(np.int64)
    c0, c1, c2 = (row[piece] for row in BUMPS[kind])
    out: Float64 = np.maximum(x, 0.0) - (c0 + magnitude * (c1 + magnitude * c2))
    return out
