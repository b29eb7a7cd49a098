"""Relative positions' part of ``checkpoints``: which configs have them, a layer's table of distances, and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["RELATIVE_CASES", "distance_table", "is_relative"]


def is_relative(config: Mapping[str, Any]) -> bool:
    """Whether a model has vectors of distances in place of a table of positions."""
    return str(config.get("position_embedding_type")).startswith("relative_key")


def distance_table(key: str, spec: Any) -> tuple[str, tuple[int, ...], str]:
    """Name, shape and kind of the vectors of a layer whose key projection is ``key``."""
    return (
        f"{key.rpartition('.')[0]}.distance_embedding.weight",
        (2 * spec.positions - 1, spec.hidden // spec.heads),
        "table",
    )


_KEY = {"config": {"position_embedding_type": "relative_key"}}
_BOTH = {"config": {"position_embedding_type": "relative_key_query"}}
_SMALL = {"layers": 2, "seed": 31, "labels": 2}

RELATIVE_CASES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("bert-relative_key", "bert", "tag", {**_SMALL, **_KEY}),
    ("bert-relative_key-classify", "bert", "classify", {**_SMALL, **_KEY}),
    ("bert-relative_key_query", "bert", "tag", {**_SMALL, **_BOTH}),
    # The longest input is as long as the distances reach; nothing is a multiple of a vector's width.
    (
        "bert-relative-odd",
        "bert",
        "features",
        {**_SMALL, "hidden": 14, "heads": 2, "inner": 50, "vocab": 131, "positions": 40, **_BOTH},
    ),
    # Tasks of two heads, that fill panels; then one head, whose vectors are those of all.
    ("bert-relative-two-tasks", "bert", "tag", {**_SMALL, "layers": 1, "hidden": 128, **_BOTH}),
    ("bert-relative-one-head", "bert", "tag", {**_SMALL, "hidden": 24, "heads": 1, **_BOTH}),
    ("roberta-relative_key_query", "roberta", "tag", {**_SMALL, **_BOTH}),
    ("electra-relative_key", "electra", "tag", {**_SMALL, **_KEY}),
    # ALBERT divides the scores alone; layers of a group share their vectors.
    ("albert-relative_key", "albert", "tag", {**_SMALL, **_KEY}),
    (
        "albert-relative_key_query",
        "albert",
        "features",
        {"layers": 4, "groups": 2, "hidden": 12, "heads": 3, "seed": 32, **_BOTH},
    ),
)
"""Name of a case, architecture, head, and the options of ``make_checkpoint``."""
