"""Everything that is made before a measurement, below one work folder, keyed by what it is made from."""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from peers import data
from peers.models import Model, Shape, inputs, torch_model

__all__ = [
    "MAX_TEXT_TOKENS",
    "add_options",
    "calibration_ids",
    "encast_artifact",
    "reference",
    "reference_embeddings",
    "token_counts",
]

STALE_SECONDS = 3600
MAX_TEXT_TOKENS = 256
"""Of all-MiniLM-L6-v2's texts."""


def add_options(parser: argparse.ArgumentParser) -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument(
        "--work",
        type=Path,
        default=cache / "encast-benchmarks",
        help="folder for exports (several GB; default: %(default)s)",
    )
    parser.add_argument("--prepare", action="store_true", help="make what is missing in the work folder; time nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round and fact there")
    data.add_option(parser)


def encast_artifact(model: Model, work: Path, dtype: str, task: str = "features") -> Path:
    """The artifact, compiled unless the very same compiler has made it before."""
    import encast

    digest = hashlib.sha256()
    package = Path(encast.__file__).parent
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    stem = f"{model.name}-{task}-{dtype}-"
    path = work / "encast" / f"{stem}{digest.hexdigest()[:12]}.encast"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path.parent, stem)
        encast.compile(model.checkpoint(work), path, dtype=dtype, task=task)
    return path


def _remove_stale(folder: Path, stem: str) -> None:
    """Removes artifacts of other compilers, except young ones that another run may be about to open."""
    for old in folder.glob(f"{stem}*.encast"):
        if time.time() - old.stat().st_mtime > STALE_SECONDS:
            for file in old.iterdir():
                file.unlink()
            old.rmdir()


def reference(model: Model, work: Path, shape: Shape) -> Any:
    """Last hidden states ``f32[tokens, hidden]`` of ``inputs(shape)``, by PyTorch in f32."""
    path = work / "reference" / f"{model.name}-{shape[0]}x{shape[1]}-torch{version('torch')}.npy"
    if not path.exists():
        import torch

        path.parent.mkdir(parents=True, exist_ok=True)
        ids = torch.from_numpy(inputs(shape)).long()
        with torch.inference_mode():
            module = torch_model(model, model.checkpoint(work), "sdpa")
            states = module(ids, torch.ones_like(ids), torch.zeros_like(ids))
        np.save(path, states.reshape(-1, model.hidden).numpy())
    return np.load(path)


def calibration_ids(model: Model, work: Path, folder: Path) -> list[list[int]] | None:
    """Token ids of real texts for a real model; None for random weights, which random ids calibrate as well."""
    return _token_ids(model, work, data.calibration_texts(folder)) if model.real else None


def token_counts(model: Model, work: Path, texts: list[str]) -> list[int]:
    """Tokens of each text, special ones included, as all backends cut them."""
    return [len(ids) for ids in _token_ids(model, work, texts)]


def reference_embeddings(model: Model, work: Path, texts: list[str]) -> Any:
    """Normalised means ``f32[texts, hidden]`` of the tokens' states, text by text, by PyTorch in f32."""
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
    path = work / "reference" / f"{model.name}-{digest}-torch{version('torch')}.npy"
    if not path.exists():
        import torch

        path.parent.mkdir(parents=True, exist_ok=True)
        module = torch_model(model, model.checkpoint(work), "sdpa")
        means = np.empty((len(texts), model.hidden), np.float32)
        with torch.inference_mode():
            for row, ids in enumerate(_token_ids(model, work, texts)):
                batch = torch.tensor([ids])
                means[row] = module(batch, torch.ones_like(batch), torch.zeros_like(batch))[0].mean(0).numpy()
        np.save(path, means / np.linalg.norm(means, axis=1, keepdims=True))
    return np.load(path)


def _token_ids(model: Model, work: Path, texts: list[str]) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model.checkpoint(work) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TEXT_TOKENS)
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]
