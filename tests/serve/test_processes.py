"""The life of a server: start, replacement of what dies, reload, and the end; with real processes."""

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
from checkpoints import make_checkpoint
from local import artifact, engine
from servers import Running, start_server

TEXTS = ["a cat sat", "dogs bark at night and sleep by day", "the model reads this"]
MANY = TEXTS * 300


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[Running]:
    # The wait is long enough for what waits while a busy machine starts an engine.
    with start_server(f"m={artifact(base, 'embed')}", "--alias", "also=m", "--max-wait-ms", "60000") as running:
        yield running


def call(url: str, method: str, path: str, body: Any = None, timeout: float = 30) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout)
    try:
        data = None if body is None else msgspec.json.encode(body)
        connection.request(method, path, data, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def embed(url: str, texts: list[str] = TEXTS, model: str = "m", timeout: float = 30) -> np.ndarray[Any, Any]:
    status, answer = call(url, "POST", "/encast/v1/embed", {"model": model, "texts": texts}, timeout)
    assert status == 200, answer
    return np.array(json.loads(answer)["results"], np.float32)


def bits(base: Path, name: str, texts: list[str] = TEXTS) -> bytes:
    return engine(base, name).embed(texts).tobytes()


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.01)


def ready(url: str) -> tuple[int, bytes]:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return call(url, "GET", "/health/ready")
    return 0, b""


