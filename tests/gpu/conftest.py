"""Tests of the GPU backend run on the CPU, by PyTorch; without PyTorch they are skipped."""

from importlib.util import find_spec

if find_spec("torch") is not None:
    import torch

    # Thousands of tiny products, on which threads only wait for each other.
    torch.set_num_threads(1)
