"""The op LayerNormalization of opset 17."""

from __future__ import annotations

import numpy as np

from encast.importers.onnx.reader import Reader, Value, handles
from encast.importers.onnx.values import Known, Seen, labels, shape_of

__all__ = ["layer_normalization"]


@handles("LayerNormalization")
def layer_normalization(reader: Reader) -> list[Value]:
    """Over the columns, with gamma, and with beta or without."""
    rows = reader.rows(reader.inputs[0])
    gamma, beta = reader.known(1), reader.known(2)
    if gamma is not None and all(one is None for one in reader.inputs[2:]):
        beta = Known(reader.zeros(gamma.array.size), constant=True)
    given = reader.node.attributes
    columns = shape_of(rows.axes)[-1:]
    plain = labels(rows.axes[-1:]) == "n" and given.get("axis", -1) in (-1, len(rows.axes) - 1)
    if gamma is None or beta is None or not plain or not gamma.array.shape == beta.array.shape == columns:
        raise reader.fail("a layer norm goes over the columns and has gamma, and beta or none")
    eps = float(str(np.float32(given.get("epsilon", 1e-5))))
    names = [reader.constant(one, one.array.reshape(-1)) for one in (gamma, beta)]
    return [Seen(rows.kind, reader.emit("layer_norm", rows.value, *names, eps=eps), rows.axes)]
