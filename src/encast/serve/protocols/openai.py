"""The OpenAI API: embeddings, and the list of models.

What is not as OpenAI's own server does it: token ids are the model's and are taken as they are, special tokens are not
added; ``truncate_prompt_tokens: -1`` (a field of vLLM's) cuts texts that are longer than the model reads, which are
refused otherwise; fields that the API does not have are ignored.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
import orjson

from encast.serve.call import Call
from encast.serve.encode import json_rows
from encast.serve.errors import RefusalError
from encast.serve.models import ServedModel
from encast.serve.operations import ErrorBody, Operation, Protocol, Reply, error_body
from encast.serve.service import Service
from encast.tasks.embed import embed, embed_ids, normalized
from encast.tasks.session import F32, Steps, need_finite
from encast.tasks.tokenize import TooLongError

__all__ = ["OPENAI"]


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


_TEXT = {"type": "string", "minLength": 1}
_IDS = _list({"type": "integer", "minimum": 0})
_INPUT = {
    # In allOf, because the decoder's own anyOf would take the place of this one.
    "allOf": [{"anyOf": [_TEXT, _list(_TEXT), _IDS, _list(_IDS)]}],
    "description": "A text, texts, the token ids of a text, or lists of token ids.",
}


class EmbeddingsBody(msgspec.Struct):
    """``dimensions``: so many of the first numbers, scaled to length 1 as OpenAI does. ``truncate_prompt_tokens``: -1
    to cut long texts.
    """

    input: Annotated[str | list[str | int | list[int]], msgspec.Meta(extra_json_schema={"allOf": [_INPUT]})]
    model: str
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    user: str | None = None
    truncate_prompt_tokens: Literal[-1] | None = None


class Embedding(msgspec.Struct):
    """A list of numbers, or the base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: str | list[float]


class Usage(msgspec.Struct):
    """Tokens, special ones included."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct):
    """Embeddings in the order of the input."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Model(msgspec.Struct):
    """``created``: seconds since 1970 at which it was compiled. ``task``: what it was compiled for."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    task: str


class ModelList(msgspec.Struct):
    """All models that are served."""

    object: Literal["list"]
    data: list[Model]


async def _embeddings(service: Service, call: Call, body: EmbeddingsBody) -> Reply:
    model = service.models.find(body.model, "embed")
    if body.dimensions is not None and body.dimensions > model.session.dim:
        raise RefusalError(
            "unprocessable",
            f"dimensions is {body.dimensions}, the model {model.name!r} gives {model.session.dim} numbers a text",
            field="dimensions",
        )
    try:
        rows = await call.run(model, _steps(service, model, body))
    except RefusalError as refusal:
        long = refusal.__cause__
        if not isinstance(long, TooLongError):
            raise
        raise RefusalError(
            "unprocessable",
            f"input[{long.index}] has more than {long.most} tokens, the most that {model.name!r} reads; shorten it, or "
            "send truncate_prompt_tokens: -1 to have it cut",
            field="input",
        ) from None
    content = await call.offload(rows.nbytes, _encode, rows, body, model.name, call.timing.tokens)
    return Reply(content)


def _steps(service: Service, model: ServedModel, body: EmbeddingsBody) -> Steps[F32]:
    """The task for whichever of its forms the input has."""
    rows: Sequence[Any] = [body.input] if isinstance(body.input, str) else body.input
    if rows and type(rows[0]) is int:
        return embed_ids(model.session, [rows])  # which refuses what else is among them
    service.limits.check_count(len(rows), "input")
    kinds = {type(row) for row in rows}
    if kinds == {list}:
        return embed_ids(model.session, rows)
    if kinds != {str}:
        found = "an empty list" if not rows else "a mixture"
        message = f"input is {found}; give a text, texts, token ids, or lists of token ids"
        raise RefusalError("invalid", message, field="input")
    service.limits.check_texts(rows, "input")
    if "" in rows:
        raise RefusalError("invalid", f"input[{rows.index('')}] is empty; leave it out", field="input")
    return embed(model.session, rows, on_long="error" if body.truncate_prompt_tokens is None else "truncate")


def _encode(rows: F32, body: EmbeddingsBody, name: str, tokens: int) -> bytes:
    if body.dimensions is not None and body.dimensions < rows.shape[1]:
        rows = normalized(rows[:, : body.dimensions])
    if body.encoding_format == "base64":
        need_finite(rows)
        vectors: Iterator[bytes] = (
            b'"' + base64.b64encode(row.astype("<f4", copy=False).tobytes()) + b'"' for row in rows
        )
    else:
        vectors = json_rows(rows)
    data = b",".join(b'{"object":"embedding","index":%d,"embedding":%b}' % item for item in enumerate(vectors))
    return b'{"object":"list","data":[%b],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (
        data, orjson.dumps(name), tokens, tokens,
    )  # fmt: skip


async def _models(service: Service, call: Call, body: None) -> Reply:
    return Reply(msgspec.json.encode(ModelList("list", [_model(one) for one in service.models.by_name.values()])))


async def _one_model(service: Service, call: Call, body: None) -> Reply:
    return Reply(msgspec.json.encode(_model(service.models.find(call.path["model"]))))


def _model(model: ServedModel) -> Model:
    return Model(model.name, "model", model.created, "encast", model.task)


_EXAMPLES = {
    "one text": {"model": "MODEL", "input": "The cat sat on the mat."},
    "texts as base64": {"model": "MODEL", "input": ["a cat", "a dog"], "encoding_format": "base64"},
}

OPENAI = Protocol(
    "openai",
    [
        Operation(
            "POST", "/v1/embeddings", "openai.embeddings", "Embeddings, in the form of the OpenAI API", _embeddings,
            EmbeddingsBody, Embeddings, examples=_EXAMPLES, serves=lambda model: model.can("embed"),
        ),
        Operation("GET", "/v1/models", "openai.models", "The models", _models, None, ModelList, runs=False),
        Operation("GET", "/v1/models/{model:path}", "openai.model", "One model", _one_model, None, Model, runs=False),
    ],
    error_body,
    {"unprocessable": 400, "unsupported": 400},
    ErrorBody,
)  # fmt: skip
