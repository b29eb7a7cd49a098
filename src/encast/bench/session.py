"""An experiment: a folder with the configuration, and rows that stay whatever happens after them."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from encast.bench.cache import default_cache
from encast.bench.comparison import Comparison, Say, Shared, tell_apart
from encast.bench.config import Job, load_jobs, settings
from encast.bench.rows import BusyError, Row, RowFile, flatten
from encast.errors import InputError, ResourceError
from encast.files import write_whole

__all__ = ["Session", "open_session", "resume_session"]

CONFIG = "config.yaml"


@dataclass
class Session:
    """Jobs and the folder that their rows go to.

    ``config``: the text of its ``config.yaml``, None where it is there already; ``begun`` are then the ``settings`` of
    its jobs. Where ``named`` is false, ``run`` takes another folder in place of one that somebody else has.
    """

    folder: Path
    jobs: tuple[Job, ...]
    config: str | None = None
    begun: Sequence[Mapping[str, Any]] = ()
    named: bool = True

    def began(self) -> bool:
        """Whether the folder holds rows."""
        rows = self.folder / "rows.jsonl"
        return rows.exists() and rows.stat().st_size > 0

    def can_resume(self) -> bool:
        """Whether ``resume_session`` finds what it needs in the folder."""
        return (self.folder / CONFIG).exists()

    def run(self, say: Say = lambda text: None, show: Callable[[Row], None] = lambda row: None) -> list[Row]:
        """Measures what has no row yet or was unavailable, and returns the rows of the folder, of each key the last.

        All jobs are made before the first is measured, so that none is refused hours later, and before anything is
        written. ``show`` gets each row once it is on the disk. Raises ``EncastError``, of which ``BusyError`` says that
        the folder is another command's; finished rows stay, also after ``KeyboardInterrupt``.
        """
        shared = Shared()
        comparisons = [
            Comparison(job, cache=Path(job.cache) if job.cache else default_cache(), say=say, shared=shared)
            for job in self.jobs
        ]
        _need_different_rows(comparisons)
        tell_apart(comparisons)
        with self._open() as file:
            shared.experiment = self.folder.name
            if self.config is None:
                self._need_own_rows(file.rows, comparisons)
            else:
                try:
                    write_whole(self.folder / CONFIG, self.config)
                except OSError as error:
                    raise ResourceError(
                        f"{self.folder / CONFIG}: cannot be written ({error.strerror or error}); make room, or name "
                        "another folder with out=FOLDER"
                    ) from None
            left = [comparison.left(file.rows) for comparison in comparisons]
            shared.rows_left = sum(left)
            if shared.rows_left:
                seconds = sum(count * job.timing.seconds for job, count in zip(self.jobs, left, strict=True))
                say(
                    f"{shared.rows_left} rows to measure; the rounds of those that can be measured take {seconds:,.4g} "
                    "s at least (timing.seconds each), loading, conversions and warm-up not counted"
                )
            said = {(row["key"], row["reason"]) for row in file.rows if row["status"] == "unavailable"}
            for comparison in comparisons:
                with contextlib.closing(comparison.rows(file.rows)) as measured:  # also where a disk is full
                    for rows in measured:
                        file.append([row for row in rows if (row["key"], row["reason"]) not in said])
                        for row in rows:
                            show(row)
            return file.rows

    def _open(self) -> RowFile:
        name, number = self.folder.name, 1
        while True:
            try:
                file = RowFile(self.folder)
                if self.config is None or not file.rows:
                    return file
                file.close()  # rows of a command that began after this one, and has ended
                raise _holds_rows(self.folder)
            except BusyError:
                if self.named:
                    raise
                number += 1
                self.folder = self.folder.with_name(f"{name}-{number}")

    def _need_own_rows(self, rows: Sequence[Row], comparisons: Sequence[Comparison]) -> None:
        """Raises ``InputError`` where rows are of other jobs than today's, beside which all would be measured again."""
        keys = set().union(*(one.keys() for one in comparisons))
        others = sum(row["key"] not in keys for row in rows)
        if not others:
            return
        then, now = ([flatten(one) for one in those] for those in (self.begun, [one.settings for one in comparisons]))
        found = [f"there were {len(then)} jobs, and are {len(now)}"] * (len(then) != len(now))
        for old, new in zip(then, now, strict=False):
            for name in {**old, **new}:
                was, is_now = (str(one.get(name, "not there")) for one in (old, new))
                if was != is_now and (text := f"{name} was {was}, is {is_now}") not in found:
                    found.append(text)
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        why = "; ".join(found[:3]) + more or "its settings are the same: encast, the cores or a data file have changed"
        raise InputError(
            f"{self.folder}: cannot be resumed: {others} of its {len(rows)} rows are of no job that {CONFIG} makes "
            f"now ({why}); start a new experiment=NAME, or resume with what this one was begun with"
        )


def open_session(overrides: Sequence[str], *, multirun: bool = False, folders: Sequence[Path] = ()) -> Session:
    """A new experiment. Raises ``InputError`` where its folder holds another's rows."""
    jobs = load_jobs(overrides, multirun=multirun, folders=folders)
    named = bool(jobs[0].experiment)
    name = jobs[0].experiment or datetime.now().strftime("%Y-%m-%d-%H%M%S")
    if Path(name).name != name or name in (".", ".."):
        raise InputError(f"experiment is {name!r}; give the name of a folder, and out=FOLDER for where it goes")
    folder = Path(jobs[0].out or "bench-results") / name
    if named and Session(folder, ()).began():
        raise _holds_rows(folder)
    document = {
        "overrides": list(overrides),
        "multirun": multirun,
        "conf": [str(path.resolve()) for path in folders],
        "jobs": [job.record() for job in jobs],
    }
    config = yaml.safe_dump(_listed(document), sort_keys=False, allow_unicode=True)
    return Session(folder, tuple(jobs), config, named=named)


def resume_session(folder: Path) -> Session:
    """An experiment that ended early, with the overrides that it was begun with. Raises ``InputError``."""
    if not os.path.isdir(folder):  # what may not be looked at is none either, where Path.is_dir would raise
        raise InputError(f"{folder}: is no folder; name one that `encast bench` has written")
    try:
        document = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
        overrides = [str(override) for override in document["overrides"]]
        folders = [Path(path) for path in document["conf"]]
        multirun = bool(document["multirun"])
        begun = [settings(job) for job in document["jobs"]]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{folder}: cannot be resumed ({CONFIG}: {reason}); name a folder that `encast bench` has written"
        ) from None
    return Session(folder, tuple(load_jobs(overrides, multirun=multirun, folders=folders)), begun=begun)


def _need_different_rows(comparisons: Sequence[Comparison]) -> None:
    """Raises ``InputError`` where two jobs would make the same row: the second would never be measured."""
    keys = Counter(key for comparison in comparisons for key in set(comparison.keys()))
    if any(count > 1 for count in keys.values()):
        raise InputError(
            "two jobs measure the same backend, model, workload, scenario and launcher; sweep over one of these: other "
            "fields do not tell rows apart"
        )


def _listed(value: Any) -> Any:
    """Tuples as lists: YAML has no others."""
    if isinstance(value, dict):
        return {name: _listed(inner) for name, inner in value.items()}
    return [_listed(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _holds_rows(folder: Path) -> BusyError:
    return BusyError(f"{folder} holds rows already; go on with --resume {folder}, or choose another experiment=NAME")
