"""Importers: from a checkpoint folder or hub id to configuration, lazy tensors, modules and tokenizer."""

from encast.importers.checkpoint import Checkpoint, checkpoint_name, open_checkpoint
from encast.importers.sentence_modules import DenseModule, SentenceModules
from encast.importers.tokenizer import TokenizerFiles
from encast.importers.weights import TensorSource

__all__ = [
    "Checkpoint",
    "DenseModule",
    "SentenceModules",
    "TensorSource",
    "TokenizerFiles",
    "checkpoint_name",
    "open_checkpoint",
]
