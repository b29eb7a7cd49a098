"""The log: what its lines hold, and that it never holds the server up."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from full_disk import files_of_at_most
from local import client, local_service

from encast.errors import InputError
from encast.serve import logs
from encast.serve.logs import Log, QuietFormatter
from encast.serve.protocols.encast import ENCAST

TEXT = "my grandmother's secret recipe"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ask(log: Log, base: Path, **body: Any) -> None:
    service = local_service(base, "embed")
    service.finished.append(log.finished)
    client(service, [ENCAST]).post("/encast/v1/embed", json=body, headers={"x-request-id": "r-1"})


def test_a_line_a_request_without_its_texts(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    log = Log(str(tmp_path / "log"), process="front-0")
    ask(log, tmp_path_factory.getbasetemp(), texts=[TEXT])
    ask(log, tmp_path_factory.getbasetemp(), texts=["x"], model=TEXT)
    log.event("reloaded", models=["embed"])
    log.close()
    answered, refused, event = lines(tmp_path / "log")
    names = ("event", "process", "id", "operation", "protocol", "status", "model")
    assert {name: answered[name] for name in names} == {
        "event": "request", "process": "front-0", "id": "r-1", "operation": "encast.embed", "protocol": "encast",
        "status": 200, "model": "embed",
    }  # fmt: skip
    assert answered["time"].endswith("Z")
    assert answered["texts"] == 1
    assert answered["tokens"] > 2
    assert answered["total_ms"] >= answered["inference_ms"] > 0
    assert (refused["status"], refused["kind"]) == (404, "not_found")
    assert (event["event"], event["models"]) == ("reloaded", ["embed"])
    assert "grandmother" not in (tmp_path / "log").read_text()


def test_texts_when_asked_for(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    log = Log(str(tmp_path / "log"), texts=True)
    ask(log, tmp_path_factory.getbasetemp(), texts=[TEXT])
    ask(log, tmp_path_factory.getbasetemp(), texts=["x"], model=TEXT)
    log.close()
    answered, refused = lines(tmp_path / "log")
    assert json.loads(answered["body"])["texts"] == [TEXT]
    assert TEXT in refused["message"]


def test_a_file_that_was_moved_away_is_opened_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = Log(str(path))
    log.event("one")
    wait_for(log)
    path.rename(tmp_path / "log.2")
    log.event("two")
    wait_for(log)
    log.reopen()
    log.event("three")
    log.close()
    assert [line["event"] for line in lines(tmp_path / "log.2")] == ["one", "two"]
    assert [line["event"] for line in lines(path)] == ["three"]


def wait_for(log: Log) -> None:
    """Until all that was given is written."""
    done = threading.Event()
    log._queue.put(done.set)
    assert done.wait(10)


def test_a_full_disk_loses_lines_and_nothing_else(tmp_path: Path) -> None:
    dropped: list[str] = []
    log = Log(str(tmp_path / "log"), dropped=dropped.append)
    log.event("first")
    wait_for(log)
    size = (tmp_path / "log").stat().st_size
    with files_of_at_most(size + 20):
        for _ in range(5):
            log.event("lost")
        wait_for(log)
    log.event("after")
    log.close()
    assert dropped == ["error"] * 5
    first, torn, after = (tmp_path / "log").read_bytes().splitlines()
    assert json.loads(first)["event"] == "first"
    assert len(torn) == 20, "a part of a line, and then a line of its own"
    assert json.loads(after)["event"] == "after"


def test_a_reader_that_stopped_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MOST_BYTES", 1 << 20)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    dropped: list[str] = []
    log = Log(str(fifo), dropped=dropped.append)
    for _ in range(5000):  # far more than the pipe and the queue hold
        log.event("told", filling="x" * 200)
    assert 1000 < len(dropped) < 5000
    assert set(dropped) == {"full"}
    os.close(reader)  # lets the thread go


def test_several_processes_share_a_file(tmp_path: Path) -> None:
    code = (
        "import sys; from encast.serve.logs import Log; log = Log(sys.argv[1], process=sys.argv[2])\n"
        "for index in range(500): log.event('e', index=index, filling='x' * 300)\n"
        "log.close()"
    )
    path = tmp_path / "log"
    children = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in "abc"]
    assert [child.wait() for child in children] == [0, 0, 0]
    found = lines(path)
    for name in "abc":
        assert [line["index"] for line in found if line["process"] == name] == list(range(500))


def test_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    log = Log("-")
    log.event("hello")
    log.close()
    assert json.loads(capfd.readouterr().out)["event"] == "hello"


def test_a_log_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the log cannot be written: No such file"):
        Log(str(tmp_path / "absent" / "log"))


def test_a_traceback_says_where_and_not_what() -> None:
    try:
        raise ValueError(TEXT)
    except ValueError:
        record = logging.LogRecord("encast", logging.ERROR, "", 0, "a defect", None, sys.exc_info())
    quiet = QuietFormatter().format(record)
    assert "grandmother" not in quiet.replace("raise ValueError(TEXT)", "")
    assert quiet.endswith("ValueError")
    assert "test_a_traceback_says_where_and_not_what" in quiet
    record.exc_text = None
    assert QuietFormatter(texts=True).format(record).endswith(f"ValueError: {TEXT}")
