"""The verb: options, exit codes, what is printed, the page."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from stub_server import Reply, Stub, vector

from encast.cli.main import main

TEXTS = [f"text {number}" for number in range(6)]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    return str(path)


def test_a_closed_loop(stub: Stub, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["loadtest", stub.url, "--clients", "4", "--requests", "100", "--texts", file]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^400 requests, 400 texts answered in .* texts, [\d,]+ tokens a second$", out, re.MULTILINE)
    assert re.search(
        r"^ms since a request was sent +p50 +p90 +p95 +p99 +p99\.9 +max\nanswered( +[\d.]+){4} +\u2013 +[\d.]+$",
        out,
        re.MULTILINE,
    )
    assert "p99.9 needs 2,995 answers" in out
    assert "note: a closed loop hides stalls" in out
    assert re.search(r"the client used .* s of a processor", out)


def test_one_document(stub: Stub, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["loadtest", stub.url, "--rate", "100", "--seconds", "1.2", "--lengths", "16:9", "--json"]
    assert main([*command, "--protocol", "tei-embed", "--batch", "2"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["load"] == {"kind": "open", "rate": 100.0, "seconds": 1.2, "seed": 0}
    assert found["latency_from"] == "due"
    assert found["texts"] == 2 * found["requests"]["answered"] > 0
    assert "   1 s, " in captured.err


def test_a_trace(stub: Stub, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.txt"
    trace.write_text("100.0\n100.01\n100.5\n")
    assert main(["loadtest", stub.url, "--trace", str(trace), "--texts", file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"]["answered"] == 3
    assert found["load"]["seconds"] == 0.5
    assert found["seconds"] >= 0.5


def test_failed_requests_are_exit_code_3(stub: Stub, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    stub.reply = lambda number, asked: Reply(500, b"<b>oops</b>") if number == 2 else None
    page = Path(file).with_name("page.html")
    command = ["loadtest", stub.url, "--clients", "1", "--requests", "9", "--texts", file, "--warmup", "1"]
    assert main([*command, "--html", str(page)]) == 3
    assert "1 x HTTP 500, the first: <b>oops</b>" in capsys.readouterr().out
    assert "&lt;b&gt;oops" in page.read_text()
    stub.reply = lambda number, asked: Reply(429)
    assert main(command) == 3
    assert "9 rejected with 429, without Retry-After" in capsys.readouterr().out
    stub.reply = lambda number, asked: Reply(429, headers={"Retry-After": "7"}) if number % 2 else None
    assert main(command) == 0
    assert "rejected with 429; Retry-After 7 to 7 s" in capsys.readouterr().out


def test_wrong_answers_are_exit_code_3(stub: Stub, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    reference = Path(file).with_name("reference.jsonl")
    rows = [[float(number) for number in vector(text)] for text in TEXTS]
    reference.write_text("".join(f"{json.dumps({'row': 1, 'embedding': row})}\n" for row in rows))
    command = [
        "loadtest",
        stub.url,
        "--clients",
        "2",
        "--requests",
        "6",
        "--texts",
        file,
        "--reference",
        str(reference),
    ]
    assert main(command) == 0
    rows[3][0] += 1.0
    reference.write_text("".join(f"{json.dumps({'row': 1, 'embedding': row})}\n" for row in rows))
    assert main(command) == 3
    assert "2 x wrong answer, the first: " in capsys.readouterr().out
    assert main([*command, "--tolerance", "1.01"]) == 0


def test_an_interrupt(stub: Stub, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    def reply(number: int, asked: object) -> None:
        if number == 10:
            os.kill(os.getpid(), signal.SIGTERM)

    stub.reply = reply
    code = main(["loadtest", stub.url, "--rate", "50", "--seconds", "600", "--texts", file, "--warmup", "1"])
    assert code == 143
    captured = capsys.readouterr()
    assert "texts answered in" in captured.out
    assert "note: ended early by SIGTERM" in captured.out
    assert "encast: terminated; the figures are of the" in captured.err


def test_a_page_of_each_kind(stub: Stub, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vl_convert", reason="pip install 'encast[plot]'")
    pages = [tmp_path / name for name in ("closed.html", "ramp.html")]
    other = tmp_path / "paragraphs <i>.txt"
    other.write_text("a paragraph\n")
    command = ["loadtest", stub.url, "--texts", file]
    closed = ["--texts", str(other), "--clients", "2", "--requests", "40", "--html", str(pages[0])]
    assert main([*command, *closed]) == 0
    ramp = ["--ramp", "20:60", "--steps", "2", "--seconds", "1", "--limit-ms", "10000", "--html", str(pages[1])]
    assert main([*command, *ramp]) == 0
    out = capsys.readouterr().out
    assert "the highest rate that was served: " in out
    assert re.search(r"^20\.0 a second: answered \d+\.\d, p99 [\d.]+ ms: served", out, re.MULTILINE)
    first, second = (page.read_text() for page in pages)
    assert "one request in N is slower" in first
    assert "paragraphs &lt;i&gt;.txt" in first
    assert "Latency in ms over" in first
    assert "answered in time" in second
    assert "Latency in ms over" not in second
    for page in (first, second):
        assert "<script" not in page
        assert "texts/s" in page


def test_a_page_on_standard_output(stub: Stub, file: str, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vl_convert", reason="pip install 'encast[plot]'")
    command = ["loadtest", stub.url, "--texts", file, "--clients", "1", "--requests", "2", "--html", "-"]
    assert main(command) == 0
    assert capfd.readouterr().out.startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--clients", "1", "--requests", "1"], "--texts FILE, or --lengths"),
        (["--lengths", "8:1"], "no load given; give one of --clients, --rate, --ramp, --trace"),
        (["--lengths", "8:1", "--rate", "1", "--clients", "1"], "--clients and --rate given"),
        (["--lengths", "8:1", "--clients", "1"], "the requests of each or the seconds"),
        (
            ["--lengths", "8:1", "--rate", "1", "--requests", "1"],
            "--requests is for --clients; leave it out with --rate",
        ),
        (["--lengths", "8:1", "--rate", "1", "--limit-ms", "1"], "--limit-ms is for --ramp"),
        (["--lengths", "8:1", "--trace", "x", "--seconds", "1"], "--seconds is for --clients and --rate and --ramp"),
        (["--lengths", "8:1", "--ramp", "50"], "give two rates, such as 50:800"),
        (["--lengths", "8:1", "--ramp", "50:20"], "a higher one"),
        (["--lengths", "8:1", "--rate", "-1"], "give numbers above 0"),
        (["--lengths", "8", "--rate", "1"], "cannot be read as a histogram"),
        (["--texts", "/nowhere.txt", "--rate", "1"], "/nowhere.txt"),
        (["--lengths", "8:1", "--rate", "1", "--header", "x"], "give NAME:VALUE"),
        (["--lengths", "8:1", "--rate", "1", "--field", "truncate=yes"], "give NAME=JSON"),
        (["--lengths", "8:1", "--rate", "1", "--field", "truncate"], "give NAME=JSON"),
        (["--lengths", "8:1", "--rate", "1", "--field", "a=1", "--protocol", "kserve-grpc"], "leave them out"),
        (["--lengths", "8:1", "--rate", "1", "--header", "a b: c"], "'a b' holds what no header can"),
        (["--lengths", "8:1", "--rate", "1", "--api-key", "a\nb"], "the API key holds what no header can"),
        (["--lengths", "8:1", "--clients", "1", "--seconds", "nan"], "give a number above 0"),
        (["--lengths", "8:1", "--rate", "1", "--timeout", "inf"], "above 0 and finite"),
        (["--lengths", "8:1", "--ramp", "1:1e12"], "give less"),
        (["--lengths", "8:1", "--rate", "1", "--protocol", "x"], "kserve"),
        (["--lengths", "8:1", "--rate", "1", "--json", "--html", "-"], "both write to standard output"),
        (["--lengths", "8:1", "--rate", "1", "--html", "/nowhere/x.html"], "choose another --html"),
    ],
)
def test_options_that_make_no_sense(
    stub: Stub, options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["loadtest", stub.url, *options]) == 2
    assert reason in capsys.readouterr().err
    assert stub.asked == []


def test_the_key_may_come_from_the_environment(stub: Stub, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["loadtest", stub.url, "--clients", "1", "--requests", "1", "--texts", file]
    monkeypatch.setenv("ENCAST_API_KEY", "from the environment")
    assert main(command) == 0
    assert stub.asked[-1].headers["authorization"] == "Bearer from the environment"
    assert main([*command, "--api-key", "given", "--header", "X-Who: me"]) == 0
    assert stub.asked[-1].headers["authorization"] == "Bearer given"
    assert stub.asked[-1].headers["x-who"] == "me"


def test_fields_of_every_body(stub: Stub, file: str) -> None:
    command = ["loadtest", stub.url, "--clients", "1", "--requests", "1", "--texts", file, "--protocol", "tei-embed"]
    assert main([*command, "--field", "truncate=true", "--field", 'note="a=b"']) == 0
    assert stub.asked[-1].document == {"inputs": ["text 0"], "truncate": True, "note": "a=b"}


def test_rankings(stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"query": "q", "documents": ["a", "b"]}\n')
    command = ["loadtest", stub.url, "--clients", "1", "--requests", "3", "--protocol", "cohere", "--json"]
    assert main([*command, "--texts", str(rows), "--pair-column", "documents"]) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == 6
    assert main([*command, "--lengths", "8:20", "--batch", "5"]) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == 15
