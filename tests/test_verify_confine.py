"""What a process may still do to the machine once it is confined to a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from runtime_how import How
from test_verify_saved_model import saved, verified

import encast.verify.apart
from encast.compile import compile
from encast.errors import InputError
from encast.verify.confine import can_confine

needs_landlock = pytest.mark.skipif(not can_confine(), reason="needs Landlock of Linux 6.2 or newer")

TRIES = """
import json, os, subprocess, sys
from encast.verify.confine import confine
inside, outside = sys.argv[1:]
tries = {
    "read": lambda: open(f"{outside}/there").read(),
    "inside": lambda: open(f"{inside}/made", "w").write("x"),
    "null": lambda: open(os.devnull, "w").write("x"),
    "write": lambda: open(f"{outside}/there", "w"),
    "make": lambda: open(f"{outside}/new", "w"),
    "truncate": lambda: os.truncate(f"{outside}/there", 0),
    "remove": lambda: os.remove(f"{outside}/there"),
    "rename": lambda: os.rename(f"{outside}/there", f"{inside}/there"),
    "folder": lambda: os.mkdir(f"{outside}/folder"),
    "remove folder": lambda: os.rmdir(f"{outside}/empty"),
    "link": lambda: os.symlink("there", f"{outside}/link"),
    "run": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
}
confine(inside)
done = []
for name, attempt in tries.items():
    try:
        attempt()
        done.append(name)
    except PermissionError:
        pass
print(json.dumps(done))
"""


@needs_landlock
def test_only_its_folder_can_be_changed(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    (outside / "empty").mkdir(parents=True)
    (outside / "there").write_text("kept")
    command = [sys.executable, "-c", TRIES, str(inside), str(outside)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["read", "inside", "null"]
    assert sorted(os.listdir(outside)) == ["empty", "there"]
    assert (outside / "there").read_text() == "kept"


@needs_landlock
def test_a_process_with_threads_is_not_confined(tmp_path: Path) -> None:
    code = """
import sys, threading
from encast.verify.confine import confine
threading.Thread(target=threading.Event().wait, daemon=True).start()
confine(sys.argv[1])
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "a process with several threads cannot be confined" in done.stderr


@needs_landlock
def test_a_graph_writes_no_file(runtime: How, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    runtime(writes=str(kept))
    with pytest.raises(InputError, match=r"TensorFlow cannot run it .*Permission denied"):
        compile(saved(tmp_path), tmp_path / "m.encast", verify=True)
    assert kept.read_text() == "kept"


def test_a_graph_runs_only_when_asked(runtime: How, tmp_path: Path) -> None:
    source = saved(tmp_path)
    skipped = verified(compile(source, tmp_path / "m.encast", dtype="f32"))["skipped"]
    assert skipped.startswith("saved: a graph of TensorFlow is a program of its maker, which runs only when asked")
    assert "relative" in verified(compile(source, tmp_path / "m.encast", dtype="f32", verify=True))


def _packed(path: Path, *, deflated: bool = False) -> None:
    (np.savez_compressed if deflated else np.savez)(path, np.zeros((5, 8), np.float32))


@pytest.mark.parametrize(
    ("reply", "answers", "reason"),
    [
        ("[" * 60_000, _packed, "RecursionError"),
        ("[]", _packed, "TypeError"),
        ("", _packed, "JSONDecodeError"),
        ("x" * 100_000, _packed, "reply.json has more than 65536 bytes|JSONDecodeError"),
        ('{"version": "1", "names": ["a"]}', lambda path: path.write_bytes(b""), "BadZipFile"),
        ('{"version": "1", "names": ["a"]}', lambda path: path.write_bytes(b"PK" * 50), "BadZipFile"),
        ('{"version": "1", "names": ["a", "b"]}', _packed, "ValueError"),
        ('{"version": "1", "names": ["a"]}', lambda path: _packed(path, deflated=True), "compressed, or too large"),
    ],
)
def test_what_a_graph_writes_in_the_place_of_answers(
    runtime: How,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reply: str,
    answers: Callable[[Path], None],
    reason: str,
) -> None:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        Path(command[7]).write_text(reply)
        answers(Path(command[6]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(encast.verify.apart.subprocess, "run", run)
    with pytest.raises(InputError, match=f"TensorFlow ended without answers .*({reason})"):
        compile(saved(tmp_path), tmp_path / "m.encast", verify=True)
    assert not (tmp_path / "m.encast").exists()
