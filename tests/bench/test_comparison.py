"""A whole comparison: every system gets its row, whatever becomes of it."""

from __future__ import annotations

import csv
import shutil
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import yaml
from lab import QUICK, TINY, backends, measure

from encast.bench.comparison import _groups
from encast.bench.config import load_jobs
from encast.bench.peers.base import BackendSpec
from encast.bench.report.compare import compare
from encast.bench.report.load import load
from encast.bench.rows import BusyError, Row, RowFile, read_rows
from encast.bench.session import open_session, resume_session
from encast.errors import InputError

pytestmark = pytest.mark.serial("starts processes on processors of their own and times them")

ALONE = ["launcher=instances", "launcher.instances=1", "launcher.cores_per_instance=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return backends(
        tmp_path_factory.mktemp("comparison"),
        slow={"peer": "Honest", "milliseconds": 20},
        quick={"peer": "Honest", "milliseconds": 2},
        absent="Absent",
        elsewhere={"peer": "Honest", "python": "/no/such/python"},
        crash={"peer": "Failing", "how": "exit", "after": 30},
        crash_at_open={"peer": "Failing", "how": "abort", "at": "open"},
        crash_at_export={"peer": "Failing", "how": "abort", "at": "export"},
        raises={"peer": "Failing", "how": "raise", "after": 3},
    )


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[str, Row]:
    names = ["slow", "quick", "absent", "elsewhere", "crash", "crash-at-open", "crash-at-export", "raises"]
    return measure(folder, names, *ALONE, "experiment=whole", "price=0.36/h", "backend.crash.milliseconds=0")


def test_the_good_ones_are_measured(rows: dict[str, Row]) -> None:
    for name, least in (("slow", 20), ("quick", 2)):
        row = rows[name]
        assert row["status"] == "ok", row["reason"]
        assert row["metrics"]["latency_ms"]["p50"] >= least
        low, high = row["metrics"]["latency_ms_interval"]
        assert low <= row["metrics"]["latency_ms"]["p50"] <= high
        assert row["point"] == {"instances": 1, "threads": 1, "batch": 1, "length": 32}
        assert row["backend"]["version"] == "1.0"
        assert row["model"] == {"name": "minilm", "sha": row["model"]["sha"], "hidden": 64, "layers": 2}
        assert row["workload"] == {"name": "fixed", "sequences": 4, "tokens": 128, "lengths": [32, 32.0, 32]}
        assert row["cold"]["load_s"] > 0
        assert row["cold"]["first_call_ms"] >= least
        assert row["memory"]["peak_rss_bytes"] > 10**7
        assert len(row["samples"]["figure"]) >= 3
        assert row["cost"]["usd_per_hour"] == 0.36
        assert row["cost"]["usd_per_million"] == pytest.approx(100 / row["metrics"]["sequences_per_s"])
        assert 0 < row["limit"]["fraction"] < 1
        assert row["noise"]["noisy"] == bool(row["noise"]["why"])
        assert row["experiment"] == "whole"


def test_ratios_are_times_as_fast(rows: dict[str, Row]) -> None:
    assert set(rows["quick"]["ratio_to"]) == {"slow"}, "only those that are ok have a ratio"
    ratio = rows["quick"]["ratio_to"]["slow"]
    assert ratio["ratio"] > 1
    assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
    assert rows["slow"]["ratio_to"]["quick"]["ratio"] < 1


def test_what_breaks_its_latency_limit_has_no_price(folder: Path) -> None:
    given = ["scenario=slo_throughput", "scenario.batch=1", "scenario.instances=1", "scenario.percent=50"]
    priced = [*given, "price=0.36/h"]
    broken = measure(folder, ["quick"], *priced, "scenario.limit_ms=1", "experiment=broken")["quick"]
    assert (broken["status"], broken["cost"]) == ("ok", None)
    kept = measure(folder, ["quick"], *priced, "scenario.limit_ms=1000", "experiment=kept")["quick"]
    rate = kept["metrics"]["sequences_per_s_within_slo"]
    assert kept["cost"]["usd_per_million"] == pytest.approx(100 / rate)


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("absent", "unavailable", "absent: not installed: pip install absent"),
        ("elsewhere", "unavailable", "elsewhere: /no/such/python cannot be started"),
        ("crash", "crashed", "crash: ended by exit code 3 during 'burst'; it said last:\n  going down"),
        ("crash-at-open", "crashed", "crash-at-open: ended by signal SIGABRT during 'open'"),
        ("crash-at-export", "crashed", "crash-at-export: ended by signal SIGABRT during 'export'"),
        ("raises", "failed", "raises: burst: ZeroDivisionError"),
    ],
)
def test_the_others_have_their_reason(rows: dict[str, Row], name: str, status: str, said: str) -> None:
    row = rows[name]
    assert row["status"] == status
    assert said in row["reason"]
    assert row["metrics"] == {}
    assert row["ratio_to"] == {}
    assert row["cost"] is None


