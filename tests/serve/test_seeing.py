"""What a server of real processes tells: metrics that survive killed processes, the live line, log, traces, shadow."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local import artifact
from prometheus_client.parser import text_string_to_metric_families
from servers import Running, start_server
from test_keys import line as key_line

KEY = "alpha"


class Collector(http.server.BaseHTTPRequestHandler):
    heard: list[bytes] = []  # noqa: RUF012  # there is one

    def do_POST(self) -> None:
        self.heard.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeing")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    base = tmp_path_factory.getbasetemp()
    (folder / "keys").write_text(key_line("me", KEY))
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        with start_server(
            f"minilm={artifact(base, 'embed')}", "--fronts", "2", "--price", "3.6/h", "--live",
            "--log", folder / "log", "--api-keys", folder / "keys", "--otlp", f"http://127.0.0.1:{collector.server_port}",
            "--shadow", f"{artifact(base, 'other-embed')}:100%", env={"OTEL_BSP_SCHEDULE_DELAY": "100"},
        ) as running:  # fmt: skip
            yield running
        collector.shutdown()


def ask(server: Running, path: str, body: Any = None) -> bytes:
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(server.url + path, data, headers), timeout=30) as answer:
        return bytes(answer.read())


def embed(server: Running, count: int) -> None:
    for _ in range(count):
        ask(server, "/encast/v1/embed", {"texts": ["a cat", "two dogs"]})


def metric(server: Running, name: str, **labels: str) -> float:
    text = ask(server, "/metrics").decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"encast_{name}" and labels.items() <= sample.labels.items()
    )


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_counts_survive_killed_fronts_and_engines(server: Running) -> None:
    before = metric(server, "texts_total", model="minilm")
    embed(server, 20)
    until(lambda: metric(server, "texts_total", model="minilm") == before + 40, "the texts were not counted")
    # What is counted within the last 250 ms before its end, a process takes with it.
    until(lambda: metric(server, "batches_total", model="minilm") >= 20, "the batches were not counted")
    for module in ("front", "engine"):
        pid = server.children(module)[0]
        os.kill(pid, signal.SIGKILL)
        until(lambda m=module, p=pid: p not in server.children(m) and len(server.children(m)) == 2, "none was started")  # type: ignore[misc]
    until(lambda: metric(server, "ready") == 1, "not ready")
    embed(server, 5)
    until(lambda: metric(server, "texts_total", model="minilm") >= before + 50, "the texts were not counted")
    assert metric(server, "texts_total", model="minilm") == before + 50
    assert metric(server, "restarts_total", process="front") == 1
    assert metric(server, "restarts_total", process="engine") == 1
    until(lambda: metric(server, "batches_total", model="minilm") >= 25, "the batches were not counted")
    assert metric(server, "model_info", model="minilm", task="embed") == 1
    for process in ("supervisor", "front-0", "front-1", "engine-minilm"):
        memory = lambda p=process: metric(server, "process_resident_memory_bytes", process=p)  # noqa: E731
        until(lambda m=memory: m() > 1e6, f"no memory of {process}")  # type: ignore[misc]


def test_the_live_line_and_the_page(server: Running) -> None:
    embed(server, 5)
    server.wait_for_line("err", r"[1-9][\d,]* inferences/s .* p50 \S+ ms .*per million")
    stats = json.loads(ask(server, "/encast/v1/stats"))
    assert stats["minute"]["texts_s"] > 0
    assert stats["ready"] is True
    assert [(one["name"], one["labels"]) for one in stats["models"]] == [("minilm", 0)]
    with urllib.request.urlopen(server.url + "/") as page:  # without a key
        assert b"<title>encast</title>" in page.read()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(server.url + "/metrics")


def test_the_shadow_is_compared(server: Running) -> None:
    embed(server, 3)
    until(lambda: metric(server, "shadow_compared_total", model="minilm") >= 3, "nothing was compared")
    assert metric(server, "shadow_drift_sum", model="minilm", measure="cosine_distance") > 0.01
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in server.children("engine")} == {os.nice(0), 19}


def test_traces_reach_the_collector(server: Running) -> None:
    embed(server, 1)
    until(lambda: any(b"encast.embed" in data for data in Collector.heard), "no span came")


def test_the_log_is_opened_anew_after_sighup(server: Running, folder: Path) -> None:
    embed(server, 1)

    def lines_of(name: str) -> list[Any]:
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in (folder / name).read_text().splitlines()]
        return []

    os.kill(server.children("front")[0], signal.SIGKILL)
    until(lambda: any(line["event"] == "warning" for line in lines_of("log")), "no end of a front was logged")
    until(lambda: metric(server, "ready") == 1, "not ready")
    (folder / "log").rename(folder / "log.1")
    lines = len(server.out)
    server.signal(signal.SIGHUP)
    server.wait_for_line("out", "reloaded", after=lines)
    embed(server, 1)

    until(lambda: any(line["event"] == "request" for line in lines_of("log")), "nothing was logged")
    requests = [
        line for line in lines_of("log.1") if line["event"] == "request" and line["operation"] == "encast.embed"
    ]
    assert {line["key"] for line in requests} == {"me"}
    assert {line["event"] for line in lines_of("log.1")} == {"server", "warning", "request"}
    assert not re.search("two dogs|alpha", (folder / "log.1").read_text() + (folder / "log").read_text())
