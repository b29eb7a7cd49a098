"""The plain JSON routes: every task's answer is the Python method's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local import ARTIFACTS, client, engine, local_service
from starlette.testclient import TestClient

from encast.engine import Engine
from encast.errors import InputError
from encast.serve.protocols.encast import ENCAST
from encast.serve.service import RequestLimits
from encast.tasks.answer import Answer
from encast.tasks.features import hidden_states

TEXTS = ["the cat", "", "caf\u00e9 \u4e2d\u6587 x\0y", "a b c d e f g"]
MASKED = ["the [MASK] sat [MASK]", "[MASK]"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def app(base: Path) -> TestClient:
    return client(local_service(base, *ARTIFACTS), [ENCAST])


def plain(value: Any) -> Any:
    """As JSON data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def ask(app: TestClient, name: str, **body: Any) -> Any:
    found = app.post(f"/encast/v1/{name}", json=body)
    assert found.status_code == 200, found.text
    return found.json()


@pytest.mark.parametrize(
    ("name", "model", "body", "offline"),
    [
        ("tag", "tag", {"texts": TEXTS}, lambda engine: engine.tag(TEXTS)),
        ("fill-mask", "fill-mask", {"texts": MASKED, "top_k": 3}, lambda engine: engine.fill_mask(MASKED, top_k=3)),
        (
            "answer", "answer", {"question": "where", "context": "the cat " * 60, "stride": 5, "n_best": 3},
            lambda engine: [engine.answer("where", "the cat " * 60, stride=5, n_best=3)],
        ),
        (
            "answer", "answer", {"question": ["a", "b"], "context": ["cat", "the dog"], "max_answer_len": 2},
            lambda engine: engine.answer(["a", "b"], ["cat", "the dog"], max_answer_len=2),
        ),
        (
            "answer", "answer", {"question": "a", "context": "the cat", "null_threshold": -1e6},
            lambda engine: [Answer("", 0, 0, engine.answer("a", "the cat", null_threshold=-1e6).score)],
        ),
        ("answer", "answer", {"question": [], "context": []}, lambda engine: []),
        ("tag", "tag", {"texts": []}, lambda engine: []),
    ],
)  # fmt: skip
def test_answers_are_the_engines(
    app: TestClient, base: Path, name: str, model: str, body: Any, offline: Callable[[Engine], Any]
) -> None:
    answer = ask(app, name, **body)
    assert answer["model"] == model
    assert answer["results"] == plain(offline(engine(base, model)))


def test_embeddings(app: TestClient, base: Path) -> None:
    answer = ask(app, "embed", texts=TEXTS, model="other-embed")
    assert np.array_equal(np.float32(answer["results"]), engine(base, "other-embed").embed(TEXTS))
    assert answer["tokens"] == sum(map(len, engine(base, "embed").session.tokenizer.encode(TEXTS)))
    assert ask(app, "embed", texts=[]) == {"model": "embed", "tokens": 0, "results": []}
    short = ask(app, "embed", texts=TEXTS, truncate_dim=5, model="embed")["results"]
    assert np.array_equal(np.float32(short), engine(base, "embed").embed(TEXTS, truncate_dim=5))
    refused = app.post("/encast/v1/embed", json={"texts": ["a"], "truncate_dim": 33})
    assert (refused.status_code, "truncate_dim" in refused.text) == (422, True)
    refused = app.post("/encast/v1/embed", json={"texts": ["a"], "prompt_name": "query"})
    assert (refused.status_code, "prompt_name" in refused.text) == (422, True)


def test_sparse_embeddings(app: TestClient, base: Path) -> None:
    for options in ({}, {"max_active_dims": 7}):
        results = ask(app, "embed-sparse", texts=TEXTS, model="embed-sparse", **options)["results"]
        for result, expected in zip(results, engine(base, "embed-sparse").embed_sparse(TEXTS, **options), strict=True):
            assert result["indices"] == expected.indices.tolist()
            assert np.array_equal(np.float32(result["values"]), expected.values)
            assert options == {} or len(result["indices"]) == 7
    assert ask(app, "embed-sparse", texts=[], model="embed-sparse")["results"] == []
    body = {"texts": ["a"], "model": "embed-sparse"}
    assert app.post("/encast/v1/embed-sparse", json=body | {"max_active_dims": 9999}).status_code == 200
    few = client(local_service(base, "embed-sparse", limits=RequestLimits(max_weights=20)), [ENCAST])
    refused = few.post("/encast/v1/embed-sparse", json=body)
    assert (refused.status_code, "more than 20 weights" in refused.text) == (422, True)
    assert app.post("/encast/v1/embed", json=body).status_code == 422


