"""Random checkpoints in the layout of the Hugging Face hub, made with NumPy alone.

They are built to make mistakes visible: no bias is zero, no norm's gamma is one, attention is peaked (queries and keys
are scaled up), a few channels are outliers that one layer scales up and the next one down, tables of positions and
token types weigh as much as that of words.

Every number is a sum of frozen ``RandomState`` integers times a constant, so that a checkpoint has the same bits on
every platform and the committed outputs of transformers (``tests/golden``) belong to it.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_tokenizers import BYTE_LEVEL_VOCAB, write_tokenizer
from checkpoints_gated import (
    GATED,
    NOT_IN_TRANSFORMERS,
    TOKENIZERS,
    gated_cases,
    gated_config,
    gated_shapes,
    gated_stem,
    inject_gated_outliers,
)
from deberta_checkpoints import DEBERTA_OPTIONS, deberta_config, deberta_shapes
from families import FAMILIES
from relative_checkpoints import RELATIVE_CASES, distance_table, is_relative
from safetensors.numpy import save_file

__all__ = [
    "ARCHS",
    "CASES",
    "ENTITY_CASES",
    "ENTITY_TEXTS",
    "HEADS",
    "TRAINABLE",
    "Case",
    "Inputs",
    "digest",
    "inputs_of",
    "make_case",
    "make_checkpoint",
]

ARCHS = (
    "bert", "distilbert", "roberta", "xlm-roberta", "camembert", "electra", "mpnet", "albert", *GATED, "deberta-v2",
)  # fmt: skip
TRAINABLE = tuple(arch for arch in ARCHS if arch not in NOT_IN_TRANSFORMERS)
"""Those that transformers has, so that ``encast compress`` trains them."""
HEADS = ("features", "embed", "embed_sparse", "classify", "tag", "answer", "fill_mask")

_STEMS = {
    "bert": "Bert",
    "distilbert": "DistilBert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "electra": "Electra",
    "mpnet": "MPNet",
    "albert": "Albert",
    "deberta-v2": "DebertaV2",
}
_SUFFIXES = {
    "features": "Model",
    "embed": "Model",
    "embed_sparse": "ForMaskedLM",
    "classify": "ForSequenceClassification",
    "tag": "ForTokenClassification",
    "answer": "ForQuestionAnswering",
    "fill_mask": "ForMaskedLM",
}
_ROBERTAS = ("roberta", "xlm-roberta", "camembert")
_OUTLIER = 16.0


@dataclass(frozen=True)
class _Spec:
    """One checkpoint to make; see ``make_checkpoint``."""

    arch: str
    head: str
    layers: int
    hidden: int
    heads: int
    inner: int
    vocab: int
    seed: int
    positions: int
    type_vocab: int
    embedding: int
    labels: int
    activation: str
    layout: str
    tied: bool
    groups: int
    inner_group: int
    pooling: tuple[str, ...]
    dense: tuple[tuple[int, str], ...]
    normalize: bool
    splade: str | None
    problem_type: str | None
    old_names: bool
    config: Mapping[str, Any]


def make_checkpoint(
    folder: Path,
    arch: str,
    head: str,
    *,
    layers: int = 3,
    hidden: int = 64,
    heads: int = 4,
    inner: int | None = None,
    vocab: int = 200,
    seed: int = 0,
    positions: int = 48,
    type_vocab: int | None = None,
    embedding: int | None = None,
    labels: int = 3,
    activation: str | None = None,
    layout: str = "transformers",
    tied: bool = True,
    groups: int = 1,
    inner_group: int = 1,
    pooling: tuple[str, ...] = (),
    dense: tuple[tuple[int, str], ...] = (),
    normalize: bool = False,
    splade: str | None = None,
    problem_type: str | None = None,
    old_names: bool = False,
    tokenizer_json: bool = True,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes ``config.json``, ``model.safetensors``, the tokenizer's files and, for ``embed``, ``modules.json``.

    ``arch`` is a ``model_type``, ``head`` one of ``HEADS``. ``inner`` is twice ``hidden`` unless given. ``embedding``
    is the width of ELECTRA's and ALBERT's tables (half of ``hidden``). ``groups`` and ``inner_group`` are ALBERT's.
    ``activation`` is gelu unless given, NomicBERT's and most families' silu. ``layout``: see ``checkpoints_gated``.
    ``pooling`` (modes), ``dense`` ((width, torch activation class) each) and ``normalize`` describe modules.json; an
    ``embed`` head without ``pooling`` is a bare encoder. ``splade``: the activation_function of a sparse encoder's
    SpladePooling, for ``embed_sparse``; without it the folder is that of a masked-LM. ``old_names``: LayerNorm.gamma
    and beta. ``config`` overrides fields of config.json. Byte-level BPE (roberta) needs a vocabulary of 300, which
    replaces a smaller one.
    """
    spec = _Spec(
        arch=arch,
        head=head,
        layers=layers,
        hidden=hidden,
        heads=heads,
        inner=inner or 2 * hidden,
        vocab=max(vocab, BYTE_LEVEL_VOCAB) if arch == "roberta" else vocab,
        seed=seed,
        positions=positions,
        type_vocab=type_vocab if type_vocab is not None else _default_types(arch),
        embedding=(embedding or hidden // 2) if arch in ("electra", "albert") else embedding or hidden,
        labels=2 if head == "answer" else labels,
        activation=activation or _usual_activation(arch),
        layout=layout,
        tied=tied,
        groups=groups,
        inner_group=inner_group,
        pooling=pooling,
        dense=dense,
        normalize=normalize,
        splade=splade,
        problem_type=problem_type,
        old_names=old_names,
        config=config or {},
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _config(spec))
    tensors = _tensors(spec)
    if old_names:
        tensors = {_old_name(name): array for name, array in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, arch, TOKENIZERS.get(arch) or _stem(spec), spec.vocab, spec.positions, tokenizer_json)
    if pooling:
        _write_modules(folder, spec)
    if splade:
        _write_splade(folder, splade)
    return folder


def _usual_activation(arch: str) -> str:
    return FAMILIES[arch].activation if arch in FAMILIES else "silu" if arch == "nomic_bert" else "gelu"


def _default_types(arch: str) -> int:
    return 1 if arch in _ROBERTAS else 0 if arch == "deberta-v2" else 2


def digest(folder: Path) -> str:
    """SHA-256 over the names, shapes and bits of a made checkpoint's tensors and its config."""
    from safetensors.numpy import load_file

    total = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.rglob("*.safetensors")):
        for name, array in sorted(load_file(path).items()):
            total.update(f"{name}{array.shape}".encode())
            total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


