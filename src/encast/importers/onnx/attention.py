"""Products of rows with weights and with each other, masks, softmax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from encast.importers.onnx.disentangled import of_positions
from encast.importers.onnx.folding import place_of
from encast.importers.onnx.reader import Reader, Value, handles
from encast.importers.onnx.smoothed import with_scales
from encast.importers.onnx.values import ARGUMENTS, Axes, Known, Seen, arrange, labels, shape_of, together

__all__ = ["add_mask", "choose", "weaker"]

Array = np.ndarray[Any, Any]

_IN_HEADS = ("rows", "product", "part")
_LOW = -1000.0
"""What is added to the scores of padding, or stands in their place, is at most this: exp of it is 0 in f32."""
_EVEN = 1e-6
"""One number up to this size may be added to all scores, which softmax does not notice: transformers' code for
TensorFlow adds 1e-9, to keep a compiler from a mistake."""


@handles("MatMul")
def _matmul(reader: Reader) -> list[Value]:
    a, b = reader.inputs
    if isinstance(a, Seen) and isinstance(b, Known):
        if b.array.ndim > 2 and labels(a.axes) in ("bh,s,d", "b,h,s,d"):
            raise reader.fail(
                "queries and keys in heads are multiplied with each other, or with a table of relative positions that "
                "the file projects itself: give the file as it was before a graph optimiser computed that in advance"
            )
        return [_times_weight(reader, a, b, b.array)]
    if isinstance(a, Seen) and isinstance(b, Seen):
        if a.kind == "probabilities":
            return [_context(reader, a, b)]
        return [_scores(reader, a, b)]
    raise reader.fail("a product is rows times a weight, queries times keys, or probabilities times values")


def _times_weight(reader: Reader, a: Seen, known: Known, weight: Array) -> Seen:
    """``weight: [in, out]``."""
    rows = Seen(a.extra[1], a.value, a.axes) if a.kind == "smoothed" else reader.rows(a)
    width = shape_of(rows.axes)[-1]
    fits = labels(rows.axes) in ("b,s,n", "bs,n", "b,n", "t,n") and labels(rows.axes[-1:]) == "n"
    if weight.ndim != 2 or weight.shape[0] != width or not fits:
        raise reader.fail(f"a weight of [{width}, outputs] is needed")
    shown = Known(weight, known.constant, known.name)
    if a.kind == "smoothed":
        # How the file rounds the scaled rows says nothing of the rows themselves.
        reader.note_product(rows.value, rows)
        shown = with_scales(reader, a, shown)
    else:
        reader.note_product(rows.value, a)
    return Seen("product", rows.value, (*rows.axes[:-1], (("n", weight.shape[1]),)), extra=(shown, rows.kind))


@handles("Gemm")
def _gemm(reader: Reader) -> list[Value]:
    given = reader.node.attributes
    a, known = reader.inputs[0], reader.known(1)
    bias = reader.inputs[2] if len(reader.inputs) > 2 else None
    plain = given.get("alpha", 1.0) == 1.0 and given.get("beta", 1.0) == 1.0 and not given.get("transA", 0)
    if not isinstance(a, Seen) or known is None or not plain or isinstance(bias, Seen):
        raise reader.fail("Gemm is rows times a weight plus a bias, with alpha and beta 1 and without transA")
    weight = known.array.T if given.get("transB", 0) else known.array
    product = _times_weight(reader, a, known, weight)
    if bias is None:
        return [product]
    if bias.array.shape != weight.shape[1:]:
        raise reader.fail(f"the bias has one number for each of {weight.shape[1:]} outputs")
    added = reader.constant(bias, bias.array)
    turned = reader.constant(product.extra[0], product.extra[0].array.T)
    name = reader.emit("linear", product.value, turned, added, activation="none")
    return [Seen(product.extra[1], name, product.axes)]


def _scaled(reader: Reader, seen: Seen) -> tuple[Seen, float]:
    """Queries or keys and what they are multiplied by."""
    if seen.kind in ("product", "part"):
        seen = reader.finished(seen)
    if seen.kind in ("rows", "table") and seen.curve is not None:
        ratio = float(seen.curve[-1] / ARGUMENTS[-1])
        if np.allclose(seen.curve, ratio * ARGUMENTS, rtol=1e-6, atol=0.0):
            return Seen(seen.kind, seen.value, seen.axes), ratio
    return reader.rows(seen), 1.0


def _heads(axes: Axes) -> int:
    return next((size for axis in axes for label, size in axis if label == "h"), 1)


def _scores(reader: Reader, a: Seen, b: Seen) -> Seen:
    if a.kind not in _IN_HEADS or b.kind not in (*_IN_HEADS, "table"):
        raise reader.fail("queries and keys are rows in heads")
    (q, first), (k, second) = _scaled(reader, a), _scaled(reader, b)
    relative = of_positions(q, k, first * second)
    if relative is not None:
        return relative
    sides = (labels(q.axes), labels(k.axes))
    fits = sides in (("b,h,s,d", "b,h,d,s"), ("bh,s,d", "bh,d,s"), ("b,s,n", "b,n,s"))
    if not fits or q.axes[:-2] != k.axes[:-2] or not (all(q.axes[-2:]) and all(k.axes[-2:])):
        raise reader.fail(
            "queries are [sequences, heads, positions, columns] and keys the same with the last two exchanged"
        )
    heads = _heads(q.axes)
    return _emit_scores(reader, q, k, heads, first * second, _score_axes(reader, q.axes))


def _score_axes(reader: Reader, axes: Axes) -> Axes:
    """The axes of the scores of queries with these, positions and columns last."""
    positions = reader.probe.ids.shape[1]
    return (*axes[:-2], (("q", positions),), (("k", positions),))


def _emit_scores(reader: Reader, q: Seen, k: Seen, heads: int, factor: float, axes: Axes) -> Seen:
    value = reader.emit("attention_scores", q.value, k.value, heads=heads)
    return Seen("scores", value, axes, None if factor == 1.0 else factor * ARGUMENTS)


def _context(reader: Reader, probs: Seen, b: Seen) -> Seen:
    v = reader.rows(b)
    sides = (labels(probs.axes), labels(v.axes))
    fits = sides in (("b,h,q,k", "b,h,s,d"), ("bh,q,k", "bh,s,d"), ("b,q,k", "b,s,n"))
    if not fits or probs.axes[:-2] != v.axes[:-2] or not (all(probs.axes[-2:]) and all(v.axes[-2:])):
        raise reader.fail("probabilities [sequences, heads, queries, keys] are multiplied by values in heads")
    return Seen("rows", reader.emit("attention_context", probs.value, v.value), v.axes)


@handles("Softmax")
def _softmax(reader: Reader) -> list[Value]:
    seen = reader.inputs[0]
    keys_last = isinstance(seen, Seen) and labels(seen.axes[-1:]) == "k" and labels(seen.axes).endswith("q,k")
    if not isinstance(seen, Seen) or seen.kind != "scores" or not keys_last:
        raise reader.fail(
            "softmax is that of attention scores; a softmax over logits is left out of an export for encast"
        )
    axis = reader.node.attributes.get("axis", -1 if reader.opset >= 13 else 1)
    if place_of(axis, len(seen.axes)) != len(seen.axes) - 1:
        raise reader.fail("softmax goes over the keys, the last axis")
    return [_probabilities(reader, seen)]


def _probabilities(reader: Reader, scores: Seen) -> Seen:
    scores = reader.finished(scores)
    if reader.probe.masked and scores.hidden is None:
        raise reader.fail(
            "the file has an attention mask, and softmax does without it; padding is taken out of the scores of every "
            "attention. Exporters leave that out where the example has no padding: give them one that has"
        )
    if scores.hidden is not None and not scores.hidden <= _LOW:
        raise reader.fail(
            f"the scores of padding reach softmax as {scores.hidden:.6g}, not as {_LOW:g} or less: they are scaled, "
            "cut off or rounded after their mask"
        )
    return Seen("probabilities", reader.emit("softmax", scores.value), scores.axes)


@handles("Attention")
def _attention(reader: Reader) -> list[Value]:
    """The op of opset 23, without cache, softcap and causal mask."""
    given = reader.node.attributes
    plain = not given.get("is_causal", 0) and not given.get("softcap", 0.0) and len(reader.node.outputs) == 1
    if not plain or any(one is not None for one in reader.inputs[4:]):
        raise reader.fail("attention has no causal mask, no cache, no softcap and one output")
    sides = []
    for place, count in enumerate(("q_num_heads", "kv_num_heads", "kv_num_heads")):
        part = reader.inputs[place]
        if not isinstance(part, Seen):
            raise reader.fail("queries, keys and values are rows")
        part, factor = _scaled(reader, part)
        if labels(part.axes) == "b,s,n" and given.get(count):
            sequences, positions, width = shape_of(part.axes)
            split = arrange(part.axes, (sequences, positions, given[count], width // given[count]))
            part = Seen(part.kind, part.value, (split[0], split[2], split[1], split[3]) if split else part.axes)
        if labels(part.axes) != "b,h,s,d" or len(part.axes) != 4:
            raise reader.fail("queries, keys and values are [sequences, heads, positions, columns]")
        sides.append((part, factor))
    (q, first), (k, second), (v, third) = sides
    heads = _heads(q.axes)
    if _heads(k.axes) != heads or _heads(v.axes) != heads or third != 1.0 or (q.axes, q.axes) != (k.axes, v.axes):
        raise reader.fail("queries, keys and values have the same heads")
    width = shape_of(q.axes)[-1]
    factor = first * second * given.get("scale", 1.0 / np.sqrt(width))
    scores = _emit_scores(reader, q, k, heads, factor, _score_axes(reader, q.axes))
    mask = reader.inputs[3] if len(reader.inputs) > 3 else None
    if isinstance(mask, Known):
        added = np.where(mask.array, 0.0, -np.inf) if mask.array.dtype == bool else mask.array
        scores = add_mask(reader, scores, added)
    elif isinstance(mask, Seen):
        raise reader.fail("the mask of an attention is made of the attention mask alone")
    context = _context(reader, _probabilities(reader, scores), v)
    if len(shape_of(reader.inputs[0].axes)) == 3:  # type: ignore[union-attr]
        order = (context.axes[0], context.axes[2], (*context.axes[1], *context.axes[3]))
        return [Seen("rows", context.value, order)]
    return [context]


def _of_texts(reader: Reader, axes: Axes, array: Array) -> tuple[Array, Array, Array] | None:
    """What an array that is spread over scores holds where query and key are tokens, and where the key is padding;
    and where the former is."""
    sequences, positions = reader.probe.ids.shape
    if labels(axes) not in ("b,h,q,k", "b,q,k", "bh,q,k") or not all(axes[-2:]):
        return None
    shape = shape_of(axes)
    if np.broadcast_shapes(array.shape, shape) != shape:
        return None
    array = array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
    # Not for every head what is the same for all of them.
    heads = [all(label == "h" for label, _ in axis) for axis in axes]
    sizes = [mine if alike else size for mine, size, alike in zip(array.shape, shape, heads, strict=True)]
    spread = np.broadcast_to(array, sizes).reshape(sequences, -1, positions, positions)
    mask = reader.probe.mask.astype(bool)
    texts = mask[:, None, :, None] & np.ones_like(mask)[:, None, None, :]
    keys = mask[:, None, None, :]
    both = np.broadcast_to(texts & keys, spread.shape)
    padding = np.broadcast_to(texts & ~keys, spread.shape)
    return spread[both], spread[padding], both


def add_mask(reader: Reader, seen: Seen, array: Array) -> Seen:
    """Scores, or a bias that is added to them, plus an array that takes padding out and leaves the rest."""
    if labels(seen.axes) == "h,q,k" and array.ndim == 4:
        axes = together(((("b", len(reader.probe.ids)),), (), (), ()), seen.axes)
        seen = replace(seen, axes=axes or seen.axes)
    parts = _of_texts(reader, seen.axes, np.asarray(array))
    if parts is not None and (parts[1] <= _LOW).all():
        added, padding, _ = parts
        hidden = weaker(seen.hidden, _most(padding))
        if (added == added[:1]).all() and (np.abs(added[:1]) <= _EVEN).all():
            return replace(seen, hidden=hidden)
        reach = _reach(*parts[::2]) if seen.kind == "scores" else None
        if reach is not None:
            seen, hidden = reader.finished(seen), weaker(hidden, _most(added[added != 0]))
            return Seen("scores", reader.emit("local_mask", seen.value, reach=reach), seen.axes, hidden=hidden)
    hint = ""
    if reader.probe.fixed and array.ndim > 2 and (array != array[..., :1, :, :]).any():
        hint = (
            ". These numbers differ by head, as a bias by relative positions does that was computed in advance for one "
            "length: export it with dynamic axes"
        )
    raise reader.fail(
        f"what is added to scores is a mask of padding: 0 between the tokens of a text, and {_LOW:g} or less for keys "
        f"that are padding or further away than a window reaches{hint}"
    )


def _most(low: Array) -> float | None:
    return float(low.max()) if low.size else None


def weaker(a: float | None, b: float | None) -> float | None:
    """What two masks add at least for what either of them hides; None for one that hides nothing."""
    return b if a is None else a if b is None else max(a, b)


def _reach(added: Array, both: Array) -> int | None:
    """How far the keys are from their queries that a mask leaves; None unless it leaves all of these, and no others.

    ``both``: which of all pairs ``added`` is for.
    """
    places = np.arange(both.shape[-1])
    distances = np.broadcast_to(np.abs(places[:, None] - places), both.shape)[both]
    seen = added == 0
    reach = int(distances[seen].max(initial=0))
    fits = reach > 0 and np.array_equal(seen, distances <= reach) and (added[~seen] <= _LOW).all()
    return reach if fits else None


def choose(reader: Reader, condition: Array, yes: Value | None, no: Value | None) -> list[Value]:
    """Where: one side is ours, the other takes the place of padding."""
    ours, other, kept = (yes, no, condition) if isinstance(yes, Seen) else (no, yes, ~condition)
    if not isinstance(ours, Seen) or not isinstance(other, Known):
        raise reader.fail("Where puts a number in the place of padding")
    low = np.asarray(other.array, np.float64)
    if ours.kind == "scores":
        # As if the array were added: 0 where the scores stay.
        return [add_mask(reader, ours, np.where(kept, 0.0, np.minimum(low, 1.0) - 1.0))]
    rows = reader.rows(ours)
    mask = reader.probe.mask[:, :, None].astype(bool)
    if labels(rows.axes) == "b,s,n" and len(rows.axes) == 3 and low.size == 1 and low.ndim <= 3:
        spread = np.broadcast_to(kept, shape_of(rows.axes))
        if np.array_equal(spread, np.broadcast_to(mask, spread.shape)) and (low == 0 or low <= _LOW).all():
            return [Seen("masked" if low == 0 else "lowered", rows.value, rows.axes)]
    raise reader.fail("Where replaces the scores or rows of padding by a number, and no others")
