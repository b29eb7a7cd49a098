"""The stage that compiles: the artifact that is asked for, and how it compares with the others of the run."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

import encast.artifact as artifacts
import encast.budget as budget
from encast.budget.race import race, ratio
from encast.budget.search import ROUNDING, keeps
from encast.compile import compile
from encast.compress.front import Entry, Judged, drop_of, judge, measure_front
from encast.compress.recipe import Quantise
from encast.compress.records import read_record, write_record
from encast.compress.stages import Context
from encast.errors import InputError, UndefinedError

__all__ = ["quantise_stage"]


def quantise_stage(
    stage: Quantise, made: Mapping[str, Path], out: Path, work: Path, context: Context
) -> dict[str, Any]:
    """Writes the artifact ``out``, of one of the checkpoints ``made`` (name to folder); returns its record.

    Without a budget it is the last checkpoint's. With one it is the fastest of all whose metric is within the budget of
    the first checkpoint in f32, which is one of them; where none but f32 is, ``missed`` of the record names the nearest
    and by how much it is over. Checkpoints whose artifact has no metric are left out, and are ``failed`` of the record;
    where that is the one that is asked for, or all, it is an ``InputError``.
    ``work`` holds what a later call goes on from.
    """
    work.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"stage": msgspec.to_builtins(stage)}
    names = list(made)
    if context.dev is None:
        path, sparse = _compiled(stage, made[names[-1]], work / "artifact", context)
        _place(path, out)
        return {**record, "checkpoint": names[-1], "sparse": sparse}
    metric = stage.metric or context.metric
    try:
        reference = _judged(f"{names[0]} f32", _plain(made[names[0]], work / "f32", context), context)
    except UndefinedError:
        raise InputError(
            f"{names[0]} in f32 answers all rows of {context.dev.name} alike, or not with finite numbers: there is "
            "nothing to compare with; train it with a lower learning-rate"
        ) from None
    if metric not in reference.metrics:
        raise InputError(f"metric is {metric!r}; this data set has {', '.join(reference.metrics)}")
    if stage.max_drop is not None and reference.metrics[metric] <= 0:
        raise InputError(
            f"{names[0]} has a {metric} of {reference.metrics[metric]:g} on {context.dev.name}: a share of that is no "
            "budget; train for longer, or leave max-drop out"
        )
    judged = [reference]
    owners, notes, failed = {}, {}, []
    for number, name in enumerate(names, 1):
        context.progress("checkpoints compiled", number, len(names))
        try:
            if stage.max_drop is None:
                path, sparse = _compiled(stage, made[name], work / name, context)
                what, note = f"{name} {stage.dtype}{', sparse' if sparse == 'always' else ''}", None
            else:
                path, what, note = _within(
                    stage, name, made[name], work / name, reference.metrics[metric], metric, context
                )
            judged.append(_judged(what, path, context))
        except UndefinedError:
            failed.append(name)
            continue
        owners[what] = name
        if note is not None:
            notes[name] = note
    if (stage.max_drop is None and names[-1] in failed) or len(failed) == len(names):
        raise InputError(
            f"{names[-1]} in {stage.dtype} answers all rows of {context.dev.name} alike, or not with finite numbers; "
            "train it with a lower learning-rate, with fewer zeros, or give another dtype"
        )
    entries = measure_front(judged, metric, context.threads, context.usd_per_hour, work)
    chosen = _choose(stage, entries)
    _place(next(one.artifact for one in judged if one.name == chosen.name), out)
    return {
        **record,
        "checkpoint": owners.get(chosen.name, names[0]),
        "chosen": chosen.name,
        "metric": metric,
        "missed": None if stage.max_drop is None else _missed(stage.max_drop, entries, owners, notes, metric),
        "front": [entry.to_json() for entry in entries],
        "searches": notes,
        "failed": failed,
    }


def _choose(stage: Quantise, entries: list[Entry]) -> Entry:
    if stage.max_drop is None:
        return entries[-1]
    # The reference is among them and has lost nothing.
    within = [entry for entry in entries if entry.drop is not None and keeps(entry.drop, stage.max_drop)]
    return max(within, key=lambda one: one.speed)


def _missed(
    max_drop: float, entries: list[Entry], owners: Mapping[str, str], notes: Mapping[str, Any], metric: str
) -> dict[str, Any] | None:
    """What is nearest to the budget where nothing narrower than f32 keeps it, and by how much it is over."""
    drops = {entry.name: entry.drop for entry in entries}
    found: dict[str, float | None] = {}
    for what, name in owners.items():
        note = notes[name]
        if note["what"] != "f32":
            found[what] = drops[what]
        elif (missed := note["found"]["missed"]) is None:
            return None  # one keeps it, and is no faster than f32
        elif (nearest := missed["nearest"]) is not None:
            found[f"{name} {nearest['name']}"] = drop_of(nearest["metrics"][metric], entries[0].metric)
    known = [(drop, what) for what, drop in found.items() if drop is not None]
    if not known:
        return None
    drop, what = min(known)
    return None if keeps(drop, max_drop) else {"nearest": what, "drop": drop, "over": drop - max_drop}


def _within(
    stage: Quantise, name: str, checkpoint: Path, folder: Path, reference: float, metric: str, context: Context
) -> tuple[Path, str, dict[str, Any]]:
    """The fastest artifact of one checkpoint that keeps the budget of the reference, if its own f32 leaves any."""
    assert context.dev is not None
    assert stage.max_drop is not None
    folder.mkdir(exist_ok=True)
    target, done = folder / "model.encast", folder / "found.json"
    if not done.is_file():
        own = _judged(name, _plain(checkpoint, folder / "f32", context), context).metrics[metric]
        left = 1.0 - (1.0 - stage.max_drop) * reference / own if own > 0 else -1.0
        if left < -ROUNDING:
            compile(checkpoint, target, dtype="int8", task=context.task, sparse=_known(stage))
            note = {"f32": own, "reason": "f32 is over the budget itself", "what": "int8"}
        else:
            found = budget.find(
                checkpoint,
                context.dev,
                out=target,
                task=context.task,
                metric=metric,
                max_drop=max(left, 0.0),
                journal=folder / "journal",
                resume=(folder / "journal").exists(),
                sparse=stage.sparse,
                threads=context.threads,
                progress=lambda step, done, total: context.progress(f"{step} ({name})", done, total),
            )
            note = {"f32": own, "what": found.chosen.text, "found": found.to_json()}
        write_record(done, note)
    note = read_record(done, "remove it, and --resume searches anew")
    return target, f"{name} {note['what']}", note


def _known(stage: Quantise) -> str:
    return "never" if stage.sparse == "auto" else stage.sparse


def _compiled(stage: Quantise, checkpoint: Path, folder: Path, context: Context) -> tuple[Path, str]:
    """Of ``stage.dtype``, with or without the zeros; "auto" takes the faster where there are zeros to leave out."""
    folder.mkdir(exist_ok=True)
    variants = [_known(stage)]
    if stage.sparse == "auto" and stage.dtype == "int8" and _zeros(checkpoint) >= _LEAST_ZEROS:
        variants = ["never", "always"]
    paths = [
        compile(checkpoint, folder / f"{one}.encast", dtype=stage.dtype, task=context.task, sparse=one)
        for one in variants
    ]
    if len(paths) == 1:
        return paths[0], variants[0]
    sample = judge("", paths[0], context.dev or context.train, context.threads).sample
    dense, sparse = race(paths, sample, context.threads)
    faster = int(ratio(dense, sparse) > 1.0)
    return paths[faster], variants[faster]


_LEAST_ZEROS = 0.3
"""Below this share of zeros no sparse kernel has ever been faster than the dense one."""


def _zeros(checkpoint: Path) -> float:
    """The mean share of zeros in the products' weights, as their record says; 1 where there is none."""
    try:
        zeros = json.loads((checkpoint / "compress.json").read_text(encoding="utf-8"))["zeros"]
        return statistics.fmean(zeros.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, statistics.StatisticsError):
        return 1.0


def _plain(checkpoint: Path, folder: Path, context: Context) -> Path:
    folder.mkdir(exist_ok=True)
    return compile(checkpoint, folder / "f32.encast", dtype="f32", task=context.task)


def _judged(name: str, artifact: Path, context: Context) -> Judged:
    assert context.dev is not None
    return judge(name, artifact, context.dev, context.threads)


def _place(artifact: Path, out: Path) -> None:
    """Puts a copy where the artifact was asked for, in place of what a killed run may have left, in one step."""
    copy = artifact.with_name(f"{artifact.name}.copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(artifact, copy)
    artifacts.replace(copy, out)
