"""What is asked: texts of files or of given lengths, made into requests before the clock starts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from encast.errors import InputError
from encast.loadtest.answers import Ranking, Row, Target
from encast.loadtest.protocols import Protocol
from encast.measure.lengths import read_histogram
from encast.measure.texts import read_texts, read_whole

__all__ = ["Request", "Source", "of_lengths", "of_rankings", "of_texts", "prepare"]

_MOST_TEXTS = 4096
"""Of given lengths; more say nothing more about a distribution."""

_MOST_REQUESTS, _MOST_BYTES = 1 << 16, 1 << 28
"""Kept in memory; longer tests ask them again."""

_SPECIAL_TOKENS = 2
"""That a model puts around a text."""

_WORDS = (
    "time people way day man thing woman life child world school state family student group country problem hand part "
    "place case week company system program question work government number night point home water room mother area "
    "money story fact month right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city community name president team minute idea body information back "
    "face level office door health person art war history party result change morning reason research girl moment air "
    "teacher force education"
)
"""Each is one token in the vocabularies of BERT, MPNet and RoBERTa."""


@dataclass(frozen=True)
class Source:
    """Texts of one kind; latencies are reported for each source."""

    name: str
    rows: Sequence[Row]

    def __post_init__(self) -> None:
        if not self.rows:
            raise InputError(f"{self.name}: holds no text; give a file with at least one row")


@dataclass(frozen=True)
class Request:
    """``body`` as it is sent; ``source``: which; ``rows`` of it; ``texts``: how many inferences it asks for."""

    body: bytes
    source: int
    rows: tuple[int, ...]
    texts: int


def of_texts(path: str, column: str = "text", pair_column: str | None = None, format: str = "auto") -> Source:
    """The rows of a file that ``encast run`` would read. Raises ``InputError`` naming file and line."""
    return Source(path, read_texts(path, [column, *([pair_column] if pair_column else [])], format))


def of_rankings(path: str, query: str = "query", documents: str = "documents", format: str = "auto") -> Source:
    """A query and a list of documents a row. Raises ``InputError`` naming file and line."""

    def made(values: Mapping[str, object], where: str) -> Ranking:
        asked, found = values[query], values[documents]
        if not isinstance(asked, str) or not isinstance(found, list) or not found:
            raise InputError(f"{where}: a text as {query} and a list of texts as {documents} are needed")
        if not all(isinstance(one, str) for one in found):
            raise InputError(f"{where}: {documents} holds what is no text")
        return Ranking(asked, tuple(found))

    return Source(path, read_whole(path, [query, documents], made, format))


def of_lengths(histogram: str, seed: int = 0) -> Source:
    """Texts of common words with so many tokens, special ones included, by a histogram (``read_histogram``).

    A tokenizer of the BERT family makes one token of each word, so lengths are exact there, but for the shortest: one
    word is three tokens. Raises ``InputError``.
    """
    rng = np.random.default_rng(seed)
    lengths = read_histogram(histogram)[:_MOST_TEXTS]
    words = _WORDS.split()
    rows = [" ".join(rng.choice(words, max(1, length - _SPECIAL_TOKENS))) for length in lengths]
    return Source(histogram if len(histogram) <= 60 else f"{histogram[:60]}...", rows)


def prepare(protocol: Protocol, target: Target, sources: Sequence[Source], batch: int, count: int) -> list[Request]:
    """Up to ``count`` requests of ``batch`` texts each, from the sources in turn, each over its rows in their order.

    Where a protocol takes rankings and a source has texts, one text is the query and the next ``batch`` are its
    documents. Raises ``InputError`` when a source does not suit the protocol.
    """
    streams = [_groups(protocol, source, batch) for source in sources]
    requests: list[Request] = []
    size = 0
    while len(requests) < min(count, _MOST_REQUESTS) and size < _MOST_BYTES:
        for number, stream in enumerate(streams):  # whole turns, so that asking them again goes on in turn
            numbers, rows = next(stream)
            texts = len(rows[0].documents) if isinstance(rows[0], Ranking) else len(rows)
            requests.append(Request(protocol.encode(target, rows), number, numbers, texts))
            size += len(requests[-1].body)
    return requests


def _groups(protocol: Protocol, source: Source, batch: int) -> Iterator[tuple[tuple[int, ...], list[Row]]]:
    """Numbers and rows of one request after the other, without end."""
    kind = type(source.rows[0])
    if kind not in protocol.takes:
        raise InputError(
            f"{source.name}: {_KINDS[kind]} are no input of the protocol {protocol.name}; it takes "
            f"{' or '.join(_KINDS[one] for one in protocol.takes)}"
        )
    ranks = Ranking in protocol.takes
    size = 1 if kind is Ranking else batch + ranks
    numbers = itertools.cycle(range(len(source.rows)))
    while True:
        chosen = tuple(itertools.islice(numbers, size))
        rows = [source.rows[number] for number in chosen]
        if ranks and kind is str:
            query, *documents = map(str, rows)
            rows = [Ranking(query, tuple(documents))]
        yield chosen, rows


_KINDS: Mapping[type, str] = {str: "texts", tuple: "pairs of texts", Ranking: "queries with documents"}
