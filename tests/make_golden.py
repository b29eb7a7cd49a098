"""Makes ``tests/golden``: what transformers answers, in float32 and float64, for the made checkpoints.

Needs torch and transformers. Run from the repository root: ``python tests/make_golden.py [case ...]``; the case
``entities`` makes entities.json, see ``make_entities``. Every other file holds, for one case of ``checkpoints.CASES``:

- ``digest``: of the checkpoint that the numbers belong to; ``versions``: of torch and transformers
- ``NAME_f64``, ``NAME_f32``: the outputs of the packed batch (``last_hidden_state``, ``embedding``, ``logits``)
- ``rows`` (with ``last_hidden_state``): the rows that are kept
- ``key_f64`` (``features`` only): the key projections of the 2-token sequence, ``[layers, 2, hidden]``. The bias of
  a key adds the same number to all scores of a query, which softmax takes away again: no output can show it.

transformers has no JinaBERT: what is compared there is ``numpy_encoders.jina``, and of families that it does not have,
their ``answers``. It has had no relative positions since
version 5: ``numpy_encoders.relative``, which is held against transformers where that is of version 4.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from checkpoints import CASES, ENTITY_CASES, ENTITY_TEXTS, Case, Inputs, digest, inputs_of, make_case
from families import FAMILIES
from numpy_encoders import jina, relative
from relative_checkpoints import is_relative
from safetensors.numpy import load_file
from transformers_form import transformers_form

GOLDEN = Path(__file__).parent / "golden"
SEQUENCE_OF_KEYS = 1


def transformers_outputs(folder: Path, case: Case, inputs: Inputs, dtype: str) -> dict[str, np.ndarray[Any, Any]]:
    """Runs the checkpoint with transformers, one sequence at a time (no padding), in ``float32`` or ``float64``."""
    of_distances = is_relative(case.options.get("config", {}))
    if case.arch == "jina_bert" or of_distances or _own_answers(case) is not None:
        import transformers

        made = _packed(folder, case, inputs, *_by_numpy(folder, case, inputs, dtype))
        if of_distances and transformers.__version__.startswith("4."):
            _need_alike(case, dtype, made, _outputs(folder, case, inputs, dtype))
        return made
    with tempfile.TemporaryDirectory() as place:
        return _outputs(transformers_form(folder, case, Path(place) / "form"), case, inputs, dtype)


def _by_numpy(
    folder: Path, case: Case, inputs: Inputs, dtype: str
) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    """The rows of every sequence and the keys of one, of a model that transformers does not have (any more)."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    types = inputs.token_type_ids or [None] * len(inputs.token_ids)
    encoder = _own_answers(case) or (jina if case.arch == "jina_bert" else relative)
    made = [
        encoder(tensors, config, case.head, ids, kinds, np.dtype(dtype))
        for ids, kinds in zip(inputs.token_ids, types, strict=True)
    ]
    return [rows for rows, _ in made], made[SEQUENCE_OF_KEYS][1]


def _own_answers(case: Case) -> Any:
    return FAMILIES[case.arch].answers if case.arch in FAMILIES else None


def _need_alike(case: Case, dtype: str, made: dict[str, Any], theirs: dict[str, Any]) -> None:
    import transformers

    for name, wanted in theirs.items():
        off, most = np.abs(made[name] - wanted).max(), 1e-13 if dtype == "float64" else 1e-5
        print(f"{case.name} {name} {dtype}: {off:.1e} off transformers {transformers.__version__}", flush=True)
        if off > most * np.abs(wanted).max():
            raise RuntimeError(f"{case.name}: {name} is {off} off what transformers answers in {dtype}")


