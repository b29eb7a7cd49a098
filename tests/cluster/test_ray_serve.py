"""``encast serve --ray`` and the application of config files on clusters of this machine: the answers of one server,
whatever is killed or replaced.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from mini_cluster import MiniCluster, mini_cluster

import encast
from encast.cli.main import main

TEXTS = [f"The {word} sat on the mat" + " again" * repeat for word in ("cat", "dog", "bird") for repeat in (0, 1, 3)]
PROXY = 8917
START_PROXY = """
import sys, ray
from ray import serve
ray.init(address=sys.argv[1], log_to_driver=False)
serve.start(proxy_location="HeadOnly", http_options={"port": int(sys.argv[2])})
"""
"""Ray's own proxy: before the first application, which would have none."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[MiniCluster]:
    with mini_cluster(nodes=2, cpus=1) as made:
        subprocess.run([sys.executable, "-c", START_PROXY, made.address, str(PROXY)], check=True)
        yield made


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact that gives other answers."""
    folder = tmp_path_factory.mktemp("other")
    made = make_checkpoint(folder / "bert", "bert", "embed", layers=1, pooling=("mean",), seed=1)
    return encast.compile(made, folder / "bert.encast", dtype="int8")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(*arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "encast.cli.main", "serve", *map(str, arguments), "--json", "--no-live"]
    return subprocess.Popen(
        [one for one in command if one != "--no-live" or "--ray" not in command], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def announced(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise AssertionError(process.communicate()[1])
    found: dict[str, Any] = json.loads(line)
    return found


def wait_for(what: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def ask(
    port: int, text: str, model: str = "a", connection: http.client.HTTPConnection | None = None, copies: int = 1
) -> Any:
    """The vector, or the status of a refusal."""
    own = connection or http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"model": model, "input": [text] * copies})
    own.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
    response = own.getresponse()
    content = response.read()
    if connection is None:
        own.close()
    return tuple(json.loads(content)["data"][0]["embedding"]) if response.status == 200 else response.status


def get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    response = connection.getresponse()
    content = response.read().decode()
    connection.close()
    return response.status, content


def servers_of(port: int) -> set[str]:
    """The addresses of the servers that are ready, as the metrics name them."""
    lines = get(port, "/metrics")[1].splitlines()
    return {
        line.split('server="')[1].split('"')[0]
        for line in lines
        if line.startswith("encast_ready{") and line.endswith(" 1.0")
    }


def wait_for_servers(port: int, count: int) -> None:
    """Ray Serve says that an application runs a moment before its gateways are told of the servers."""
    wait_for(lambda: len(servers_of(port)) == count)


class Load:
    """Asks without end; ``wrong`` answers are those that ``right`` does not have for their text."""

    def __init__(self, port: int, right: dict[str, set[Any]], clients: int = 4, copies: int = 1) -> None:
        self._port, self._right, self._copies = port, right, copies
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.latest: Any = None
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._stop.is_set():
            text = TEXTS[number % len(TEXTS)]
            number += 1
            try:
                answer = ask(self._port, text, connection=connection, copies=self._copies)
            except (OSError, http.client.HTTPException) as error:
                self._count("failed", repr(error))
                connection.close()
                continue
            if isinstance(answer, int):
                self._count("failed", str(answer))
            else:
                self._count("right" if answer in self._right[text] else "wrong", "")
        connection.close()

    def _count(self, what: str, reason: str) -> None:
        self.counts[what] += 1
        if reason:
            self.failures.append(reason)

    def more(self, count: int) -> None:
        """Returns after so many more right answers."""
        before = self.counts["right"]
        wait_for(lambda: self.counts["right"] >= before + count)

    def end(self) -> Counter[str]:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        print(dict(self.counts), self.failures[:5])
        return self.counts


@pytest.fixture(scope="module")
def one_server(artifact: Path, other: Path) -> Iterator[int]:
    process = start(f"a={artifact}", f"b={other}", "--port", 0, "--no-pin")
    yield int(announced(process)["url"].rpartition(":")[2])
    process.terminate()
    process.communicate(timeout=60)


@pytest.fixture(scope="module")
def right(one_server: int) -> dict[str, set[Any]]:
    return {text: {ask(one_server, text)} for text in TEXTS}


@pytest.fixture(scope="module")
def place(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that a test may replace."""
    return Path(shutil.copytree(artifact, tmp_path_factory.mktemp("place") / "a.encast"))


