"""What an artifact was made of, and the runtime that answers by it: the one table of these."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

__all__ = ["ONNX_RUNTIME", "RUNTIMES", "TENSORFLOW", "UNUSED", "Original", "Runtime", "Takes"]

UNUSED = "unused"
"""What an input is that no answer depends on: it gets zeros."""


@dataclass(frozen=True)
class Runtime:
    """``module``: what is imported, by the module ``session`` alone; ``extra`` installs it. ``advice``: what is to be
    done where its answers are others. ``programs``: whether its originals are programs, which run only when asked."""

    name: str
    module: str
    extra: str
    session: str
    advice: str
    programs: bool = False

    def installed(self) -> bool:
        """Whether it is there; it is not imported."""
        return find_spec(self.module) is not None


ONNX_RUNTIME = Runtime(
    "ONNX Runtime",
    "onnxruntime",
    "verify",
    "encast.verify.onnx_session",
    "the graph was not understood: compile the model's checkpoint, and report this file",
)
TENSORFLOW = Runtime(
    "TensorFlow",
    "tensorflow",
    "verify-tensorflow",
    "encast.verify.tensorflow_session",
    "its graph computes something else than its config says: correct num_attention_heads, hidden_act and problem_type "
    "there, or report this model",
    programs=True,
)
RUNTIMES = {runtime.module: runtime for runtime in (ONNX_RUNTIME, TENSORFLOW)}


@dataclass(frozen=True)
class Takes:
    """``inputs``: by the file's names what its inputs are, in the words of transformers, for those that have others, or
    ``UNUSED``; ``sequences`` and ``positions``: how many a batch has, None where the file takes any number.
    ``tags`` and ``signature`` choose a graph of a SavedModel."""

    inputs: Mapping[str, str] = field(default_factory=dict)
    sequences: int | None = None
    positions: int | None = None
    tags: tuple[str, ...] = ()
    signature: str = ""

    @property
    def masked(self) -> bool:
        return not self.inputs or "attention_mask" in self.inputs.values()

    def dump(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Original:
    """``source``: a file, or the folder of a SavedModel. ``arithmetic``: its own, a key of ``compare.LIMITS``."""

    runtime: Runtime
    source: Path
    takes: Takes = field(default_factory=Takes)
    arithmetic: str = "f32"

    @property
    def label(self) -> str:
        return self.source.name or str(self.source)
