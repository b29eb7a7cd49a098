"""Reranking by Cohere's and Jina's APIs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from local import client, engine, local_service
from starlette.testclient import TestClient

from encast.serve.protocols.rerank import RERANK
from encast.serve.service import RequestLimits

QUERY = "where is the cat"
DOCUMENTS = ["the cat is here", "a dog", "", "the cat " * 30]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def app(base: Path) -> TestClient:
    return client(local_service(base, "embed", "classify", "rerank"), [RERANK])


def ask(app: TestClient, path: str = "/v2/rerank", **body: Any) -> Any:
    found = app.post(path, json={"query": QUERY, "documents": DOCUMENTS, **body})
    assert found.status_code == 200, found.text
    return found.json()


def test_a_cross_encoder_scores_with_the_sigmoid_of_its_logit(app: TestClient, base: Path) -> None:
    answer = ask(app, model="rerank")
    expected = engine(base, "rerank").rerank(QUERY, DOCUMENTS)
    assert [one["index"] for one in answer["results"]] == [index for index, _ in expected]
    for one, (_, logit) in zip(answer["results"], expected, strict=True):
        assert one["relevance_score"] == pytest.approx(1 / (1 + math.exp(-logit)), rel=1e-14)
        assert set(one) == {"index", "relevance_score"}


def test_embeddings_score_with_their_similarity(app: TestClient, base: Path) -> None:
    answer = ask(app, model="embed")
    found = [(one["index"], one["relevance_score"]) for one in answer["results"]]
    assert found == engine(base, "embed").rerank(QUERY, DOCUMENTS)


def test_without_a_name_the_cross_encoder_is_meant(app: TestClient, base: Path) -> None:
    assert ask(app)["model"] == "rerank"
    assert ask(client(local_service(base, "classify", "embed"), [RERANK]))["model"] == "embed"
    found = client(local_service(base, "tag"), [RERANK]).post("/v2/rerank", json={"query": "a", "documents": ["b"]})
    assert found.status_code == 422


def test_the_forms_of_cohere_and_jina(app: TestClient, base: Path) -> None:
    documents = ["a cat", {"text": "a dog", "more": 1}]
    answer = ask(app, "/v1/rerank", documents=documents, return_documents=True, top_n=5, model="rerank")
    assert {one["index"]: one["document"]["text"] for one in answer["results"]} == {0: "a cat", 1: "a dog"}
    session = engine(base, "rerank").session
    tokens = sum(map(len, session.tokenizer.encode([(QUERY, "a cat"), (QUERY, "a dog")])))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert answer["meta"] == {
        "api_version": {"version": "1"}, "billed_units": {"search_units": 1}, "tokens": {"input_tokens": tokens},
    }  # fmt: skip
    assert answer["id"]


def test_top_n_are_the_best(app: TestClient) -> None:
    assert ask(app, top_n=2)["results"] == ask(app)["results"][:2]
    assert ask(app, top_n=100)["results"] == ask(app)["results"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"documents": []}, 400), ({"documents": "a"}, 400), ({"documents": [1]}, 400), ({"documents": [{}]}, 400),
        ({"query": None}, 400), ({"top_n": 0}, 400), ({"model": "x"}, 404), ({"model": "classify"}, 422),
        ({"max_tokens_per_doc": 10}, 422), ({"rank_fields": ["title"]}, 400), ({"documents": ["a"] * 5}, 413),
        ({"query": "a" * 201}, 413), ({"documents": ["a" * 201]}, 413),
    ],
)  # fmt: skip
def test_what_is_refused(base: Path, body: Any, status: int) -> None:
    service = local_service(base, "rerank", "classify", limits=RequestLimits(max_texts=4, max_text_bytes=200))
    found = client(service, [RERANK]).post("/v2/rerank", json={"query": QUERY, "documents": ["a"], **body})
    assert found.status_code == status
    assert found.json()["message"] == found.json()["detail"] != ""


def test_fields_that_change_nothing(app: TestClient) -> None:
    assert ask(app, max_tokens_per_doc=4096, rank_fields=["text"], priority=3)["results"] == ask(app)["results"]
