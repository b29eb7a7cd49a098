"""Which device a name stands for, and whether it can be used."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from encast.backends.devices import CARD_DTYPES
from encast.errors import InputError, ResourceError, install_hint

__all__ = [
    "DTYPES",
    "card_name",
    "choose_device",
    "first_line",
    "need_bf16",
    "need_f8",
    "need_half_sums",
    "need_int8",
    "runs_products",
    "stored_dtype",
    "why_no_triton",
]

DTYPES = dict(
    zip(CARD_DTYPES, (torch.float32, torch.float16, torch.bfloat16, torch.float16, torch.float16), strict=True)
)
"""What values are stored in between steps, by the option ``dtype``."""


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


def card_name(device: torch.device) -> str:
    """Of the card; the CPU that stands for one has a name too."""
    return "the CPU, by PyTorch" if device.type == "cpu" else str(torch.cuda.get_device_name(device))


def stored_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """Raises ``InputError`` for an unknown dtype, ``ResourceError`` for one that the card does not compute."""
    if name is None:
        return torch.float32
    if name not in DTYPES:
        raise InputError(f"dtype is {name!r}; {', '.join(map(repr, DTYPES))} are known, or None: as it was compiled")
    if name == "bf16":
        need_bf16(device)
    if name == "f8":
        need_f8(device)
    if name == "f16-acc16":
        need_half_sums(device)
    return DTYPES[name]


def need_bf16(device: torch.device) -> None:
    """Raises ``ResourceError`` on a card without products of bf16."""
    _need_capability(device, (8, 0), "bf16", "give dtype='f16'")


def need_f8(device: torch.device) -> None:
    """Raises ``ResourceError`` on a card that the kernels for products of f8 do not run on."""
    if device.type == "cuda" and not runs_products(device):
        have = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise ResourceError(
            f"dtype 'f8' needs a card of compute capability 9.0 or 10.x, {torch.cuda.get_device_name(device)} has "
            f"{have}; give dtype='f16'"
        )
    if device.type == "cuda" and (why := why_no_triton(device)) is not None:
        raise ResourceError(f"dtype 'f8': {why}; mend that, or give dtype='f16'")


def need_half_sums(device: torch.device) -> None:
    """Raises ``ResourceError`` on a card on which PyTorch sums products of f16 in f32 whatever it is told."""
    _need_capability(device, (7, 0), "f16 with sums in f16", "give dtype='f16'")


def runs_products(device: torch.device) -> bool:
    """Whether the kernel of ``kernels/product.py`` runs: from compute capability 9.0 on, with shared memory for its
    tiles, which the cards of 12.x lack."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False
    return bool(torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 227 << 10)


def need_int8(device: torch.device) -> None:
    """Raises ``ResourceError`` on a card without products of int8."""
    _need_capability(device, (7, 5), "int8", "compile to f32 and give dtype='f16'")


def _need_capability(device: torch.device, least: tuple[int, int], dtype: str, remedy: str) -> None:
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < least:
        have, want = (".".join(map(str, one)) for one in (found, least))
        raise ResourceError(
            f"{torch.cuda.get_device_name(device)} (compute capability {have}) has no products of {dtype}, which need "
            f"{want}; {remedy}"
        )


def why_no_triton(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on the card, or None: they can."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if (found := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"Triton needs compute capability 8.0, the card has {found[0]}.{found[1]}"
    from encast.backends.gpu.kernels.driver import start_driver

    try:
        start_driver()
    except Exception as error:
        return f"Triton's driver does not work, it needs a C compiler and Python's headers: {first_line(error)}"
    return None


def first_line(error: Exception) -> str:
    """What it says, or its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
