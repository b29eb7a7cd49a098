"""The Open Inference Protocol over HTTP: tensors as JSON and as bytes, and what does not fit together."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local import client, engine, local_service
from starlette.testclient import TestClient

from encast.serve.protocols.kserve import KSERVE
from encast.serve.service import RequestLimits, Service

TEXTS = ["the cat", "a dog here", "caf\u00e9 x\0y"]
LONG = "the cat " * 60
HEADER = "inference-header-content-length"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def service(base: Path) -> Service:
    names = (
        "embed", "embed-sparse", "embed-tokens", "embed-m3", "classify", "rerank", "tag", "answer", "fill-mask",
        "features",
    )  # fmt: skip
    return local_service(base, *names, limits=RequestLimits(max_texts=64))


@pytest.fixture(scope="module")
def app(service: Service) -> TestClient:
    return client(service, [KSERVE])


def texts_of(texts: list[str], name: str = "text") -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(texts)], "data": texts}


def tensor(name: str, rows: Any, datatype: str = "INT64") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(np.shape(rows)), "data": rows}


def outputs_of(answer: Any) -> dict[str, Any]:
    """Name to array or list; checks that the shape is that of the data."""
    assert answer.status_code == 200, answer.text
    found = {}
    for one in answer.json()["outputs"]:
        dtype = {"FP32": np.float32, "INT64": np.int64, "BYTES": object}[one["datatype"]]
        found[one["name"]] = np.array(one["data"], dtype).reshape(one["shape"])
    return found


def ask(app: TestClient, model: str, *inputs: dict[str, Any], **fields: Any) -> Any:
    return app.post(f"/v2/models/{model}/infer", json={"inputs": list(inputs), **fields})


def ids_of(base: Path, name: str, texts: list[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Padded ids and their mask."""
    rows = [encoding.ids for encoding in engine(base, name).session.tokenizer.encode(texts)]
    longest = max(map(len, rows)) + 2
    return (
        [row + [0] * (longest - len(row)) for row in rows],
        [[1] * len(row) + [0] * (longest - len(row)) for row in rows],
    )


def test_texts(app: TestClient, base: Path) -> None:
    answer = ask(app, "embed", texts_of(TEXTS), id="the id")
    np.testing.assert_array_equal(outputs_of(answer)["embedding"], engine(base, "embed").embed(TEXTS), strict=True)
    assert {key: answer.json()[key] for key in ("id", "model_name", "model_version")} == {
        "id": "the id", "model_name": "embed", "model_version": "1",
    }  # fmt: skip
    column = {**texts_of(TEXTS), "shape": [3, 1], "data": [[text] for text in TEXTS]}
    assert ask(app, "the-embed", column).json()["outputs"] == answer.json()["outputs"]
    assert "id" not in ask(app, "embed", column).json()


def test_padded_ids_give_what_the_texts_give(app: TestClient, base: Path) -> None:
    ids, mask = ids_of(base, "embed", TEXTS)
    types = np.zeros_like(ids).tolist()
    inputs = tensor("input_ids", ids), tensor("attention_mask", mask, "INT32"), tensor("token_type_ids", types)
    found = outputs_of(ask(app, "embed", *inputs, outputs=[{"name": "last_hidden_state"}, {"name": "embedding"}]))
    assert list(found) == ["last_hidden_state", "embedding"]
    np.testing.assert_array_equal(found["embedding"], engine(base, "embed").embed(TEXTS))
    rows = [row[: sum(ones)] for row, ones in zip(ids, mask, strict=True)]
    for states, row, one in zip(found["last_hidden_state"], rows, engine(base, "embed").forward(rows), strict=True):
        np.testing.assert_array_equal(states[: len(row)], one)
        assert not states[len(row) :].any()
    texts = outputs_of(
        ask(app, "embed", texts_of(TEXTS), outputs=[{"name": "last_hidden_state"}, {"name": "attention_mask"}])
    )
    np.testing.assert_array_equal(texts["last_hidden_state"], found["last_hidden_state"][:, :-2])
    np.testing.assert_array_equal(texts["attention_mask"], np.array(mask)[:, :-2])


def test_token_types_reach_the_model(app: TestClient, base: Path) -> None:
    encoding = engine(base, "classify").session.tokenizer.encode([("the cat", "a dog")])[0]
    assert 1 in encoding.type_ids
    pair = {"name": "text", "datatype": "BYTES", "shape": [1, 2], "data": ["the cat", "a dog"]}
    expected = outputs_of(ask(app, "classify", pair))
    found = outputs_of(
        ask(app, "classify", tensor("input_ids", [encoding.ids]), tensor("token_type_ids", [encoding.type_ids]))
    )
    for name in ("logits", "scores", "label"):
        np.testing.assert_array_equal(found[name], expected[name])
    plain = outputs_of(ask(app, "classify", tensor("input_ids", [encoding.ids])))
    assert (plain["logits"] != found["logits"]).any()


