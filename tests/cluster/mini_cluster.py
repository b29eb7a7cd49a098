"""A Ray cluster of several nodes on this machine, whose nodes can be killed as a machine that loses its power."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["MiniCluster", "mini_cluster"]

# A dead node is noticed within seconds, not half a minute.
_SYSTEM = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_timeout_ms": 500}


def _children(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found += _children(int(entry.name))
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class MiniCluster:
    """``nodes`` of ``cpus`` logical CPUs and ``gpus`` each, besides a head without any, where the driver lives."""

    def __init__(self, nodes: int, cpus: int = 1, gpus: int = 0) -> None:
        from ray.cluster_utils import Cluster

        self._cpus, self._gpus = cpus, gpus
        # Names of sockets may have 107 bytes.
        self._temporary = tempfile.mkdtemp(prefix="encast-ray-", dir="/tmp")
        (Path(self._temporary) / "ray").mkdir()
        self._before = os.environ.get("RAY_TMPDIR")
        os.environ["RAY_TMPDIR"] = self._temporary
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": _SYSTEM}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        self.nodes: list[Any] = []
        for _ in range(nodes):
            self.add()

    def add(self) -> None:
        self.nodes.append(self._cluster.add_node(num_cpus=self._cpus, num_gpus=self._gpus, include_dashboard=False))

    def kill(self, index: int) -> None:
        """SIGKILL for the raylet of a node and all its workers."""
        node = self.nodes.pop(index)
        raylet = node.all_processes["raylet"][0].process
        for pid in _children(raylet.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raylet.wait()

    def replicas(self) -> list[int]:
        """The processes of encast's actors, on all nodes."""
        return self.processes(b"Replica")

    def processes(self, words: bytes) -> list[int]:
        """The processes below the nodes in whose command line these stand."""
        pids = [pid for node in self.nodes for pid in _children(node.all_processes["raylet"][0].process.pid)]
        return [pid for pid in pids if words in _command(pid)]

    def close(self) -> None:
        self._cluster.shutdown()
        if self._before is None:
            del os.environ["RAY_TMPDIR"]
        else:
            os.environ["RAY_TMPDIR"] = self._before
        shutil.rmtree(self._temporary, ignore_errors=True)


@contextlib.contextmanager
def mini_cluster(nodes: int, cpus: int = 1, gpus: int = 0) -> Iterator[MiniCluster]:
    began = time.monotonic()
    cluster = MiniCluster(nodes, cpus, gpus)
    print(f"a cluster of {nodes} nodes after {time.monotonic() - began:.1f} s")
    try:
        yield cluster
    finally:
        cluster.close()
