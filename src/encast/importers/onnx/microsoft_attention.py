"""The fused attentions of ``com.microsoft``, taken apart: Attention and MultiHeadAttention."""

from __future__ import annotations

from typing import Any

import numpy as np

from encast.importers.files import quote
from encast.importers.onnx.microsoft import Parts, fuses
from encast.importers.onnx.reader import Value
from encast.importers.onnx.values import Known, Seen, labels, shape_of

__all__: list[str] = []

_FILTER = -10000.0
"""What is added to the scores of padding, where the node has no attribute."""
_READ = ("num_heads", "scale", "mask_filter_value")


@fuses("Attention")
def _attention(parts: Parts) -> list[Value]:
    """Products of the rows with one weight for queries, keys and values side by side, and the attention of these."""
    parts.check(
        ("input", "weights", "bias", "mask_index", "past", "attention_bias", "past_sequence_length"),
        read=(*_READ, "qkv_hidden_sizes"),
        fixed={
            "unidirectional": (0,),
            "do_rotary": (0,),
            "rotary_embedding_dim": (0,),
            "past_present_share_buffer": (0,),
        },
        absent=("past", "past_sequence_length"),
    )
    rows, weight, bias = parts.rows(0, "input"), parts.known(1, "weights"), parts.known(2, "bias")
    width = shape_of(rows.axes)[-1]
    if weight is None or weight.array.ndim != 2 or weight.array.shape[0] != width or weight.array.shape[1] % 3:
        found = "nothing" if weight is None else list(weight.array.shape)
        raise parts.fail(f"its weights are [{width}, 3 x hidden], for queries, keys and values, not {found}")
    size = weight.array.shape[1] // 3
    sizes = parts.node.attributes.get("qkv_hidden_sizes") or [size] * 3
    if sizes != [size] * 3:
        raise parts.fail(
            f"its attribute 'qkv_hidden_sizes' is {quote(str(sizes))}; {[size] * 3} is read: all three as wide"
        )
    if bias is not None and bias.array.shape != (3 * size,):
        raise parts.fail(f"its bias has {3 * size} numbers, not {list(bias.array.shape)}")
    sides = []
    for place in range(3):
        product = parts.do("MatMul", rows, _cut(parts, weight, size, place, 1))
        sides.append(parts.added(product, None if bias is None else _cut(parts, bias, size, place, 0)))
    return [_attend(parts, sides, parts.known(3, "mask_index"), parts.given(5))]


def _cut(parts: Parts, packed: Known, size: int, place: int, axis: int) -> Known:
    """The part of what lies side by side that is for queries (0), keys (1) or values (2)."""
    bounds = (place * size, (place + 1) * size, axis)
    cut = parts.do("Slice", packed, *(Known(np.array([one]), constant=True) for one in bounds))
    assert isinstance(cut, Known)
    return cut


@fuses("MultiHeadAttention")
def _multi_head_attention(parts: Parts) -> list[Value]:
    """The attention of queries, keys and values, to which it may add biases; the three may be packed in one value."""
    parts.check(
        (
            *("query", "key", "value", "bias", "key_padding_mask", "attention_bias"),
            *("past_key", "past_value", "past_sequence_length", "cache_indirection"),
        ),
        read=_READ,
        fixed={"unidirectional": (0,)},
        absent=("past_key", "past_value", "past_sequence_length", "cache_indirection"),
    )
    sides = [parts.given(place) for place in range(3)]
    if isinstance(sides[0], Seen) and len(sides[0].axes) == 5:
        return [_attend(parts, _unpacked(parts, sides[0]), parts.known(4, "key_padding_mask"), parts.given(5))]
    if any(not isinstance(one, Seen) for one in sides):
        raise parts.fail(
            "its query, key and value are rows of the encoder, each an input of its own, or all in the first, which is "
            "[batch, sequence, heads, 3, columns]"
        )
    bias = parts.known(3, "bias")
    made: list[Value] = []
    for place, side in enumerate(sides):
        assert isinstance(side, Seen)
        if bias is not None:
            size = shape_of(side.axes)[-1]
            if len(side.axes) != 3 or bias.array.shape != (3 * size,):
                raise parts.fail(f"its bias has {3 * size} numbers for rows of {size}, not {list(bias.array.shape)}")
            side = parts.added(side, _cut(parts, bias, size, place, 0))
        made.append(side)
    return [_attend(parts, made, parts.known(4, "key_padding_mask"), parts.given(5))]


