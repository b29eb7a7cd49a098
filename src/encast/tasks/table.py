"""The tasks as files of rows see them: which columns go in, which come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.errors import InputError
from encast.tasks.answer import answer
from encast.tasks.classify import classify
from encast.tasks.embed import embed
from encast.tasks.embed_m3 import embed_m3
from encast.tasks.embed_sparse import embed_sparse
from encast.tasks.embed_tokens import Kind, embed_tokens
from encast.tasks.features import hidden_states
from encast.tasks.fill_mask import fill_mask
from encast.tasks.pooling import Pooling
from encast.tasks.rerank import rerank
from encast.tasks.session import Session, Steps, need_finite
from encast.tasks.tag import tag
from encast.tasks.texts import check_text
from encast.tasks.tokenize import OnLong

__all__ = ["TABLE", "FileTask", "RunOptions", "file_task"]

Records = list[dict[str, Any]]


@dataclass(frozen=True)
class RunOptions:
    """What a run over a file may change: what long texts do, and of windows the ``stride`` and the ``pooling``, which a
    task without a use for them refuses; of embedding the prompt, ``truncate_dim`` and, of sparse embeddings,
    ``max_active_dims``, of those of tokens the ``kind``; of answering the ``stride`` and the ``null_threshold``.
    """

    on_long: OnLong = "truncate"
    stride: int | None = None
    prompt_name: str | None = None
    null_threshold: float | None = None
    truncate_dim: int | None = None
    max_active_dims: int | None = None
    kind: Kind = "document"
    pooling: Pooling | None = None


@dataclass(frozen=True)
class FileTask:
    """One task over rows.

    ``text`` and ``pair`` are the default names of its columns (``pair`` is None when the task reads one text);
    ``columns``: name to shape of what it writes, see ``data.writers``; ``run`` answers rows (``(text,)`` or
    ``(text, pair)`` values as read) with a record each, or raises ``InputError``; see ``Steps``.
    """

    text: str
    pair: str | None
    columns: Mapping[str, Any]
    run: Callable[[Session, Sequence[tuple[Any, ...]], RunOptions], Steps[Records]]


def file_task(name: str) -> FileTask:
    """The task of that name; raises ``InputError`` listing those there are."""
    if name not in TABLE:
        raise InputError(f"task {name!r} is unknown; auto, {', '.join(TABLE)} are known")
    return TABLE[name]


def _refuse(task: str, **options: object) -> None:
    """Raises ``InputError`` for an option that is given."""
    for name, value in options.items():
        if value is not None:
            raise InputError(f"{name} is {value!r}; {task} has no such option, leave it out")


def _features(session: Session, rows: Sequence[tuple[Any, ...]], options: RunOptions) -> Steps[Records]:
    _refuse("features", stride=options.stride, pooling=options.pooling)
    states = yield from hidden_states(session, [text for (text,) in rows], on_long=options.on_long)
    return [{"last_hidden_state": one} for one in states]


def _embed(session: Session, rows: Sequence[tuple[Any, ...]], options: RunOptions) -> Steps[Records]:
    vectors = yield from embed(
        session,
        [text for (text,) in rows],
        on_long=options.on_long,
        stride=options.stride,
        pooling=options.pooling,
        prompt_name=options.prompt_name,
        truncate_dim=options.truncate_dim,
    )
    return [{"embedding": vector} for vector in need_finite(vectors)]


def _embed_sparse(session: Session, rows: Sequence[tuple[Any, ...]], options: RunOptions) -> Steps[Records]:
    _refuse("embed_sparse", pooling=options.pooling)
    vectors = yield from embed_sparse(
        session,
        [text for (text,) in rows],
        on_long=options.on_long,
        stride=options.stride,
        prompt_name=options.prompt_name,
        max_active_dims=options.max_active_dims,
    )
    return [{"indices": vector.indices, "values": vector.values} for vector in vectors]


def _embed_tokens(session: Session, rows: Sequence[tuple[Any, ...]], options: RunOptions) -> Steps[Records]:
    _refuse("embed_tokens", stride=options.stride, pooling=options.pooling)
    found = yield from embed_tokens(
        session,
        [text for (text,) in rows],
        kind=options.kind,
        on_long=options.on_long,
        prompt_name=options.prompt_name,
    )
    return [{"token_ids": one.token_ids, "vectors": one.vectors} for one in found]


def _embed_m3(session: Session, rows: Sequence[tuple[Any, ...]], options: RunOptions) -> Steps[Records]:
    _refuse("embed_m3", stride=options.stride, pooling=options.pooling, truncate_dim=options.truncate_dim)
    found = yield from embed_m3(
        session,
        [text for (text,) in rows],
        on_long=options.on_long,
        prompt_name=options.prompt_name,
        max_active_dims=options.max_active_dims,
    )
    return [
        {
            "embedding": one.embedding,
            "indices": one.sparse.indices,
            "values": one.sparse.values,
            "token_ids": one.tokens.token_ids,
            "vectors": one.tokens.vectors,
        }
        for one in found
    ]


def _classify(session: Session, rows: Sequence[tuple[Any, ...]], options: RunOptions) -> Steps[Records]:
    found = yield from classify(
        session,
        [row[0] if len(row) == 1 else row for row in rows],
        on_long=options.on_long,
        stride=options.stride,
        pooling=options.pooling,
    )
    need_finite(np.array([result.score for result in found]))
    return [
        {
            "label": result.label,
            "score": result.score,
            "scores": [{"label": label, "score": score} for label, score in result.scores.items()],
        }
        for result in found
    ]


def _answer(session: Session, rows: Sequence[tuple[Any, ...]], options: RunOptions) -> Steps[Records]:
    _refuse("answer", pooling=options.pooling)
    found = yield from answer(
        session,
        [row[0] for row in rows],
        [row[1] for row in rows],
        stride=options.stride,
        null_threshold=options.null_threshold,
    )
    assert isinstance(found, list)  # lists in, a list out
    return [{"answer": one.text, "start": one.start, "end": one.end, "score": one.score} for one in found]


def _tag(session: Session, rows: Sequence[tuple[Any, ...]], options: RunOptions) -> Steps[Records]:
    _refuse("tag", pooling=options.pooling)
    found = yield from tag(session, [text for (text,) in rows], on_long=options.on_long, stride=options.stride)
    return [{"entities": [vars(entity) for entity in tagging.entities]} for tagging in found]


def _rerank(session: Session, rows: Sequence[tuple[Any, ...]], options: RunOptions) -> Steps[Records]:
    records: Records = []
    for query, documents in rows:
        if not isinstance(documents, list):
            raise InputError(f"documents are of type {type(documents).__name__}; a list of texts is needed")
        ranking = yield from rerank(
            session,
            check_text(query, "query"),
            documents,
            on_long=options.on_long,
            stride=options.stride,
            pooling=options.pooling,
        )
        need_finite(np.array([score for _, score in ranking]))
        records.append({"ranking": [{"index": index, "score": score} for index, score in ranking]})
    return records


def _fill_mask(session: Session, rows: Sequence[tuple[Any, ...]], options: RunOptions) -> Steps[Records]:
    _refuse("fill_mask", stride=options.stride, pooling=options.pooling)
    found = yield from fill_mask(session, [text for (text,) in rows], on_long=options.on_long)
    return [{"masks": [[vars(one) for one in candidates] for candidates in masks]} for masks in found]


TABLE: Mapping[str, FileTask] = {
    "features": FileTask("text", None, {"last_hidden_state": [["f32"]]}, _features),
    "embed": FileTask("text", None, {"embedding": ["f32"]}, _embed),
    "embed_sparse": FileTask("text", None, {"indices": ["int"], "values": ["f32"]}, _embed_sparse),
    "embed_tokens": FileTask("text", None, {"token_ids": ["int"], "vectors": [["f32"]]}, _embed_tokens),
    "embed_m3": FileTask(
        "text",
        None,
        {"embedding": ["f32"], "indices": ["int"], "values": ["f32"], "token_ids": ["int"], "vectors": [["f32"]]},
        _embed_m3,
    ),
    "classify": FileTask(
        "text", None, {"label": "str", "score": "float", "scores": [{"label": "str", "score": "float"}]}, _classify
    ),
    "answer": FileTask(
        "question", "context", {"answer": "str", "start": "int", "end": "int", "score": "float"}, _answer
    ),
    "tag": FileTask(
        "text",
        None,
        {"entities": [{"label": "str", "text": "str", "start": "int", "end": "int", "score": "float"}]},
        _tag,
    ),
    "rerank": FileTask("query", "documents", {"ranking": [{"index": "int", "score": "float"}]}, _rerank),
    "fill_mask": FileTask(
        "text", None, {"masks": [[{"token": "str", "token_id": "int", "score": "float"}]]}, _fill_mask
    ),
}
