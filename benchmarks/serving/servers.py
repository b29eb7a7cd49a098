"""The processes that are measured, each in a session of its own so that all of them are found, watched and ended."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from encast.launch.process import die_with_parent
from encast.measure import processes

__all__ = ["Encast", "Infinity", "Offline", "Sample", "Server", "Watch", "engines_of_infinity"]

START_S = 300.0
"""A server that is not ready by then has failed: infinity loads torch first."""


class Server:
    """A server process and its family. Its output goes to ``log``."""

    ready = "/health/ready"

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ):
        self.name, self.log = name, log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
                cwd=cwd,
                preexec_fn=functools.partial(die_with_parent, signal.SIGTERM, os.getpid()),
            )
        self._known: set[psutil.Process] = set()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        raise NotImplementedError

    @property
    def family(self) -> list[psutil.Process]:
        found = processes.family(self.process.pid)
        self._known.update(found)
        return found

    def wait_ready(self, seconds: float = START_S) -> None:
        """Until it takes requests; ends the program with what it said when it does not."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.process.poll() is not None:
                break
            if self.answers(self.ready):
                return
            time.sleep(0.05)
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
        raise SystemExit(f"{self.name} is not ready after {seconds:g} s; it said:\n{tail}")

    def answers(self, path: str) -> bool:
        """Whether a GET gets a 200 within a second."""
        with contextlib.suppress(OSError, http.client.HTTPException, StopIteration, psutil.Error):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1)
            with contextlib.closing(connection):
                connection.request("GET", path)
                return connection.getresponse().status == 200
        return False

    def end(self, seconds: float = 40.0) -> None:
        """By SIGTERM, and what is left then by SIGKILL."""
        known = {*self._known, *self.family}
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        processes.end(known, self.process.pid)
        self.process.wait()


class Encast(Server):
    """``encast serve`` on a port that the system chooses."""

    def __init__(self, artifact: Path, folder: Path, options: Sequence[str] = (), name: str = "encast"):
        serve = [sys.executable, "-m", "encast.cli.main", "serve", str(artifact), "--port", "0", *options]
        super().__init__(name, serve, folder / f"{name}.log")
        try:
            self.wait_ready()
        except BaseException:
            self.end()
            raise

    @functools.cached_property
    def port(self) -> int:  # type: ignore[override]
        """Of the one TCP socket on which the supervisor listens."""
        found = psutil.Process(self.process.pid).net_connections("tcp")
        return next(one.laddr.port for one in found if one.status == psutil.CONN_LISTEN)

    def children(self, kind: str) -> list[psutil.Process]:
        """The processes that are its ``engine``, or its ``front``."""
        return [process for process in self.family if role(process) == kind]


def role(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        for kind in ("engine", "front"):
            if f"encast.serve.{kind}" in words:
                return kind
        return "supervisor" if "serve" in words else "other"
    return "gone"


class Infinity(Server):
    """infinity-emb from its own virtual environment; the client finds its routes below ``/v1`` as OpenAI's.

    It runs in the model's folder: its ONNX engine finds a local file only by a name relative to that.
    """

    ready = "/v1/models"

    def __init__(self, venv: Path, model: Path, options: Sequence[str], folder: Path, name: str):
        with socket.create_server(("127.0.0.1", 0)) as chosen:
            self._port: int = chosen.getsockname()[1]
        command = [str(venv.absolute() / "bin" / "infinity_emb"), "v2", "--model-id", ".", "--device", "cpu"]
        command += ["--port", str(self._port), "--url-prefix", "/v1", "--served-model-name", "peer", *options]
        # Optimised graphs go to the hub's cache: a fresh one, so that none of another run is picked up.
        environment = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "HF_HOME": str(folder / f"{name}-hub")}
        super().__init__(name, command, folder / f"{name}.log", environment, model)

    @property
    def port(self) -> int:
        return self._port


def engines_of_infinity(venv: Path, checkpoint: Path, folder: Path) -> dict[str, tuple[Path, list[str]]]:
    """Set-ups of its CPU engines by name: the model's folder and the options.

    ONNX graphs are made by its environment's optimum-cli: as exported, optimised (-O3), and int8 for AVX512-VNNI.
    """
    torch = ["--engine", "torch", "--no-bettertransformer"]
    found = {
        "torch": (checkpoint, torch),
        "torch, batches of 128": (checkpoint, [*torch, "--batch-size", "128"]),
        "torch, bf16": (checkpoint, [*torch, "--dtype", "bfloat16"]),
        "torch, int8": (checkpoint, [*torch, "--dtype", "int8"]),
    }
    cli = venv / "bin" / "optimum-cli"
    onnx, fused, int8 = folder / "onnx", folder / "onnx-o3", folder / "onnx-int8"
    export = ["export", "onnx", "--task", "feature-extraction", "--library", "transformers", "--model"]
    made = {
        "ONNX": (onnx, [*export, checkpoint.absolute(), onnx]),
        "ONNX, optimised": (fused, ["onnxruntime", "optimize", "--onnx_model", onnx, "-O3", "-o", fused]),
        "ONNX, int8": (int8, ["onnxruntime", "quantize", "--onnx_model", onnx, "--avx512_vnni", "-o", int8]),
    }
    for name, (model, command) in made.items() if cli.exists() else ():
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([cli, *command], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"note: {name} could not be made: {done.stderr.strip()[-300:]}", file=sys.stderr)
            continue
        found[name] = (model, ["--engine", "optimum", "--pooling-method", "mean"])
    return found


class Offline:
    """``Engine.embed`` in a process of its own (``offline.py``), with the default settings of ``encast.load``."""

    def __init__(self, artifact: Path, texts: Path):
        worker = Path(__file__).with_name("offline.py")
        self.process = subprocess.Popen(
            [sys.executable, str(worker), str(artifact), str(texts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._answer()

    def __enter__(self) -> Offline:
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()
        self.process.wait()

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the process with the offline engine ended; it said why above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(frozen=True)
class Sample:
    """Of a server's processes at one moment (``time.perf_counter``): resident and proportional memory in MB, open
    descriptors, and how many processes, by role."""

    at: float
    rss_mb: dict[str, float]
    pss_mb: float
    descriptors: dict[str, int]
    count: dict[str, int]

    @staticmethod
    def of(server: Server) -> Sample:
        family = server.family
        rss: dict[str, float] = {}
        descriptors: dict[str, int] = {}
        count: dict[str, int] = {}
        for process in family:
            with contextlib.suppress(psutil.Error):
                kind, memory, files = role(process), process.memory_info().rss / 1e6, process.num_fds()
                rss[kind] = rss.get(kind, 0.0) + memory
                descriptors[kind] = descriptors.get(kind, 0) + files
                count[kind] = count.get(kind, 0) + 1
        return Sample(time.perf_counter(), rss, processes.proportional_bytes(family) / 1e6, descriptors, count)

    @property
    def total_mb(self) -> float:
        return sum(self.rss_mb.values())

    @property
    def total_descriptors(self) -> int:
        return sum(self.descriptors.values())


class Watch:
    """Takes a ``Sample`` every so many seconds, in a thread, until the block ends."""

    def __init__(self, server: Server, every: float):
        self.samples: list[Sample] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(server, every), daemon=True)

    def _run(self, server: Server, every: float) -> None:
        while not self._over.wait(every):
            self.samples.append(Sample.of(server))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
