"""What the peers share that run a checkpoint by the Hugging Face layout on padded batches.

Such a peer takes ``input_ids``, ``attention_mask`` and, where the model has them, ``token_type_ids``, each
``i64[seqs, length]``, and computes states ``f32[seqs, length, hidden]``. The mask is given for full rectangles too, as
a service would.
"""

from __future__ import annotations

import abc
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from encast.backends.base import check_request
from encast.batch import Batch
from encast.bench.peers.base import Call, Float32, Int32, Int64, ModelFiles, Peer, pad
from encast.errors import InputError, install_hint
from encast.ir.types import ValueType

__all__ = [
    "OUTPUT",
    "CheckpointPeer",
    "Choices",
    "Encoder",
    "Feeds",
    "PaddedPeer",
    "Shape",
    "States",
    "not_installed",
    "read_encoder",
    "versions",
]

OUTPUT = "last_hidden_state"

Feeds = dict[str, Int64]
"""Inputs by name, each ``i64[seqs, length]``; in the order of ``Encoder.inputs``."""

Choices = Mapping[str, tuple[str, ...]]
"""Options that take one of a few words, and the words."""

Shape = tuple[int, int]
"""Sequences, and tokens of the longest."""

States = Callable[[], Float32]
"""A call that computes ``f32[seqs, length, hidden]``."""


@dataclass(frozen=True)
class Encoder:
    """What a checkpoint's config says of its encoder. ``kind`` is its ``model_type``."""

    kind: str
    layers: int
    heads: int
    hidden: int
    vocab: int
    type_vocab: int
    max_len: int

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs. A table of one token type is added to all tokens alike and needs no input."""
        return ("input_ids", "attention_mask", *(["token_type_ids"] if self.type_vocab > 1 else []))

    def check(self, output: str, batch: Batch, select: Int32 | None) -> None:
        """Raises ``InputError`` for what the model cannot compute."""
        check_request(self, {OUTPUT: ValueType("f32", ("tokens", self.hidden))}, output, batch, select)

    def feeds(self, batch: Batch) -> Feeds:
        # Whatever id stands in padding: it comes last, so no token's position counts it, and the mask hides it.
        padded = pad(batch)
        arrays = {
            "input_ids": padded.token_ids,
            "attention_mask": padded.mask,
            "token_type_ids": padded.token_type_ids,
        }
        return {name: arrays[name] for name in self.inputs}

    def example(self, seqs: int, length: int) -> Feeds:
        """Random words without padding, for tracing: real ids, so that no position is taken for padding."""
        ids = np.random.default_rng(0).integers(self.vocab // 2, self.vocab, (seqs, length))
        return self.feeds(Batch.of(ids.tolist()))


def read_encoder(checkpoint: Path) -> Encoder:
    """Raises ``CheckpointError`` or ``UnsupportedModelError``."""
    from encast.archs import build_graph  # as in `interpreted`
    from encast.importers import open_checkpoint

    opened = open_checkpoint(checkpoint)
    meta = build_graph(opened, "features").meta
    sizes = {name: getattr(meta, name) for name in ("layers", "heads", "hidden", "vocab", "type_vocab", "max_len")}
    return Encoder(str(opened.config.get("model_type")), **sizes)


class CheckpointPeer(Peer):
    """Knows its model's ``encoder`` and checks its options.

    ``settings`` are the options with their defaults: ``defaults`` says which there are, ``choices`` what those take
    that are one of a few words.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    choices: ClassVar[Choices] = {}

    def __init__(self, model: ModelFiles, dtype: str, threads: int, cache: Path, **options: Any) -> None:
        super().__init__(model, dtype, threads, cache, **options)
        unknown = sorted(options.keys() - self.defaults.keys())
        if unknown:
            known = ", ".join(sorted(self.defaults)) or "none"
            raise InputError(f"{self.name} has no option {unknown[0]!r}; it has: {known}")
        self.settings: dict[str, Any] = {**self.defaults, **options}
        for option, words in self.choices.items():
            if self.settings[option] not in words:
                raise InputError(
                    f"{self.name}: {option} is {self.settings[option]!r}; one of {', '.join(words)} is needed"
                )

    @cached_property
    def encoder(self) -> Encoder:
        # To read it off the checkpoint takes every weight into memory, which is for no peer to pay.
        return Encoder(**self.model.encoder) if self.model.encoder else read_encoder(self.model.checkpoint)


class PaddedPeer(CheckpointPeer):
    """Checks requests, pads, and takes padding out again."""

    @abc.abstractmethod
    def compute(self, feeds: Feeds) -> Float32:
        """``f32[seqs, length, hidden]`` of a rectangle that may never come again."""

    def prepare(self, feeds: Feeds) -> States:
        """A call that computes the rectangle each time; here is done what a service does once for a shape."""
        return lambda: self.compute(feeds)

    def run(self, output: str, batch: Batch, select: Int32 | None = None) -> Float32:
        self.encoder.check(output, batch, select)
        feeds = self.encoder.feeds(batch)
        return _without_padding(feeds, lambda: self.compute(feeds))()

    def bind(self, batch: Batch) -> Call:
        self.encoder.check(OUTPUT, batch, None)
        feeds = self.encoder.feeds(batch)
        return _without_padding(feeds, self.prepare(feeds))


def _without_padding(feeds: Feeds, states: States) -> Call:
    mask = feeds["attention_mask"]
    tokens = np.flatnonzero(mask)
    if tokens.size == mask.size:
        return lambda: states().reshape(mask.size, -1)

    def call() -> Float32:
        rectangle = states()
        return rectangle.reshape(mask.size, rectangle.shape[-1]).take(tokens, axis=0)

    return call


def not_installed(extra: str, *modules: str) -> str | None:
    """None when all can be imported, found without importing them; else how to install them."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return f"not installed ({', '.join(missing)}): {install_hint(extra)}" if missing else None


def versions(*packages: str) -> dict[str, str]:
    """Installed versions by the names that pip knows."""
    return {package: version(package) for package in packages}
