"""What the requests and answers of text-embeddings-inference are made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

__all__ = [
    "DecodeBody",
    "EmbedAllBody",
    "EmbedBody",
    "Info",
    "PredictBody",
    "Prediction",
    "Rank",
    "RerankBody",
    "SimilarityBody",
    "SimilarityParameters",
    "SimpleToken",
    "SparseValue",
    "TeiError",
    "TokenizeBody",
    "Truncation",
]

Id = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Direction = Literal["right", "left", "Right", "Left"]
Ids = list[Id]

_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
# In allOf, because the decoder's own anyOf would take the place of this one.
_INPUTS = {
    "allOf": [
        {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ],
    "description": "A text, texts, the token ids of a text, or lists of token ids.",
}
_ROW = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 2}
_ROWS = {
    "allOf": [{"anyOf": [_TEXT, _ROW, {"type": "array", "items": _ROW, "minItems": 1}]}],
    "description": 'A text; a pair `["a", "b"]`; or a batch of both: `[["a"], ["a", "b"]]`.',
}

_TEXT_OR_TEXTS = {"allOf": [{"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}]}
# What is refused in TEI's own words; the decoder would say it in others.
_SOME = msgspec.Meta(extra_json_schema={"minItems": 1})
_SOME_TEXTS = msgspec.Meta(extra_json_schema={"allOf": [{"items": _TEXT}], "minItems": 1})


class Truncation(msgspec.Struct, kw_only=True):
    """``truncate``: whether a text that is longer than the model reads is cut, or refused."""

    truncate: bool | None = None
    truncation_direction: Direction | None = None


class EmbedAllBody(Truncation, kw_only=True):
    """``prompt_name``: which of the checkpoint's prompts goes before every text; its default when left out."""

    inputs: Annotated[str | list[str | Id | Ids], msgspec.Meta(extra_json_schema=_INPUTS)]
    prompt_name: str | None = None


class EmbedBody(EmbedAllBody, kw_only=True):
    """``normalize``: to length 1. ``dimensions``: so many of the first numbers, before that."""

    normalize: bool = True
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None


class PredictBody(Truncation, kw_only=True):
    """``raw_scores``: logits instead of probabilities."""

    inputs: Annotated[str | list[str | list[str]], msgspec.Meta(extra_json_schema=_ROWS)]
    raw_scores: bool = False


class RerankBody(Truncation, kw_only=True):
    """``raw_scores``: logits instead of their sigmoid. ``return_text``: whether the answer repeats the texts."""

    query: str
    texts: Annotated[list[str], _SOME]
    raw_scores: bool = False
    return_text: bool = False


class SimilarityInput(msgspec.Struct):
    """A sentence, and those that it is compared with."""

    source_sentence: Annotated[str, msgspec.Meta(extra_json_schema=_TEXT)]
    sentences: Annotated[list[str], _SOME_TEXTS]


class SimilarityParameters(Truncation, kw_only=True):
    """See ``EmbedAllBody``."""

    prompt_name: str | None = None


class SimilarityBody(msgspec.Struct):
    """What to compare, and how."""

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None


class SparseValue(msgspec.Struct):
    """The weight of a token of the vocabulary."""

    index: int
    value: float


class TokenizeBody(msgspec.Struct):
    """A text or texts; nothing is cut off."""

    inputs: Annotated[str | list[str], msgspec.Meta(extra_json_schema=_TEXT_OR_TEXTS)]
    add_special_tokens: bool = True
    prompt_name: str | None = None


class DecodeBody(msgspec.Struct):
    """The token ids of one text, or of several."""

    ids: Annotated[list[Id | Ids], msgspec.Meta(extra_json_schema={"anyOf": [_IDS, {"items": _IDS}], "minItems": 1})]
    skip_special_tokens: bool = True


class Prediction(msgspec.Struct):
    """A label and its score."""

    score: float
    label: str


class Rank(msgspec.Struct, omit_defaults=True):
    """``index``: of the text in the request."""

    index: int
    score: float
    text: str | None = None


class SimpleToken(msgspec.Struct):
    """``start`` and ``stop``: in bytes of the text, null for tokens that stand for nothing in it."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class Info(msgspec.Struct):
    """The first served model, and the server's limits."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None


class TeiError(msgspec.Struct):
    """A refusal in the form of TEI."""

    error: str
    error_type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]
