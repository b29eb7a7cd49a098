"""Bars of faults: processes killed, clients that vanish, reloads, a full disk and SIGTERM.

All under a closed-loop load whose every answer is compared with the offline engine's.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import threading
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from loads import Bare, Probe, Texts, body_of, closed, model_of
from report import held, table
from servers import Encast, Sample
from trouble import FLAT, Clock, known_texts

from encast.artifact.card import CARD, TOKENIZER, checksum, hexadecimal, read_card, seal
from encast.loadtest import Result
from encast.loadtest.records import ANSWERED, WRONG

__all__ = ["faults"]

PROBE_S = 0.05
VANISHING_OPEN = 50
VANISHING_TEXTS = 4


class Fault:
    """A load for ``seconds`` during which ``mischief`` is done in a thread, and what was seen of it."""

    def __init__(self, server: Encast, args: Namespace, texts: Texts, known: tuple[str, ...]):
        self.server, self.args, self.texts, self.known = server, args, texts, known
        self.over = threading.Event()
        self.moments: list[float] = []
        """Of the faults; ``perf_counter``."""
        self.notes: list[str] = []

    def run(self, mischief: Callable[[Fault], None], seconds: float) -> dict[str, Any]:
        before = Sample.of(self.server)
        thread = threading.Thread(target=self._guard, args=(mischief,), daemon=True)
        clock = Clock()
        with Probe(self.server.url, min(self.texts.rows, key=len), PROBE_S) as probe:
            try:
                thread.start()
                result = closed(
                    self.server.url, self.args.clients, seconds, [self.texts], batch=self.args.batch,
                    reference=self.known, say=clock,
                )  # fmt: skip
            finally:
                self.over.set()
                thread.join(60)
        after = self._settled(before)
        return {
            **counted(result),
            "faults": len(self.moments),
            "recovery_s": [recovery(probe, moment) for moment in self.moments],
            "before": vars(before),
            "after": vars(after),
            "notes": self.notes,
        }

    def _guard(self, mischief: Callable[[Fault], None]) -> None:
        try:
            mischief(self)
        except Exception as error:
            self.notes.append(f"{type(error).__name__}: {error}")

    def wait(self, seconds: float) -> None:
        self.over.wait(seconds)

    def mark(self) -> None:
        self.moments.append(time.perf_counter())

    def _settled(self, before: Sample) -> Sample:
        """When the server is idle again, at the latest after 15 s."""
        until = time.monotonic() + 15
        while time.monotonic() < until:
            now = Sample.of(self.server)
            if now.count == before.count and now.total_descriptors <= before.total_descriptors:
                break
            time.sleep(0.25)
        return now


def counted(result: Result) -> dict[str, Any]:
    return {
        "answered": len(result.answered),
        "wrong": int((result.columns.outcome == WRONG).sum()),
        "first_wrong": result.first_wrong,
        "errors": result.errors,
        "examples": dict(result.examples),
    }


def recovery(probe: Probe, moment: float) -> float | None:
    """Seconds from a fault until a query that was sent after it is answered; None where none was."""
    return min(
        (at + ms / 1e3 - moment for at, status, ms in probe.seen if at >= moment and status == 200), default=None
    )


# Mischief


def kill(kind: str, times: int, pause: float) -> Callable[[Fault], None]:
    def mischief(fault: Fault) -> None:
        for _ in range(times):
            fault.wait(pause)
            if fault.over.is_set():
                return
            victim = random.choice(fault.server.children(kind))
            fault.mark()
            victim.kill()

    return mischief


def vanish(request: bytes, count: int, seconds: float) -> Callable[[Fault], None]:
    """Clients that send all or a part of a request and reset the connection, at an even pace."""

    def mischief(fault: Fault) -> None:
        chosen, opened = random.Random(0), deque[socket.socket]()
        begin = time.perf_counter()
        for number in range(count):
            fault.wait(max(0.0, begin + number * seconds / count - time.perf_counter()))
            if fault.over.is_set():
                fault.notes.append(f"only {number} of {count} clients came")
                break
            client = socket.create_connection(("127.0.0.1", fault.server.port), 10)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no goodbye
            with contextlib.suppress(OSError):
                client.sendall(request[: chosen.choice((len(request), chosen.randrange(1, len(request))))])
            opened.append(client)
            if len(opened) > VANISHING_OPEN:
                opened.popleft().close()
        else:
            fault.mark()
            fault.notes.append(f"{count} clients")
        for client in opened:
            client.close()

    return mischief


def reload(link: Path, artifacts: list[Path], times: int, pause: float) -> Callable[[Fault], None]:
    """SIGHUP with another artifact behind the link each time; waits until other engines have taken over."""

    def mischief(fault: Fault) -> None:
        for number in range(times):
            fault.wait(pause)
            if fault.over.is_set():
                fault.notes.append(f"only {number} of {times} reloads were asked for")
                return
            old = {process.pid for process in fault.server.children("engine")}
            point(link, artifacts[(number + 1) % 2])
            fault.mark()
            fault.server.process.send_signal(signal.SIGHUP)
            until = time.monotonic() + 30
            while old & {process.pid for process in fault.server.children("engine")}:
                if time.monotonic() > until:
                    fault.notes.append(f"reload {number + 1}: the old engine still runs after 30 s")
                    break
                time.sleep(0.1)

    return mischief


def fill_disk(log: Path, seconds: float) -> Callable[[Fault], None]:
    """For so long no process of the server can write beyond the size of its log (RLIMIT_FSIZE)."""

    def limit(server: Encast, size: int) -> None:
        for process in server.family:
            with contextlib.suppress(OSError, psutil.Error):
                hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, hard))

    def mischief(fault: Fault) -> None:
        fault.wait(1)
        fault.mark()
        limit(fault.server, log.stat().st_size)
        fault.wait(0.5)
        full = log.stat().st_size
        fault.wait(seconds)
        grown = log.stat().st_size - full
        limit(fault.server, resource.RLIM_INFINITY)
        fault.wait(2)
        fault.notes.append(f"log: {grown} bytes while full, {log.stat().st_size - full - grown} in 2 s after")
        for number, line in enumerate(log.read_text(errors="replace").splitlines()):
            try:
                json.loads(line)
            except ValueError:
                fault.notes.append(f"log: line {number + 1} is broken: {line[:80]!r}")
                break

    return mischief


# The whole


def faults(args: Namespace, folder: Path) -> dict[str, Any]:
    """Kills, vanishing clients, reloads, a full disk and SIGTERM under load: nothing wrong, nothing lost, no leak."""
    texts, known = known_texts(args, folder)
    link, log, shm = folder / "served.encast", folder / "requests.jsonl", set(os.listdir("/dev/shm"))
    point(link, args.artifact)
    pause, wanted = args.seconds, args.only or ["engine", "front", "vanish", "reload", "disk", "term"]
    rows: dict[str, dict[str, Any]] = {}
    with Encast(link, folder, [*args.serve, "--log", str(log)]) as server:
        closed(server.url, args.clients, pause, [texts], batch=args.batch, reference=known)
        time.sleep(1)
        steady, names = Sample.of(server), abstract_names(server)
        request = Bare.request(body_of(model_of(server.url), texts.rows[:VANISHING_TEXTS]))
        plan: dict[str, tuple[Callable[[Fault], None], float]] = {
            "engine": (kill("engine", args.kills, pause), pause * (args.kills + 1)),
            "front": (kill("front", args.kills, pause), pause * (args.kills + 1)),
            "vanish": (vanish(request, args.vanishing, 4 * pause), 5 * pause),
            "disk": (fill_disk(log, 2 * pause), 3 * pause + 3),
        }
        if "reload" in wanted:
            other = same_but_other(args.artifact, folder / "other.encast")
            plan["reload"] = (
                reload(link, [args.artifact, other], args.reloads, pause), (pause + 5) * args.reloads + pause
            )  # fmt: skip
        for name, (mischief, seconds) in plan.items():
            if name in wanted:
                rows[name] = Fault(server, args, texts, known).run(mischief, seconds)
                print(f"{name}: {rows[name]['answered']} answered, {rows[name]['errors'] or 'no errors'}", flush=True)
        names |= abstract_names(server)
        final = Sample.of(server)
        if "term" in wanted:
            rows["term"] = terminate(server, args, texts, known)
    leaked = {
        "descriptors": final.total_descriptors - steady.total_descriptors,
        "processes": sum(final.count.values()) - sum(steady.count.values()),
        "rss": final.total_mb / steady.total_mb,
        "shm": sorted(set(os.listdir("/dev/shm")) - shm),
        "sockets": sorted(names & names_in(Path("/proc/net/unix").read_text())),
        "left": [process.pid for process in server.family],
    }
    report(rows)
    print(f"after all: {leaked}")
    return {"rows": rows, "steady": vars(steady), "final": vars(final), "leaked": leaked,
            "bars": [*judged(args, rows), *judged_leaks(leaked)]}  # fmt: skip


def terminate(server: Encast, args: Namespace, texts: Texts, known: tuple[str, ...]) -> dict[str, Any]:
    """SIGTERM at full load. What was sent before it must be answered; what comes after finds nobody."""

    class Ending(Clock):
        sent = 0.0

        def __call__(self, line: str) -> None:
            super().__call__(line)
            if self.second == 2:
                server.process.send_signal(signal.SIGTERM)
                self.sent = time.perf_counter()

    clock, gone = Ending(), [0.0]

    def wait_for_end() -> None:
        server.process.wait()
        gone[0] = time.perf_counter()

    waiting = threading.Thread(target=wait_for_end, daemon=True)
    waiting.start()
    result = closed(server.url, args.clients, args.seconds + 2, [texts], batch=args.batch, reference=known, say=clock)
    waiting.join(40)
    code, took = server.process.poll(), gone[0] - clock.sent
    columns = result.columns
    early = columns.begun < (clock.sent - clock.begun) * 1e9
    lost = early & (columns.outcome != ANSWERED)
    kinds = np.bincount(columns.outcome[lost], minlength=len(result.kinds))
    waited = (columns.ended - columns.begun)[~early & (columns.outcome != ANSWERED)] / 1e9
    return {
        **counted(result),
        "faults": 1,
        "lost": {kind: int(count) for kind, count in zip(result.kinds, kinds, strict=True) if count},
        "answered_of_those_sent_after": int((~early & (columns.outcome == ANSWERED)).sum()),
        "longest_wait_for_an_error_s": float(waited.max(initial=0.0)),
        "exit_code": code,
        "seconds_to_end": took,
        "recovery_s": [],
        "notes": [f"ended in {took:.2f} s; who came later had an error in {waited.max(initial=0.0):.2f} s at most"],
    }


def report(rows: dict[str, dict[str, Any]]) -> None:
    table(
        ["fault", "times", "answered", "wrong", "failed", "recovery, s", "descriptors", "resident, MB", "notes"],
        [
            (
                name, row["faults"], row["answered"], row["wrong"],
                ", ".join(f"{count} {kind}" for kind, count in row["errors"].items()) or "none",
                worst(row["recovery_s"]),
                *(
                    (between(row, lambda one: sum(one["descriptors"].values())),
                     between(row, lambda one: round(sum(one["rss_mb"].values()))))
                    if "before" in row else ("-", "-")
                ),
                "; ".join(row["notes"]) or "-",
            )
            for name, row in rows.items()
        ],
    )  # fmt: skip


def judged(args: Namespace, rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    wrong = sum(row["wrong"] for row in rows.values())
    bars = [held("no wrong answer", wrong, wrong == 0)]
    for name, row in rows.items():
        errors = row["errors"]
        if name == "front":
            # Each client has one request under way; those in the killed process may be lost, by a reset.
            most = args.clients * row["faults"]
            allowed = set(errors) <= {"connection reset"} and sum(errors.values()) <= most
            bars.append(held(f"front: resets only, at most {most}", errors or "none", allowed))
        elif name == "term":
            bars.append(held("SIGTERM: nothing lost that was sent before it", row["lost"] or "none", not row["lost"]))
            bars.append(held("SIGTERM: exit code 0", row["exit_code"], row["exit_code"] == 0))
        else:
            bars.append(held(f"{name}: no request fails", errors or "none", not errors))
        if name in ("engine", "front"):
            slowest = worst(row["recovery_s"])
            done = row["faults"] == args.kills and None not in row["recovery_s"]
            bars.append(held(f"{name}: {args.kills} times replaced within 2 s", slowest, done and slowest <= 2))
        if name == "vanish":
            bars.append(held(f"vanish: {args.vanishing} clients came and went", row["notes"], row["faults"] == 1))
        if name == "reload":
            done = row["faults"] == args.reloads and not row["notes"]
            bars.append(held(f"reload: {args.reloads} times done", row["notes"] or row["faults"], done))
    return bars


def judged_leaks(leaked: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        held("no more descriptors or processes than before", leaked["descriptors"],
             leaked["descriptors"] <= 0 and leaked["processes"] <= 0),
        held(f"resident memory at most {FLAT} of before", f"{leaked['rss']:.3f}", leaked["rss"] <= FLAT),
        held("no shared memory, socket or process is left", leaked["shm"] + leaked["sockets"] + leaked["left"],
             not (leaked["shm"] or leaked["sockets"] or leaked["left"])),
    ]  # fmt: skip


def worst(seconds: list[float | None]) -> Any:
    """The longest; infinity where one never came, None without any."""
    return max((float("inf") if one is None else one for one in seconds), default=None)


def between(row: dict[str, Any], what: Callable[[dict[str, Any]], Any]) -> str:
    return f"{what(row['before'])} to {what(row['after'])}"


def point(link: Path, artifact: Path) -> None:
    """The link leads there from now on, at once."""
    new = link.with_suffix(".new")
    new.symlink_to(artifact)
    new.replace(link)


def same_but_other(artifact: Path, copy: Path) -> Path:
    """An artifact with another checksum and the same answers: a blank more in its tokenizer's file."""
    shutil.copytree(artifact, copy)
    data = (copy / TOKENIZER).read_bytes() + b"\n"
    (copy / TOKENIZER).write_bytes(data)
    card = read_card(copy)
    card["files"][TOKENIZER] = hexadecimal(checksum(data))
    card["sizes"][TOKENIZER] = len(data)
    (copy / CARD).write_bytes(seal(card))
    return copy


def abstract_names(server: Encast) -> set[str]:
    """Of the Unix sockets that its processes have open."""
    inodes = set()
    for process in server.family:
        with contextlib.suppress(OSError):
            folder = f"/proc/{process.pid}/fd"
            inodes |= {os.readlink(f"{folder}/{number}") for number in os.listdir(folder)}
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return names_in("\n".join(line for line in lines if f"socket:[{line.split()[6]}]" in inodes))


def names_in(lines: str) -> set[str]:
    return {words[7] for words in map(str.split, lines.splitlines()) if len(words) > 7 and words[7].startswith("@")}