class Load:
    """Threads that ask all the time, each on a connection of its own; what they got."""

    def __init__(self, url: str, texts: list[str] = TEXTS, threads: int = 4) -> None:
        self.answers: list[bytes] = []
        self.failures: list[str] = []
        self.begun = self.over = 0
        self._stop = False
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(url, texts), daemon=True) for _ in range(threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        self.more(4)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        for thread in self._threads:
            thread.join(60)

    def more(self, answers: int) -> None:
        """Waits for so many more."""
        wanted = self.over + answers
        wait_for(lambda: self.over >= wanted)

    def _ask(self, url: str, texts: list[str]) -> None:
        while not self._stop:
            with self._lock:
                self.begun += 1
            try:
                answer, failure = embed(url, texts).tobytes(), None
            except (OSError, http.client.HTTPException, AssertionError) as error:
                answer, failure = b"", repr(error)
                time.sleep(0.01)
            with self._lock:
                self.over += 1
                if failure is None:
                    self.answers.append(answer)
                else:
                    self.failures.append(failure)


def test_answers_have_the_bits_of_the_engine(server: Running, base: Path) -> None:
    assert embed(server.url).tobytes() == bits(base, "embed")
    assert embed(server.url, model="also").tobytes() == bits(base, "embed")
    assert call(server.url, "GET", "/health/live") == (200, b'{"status":"live","models":["m"]}')
    assert ready(server.url) == (200, b'{"status":"ready","models":["m"]}')


def test_a_curl_command_is_shown_that_works(server: Running) -> None:
    command = server.wait_for_line("out", "try: ").split("try: ")[1]
    done = subprocess.run(command.replace("curl ", "curl -sS "), shell=True, capture_output=True, check=True)
    assert len(json.loads(done.stdout)["results"]) == 2


def test_json_says_what_is_served(base: Path) -> None:
    command = [sys.executable, "-m", "encast.cli.main", "serve", "--json", "--port", "0", str(artifact(base, "embed"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        served = json.loads(process.stdout.readline())
        process.terminate()
        rest, said = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, "")
    assert [(model["name"], model["task"]) for model in served["models"]] == [("embed", "embed")]
    assert f"at {served['url']}" in said
    assert (served["pid"], served["grpc_port"]) == (process.pid, None)


def test_a_killed_engine_is_replaced_and_no_request_notices(server: Running, base: Path) -> None:
    expected = bits(base, "embed")
    with Load(server.url) as load:
        for _ in range(2):
            (pid,) = server.children("engine")
            seen = len(server.err)
            os.kill(pid, signal.SIGKILL)
            load.more(8)
            assert server.children("engine") != [pid]
            server.wait_for_line("err", "the engine of m ended with SIGKILL; it is started again", after=seen)
    assert set(load.answers) == {expected}
    assert load.failures == []
    wait_for(lambda: ready(server.url)[0] == 200)


def test_an_engine_that_hangs_is_replaced(server: Running, base: Path) -> None:
    (pid,) = server.children("engine")
    seen = len(server.err)
    os.kill(pid, signal.SIGSTOP)
    assert embed(server.url).tobytes() == bits(base, "embed")
    server.wait_for_line("err", "the engine of m was not heard for 10 s; it is started again", after=seen)
    assert server.children("engine") != [pid]


def test_a_killed_front_is_replaced(server: Running, base: Path) -> None:
    (pid,) = server.children("front")
    os.kill(pid, signal.SIGKILL)
    # A connection waits in the backlog until the next one takes it.
    assert embed(server.url).tobytes() == bits(base, "embed")
    assert server.children("front") != [pid]


def test_children_end_with_a_killed_supervisor(base: Path) -> None:
    with start_server(artifact(base, "embed")) as server:
        pids = server.children("engine") + server.children("front")
        assert len(pids) == 2
        server.process.kill()
        wait_for(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() and _runs(pid) for pid in pids))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_sigterm_answers_what_was_accepted(base: Path) -> None:
    expected = bits(base, "embed", MANY)
    with start_server(f"m={artifact(base, 'embed')}") as server:
        outcomes: list[bytes | str] = []

        def ask() -> None:
            try:
                outcomes.append(embed(server.url, MANY).tobytes())
            except (OSError, AssertionError) as error:
                outcomes.append(repr(error))

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        wait_for(lambda: _under_way(server) >= 6)
        server.signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        for thread in threads:
            thread.join()
        assert [outcome == expected for outcome in outcomes] == [True] * 6
        with pytest.raises(ConnectionRefusedError):
            call(server.url, "GET", "/health/live")


def _under_way(server: Running) -> int:
    """Connections to the server's port that are established, as seen by its side."""
    port = urlsplit(server.url).port
    assert port is not None
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "01" for line in lines)


def test_processes_have_one_heap_each(server: Running) -> None:
    for module in ("front", "engine"):
        (pid,) = server.children(module)
        assert b"MALLOC_ARENA_MAX=1" in Path("/proc", str(pid), "environ").read_bytes().split(b"\0")


def _refuses(server: Running) -> bool:
    url = urlsplit(server.url)
    try:
        socket.create_connection((url.hostname, url.port)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_second_signal_ends_at_once_and_new_connections_are_refused_before(base: Path) -> None:
    with start_server(f"m={artifact(base, 'embed')}") as server:
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
        connection.putrequest("POST", "/encast/v1/embed")
        connection.putheader("content-length", "100")
        connection.endheaders()  # a body that does not come would be waited for
        call(server.url, "GET", "/health/live")
        server.signal(signal.SIGTERM)
        server.wait_for_line("out", "ending")
        wait_for(lambda: _refuses(server))  # not taken on and reset at the end
        assert server.process.poll() is None
        server.signal(signal.SIGTERM)
        assert server.process.wait(5) == 128 + signal.SIGTERM
        connection.close()


@pytest.fixture
def linked(tmp_path: Path, base: Path) -> Path:
    link = tmp_path / "served.encast"
    link.symlink_to(artifact(base, "embed"))
    return link


def relink(link: Path, target: Path) -> None:
    fresh = link.with_suffix(".new")
    fresh.symlink_to(target)
    fresh.rename(link)


def instances(url: str) -> list[bytes]:
    return [line for line in call(url, "GET", "/metrics")[1].splitlines() if line.startswith(b"encast_instances{")]


def test_a_reload_under_load_loses_nothing(linked: Path, base: Path) -> None:
    one, other = bits(base, "embed"), bits(base, "other-embed")
    with start_server(f"m={linked}", "--fronts", "2") as server:
        (pid,) = server.children("engine")
        wait_for(lambda: bool(instances(server.url)))
        before = instances(server.url)
        with Load(server.url) as load:
            relink(linked, artifact(base, "other-embed"))
            server.signal(signal.SIGHUP)
            server.wait_for_line("out", "reloaded; new: m")
            load.more(8)
        assert load.failures == []
        assert set(load.answers) == {one, other}
        assert embed(server.url).tobytes() == other
        wait_for(lambda: pid not in server.children("engine"))
        assert len(server.children("engine")) == 1
        wait_for(lambda: instances(server.url) == before)  # those of the engine that ended are gone
        # A front that starts later has the new model too.
        os.kill(server.children("front")[0], signal.SIGKILL)
        assert {embed(server.url).tobytes() for _ in range(8)} == {other}


def test_a_front_that_starts_during_a_reload_has_the_new_model(linked: Path, base: Path) -> None:
    with start_server(f"m={linked}", "--fronts", "2") as server:
        relink(linked, artifact(base, "other-embed"))
        # The second front is starting when the reload comes: it has the new model when it answers.
        os.kill(server.children("front")[1], signal.SIGKILL)
        server.signal(signal.SIGHUP)
        server.signal(signal.SIGHUP)
        server.wait_for_line("out", "reloaded; new: m")
        other = bits(base, "other-embed")
        assert {embed(server.url).tobytes() for _ in range(16)} == {other}


def test_the_shadow_has_the_lowest_priority_and_a_model_may_be_called_so(base: Path) -> None:
    given = artifact(base, "embed")
    with start_server(f"shadow={given}", "--shadow", f"{given}:100%") as server:
        assert embed(server.url, model="shadow").tobytes() == bits(base, "embed")
        nices = {pid: _nices(pid) for pid in server.children("engine")}
        assert sorted(map(sorted, nices.values())) == [[os.nice(0)], [19]], nices


def test_several_models_leave_the_choice_of_cores_to_the_system(base: Path) -> None:
    one, other = artifact(base, "embed"), artifact(base, "other-embed")
    with start_server(f"a={one}", f"b={other}") as server:
        for pid in server.children("engine"):
            masks = {os.sched_getaffinity(int(entry)) == os.sched_getaffinity(0) for entry in _threads(pid)}
            assert masks == {True}
        assert embed(server.url, model="a").tobytes() == bits(base, "embed")
        assert embed(server.url, model="b").tobytes() == bits(base, "other-embed")


def _threads(pid: int) -> list[str]:
    return os.listdir(f"/proc/{pid}/task")


def _nices(pid: int) -> set[int]:
    """Of all threads of a process."""
    stats = [Path(f"/proc/{pid}/task/{thread}/stat").read_text() for thread in _threads(pid)]
    assert len(stats) > 1
    return {int(stat.rpartition(")")[2].split()[16]) for stat in stats}


def test_a_bad_artifact_is_refused_at_a_reload(linked: Path, base: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.encast"
    shutil.copytree(artifact(base, "other-embed"), bad)
    weights = bytearray((bad / "weights.safetensors").read_bytes())
    weights[-100] ^= 0x40
    (bad / "weights.safetensors").write_bytes(weights)
    with start_server(f"m={linked}") as server:
        for target, why in ((bad, "reload: .*checksum.*served on"), (tmp_path / "absent", "reload: .*no folder")):
            relink(linked, target)
            server.signal(signal.SIGHUP)
            server.wait_for_line("err", why)
            assert embed(server.url).tobytes() == bits(base, "embed")
            assert ready(server.url)[0] == 200
        relink(linked, artifact(base, "embed"))
        server.signal(signal.SIGHUP)
        server.wait_for_line("out", "reloaded; no model has changed")
        assert len(server.children("engine")) == 1


def test_a_crash_loop_makes_it_not_ready_and_says_why(base: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.encast"
    shutil.copytree(artifact(base, "embed"), own)
    with start_server(f"m={own}") as server:
        (own / "graph.json").rename(own / "away")
        os.kill(server.children("engine")[0], signal.SIGKILL)
        wait_for(lambda: ready(server.url)[0] == 503 and b"the engine of m ends again" in ready(server.url)[1])
        assert str(own).encode() not in ready(server.url)[1]
        server.wait_for_line("err", "graph.json")
        status, answer = call(server.url, "POST", "/encast/v1/embed", {"texts": TEXTS})
        assert status == 503, answer
        assert call(server.url, "GET", "/health/live")[0] == 200
        (own / "away").rename(own / "graph.json")
        wait_for(lambda: ready(server.url)[0] == 200)
        assert embed(server.url).tobytes() == bits(base, "embed")


def test_a_replaced_folder_is_never_mixed_with_the_old_one(base: Path, tmp_path: Path) -> None:
    """A front that starts after the folder was replaced has no tokenizer of another model than the engine's."""
    own = tmp_path / "own.encast"
    shutil.copytree(artifact(base, "embed"), own)
    with start_server(f"m={own}") as server:
        own.rename(tmp_path / "old.encast")
        shutil.copytree(artifact(base, "other-embed"), own)
        os.kill(server.children("front")[0], signal.SIGKILL)
        server.wait_for_line("err", "was replaced by another artifact")
        server.signal(signal.SIGHUP)
        server.wait_for_line("out", "reloaded; new: m")
        wait_for(lambda: ready(server.url)[0] == 200)
        assert embed(server.url).tobytes() == bits(base, "other-embed")


def test_compiling_holds_up_no_end() -> None:
    code = (
        "import asyncio, time; from encast.serve.supervisor import in_daemon\n"
        "async def main():\n"
        "    print(await in_daemon(lambda: 'compiled'))\n"
        "    await asyncio.wait_for(in_daemon(lambda: time.sleep(600)), 0.1)\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "compiled\n")
    assert "TimeoutError" in ended.stderr


def test_a_checkpoint_is_compiled_once(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tiny", "bert", "embed", layers=1, hidden=32, heads=2, pooling=("mean",))
    env = {"ENCAST_CACHE_DIR": str(tmp_path / "cache")}
    with start_server(folder, "--dtype", "f32", env=env) as server:
        first = embed(server.url, model="tiny").tobytes()
    (made,) = (tmp_path / "cache" / "served" / "artifacts").glob("*.encast")
    before = made.stat().st_ino
    with start_server(folder, "--dtype", "f32", env=env) as server:
        assert embed(server.url, model="tiny").tobytes() == first
    assert [path.stat().st_ino for path in made.parent.glob("*.encast")] == [before]


def test_two_servers_that_start_at_once_compile_once(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tiny", "bert", "embed", layers=1, hidden=32, heads=2, pooling=("mean",))
    code = (
        "from encast.serve.sources import read_sources; import sys; "
        "path = read_sources([sys.argv[1]], [], None)[0].prepare(); print(path.stat().st_ino)"
    )
    env = {**os.environ, "ENCAST_CACHE_DIR": str(tmp_path / "cache")}
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(folder)], env=env, stdout=subprocess.PIPE) for _ in range(2)
    ]
    inodes = {process.communicate(timeout=60)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(inodes) == 1
