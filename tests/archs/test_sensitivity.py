"""No term can be lost silently: whatever is taken out of a graph, the comparison with transformers must notice.

Every test breaks one thing (a bias, a norm's gamma, a table, a residual, the scale, an activation, the walls between
sequences, the order of positions) and asks that the output leaves the bound that float32 engines are held to, so that
what is proven here for the reference holds for every engine that is compared within that bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bounds import allowed_difference, largest_excess
from cases import CASES, Opened, open_case

from encast.backends.reference import EVALUATORS, Context
from encast.ir import Constant, Graph

FEATURES = [name for name, case in CASES.items() if case.head == "features"]
HEADS = [name for name, case in CASES.items() if case.head != "features"]
# Softmax takes a key's bias away again, see test_golden.test_keys_match_transformers.
KEY_BIASES = tuple(f"{path}.bias" for path in (".key", ".attn.k", ".k_lin", ".key_proj"))
# So it does that of a vector of distances that queries meet; it is no key's.
POSITION_BIAS = ".pos_key_proj.bias"

Table = dict[str, Callable[..., Any]]


def with_constant(graph: Graph, name: str, change: Callable[[Any], Any]) -> Graph:
    """A copy in which one constant is changed."""
    other = graph.copy()
    old = other.constants[name]
    other.constants[name] = Constant(old.type, np.ascontiguousarray(change(old.array), old.array.dtype))
    return other


def broken_constants(graph: Graph) -> Iterator[tuple[str, Graph]]:
    """Every constant, lost: biases, betas and tables zero, gammas one, weights without their last input."""
    gammas = {node.inputs[1] for node in graph.nodes if node.op in ("layer_norm", "rms_norm")}
    for name, constant in graph.constants.items():
        if not constant.array.any():
            continue  # the bias of a norm that has none
        if name in gammas:
            yield f"{name} = 1", with_constant(graph, name, np.ones_like)
        elif constant.array.ndim == 1 or "embeddings" in name or "relative_attention_bias" in name:
            yield f"{name} = 0", with_constant(graph, name, np.zeros_like)
        else:
            yield (
                f"{name} short",
                with_constant(graph, name, lambda w: np.where(np.arange(w.shape[1]) == w.shape[1] - 1, 0, w)),
            )
    for name in graph.constants:
        if "token_type_embeddings.weight" in name and len(graph.constants[name].array) > 1:
            yield f"{name} row 1 = row 0", with_constant(graph, name, lambda t: np.repeat(t[:1], len(t), axis=0))


def broken_nodes(graph: Graph) -> Iterator[tuple[str, Table]]:
    """Evaluators that do the n-th application of an op wrongly."""
    wrong: dict[str, list[tuple[str, Callable[..., Any]]]] = {
        "add": [("without a", lambda context, a, b: b), ("without b", lambda context, a, b: a)],
        "scale": [("left out", lambda context, x, *, factor: x)],
        "activation": [
            ("left out", lambda context, x, *, kind: x),
            ("another", lambda context, x, *, kind: EVALUATORS["activation"](context, x, kind=_other(kind))),
        ],
        "layer_norm": [("left out", lambda context, x, gamma, beta, *, eps: x * gamma + beta)],
        "rms_norm": [
            ("left out", lambda context, x, gamma, *, eps: x * gamma),
            ("centred", lambda context, x, gamma, *, eps: EVALUATORS["layer_norm"](context, x, gamma, 0.0, eps=eps)),
            ("another eps", lambda context, x, gamma, *, eps: EVALUATORS["rms_norm"](context, x, gamma, eps=100 * eps)),
        ],
        "relative_bias": [
            ("mirrored", _mirrored),
            ("left out", lambda context, scores, table, *, max_distance: scores),
        ],
        "linear_bias": [
            ("left out", lambda context, scores, slopes: scores),
            ("to one side", _to_one_side),
            ("heads turned", lambda context, scores, slopes: EVALUATORS["linear_bias"](context, scores, slopes[::-1])),
        ],
        "relative_scores": [
            ("left out", lambda context, scores, x, table, *, of, max_distance: scores),
            ("mirrored", lambda *operands, **rule: _distances(*operands[:3], operands[3][::-1], **rule)),
            ("one further", lambda *operands, **rule: _distances(*operands[:3], np.roll(operands[3], 1, 0), **rule)),
            ("the other side", _other_side),
            ("heads swapped", lambda *operands, **rule: _distances(*operands[:3], _rolled_heads(*operands), **rule)),
            (
                "other buckets",
                lambda *operands, of, max_distance: _distances(
                    *operands, of=of, max_distance=0 if max_distance else 2 * len(operands[3])
                ),
            ),
        ],
        "window_rows": [
            ("middle alone", lambda context, x, *, width: _window(context, x, width, [width // 2])),
            ("without the first", lambda context, x, *, width: _window(context, x, width, range(1, width))),
            ("backwards", lambda context, x, *, width: _window(context, x, width, range(width))[:, ::-1]),
            ("without walls", _window_without_walls),
        ],
        "local_mask": [
            ("left out", lambda context, scores, *, reach: scores),
            ("one further", lambda context, scores, *, reach: _masked(context, scores, reach + 1)),
            ("one less far", lambda context, scores, *, reach: _masked(context, scores, reach - 1)),
        ],
        "rotary": [
            ("left out", lambda context, x, **attrs: x),
            ("another base", lambda context, x, *, theta, **attrs: _rotated(context, x, theta=theta * 1.05, **attrs)),
            ("another rate", lambda context, x, *, rate, **attrs: _rotated(context, x, rate=rate * 1.05, **attrs)),
            ("one head", lambda context, x, *, heads, **attrs: _rotated(context, x, heads=1, **attrs)),
            ("other pairs", _rotated_neighbours),
            ("backwards", lambda context, x, **attrs: _rotated(context, x[:, ::-1], **attrs)[:, ::-1]),
            ("not restarted", _rotated_not_restarted),
        ],
        "gated_activation": [
            ("halves swapped", lambda context, x, *, kind: _gated(context, np.roll(x, x.shape[1] // 2, axis=1), kind)),
            ("another", lambda context, x, *, kind: _gated(context, x, _other(kind))),
            ("halves mixed", lambda context, x, *, kind: _gated(context, _interleaved(x), kind)),
        ],
        "pooling": [
            ("rolled", lambda context, x, *, modes: EVALUATORS["pooling"](context, np.roll(x, 1, axis=0), modes=modes))
        ],
        "softmax": [("left out", lambda context, scores: np.where(np.isinf(scores), 0.0, scores))],
        "position_ids": [("all first", _all_first), ("not restarted", _not_restarted), ("shifted", _shifted)],
        "normalize": [("left out", lambda context, x: x)],
        "first_token": [("last", lambda context, x: x[context.cu_seqlens[1:] - 1])],
        "select_rows": [("rolled", lambda context, x, select: np.roll(x, 1, axis=0)[select])],
    }
    counts: dict[str, int] = {}
    for node in graph.nodes:
        index = counts[node.op] = counts.get(node.op, -1) + 1
        for how, function in wrong.get(node.op, []):
            yield f"{node.name} ({node.op}) {how}", _nth(node.op, [index], function)
    with_distances = [node.layer for node in graph.nodes if node.op == "relative_scores"]
    for layer in range(counts["softmax"] + 1):
        relative = [index for index, of_layer in enumerate(with_distances) if of_layer == layer]
        yield f"layer {layer}: no walls between sequences", _without_walls(layer, relative)
    if any(node.op == "position_ids" and node.attrs["skip_id"] >= 0 for node in graph.nodes):
        yield "padding tokens count as positions", {**EVALUATORS, "position_ids": _counts_padding}


def _other(kind: str) -> str:
    # The two gelus are the closest pair: taking one for the other must show.
    return {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}.get(kind, "gelu")


def _distances(context: Context, scores: Any, x: Any, table: Any, *, of: str, max_distance: int) -> Any:
    return EVALUATORS["relative_scores"](context, scores, x, table, of=of, max_distance=max_distance)


def _other_side(context: Context, scores: Any, x: Any, table: Any, *, of: str, max_distance: int) -> Any:
    return _distances(context, scores, x, table, of="key" if of == "query" else "query", max_distance=max_distance)


def _rolled_heads(context: Context, scores: Any, x: Any, table: Any) -> Any:
    # By a head; by a column where one is as wide as the table.
    return np.roll(table, table.shape[1] // len(scores) % table.shape[1] or 1, axis=1)


def _window(context: Context, x: Any, width: int, places: Any) -> Any:
    whole = EVALUATORS["window_rows"](context, x, width=width)
    kept = np.repeat([place in places for place in range(width)], x.shape[1])
    return np.where(kept, whole, 0.0)


def _window_without_walls(context: Context, x: Any, *, width: int) -> Any:
    return EVALUATORS["window_rows"](replace(context, cu_seqlens=context.cu_seqlens[[0, -1]]), x, width=width)


def _masked(context: Context, scores: Any, reach: int) -> Any:
    return EVALUATORS["local_mask"](context, scores, reach=reach)


def _to_one_side(context: Context, scores: Any, slopes: Any) -> Any:
    """Of keys behind the query alone, as if the model were causal."""
    result = EVALUATORS["linear_bias"](context, scores, slopes)
    for _, pairs, length in context.sequences():
        before = (np.arange(length)[None, :] < np.arange(length)[:, None]).reshape(-1)
        result[:, pairs][:, before] = scores[:, pairs][:, before]
    return result


def _rotated(context: Context, x: Any, **attrs: Any) -> Any:
    return EVALUATORS["rotary"](context, x, **attrs)


def _rotated_neighbours(context: Context, x: Any, *, heads: int, **attrs: Any) -> Any:
    """Pairs of neighbouring columns, as other models have them."""
    size = x.shape[1] // heads
    order = np.arange(x.shape[1]).reshape(heads, size // 2, 2).transpose(0, 2, 1).reshape(-1)
    return _rotated(context, x[:, order], heads=heads, **attrs)[:, np.argsort(order)]


def _rotated_not_restarted(context: Context, x: Any, **attrs: Any) -> Any:
    whole = replace(context, cu_seqlens=np.array([0, len(x)], np.int32))
    # Of queries or of keys alone: where both are wrong alike, no distance is.
    return _rotated(whole, x, **attrs)


def _gated(context: Context, x: Any, kind: str) -> Any:
    return EVALUATORS["gated_activation"](context, x, kind=kind)


def _interleaved(x: Any) -> Any:
    return np.concatenate([x[:, ::2], x[:, 1::2]], axis=1)


def _mirrored(context: Context, scores: Any, table: Any, *, max_distance: int) -> Any:
    half = len(table) // 2
    return EVALUATORS["relative_bias"](context, scores, np.roll(table, half, axis=0), max_distance=max_distance)


def _all_first(context: Context, ids: Any, *, offset: int, skip_id: int) -> Any:
    return np.full_like(ids, offset)


def _not_restarted(context: Context, ids: Any, *, offset: int, skip_id: int) -> Any:
    return np.minimum(np.arange(len(ids)) + offset, 40 + offset).astype(np.int32)


def _shifted(context: Context, ids: Any, *, offset: int, skip_id: int) -> Any:
    return EVALUATORS["position_ids"](context, ids, offset=offset + 1, skip_id=skip_id)


def _counts_padding(context: Context, ids: Any, *, offset: int, skip_id: int) -> Any:
    return EVALUATORS["position_ids"](context, ids, offset=offset, skip_id=-1)


def _nth(op: str, indices: list[int], wrong: Callable[..., Any]) -> Table:
    calls = iter(range(1 << 30))

    def evaluate(*operands: Any, **attrs: Any) -> Any:
        return (wrong if next(calls) in indices else EVALUATORS[op])(*operands, **attrs)

    return {**EVALUATORS, op: evaluate}


def _without_walls(layer: int, relative: list[int]) -> Table:
    """Attention of one layer over the whole batch as if it were one sequence."""

    def merged(op: str) -> Callable[..., Any]:
        def evaluate(context: Context, *operands: Any, **attrs: Any) -> Any:
            return EVALUATORS[op](replace(context, cu_seqlens=context.cu_seqlens[[0, -1]]), *operands, **attrs)

        return evaluate

    ops = ("attention_scores", "relative_bias", "linear_bias", "softmax", "attention_context")
    # Of these a layer has more than one, or none.
    distances = {"relative_scores": _nth("relative_scores", relative, merged("relative_scores"))["relative_scores"]}
    # A mask of whole sequences would hide what lies beyond the walls: the n-th local layer is not the n-th layer.
    unmasked = {"local_mask": lambda context, scores, *, reach: scores}
    return {**EVALUATORS, **unmasked, **distances, **{op: _nth(op, [layer], merged(op))[op] for op in ops}}


def unnoticed(opened: Opened, broken: Iterator[tuple[str, Graph | Table]]) -> list[str]:
    exact, allowed = allowed_difference(opened.graph, opened.output, opened.batch, opened.select)
    exact, allowed = opened.kept(exact), opened.kept(allowed)
    assert largest_excess(opened.golden("f64"), exact, allowed) < 1.0
    result = []
    count = 0
    for name, change in broken:
        got = opened.evaluate(change) if isinstance(change, Graph) else opened.evaluate(evaluators=change)
        count += 1
        if largest_excess(got, opened.golden("f64"), allowed) <= 1.0:
            result.append(name)
    assert count > 0
    return result


@pytest.mark.parametrize("name", FEATURES)
def test_every_constant_of_an_encoder_is_needed(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    opened = open_case(name, tmp_path_factory)
    hidden = (*KEY_BIASES, POSITION_BIAS)
    if any(node.op == "rotary" or node.attrs.get("of") == "key" for node in opened.graph.nodes):
        hidden = (POSITION_BIAS,)  # a key's that is turned, or meets vectors of distances, shows
    expected = [f"{name} = 0" for name in opened.graph.constants if name.endswith(hidden)]
    assert unnoticed(opened, broken_constants(opened.graph)) == expected


@pytest.mark.parametrize("name", FEATURES)
def test_every_node_of_an_encoder_is_needed(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    opened = open_case(name, tmp_path_factory)
    assert unnoticed(opened, broken_nodes(opened.graph)) == []


@pytest.mark.parametrize("name", HEADS)
def test_every_part_of_a_head_is_needed(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    opened = open_case(name, tmp_path_factory)
    inside = {name for node in opened.graph.nodes if node.layer >= 0 for name in (node.name, *node.inputs)}

    def outside(broken: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        return (item for item in broken if item[0].split(" ")[0] not in inside and not item[0].startswith("layer "))

    assert unnoticed(opened, outside(broken_constants(opened.graph))) == []
    assert unnoticed(opened, outside(broken_nodes(opened.graph))) == []


@pytest.mark.parametrize("name", FEATURES)
def test_a_lost_key_bias_shows_in_the_keys(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    opened = open_case(name, tmp_path_factory)
    wanted = opened.golden_array("key_f64")
    scores = [node for node in opened.graph.nodes if node.op == "attention_scores"]
    begin, end = opened.batch.cu_seqlens[1:3]
    for bias in [name for name in opened.graph.constants if name.endswith(KEY_BIASES)]:
        broken = replace(opened, graph=with_constant(opened.graph, bias, np.zeros_like)).values()
        got = np.stack([broken[node.inputs[1]][begin:end] for node in scores])
        assert np.abs(got - wanted).max() > 1e-3
