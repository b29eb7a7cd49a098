"""A recipe from its first stage to the last, in a folder that it can go on in after a kill."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from encast.artifact.write import version
from encast.compress.checks import check_run
from encast.compress.model import files_of
from encast.compress.quantise import quantise_stage
from encast.compress.recipe import Distil, Prune, Quantise, Recipe, Stage, Training
from encast.compress.records import read_record, read_stage, write_record
from encast.compress.stages import Context, train_stage
from encast.compress.state import resumable
from encast.data.datasets import Dataset
from encast.errors import InputError, ResourceError
from encast.files import lock, sync_folder
from encast.importers import Checkpoint, open_checkpoint
from encast.machine import usable_cores
from encast.measure.price import usd_per_million
from encast.scoring import METRICS, PRIMARY
from encast.sparsity.files import contains

__all__ = ["Result", "compress", "prepare"]

Progress = Callable[[str, str, int, int | None], None]

_RUN, _RESULT, _WORK = "run.json", "result.json", ".work"
_REMEDY = "remove it and go on with --resume"
_LARGEST_SEED = (1 << 64) - 1
_LONGEST_NAME = 255
"""Bytes of a file's name, on the file systems of Linux."""


@dataclass(frozen=True)
class Result:
    """``stages``: name to its record, in order; ``checkpoint``: the last one; ``artifact``: None without a stage that
    compiles."""

    out: Path
    stages: dict[str, dict[str, Any]]
    checkpoint: Path
    artifact: Path | None


def compress(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    task: str,
    recipe: Recipe,
    train: Dataset,
    dev: Dataset | None = None,
    unlabelled: Dataset | None = None,
    metric: str | None = None,
    seed: int = 0,
    threads: int | None = None,
    device: str | None = None,
    usd_per_hour: float | None = None,
    resume: bool = False,
    progress: Progress = lambda stage, what, done, total: None,
) -> Result:
    """Runs the stages of ``recipe`` on the checkpoint ``source`` (a folder or a hub id) and writes the folder ``out``.

    ``out`` gets a folder ``N-NAME`` for every stage that trains, an ordinary checkpoint with ``compress.json``, which
    says what was done; the artifact of a stage that compiles; and ``result.json``, written last. ``task`` is one of
    ``archs.TASKS``. ``dev``: the rows that decide which weights are kept, by ``metric`` (a name that
    ``scoring.score`` gives; default: that of the kind of data); without, the last weights are kept. ``unlabelled``:
    rows of the kind "texts", for stages that learn from a teacher alone (``hard`` 0).
    ``threads``: default: the usable cores. ``device``: of torch; default: CUDA where it is there, else the CPU. With
    ``resume`` a run that was ended goes on, to the same bits. ``progress(stage, what, done, total)``.

    Raises ``InputError`` for what cannot be done as asked, before anything runs where that can be seen;
    ``CheckpointError`` and ``UnsupportedModelError`` for a checkpoint that cannot be used; ``ResourceError`` when the
    disk is full: what was done stays, and ``resume`` goes on from there, as after a ``KeyboardInterrupt``.
    """
    folder = Path(os.path.abspath(out))
    checkpoint = open_checkpoint(source)
    checkpoint.need_hugging_face("training")
    if contains(checkpoint.root, folder):
        raise InputError(f"{folder} lies in the checkpoint itself; choose a place outside of it")
    compiles = any(isinstance(stage, Quantise) for stage in recipe.stages)
    if compiles and len(os.fsencode(_artifact(folder).name)) > _LONGEST_NAME:
        raise InputError(
            f"out is {folder}: its artifact adds .encast to that name, and a file's name has {_LONGEST_NAME} bytes at "
            "most; give a shorter one"
        )
    context = prepare(checkpoint, recipe, task, train, dev, unlabelled, metric, seed, threads, device, usd_per_hour)
    deterministic = torch.utils.deterministic
    before = (
        torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    )  # fmt: skip
    descriptor = _open(folder, _key(checkpoint, recipe, context), resume)
    try:
        torch.set_num_threads(context.threads)
        # The same bits each time; what has no such kernel on a GPU says so and runs.
        torch.use_deterministic_algorithms(True, warn_only=context.device != "cpu")
        # Writing NaN to every new tensor takes 7 % of a step, and nothing here reads what it has not written.
        deterministic.fill_uninitialized_memory = False
        if not _is_done(folder):
            _run(checkpoint.root, folder, recipe, context, progress)
        elif usd_per_hour is not None:
            _pay(folder, usd_per_hour)
        return _read(folder)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{folder} has what was done; --resume goes on") from None
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
        deterministic.fill_uninitialized_memory = before[2]
        os.close(descriptor)


