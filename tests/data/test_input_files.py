"""Which files a job reads: each of them, or an error that names it."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from encast.data import open_rows, readers
from encast.data import source as sources
from encast.data.inputs import list_inputs, state_of
from encast.data.remote import reaching, reason_of, shown, with_credentials, without_credentials
from encast.errors import InputError

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))
from object_store import object_store

ODD = ["a b.txt", "c#d.txt", "e?f.txt", "g%h.txt", "%41.txt", "i+j.txt", "k&l=m.txt", "ü.txt", "A.txt"]


def rows_of(path: str) -> list[object]:
    with open_rows(path, ["text"]) as reader:
        return [row.raw for row in reader]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("pyarrow")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / "store" / "bucket").mkdir(parents=True)
    return tmp_path / "store"


def test_every_name_in_a_store_s_folder_is_that_object_s(store: Path) -> None:
    """%41.txt is not A.txt, and what stands behind # and ? belongs to the name."""
    folder = store / "bucket" / "rows of mine" / "x"
    folder.mkdir(parents=True)
    for name in ODD:
        (folder / name).write_text(name)
    with object_store(store) as how:
        url = f"s3://bucket/rows%20of%20mine?{how}"
        found = list_inputs([url])
        assert [rows_of(one.reached([url])) for one in found] == [[name] for name in sorted(ODD, key=str.encode)]
        assert len({one.name for one in found}) == len(ODD)
        # What a listing calls a file reads that file, too.
        assert rows_of(f"{found[1].name}?{how}") == ["A.txt"]


def test_folders_of_disks_are_read_whole_links_too(tmp_path: Path) -> None:
    rows, far = tmp_path / "rows", tmp_path / "far"
    (rows / "inner").mkdir(parents=True)
    (far / "deep").mkdir(parents=True)
    for path in (rows / "a.txt", rows / "inner" / "b.txt", far / "c.txt", far / "deep" / "d.txt", rows / "_x" / ".y"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(path.name)
    (rows / "linked").symlink_to(far)
    (rows / "one.txt").symlink_to(tmp_path / "file.txt")
    (tmp_path / "file.txt").write_text("file")
    (rows / "_gone").symlink_to("nowhere")
    found = [os.path.relpath(one.path, rows) for one in list_inputs([str(rows)])]
    assert found == ["a.txt", "inner/b.txt", "linked/c.txt", "linked/deep/d.txt", "one.txt"]


def _loop(rows: Path) -> None:
    (rows / "in").mkdir()
    (rows / "in" / "again").symlink_to(rows)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda rows: (rows / "l.txt").symlink_to("nowhere"), r"l\.txt: is a link to nothing; mend or remove it"),
        (lambda rows: (rows / "l").symlink_to(rows / "l"), r"rows/l: cannot be read \(Too many levels"),
        (_loop, r"in/again: is a link to a folder that it lies in"),
        (lambda rows: os.mkfifo(rows / "p.txt"), r"p\.txt: is no regular file but a pipe"),
        (lambda rows: (rows / "d.txt").symlink_to("/dev/zero"), r"d\.txt: is no regular file"),
        (lambda rows: (rows / "b.txt").symlink_to("a.txt"), r"b\.txt is the file .*a\.txt, which is named already"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, make: object, reason: str) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "a.txt").write_text("a")
    make(rows)  # type: ignore[operator]
    with pytest.raises(InputError, match=reason):
        list_inputs([str(rows)])


def test_a_folder_that_may_not_be_entered_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows" / "shut").mkdir(parents=True)
    plain = os.listdir

    def listdir(path: str) -> list[str]:
        if path.endswith("shut"):  # root may enter all
            raise PermissionError(13, "Permission denied", path)
        return plain(path)

    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(InputError, match=r"rows/shut: cannot be read \(Permission denied\)"):
        list_inputs([str(tmp_path / "rows")])


