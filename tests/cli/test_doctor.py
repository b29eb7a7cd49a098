"""What ``encast doctor`` and ``encast kernels`` say."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

from encast.ceilings import Ceilings, Fingerprint, Kept
from encast.cli.doctor import Finding, Level, _lines, diagnose
from encast.cli.main import main
from encast.machine import CgroupLimits, Core, HugePages, Machine, MemoryNode, quota_alone_limits, this_machine

pytestmark = pytest.mark.serial("times kernels and forwards")

FEATURES = ("", "avx2 fma", "avx2 fma avx512f")
NAMES = ("scalar", "avx2", "avx512")
ALL = [Level(name, features, "", True, "") for name, features in zip(NAMES, FEATURES, strict=True)]
HEALTHY = Machine(
    processor="Made-up Processor 9000",
    virtual=False,
    online=(0, 1, 2, 3),
    affinity=(0, 1, 2, 3),
    cores=tuple(Core((cpu,), 0, 0) for cpu in range(4)),
    caches=(),
    nodes=(MemoryNode(0, (0, 1, 2, 3), 8 << 30),),
    cgroup=CgroupLimits(),
    memory_bytes=8 << 30,
    governor="performance",
    huge_pages=HugePages("madvise", 2 << 20, 0, 0),
    allocator="glibc",
)
FINGERPRINT = Fingerprint(1, HEALTHY.processor, NAMES, (), 4, 4, ())
MEASURED = datetime(2026, 1, 1, tzinfo=timezone.utc)
READS = {("memory", 1): 2e10, ("memory", 4): 5e10}


def found(levels: list[Level] = ALL, **changes: object) -> list[Finding]:
    return diagnose(dataclasses.replace(HEALTHY, **changes), levels)  # type: ignore[arg-type]


def test_a_healthy_machine_has_no_findings() -> None:
    assert found() == []
    assert found(cgroup=CgroupLimits(4.0, (0, 1, 2, 3), 4 << 30)) == []


@pytest.mark.parametrize(
    ("changes", "subject", "words"),
    [
        ({"affinity": (1, 2)}, "affinity", "2 of 4 physical cores"),
        ({"cgroup": CgroupLimits(cpus=0.5)}, "cgroup", "0.5 of one CPU: after 50% of every period"),
        ({"cgroup": CgroupLimits(cpus=2.0)}, "cgroup", "2 CPUs, though 4 cores are in reach; 2 threads are used"),
        ({"cgroup": CgroupLimits(memory_bytes=100 << 20)}, "cgroup", "memory limit is 100 MiB"),
        ({"governor": "powersave"}, "frequency", "governor is powersave"),
        ({"huge_pages": HugePages("never", None, 0, 0)}, "huge pages", "are off"),
        ({"nodes": (MemoryNode(0, (0, 1, 2, 3), 0),)}, "numa", "memory node 0 has CPUs and no memory"),
        ({"cores": tuple(Core((cpu,), 0, cpu % 2) for cpu in range(4))}, "numa", "spans 2 memory nodes"),
    ],
)
def test_each_trouble_is_one_finding_with_a_remedy(changes: dict[str, object], subject: str, words: str) -> None:
    (finding,) = found(**changes)
    assert finding.subject == subject
    assert words in finding.problem
    assert finding.remedy


def test_a_quota_that_is_no_whole_number_says_so() -> None:
    problems = [finding.problem for finding in found(cgroup=CgroupLimits(cpus=2.5))]
    assert len(problems) == 2
    assert "0.5 of a CPU cannot carry a thread" in problems[1]


def lines(**changes: object) -> str:
    return "\n".join(text for _, text in _lines(dataclasses.replace(HEALTHY, **changes), ALL))  # type: ignore[arg-type]


def test_what_the_kernel_allows_of_huge_pages() -> None:
    assert "arenas have them, and so would weights with ENCAST_COPY_WEIGHTS=1" in lines()
    late = lines(huge_pages=HugePages("always", 2 << 20, 0, 0, "never"))
    assert "arenas have them, where one is free at once, and so would weights" in late
    never = lines(huge_pages=HugePages("never", 2 << 20, 0, 0))
    assert "neither arenas nor weights can have them" in never
    assert "ENCAST_COPY_WEIGHTS" not in never


def test_the_report_tells_of_caches_slower_cores_and_offline_cpus() -> None:
    assert "last-level cache each" not in lines()
    assert "offline" not in lines()
    report = lines(cores=tuple(Core((cpu,), 0, 0, cpu // 2, cpu == 3) for cpu in range(4)), offline=(4, 5, 7))
    assert "2 groups of 2 cores share a last-level cache each" in report
    assert "1 of them are the slower kind" in report
    assert "CPUs 4-5,7 are offline" in report


def test_a_level_that_is_slow_here_is_named_with_the_reason() -> None:
    levels = [*ALL[:2], dataclasses.replace(ALL[2], slow="it is slower than avx2")]
    report = [text for _, text in _lines(HEALTHY, levels)]
    assert report[1] == "scalar, avx2, avx512; kernels use avx2"
    assert report[2] == "avx512: not chosen, it is slower than avx2"
    assert not found(levels=levels)


def test_levels() -> None:
    scalar_only = [
        ALL[0],
        dataclasses.replace(ALL[1], missing="avx2 fma", allowed=False),
        dataclasses.replace(ALL[2], missing="avx2", allowed=False),
    ]
    (finding,) = found(levels=scalar_only)
    assert "does not show avx2 fma" in finding.problem
    forced = [ALL[0], ALL[1], dataclasses.replace(ALL[2], allowed=False)]
    (finding,) = found(levels=forced)
    assert "down to avx2; this machine has avx512" in finding.problem


def test_knob_errors_are_findings() -> None:
    (finding,) = diagnose(HEALTHY, ALL, ["ENCAST_THREADS='x' is wrong"])
    assert (finding.subject, finding.problem) == ("knobs", "ENCAST_THREADS='x' is wrong")


def encast(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from encast.cli.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_threads_under_a_quota_are_bound_to_no_cpus() -> None:
    assert dict(_lines(HEALTHY, ALL))["threads"] == "4 by default, on CPUs 0, 1, 2, 3"
    limited = dict(_lines(dataclasses.replace(HEALTHY, cgroup=CgroupLimits(2.0)), ALL))
    assert limited["threads"] == "2 by default, bound to no CPUs, since a quota limits them"


def test_the_report_of_this_machine() -> None:
    pytest.importorskip("encast._core", reason="the native core is not built")
    done = encast("doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert set(report["affinity"]) == os.sched_getaffinity(0)
    assert report["isa_levels"][0] == {
        "name": "scalar",
        "features": "",
        "missing": "",
        "allowed": True,
        "slow": "",
    }
    if quota_alone_limits(this_machine()):
        assert report["thread_cpus"] == report["affinity"]
    else:
        assert len(report["thread_cpus"]) == report["default_threads"]
    lines = encast("doctor").stdout.splitlines()
    assert any(line.split()[:1] == ["isa"] and report["isa_best"] in line for line in lines)


def test_a_wrong_level_is_a_finding_and_no_crash() -> None:
    pytest.importorskip("encast._core", reason="the native core is not built")
    done = encast("doctor", "--json", ENCAST_ISA="sse9")
    assert done.returncode == 0
    (finding,) = json.loads(done.stdout)["findings"]
    assert "ENCAST_ISA=sse9 is no level; this machine accepts scalar" in finding["problem"]


def test_kernels_lists_what_is_chosen() -> None:
    core = pytest.importorskip("encast._core", reason="the native core is not built")
    done = encast("kernels", "--json")
    rows = json.loads(done.stdout)
    assert [row["name"] for row in rows] == [row["name"] for row in core.kernels()]
    for row in rows:
        of_class = (row["op"], row["arithmetic"])
        chosen = [count for count in (1, 16, 1024) if core.select_kernel(*of_class, count) == row["name"]]
        assert row["chosen_for"] == chosen
    assert any(row["chosen_for"] for row in rows)
    table = encast("kernels").stdout.splitlines()
    assert len(table) == len(rows) + 1


def test_a_forced_level_chooses_only_its_kernels() -> None:
    pytest.importorskip("encast._core", reason="the native core is not built")
    rows = json.loads(encast("kernels", "--json", ENCAST_ISA="scalar").stdout)
    assert {row["isa"] for row in rows if row["chosen_for"]} == {"scalar"}
    assert {row["isa"] for row in rows if row["allowed"]} == {"scalar"}
    done = encast("kernels", ENCAST_ISA="sse9")
    assert done.returncode == 2
    assert "accepts scalar" in done.stderr
    assert "Traceback" not in done.stderr


def test_ceilings_are_measured_kept_and_shown(tmp_path: Path) -> None:
    pytest.importorskip("encast._core", reason="the native core is not built")
    cache = {"ENCAST_CACHE_DIR": str(tmp_path / "cache")}
    assert json.loads(encast("doctor", "--json", **cache).stdout)["ceilings"] is None
    assert "encast doctor --measure" in encast("doctor", **cache).stdout
    assert not (tmp_path / "cache").exists()
    done = encast("doctor", "--measure", "--json", **cache)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    measured = report["ceilings"]
    (path,) = (tmp_path / "cache").iterdir()
    assert measured["path"] == str(path)
    threads = {1, report["default_threads"]}
    levels = {level["name"] for level in report["isa_levels"] if level["allowed"]}
    peaks = {(row["dtype"], row["isa"], row["threads"]) for row in measured["instruction_peaks"]}
    assert {(dtype, isa) for dtype, isa, _ in peaks} >= {(dtype, "scalar") for dtype in ("f32", "bf16", "int8")}
    assert {isa for _, isa, _ in peaks} <= levels
    assert {count for _, _, count in peaks} == threads
    assert {row["level"] for row in measured["read_bandwidths"]} >= {"memory"}
    assert all(row["operations_per_second"] > 0 for row in measured["instruction_peaks"])
    assert (measured["handoff_nanoseconds"] > 0) == (report["default_threads"] > 1)
    # Kept: the next report shows the same figures.
    assert json.loads(encast("doctor", "--json", **cache).stdout)["ceilings"] == measured
    assert f"kept in {path}" in encast("doctor", **cache).stdout
    # Damage is a finding, and measurements of another level are others.
    path.write_text("{")
    (finding,) = [
        f for f in json.loads(encast("doctor", "--json", **cache).stdout)["findings"] if f["subject"] == "ceilings"
    ]
    assert "holds no ceilings of this machine" in finding["problem"]
    assert "encast doctor --measure" in finding["remedy"]


def test_ceilings_that_cannot_be_kept_are_shown_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("encast._core", reason="the native core is not built")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ENCAST_CACHE_DIR", str(tmp_path / "file"))
    measured = Ceilings(FINGERPRINT, MEASURED, {("f32", "avx2", 1): 9e9, ("f32", "avx2", 4): 36e9}, READS, 500.0, ())
    monkeypatch.setattr("encast.ceilings.measure", lambda machine, progress: measured)
    assert main(["doctor", "--measure"]) == 2
    shown = capsys.readouterr()
    assert "GB/s read" in shown.out
    assert "set ENCAST_CACHE_DIR to a folder that can be written" in shown.err
    assert "Traceback" not in shown.err


def test_nothing_is_measured_with_a_wrong_knob() -> None:
    pytest.importorskip("encast._core", reason="the native core is not built")
    done = encast("doctor", "--measure", ENCAST_CACHE_DIR="here")
    assert (done.returncode, done.stdout) == (2, "")
    assert "ENCAST_CACHE_DIR accepts the absolute path of a folder" in done.stderr


def test_doubts_are_a_finding() -> None:
    assert diagnose(HEALTHY, ALL, kept=Kept(None)) == []
    doubtful = Ceilings(FINGERPRINT, MEASURED, {}, {}, 0.0, ("L3: it swung",))
    (finding,) = diagnose(HEALTHY, ALL, kept=Kept(None, doubtful))
    assert "noisy when they were measured: L3: it swung" in finding.problem
    assert diagnose(HEALTHY, ALL, kept=Kept(None, dataclasses.replace(doubtful, doubts=()))) == []
