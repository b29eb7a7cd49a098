"""What a runtime must offer to be measured: one class in one file, and a YAML for each of its settings."""

from __future__ import annotations

import abc
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from encast.backends.base import check_request
from encast.batch import Batch
from encast.bench.cache import cached, content_hash, seconds_to_make
from encast.errors import InputError, install_hint
from encast.ir import Graph
from encast.ir.types import ValueType

__all__ = [
    "CARD_DTYPES",
    "DTYPES",
    "OUTPUT",
    "BackendSpec",
    "Call",
    "CheckpointPeer",
    "Encoder",
    "Feeds",
    "ModelFiles",
    "PaddedPeer",
    "Peer",
    "Shape",
    "States",
    "line_in",
    "load_object",
    "load_peer",
    "plain_graph",
    "read_encoder",
    "source_digest",
    "versions",
]

Float32 = np.ndarray[Any, np.dtype[np.float32]]
Int64 = np.ndarray[Any, np.dtype[np.int64]]
Call = Callable[[], Float32]

OUTPUT = "last_hidden_state"

Feeds = dict[str, Int64]
"""Inputs by name, each ``i64[seqs, length]``; in the order of ``Encoder.inputs``."""

Shape = tuple[int, int]
"""Sequences, and tokens of the longest."""

States = Callable[[], Float32]
"""A call that computes ``f32[seqs, length, hidden]``."""

_PAGE = '"Adding a backend or a scenario" in docs/howto/benchmark.md'

CARD_DTYPES = ("f16", "f8")
DTYPES = ("f32", "bf16", "int8", *CARD_DTYPES)
"""The classes of arithmetic that are compared: each backend says of which it is. Cards alone multiply f16 and f8, which
is E4M3."""


@dataclass(frozen=True)
class ModelFiles:
    """A checkpoint on disk: a folder, a file or the prefix of TensorFlow's. ``sha`` covers config and weights."""

    name: str
    checkpoint: Path
    sha: str
    calibration: tuple[tuple[int, ...], ...] = ()
    """Token ids of representative texts, for backends that quantise activations statically."""
    encoder: Mapping[str, Any] = field(default_factory=dict)
    """The fields of ``Encoder``, read off the checkpoint before any backend is timed."""
    other_format: str | None = None
    """What the checkpoint is, where it is no folder in the Hugging Face layout: ``Checkpoint.other_format``."""


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

    @property
    def on_card(self) -> bool:
        """Whether its YAML says ``device: cuda`` (or ``cuda:1``): what the processors can do is no limit then."""
        return str(self.options.get("device")).partition(":")[0] in ("cuda", "torch-cpu")


@dataclass(frozen=True)
class Encoder:
    """What backends need of ``GraphMeta``."""

    arch: str
    heads: int
    hidden: int
    vocab: int
    type_vocab: int
    max_len: int

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs. A table of one token type is added to all tokens alike and needs no input."""
        return ("input_ids", "attention_mask", *(["token_type_ids"] if self.type_vocab > 1 else []))

    def feeds(self, batch: Batch) -> Feeds:
        """The batch as a rectangle of as many columns as its longest sequence has tokens, zeros at the ends of others.

        Whatever id stands in padding: it comes last, so no token's position counts it, and the mask hides it.
        """
        lengths = np.diff(batch.cu_seqlens)
        inside = np.arange(lengths.max()) < lengths[:, None]
        feeds = {name: np.zeros(inside.shape, np.int64) for name in self.inputs}
        feeds["input_ids"][inside] = batch.token_ids
        feeds["attention_mask"][inside] = 1
        if "token_type_ids" in feeds and batch.token_type_ids is not None:
            feeds["token_type_ids"][inside] = batch.token_type_ids
        return feeds

    def example(self, seqs: int, length: int) -> Feeds:
        """Random words without padding, for tracing: real ids, so that no position is taken for padding."""
        ids = np.random.default_rng(0).integers(self.vocab // 2, self.vocab, (seqs, length))
        return self.feeds(Batch.of(ids.tolist()))


def read_encoder(checkpoint: Path) -> Encoder:
    """Raises ``CheckpointError`` or ``UnsupportedModelError``."""
    meta = plain_graph(checkpoint).meta
    return Encoder(**{item.name: getattr(meta, item.name) for item in fields(Encoder)})


def plain_graph(checkpoint: Path) -> Graph:
    """The graph of a checkpoint's encoder, in plain ops, before any pass; output ``last_hidden_state``."""
    from encast.archs import build_graph  # here, so that `missing` can say what a bare environment needs for it
    from encast.importers import open_checkpoint

    return build_graph(open_checkpoint(checkpoint), task="features")


