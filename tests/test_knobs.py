"""The list of environment variables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from encast import knobs
from encast.errors import InputError

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("ENCAST_ISA", "avx512vnni", "avx512vnni"),
        ("ENCAST_THREADS", "4", 4),
        ("ENCAST_THREADS", " 12 ", 12),
        ("ENCAST_SPIN_US", "0", 0),
        ("ENCAST_IDLE_SPIN_US", "7", 7),
        ("ENCAST_BLOCK_ROWS", "16", 16),
        ("ENCAST_STREAM_ROWS", "1", 1),
        ("ENCAST_CHUNK_TOKENS", "1048576", 1048576),
        ("ENCAST_COPY_WEIGHTS", "1", True),
        ("ENCAST_COPY_WEIGHTS", "0", False),
    ],
)
def test_values(monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object) -> None:
    monkeypatch.setenv(name, text)
    assert knobs.get(name) == value  # type: ignore[call-overload]


@pytest.mark.parametrize("knob", knobs.KNOBS, ids=lambda knob: knob.name)
def test_unset_and_empty_mean_the_default(knob: knobs.Knob[object]) -> None:
    assert knob.read({}) == knob.default
    assert knob.read({knob.name: " "}) == knob.default


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ENCAST_THREADS", "0"),
        ("ENCAST_THREADS", "-1"),
        ("ENCAST_THREADS", "4097"),
        ("ENCAST_THREADS", "two"),
        ("ENCAST_THREADS", "1.5"),
        ("ENCAST_THREADS", "٣"),  # a digit, but not ours
        ("ENCAST_THREADS", "9" * 5000),
        ("ENCAST_SPIN_US", "1000001"),
        ("ENCAST_CHUNK_TOKENS", "0"),
        ("ENCAST_BLOCK_ROWS", "15"),
        ("ENCAST_COPY_WEIGHTS", "yes"),
        ("ENCAST_ISA", "avx 2"),
    ],
)
def test_bad_values_name_the_knob_and_what_it_accepts(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(InputError, match=f"{name} accepts .+; correct it"):
        knobs.get(name)  # type: ignore[call-overload]


def test_an_unknown_name_is_a_defect() -> None:
    with pytest.raises(KeyError, match="is no knob"):
        knobs.get("ENCAST_COLOUR")  # type: ignore[call-overload]


def test_every_variable_of_the_source_is_in_the_list() -> None:
    listed = {knob.name for knob in knobs.KNOBS}
    read: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        read |= set(re.findall(r"(?:environ|getenv|knobs\.get)\W+(ENCAST_[A-Z_]+)", path.read_text(encoding="utf-8")))
    for path in (ROOT / "core").rglob("*.cc"):
        if "test" not in path.name:
            read |= set(re.findall(r'getenv\("(ENCAST_[A-Z_]+)"', path.read_text(encoding="utf-8")))
    assert read <= listed
    assert "ENCAST_ISA" in read
