"""Plain JSON for every task, with the names and the answers of the Python methods; no field changes what they do.

``model`` may be left out: then the first served model that has the task answers. A text that is longer than the model
reads is refused unless ``on_long`` is "truncate".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import orjson

from encast.serve.call import Call
from encast.serve.encode import json_list, json_vector
from encast.serve.models import ServedModel
from encast.serve.operations import ErrorBody, Operation, Protocol, Reply, error_body
from encast.serve.protocols.rerank import find_reranker, reranks
from encast.serve.service import Service
from encast.tasks import Answer, Candidate, Tagging
from encast.tasks.answer import answer
from encast.tasks.classify import classify
from encast.tasks.embed import embed
from encast.tasks.embed_m3 import embed_m3
from encast.tasks.embed_sparse import SparseVector, embed_sparse
from encast.tasks.embed_tokens import TokenVectors, embed_tokens
from encast.tasks.features import hidden_states
from encast.tasks.fill_mask import fill_mask
from encast.tasks.rerank import rerank
from encast.tasks.session import F32, need_finite
from encast.tasks.tag import tag
from encast.tasks.texts import check_texts
from encast.tasks.tokenize import Encoding

__all__ = ["ENCAST"]

OnLong = Literal["error", "truncate"]
Count = Annotated[int, msgspec.Meta(ge=1, le=1000)]


class TextsBody(msgspec.Struct, kw_only=True):
    """Texts for a model."""

    texts: list[str]
    model: str | None = None
    on_long: OnLong = "error"


class EmbedBody(TextsBody, kw_only=True):
    """``prompt_name``: which of the checkpoint's prompts goes before every text; its default when left out.
    ``truncate_dim``: so many of the first numbers, of length 1 again where the model normalises.
    """

    prompt_name: str | None = None
    truncate_dim: Annotated[int, msgspec.Meta(ge=1)] | None = None


class EmbedSparseBody(TextsBody, kw_only=True):
    """``prompt_name``: as of embed. ``max_active_dims``: so many of the largest weights of a text; as the checkpoint
    says when left out, else all.
    """

    prompt_name: str | None = None
    max_active_dims: Annotated[int, msgspec.Meta(ge=1)] | None = None


class EmbedTokensBody(TextsBody, kw_only=True):
    """``kind``: whether the texts are queries or documents, which the model reads differently. ``prompt_name``: as of
    embed.
    """

    kind: Literal["query", "document"] = "document"
    prompt_name: str | None = None


class ClassifyBody(msgspec.Struct, kw_only=True):
    """Texts, or pairs of texts."""

    texts: list[str | tuple[str, str]]
    model: str | None = None
    on_long: OnLong = "error"


class RankBody(msgspec.Struct, kw_only=True):
    """Documents to order."""

    query: str
    documents: list[str]
    model: str | None = None
    on_long: OnLong = "error"


class AnswerBody(msgspec.Struct, kw_only=True):
    """A question and its context, or lists of equal length. The fields beyond are those of ``Engine.answer``."""

    question: str | list[str]
    context: str | list[str]
    model: str | None = None
    stride: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    max_answer_len: Count = 30
    n_best: Count = 20
    null_threshold: float | None = None


class FillMaskBody(TextsBody, kw_only=True):
    """Texts with masks; ``top_k`` candidates for each."""

    top_k: Count = 5


class EmbedAnswer(msgspec.Struct):
    """A row a text."""

    model: str
    tokens: int
    results: list[list[float]]


class SparseWeights(msgspec.Struct):
    """``indices``: ids of tokens, rising; ``values``: their weights, above 0."""

    indices: list[int]
    values: list[float]


class EmbedSparseAnswer(msgspec.Struct):
    """The weights of every text."""

    model: str
    tokens: int
    results: list[SparseWeights]


class TextVectors(msgspec.Struct):
    """``vectors``: of length 1, one for each of ``token_ids``."""

    token_ids: list[int]
    vectors: list[list[float]]


class EmbedTokensAnswer(msgspec.Struct):
    """The vectors of every text."""

    model: str
    tokens: int
    results: list[TextVectors]


class M3Vectors(msgspec.Struct):
    """What embed, embed-sparse and embed-tokens say of a text."""

    embedding: list[float]
    sparse: SparseWeights
    tokens: TextVectors


class EmbedM3Answer(msgspec.Struct):
    """The three embeddings of every text."""

    model: str
    tokens: int
    results: list[M3Vectors]


class LabelScore(msgspec.Struct):
    """The score of one label."""

    label: str
    score: float


class ClassifyResult(msgspec.Struct):
    """``label``: the best, null for a regression, whose value is ``score``; ``scores``: in the checkpoint's order."""

    label: str | None
    score: float
    scores: list[LabelScore]


