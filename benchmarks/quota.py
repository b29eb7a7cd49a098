"""What a CPU quota costs: encast under a real cgroup quota beside encast on one core without one.

    sudo python benchmarks/quota.py MODEL.encast

Set-ups, each a process of its own, by turns: ``one core``, bound to one core without quota; ``quota Q``, with a
cgroup's quota of Q CPUs and all cores in reach, at the threads that encast chooses; ``quota Q, T threads``, the same
with as many threads as there are cores, as a library runs that does not read the quota; ``quota Q, T instances``, with
as many instances of one thread. A round is a burst of each; a row is the medians over rounds, and the ratio to
``one core`` taken within each round with its quartiles.

Needs to be root, and a cgroup (version 2, else 1) whose cpu controller can be used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from encast.machine import default_threads, this_machine

PERIOD_US = 100_000


@contextlib.contextmanager
def cgroup(name: str, cpus: float) -> Iterator[Path]:
    """A control group with a quota, removed at the end; its members must have ended by then."""
    quota = int(cpus * PERIOD_US)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount, kind = Path(before.split()[4]), after.split()
        if kind[0] == "cgroup2" and "cpu" in (mount / "cgroup.controllers").read_text().split():
            with contextlib.suppress(OSError):
                (mount / "cgroup.subtree_control").write_text("+cpu")
            files = {"cpu.max": f"{quota} {PERIOD_US}"}
        elif kind[0] == "cgroup" and "cpu" in kind[-1].split(","):
            files = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota)}
        else:
            continue
        group = mount / f"encast-{name}-{os.getpid()}"
        group.mkdir()
        try:
            for file, text in files.items():
                (group / file).write_text(text)
            yield group
        finally:
            group.rmdir()
        return
    sys.exit("no cgroup here has a cpu controller that can be used")


class Worker:
    """An engine in a process of its own, asked for bursts."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work", json.dumps(options)], stdin=-1, stdout=-1, text=True
        )
        self.threads = self._answer()["threads"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def burst(self) -> list[float]:
        """Milliseconds of every call."""
        assert self.process.stdin is not None
        print("burst", file=self.process.stdin, flush=True)
        times: list[float] = self._answer()["ms"]
        return times

    def close(self) -> None:
        self.process.communicate()


def work(options: dict[str, Any]) -> None:
    if options["group"]:
        (Path(options["group"]) / "cgroup.procs").write_text(str(os.getpid()))
    if options["cpu"] is not None:
        os.sched_setaffinity(0, {options["cpu"]})
    import encast

    instances = options["instances"]
    with encast.load(options["artifact"], threads=options["threads"], instances=instances) as engine:
        ids = np.random.default_rng(0).integers(5, 1000, options["batch"] * options["length"]).astype(np.int32)
        cu_seqlens = np.arange(0, len(ids) + 1, options["length"], dtype=np.int32)
        engine.forward_packed(ids, cu_seqlens)
        print(json.dumps({"threads": options["threads"] or default_threads(this_machine())}), flush=True)

        def call(end: float) -> list[float]:
            times = []
            while time.perf_counter() < end:
                begin = time.perf_counter()
                engine.forward_packed(ids, cu_seqlens)
                times.append((time.perf_counter() - begin) * 1e3)
            return times

        with ThreadPoolExecutor(instances) as callers:
            for _ in sys.stdin:
                times = callers.map(call, [time.perf_counter() + options["seconds"]] * instances)
                print(json.dumps({"ms": [ms for own in times for ms in own]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", nargs="?")
    parser.add_argument("--quotas", type=float, nargs="+", default=[1.0, 1.5, 0.5])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--burst", type=float, default=0.5, help="seconds; a quota's period is 0.1")
    parser.add_argument("--seconds", type=float, default=60.0, help="of all rounds")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(json.loads(args.work))
        return
    if args.artifact is None:
        parser.error("name an artifact")
    cpus = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        common = {"artifact": args.artifact, "batch": args.batch, "length": args.length, "seconds": args.burst}
        plain = {**common, "group": None, "cpu": None, "threads": None, "instances": 1}
        setups = {"one core": {**plain, "cpu": cpus[0]}}
        for number, quota in enumerate(args.quotas):
            group = str(stack.enter_context(cgroup(str(number), quota)))
            setups[f"quota {quota:g}"] = {**plain, "group": group}
            setups[f"quota {quota:g}, {len(cpus)} threads"] = {**plain, "group": group, "threads": len(cpus)}
            setups[f"quota {quota:g}, {len(cpus)} instances"] = {
                **plain,
                "group": group,
                "threads": 1,
                "instances": len(cpus),
            }
        workers = {name: Worker(options) for name, options in setups.items()}
        for worker in workers.values():
            stack.callback(worker.close)
        rounds: dict[str, list[list[float]]] = {name: [] for name in workers}
        end, turn = time.monotonic() + args.seconds, 0
        while time.monotonic() < end or turn < 3:
            for name in list(workers)[:: 1 if turn % 2 else -1]:
                time.sleep(0.15)  # the quota of a new period
                rounds[name].append(workers[name].burst())
            turn += 1
    print("| set-up | threads | calls a second | p50, ms | p99, ms | to one core |")
    print("| --- | --- | --- | --- | --- | --- |")
    rates = {name: [len(times) / args.burst for times in bursts] for name, bursts in rounds.items()}
    for name, bursts in rounds.items():
        calls = np.concatenate(bursts)
        ratios = [mine / alone for mine, alone in zip(rates[name], rates["one core"], strict=True)]
        low, middle, high = np.percentile(ratios, (25, 50, 75))
        print(
            f"| {name} | {workers[name].threads} | {statistics.median(rates[name]):.1f} | {np.median(calls):.2f} | "
            f"{np.percentile(calls, 99):.2f} | {middle:.3f} [{low:.3f}, {high:.3f}] |"
        )


if __name__ == "__main__":
    main()
