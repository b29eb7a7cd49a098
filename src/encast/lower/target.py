"""What a plan is made for: the arithmetic classes that the machine's kernels offer, and the chunk size."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import encast._core as _core
import encast.knobs as knobs
from encast.crossover import dense_rows
from encast.errors import InputError, ResourceError
from encast.lower.unfuse import ABLATIONS
from encast.machine import Machine, this_machine

__all__ = ["ATTENTION_CLASSES", "DEFAULT_CHUNK_TOKENS", "GEMM_CLASSES", "Target"]

DEFAULT_CHUNK_TOKENS = 1024
"""Tokens that go through all layers together: enough to keep weights from being the bound, few enough
that the activations of one step stay in a last-level cache of some tens of MB."""

GEMM_CLASSES = {
    "f32": ("gemm_f32", ("f32",)),
    "q8": ("gemm_q8s8", ("s8",)),
    "bf16": ("gemm_bf16", ("bf16_tile", "bf16_dp", "bf16_fma")),
}
"""For each operand dtype the op of the catalog and its arithmetic classes, fastest first."""

ATTENTION_CLASSES = {
    "f32": ("attention", ("f32",)),
    "bf16": ("attention", ("bf16_tile", "bf16_dp", "bf16_fma")),
    "int8": ("attention", ("s8",)),
}
"""The same for what the products of an ``attention`` are made of."""

TILE_CLASSES = ("s8", "bf16_tile")
"""Arithmetic classes of products with kernels for AMX. Plans without them have no use for what suits its tiles."""

_TILE_BLOCK_ROWS = 384
_TILE_CACHED_BYTES = 16 << 20
"""Weights that threads do not share with AMX: between MiniLM's in int8 and in bf16, see ``rows_to_stream``."""


