"""What a runtime must offer to be measured: one class in one file, and a YAML for each of its settings."""

from __future__ import annotations

import abc
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from encast.batch import Batch
from encast.errors import InputError

__all__ = [
    "DTYPES",
    "BackendSpec",
    "Call",
    "ModelFiles",
    "Padded",
    "Peer",
    "line_in",
    "load_object",
    "load_peer",
    "pad",
    "unpad",
]

Float32 = np.ndarray[Any, np.dtype[np.float32]]
Int32 = np.ndarray[Any, np.dtype[np.int32]]
Int64 = np.ndarray[Any, np.dtype[np.int64]]
Call = Callable[[], Float32]

DTYPES = ("f32", "bf16", "int8")
"""The classes of arithmetic that are compared: each backend says of which it is."""


@dataclass(frozen=True)
class ModelFiles:
    """A checkpoint on disk. ``sha`` covers config and weights."""

    name: str
    checkpoint: Path
    sha: str
    calibration: tuple[tuple[int, ...], ...] = ()
    """Token ids of representative texts, for backends that quantise activations statically."""
    encoder: Mapping[str, Any] = field(default_factory=dict)
    """The fields of ``transformer.Encoder``, read off the checkpoint before any backend is timed."""


@dataclass(frozen=True)
class BackendSpec:
    """What a backend's YAML says: ``peer`` is ``module:Class`` or ``/path/file.py:Class``."""

    name: str
    peer: str
    dtype: str
    python: str | None = None
    """Interpreter of a separate virtual environment (it needs NumPy); None: the one that runs encast.

    In the YAML also the name of an environment, see ``bench.environments``.
    """
    options: Mapping[str, Any] = field(default_factory=dict)


class Peer(abc.ABC):
    """A runtime with one model in it. Lives in a process of its own, from which it is never moved.

    ``Runnable`` for the output ``last_hidden_state``. An instance is made, exported or opened, bound, called, closed.
    Whatever a method raises is reported as this backend's failure, with its text, and the comparison goes on.
    """

    name: ClassVar[str]
    """The runtime's own name, as reports print it."""
    dtypes: ClassVar[tuple[str, ...]]
    """Those of ``DTYPES`` that it can compute in."""
    modules: ClassVar[tuple[str, ...]] = ()
    """What ``open`` will import; imported after ``__init__`` and before ``open``, and timed apart from it."""
    tried: bool = False
    """Set by ``bind`` when it has timed several ways and kept the quickest for later processes. A service knows its
    settings, so the process is begun anew, and the trials are no part of its cold start."""

    def __init__(self, model: ModelFiles, dtype: str, threads: int, cache: Path, **options: Any) -> None:
        """Cheap: nothing is read or imported; the place to set environment variables that imports read.

        ``options`` are the other keys of the YAML.

        ``threads`` is the budget of every call; ``cache`` is where conversions are kept (``bench.cache.cached``).
        """
        if dtype not in self.dtypes:
            raise InputError(f"{self.name} has no {dtype}; it has {', '.join(self.dtypes)}")
        self.model, self.dtype, self.threads, self.cache = model, dtype, threads, cache
        self.options = options

    @classmethod
    def missing(cls) -> str | None:
        """None when it can be used here, or why not and how to change that, in one sentence."""
        # Of a.b only a: to look for b imports a, which may take seconds and is timed later.
        absent = [name for name in cls.modules if importlib.util.find_spec(name.partition(".")[0]) is None]
        return f"not installed: install what has {', '.join(absent)}" if absent else None

    def export(self) -> Mapping[str, Any]:
        """Converts the checkpoint once, kept by content hash; runs in a process of its own before anything is timed.

        Returns facts, with ``seconds`` it took (or had taken, when it was found in the cache) and ``path``.
        """
        return {}

    @abc.abstractmethod
    def open(self) -> None:
        """Loads and compiles; timed as part of the cold start."""

    @abc.abstractmethod
    def run(self, output: str, batch: Batch, select: Int32 | None = None) -> Float32:
        """``f32[tokens, hidden]``: the last hidden states of the batch's tokens, without padding."""

    def bind(self, batch: Batch) -> Call:
        """A call that computes the batch anew each time, and returns ``f32[tokens, hidden]``.

        Here a peer does once what a service would do once for each shape. The array may be overwritten by the next
        call. A peer that pads does so in ``run``, or here.
        """
        return lambda: self.run("last_hidden_state", batch)

    def facts(self) -> Mapping[str, Any]:
        """Plain JSON: ``version``, settings really in force, what was chosen. Read after ``bind``."""
        return {}

    def close(self) -> None:  # noqa: B027, most have nothing to close
        """Frees what the process's end does not."""


