"""JSON without the liberties of the standard parser."""

from __future__ import annotations

import json
from typing import Any

from encast.errors import ArtifactError

__all__ = ["parse_json"]


def parse_json(data: bytes, where: str) -> Any:
    """Parses UTF-8 JSON; raises ``ArtifactError`` on malformed text, repeated keys, NaN and endless nesting."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
        return made

    def refuse(text: str) -> None:
        raise ValueError(f"{text} is no JSON number")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{where} is not well-formed JSON: {error}") from None
