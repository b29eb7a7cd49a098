"""Reranking as the APIs of Cohere (v1 and v2) and Jina have it: their requests and answers meet in one form.

A cross-encoder's score is the sigmoid of its logit, 0 to 1, as sentence-transformers has it for one label; a model of
embeddings scores with its similarity, which for the cosine is -1 to 1, one of embeddings of tokens with MaxSim, which
is up to the number of the query's vectors. The query and a document are cut to what the model reads, as these APIs do.
``priority`` and fields that they do not have are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from encast.serve.call import Call
from encast.serve.errors import RefusalError
from encast.serve.models import ServedModel
from encast.serve.operations import Operation, Protocol, Reply
from encast.serve.service import Service
from encast.tasks.classify import sigmoid
from encast.tasks.rerank import rerank
from encast.tasks.session import need_finite

__all__ = ["RERANK", "find_reranker", "reranks"]


Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class Document(msgspec.Struct):
    """A document as an object."""

    text: str


class RerankBody(msgspec.Struct):
    """``model``: by default the first that can rerank. ``top_n``: by default all. ``max_tokens_per_doc``: no less than
    the model reads, which is where documents are cut. ``rank_fields``: documents are ranked by their text alone.
    """

    query: str
    documents: Annotated[list[str | Document], msgspec.Meta(min_length=1)]
    model: str | None = None
    top_n: Count | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Count | None = None
    rank_fields: Annotated[list[Literal["text"]], msgspec.Meta(min_length=1)] | None = None


class RerankResult(msgspec.Struct, omit_defaults=True):
    """``index``: the document's place in the request."""

    index: int
    relevance_score: float
    document: Document | None = None


class ApiVersion(msgspec.Struct):
    """Of Cohere's API."""

    version: str


class BilledUnits(msgspec.Struct):
    """What Cohere would count."""

    search_units: int


class Tokens(msgspec.Struct):
    """Tokens that the model read."""

    input_tokens: int


class Meta(msgspec.Struct):
    """Cohere's facts about a request."""

    api_version: ApiVersion
    billed_units: BilledUnits
    tokens: Tokens


class Usage(msgspec.Struct):
    """Jina's facts about a request."""

    prompt_tokens: int
    total_tokens: int


class RerankAnswer(msgspec.Struct):
    """Results, best first."""

    id: str
    model: str
    results: list[RerankResult]
    meta: Meta
    usage: Usage


class RerankError(msgspec.Struct):
    """A refusal: Cohere's clients read ``message``, Jina's ``detail``."""

    message: str
    detail: str


def reranks(model: ServedModel) -> bool:
    """Whether it is a cross-encoder or a model of embeddings, of texts or of tokens."""
    return model.reranks or model.can("embed", "embed_tokens")


def find_reranker(service: Service, name: str | None) -> ServedModel:
    """The model of that name; for None the first cross-encoder, else the first model of embeddings."""
    if name is None:
        for model in service.models.by_name.values():
            if model.reranks:
                return model
        return service.models.find(None, "embed", "embed_tokens")
    return service.models.find(name, "classify", "embed", "embed_tokens")


async def _rerank(service: Service, call: Call, body: RerankBody, version: str) -> Reply:
    model = find_reranker(service, body.model)
    most = model.session.tokenizer.max_length
    if body.max_tokens_per_doc is not None and body.max_tokens_per_doc < most:
        raise RefusalError(
            "unprocessable",
            f"max_tokens_per_doc is {body.max_tokens_per_doc}; {model.name!r} cuts the query with a document at {most} "
            "tokens and nowhere else: leave it out, or shorten the documents",
            field="max_tokens_per_doc",
        )
    service.limits.check_count(len(body.documents), "documents")
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    service.limits.check_texts([body.query], "query")
    service.limits.check_texts(texts, "documents")
    ranking = await call.run(model, rerank(model.session, body.query, texts, most_products=service.limits.max_products))
    scores = need_finite(np.array([score for _, score in ranking]))
    if model.task == "classify":
        scores = sigmoid(scores)
    results = [
        RerankResult(index, score, Document(texts[index]) if body.return_documents else None)
        for (index, _), score in zip(ranking[: body.top_n], scores.tolist(), strict=False)
    ]
    tokens = call.timing.tokens
    answer = RerankAnswer(
        call.id, model.name, results, Meta(ApiVersion(version), BilledUnits(1), Tokens(tokens)), Usage(tokens, tokens)
    )
    size = len(call.body) if body.return_documents else 64 * len(results)
    return Reply(await call.offload(size, msgspec.json.encode, answer))


async def _v1(service: Service, call: Call, body: Any) -> Reply:
    return await _rerank(service, call, body, "1")


async def _v2(service: Service, call: Call, body: Any) -> Reply:
    return await _rerank(service, call, body, "2")


def _error(refusal: RefusalError) -> bytes:
    return msgspec.json.encode(RerankError(refusal.message, refusal.message))


_EXAMPLE = {"query": "Where is the cat?", "documents": ["The cat is on the mat.", "Dogs bark."], "top_n": 1}
_EXAMPLES = {"strings": _EXAMPLE, "named": {"model": "MODEL", **_EXAMPLE}}

RERANK = Protocol(
    "rerank",
    [
        Operation(
            "POST", "/v1/rerank", "rerank.v1", "Reranking, in the form of Jina's API and Cohere's v1", _v1, RerankBody,
            RerankAnswer, examples=_EXAMPLES, serves=reranks,
        ),
        Operation(
            "POST", "/v2/rerank", "rerank.v2", "Reranking, in the form of Cohere's API v2", _v2, RerankBody,
            RerankAnswer, examples=_EXAMPLES, serves=reranks,
        ),
    ],
    _error,
    error_type=RerankError,
)  # fmt: skip