@dataclass(frozen=True)
class Padded:
    """A batch as a rectangle, shorter sequences filled up at their ends. All arrays are ``i64[seqs, length]``."""

    token_ids: Int64
    mask: Int64
    token_type_ids: Int64


def pad(batch: Batch, length: int | None = None, *, pad_id: int = 0, seqs: int | None = None) -> Padded:
    """The batch as a rectangle of ``length`` columns (default: its longest sequence) and ``seqs`` rows.

    Rows beyond the batch's sequences have a mask with one true token, so that no softmax divides by zero.
    """
    lengths = np.diff(batch.cu_seqlens)
    columns = int(lengths.max()) if length is None else length
    rows = batch.seqs if seqs is None else seqs
    if columns < lengths.max() or rows < batch.seqs:
        raise InputError(
            f"{batch.seqs} sequences of up to {lengths.max()} tokens do not fit a rectangle of {rows} x {columns}"
        )
    inside = np.arange(columns) < lengths[:, None]
    token_ids = np.full((rows, columns), pad_id, np.int64)
    token_ids[: batch.seqs][inside] = batch.token_ids
    mask = np.zeros((rows, columns), np.int64)
    mask[: batch.seqs] = inside
    mask[batch.seqs :, 0] = 1
    types = np.zeros((rows, columns), np.int64)
    if batch.token_type_ids is not None:
        types[: batch.seqs][inside] = batch.token_type_ids
    return Padded(token_ids, mask, types)


def unpad(states: np.ndarray[Any, Any], batch: Batch) -> Float32:
    """``f32[tokens, hidden]`` of ``[rows, columns, hidden]``; without a copy where nothing was padded."""
    rows, columns = states.shape[:2]
    if rows == batch.seqs and rows * columns == batch.tokens:
        return states.reshape(batch.tokens, -1)
    inside = np.arange(columns) < np.diff(batch.cu_seqlens)[:, None]
    flat: Float32 = states[: batch.seqs][inside]
    return flat


def load_object(target: str) -> Any:
    """What ``module:Name`` or ``/path/file.py:Name`` names; raises ``InputError`` that says what is wrong with it."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise InputError(f"{target!r} names nothing; write package.module:Name or /path/file.py:Name")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, OSError, SyntaxError) as error:
        raise InputError(f"{target}: cannot be imported ({error}); correct the YAML that names it") from None
    except Exception as error:
        if (where := line_in(place, error)) is None:
            raise
        raise InputError(f"{where}: {type(error).__name__}: {error}; correct the file") from None
    try:
        return getattr(module, name)
    except AttributeError:
        found = [public for public in getattr(module, "__all__", dir(module)) if not public.startswith("_")]
        raise InputError(f"{target}: {place} has no {name}; it has {', '.join(found)}") from None


def load_peer(target: str) -> type[Peer]:
    """The class that a backend's YAML names under ``peer``; raises ``InputError``."""
    found = load_object(target)
    if not (isinstance(found, type) and issubclass(found, Peer)):
        raise InputError(f"{target} is no Peer; derive it from encast.bench.peers.base.Peer")
    return found


def line_in(file: str, error: BaseException) -> str | None:
    """``FILE, line N``: the last line of the file that the error went through; None when it went through none."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}, line {lines[-1]}" if lines else None


def _from_file(path: Path) -> Any:
    name = f"_encast_bench_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
