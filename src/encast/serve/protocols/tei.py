"""The routes of text-embeddings-inference (TEI) with its JSON, its error bodies and its headers.

Its routes name no model: the first served one that has the task answers. What is not as TEI does it:

- Token ids as input are taken as they are; TEI decodes them and tokenises the text again.
- A long text is refused unless ``truncate`` is true, whatever TEI's ``--auto-truncate`` is; it is cut at the side that
  the checkpoint's tokenizer names, and the other ``truncation_direction`` is refused.
- ``normalize: false`` gives what the checkpoint's own pipeline gives, which may end with a normalisation of its own.
- ``/predict`` gives labels that do not exclude each other a sigmoid each, and the values of a regression as they are.
- JSON that is not what a route takes has status 400 and the body of every other error; too many texts have 413.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import Annotated, Any

import msgspec
import numpy as np

from encast.serve.call import Call
from encast.serve.encode import json_list
from encast.serve.errors import Kind, RefusalError
from encast.serve.models import ServedModel
from encast.serve.operations import Operation, Protocol, Reply
from encast.serve.protocols.tei_types import (
    DecodeBody,
    EmbedAllBody,
    EmbedBody,
    Info,
    PredictBody,
    Prediction,
    Rank,
    RerankBody,
    SimilarityBody,
    SimilarityParameters,
    SimpleToken,
    SparseValue,
    TeiError,
    TokenizeBody,
    Truncation,
)
from encast.serve.service import Service
from encast.tasks.classify import decide, label_names, score_rows, sigmoid
from encast.tasks.embed import embed, embed_ids, normalized, similarities
from encast.tasks.embed_sparse import SparseVector, embed_sparse, embed_sparse_ids
from encast.tasks.embed_tokens import embed_tokens
from encast.tasks.features import hidden_states, hidden_states_of_ids
from encast.tasks.rerank import rerank
from encast.tasks.session import F32, Session, Steps, need_finite
from encast.tasks.texts import check_texts, check_texts_or_pairs
from encast.tasks.tokenize import Encoding, OnLong, TooLongError

__all__ = ["TEI"]


class _EmptyError(RefusalError):
    """TEI has an error type for inputs that are empty."""

    def __init__(self, field: str) -> None:
        super().__init__("invalid", f"`{field}` cannot be empty", field=field)


_TYPES: dict[Kind, Any] = {"overloaded": "Overloaded", "unavailable": "Unhealthy"}
_TYPES.update(dict.fromkeys(("unsupported", "failed", "expired", "cancelled"), "Backend"))


def _error(refusal: RefusalError) -> bytes:
    kind: Any = "Empty" if isinstance(refusal, _EmptyError) else _TYPES.get(refusal.kind, "Validation")
    return msgspec.json.encode(TeiError(refusal.message, kind))


def _on_long(model: ServedModel, options: Truncation) -> OnLong:
    side = model.session.tokenizer.truncation_side
    wanted = options.truncation_direction
    if options.truncate and wanted is not None and wanted.lower() != side:
        raise RefusalError(
            "unprocessable",
            f"truncation_direction is {wanted}; {model.name!r} is cut at the side that its tokenizer names, {side}",
            field="truncation_direction",
        )
    return "truncate" if options.truncate else "error"


async def _run(call: Call, model: ServedModel, steps: Steps[Any]) -> Any:
    """``Call.run`` that says of a long text how it may be cut here."""
    try:
        return await call.run(model, steps)
    except RefusalError as refusal:
        long = refusal.__cause__
        if not isinstance(long, TooLongError):
            raise
        raise RefusalError(
            "unprocessable",
            f"`inputs` must have less than {long.most + 1} tokens, number {long.index} has more; shorten it, or send "
            "truncate: true",
            field="inputs",
        ) from None


def _reply(call: Call, body: bytes, characters: int) -> Reply:
    """An answer with the headers of TEI; times in whole milliseconds."""
    timing, total_s = call.timing, time.monotonic() - call.arrived
    times = {
        "x-compute-time": total_s, "x-total-time": total_s, "x-tokenization-time": timing.tokenize_s,
        "x-queue-time": timing.queue_s, "x-inference-time": timing.inference_s,
    }  # fmt: skip
    headers = {name: str(int(1e3 * seconds)) for name, seconds in times.items()}
    headers |= {
        "x-compute-type": "cpu",
        "x-compute-characters": str(characters),
        "x-compute-tokens": str(timing.tokens),
    }
    return Reply(body, headers)


def _rows(service: Service, body: EmbedAllBody) -> list[Any]:
    """The inputs as a list of texts, or of lists of token ids."""
    rows: list[Any] = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if rows and all(type(row) is int for row in rows):
        rows = [rows]
    service.limits.check_count(len(rows), "inputs")
    if not rows or "" in rows or [] in rows:
        raise _EmptyError("inputs")
    kinds = {type(row) for row in rows}
    if len(kinds) > 1 or int in kinds:
        raise RefusalError("invalid", "inputs mix texts and token ids; send several requests", field="inputs")
    if str in kinds:
        service.limits.check_texts(rows, "inputs")
    elif body.prompt_name:
        raise RefusalError("unprocessable", "prompt_name: token ids get no prompt; leave it out", field="prompt_name")
    return rows


async def _embed(service: Service, call: Call, body: EmbedBody) -> Reply:
    model = service.models.find(None, "embed")
    if body.dimensions is not None and body.dimensions > model.session.dim:
        raise RefusalError(
            "unprocessable",
            f"`dimensions` is {body.dimensions}; {model.name!r} gives {model.session.dim} numbers a text",
            field="dimensions",
        )
    rows = _rows(service, body)
    if isinstance(rows[0], str):
        steps = embed(model.session, rows, on_long=_on_long(model, body), prompt_name=body.prompt_name)
    else:
        steps = embed_ids(model.session, rows)
    vectors = await _run(call, model, steps)
    size = vectors.nbytes
    if body.dimensions is not None:
        vectors = vectors[:, : body.dimensions]
    if body.normalize:
        vectors = normalized(vectors)
    return _reply(call, await call.offload(size, json_list, vectors), sum(map(len, rows)))


def _document_vectors(model: ServedModel, rows: Sequence[Any], body: EmbedAllBody) -> Steps[list[F32]]:
    if not isinstance(rows[0], str):
        raise RefusalError(
            "unprocessable",
            f"{model.name!r} reads texts, to which it adds tokens of its own; send texts",
            field="inputs",
        )
    found = yield from embed_tokens(model.session, rows, on_long=_on_long(model, body), prompt_name=body.prompt_name)
    return [one.vectors for one in found]


async def _embed_all(service: Service, call: Call, body: EmbedAllBody) -> Reply:
    states: list[F32]
    model = service.models.find(None, "embed", "features", "embed_tokens")
    rows = _rows(service, body)
    if not model.can("embed", "features"):
        states = await _run(call, model, _document_vectors(model, rows, body))
    elif isinstance(rows[0], str):
        prompt = model.session.prompt(body.prompt_name)
        texts = [prompt + text for text in rows]
        states = await _run(call, model, hidden_states(model.session, texts, on_long=_on_long(model, body)))
    else:
        states = await _run(call, model, hidden_states_of_ids(model.session, rows))
    size = sum(one.nbytes for one in states)
    content = await call.offload(size, lambda: b"[" + b",".join(map(json_list, states)) + b"]")
    return _reply(call, content, sum(map(len, rows)))


async def _embed_sparse(service: Service, call: Call, body: EmbedAllBody) -> Reply:
    model = service.models.find(None, "embed_sparse")
    rows = _rows(service, body)
    most = service.limits.max_weights
    if isinstance(rows[0], str):
        steps = embed_sparse(
            model.session, rows, on_long=_on_long(model, body), prompt_name=body.prompt_name, most_weights=most
        )
    else:
        steps = embed_sparse_ids(model.session, rows, most_weights=most)
    found: list[SparseVector] = await _run(call, model, steps)
    size = 32 * sum(one.indices.size for one in found)
    # One text at a time: of all at once there could be millions of objects.
    content = await call.offload(size, lambda: b"[" + b",".join(map(_sparse_values, found)) + b"]")
    return _reply(call, content, sum(map(len, rows)))


def _sparse_values(vector: SparseVector) -> bytes:
    pairs = zip(vector.indices.tolist(), vector.values.tolist(), strict=True)
    return msgspec.json.encode([SparseValue(index, value) for index, value in pairs])


async def _predict(service: Service, call: Call, body: PredictBody) -> Reply:
    model = service.models.find(None, "classify")
    if not isinstance(body.inputs, str):
        service.limits.check_count(len(body.inputs), "inputs")
    single, rows = _sequences(body.inputs)
    texts = [text for row in rows for text in ((row,) if isinstance(row, str) else row)]
    service.limits.check_texts(texts, "inputs")
    if any(not (row if isinstance(row, str) else row[0] + row[1]) for row in rows):
        raise _EmptyError("inputs")
    steps = _predictions(model.session, rows, _on_long(model, body), body.raw_scores)
    found = await _run(call, model, steps)
    content = await call.offload(64 * len(found), msgspec.json.encode, found[0] if single else found)
    return _reply(call, content, sum(map(len, texts)))


def _sequences(inputs: str | list[str | list[str]]) -> tuple[bool, list[str | tuple[str, str]]]:
    """Whether it is one row and no batch, and the rows: a list of texts is one row, of one text or of two."""
    if isinstance(inputs, str):
        return True, [inputs]
    if not inputs:
        raise _EmptyError("inputs")
    single = isinstance(inputs[0], str)
    rows: list[str | tuple[str, str]] = []
    for row in [inputs] if single else inputs:
        if isinstance(row, str) or not 1 <= len(row) <= 2 or not all(isinstance(text, str) for text in row):
            raise RefusalError(
                "invalid",
                "inputs is a text, a pair [text, text], or a batch [[text], [text, text], ...]; for a batch of texts "
                "put each into a list of its own",
                field="inputs",
            )
        rows.append(row[0] if len(row) == 1 else (row[0], row[1]))  # type: ignore[arg-type]  # all are texts
    return single, rows


def _predictions(session: Session, rows: Sequence[Any], on_long: OnLong, raw: bool) -> Steps[list[list[Prediction]]]:
    logits = need_finite((yield from score_rows(session, check_texts_or_pairs(rows, "inputs"), on_long=on_long)))
    names = label_names(session.meta, logits.shape[1])
    answers = []
    for row in logits.astype(np.float64):
        if raw:
            scores = row.tolist()
        elif len(names) == 1:
            scores = sigmoid(row).tolist()
        else:
            scores = list(decide(session.meta, row, names).scores.values())
        found = [Prediction(score, label) for score, label in zip(scores, names, strict=True)]
        answers.append(sorted(found, key=lambda one: -one.score))
    return answers


async def _rerank(service: Service, call: Call, body: RerankBody) -> Reply:
    if not body.texts:
        raise _EmptyError("texts")
    model = next((one for one in service.models.by_name.values() if one.reranks), None)
    if model is None:
        raise RefusalError("unsupported", "no model here is a re-ranker: a classifier of pairs with one label")
    service.limits.check_texts([body.query], "query")
    service.limits.check_texts(body.texts, "texts")
    on_long, most = _on_long(model, body), service.limits.max_products
    steps = rerank(model.session, body.query, body.texts, on_long=on_long, most_products=most)
    found: list[tuple[int, float]] = await _run(call, model, steps)
    scores = need_finite(np.array([score for _, score in found]))
    if not body.raw_scores:
        scores = sigmoid(scores)
    ranks = [
        Rank(index, score, body.texts[index] if body.return_text else None)
        for (index, _), score in zip(found, scores.tolist(), strict=True)
    ]
    characters = len(body.query) * len(body.texts) + sum(map(len, body.texts))
    return _reply(call, await call.offload(len(call.body), msgspec.json.encode, ranks), characters)


async def _similarity(service: Service, call: Call, body: SimilarityBody) -> Reply:
    model = service.models.find(None, "embed")
    if not body.inputs.sentences:
        raise _EmptyError("inputs.sentences")
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    if "" in texts:
        raise _EmptyError("inputs")
    service.limits.check_texts(texts, "inputs.sentences")
    options = body.parameters or SimilarityParameters()
    steps = embed(model.session, texts, on_long=_on_long(model, options), prompt_name=options.prompt_name)
    vectors = need_finite(await _run(call, model, steps))
    scores = similarities("cosine", vectors[0], vectors[1:]).tolist()
    return _reply(call, msgspec.json.encode(scores), sum(map(len, texts)))


async def _tokenize(service: Service, call: Call, body: TokenizeBody) -> Reply:
    model = call.model = service.models.find(None)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if not texts or "" in texts:
        raise _EmptyError("inputs")
    service.limits.check_texts(texts, "inputs")
    prompt = model.session.prompt(body.prompt_name)

    def encode() -> bytes:
        # One text at a time: of all at once there could be millions of objects.
        rows, tokens = [], 0
        for text in check_texts([prompt + text for text in texts], "inputs"):
            (found,) = model.session.tokenizer.whole([text], add_special_tokens=body.add_special_tokens)
            tokens += len(found)
            service.limits.check_tokens(tokens, "inputs")
            rows.append(msgspec.Raw(msgspec.json.encode(_tokens(found, text))))
        return msgspec.json.encode(rows)

    return Reply(await call.offload(len(call.body), encode))


def _tokens(encoding: Encoding, text: str) -> list[SimpleToken]:
    places = range(len(text) + 1)
    at: Sequence[int] = places if text.isascii() else list(accumulate((len(c.encode()) for c in text), initial=0))
    columns = encoding.ids, encoding.tokens, encoding.offsets, encoding.special_tokens_mask
    return [
        SimpleToken(id, token, True, None, None)
        if special
        else SimpleToken(id, text[start:stop], False, at[start], at[stop])
        for id, token, (start, stop), special in zip(*columns, strict=True)
    ]


async def _decode(service: Service, call: Call, body: DecodeBody) -> Reply:
    model = call.model = service.models.find(None)
    rows: list[Any] = body.ids if body.ids and isinstance(body.ids[0], list) else [body.ids]
    if not all(rows):
        raise _EmptyError("ids")
    if not all(isinstance(row, list) and all(type(id) is int for id in row) for row in rows):
        raise RefusalError("invalid", "ids mix token ids and lists of them; give one or the other", field="ids")
    service.limits.check_count(len(rows), "ids")
    decode, skip = model.session.tokenizer.decode, body.skip_special_tokens

    def encode() -> bytes:
        return msgspec.json.encode([decode(row, skip_special_tokens=skip) for row in rows])

    return Reply(await call.offload(len(call.body), encode))


async def _root(service: Service, call: Call, body: dict[str, Any]) -> Reply:
    """TEI's default route, by what the request looks like and what the first model can do."""
    if "query" in body:
        return await _rerank(service, call, _as(RerankBody, body))
    if isinstance(body.get("inputs"), dict):
        return await _similarity(service, call, _as(SimilarityBody, body))
    task = service.models.find(None, "embed", "embed_sparse", "classify").task
    if task == "classify":
        return await _predict(service, call, _as(PredictBody, body))
    if task == "embed_sparse":
        return await _embed_sparse(service, call, _as(EmbedAllBody, body))
    return await _embed(service, call, _as(EmbedBody, body))


