"""Starts the process that runs an original (``runtime.py``), and reads what it says. Time and memory are bounded."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
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

    with tempfile.TemporaryDirectory(prefix="encast-verify-") as made:
        texts, answers = Path(made, "texts.npz"), Path(made, "answers.npz")
        lengths = [len(one) for one in ids]
        np.savez(texts, ids=np.concatenate(ids), types=np.concatenate(types), lengths=np.array(lengths))
        command = [sys.executable, "-m", "encast.verify.runtime", original.runtime.module]
        command += [os.path.abspath(original.source), str(texts), str(answers), original.takes.dump()]
        try:
            # Python looks for modules in the working directory first, and that may be a model's folder.
            done = subprocess.run(
                command,
                cwd=made,
                env={**os.environ, "PYTHONPATH": _module_path(), "TMPDIR": made},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
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
        said = (done.stdout.decode("utf-8", "replace").strip().splitlines() or [""])[-1]
        if done.returncode != 0:
            how = f"was ended by {signal_name(-done.returncode)}" if done.returncode < 0 else said or "failed"
            raise NotComparedError(f"{original.label}: {name} cannot run it ({how}); compile without verify")
        try:
            reply = json.loads(said)
            with np.load(answers) as found:
                outputs = dict(zip(reply["names"], (found[key] for key in found.files), strict=True))
        except (KeyError, OSError, TypeError, ValueError) as error:
            raise NotComparedError(
                f"{original.label}: {name} ended without answers ({error}); compile without verify"
            ) from None
        return Answers(reply["version"], outputs)


def _nbytes(source: Path) -> int:
    """Of a folder with all below it; of a file with those beside it, where an ONNX file's weights may be."""
    if source.is_dir():
        paths = [Path(root, name) for root, _, names in os.walk(source) for name in names]
    else:
        paths = list(source.parent.iterdir())
    return sum(path.stat().st_size for path in paths if path.is_file())


def _module_path() -> str:
    """The modules that are found here, for a process that has another working directory."""
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(os.path.abspath(one) for one in [*filter(None, named), *sys.path])
