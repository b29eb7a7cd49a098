"""Training: fine-tune, prune in blocks, distil and quantise, by a recipe; each stage ends in an ordinary checkpoint."""
