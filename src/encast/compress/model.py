"""A checkpoint as a module of torch with the head of a task, and back to an ordinary checkpoint."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, its usual name
import transformers

from encast.archs import build_graph, need_transformers
from encast.compress.records import write_stage
from encast.compress.tasks import TrainTask
from encast.errors import CheckpointError, EncastError, InputError
from encast.files import sync_folder
from encast.importers import Checkpoint
from encast.importers.tokenizer_build import SENTENCEPIECE_FILES
from encast.sparsity.files import copy_files
from encast.tasks.tokenize import Tokenizer

__all__ = [
    "LAYER",
    "Answers",
    "Model",
    "evenly",
    "files_of",
    "head_labels",
    "kept_layers",
    "load_model",
    "longest_text",
    "open_tokenizer",
    "save_checkpoint",
]

Tensor = Any

_ACTIVATIONS = {"tanh": torch.tanh, "gelu": F.gelu, "relu": torch.relu, "silu": F.silu, "none": lambda x: x}
_TOKENIZER_FILES = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt", "vocab.json", "merges.txt",
    *SENTENCEPIECE_FILES,
)  # fmt: skip
_ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout")
_DROPOUTS = (
    "hidden_dropout_prob", "dropout", "classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout",
    "qa_dropout", "summary_last_dropout", "embedding_dropout", "mlp_dropout", "pooler_dropout",
)  # fmt: skip
LAYER = re.compile(r"\blayers?\.([0-9]+)(?=\.)")
"""The number of a layer in the name of a parameter."""
_LAYER_COUNTS = ("num_hidden_layers", "n_layers")


@dataclass(frozen=True)
class Answers:
    """What a model says of a batch: its task's answers; of all layers the hidden states, and attention's weights."""

    answers: Tensor
    hidden: Sequence[Tensor] = ()
    attention: Sequence[Tensor] = ()


class Model:
    """A module of transformers on its device; ``checkpoint`` is what it was made from."""

    def __init__(self, module: Any, checkpoint: Checkpoint, task: TrainTask) -> None:
        self.module, self.checkpoint, self.task = module, checkpoint, task
        self.pad = int(module.config.pad_token_id or 0)
        self.typed = int(getattr(module.config, "type_vocab_size", 0) or 0) > 1
        self._dense = [] if checkpoint.modules is None else [_dense(one) for one in checkpoint.modules.dense]

    @property
    def device(self) -> Any:
        return next(self.module.parameters()).device

    def parameters(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters())

    def __call__(
        self, ids: Tensor, types: Tensor, mask: Tensor, *, hidden: bool = False, attention: bool = False
    ) -> Answers:
        """``ids, types: i64[rows, length]``, ``mask: bool[rows, length]``. ``hidden``, ``attention``: those too."""
        given = {"input_ids": ids, "attention_mask": mask.long()}
        if self.typed:
            given["token_type_ids"] = types
        wanted = {"output_hidden_states": hidden, "output_attentions": attention}
        out = self.module(**given, **{name: True for name, value in wanted.items() if value})
        return Answers(
            self._answers(out, mask),
            out.hidden_states or () if hidden else (),
            tuple(one for one in out.attentions or () if one is not None) if attention else (),
        )

    def _answers(self, out: Any, mask: Tensor) -> Tensor:
        if self.task.task == "answer":
            return torch.stack([out.start_logits, out.end_logits], -1)
        if self.task.task == "embed":
            return self._embedding(out.last_hidden_state, mask)
        return out.logits

    def _embedding(self, states: Tensor, mask: Tensor) -> Tensor:
        """Pooled as the checkpoint's modules say, by the mean where it has none."""
        modules = self.checkpoint.modules
        modes = ("mean",) if modules is None else modules.pooling_modes
        x = torch.cat([_POOLING[mode](states, mask.unsqueeze(-1).to(states.dtype)) for mode in modes], -1)
        for weight, bias, activation in self._dense:
            x = activation(F.linear(x, weight.to(x), None if bias is None else bias.to(x)))
        return F.normalize(x, dim=-1) if modules is not None and modules.normalize else x


def _dense(module: Any) -> tuple[Tensor, Tensor | None, Any]:
    bias = None if module.bias is None else torch.from_numpy(module.bias.copy())
    return torch.from_numpy(module.weight.copy()), bias, _ACTIVATIONS[module.activation]


def _weighted(states: Tensor, mask: Tensor) -> Tensor:
    weights = mask * torch.arange(1, states.shape[1] + 1, device=states.device, dtype=states.dtype)[None, :, None]
    return (states * weights).sum(1) / weights.sum(1)


def _last(states: Tensor, mask: Tensor) -> Tensor:
    last = mask[..., 0].sum(1).long() - 1
    return states[torch.arange(len(states), device=states.device), last]


