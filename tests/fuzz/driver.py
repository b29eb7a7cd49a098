"""What the fuzz targets in Python share: readers by the first byte, libFuzzer through atheris, mutations without it.

    python tests/fuzz/fuzz_NAME.py tests/fuzz/corpus/NAME                   libFuzzer, with atheris installed
    python tests/fuzz/fuzz_NAME.py --mutate 10000 tests/fuzz/corpus/NAME    without it: random mutations
    python tests/fuzz/fuzz_NAME.py --write tests/fuzz/corpus/NAME           makes the committed corpus

The first byte of an input picks the reader, the rest is what it reads. Anything but an ``EncastError`` or a good
result is a defect.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from encast.errors import EncastError

__all__ = ["Reader", "main", "run_input"]

Reader = Callable[[bytes], object]

_SMALL = 1 << 20


def run_input(readers: Sequence[Reader], data: bytes) -> bool:
    """Whether the input is accepted; raises whatever a reader raises other than ``EncastError``."""
    if not data or len(data) > _SMALL:
        return False
    try:
        readers[data[0] % len(readers)](data[1:])
    except EncastError:
        return False
    return True


def main(readers: Sequence[Reader], corpus: Callable[[], Mapping[str, bytes]]) -> None:
    """The program of a target; ``corpus`` makes one good input for every reader."""
    if "--mutate" not in sys.argv and "--write" not in sys.argv:
        import atheris

        atheris.instrument_all()
        atheris.Setup(sys.argv, lambda data: run_input(readers, data))
        atheris.Fuzz()
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutate", type=int, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("corpus", type=Path)
    options = parser.parse_args()
    if options.write:
        options.corpus.mkdir(parents=True, exist_ok=True)
        for name, data in corpus().items():
            (options.corpus / name).write_bytes(data)
    if options.mutate:
        seeds = [path.read_bytes() for path in sorted(options.corpus.iterdir())]
        _mutate(readers, seeds, options.mutate, options.seed)


def _mutate(readers: Sequence[Reader], seeds: Sequence[bytes], count: int, seed: int) -> None:
    chooser = random.Random(seed)
    accepted = 0
    for _ in range(count):
        data = bytearray(chooser.choice(seeds))
        for _ in range(chooser.randint(1, 6)):
            at = chooser.randrange(1, len(data) + 1)
            match chooser.randrange(4):
                case 0 if at < len(data):
                    data[at] = chooser.randrange(256)
                case 1:
                    del data[at : at + chooser.randint(1, 16)]
                case 2:
                    data[at:at] = chooser.randbytes(chooser.randint(1, 8))
                case _:
                    other = chooser.choice(seeds)
                    start = chooser.randrange(len(other))
                    data[at:at] = other[start : start + chooser.randint(1, 32)]
        try:
            accepted += run_input(readers, bytes(data))
        except BaseException:
            crash = Path(sys.argv[0]).with_suffix(".crash").name
            Path(crash).write_bytes(data)
            print(f"the input is in {crash}", file=sys.stderr)
            raise
    print(f"{count} mutations of {len(seeds)} inputs with seed {seed}: {accepted} accepted, the others refused")
