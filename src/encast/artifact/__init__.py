"""The compiled model on disk: a folder with graph, packed weights, tokenizer and card."""

from encast.artifact.card import MUTABLE, update_card
from encast.artifact.open import Artifact, open
from encast.artifact.safetensors import StoredTensor
from encast.artifact.write import check_target, replace, write

__all__ = ["MUTABLE", "Artifact", "StoredTensor", "check_target", "open", "replace", "update_card", "write"]
