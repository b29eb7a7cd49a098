"""Environments of their own: row, documents and pyproject.toml give one command, and what it makes is enough."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from checkpoints import make_checkpoint
from formats import OTHERS, write
from lab import QUICK, TINY

import encast.bench
from encast.bench.environments import THIS_PYTHON, WORKER_NEEDS, interpreter
from encast.bench.peers.base import load_peer
from encast.bench.session import open_session

ROOT = Path(__file__).parent.parent.parent
CONF = Path(encast.bench.__file__).parent / "conf" / "backend"
PEERS = {
    config["python"]: config
    for path in sorted(CONF.glob("*.yaml"))
    if "python" in (config := yaml.safe_load(path.read_text(encoding="utf-8")))
}
NAMES = ("deepsparse", "jax", "mxnet", "tensorflow", "tvm")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENCAST_CACHE_DIR", str(tmp_path))
    return tmp_path / "bench" / "environments"


def advice(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The command in what a peer says when nothing is installed."""
    with monkeypatch.context() as nothing:
        nothing.setattr("importlib.util.find_spec", lambda name: None)
        reason = load_peer(PEERS[name]["peer"]).missing()
    assert reason is not None
    found = re.fullmatch(r"not installed \((\w+), tokenizers\): it has an environment of its own: (.*)", reason)
    assert found is not None, reason
    return found[2]


def extra(name: str) -> list[str]:
    """The requirements of an extra of pyproject.toml, read with the standard library of Python 3.10."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf"^{name} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return re.findall(r'"([^"]+)"', found[1])


def test_these_have_one() -> None:
    assert tuple(sorted(PEERS)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_advice_makes_the_environment_that_is_looked_for(
    name: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, install = advice(name, monkeypatch).split(" && ")
    python, *venv, folder = shlex.split(make)
    pip, *requirements = shlex.split(install)
    assert venv == ["-m", "venv"]
    assert (folder, pip) == (str(home / name), str(home / name / "bin" / "pip"))
    # MXNet and DeepSparse have no wheels, or dependencies without, for newer Pythons.
    assert python == ("python3.11" if name in ("mxnet", "deepsparse") else THIS_PYTHON)
    assert requirements == ["install", *extra(f"bench-{name}"), *WORKER_NEEDS.values()]
    assert set(WORKER_NEEDS.values()) <= set(extra("dependencies"))
    assert interpreter(name) is None
    (home / name / "bin").mkdir(parents=True)
    (home / name / "bin" / "python").symlink_to(sys.executable)
    assert interpreter(name) == str(home / name / "bin" / "python")


def test_the_documents_give_that_command(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "howto" / "benchmark.md").read_text(encoding="utf-8")
    command = advice("jax", monkeypatch).replace(str(home), "~/.cache/encast/bench/environments")
    assert "\n" + command.replace(THIS_PYTHON, "python3.11").replace(" && ", "\n") + "\n" in page


def test_a_worker_needs_no_more_than_that(tmp_path: Path) -> None:
    """Of what is not in the standard library an environment has NumPy and ``WORKER_NEEDS``, and no native core."""
    checkpoints = [make_checkpoint(tmp_path / "model", "bert", "features")]
    for which in OTHERS:
        (tmp_path / which).mkdir()
        checkpoints.append(write(tmp_path / which, which)[1])
    code = f"""
import sys
class Bare:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        known = {{"numpy", "encast", "_distutils_hack", *{sorted(WORKER_NEEDS)!r}, *sys.stdlib_module_names}}
        if name == "encast._core" or top not in known and top in absent:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
absent = {{"safetensors", "huggingface_hub", "typer", "rich", "hydra", "omegaconf", "optuna", "yaml", "torch", "onnx"}}
sys.meta_path.insert(0, Bare())
import encast.bench.worker_process
from pathlib import Path
from encast.bench.peers.base import ModelFiles, load_peer
for target in {sorted(config["peer"] for config in PEERS.values())!r}:
    assert load_peer(target).any_format
    for checkpoint in {list(map(str, checkpoints))!r}:
        peer = load_peer(target)(ModelFiles("tiny", Path(checkpoint), "sha"), "f32", 1, Path("cache"))
        peer.start = lambda: None
        peer.open()
        print(peer.graph.meta.arch, peer.encoder.arch)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(encast.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) == 1


def test_a_half_made_environment_has_the_same_advice(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the runtime there, and what encast needs there not, its module still loads and says so."""
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tokenizers" else find("json"))
    for name in NAMES:
        reason = load_peer(PEERS[name]["peer"]).missing()
        assert reason is not None
        assert reason.startswith("not installed (tokenizers): ")
        assert reason.endswith("'tokenizers>=0.20'")


@pytest.mark.parametrize("name", NAMES)
def test_a_row_says_so(name: str, home: Path, tmp_path: Path) -> None:
    peer = load_peer(PEERS[name]["peer"])
    if (reason := peer.missing()) is None:
        pytest.skip(f"{name} is installed beside encast")
    backend = PEERS[name]["name"]
    given = [f"backend={backend}", *TINY, *QUICK, f"out={tmp_path}", f"cache={tmp_path / 'cache'}", "experiment=absent"]
    (row,) = open_session(given).run()
    assert row["status"] == "unavailable"
    assert row["reason"] == f"{backend}: {reason}"
    assert row["metrics"] == {}