def prepare(
    checkpoint: Checkpoint,
    recipe: Recipe,
    task: str,
    train: Dataset,
    dev: Dataset | None,
    unlabelled: Dataset | None,
    metric: str | None,
    seed: int,
    threads: int | None,
    device: str | None,
    usd_per_hour: float | None,
) -> Context:
    """The arguments of ``compress``, all checked, with what their defaults stand for."""
    checkpoint.need_hugging_face("training")
    if not 0 <= seed <= _LARGEST_SEED:
        raise InputError(f"seed is {seed}; a whole number from 0 to {_LARGEST_SEED} is needed")
    if usd_per_hour is not None and not 0 < usd_per_hour < math.inf:
        raise InputError(f"usd_per_hour is {usd_per_hour}; an hour costs more than nothing and less than infinity")
    if usd_per_hour is not None and (dev is None or not any(isinstance(stage, Quantise) for stage in recipe.stages)):
        raise InputError(
            "a price is given for artifacts that are timed on dev rows; give a recipe with a stage quantise and a dev "
            "set, or leave it out"
        )
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _check_device(chosen)
    count = threads or len(usable_cores())
    name = metric or PRIMARY[train.kind]
    if name not in METRICS[train.kind]:
        raise InputError(f"metric is {name!r}; for {train.kind} it is one of {', '.join(METRICS[train.kind])}")
    context = Context(task, train, dev, name, seed, count, chosen, usd_per_hour, lambda *_: None, unlabelled)
    check_run(checkpoint, recipe, context)
    return context


def _check_device(name: str) -> None:
    try:
        torch.zeros(1, device=name).cpu()
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise InputError(
            f"device is {name!r}, which torch cannot use here ({reason}); give cpu, cuda or cuda:N"
        ) from None


def _artifact(folder: Path) -> Path:
    return folder / f"{folder.name}.encast"


def _run(source: Path, folder: Path, recipe: Recipe, context: Context, progress: Progress) -> None:
    work = folder / _WORK
    current, artifact = source, None
    records: dict[str, dict[str, Any]] = {}
    made: dict[str, Path] = {}
    for number, (stage, name) in enumerate(zip(recipe.stages, recipe.names(), strict=True), 1):
        own = Context(**{**vars(context), "progress": _named(progress, name)})
        if isinstance(stage, Quantise):
            artifact = _artifact(folder)
            with resumable(folder):
                records[name] = quantise_stage(stage, made or {"source": source}, artifact, work / name, own)
            continue
        assert isinstance(stage, Training)
        target = folder / f"{number}-{name}"
        if target.is_dir():
            records[name] = read_stage(target)
        else:
            records[name] = train_stage(stage, current, target, work / name, made, own)
        shutil.rmtree(work / name, ignore_errors=True)
        made[name] = current = target
    document = {
        "checkpoint": os.path.relpath(current, folder),
        "artifact": artifact and artifact.name,
        "stages": records,
    }
    with resumable(folder):
        write_record(folder / _RESULT, document)
        sync_folder(folder)


def _is_done(folder: Path) -> bool:
    """Whether there is a result, and what it names; a result of something that is gone is removed."""
    if not (folder / _RESULT).is_file():
        return False
    result = _read(folder)
    # A recipe that trains nothing names its source, which may have moved.
    own = [path for path in (result.artifact, result.checkpoint) if path is not None and path.parent == folder]
    gone = [path for path in own if not path.is_dir()]
    if gone:
        print(f"encast: {gone[0]} is not there any more and is made again", file=sys.stderr)
        (folder / _RESULT).unlink()
    return not gone


def _read(folder: Path) -> Result:
    """What a run that is done has left; removes what a kill at its very end left besides."""
    shutil.rmtree(folder / _WORK, ignore_errors=True)
    document = read_record(folder / _RESULT, _REMEDY)
    checkpoint, artifact = document["checkpoint"], document["artifact"]
    return Result(
        folder,
        document["stages"],
        Path(os.path.normpath(folder / checkpoint)),
        None if artifact is None else folder / artifact,
    )


