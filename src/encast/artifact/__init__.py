"""The compiled model on disk: a folder with graph, packed weights, tokenizer and card."""

from encast.artifact.card import update_card
from encast.artifact.identity import artifact_sha
from encast.artifact.open import Artifact, open
from encast.artifact.safetensors import StoredTensor
from encast.artifact.write import check_target, replace, write

__all__ = ["Artifact", "StoredTensor", "artifact_sha", "check_target", "open", "replace", "update_card", "write"]
