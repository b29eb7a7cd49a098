"""NVIDIA's ``tritonclient`` over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils
from grpc_local import grpc_served
from local import LocalRunner, engine, local_service, served

from encast.serve.errors import RefusalError
from encast.serve.protocols.kserve import KSERVE
from encast.serve.service import Service

TEXTS = ["the cat", "a dog here", "caf\u00e9 \u4e2d\u6587"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def service(base: Path) -> Service:
    return local_service(base, "embed", "classify")


@pytest.fixture(scope="module", params=["http", "grpc"])
def triton(service: Service, request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """The module of the transport, and a client."""
    if request.param == "http":
        with served(service, [KSERVE]) as url:
            client = tritonclient.http.InferenceServerClient(url.removeprefix("http://"))
            yield tritonclient.http, client
            client.close()
    else:
        with grpc_served(service) as address:
            grpc_client = tritonclient.grpc.InferenceServerClient(address)
            yield tritonclient.grpc, grpc_client
            grpc_client.close()


def texts_of(module: Any, texts: list[str], **options: Any) -> Any:
    tensor = module.InferInput("text", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in texts], object), **options)
    return tensor


def test_health_and_metadata(triton: tuple[Any, Any]) -> None:
    module, client = triton
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("embed")
    assert not client.is_model_ready("nope") if module is tritonclient.http else True
    as_json = {"as_json": True} if module is tritonclient.grpc else {}
    assert client.get_server_metadata(**as_json)["name"] == "encast"
    about = client.get_model_metadata("embed", **as_json)
    assert about["inputs"][0]["name"] == "text"
    assert about["outputs"][0] == {"name": "embedding", "datatype": "FP32", "shape": about["outputs"][0]["shape"]}


def test_texts(triton: tuple[Any, Any], base: Path) -> None:
    module, client = triton
    answer = client.infer("embed", [texts_of(module, TEXTS)], request_id="the id")
    np.testing.assert_array_equal(answer.as_numpy("embedding"), engine(base, "embed").embed(TEXTS), strict=True)
    response = answer.get_response()
    assert (response["id"] if isinstance(response, dict) else response.id) == "the id"


@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_binary_and_json(service: Service, base: Path, sent: bool, wanted: bool) -> None:
    module = tritonclient.http
    with served(service, [KSERVE]) as url, module.InferenceServerClient(url.removeprefix("http://")) as client:
        outputs = [module.InferRequestedOutput(name, binary_data=wanted) for name in ("scores", "label")]
        answer = client.infer("classify", [texts_of(module, TEXTS, binary_data=sent)], outputs=outputs)
    expected = engine(base, "classify").classify(TEXTS)
    scores = np.array([list(one.scores.values()) for one in expected], np.float32)
    np.testing.assert_array_equal(answer.as_numpy("scores"), scores, strict=True)
    labels = [one.decode() if isinstance(one, bytes) else one for one in answer.as_numpy("label")]
    assert labels == [one.label for one in expected]


def test_padded_ids(triton: tuple[Any, Any], base: Path) -> None:
    module, client = triton
    rows = [encoding.ids for encoding in engine(base, "embed").session.tokenizer.encode(TEXTS)]
    ids = np.zeros((3, max(map(len, rows)) + 1), np.int64)
    mask = np.zeros(ids.shape, np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = row, 1
    inputs = []
    for name, array in (("input_ids", ids), ("attention_mask", mask)):
        inputs.append(module.InferInput(name, list(array.shape), "INT64"))
        inputs[-1].set_data_from_numpy(array)
    outputs = [module.InferRequestedOutput(name) for name in ("last_hidden_state", "embedding")]
    answer = client.infer("embed", inputs, outputs=outputs)
    np.testing.assert_array_equal(answer.as_numpy("embedding"), engine(base, "embed").embed(TEXTS), strict=True)
    states = answer.as_numpy("last_hidden_state")
    for index, one in enumerate(engine(base, "embed").forward(rows)):
        np.testing.assert_array_equal(states[index, : len(one)], one)


@pytest.mark.parametrize(
    ("kind", "http", "grpc"),
    [
        ("overloaded", "429", "RESOURCE_EXHAUSTED"),
        ("failed", "500", "INTERNAL"),
        ("expired", "504", "DEADLINE_EXCEEDED"),
    ],
)
def test_errors_are_the_clients_own(service: Service, triton: tuple[Any, Any], kind: Any, http: str, grpc: str) -> None:
    module, client = triton
    runner = service.models.find("embed").runner
    assert isinstance(runner, LocalRunner)
    runner.fails.append(RefusalError(kind, "not now", retry_after=2))
    with pytest.raises(tritonclient.utils.InferenceServerException, match="not now") as caught:
        client.infer("embed", [texts_of(module, TEXTS)])
    assert (http if module is tritonclient.http else grpc) in caught.value.status()


def test_wrong_requests(triton: tuple[Any, Any]) -> None:
    module, client = triton
    with pytest.raises(tritonclient.utils.InferenceServerException, match="no model 'nope'"):
        client.infer("nope", [texts_of(module, TEXTS)])
    with pytest.raises(tritonclient.utils.InferenceServerException, match="truncate"):
        client.infer("embed", [texts_of(module, ["the cat " * 60])])
    answer = client.infer("embed", [texts_of(module, ["the cat " * 60])], parameters={"truncate": True})
    assert answer.as_numpy("embedding").shape == (1, 32)