class Peer(abc.ABC):
    """A runtime with one model in it. Lives in a process of its own, from which it is never moved.

    An instance is made, exported or opened, bound, called, closed. Whatever a method raises is reported as this
    backend's failure, with its text, and the comparison goes on.
    """

    name: ClassVar[str]
    """The runtime's own name, as reports print it."""
    dtypes: ClassVar[tuple[str, ...]]
    """Those of ``DTYPES`` that it can compute in."""
    modules: ClassVar[tuple[str, ...]] = ()
    """What ``open`` will import; imported after ``__init__`` and before ``open``, and timed apart from it."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Modules that ``export`` imports beside these."""
    extra: ClassVar[str] = ""
    """The extra of encast that installs both."""
    any_format: ClassVar[bool] = False
    """Whether it reads what ``encast compile`` reads, by ``encast.importers``. Others get folders in the Hugging Face
    layout with weights of PyTorch alone."""
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
        wanted = dict.fromkeys(name.partition(".")[0] for name in (*cls.modules, *cls.needs))
        absent = [name for name in wanted if importlib.util.find_spec(name) is None]
        return f"not installed ({', '.join(absent)}): {cls.how_to_install(absent)}" if absent else None

    @classmethod
    def how_to_install(cls, absent: Sequence[str]) -> str:
        """What to do where these modules are not."""
        return install_hint(cls.extra) if cls.extra else f"install what has {', '.join(absent)}"

    def converted(self) -> Path | None:
        """What ``open`` reads, in a folder of ``bench.cache.cached``: made by the first call. None: the checkpoint."""
        return None

    def export(self) -> Mapping[str, Any]:
        """Converts the checkpoint once; runs in a process of its own before anything is timed.

        Returns facts, with ``seconds`` it took (or had taken, when it was found in the cache) and ``path``.
        """
        path = self.converted()
        return {} if path is None else {"seconds": seconds_to_make(path.parent), "path": str(path)}

    def kept(self, kind: str, make: Callable[[Path], None], packages: Sequence[str] = (), **settings: Any) -> Path:
        """The folder that ``make`` fills from the checkpoint with these settings and versions of packages."""
        return cached(self.cache, kind, {"model": self.model.sha, **settings, **versions(*packages)}, make)

    @abc.abstractmethod
    def open(self) -> None:
        """Loads and compiles; timed as part of the cold start."""

    @abc.abstractmethod
    def bind(self, batch: Batch) -> Call:
        """A call that computes the batch anew each time: the last hidden states of its tokens, ``f32[tokens, hidden]``.

        Here a peer does once what a service would do once for each shape. The array may be overwritten by the next
        call. Raises ``InputError`` for what the model cannot compute.
        """

    def facts(self) -> Mapping[str, Any]:
        """Plain JSON: ``version``, settings really in force, what was chosen. Read after ``bind``."""
        return {}

    def close(self) -> None:  # noqa: B027, most have nothing to close
        """Frees what the process's end does not."""


