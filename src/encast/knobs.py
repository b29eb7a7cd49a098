"""The one list of environment variables that encast reads.

Arguments of functions and options of the command line go before a knob, a knob goes before what encast
would choose.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar, overload

from encast.errors import InputError

__all__ = ["KNOBS", "Knob", "get"]

T = TypeVar("T")


@dataclass(frozen=True)
class Knob(Generic[T]):
    """An environment variable with its type, its default and what it is for."""

    name: str
    default: T
    accepts: str  # completes "NAME accepts ..."
    doc: str
    parse: Callable[[str], T]  # raises ValueError

    def read(self, environ: Mapping[str, str] | None = None) -> T:
        """The variable's value, or the default when it is unset or empty.

        ``environ`` stands for ``os.environ`` when given. Raises ``InputError`` on a value that is not accepted.
        """
        text = (os.environ if environ is None else environ).get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise InputError(
                f"{self.name}={text!r} in the environment: {self.name} accepts {self.accepts}; "
                f"correct it, or unset it for the default"
            ) from None


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise ValueError(text)
        return int(text)

    return parse


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _word(text: str) -> str:
    if not text.isascii() or not text.isalnum():
        raise ValueError(text)
    return text


def _folder(text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # no such user, or no home
        raise ValueError(text) from None
    if not path.is_absolute() or "\0" in text:
        raise ValueError(text)
    return path


_ISA: Knob[str | None] = Knob(
    "ENCAST_ISA",
    None,
    "the name of an ISA level, as `encast doctor` lists them",
    "The fastest ISA level that may run; faster ones are treated as absent. Naming a level that is passed over as slow "
    "on this processor takes it. Read once, by the native core.",
    _word,
)
_THREADS: Knob[int | None] = Knob(
    "ENCAST_THREADS",
    None,
    "a whole number from 1 to 4096",
    "Threads of every instance of an engine. Without it: the physical cores that affinity mask and cgroup quota "
    "leave, divided by the instances.",
    _integer(1, 4096),
)
_SPIN_US: Knob[int] = Knob(
    "ENCAST_SPIN_US",
    1000,
    "a whole number of microseconds from 0 to 1000000",
    "How long a thread that waits for the others within a forward spins before it sleeps.",
    _integer(0, 1_000_000),
)
_IDLE_SPIN_US: Knob[int] = Knob(
    "ENCAST_IDLE_SPIN_US",
    200,
    "a whole number of microseconds from 0 to 1000000",
    "How long a thread that waits for the next forward spins before it sleeps: more answers quicker, less leaves the "
    "core to others.",
    _integer(0, 1_000_000),
)
_CHUNK_TOKENS: Knob[int | None] = Knob(
    "ENCAST_CHUNK_TOKENS",
    None,
    "a whole number of tokens from 1 to 1048576",
    "Tokens that a forward takes through all layers at a time. Without it: 1024.",
    _integer(1, 1 << 20),
)
_BLOCK_ROWS: Knob[int | None] = Knob(
    "ENCAST_BLOCK_ROWS",
    None,
    "a whole number of rows from 16 to 65536",
    "Rows that a thread takes through the steps between two attentions at a time, rounded up to a multiple of 16. "
    "Without it: as many as keep their values in the core's own cache; 384 with AMX.",
    _integer(16, 1 << 16),
)
_STREAM_ROWS: Knob[int | None] = Knob(
    "ENCAST_STREAM_ROWS",
    None,
    "a whole number of rows from 1 to 65536",
    "With fewer rows a thread than this, threads share a product's weights instead of its rows. Without it: 24 "
    "when half of the last-level cache (with AMX: 16 MiB) holds the weights of all products, else 80.",
    _integer(1, 1 << 16),
)
_HEAD_TOKENS: Knob[int] = Knob(
    "ENCAST_HEAD_TOKENS",
    128,
    "a whole number of tokens from 0 to 65536",
    "Attention and the product that makes its queries, keys and values run in tasks of some heads of sequences with so "
    "many tokens together (a longer one alone), so that those stay in a core's own cache. 0: the product runs over all "
    "tokens first, as it does anyway with AMX, in runs with a text of more than 512 tokens (or of this many, if they "
    "are more), and where there are too few tasks for the threads.",
    _integer(0, 1 << 16),
)
_COPY_WEIGHTS: Knob[bool] = Knob(
    "ENCAST_COPY_WEIGHTS",
    False,
    "0 or 1",
    "1: an engine reads the weights into memory of its own, in huge pages where the kernel has them and on the memory "
    "node of its CPUs, instead of sharing the mapped file with other processes.",
    _flag,
)
_CACHE_DIR: Knob[Path | None] = Knob(
    "ENCAST_CACHE_DIR",
    None,
    "the absolute path of a folder",
    "Where measurements of this machine, and what `encast serve` compiles, are kept. Without it: encast/ below "
    "XDG_CACHE_HOME, or ~/.cache/encast.",
    _folder,
)

KNOBS: tuple[Knob[str | None] | Knob[Path | None] | Knob[int | None] | Knob[int] | Knob[bool], ...] = (
    _ISA,
    _THREADS,
    _SPIN_US,
    _IDLE_SPIN_US,
    _CHUNK_TOKENS,
    _BLOCK_ROWS,
    _STREAM_ROWS,
    _HEAD_TOKENS,
    _COPY_WEIGHTS,
    _CACHE_DIR,
)


@overload
def get(name: Literal["ENCAST_ISA"]) -> str | None: ...
@overload
def get(name: Literal["ENCAST_SPIN_US", "ENCAST_IDLE_SPIN_US", "ENCAST_HEAD_TOKENS"]) -> int: ...
@overload
def get(
    name: Literal["ENCAST_THREADS", "ENCAST_CHUNK_TOKENS", "ENCAST_BLOCK_ROWS", "ENCAST_STREAM_ROWS"],
) -> int | None: ...
@overload
def get(name: Literal["ENCAST_COPY_WEIGHTS"]) -> bool: ...
@overload
def get(name: Literal["ENCAST_CACHE_DIR"]) -> Path | None: ...
def get(name: str) -> str | Path | int | bool | None:
    """The value of a knob of the list by its name; raises ``InputError`` as ``Knob.read`` does."""
    for knob in KNOBS:
        if knob.name == name:
            return knob.read()
    raise KeyError(f"{name} is no knob; the list is {', '.join(knob.name for knob in KNOBS)}")
