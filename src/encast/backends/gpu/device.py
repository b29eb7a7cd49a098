"""Which device a name stands for, and whether it can be used."""

from __future__ import annotations

import torch

from encast.errors import InputError, ResourceError, install_hint

__all__ = ["DTYPES", "choose_device", "stored_dtype"]

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def choose_device(kind: str, index: int | None) -> torch.device:
    """``kind``: "cuda" or "torch-cpu". Raises ``ResourceError`` where there is no such card, with the reason."""
    if kind == "torch-cpu":
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise ResourceError(
            f"device 'cuda': this PyTorch ({torch.__version__}) is built without CUDA; install one that is "
            f"({install_hint('cuda')}), or choose the device 'cpu'"
        )
    count = torch.cuda.device_count()
    if count == 0:
        raise ResourceError(
            "device 'cuda': PyTorch finds no CUDA card (nvidia-smi shows what the driver sees, CUDA_VISIBLE_DEVICES "
            "may hide cards); choose the device 'cpu'"
        )
    if index is not None and index >= count:
        raise ResourceError(f"device 'cuda:{index}': there are cards 0 to {count - 1}")
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def stored_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """Raises ``InputError`` for an unknown dtype, ``ResourceError`` for one that the card does not compute."""
    if name is None:
        return torch.float32
    if name not in DTYPES:
        raise InputError(f"dtype is {name!r}; {', '.join(map(repr, DTYPES))} are known, or None: as it was compiled")
    if name == "bf16":
        need_bf16(device)
    return DTYPES[name]


def need_bf16(device: torch.device) -> None:
    """Raises ``ResourceError`` on a card without products of bf16."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise ResourceError(
            f"{torch.cuda.get_device_name(device)} has no products of bf16 (compute capability 8.0 has); compile to "
            "f32 and give dtype='f16'"
        )
