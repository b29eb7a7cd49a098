"""The protocols of embedding servers: how texts become the body of a request, and a body becomes answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from encast.errors import InputError
from encast.loadtest import kserve_grpc
from encast.loadtest.answers import Answers, BadAnswerError, Ranking, Target

__all__ = ["GRPC", "PROTOCOLS", "Protocol", "protocol_of", "text_input"]

GRPC = "kserve-grpc"
"""The only protocol that is not JSON over HTTP."""


@dataclass(frozen=True)
class Protocol:
    """``path`` follows the server's address; ``{model}`` in it is the model's name.

    ``answer``: what it answers, by the name of the field that ``encast run`` writes. ``takes``: kinds of rows.
    ``decode`` raises ``BadAnswerError``; its second argument is how many texts were sent. ``named_inputs``: whether
    the server is asked for the name of the input.
    """

    name: str
    path: str
    answer: str
    takes: tuple[type, ...]
    encode: Callable[[Target, Sequence[Any]], bytes]
    decode: Callable[[bytes, int], Answers]
    needs_model: bool = True
    named_inputs: bool = False


def protocol_of(name: str) -> Protocol:
    """Raises ``InputError`` listing those there are."""
    if name not in PROTOCOLS:
        raise InputError(f"--protocol is {name!r}; {', '.join(PROTOCOLS)} are known")
    return PROTOCOLS[name]


def _decoded(read: Callable[[Any, int], Answers]) -> Callable[[bytes, int], Answers]:
    def decode(body: bytes, texts: int) -> Answers:
        try:
            answers = read(orjson.loads(body), texts)
        except (AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
            raise BadAnswerError(f"{type(error).__name__}: {error}"[:200]) from None
        return answers

    return decode


def _json(target: Target, document: dict[str, Any]) -> bytes:
    return orjson.dumps({**document, **target.fields})


def _need_all(found: Sequence[Any], texts: int) -> Sequence[Any]:
    if len(found) != texts or not all(found):
        raise ValueError(f"{sum(map(bool, found))} answers to {texts} texts")
    return found


def _openai(encoding: str) -> Callable[[Target, Sequence[Any]], bytes]:
    return lambda target, rows: _json(target, {"model": target.model, "input": rows, "encoding_format": encoding})


def _openai_answers(document: Any, texts: int) -> Answers:
    found: list[Any] = [None] * texts
    for item in document["data"]:
        if item["index"] < 0:
            raise ValueError(f"the index {item['index']}")
        found[item["index"]] = item["embedding"]
    return Answers(_need_all(found, texts), (document.get("usage") or {}).get("total_tokens"))


def _list_answers(document: Any, texts: int) -> Answers:
    if not isinstance(document, list):
        raise TypeError("a list of answers is needed")
    return Answers(_need_all(document, texts))


def _ranking(target: Target, rows: Sequence[Any]) -> bytes:
    return _json(target, {"model": target.model, "query": rows[0].query, "documents": rows[0].documents})


def _ranking_answers(document: Any, texts: int) -> Answers:
    """TEI's is the list itself; Cohere's and Jina's have it in ``results``, and Jina's says its tokens."""
    found, usage = document, None
    if isinstance(document, dict):
        found, usage = document["results"], document.get("usage")
    if sorted(one["index"] for one in found) != list(range(texts)):
        raise ValueError(f"{len(found)} places for {texts} documents")
    return Answers([found], (usage or {}).get("total_tokens"))


def _kserve(target: Target, rows: Sequence[Any]) -> bytes:
    given = {"name": target.input, "shape": [len(rows)], "datatype": "BYTES", "data": rows}
    return _json(target, {"inputs": [given]})


def _kserve_answers(document: Any, texts: int) -> Answers:
    output = next(one for one in document["outputs"] if one["datatype"] == "FP32")
    numbers, shape = output["data"], output["shape"]
    if isinstance(numbers[0], list):  # the protocol allows rows as well
        return Answers(_need_all(numbers, texts))
    width = len(numbers) // texts
    if shape[0] != texts or math.prod(shape) != len(numbers) or not width:
        raise ValueError(f"an output of shape {shape} and {len(numbers)} numbers for {texts} texts")
    return Answers([numbers[begin : begin + width] for begin in range(0, len(numbers), width)])


def text_input(body: bytes) -> str | None:
    """The first input of texts, of a model's KServe metadata. Raises ``BadAnswerError``."""
    try:
        return next((str(one["name"]) for one in orjson.loads(body)["inputs"] if one["datatype"] == "BYTES"), None)
    except (KeyError, TypeError, ValueError) as error:
        raise BadAnswerError(f"no metadata of a model ({error})") from None


PROTOCOLS: Mapping[str, Protocol] = {
    protocol.name: protocol
    for protocol in (
        Protocol("openai", "/v1/embeddings", "embedding", (str,), _openai("base64"), _decoded(_openai_answers)),
        Protocol("openai-floats", "/v1/embeddings", "embedding", (str,), _openai("float"), _decoded(_openai_answers)),
        Protocol(
            "tei-embed",
            "/embed",
            "embedding",
            (str,),
            lambda target, rows: _json(target, {"inputs": rows}),
            _decoded(_list_answers),
            False,
        ),
        Protocol(
            "tei-predict",
            "/predict",
            "scores",
            (str, tuple),
            lambda target, rows: _json(target, {"inputs": [[row] if isinstance(row, str) else row for row in rows]}),
            _decoded(_list_answers),
            False,
        ),
        Protocol(
            "tei-rerank",
            "/rerank",
            "ranking",
            (str, Ranking),
            lambda target, rows: _json(target, {"query": rows[0].query, "texts": rows[0].documents}),
            _decoded(_ranking_answers),
            False,
        ),
        Protocol("cohere", "/v2/rerank", "ranking", (str, Ranking), _ranking, _decoded(_ranking_answers)),
        Protocol("jina", "/v1/rerank", "ranking", (str, Ranking), _ranking, _decoded(_ranking_answers)),
        Protocol(
            "kserve",
            "/v2/models/{model}/infer",
            "embedding",
            (str,),
            _kserve,
            _decoded(_kserve_answers),
            named_inputs=True,
        ),
        Protocol(
            GRPC,
            "",
            "embedding",
            (str,),
            kserve_grpc.encode,
            kserve_grpc.decode,
            named_inputs=True,
        ),
    )
}
