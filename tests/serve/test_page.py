"""The page of a server in a real browser: it looks right at both sizes, and every task can be tried."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from chromium import EXECUTABLE, Chromium
from local import client, local_service, served

from encast.serve.keys import Keys
from encast.serve.metrics import Live, ModelInfo, Recorder, Registry
from encast.serve.operations import Protocol
from encast.serve.protocols.encast import ENCAST
from encast.serve.protocols.page import page
from encast.serve.service import Service

needs_browser = pytest.mark.skipif(EXECUTABLE is None, reason="Chromium is not installed: apt-get install chromium")
NAMES = ("embed", "embed-sparse", "rerank", "classify", "tag", "answer", "fill-mask")
HOSTILE = "<img src=x onerror=alert()>"


class Server:
    """A service of a model for every task, with its numbers."""

    def __init__(self, base: Path) -> None:
        self.registry, recorder = Registry(usd_per_hour=0.17), Recorder()
        self.service: Service = local_service(base, *NAMES)
        self.service.finished.append(recorder.finished)
        self.registry.ready = True
        self.registry.models = tuple(
            ModelInfo(one.name, one.task, one.dtype, one.sha256, len(one.session.meta.labels or ()))
            for one in self.service.models.by_name.values()
        )

        async def live() -> bytes:
            self.registry.heard_front(recorder.take())
            return msgspec.json.encode(self.registry.live())

        self.protocols: list[Protocol] = [ENCAST, page(live)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    return Server(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def url(server: Server) -> Iterator[str]:
    with served(server.service, server.protocols) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium(online=True) as opened:
        yield opened


def test_the_page_may_only_run_its_own_script_and_ask_its_own_server(server: Server) -> None:
    answer = client(server.service, server.protocols).get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in re.sub(r"http://www\.w3\.org/2000/svg", "", answer.text), "the page names another host"
    assert "innerHTML" not in answer.text


def test_stats_are_what_the_registry_says(server: Server) -> None:
    live = msgspec.json.decode(client(server.service, server.protocols).get("/encast/v1/stats").content, type=Live)
    assert [model.name for model in live.models] == list(NAMES)
    assert live.ready
    only = [ENCAST, page(server.protocols[1].operations[1].handler, html=False)]  # type: ignore[arg-type]
    assert client(server.service, only).get("/").status_code == 404


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_the_page_is_whole(browser: Chromium, url: str, width: int, dark: bool) -> None:
    browser.open(f"{url}/", width=width, dark=dark)
    browser.wait("document.querySelectorAll('#tabs button').length === 8")
    assert browser.complaints == []
    assert {one for one in browser.requests if not one.startswith("data:")} == {f"{url}/", f"{url}/encast/v1/stats"}
    assert browser.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    boxes = browser.evaluate(
        "[...document.querySelectorAll('#cards svg')].map(one => one.getBoundingClientRect())"
        ".map(box => [box.width, box.height])"
    )
    assert len(boxes) == 6
    assert all(wide > 200 and high >= 60 for wide, high in boxes)


@needs_browser
def test_charts_follow_the_traffic(browser: Chromium, url: str, server: Server) -> None:
    browser.open(f"{url}/")
    browser.wait("document.querySelectorAll('#cards .card b').length")
    with_traffic = client(server.service, server.protocols)
    shown = "document.querySelector('#cards .card b').textContent"
    deadline = time.monotonic() + 20
    while browser.evaluate(shown) in ("-", "0"):
        assert time.monotonic() < deadline, "no chart moved"
        assert with_traffic.post("/encast/v1/embed", json={"texts": ["a", "b"]}).status_code == 200
    lines = "document.querySelectorAll('#cards svg path.line')"
    assert browser.evaluate(f"{lines}[0].getAttribute('d').length") > 10
    assert browser.evaluate("document.querySelectorAll('#cards .card')[2].querySelector('b').textContent") != "-", "p50"


@needs_browser
def test_every_task_can_be_tried(browser: Chromium, url: str) -> None:
    browser.open(f"{url}/")
    browser.wait("document.querySelectorAll('#tabs button').length === 8")
    seen = {}
    texts = {"tag": "John Smith lives in 🌍 London", "fill-mask": "the [MASK] sat"}
    for task in ("embed", "embed-sparse", "classify", "rerank", "tag", "answer", "fill-mask", "tokenize"):
        browser.click(f"#tabs button[data-task='{task}']")
        if task in texts:
            browser.write("#field-a", texts[task])
        browser.click("#go")
        browser.wait("!document.querySelector('#go').disabled && document.querySelector('#result').children.length")
        assert browser.evaluate("document.querySelector('#result .error')?.textContent") is None, task
        browser.evaluate("document.querySelectorAll('#result mark small').forEach(one => one.remove())")
        seen[task] = browser.evaluate("document.querySelector('#result').innerText")
        timed = browser.evaluate("document.querySelector('#timing').textContent")
        assert ("inference" in timed) == (task != "tokenize"), timed
    assert re.match(r"-?[01]\.\d{4}\ncosine similarity\s+A = \[", seen["embed"])
    assert seen["embed-sparse"].count("token ") == 20
    assert seen["classify"].count("label ") == 3
    assert {"Photosynthesis turns light into sugar.", "Leaves hold chlorophyll."} <= set(seen["rerank"].split("\n"))
    assert "London" in seen["tag"]
    assert "score" in seen["answer"]
    assert len(re.findall(r"[01]\.\d{4}", seen["fill-mask"])) == 5
    assert "[CLS]" in seen["tokenize"]


@needs_browser
def test_marks_count_characters_as_the_server_does(browser: Chromium, url: str) -> None:
    browser.open(f"{url}/")
    spans = '[{start: 2, end: 8, label: "LOC"}]'
    assert browser.evaluate(f"marked('🌍 London', {spans}).querySelector('mark').firstChild.data") == "London"


@needs_browser
@pytest.mark.parametrize("task", ["rerank", "tokenize", "tag", "answer"])
def test_texts_never_become_markup(browser: Chromium, url: str, task: str) -> None:
    browser.open(f"{url}/")
    browser.wait("document.querySelectorAll('#tabs button').length === 8")
    browser.click(f"#tabs button[data-task='{task}']")
    field = {"rerank": "#field-documents", "answer": "#field-context"}.get(task, "#field-a")
    browser.write(field, HOSTILE)
    browser.click("#go")
    browser.wait("!document.querySelector('#go').disabled && document.querySelector('#result').children.length")
    assert browser.evaluate("document.querySelector('#result .error')?.textContent") is None
    assert browser.evaluate("document.querySelectorAll('#result img').length") == 0
    browser.evaluate("document.querySelectorAll('#result small').forEach(one => one.remove())")
    if task != "tokenize":
        assert HOSTILE in browser.evaluate("document.querySelector('#result').textContent")
    assert browser.complaints == []


@needs_browser
def test_refusals_are_shown_in_words(browser: Chromium, url: str) -> None:
    browser.open(f"{url}/")
    browser.wait("document.querySelectorAll('#tabs button').length === 8")
    browser.click("#tabs button[data-task='fill-mask']")
    browser.write("#field-a", "no mask here")
    browser.click("#go")
    assert "has no [MASK]" in browser.wait("document.querySelector('#result .error')?.textContent")


@needs_browser
def test_the_key_is_sent_and_kept_nowhere(
    browser: Chromium, server: Server, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path / "keys"
    file.write_text("me sha256:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b\n")  # "secret"
    file.chmod(0o600)
    guarded = Service(server.service.models, authorise=Keys(file, print).authorise)
    with served(guarded, server.protocols) as address:
        browser.open(f"{address}/")
        browser.wait("document.querySelector('#state').textContent === 'an API key is needed'")
        browser.write("#key", "secret")
        browser.wait("document.querySelectorAll('#tabs button').length === 8")
        browser.click("#go")
        assert browser.wait("document.querySelector('#result .big')?.textContent")
        assert browser.evaluate("document.cookie + localStorage.length + sessionStorage.length") == "00"
