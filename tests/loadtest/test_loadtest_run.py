"""Loads against a server that answers as each test wants: what is counted, and from when."""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stub_server import Asked, Reply, Stub, vector

from encast.errors import InputError, ResourceError
from encast.loadtest import ClosedLoop, OpenLoop, Plan, Ramp, Result, Source, of_lengths, run

TEXTS = Source("texts", [f"text {number}" for number in range(10)])


def loaded(stub: Stub, load: Any, **options: Any) -> Result:
    return run(Plan(stub.url, **{"sources": [TEXTS], "load": load, "warmup": 1, **options}))


def regular(count: int, milliseconds: float) -> OpenLoop:
    return OpenLoop([round(number * milliseconds * 1e6) for number in range(count)], {"trace": "t", "seconds": 1.0})


def test_a_closed_loop_sends_as_many_requests_as_asked_for(stub: Stub) -> None:
    result = loaded(stub, ClosedLoop(4, 6), batch=3, warmup=5)
    assert len(stub.asked) == 5 + 24
    assert result.model == "stub"
    assert len(result.answered) == 24
    assert not result.failed
    found = result.to_json()
    assert found["texts"] == 72
    assert found["tokens_per_s"] == pytest.approx(72 * 5 / found["seconds"])
    assert found["requests"] == {"sent": 24, "answered": 24, "rejected": 0, "failed": 0, "unfinished": 0}
    assert found["latency_from"] == "send"
    assert any("hides stalls" in warning for warning in result.warnings)
    json.dumps(found)


def test_clients_wait_for_their_answers(stub: Stub) -> None:
    stub.reply = lambda number, asked: Reply(seconds=0.01)
    loaded(stub, ClosedLoop(5, 4))
    assert stub.most_at_once == 5


def test_a_closed_loop_ends_after_its_seconds(stub: Stub) -> None:
    stub.reply = lambda number, asked: Reply(seconds=0.01)
    result = loaded(stub, ClosedLoop(2, seconds=0.3))
    assert result.seconds >= 0.3
    assert len(result.answered) >= 2


def test_texts_go_in_their_order_and_again(stub: Stub) -> None:
    loaded(stub, ClosedLoop(1, 7), batch=4)
    inputs = [asked.document["input"] for asked in stub.asked[1:]]
    flat = [text for given in inputs for text in given]
    assert flat == [f"text {number % 10}" for number in range(28)]


def test_latency_is_from_the_time_at_which_a_request_was_due(stub: Stub) -> None:
    """A server that stops for a while: who was due then waited for it, though the stop hit only one request."""

    def reply(number: int, asked: Asked) -> Reply:
        return Reply(seconds=0.4 if number == 5 else 0.0)

    stub.reply = reply
    stub.one_at_a_time()
    result = loaded(stub, regular(100, 5.0))
    latency = np.sort(result.answered.responses.latency) / 1e6
    assert result.to_json()["latency_from"] == "due"
    assert latency[-1] >= 399
    # Of the 400 ms, 80 requests were due: all waited for what was left of it.
    assert (latency > 100).sum() >= 50
    stub.asked.clear()
    closed = loaded(stub, ClosedLoop(1, 100)).answered.responses.latency / 1e6
    assert (closed > 100).sum() < 10, "and a closed loop hides it"


def test_who_waits_for_a_connection_waits(stub: Stub) -> None:
    stub.reply = lambda number, asked: Reply(seconds=0.05)
    result = loaded(stub, regular(10, 0.1), connections=1)
    assert stub.most_at_once == 1
    assert result.answered.responses.latency.max() / 1e6 >= 10 * 50 - 1
    assert result.answered.responses.wait.max() / 1e6 >= 9 * 50 - 1
    assert any("left" in warning for warning in result.warnings)


def test_requests_leave_no_earlier_than_they_are_due(stub: Stub) -> None:
    """Event loops round their sleeps to milliseconds, either way."""
    result = loaded(stub, regular(200, 3.3))
    assert len(result.answered) == 200
    assert result.columns.responses.wait.min() >= 0


