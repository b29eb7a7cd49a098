"""The command: interrupted, resumed, refused, listed."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lab import PEERS, QUICK, TINY, backends, measure
from small_reports import few
from synthetic_rows import write

from encast.batch import Batch
from encast.bench.comparison import Comparison
from encast.bench.config import load_jobs
from encast.bench.listing import listing
from encast.bench.rows import Row, RowFile, read_rows
from encast.bench.scenarios.base import Point
from encast.bench.session import open_session, resume_session
from encast.cli.main import main
from encast.errors import InputError, ResourceError

pytestmark = pytest.mark.serial("starts processes on processors of their own and times them")


def command(folder: Path, *given: str) -> list[str]:
    out = [f"out={folder / 'out'}", f"cache={folder / 'cache'}", "experiment=sweep"]
    return [sys.executable, "-m", "encast.cli.main", "bench", "--conf", str(folder), *TINY[:-1], *QUICK, *out, *given]


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_finished_rows_outlive_an_interrupt(tmp_path: Path, number: int, code: int, word: str) -> None:
    backends(tmp_path, honest="Honest")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    sweep = command(tmp_path, "backend=honest", "workload.length=8,16,24", "--multirun", "--json")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(sweep, **pipes, text=True, env={**os.environ, "TMPDIR": str(temporary)}) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        process.send_signal(number)
        _, said = process.communicate()
    home = tmp_path / "out" / "sweep"
    assert process.returncode == code
    assert f"encast: {word}; finished rows are in {home}; --resume {home} goes on" in said
    assert "Traceback" not in said
    assert list(temporary.iterdir()) == []
    kept = read_rows(home)
    assert kept[0] == first
    assert 1 <= len(kept) < 3

    assert subprocess.run([*sweep[:4], "--resume", str(home)], check=False).returncode == 0
    rows = read_rows(home)
    assert [row["point"]["length"] for row in rows] == [8, 16, 24]
    assert rows[: len(kept)] == kept
    assert {row["status"] for row in rows} == {"ok"}


def test_no_process_outlives_a_killed_command(tmp_path: Path) -> None:
    backends(tmp_path, hang={"peer": "Failing", "how": "hang", "at": "open"})
    hanging = command(tmp_path, "backend=hang", "workload.length=16")
    with subprocess.Popen(hanging, stderr=subprocess.DEVNULL) as process:
        workers: list[str] = []
        while process.poll() is None and not any(
            "worker_process" in Path(f"/proc/{pid}/cmdline").read_text() for pid in workers
        ):
            workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert workers
        rows = str(tmp_path / "out" / "sweep" / "rows.jsonl")
        assert rows in files(process.pid)
        assert not any(rows in files(int(pid)) for pid in workers), "they would hold its lock"
        process.kill()
        process.wait()
    # The kernel ends them, which takes it a moment; without its help they would sleep for an hour.
    end = time.monotonic() + 60
    while any(alive(int(pid)) for pid in workers) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(alive(int(pid)) for pid in workers)


def files(pid: int) -> set[str]:
    """What a process has open; nothing once it ends."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            found.add(os.readlink(descriptor))
    return found