class ClassifyAnswer(msgspec.Struct):
    """A result a row."""

    model: str
    tokens: int
    results: list[ClassifyResult]


class Ranked(msgspec.Struct):
    """``score``: a cross-encoder's logit, the similarity of embeddings, or MaxSim of those of tokens."""

    index: int
    score: float


class RankAnswer(msgspec.Struct):
    """Documents by their index, best first."""

    model: str
    tokens: int
    results: list[Ranked]


class TagAnswer(msgspec.Struct):
    """Entities and tokens of every text."""

    model: str
    tokens: int
    results: list[Tagging]


class AnswerAnswer(msgspec.Struct):
    """An answer a question."""

    model: str
    tokens: int
    results: list[Answer]


class FillMaskAnswer(msgspec.Struct):
    """For every text, for every mask, the likeliest tokens."""

    model: str
    tokens: int
    results: list[list[list[Candidate]]]


class HiddenStatesAnswer(msgspec.Struct):
    """For every text, for every token, special ones included, a row."""

    model: str
    tokens: int
    results: list[list[list[float]]]


class TextToken(msgspec.Struct):
    """``start`` and ``end``: in characters of the text; ``special``: added by the tokenizer."""

    id: int
    token: str
    start: int
    end: int
    special: bool


class TokenizeAnswer(msgspec.Struct):
    """The tokens of every text; the model reads at most ``max_length`` of them."""

    model: str
    max_length: int
    results: list[list[TextToken]]


def _content(name: str, tokens: int, results: bytes) -> bytes:
    return b'{"model":%b,"tokens":%d,"results":%b}' % (orjson.dumps(name), tokens, results)


async def _reply(call: Call, model: ServedModel, size: int, encode: Callable[[], bytes]) -> Reply:
    """An answer with the results that ``encode`` makes of about ``size`` bytes."""
    return Reply(_content(model.name, call.timing.tokens, await call.offload(size, encode)))


async def _embed(service: Service, call: Call, body: EmbedBody) -> Reply:
    model = service.models.find(body.model, "embed")
    service.limits.check_texts(body.texts, "texts")
    steps = embed(
        model.session,
        body.texts,
        on_long=body.on_long,
        prompt_name=body.prompt_name,
        truncate_dim=body.truncate_dim,
    )
    rows = await call.run(model, steps)
    return await _reply(call, model, rows.nbytes, lambda: json_list(rows))


async def _embed_sparse(service: Service, call: Call, body: EmbedSparseBody) -> Reply:
    model = service.models.find(body.model, "embed_sparse")
    service.limits.check_texts(body.texts, "texts")
    steps = embed_sparse(
        model.session,
        body.texts,
        on_long=body.on_long,
        prompt_name=body.prompt_name,
        max_active_dims=body.max_active_dims,
        most_weights=service.limits.max_weights,
    )
    found = await call.run(model, steps)

    def encode() -> bytes:
        return b"[" + b",".join(map(_json_weights, found)) + b"]"

    return await _reply(call, model, 8 * sum(one.indices.size for one in found), encode)


async def _embed_tokens(service: Service, call: Call, body: EmbedTokensBody) -> Reply:
    model = service.models.find(body.model, "embed_tokens")
    service.limits.check_texts(body.texts, "texts")
    steps = embed_tokens(model.session, body.texts, kind=body.kind, on_long=body.on_long, prompt_name=body.prompt_name)
    found = await call.run(model, steps)

    def encode() -> bytes:
        return b"[" + b",".join(map(_json_vectors, found)) + b"]"

    return await _reply(call, model, sum(one.vectors.nbytes for one in found), encode)


