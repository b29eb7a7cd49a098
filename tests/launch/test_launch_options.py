"""What ``encast launch`` makes of its options, and what it refuses."""

from __future__ import annotations

import json
import re
import stat
import sys
from pathlib import Path

import pytest
from launched import CPUS, launch, two_cpus
from machines import MadeUp
from profiles import compiled

from encast import artifact as artifacts
from encast.artifact import artifact_sha
from encast.backends.groups import InstanceGroup, Setup
from encast.cli.main import main
from encast.tune.configuration import Configuration, machine_fingerprint

pytestmark = pytest.mark.serial("starts processes on processors of their own and times them")


def test_a_program_that_is_not_there_or_cannot_run(tmp_path: Path) -> None:
    absent = launch("--", "no-such-program")
    assert absent.returncode == 2
    assert "there is no program 'no-such-program' that can be run; name one on PATH" in absent.stderr
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF and no more")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    refused = launch("--instances", "1", "--", str(broken))
    assert refused.returncode == 2
    assert "instance 0" in refused.stderr
    assert "cannot be started: Exec format error" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--core-list", "3-1"), "--core-list is '3-1'; give numbers and ranges such as 0-3,8"),
        (("--core-list", "0-99999999999"), "--core-list is '0-99999999999'; give numbers"),
        (("--nodes", "one"), "--nodes is 'one'"),
        (("--instances", "5000"), "5000 instances of 1 core do not fit"),
        (("--allocator", "fastmalloc"), "the allocator is 'fastmalloc'; system, tcmalloc and jemalloc are known"),
        (("--preset", "speed"), "the preset is 'speed'; latency and throughput are known"),
    ],
)
def test_wrong_options(arguments: tuple[str, ...], words: str) -> None:
    done = launch(*arguments, "--", "true")
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    done = launch("--dry-run", "--instances", "1", "--core-list", str(CPUS[-1]), "--", "touch", str(file))
    assert done.returncode == 0
    assert re.search(rf"^ +0 +1 +\d+ +{CPUS[-1]}$", done.stdout, re.MULTILINE)
    assert f"command    touch {file}" in done.stdout
    document = json.loads(
        launch("--dry-run", "--json", "--core-list", str(CPUS[-1]), "--no-openmp", "--", "touch", str(file)).stdout
    )
    (instance,) = document["instances"]
    assert (instance["cpus"], instance["threads"], instance["command"]) == ([CPUS[-1]], 1, ["touch", str(file)])
    assert instance["environment"] == {"ENCAST_INSTANCE": "0", "ENCAST_INSTANCES": "1"}
    assert not file.exists()


def test_under_a_quota_instances_are_bound_to_no_cores(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ENCAST_THREADS", raising=False)
    machine = MadeUp(cores=48, quota="200000 100000").read()
    monkeypatch.setattr("encast.cli.launch.this_machine", lambda: machine)
    assert main(["launch", "--dry-run", "--json", "--instances", "2", "--", "true"]) == 0
    document = json.loads(capsys.readouterr().out)
    for instance in document["instances"]:
        assert (instance["cpus"], instance["threads"], instance["bound"]) == ([*range(48)], 1, False)
        assert instance["environment"]["ENCAST_THREADS"] == "1"
    quota, unbound = document["notes"]
    assert quota == "the cgroup's CPU quota of 2 bounds the threads"
    assert unbound.startswith("instances are not bound to cores, since ")
    assert main(["launch", "--dry-run", "--core-list", "4-5", "--", "true"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^ +0 +2 +0 +4-5$", said, re.MULTILINE)
    assert "not bound to cores" not in said


def test_a_tuned_configuration_says_the_cores(tmp_path: Path) -> None:
    path = tmp_path / "model.tuned.json"
    path.write_text(
        json.dumps({"schema": 1, "machine": "another", "chosen": {"groups": [{"instances": 1, "threads": 1}]}})
    )
    done = launch("--dry-run", "--json", "--config", str(path), "--", "true")
    document = json.loads(done.stdout)
    assert [instance["threads"] for instance in document["instances"]] == [1]
    assert any("was tuned on another machine" in note for note in document["notes"])
    both = launch("--config", str(path), "--preset", "latency", "--", "true")
    assert (both.returncode, "leave out --cores-per-instance and --preset" in both.stderr) == (2, True)
    path.write_text("{}")
    wrong = launch("--config", str(path), "--", "true")
    assert (wrong.returncode, "schema is None" in wrong.stderr) == (2, True)


@two_cpus
def test_an_engine_in_a_smaller_instance_takes_the_configuration(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tuned by a process that may use more cores than the instance is given."""
    artifact, path = compiled("bert-embed", "f32", tmp_path_factory), tmp_path / "model.tuned.json"
    chosen = Setup((InstanceGroup(1, 1),), 1024)
    Configuration(chosen, artifact_sha(artifacts.open(artifact)), machine_fingerprint()).write(path)
    code = (
        "import encast, os\n"
        f"encast.load({str(artifact)!r}, config={str(path)!r}, strict=True).close()\n"
        "print(os.sched_getaffinity(0))"
    )
    done = launch("--config", str(path), "--", sys.executable, "-W", "error", "-c", code)
    assert (done.returncode, done.stdout) == (0, f"{{{CPUS[0]}}}\n"), done.stderr
    assert "tuned" not in done.stderr


def test_an_engine_in_an_instance_has_its_threads() -> None:
    code = "from encast.machine import usable_cores; print(usable_cores())"
    done = launch("--instances", "1", "--cores-per-instance", "1", "--", sys.executable, "-c", code)
    assert done.stdout == f"[{CPUS[0]}]\n", done.stderr
