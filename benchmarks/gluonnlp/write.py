"""GluonNLP's models as its scripts save them, and what they answer.

    python3.8 -m venv gluon
    gluon/bin/pip install mxnet==1.9.1 numpy==1.23.5 safetensors "cython<3" "setuptools<60" wheel packaging
    gluon/bin/pip install --no-build-isolation --no-deps gluonnlp==0.10.0
    gluon/bin/python benchmarks/gluonnlp/write.py CHECKPOINT OUT [--scripts CLONE/scripts]
    python benchmarks/gluonnlp/compare.py OUT

For each model of ``MODELS`` a folder in OUT: ``net.params``, ``net.vocab``, the texts with the ids that GluonNLP makes
of them, and its answers in f32. CHECKPOINT is a BERT in the Hugging Face layout, with or without a head that
classifies, uncased, with ``hidden_act`` gelu and ``model.safetensors``: its ``vocab.txt`` is the vocabulary of all, and
the model ``checkpoint`` has its weights. The others have random weights. ``--scripts`` is the folder of GluonNLP's
repository at v0.10.0 with ``BertForQA`` and ``BERTTagger``, which the package lacks; without it the two models with
these heads are left out. The last line is for encast's own environment. Python 3.8 is the version that these releases
were made for.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import gluonnlp
import mxnet as mx
import numpy as np
from safetensors.numpy import load_file

TEXTS = [
    ["a man inspects the uniform of a figure in some east asian country.", "the man is sleeping"],
    ["Where did the queen's 3rd (unpublished) letter go?", "It was found in 1998, near Überlingen; nobody read it."],
    ["no", "yes"],
    ["one " * 40 + "end", "so long a text that attention has something to choose from: " * 3],
]
POSITIONS = 512
WEIGHTS = "model.safetensors"
# Name of the folder -> GluonNLP's model, its options, the head, how it is saved, what encast calls the output;
# "words": the logits of all tokens.
MODELS = {
    "bert-base": ("bert_12_768_12", {}, "", "save_parameters", "last_hidden_state"),
    "bert-base-classes": ("bert_12_768_12", {}, "classes", "save_parameters", "logits"),
    "bert-base-score": ("bert_12_768_12", {}, "score", "save_parameters", "logits"),
    "bert-base-words": ("bert_12_768_12", {"use_decoder": True}, "", "save_parameters", "words"),
    "bert-base-spans": ("bert_12_768_12", {"use_pooler": False}, "spans", "save_parameters", "logits"),
    "bert-base-tags": ("bert_12_768_12", {"use_pooler": False}, "tags", "save_parameters", "logits"),
    "bert-base-classes-collected": ("bert_12_768_12", {}, "classes", "collect_params", "logits"),
    "bert-base-classes-exported": ("bert_12_768_12", {}, "classes", "export", "logits"),
    "bert-large": ("bert_24_1024_16", {}, "", "save_parameters", "last_hidden_state"),
    "bert-large-classes": ("bert_24_1024_16", {}, "classes", "save_parameters", "logits"),
    "roberta-base": ("roberta_12_768_12", {}, "", "save_parameters", "last_hidden_state"),
    "roberta-base-words": ("roberta_12_768_12", {"use_decoder": True}, "", "save_parameters", "words"),
    "roberta-base-classes": ("roberta_12_768_12", {}, "classes", "save_parameters", "logits"),
    "roberta-large-classes": ("roberta_24_1024_16", {}, "classes", "save_parameters", "logits"),
    "distilbert": ("distilbert_6_768_12", {}, "", "save_parameters", "last_hidden_state"),
    "ernie-classes": ("ernie_12_768_12", {}, "classes", "save_parameters", "logits"),
}


def spread(net: Any) -> None:
    """Random weights as of a trained model: norms that scale and shift, biases that are not zero."""
    mx.random.seed(0)
    for name, parameter in net.collect_params().items():
        mean, deviation = (1, 0.1) if name.endswith("gamma") else (0, 0.1 if name.endswith(("bias", "beta")) else 0.04)
        parameter.set_data(mx.nd.random.normal(mean, deviation, parameter.shape))


# Of a layer, in the Hugging Face layout -> in GluonNLP.
PRODUCTS = {
    **{f"attention.self.{part}": f"attention_cell.proj_{part}" for part in ("query", "key", "value")},
    "attention.output.dense": "proj",
    "intermediate.dense": "ffn.ffn_1",
    "output.dense": "ffn.ffn_2",
}
NORMS = {"attention.output.LayerNorm": "layer_norm", "output.LayerNorm": "ffn.layer_norm"}


def with_weights(checkpoint: Path, vocabulary: Any) -> Any:
    """The model of ``checkpoint``, a classifier if it has that head, without its dropout."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if config["hidden_act"] != "gelu":
        sys.exit(f"{checkpoint}: hidden_act is {config['hidden_act']}; this model of GluonNLP has gelu")
    stored = {re.sub(r"^bert\.", "", name): array for name, array in load_file(checkpoint / WEIGHTS).items()}
    stored.pop("embeddings.position_ids", None)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    net, _ = gluonnlp.model.get_model(
        "bert_12_768_12", dataset_name=None, vocab=vocabulary, pretrained=False, use_decoder=False,
        use_classifier=False, hparam_allow_override=True, num_layers=layers, units=hidden, embed_size=hidden,
        hidden_size=config["intermediate_size"], num_heads=config["num_attention_heads"],
        layer_norm_eps=config["layer_norm_eps"],
    )  # fmt: skip
    names = {"embeddings.position_embeddings.weight": "encoder.position_weight"}
    names.update({f"embeddings.{part}_embeddings.weight": f"{part}_embed.0.weight" for part in ("word", "token_type")})
    products = {"pooler.dense": "pooler"}
    norms = {"embeddings.LayerNorm": "encoder.layer_norm"}
    for layer in range(layers):
        own, gluon = f"encoder.layer.{layer}.", f"encoder.transformer_cells.{layer}."
        products.update({own + a: gluon + b for a, b in PRODUCTS.items()})
        norms.update({own + a: gluon + b for a, b in NORMS.items()})
    if "classifier.weight" in stored:
        net = gluonnlp.model.BERTClassifier(net, num_classes=len(stored["classifier.weight"]))
        names = {own: f"bert.{gluon}" for own, gluon in names.items()}
        products = {own: f"bert.{gluon}" for own, gluon in products.items()}
        norms = {own: f"bert.{gluon}" for own, gluon in norms.items()}
        products["classifier"] = "classifier.0"
    names.update({f"{own}.{kind}": f"{gluon}.{kind}" for own, gluon in products.items() for kind in ("weight", "bias")})
    for own, gluon in norms.items():
        names.update({f"{own}.weight": f"{gluon}.gamma", f"{own}.bias": f"{gluon}.beta"})
    if stored.keys() != names.keys():
        sys.exit(f"{checkpoint}: has tensors more or less than a BERT: {sorted(stored.keys() ^ names.keys())[:4]}")
    order = {token: at for at, token in enumerate(read_words(checkpoint))}
    words = "embeddings.word_embeddings.weight"
    stored[words] = stored[words][[order[token] for token in vocabulary.idx_to_token]]
    net.initialize()
    parameters = net._collect_params_with_prefix()
    for own, gluon in names.items():
        parameters[gluon].shape = stored[own].shape
        parameters[gluon].set_data(mx.nd.array(stored[own]))
    return net