def test_rejections_are_counted_apart(stub: Stub) -> None:
    def reply(number: int, asked: Asked) -> Reply | None:
        if number % 4 == 1:
            return Reply(429, b"full", {"Retry-After": str(number % 3)})
        said = "nan" if number > 20 else "Wed, 21 Oct 2026 07:28:00 GMT"
        return Reply(429, b"", {"Retry-After": said}) if number % 4 == 2 else None

    stub.reply = reply
    result = loaded(stub, ClosedLoop(2, 20))
    found = result.to_json()
    assert found["requests"]["answered"] == 20
    assert found["requests"]["rejected"] == 20
    assert found["errors"] == {}
    assert found["rejected"]["retry_after_s"] == [0.0, 2.0]
    assert found["rejected"]["latency_ms"]["max"] > 0
    assert found["texts"] == 20
    assert not result.failed
    assert sum(found["by_second"]["rejected"]) == 20


def test_errors_by_kind(stub: Stub) -> None:
    replies = {
        1: Reply(500, b'{"error": "out of\nmemory"}'),
        2: Reply(503, b"later"),
        3: Reply(reset=True),
        4: Reply(body=b"no json"),
        5: Reply(body=b'{"data": []}'),
        6: Reply(302, headers={"Location": "/elsewhere"}),
        7: Reply(seconds=1.0),
        8: Reply(body=b'{"data": [{"index": 0, "embedding": []}]}'),
    }
    stub.reply = lambda number, asked: replies.get(number)
    result = loaded(stub, ClosedLoop(1, 10), timeout=0.3)
    assert result.errors == {
        "HTTP 500": 1,
        "HTTP 503": 1,
        "HTTP 302": 1,
        "connection reset": 1,
        "bad answer": 3,
        "timeout": 1,
    }
    assert result.failed
    assert len(result.answered) == 2
    assert result.examples["HTTP 500"] == '{"error": "out of memory"}'
    assert len(stub.asked) == 11, "nothing is sent twice"


def test_a_server_that_goes_away(stub: Stub) -> None:
    def reply(number: int, asked: Asked) -> Reply | None:
        if number < 3:
            return None
        stub.close()
        return Reply(reset=True)

    stub.reply = reply
    result = loaded(stub, ClosedLoop(1, 9))
    assert result.errors == {"connection reset": 1, "connection refused": 6}
    assert len(result.answered) == 2


def test_several_files_in_turn(stub: Stub) -> None:
    """Half questions, half paragraphs, and paragraphs take longer."""
    long = Source("paragraphs", ["a paragraph"] * 3)

    def reply(number: int, asked: Asked) -> Reply:
        return Reply(seconds=0.02 if asked.document["input"] == ["a paragraph"] else 0.0)

    stub.reply = reply
    result = loaded(stub, ClosedLoop(1, 40), sources=[TEXTS, long])
    found = result.by_source()
    assert {name: one["answered"] for name, one in found.items()} == {"texts": 20, "paragraphs": 20}
    assert found["paragraphs"]["latency_ms"]["p50"] >= 20
    assert found["texts"]["latency_ms"]["p50"] < found["paragraphs"]["latency_ms"]["p50"]


@pytest.mark.serial("the rate that is served depends on who else uses the processors")
def test_a_ramp_finds_where_the_server_breaks(stub: Stub) -> None:
    """5 ms each, one at a time: at most 200 a second."""
    stub.reply = lambda number, asked: Reply(seconds=0.005)
    stub.one_at_a_time()
    result = loaded(stub, Ramp(60, 660, 4.2, steps=6))
    assert [step.rate for step in result.steps[:2]] == [60, 180]
    assert result.served_rate in (60, 180)
    assert [step.served for step in result.steps[-2:]] == [False, False]
    assert len(result.steps) < 6, "it ends where two in a row are not served"
    assert result.steps[-1].answered_rate < 205
    assert result.to_json()["served_rate"] == result.served_rate


def test_a_ramp_to_a_limit(stub: Stub) -> None:
    def reply(number: int, asked: Asked) -> Reply:
        return Reply(seconds=0.15 if stub.at_once > 3 else 0.001)

    stub.reply = reply
    result = loaded(stub, Ramp(10, 4000, 1.0, steps=2, limit_ms=0.01))
    assert [step.served for step in result.steps] == [False, False]
    assert result.served_rate is None


def test_a_ramp_counts_rejections_as_not_served(stub: Stub) -> None:
    stub.reply = lambda number, asked: Reply(429) if number and number % 10 == 0 else None
    result = loaded(stub, Ramp(100, 200, 0.8, steps=2))
    assert [step.served for step in result.steps] == [False, False]
    assert result.steps[0].rejected == 4


