"""``encast run --ray`` on clusters of this machine: the bits of the local job, whatever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from job_rows import content, make_rows, text
from mini_cluster import MiniCluster, mini_cluster

import encast.cluster.executor as executor
from encast.cli.main import main
from encast.cli.run_job import SOME_ROWS_BAD
from encast.jobs.folder import FINISHED


@pytest.fixture(scope="module")
def cluster() -> Iterator[MiniCluster]:
    with mini_cluster(nodes=2, cpus=2) as made:
        yield made


def start(*arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "encast.cli.main", "run", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str]:
    _, said = process.communicate(timeout=seconds)
    print(said)
    return process.returncode, said


def run(*arguments: Any) -> tuple[int, str]:
    return ended(start(*arguments))


def wait_for(what: Callable[[], bool], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def finished(out: Path) -> list[int]:
    """The shards that the journal has, in its order."""
    path = out / FINISHED
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [entry["shard"] for entry in map(json.loads, lines) if "shard" in entry]


def test_a_cluster_writes_what_one_process_writes(
    cluster: MiniCluster, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(tmp_path / "rows", 300)
    options = [artifact, rows, "--shard-rows", 64, "--format", "parquet"]
    assert run(*options, "-o", tmp_path / "alone")[0] == SOME_ROWS_BAD
    # In this process, so that the cluster counts the rows of these small files too.
    monkeypatch.setattr(executor, "COUNT_HERE_BYTES", 0)
    options += ["-o", tmp_path / "many", "--ray", cluster.address, "--threads", "1", "--instances", "2"]
    assert main(["run", *map(str, options)]) == SOME_ROWS_BAD
    assert len(content(tmp_path / "alone")) == 20 + 5 + 1  # one JSONL file has bad rows in every shard
    assert content(tmp_path / "many") == content(tmp_path / "alone")
    assert not list((tmp_path / "many").glob(".encast/*/*"))


def test_nodes_and_drivers_that_are_killed_lose_and_double_nothing(
    cluster: MiniCluster, artifact: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"{text(number)} slow"}) + "\n" for number in range(800)))
    out = tmp_path / "out"
    options = [artifact, rows, "--shard-rows", 20, "-o", out]
    seen: dict[int, int] = {}

    def note() -> None:
        for shard in finished(out):
            seen.setdefault(shard, (out / f"part-{shard:05d}.jsonl").stat().st_mtime_ns)

    for _ in range(2):
        before = len(finished(out))
        driver = start(*options, "--ray", cluster.address)
        wait_for(lambda before=before: len(finished(out)) > before + 3)
        cluster.kill(0)
        assert 0 < len(finished(out)) < 40
        wait_for(lambda before=before: len(finished(out)) > before + 8)
        driver.kill()
        driver.communicate()
        assert 0 < len(finished(out)) < 40
        note()
        cluster.add()  # which takes long on a busy machine
    driver = start(*options, "--ray", cluster.address)
    before = len(finished(out))
    wait_for(lambda: len(finished(out)) > before + 3)
    cluster.kill(1)
    cluster.add()
    code, said = ended(driver)
    assert code == 0
    assert "rows were finished before" in said
    # Finished once, and never written again.
    assert sorted(finished(out)) == list(range(40))
    assert {shard: (out / f"part-{shard:05d}.jsonl").stat().st_mtime_ns for shard in seen} == seen
    assert run(artifact, rows, "--shard-rows", 20, "-o", tmp_path / "alone")[0] == 0
    assert content(out) == content(tmp_path / "alone")
    assert not list(out.glob(".encast/*/*"))


def test_a_shard_that_kills_its_worker_is_named_and_the_others_are_finished(
    cluster: MiniCluster, artifact: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.txt"
    rows.write_text("".join("poison\n" if number == 33 else text(number) + "\n" for number in range(100)))
    code, said = run(artifact, rows, "--shard-rows", 10, "-o", tmp_path / "out", "--ray", cluster.address)
    assert code == 2
    assert "1 of 10 shards failed, the others are finished" in said
    assert f"shard 3 ({rows}, 10 rows from row 31): the process that computed it died" in said
    assert sorted(finished(tmp_path / "out")) == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_a_worker_that_is_killed_and_one_that_hangs_are_started_again(
    cluster: MiniCluster, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(executor, "_WATCH_S", 0.5)
    monkeypatch.setattr(executor, "_STILL_S", 3.0)
    rows = tmp_path / "rows.txt"
    rows.write_text("slow\n" * 300)
    out = tmp_path / "out"
    harmed: list[int] = []

    def harm() -> None:
        wait_for(lambda: len(finished(out)) > 3)
        harmed.extend(cluster.replicas())
        for pid, how in zip(harmed, (signal.SIGKILL, signal.SIGSTOP), strict=True):
            os.kill(pid, how)

    thread = threading.Thread(target=harm)
    thread.start()
    assert main(["run", *map(str, [artifact, rows, "--shard-rows", 5, "-o", f"{out}/", "--ray", cluster.address])]) == 0
    thread.join()
    assert sorted(finished(out)) == list(range(60))
    assert "has done nothing for 3 s; it is started again" in capsys.readouterr().err
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in harmed))


def test_sigterm_ends_the_job_and_its_replicas(cluster: MiniCluster, artifact: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.txt"
    rows.write_text("slow\n" * 400)
    out = tmp_path / "out"
    driver = start(artifact, rows, "--shard-rows", 10, "-o", out, "--ray", cluster.address)
    wait_for(lambda: len(finished(out)) > 3)
    assert len(cluster.replicas()) == 2
    driver.send_signal(signal.SIGTERM)
    code, said = ended(driver)
    assert code == 143
    assert "of 40 shards are finished; the same command goes on" in said
    wait_for(lambda: not cluster.replicas())


def test_what_the_cluster_cannot_do_is_said(cluster: MiniCluster, artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    options = [artifact, tmp_path / "a.txt", "-o", f"{tmp_path}/out/"]
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        code, said = run(*options, "--ray", f"127.0.0.1:{other.server_port}")
        other.shutdown()
    assert (code, "no Ray cluster answers" in said) == (2, True), said
    for more, reason in (
        (["--ray", "127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1"),
        (["--ray", "ray://127.0.0.1:10001"], "give auto, or HOST:PORT"),
        (["--ray", cluster.address, "--threads", "4"], "takes 4 CPUs, the largest node of the cluster has 2"),
    ):
        code, said = run(*options, *more)
        assert (code, reason in said) == (2, True), said
        assert not (tmp_path / "out").exists()


def test_a_node_without_the_artifact(
    cluster: MiniCluster, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that joins a job is left out, one that was there from the beginning ends it."""
    rows = tmp_path / "rows.txt"
    rows.write_text("slow\n" * 20_000)
    out = tmp_path / "out"
    options = [artifact, rows, "--shard-rows", 10, "--ray", cluster.address, "-o"]
    driver = start(*options, out)
    wait_for(lambda: len(finished(out)) > 3)
    monkeypatch.setenv("ENCAST_TEST_WITHOUT_ARTIFACT", "1")
    cluster.add()
    assert driver.stderr is not None
    line = next(line for line in driver.stderr if "is left out: " in line)
    assert f"{artifact} is not there (on the node " in line
    before = len(finished(out))
    wait_for(lambda: len(finished(out)) > before + 3)
    driver.send_signal(signal.SIGINT)
    assert ended(driver)[0] == 130
    code, said = run(*options, tmp_path / "other")
    assert code == 2
    assert f"error: {artifact} is not there (on the node " in said
    cluster.kill(-1)
