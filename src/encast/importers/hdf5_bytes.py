"""The bytes of an HDF5 file, taken with every place and size checked and all of it together bounded."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from encast.errors import CheckpointError
from encast.importers.files import MappedFile

__all__ = ["UNDEFINED", "Hdf5Bytes"]

UNDEFINED = (1 << 64) - 1
"""The address of what is not there."""

_MOST_READS = 500_000
"""A model with 48 layers takes 25,000. Structures may be shared, so the file's size alone bounds nothing."""


class Hdf5Bytes:
    """A file of which no more is read than a model needs; ``where`` is its path.

    What was taken are the structures of the file, between which no elements may lie.
    """

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.where = str(file.path)
        self._reads = 0
        self._begins, self._ends = array("Q"), array("Q")

    def fail(self, what: str) -> NoReturn:
        """Raises ``CheckpointError`` for a file that contradicts itself or the format."""
        raise CheckpointError(f"{self.where}: {what}; the file is damaged, so fetch it again")

    def take(self, at: int, size: int, what: str) -> bytes:
        """``size`` bytes that begin at byte ``at``; raises ``CheckpointError`` when the file does not have them."""
        self._reads += 1
        if self._reads > _MOST_READS:
            raise CheckpointError(
                f"{self.where}: its groups and datasets have more than {_MOST_READS} parts, which no model needs; the "
                "file is damaged"
            )
        if at == UNDEFINED:
            self.fail(f"{what} is said to be nowhere")
        if at + size > self.file.size:
            raise CheckpointError(
                f"{self.where}: {what} would end at byte {at + size}, and the file has {self.file.size}; it is "
                "truncated or damaged, so fetch it again"
            )
        if size:
            self._begins.append(at)
            self._ends.append(at + size)
        return self.file.bytes[at : at + size]

    def taken(self, places: Sequence[tuple[int, int]]) -> list[bool]:
        """Of each place, the bytes from a begin to an end, whether some of it was taken."""
        order = np.argsort(np.asarray(self._begins), kind="stable")
        begins, reached = np.asarray(self._begins)[order], np.maximum.accumulate(np.asarray(self._ends)[order])
        before = np.searchsorted(begins, np.array([end for _, end in places], np.uint64))
        return [
            begin < end and count > 0 and int(reached[count - 1]) > begin
            for (begin, end), count in zip(places, before, strict=True)
        ]

    def numbers(self, form: str, at: int, what: str) -> tuple[int, ...]:
        """Little-endian numbers; ``form`` is that of ``struct``."""
        return struct.unpack("<" + form, self.take(at, struct.calcsize("<" + form), what))

    def signed(self, signature: bytes, at: int, what: str) -> None:
        """Raises ``CheckpointError`` unless the four bytes stand there with which the structure begins."""
        if self.take(at, 4, what) != signature:
            self.fail(f"at byte {at} there is no {what}, which begins with {signature.decode()}")
