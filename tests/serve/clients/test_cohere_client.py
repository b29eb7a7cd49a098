"""The official ``cohere`` client: reranking by both versions of its API."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cohere
import pytest
from local import LocalRunner, engine, local_service, served

from encast.serve.errors import RefusalError
from encast.serve.protocols.rerank import RERANK
from encast.serve.service import Service

QUERY = "where is the cat"
DOCUMENTS = ["the cat is here", "a dog", "", "the cat " * 30]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def service(base: Path) -> Service:
    service = local_service(base, "embed", "rerank", "classify")
    service.authorise = lambda header: "me" if header == "Bearer the-key" else None
    return service


@pytest.fixture(scope="module")
def url(service: Service) -> Iterator[str]:
    with served(service, [RERANK]) as url:
        yield url


@pytest.fixture(scope="module")
def client_v2(url: str) -> cohere.ClientV2:
    return cohere.ClientV2("the-key", base_url=url, max_retries=0)


def ranks(answer: Any) -> list[tuple[int, float]]:
    return [(one.index, one.relevance_score) for one in answer.results]


def check(found: list[tuple[int, float]], base: Path) -> None:
    expected = engine(base, "rerank").rerank(QUERY, DOCUMENTS)
    assert [index for index, _ in found] == [index for index, _ in expected]
    for (_, score), (_, logit) in zip(found, expected, strict=True):
        assert score == pytest.approx(1 / (1 + math.exp(-logit)), rel=1e-14)


def test_version_2(client_v2: cohere.ClientV2, url: str, base: Path) -> None:
    answer = client_v2.rerank(model="rerank", query=QUERY, documents=DOCUMENTS)
    check(ranks(answer), base)
    assert answer.id
    assert answer.meta.api_version.version == "2"
    assert answer.meta.billed_units.search_units == 1
    assert ranks(client_v2.rerank(model="rerank", query=QUERY, documents=DOCUMENTS, top_n=1)) == ranks(answer)[:1]
    similar = client_v2.rerank(model="embed", query=QUERY, documents=DOCUMENTS, max_tokens_per_doc=4096)
    assert ranks(similar) == engine(base, "embed").rerank(QUERY, DOCUMENTS)

    async def later() -> Any:
        async with cohere.AsyncClientV2("the-key", base_url=url, max_retries=0) as made:
            return await made.rerank(model="rerank", query=QUERY, documents=DOCUMENTS)

    assert ranks(asyncio.run(later())) == ranks(answer)


def test_version_1(url: str, base: Path) -> None:
    made = cohere.Client("the-key", base_url=url, max_retries=0)
    documents = [{"text": text} for text in DOCUMENTS]
    answer = made.rerank(query=QUERY, documents=documents, return_documents=True)
    check(ranks(answer), base)
    assert [one.document.text for one in answer.results] == [DOCUMENTS[one.index] for one in answer.results]


def test_refusals_are_the_clients_exceptions(client_v2: cohere.ClientV2, service: Service, url: str) -> None:
    def ask(**changed: Any) -> None:
        client_v2.rerank(**{"model": "rerank", "query": QUERY, "documents": DOCUMENTS, **changed})

    with pytest.raises(cohere.NotFoundError) as missing:
        ask(model="nobody")
    assert "served are" in missing.value.body["message"]
    with pytest.raises(cohere.BadRequestError):
        ask(documents=[])
    with pytest.raises(cohere.BadRequestError):
        ask(top_n=0)
    with pytest.raises(cohere.UnprocessableEntityError):
        ask(model="classify")
    with pytest.raises(cohere.UnauthorizedError):
        cohere.ClientV2("wrong", base_url=url, max_retries=0).rerank(model="rerank", query="a", documents=["b"])
    runner = service.models.by_name["rerank"].runner
    assert isinstance(runner, LocalRunner)
    for kind, exception in (
        ("overloaded", cohere.TooManyRequestsError),
        ("unavailable", cohere.ServiceUnavailableError),
        ("expired", cohere.GatewayTimeoutError),
        ("failed", cohere.InternalServerError),
    ):
        runner.fails.append(RefusalError(kind, "no"))  # type: ignore[arg-type]
        with pytest.raises(exception):
            ask()