def _outputs(folder: Path, case: Case, inputs: Inputs, dtype: str) -> dict[str, np.ndarray[Any, Any]]:
    import torch
    import transformers

    classes = {
        "features": transformers.AutoModel,
        "embed": transformers.AutoModel,
        "embed_sparse": transformers.AutoModelForMaskedLM,
        "classify": transformers.AutoModelForSequenceClassification,
        "tag": transformers.AutoModelForTokenClassification,
        "answer": transformers.AutoModelForQuestionAnswering,
        "fill_mask": transformers.AutoModelForMaskedLM,
    }
    # The eager form of their attention takes its softmax in float32, whatever the model's dtype is.
    attention = "sdpa" if case.arch in ("modernbert", *FAMILIES) else "eager"
    # Some models have no head for answers; the folder then has it as one that labels tokens.
    answers = json.loads((folder / "config.json").read_text())["architectures"][0].endswith("QuestionAnswering")
    kind = "tag" if case.head == "answer" and not answers else case.head
    model, loading = classes[kind].from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention, output_loading_info=True
    )
    problems = {key: value for key, value in loading.items() if value}
    if problems:
        raise RuntimeError(f"{case.name}: transformers and the maker disagree about the tensors: {problems}")
    model.eval()
    keys: list[Any] = []
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in ("key", "k", "k_lin", "k_proj", "key_proj"):
            module.register_forward_hook(lambda module, args, result: keys.append(result[0].numpy()))
        elif name.endswith(".Wqkv"):
            module.register_forward_hook(lambda module, args, result: keys.append(result[0].chunk(3, -1)[1].numpy()))
        elif type(module).__name__ == "EuroBertRMSNorm" and dtype == "float64":
            module.forward = partial(_norm_in_float64, module)
        elif name.endswith("rotary_emb") and dtype == "float64":
            module.register_forward_hook(_angles_in_float64, with_kwargs=True)
    parts, kept_keys = [], []
    from transformers.models.deberta_v2 import modeling_deberta_v2
    from transformers.models.modernbert import modeling_modernbert

    turn = modeling_modernbert.apply_rotary_pos_emb if dtype == "float32" else _turned_in_float64
    root = modeling_deberta_v2.scaled_size_sqrt if dtype == "float32" else _root_in_float64
    with (
        torch.no_grad(),
        mock.patch.object(modeling_modernbert, "apply_rotary_pos_emb", turn),
        mock.patch.object(modeling_deberta_v2, "scaled_size_sqrt", root),
    ):
        for index, ids in enumerate(inputs.token_ids):
            keys.clear()
            arguments = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
            if inputs.token_type_ids is not None:
                arguments["token_type_ids"] = torch.tensor([inputs.token_type_ids[index]])
            answer = model(**arguments)
            if answers:
                parts.append(torch.stack([answer.start_logits[0], answer.end_logits[0]], dim=1).numpy())
            elif case.head in ("features", "embed"):
                parts.append(answer.last_hidden_state[0].numpy())
            else:
                parts.append(answer.logits[0].numpy() if case.head != "classify" else answer.logits.numpy())
            if index == SEQUENCE_OF_KEYS:
                # DeBERTa's layers project positions as they do keys.
                kept_keys = [_of_all_heads(key, model.config) for key in keys if len(key) == len(ids)]
    return _packed(folder, case, inputs, parts, kept_keys)


def _packed(folder: Path, case: Case, inputs: Inputs, parts: list[Any], keys: list[Any]) -> dict[str, Any]:
    """The outputs of a packed batch, of what was answered for each sequence."""
    import torch

    if case.head == "embed":
        return {"embedding": np.stack([embed(folder, torch.from_numpy(part)) for part in parts])}
    if case.head == "embed_sparse":
        return {"sparse_embedding": np.stack([part.max(axis=0).clip(0) for part in parts])}
    packed = np.concatenate(parts)
    if case.head == "features":
        return {"last_hidden_state": packed, "key": np.stack(keys)}
    return {"logits": packed[inputs.select] if case.head == "fill_mask" else packed}


def _of_all_heads(key: np.ndarray[Any, Any], config: Any) -> np.ndarray[Any, Any]:
    """Keys that heads share, once for each of them."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", heads)
    parts = key.reshape(len(key), groups, -1)
    return np.repeat(parts, heads // groups, axis=1).reshape(len(key), -1)


def _norm_in_float64(module: Any, x: Any) -> Any:
    """EuroBERT's norm in its own dtype: transformers rounds what it reads to float32, always."""
    import torch

    return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))


