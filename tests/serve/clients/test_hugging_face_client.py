"""``huggingface_hub.InferenceClient`` against the routes of text-embeddings-inference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from local import LocalRunner, engine, local_service, served

from encast.serve.errors import RefusalError
from encast.serve.protocols.tei import TEI
from encast.serve.service import Service

TEXTS = ["the cat", "a dog here", "caf\u00e9 \u4e2d\u6587"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def service(base: Path) -> Service:
    service = local_service(base, "embed", "classify", "rerank")
    service.authorise = lambda header: "me" if header == "Bearer the-key" else None
    return service


@pytest.fixture(scope="module")
def url(service: Service) -> Iterator[str]:
    with served(service, [TEI]) as url:
        yield url


@pytest.mark.parametrize("path", ["", "/embed"])
def test_feature_extraction(url: str, base: Path, path: str) -> None:
    client = InferenceClient(base_url=url + path, api_key="the-key")
    vectors = engine(base, "embed").embed(TEXTS)
    found = client.feature_extraction(TEXTS[0])
    np.testing.assert_array_equal(found, vectors[:1], strict=True)
    np.testing.assert_array_equal(client.feature_extraction(TEXTS), vectors, strict=True)  # type: ignore[arg-type]
    long = "the cat " * 60
    cut = client.feature_extraction(long, truncate=True, truncation_direction="right", normalize=True)
    np.testing.assert_array_equal(cut, engine(base, "embed").embed([long]), strict=True)


@pytest.mark.parametrize("path", ["", "/similarity"])
def test_sentence_similarity(url: str, base: Path, path: str) -> None:
    client = InferenceClient(base_url=url + path, api_key="the-key")
    found = client.sentence_similarity("a cat", other_sentences=TEXTS)
    vectors = engine(base, "embed").embed(["a cat", *TEXTS])
    np.testing.assert_allclose(found, vectors[1:] @ vectors[0], atol=1e-6)


def test_text_classification(url: str, base: Path) -> None:
    client = InferenceClient(base_url=f"{url}/predict", api_key="the-key")
    # The client takes the first of what it gets, which of TEI's answer is the best label.
    found = client.text_classification("the cat")
    (expected,) = engine(base, "classify").classify(["the cat"])
    assert (found.label, found.score) == (expected.label, expected.score)  # type: ignore[attr-defined]


def test_errors_are_the_clients_own(service: Service, url: str) -> None:
    client = InferenceClient(base_url=url, api_key="the-key")
    with pytest.raises(HfHubHTTPError, match="must have less than") as caught:
        client.feature_extraction("the cat " * 60)
    assert caught.value.response.status_code == 422
    runner = service.models.find("embed").runner
    assert isinstance(runner, LocalRunner)
    runner.fails.append(RefusalError("overloaded", "the queue is full", retry_after=2))
    with pytest.raises(HfHubHTTPError, match="the queue is full") as caught:
        client.feature_extraction("a")
    assert (caught.value.response.status_code, caught.value.response.headers["retry-after"]) == (429, "2")
    with pytest.raises(HfHubHTTPError) as caught:
        InferenceClient(base_url=url, api_key="wrong").feature_extraction("a")
    assert caught.value.response.status_code == 401
