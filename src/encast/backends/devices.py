"""The devices of ``encast.load``. A new one is a row of ``DEVICES`` and a function that opens it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from encast.errors import InputError, need_modules

if TYPE_CHECKING:
    from encast.artifact import Artifact
    from encast.backends.base import Runnable
    from encast.backends.groups import Setup

__all__ = [
    "CARD_DTYPES", "DEVICES", "RUNS_A_CARD", "Device", "card_names", "check_cards", "find_device", "find_devices",
    "is_card", "need_card",
]  # fmt: skip

_CARDS = ("cuda", "torch-cpu")

CARD_DTYPES = ("f32", "f16", "bf16", "f8", "f16-acc16")
"""What the values of a card may be stored and multiplied in; ``f16-acc16`` sums products with weights in f16 too."""

RUNS_A_CARD = 2
"""That keep a card busy: while it computes one, the next is made ready."""


@dataclass(frozen=True)
class Device:
    """``open(artifact, **options)`` readies an open artifact. ``options``: those of ``encast.load`` that it takes,
    ``config`` as the ``Setup`` that it says; of a card that is ``batch_tokens`` alone, and ``open`` does without.
    ``begin(artifact)`` begins what may go on beside other work: a context of more options for ``open``.
    """

    open: Callable[..., Runnable]
    options: tuple[str, ...] = ()
    begin: Callable[[Artifact], AbstractContextManager[Mapping[str, Any]]] = lambda _: nullcontext({})


# Imports stand in the functions, so that a device which is not used costs nothing and may lack its packages.


def _open_cpu(artifact: Artifact, *, config: Setup | None = None, **options: Any) -> Runnable:
    from encast.backends.cpu import CpuRunnable

    if config is not None:
        options |= {"groups": config.groups, "shared_cores": config.shared_cores}
    return CpuRunnable(artifact, **options)


@contextmanager
def _begin_cpu(artifact: Artifact) -> Iterator[Mapping[str, Any]]:
    from encast.backends.cpu import Opening

    with Opening(artifact) as opening:
        yield {"opening": opening}


def _open_gpu(artifact: Artifact, kind: str, index: int | None = None, **options: Any) -> Runnable:
    need_modules("cuda", "torch")
    from encast.backends.gpu.runnable import GpuRunnable

    artifact.verify()
    return GpuRunnable(artifact.load_graph(), kind, index=index, **options)


def _open_cards(artifact: Artifact, names: Sequence[str], **options: Any) -> Runnable:
    from encast.backends.cards import Cards

    return Cards(artifact, names, **options)


def _open_reference(artifact: Artifact) -> Runnable:
    from encast.backends.reference import Reference

    artifact.verify()
    return Reference(artifact.load_graph())


DEVICES: Mapping[str, Device] = {
    "cpu": Device(_open_cpu, options=("threads", "instances", "pin", "config"), begin=_begin_cpu),
    "cuda": Device(partial(_open_gpu, kind="cuda"), options=("dtype", "config")),
    "torch-cpu": Device(partial(_open_gpu, kind="torch-cpu"), options=("dtype", "config")),
    "reference": Device(_open_reference),
}


def find_device(name: object, options: Collection[str]) -> Device:
    """The device of that name; raises ``InputError`` for one that is unknown, and for options that it does not take.

    "cuda:1" is the second card.
    """
    kind, colon, index = name.partition(":") if isinstance(name, str) else ("", "", "")
    device = DEVICES.get(kind)
    if device is None or (colon and not (kind == "cuda" and index.isascii() and index.isdigit())):
        known = ", ".join(map(repr, DEVICES))
        raise InputError(f"device is {name!r}; {known} are known, and 'cuda:1' for the second card")
    if colon:
        device = replace(device, open=partial(device.open, index=int(index)))
    for option in options:
        if option not in device.options:
            takes = ", ".join(device.options) or "no options"
            others = [repr(other) for other in ("cpu", "cuda") if option in DEVICES[other].options]
            raise InputError(
                f"the device {name!r} does not take {option}; leave it out (it takes {takes}), or choose the device "
                f"{' or '.join(others)}, which does"
            )
    return device


def find_devices(names: object, options: Collection[str]) -> Device:
    """As ``find_device``, of a name or of a sequence of them: several are cards that run side by side."""
    if not isinstance(names, (list, tuple)):
        return find_device(names, options)
    if not names:
        raise InputError("device is an empty list; name a device, 'cpu' say, or cards: ['cuda:0', 'cuda:1']")
    devices = [find_device(name, options) for name in names]
    if len(names) == 1:
        return devices[0]
    if not is_card(names[0]) or len({name.partition(":")[0] for name in names}) > 1:
        raise InputError(
            f"device is {list(names)}; several devices are cards, 'cuda:0', 'cuda:1', ..., and nothing else beside them"
        )
    _need_distinct(names)
    return replace(devices[0], open=partial(_open_cards, names=names))


def _need_distinct(cards: Sequence[str]) -> None:
    """Raises ``InputError`` for a card that is named twice. "torch-cpu" may be, which tests what several cards do."""
    seen: set[int] = set()
    for name in cards:
        kind, _, index = name.partition(":")
        if kind == "cuda" and int(index or 0) in seen:
            raise InputError(f"device is {name!r}, which is given twice; a card has one instance")
        seen |= {int(index or 0)} if kind == "cuda" else set()


def need_card(name: str) -> tuple[str, int | None]:
    """Kind and index of a card, or of "torch-cpu", which stands for one; raises ``InputError`` for other devices."""
    if not is_card(name):
        raise InputError(f"the device is {name!r}; cuda, cuda:1, ... are cards; leave it out for the processor")
    find_device(name, ())
    kind, _, index = name.partition(":")
    return kind, int(index) if index else None


def is_card(name: str) -> bool:
    """Whether it names a kind of card, or "torch-cpu", which stands for one."""
    return name.partition(":")[0] in _CARDS


def check_cards(devices: Sequence[str], dtype: str | None, who: str) -> None:
    """Raises ``InputError`` unless instances can run on these devices of ``encast.load``; ``who`` takes them."""
    for name in devices:
        if not is_card(name):
            raise InputError(f"device is {name!r}; {who} takes cuda, cuda:1, ..., and without any runs on the CPU")
        find_device(name, () if dtype is None else ("dtype",))
    _need_distinct(devices)
    if dtype not in (None, *CARD_DTYPES):
        raise InputError(f"the card's dtype is {dtype!r}; one of {', '.join(CARD_DTYPES)} is needed")


def card_names(devices: Sequence[str]) -> tuple[str, ...]:
    """What the cards of these devices are called. Raises ``InputError`` without PyTorch, ``ResourceError`` where a card
    is not there.
    """
    need_modules("cuda", "torch")
    from encast.backends.gpu.device import card_name, choose_device

    return tuple(card_name(choose_device(*need_card(name))) for name in devices)
