"""Zeros in weights: the patterns in which they lie, and making them by magnitude."""

from encast.sparsity.checkpoint import PrunedWeight, prune_checkpoint
from encast.sparsity.magnitude import magnitude_mask
from encast.sparsity.pattern import Pattern
from encast.sparsity.products import product_weights

__all__ = ["Pattern", "PrunedWeight", "magnitude_mask", "product_weights", "prune_checkpoint"]