# Config


def _stem(spec: _Spec) -> str:
    return gated_stem(spec) if spec.arch in GATED else _STEMS[spec.arch]


def _class_name(spec: _Spec) -> str:
    usual = _stem(spec) + _SUFFIXES[spec.head]
    return FAMILIES[spec.arch].class_names.get(spec.head, usual) if spec.arch in FAMILIES else usual


def _config(spec: _Spec) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [_class_name(spec)],
        "model_type": spec.arch,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.positions,
        "pad_token_id": 1 if spec.arch in (*_ROBERTAS, "mpnet") else 0,
        "tie_word_embeddings": spec.tied,
    }
    if spec.arch == "distilbert":
        config.update(
            dim=spec.hidden,
            n_layers=spec.layers,
            n_heads=spec.heads,
            hidden_dim=spec.inner,
            activation=spec.activation,
            sinusoidal_pos_embds=False,
        )
    else:
        config.update(
            hidden_size=spec.hidden,
            num_hidden_layers=spec.layers,
            num_attention_heads=spec.heads,
            intermediate_size=spec.inner,
            hidden_act=spec.activation,
            layer_norm_eps=1e-5 if spec.arch in (*_ROBERTAS, "mpnet") else 1e-12,
        )
    if spec.arch in GATED:
        config = gated_config(spec, config)
    elif spec.arch == "mpnet":
        config["relative_attention_num_buckets"] = 32
    elif spec.arch != "distilbert":
        config["type_vocab_size"] = spec.type_vocab
    if spec.arch == "deberta-v2":
        config.update(deberta_config(spec))
    if spec.arch in ("electra", "albert"):
        config["embedding_size"] = spec.embedding
    if spec.arch == "albert":
        config.update(num_hidden_groups=spec.groups, inner_group_num=spec.inner_group)
    if spec.head in ("classify", "tag", "answer"):
        config["id2label"] = {str(index): f"label {index}" for index in range(spec.labels)}
        config["label2id"] = {f"label {index}": index for index in range(spec.labels)}
    if spec.problem_type is not None:
        config["problem_type"] = spec.problem_type
    return {**config, **spec.config}