def test_a_full_temporary_folder_ends_a_sweep_and_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backends(tmp_path, honest="Honest")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    make, numbers = tempfile.mkdtemp, itertools.count(1)

    def mkdtemp(*given: Any, prefix: str, **more: Any) -> str:
        if prefix == "encast-bench-" and next(numbers) == 3:  # converted, opened, opened for the second job
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return str(make(*given, prefix=prefix, **more))

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    assert main(command(tmp_path, "backend=honest", "workload.length=8,16", "--multirun")[3:]) == 2
    home = tmp_path / "out" / "sweep"
    assert capsys.readouterr().err.splitlines()[-2:] == [
        f"encast: finished rows are in {home}; --resume {home} goes on",
        f"encast: error: {temporary}: temporary files cannot be written (No space left on device); make room, or name "
        "another folder with TMPDIR",
    ]
    assert [row["status"] for row in read_rows(home)] == ["ok"]
    assert list(temporary.iterdir()) == []
    assert main(["bench", "--resume", str(home)]) == 0
    assert [row["status"] for row in read_rows(home)] == ["ok", "ok"]
    with RowFile(home):
        capsys.readouterr()
        assert main(["bench", "--resume", str(home)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"encast: error: another `encast bench` writes to {home}; wait for its end or choose another experiment=NAME"
    ]


def test_a_row_that_cannot_be_written_leaves_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backends(tmp_path, honest="Honest")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def full(file: RowFile, rows: Sequence[Row]) -> None:
        raise ResourceError("no room")

    monkeypatch.setattr(RowFile, "append", full)
    with pytest.raises(ResourceError) as caught:
        measure(tmp_path, ["honest"], "workload.length=[8,16]")
    assert list(tmp_path.glob("encast-bench-*")) == [], str(caught.value)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["backend=nothing"], "there is no backend 'nothing'; there are "),
        (["scenario=nothing"], "there is no scenario 'nothing'"),
        (["timing.second=1"], "there is no field 'timing.second'; timing has seconds,"),
        (["--resume", "/no/such/folder"], "/no/such/folder: is no folder; name one that `encast bench` has written"),
        (["--resume", "x" * 300], ": is no folder; name one that `encast bench` has written"),
        (["--resume", "."], "cannot be resumed (config.yaml: "),
        (["--resume", "/no/such/folder", "backend=encast-f32"], "leave all others out"),
        (["--conf", "/no/such/folder"], "holds none of the folders"),
        (["price=a-lot"], "price 'a-lot' is neither an amount an hour"),
        (["price=0.25"], "price '0.25' is neither an amount an hour such as 0.25/h nor a machine"),
        (["launcher=instances", "launcher.instances=100000"], "100000"),
        (["launcher.allocator=nothing"], "the allocator is 'nothing'"),
    ],
)
def test_what_cannot_be_is_refused(
    given: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *TINY, f"cache={tmp_path / 'cache'}", *given] if "--resume" not in given else
                ["bench", *given]) == 2  # fmt: skip
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""
    assert not (tmp_path / "bench-results").exists(), "a refused command leaves nothing"


def test_a_class_may_move_before_resuming_and_a_setting_may_not(tmp_path: Path) -> None:
    backends(tmp_path, honest="Honest")
    measure(tmp_path, ["honest"], "workload.length=[8,16]", "experiment=begun")
    home, yaml = tmp_path / "out" / "begun", tmp_path / "backend" / "honest.yaml"
    first = (home / "rows.jsonl").read_text().splitlines(keepends=True)[0]
    (home / "rows.jsonl").write_text(first)
    moved = shutil.copy(PEERS, tmp_path / "moved.py")
    yaml.write_text(yaml.read_text().replace(str(PEERS), str(moved)))
    resume_session(home).run()
    lines = (home / "rows.jsonl").read_text().splitlines(keepends=True)
    assert (lines[0], len(lines)) == (first, 2)

    yaml.write_text(yaml.read_text().replace("milliseconds: 2", "milliseconds: 3"))
    with pytest.raises(InputError) as caught:
        resume_session(home).run()
    assert str(caught.value) == (
        f"{home}: cannot be resumed: 2 of its 2 rows are of no job that config.yaml makes now "
        "(backend.honest.options.milliseconds was 2, is 3); start a new experiment=NAME, or resume with what this one "
        "was begun with"
    )
    assert (home / "rows.jsonl").read_text() == "".join(lines)


def test_rows_of_another_version_are_not_measured_again_beside_themselves(tmp_path: Path) -> None:
    backends(tmp_path, honest="Honest")
    measure(tmp_path, ["honest"], "workload.length=[8,16]", "experiment=begun")
    home = tmp_path / "out" / "begun"
    row, other = read_rows(home)
    (home / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in ({**row, "key": "f05d22"}, other)))
    with pytest.raises(
        InputError, match=r"1 of its 2 rows are of no job that config.yaml makes now \(its settings are the same"
    ):
        resume_session(home).run()
    assert len(read_rows(home)) == 2


@pytest.mark.parametrize("package", ["hydra", "psutil", "scipy", "yaml"])
@pytest.mark.parametrize("given", [["backend=encast-f32"], ["--list"], ["--resume", "."]])
def test_a_package_that_is_not_installed_is_named(package: str, given: list[str], tmp_path: Path) -> None:
    run = without([package], tmp_path, "bench", *given)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == f"encast: error: not installed: {package}; pip install 'encast[bench]'\n"
    assert list(tmp_path.iterdir()) == []


