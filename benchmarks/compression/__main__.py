"""What sparsity costs on real tasks: a checkpoint fine-tuned, pruned in steps to 80 or 90 %, and each compiled to int8.

    python benchmarks/compression run CHECKPOINT --data ../shared/data --out runs [--tasks mrpc stsb] [--seeds 0 1 2]
        [--jobs 2] [--threads 1]
    python benchmarks/compression table runs

``run`` is ``encast compress`` with the recipe of each task that lies beside this file, as many at a time as ``--jobs``,
on ``--threads`` each; what is there already is not run again, and what was ended goes on. Students also get rows
without labels: pairs (``pairs.py``), for SST-2 joined phrases (``phrases.py``), for SQuAD questions (``questions.py``).
``table`` prints, of all runs that are done, the metric of each level over the seeds, and sizes and speeds of the first
seed's artifacts, measured by turns in one process on all cores: leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pairs import write_pairs
from phrases import write_phrases
from questions import write_questions

import encast
from encast.compress.front import Entry, judge, measure_front
from encast.data.datasets import open_dataset
from encast.machine import usable_cores

HERE = Path(__file__).parent
ENCAST = "import sys; from encast.cli.main import main; sys.exit(main())"


@dataclass(frozen=True)
class Task:
    title: str
    task: str
    data: str
    metric: str
    unlabelled: Callable[[Path, Path], int] | None = None
    """Writes rows without labels, of the data set's folder, into a file."""
    rows: int | None = None
    """How many of the training rows, None for all."""


TASKS = {
    "sst2": Task("SST-2", "classify", "glue/SST-2", "accuracy", partial(write_phrases, count=67_000)),
    "mrpc": Task("MRPC", "classify", "glue/MRPC", "f1", partial(write_pairs, each=2)),
    "stsb": Task("STS-B", "classify", "glue/STS-B", "spearman", partial(write_pairs, each=2)),
    "squad": Task("SQuAD 1.1", "answer", "squad-v1.1", "f1", partial(write_questions, count=20_000), rows=12_000),
}


def run(checkpoint: str, data: Path, out: Path, tasks: list[str], seeds: list[int], jobs: int, threads: int) -> bool:
    """Whether all is done."""
    out.mkdir(exist_ok=True)
    (out / "data.json").write_text(json.dumps(str(data.resolve())))
    for name in tasks:
        if (write := TASKS[name].unlabelled) is not None:
            write(data / TASKS[name].data, out / f"{name}.jsonl")

    def one(name: str, seed: int) -> bool:
        task, folder, log = TASKS[name], out / f"{name}-{seed}", out / f"{name}-{seed}.log"
        command = [
            sys.executable, "-c", ENCAST, "compress", checkpoint,
            "--task", task.task, "--data", str(data / task.data), "--metric", task.metric,
            *(["--unlabelled", str(out / f"{name}.jsonl")] if task.unlabelled else []),
            *(["--train-rows", str(task.rows)] if task.rows else []),
            "--recipe", str(HERE / f"{name}.yaml"), "--seed", str(seed), "--threads", str(threads), "--resume",
            "--out", str(folder),
        ]  # fmt: skip
        with log.open("a") as file:
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode == 0
        print(f"{folder}: {'done' if done else f'failed, see {log}'}", flush=True)
        return done

    with ThreadPoolExecutor(jobs) as pool:
        return all(list(pool.map(lambda job: one(*job), [(name, seed) for seed in seeds for name in tasks])))


def table(out: Path) -> Iterator[str]:
    """Lines of Markdown."""
    data = Path(json.loads((out / "data.json").read_text()))
    yield "| task, metric | model | metric, of each seed | loss of f32, of each seed | mean loss | files | speed |"
    yield "| --- | --- | --- | --- | ---: | ---: | ---: |"
    for name, task in TASKS.items():
        results = [json.loads(file.read_text()) for file in sorted(out.glob(f"{name}-*/result.json"))]
        if not results:
            continue
        fronts = [_front(result) for result in results]
        speeds = _speeds(sorted(out.glob(f"{name}-*/result.json"))[0].parent, task, data)
        for place, entry in enumerate(fronts[0]):
            values = [front[place]["metric"] for front in fronts]
            losses = [1.0 - front[place]["metric"] / front[0]["metric"] for front in fronts]
            label = entry["name"].removesuffix(", sparse")
            measured = speeds[label]
            yield (
                f"| {task.title}, {task.metric} | {label} | {', '.join(f'{value:.2f}' for value in values)} "
                f"| {', '.join(f'{loss:.2%}' for loss in losses)} | {statistics.fmean(losses):.2%} "
                f"| {measured.bytes / 1e6:.1f} MB | {measured.speed:.2f}x |"
            )


def _front(result: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = next(record["front"] for record in result["stages"].values() if "front" in record)
    return found


def _speeds(run: Path, task: Task, data: Path) -> dict[str, Entry]:
    """Of the first stage in f32, and of every stage in int8, sparse from half of zeros on."""
    dev, threads = open_dataset(data / task.data, split="dev"), len(usable_cores())
    stages = sorted(run.glob("[0-9]-*"))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        reference = f"{stages[0].name[2:]} f32"
        paths = {reference: encast.compile(stages[0], work / "f32.encast", dtype="f32", task=task.task)}
        for stage in stages:
            sparse = "never" if stage == stages[0] else "always"
            paths[f"{stage.name[2:]} int8"] = encast.compile(
                stage, work / f"{stage.name}.encast", dtype="int8", task=task.task, sparse=sparse
            )
        judged = [judge(name, path, dev, threads) for name, path in paths.items()]
        return {entry.name: entry for entry in measure_front(judged, task.metric, threads, None, work)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("checkpoint")
    running.add_argument("--data", type=Path, required=True)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--tasks", nargs="+", choices=TASKS, default=["mrpc", "stsb", "sst2"])
    running.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    running.add_argument("--jobs", type=int, default=len(usable_cores()))
    running.add_argument("--threads", type=int, default=1)
    commands.add_parser("table").add_argument("out", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        where = options.checkpoint, options.data, options.out
        sys.exit(not run(*where, options.tasks, options.seeds, options.jobs, options.threads))
    for line in table(options.out):
        print(line)


if __name__ == "__main__":
    main()
