"""A laboratory of a tiny model and the peers of ``lab_peers``, as YAML in a folder of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from encast.bench.rows import Row
from encast.bench.session import open_session

__all__ = ["QUICK", "TINY", "backends", "measure", "measure_all"]

PEERS = Path(__file__).with_name("lab_peers.py")

TINY = [
    "model=minilm",
    *(f"model.{name}={size}" for name, size in {"layers": 2, "hidden": 64, "inner": 128, "heads": 2}.items()),
    "model.vocab=500",
    "model.positions=64",
    "workload.length=32",
]
QUICK = ["timing.seconds=0.3", "timing.warm_up_seconds=0.5", "scenario.seconds=0.08"]


def backends(folder: Path, **given: str | Mapping[str, Any]) -> Path:
    """Writes ``backend/NAME.yaml`` for each: a class of ``lab_peers``, or a mapping with ``peer`` and options."""
    (folder / "backend").mkdir(parents=True, exist_ok=True)
    for name, what in given.items():
        config = {"peer": what} if isinstance(what, str) else dict(what)
        config["peer"] = f"{PEERS}:{config['peer']}"
        name = name.replace("_", "-")
        text = yaml.safe_dump({"name": name, "dtype": "f32", "milliseconds": 2, **config})
        (folder / "backend" / f"{name}.yaml").write_text(text)
    return folder


def measure(folder: Path, names: list[str], *overrides: str) -> dict[str, Row]:
    """The rows of one comparison at one point, by the name of the backend; ``folder`` is what ``backends`` returned."""
    return {row["backend"]["name"]: row for row in measure_all(folder, names, *overrides)}


def measure_all(folder: Path, names: list[str], *overrides: str) -> list[Row]:
    """The rows of one comparison."""
    given = [f"backend=[{','.join(names)}]", *TINY, *QUICK, f"out={folder / 'out'}", f"cache={folder / 'cache'}"]
    return open_session([*given, *overrides], folders=[folder]).run()