def reference(folder: Path, records: list[dict[str, Any]]) -> list[str]:
    file = folder / "reference.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return [str(file)]


def known(text: str) -> list[float]:
    return [float(number) for number in vector(text)]


@pytest.mark.parametrize("protocol", ["openai", "openai-floats", "tei-embed", "kserve"])
def test_answers_are_checked_to_the_bit(stub: Stub, tmp_path: Path, protocol: str) -> None:
    rows = [{"row": number + 1, "embedding": known(str(text))} for number, text in enumerate(TEXTS.rows)]
    options = {"protocol": protocol, "batch": 3}
    assert not loaded(stub, ClosedLoop(2, 10), reference=reference(tmp_path, rows), **options).failed
    close = float(np.nextafter(np.float32(rows[7]["embedding"][2]), np.float32(9)))  # type: ignore[index]
    rows[7]["embedding"][2] = close  # type: ignore[index]
    result = loaded(stub, ClosedLoop(1, 10), reference=reference(tmp_path, rows), **options)
    assert result.errors == {"wrong answer": 3}, "each request with the eighth text"
    assert result.failed
    assert result.first_wrong.startswith("texts, row 8, 'text 7': number 3 of 8 is ")
    assert result.to_json()["texts"] == 21
    files = reference(tmp_path, rows)
    assert not loaded(stub, ClosedLoop(1, 10), reference=files, tolerance=1e-6, **options).failed


def test_a_reference_by_text(stub: Stub, tmp_path: Path) -> None:
    rows = [{"text": text, "embedding": known(str(text))} for text in reversed(["more", *TEXTS.rows])]
    assert not loaded(stub, ClosedLoop(1, 10), reference=reference(tmp_path, rows)).failed
    with pytest.raises(InputError, match=r'no answer to "text 9" of texts'):
        loaded(stub, ClosedLoop(1, 10), reference=reference(tmp_path, rows[1:]))
    unnamed = [{"row": 1, "embedding": [1.0]}] * 9
    with pytest.raises(InputError, match="9 answers to 10 texts"):
        loaded(stub, ClosedLoop(1, 10), reference=reference(tmp_path, unnamed))
    with pytest.raises(InputError, match=r"reference\.jsonl:2: no embedding"):
        loaded(stub, ClosedLoop(1, 10), reference=reference(tmp_path, [rows[0], {"embedding": ["x"]}]))


def test_the_sign_of_zero_is_a_bit(stub: Stub, tmp_path: Path) -> None:
    body = json.dumps({"data": [{"index": 0, "embedding": [0.0, 1.0]}]}).encode()
    stub.reply = lambda number, asked: Reply(body=body)
    for zero, tolerance, wrong in ((0.0, 0.0, {}), (-0.0, 0.0, {"wrong answer": 3}), (-0.0, 1e-9, {})):
        files = reference(tmp_path, [{"embedding": [zero, 1.0]}] * 10)
        assert loaded(stub, ClosedLoop(1, 3), reference=files, tolerance=tolerance).errors == wrong


def test_an_answer_that_is_not_a_number_is_wrong(stub: Stub, tmp_path: Path) -> None:
    bad = base64.b64encode(np.full(8, np.nan, np.float32).tobytes()).decode()
    body = json.dumps({"data": [{"index": 0, "embedding": bad}]}).encode()
    stub.reply = lambda number, asked: Reply(body=body)
    rows = [{"row": 1, "embedding": known(str(text))} for text in TEXTS.rows]
    result = loaded(stub, ClosedLoop(1, 3), reference=reference(tmp_path, rows), tolerance=1e9)
    assert result.errors == {"wrong answer": 3}


def test_what_the_server_refuses_is_said_before_the_test(stub: Stub) -> None:
    stub.reply = lambda number, asked: Reply(401, b"who are you?")
    with pytest.raises(InputError, match=r"HTTP 401: who are you\?.*--api-key"):
        loaded(stub, ClosedLoop(1, 1))
    stub.reply = lambda number, asked: Reply(body=b"[]")
    with pytest.raises(InputError, match="no answer of --protocol openai"):
        loaded(stub, ClosedLoop(1, 1))
    with pytest.raises(InputError, match=r"metadata of another: HTTP 404"):
        loaded(stub, ClosedLoop(1, 1), protocol="kserve", model="another")
    with pytest.raises(InputError, match="names no model; give the address without /v1"):
        run(Plan(f"{stub.url}/v1", [TEXTS], ClosedLoop(1, 1)))
    assert len(stub.asked) == 2


