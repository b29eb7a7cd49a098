"""The official ``openai`` client, and the embedding classes of LangChain and LlamaIndex that stand on it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from local import LocalRunner, engine, local_service, served

from encast.serve.errors import RefusalError
from encast.serve.protocols.openai import OPENAI
from encast.serve.service import Service

TEXTS = ["the cat", "a b c d e f g", "caf\u00e9 \u4e2d\u6587 x\0y"]
KEY = "the-key"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    service = local_service(tmp_path_factory.getbasetemp(), "embed", "tag")
    service.authorise = lambda header: "me" if header == f"Bearer {KEY}" else None
    return service


@pytest.fixture(scope="module")
def url(service: Service) -> Iterator[str]:
    with served(service, [OPENAI]) as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray[Any, Any]:
    return engine(tmp_path_factory.getbasetemp(), "embed").embed(TEXTS)


@pytest.fixture
def openai_client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as made:
        yield made


def vectors(answer: Any) -> np.ndarray[Any, Any]:
    return np.float32([item.embedding for item in answer.data])


def test_embeddings_in_every_form(
    openai_client: openai.OpenAI, offline: np.ndarray[Any, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    ask = openai_client.embeddings.create
    answer = ask(model="embed", input=TEXTS)  # the client asks for base64 by itself
    assert np.array_equal(vectors(answer), offline)
    assert (answer.object, answer.model, answer.usage.total_tokens > 10) == ("list", "embed", True)
    assert np.array_equal(vectors(ask(model="embed", input=TEXTS, encoding_format="float")), offline)
    assert np.array_equal(vectors(ask(model="the-embed", input=TEXTS[0])), offline[:1])
    ids = [one.ids for one in engine(tmp_path_factory.getbasetemp(), "embed").session.tokenizer.encode(TEXTS)]
    assert np.array_equal(vectors(ask(model="embed", input=ids)), offline)
    assert np.array_equal(vectors(ask(model="embed", input=ids[1])), offline[1:2])
    assert vectors(ask(model="embed", input=TEXTS, dimensions=7)).shape == (3, 7)


def test_many_at_once(url: str, offline: np.ndarray[Any, Any]) -> None:
    async def all_of_them() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as made:
            calls = [made.embeddings.create(model="embed", input=TEXTS[i % 3]) for i in range(30)]
            return await asyncio.gather(*calls)

    for index, answer in enumerate(asyncio.run(all_of_them())):
        assert np.array_equal(vectors(answer)[0], offline[index % 3])


def test_the_models(openai_client: openai.OpenAI) -> None:
    assert [model.id for model in openai_client.models.list()] == ["embed", "tag"]
    assert openai_client.models.retrieve("the-tag").id == "tag"


def test_refusals_are_the_clients_exceptions(openai_client: openai.OpenAI, service: Service, url: str) -> None:
    ask = openai_client.embeddings.create
    with pytest.raises(openai.NotFoundError) as missing:
        ask(model="gpt", input="a")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert "served are embed" in missing.value.message
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("no/such")
    with pytest.raises(openai.NotFoundError):
        openai_client.chat.completions.create(model="embed", messages=[])
    for wrong in ({"input": ""}, {"input": []}, {"input": "a " * 100}, {"dimensions": 33}, {"model": "tag"}):
        with pytest.raises(openai.BadRequestError) as bad:
            ask(**{"model": "embed", "input": "a", **wrong})
        assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.AuthenticationError, match="API key"):
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.APIStatusError, match="16777216 bytes"):
        ask(model="embed", input="a" * (17 << 20))
    runner = service.models.by_name["embed"].runner
    assert isinstance(runner, LocalRunner)
    runner.fails.append(RefusalError("overloaded", "full", retry_after=1))
    with pytest.raises(openai.RateLimitError):
        ask(model="embed", input="a")
    runner.fails.append(RuntimeError("a defect"))
    with pytest.raises(openai.InternalServerError) as failed:
        ask(model="embed", input="a")
    assert failed.value.request_id
    assert failed.value.request_id in failed.value.message


def test_the_client_comes_back_after_429(url: str, service: Service, offline: np.ndarray[Any, Any]) -> None:
    runner = service.models.by_name["embed"].runner
    assert isinstance(runner, LocalRunner)
    runner.fails.append(RefusalError("overloaded", "full", retry_after=0.5))
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=1) as made:
        assert np.array_equal(vectors(made.embeddings.create(model="embed", input=TEXTS)), offline)


def test_a_timeout_of_the_client_frees_the_engine(url: str, service: Service) -> None:
    runner = service.models.by_name["embed"].runner
    assert isinstance(runner, LocalRunner)
    runner.go.clear()
    gone = threading.Event()
    service.finished.append(lambda finished: gone.set() if finished.kind == "cancelled" else None)
    try:
        with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=0.2) as made:
            with pytest.raises(openai.APITimeoutError):
                made.embeddings.create(model="embed", input="a")
            assert gone.wait(30)
    finally:
        runner.go.set()
        service.finished.clear()
    assert runner.waiting == 0


def test_langchain(url: str, offline: np.ndarray[Any, Any]) -> None:
    made = OpenAIEmbeddings(
        model="embed", base_url=url, api_key=KEY, check_embedding_ctx_length=False, max_retries=0, chunk_size=2
    )
    assert np.array_equal(np.float32(made.embed_documents(TEXTS)), offline)
    assert np.array_equal(np.float32(made.embed_query(TEXTS[1])), offline[1])
    assert np.array_equal(np.float32(asyncio.run(made.aembed_documents(TEXTS))), offline)
    with pytest.raises(openai.BadRequestError):
        made.embed_query("a " * 100)
    cut = made.model_copy(update={"model_kwargs": {"extra_body": {"truncate_prompt_tokens": -1}}})
    assert len(cut.embed_query("a " * 100)) == offline.shape[1]


def test_llama_index(url: str, offline: np.ndarray[Any, Any]) -> None:
    made = OpenAILikeEmbedding(model_name="embed", api_base=url, api_key=KEY, embed_batch_size=2, max_retries=0)
    assert np.array_equal(np.float32(made.get_text_embedding_batch(TEXTS)), offline)
    assert np.array_equal(np.float32(made.get_query_embedding(TEXTS[1])), offline[1])
    assert np.array_equal(np.float32(asyncio.run(made.aget_text_embedding_batch(TEXTS))), offline)
    wrong = OpenAILikeEmbedding(model_name="nobody", api_base=url, api_key=KEY, max_retries=0)
    with pytest.raises(openai.NotFoundError):
        wrong.get_text_embedding("a")
