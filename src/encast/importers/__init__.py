"""Importers: from a checkpoint folder or hub id to configuration, lazy tensors, modules and tokenizer."""

from encast.importers.adapters import NO_ADAPTER
from encast.importers.checkpoint import Checkpoint, checkpoint_name, open_checkpoint
from encast.importers.sentence_modules import DenseModule, SentenceModules
from encast.importers.tokenizer import TokenizerFiles
from encast.importers.weights import TensorSource

__all__ = [
    "NO_ADAPTER",
    "Checkpoint",
    "DenseModule",
    "SentenceModules",
    "TensorSource",
    "TokenizerFiles",
    "checkpoint_name",
    "open_checkpoint",
]
