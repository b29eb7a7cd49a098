"""What a worker on another machine checks before it computes, and what nobody needs who does not ask for a cluster."""

from __future__ import annotations

import gzip
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import encast.data.source as sources
import encast.jobs.run as running
from encast.cli.main import main
from encast.cluster import connection
from encast.errors import ArtifactError, ResourceError
from encast.jobs.folder import JOB_FILE, JobFolder
from encast.jobs.layout import Done, written
from encast.jobs.sealed import seal, unseal
from encast.jobs.worker import StoppedError, Worker


@pytest.fixture
def job(artifact: Path, tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("a\nb\n")
    assert main(["run", str(artifact), str(tmp_path / "a.txt"), "-o", f"{tmp_path}/out/"]) == 0
    return tmp_path / "out"


def rewrite(job: Path, **told: str) -> None:
    content = unseal((job / JOB_FILE).read_bytes())
    content["job"].update(told)
    (job / JOB_FILE).write_bytes(seal(content))


def test_storage_that_is_not_shared(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="--output must lie on storage that every node has under the same path"):
        Worker(tmp_path / "elsewhere", artifact, [])


def test_an_artifact_that_is_absent_or_another_one(artifact: Path, job: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="absent"):
        Worker(job, tmp_path / "absent.encast", [])
    rewrite(job, artifact="0" * 64)
    with pytest.raises(ArtifactError, match=r"is not the artifact of the job here .* copy the right one to every node"):
        Worker(job, artifact, [])


def test_another_version_of_encast(artifact: Path, job: Path) -> None:
    rewrite(job, encast="0.0.1")
    with pytest.raises(ResourceError, match=r"is installed here, the job is computed by 0\.0\.1"):
        Worker(job, artifact, [])


def test_a_shard_that_is_written_and_not_seen(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_SEEN_S", 0.0)
    shutil.move(job / "part-00000.jsonl", job.parent / "far")

    class Elsewhere:
        def run(self, shards: object, left: object, agree: object) -> object:
            assert left == [0]
            yield Done(0, 2, 0, written(job.parent / "far"))

    with JobFolder(job) as folder:
        assert folder.check(lambda count, fraction: None) == 1
        with pytest.raises(ResourceError, match="a worker wrote shard 0 there, and it is not seen here"):
            running.run_job(folder, Elsewhere(), lambda count, fraction: None)  # type: ignore[arg-type]


def test_passing_over_a_gzipped_file_is_progress_and_can_be_stopped(artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    lines = [os.urandom(40_000).hex() for _ in range(60)]
    path.write_bytes(gzip.compress("\n".join([*lines, "the last one"]).encode()))
    assert main(["run", str(artifact), str(path), "-o", f"{tmp_path}/out/", "--shard-rows", "60", "--json"]) == 0
    worker = Worker(tmp_path / "out", artifact, [str(path)], threads=1)
    try:
        seen: list[int] = []
        read = sources._Packed.read

        def look(self: Any, size: int = -1) -> bytes:
            seen.append(worker.progress()[1])
            if stopping and len(seen) == 3:
                worker.stop()
            return read(self, size)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sources._Packed, "read", look)
            stopping = False
            worker.run(1)
            assert max(seen) > 5
            assert seen == sorted(seen)
            whole, stopping = len(seen), True
            seen.clear()
            with pytest.raises(StoppedError):
                worker.run(1)
            assert len(seen) < whole / 2
    finally:
        worker.close()


@pytest.mark.parametrize("address", ["[::1]:{}", "127.0.0.1:{}"])
def test_an_address_of_ipv6_is_reached(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "need_modules", lambda *names: None)
    family = socket.AF_INET6 if "[" in address else socket.AF_INET
    try:
        server = socket.create_server(("::1" if "[" in address else "127.0.0.1", 0), family=family)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server:
        port = server.getsockname()[1]
        thread = threading.Thread(target=lambda: server.accept()[0].close())
        thread.start()
        with pytest.raises(ResourceError, match=r"it is no Ray cluster|Connection reset"):
            connection.connect(address.format(port))
        thread.join()


def test_without_ray(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    monkeypatch.setattr("encast.errors.find_spec", lambda name: None)
    assert main(["run", str(artifact), str(tmp_path / "a.txt"), "-o", f"{tmp_path}/out/", "--ray", "auto"]) == 2
    assert "not installed: ray; pip install 'encast[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_job_without_a_cluster_imports_none(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    code = (
        "import sys; from encast.cli.main import main; code = main(sys.argv[1:]);"
        "assert not {'ray', 'encast.cluster', 'pyarrow'} & set(sys.modules); sys.exit(code)"
    )
    arguments = ["run", str(artifact), str(tmp_path / "a.txt"), "-o", f"{tmp_path}/out/"]
    assert subprocess.run([sys.executable, "-c", code, *arguments], check=False).returncode == 0