async def _embed_m3(service: Service, call: Call, body: EmbedSparseBody) -> Reply:
    model = service.models.find(body.model, "embed_m3")
    service.limits.check_texts(body.texts, "texts")
    steps = embed_m3(
        model.session,
        body.texts,
        on_long=body.on_long,
        prompt_name=body.prompt_name,
        max_active_dims=body.max_active_dims,
        most_weights=service.limits.max_weights,
    )
    found = await call.run(model, steps)

    def encode() -> bytes:
        rows = (
            b'{"embedding":%b,"sparse":%b,"tokens":%b}'
            % (json_vector(one.embedding), _json_weights(one.sparse), _json_vectors(one.tokens))
            for one in found
        )
        return b"[" + b",".join(rows) + b"]"

    return await _reply(call, model, sum(one.tokens.vectors.nbytes for one in found), encode)


def _json_weights(one: SparseVector) -> bytes:
    return b'{"indices":%b,"values":%b}' % (json_vector(one.indices), json_vector(one.values))


def _json_vectors(one: TokenVectors) -> bytes:
    return b'{"token_ids":%b,"vectors":%b}' % (json_vector(one.token_ids), json_list(one.vectors))


async def _classify(service: Service, call: Call, body: ClassifyBody) -> Reply:
    model = service.models.find(body.model, "classify")
    service.limits.check_texts(body.texts, "texts")
    found = await call.run(model, classify(model.session, body.texts, on_long=body.on_long))
    need_finite(np.array([one.score for one in found]))

    def encode() -> bytes:
        return msgspec.json.encode(
            [ClassifyResult(one.label, one.score, [LabelScore(*pair) for pair in one.scores.items()]) for one in found]
        )

    return await _reply(call, model, 64 * len(found), encode)


async def _rank(service: Service, call: Call, body: RankBody) -> Reply:
    model = find_reranker(service, body.model)
    service.limits.check_texts([body.query], "query")
    service.limits.check_texts(body.documents, "documents")
    most = service.limits.max_products
    steps = rerank(model.session, body.query, body.documents, on_long=body.on_long, most_products=most)
    found = await call.run(model, steps)
    need_finite(np.array([score for _, score in found]))
    return await _reply(call, model, 32 * len(found), lambda: msgspec.json.encode([Ranked(*one) for one in found]))


async def _tag(service: Service, call: Call, body: TextsBody) -> Reply:
    model = service.models.find(body.model, "tag")
    service.limits.check_texts(body.texts, "texts")
    found = await call.run(model, tag(model.session, body.texts, on_long=body.on_long))
    return await _reply(call, model, 64 * call.timing.tokens, lambda: msgspec.json.encode(found))


async def _answer(service: Service, call: Call, body: AnswerBody) -> Reply:
    model = service.models.find(body.model, "answer")
    questions, contexts = ([one] if isinstance(one, str) else one for one in (body.question, body.context))
    service.limits.check_texts(questions, "question")
    service.limits.check_texts(contexts, "context")
    steps = answer(
        model.session, body.question, body.context, stride=body.stride, max_answer_len=body.max_answer_len,
        n_best=body.n_best, null_threshold=body.null_threshold, at_most_half=True,
    )  # fmt: skip
    found = await call.run(model, steps)
    results = found if isinstance(found, list) else [found]
    return await _reply(call, model, 128 * len(results), lambda: msgspec.json.encode(results))


async def _fill_mask(service: Service, call: Call, body: FillMaskBody) -> Reply:
    model = service.models.find(body.model, "fill_mask")
    service.limits.check_texts(body.texts, "texts")
    found = await call.run(model, fill_mask(model.session, body.texts, top_k=body.top_k, on_long=body.on_long))
    size = 64 * body.top_k * sum(map(len, found))
    return await _reply(call, model, size, lambda: msgspec.json.encode(found))


async def _hidden_states(service: Service, call: Call, body: TextsBody) -> Reply:
    model = service.models.find(body.model)
    service.limits.check_texts(body.texts, "texts")
    found: list[F32] = await call.run(model, hidden_states(model.session, body.texts, on_long=body.on_long))
    size = sum(one.nbytes for one in found)
    return await _reply(call, model, size, lambda: b"[" + b",".join(map(json_list, found)) + b"]")


