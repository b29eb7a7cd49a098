"""Architectures: from a checkpoint to a graph of plain ops, one file an architecture.

A file in this folder that registers an architecture (``encast.archs.base.architecture``) is all that it takes.
"""

from encast.archs.base import TASKS, build_graph, m3_of, model_types, need_transformers

__all__ = ["TASKS", "build_graph", "m3_of", "model_types", "need_transformers"]