def test_the_folder_holds_everything(folder: Path, rows: dict[str, Row]) -> None:
    home = folder / "out" / "whole"
    assert {row["backend"]["name"]: row for row in read_rows(home)} == rows
    with (home / "rows.csv").open(newline="") as file:
        table = {line["backend.name"]: line for line in csv.DictReader(file)}
    assert table["quick"]["status"] == "ok"
    assert float(table["quick"]["metrics.latency_ms.p50"]) == rows["quick"]["metrics"]["latency_ms"]["p50"]
    config = yaml.safe_load((home / "config.yaml").read_text())
    assert config["jobs"][0]["workload"]["length"] == 32
    assert config["jobs"][0]["backends"][0]["options"] == {"milliseconds": 20}
    assert sorted(path.name for path in home.iterdir()) == ["config.yaml", "rows.csv", "rows.jsonl"]


def test_nothing_is_measured_twice(folder: Path, rows: dict[str, Row]) -> None:
    home = folder / "out" / "whole"
    before = (home / "rows.jsonl").read_bytes()
    assert len(resume_session(home).run()) == len(rows)
    assert (home / "rows.jsonl").read_bytes() == before


def test_a_backend_that_was_installed_is_measured_by_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backends(
        tmp_path,
        crash={"peer": "Failing", "how": "abort", "at": "open"},
        absent="Absent",
        quick="Honest",
        other="Honest",
    )
    names = ["crash", "absent", "quick", "other"]
    measure(tmp_path, names, *ALONE, "workload.length=[16,32]", "experiment=before")
    home = tmp_path / "out" / "before"
    first = (home / "rows.jsonl").read_bytes()
    old = load([Path(shutil.copytree(home, tmp_path / "old"))]).rows

    said: list[str] = []
    shown: list[Row] = []
    resume_session(home).run(said.append, shown.append)
    assert (home / "rows.jsonl").read_bytes() == first, "what is still so is not said twice"
    assert [row["backend"]["name"] for row in shown] == ["absent", "absent"], "but shown"
    assert [line.split(":")[0] for line in said[1:]] == ["absent"], "nothing else is started"

    monkeypatch.setenv("ENCAST_TEST_MISSING", "too old: pip install --upgrade absent")
    assert {row["reason"] for row in resume_session(home).run() if row["status"] == "unavailable"} == {
        "absent: too old: pip install --upgrade absent"
    }
    monkeypatch.setenv("ENCAST_TEST_MISSING", "")
    lines = (home / "rows.jsonl").read_text().splitlines(keepends=True)
    (lost,) = (line for line in lines if '"name": "crash"' in line and '"length": 32' in line)
    (home / "rows.jsonl").write_text("".join(line for line in lines if line != lost))
    said.clear()
    rows = resume_session(home).run(said.append)
    assert said[0].startswith("3 rows to measure")
    # The first that was measured takes part for the ratios; of the others nobody does where the row is known.
    assert [line.split(": ")[-1] for line in said if ": latency, " in line] == ["quick, absent", "quick, crash, absent"]
    assert [line.split(":")[0].strip() for line in said if "load, " in line] == ["quick", "absent", "crash"]
    assert Counter(row["status"] for row in rows) == {"ok": 6, "crashed": 2}
    assert [set(row["ratio_to"]) for row in rows if row["backend"]["name"] == "absent"] == [{"quick"}] * 2
    with (home / "rows.csv").open(newline="") as file:
        assert [line["key"] for line in csv.DictReader(file)] == [row["key"] for row in rows]
    loaded = load([home])
    assert (len(loaded.rows), loaded.replaced) == (8, 4)
    judged = {(one.row.name, one.conclusion) for one in compare(old, loaded.rows).changes}
    assert {one for name, one in judged if name == "absent"} == {"now works"}
    assert len(read_rows(home)) == 12
    resume_session(home).run()
    assert len(read_rows(home)) == 12


def test_two_commands_do_not_share_a_folder(tmp_path: Path) -> None:
    backends(tmp_path, quick="Honest")
    given = ["backend=quick", *TINY, *QUICK, f"out={tmp_path}", f"cache={tmp_path / 'cache'}", "experiment=shared"]
    first, second = (open_session([*given, f"workload.seed={seed}"], folders=[tmp_path]) for seed in (1, 2))
    with RowFile(first.folder), pytest.raises(BusyError, match=r"another `encast bench` writes to .*shared; wait"):
        second.run()
    assert not (first.folder / "config.yaml").exists(), "it would be that of the one that is refused"
    first.run()
    config = (first.folder / "config.yaml").read_text()
    with pytest.raises(BusyError, match=r"holds rows already; go on with --resume"):
        second.run()
    assert (first.folder / "config.yaml").read_text() == config
    assert len(read_rows(first.folder)) == 1


