"""CRC-32C (Castagnoli), by NumPy: bytes of many lanes at once, since one after the other takes minutes for a model.

The register is linear over GF(2). So lanes of a block run apart from zero, and are joined by advancing the left one
over the zeros that stand for the right one (Stephan Brumme, "Fast CRC32"; Mark Adler's ``crc32_combine``).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

__all__ = ["crc32c", "unmask"]

Table = np.ndarray[Any, np.dtype[np.uint32]]

_POLYNOMIAL = 0x82F63B78  # reflected
_LANE_BITS = 8
_BLOCK_BITS = 20


def crc32c(data: Any) -> int:
    """The checksum of a buffer's bytes; works in a MiB, whatever the size."""
    octets = np.frombuffer(data, np.uint8)
    count = octets.size
    bits = min(_BLOCK_BITS, max(_LANE_BITS, (count - 1).bit_length() if count else 0))
    block = 1 << bits
    register = np.zeros(1, np.uint32)
    # Zeros in front leave a register of zero as it is, so the first block may be padded there.
    for start in range(-(-count % block), count, block):
        part = octets[max(start, 0) : start + block]
        if part.size < block:
            part = np.concatenate([np.zeros(block - part.size, np.uint8), part])
        register = _advance(register, bits) ^ _block(part)
    start_value = np.full(1, 0xFFFFFFFF, np.uint32)
    for bit in range(count.bit_length()):
        if count >> bit & 1:
            start_value = _advance(start_value, bit)
    return int(register[0] ^ start_value[0]) ^ 0xFFFFFFFF


def unmask(masked: int) -> int:
    """The checksum that TensorFlow and LevelDB store turned and shifted (``crc32c::Unmask``)."""
    turned = (masked - 0xA282EAD8) & 0xFFFFFFFF
    return (turned >> 17 | turned << 15) & 0xFFFFFFFF


def _block(octets: np.ndarray[Any, np.dtype[np.uint8]]) -> Table:
    """The register after a block of 2^n bytes, from zero: u32[1]."""
    lanes = np.ascontiguousarray(octets.view("<u2").reshape(-1, 1 << (_LANE_BITS - 1)).T)
    table = _two_bytes()
    register = np.zeros(lanes.shape[1], np.uint32)
    for words in lanes:
        register = table[(register & 0xFFFF) ^ words] ^ (register >> 16)
    bits = _LANE_BITS
    while register.size > 1:
        register = _advance(register[0::2], bits) ^ register[1::2]
        bits += 1
    return register


def _advance(register: Table, bits: int) -> Table:
    """Registers after 2^bits further bytes of zero."""
    tables = _tables(bits)
    advanced: Table = tables[0][register & 0xFF] ^ tables[1][register >> 8 & 0xFF]
    advanced ^= tables[2][register >> 16 & 0xFF] ^ tables[3][register >> 24]
    return advanced


@cache
def _tables(bits: int) -> Table:
    """u32[4, 256]: where 2^bits bytes of zero take each byte of a register."""
    values = np.arange(256, dtype=np.uint32)
    registers = np.stack([values << 8 * place for place in range(4)])
    if bits > 0:
        return _advance(_advance(registers, bits - 1), bits - 1)
    for _ in range(8):
        registers = np.where(registers & 1, registers >> 1 ^ np.uint32(_POLYNOMIAL), registers >> 1)
    return registers


@cache
def _two_bytes() -> Table:
    """u32[65536]: where two bytes of zero take the lower half of a register."""
    return _advance(np.arange(1 << 16, dtype=np.uint32), 1)