_POOLING = {
    "cls": lambda states, mask: states[:, 0],
    "mean": lambda states, mask: (states * mask).sum(1) / mask.sum(1),
    "max": lambda states, mask: states.masked_fill(mask == 0, -torch.inf).amax(1),
    "mean_sqrt_len_tokens": lambda states, mask: (states * mask).sum(1) / mask.sum(1).sqrt(),
    "weightedmean": _weighted,
    "lasttoken": _last,
}


def files_of(checkpoint: Checkpoint) -> dict[str, str]:
    """SHA-256 of the files that a model is made of, by name."""
    _ = checkpoint.tokenizer  # its files count once it was asked for
    files: dict[str, str] = checkpoint.provenance["files"]
    return files


def longest_text(checkpoint: Checkpoint, limit: int | None = None) -> int:
    """Tokens of the longest row, special ones included, that the checkpoint takes; ``limit``: and at most so many."""
    longest = build_graph(checkpoint, "features").meta.longest_text(checkpoint.tokenizer.max_length)
    return longest if limit is None else min(limit, longest)


def open_tokenizer(checkpoint: Checkpoint, max_length: int) -> Tokenizer:
    """The checkpoint's tokenizer, cutting rows at ``max_length`` tokens."""
    side = checkpoint.tokenizer.truncation_side
    return Tokenizer(checkpoint.tokenizer.json, max_length=max_length, truncation_side=side)


def load_model(
    checkpoint: Checkpoint,
    task: TrainTask,
    *,
    seed: int,
    layers: Sequence[int] | int | None = None,
    dropout: float | None = None,
    attention: bool = False,
    device: str = "cpu",
) -> Model:
    """The checkpoint with the head of the task: its own, or a new one with random weights by ``seed``.

    ``layers``: which of its layers stay, or how many. ``dropout``: instead of what the config says; the config that is
    saved later stays as it was. ``attention``: its weights will be asked for; it then has no dropout,
    whose zeros would be learned. A head of other sizes is replaced by a new one, and stderr says so.
    Raises ``InputError``, ``CheckpointError``, and ``UnsupportedModelError`` for a layout that is not transformers'.
    """
    need_transformers(checkpoint, "training")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    path = str(checkpoint.path)
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        head = task.head()
        _report_head(checkpoint, config, task)
        for name, value in head.items():
            setattr(config, name, value)
        changed = _set_dropout(config, dropout, attention)
        options: dict[str, Any] = {"config": config, "local_files_only": True, "dtype": torch.float32}
        if attention:
            options["attn_implementation"] = "eager"
        if head:
            options["ignore_mismatched_sizes"] = True
        module = getattr(transformers, task.model).from_pretrained(path, **options)
    except Exception as error:  # a config's fields may be anything, and so is what transformers and torch say of them
        if isinstance(error, (EncastError, MemoryError)):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise CheckpointError(f"{path}: transformers cannot open it for {task.task!r}: {reason}") from None
    pad, vocab = getattr(module.config, "pad_token_id", None) or 0, module.get_input_embeddings().num_embeddings
    if not 0 <= pad < vocab:
        raise CheckpointError(
            f"{path}: pad_token_id is {pad}; the model has tokens 0 to {vocab - 1}: correct config.json"
        )
    if layers is not None:
        module = _with_layers(module, layers)
    for name, value in changed.items():
        setattr(module.config, name, value)
    return Model(module.to(device), checkpoint, task)


def _set_dropout(config: Any, dropout: float | None, attention: bool) -> dict[str, Any]:
    """Sets the config's fields of dropout, and returns what they were."""
    wanted = {} if dropout is None else dict.fromkeys((*_DROPOUTS, *_ATTENTION_DROPOUTS), dropout)
    if attention:
        wanted |= dict.fromkeys(_ATTENTION_DROPOUTS, 0.0)
    before = {name: getattr(config, name) for name in wanted if hasattr(config, name)}
    for name in before:
        setattr(config, name, wanted[name])
    return before


def _report_head(checkpoint: Checkpoint, config: Any, task: TrainTask) -> None:
    """Says where a head that was trained for something else is not taken as it is."""
    wanted = list(task.head().get("id2label", {}).values()) or [""] * int(task.head().get("num_labels", 0))
    own = head_labels(checkpoint, task)
    if wanted and own is not None and (len(own) != len(wanted) or (wanted[0] and not task.adopt(own))):
        what = "is replaced by a new one" if len(own) != len(wanted) else "is trained on from its weights"
        print(
            f"encast: the head of {checkpoint.path} is for {len(own)} outputs ({', '.join(own)[:200]}), the data set "
            f"has {len(wanted)} ({', '.join(filter(None, wanted))[:200]}): it {what}",
            file=sys.stderr,
        )


