"""What is trained for: how rows of a data set become examples, which head a model gets, and the losses.

A task is a class in the table ``_TASKS``, found by the kind of data that it learns from and the task of its artifact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812, its usual name

from encast.compress.batches import Example, tokens_of
from encast.data.datasets import Dataset
from encast.errors import InputError
from encast.tasks.tag import text_tokens, word_tokens
from encast.tasks.tokenize import Encoding, Tokenizer

__all__ = ["TrainTask", "find_task"]

Tensor = Any
IGNORED = -100
"""The label of tokens that have none, which cross entropy leaves out."""


class TrainTask(ABC):
    """One task on one training set."""

    task: ClassVar[str]
    """Of the artifact: one of ``archs.TASKS``."""
    model: ClassVar[str]
    """The class of transformers that has the head."""
    output: ClassVar[str] = "logits"
    """The output of a graph that a teacher's answer is."""

    def __init__(self, data: Dataset, max_length: int, stride: int | None) -> None:
        """Reads of ``data``, the training set, what the head must know. Raises ``InputError``."""
        self.max_length, self.stride = max_length, stride

    def head(self) -> dict[str, Any]:
        """Fields of the config that the head needs."""
        return {}

    def adopt(self, labels: Sequence[str]) -> bool:
        """Takes the classes of a head that there is, in its order; False where it is for others than the data's."""
        return True

    def units(self, rows: Sequence[Example]) -> int:
        """What the loss of labels is a mean over."""
        return len(rows)

    def soft_units(self, rows: Sequence[Example]) -> int:
        """What ``soft_loss`` is a mean over."""
        return len(rows)

    @abstractmethod
    def examples(self, rows: Sequence[Any], tokenizer: Tokenizer, prompt: str = "") -> Iterable[Example]:
        """``prompt`` goes before every text that is embedded."""

    def unlabelled(self, rows: Sequence[Any], tokenizer: Tokenizer, prompt: str = "") -> Iterable[Example]:
        """Examples that only a teacher can answer: ``rows`` are texts, or pairs of texts, as the training rows are."""
        return (_example([encoding], None) for encoding in _encode(rows, tokenizer))

    @abstractmethod
    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        """Of the model's ``answers`` for a batch against its labels, as ``collate`` gives them: a scalar."""

    @abstractmethod
    def soft_loss(self, answers: Tensor, teacher: Tensor, mask: Tensor, temperature: float) -> Tensor:
        """Of answers against the teacher's. ``mask: bool[rows, length]``: the tokens that are no padding."""

    def targets(self, targets: Sequence[Any], length: int) -> Tensor:
        """The labels of a batch whose rows are padded to ``length`` tokens."""
        return torch.tensor(targets)

    def answers(self, answers: Sequence[np.ndarray[Any, Any]], length: int) -> Tensor:
        """A teacher's answers for the rows of a batch, as the model would give them."""
        return torch.from_numpy(np.stack(answers))


def _encode(texts: Sequence[Any], tokenizer: Tokenizer, offsets: bool = False) -> Iterable[Encoding]:
    for begin in range(0, len(texts), 4096):
        yield from tokenizer.encode(texts[begin : begin + 4096], offsets=offsets, first=begin)


def _example(encodings: Sequence[Encoding], target: Any) -> Example:
    ids = tuple(np.array(encoding.ids, np.int32) for encoding in encodings)
    types = tuple(np.array(encoding.type_ids, np.int32) for encoding in encodings)
    return Example(ids, types, target)