@pytest.fixture(scope="module")
def served(cluster: MiniCluster, place: Path, other: Path) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """By two servers, of two models."""
    port = free_port()
    process = start(f"a={place}", f"b={other}", "--ray", cluster.address, "--port", port)
    assert announced(process)["servers"] == 2
    yield port, process
    if process.poll() is None:
        process.terminate()
        process.communicate(timeout=90)


def test_a_cluster_answers_as_one_server(served: tuple[int, Any], one_server: int, artifact: Path) -> None:
    port = served[0]
    assert len(servers_of(port)) == 2
    for path in ("/openapi.json", "/v1/models", "/health/ready", "/", "/nothing"):
        assert get(port, path) == get(one_server, path), path
    for text in TEXTS:
        for model in ("a", "b", "c"):
            assert ask(port, text, model) == ask(one_server, text, model)
    families = {line for line in get(one_server, "/metrics")[1].splitlines() if line.startswith("# TYPE")}
    text = get(port, "/metrics")[1]
    assert families <= set(text.splitlines())
    assert "encast_gateway_servers 2" in text


def test_a_server_and_its_replica_are_killed_under_load(
    served: tuple[int, Any], cluster: MiniCluster, right: dict[str, set[Any]]
) -> None:
    port = served[0]
    for who in (b"encast.cli.main", b"ServeReplica:encast:servers"):
        before = servers_of(port)
        assert len(before) == 2
        load = Load(port, right)
        load.more(50)
        os.kill(cluster.processes(who)[0], signal.SIGKILL)
        wait_for(lambda before=before: len(now := servers_of(port)) == 2 and now != before)
        load.more(50)
        counts = load.end()
        assert (counts["wrong"], counts["failed"]) == (0, 0)


def test_artifacts_are_opened_again(
    served: tuple[int, Any], place: Path, other: Path, one_server: int, right: dict[str, set[Any]]
) -> None:
    """SIGHUP, with another artifact in the place of the first, and back."""
    port, process = served
    fresh = {text: ask(one_server, text, "b") for text in TEXTS}
    load = Load(port, {text: {*right[text], fresh[text]} for text in TEXTS})
    load.more(20)
    old = place.with_name("old.encast")
    for source in (other, old):
        gone = place.with_name(f"gone-{source.name}") if source is old else old
        os.rename(place, gone)
        shutil.copytree(source, place)
        process.send_signal(signal.SIGHUP)
        expected = {fresh[TEXTS[0]]} if source is other else right[TEXTS[0]]
        # All of them: each is asked in turn.
        wait_for(lambda expected=expected: all(ask(port, TEXTS[0]) in expected for _ in range(10)))
        load.more(20)
    counts = load.end()
    assert (counts["wrong"], counts["failed"]) == (0, 0)


def test_a_node_is_killed_under_load(served: tuple[int, Any], cluster: MiniCluster, right: dict[str, set[Any]]) -> None:
    port = served[0]
    before = servers_of(port)
    load = Load(port, right)
    load.more(50)
    cluster.kill(0)
    load.more(50)
    cluster.add()
    wait_for(lambda: len(now := servers_of(port)) == 2 and now != before)
    load.more(50)
    counts = load.end()
    assert counts["wrong"] == 0
    # A gateway dies with its node: the clients that it had see their connections end, once each.
    assert counts["failed"] <= 4, load.failures


def test_sigterm_answers_and_leaves_nothing(
    served: tuple[int, subprocess.Popen[str]], cluster: MiniCluster, right: dict[str, set[Any]]
) -> None:
    port, process = served
    load = Load(port, right, clients=2)
    load.more(20)
    process.terminate()
    wait_for(lambda: load.counts["failed"] > 0)
    counts = load.end()
    assert counts["wrong"] == 0
    # Connections end between two requests, or are refused; nothing that was accepted is dropped.
    assert not {one for one in load.failures if one.isdigit()}, load.failures[:5]
    _, said = process.communicate(timeout=90)
    assert process.returncode == 0, said
    assert "ending: what was accepted is answered first" in said
    wait_for(lambda: not cluster.processes(b"encast.cli.main") and not cluster.processes(b"ServeReplica:"))