def test_all_embeddings_of_m3_in_one_run(app: TestClient, base: Path) -> None:
    service = local_service(base, "embed-m3")
    one = client(service, [ENCAST])
    before = len(service.models.by_name["embed-m3"].runner.runs)
    results = ask(one, "embed-m3", texts=TEXTS, max_active_dims=3)["results"]
    assert len(service.models.by_name["embed-m3"].runner.runs) == before + 1
    expected = engine(base, "embed-m3").embed_m3(TEXTS, max_active_dims=3)
    for result, wanted in zip(results, expected, strict=True):
        assert np.array_equal(np.float32(result["embedding"]), wanted.embedding)
        assert result["sparse"]["indices"] == wanted.sparse.indices.tolist()
        assert np.array_equal(np.float32(result["sparse"]["values"]), wanted.sparse.values)
        assert result["tokens"]["token_ids"] == wanted.tokens.token_ids.tolist()
        assert np.array_equal(np.float32(result["tokens"]["vectors"]), wanted.tokens.vectors)
    # It can do each of the three alone, too.
    assert np.array_equal(np.float32(ask(one, "embed", texts=TEXTS)["results"]), [each.embedding for each in expected])
    assert ask(one, "embed-sparse", texts=TEXTS, max_active_dims=3)["results"] == [one["sparse"] for one in results]
    assert ask(one, "embed-tokens", texts=TEXTS)["results"] == [one["tokens"] for one in results]
    few = client(local_service(base, "embed-m3", limits=RequestLimits(max_weights=2)), [ENCAST])
    refused = few.post("/encast/v1/embed-m3", json={"texts": TEXTS})
    assert (refused.status_code, "more than 2 weights" in refused.text) == (422, True)
    refused = app.post("/encast/v1/embed-m3", json={"texts": TEXTS, "model": "embed"})
    assert (refused.status_code, "embed_m3" in refused.text) == (422, True)


def test_embeddings_of_tokens(app: TestClient, base: Path) -> None:
    for kind in ("query", "document"):
        results = ask(app, "embed-tokens", texts=TEXTS, model="embed-tokens", kind=kind)["results"]
        for result, expected in zip(results, engine(base, "embed-tokens").embed_tokens(TEXTS, kind=kind), strict=True):
            assert result["token_ids"] == expected.token_ids.tolist()
            assert np.array_equal(np.float32(result["vectors"]), expected.vectors)
            assert kind == "document" or len(result["token_ids"]) == 12
    plain_form = ask(app, "embed-tokens", texts=TEXTS[:1])
    assert (
        plain_form["results"][0]["token_ids"] == engine(base, "embed-tokens").embed_tokens(TEXTS)[0].token_ids.tolist()
    )
    assert ask(app, "embed-tokens", texts=[])["results"] == []
    for body, status in (
        ({"texts": ["a"], "kind": "passage"}, 400),
        ({"texts": ["a"], "prompt_name": "nope"}, 422),
        ({"texts": ["a " * 30]}, 422),
        ({"texts": ["a"], "model": "embed"}, 422),
    ):
        assert app.post("/encast/v1/embed-tokens", json=body).status_code == status
    cut = ask(app, "embed-tokens", texts=["a " * 30], on_long="truncate")["results"][0]
    assert len(cut["token_ids"]) == 20


def test_labels_of_texts_and_pairs(app: TestClient, base: Path) -> None:
    rows = ["a cat", ["a cat", "a dog"]]
    for name in ("classify", "rerank"):
        results = ask(app, "classify", texts=rows, model=name)["results"]
        for result, expected in zip(results, engine(base, name).classify(["a cat", ("a cat", "a dog")]), strict=True):
            scores = [{"label": label, "score": score} for label, score in expected.scores.items()]
            assert result == {"label": expected.label, "score": expected.score, "scores": scores}


