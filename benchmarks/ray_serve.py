"""``encast serve --ray`` beside ``encast serve`` on the same cores; and with a server, a node and an artifact replaced
under load.

    python benchmarks/ray_serve.py all-MiniLM-L6-v2.encast
    python benchmarks/ray_serve.py all-MiniLM-L6-v2.encast --nodes 1 --rounds 5 --seconds 10

Needs the extra ``ray``. The cluster is one of this machine: nodes that share its cores, each a raylet with workers of
its own; its gateway's port is shared by all of them, so a client that is connected to the gateway of a node that is
killed sees its connection end. By turns the same clients ask the cluster and one server, with queries and with
paragraphs; the ratio is that of medians. Both are up all the time, and the one that is not asked has nothing to do.
Then, under the queries: a server's process is killed, the actor that keeps one, a node (another one joins), and an
artifact is replaced by another. Every answer is compared with that of the one server; a request is failed where
it has another status than 200 or its connection ends. Exit code 1 where an answer is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.request import urlopen

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cluster"))
from mini_cluster import MiniCluster, mini_cluster

from encast.machine import usable_cores

_WORDS = "time year people way day man thing woman life child world school state family student group country problem "
_WORDS += "hand part place case week company system program question work government number night point home water room"
QUERIES, PARAGRAPHS = (8, 1, 32), (110, 16, 8)
"""Words of a text, texts of a request, clients."""

PORT = 18_080
WITHIN_S = 60.0


def bodies(words: int, texts: int, count: int) -> list[bytes]:
    generator = random.Random(words)
    vocabulary = _WORDS.split()
    return [
        json.dumps(
            {
                "model": "m",
                "input": [" ".join(generator.choice(vocabulary) for _ in range(words)) for _ in range(texts)],
                "encoding_format": "base64",
            }
        ).encode()
        for _ in range(count)
    ]


class Clients:
    """Ask without end, each on a connection of its own, until ``until`` says so. ``right``: the answers to each body;
    others are wrong. ``times``: of failures, after the clients began.
    """

    def __init__(self, port: int, asked: Sequence[bytes], right: Sequence[set[bytes]] | None = None) -> None:
        self._port, self._asked, self._right = port, asked, right
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    async def run(self, clients: int, seconds: float | None = None, until: threading.Event | None = None) -> float:
        """Returns how long they asked."""
        began = time.monotonic()
        self._end = None if seconds is None else began + seconds
        self._until = until
        await asyncio.gather(*(self._ask(number) for number in range(clients)))
        return time.monotonic() - began

    def _over(self) -> bool:
        return (
            time.monotonic() >= self._end if self._end is not None else self._until is not None and self._until.is_set()
        )

    async def _ask(self, number: int) -> None:
        writer = None
        while not self._over():
            number += 7
            body = self._asked[number % len(self._asked)]
            try:
                if writer is None:
                    reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                status, answer = await exchange(reader, writer, body)
            except (OSError, asyncio.IncompleteReadError) as error:
                self._fail(type(error).__name__)
                if writer is not None:
                    writer.close()
                writer = None
                await asyncio.sleep(0.01)
                continue
            if status != 200:
                self._fail(str(status))
            elif self._right is not None and vectors(answer) not in self._right[number % len(self._asked)]:
                self.counts["wrong"] += 1
            else:
                self.counts["answered"] += 1
        if writer is not None:
            writer.close()

    def _fail(self, reason: str) -> None:
        self.counts["failed"] += 1
        self.reasons[reason] += 1


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> tuple[int, bytes]:
    head = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    answer = await reader.readuntil(b"\r\n\r\n")
    size = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return int(answer.split(b" ", 2)[1]), await reader.readexactly(size)


def vectors(answer: bytes) -> bytes:
    return json.dumps([one["embedding"] for one in json.loads(answer)["data"]]).encode()


def answers(port: int, asked: Sequence[bytes]) -> list[bytes]:
    async def ask() -> list[bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        found = []
        for body in asked:
            status, answer = await exchange(reader, writer, body)
            if status != 200:
                raise SystemExit(f"a request was answered with {status}: {answer.decode()[:300]}")
            found.append(vectors(answer))
        writer.close()
        return found

    return asyncio.run(ask())


def servers(port: int) -> set[str]:
    """Those that the gateway knows and that are ready."""
    with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        lines = [line for line in response.read().decode().splitlines() if line.startswith("encast_ready{")]
        return {line.split('server="')[1].split('"')[0] for line in lines if line.endswith(" 1.0")}
    return set()


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "encast.cli.main", "serve", *arguments, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(process.communicate()[1])
        told = json.loads(line)
        yield int((told.get("url") or told["urls"][0]).rpartition(":")[2]), process
    finally:
        process.terminate()
        process.communicate()


def compared(cluster: int, alone: int, rounds: int, seconds: float) -> None:
    for name, (words, texts, clients) in (("queries", QUERIES), ("paragraphs", PARAGRAPHS)):
        asked = bodies(words, texts, 64)
        rates: dict[str, list[float]] = {"cluster": [], "alone": []}
        for at in range(2 * rounds + 2):
            who, port = (("cluster", cluster), ("alone", alone))[at % 2]
            load = Clients(port, asked)
            took = uvloop.run(load.run(clients, seconds))
            if load.counts["failed"]:
                print(f"  {who}: {load.counts['failed']} failed {dict(load.reasons)}")
            if at >= 2:  # the first of each warms up
                rates[who].append(load.counts["answered"] / took)
        medians = {who: statistics.median(of) for who, of in rates.items()}
        ratios = sorted(one / two for one, two in zip(rates["cluster"], rates["alone"], strict=True))
        print(
            f"{name}: cluster {medians['cluster']:,.1f}, one server {medians['alone']:,.1f} requests a second: "
            f"{medians['cluster'] / medians['alone']:.3f} [{ratios[0]:.3f}, {ratios[-1]:.3f}] in {rounds} rounds",
            flush=True,
        )


def disturbed(
    name: str, port: int, asked: Sequence[bytes], right: Sequence[set[bytes]], do: Callable[[], None], whole: int,
    fresh: bytes | None = None,
) -> bool:  # fmt: skip
    """Under load, ``do`` and then until ``whole`` servers are there of which one is new, or until all answer
    ``fresh``. Whether all answers were right.
    """
    until = threading.Event()
    load = Clients(port, asked, right)
    # Ray wants the main thread for a node that joins.
    running = threading.Thread(target=lambda: uvloop.run(load.run(8, until=until)))
    running.start()
    time.sleep(2)
    before, began = servers(port), time.monotonic()
    do()
    took = None
    while took is None and time.monotonic() - began < WITHIN_S:
        time.sleep(0.05)
        if fresh is not None:
            there = {answers(port, asked[:1])[0] for _ in range(3 * whole)} == {fresh}
        else:
            now = servers(port)
            there = len(now) == whole and now != before
        if there:
            took = time.monotonic() - began
    time.sleep(2)
    until.set()
    running.join()
    counts = load.counts
    said = "never" if took is None else f"{took:.1f} s later"
    print(
        f"{name}: {sum(counts.values()):,} requests, {counts['failed']} failed {dict(load.reasons) or ''}, "
        f"{counts['wrong']} wrong; whole {said}",
        flush=True,
    )
    return counts["wrong"] == 0


def measured(args: argparse.Namespace, cluster: MiniCluster, folder: Path) -> bool:
    place = Path(shutil.copytree(args.artifact, folder / "m.encast"))
    on_ray = f"m={place}", "--port", str(PORT), "--ray", cluster.address
    if args.rounds:
        # As many gateways as there are machines.
        with (
            serving(f"m={args.artifact}", "--port", "0") as (alone, _),
            serving(*on_ray, "--gateways", "1") as (port, _),
        ):
            compared(port, alone, args.rounds, args.seconds)
    if not args.kills and args.other is None:
        return True
    with serving(f"m={args.artifact}", "--port", "0") as (alone, _), serving(*on_ray) as (port, command):
        asked = bodies(*QUERIES[:2], 64)
        right = [{one} for one in answers(alone, asked)]

        def kill(words: bytes) -> Callable[[], None]:
            return lambda: os.kill(cluster.processes(words)[0], signal.SIGKILL)

        def kill_node() -> None:
            cluster.kill(0)
            cluster.add()

        good = True
        for at in range(args.kills):
            for name, do in (
                ("a server is killed", kill(b"encast.cli.main")),
                ("a replica is killed", kill(b"ServeReplica:encast:servers")),
                ("a node is killed", kill_node),
            ):
                good &= disturbed(f"{name}, {at + 1}", port, asked, right, do, args.nodes)
        if args.other is None:
            return good
        with serving(f"m={args.other}", "--port", "0") as (other, _):
            fresh = answers(other, asked)
        both = [{*old, new} for old, new in zip(right, fresh, strict=True)]

        def replace() -> None:
            place.rename(folder / "old.encast")
            shutil.copytree(args.other, place)
            command.send_signal(signal.SIGHUP)

        return disturbed("an artifact is replaced", port, asked, both, replace, args.nodes, fresh[0]) and good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path, help="one of embeddings")
    parser.add_argument("--other", type=Path, help="another one, that takes its place under load")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="of both, by turns; 0: only what is killed")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a turn")
    parser.add_argument("--kills", type=int, default=1, help="of each kind")
    args = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    folder = Path(tempfile.mkdtemp(prefix="encast-ray-serve-"))
    try:
        with mini_cluster(args.nodes, max(1, len(usable_cores()) // args.nodes)) as cluster:
            good = measured(args, cluster, folder)
    finally:
        shutil.rmtree(folder)
    sys.exit(not good)


if __name__ == "__main__":
    main()
