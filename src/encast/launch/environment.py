"""The environment of an instance: the allocator to preload, and how many threads its libraries may run."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from encast.errors import InputError, ResourceError
from encast.launch.placement import Placement

__all__ = ["ALLOCATORS", "Allocator", "environment"]


@dataclass(frozen=True)
class Allocator:
    """A malloc that can be preloaded: the names of its library, the first that exists counts, and its packages."""

    libraries: tuple[str, ...]
    packages: str


# "system" is no allocator of the list: it preloads nothing.
ALLOCATORS: Mapping[str, Allocator] = {
    "tcmalloc": Allocator(
        # Without the profilers of the full library, whose hooks cost time, it is the same allocator.
        ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"),
        "Debian, Ubuntu: apt install libtcmalloc-minimal4; Fedora: dnf install gperftools-libs; "
        "conda: conda install -c conda-forge gperftools",
    ),
    "jemalloc": Allocator(
        ("libjemalloc.so.2",),
        "Debian, Ubuntu: apt install libjemalloc2; Fedora: dnf install jemalloc; "
        "conda: conda install -c conda-forge jemalloc",
    ),
}


def environment(
    placement: Placement,
    *,
    allocator: str = "system",
    openmp: bool = True,
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Variables to set for an instance, beside those that it inherits from ``environ`` (default: ``os.environ``).

    ``allocator``: ``system`` or a name of ``ALLOCATORS``; what ``LD_PRELOAD`` named before stays. ``openmp``: the
    number of threads for libraries on OpenMP (PyTorch, MKL, OpenBLAS, CTranslate2), and for Intel's and LLVM's runtime
    their places, if the placement is bound, and a short wait before they sleep. ``OMP_PROC_BIND`` and ``OMP_PLACES``
    stay unset: with them GNU's runtime binds the main thread as it is loaded, and every other pool of the process
    inherits that one CPU.
    Raises ``InputError`` for an unknown allocator, ``ResourceError`` for one that is not here or cannot be loaded.
    """
    environ = os.environ if environ is None else environ
    variables: dict[str, str] = {}
    if allocator != "system":
        if allocator not in ALLOCATORS:
            raise InputError(f"the allocator is {allocator!r}; system, {' and '.join(ALLOCATORS)} are known")
        preloaded = [str(_library(allocator, environ.get("LD_LIBRARY_PATH", ""))), environ.get("LD_PRELOAD", "")]
        variables["LD_PRELOAD"] = ":".join(filter(None, preloaded))
    if placement.smt or not (placement.bound or environ.get("ENCAST_THREADS")):
        # Left to itself, encast runs one thread a core, and as many as the whole quota pays for.
        variables["ENCAST_THREADS"] = str(placement.threads)
    if openmp:
        variables["OMP_NUM_THREADS"] = str(placement.threads)
        if placement.bound:
            variables["KMP_AFFINITY"] = "granularity=fine,compact,1,0"
        variables["KMP_BLOCKTIME"] = "1"
    return variables


@functools.cache
def _library(allocator: str, library_path: str) -> Path:
    """The allocator's library, which the dynamic linker has been seen to load."""
    known = ALLOCATORS[allocator]
    folders = _library_folders(library_path)
    for name in known.libraries:
        for folder in folders:
            path = folder / name
            if not path.is_file():
                continue
            # The linker says what it cannot preload, and goes on without it.
            probe = subprocess.run(
                [sys.executable, "-S", "-c", ""],
                env={"LD_LIBRARY_PATH": library_path, "LD_PRELOAD": str(path)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
            if probe.returncode == 0 and str(path) not in probe.stderr:
                return path
            said = probe.stderr.strip().splitlines() or [f"a process with it ends with {probe.returncode}"]
            raise ResourceError(f"{path} cannot be preloaded: {said[0]}; install it anew ({known.packages})")
    raise ResourceError(
        f"{allocator} is not installed: there is no {' or '.join(known.libraries)} in "
        f"{', '.join(map(str, folders))}; {known.packages}. If it lies elsewhere, name its folder in LD_LIBRARY_PATH"
    )


def _library_folders(library_path: str) -> Sequence[Path]:
    """Where shared libraries of this system lie; the linker's own list comes without LD_LIBRARY_PATH."""
    triplet = f"{os.uname().machine}-linux-gnu"
    named = [Path(part) for part in library_path.split(":") if part.startswith("/")]
    usual = [Path(sys.prefix, "lib")]
    usual += [Path(root, inner) for root in ("/usr/local", "/usr", "/") for inner in (f"lib/{triplet}", "lib64", "lib")]
    return [folder for folder in dict.fromkeys(named + usual) if folder.is_dir()]