def test_ranks_are_the_raw_scores(app: TestClient, base: Path) -> None:
    for name in ("rerank", "embed", "embed-tokens"):
        results = ask(app, "rerank", query="a cat", documents=TEXTS, model=name)["results"]
        expected = engine(base, name).rerank("a cat", TEXTS)
        assert results == [{"index": index, "score": score} for index, score in expected]


def test_hidden_states_of_any_model(app: TestClient, base: Path) -> None:
    for name in ("features", "tag"):
        results = ask(app, "hidden-states", texts=TEXTS, model=name)["results"]
        offline = engine(base, name)
        expected = offline.drive(hidden_states(offline.session, TEXTS))
        assert len(results) == len(expected)
        assert all(np.array_equal(np.float32(a), b) for a, b in zip(results, expected, strict=True))


def test_tokens(app: TestClient, base: Path) -> None:
    answer = ask(app, "tokenize", texts=["the cat"], model="tag")
    assert answer["max_length"] == engine(base, "tag").max_length
    (tokens,) = answer["results"]
    encoding = engine(base, "tag").session.tokenizer.encode(["the cat"])[0]
    assert [one["id"] for one in tokens] == encoding.ids
    assert [one["special"] for one in tokens] == [True] + [False] * (len(tokens) - 2) + [True]
    assert "".join("the cat"[one["start"] : one["end"]] for one in tokens) == "thecat"


@pytest.mark.parametrize("name", ["embed", "classify", "tag", "hidden-states", "tokenize"])
def test_long_texts_are_refused_unless_asked_to_be_cut(app: TestClient, name: str) -> None:
    texts = ["a", "a " * 100]
    found = app.post(f"/encast/v1/{name}", json={"texts": texts})
    assert found.status_code == 422
    assert found.json()["error"]["message"].startswith("texts[1] is longer than 4")
    assert len(ask(app, name, texts=texts, on_long="truncate")["results"]) == 2
    # A request does not decide how many runs a text takes.
    windows = app.post(f"/encast/v1/{name}", json={"texts": texts, "on_long": "windows"})
    assert windows.status_code == 400
    assert "on_long" in windows.json()["error"]["message"]


def test_a_request_does_not_decide_how_many_windows_a_context_takes(app: TestClient) -> None:
    body = {"question": "where", "context": "the cat " * 60}
    found = app.post("/encast/v1/answer", json={**body, "stride": 30})
    half = int(re.findall(r"half of the (\d+) tokens", found.json()["error"]["message"])[0]) // 2
    statuses = [app.post("/encast/v1/answer", json={**body, "stride": n}).status_code for n in (half, half + 1)]
    assert statuses == [200, found.status_code]
    assert found.status_code >= 400


@pytest.mark.parametrize("operation", ENCAST.operations, ids=lambda operation: operation.name)
def test_examples_are_answered_and_unknown_models_are_not(app: TestClient, operation: Any) -> None:
    example = operation.examples["example"]
    assert app.post(operation.path, json=example).status_code == 200
    found = app.post(operation.path, json={**example, "model": "nobody"})
    assert (found.status_code, found.json()["error"]["code"]) == (404, "model_not_found")


def test_limits(base: Path) -> None:
    app = client(local_service(base, *ARTIFACTS, limits=RequestLimits(max_texts=1, max_text_bytes=60)), [ENCAST])
    for operation in ENCAST.operations:
        for field in set(operation.examples["example"]) - {"query"}:
            value = operation.examples["example"][field]
            body = {**operation.examples["example"], field: ["a" * 61]}
            if isinstance(value, str):
                body = {name: ["a" * 61] if name == field else ["a"] for name in body}
            found = app.post(operation.path, json=body)
            assert (found.status_code, f"{field}[0] has 61 bytes" in found.text) == (413, True)
            body[field] = ["a", "a"]
            assert app.post(operation.path, json=body).status_code == 413


def test_numbers_that_json_lacks_are_refused(app: TestClient, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = engine(base, "embed")
    nothing = np.full((1, model.dim), np.nan, np.float32)
    monkeypatch.setattr(model.runnable, "run", lambda *_: nothing)
    found = app.post("/encast/v1/embed", json={"texts": ["a"]})
    assert (found.status_code, "not a finite number" in found.text) == (422, True)
    with pytest.raises(InputError):
        model.drive(hidden_states(model.session, ["a"]))
