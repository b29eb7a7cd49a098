"""CTranslate2's encoder: a converted checkpoint, int8 weights with activations quantised as they come.

It takes sequences of unequal lengths and leaves padding out of its products. Its builds for CPUs have no bf16.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from encast.bench.peers.base import Feeds, Float32, PaddedPeer, States
from encast.bench.peers.pytorch import import_torch, quiet
from encast.errors import InputError

__all__ = ["CTranslate2"]

_KINDS = ("bert", "distilbert", "roberta", "xlm-roberta", "camembert")
"""Architectures that both its converter and its encoder know."""

_COMPUTE = {"f32": "float32", "int8": "int8_float32"}


class CTranslate2(PaddedPeer):
    """int8: products of linears; attention and everything else in f32."""

    name = "CTranslate2"
    dtypes = ("f32", "int8")
    modules = ("ctranslate2",)
    needs = ("torch", "transformers")
    extra = "bench-ctranslate2"

    def converted(self) -> Path:
        kind = self.encoder.arch
        if kind not in _KINDS:
            raise InputError(f"CTranslate2 has no encoder for {kind} models; it has {', '.join(_KINDS)}")
        packages = ("ctranslate2", "torch", "transformers")
        return self.kept("ctranslate2", self._convert, packages, dtype=self.dtype) / "model"

    def open(self) -> None:
        self._library: Any = importlib.import_module("ctranslate2")
        self._encoder = self._library.Encoder(
            str(self.converted()),
            device="cpu",
            compute_type=_COMPUTE[self.dtype],
            inter_threads=1,
            intra_threads=self.threads,
        )

    def prepare(self, feeds: Feeds) -> States:
        encoder, view = self._encoder, self._library.StorageView.from_array
        ids = view(feeds["input_ids"].astype(np.int32))
        lengths = view(feeds["attention_mask"].sum(1).astype(np.int32))
        types = feeds.get("token_type_ids")
        # It takes them as lists alone, and fills in zeros by itself.
        rows = types.tolist() if types is not None and types.any() else None

        def call() -> Float32:
            return np.array(encoder.forward_batch(ids, lengths, rows).last_hidden_state, copy=None)

        return call

    def facts(self) -> Mapping[str, Any]:
        return {
            "version": self._library.__version__,
            "compute_type": self._encoder.compute_type,
            "supported": sorted(self._library.get_supported_compute_types("cpu")),
            "threads": self.threads,
            "interop_threads": self._encoder.num_encoders,
        }

    def close(self) -> None:
        del self._encoder

    def _convert(self, folder: Path) -> None:
        converter = _converter(self.model.checkpoint, self.encoder.vocab)
        try:
            with quiet():
                converter.convert(str(folder / "model"), quantization=None if self.dtype == "f32" else "int8")
        except (AttributeError, KeyError, ValueError) as error:
            raise InputError(
                f"CTranslate2's converter refuses {self.model.name}: {type(error).__name__}: {error}; leave this "
                "backend out for it"
            ) from error


def _converter(checkpoint: Path, vocab: int) -> Any:
    """Its converter, which is told two things that this version of transformers, or the checkpoint, does not say."""
    base: Any = importlib.import_module("ctranslate2.converters").TransformersConverter

    class Converter(base):  # type: ignore[misc]
        def load_model(self, model_class: Any, path: str, **options: Any) -> Any:
            model = super().load_model(model_class, path, **{**options, "dtype": import_torch().float32})
            # The converters ask for a field that was dropped when all models came to have absolute positions.
            if not hasattr(model.config, "position_embedding_type"):
                model.config.position_embedding_type = "absolute"
            return model

        def load_tokenizer(self, tokenizer_class: Any, path: str, **options: Any) -> Any:
            # Ids come in, so words have no meaning; the converted model must have as many as its table has rows.
            words = {f"[{index}]": index for index in range(vocab)}
            special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "[0]")
            return SimpleNamespace(get_vocab=lambda: words, **special)

    return Converter(str(checkpoint))
