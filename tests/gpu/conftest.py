"""Tests of the GPU backend run on the CPU, by PyTorch, or on a card; without PyTorch they are skipped."""

import os
from importlib.util import find_spec

if find_spec("torch") is not None:
    import torch

    # Thousands of tiny products, on which threads only wait for each other.
    torch.set_num_threads(1)

on_the_cpu = os.environ.get("ENCAST_TEST_DEVICE", "torch-cpu") == "torch-cpu"
if on_the_cpu and find_spec("triton") is not None and "TRITON_INTERPRET" not in os.environ:
    # Triton asks when it is imported. For this process alone: what tests start finds Triton as ever.
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    del os.environ["TRITON_INTERPRET"]
    triton.knobs.runtime.interpret = True
