"""encast itself, as a service holds it: an engine on an artifact, packed ids in, last hidden states out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from encast.batch import Batch
from encast.bench.cache import cached, seconds_to_make
from encast.bench.peers.base import Call, Float32, Int32, Peer

__all__ = ["Encast"]


class Encast(Peer):
    """Options: ``exact`` (libm's functions instead of polynomials), ``pin`` (threads bound to cores)."""

    name = "encast"
    dtypes = ("f32", "bf16", "int8")
    modules = ("encast.engine", "encast.backends.cpu")

    def export(self) -> Mapping[str, Any]:
        path = self._artifact()
        return {"seconds": seconds_to_make(path.parent), "path": str(path)}

    def open(self) -> None:
        from encast.engine import load

        self._engine = load(self._artifact(), threads=self.threads, pin=bool(self.options["pin"]))

    def run(self, output: str, batch: Batch, select: Int32 | None = None) -> Float32:
        return self._engine.session.runnable.run(output, batch, select)

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

    def _artifact(self) -> Path:
        """Compiled unless the very same compiler has compiled the very same checkpoint before."""
        exact = bool(self.options["exact"])
        key = {"model": self.model.sha, "compiler": _compiler_digest(), "dtype": self.dtype, "exact": exact}

        def make(folder: Path) -> None:
            from encast.compile import compile

            compile(self.model.checkpoint, folder / "model.encast", dtype=self.dtype, task="features", exact=exact)

        return cached(self.cache, "encast", key, make) / "model.encast"


def _compiler_digest() -> str:
    """Of the Python that decides what an artifact holds."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for part in ("compile.py", "importers", "archs", "ir", "passes", "quant", "artifact"):
        for file in sorted([package / part] if part.endswith(".py") else (package / part).rglob("*.py")):
            digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    return digest.hexdigest()