def test_classify(app: TestClient, base: Path) -> None:
    rows = [("a", "b"), ("the cat", "a dog")]
    inputs = {"name": "text", "datatype": "BYTES", "shape": [2, 2], "data": [list(row) for row in rows]}
    found = outputs_of(ask(app, "classify", inputs))
    expected = engine(base, "classify").classify(rows)
    assert found["label"].tolist() == [one.label for one in expected]
    np.testing.assert_array_equal(
        found["scores"], np.array([list(one.scores.values()) for one in expected], np.float32)
    )
    single = outputs_of(ask(app, "classify", texts_of(TEXTS)))
    assert single["label"].tolist() == [one.label for one in engine(base, "classify").classify(TEXTS)]


@pytest.mark.parametrize("name", ["rerank", "embed"])
def test_rerank(app: TestClient, base: Path, name: str) -> None:
    found = outputs_of(ask(app, name, texts_of(["q"], "query"), texts_of(TEXTS, "documents")))
    expected = [score for _, score in sorted(engine(base, name).rerank("q", TEXTS))]
    np.testing.assert_array_equal(found["relevance_score"], np.array(expected, np.float32))


def test_answer(app: TestClient, base: Path) -> None:
    found = outputs_of(ask(app, "answer", texts_of(["q", "r"], "question"), texts_of(TEXTS[:2], "context")))
    expected = engine(base, "answer").answer(["q", "r"], TEXTS[:2])
    assert found["answer"].tolist() == [one.text for one in expected]
    assert found["start"].tolist() == [one.start for one in expected]


def test_tag(app: TestClient, base: Path) -> None:
    found = outputs_of(ask(app, "tag", texts_of(TEXTS)))
    expected = [(row, one) for row, tagging in enumerate(engine(base, "tag").tag(TEXTS)) for one in tagging.entities]
    assert expected
    assert found["row"].tolist() == [row for row, _ in expected]
    assert found["entity"].tolist() == [one.text for _, one in expected]
    assert found["end"].tolist() == [one.end for _, one in expected]
    ids, mask = ids_of(base, "tag", TEXTS)
    logits = outputs_of(ask(app, "tag", tensor("input_ids", ids), tensor("attention_mask", mask)))["logits"]
    assert logits.shape == (*np.shape(ids), 5)
    assert not logits[np.array(mask) == 0].any()


def test_fill_mask(app: TestClient, base: Path) -> None:
    texts = ["the [MASK] [MASK]", "a [MASK]"]
    found = outputs_of(ask(app, "fill-mask", texts_of(texts), parameters={"top_k": 2}))
    expected = engine(base, "fill-mask").fill_mask(texts, top_k=2)
    assert found["row"].tolist() == [0, 0, 1]
    assert found["token"].tolist() == [[one.token for one in mask] for text in expected for mask in text]


def test_embed_sparse(app: TestClient, base: Path) -> None:
    found = outputs_of(ask(app, "embed-sparse", texts_of(TEXTS)))
    expected = engine(base, "embed-sparse").embed_sparse(TEXTS)
    for row, one in enumerate(expected):
        of_row = found["row"] == row
        np.testing.assert_array_equal(found["index"][of_row], one.indices)
        np.testing.assert_array_equal(found["value"][of_row], one.values)
    few = outputs_of(ask(app, "embed-sparse", texts_of(TEXTS), parameters={"max_active_dims": 3}))
    assert few["row"].tolist() == [row for row in range(len(TEXTS)) for _ in range(3)]
    assert ask(app, "embed-sparse", texts_of(TEXTS), parameters={"max_active_dims": 0}).status_code == 400
    ids, mask = ids_of(base, "embed-sparse", TEXTS)
    states = outputs_of(ask(app, "embed-sparse", tensor("input_ids", ids), tensor("attention_mask", mask)))
    assert states["last_hidden_state"].shape == (*np.shape(ids), 32)