def _as(kind: Any, body: dict[str, Any]) -> Any:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise RefusalError("invalid", f"the body is not what this route takes: {error}") from None


async def _info(service: Service, call: Call, body: None) -> Reply:
    model, limits = next(iter(service.models.by_name.values())), service.limits
    meta = model.session.meta
    kind = "reranker" if model.reranks else "classifier" if model.task == "classify" else "embedding"
    labels = label_names(meta, len(meta.labels or ())) if kind != "embedding" else []
    by_id = {str(index): label for index, label in enumerate(labels)}
    # How an artifact pools is a part of its compiled graph.
    about = {"pooling": "splade" if model.task == "embed_sparse" else "compiled"} if kind == "embedding" else {
        "id2label": by_id, "label2id": {label: int(index) for index, label in by_id.items()}
    }  # fmt: skip
    info = Info(
        model_id=model.source or model.name, model_sha=model.sha256, model_dtype=model.dtype,
        served_model_name=model.name, model_type={kind: about}, max_concurrent_requests=limits.max_concurrent,
        max_input_length=model.session.tokenizer.max_length, max_batch_tokens=model.session.batch_tokens,
        max_batch_requests=None, max_client_batch_size=limits.max_texts, auto_truncate=False, tokenization_workers=1,
        version=version("encast"), sha=None, docker_label=None,
    )  # fmt: skip
    return Reply(msgspec.json.encode(info))