def test_pipes_are_no_input_of_a_job(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.txt")
    for ask in (lambda path: list_inputs([path]), state_of):
        with pytest.raises(InputError, match="is no regular file"):
            ask(str(tmp_path / "p.txt"))


def test_names_that_are_not_utf8_are_read_and_shown(tmp_path: Path) -> None:
    for name, format in ((b"caf\xe9.txt", "text"), (b"caf\xe9.parquet", "parquet")):
        path = os.path.join(os.fsencode(tmp_path), name)
        if format == "parquet":
            pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            pq.write_table(pa.table({"text": ["one"]}), tmp_path / "a")
            os.rename(tmp_path / "a", path)
        else:
            Path(os.fsdecode(path)).write_text("one\n")
        (one,) = list_inputs([os.fsdecode(path)])
        assert one.name == f"{tmp_path}/caf\\xe9.{format.replace('text', 'txt')}"
        assert one.name.encode()
        with open_rows(one.path, ["text"]) as reader:
            assert [row.values["text"] for row in reader] == ["one"]  # type: ignore[union-attr]
    (tmp_path / "caf\\xe9.txt").write_text("two\n")
    with pytest.raises(InputError, match=r"are both called .* in the output"):
        list_inputs([str(tmp_path)])


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("s3://bucket/a", "s3://bucket/a"),
        ("s3://key:secret@bucket/a?region=x&session_token=t", "s3://bucket/a?region=x"),
        ("s3://key:sec/ret@bucket/a", "s3://bucket/a"),
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("s3://bucket/a?endpoint_override=u:p@host", "s3://bucket/a"),
        ("abfs://box:pass@account.host/a?sas_token=t", "abfs://box@account.host/a"),
        ("gs://token@bucket/a", "gs://bucket/a"),
        ("plain@file?x", "plain@file?x"),
    ],
)
def test_credentials_are_kept_apart(url: str, kept: str) -> None:
    assert without_credentials(url) == kept
    assert with_credentials(kept, url) == url
    assert "sec" not in shown(url)
    assert "pass" not in shown(url)


def test_messages_have_no_credentials(store: Path) -> None:
    with object_store(store) as how:
        for url in (
            f"s3://KEYKEY:SECRET@bucket/absent?{how}",
            f"s3://KEYKEY:SEC/SECRET@bucket/absent?{how}",
            f"s3://KEYKEY:SECRET@bucket/a b?{how}",
            f"s3://bucket/absent?{how}&secret_key=SECRET",
            f"s3://bucket/absent?{how}&SECRETS=SECRET SECRET",
        ):
            for ask in (lambda url: list_inputs([url]), open_rows_of, state_of):
                with pytest.raises(InputError) as error:
                    ask(url)
                assert "=SECRET" not in str(error.value)
                assert ":SEC" not in str(error.value)
                assert "KEYKEY" not in str(error.value)
                assert "(None)" not in str(error.value)
    with (
        pytest.raises(InputError, match=r"cannot be read \(no entry for \*\*\* with \*\*\*\)"),
        reaching("s3://KEYKEY:SEC%2FRET@bucket/a"),
    ):
        raise OSError("no entry for KEYKEY with SEC/RET")


def open_rows_of(url: str) -> None:
    open_rows(url, ["text"], "parquet")


SIGNED = "abfs://box@account.host/rows.txt?sas_token=SECRET%2FSIGNATURE"
SAID = f"GET of https://account.host/box/{'long/' * 48}rows.txt?se=2026&sig=SECRET/SIGNATURE failed: 403"


def test_a_reason_is_cut_after_its_secrets_are_taken_out() -> None:
    for text in (SAID, "x" * 290 + "SECRET/SIGNATURE", "x" * 290 + "SECRET%2FSIGNATURE"):
        for error in (ValueError(text), OSError(5, text)):
            assert "SEC" not in reason_of(error, SIGNED)
            assert len(reason_of(error, SIGNED)) <= 300
    # A signature that came from elsewhere than the URL.
    assert reason_of(OSError(5, SAID.replace("long/", "")), "s3://bucket/a") == (
        "GET of https://account.host/box/rows.txt failed: 403"
    )


