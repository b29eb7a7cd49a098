"""A job of ``encast run --ray`` beside ``encast run`` on the same cores, undisturbed and with nodes and drivers killed.

    python benchmarks/ray_batch.py all-MiniLM-L6-v2.encast
    python benchmarks/ray_batch.py all-MiniLM-L6-v2.encast --rows 20000 --shard-rows 1000

Needs the extra ``ray``. The cluster is one of this machine: nodes that share its cores, each a raylet with workers of
its own. By turns the job runs in one process and on the cluster; the medians of the whole commands are compared, and of
what passed between the first and the last finished shard. Then it runs once more while SIGKILL ends five times a raylet
with all its workers (another node joins), and twice the driver, at moments drawn by a seed that is printed; a driver
that was killed is started again. Every output is compared byte by byte, and every row is counted. Exit code 1 where
something differs or is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cluster"))
from mini_cluster import MiniCluster, mini_cluster

from encast.jobs.folder import FINISHED
from encast.machine import usable_cores

NODE_KILLS, DRIVER_KILLS = 5, 2
_WORDS = "time year people way day man thing woman life child world school state family student group country problem "
_WORDS += "hand part place case week company system program question work government number night point home water room"
_FILES = 8


def make_rows(folder: Path, count: int, words: tuple[int, int]) -> None:
    generator = random.Random(0)
    vocabulary = _WORDS.split()
    for at in range(_FILES):
        mine = range(at * count // _FILES, (at + 1) * count // _FILES)
        with (folder / f"{at}.jsonl").open("w") as file:
            for number in mine:
                length = generator.randint(*words)
                text = " ".join(generator.choice(vocabulary) for _ in range(length))
                file.write(json.dumps({"text": f"{number} {text}"}) + "\n")


def start(options: list[str], out: Path, address: str | None) -> subprocess.Popen[bytes]:
    more = [] if address is None else ["--ray", address]
    return subprocess.Popen([sys.executable, "-m", "encast.cli.main", "run", *options, "-o", str(out), *more])


def timed(options: list[str], out: Path, address: str | None) -> dict[str, float]:
    began = time.monotonic()
    if code := start(options, out, address).wait():
        raise SystemExit(f"encast run ended with {code}")
    seconds = time.monotonic() - began
    times = sorted(path.stat().st_mtime for path in out.glob("part-*.jsonl"))
    return {"seconds": seconds, "first_to_last": times[-1] - times[0]}


def finished(out: Path) -> list[int]:
    path = out / FINISHED
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [entry["shard"] for entry in map(json.loads, lines) if "shard" in entry]


def disturbed(options: list[str], out: Path, cluster: MiniCluster, seconds: float, seed: int) -> None:
    """Kills at moments drawn from the time that the job takes undisturbed, counted while a driver runs."""
    generator = random.Random(seed)
    kills = sorted(
        [(generator.uniform(0.05, 0.9) * seconds, "node") for _ in range(NODE_KILLS)]
        + [(generator.uniform(0.1, 0.9) * seconds, "driver") for _ in range(DRIVER_KILLS)]
    )
    began = time.monotonic()
    driver = start(options, out, cluster.address)
    for moment, what in kills:
        while time.monotonic() - began < moment and driver.poll() is None:
            time.sleep(0.05)
        if driver.poll() is not None:
            raise SystemExit(f"the job ended, with {driver.returncode}, before everything was killed; take more --rows")
        print(
            f"  {time.monotonic() - began:6.1f} s: a {what} is killed, {len(finished(out))} shards finished", flush=True
        )
        if what == "node":
            cluster.kill(generator.randrange(len(cluster.nodes)))
            cluster.add()
        else:
            driver.kill()
            driver.wait()
            driver = start(options, out, cluster.address)
    if code := driver.wait():
        raise SystemExit(f"encast run ended with {code}")
    print(f"  {time.monotonic() - began:6.1f} s: finished", flush=True)


def differences(expected: Path, found: Path, rows: int) -> list[str]:
    wrong = []
    names = sorted({path.name for folder in (expected, found) for path in folder.iterdir() if path.is_file()})
    for name in names:
        pair = [folder / name for folder in (expected, found)]
        if not all(path.exists() for path in pair) or pair[0].read_bytes() != pair[1].read_bytes():
            wrong.append(f"{name} differs")
    counts: Counter[tuple[str, int]] = Counter()
    for path in found.glob("part-*.jsonl"):
        with path.open() as file:
            for line in file:
                head = json.loads(line.partition(', "embedding"')[0] + "}")
                counts[head["input"], head["row"]] += 1
    if len(counts) != rows or any(count != 1 for count in counts.values()):
        wrong.append(f"{rows - len(counts)} rows are lost, {sum(count > 1 for count in counts.values())} doubled")
    shards = finished(found)
    if len(shards) != len(set(shards)):
        wrong.append("a shard was finished twice")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path, help="one of embeddings")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--words", type=int, nargs=2, default=(20, 60), help="of a row, least and most")
    parser.add_argument("--shard-rows", type=int, default=2_000)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1, help="of both, by turns")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000, help="of the moments of the kills")
    parser.add_argument("--folder", type=Path, help="for rows and outputs, several GB; default: a temporary one")
    args = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    folder = args.folder or Path(tempfile.mkdtemp(prefix="encast-ray-batch-"))
    rows = folder / "rows"
    rows.mkdir(parents=True)
    make_rows(rows, args.rows, tuple(args.words))
    options = [str(args.artifact.resolve()), str(rows), "--shard-rows", str(args.shard_rows)]
    alone, many, killed = (folder / name for name in ("alone", "many", "killed"))
    times: dict[str, list[dict[str, float]]] = {"alone": [], "many": []}
    with mini_cluster(args.nodes, max(1, len(usable_cores()) // args.nodes)) as cluster:
        for _ in range(args.rounds):
            for out, address in ((alone, None), (many, cluster.address)):
                shutil.rmtree(out, ignore_errors=True)
                times[out.name].append(timed(options, out, address))
        medians = {
            name: {key: statistics.median(one[key] for one in of) for key in of[0]} for name, of in times.items()
        }
        print("kills by the seed", args.seed, flush=True)
        disturbed(options, killed, cluster, medians["many"]["seconds"], args.seed)
    wrong = differences(alone, many, args.rows) + differences(alone, killed, args.rows)
    for name, of in medians.items():
        print(f"{name:6s} {of['seconds']:8.1f} s, first to last shard {of['first_to_last']:8.1f} s")
    for key in ("seconds", "first_to_last"):
        print(f"overhead of {key}: {medians['many'][key] / medians['alone'][key] - 1:+.1%}")
    print("\n".join(wrong) or "all outputs are bit-equal, every row is there once")
    if args.folder is None:
        shutil.rmtree(folder)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