def test_embed_m3(app: TestClient, base: Path) -> None:
    found = outputs_of(ask(app, "embed-m3", texts_of(TEXTS)))
    for row, one in enumerate(engine(base, "embed-m3").embed_m3(TEXTS)):
        np.testing.assert_array_equal(found["embedding"][row], one.embedding)
        of_row = found["sparse_row"] == row
        np.testing.assert_array_equal(found["index"][of_row], one.sparse.indices)
        np.testing.assert_array_equal(found["value"][of_row], one.sparse.values)
        of_row = found["token_row"] == row
        np.testing.assert_array_equal(found["token_id"][of_row], one.tokens.token_ids)
        np.testing.assert_array_equal(found["vector"][of_row], one.tokens.vectors)
    ids, mask = ids_of(base, "embed-m3", TEXTS)
    rows = outputs_of(ask(app, "embed-m3", tensor("input_ids", ids), tensor("attention_mask", mask)))
    assert rows["m3_embedding"].shape == (*np.shape(ids), 65)


def test_embed_tokens(app: TestClient, base: Path) -> None:
    for kind in ("query", "document"):
        found = outputs_of(ask(app, "embed-tokens", texts_of(TEXTS), parameters={"kind": kind}))
        for row, one in enumerate(engine(base, "embed-tokens").embed_tokens(TEXTS, kind=kind)):
            of_row = found["row"] == row
            np.testing.assert_array_equal(found["token_id"][of_row], one.token_ids)
            np.testing.assert_array_equal(found["vector"][of_row], one.vectors)
    refused = ask(app, "embed-tokens", texts_of(TEXTS), parameters={"kind": "passage"})
    assert (refused.status_code, "query and document" in refused.text) == (400, True)
    ranks = outputs_of(ask(app, "embed-tokens", texts_of(TEXTS[:1], "query"), texts_of(TEXTS, "documents")))
    expected = dict(engine(base, "embed-tokens").rerank(TEXTS[0], TEXTS))
    assert ranks["relevance_score"].tolist() == [np.float32(expected[index]) for index in range(len(TEXTS))]
    ids, mask = ids_of(base, "embed-tokens", TEXTS)
    vectors = outputs_of(ask(app, "embed-tokens", tensor("input_ids", ids), tensor("attention_mask", mask)))
    assert vectors["token_embedding"].shape == (*np.shape(ids), 24)


def test_features(app: TestClient, base: Path) -> None:
    found = outputs_of(ask(app, "features", texts_of(["the cat"])))
    ids = engine(base, "features").session.tokenizer.encode(["the cat"])[0].ids
    np.testing.assert_array_equal(found["last_hidden_state"][0], engine(base, "features").forward([ids])[0])
    assert found["attention_mask"].tolist() == [[1] * len(ids)]


def binary(inputs: list[tuple[dict[str, Any], bytes]], **fields: Any) -> tuple[bytes, dict[str, str]]:
    head = [{**one, "parameters": {"binary_data_size": len(raw)}} for one, raw in inputs]
    text = json.dumps({"inputs": head, **fields}).encode()
    return text + b"".join(raw for _, raw in inputs), {HEADER: str(len(text))}


def strings(texts: list[str]) -> bytes:
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)