def _angles_in_float64(module: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Cosines and sines of angles in float64: transformers makes them in float32, whatever the model's dtype is."""
    import torch

    _, positions, *kind = (*args, *kwargs.values())
    size = result[0].shape[-1]
    parameters = module.config.rope_parameters[kind[0]] if kind else module.config.rope_parameters
    theta, factor = float(parameters["rope_theta"]), 1.0
    if parameters.get("rope_type") == "linear":
        factor = float(parameters["factor"])
    frequencies = 1.0 / factor * theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = (positions[..., None].double() * frequencies).repeat(1, 1, 2)
    assert (angles.cos() - result[0]).abs().max() < 1e-5
    assert (angles.sin() - result[1]).abs().max() < 1e-5
    return angles.cos(), angles.sin()


def _turned_in_float64(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[Any, Any]:
    """Queries and keys turned in their own dtype: transformers rounds them to float32 first, always."""
    import torch

    def turned(x: Any) -> Any:
        a, b = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(unsqueeze_dim) + torch.cat([-b, a], dim=-1) * sin.unsqueeze(unsqueeze_dim)

    return turned(q), turned(k)


def _root_in_float64(query: Any, factor: int) -> Any:
    """What DeBERTa's scores are divided by: transformers makes it in float32, whatever the model's dtype is."""
    import torch

    return torch.sqrt(torch.tensor(query.size(-1) * factor, dtype=torch.float64))


def embed(folder: Path, x: Any) -> np.ndarray[Any, Any]:
    """Pooling, dense and normalisation of one sequence, ``x: [tokens, hidden]``, as ``modules.json`` says."""
    import torch
    from safetensors.torch import load_file as load_tensors

    if not (folder / "modules.json").exists():
        return x.mean(dim=0).numpy()
    for module in json.loads((folder / "modules.json").read_text())[1:]:
        kind = module["type"].rsplit(".", 1)[-1]
        if kind == "Pooling":
            config = json.loads((folder / module["path"] / "config.json").read_text())
            weights = torch.arange(1, len(x) + 1, dtype=x.dtype)[:, None]
            pooled = {
                "pooling_mode_cls_token": x[0],
                "pooling_mode_max_tokens": x.max(dim=0).values,
                "pooling_mode_mean_tokens": x.mean(dim=0),
                "pooling_mode_mean_sqrt_len_tokens": x.sum(dim=0) / len(x) ** 0.5,
                "pooling_mode_weightedmean_tokens": (x * weights).sum(dim=0) / weights.sum(),
                "pooling_mode_lasttoken": x[-1],
            }
            x = torch.cat([value for mode, value in pooled.items() if config[mode]])
        elif kind == "Dense":
            config = json.loads((folder / module["path"] / "config.json").read_text())
            tensors = load_tensors(folder / module["path"] / "model.safetensors")
            x = torch.nn.functional.linear(x, tensors["linear.weight"].to(x.dtype), tensors["linear.bias"].to(x.dtype))
            activation = config["activation_function"].rsplit(".", 1)[-1]
            x = getattr(torch.nn, activation)()(x)
        elif kind == "Normalize":
            x = torch.nn.functional.normalize(x, dim=0)
    return x.numpy()


def kept_rows(inputs: Inputs) -> np.ndarray[Any, Any]:
    """The rows of hidden states that are committed: all but four in five of the longest sequence's."""
    starts = np.cumsum([0, *map(len, inputs.token_ids)])
    return np.array(
        [row for row in range(starts[-1]) if not starts[3] <= row < starts[4] or (row - starts[3]) % 5 == 4]
    )


def make(case: Case, folder: Path) -> None:
    import torch
    import transformers

    checkpoint, inputs = make_case(folder, case), inputs_of(case)
    kept: dict[str, Any] = {
        "digest": digest(checkpoint),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }
    for dtype, suffix in (("float64", "f64"), ("float32", "f32")):
        for name, value in transformers_outputs(checkpoint, case, inputs, dtype).items():
            if name == "key" and suffix == "f32":
                continue
            if name == "last_hidden_state":
                kept["rows"] = kept_rows(inputs)
                value = value[kept["rows"]]
            kept[f"{name}_{suffix}"] = value
    np.savez_compressed(GOLDEN / f"{case.name}.npz", **kept)


def make_entities(folder: Path) -> None:
    """``golden/entities.json``: what transformers' pipeline finds in ``ENTITY_TEXTS`` with its simple strategy."""
    import transformers

    found: dict[str, Any] = {}
    for case in ENTITY_CASES:
        checkpoint = str(make_case(folder, case))
        pipeline = transformers.pipeline("token-classification", model=checkpoint, aggregation_strategy="simple")
        found[case.name] = [
            [
                [one["entity_group"], float(one["score"]), one["start"], one["end"]]
                for one in (pipeline(text) if text else [])  # it refuses an empty text
            ]
            for text in ENTITY_TEXTS
        ]
    (GOLDEN / "entities.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[1:] in ([], ["entities"]):
            make_entities(Path(folder))
        if sys.argv[1:] == ["entities"]:
            return
        for name in sys.argv[1:] or CASES:
            make(CASES[name], Path(folder))
            print(name, flush=True)


if __name__ == "__main__":
    main()