def test_a_server_that_is_busy_is_tested(stub: Stub) -> None:
    stub.reply = lambda number, asked: Reply(503) if number == 0 else None
    assert not loaded(stub, ClosedLoop(1, 1)).failed


@pytest.mark.parametrize("model", [None, "stub"])
def test_nobody_there(stub: Stub, model: str | None) -> None:
    with pytest.raises(ResourceError, match="connection refused; is a server running there"):
        run(Plan("http://127.0.0.1:9", [TEXTS], ClosedLoop(1, 1), model=model))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"url": "127.0.0.1:80"}, "no address of a server"),
        ({"url": "ftp://x"}, "no address of a server"),
        ({"url": "http://[::1"}, "no address of a server"),
        ({"url": "http://x:99999"}, "no address of a server"),
        ({"url": "http://x/?a=b"}, "no address of a server"),
        ({"tolerance": float("nan")}, "no number from 0"),
        ({"protocol": "soap"}, "'soap'; openai, .* are known"),
        ({"batch": 0}, "above 0"),
        ({"sources": [TEXTS, TEXTS]}, "give each source once"),
        ({"sources": []}, "needs texts"),
    ],
)
def test_plans_that_make_no_sense(stub: Stub, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        run(Plan(**{"url": stub.url, "sources": [TEXTS], "load": ClosedLoop(1, 1), **options}))


def test_headers_are_sent(stub: Stub) -> None:
    loaded(stub, ClosedLoop(1, 1), headers={"Authorization": "Bearer key", "X-Mine": "1"}, model="m")
    asked = stub.asked[-1]
    assert asked.headers["authorization"] == "Bearer key"
    assert asked.headers["x-mine"] == "1"
    assert asked.headers["content-type"] == "application/json"
    assert asked.document["model"] == "m"


def test_tokens_may_come_as_a_header(stub: Stub) -> None:
    stub.reply = lambda number, asked: Reply(headers={"x-tokens": "11"})
    found = loaded(stub, ClosedLoop(1, 4), protocol="tei-embed").to_json()
    assert found["tokens_per_s"] == pytest.approx(44 / found["seconds"])
    for said in ({}, {"x-tokens": "many"}, {"x-tokens": "9" * 40}, {"x-tokens": "-4"}):
        stub.reply = lambda number, asked, said=said: Reply(headers=said)  # type: ignore[misc]
        assert loaded(stub, ClosedLoop(1, 4), protocol="tei-embed").to_json()["tokens_per_s"] is None


@pytest.mark.parametrize("load", [ClosedLoop(2, 100_000), OpenLoop.poisson(50, 600)], ids=["closed", "open"])
def test_an_interrupt_leaves_the_figures_so_far(stub: Stub, load: Any) -> None:
    def reply(number: int, asked: Asked) -> Reply:
        if number == 16:
            os.kill(os.getpid(), signal.SIGINT)
        return Reply(seconds=60.0 if number >= 15 else 0.0)

    stub.reply = reply
    own = signal.signal(signal.SIGTERM, lambda *_: None)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        result = loaded(stub, load)
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    finally:
        signal.signal(signal.SIGTERM, own)
    assert result.seconds < 60
    assert result.interrupted == "SIGINT"
    assert len(result.answered) == 14
    assert result.unfinished >= 2
    assert any("ended early by SIGINT" in warning for warning in result.warnings)


def test_a_test_in_a_thread(stub: Stub) -> None:
    found: list[Result] = []
    thread = threading.Thread(target=lambda: found.append(loaded(stub, ClosedLoop(1, 3))))
    thread.start()
    thread.join()
    assert len(found[0].answered) == 3


def test_a_line_a_second(stub: Stub) -> None:
    lines: list[str] = []
    run(Plan(stub.url, [of_lengths("8:4")], regular(57, 20.0), warmup=1), lines.append)
    assert lines[0].startswith("   1 s, ")