def head_labels(checkpoint: Checkpoint, task: TrainTask) -> list[str] | None:
    """The labels of the head that a checkpoint has for a task, in order; None where it has no such head."""
    suffix = task.model.removeprefix("AutoModel")
    if not suffix or not checkpoint.architecture.endswith(suffix):
        return None
    config = checkpoint.config
    labels = config.get("id2label")
    try:
        if isinstance(labels, dict) and labels:
            return [str(labels[key]) for key in sorted(labels, key=int)]
        return [f"LABEL_{index}" for index in range(int(config.get("num_labels", 2)))]
    except (TypeError, ValueError, OverflowError):
        raise CheckpointError(
            f"{checkpoint.path}: id2label or num_labels of config.json does not number the head's outputs from 0; "
            "correct the file"
        ) from None


def kept_layers(layers: Sequence[int] | int, names: Iterable[str], count: int) -> list[int]:
    """Which of a model's ``count`` layers stay; ``names``: of its tensors.

    Raises ``InputError`` where there are no such layers, and where the model cannot do with them alone: layers that
    share their weights have none of their own to leave out, and a layer needs the tensors of the place that it takes.
    ModernBERT's first has no norm, so no other can be the first.
    """
    own: dict[int, set[str]] = {}
    for name in names:
        if match := LAYER.search(name):
            own.setdefault(int(match[1]), set()).add(name[match.end() + 1 :])
    if not own.keys() >= set(range(count)):
        raise InputError(
            f"layers: the model has no weights called layer.0, layer.1 and so on for its {count} layers, so that none "
            "can be left out: leave `layers` out"
        )
    kept = evenly(count, layers) if isinstance(layers, int) else list(layers)
    if not kept or kept[-1] >= count:
        raise InputError(f"layers is {layers}; the model has {count}, numbered from 0")
    for place, layer in enumerate(kept):
        if differ := own[layer] ^ own[place]:
            raise InputError(
                f"layers is {layers}; layer {layer} of the model cannot be its layer {place}, only one of them has "
                f"{min(differ)}: keep layer {place}"
            )
    return kept


def _with_layers(module: Any, layers: Sequence[int] | int) -> Any:
    """A module of the same kind with only these layers."""
    config = module.config
    name = next((one for one in _LAYER_COUNTS if hasattr(config, one)), _LAYER_COUNTS[0])
    state = module.state_dict()
    count = int(getattr(config, name))
    kept = kept_layers(layers, state, count)
    place = {old: new for new, old in enumerate(kept)}
    fields = {**config.to_dict(), name: len(kept)}
    if isinstance(types := fields.get("layer_types"), list):
        fields["layer_types"] = [types[old] for old in kept]
    fewer = type(config).from_dict(fields)
    small = type(module)._from_config(fewer, attn_implementation=config._attn_implementation)
    chosen = {}
    for key, value in state.items():
        match = LAYER.search(key)
        if match is None or int(match[1]) in place:
            new = key if match is None else f"{key[: match.start(1)]}{place[int(match[1])]}{key[match.end(1) :]}"
            chosen[new] = value
    small.load_state_dict(chosen)
    return small


def evenly(count: int, wanted: int) -> list[int]:
    """``wanted`` of ``count`` places from the first to the last, as evenly spaced as whole numbers allow."""
    if wanted == 1:
        return [0]
    return [round(index * (count - 1) / (wanted - 1)) for index in range(wanted)] if wanted <= count else []


def save_checkpoint(
    model: Model, weights: Mapping[str, Tensor] | None, out: Path, record: Mapping[str, Any] | None = None
) -> None:
    """Writes a checkpoint in the Hugging Face layout into the new folder ``out``, whole on the disk when this returns.

    ``weights``: instead of the module's. ``record`` becomes ``compress.json``, with the SHA-256 of the other files.
    A model that embeds keeps the files of its source (sentence-transformers' modules); others get the tokenizer's.
    Raises ``OSError``.
    """
    checkpoint, module = model.checkpoint, model.module
    out.mkdir()
    place = out
    if model.task.task == "embed":
        copy_files(checkpoint, out, out)
        place = out / checkpoint.path.relative_to(checkpoint.root)
    else:
        for name in _TOKENIZER_FILES:
            if (checkpoint.path / name).is_file():
                shutil.copyfile(checkpoint.path / name, out / name)
        (out / "tokenizer.json").write_text(checkpoint.tokenizer.json, encoding="utf-8")
    state = module.state_dict() if weights is None else weights
    # The names of the parameters, by which the record and later stages speak of them, and not those of the files that
    # transformers converts them from.
    tensors = {name: value.contiguous() for name, value in state.items()}
    module.save_pretrained(place, state_dict=tensors, save_original_format=False)
    if record is not None:
        write_stage(out, record)
    for folder, _, files in os.walk(out):
        for name in files:
            with open(Path(folder) / name, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(folder))
