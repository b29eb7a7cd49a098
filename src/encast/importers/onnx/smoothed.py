"""The channel scales of SmoothQuant (Xiao et al. 2023): rows times a number for each column, before a product.

The weight of that product was divided by the same numbers, so that both sides lose less in 8 bits. Here they go back
into the weight: ``(x * s) W`` is ``x (s W)``, which is the product of the model before it was quantised, up to the
rounding of its weight.
"""

from __future__ import annotations

import numpy as np

from encast.importers.onnx.reader import Reader
from encast.importers.onnx.values import Known, Seen, labels

__all__ = ["smoothed", "with_scales"]


def smoothed(reader: Reader, seen: Seen, known: Known) -> Seen:
    """Rows times a constant for each column; only a product with a weight reads them."""
    rows = reader.rows(seen)
    numbers = known.array.reshape(-1)
    if labels(rows.axes[-1:]) != "n" or numbers.dtype != np.float32 or not np.isfinite(numbers).all():
        raise reader.fail("rows are multiplied by finite f32 numbers, one for each of their columns")
    return Seen("smoothed", rows.value, rows.axes, extra=(numbers, rows.kind))


def with_scales(reader: Reader, seen: Seen, weight: Known) -> Known:
    """``weight``: ``[in, out]``, and the scales of its rows in it."""
    return Known(reader.rescaled(weight, seen.extra[0]), weight.constant, weight.name)
