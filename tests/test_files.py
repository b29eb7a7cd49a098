"""Files that are whole or absent: their modes, and who may have them."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from pathlib import Path

import pytest

from encast.data.output import OutputFile
from encast.errors import InputError
from encast.files import LineFile, write_whole

BUSY = InputError("busy")


def test_new_files_have_the_mode_of_the_umask_which_no_thread_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0o026)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", None)  # it is the whole process's, so that two threads could leave it at 0
            write_whole(tmp_path / "a", "a")
            write_whole(tmp_path / "b", b"b")
            output = OutputFile(tmp_path / "c")
            output.append(b"c")
            output.finish()
    finally:
        os.umask(before)
    for name in "abc":
        assert (tmp_path / name).read_text() == name
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_that_was_removed_while_it_was_waited_for_is_not_the_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock would keep nobody out who opens the name."""
    path = tmp_path / "lines"
    path.write_bytes(b"old\n")
    plain = fcntl.flock

    def remove_first(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", plain)
        path.unlink()
        plain(fd, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    file = LineFile(path, BUSY, create=True)
    assert (file.found, file.locked) == (b"", True)
    with pytest.raises(InputError, match="busy"):
        LineFile(path, BUSY, create=True)
    file.close()


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(fd: int, how: int) -> None:
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", none)
    file = LineFile(tmp_path / "lines", BUSY, create=True)
    assert not file.locked
    file.close()


def test_output_of_many_threads_leaves_the_umask(tmp_path: Path) -> None:
    def make(name: str) -> None:
        for _ in range(50):
            OutputFile(tmp_path / name).finish()

    before = os.umask(0o022)
    try:
        threads = [threading.Thread(target=make, args=(str(number),)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
