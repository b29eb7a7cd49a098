"""Starts the process that runs an original (``runtime.py``), and reads what it says. Time and memory are bounded."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from encast.errors import InputError
from encast.launch.process import signal_name
from encast.verify.original import Original

__all__ = ["Answers", "NotComparedError", "run_apart"]

Array = np.ndarray[Any, Any]

_SECONDS, _BYTES_A_SECOND = 60, 20 << 20
_MEMORY, _MEMORY_TIMES = 8 << 30, 6
"""Address space of the process: so many bytes, and so many times those of the original."""
_MOST_ANSWERS, _MOST_REPLY = 1 << 30, 1 << 16
"""Bytes of its two files, which may hold anything: a SavedModel's graph can write them."""
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PYTHONHOME", "CONDA_PREFIX")
"""What the process needs of the environment, which may hold passwords."""
_SET = {
    "OPENBLAS_NUM_THREADS": "1",  # a thread that numpy starts would not be confined
    "MALLOC_ARENA_MAX": "2",  # each thread's own takes address space, which is bounded
}


class NotComparedError(InputError):
    """The runtime cannot run the original, or the two have no output in common."""


@dataclass(frozen=True)
class Answers:
    """``version``: of the runtime; ``outputs``: rows of the original's outputs by their names."""

    version: str
    outputs: dict[str, Array]


def run_apart(original: Original, ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]]) -> Answers:
    """Raises ``NotComparedError``."""
    name, nbytes = original.runtime.name, _nbytes(original.source)
    seconds, memory = _SECONDS + nbytes / _BYTES_A_SECOND, _MEMORY + _MEMORY_TIMES * nbytes

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_ANSWERS, _MOST_ANSWERS))

    with tempfile.TemporaryDirectory(prefix="encast-verify-") as made:
        texts, answers, reply = (Path(made, name) for name in ("texts.npz", "answers.npz", "reply.json"))
        lengths = [len(one) for one in ids]
        np.savez(texts, ids=np.concatenate(ids), types=np.concatenate(types), lengths=np.array(lengths))
        command = [sys.executable, "-m", "encast.verify.runtime", original.runtime.module]
        command += [os.path.abspath(original.source), str(texts), str(answers), str(reply), original.takes.dump()]
        try:
            # Python looks for modules in the working directory first, and that may be a model's folder.
            done = subprocess.run(
                command,
                cwd=made,
                env={
                    **{name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                    "PYTHONPATH": _module_path(original.source),
                    "TMPDIR": made,
                    **_SET,
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
                preexec_fn=bound,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NotComparedError(
                f"{original.label}: {name} takes more than {seconds:.0f} s for {sum(lengths)} tokens; compile without "
                "verify"
            ) from None
        try:
            said = _bounded(reply, _MOST_REPLY).decode("utf-8", "replace") if reply.exists() else ""
        except OSError as error:
            said = str(error)
        if done.returncode != 0:
            how = f"was ended by {signal_name(-done.returncode)}" if done.returncode < 0 else said[:300] or "failed"
            raise NotComparedError(f"{original.label}: {name} cannot run it ({how}); compile without verify")
        try:
            found = json.loads(said)
            version, names = str(found["version"])[:80], [str(one) for one in found["names"]]
            outputs = dict(zip(names, _arrays(answers), strict=True))
        except Exception as error:  # a graph may have written these files: anything can be wrong with them
            raise NotComparedError(
                f"{original.label}: {name} ended without answers ({type(error).__name__}: {error}); compile without "
                "verify"
            ) from None
        return Answers(version, outputs)


def _bounded(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(f"{path.name} has more than {most} bytes")
    return data


def _arrays(path: Path) -> list[Array]:
    """Those of an .npz file, f32, in their order. Raises ``ValueError`` for others, and for compressed ones and such
    that overlap, which take more memory than disk."""
    with zipfile.ZipFile(path) as held:
        entries = held.infolist()
        stored = all(one.compress_type == zipfile.ZIP_STORED for one in entries)
        if not stored or sum(one.file_size for one in entries) > _MOST_ANSWERS:
            raise ValueError("answers are compressed, or too large")
    with np.load(path) as found:
        arrays = [found[key] for key in found.files]
    if any(array.dtype != np.float32 for array in arrays):
        raise ValueError("answers are not f32")
    return arrays


def _nbytes(source: Path) -> int:
    """Of a folder with all below it; of a file with those beside it, where an ONNX file's weights may be."""
    if source.is_dir():
        paths = [Path(root, name) for root, _, names in os.walk(source) for name in names]
    else:
        paths = list(source.parent.iterdir())
    return sum(path.stat().st_size for path in paths if path.is_file())


def _module_path(source: Path) -> str:
    """The modules that are found here, for a process that has another working directory; but for those of this one and
    of the original, which Python finds here in a session or with ``-c``.
    """
    strange = {os.path.realpath(one) for one in (os.getcwd(), source, os.path.dirname(os.path.abspath(source)))}
    named = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    return os.pathsep.join(os.path.abspath(one) for one in named if one and os.path.realpath(one) not in strange)