@dataclass(frozen=True)
class Target:
    """``gemm``: operand dtype to arithmetic class; ``attention`` likewise, by its ``products``.

    ``chunk_tokens``: raised to the model's longest text.

    ``block_bytes``: what the values of a block of rows may take, so that most of them stay in a core's own cache;
    ``block_rows`` says it in rows, rounded up to a whole unit. ``shared_cache_bytes``: of the cache that weights
    may stay in between forwards. ``isa``: the level of its kernels. ``tiles``: products of ``TILE_CLASSES`` use AMX.
    ``stream_rows``: with fewer rows a thread, threads share a product's weights instead of its rows; None: by
    ``rows_to_stream``. ``without``: optimisations of ``ABLATIONS`` that are left out. Raises ``InputError`` for one
    that is not known.
    """

    gemm: dict[str, str]
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    block_bytes: int = (4 << 20) // 3
    block_rows: int | None = None
    shared_cache_bytes: int = 32 << 20
    stream_rows: int | None = None
    head_tokens: int = 128
    isa: str = "scalar"
    tiles: bool = False
    attention: dict[str, str] = field(default_factory=lambda: {"f32": "f32", "bf16": "bf16_fma", "int8": "s8"})
    without: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        unknown = sorted(self.without - ABLATIONS.keys())
        if unknown:
            raise InputError(f"without names {', '.join(map(repr, unknown))}; {', '.join(ABLATIONS)} are known")

    def rows_of_block(self, bytes_per_row: float, tiles: bool, sparse: bool) -> int:
        """Most rows that a thread takes through the steps of a stage at a time, whole ``BLOCK_UNIT``.

        Multiples of 48 are whole register tiles, and fewer reread the weights too often: BERT-large int8 at 8 x 128
        is 2.4 % faster with 48 rows than with 32, MiniLM 2 % faster with 144 than with 96, BERT-base bf16 1 % slower.
        Tiles of AMX are done with so few rows before the next weights are there: with blocks of 384, BERT-base at
        8 x 128 is 12 % (int8) and 6 % (bf16) faster than with 144, MiniLM 1 %. Stages with sparse products take tiles
        of 64 rows, and a block has room for one: with 48, DistilBERT at 8 x 128 takes 1.2 times as long.
        """
        if self.block_rows is not None:
            return -(-self.block_rows // _core.BLOCK_UNIT) * _core.BLOCK_UNIT
        if tiles:
            return _TILE_BLOCK_ROWS
        fitting = int(self.block_bytes / max(bytes_per_row, 1.0))
        return max(_core.SPARSE_TILE_ROWS if sparse else 48, min(192, fitting // 48 * 48))

    def rows_to_stream(self, weight_bytes: int, tiles: bool, sparse: bool) -> int:
        """Rows a thread below which threads share products of ``weight_bytes`` in all.

        From memory, each weight had better be read by one core: BERT-base int8 at 1 x 128 is 2.4 % faster. Where
        weights stay in cache, meeting after every step costs more, most so with cores that share no cache: MiniLM
        int8 at 1 x 64 takes 11 % longer. With tiles of AMX a large L3 is not fast enough: sharing makes BERT-base
        at 1 x 64 1.3 times as fast, at 1 x 128 1.14 (int8) and 1.24 times (bf16), MiniLM bf16 at 1 x 64 1.14; but
        MiniLM int8 at 1 x 128 takes 6 % longer. Sparse products are shared below a tile a thread: DistilBERT with 62 %
        of zeros at 1 x 128 takes 0.75 times as long with a tile for each of two threads (AVX-512 VNNI; 0.77 to 0.87 at
        AVX-512, AVX-VNNI and AVX2), at 1 x 129 to 1 x 176 0.92 to 0.99.
        """
        if self.stream_rows is not None:
            return self.stream_rows
        if tiles:
            return 24 if weight_bytes <= _TILE_CACHED_BYTES else 80
        if self.cached(weight_bytes):
            return 24
        return _core.SPARSE_TILE_ROWS if sparse else 80

    def cached(self, weight_bytes: int) -> bool:
        """Whether products of ``weight_bytes`` in all find their weights in the shared cache in every forward."""
        return 2 * weight_bytes <= self.shared_cache_bytes

    def dense_rows(self, left: float, weight_bytes: int) -> int | None:
        """``crossover.dense_rows`` of a product, of a model with ``weight_bytes`` of them."""
        return dense_rows(self.isa, left, cached=self.cached(weight_bytes))

    @staticmethod
    def here(machine: Machine | None = None) -> Target:
        """This machine, read anew unless given, at the ISA level that ``ENCAST_ISA`` allows and with the other knobs.

        Raises ``ResourceError`` when no kernel may run, ``InputError`` for a knob out of range.
        """
        slow = {name for name, *_, why in _core.isa_levels() if why}
        target = Target.choose(_core.select_kernel, slow)
        machine = this_machine() if machine is None else machine
        # An engine runs one thread a core, whatever the hardware threads that share its caches.
        sharers = {cache: max(1, cache.shared_by // machine.threads_per_core) for cache in machine.caches}
        core_cache = max((cache.bytes // cores for cache, cores in sharers.items() if cache.level == 2), default=0)
        shared_cache = max((cache.bytes for cache in machine.caches if cache.level == 3), default=0)
        return replace(
            target,
            chunk_tokens=knobs.get("ENCAST_CHUNK_TOKENS") or target.chunk_tokens,
            isa=_core.isa_best(),
            tiles=_core.isa_best() == "amx",
            block_bytes=core_cache * 4 // 3 or target.block_bytes,
            block_rows=knobs.get("ENCAST_BLOCK_ROWS"),
            shared_cache_bytes=shared_cache or target.shared_cache_bytes,
            stream_rows=knobs.get("ENCAST_STREAM_ROWS"),
            head_tokens=knobs.get("ENCAST_HEAD_TOKENS"),
        )

    @staticmethod
    def choose(select_kernel: Callable[[str, str, int], str | None], slow: Collection[str] = ()) -> Target:
        """The fastest class of every operand dtype for which ``select_kernel(op, class, rows)`` finds a kernel.

        ``slow``: ISA levels, which end the names of their kernels, that are passed over where another class has one.
        """

        def fastest(table: dict[str, tuple[str, tuple[str, ...]]]) -> dict[str, str]:
            chosen = {}
            for dtype, (op, classes) in table.items():
                kernels = {name: kernel for name in classes if (kernel := select_kernel(op, name, 1)) is not None}
                if not kernels:
                    raise ResourceError(
                        f"no kernel of {op} may run on this machine; {classes} exist, see: encast kernels"
                    )
                quick = [name for name, kernel in kernels.items() if kernel.rpartition("_")[2] not in slow]
                chosen[dtype] = next(iter(quick or kernels))
            return chosen

        return Target(fastest(GEMM_CLASSES), attention=fastest(ATTENTION_CLASSES))
