"""API keys: who is let in, and what a file of keys may hold."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from encast.errors import InputError
from encast.serve.keys import Keys


def line(name: str, key: str) -> str:
    return f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()}\n"


def keys(path: Path, text: str, mode: int = 0o600, warnings: list[str] | None = None) -> Keys:
    path.write_text(text)
    path.chmod(mode)
    return Keys(path, ([] if warnings is None else warnings).append)


def test_a_key_gives_its_name(tmp_path: Path) -> None:
    text = "# who may ask\n\n" + line("search", "alpha") + "  " + line("search", "new alpha") + line("häns-2", "ßecret")
    found = keys(tmp_path / "keys", text)
    assert found.authorise("Bearer alpha") == "search"
    assert found.authorise("bearer  new alpha ") == "search"
    # A server reads a header's bytes as latin-1.
    assert found.authorise("Bearer " + "ßecret".encode().decode("latin-1")) == "häns-2"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "alpha", "Basic alpha", "Bearer beta", "Bearer Alpha", "Bearer \u20ac"]
)
def test_others_are_refused(tmp_path: Path, header: str | None) -> None:
    assert keys(tmp_path / "keys", line("search", "alpha")).authorise(header) is None


def test_the_hash_is_no_key(tmp_path: Path) -> None:
    text = line("search", "alpha")
    assert keys(tmp_path / "keys", text).authorise(f"Bearer {text.split(':')[1].strip()}") is None


def test_all_keys_are_compared_whichever_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = keys(tmp_path / "keys", line("a", "1") + line("b", "2") + line("c", "3"))
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return one == other

    monkeypatch.setattr("encast.serve.keys.hmac.compare_digest", compare)
    for key, name in (("1", "a"), ("3", "c"), ("4", None)):
        compared.clear()
        assert found.authorise(f"Bearer {key}") == name
        assert len(compared) == 3


@pytest.mark.parametrize(
    "wrong", ["alpha", "search alpha", "search sha256:12", "search md5:" + "0" * 64, "a b sha256:"]
)
def test_a_wrong_line_is_named_and_not_shown(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(InputError, match=r"keys, line 3: give NAME sha256:HEX") as caught:
        keys(tmp_path / "keys", f"# keys\n{line('search', 'x')}{wrong}\n")
    assert "alpha" not in str(caught.value)


def test_files_that_cannot_serve(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no key"):
        keys(tmp_path / "keys", "# none yet\n")
    with pytest.raises(InputError, match="No such file"):
        Keys(tmp_path / "absent", print)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="not UTF-8"):
        Keys(tmp_path / "binary", print)


def test_a_reload_that_fails_changes_nothing(tmp_path: Path) -> None:
    found = keys(tmp_path / "keys", line("old", "1"))
    (tmp_path / "keys").write_text(line("new", "2"))
    found.reload()
    assert (found.authorise("Bearer 1"), found.authorise("Bearer 2")) == (None, "new")
    (tmp_path / "keys").write_text("nonsense")
    with pytest.raises(InputError):
        found.reload()
    assert found.authorise("Bearer 2") == "new"


def test_a_file_that_everybody_reads_is_mentioned(tmp_path: Path) -> None:
    warnings: list[str] = []
    keys(tmp_path / "keys", line("a", "1"), 0o640, warnings)
    assert warnings == []
    keys(tmp_path / "keys", line("a", "1"), 0o644, warnings)
    assert len(warnings) == 1
    assert "chmod o-r" in warnings[0]
