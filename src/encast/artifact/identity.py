"""What tells artifacts with different answers apart."""

from __future__ import annotations

import hashlib
import json

from encast.artifact.card import MUTABLE
from encast.artifact.open import Artifact

__all__ = ["artifact_sha"]

_NOT_FIXED = {"checksum", "created", "encast_version", "source", *MUTABLE}
"""Of a card."""


def artifact_sha(artifact: Artifact) -> str:
    """SHA-256 over everything that is fixed at compile: the checksums of graph, tokenizer and every tensor, and what
    the card says of texts and answers. Two compilations of the same checkpoint in the same way have the same.
    """
    fixed = {name: value for name, value in artifact.card.items() if name not in _NOT_FIXED}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()