class Failing(io.RawIOBase):
    """A file that fails with ``error`` at ``begin``, or everywhere."""

    fails = False

    def __init__(self, path: Path, begin: int, error: Exception) -> None:
        self.file, self.begin, self.error = path.open("rb"), begin, error

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def readinto(self, buffer: Any) -> int:
        if self.file.tell() == self.begin:
            raise self.error
        return self.file.readinto(memoryview(buffer)[:10])

    def read(self, size: int = -1) -> bytes:
        if self.fails:
            raise self.error
        return self.file.read(size)


def fail_while_open(failing: Failing) -> None:
    with open_rows(SIGNED.replace(".txt", ".parquet"), ["text"]) as reader:
        failing.fails = True
        list(reader)


def test_a_failure_in_the_middle_of_a_read_has_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    text, table = tmp_path / "a.txt", tmp_path / "a.parquet"
    text.write_text("one\ntwo\nthree\nfour\n")
    parquet.write_table(arrow.table({"text": list(map(str, range(50_000)))}), table)
    error: Exception
    for error in (OSError(5, SAID), OSError(SAID), arrow.ArrowInvalid(SAID), arrow.ArrowException(SAID)):
        lines = io.BufferedReader(Failing(text, 10, error))
        monkeypatch.setattr(sources, "open_url", lambda url, lines=lines: (lines, 20))
        with pytest.raises(InputError, match=r"^abfs://box@account.host/rows.txt: cannot be read after line") as raised:
            rows_of(SIGNED)
        assert "SECRET" not in str(raised.value)
        for footer in (True, False):
            whole = io.BufferedReader(Failing(table, -1, error))
            monkeypatch.setattr(sources, "open_url", lambda url, whole=whole: (whole, 20))
            failing = Failing(table, -1, error)
            failing.fails = footer
            file = arrow.PythonFile(failing, "r")
            monkeypatch.setattr(readers, "random_access", lambda url, file=file: file)
            with pytest.raises(InputError, match="damaged") as raised:
                fail_while_open(failing)
            assert "SECRET" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/x#y.txt",
        "s3://key:se#cret@bucket/x.txt",
        "s3://bucket/x.txt?region=#&x",
        "file://{}/x#y.txt",
        "file://{}/x?y.txt",
    ],
)
def test_a_url_of_which_a_part_would_not_be_read_is_refused(tmp_path: Path, url: str) -> None:
    pytest.importorskip("pyarrow")
    for name in ("x", "x#y.txt", "x?y.txt"):
        (tmp_path / name).write_text(name + "\n")
    url = url.format(tmp_path)
    for ask in (lambda: list_inputs([url], "text"), lambda: rows_of(url), lambda: state_of(url)):
        with pytest.raises(InputError, match=r"a URL with [#?], behind which nothing.*; write %(23|3F)") as error:
            ask()
        assert "cret" not in str(error.value)
    for plain in ("x%23y.txt", "x%3Fy.txt"):
        (found,) = list_inputs([f"file://{tmp_path}/{plain}"])
        assert rows_of(found.path) == rows_of(f"file://{tmp_path}/{plain}") == [Path(found.path).name]


def test_the_state_of_a_file_tells_contents_apart(store: Path) -> None:
    path = store / "bucket" / "a.txt"
    path.write_text("one")
    seen = [state_of(str(path))]
    path.write_text("two, longer")
    seen.append(state_of(str(path)))
    os.utime(path, ns=(1, 1))
    seen.append(state_of(str(path)))
    other = store / "other"
    other.write_text("TWO, longer")
    os.utime(other, ns=(1, 1))
    os.replace(other, path)
    seen.append(state_of(str(path)))
    assert len(set(seen)) == 4
    with object_store(store) as how:
        url = f"s3://bucket/a.txt?{how}"
        before = state_of(url)
        assert state_of(url) == before
        path.write_text("two, LONGER")
        assert state_of(url) != before