def _divergence(answers: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL of the teacher's softmax from the student's, both at a temperature, times its square: a value a row."""
    own = F.log_softmax(answers / temperature, -1)
    other = F.log_softmax(teacher / temperature, -1)
    return F.kl_div(own, other, reduction="none", log_target=True).sum(-1) * temperature**2


class Classify(TrainTask):
    """Texts or pairs of texts into classes."""

    task = "classify"
    model = "AutoModelForSequenceClassification"

    def __init__(self, data: Dataset, max_length: int, stride: int | None) -> None:
        super().__init__(data, max_length, stride)
        found = sorted({str(row.gold) for row in data.rows}, key=_natural)
        if len(found) < 2:
            raise InputError(f"{data.name}: all {len(data.rows)} rows are of the class {found[0]!r}; give at least two")
        self.labels = found

    def adopt(self, labels: Sequence[str]) -> bool:
        found = list(labels)
        if set(found) == set(self.labels):
            self.labels = found
            return True
        return found == [f"LABEL_{index}" for index in range(len(self.labels))]

    def head(self) -> dict[str, Any]:
        return {
            "id2label": dict(enumerate(self.labels)),
            "label2id": {label: index for index, label in enumerate(self.labels)},
            "problem_type": "single_label_classification",
        }

    def examples(self, rows: Sequence[Any], tokenizer: Tokenizer, prompt: str = "") -> Iterable[Example]:
        index = {label: number for number, label in enumerate(self.labels)}
        for row, encoding in zip(rows, _encode([row.text for row in rows], tokenizer), strict=True):
            yield _example([encoding], index[str(row.gold)])

    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(answers, targets)

    def soft_loss(self, answers: Tensor, teacher: Tensor, mask: Tensor, temperature: float) -> Tensor:
        return _divergence(answers, teacher, temperature).mean()


def _range_of(data: Dataset, limit: float) -> tuple[float, float]:
    """The least and the largest score; raises ``InputError`` where these are one, which teaches nothing, and beyond
    ``limit``, where losses would not be finite."""
    scores = [row.gold for row in data.rows]
    least, most = min(scores), max(scores)
    if least == most:
        raise InputError(f"{data.name}: all {len(scores)} scores are {least:g}; give at least two")
    if max(-least, most) > limit:
        raise InputError(f"{data.name}: scores go from {least:g} to {most:g}, beyond {limit:g}; scale them")
    return least, most


class Regress(TrainTask):
    """Texts or pairs of texts to a number."""

    task = "classify"
    model = "AutoModelForSequenceClassification"

    def __init__(self, data: Dataset, max_length: int, stride: int | None) -> None:
        super().__init__(data, max_length, stride)
        _range_of(data, 1e18)  # of float32, in which it is squared

    def head(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def examples(self, rows: Sequence[Any], tokenizer: Tokenizer, prompt: str = "") -> Iterable[Example]:
        for row, encoding in zip(rows, _encode([row.text for row in rows], tokenizer), strict=True):
            yield _example([encoding], float(row.gold))

    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(answers[:, 0], targets)

    def soft_loss(self, answers: Tensor, teacher: Tensor, mask: Tensor, temperature: float) -> Tensor:
        return F.mse_loss(answers, teacher)


class Tag(TrainTask):
    """Words into BIO labels; the first token of a word learns its label."""

    task = "tag"
    model = "AutoModelForTokenClassification"

    def __init__(self, data: Dataset, max_length: int, stride: int | None) -> None:
        super().__init__(data, max_length, stride)
        found = set(chain.from_iterable(row.labels for row in data.rows))
        # An entity that the training set only begins may go on elsewhere.
        found |= {f"I-{label[2:]}" for label in found if label.startswith("B-")}
        self.labels = sorted(found, key=lambda label: (label != "O", label[2:], label))
        if len(self.labels) < 2:
            raise InputError(f"{data.name}: all words have the label {self.labels[0]!r}; give at least two labels")

    head = Classify.head
    adopt = Classify.adopt

    def units(self, rows: Sequence[Example]) -> int:
        return sum(int((row.target != IGNORED).sum()) for row in rows)

    def soft_units(self, rows: Sequence[Example]) -> int:
        return tokens_of(rows)

    def examples(self, rows: Sequence[Any], tokenizer: Tokenizer, prompt: str = "") -> Iterable[Example]:
        index = {label: number for number, label in enumerate(self.labels)}
        texts = [" ".join(row.words) for row in rows]
        for row, text, encoding in zip(rows, texts, _encode(texts, tokenizer, True), strict=True):
            tokens = list(text_tokens(encoding, text))
            firsts = word_tokens(row.words, [(start, end) for _, _, start, end in tokens])
            target = np.full(len(encoding.ids), IGNORED, np.int64)
            for first, label in zip(firsts, row.labels, strict=True):
                if first is not None and target[place := tokens[first][0]] == IGNORED:
                    target[place] = index[label]
            yield _example([encoding], target)

    def targets(self, targets: Sequence[Any], length: int) -> Tensor:
        return torch.from_numpy(_padded(targets, length, IGNORED))

    def answers(self, answers: Sequence[np.ndarray[Any, Any]], length: int) -> Tensor:
        return torch.from_numpy(_padded(answers, length, 0.0))

    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(answers.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return losses / (targets != IGNORED).sum().clamp_min(1)

    def soft_loss(self, answers: Tensor, teacher: Tensor, mask: Tensor, temperature: float) -> Tensor:
        return _divergence(answers[mask], teacher[mask], temperature).mean()


class AnswerSpans(TrainTask):
    """Questions to the span of a context: start and end tokens, the first token where a window has no answer."""

    task = "answer"
    model = "AutoModelForQuestionAnswering"

    def head(self) -> dict[str, Any]:
        return {"num_labels": 2}

    def __init__(self, data: Dataset, max_length: int, stride: int | None) -> None:
        super().__init__(data, max_length, stride)
        if not any(row.answers for row in data.rows):
            raise InputError(f"{data.name}: no question has an answer; give some that have")
        for row in data.rows:
            if len(row.starts) != len(row.answers):
                raise InputError(
                    f"{data.name}: question {row.id!r} says not where its answers start (answer_start), which training "
                    "needs"
                )

    def examples(self, rows: Sequence[Any], tokenizer: Tokenizer, prompt: str = "") -> Iterable[Example]:
        for row in rows:
            for window in tokenizer.windows(row.question, row.context, self.stride):
                yield _example([window], self._span(window, row))

    @staticmethod
    def _span(window: Encoding, row: Any) -> tuple[int, int]:
        if not row.answers:
            return 0, 0
        begin, end = row.starts[0], row.starts[0] + len(row.answers[0])
        inside = [token for token, part in enumerate(window.sequence_ids) if part == 1]
        if not inside or window.offsets[inside[0]][0] > begin or window.offsets[inside[-1]][1] < end:
            return 0, 0
        first = max((token for token in inside if window.offsets[token][0] <= begin), default=0)
        last = min((token for token in inside if window.offsets[token][1] >= end), default=0)
        return (first, last) if first <= last else (0, 0)

    def unlabelled(self, rows: Sequence[Any], tokenizer: Tokenizer, prompt: str = "") -> Iterable[Example]:
        for question, context in rows:
            for window in tokenizer.windows(question, context, self.stride):
                yield _example([window], None)

    answers = Tag.answers

    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        return (F.cross_entropy(answers[..., 0], targets[:, 0]) + F.cross_entropy(answers[..., 1], targets[:, 1])) / 2

    def soft_loss(self, answers: Tensor, teacher: Tensor, mask: Tensor, temperature: float) -> Tensor:
        own, other = (one.masked_fill(~mask.unsqueeze(-1), -1e4).transpose(1, 2) for one in (answers, teacher))
        return _divergence(own, other, temperature).mean()


class EmbedScores(TrainTask):
    """Pairs of texts whose embeddings' cosine is to follow a score."""

    task = "embed"
    model = "AutoModel"
    output = "embedding"

    def __init__(self, data: Dataset, max_length: int, stride: int | None) -> None:
        super().__init__(data, max_length, stride)
        self._least, most = _range_of(data, 1e307)
        self._range = most - self._least
        if any(isinstance(row.text, str) for row in data.rows):
            raise InputError(f"{data.name} has single texts; embeddings are trained on pairs of texts")

    def examples(self, rows: Sequence[Any], tokenizer: Tokenizer, prompt: str = "") -> Iterable[Example]:
        for row, pair in zip(rows, _encoded_pairs([row.text for row in rows], tokenizer, prompt), strict=True):
            yield _example(pair, (row.gold - self._least) / self._range)

    def unlabelled(self, rows: Sequence[Any], tokenizer: Tokenizer, prompt: str = "") -> Iterable[Example]:
        return (_example(pair, None) for pair in _encoded_pairs(rows, tokenizer, prompt))

    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        """Mean square difference of cosine and score, the scores scaled to 0 to 1 (Reimers and Gurevych, 2019,
        arXiv:1908.10084)."""
        return F.mse_loss(F.cosine_similarity(answers[0::2], answers[1::2]), targets)

    def soft_loss(self, answers: Tensor, teacher: Tensor, mask: Tensor, temperature: float) -> Tensor:
        return (1 - F.cosine_similarity(answers, teacher)).mean()

    def answers(self, answers: Sequence[np.ndarray[Any, Any]], length: int) -> Tensor:
        return torch.from_numpy(np.concatenate(answers))


class EmbedPairs(EmbedScores):
    """Pairs of texts that belong together, against all other second texts of their batch."""

    _SCALE = 20.0

    def __init__(self, data: Dataset, max_length: int, stride: int | None) -> None:
        TrainTask.__init__(self, data, max_length, stride)
        if len({row.positive for row in data.rows}) < 2:
            raise InputError(f"{data.name}: all {len(data.rows)} rows have one positive; give at least two")

    def examples(self, rows: Sequence[Any], tokenizer: Tokenizer, prompt: str = "") -> Iterable[Example]:
        """The target is a number of the positive's text, by which ``loss`` knows it again in other rows."""
        numbers: dict[str, int] = {}
        encoded = _encoded_pairs([(row.anchor, row.positive) for row in rows], tokenizer, prompt)
        for row, pair in zip(rows, encoded, strict=True):
            yield _example(pair, numbers.setdefault(row.positive, len(numbers)))

    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of 20 times the cosines (Henderson et al., 2017, arXiv:1705.00652). Of other rows those with
        the row's own positive are left out: they are right too."""
        a, b = (F.normalize(answers[part::2], dim=-1) for part in (0, 1))
        own = torch.arange(len(a), device=a.device)
        right_too = (targets[:, None] == targets) & (own[:, None] != own)
        return F.cross_entropy((self._SCALE * a @ b.T).masked_fill(right_too, -torch.inf), own)


def _encoded_pairs(
    pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer, prompt: str
) -> Iterable[tuple[Encoding, Encoding]]:
    first, second = (_encode([prompt + pair[side] for pair in pairs], tokenizer) for side in (0, 1))
    return zip(first, second, strict=True)


def _natural(label: str) -> tuple[int, str, str]:
    """Whole numbers by size, however many digits they have; other labels are like 0."""
    digits = label.lstrip("0") if label.isascii() and label.isdigit() else ""
    return len(digits), digits, label


def _padded(rows: Sequence[np.ndarray[Any, Any]], length: int, filler: float) -> np.ndarray[Any, Any]:
    """Rows of different lengths side by side."""
    out = np.full((len(rows), length, *rows[0].shape[1:]), filler, rows[0].dtype)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return out


_TASKS: dict[tuple[str, str], Callable[[Dataset, int, int | None], TrainTask]] = {
    ("classes", "classify"): Classify,
    ("scores", "classify"): Regress,
    ("entities", "tag"): Tag,
    ("answers", "answer"): AnswerSpans,
    ("scores", "embed"): EmbedScores,
    ("pairs", "embed"): EmbedPairs,
}


def find_task(task: str, data: Dataset) -> Callable[[Dataset, int, int | None], TrainTask]:
    """The class that learns ``task`` from such data; raises ``InputError`` that lists what goes together."""
    found = _TASKS.get((data.kind, task))
    if found is None:
        known = ", ".join(f"{kind} for {task}" for kind, task in _TASKS)
        raise InputError(
            f"{data.name} holds {data.kind}, from which nothing is trained for {task!r}; known are {known}"
        )
    return found