def test_a_page_needs_no_package_that_measures(tmp_path: Path) -> None:
    folder = str(write(tmp_path / "rows", few()))
    run = without(["hydra", "optuna", "psutil", "scipy", "yaml"], tmp_path, "bench", "report", folder)
    assert (run.returncode, run.stderr) == (0, "")
    for package, extra, given in [
        ("scipy", "bench", ["--compare", folder, folder]),
        ("yaml", "bench", [folder, "--price", "c5.xlarge"]),
        ("jinja2", "plot", [folder]),
        ("vl_convert", "plot", [folder]),
    ]:
        run = without([package], tmp_path, "bench", "report", *given)
        assert run.returncode == 2
        assert package in run.stderr
        assert run.stderr.endswith(f"; pip install 'encast[{extra}]'\n")


def without(packages: list[str], folder: Path, *given: str) -> subprocess.CompletedProcess[str]:
    hidden = f"import sys; sys.modules.update(dict.fromkeys({packages})); from encast.cli.main import main; "
    command = [sys.executable, "-c", hidden + "sys.exit(main())", *given]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_bench_that_measured_nothing_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backends(tmp_path, absent="Absent", half="FirstHalf", honest="Honest")
    arguments = command(tmp_path, "backend=absent,half", "workload.length=16")[3:]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    rows = tmp_path / "out" / "sweep" / "rows.jsonl"
    assert "error: nothing was measured: 2 rows, 1 unavailable, 1 disagrees; the field reason of each, in " in last
    assert str(rows) in last
    assert len(read_rows(rows)) == 2
    assert [line.split()[0] for line in captured.out.splitlines()] == ["absent", "half"]
    assert "unavailable: not installed: pip install absent" in captured.out
    assert "not installed" not in captured.err
    assert main([*arguments, "experiment=one", "backend=absent,honest"]) == 0
    assert "encast: 2 rows are in " in capsys.readouterr().err


def test_the_list_shows_every_group(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "backend:\n" in shown
    assert "  latency " in shown
    backends(tmp_path, mine="Honest")
    assert main(["bench", "--list", "--json", "--conf", str(tmp_path)]) == 0
    groups = json.loads(capsys.readouterr().out)
    assert {"backend", "model", "workload", "scenario", "launcher"} <= set(groups)
    assert {"mine", "encast-int8"} <= set(groups["backend"])
    assert groups["fields"]["scenario=batch_scaling"]["scenario.batch"]["default"] == "8"
    assert "c5.xlarge" in groups["price"]


def test_the_list_shows_fields_with_defaults_and_units(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = listing()
    named = {"": found.fields[""], **{of: own for of, own in found.fields.items() if of.startswith("scenario=")}}
    for of, own in named.items():
        assert all(field["text"] for field in own.values()), f"{of}: a comment above each field says it"
    whole = load_jobs([])[0]
    for section in ("timing", "limits"):
        names = [name.partition(".")[2] for name in found.fields[""] if name.startswith(f"{section}.")]
        assert names == list(asdict(getattr(whole, section)))
    lines = list(found.lines())
    assert "    scenario.limit_ms=10.0           Milliseconds that the percentile of the latency must keep." in lines
    (shown,) = (line for line in lines if line.startswith("  timing.seconds=8.0 "))
    assert shown.index("Seconds of each backend at a point;") == 37
    assert any(line.startswith("  c5.xlarge ") and "0.17 USD/h" in line for line in lines)
    assert main(["bench", "--list", "--conf", str(tmp_path)]) == 2
    assert "holds none of the folders study, backend" in capsys.readouterr().err


def test_a_full_disk_before_the_first_row_is_an_error(tmp_path: Path) -> None:
    session = open_session([*TINY, "backend=encast-f32", f"out={tmp_path / 'out'}", f"cache={tmp_path / 'cache'}"])
    with (
        mock.patch("encast.bench.session.write_whole", side_effect=OSError(errno.ENOSPC, "No space left on device")),
        pytest.raises(ResourceError, match=r"config.yaml: cannot be written \(No space left on device\)"),
    ):
        session.run()
    assert not session.began()


def test_a_batch_that_cannot_be_divided_is_refused_beforehand(tmp_path: Path) -> None:
    (job,) = load_jobs([*TINY, "backend=encast-f32", "scenario=batch_scaling"])
    point = Point((Batch.of([[1, 2]]),), 2, 1, {}, split=True)
    with (
        mock.patch("encast.bench.scenarios.scaling.BatchScaling.points", return_value=[point]),
        pytest.raises(InputError, match="a batch of 1 sequences cannot be divided over 2 instances"),
    ):
        Comparison(job, cache=tmp_path)