# Tensors


def _shapes(spec: _Spec) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and kind of every tensor; a kind says how it is filled."""
    hidden, table, prefix = spec.hidden, spec.embedding, ""
    if spec.head not in ("features", "embed"):
        prefix = {
            "distilbert": "distilbert.", "camembert": "roberta.", "xlm-roberta": "roberta.",
            "deberta-v2": "deberta.",
        }.get(spec.arch, spec.arch + ".")  # fmt: skip
    if spec.arch in GATED:
        yield from gated_shapes(spec)
        return
    if spec.arch == "deberta-v2":
        yield from deberta_shapes(spec, prefix)
        return

    def linear(name: str, size: int, inner: int, kind: str = "weight") -> Iterator[tuple[str, tuple[int, ...], str]]:
        yield f"{name}.weight", (size, inner), kind
        yield f"{name}.bias", (size,), "bias"

    def norm(name: str, size: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
        yield f"{name}.weight", (size,), "gamma"
        yield f"{name}.bias", (size,), "beta"

    embeddings = f"{prefix}embeddings"
    yield f"{embeddings}.word_embeddings.weight", (spec.vocab, table), "table"
    yield f"{embeddings}.position_embeddings.weight", (spec.positions, table), "table"
    if spec.arch not in ("distilbert", "mpnet"):
        yield f"{embeddings}.token_type_embeddings.weight", (spec.type_vocab, table), "table"
    yield from norm(f"{embeddings}.LayerNorm", table)
    if spec.arch == "electra" and table != hidden:
        yield from linear(f"{prefix}embeddings_project", hidden, table)
    if spec.arch == "albert":
        yield from linear(f"{prefix}encoder.embedding_hidden_mapping_in", hidden, table)
    if spec.arch == "mpnet":
        yield f"{prefix}encoder.relative_attention_bias.weight", (32, spec.heads), "relative"
    names = _layer_names(spec.arch)
    for path in _layer_paths(spec):
        at = f"{prefix}{path}."
        yield from linear(at + names["q"], hidden, hidden, "peaked")
        yield from linear(at + names["k"], hidden, hidden, "peaked")
        yield from linear(at + names["v"], hidden, hidden)
        if is_relative(spec.config):
            yield distance_table(at + names["k"], spec)
        yield from linear(at + names["o"], hidden, hidden)
        yield from norm(at + names["norm1"], hidden)
        yield from linear(at + names["up"], spec.inner, hidden)
        yield from linear(at + names["down"], hidden, spec.inner)
        yield from norm(at + names["norm2"], hidden)
    yield from _head_shapes(spec, prefix, linear, norm)


def _head_shapes(spec: _Spec, prefix: str, linear: Any, norm: Any) -> Iterator[tuple[str, tuple[int, ...], str]]:
    arch, head, hidden, labels = spec.arch, spec.head, spec.hidden, spec.labels
    pooled = arch in ("bert", "albert") and head == "classify"
    if pooled or (head in ("features", "embed") and arch not in ("distilbert", "electra")):
        yield from linear(f"{prefix}pooler" if arch == "albert" else f"{prefix}pooler.dense", hidden, hidden)
    if head == "tag" or pooled:
        yield from linear("classifier", labels, hidden)
    elif head == "answer":
        yield from linear("qa_outputs", 2, hidden)
    elif head == "classify" and arch == "distilbert":
        yield from linear("pre_classifier", hidden, hidden)
        yield from linear("classifier", labels, hidden)
    elif head == "classify":
        yield from linear("classifier.dense", hidden, hidden)
        yield from linear("classifier.out_proj", labels, hidden)
    elif head in ("fill_mask", "embed_sparse"):
        dense, layer_norm, decoder, bias = {
            "bert": (
                "cls.predictions.transform.dense",
                "cls.predictions.transform.LayerNorm",
                "cls.predictions.decoder",
                "cls.predictions.bias",
            ),
            "distilbert": ("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"),
            "electra": (
                "generator_predictions.dense",
                "generator_predictions.LayerNorm",
                "generator_lm_head",
                "generator_lm_head.bias",
            ),
            "albert": ("predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias"),
        }.get(arch, ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"))
        yield from linear(dense, spec.embedding, hidden)
        yield from norm(layer_norm, spec.embedding)
        if spec.tied:
            yield bias, (spec.vocab,), "bias"
        else:
            yield from linear(decoder, spec.vocab, spec.embedding)
            if bias != f"{decoder}.bias":
                yield bias, (spec.vocab,), "bias"  # saved by transformers too, and read by nothing


def _layer_paths(spec: _Spec) -> list[str]:
    if spec.arch == "albert":
        return [
            f"encoder.albert_layer_groups.{group}.albert_layers.{inner}"
            for group in range(spec.groups)
            for inner in range(spec.inner_group)
        ]
    return [f"{'transformer' if spec.arch == 'distilbert' else 'encoder'}.layer.{i}" for i in range(spec.layers)]


def _layer_names(arch: str) -> dict[str, str]:
    if arch == "deberta-v2":
        names = "attention.self.query_proj attention.self.key_proj attention.self.value_proj attention.output.dense"
        names += " attention.output.LayerNorm intermediate.dense output.dense output.LayerNorm"
    elif arch == "distilbert":
        names = "attention.q_lin attention.k_lin attention.v_lin attention.out_lin sa_layer_norm ffn.lin1 ffn.lin2"
        names += " output_layer_norm"
    elif arch == "albert":
        names = "attention.query attention.key attention.value attention.dense attention.LayerNorm ffn ffn_output"
        names += " full_layer_layer_norm"
    elif arch == "mpnet":
        names = "attention.attn.q attention.attn.k attention.attn.v attention.attn.o attention.LayerNorm"
        names += " intermediate.dense output.dense output.LayerNorm"
    else:
        names = "attention.self.query attention.self.key attention.self.value attention.output.dense"
        names += " attention.output.LayerNorm intermediate.dense output.dense output.LayerNorm"
    return dict(zip(("q", "k", "v", "o", "norm1", "up", "down", "norm2"), names.split(), strict=True))


def _bell(name: str, seed: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Roughly normal numbers of standard deviation 1.15: multiples of 2^-11 between -4 and 4, so sums are exact."""
    source = np.random.RandomState(zlib.crc32(f"{seed}/{name}".encode()))
    return (source.randint(0, 4096, size=(4, *shape), dtype=np.int32).sum(axis=0) - 8190) / 2048.0