def test_binary_both_ways(app: TestClient, base: Path) -> None:
    text = {"name": "text", "datatype": "BYTES", "shape": [3]}
    content, headers = binary([(text, strings(TEXTS))], parameters={"binary_data_output": True}, id="7")
    answer = app.post("/v2/models/embed/infer", content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    at = int(answer.headers[HEADER])
    head = json.loads(answer.content[:at])
    (output,) = head["outputs"]
    assert (head["id"], output["parameters"]) == ("7", {"binary_data_size": len(answer.content) - at})
    vectors = np.frombuffer(answer.content[at:], "<f4").reshape(output["shape"])
    np.testing.assert_array_equal(vectors, engine(base, "embed").embed(TEXTS))
    # One output as bytes, one as JSON; strings as bytes.
    wanted = [{"name": "label", "parameters": {"binary_data": True}}, {"name": "logits"}]
    content, headers = binary([(text, strings(TEXTS))], outputs=wanted)
    answer = app.post("/v2/models/classify/infer", content=content, headers=headers)
    at = int(answer.headers[HEADER])
    labels = [one.label for one in engine(base, "classify").classify(TEXTS)]
    assert answer.content[at:] == strings([label or "" for label in labels])
    assert len(json.loads(answer.content[:at])["outputs"][1]["data"]) == 9


def test_metadata_and_health(service: Service, app: TestClient, base: Path) -> None:
    assert app.get("/v2").json()["extensions"] == ["binary_tensor_data"]
    assert app.get("/v2/health/live").json() == {"live": True}
    assert app.get("/v2/health/ready").json() == {"ready": True}
    for path in ("/v2/models/embed", "/v2/models/embed/versions/1"):
        about = app.get(path).json()
        assert (about["name"], about["versions"]) == ("embed", ["1"])
        assert about["inputs"][0] == {"name": "text", "datatype": "BYTES", "shape": [-1]}
        assert {"name": "embedding", "datatype": "FP32", "shape": [-1, 32]} in about["outputs"]
        assert app.get(f"{path}/ready").json() == {"name": "embed", "ready": True}
    # Whatever the metadata promises comes, in the promised shape and datatype.
    ids = tensor("input_ids", [[5, 6]])
    for name in service.models.by_name:
        specs = {one["name"]: one for one in app.get(f"/v2/models/{name}").json()["outputs"]}
        for one in ask(app, name, ids).json()["outputs"]:
            spec = specs[one["name"]]
            assert spec["datatype"] == one["datatype"]
            assert all(size in (-1, real) for size, real in zip(spec["shape"], one["shape"], strict=True))
    assert ask(app, "embed", ids).status_code == 200
    for path in ("/v2/models/embed/versions/2", "/v2/models/nope", "/v2/models/nope/ready"):
        assert app.get(path).status_code == 404, path
        assert app.get(path).json()["error"]
    assert app.post("/v2/models/embed/versions/1/infer", json={"inputs": [ids]}).status_code == 200
    assert app.post("/v2/models/embed/versions/2/infer", json={"inputs": [ids]}).status_code == 404
    service.ready = lambda: False
    try:
        assert app.get("/v2/health/ready").status_code == 503
        assert app.get("/v2/health/live").status_code == 200
        assert app.get("/v2/models/embed/ready").status_code == 503
    finally:
        service.ready = lambda: True


TEXT = texts_of(["a"])
IDS = tensor("input_ids", [[5, 6], [5, 6]])
WRONG: dict[str, Any] = {
    "no inputs": [],
    "twice": [TEXT, TEXT],
    "unknown": [{**TEXT, "name": "txt"}],
    "both forms": [TEXT, IDS],
    "mask alone": [tensor("attention_mask", [[1]])],
    "dtype of ids": [{**IDS, "datatype": "FP32"}],
    "no dtype": [{**IDS, "datatype": "HUGE"}],
    "dtype of text": [{**TEXT, "datatype": "INT64", "data": [1]}],
    "ids as BYTES": [{**IDS, "datatype": "BYTES", "data": ["a"] * 4}],
    "too few": [{**IDS, "shape": [2, 3]}],
    "too many": [{**TEXT, "shape": [1], "data": ["a", "b"]}],
    "negative": [{**IDS, "shape": [-2, -2]}],
    "zero": [{**IDS, "shape": [0, 2], "data": []}],
    "huge": [{**IDS, "shape": [2**62, 2**62]}],
    "beyond 64 bits": [{**IDS, "shape": [10**30, 1]}],
    "no axis": [{**TEXT, "shape": [], "data": ["a"]}],
    "five axes": [{**TEXT, "shape": [1] * 5, "data": ["a"]}],
    "three texts a row": [{**TEXT, "shape": [1, 3], "data": ["a"] * 3}],
    "one axis of ids": [{**IDS, "shape": [4], "data": [5, 6, 5, 6]}],
    "texts for ids": [{**IDS, "data": ["5", "6", "5", "6"]}],
    "numbers for texts": [{**TEXT, "data": [5]}],
    "fractions": [{**IDS, "data": [5.0, 6.5, 5, 6]}],
    "booleans": [{**IDS, "data": [True, 6, 5, 6]}],
    "ragged": [{**IDS, "data": [[5], [6, 5, 6]]}],
    "nested too deeply": [{**IDS, "data": [[[5], [6]], [[5], [6]]]}],
    "no data": [{"name": "text", "datatype": "BYTES", "shape": [1]}],
    "null in data": [{**TEXT, "data": [None]}],
    "beyond int32": [{**IDS, "datatype": "INT32", "data": [2**31, 6, 5, 6]}],
    "beyond int64": [{**IDS, "data": [2**63, 6, 5, 6]}],
    "id beyond the vocabulary": [{**IDS, "data": [5, 10**9, 5, 6]}],
    "negative id": [{**IDS, "data": [5, -1, 5, 6]}],
    "shape of the mask": [IDS, tensor("attention_mask", [[1, 1]])],
    "hole in the mask": [tensor("input_ids", [[5, 6, 7]]), tensor("attention_mask", [[1, 0, 1]])],
    "padding first": [IDS, tensor("attention_mask", [[0, 1], [1, 1]])],
    "all padding": [IDS, tensor("attention_mask", [[0, 0], [1, 1]])],
    "twos in the mask": [IDS, tensor("attention_mask", [[2, 1], [1, 1]])],
    "types beyond the model": [IDS, tensor("token_type_ids", [[0, 9], [0, 0]])],
    "longer than the model": [tensor("input_ids", [[5] * 60])],
    "longer text": [texts_of([LONG])],
    "parameter of a tensor": [{**TEXT, "parameters": {"x": 1}}],
    "bytes that did not come": [
        {"name": "text", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}}
    ],
    "a size that is none": [{**TEXT, "data": None, "parameters": {"binary_data_size": True}}],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(app: TestClient, name: str) -> None:
    answer = ask(app, "embed", *WRONG[name])
    assert answer.status_code == 400, answer.text
    assert list(answer.json()) == ["error"]


@pytest.mark.parametrize(
    "fields",
    [
        {"outputs": [{"name": "logits"}]},
        {"outputs": [{"name": "embedding", "parameters": {"classification": 3}}]},
        {"outputs": [{"name": "embedding", "parameters": {"binary_data": 1}}]},
        {"parameters": {"truncate": "yes"}},
        {"parameters": {"priority": 1}},
        {"parameters": {"top_k": 0}},
        {"parameters": {"prompt_name": "nope"}},
        {"parameters": {"binary_data_output": "yes"}},
    ],
)
def test_wrong_options(app: TestClient, fields: dict[str, Any]) -> None:
    assert ask(app, "embed", TEXT, **fields).status_code == 400


def test_a_long_text_is_cut_when_asked(app: TestClient, base: Path) -> None:
    found = outputs_of(ask(app, "embed", texts_of([LONG]), parameters={"truncate": True}))
    np.testing.assert_array_equal(found["embedding"], engine(base, "embed").embed([LONG]))


def test_limits(app: TestClient) -> None:
    assert ask(app, "embed", texts_of(["a"] * 65)).status_code == 413
    assert ask(app, "embed", tensor("input_ids", [[5]] * 65)).status_code == 413
    # Counted before they are looked at.
    content, headers = binary(
        [({"name": "text", "datatype": "BYTES", "shape": [65]}, (struct.pack("<I", 1) + b"\xff") * 65)]
    )
    assert app.post("/v2/models/embed/infer", content=content, headers=headers).status_code == 413


@pytest.mark.parametrize(
    ("raw", "shape"),
    [
        (strings(TEXTS)[:-1], [3]),
        (strings(TEXTS) + b"\0", [3]),
        (strings(TEXTS), [2]),
        (strings(TEXTS), [4]),
        (struct.pack("<I", 2**32 - 1) + b"abc", [1]),
        (b"\1\0", [1]),
        (struct.pack("<I", 2) + b"\xff\xfe", [1]),
        (b"", [1]),
    ],
)
def test_lying_strings(app: TestClient, raw: bytes, shape: list[int]) -> None:
    content, headers = binary([({"name": "text", "datatype": "BYTES", "shape": shape}, raw)])
    answer = app.post("/v2/models/embed/infer", content=content, headers=headers)
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("header", ["-1", "x", "99999999", "1e3", "", "3"])
def test_lying_header(app: TestClient, header: str) -> None:
    content, _ = binary([({"name": "text", "datatype": "BYTES", "shape": [3]}, strings(TEXTS))])
    answer = app.post("/v2/models/embed/infer", content=content, headers={HEADER: header})
    assert answer.status_code == 400, answer.text


def test_bytes_that_belong_to_no_input(app: TestClient) -> None:
    content, headers = binary([({"name": "text", "datatype": "BYTES", "shape": [3]}, strings(TEXTS))])
    answer = app.post("/v2/models/embed/infer", content=content + b"more", headers=headers)
    assert answer.status_code == 400


def test_content_types(app: TestClient) -> None:
    for kind, status in (("text/plain", 415), ("application/json; charset=utf-8", 400)):
        answer = app.post("/v2/models/embed/infer", content=b"{", headers={"content-type": kind})
        assert (answer.status_code, list(answer.json())) == (status, ["error"])


def test_padding_cannot_make_a_huge_answer(base: Path) -> None:
    app = client(
        local_service(base, "features", limits=RequestLimits(max_texts=1 << 20, max_body_bytes=1 << 26)), [KSERVE]
    )
    rows, longest = 4096, 1024
    shape = {"datatype": "INT32", "shape": [rows, longest]}
    mask = np.zeros((rows, longest), "<i4")
    mask[:, 0] = 1
    inputs = [
        ({"name": "input_ids", **shape}, (5 * mask).tobytes()),
        ({"name": "attention_mask", **shape}, mask.tobytes()),
    ]
    content, headers = binary(inputs)
    answer = app.post("/v2/models/features/infer", content=content, headers=headers)
    assert (answer.status_code, "last_hidden_state" in answer.text) == (413, True), answer.text
