"""Engines without weights: a small word-piece tokenizer, and answers that a rule computes from a sequence's ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from graphs import META
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors

from encast.backends.base import check_request
from encast.batch import Batch
from encast.engine import Engine
from encast.ir import GraphMeta
from encast.ir.meta import HEADS
from encast.ir.types import ValueType
from encast.tasks.session import Session
from encast.tasks.tokenize import Tokenizer

__all__ = ["VOCAB", "FakeRunnable", "fake_engine", "tokenizer_json"]

HIDDEN = 4
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,-'\""
_WORDS = "the cat sat on mat john smith lives in new york paris works for acme corp who where what is"
VOCAB = {
    token: index
    for index, token in enumerate(
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        + _WORDS.split()
        + list(_LETTERS)
        + ["##" + letter for letter in _LETTERS]
    )
}


def tokenizer_json(*, specials: bool = True, padded: bool = False) -> str:
    backend = Backend(models.WordPiece(VOCAB, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    if specials:
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", VOCAB["[CLS]"]), ("[SEP]", VOCAB["[SEP]"])],
        )
    if padded:
        backend.enable_padding(length=64)
        backend.enable_truncation(8)
    return str(backend.to_str())


class FakeRunnable:
    """``rule(ids) -> row or rows`` of one sequence; keeps the batches that it was given."""

    def __init__(self, rule: Callable[[np.ndarray[Any, Any]], Any], meta: GraphMeta) -> None:
        self.rule, self.meta = rule, meta
        self.per_token = meta.task in ("tag", "answer", "fill_mask", "embed_tokens")
        head = HEADS[meta.task] or ("last_hidden_state", "tokens")
        self.outputs_of = {
            name: ValueType("f32", (rows, HIDDEN)) for name, rows in (head, ("last_hidden_state", "tokens"))
        }
        self.batches: list[Batch] = []
        self.selects: list[Any] = []
        self.outputs: list[str] = []
        self.closed = 0

    def run(self, output: str, batch: Batch, select: Any = None) -> np.ndarray[Any, Any]:
        check_request(self.meta, self.outputs_of, output, batch, select)
        self.batches.append(batch)
        self.selects.append(select)
        self.outputs.append(output)
        if output == "last_hidden_state":
            return np.repeat(batch.token_ids[:, None].astype(np.float32), HIDDEN, axis=1)
        parts = [
            np.asarray(self.rule(batch.token_ids[begin:end]), np.float32)
            for begin, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
        ]
        rows = np.concatenate(parts) if self.per_token else np.stack(parts)
        return rows if select is None else rows[select]

    def close(self) -> None:
        self.closed += 1


def fake_engine(
    task: str,
    rule: Callable[[np.ndarray[Any, Any]], Any] = lambda ids: np.zeros(HIDDEN),
    *,
    labels: list[str] | None = None,
    problem_type: str | None = None,
    similarity: str | None = None,
    max_length: int = 32,
    dim: int = HIDDEN,
    batch_tokens: int = 64,
    type_vocab: int = 2,
    vocab: int = len(VOCAB),
    json_text: str | None = None,
) -> Engine:
    meta = replace(
        META,
        task=task,
        hidden=HIDDEN,
        vocab=vocab,
        type_vocab=type_vocab,
        max_len=max_length,
        labels=None if labels is None else tuple(labels),
        problem_type=problem_type,
        similarity=similarity,
    )
    tokenizer = Tokenizer(json_text or tokenizer_json(), max_length=max_length)
    session = Session(meta, tokenizer, dim=dim, batch_tokens=batch_tokens)
    return Engine(session, FakeRunnable(rule, meta))
