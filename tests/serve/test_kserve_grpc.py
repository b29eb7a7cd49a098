"""The Open Inference Protocol over gRPC: answers, codes, deadlines, cancelling, and messages that lie."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_local import grpc_served
from local import LocalRunner, engine, local_service

from encast.kserve import messages_pb2 as messages
from encast.serve.errors import RefusalError
from encast.serve.service import Finished, RequestLimits, Service

TEXTS = ["the cat", "a dog here", "caf\u00e9 x\0y"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def service(base: Path) -> Service:
    service = local_service(base, "embed", "classify", limits=RequestLimits(max_texts=64, max_body_bytes=1 << 20))
    service.authorise = lambda header: "me" if header == "Bearer the-key" else None
    return service


@pytest.fixture(scope="module")
def channel(service: Service) -> Iterator[grpc.Channel]:
    with grpc_served(service) as address, grpc.insecure_channel(address) as channel:
        yield channel


class Told:
    """The requests that ended; the server tells of them on a thread of its own."""

    def __init__(self, service: Service) -> None:
        self.all: list[Finished] = []
        self.changed = threading.Condition()
        service.finished.append(self._tell)

    def _tell(self, finished: Finished) -> None:
        with self.changed:
            self.all.append(finished)
            self.changed.notify()

    def last(self, kind: str) -> Finished:
        with self.changed:
            assert self.changed.wait_for(lambda: bool(self.all) and self.all[-1].kind == kind, 10)
            return self.all[-1]


@pytest.fixture
def told(service: Service) -> Iterator[Told]:
    told = Told(service)
    yield told
    service.finished.clear()


KEY = (("authorization", "Bearer the-key"),)


def call(channel: grpc.Channel, name: str, request: Any, metadata: Any = KEY, **options: Any) -> Any:
    """The parsed answer; ``request`` may be bytes."""
    answer_type = getattr(messages, name + "Response")
    method = channel.unary_unary(
        f"/inference.GRPCInferenceService/{name}",
        request_serializer=lambda one: one if isinstance(one, bytes) else one.SerializeToString(),
        response_deserializer=answer_type.FromString,
    )
    return method(request, metadata=metadata, timeout=options.pop("timeout", 20), **options)


def refused(channel: grpc.Channel, name: str, request: Any, **options: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, name, request, **options)
    return caught.value


def strings(texts: list[str]) -> bytes:
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)


def request_of(model: str, texts: list[str], *, raw: bool, **fields: Any) -> Any:
    request = messages.ModelInferRequest(model_name=model, **fields)
    tensor = request.inputs.add(name="text", datatype="BYTES", shape=[len(texts)])
    if raw:
        request.raw_input_contents.append(strings(texts))
    else:
        tensor.contents.bytes_contents.extend(text.encode() for text in texts)
    return request


def test_raw_contents(channel: grpc.Channel, base: Path) -> None:
    answer = call(channel, "ModelInfer", request_of("embed", TEXTS, raw=True, id="the id"))
    assert (answer.id, answer.model_name, answer.model_version) == ("the id", "embed", "1")
    (output,), (raw,) = answer.outputs, answer.raw_output_contents
    assert (output.name, output.datatype, list(output.shape)) == ("embedding", "FP32", [3, 32])
    np.testing.assert_array_equal(np.frombuffer(raw, "<f4").reshape(3, 32), engine(base, "embed").embed(TEXTS))


def test_typed_contents(channel: grpc.Channel, base: Path) -> None:
    answer = call(channel, "ModelInfer", request_of("the-embed", TEXTS, raw=False))
    (output,) = answer.outputs
    assert not answer.raw_output_contents
    found = np.array(output.contents.fp32_contents, np.float32).reshape(3, 32)
    np.testing.assert_array_equal(found, engine(base, "embed").embed(TEXTS))
    answer = call(channel, "ModelInfer", request_of("classify", TEXTS, raw=False))
    labels = {one.name: one for one in answer.outputs}["label"].contents.bytes_contents
    assert [one.decode() for one in labels] == [one.label for one in engine(base, "classify").classify(TEXTS)]


def test_ids(channel: grpc.Channel, base: Path) -> None:
    ids = engine(base, "embed").session.tokenizer.encode(["the cat"])[0].ids
    typed = messages.ModelInferRequest(model_name="embed")
    typed.inputs.add(name="input_ids", datatype="INT64", shape=[1, len(ids)]).contents.int64_contents.extend(ids)
    typed.outputs.add(name="embedding")
    raw = messages.ModelInferRequest(model_name="embed", raw_input_contents=[np.array(ids, "<i4").tobytes()])
    raw.inputs.add(name="input_ids", datatype="INT32", shape=[1, len(ids)])
    expected = engine(base, "embed").embed(["the cat"])[0]
    np.testing.assert_array_equal(
        np.array(call(channel, "ModelInfer", typed).outputs[0].contents.fp32_contents, np.float32), expected
    )
    np.testing.assert_array_equal(
        np.frombuffer(call(channel, "ModelInfer", raw).raw_output_contents[0], "<f4"), expected
    )


def test_parameters(channel: grpc.Channel, base: Path) -> None:
    long = "the cat " * 60
    assert "truncate" in refused(channel, "ModelInfer", request_of("embed", [long], raw=True)).details()
    request = request_of("embed", [long], raw=True)
    request.parameters["truncate"].bool_param = True
    raw = call(channel, "ModelInfer", request).raw_output_contents[0]
    np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), engine(base, "embed").embed([long])[0])


def test_metadata_and_health(service: Service, channel: grpc.Channel) -> None:
    assert call(channel, "ServerLive", messages.ServerLiveRequest(), ()).live
    assert call(channel, "ServerReady", messages.ServerReadyRequest(), ()).ready
    assert call(channel, "ModelReady", messages.ModelReadyRequest(name="embed"), ()).ready
    assert call(channel, "ServerMetadata", messages.ServerMetadataRequest()).name == "encast"
    about = call(channel, "ModelMetadata", messages.ModelMetadataRequest(name="embed", version="1"))
    assert (about.name, list(about.versions), about.properties["task"]) == ("embed", ["1"], "embed")
    assert (about.inputs[0].name, list(about.inputs[0].shape)) == ("text", [-1])
    missing = refused(channel, "ModelReady", messages.ModelReadyRequest(name="embed", version="2"), metadata=())
    assert missing.code() == grpc.StatusCode.NOT_FOUND
    service.ready = lambda: False
    try:
        assert not call(channel, "ServerReady", messages.ServerReadyRequest(), ()).ready
        error = refused(channel, "ModelInfer", request_of("embed", ["a"], raw=True))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
    finally:
        service.ready = lambda: True


def test_keys(channel: grpc.Channel) -> None:
    for metadata in ((), (("authorization", "Bearer wrong"),)):
        for name in ("ModelInfer", "ModelMetadata", "ServerMetadata"):
            error = refused(channel, name, getattr(messages, f"{name}Request")(), metadata=metadata)
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED, name


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("overloaded", grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("unavailable", grpc.StatusCode.UNAVAILABLE),
        ("failed", grpc.StatusCode.INTERNAL),
    ],
)
def test_refusals_of_the_engine(service: Service, channel: grpc.Channel, kind: Any, code: grpc.StatusCode) -> None:
    runner = service.models.find("embed").runner
    assert isinstance(runner, LocalRunner)
    runner.fails.append(RefusalError(kind, "no", retry_after=1.5))
    error = refused(channel, "ModelInfer", request_of("embed", ["a"], raw=True))
    assert (error.code(), error.details()) == (code, "no")
    trailing = dict(error.trailing_metadata())
    assert (trailing["retry-after"], trailing["grpc-retry-pushback-ms"]) == ("2", "1500")


def test_a_defect_stays_in_the_log(service: Service, channel: grpc.Channel, told: Told) -> None:
    runner = service.models.find("embed").runner
    assert isinstance(runner, LocalRunner)
    runner.fails.append(ZeroDivisionError("/a/secret/path"))
    error = refused(channel, "ModelInfer", request_of("embed", ["a"], raw=True))
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in error.details()
    assert told.last("failed").status == 500


def test_what_is_told_of_a_call(channel: grpc.Channel, told: Told) -> None:
    _, state = (
        channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        .with_call(request_of("embed", TEXTS, raw=True).SerializeToString(), metadata=(*KEY, ("x-request-id", "mine")))
    )  # fmt: skip
    finished = told.last("")
    assert (finished.operation, finished.protocol, finished.status) == ("kserve_grpc.ModelInfer", "kserve_grpc", 200)
    assert (finished.key, finished.request_id, finished.call.timing.texts) == ("me", "mine", 3)
    trailing = dict(state.trailing_metadata())
    assert (trailing["x-request-id"], trailing["x-tokens"]) == ("mine", str(finished.call.timing.tokens))
    refused(channel, "ModelInfer", request_of("nope", TEXTS, raw=True))
    assert told.last("not_found").status == 404


def wait_until_one_waits(runner: LocalRunner) -> None:
    limit = threading.Event()
    for _ in range(2000):
        if runner.waiting:
            return
        limit.wait(0.005)
    pytest.fail("no run waits")


@pytest.mark.parametrize("way", ["cancel", "deadline"])
def test_a_client_that_leaves_withdraws_its_run(service: Service, channel: grpc.Channel, told: Told, way: str) -> None:
    runner = service.models.find("embed").runner
    assert isinstance(runner, LocalRunner)
    withdrawn = runner.withdrawn
    runner.go.clear()
    try:
        method = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        content = request_of("embed", ["a"], raw=True).SerializeToString()
        waiting = method.future(content, metadata=KEY, timeout=0.4 if way == "deadline" else 20)
        wait_until_one_waits(runner)
        if way == "cancel":
            waiting.cancel()
            told.last("cancelled")
        else:
            assert waiting.exception(10).code() == grpc.StatusCode.DEADLINE_EXCEEDED
            with told.changed:
                assert told.changed.wait_for(lambda: bool(told.all), 10)
            assert told.all[-1].kind in ("cancelled", "expired")
            assert runner.deadlines[-1] - told.all[-1].call.arrived < 0.5
        assert runner.withdrawn == withdrawn + 1
        assert service.running == 0
    finally:
        runner.go.set()


def test_the_servers_own_limit(base: Path) -> None:
    service = local_service(base, "embed", limits=RequestLimits(timeout_s=0.2))
    runner = service.models.find("embed").runner
    assert isinstance(runner, LocalRunner)
    runner.go.clear()
    with grpc_served(service) as address, grpc.insecure_channel(address) as channel:
        error = refused(channel, "ModelInfer", request_of("embed", ["a"], raw=True), metadata=())
    assert (error.code(), error.details()) == (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "there is no answer after 0.2 s; try again",
    )
    assert runner.withdrawn == 1


def lies() -> dict[str, Any]:
    good = request_of("embed", TEXTS, raw=True)

    def changed(**fields: Any) -> Any:
        request = messages.ModelInferRequest()
        request.CopyFrom(good)
        for name, value in fields.items():
            if name == "raw":
                del request.raw_input_contents[:]
                request.raw_input_contents.extend(value)
            elif name == "shape":
                del request.inputs[0].shape[:]
                request.inputs[0].shape.extend(value)
            else:
                setattr(request.inputs[0], name, value)
        return request

    both = changed()
    both.inputs[0].contents.bytes_contents.append(b"a")
    other = request_of("embed", ["a"], raw=False)
    other.inputs[0].contents.int64_contents.append(1)
    empty = request_of("embed", ["a"], raw=False)
    empty.inputs[0].ClearField("contents")
    odd = request_of("embed", ["a"], raw=False)
    odd.inputs[0].parameters["binary_data_size"].int64_param = 3
    nothing = request_of("embed", ["a"], raw=False)
    nothing.parameters["truncate"].SetInParent()
    return {
        "no message": b"\xff\xff\xff\xff",
        "a length beyond the message": b"\x0a\xff\xff\xff\xff\x07abc",
        "a message cut short": good.SerializeToString()[:-3],
        "length of a string": changed(raw=[struct.pack("<I", 2**32 - 1) + b"abc"]),
        "bytes cut short": changed(raw=[strings(TEXTS)[:-1]]),
        "more bytes": changed(raw=[strings(TEXTS) + b"more"]),
        "no bytes": changed(raw=[b""]),
        "two contents": changed(raw=[strings(TEXTS)] * 2),
        "negative shape": changed(shape=[-3]),
        "shape beyond memory": changed(shape=[2**62, 2**62]),
        "no shape": changed(shape=[]),
        "another shape": changed(shape=[4]),
        "no UTF-8": changed(raw=[struct.pack("<I", 2) + b"\xff\xfe"], shape=[1]),
        "datatype": changed(datatype="INT64"),
        "no datatype": changed(datatype=""),
        "a long datatype": changed(datatype="X" * 100_000),
        "a long name": changed(name="X" * 100_000),
        "contents twice": both,
        "contents of another type": other,
        "no contents": empty,
        "parameter of a tensor": odd,
        "a parameter without a value": nothing,
        "nothing": messages.ModelInferRequest(model_name="embed"),
    }


@pytest.mark.parametrize("name", lies())
def test_lies(channel: grpc.Channel, name: str) -> None:
    error = refused(channel, "ModelInfer", lies()[name])
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error.details()
    assert len(error.details()) < 1000


def test_a_message_beyond_the_limit(channel: grpc.Channel) -> None:
    error = refused(channel, "ModelInfer", request_of("embed", ["x" * (1 << 20)], raw=True))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert call(channel, "ServerLive", messages.ServerLiveRequest(), ()).live


def test_too_many_texts(channel: grpc.Channel) -> None:
    error = refused(channel, "ModelInfer", request_of("embed", ["a"] * 65, raw=True))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_stopping_lets_calls_finish(base: Path) -> None:
    service = local_service(base, "embed")
    runner = service.models.find("embed").runner
    assert isinstance(runner, LocalRunner)
    runner.go.clear()
    with grpc_served(service, grace=20) as address:
        channel = grpc.insecure_channel(address)
        waiting = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer").future(
            request_of("embed", TEXTS, raw=True).SerializeToString(), timeout=20
        )
        wait_until_one_waits(runner)
        threading.Timer(0.2, runner.go.set).start()
    with channel:
        answer = messages.ModelInferResponse.FromString(waiting.result(20))
    np.testing.assert_array_equal(
        np.frombuffer(answer.raw_output_contents[0], "<f4").reshape(3, -1), engine(base, "embed").embed(TEXTS)
    )