def _pay(folder: Path, usd_per_hour: float) -> None:
    """A run that was done without a price, or with another, gets this one."""
    document = read_record(folder / _RESULT, _REMEDY)
    for stage in document["stages"].values():
        for entry in stage.get("front", ()):
            entry["usd_per_million"] = usd_per_million(usd_per_hour, entry["rows_per_second"])
    with resumable(folder):
        write_record(folder / _RESULT, document)


def _named(progress: Progress, stage: str) -> Callable[[str, int, int | None], None]:
    return lambda what, done, total: progress(stage, what, done, total)


def _key(checkpoint: Checkpoint, recipe: Recipe, context: Context) -> dict[str, Any]:
    """What the result depends on."""
    return {
        "encast": version(),
        "source": files_of(checkpoint),
        "task": context.task,
        "recipe": [_stage_key(stage, name, recipe) for stage, name in zip(recipe.stages, recipe.names(), strict=True)],
        "train": context.train.digest,
        "dev": None if context.dev is None else context.dev.digest,
        "unlabelled": None if context.unlabelled is None else context.unlabelled.digest,
        "metric": context.metric,
        "seed": context.seed,
        "threads": context.threads,
        "device": context.device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _stage_key(stage: Stage, name: str, recipe: Recipe) -> dict[str, Any]:
    """Its fields, with the files of a teacher that is no stage."""
    key = {**msgspec.to_builtins(stage), "name": name}
    distil = stage.distil if isinstance(stage, (Prune, Distil)) else None
    if distil is None or distil.teacher in recipe.names():
        return key
    return {**key, "teacher": files_of(open_checkpoint(distil.teacher))}


def _open(folder: Path, key: Mapping[str, Any], resume: bool) -> int:
    """Makes the folder, or finds it as a run with the same key has left it; returns its lock, the open folder.

    Nothing in the folder is read or written before it is locked: another run may be at work there.
    """
    if not resume and os.path.lexists(folder):
        raise _exists(folder)
    try:
        if not folder.parent.is_dir():
            raise InputError(f"the folder {folder.parent} does not exist; make it, or choose another place")
        if not os.path.lexists(folder):
            folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except NotADirectoryError:
        raise _exists(folder) from None
    except OSError as error:
        raise ResourceError(f"{folder} cannot be written: {error.strerror}; choose another place") from None
    try:
        lock(descriptor, InputError(f"another process is at work in {folder}; wait for it, or choose another place"))
        file = folder / _RUN
        if file.is_file():
            # Without ``resume`` the folder was not there a moment ago: another run made it, and has ended since.
            if not resume:
                raise _exists(folder)
            _compare(file, key)
        elif _is_bare(folder):
            write_record(file, key)
        else:
            raise _exists(folder)
    except OSError as error:
        os.close(descriptor)
        raise ResourceError(f"{folder} cannot be written: {error.strerror}; choose another place") from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _exists(folder: Path) -> InputError:
    hint = "add --resume to go on with it, or " if (folder / _RUN).is_file() else ""
    return InputError(f"{folder} exists already; {hint}choose another place, or remove it")


def _is_bare(folder: Path) -> bool:
    """Whether it is as a run leaves it that was killed before its first file was whole."""
    return all(name.startswith(".encast-") for name in os.listdir(folder))


def _compare(file: Path, key: Mapping[str, Any]) -> None:
    found = read_record(file, f"remove {file.parent} and begin anew")
    asked = json.loads(json.dumps(key))
    other = [name for name in asked if found.get(name) != asked[name]]
    if other == ["recipe"]:
        # Stages that are done must be the same; of the others the first that differs begins anew, and those behind it.
        stages = list(zip(found["recipe"], asked["recipe"], strict=False))
        same = next((index for index, (old, new) in enumerate(stages) if old != new), len(stages))
        names = [f"{number}-{stage['name']}" for number, stage in enumerate(found["recipe"], 1)]
        done = any((file.parent / name).is_dir() for name in names[same:])
        if not done and not (file.parent / _RESULT).is_file():
            for stage in (*found["recipe"][same:], *asked["recipe"][same:]):
                shutil.rmtree(file.parent / _WORK / stage["name"], ignore_errors=True)
            write_record(file, key)
            return
    if other:
        raise InputError(
            f"{file.parent} is of a run that differs in {', '.join(other)}; give the same (of the recipe, the stages "
            "that are done and their teachers), or choose another place"
        )