def _tensors(spec: _Spec) -> dict[str, np.ndarray[Any, Any]]:
    made = {}
    for name, shape, kind in _shapes(spec):
        x = _bell(name, spec.seed, shape)
        if kind == "weight":
            x = x / math.sqrt(shape[1])
        elif kind == "peaked":
            x = 1.6 * x / math.sqrt(shape[1])
        elif kind == "peaked_qk":
            x = x / math.sqrt(shape[1])
            x[: 2 * shape[1]] *= 1.2
        elif kind == "gamma":
            x = 1.1 + 0.3 * x
        elif kind in ("bias", "beta"):
            x = 0.4 * x
        made[name] = x
    _inject_outliers(made, spec)
    return {name: array.astype(np.float32) for name, array in made.items()}


def _inject_outliers(made: dict[str, np.ndarray[Any, Any]], spec: _Spec) -> None:
    """Two hidden channels leave the first layer 16 times as large, and the second layer scales them down again.

    Three inner channels of every layer do the same within the feed-forward part. Layers that share their weights do
    both at once.
    """
    if spec.arch in GATED:
        inject_gated_outliers(made, spec)
        return
    names = _layer_names(spec.arch)
    prefix = next(name for name in made if name.endswith("embeddings.LayerNorm.weight")).partition("embeddings.")[0]
    paths = [prefix + path + "." for path in _layer_paths(spec)]
    channels = [3, spec.hidden // 2]
    first, second = paths[0], paths[min(1, len(paths) - 1)]
    for part in ("weight", "bias"):
        made[f"{first}{names['norm2']}.{part}"][channels] *= _OUTLIER
        made[f"{second}{names['norm1']}.{part}"][channels] /= _OUTLIER
    for part in ("q", "k", "v"):
        made[f"{second}{names[part]}.weight"][:, channels] /= _OUTLIER
    inner = [1, spec.inner // 3, spec.inner - 2]
    for path in paths:
        made[f"{path}{names['up']}.weight"][inner] *= 8.0
        made[f"{path}{names['up']}.bias"][inner] *= 8.0
        made[f"{path}{names['down']}.weight"][:, inner] /= 8.0


def _old_name(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


# Sentence modules


def _write_modules(folder: Path, spec: _Spec) -> None:
    entries = [("", "Transformer"), ("1_Pooling", "Pooling")]
    pooling: dict[str, Any] = {"word_embedding_dimension": spec.hidden, "include_prompt": True}
    for field_name, mode in (
        ("pooling_mode_cls_token", "cls"),
        ("pooling_mode_max_tokens", "max"),
        ("pooling_mode_mean_tokens", "mean"),
        ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
        ("pooling_mode_weightedmean_tokens", "weightedmean"),
        ("pooling_mode_lasttoken", "lasttoken"),
    ):
        pooling[field_name] = mode in spec.pooling
    (folder / "1_Pooling").mkdir(exist_ok=True)
    _write_json(folder / "1_Pooling" / "config.json", pooling)
    width = spec.hidden * len(spec.pooling)
    for size, activation in spec.dense:
        name = f"{len(entries)}_Dense"
        entries.append((name, "Dense"))
        (folder / name).mkdir(exist_ok=True)
        module = "torch.nn.modules.linear" if activation == "Identity" else "torch.nn.modules.activation"
        _write_json(
            folder / name / "config.json",
            {
                "in_features": width,
                "out_features": size,
                "bias": True,
                "activation_function": f"{module}.{activation}",
            },
        )
        weight = _bell(f"{name}.weight", spec.seed, (size, width)) / math.sqrt(width)
        bias = 0.4 * _bell(f"{name}.bias", spec.seed, (size,))
        tensors = {"linear.weight": weight.astype(np.float32), "linear.bias": bias.astype(np.float32)}
        save_file(tensors, folder / name / "model.safetensors")
        width = size
    if spec.normalize:
        entries.append((f"{len(entries)}_Normalize", "Normalize"))
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(entries)
    ]
    (folder / "modules.json").write_text(json.dumps(modules, indent=2))
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": 40, "do_lower_case": False})


def _write_splade(folder: Path, activation: str) -> None:
    """As SparseEncoder of sentence-transformers 5.0 to 5.3 writes it."""
    at = "sentence_transformers.sparse_encoder.models"
    modules = [("", f"{at}.MLMTransformer"), ("1_SpladePooling", f"{at}.SpladePooling")]
    _write_json(
        folder / "modules.json",
        [{"idx": index, "name": str(index), "path": path, "type": kind} for index, (path, kind) in enumerate(modules)],
    )
    (folder / "1_SpladePooling").mkdir(exist_ok=True)
    _write_json(
        folder / "1_SpladePooling" / "config.json",
        {"pooling_strategy": "max", "activation_function": activation, "word_embedding_dimension": None},
    )
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": 40, "do_lower_case": False})


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# The cases of the suites


@dataclass(frozen=True)
class Case:
    """A checkpoint of the test matrix: ``options`` are keyword arguments of ``make_checkpoint``."""

    name: str
    arch: str
    head: str
    options: Mapping[str, Any] = field(default_factory=dict)


def _cases() -> Iterator[Case]:
    for seed, arch in enumerate(ARCHS):
        for head in ("features", "classify", "tag", "answer", "fill_mask"):
            options = FAMILIES[arch].usual if arch in FAMILIES else {}
            yield Case(f"{arch}-{head}", arch, head, {"seed": {**GATED, "deberta-v2": 13}.get(arch, seed), **options})
    small = {"layers": 2, "seed": 20}
    for activation in ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu", "silu", "tanh"):
        yield Case(f"bert-{activation}", "bert", "features", {**small, "activation": activation})
    # Nothing here is a multiple of a vector's width: head_dim 15, 7 and 1.
    odd = {**small, "hidden": 60, "inner": 100, "vocab": 131}
    for arch in ("bert", "mpnet", "albert"):
        yield Case(f"{arch}-odd", arch, "features", odd)
    yield Case("electra-odd-fill_mask", "electra", "fill_mask", {**odd, "embedding": 21})
    yield Case("distilbert-head_dim-7", "distilbert", "features", {**small, "hidden": 21, "heads": 3, "inner": 17})
    yield Case("bert-head_dim-1", "bert", "classify", {**small, "hidden": 8, "heads": 8})
    yield Case("bert-one-head", "bert", "classify", {**small, "heads": 1, "labels": 1})
    yield Case(
        "bert-multi_label", "bert", "classify", {**small, "labels": 7, "problem_type": "multi_label_classification"}
    )
    yield Case("roberta-regression", "roberta", "classify", {**small, "labels": 1, "problem_type": "regression"})
    yield Case("bert-one-type", "bert", "features", {**small, "type_vocab": 1})
    yield Case("roberta-two-types", "roberta", "features", {**small, "type_vocab": 2})
    yield Case("roberta-pad-5", "roberta", "features", {**small, "positions": 52, "config": {"pad_token_id": 5}})
    yield Case("bert-old-names", "bert", "fill_mask", {**small, "old_names": True})
    yield Case("electra-wide-tables", "electra", "features", {**small, "embedding": 64})
    yield Case("albert-groups", "albert", "features", {"layers": 4, "groups": 2, "inner_group": 2, "seed": 21})
    biases = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")
    modern: dict[str, Any] = {"seed": 22, "config": dict.fromkeys(biases, True)}
    yield Case("modernbert-biases", "modernbert", "features", modern)
    yield Case("modernbert-biases-classify", "modernbert", "classify", modern)
    yield Case("modernbert-plain-decoder", "modernbert", "fill_mask", {**small, "config": {"decoder_bias": False}})
    mean = {"labels": 1, "config": {"classifier_pooling": "mean", "classifier_activation": "silu"}}
    yield Case("modernbert-mean", "modernbert", "classify", {**small, **mean})
    # One head of five fills no panel of 64 columns alone; the window sees three tokens to each side.
    wide = {"layers": 1, "hidden": 320, "heads": 5, "inner": 100, "seed": 23}
    yield Case("modernbert-wide", "modernbert", "tag", {**wide, "config": {"layer_types": ["sliding_attention"]}})
    yield Case("modernbert-odd", "modernbert", "features", {**odd, "heads": 3, "config": {"local_attention": 2}})
    yield Case("modernbert-silu", "modernbert", "features", {**small, "activation": "silu"})
    theta = {"full_attention": {"rope_type": "default", "rope_theta": 50.0}, "sliding_attention": {"rope_theta": 7}}
    kinds = ["sliding_attention", "full_attention"]
    new = {"config": {"rope_parameters": theta, "layer_types": kinds, "local_attention": 30}}
    yield Case("modernbert-layer_types", "modernbert", "features", {**small, **new})
    yield Case("modernbert-embed", "modernbert", "embed", {**small, "pooling": ("mean",), "normalize": True})
    for name, arch, head, options in gated_cases():
        yield Case(name, arch, head, options)
    for name, (head, options) in DEBERTA_OPTIONS.items():
        yield Case(f"deberta-v2-{name}", "deberta-v2", head, options)
    for name, arch, head, options in RELATIVE_CASES:
        yield Case(name, arch, head, options)
    for arch in ("bert", "roberta", "electra", "distilbert", "albert", "modernbert"):
        yield Case(f"{arch}-untied", arch, "fill_mask", {**small, "tied": False})
    yield Case("bert-relu-fill_mask", "bert", "fill_mask", {**small, "activation": "relu"})
    yield Case("roberta-relu-fill_mask", "roberta", "fill_mask", {**small, "activation": "relu"})
    yield Case("bert-embed-bare", "bert", "embed", small)
    yield Case("bert-embed", "bert", "embed", {**small, "pooling": ("mean",), "normalize": True})
    modes = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
    yield Case("mpnet-embed-every-mode", "mpnet", "embed", {**small, "pooling": modes, "normalize": True})
    yield Case("bert-embed_sparse", "bert", "embed_sparse", {**small, "splade": "relu"})
    yield Case("distilbert-embed_sparse", "distilbert", "embed_sparse", small)
    dense = ((48, "Tanh"), (24, "Identity"))
    yield Case("distilbert-embed-dense", "distilbert", "embed", {**small, "pooling": ("cls", "mean"), "dense": dense})


CASES = {case.name: case for case in _cases()}

_NAMES = ["O", "B-PER", "I-PER", "LOC", "I-creative-work", "S-PER"]
ENTITY_CASES = [
    Case(
        f"{arch}-entities",
        arch,
        "tag",
        {
            "layers": 1,
            "seed": 3,
            "labels": len(_NAMES),
            "tokenizer_json": False,
            "config": {
                "id2label": {str(index): name for index, name in enumerate(_NAMES)},
                "label2id": {name: index for index, name in enumerate(_NAMES)},
            },
        },
    )
    for arch in ("bert", "roberta")
]
"""Word pieces, and byte-level BPE, where a token begins with a space; labels of all kinds."""
ENTITY_TEXTS = [
    "",
    " ",
    "the cat and Bob, from Paris",
    "  two  spaces   before words ",
    "unbelievable-things; e.g. this (that)",
    "caf\u00e9 \u4e2d\u6587 \U0001f600 na\u00efve",
    "a b c d e f g h i j k l m n o p",
]


def make_case(folder: Path, case: Case) -> Path:
    """The checkpoint of a case, in ``folder / case.name``."""
    return make_checkpoint(folder / case.name, case.arch, case.head, **case.options)


@dataclass(frozen=True)
class Inputs:
    """What a case is asked: sequences of 1, 2, 17, 40 tokens and a pair of 7 + 6, with token types if it has them."""

    token_ids: list[list[int]]
    token_type_ids: list[list[int]] | None
    select: list[int]


def inputs_of(case: Case) -> Inputs:
    """Fixed token ids for a case. Models whose positions skip padding get padding tokens inside of a text."""
    source = np.random.RandomState(zlib.crc32(case.name.encode()))
    lengths = [1, 2, 17, 40, 13]
    vocab = case.options.get("vocab", 200)
    ids = [[int(token) for token in source.randint(6, vocab, size=length, dtype=np.int32)] for length in lengths]
    if case.arch in (*_ROBERTAS, "mpnet"):
        ids[2][5] = ids[2][6] = ids[3][39] = case.options.get("config", {}).get("pad_token_id", 1)
    elif case.options.get("layout") == "absolute":
        ids[2][5] = ids[2][6] = ids[3][39] = 0
    default = _default_types(case.arch)
    types = None
    if (
        case.arch not in ("distilbert", "mpnet", "modernbert", *FAMILIES)
        and case.options.get("type_vocab", default) > 1
    ):
        types = [[0] * length for length in lengths[:-1]] + [[0] * 7 + [1] * 6]
    return Inputs(ids, types, [0, 2, 3, 19, 24, 59, 60, 72])
