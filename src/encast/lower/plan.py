"""Graph to plan text: one step a node, a place for every value. The grammar stands in core/runtime/plan.h."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import encast._core as _core
from encast.errors import UnsupportedModelError
from encast.ir.blocks import blocks_beside
from encast.ir.graph import Graph, Node
from encast.ir.ops import ATTENTIONS, COARSE_ACTIVATIONS
from encast.ir.types import ValueType
from encast.lower.memory import Lifetime, place_values
from encast.lower.target import TILE_CLASSES, Target
from encast.lower.unfuse import unfuse

__all__ = ["StoredTensor", "has_steps", "lower"]

_READS_QKV = (*ATTENTIONS, "rotary_qkv")
_APART = frozenset({"head_tasks", "qkv_fusion", "row_blocks"})  # ablations that keep attention and its product apart


class StoredTensor(Protocol):
    """Where a tensor of the artifact stands: ``offset`` bytes from the start of the weights file."""

    @property
    def offset(self) -> int: ...


@dataclass(frozen=True)
class _Step:
    kind: str
    keys: Mapping[str, str]
    reads: Mapping[str, str]
    writes: Mapping[str, str]


@dataclass(frozen=True)
class _Stage:
    """``kind``: rows, sequences or heads; ``steps``: indices, one after the other."""

    kind: str
    steps: list[int]


class _Lowering:
    def __init__(self, graph: Graph, tensors: Mapping[str, StoredTensor], target: Target) -> None:
        self.graph, self.tensors, self.target = graph, tensors, target
        self.weights: dict[tuple[str, str, int, int], str] = {}
        self.weight_lines: list[str] = []
        self.product_bytes = _product_bytes(graph)
        self.steps: list[_Step] = []
        self.values: dict[str, ValueType] = {}
        self.counts: dict[str, Mapping[str, Any]] = {}
        self.readers = Counter(value for node in graph.nodes for value in node.inputs) + Counter(graph.outputs.values())

    # Operands

    def weight(self, name: str, layout: str, *, stored: str | None = None, part: int = 0, parts: int = 1) -> str:
        """The id of a constant in one of the layouts; ``stored`` names the tensor when it is derived.

        ``part`` of ``parts`` equal ones, each of whole panels, of what belongs to a product's outputs.
        """
        stored = stored or name
        key = (stored, layout, part, parts)
        type = self.constant(name)
        if key not in self.weights:
            if layout == "padded":
                dtype, rows, cols = ("i32" if stored != name else type.dtype), 1, int(type.shape[0]) // parts
            elif len(type.shape) == 1:
                dtype, rows, cols = type.dtype, 1, int(type.shape[0])
            else:
                dtype, rows, cols = type.dtype, int(type.shape[0]) // parts, int(type.shape[1])
            self.weights[key] = f"w{len(self.weights)}"
            offset = self.tensors[stored].offset + part * _core.weight_bytes(dtype, layout, rows, cols)
            self.weight_lines.append(f"weight {self.weights[key]} {dtype} {layout} {rows} {cols} @{offset}")
        return self.weights[key]

    def constant(self, name: str) -> ValueType:
        if name not in self.graph.constants:
            raise UnsupportedModelError(f"{name!r} is read as a weight, which no step takes unless it is a constant")
        return self.graph.type_of(name)

    def step(self, kind: str, node: Node, reads: Mapping[str, str], writes: Mapping[str, str], **keys: str) -> None:
        for value in reads.values():
            self.need_made(value, node)
        self.steps.append(_Step(kind, {"name": node.name or node.outputs[0], **keys}, reads, writes))
        for value in writes.values():
            self.values[value] = self.graph.type_of(value)

    def need_made(self, value: str, node: Node) -> None:
        if value not in self.values:
            raise UnsupportedModelError(
                f"node {node.name!r} computes with {value!r}, which no step before it makes; fold constants first"
            )

    def rename(self, value: str, node: Node) -> None:
        """The steps that make a value make the only output of its only reader, ``node``, instead."""
        self.need_made(value, node)
        (output,) = node.outputs
        for index, step in enumerate(self.steps):
            writes = {key: output if name == value else name for key, name in step.writes.items()}
            self.steps[index] = replace(step, writes=writes)
        del self.values[value]
        self.values[output] = self.graph.type_of(output)

    # One method an op, found by name

    def embed_layer_norm(self, node: Node) -> None:
        _, _, word, position, token_type, gamma, beta = node.inputs
        tables = {"word": word, "position": position, "token_type": token_type, "gamma": gamma, "beta": beta}
        self.step(
            "embed",
            node,
            {},
            _outputs(node),
            **{key: self.weight(name, "dense") for key, name in tables.items() if name},
            eps=_real(node.attrs["eps"]),
            offset=str(node.attrs["position_offset"]),
            skip=str(node.attrs["position_skip_id"]),
            **_narrow_keys(node),
        )

    def embedding(self, node: Node) -> None:
        ids, word = node.inputs
        if ids != "token_ids":
            raise UnsupportedModelError(
                f"node {node.name!r}: an embedding of {ids!r} has no step of its own on this backend, as that of token "
                "ids has; it is computed only as part of a fusion, which did not match. See: encast inspect"
            )
        word = self.weight(word, "dense")
        self.step("embed", node, {}, _outputs(node), word=word, eps=_real(0.0), offset="0", skip="-1")

    def layer_norm(self, node: Node) -> None:
        x, gamma, beta = node.inputs
        self._norm(node, {"x": x}, gamma, beta)

    def add_layer_norm(self, node: Node) -> None:
        x, residual, gamma, beta = node.inputs
        self._norm(node, {"x": x, "other": residual}, gamma, beta)

    def rms_norm(self, node: Node) -> None:
        x, gamma = node.inputs
        self._norm(node, {"x": x}, gamma, "")

    def _norm(self, node: Node, reads: Mapping[str, str], gamma: str, beta: str) -> None:
        self.step(
            "norm",
            node,
            reads,
            _outputs(node),
            gamma=self.weight(gamma, "dense"),
            **({"beta": self.weight(beta, "dense")} if beta else {}),
            eps=_real(node.attrs["eps"]),
            **_narrow_keys(node),
        )

    def linear(self, node: Node) -> None:
        self._linear(node, "f32", node.inputs[1], _operand(node, 2))

    def linear_bf16(self, node: Node) -> None:
        self._linear(node, "bf16", node.inputs[1], _operand(node, 2))

    def linear_int8(self, node: Node) -> None:
        weight, scale, bias, blocks = node.inputs[1], node.inputs[2], _operand(node, 3), blocks_beside(node.inputs)
        dense_rows = None
        if blocks:
            whole, left = (math.prod(map(int, self.constant(name).shape)) for name in (weight, blocks[0]))
            dense_rows = self.target.dense_rows(left / whole, self.product_bytes)
        if dense_rows is None:
            self._linear(node, "q8", weight, bias, scale=scale)
            return
        both = {"dense": self.weight(weight, "panels"), "dense_rows": str(dense_rows)} if dense_rows else {}
        self._sparse(node, blocks, scale, f"{weight}.colsum", bias, both)

    def _linear(self, node: Node, dtype: str, weight: str, bias: str, scale: str = "") -> None:
        parts = self._parts(node)
        activation = node.attrs["activation"]
        coarse = activation in COARSE_ACTIVATIONS.values()
        for part in range(parts):
            vectors = {"coarse": "1"} if coarse else {}
            if scale:
                colsum = self.weight(scale, "padded", stored=f"{weight}.colsum", part=part, parts=parts)
                vectors |= {"scale": self.weight(scale, "padded", part=part, parts=parts), "colsum": colsum}
            if bias:
                vectors["bias"] = self.weight(bias, "padded", part=part, parts=parts)
            if parts > 1:
                width = self.graph.type_of(weight).shape[0]
                assert isinstance(width, int)
                vectors["column"] = str(width // parts * part)
            self.step(
                "linear",
                replace(node, name=f"{node.name}.{'qkv'[part]}") if parts > 1 else node,
                {"x": node.inputs[0]},
                _outputs(node),
                w=self.weight(weight, "panels", part=part, parts=parts),
                act=activation.removesuffix("_coarse"),
                arithmetic=self.target.gemm[dtype],
                **vectors,
            )

    def linear_sparse_int8(self, node: Node) -> None:
        _, *blocks, sums, scale = node.inputs[:6]
        self._sparse(node, blocks, scale, sums, _operand(node, 6), {})

    def _sparse(
        self, node: Node, blocks: Sequence[str], scale: str, sums: str, bias: str, both: Mapping[str, str]
    ) -> None:
        """``sums``: the stored ones. ``both``: the keys that a product has whose weight is there in panels too."""
        values, columns, starts = blocks
        activation = node.attrs["activation"]
        self.step(
            "sparse",
            node,
            {"x": node.inputs[0]},
            _outputs(node),
            w=self.weight(values, "dense"),
            columns=self.weight(columns, "dense"),
            starts=self.weight(starts, "dense"),
            scale=self.weight(scale, "padded"),
            colsum=self.weight(scale, "padded", stored=sums),
            **({"bias": self.weight(bias, "padded")} if bias else {}),
            **({"coarse": "1"} if activation in COARSE_ACTIVATIONS.values() else {}),
            act=activation.removesuffix("_coarse"),
            arithmetic="s8",
            **both,
        )

    def _parts(self, node: Node) -> int:
        """Three for the projection of queries, keys and values when they are to be products of their own."""
        if "qkv_fusion" not in self.target.without:
            return 1
        width = self.graph.type_of(node.outputs[0]).shape[1]
        read = any(user.op in _READS_QKV and user.inputs[0] == node.outputs[0] for user in self.graph.nodes)
        return 3 if read and isinstance(width, int) and width % (3 * _core.PANEL) == 0 else 1

    def attention(self, node: Node) -> None:
        bias = "" if node.op == "local_attention" else _operand(node, 1)
        self.step(
            "attention",
            node,
            {"x": node.inputs[0]},
            _outputs(node),
            heads=str(node.attrs["heads"]),
            factor=_real(node.attrs["scale"]),
            arithmetic=self.target.attention[node.attrs["products"]],
            **({"bias": self.weight(bias, "dense")} if bias else {}),
            **({"reach": str(node.attrs["reach"])} if "reach" in node.attrs else {}),
            **self.hidden_keys(_operand(node, 1 if node.op == "local_attention" else 2), node),
        )

    def hidden_keys(self, seen: str, node: Node) -> dict[str, str]:
        """Which keys an attention hides: what the op says that counts those it sees."""
        if not seen:
            return {}
        if seen not in self.counts:
            raise UnsupportedModelError(f"node {node.name!r} sees {seen!r} keys, which no seen_tokens counts")
        return {"unseen": str(self.counts[seen]["token"]), "most_unseen": str(self.counts[seen]["most"])}

    def seen_tokens(self, node: Node) -> None:
        self.counts[node.outputs[0]] = node.attrs

    def local_attention(self, node: Node) -> None:
        self.attention(node)

    def disentangled_attention(self, node: Node) -> None:
        tables = {"key_table": _operand(node, 1), "query_table": _operand(node, 2)}
        self.step(
            "attention",
            node,
            {"x": node.inputs[0]},
            _outputs(node),
            heads=str(node.attrs["heads"]),
            factor=_real(node.attrs["scale"]),
            arithmetic=self.target.attention[node.attrs["products"]],
            **{key: self.weight(name, "dense") for key, name in tables.items() if name},
            **({"shared_tables": "1"} if node.attrs["shared"] else {}),
        )

    def window_rows(self, node: Node) -> None:
        self.step("window", node, {"x": node.inputs[0]}, _outputs(node))

    def rotary_qkv(self, node: Node) -> None:
        qkv, table = node.inputs
        if self.readers[qkv] != 1:
            raise UnsupportedModelError(f"node {node.name!r} turns {qkv!r} in place, which others read too")
        self.rename(qkv, node)
        x = {"x": node.outputs[0]}
        heads = str(node.attrs["heads"])
        self.step("rotary", node, x, _outputs(node), table=self.weight(table, "dense"), heads=heads)

    def quantize(self, node: Node) -> None:
        zero_point = str(int(node.attrs["zero_point"]))
        self.step("narrow", node, {"x": node.inputs[0]}, _outputs(node), zero_point=zero_point)

    def quantize_static(self, node: Node) -> None:
        keys = _fixed_keys(node.attrs)
        self.step("narrow", node, {"x": node.inputs[0]}, _outputs(node), zero_point="0", **keys)

    def cast_bf16(self, node: Node) -> None:
        x = node.inputs[0]
        makers = [i for i, step in enumerate(self.steps) if x in step.writes.values()]
        fused = "epilogue_fusion" not in self.target.without and self.readers[x] == 1
        if fused and makers and all(self.steps[maker].kind == "linear" for maker in makers):
            self.rename(x, node)  # a product rounds in registers what nobody reads wider
            return
        self.step("narrow", node, {"x": node.inputs[0]}, _outputs(node), zero_point="0")

    def activation(self, node: Node) -> None:
        self.step("elementwise", node, {"x": node.inputs[0]}, _outputs(node), factor="1", act=node.attrs["kind"])

    def gated_activation(self, node: Node) -> None:
        self.step("gated", node, {"x": node.inputs[0]}, _outputs(node), act=node.attrs["kind"], **_narrow_keys(node))

    def add(self, node: Node) -> None:
        a, b = node.inputs
        if self.product_adds(a, b, node) or self.product_adds(b, a, node):
            return
        self.step("elementwise", node, {"x": a, "other": b}, _outputs(node), factor="1", act="none")

    def product_adds(self, made: str, other: str, node: Node) -> bool:
        """Lets the product that makes a value which only ``node`` reads add one that was made before."""
        makers = {value: index for index, step in enumerate(self.steps) for value in step.writes.values()}
        if self.readers[made] != 1 or not makers.get(other, len(self.steps)) < makers.get(made, 0):
            return False
        step = self.steps[makers[made]]
        apart = not {"epilogue_fusion", "norm_fusion"}.isdisjoint(self.target.without)
        if apart or step.kind not in {"linear", "sparse"} or "column" in step.keys or "other" in step.reads:
            return False
        self.steps[makers[made]] = replace(step, reads={**step.reads, "other": other})
        self.rename(made, node)
        return True

    def scale(self, node: Node) -> None:
        factor = _real(node.attrs["factor"])
        self.step("elementwise", node, {"x": node.inputs[0]}, _outputs(node), factor=factor, act="none")

    def pooling(self, node: Node) -> None:
        width = self.graph.type_of(node.inputs[0]).shape[1]
        assert isinstance(width, int)
        for index, mode in enumerate(node.attrs["modes"]):
            self.step("pool", node, {"x": node.inputs[0]}, _outputs(node), mode=mode, column=str(index * width))

    def first_token(self, node: Node) -> None:
        self.step("first", node, {"x": node.inputs[0]}, _outputs(node))

    def select_rows(self, node: Node) -> None:
        self.step("select", node, {"x": node.inputs[0]}, _outputs(node))

    def normalize(self, node: Node) -> None:
        self.step("normalize", node, {"x": node.inputs[0]}, _outputs(node))

    def concat(self, node: Node) -> None:
        column = 0
        for operand in filter(None, node.inputs):
            part = {"factor": "1", "act": "none", **({"column": str(column)} if column else {})}
            self.step("elementwise", node, {"x": operand}, _outputs(node), **part)
            width = self.graph.type_of(operand).shape[1]
            assert isinstance(width, int)
            column += width

    # The whole

    def stages(self) -> list[_Stage]:
        """The steps cut into the stages that core/runtime/plan.h defines, as long as they may be."""
        stages: list[_Stage] = []
        for index, step in enumerate(self.steps):
            if step.kind == "attention":
                if self.by_heads(index):
                    stages[-1].steps.pop()
                    if not stages[-1].steps:
                        stages.pop()
                    stages.append(_Stage("heads", [index - 1, index]))
                else:
                    stages.append(_Stage("sequences", [index]))
            elif stages and stages[-1].kind == "rows" and self.may_follow(stages[-1].steps, step):
                stages[-1].steps.append(index)
            else:
                stages.append(_Stage("rows", [index]))
        return stages

    def may_follow(self, steps: list[int], step: _Step) -> bool:
        """Whether a step may stand in one stage of rows with the steps before it."""
        if step.kind == "window" and any(step.reads["x"] in self.steps[index].writes.values() for index in steps):
            return False  # it reads rows of other tokens, which another thread may be making
        return self.made_rows(self.steps[steps[-1]]) == self.made_rows(step)

    def by_heads(self, index: int) -> bool:
        """Whether an attention shares a stage of heads with the product before it."""
        if self.target.head_tokens == 0 or self.uses_tiles() or not _APART.isdisjoint(self.target.without):
            return False
        product, attention = self.steps[index - 1], self.steps[index]
        x, heads = attention.reads["x"], int(attention.keys["heads"])
        width = self.values[x].shape[1]
        assert isinstance(width, int)
        alone = product.kind in ("linear", "sparse") and "other" not in product.reads
        made = index > 0 and alone and product.writes["out"] == x and self.readers[x] == 1
        return made and _core.heads_fill_panels(heads, width // 3 // heads)

    def uses_tiles(self) -> bool:
        products = {step.keys["arithmetic"] for step in self.steps if step.kind == "linear"}
        return self.target.tiles and not products.isdisjoint(TILE_CLASSES)

    def made_rows(self, step: _Step) -> str:
        return str(self.values[step.writes["out"]].shape[0])

    def places(self, stages: list[_Stage], chunk: int) -> tuple[dict[str, str], int, int]:
        """The place of every value as the plan spells it, the bytes of the arena and of 16 rows of a block."""
        of_step = [number for number, stage in enumerate(stages) for _ in stage.steps]
        uses: dict[str, list[int]] = {}
        for index, step in enumerate(self.steps):
            for value in (*step.reads.values(), *step.writes.values()):
                uses.setdefault(value, []).append(index)
        read = {value for step in self.steps for value in step.reads.values()}
        # A step with two outputs also runs for the sake of the other one, when nobody gives memory for the first.
        sole = {value for step in self.steps if len(step.writes) == 1 for value in step.writes.values()}
        outputs = set(self.graph.outputs.values())
        outside = {value for value in outputs if value not in read and value in sole}
        # Only stages of rows take blocks.
        within = {
            value: of_step[used[0]] == of_step[used[-1]]
            and stages[of_step[used[0]]].kind == "rows"
            and value not in outputs
            for value, used in uses.items()
            if value not in outside
        }
        block = [value for value, local in within.items() if local]
        arena = [value for value, local in within.items() if not local]
        block_spans = [Lifetime(_nbytes(self.values[v], _core.BLOCK_UNIT), uses[v][0], uses[v][-1]) for v in block]
        shared = self.in_place(arena, uses, stages, of_step)
        arena_spans = [
            Lifetime(_nbytes(self.values[group[0]], chunk), of_step[uses[group[0]][0]], of_step[uses[group[-1]][-1]])
            for group in shared
        ]
        block_offsets, block_bytes = place_values(block_spans)
        arena_offsets, arena_bytes = place_values(arena_spans)
        spelled = dict.fromkeys(outside, "-")
        spelled |= {value: f"+{offset}" for value, offset in zip(block, block_offsets, strict=True)}
        spelled |= {value: str(offset) for group, offset in zip(shared, arena_offsets, strict=True) for value in group}
        return spelled, arena_bytes, block_bytes

    def in_place(
        self, arena: Sequence[str], uses: Mapping[str, Sequence[int]], stages: Sequence[_Stage], of_step: Sequence[int]
    ) -> list[list[str]]:
        """The values of the arena in groups that share a place, each made over the one before it.

        A stage of rows makes a value where one of the same type lies that no later step reads: its rows, which the
        thread has just read, are still in the core's cache. Elsewhere they would come from memory to be overwritten.
        """
        windows = {step.reads["x"] for step in self.steps if step.kind == "window"}  # of other rows too
        groups: list[list[str]] = []
        for value in sorted(arena, key=lambda value: uses[value][0]):
            made, stage = uses[value][0], of_step[uses[value][0]]
            over = [
                group
                for group in groups
                if stages[stage].kind == "rows"
                and self.values[group[-1]] == self.values[value]
                and group[-1] not in windows
                and of_step[uses[group[-1]][-1]] == stage
                and uses[group[-1]][-1] < made
            ]
            if over:
                max(over, key=lambda group: uses[group[-1]][-1]).append(value)
            else:
                groups.append([value])
        return groups

    def lines(self) -> list[str]:
        meta = self.graph.meta
        chunk = max(self.target.chunk_tokens, meta.max_len)
        ids = {value: f"v{index}" for index, value in enumerate(self.values)}
        stages = self.stages()
        place, arena, block = self.places(stages, chunk)
        head_tokens = self.target.head_tokens if any(stage.kind == "heads" for stage in stages) else 0
        tiles = self.uses_tiles()
        sparse = any(step.kind == "sparse" for step in self.steps)
        block_rows = self.target.rows_of_block(block / _core.BLOCK_UNIT, tiles, sparse)
        stream_rows = self.target.rows_to_stream(self.product_bytes, tiles, sparse)
        if "row_blocks" in self.target.without:
            block_rows = stream_rows = -(-chunk // _core.BLOCK_UNIT) * _core.BLOCK_UNIT
        lines = ["encast-plan 1"]
        lines.append(
            f"limits vocab={meta.vocab} types={meta.type_vocab} max_len={meta.max_len} "
            f"chunk_tokens={chunk} arena={arena} block_rows={block_rows} "
            f"stream_rows={stream_rows} head_tokens={head_tokens} block={block} "
            f"exact={int(meta.math == 'exact')}"
        )
        lines += self.weight_lines
        for value, type in self.values.items():
            lines.append(f"value {ids[value]} {type.dtype} {type.shape[0]} {type.shape[1]} @{place[value]}")
        for stage in stages:
            lines.append(f"stage {stage.kind}")
            for step in map(self.steps.__getitem__, stage.steps):
                keys = {**step.keys, **{key: ids[value] for key, value in (*step.reads.items(), *step.writes.items())}}
                lines.append(f"step {step.kind} " + " ".join(f"{key}={text}" for key, text in keys.items()))
        lines += [f"output {public} {ids[value]}" for public, value in self.graph.outputs.items()]
        return lines


def lower(graph: Graph, tensors: Mapping[str, StoredTensor], target: Target) -> str:
    """The plan's text for a target.

    ``tensors`` gives the place of every stored tensor by name. Raises ``UnsupportedModelError`` for a node
    that no step computes: its fusion was missed.
    """
    graph = unfuse(graph, target.without) if target.without else graph
    lowering = _Lowering(graph, tensors, target)
    for node in graph.nodes:
        if not has_steps(node.op):
            raise UnsupportedModelError(
                f"node {node.name!r}: {node.op} has no step of its own on this backend; it is computed only as part of "
                "a fusion, which did not match. See: encast inspect"
            )
        getattr(lowering, _method_of(node.op))(node)
    return "\n".join(lowering.lines()) + "\n"


def has_steps(op: str) -> bool:
    """Whether lowering has steps for an op of the table of ops."""
    return hasattr(_Lowering, _method_of(op))


def _product_bytes(graph: Graph) -> int:
    """Of the weights of all products; of one that has two forms those of the dense one."""
    operands = {"linear": 1, "linear_bf16": 1, "linear_int8": 1, "linear_sparse_int8": 2}
    names = {name for node in graph.nodes for name in node.inputs[1 : operands.get(node.op, 0) + 1]}
    types = [graph.type_of(name) for name in sorted(names & graph.constants.keys())]
    return sum(math.prod(map(int, type.shape)) * _core.element_bytes(type.dtype) for type in types)


def _method_of(op: str) -> str:
    return op.removesuffix("_narrow")


def _operand(node: Node, index: int) -> str:
    return node.inputs[index] if index < len(node.inputs) else ""


def _outputs(node: Node) -> dict[str, str]:
    return dict(zip(("out", "also"), node.outputs, strict=False))


def _narrow_keys(node: Node) -> dict[str, str]:
    also = node.attrs.get("also")
    if isinstance(also, dict):
        return _fixed_keys(also)
    return {"zero_point": "1"} if also == "q8_zero_point" else {}


def _fixed_keys(attrs: Mapping[str, Any]) -> dict[str, str]:
    """The keys of ``quantize_static``."""
    return {"q8_scale": _real(attrs["scale"]), "q8_zero": str(attrs["zero_point"])}


def _real(value: float) -> str:
    """Shortest text that reads back as the same double, and so as the same f32 after one rounding."""
    return repr(float(value))


def _nbytes(type: ValueType, rows: int) -> int:
    """Bytes of a value in memory."""
    cols = type.shape[1]
    assert isinstance(cols, int)
    return _core.value_bytes(type.dtype, rows, cols)
