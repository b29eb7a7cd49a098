"""The routes of text-embeddings-inference: JSON, statuses and answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local import LocalRunner, client, engine, local_service
from starlette.testclient import TestClient

from encast.serve.errors import RefusalError
from encast.serve.protocols.encast import ENCAST
from encast.serve.protocols.tei import TEI
from encast.serve.service import RequestLimits, Service

TEXTS = ["the cat", "a dog here", "caf\u00e9 x\0y"]
LONG = "the cat " * 60


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def service(base: Path) -> Service:
    return local_service(base, "embed", "classify", "rerank", limits=RequestLimits(max_texts=8))


@pytest.fixture(scope="module")
def app(service: Service) -> TestClient:
    return client(service, [TEI])


def floats(answer: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    assert answer.status_code == 200, answer.text
    return np.array(answer.json(), np.float32)


def test_embeddings_are_the_engines(app: TestClient, base: Path) -> None:
    answer = app.post("/embed", json={"inputs": TEXTS})
    np.testing.assert_array_equal(floats(answer), engine(base, "embed").embed(TEXTS), strict=True)
    assert answer.headers["x-compute-characters"] == str(sum(map(len, TEXTS)))
    assert answer.headers["x-compute-tokens"] == answer.headers["x-tokens"]
    assert answer.headers["x-compute-type"] == "cpu"
    single = app.post("/embed", json={"inputs": TEXTS[0]})
    np.testing.assert_array_equal(floats(single), engine(base, "embed").embed(TEXTS[:1]))


def test_token_ids_are_taken_as_they_are(app: TestClient, base: Path) -> None:
    session = engine(base, "embed").session
    ids = [encoding.ids for encoding in session.tokenizer.encode(TEXTS)]
    np.testing.assert_array_equal(floats(app.post("/embed", json={"inputs": ids})), engine(base, "embed").embed(TEXTS))
    np.testing.assert_array_equal(
        floats(app.post("/embed", json={"inputs": ids[1]})), engine(base, "embed").embed([TEXTS[1]])
    )
    states = app.post("/embed_all", json={"inputs": ids[1]}).json()
    np.testing.assert_array_equal(np.array(states[0], np.float32), engine(base, "embed").forward([ids[1]])[0])


def test_normalize_and_dimensions(app: TestClient, base: Path) -> None:
    vectors = engine(base, "embed").embed(TEXTS)
    short = floats(app.post("/embed", json={"inputs": TEXTS, "dimensions": 4}))
    expected = vectors[:, :4] / np.linalg.norm(vectors[:, :4].astype(np.float64), axis=1, keepdims=True)
    np.testing.assert_allclose(short, expected, rtol=3e-7)
    plain = floats(app.post("/embed", json={"inputs": TEXTS, "dimensions": 4, "normalize": False}))
    np.testing.assert_array_equal(plain, vectors[:, :4])


def test_every_token(app: TestClient, base: Path) -> None:
    states = app.post("/embed_all", json={"inputs": TEXTS}).json()
    session = engine(base, "embed").session
    expected = engine(base, "embed").forward([encoding.ids for encoding in session.tokenizer.encode(TEXTS)])
    for found, one in zip(states, expected, strict=True):
        np.testing.assert_array_equal(np.array(found, np.float32), one)


@pytest.mark.parametrize(
    ("inputs", "rows", "single"),
    [
        ("one text", ["one text"], True),
        (["one text"], ["one text"], True),
        (["a text", "its pair"], [("a text", "its pair")], True),
        ([["a"], ["b"]], ["a", "b"], False),
        ([["a", "b"], ["c"]], [("a", "b"), "c"], False),
        ([["a"]], ["a"], False),
    ],
)
def test_shapes_of_predict(app: TestClient, base: Path, inputs: Any, rows: list[Any], single: bool) -> None:
    answer = app.post("/predict", json={"inputs": inputs})
    assert answer.status_code == 200, answer.text
    found = [answer.json()] if single else answer.json()
    for predictions, one in zip(found, engine(base, "classify").classify(rows), strict=True):
        assert {item["label"]: item["score"] for item in predictions} == one.scores
        scores = [item["score"] for item in predictions]
        assert scores == sorted(scores, reverse=True)


def test_raw_scores_are_logits(app: TestClient) -> None:
    raw = app.post("/predict", json={"inputs": "the cat", "raw_scores": True}).json()
    kind = app.post("/predict", json={"inputs": "the cat"}).json()
    powers = np.exp([item["score"] for item in raw])
    np.testing.assert_allclose(powers / powers.sum(), [item["score"] for item in kind], rtol=1e-6)


def test_a_classifier_with_one_label_gives_a_sigmoid(base: Path) -> None:
    app = client(local_service(base, "rerank"), [TEI])
    (raw,) = app.post("/predict", json={"inputs": ["q", "the cat"], "raw_scores": True}).json()
    (found,) = app.post("/predict", json={"inputs": ["q", "the cat"]}).json()
    assert found["score"] == pytest.approx(1 / (1 + np.exp(-raw["score"])), rel=1e-12)


def test_rerank(app: TestClient, base: Path) -> None:
    expected = engine(base, "rerank").rerank("where is it", TEXTS)
    raw = app.post("/rerank", json={"query": "where is it", "texts": TEXTS, "raw_scores": True}).json()
    assert [(one["index"], one["score"]) for one in raw] == expected
    assert "text" not in raw[0]
    found = app.post("/rerank", json={"query": "where is it", "texts": TEXTS, "return_text": True}).json()
    for one, (index, logit) in zip(found, expected, strict=True):
        assert (one["index"], one["text"]) == (index, TEXTS[index])
        assert one["score"] == pytest.approx(1 / (1 + np.exp(-logit)), rel=1e-12)


def test_similarity_does_not_depend_on_the_other_sentences(app: TestClient, base: Path) -> None:
    def ask(sentences: list[str]) -> list[float]:
        body = {"inputs": {"source_sentence": "a cat", "sentences": sentences}, "parameters": {"truncate": True}}
        answer = app.post("/similarity", json=body)
        assert answer.status_code == 200, answer.text
        return list(answer.json())

    found = ask([*TEXTS, "a cat"])
    assert found == [ask([text])[0] for text in [*TEXTS, "a cat"]]
    vectors = engine(base, "embed").embed(["a cat", *TEXTS])
    np.testing.assert_allclose(found[:3], vectors[1:] @ vectors[0], atol=1e-6)
    assert found[3] == 1


def test_tokens_have_places_in_bytes(app: TestClient) -> None:
    text = "caf\u00e9 the cat"
    answer = app.post("/tokenize", json={"inputs": [text, LONG]})
    assert answer.status_code == 200, answer.text
    first, second = answer.json()
    assert (first[0]["text"], first[0]["special"], first[0]["start"]) == ("[CLS]", True, None)
    inner = [token for token in first if not token["special"]]
    for token in inner:
        assert text.encode()[token["start"] : token["stop"]].decode() == token["text"]
    assert inner[-1]["stop"] == len(text.encode())
    assert len(second) > 100, "nothing is cut off"
    bare = app.post("/tokenize", json={"inputs": text, "add_special_tokens": False}).json()
    assert bare == [inner]


def test_tokens_of_an_answer_are_bounded(app: TestClient, service: Service) -> None:
    """All texts count; the first that is too much ends it, before a list is made of its tokens."""
    count = len(app.post("/tokenize", json={"inputs": ["the cat", LONG]}).json()[1])
    limits, service.limits = service.limits, RequestLimits(max_listed_tokens=count)
    try:
        assert app.post("/tokenize", json={"inputs": LONG}).status_code == 200
        for inputs in (LONG + " the", [LONG, "the"]):
            found = app.post("/tokenize", json={"inputs": inputs})
            assert (found.status_code, found.json()["error_type"]) == (413, "Validation")
            assert f"inputs has more than {count} tokens" in found.json()["error"]
        found = client(service, [ENCAST]).post("/encast/v1/tokenize", json={"texts": ["the cat"] * count})
        assert found.status_code == 413
        assert f"texts has more than {count} tokens" in found.json()["error"]["message"]
    finally:
        service.limits = limits


def test_decode_is_the_inverse(app: TestClient) -> None:
    (tokens,) = app.post("/tokenize", json={"inputs": "the a b"}).json()
    ids = [token["id"] for token in tokens]
    assert app.post("/decode", json={"ids": ids}).json() == ["the a b"]
    assert app.post("/decode", json={"ids": [ids, ids]}).json() == ["the a b"] * 2
    (whole,) = app.post("/decode", json={"ids": ids, "skip_special_tokens": False}).json()
    assert "[CLS]" in whole
    assert app.post("/decode", json={"ids": [2**32 - 1]}).json() == [""]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/embed", {"inputs": []}, 400, "Empty"),
        ("/embed", {"inputs": ""}, 400, "Empty"),
        ("/embed", {"inputs": [[]]}, 400, "Empty"),
        ("/predict", {"inputs": []}, 400, "Empty"),
        ("/predict", {"inputs": ["", ""]}, 400, "Empty"),
        ("/rerank", {"query": "q", "texts": []}, 400, "Empty"),
        ("/similarity", {"inputs": {"source_sentence": "q", "sentences": []}}, 400, "Empty"),
        ("/tokenize", {"inputs": []}, 400, "Empty"),
        ("/decode", {"ids": []}, 400, "Empty"),
        ("/embed", {}, 400, "Validation"),
        ("/embed", {"inputs": 7}, 400, "Validation"),
        ("/embed", {"inputs": [1, "a"]}, 400, "Validation"),
        ("/embed", {"inputs": [-1]}, 400, "Validation"),
        ("/embed", {"inputs": [True]}, 400, "Validation"),
        ("/embed", {"inputs": [2**40]}, 400, "Validation"),
        ("/embed", {"inputs": [10**6]}, 422, "Validation"),
        ("/embed", {"inputs": "a", "dimensions": 0}, 400, "Validation"),
        ("/embed", {"inputs": "a", "dimensions": 999}, 422, "Validation"),
        ("/embed", {"inputs": "a", "prompt_name": "nope"}, 422, "Validation"),
        ("/embed", {"inputs": LONG}, 422, "Validation"),
        ("/embed", {"inputs": "a", "truncate": True, "truncation_direction": "left"}, 422, "Validation"),
        ("/embed", {"inputs": ["a"] * 9}, 413, "Validation"),
        ("/predict", {"inputs": [["a"]] * 8 + [[]]}, 413, "Validation"),  # counted before they are looked at
        ("/predict", {"inputs": ["a", "b", "c"]}, 400, "Validation"),
        ("/predict", {"inputs": [["a"], "b"]}, 400, "Validation"),
        ("/predict", {"inputs": ["a", ["b"]]}, 400, "Validation"),
        ("/predict", {"inputs": [[]]}, 400, "Validation"),
        ("/decode", {"ids": [[1], 2]}, 400, "Validation"),
        ("/embed_sparse", {"inputs": "a"}, 424, "Backend"),  # no model here has the head
        ("/", {"nothing": 1}, 400, "Validation"),
        ("/", {"inputs": {"source_sentence": 1}}, 400, "Validation"),
    ],
)  # fmt: skip
def test_refusals(app: TestClient, path: str, body: dict[str, Any], status: int, kind: str) -> None:
    answer = app.post(path, json=body)
    assert (answer.status_code, answer.json()["error_type"]) == (status, kind), answer.text
    assert answer.json()["error"]


def test_sparse_embeddings(base: Path) -> None:
    app = client(local_service(base, "embed-sparse"), [TEI])
    expected = [
        [
            {"index": index, "value": value}
            for index, value in zip(one.indices.tolist(), one.values.tolist(), strict=True)
        ]
        for one in engine(base, "embed-sparse").embed_sparse(TEXTS)
    ]
    ids = [encoding.ids for encoding in engine(base, "embed-sparse").session.tokenizer.encode(TEXTS)]
    for path, inputs in (("/embed_sparse", TEXTS), ("/embed_sparse", ids), ("/", TEXTS)):
        answer = app.post(path, json={"inputs": inputs})
        assert (answer.status_code, answer.json()) == (200, expected)
    assert app.post("/embed_sparse", json={"inputs": TEXTS[0]}).json() == expected[:1]
    assert app.post("/embed", json={"inputs": "a"}).status_code == 424
    assert app.post("/embed_sparse", json={"inputs": LONG}).status_code == 422
    assert app.get("/info").json()["model_type"] == {"embedding": {"pooling": "splade"}}


def test_embeddings_of_tokens(base: Path) -> None:
    app = client(local_service(base, "embed-tokens"), [TEI])
    answer = app.post("/embed_all", json={"inputs": TEXTS})
    assert answer.status_code == 200, answer.text
    for found, expected in zip(answer.json(), engine(base, "embed-tokens").embed_tokens(TEXTS), strict=True):
        np.testing.assert_array_equal(np.float32(found), expected.vectors)
    assert app.post("/embed_all", json={"inputs": [[2, 5, 3]]}).status_code == 422
    assert app.post("/embed_all", json={"inputs": LONG}).status_code == 422
    assert len(app.post("/embed_all", json={"inputs": LONG, "truncate": True}).json()[0]) == 20
    assert app.post("/embed", json={"inputs": "a"}).status_code == 424


def test_a_long_text_is_cut_when_asked(app: TestClient, base: Path) -> None:
    answer = app.post("/embed", json={"inputs": LONG, "truncate": True, "truncation_direction": "Right"})
    np.testing.assert_array_equal(floats(answer), engine(base, "embed").embed([LONG]))


def test_a_task_that_no_model_has(base: Path) -> None:
    app = client(local_service(base, "tag"), [TEI])
    bodies = {"/embed": {"inputs": "a"}, "/predict": {"inputs": "a"}, "/": {"inputs": "a"}}
    bodies |= {"/rerank": {"query": "a", "texts": ["b"]}}
    for path, body in bodies.items():
        answer = app.post(path, json=body)
        assert (answer.status_code, answer.json()["error_type"]) == (424, "Backend"), path


@pytest.mark.parametrize(
    ("kind", "status", "name"),
    [("overloaded", 429, "Overloaded"), ("failed", 424, "Backend"), ("unavailable", 503, "Unhealthy")],
)
def test_statuses_of_the_engine(service: Service, app: TestClient, kind: Any, status: int, name: str) -> None:
    runner = service.models.find("embed").runner
    assert isinstance(runner, LocalRunner)
    runner.fails.append(RefusalError(kind, "no", retry_after=3))
    answer = app.post("/embed", json={"inputs": "a"})
    assert (answer.status_code, answer.json()["error_type"]) == (status, name)
    assert answer.headers["retry-after"] == "3"


def test_the_root_does_what_the_first_model_can(app: TestClient, base: Path) -> None:
    embedded = app.post("/", json={"inputs": TEXTS})
    np.testing.assert_array_equal(floats(embedded), engine(base, "embed").embed(TEXTS))
    ranked = app.post("/", json={"query": "q", "texts": TEXTS}).json()
    assert {one["index"] for one in ranked} == {0, 1, 2}
    body = {"inputs": {"source_sentence": "a", "sentences": ["a"]}}
    assert app.post("/", json=body).json() == [1]
    classifier = client(local_service(base, "classify"), [TEI])
    assert len(classifier.post("/", json={"inputs": "a"}).json()) == 3


def test_info_and_health(base: Path) -> None:
    service = local_service(base, "rerank")
    app = client(service, [TEI])
    info = app.get("/info").json()
    assert info["model_id"] == "tests/rerank"
    assert list(info["model_type"]) == ["reranker"]
    assert info["max_input_length"] == engine(base, "rerank").max_length
    assert (app.get("/health").status_code, app.get("/health").content) == (200, b"")
    service.ready = lambda: False
    answer = app.get("/health")
    assert (answer.status_code, answer.json()) == (503, {"error": "unhealthy", "error_type": "Unhealthy"})
