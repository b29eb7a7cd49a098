"""The OpenAI API over a small model: forms of input, of output, and refusals."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local import client, engine, local_service
from starlette.testclient import TestClient

from encast.serve.protocols.openai import OPENAI
from encast.serve.service import RequestLimits

TEXTS = ["the cat", "", "a b c d e f g", "caf\u00e9 \u4e2d\u6587 x\0y"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def app(base: Path) -> TestClient:
    return client(local_service(base, "embed", "classify"), [OPENAI])


def ask(app: TestClient, **body: Any) -> Any:
    found = app.post("/v1/embeddings", json={"model": "embed", **body})
    assert found.status_code == 200, found.text
    return found.json()


def rows(answer: Any) -> np.ndarray[Any, Any]:
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return np.array([item["embedding"] for item in answer["data"]], np.float64)


def refused(app: TestClient, status: int, **body: Any) -> Any:
    found = app.post("/v1/embeddings", json={"model": "embed", "input": "a", **body})
    assert found.status_code == status, found.text
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_texts_have_the_bits_of_the_engine(app: TestClient, base: Path) -> None:
    texts = [text for text in TEXTS if text]
    answer = ask(app, input=texts)
    expected = engine(base, "embed").embed(texts)
    assert np.array_equal(rows(answer).astype(np.float32), expected)
    assert answer["object"] == "list"
    assert answer["model"] == "embed"
    assert answer["data"][0]["object"] == "embedding"
    tokens = sum(map(len, engine(base, "embed").session.tokenizer.encode(texts)))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert np.array_equal(rows(ask(app, input=texts[0]))[0].astype(np.float32), expected[0])


def test_floats_have_the_fewest_digits(app: TestClient) -> None:
    """Not those of the f64 of the same value, which are twice as many."""
    text = app.post("/v1/embeddings", json={"model": "embed", "input": "a"}).text
    longest = max(len(number) for number in text.partition('"embedding":[')[2].partition("]")[0].split(","))
    assert longest <= len("-0.0123456789")


def test_base64_is_little_endian_f32(app: TestClient, base: Path) -> None:
    answer = ask(app, input=["a cat", "b"], encoding_format="base64", user="somebody", unknown={"x": [1]})
    found = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in answer["data"]]
    assert np.array_equal(found, engine(base, "embed").embed(["a cat", "b"]))


def test_token_ids_are_taken_as_they_are(app: TestClient, base: Path) -> None:
    ids = [encoding.ids for encoding in engine(base, "embed").session.tokenizer.encode(["a cat", "b"])]
    expected = engine(base, "embed").embed(["a cat", "b"])
    assert np.array_equal(rows(ask(app, input=ids)).astype(np.float32), expected)
    assert np.array_equal(rows(ask(app, input=ids[0])).astype(np.float32), expected[:1])


def test_dimensions_are_a_prefix_of_length_one(app: TestClient, base: Path) -> None:
    whole = engine(base, "embed").embed(["a cat", "b"])
    found = rows(ask(app, input=["a cat", "b"], dimensions=5)).astype(np.float32)
    np.testing.assert_allclose(found, whole[:, :5] / np.linalg.norm(whole[:, :5], axis=1, keepdims=True), rtol=1e-6)
    assert np.array_equal(rows(ask(app, input=["a cat", "b"], dimensions=32)).astype(np.float32), whole)
    assert refused(app, 400, dimensions=33)["param"] == "dimensions"
    refused(app, 400, dimensions=0)


def test_long_texts_are_refused_unless_asked_to_be_cut(app: TestClient, base: Path) -> None:
    error = refused(app, 400, input=["a", "a " * 100])
    assert error["message"].startswith("input[1] has more than 40 tokens")
    assert "truncate_prompt_tokens: -1" in error["message"]
    assert error["param"] == "input"
    found = rows(ask(app, input=["a " * 100], truncate_prompt_tokens=-1)).astype(np.float32)
    assert np.array_equal(found, engine(base, "embed").embed(["a " * 100]))
    refused(app, 400, truncate_prompt_tokens=10)
    assert "41 token ids" in refused(app, 400, input=[[7], [7] * 41])["message"]


@pytest.mark.parametrize(
    "given", ["", [], ["a", ""], [[]], ["a", 1], [1, [2]], [1.5], [True], [10**6], [-1], [[1], []], {"a": 1}, None]
)
def test_what_is_no_input(app: TestClient, given: Any) -> None:
    assert refused(app, 400, input=given)["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [{"encoding_format": "hex"}, {"model": None}, {"dimensions": "3"}, {"model": 3}])
def test_wrong_fields_are_named(app: TestClient, body: Any) -> None:
    assert f"$.{next(iter(body))}" in refused(app, 400, **body)["message"]


def test_models_have_names(app: TestClient, base: Path) -> None:
    error = refused(app, 404, model="gpt-5")
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "embed" in error["message"]
    assert "compiled for classify" in refused(app, 400, model="classify")["message"]
    assert ask(app, model="the-embed", input="a")["model"] == "embed"
    assert app.post("/v1/embeddings", json={"input": "a"}).status_code == 400


def test_the_list_of_models(app: TestClient) -> None:
    answer = app.get("/v1/models").json()
    assert [(one["id"], one["task"], one["object"]) for one in answer["data"]] == [
        ("embed", "embed", "model"), ("classify", "classify", "model"),
    ]  # fmt: skip
    assert app.get("/v1/models/the-embed").json() == answer["data"][0]
    assert app.get("/v1/models/a/b").json()["error"]["code"] == "model_not_found"


def test_limits(base: Path) -> None:
    app = client(local_service(base, "embed", limits=RequestLimits(max_texts=2, max_text_bytes=10)), [OPENAI])
    refused(app, 413, input=["a"] * 3)
    refused(app, 413, input=[[1]] * 3)
    assert "input[0]" in refused(app, 413, input="a" * 11)["message"]
