"""What a graph says of its model: the facts that later stages and the tasks need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from encast.errors import GraphError

__all__ = [
    "HEADS",
    "PARTS",
    "SIMILARITIES",
    "SPLADE_ACTIVATIONS",
    "Check",
    "FusionPromise",
    "GraphMeta",
    "TokenForm",
    "count",
    "is_text",
    "is_token_form",
    "is_tokens",
    "one_of",
]

HEADS: Mapping[str, tuple[str, str] | None] = {
    "features": None,
    "embed": ("embedding", "seqs"),
    "embed_sparse": ("sparse_embedding", "seqs"),
    "embed_tokens": ("token_embedding", "tokens"),
    "embed_m3": ("m3_embedding", "tokens"),
    "classify": ("logits", "seqs"),
    "tag": ("logits", "tokens"),
    "answer": ("logits", "tokens"),
    "fill_mask": ("logits", "selected"),
}
"""Every task, and the output of its head with the rows of that; ``features`` is the encoder alone."""

PARTS: Mapping[str, tuple[str, ...]] = {"embed_m3": ("embed", "embed_sparse", "embed_tokens")}
"""Tasks whose artifacts can do others too, and which."""

SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
"""How embeddings may be compared."""

SPLADE_ACTIVATIONS: Mapping[str, int] = {"relu": 1, "log1p_relu": 2}
"""How many times a sparse embedding takes log(1 + x) of what is above 0, by the names of sentence-transformers."""


@dataclass(frozen=True)
class TokenForm:
    """How a model of token embeddings reads texts, in token ids.

    A marker follows the first token of a query or a document, None for none. ``query_length`` and ``document_length``
    bound their tokens, special ones and the marker included; None where the tokenizer's limit does. ``expansion`` fills
    queries up to their length, None where they stay as they are; ``most_unseen`` is how many of these a query may have
    that no token sees, 0 where all are seen. ``skip``: tokens of which a document has no vectors, rising.
    ``drop_first``: whether the first token of a text has no vector. ``placeholder``: what goes before each text, ""
    for nothing; the marker then takes the place of its token, which is the second of all.
    """

    query_marker: int | None
    document_marker: int | None
    query_length: int | None
    document_length: int | None
    expansion: int | None
    most_unseen: int
    skip: tuple[int, ...]
    drop_first: bool = False
    placeholder: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {**asdict(self), "skip": list(self.skip)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TokenForm:
        """The inverse of ``to_json`` for data that ``is_token_form`` takes."""
        return TokenForm(**{**data, "skip": tuple(data["skip"])})


@dataclass(frozen=True)
class FusionPromise:
    """How many fusions of one kind a config promises: in each encoder layer, and outside of the layers."""

    per_layer: int
    other: int


@dataclass(frozen=True)
class GraphMeta:
    """The facts of a graph.

    ``arch``: the checkpoint's ``model_type``. ``task``: one of ``HEADS``. ``type_vocab`` is 0 when the model has no
    token types; ``max_len`` is the longest sequence that the positions allow, special tokens included. ``labels``,
    ``problem_type`` (``single_label``, ``multi_label``, ``regression``) and ``similarity`` (of ``SIMILARITIES``) are
    None where the checkpoint has none. ``expected``: fusion to what the config
    promises. ``math``: ``fast`` or ``exact``. ``dtype`` of the products: ``f32``, ``bf16`` or ``int8``.
    """

    arch: str
    task: str
    hidden: int
    layers: int
    heads: int
    vocab: int
    type_vocab: int
    max_len: int
    labels: tuple[str, ...] | None
    problem_type: str | None
    similarity: str | None
    expected: Mapping[str, FusionPromise]
    math: str
    dtype: str

    def can(self, *tasks: str) -> bool:
        """Whether an artifact of this task can do one of ``tasks``."""
        return any(task in tasks for task in (self.task, *PARTS.get(self.task, ())))

    def longest_text(self, tokenizer_max: int | None) -> int:
        """Tokens after which texts are cut, special ones included, by what the checkpoint's tokenizer says."""
        return min(self.max_len, tokenizer_max or self.max_len)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {**asdict(self), "labels": None if self.labels is None else list(self.labels)}

    @staticmethod
    def from_json(data: object) -> GraphMeta:
        """The inverse of ``to_json`` for data that nobody vouches for; raises ``GraphError`` naming the field."""
        if not isinstance(data, Mapping):
            raise GraphError(f"meta is malformed: it is of type {type(data).__name__}; an object is needed")
        for name in data:
            if name not in _ACCEPTED:
                raise GraphError(
                    f"meta[{_short(name)}] is a field that no compiled graph has; they have {list(_ACCEPTED)}"
                )
        for name, accepts in _ACCEPTED.items():
            if name not in data:
                raise GraphError(f"meta[{name!r}] is missing; every compiled graph has it")
            if not accepts(data[name]):
                raise GraphError(f"meta[{name!r}] is {_short(data[name])}, which no compiled graph has")
        labels = data["labels"]
        expected = {fusion: FusionPromise(**promise) for fusion, promise in data["expected"].items()}
        return GraphMeta(**{**data, "labels": None if labels is None else tuple(labels), "expected": expected})


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + "..."


Check = Callable[[Any], bool]


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def count(least: int) -> Check:
    """Whether a value is a whole number from ``least`` on that fits int32; true and false are none."""
    return lambda value: type(value) is int and least <= value < 1 << 31


def one_of(*known: str) -> Check:
    return lambda value: isinstance(value, str) and value in known


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def is_tokens(value: Any) -> bool:
    """Whether JSON data is a list of token ids."""
    return isinstance(value, list) and all(map(count(0), value))


def is_token_form(value: Any) -> bool:
    """Whether JSON data is that of a ``TokenForm``."""
    token, length = count(0), count(3)
    checks: Mapping[str, Check] = {
        "query_marker": _optional(token),
        "document_marker": _optional(token),
        "query_length": _optional(length),
        "document_length": _optional(length),
        "expansion": _optional(token),
        "most_unseen": token,
        "drop_first": lambda drop: isinstance(drop, bool),
        "placeholder": is_text,
        "skip": is_tokens,
    }
    return (
        isinstance(value, dict) and value.keys() == checks.keys() and all(checks[name](value[name]) for name in checks)
    )


def _is_promises(value: Any) -> bool:
    names = {field.name for field in fields(FusionPromise)}
    return isinstance(value, dict) and all(
        isinstance(promise, dict) and set(promise) == names and all(map(count(0), promise.values()))
        for promise in value.values()
    )


_ACCEPTED: Mapping[str, Check] = {
    "arch": is_text,
    "task": one_of(*HEADS),
    "hidden": count(1),
    "layers": count(0),
    "heads": count(1),
    "vocab": count(1),
    "type_vocab": count(0),
    "max_len": count(1),
    "labels": _optional(_is_texts),
    "problem_type": _optional(one_of("single_label", "multi_label", "regression")),
    "similarity": _optional(one_of(*SIMILARITIES)),
    "expected": _is_promises,
    "math": one_of("fast", "exact"),
    "dtype": one_of("f32", "bf16", "int8"),
}
