"""What a card is, and what it can do at most: for ``encast doctor`` and the limit of ``encast bench``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial

import torch

from encast.backends.devices import CARD_DTYPES
from encast.backends.gpu.device import (
    card_name,
    choose_device,
    need_bf16,
    need_f8,
    need_half_sums,
    need_int8,
    why_no_triton,
)
from encast.ceilings.card import CardCeilings
from encast.errors import ResourceError

__all__ = ["Card", "describe", "measure", "product_rates"]

_ROUNDS, _PRODUCTS = 5, 10
_SIZE, _SIZE_ON_CPU = 8192, 256
_COPIED, _COPIED_ON_CPU = 1 << 30, 1 << 22


@dataclass(frozen=True)
class Card:
    """``dtypes``: what it multiplies; ``without``: the others, each with the reason. ``without_triton``: why its
    kernels do not run, or None. ``capability`` and the bytes of memory are None for the CPU."""

    name: str
    capability: str | None
    memory_bytes: int | None
    free_bytes: int | None
    torch: str
    cuda: str | None
    dtypes: tuple[str, ...]
    without: dict[str, str]
    without_triton: str | None


def describe(kind: str, index: int | None) -> Card:
    """Of the device "cuda" or "torch-cpu". Raises ``ResourceError`` where there is none, with the reason."""
    device = choose_device(kind, index)
    without: dict[str, str] = {}
    for dtype, need in (("bf16", need_bf16), ("f8", need_f8), ("f16-acc16", need_half_sums), ("int8", need_int8)):
        try:
            need(device)
        except ResourceError as error:
            without[dtype] = str(error)
    free, total, capability, why = None, None, None, None
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        why = why_no_triton(device)
    dtypes = tuple(dtype for dtype in (*CARD_DTYPES, "int8") if dtype not in without)
    return Card(card_name(device), capability, total, free, torch.__version__, torch.version.cuda, dtypes, without, why)


def measure(kind: str, index: int | None) -> CardCeilings:
    """Some seconds on a card. Raises ``ResourceError`` where there is none, and where its memory is taken."""
    device = choose_device(kind, index)
    on_card = device.type == "cuda"
    try:
        rates = product_rates(device, _SIZE if on_card else _SIZE_ON_CPU)
        numbers = torch.empty((_COPIED if on_card else _COPIED_ON_CPU) // 4, device=device)
        other = torch.empty_like(numbers)
        copy = _seconds(device, partial(other.copy_, numbers))
    except torch.OutOfMemoryError:
        raise ResourceError(f"{device}: no memory is left to measure with; free the card of other models") from None
    now = datetime.now(timezone.utc).replace(microsecond=0)
    return CardCeilings(card_name(device), now, rates, 8 * numbers.numel() / copy)


def product_rates(device: torch.device, size: int) -> dict[str, float]:
    """Multiplications and additions a second of a product of ``size`` cubed by PyTorch's library, by dtype.

    The median of five rounds of ten. A dtype that this PyTorch or device has no product of is absent.
    """
    found = {}
    for dtype, run in _products(device, size):
        try:
            found[dtype] = 2 * size**3 / _seconds(device, run)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            if dtype in ("f32", "f16"):  # which all cards have
                raise
    return found


def _products(device: torch.device, size: int) -> Iterator[tuple[str, Callable[[], object]]]:
    wide = [torch.randn(size, size, device=device) for _ in range(2)]
    for name, dtype in (("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)):
        x, y = (one.to(dtype) for one in wide)
        yield name, partial(torch.matmul, x, y.t())
    x, y = (one.to(torch.float8_e4m3fn) for one in wide)
    one = torch.ones((), device=device)
    yield "f8", partial(torch._scaled_mm, x, y.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    x, y = (torch.randint(-127, 128, (size, size), device=device, dtype=torch.int8) for _ in range(2))
    yield "int8", partial(torch._int_mm, x, y.t())


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Of one run: the median of rounds, after one that warms up."""
    times = []
    for _ in range(_ROUNDS + 1):
        begin = time.perf_counter()
        for _ in range(_PRODUCTS):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - begin) / _PRODUCTS)
    return statistics.median(times[1:])