def build(name: str, options: dict[str, bool], head: str, vocabulary: Any, scripts: Path | None) -> Any:
    family = name.split("_")[0]
    choices = {"pretrained": False, "vocab": vocabulary, "dataset_name": None}
    if family in ("bert", "ernie"):
        choices.update(use_pooler=True, use_classifier=False)
    if family != "distilbert":
        choices.update(use_decoder=False)
    encoder, _ = gluonnlp.model.get_model(name, **{**choices, **options})
    if head == "spans":
        return _script(scripts, "bert/model/qa.py").BertForQA(encoder)
    if head == "tags":
        return _script(scripts, "ner/model.py").BERTTagger(encoder, 5, 0.1)
    if head:
        kind = gluonnlp.model.RoBERTaClassifier if family == "roberta" else gluonnlp.model.BERTClassifier
        return kind(encoder, num_classes=1 if head == "score" else 3, dropout=0.1)
    return encoder


def _script(scripts: Path | None, path: str) -> Any:
    assert scripts is not None
    spec = importlib.util.spec_from_file_location(Path(path).stem, scripts / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_words(checkpoint: Path) -> list[str]:
    return (checkpoint / "vocab.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")


def word_pieces(checkpoint: Path) -> Any:
    words = read_words(checkpoint)
    if any(word.isalpha() and word != word.lower() for word in words):
        sys.exit(f"{checkpoint}: vocab.txt is cased, and texts are lowered here")
    special = {"[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"}
    tokens = [word for word in words if word not in special]
    return gluonnlp.vocab.BERTVocab(collections.Counter({token: len(tokens) - at for at, token in enumerate(tokens)}))


def letters() -> Any:
    """What RoBERTa's byte pairs are without merges."""
    signs = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    signs += [chr(256 + at) for at in range(256 - len(signs))]
    special = {"unknown_token": "<unk>", "padding_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    places = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4 + len(signs)}
    return gluonnlp.Vocab(collections.Counter(signs), **special, mask_token="<mask>", token_to_idx=places)


def encode(vocabulary: Any, family: str) -> tuple[list[list[list[str]]], list[list[int]], list[list[int]]]:
    """Texts, ids and types of each row; for RoBERTa random ids, as its merges are not ours to give."""
    if family == "roberta":
        random = np.random.default_rng(0)
        rows = [[0, *random.integers(4, len(vocabulary) - 1, length), 2] for length in (30, 7, 1, 200)]
        return [], [[int(value) for value in row] for row in rows], [[0] * len(row) for row in rows]
    tokenizer = gluonnlp.data.BERTTokenizer(vocabulary, lower=True)
    cut = gluonnlp.data.BERTSentenceTransform(tokenizer, POSITIONS, pad=False)
    if family == "distilbert":
        cut = gluonnlp.data.BERTSentenceTransform(tokenizer, POSITIONS, pad=False, pair=False)
    texts = [[pair[0]] if family == "distilbert" else pair for pair in TEXTS]
    found = [cut(tuple(text)) for text in texts]
    return texts, [row[0].tolist() for row in found], [row[2].tolist() for row in found]


def answer(net: Any, ids: list[list[int]], types: list[list[int]], family: str, words: bool) -> Any:
    """One padded batch, as the scripts run it."""
    longest = max(map(len, ids))
    padded, kinds = (
        mx.nd.array([row + [1 if rows is ids else 0] * (longest - len(row)) for row in rows], dtype="int32")
        for rows in (ids, types)
    )
    lengths = mx.nd.array([len(row) for row in ids], dtype="float32")
    inputs = [padded, lengths] if family in ("roberta", "distilbert") else [padded, kinds, lengths]
    if words:
        everywhere = mx.nd.array(np.tile(np.arange(longest), (len(ids), 1)), dtype="int32")
        return net(*inputs, everywhere)[-1]
    found = net(*inputs)
    return found[0] if isinstance(found, (list, tuple)) else found


def tokens_of(found: Any, ids: list[list[int]]) -> Any:
    """Without the padding, where each token has an answer."""
    return np.concatenate([found[at, : len(row)] for at, row in enumerate(ids)]) if found.ndim == 3 else found


def write_random(
    folder: Path, model: tuple[str, dict[str, bool], str, str, str], scripts: Path | None, pieces: Any
) -> None:
    name, options, head, how, output = model
    family = name.split("_")[0]
    vocabulary = letters() if family == "roberta" else pieces
    net = build(name, options, head, vocabulary, scripts)
    net.initialize()
    _, ids, types = encode(vocabulary, family)
    answer(net, ids, types, family, output == "words")  # which gives every parameter its shape
    spread(net)
    write(folder, net, vocabulary, family, how, output)


def write_checkpoint(folder: Path, checkpoint: Path, pieces: Any) -> None:
    net = with_weights(checkpoint, pieces)
    folder.mkdir()
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    kept = ("num_attention_heads", "hidden_act", "layer_norm_eps", "id2label")
    config = {name: config[name] for name in kept if name in config}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    output = "logits" if isinstance(net, gluonnlp.model.BERTClassifier) else "last_hidden_state"
    write(folder, net, pieces, "bert", "save_parameters", output)


def write(folder: Path, net: Any, vocabulary: Any, family: str, how: str, output: str) -> None:
    folder.mkdir(exist_ok=True)
    if how == "export":
        net.hybridize()
    texts, ids, types = encode(vocabulary, family)
    found = answer(net, ids, types, family, output == "words").asnumpy()
    if how == "export":
        net.export(str(folder / "net"))
        (folder / "net-0000.params").rename(folder / "net.params")
    elif how == "collect_params":
        net.collect_params().save(str(folder / "net.params"))
    else:
        net.save_parameters(str(folder / "net.params"))
    np.save(folder / "answers.npy", tokens_of(found, ids))
    (folder / "net.vocab").write_text(vocabulary.to_json(), encoding="utf-8")
    if family == "roberta":
        (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    else:
        (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    rows = {"texts": texts, "ids": ids, "types": types, "output": output}
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scripts", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    pieces = word_pieces(options.checkpoint)
    for name in ("checkpoint", *MODELS):
        folder = options.out / name
        if name in MODELS and MODELS[name][2] in ("spans", "tags") and options.scripts is None:
            print(f"{folder}: left out, it needs --scripts")
            continue
        if (folder / "rows.json").exists():  # which is written last
            continue
        shutil.rmtree(folder, ignore_errors=True)
        if name == "checkpoint":
            write_checkpoint(folder, options.checkpoint, pieces)
        else:
            write_random(folder, MODELS[name], options.scripts, pieces)
        print(folder, flush=True)


if __name__ == "__main__":
    main()
