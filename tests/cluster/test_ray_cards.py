"""Jobs and servers on the cards of a Ray cluster: a node of this machine that says it has two GPUs, and the device
``torch-cpu`` in their place.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make test-gpu")

from job_rows import content, text
from mini_cluster import MiniCluster, mini_cluster
from test_ray_jobs import run
from test_ray_serve import TEXTS, announced, ask, free_port, start, wait_for, wait_for_servers

import encast
from encast.cli.main import main


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each process that computes shards says which cards it sees."""
    return tmp_path_factory.mktemp("seen")


@pytest.fixture(scope="module")
def cluster(seen: Path) -> Iterator[MiniCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENCAST_TEST_CARDS_SEEN", str(seen))
        # Encast itself shows each process its cards, also where Ray was told not to.
        patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
        # Ray would give its processes a number of their own.
        patch.setenv("OMP_NUM_THREADS", "1")
        with mini_cluster(nodes=1, cpus=2, gpus=2) as made:
            yield made


def test_a_job_on_cards_writes_what_one_process_writes(
    cluster: MiniCluster, artifact: Path, tmp_path: Path, seen: Path
) -> None:
    rows = tmp_path / "rows.txt"
    rows.write_text("".join(text(number) + " slow\n" for number in range(120)))
    options = [artifact, rows, "--shard-rows", 10, "--device", "torch-cpu", "--dtype", "bf16"]
    assert run(*options, "-o", f"{tmp_path}/alone/")[0] == 0
    assert run(*options, "-o", f"{tmp_path}/many/", "--ray", cluster.address)[0] == 0
    assert content(tmp_path / "many") == content(tmp_path / "alone")
    cards = [path.read_text() for path in seen.iterdir()]
    assert set(cards) <= {"0", "1"}
    assert len(set(cards)) == len(cards) > 0


def test_each_server_has_a_card_of_its_own(
    cluster: MiniCluster, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    options = [f"a={artifact}", "--ray", cluster.address, "--port", port, "--device", "torch-cpu", "--batch-tokens", 64]
    assert main(["serve", *map(str, options), "--replica-gpus", "4"]) == 2
    assert "a server takes 4 GPUs, the largest node of the cluster has 2" in capsys.readouterr().err
    process = start(*options, "--replica-gpus", 1)
    try:
        assert announced(process)["servers"] == 2
        wait_for_servers(port, 2)
        commands = {
            pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in cluster.processes(b"--device")
        }
        assert [command.count(b"--device") for command in commands.values()] == [1, 1]
        environments = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in commands]
        cards = [one for each in environments for one in each if one.startswith(b"CUDA_VISIBLE_DEVICES=")]
        assert sorted(cards) == [b"CUDA_VISIBLE_DEVICES=0", b"CUDA_VISIBLE_DEVICES=1"]
        with encast.load(artifact, device="torch-cpu") as card:
            expected = card.embed(TEXTS)
        found = [ask(port, one) for one in TEXTS]
        np.testing.assert_allclose(np.float32(found), expected, atol=1e-5)
    finally:
        process.terminate()
        process.communicate(timeout=90)
    wait_for(lambda: not cluster.processes(b"--device"))
