"""KServe over gRPC: the bytes that its specification asks for, and a server that speaks it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from stub_server import vector

from encast.errors import InputError, ResourceError
from encast.loadtest import ClosedLoop, Plan, Result, Source, run
from encast.loadtest.answers import BadAnswerError, Target
from encast.loadtest.kserve_grpc import decode, encode, text_input

grpc = pytest.importorskip("grpc", reason="pip install 'encast[serve]'")
messages = pytest.importorskip("encast.kserve.messages_pb2")

TEXTS = Source("texts", ["a", "b", "c"])
# By hand, after the numbers of the fields in open_inference_grpc.proto.
REQUEST = b"\x0a\x01m\x2a\x12" + b"\x0a\x01w\x12\x05BYTES\x1a\x01\x01\x2a\x03\x42\x01a"
OUTPUT = b"\x2a\x0d" + b"\x0a\x01e\x12\x04FP32\x1a\x02\x01\x02"
NUMBERS = struct.pack("<2f", 0.5, -1.0)


def test_the_bytes_of_the_protocol() -> None:
    assert encode(Target("m", "w"), ["a"]) == REQUEST
    assert decode(OUTPUT + b"\x32\x08" + NUMBERS, 1).found == [NUMBERS]
    contents = b"\x2a\x0a\x32\x08" + NUMBERS
    assert decode(OUTPUT.replace(b"\x2a\x0d", b"\x2a\x19") + contents, 1).found == [NUMBERS]
    metadata = b"\x0a\x01m\x22\x08\x0a\x01i\x12\x03INT\x22\x0a\x0a\x01w\x12\x05BYTES"
    assert text_input(metadata) == "w"
    assert text_input(metadata[:13]) is None


@pytest.mark.parametrize(
    "body", [b"", b"\xff\xff", OUTPUT, OUTPUT + b"\x32\x04abcd", OUTPUT + b"\x32\xff\xff\xff\x7fa"]
)
def test_what_is_no_answer(body: bytes) -> None:
    with pytest.raises(BadAnswerError):
        decode(body, 1)
    with pytest.raises(BadAnswerError, match="for 2 texts"):
        decode(OUTPUT + b"\x32\x08" + NUMBERS, 2)


class Server:
    """``fail``: aborts the call to the n-th request, where it wants to."""

    url = ""
    fail: Callable[[int, Any], None] = staticmethod(lambda number, context: None)

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.metadata: dict[str, str] = {}

    def infer(self, body: bytes, context: Any) -> bytes:
        request = messages.ModelInferRequest.FromString(body)
        self.asked.append(request)
        self.metadata = dict(context.invocation_metadata())
        self.fail(len(self.asked) - 1, context)
        response = messages.ModelInferResponse()
        texts = request.inputs[0].contents.bytes_contents
        response.outputs.add(name="ids", datatype="INT64", shape=[1])
        response.outputs.add(name="embedding", datatype="FP32", shape=[len(texts), 8])
        response.raw_output_contents.extend([b"12345678", b"".join(vector(one.decode()).tobytes() for one in texts)])
        return bytes(response.SerializeToString())

    def about(self, body: bytes, context: Any) -> bytes:
        if messages.ModelMetadataRequest.FromString(body).name != "m":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such model")
        response = messages.ModelMetadataResponse()
        response.inputs.add(name="text", datatype="BYTES")
        return bytes(response.SerializeToString())


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    methods = {"ModelInfer": made.infer, "ModelMetadata": made.about}
    handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
    running = grpc.server(ThreadPoolExecutor(4))
    running.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers)])
    made.url = f"http://127.0.0.1:{running.add_insecure_port('127.0.0.1:0')}"
    running.start()
    yield made
    running.stop(None).wait()


def loaded(server: Server, load: ClosedLoop, **options: Any) -> Result:
    return run(Plan(server.url, [TEXTS], load, **{"protocol": "kserve-grpc", "model": "m", "warmup": 1, **options}))


def test_answers_are_checked(server: Server, tmp_path: Path) -> None:
    reference = tmp_path / "reference.jsonl"
    rows = [[float(number) for number in vector(str(text))] for text in TEXTS.rows]
    reference.write_text("".join(json.dumps({"embedding": row}) + "\n" for row in rows))
    options = {"batch": 2, "reference": [str(reference)], "headers": {"Authorization": "Bearer key"}}
    result = loaded(server, ClosedLoop(2, 5), **options)
    assert not result.failed
    assert result.to_json()["texts"] == 20
    assert server.asked[1].inputs[0].name == "text"
    assert server.metadata["authorization"] == "Bearer key"
    rows[1][0] += 1
    reference.write_text("".join(json.dumps({"embedding": row}) + "\n" for row in rows))
    assert loaded(server, ClosedLoop(1, 3), **options).errors == {"wrong answer": 2}


def test_errors_by_kind(server: Server) -> None:
    def fail(number: int, context: Any) -> None:
        if number == 1:
            context.set_trailing_metadata([("retry-after", "3")])
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        if number == 2:
            context.abort(grpc.StatusCode.INTERNAL, "broken")
        if number == 3:
            context.abort(grpc.StatusCode.UNAVAILABLE, "draining")

    server.fail = fail
    result = loaded(server, ClosedLoop(1, 5))
    assert result.errors == {"gRPC INTERNAL": 1, "gRPC UNAVAILABLE: draining": 1}
    assert result.examples["gRPC INTERNAL"] == "broken"
    assert result.to_json()["requests"]["rejected"] == 1
    assert list(result.retry_after) == [3]
    assert len(result.answered) == 2


def test_what_is_said_before_the_test(server: Server) -> None:
    with pytest.raises(InputError, match="give --model"):
        loaded(server, ClosedLoop(1, 1), model=None)
    with pytest.raises(InputError, match="metadata of x: gRPC NOT_FOUND: no such model"):
        loaded(server, ClosedLoop(1, 1), model="x")
    server.url += "/path"
    with pytest.raises(InputError, match="gRPC has no paths"):
        loaded(server, ClosedLoop(1, 1))
    server.url = "http://127.0.0.1:9"
    with pytest.raises(ResourceError, match="is a server running there"):
        loaded(server, ClosedLoop(1, 1), timeout=5.0)
