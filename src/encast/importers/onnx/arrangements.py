"""Ops that move values without computing: other axes, rows of tables, first tokens, single columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from encast.errors import GraphError
from encast.importers.onnx.folding import axes_of, index_slices, place_of, resolve_shape
from encast.importers.onnx.grouped import repeated
from encast.importers.onnx.packed import part, side
from encast.importers.onnx.reader import Reader, Value, handles
from encast.importers.onnx.rotary import half
from encast.importers.onnx.values import Axes, Known, Seen, arrange, labels, shape_of
from encast.ir.relative import relative_buckets

__all__ = ["ONE_HOT", "look_up", "look_up_one_hot", "with_positions"]

ONE_HOT = "one hot "
"""Before the name of an input: ``Known.source`` of its ids as rows of zeros with one 1."""

Array = np.ndarray[Any, Any]

_FLOATING = (1, 10, 11, 16)
"""Data types f32, f16, f64 and bf16."""
_WITHOUT_AXES = ("byte scale", "byte zero", "integer sums")
"""Kinds of which it is not followed how they lie."""
_UNMOVED = ("Identity", "Dropout", "Cast", "CastLike")
_REACH = 128
"""The greatest distance of a relative bias with buckets of its own: that of MPNet and T5."""


def _seen(reader: Reader) -> Seen:
    seen = reader.inputs[0]
    if not isinstance(seen, Seen):
        raise reader.fail(f"{reader.node.op} takes its rows first")
    if seen.kind in _WITHOUT_AXES and reader.node.op not in _UNMOVED:
        raise reader.fail("sums of integers and their scales stay as they are until they are multiplied")
    return seen


def _array(reader: Reader, place: int) -> Array | None:
    """The known array of an input, None if there is no such input."""
    if place < len(reader.inputs) and isinstance(reader.inputs[place], Seen):
        raise reader.fail("shapes, indices and axes are numbers")
    known = reader.known(place)
    return None if known is None else known.array


def _with_axes(seen: Seen, axes: Axes) -> list[Value]:
    return [replace(seen, axes=axes, rounded=None)]


@handles("Identity", "Dropout")
def _identity(reader: Reader) -> list[Value]:
    for training in reader.inputs[2:]:
        off = isinstance(training, Known) and training.constant and not training.array.any()
        if training is not None and not off:
            raise reader.fail("a dropout does nothing: training_mode is absent or false")
    return [_seen(reader)]


@handles("Cast", "CastLike")
def _cast(reader: Reader) -> list[Value]:
    if reader.node.op == "Cast":
        floating = reader.node.attributes.get("to") in _FLOATING
    else:
        like = reader.inputs[1] if len(reader.inputs) > 1 else None
        kind = like.array.dtype if isinstance(like, Known) else np.dtype("f4")
        floating = like is not None and kind.kind == "f"
    if not floating:
        raise reader.fail("rows and scores stay numbers in floating point")
    if (known := reader.known(0)) is not None:
        # Numbers like rows: the factor of scores in a graph of which nothing was folded.
        floats = known.array.dtype.kind == "f"
        return [known if floats else replace(known, array=known.array.astype(np.float32))]
    # A cast to f16 says in which dtype that runtime computes; here the artifact's dtype does.
    return [_seen(reader)]


@handles("Shape")
def _shape(reader: Reader) -> list[Value]:
    shape = shape_of(_seen(reader).axes)
    given = reader.node.attributes
    return [Known(np.array(shape[given.get("start", 0) : given.get("end", len(shape))], np.int64), constant=False)]


@handles("Reshape", "Flatten")
def _reshape(reader: Reader) -> list[Value]:
    seen = _seen(reader)
    shape = shape_of(seen.axes)
    if reader.node.op == "Flatten":
        axis = reader.node.attributes.get("axis", 1)
        if axis != len(shape):
            place_of(axis, len(shape))
        wanted = [int(np.prod(shape[:axis])), -1]
    else:
        array = _array(reader, 1)
        if array is None:
            raise reader.fail("the new shape is made of numbers and of the sizes of the ids")
        wanted = [int(size) for size in array.reshape(-1)]
    axes = arrange(seen.axes, resolve_shape(shape, wanted, bool(reader.node.attributes.get("allowzero", 0))))
    if axes is None:
        raise reader.fail(f"{wanted} would mix tokens; columns are cut into heads or put together again")
    return _with_axes(seen, axes)


@handles("Transpose")
def _transpose(reader: Reader) -> list[Value]:
    seen = _seen(reader)
    order = reader.node.attributes.get("perm") or list(range(len(seen.axes)))[::-1]
    if sorted(order) != list(range(len(seen.axes))):
        raise reader.fail(f"the order {order} is none of its axes")
    return _with_axes(seen, tuple(seen.axes[place] for place in order))


@handles("Unsqueeze", "Squeeze")
def _squeeze(reader: Reader) -> list[Value]:
    seen = _seen(reader)
    wanted = axes_of(reader.node, [None, _array(reader, 1)])
    axes = list(seen.axes)
    if reader.node.op == "Unsqueeze":
        rank = len(axes) + len(wanted or ())
        places = sorted(place_of(one, rank) for one in wanted or ())
        if not places or len(set(places)) != len(places):
            raise reader.fail("axes are given, each once")
        for place in places:
            axes.insert(place, ())
    else:
        if wanted == []:
            raise reader.fail("no axes at all may mean all of them or none")
        gone = (
            {place_of(one, len(axes)) for one in wanted}
            if wanted is not None
            else {i for i, a in enumerate(axes) if not a}
        )
        if any(axes[place] for place in gone):
            raise reader.fail("only axes of size 1 are squeezed out")
        axes = [axis for place, axis in enumerate(axes) if place not in gone]
    return _with_axes(seen, tuple(axes))


@handles("Expand")
def _expand(reader: Reader) -> list[Value]:
    seen, array = _seen(reader), _array(reader, 1)
    if array is None:
        raise reader.fail("the new shape is made of numbers and of the sizes of the ids")
    shape = np.broadcast_shapes(shape_of(seen.axes), tuple(int(size) for size in array.reshape(-1)))
    axes: list[Any] = [()] * (len(shape) - len(seen.axes)) + list(seen.axes)
    if len(shape) == len(seen.axes) == 5 and shape != shape_of(seen.axes):
        found = repeated(reader, seen, 2, shape[2])
        if found is not None and shape_of(found.axes) == shape:
            return [found]
    sequences = reader.probe.ids.shape[0]
    for place, (axis, size) in enumerate(zip(axes, shape, strict=True)):
        if not axis and size != 1:
            if place == 0 and size == sequences and seen.kind in ("bias", "rows"):
                axes[place] = (("b", size),)  # the same for every sequence
            elif seen.kind in ("squares", "mean", "variance"):
                axes[place] = (("n", size),)
            else:
                raise reader.fail("rows are not repeated")
    return _with_axes(seen, tuple(axes))


@handles("Gather")
def _gather(reader: Reader) -> list[Value]:
    seen, index = _seen(reader), _array(reader, 1)
    if index is None:
        raise reader.fail("rows are picked by a constant index")
    axis = place_of(reader.node.attributes.get("axis", 0), len(seen.axes))
    if index.size != 1:
        raise reader.fail("one row or one column is picked")
    return [_pick(reader, seen, axis, int(index.reshape(())), ((),) * index.ndim)]


@handles("Slice")
def _slice(reader: Reader) -> list[Value]:
    seen = _seen(reader)
    arrays = [None, *(_array(reader, place) for place in range(1, len(reader.inputs)))]
    shape = shape_of(seen.axes)
    if any(arrays[place] is None and reader.inputs[place] is not None for place in range(1, len(arrays))):
        raise reader.fail("the bounds of a slice are numbers")
    for axis, one in enumerate(index_slices(reader.node, len(shape), arrays)):
        start, stop, step = one.indices(shape[axis])
        if (start, stop, step) == (0, shape[axis], 1):
            continue
        if stop - start == 1:
            seen = _pick(reader, seen, axis, start, ((),))
        elif step == 1:
            seen = _columns(reader, seen, axis, start, stop)
        else:
            raise reader.fail("a slice takes the first token, or columns that lie side by side")
    return [seen]


def _columns(reader: Reader, seen: Seen, axis: int, start: int, stop: int) -> Seen:
    """Columns ``start`` to ``stop`` of a product, or of every head."""
    if axis == len(seen.axes) - 1 and 0 <= start < stop <= shape_of(seen.axes)[axis]:
        if labels(seen.axes) in ("b,s,n", "bs,n") and all(seen.axes):
            return part(reader, seen, start, stop, (*seen.axes[:-1], (("n", stop - start),)))
        found = half(reader, seen, start, stop)
        if found is not None:
            return found
    raise reader.fail("columns are those of a product, or one half of every head's")


def _pick(reader: Reader, seen: Seen, axis: int, start: int, kept: Axes) -> Seen:
    """The part at ``start`` of an axis, for which ``kept`` stands: the first token's row, a column, or the queries,
    the keys or the values of a product that makes all three."""
    width = shape_of(seen.axes)[axis]
    if not 0 <= start + width * (start < 0) < width:
        raise reader.fail(f"index {start} is beyond the {width} that are there")
    found = side(reader, seen, axis, start % width, kept)
    if found is not None:
        return found
    axes = (*seen.axes[:axis], *kept, *seen.axes[axis + 1 :])
    rows = reader.rows(seen)
    if labels(rows.axes) == "b,s,n" and labels(rows.axes[axis : axis + 1]) == "s" and start == 0:
        return Seen("sequences", reader.emit("first_token", rows.value), axes)
    if axis == len(rows.axes) - 1 and labels(rows.axes) == "b,s,n" and rows.axes[axis]:
        return Seen("column", rows.value, axes, extra=start % width)
    raise reader.fail("the first token of every sequence is picked, or one column of the rows")


@handles("Split")
def _split(reader: Reader) -> list[Value]:
    seen, sizes = _seen(reader), _array(reader, 1)
    axis = place_of(reader.node.attributes.get("axis", 0), len(seen.axes))
    width = shape_of(seen.axes)[axis]
    given = reader.node.attributes.get("split") if sizes is None else [int(one) for one in sizes.reshape(-1)]
    count = len(reader.node.outputs)
    if given is None and width % count == 0:
        given = [width // count] * count
    if given is None or len(given) != count or sum(given) != width or min(given) < 1:
        raise reader.fail(f"{width} columns are split into {count} parts")
    ends = np.cumsum(given).tolist()
    if given == [1] * width:
        return [_pick(reader, seen, axis, place, ((),)) for place in range(width)]
    return [_columns(reader, seen, axis, end - size, end) for size, end in zip(given, ends, strict=True)]


# Rows of tables


def look_up(reader: Reader, table: Known, index: Known) -> list[Value] | None:
    """Gather of a table at ids that depend on the input: an embedding or a relative bias. None if it is neither."""
    array = index.array
    if table.array.ndim != 2 or table.array.dtype.kind != "f" or array.dtype.kind != "i":
        return None
    sequences, positions = reader.probe.ids.shape
    if array.ndim == 2 and array.shape == (positions, positions) and table.array.shape[0] > 1:
        bias = _relative_bias(reader, table, array)
        if bias is not None:
            return [bias]
    columns = (("n", table.array.shape[1]),)
    axes: Axes = ((), (("s", positions),), columns)[2 - array.ndim :]
    if array.shape == (sequences, positions):
        axes = ((("b", sequences),), (("s", positions),), columns)
    elif array.shape == (sequences * positions,) and (sequences > 1 or index.source):
        axes = ((("b", sequences), ("s", positions)), columns)
        array = array.reshape(sequences, positions)
    elif array.shape not in ((1, positions), (positions,)):
        return None
    if index.source not in ("input_ids", "token_type_ids") and not array.any():
        # A model that was exported without token_type_ids: all tokens have type 0, and the other rows no use.
        table = Known(table.array[:1], table.constant, table.name)
    ids = _ids(reader, np.broadcast_to(array, (sequences, positions)), index.source)
    return [Seen("rows", reader.emit("embedding", ids, reader.constant(table, table.array)), axes)]


def look_up_one_hot(reader: Reader, table: Known, rows: Known) -> list[Value] | None:
    """The product of ids as rows of zeros with one 1 and a table; None if the table is none."""
    depth = table.array.shape[0]
    if table.array.ndim != 2 or rows.array.shape[-1] != depth or rows.array.size != reader.probe.ids.size * depth:
        return None
    source = rows.source.removeprefix(ONE_HOT)
    # The input itself: ids of the probe may lie behind a table of words.
    ids = reader.probe.ids if source == "input_ids" else reader.probe.types
    return look_up(reader, table, Known(ids.reshape(rows.array.shape[:-1]), rows.constant, source=source))


def _ids(reader: Reader, array: Array, source: str) -> str:
    """Token ids, token types or positions: what the array holds for the tokens of the texts.

    Ids and types are the inputs themselves: what is computed of them may be the same for the probe's alone. Zeros for
    all tokens are types too, of which there is one.
    """
    probe = reader.probe
    real = probe.mask.astype(bool)
    found = array[real]
    if source == "input_ids" and np.array_equal(found, probe.ids[real]):
        return "token_ids"
    if source == "token_type_ids" and np.array_equal(found, probe.types[real]):
        return reader.types_input()
    if not found.any():
        return reader.types_input()
    for skip in (-1, *probe.special):
        counted = probe.ids != skip
        before = np.cumsum(counted, axis=1) - counted
        offset = int((array - before)[real & counted][0]) if (real & counted).any() else 0
        if np.array_equal(found, np.where(counted, offset + before, offset - 1)[real]):
            return reader.emit("position_ids", "token_ids", offset=offset, skip_id=skip)
    raise reader.fail(
        "rows of a table are picked by token ids, by token type ids or by positions, which count from a fixed number "
        "and may leave out a padding id"
    )


def with_positions(reader: Reader, rows: Seen, known: Known) -> Seen:
    """Rows plus a row for every position: the first ones of a table, or a constant that a file of one length may have
    in the place of one.

    Such a table ends with that length, and so do the texts that the model takes. The same row for every position is the
    one row of a table of token types that has no more, as RoBERTa's.
    """
    sequences, positions = reader.probe.ids.shape
    array = known.array
    width = shape_of(rows.axes)[-1]
    fits = labels(rows.axes) == "b,s,n" and len(rows.axes) == 3 and array.shape[-2:] == (positions, width)
    if not fits or array.ndim > 3 or array.shape[:-2] not in ((), (1,), (sequences,)):
        raise reader.fail("a constant that is added to rows is a bias, or has one row for every position")
    each = array.reshape(-1, positions, width)
    if not (each == each[0]).all():
        raise reader.fail("rows of positions are the same for all sequences")
    table = reader.table(known)
    if table is None and not known.constant:
        raise reader.fail("rows of positions are the first ones of a table, or constants in a file of one length")
    if table is None or (reader.probe.fixed and len(table.array) == positions):
        table = Known(each[0], constant=True, name=known.name)
    if (table.array == table.array[0]).all():
        ids, table = reader.types_input(), Known(table.array[:1], constant=True, name=known.name)
    else:
        ids = reader.emit("position_ids", "token_ids", offset=0, skip_id=-1)
        if reader.probe.fixed and len(table.array) == positions:
            reader.cut_at = positions
    found = reader.emit("embedding", ids, reader.constant(table, table.array))
    return Seen("rows", reader.emit("add", rows.value, found), rows.axes)


def _relative_bias(reader: Reader, table: Known, array: Array) -> Seen | None:
    positions = len(array)
    distances = np.arange(positions)[None, :] - np.arange(positions)[:, None]
    try:
        wanted = relative_buckets(distances, table.array.shape[0], _REACH)
        before = relative_buckets(distances - np.sign(distances), table.array.shape[0], _REACH)
    except GraphError:
        return None
    # A logarithm in f32 may put the first distance of a bucket into the one before.
    if not ((array == wanted) | ((array == before) & (np.abs(distances) > 1))).all():
        return None
    axes: Axes = ((("q", positions),), (("k", positions),), (("h", table.array.shape[1]),))
    return Seen("bias", reader.constant(table, table.array), axes, extra=_REACH)
