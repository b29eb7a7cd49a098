"""Small artifacts for tests, and ways to damage them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphs import masked_lm

from encast import artifact
from encast.artifact.card import seal
from encast.ir import Graph
from encast.passes import optimise
from encast.quant import QuantSpec

__all__ = ["CARD", "FILES", "TOKENIZER", "compiled_graph", "edit_card", "refresh", "write_artifact"]

FILES = ("card.json", "graph.json", "tokenizer.json", "weights.safetensors")
TOKENIZER = '{"version": "1.0", "words": ["größe"' + ', "word"' * 40 + "]}"


def compiled_graph(dtype: str = "int8") -> tuple[Graph, dict[str, Any]]:
    """Sizes that are no multiple of anything, so that every kind of padding occurs."""
    spec = QuantSpec(dtype)
    graph, report = optimise(masked_lm(hidden=30, heads=2, inner=50, vocab=70), spec, strict=True)
    return graph, {"source": {"source": "tests"}, "quant": spec.to_json(), "fusions": report.to_json(), "dtype": dtype}


CARD = compiled_graph()[1]


def write_artifact(out: Path, dtype: str = "int8", **options: Any) -> Path:
    graph, card = compiled_graph(dtype)
    return artifact.write(out, graph, TOKENIZER, card, **options)


def edit_card(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a card and seals it again, as somebody would who knows how."""
    card = json.loads((path / "card.json").read_bytes())
    change(card)
    (path / "card.json").write_bytes(seal(card))


def refresh(path: Path, name: str, data: bytes) -> None:
    """Replaces graph, tokenizer or the weights' header (``weights.safetensors header``) and its checksum."""
    from encast.artifact.card import checksum, hexadecimal

    if name.endswith(" header"):
        weights = path / "weights.safetensors"
        old = weights.read_bytes()
        weights.write_bytes(data + old[8 + int.from_bytes(old[:8], "little") :])
    else:
        (path / name).write_bytes(data)
    edit_card(path, lambda card: card["files"].update({name: hexadecimal(checksum(data))}))
