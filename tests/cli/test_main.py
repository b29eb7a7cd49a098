"""The front door: verbs, exit codes, errors."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Annotated, Any

import pytest
import typer

from encast.cli import main as front
from encast.errors import ArtifactError


def _verb(monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> None:
    def command(count: Annotated[int, typer.Option(help="A number.")] = 1) -> None:
        """Does nothing much."""
        if error is not None:
            raise error
        print("count", count)

    module: Any = types.ModuleType("fake_verb")
    module.command = command
    monkeypatch.setitem(sys.modules, "fake_verb", module)
    monkeypatch.setitem(front.VERBS, "fake", ("fake_verb:command", "A verb for tests."))


def test_a_verb_runs_with_its_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _verb(monkeypatch, None)
    assert front.main(["fake", "--count", "3"]) == 0
    assert capsys.readouterr().out == "count 3\n"
    assert front.main(["fake", "--help"]) == 0
    assert "Does nothing much." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ArtifactError("x.encast is damaged"), 2, "encast: error: x.encast is damaged\n"),
        (KeyboardInterrupt(), 130, "encast: interrupted\n"),
        (KeyboardInterrupt("3 rows are kept"), 130, "encast: interrupted; 3 rows are kept\n"),
        (MemoryError(), 2, "out of memory"),
        (OSError(28, "No space left on device"), 2, "encast: error: No space left on device\n"),
        (PermissionError(13, "Permission denied", "a/b"), 2, "encast: error: a/b: Permission denied\n"),
        (ZeroDivisionError("oops"), 1, "ZeroDivisionError: oops\nencast: this is a defect"),
        (ArtifactError("caf\u00e9 \ud83d"), 2, "\\ud83d"),
    ],
    ids=repr,
)
def test_errors_become_messages_and_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, message: str
) -> None:
    _verb(monkeypatch, error)
    assert front.main(["fake"]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert front.main(["--traceback", "fake"]) == code
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["runn"], ["run"], ["fake", "--count", "x"], ["fake", "--nope"], []])
def test_wrong_usage_is_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    _verb(monkeypatch, None)
    assert front.main(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert front.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in front.VERBS)


@pytest.mark.parametrize("verb", sorted(front.VERBS))
def test_every_verb_has_help_and_json(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert front.main([verb, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_the_overview_imports_no_verb() -> None:
    program = (
        "import sys\nfrom encast.cli.main import main\nmain(['--help'])\n"
        "heavy = {'numpy', 'tokenizers', 'torch', 'pyarrow'}\n"
        "print(sorted(heavy.intersection(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)
    assert done.stderr.strip() == b"[]"


@pytest.mark.parametrize(
    ("streams", "code", "message"),
    [
        ("<&-", 0, ""),
        (">&-", 2, "standard output is closed"),
        (">/dev/full", 2, "No space left"),
        ("<&- 2>&-", 0, ""),
        ("<&- >&- 2>&-", 2, ""),
    ],
)
def test_standard_streams_that_are_closed_or_full(streams: str, code: int, message: str) -> None:
    shell = f'"$0" -m encast.cli.main kernels {streams}'
    done = subprocess.run(["/bin/sh", "-c", shell, sys.executable], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "defect" not in done.stderr
    assert "Exception ignored" not in done.stderr