class CheckpointPeer(Peer):
    """Knows its model's ``encoder`` and checks its options."""

    accepted: ClassVar[Mapping[str, tuple[str, ...] | float]] = {}
    """The options: the words that one takes, or a number of at least 0. The first word, or the number, is the default.
    ``settings`` are those in force."""

    def __init__(self, model: ModelFiles, dtype: str, threads: int, cache: Path, **options: Any) -> None:
        super().__init__(model, dtype, threads, cache, **options)
        if unknown := sorted(options.keys() - self.accepted.keys()):
            known = ", ".join(sorted(self.accepted)) or "none"
            raise InputError(f"{self.name} has no option {unknown[0]!r}; it has: {known}")
        self.settings: dict[str, Any] = {}
        for option, accepted in self.accepted.items():
            words = accepted if isinstance(accepted, tuple) else ()
            value = options.get(option, words[0] if words else accepted)
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
            if value not in words if words else not number:
                wanted = f"one of {', '.join(words)}" if words else "a number of at least 0"
                raise InputError(f"{self.name}: {option} is {value!r}; {wanted} is needed")
            self.settings[option] = value

    @cached_property
    def encoder(self) -> Encoder:
        # To read it off the checkpoint takes every weight into memory, which is for no peer to pay.
        return Encoder(**self.model.encoder) if self.model.encoder else read_encoder(self.model.checkpoint)

    def check(self, batch: Batch) -> None:
        """Raises ``InputError`` for what the model cannot compute."""
        outputs = {OUTPUT: ValueType("f32", ("tokens", self.encoder.hidden))}
        check_request(self.encoder, outputs, OUTPUT, batch)

    def calibration_feeds(self) -> list[Feeds]:
        """Of representative texts, one at a time: what stands in padding must not widen a range."""
        if not self.model.calibration:
            raise InputError(
                f"{self.model.name} has no calibration sequences, which {self.name} takes the ranges of static int8 "
                "from; take another backend, or a model with them"
            )
        return [self.encoder.feeds(Batch.of([ids])) for ids in self.model.calibration]

    def calibration_digest(self) -> str:
        return content_hash({"sequences": self.model.calibration})


class PaddedPeer(CheckpointPeer):
    """Runs a checkpoint by the Hugging Face layout on padded batches, and takes padding out again.

    The mask is given for full rectangles too, as a service would.
    """

    @abc.abstractmethod
    def prepare(self, feeds: Feeds) -> States:
        """A call that computes the rectangle each time; here is done what a service does once for a shape."""

    def bind(self, batch: Batch) -> Call:
        self.check(batch)
        feeds = self.encoder.feeds(batch)
        states, mask, hidden = self.prepare(feeds), feeds["attention_mask"], self.encoder.hidden
        tokens = np.flatnonzero(mask)
        if tokens.size == mask.size:
            return lambda: states().reshape(mask.size, hidden)
        return lambda: states().reshape(mask.size, hidden).take(tokens, axis=0)


def versions(*packages: str) -> dict[str, str]:
    """Installed versions by the names that pip knows."""
    return {package: version(package) for package in packages}


def source_digest(*parts: str) -> str:
    """SHA-256 of encast's Python below these files and folders of the package."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for part in parts:
        for file in sorted([package / part] if part.endswith(".py") else (package / part).rglob("*.py")):
            digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def load_object(target: str) -> Any:
    """What ``module:Name`` or ``/path/file.py:Name`` names; raises ``InputError`` that says what is wrong with it."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise InputError(f"{target!r} names nothing; write package.module:Name or /path/file.py:Name")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, OSError, SyntaxError) as error:
        of_encast = isinstance(error, ImportError) and (error.name or "").startswith("encast.")
        advice = f"import what there is, see {_PAGE}" if of_encast else "correct the YAML that names it"
        raise InputError(f"{target}: cannot be imported ({error}); {advice}") from None
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
        raise InputError(f"{target} is no Peer; derive it from encast.bench.peers.base.Peer, see {_PAGE}")
    if inspect.isabstract(found):
        absent = " and ".join(sorted(found.__abstractmethods__))
        raise InputError(
            f"{target} lacks {absent}; a Peer needs `open()` and `bind(batch)`, which returns the call that is timed, "
            f"one derived from PaddedPeer `open()` and `prepare(feeds)`: see {_PAGE}"
        )
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
