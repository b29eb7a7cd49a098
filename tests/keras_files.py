"""Checkpoints with Keras's weights: those that the frameworks wrote (``golden/keras``), and more of the same names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import make_checkpoint

__all__ = ["ARCHS", "GOLDEN", "HEADS", "SMALL", "WHOLE", "as_tf_model", "checkpoint_of", "tf_names"]

GOLDEN = Path(__file__).parent / "golden" / "keras"
ARCHS = (
    "bert", "distilbert", "roberta", "xlm-roberta", "camembert", "electra", "mpnet", "albert", "deberta-v2",
)  # fmt: skip
"""Those that transformers 4 had for TensorFlow too."""
HEADS = ("features", "classify", "tag", "answer", "fill_mask")
SMALL: dict[str, Any] = {"layers": 1, "hidden": 8, "heads": 2, "vocab": 60}
WHOLE: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "bert-classify": ("bert", "classify", SMALL, "1GB"),
    "albert-fill_mask": ("albert", "fill_mask", {**SMALL, "inner": 12}, "4KB"),
}
"""What TensorFlow wrote whole: architecture, head, options of ``make_checkpoint``, and the size of shards."""


def checkpoint_of(folder: Path, arch: str, head: str, **options: Any) -> Path:
    """The checkpoint of PyTorch."""
    return make_checkpoint(folder / f"{arch}-{head}", arch, head, **options)


def as_tf_model(source: Path, target: Path, names: dict[str, str]) -> Path:
    """The checkpoint ``source`` with its weights in ``tf_model.h5``, at the paths that TensorFlow gave a model with one
    layer; ``names`` is an entry of ``tf_names.json``. Paths that no tensor is for hold zeros, as of an unused pooler.
    """
    import h5py
    from safetensors.numpy import load_file

    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    # transformers saves ALBERT's second name for this bias; the maker of checkpoints does not.
    decoder = {"predictions/decoder/bias:0": tensors.get("predictions.bias", np.zeros(1, "f4"))}
    (target / "model.safetensors").unlink()
    with h5py.File(target / "tf_model.h5", "w") as file:
        for path, name in names.items():
            layers = [0]
            if ".layer.0." in name or name.startswith("layer.0."):
                layers = [i for i in range(99) if name.replace("layer.0.", f"layer.{i}.") in tensors]
            for layer in layers:
                at = path.replace("layer_._0", f"layer_._{layer}")
                if name:
                    tensor = tensors[name.replace("layer.0.", f"layer.{layer}.")]
                else:
                    tensor = next((value for end, value in decoder.items() if at.endswith(end)), np.zeros(1, "f4"))
                file.create_dataset(at, data=tensor.T if path.endswith("kernel:0") else tensor)
    return target


def tf_names() -> dict[str, dict[str, str]]:
    names: dict[str, dict[str, str]] = json.loads((GOLDEN / "tf_names.json").read_text())
    return names
