"""A small BERT in every format but the Hugging Face layout."""

from __future__ import annotations

import shutil
from pathlib import Path

from bundle_files import as_bundle
from checkpoints import make_checkpoint
from gluon_files import write_gluon
from keras_files import as_tf_model, tf_names
from onnx_files import CASES, checkpoint_of

__all__ = ["OTHERS", "write"]

OTHERS = {
    "gluon": "a file of GluonNLP",
    "tensorflow": "a checkpoint of TensorFlow",
    "keras": "a folder with weights of Keras",
    "onnx": "an ONNX file",
}
_GOLDEN = Path(__file__).parent.parent / "golden" / "onnx"
_EXPORT = "bert-features-dynamo-18.onnx"


def write(folder: Path, which: str) -> tuple[Path, Path]:
    """The checkpoint in the Hugging Face layout, and what is given of the other format."""
    source, given = folder / "net", folder / "given"
    if which == "onnx":
        case = next(case for case in CASES if case.file == _EXPORT)
        checkpoint_of(case, source)
        shutil.copytree(source, given, ignore=shutil.ignore_patterns("model.safetensors"))
        return source, Path(shutil.copy(_GOLDEN / case.file, given / "net.onnx"))
    make_checkpoint(source, "bert", "features", layers=2, hidden=32, tokenizer_json=False)
    if which == "gluon":
        return source, write_gluon(source, given, "bert", "features")
    if which == "tensorflow":
        return source, as_bundle(source, given) / "bert_model.ckpt"
    return source, as_tf_model(source, given, tf_names()["bert-features"])