@contextlib.contextmanager
def deployed(cluster: MiniCluster, config: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """As ``serve deploy`` does it; the function deploys another config, and returns the application's status."""
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:

        def deploy(config: dict[str, Any]) -> Any:
            _get_global_client().deploy_apps(ServeDeploySchema(applications=[config]))
            status = None

            def settled() -> bool:
                nonlocal status
                status = serve.status().applications.get(config["name"])
                return status is not None and status.status in ("RUNNING", "DEPLOY_FAILED", "UNHEALTHY")

            time.sleep(0.5)
            wait_for(settled)
            return status

        try:
            assert deploy(config).status == "RUNNING"
            yield deploy
        finally:
            serve.delete(config["name"])
    finally:
        ray.shutdown()


def application(port: int, path: Path, **args: Any) -> dict[str, Any]:
    servers = {"name": "servers", "user_config": {"models": {"a": str(path)}}}
    return {
        "name": "texts", "route_prefix": "/", "import_path": "encast.cluster.serving:app",
        "args": {"models": {"a": str(path)}, "port": port, "options": {"drain-s": 5}, **args},
        "deployments": [servers],
    }  # fmt: skip


def test_a_config_file_rolls_out_an_artifact(
    cluster: MiniCluster, artifact: Path, other: Path, right: dict[str, set[Any]], one_server: int
) -> None:
    port = free_port()
    fresh = {text: ask(one_server, text, "b") for text in TEXTS}
    config = application(port, artifact)
    with deployed(cluster, config) as deploy:
        wait_for_servers(port, 2)
        before = servers_of(port)
        load = Load(port, {text: {*right[text], fresh[text]} for text in TEXTS})
        load.more(20)
        # In place: the servers stay.
        changed = json.loads(json.dumps(config))
        changed["deployments"][0]["user_config"]["models"]["a"] = str(other)
        assert deploy(changed).status == "RUNNING"
        wait_for(lambda: all(ask(port, TEXTS[0]) == fresh[TEXTS[0]] for _ in range(10)))
        assert servers_of(port) == before
        load.more(20)
        counts = load.end()
        assert (counts["wrong"], counts["failed"]) == (0, 0)
        # Ray's own proxy, which the head has, asks the same servers.
        assert ask(PROXY, TEXTS[0]) == fresh[TEXTS[0]]
        assert get(PROXY, "/v1/models") == get(port, "/v1/models")


def test_replicas_follow_the_load(cluster: MiniCluster, artifact: Path, right: dict[str, set[Any]]) -> None:
    port = free_port()
    with deployed(cluster, application(port, artifact, replicas="1-2", queued_tokens=1)):
        wait_for_servers(port, 1)
        load = Load(port, right, clients=8, copies=500)
        wait_for_servers(port, 2)
        counts = load.end()
        assert (counts["wrong"], counts["failed"]) == (0, 0)


def test_what_cannot_be_served_is_said(
    cluster: MiniCluster, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, reason in (
        (["--grpc-port", "0"], "--grpc-port is for one machine; gateways speak HTTP alone"),
        (["--replica-cpus", "4"], "a server takes 4 CPUs, the largest node of the cluster has 1"),
        (["--replicas", "3"], "3 servers are asked for, and 2 fit on the nodes that there are"),
        (["--replicas", "3-2"], "replicas is '3-2'; give a number, or the least and the most as 2-8"),
        (["--api-keys", tmp_path / "none"], "the API keys cannot be read"),
    ):
        code = main(["serve", *map(str, [artifact, "--ray", cluster.address, "--port", free_port(), *more])])
        assert (code, reason in capsys.readouterr().err) == (2, True), more
    assert not cluster.processes(b"encast.cli.main")


def test_the_recipe_for_kuberay_is_a_config_of_ray_serve() -> None:
    import yaml
    from ray.serve.schema import ServeDeploySchema

    recipe = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "rayservice.yaml").read_text())
    config = yaml.safe_load(recipe["spec"]["serveConfigV2"])
    found = ServeDeploySchema(**config).model_dump(exclude_unset=True)
    assert found["proxy_location"] == "Disabled"
    assert found["applications"] == config["applications"]
