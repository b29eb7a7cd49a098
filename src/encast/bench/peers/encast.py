"""encast itself, as a service holds it: an engine on an artifact, packed ids in, last hidden states out."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

from encast.batch import Batch
from encast.bench.peers.base import Call, Peer, source_digest
from encast.bench.peers.card import why_no_card

__all__ = ["Encast", "EncastOnCard"]


class Encast(Peer):
    """Options: ``exact`` (libm's functions instead of polynomials), ``pin`` (threads bound to cores), ``sparse``
    (``always``: int8 products leave out the zeros of a pruned checkpoint)."""

    name = "encast"
    dtypes: ClassVar[tuple[str, ...]] = ("f32", "bf16", "int8")
    modules: ClassVar[tuple[str, ...]] = ("encast.engine", "encast.backends.cpu")
    any_format = True

    def converted(self) -> Path:
        """Compiled unless the very same compiler has compiled the very same checkpoint before."""
        options: dict[str, Any] = {
            "dtype": self.artifact_dtype,
            "exact": bool(self.options["exact"]),
            "sparse": str(self.options.get("sparse", "never")),
        }

        def make(folder: Path) -> None:
            from encast.compile import compile

            compile(self.model.checkpoint, folder / "model.encast", task="features", **options)

        return self.kept("encast", make, compiler=_compiler_digest(), **options) / "model.encast"

    @property
    def artifact_dtype(self) -> str:
        """That it is compiled to."""
        return self.dtype

    def open(self) -> None:
        from encast.engine import load

        self._engine = load(self.converted(), threads=self.threads, pin=bool(self.options["pin"]))

    def bind(self, batch: Batch) -> Call:
        ids, cu_seqlens, types = batch.token_ids, batch.cu_seqlens, batch.token_type_ids
        forward = self._engine.forward_packed
        return lambda: forward(ids, cu_seqlens, types)

    def facts(self) -> Mapping[str, Any]:
        try:
            installed = version("encast")
        except PackageNotFoundError:  # run from a source tree that is not installed
            installed = "0+unknown"
        return {"version": installed, "compiler": _compiler_digest()[:12], **self.options}

    def close(self) -> None:
        self._engine.close()


class EncastOnCard(Encast):
    """On a GPU. Options: ``exact``, ``sparse`` and ``device`` (of ``encast.load``); ``values``, its ``dtype``."""

    dtypes = ("f32", "f16", "bf16", "f8", "int8")
    modules = ("torch", "encast.engine", "encast.backends.gpu.runnable")
    extra = "cuda"

    @classmethod
    def missing(cls) -> str | None:
        return super().missing() or why_no_card()

    @property
    def artifact_dtype(self) -> str:
        return self.dtype if self.dtype in Encast.dtypes else "f32"

    def open(self) -> None:
        from encast.engine import load

        self._engine = load(self.converted(), device=str(self.options["device"]), dtype=self.options.get("values"))

    def facts(self) -> Mapping[str, Any]:
        from encast.backends.gpu.device import card_name

        runnable: Any = self._engine.runnable
        return {**super().facts(), "card": card_name(runnable.device), "report": runnable.report()}


def _compiler_digest() -> str:
    """Of the Python that decides what an artifact holds."""
    return source_digest("compile.py", "importers", "archs", "ir", "passes", "quant", "artifact")