async def _health(service: Service, call: Call, body: None) -> Reply:
    if not service.ready():
        raise RefusalError("unavailable", "unhealthy", retry_after=1)
    return Reply(b"", media_type="text/plain")


_ROOT = Annotated[
    dict[str, Any],
    msgspec.Meta(
        description="By its shape: `query` as of /rerank, `inputs` with `source_sentence` as of /similarity; else as of"
        " /predict, /embed_sparse or /embed, by what the first model can do."
    ),
]
_CATS = ["The cat sat on the mat.", "Dogs bark."]

TEI = Protocol(
    "tei",
    [
        Operation(
            "POST", "/embed", "tei.embed", "Embeddings, in the form of TEI", _embed, EmbedBody, list[list[float]],
            examples={"texts": {"inputs": _CATS}},
        ),
        Operation(
            "POST", "/embed_all", "tei.embed_all",
            "Last hidden states of every token, or its embedding, in the form of TEI", _embed_all,
            EmbedAllBody, list[list[list[float]]], examples={"text": {"inputs": _CATS[0]}},
        ),
        Operation(
            "POST", "/embed_sparse", "tei.embed_sparse", "Sparse embeddings, in the form of TEI", _embed_sparse,
            EmbedAllBody, list[list[SparseValue]], examples={"texts": {"inputs": _CATS}},
        ),
        Operation(
            "POST", "/predict", "tei.predict", "Labels of a text, a pair or a batch, in the form of TEI", _predict,
            PredictBody, list[Prediction | list[Prediction]],
            examples={"batch": {"inputs": [["What a film!"], ["a cat sleeps", "an animal rests"]]}},
        ),
        Operation(
            "POST", "/rerank", "tei.rerank", "Texts in the order of how well they fit a query, in the form of TEI",
            _rerank, RerankBody, list[Rank], examples={"texts": {"query": "Where is the cat?", "texts": _CATS}},
        ),
        Operation(
            "POST", "/similarity", "tei.similarity", "Cosines of a sentence with others, in the form of TEI",
            _similarity, SimilarityBody, list[float],
            examples={"sentences": {"inputs": {"source_sentence": "A cat.", "sentences": _CATS}}},
        ),
        Operation(
            "POST", "/tokenize", "tei.tokenize", "The tokens of texts, in the form of TEI", _tokenize, TokenizeBody,
            list[list[SimpleToken]], examples={"text": {"inputs": _CATS[0]}}, runs=False,
        ),
        Operation(
            "POST", "/decode", "tei.decode", "The texts of token ids, in the form of TEI", _decode, DecodeBody,
            list[str], examples={"ids": {"ids": [5, 6, 7]}}, runs=False,
        ),
        Operation("POST", "/", "tei.root", "TEI's default route", _root, _ROOT, examples={"embed": {"inputs": _CATS}}),
        Operation("GET", "/info", "tei.info", "The first model, and the limits", _info, None, Info, runs=False),
        Operation(
            "GET", "/health", "tei.health", "Whether requests are taken", _health, runs=False, open=True,
            media_type="text/plain",
        ),
    ],
    _error,
    {"unsupported": 424, "failed": 424},
    TeiError,
)  # fmt: skip
