"""What ``encast serve`` refuses before it serves: clear words, exit code 2."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from local import artifact

from encast.cli.main import main
from encast.errors import InputError
from encast.serve.sources import read_sources

TEXT = Path(__file__)


@pytest.fixture(scope="module")
def embed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact(tmp_path_factory.getbasetemp(), "embed")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tls-key", TEXT], "--tls-key belongs to a certificate"),
        (["--tls-cert", TEXT], "cannot be used for TLS"),
        (["--api-keys", TEXT], "line 1: give NAME sha256:HEX"),
        (["--api-keys", "/absent"], "the API keys cannot be read"),
        (["--log-texts"], "give --log too"),
        (["--config", TEXT, "--threads", "2"], "leave --threads and --instances out"),
        (["--config", TEXT], "encast: error: " + str(TEXT)),
        (["--otlp", "localhost"], "encast: error: 'localhost' is no address of a collector"),
        (["--dtype", "int8"], "compiled already"),
        (["--dtype", "int4"], "int4"),
        (["--alias", "x"], "NAME=MODEL is needed"),
        (["--alias", "x=y"], "there is no model 'y'"),
        (["--alias", "embed=embed"], "called 'embed' already"),
        (["--shadow", "x:200%"], "a share above 0 % and up to 100 %"),
        (["--price", "free"], "neither an amount an hour"),
        (["--log", "/absent/log"], "the log cannot be written"),
        (["--host", "256.1.1.1"], "cannot be listened on"),
    ],
)
def test_a_wrong_option_is_refused(
    embed: Path, options: list[object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(embed), "--port", "0", *map(str, options)]) == 2
    assert words in capsys.readouterr().err


def test_a_port_in_use_is_refused(embed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", str(embed), "--port", str(taken.getsockname()[1])]) == 2
    assert "Address already in use; choose others by --host and --port" in capsys.readouterr().err


def test_names_of_models(embed: Path, tmp_path: Path) -> None:
    (only,) = read_sources([str(embed)], ["a/b=embed"], None)
    assert (only.name, only.given, only.compiled, only.aliases) == ("embed", str(embed), False, ("a/b",))
    (tmp_path / "checkpoint").mkdir()
    named, checkpoint, hub = read_sources([f"x={embed}", str(tmp_path / "checkpoint"), "owner/model"], [], "f32")
    assert (named.name, named.compiled) == ("x", False)
    assert (checkpoint.name, checkpoint.compiled, checkpoint.dtype) == ("checkpoint", True, "f32")
    assert (hub.name, hub.given, hub.compiled) == ("model", "owner/model", True)
    with pytest.raises(InputError, match="two models are called 'embed'"):
        read_sources([str(embed), str(embed)], [], None)
    for wrong in ("absent.encast", "./absent", str(TEXT), "x=", "a b=c"):
        with pytest.raises(InputError, match=r"no folder and no hub id|no usable name"):
            read_sources([wrong], [], None)


def serve(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "encast.cli.main", "serve", *map(str, arguments), "--port", "0"]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60)


def test_a_damaged_artifact_is_an_error_and_no_crash_loop(embed: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.encast"
    shutil.copytree(embed, bad)
    weights = bytearray((bad / "weights.safetensors").read_bytes())
    weights[-100] ^= 0x40
    (bad / "weights.safetensors").write_bytes(weights)
    done = serve(bad, ENCAST_CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "the engine of bad: " in done.stderr
    assert "checksum" in done.stderr


def test_an_engine_with_a_wrong_canary_never_serves(embed: Path, tmp_path: Path) -> None:
    from encast.artifact import artifact_sha
    from encast.artifact import open as open_artifact

    kept = tmp_path / "served" / "canaries"
    kept.mkdir(parents=True)
    (kept / artifact_sha(open_artifact(embed))).write_text((b"\0\0\x80\x3f" * 128).hex())
    done = serve(embed, ENCAST_CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "the canary's answer has cosine" in done.stderr
