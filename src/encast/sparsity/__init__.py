"""Zeros in weights: the patterns in which they lie, and making them by magnitude."""

from encast.sparsity.checkpoint import PrunedWeight, prune_checkpoint
from encast.sparsity.magnitude import magnitude_mask
from encast.sparsity.pattern import Pattern

__all__ = ["Pattern", "PrunedWeight", "magnitude_mask", "prune_checkpoint"]