def _unpacked(parts: Parts, packed: Seen) -> list[Value]:
    """Queries, keys and values of rows [batch, sequence, heads, 3, columns], which are one product with a weight."""
    reader, heads = parts.reader, parts.whole("num_heads")
    alone = all(parts.given(place) is None for place in (1, 2, 3))
    whole = reader.rows(packed)
    node = reader.graph.producer(whole.value)
    if labels(packed.axes) != "b,s,h,p,d" or shape_of(packed.axes)[2:4] != (heads, 3) or not alone:
        raise parts.fail(f"packed rows are [batch, sequence, {heads}, 3, columns], without key, value and bias")
    if node is None or node.op != "linear":
        raise parts.fail("packed rows are the product of rows with one weight")
    weight, bias = (reader.graph.constants[name].array if name else None for name in node.inputs[1:])
    assert weight is not None
    rows = Seen(whole.kind, node.inputs[0], (*packed.axes[:2], (("n", weight.shape[1]),)))
    sides = []
    for place in range(3):
        product = parts.do("MatMul", rows, Known(_part(weight, heads, place).T, constant=True, name=node.inputs[1]))
        added = None if bias is None else Known(_part(bias, heads, place), constant=True, name=node.inputs[2])
        sides.append(parts.added(product, added))
    return sides


def _part(packed: np.ndarray[Any, Any], heads: int, place: int) -> np.ndarray[Any, Any]:
    """Of an array [heads x 3 x columns, ...] what is for queries (0), keys (1) or values (2)."""
    behind = packed.shape[1:]
    part: np.ndarray[Any, Any] = packed.reshape(heads, 3, -1, *behind)[:, place].reshape(-1, *behind)
    return part


def _attend(parts: Parts, sides: list[Value], mask: Known | None, bias: Value | None) -> Value:
    """What queries take of values, ``sides`` being queries, keys and values [sequences, positions, columns]."""
    heads = parts.whole("num_heads")
    width = shape_of(sides[0].axes)[-1] if isinstance(sides[0], Seen) else 0
    turned = []
    for side, order in zip(sides, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True):
        fits = isinstance(side, Seen) and labels(side.axes) == "b,s,n" and len(side.axes) == 3
        if not isinstance(side, Seen) or not fits or shape_of(side.axes)[-1] != width:
            raise parts.fail("queries, keys and values are [sequences, positions, columns], all three as wide")
        if width % heads:
            raise parts.fail(f"its attribute 'num_heads' is {heads}, which does not divide {width} columns")
        split = parts.do("Reshape", side, Known(np.array([0, 0, heads, width // heads]), constant=True))
        turned.append(parts.do("Transpose", split, perm=order))
    queries, keys, values = turned
    scale = parts.node.attributes.get("scale", 0.0) or 1.0 / np.sqrt(width // heads)
    scores = parts.do("Mul", parts.do("MatMul", queries, keys), Known(np.array(scale, np.float64), constant=True))
    if bias is not None:
        scores = parts.do("Add", scores, bias)
    if mask is not None:
        scores = parts.do("Add", scores, Known(_padding(parts, mask), constant=False))
    context = parts.do("MatMul", parts.do("Softmax", scores, axis=3), values)
    rows = parts.do("Transpose", context, perm=[0, 2, 1, 3])
    return parts.do("Reshape", rows, Known(np.array([0, 0, width]), constant=True))


def _padding(parts: Parts, mask: Known) -> np.ndarray[Any, Any]:
    """What a mask adds to scores: f64[sequences, 1, 1 or positions, positions], 0 for tokens.

    A mask is the lengths of the texts, their ends and then their starts, or not above 0 for padding: for keys, or for
    queries and keys.
    """
    sequences, positions = parts.reader.probe.ids.shape
    array = mask.array
    if array.dtype.kind not in "iub":
        raise parts.fail("its mask is integers")
    places = np.arange(positions)[None, :]
    if array.shape == (sequences,):
        real = places < array[:, None]
    elif array.shape == (2 * sequences,):
        real = (places < array[:sequences, None]) & (places >= array[sequences:, None])
    elif array.shape in ((sequences, positions), (sequences, positions, positions)):
        real = array > 0
    else:
        raise parts.fail(
            f"its mask has shape {list(array.shape)} for {sequences} texts of {positions} tokens; lengths [batch], "
            "ends and starts [2 x batch], [batch, sequence] and [batch, sequence, sequence] are read"
        )
    low = float(parts.node.attributes.get("mask_filter_value", _FILTER))
    if not low < 0.0:
        raise parts.fail(f"its attribute 'mask_filter_value' is {quote(str(low))}; a low number is read")
    spread = real[:, None, None, :] if real.ndim == 2 else real[:, None]
    return np.where(spread, 0.0, low)
