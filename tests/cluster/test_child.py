"""The child of a replica: what it says is read, whatever it says, and nothing of it is left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from encast.cluster import child
from encast.cluster.child import ChildServer
from encast.errors import ResourceError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_line_without_end_is_read_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> ChildServer:
        server = ChildServer("127.0.0.1", [], None)
        stream = asyncio.StreamReader(limit=1 << 16)
        reading = asyncio.ensure_future(server._listen(stream))
        for _ in range(10):
            stream.feed_data(b"x" * 50_000)
            await asyncio.sleep(0)
        stream.feed_data(b"\nencast: reloaded\nlast")
        stream.feed_eof()
        await asyncio.wait_for(reading, 30)
        return server

    server = asyncio.run(main())
    assert list(server._said)[-2:] == ["encast: reloaded", "last"]
    assert all(len(line) <= 1000 for line in server._said)
    assert capsys.readouterr().err.count("x") == 500_000


def test_a_start_that_fails_leaves_nothing(folder: Path) -> None:
    async def main() -> None:
        server = ChildServer("127.0.0.1", ["--no-such-option"], None)
        with pytest.raises(ResourceError, match="no-such-option"):
            await server.start({"a": str(folder / "a.encast")})
        assert not server.runs

    asyncio.run(main())
    assert list(folder.glob("encast-serve-*")) == []


def test_folders_of_actors_that_were_killed_are_removed(folder: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone, mine = folder / f"{child._FOLDERS}{ended.pid}-x", folder / f"{child._FOLDERS}{os.getpid()}-x"
    for one in (gone, mine):
        one.mkdir()
        (one / "keys").write_text("secret")
    ChildServer("127.0.0.1", [], None).tidy()
    assert not gone.exists()
    assert mine.exists()
