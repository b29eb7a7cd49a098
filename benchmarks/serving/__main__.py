"""What ``encast serve`` must show, one command a bar; README.md beside this says what each needs.

    python benchmarks/serving offline MINILM.encast --data FOLDER
    python benchmarks/serving clients MINILM.encast --data FOLDER --infinity VENV --infinity-model CHECKPOINT
    python benchmarks/serving one|mixed|overload|faults|soak ARTIFACT --data FOLDER

Every command starts its servers, on free ports, and ends them, also on errors and Ctrl-C. It prints a table and
whether each bar is held; ``--json FILE`` writes all figures. The exit code is 1 when a bar is not held.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import faults
from speed import clients, mixed, offline, one
from trouble import overload, soak

from encast.machine import this_machine

COMMANDS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "offline": offline,
    "clients": clients,
    "one": one,
    "mixed": mixed,
    "overload": overload,
    "faults": faults,
    "soak": soak,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="command", required=True)
    made = {}
    for name, command in COMMANDS.items():
        made[name] = verb = verbs.add_parser(name, help=(command.__doc__ or "").split("\n\n")[0])
        verb.add_argument("artifact", type=lambda text: Path(text).absolute(), help="int8 MiniLM, compiled for embed")
        verb.add_argument("--data", type=Path, default=Path("../shared/data"), help="(default: %(default)s)")
        verb.add_argument("--json", type=Path, help="a file for all figures")
        verb.add_argument("--serve", type=shlex.split, default=[], help="more options of encast serve, one argument")

    def rounds(name: str, seconds: float, count: int = 7) -> None:
        made[name].add_argument("--rounds", type=int, default=count, help="(default: %(default)s)")
        made[name].add_argument("--seconds", type=float, default=seconds, help="of a turn (default: %(default)s)")

    def load(name: str, texts: str, batch: int, clients: int) -> None:
        made[name].add_argument("--texts", choices=["queries", "paragraphs"], default=texts)
        made[name].add_argument("--batch", type=int, default=batch, help="texts of a request (default: %(default)s)")
        made[name].add_argument("--clients", type=int, default=clients, help="(default: %(default)s)")

    rounds("offline", 8)
    made["offline"].add_argument("--clients", type=int, default=3)
    made["offline"].add_argument("--batch", type=int, default=32)
    rounds("clients", 5)
    made["clients"].add_argument("--clients", type=int, nargs="+", default=[1, 8, 64, 512])
    made["clients"].add_argument("--infinity", type=Path, help="a virtual environment with infinity-emb")
    made["clients"].add_argument("--infinity-model", type=Path, help="the checkpoint folder of the same model")
    made["clients"].add_argument("--engine", help="of infinity's set-ups, in place of the fastest")
    made["clients"].add_argument("--heats", type=int, default=3, help="to find infinity's fastest engine")
    made["one"].add_argument("--rounds", type=int, default=15)
    made["one"].add_argument("--calls", type=int, default=300, help="queries of a round (default: %(default)s)")
    rounds("mixed", 20)
    made["mixed"].add_argument("--shares", type=float, nargs="+", default=[0.6, 0.8], help="of capacity")
    made["mixed"].add_argument("--short", type=int, default=12, help="tokens (default: %(default)s)")
    made["mixed"].add_argument("--length", type=int, default=400, help="tokens of long texts (default: %(default)s)")
    made["mixed"].add_argument("--clients", type=int, default=8, help="that find the capacity")
    load("overload", "paragraphs", 4, 16)
    rounds("overload", 12, 5)
    made["overload"].add_argument("--times", type=float, default=3, help="the capacity (default: %(default)s)")
    made["overload"].add_argument(
        "--max-wait-ms", type=float, default=2000, help="of the server (default: %(default)s)"
    )
    made["overload"].add_argument("--connections", type=int, default=1024, help="of the client, at most")
    load("faults", "queries", 1, 32)
    made["faults"].add_argument("--kills", type=int, default=10, help="of engines, and of fronts")
    made["faults"].add_argument("--vanishing", type=int, default=5000, help="clients that go mid-request")
    made["faults"].add_argument("--reloads", type=int, default=5)
    made["faults"].add_argument("--seconds", type=float, default=5, help="of load before, after and between faults")
    made["faults"].add_argument("--only", nargs="+", help="of: engine, front, vanish, reload, disk, term")
    load("soak", "queries", 1, 64)
    made["soak"].add_argument("--minutes", type=float, default=15)
    made["soak"].add_argument("--share", type=float, default=0.8, help="of capacity (default: %(default)s)")
    args = parser.parse_args()
    if args.command == "clients" and (args.infinity is None) != (args.infinity_model is None):
        parser.error("--infinity and --infinity-model go together")
    return args


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and its servers with it
    with tempfile.TemporaryDirectory(prefix="encast-serving-") as folder:
        try:
            found = COMMANDS[args.command](args, Path(folder))
        except KeyboardInterrupt:
            return 130
    machine = {"processor": this_machine().processor, "cores": len(os.sched_getaffinity(0))}
    if args.json:
        said = {name: str(value) for name, value in vars(args).items()}
        args.json.write_text(json.dumps({"command": args.command, "arguments": said, "machine": machine, **found}))
    return int(any(bar["held"] is False for bar in found["bars"]))


if __name__ == "__main__":
    sys.exit(main())
