"""Runs a recipe to its end, and again with kills at random moments: SOURCE DATA RECIPE FOLDER KILLS.

Every run is a fork of this process, which has imported torch and computed nothing; it saves its state after every step.
Prints a line for each that was killed, with the stages that were done.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import encast.compress.train as train
from encast.compress.pipeline import compress
from encast.compress.recipe import load_recipe
from encast.data.datasets import open_dataset


def start(source: Path, data: Path, recipe: Path, out: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        compress(
            source, out, task="classify", recipe=load_recipe(recipe), train=open_dataset(data, split="train"),
            dev=open_dataset(data), threads=1, device="cpu", resume=out.exists(),
        )  # fmt: skip
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def ended(child: int, seconds: float) -> bool:
    """Whether it ends in that time; killed if not."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            return True
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def main() -> None:
    source, data, recipe, folder = map(Path, sys.argv[1:5])
    train.SAVE_SECONDS = 0.0
    began = time.monotonic()
    assert os.waitpid(start(source, data, recipe, folder / "whole"), 0)[1] == 0
    seconds = time.monotonic() - began
    seed = time.time_ns()
    print("kills by the seed", seed, flush=True)
    generator = random.Random(seed)
    out, killed, done = folder / "killed", 0, 0
    while killed < int(sys.argv[5]):
        if ended(start(source, data, recipe, out), generator.uniform(0.02, 0.6) * seconds):
            out.rename(folder / f"done-{done}")
            done += 1
        else:
            stages = sorted(path.name for path in out.glob("[0-9]-*"))
            print("killed after", *stages, flush=True)
            killed += 1
    assert os.waitpid(start(source, data, recipe, out), 0)[1] == 0


if __name__ == "__main__":
    main()