async def _tokenize(service: Service, call: Call, body: TextsBody) -> Reply:
    model = call.model = service.models.find(body.model)
    service.limits.check_texts(body.texts, "texts")
    tokenizer = model.session.tokenizer

    def encode() -> bytes:
        # One text at a time: of all at once there could be millions of objects.
        rows, tokens = [], 0
        for index, text in enumerate(check_texts(body.texts)):
            (found,) = tokenizer.encode([text], offsets=True, on_long=body.on_long, first=index)
            tokens += len(found)
            service.limits.check_tokens(tokens, "texts")
            rows.append(msgspec.Raw(msgspec.json.encode(_tokens(found))))
        return msgspec.json.encode({"model": model.name, "max_length": tokenizer.max_length, "results": rows})

    return Reply(await call.offload(len(call.body), encode))


def _tokens(encoding: Encoding) -> list[TextToken]:
    columns = encoding.ids, encoding.tokens, encoding.offsets, encoding.special_tokens_mask
    return [
        TextToken(id, token, start, end, bool(special))
        for id, token, (start, end), special in zip(*columns, strict=True)
    ]


_CATS = {"texts": ["The cat sat on the mat.", "Dogs bark."]}
_QUESTION = {"question": "Where is the cat?", "context": "The cat sat on the mat."}


def _any(model: ServedModel) -> bool:
    return True


def _of(task: str) -> Callable[[ServedModel], bool]:
    return lambda model: model.can(task)


# Name, summary, handler, its body and answer, an example, and which models it can ask.
_ROUTES: list[tuple[str, str, Any, Any, Any, dict[str, Any], Callable[[ServedModel], bool]]] = [
    ("embed", "Embeddings of texts", _embed, EmbedBody, EmbedAnswer, _CATS, _of("embed")),
    (
        "embed-sparse", "Sparse embeddings of texts: weights of tokens", _embed_sparse, EmbedSparseBody,
        EmbedSparseAnswer, _CATS, _of("embed_sparse"),
    ),
    (
        "embed-tokens", "Embeddings of the tokens of texts, for late interaction", _embed_tokens, EmbedTokensBody,
        EmbedTokensAnswer, _CATS, _of("embed_tokens"),
    ),
    (
        "embed-m3", "Embeddings, sparse embeddings and embeddings of tokens of texts, all in one run", _embed_m3,
        EmbedSparseBody, EmbedM3Answer, _CATS, _of("embed_m3"),
    ),
    (
        "classify", "Labels of texts, or of pairs of texts", _classify, ClassifyBody, ClassifyAnswer,
        {"texts": ["What a film!", ["a cat sleeps", "an animal rests"]]}, _of("classify"),
    ),
    (
        "rerank", "Documents in the order of how well they fit a query", _rank, RankBody, RankAnswer,
        {"query": "Where is the cat?", "documents": _CATS["texts"]}, reranks,
    ),
    ("tag", "Entities in texts", _tag, TextsBody, TagAnswer, {"texts": ["Jo Doe lives in New York."]}, _of("tag")),
    (
        "answer", "Answers to questions, out of contexts of any length", _answer, AnswerBody, AnswerAnswer, _QUESTION,
        _of("answer"),
    ),
    (
        "fill-mask", "Likely tokens for masks", _fill_mask, FillMaskBody, FillMaskAnswer,
        {"texts": ["The cat sat on the [MASK]."]}, _of("fill_mask"),
    ),
    ("hidden-states", "Last hidden states of every token", _hidden_states, TextsBody, HiddenStatesAnswer, _CATS, _any),
    ("tokenize", "The tokens of texts", _tokenize, TextsBody, TokenizeAnswer, _CATS, _any),
]  # fmt: skip

ENCAST = Protocol(
    "encast",
    [
        Operation(
            "POST", f"/encast/v1/{name}", f"encast.{name}", summary, handler, body, answer,
            examples={"example": example}, serves=serves, runs=name != "tokenize",
        )
        for name, summary, handler, body, answer, example, serves in _ROUTES
    ],
    error_body,
    error_type=ErrorBody,
)  # fmt: skip
