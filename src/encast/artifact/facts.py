"""The facts of a graph and a card that whoever runs an artifact takes at their word, checked when it is opened.

Checksums tell damage, not lies: a file with right checksums may still come from another program.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from encast.errors import ArtifactError
from encast.ir import Graph
from encast.ir.meta import HEADS, PARTS, SPLADE_ACTIVATIONS, Check, count, is_text, is_token_form, is_tokens, one_of
from encast.ir.types import ValueType

__all__ = ["check_card", "check_graph"]

MAX_NODES = 1 << 15
"""Planning the memory of more would take minutes; 1,024 layers, the most that a checkpoint may have, need a third."""

_INPUTS = {"token_ids": "i32[tokens]", "token_type_ids": "i32[tokens]", "select": "i32[selected]"}


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_prompts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_sizes(value: Any) -> bool:
    return isinstance(value, dict) and all(map(count(0), value.values()))


# Every entry may be absent: cards are also written by tools that know less.
_CARD: Mapping[str, Check] = {
    "tokenizer": _is_table,
    "prompts": _is_prompts,
    "default_prompt": is_text,
    "sizes": _is_sizes,
    "accuracy": _is_table,
    "search": _is_table,
    "verified": _is_table,
    "splade": _is_table,
    "token_form": is_token_form,
    "unweighted": is_tokens,
}
_SPLADE: Mapping[str, Check] = {"activation": one_of(*SPLADE_ACTIVATIONS), "max_active_dims": count(1)}
_TOKENIZER: Mapping[str, Check] = {
    "max_length": count(1),
    "truncation_side": one_of("left", "right"),
    "mask_token": is_text,
}


def check_graph(graph: Graph, path: Path) -> None:
    """Raises ``ArtifactError`` unless a verified graph is one that ``archs`` and ``passes`` could have made."""
    if len(graph.nodes) > MAX_NODES:
        raise ArtifactError(f"{path}: the graph has {len(graph.nodes)} nodes; at most {MAX_NODES} are accepted")
    for node in graph.nodes:
        for name in (node.name, *node.outputs):
            # Names go into the plan, word by word, and to the terminal.
            if not name.isprintable() or " " in name:
                raise ArtifactError(f"{path}: the graph has the name {name!r}; no module has blanks in its name")
    for name, type in graph.inputs.items():
        if _INPUTS.get(name) != str(type):
            raise ArtifactError(f"{path}: the graph has an input {name}: {type}; a batch offers {_INPUTS}")
    _check_outputs(graph, path)


def _check_outputs(graph: Graph, path: Path) -> None:
    meta = graph.meta
    rows = {"last_hidden_state": "tokens"}
    for task in (meta.task, *PARTS.get(meta.task, ())):
        if head := HEADS[task]:
            rows[head[0]] = head[1]
    # Of BGE-M3 a sparse embedding is the weight of each token, of others those of the vocabulary.
    by_token = meta.task == "embed_m3" or (
        meta.task == "embed_sparse"
        and "sparse_embedding" in graph.outputs
        and graph.type_of(graph.outputs["sparse_embedding"]) == ValueType("f32", ("tokens", 1))
    )
    if by_token:
        rows["sparse_embedding"] = "tokens"
    if set(graph.outputs) != set(rows):
        raise ArtifactError(
            f"{path}: the graph has the outputs {sorted(graph.outputs)}; {meta.task} has {sorted(rows)}"
        )
    for name, value in graph.outputs.items():
        type = graph.type_of(value)
        if value not in graph.values or type.dtype != "f32" or len(type.shape) != 2 or type.shape[0] != rows[name]:
            raise ArtifactError(
                f"{path}: output {name!r} is {type} of {value!r}; computed f32[{rows[name]}, ...] is needed"
            )
    if graph.type_of(graph.outputs["last_hidden_state"]) != ValueType("f32", ("tokens", meta.hidden)):
        raise ArtifactError(f"{path}: last_hidden_state is not f32[tokens, {meta.hidden}], as meta says")
    widths = {name: graph.type_of(value).shape[1] for name, value in graph.outputs.items()}
    wanted = {"sparse_embedding": 1 if by_token else meta.vocab}
    if meta.task in ("classify", "tag") and meta.labels:
        wanted["logits"] = len(meta.labels)
    elif meta.task == "answer":
        wanted["logits"] = 2
    elif meta.task == "embed_m3":
        token_dim = widths["token_embedding"]
        assert isinstance(token_dim, int)
        wanted |= {"embedding": meta.hidden, "m3_embedding": token_dim + meta.hidden + 1}
    for name, columns in wanted.items():
        if widths.get(name, columns) != columns:
            raise ArtifactError(f"{path}: {name} has not {columns} columns, as meta says")


def check_card(card: Mapping[str, Any], path: Path) -> None:
    """Raises ``ArtifactError`` for an entry of a card that a run would read and that has another form."""
    tables = (
        (card, _CARD, ""),
        (card.get("tokenizer"), _TOKENIZER, "tokenizer/"),
        (card.get("splade"), _SPLADE, "splade/"),
    )
    for table, checks, where in tables:
        for key, accepts in checks.items():
            value = table.get(key) if isinstance(table, Mapping) else None
            if value is not None and not accepts(value):
                raise ArtifactError(f"{path}: the card's {where}{key} is {value!r}, which no compiled artifact has")
    default = card.get("default_prompt")
    if default is not None and default not in (card.get("prompts") or {}):
        raise ArtifactError(f"{path}: the card's default_prompt is {default!r}, which is not among its prompts")