def test_unnamed_experiments_of_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    backends(tmp_path, quick="Honest")
    given = ["backend=quick", *TINY, *QUICK, f"out={tmp_path / 'out'}", f"cache={tmp_path / 'cache'}"]
    with mock.patch("encast.bench.session.datetime") as clock:
        clock.now.return_value.strftime.return_value = "now"
        sessions = [open_session(given, folders=[tmp_path]) for _ in range(3)]
        with RowFile(tmp_path / "out" / "now"):
            sessions[0].run()
        for session in sessions[1:]:
            session.run()
    assert [session.folder.name for session in sessions] == ["now-2", "now", "now-3"]
    for session in sessions:
        assert [row["experiment"] for row in resume_session(session.folder).run()] == [session.folder.name]


def test_an_experiment_is_not_written_over(folder: Path, rows: dict[str, Row]) -> None:
    with pytest.raises(InputError, match=r"holds rows already; go on with --resume .*whole"):
        open_session([f"out={folder / 'out'}", "experiment=whole"])
    with pytest.raises(InputError, match="give the name of a folder"):
        open_session(["experiment=../elsewhere"])
    with pytest.raises(InputError, match="cannot be resumed"):
        resume_session(folder)


def test_a_sweep_is_refused_as_a_whole(folder: Path) -> None:
    given = [*TINY[:-1], *QUICK, f"out={folder / 'out'}", f"cache={folder / 'cache'}", "experiment=refused"]
    session = open_session([*given, "backend=quick", "workload.length=32,65"], multirun=True, folders=[folder])
    with pytest.raises(InputError, match="65"):
        session.run()
    assert not session.folder.exists(), "nothing half-written stays"
    assert (folder / "cache").exists()


def test_what_is_to_come_is_counted(folder: Path) -> None:
    given = [*TINY[:-1], *QUICK, f"out={folder / 'out'}", f"cache={folder / 'cache'}", "experiment=counted", *ALONE]
    session = open_session(
        [*given, "backend=absent,quick,slow", "workload.length=16,[8,32]", "timing.seconds=0.2"],
        multirun=True,
        folders=[folder],
    )
    said: list[str] = []
    session.run(said.append)
    assert said[0].startswith("9 rows to measure; the rounds of those that can be measured take 1.8 s at least")
    counts = [line.split(":")[0] for line in said[1:] if ": latency, " in line]
    assert counts == ["8 rows left", "4 rows left", "2 rows left"]
    assert said.count("  quick: load, warm up, check") == 2, "once a job"
    assert said.count("  quick: warm up, check") == 1, "the process is there at a job's second point"
    assert said.count("  interleaved rounds: quick, slow") == 3
    assert not [line for line in said if "unavailable" in line], "the row says it"


def test_instances_and_points_share_a_system(folder: Path) -> None:
    rows = measure(
        folder, ["quick"], "launcher=throughput", "workload.length=[16,32]", "scenario=throughput",
        "scenario.seconds=0.1", "experiment=points",
    )  # fmt: skip
    both = read_rows(folder / "out" / "points")
    assert [row["point"]["length"] for row in both] == [16, 32]
    first, second = (row["cold"] for row in both)
    assert first["first_call_ms"] > 0
    assert second == {**first, "first_call_ms": None}, "the one process was opened for the first point"
    assert all(row["memory"]["peak_rss_bytes"] > 10**7 for row in both)
    row = rows["quick"]
    assert row["status"] == "ok", row["reason"]
    assert row["point"]["instances"] == row["machine"]["cores"]
    assert row["fairness"]["threads_budget"] == row["machine"]["cores"]


@pytest.mark.parametrize(
    ("count", "together", "groups"),
    [
        (0, 3, []),
        (3, 3, ["012"]),
        (4, 3, ["012", "03"]),
        (6, 3, ["012", "034", "05"]),
        (3, 1, ["01", "02"]),
    ],
)
def test_the_first_backend_is_in_every_group(count: int, together: int, groups: list[str]) -> None:
    specs = [BackendSpec(str(number), "a:B", "f32") for number in range(count)]
    assert ["".join(spec.name for spec in group) for group in _groups(specs, together)] == groups


def test_keys_tell_settings_apart(tmp_path: Path) -> None:
    from encast.bench.comparison import Comparison

    keys = set()
    for override in ("timing.seconds=1", "timing.seconds=2", "workload.seed=1", "backend.encast-f32.pin=false"):
        jobs = load_jobs(["backend=encast-f32", *TINY, override])
        keys |= set(Comparison(jobs[0], cache=tmp_path).keys())
    assert len(keys) == 3, "how long is measured is not what is measured"
