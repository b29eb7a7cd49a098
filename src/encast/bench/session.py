"""An experiment: a folder with the configuration, and rows that stay whatever happens after them."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from encast.bench.cache import default_cache
from encast.bench.config import Job, load_jobs
from encast.bench.rows import BusyError, Row, RowFile
from encast.bench.run import Comparison, Shared, tell_apart
from encast.errors import InputError, ResourceError
from encast.files import write_whole

__all__ = ["Session", "open_session", "resume_session"]

CONFIG = "config.yaml"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Session:
    """Jobs and the folder that their rows go to.

    ``config``: the text of its ``config.yaml``, None where it is there already. ``made``: folders that were made for
    it, the innermost first; ``run`` removes them again where the jobs are refused.
    """

    folder: Path
    jobs: tuple[Job, ...]
    config: str | None = None
    made: tuple[Path, ...] = ()

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
        try:
            comparisons = [Comparison(job, cache=_cache(job), say=say, shared=shared) for job in self.jobs]
            _need_different_rows(comparisons)
            tell_apart(comparisons)
            opened = RowFile(self.folder)
        except BaseException:
            _remove(self.made)
            raise
        with opened as file:
            if self.config is not None:
                if file.rows:  # of a command that began after this one, and has ended
                    raise _holds_rows(self.folder)
                try:
                    _write(self.folder, self.config)
                except BaseException:
                    file.path.unlink()
                    _remove(self.made)
                    raise
            left = [comparison.left(file.rows) for comparison in comparisons]
            said = {(row["key"], row["reason"]) for row in file.rows if row["status"] == "unavailable"}
            shared.rows_left = sum(left)
            if shared.rows_left:
                say(_plan(comparisons, left))
            for comparison in comparisons:
                with contextlib.closing(comparison.rows(file.rows)) as measured:  # also where a disk is full
                    for rows in measured:
                        file.append([row for row in rows if (row["key"], row["reason"]) not in said])
                        for row in rows:
                            show(row)
            return file.rows


def open_session(overrides: Sequence[str], *, multirun: bool = False, folders: Sequence[Path] = ()) -> Session:
    """A new experiment, its folder made. Raises ``InputError`` where that holds another's rows."""
    jobs = load_jobs(overrides, multirun=multirun, folders=folders)
    name = jobs[0].experiment or datetime.now().strftime("%Y-%m-%d-%H%M%S")
    if Path(name).name != name or name in (".", ".."):
        raise InputError(f"experiment is {name!r}; give the name of a folder, and out=FOLDER for where it goes")
    folder = Path(jobs[0].out or "bench-results") / name
    if Session(folder, ()).began():
        raise _holds_rows(folder)
    document = {
        "overrides": list(overrides),
        "multirun": multirun,
        "conf": [str(path.resolve()) for path in folders],
        "jobs": [job.record() for job in jobs],
    }
    folder, made = _claim(folder, new=not jobs[0].experiment)
    session = _session(folder, jobs)
    config = yaml.safe_dump(_listed(document), sort_keys=False, allow_unicode=True)
    return replace(session, config=config, made=made)


def resume_session(folder: Path) -> Session:
    """An experiment that ended early, with the overrides that it was begun with. Raises ``InputError``."""
    if not os.path.isdir(folder):  # what may not be looked at is none either, where Path.is_dir would raise
        raise InputError(f"{folder}: is no folder; name one that `encast bench` has written")
    try:
        document = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
        overrides = [str(override) for override in document["overrides"]]
        folders = [Path(path) for path in document["conf"]]
        multirun = bool(document["multirun"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{folder}: cannot be resumed ({CONFIG}: {reason}); name a folder that `encast bench` has written"
        ) from None
    return _session(folder, load_jobs(overrides, multirun=multirun, folders=folders))


def _session(folder: Path, jobs: Sequence[Job]) -> Session:
    """Rows say which experiment they are of, also where nobody has named it."""
    return Session(folder, tuple(replace(job, experiment=job.experiment or folder.name) for job in jobs))


def _need_different_rows(comparisons: Sequence[Comparison]) -> None:
    """Raises ``InputError`` where two jobs would make the same row: the second would never be measured."""
    keys = Counter(key for comparison in comparisons for key in set(comparison.keys()))
    if any(count > 1 for count in keys.values()):
        raise InputError(
            "two jobs measure the same backend, model, workload, scenario and launcher; sweep over one of these: other "
            "fields do not tell rows apart"
        )


def _cache(job: Job) -> Path:
    return Path(job.cache) if job.cache else default_cache()


def _listed(value: Any) -> Any:
    """Tuples as lists: YAML has no others."""
    if isinstance(value, dict):
        return {name: _listed(inner) for name, inner in value.items()}
    return [_listed(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _plan(comparisons: Sequence[Comparison], left: Sequence[int]) -> str:
    """What is to come, as far as it is known: the time of the rounds alone."""
    rows = sum(left)
    shapes = {(len(comparison.points), len(comparison.job.backends)) for comparison in comparisons}
    points, backends = next(iter(shapes))
    what = "1 row" if rows == 1 else f"{rows} rows"
    if rows > 1 and len(shapes) == 1 and rows == points * backends * len(comparisons):
        parts = [(len(comparisons), "job"), (points, "point"), (backends, "backend")]
        what += f" ({' x '.join(f'{count} {name}s' for count, name in parts if count > 1)})"
    seconds = sum(count * comparison.job.timing.seconds for comparison, count in zip(comparisons, left, strict=True))
    return (
        f"{what} to measure; the rounds of those that can be measured take {_duration(seconds)} at least "
        "(timing.seconds each), loading, conversions and warm-up not counted"
    )


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.3g} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _claim(folder: Path, *, new: bool) -> tuple[Path, tuple[Path, ...]]:
    """Makes the folder, and says which folders it made; a ``new`` one that is there already gets a number instead."""
    candidates = (
        folder if number == 1 else folder.with_name(f"{folder.name}-{number}") for number in itertools.count(1)
    )
    for candidate in candidates:
        made = tuple(part for part in (candidate, *candidate.parents) if not part.exists())
        try:
            candidate.parent.mkdir(parents=True, exist_ok=True)
            candidate.mkdir(exist_ok=not new)
        except FileExistsError:
            if candidate.is_dir():
                continue
            taken = next(part for part in (candidate, *candidate.parents) if part.exists())
            raise ResourceError(f"{taken}: is no folder; choose another experiment=NAME or out=FOLDER") from None
        except OSError as error:
            _remove(made)
            raise _unwritable(candidate, error) from None
        return candidate, made
    raise AssertionError("counting never ends")


def _remove(folders: Sequence[Path]) -> None:
    """Those that are empty; another command may have come to use one."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _holds_rows(folder: Path) -> BusyError:
    return BusyError(f"{folder} holds rows already; go on with --resume {folder}, or choose another experiment=NAME")


def _unwritable(path: Path, error: OSError) -> ResourceError:
    return ResourceError(
        f"{path}: cannot be written ({error.strerror or error}); make room, or name another folder with out=FOLDER"
    )


def _write(folder: Path, text: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / CONFIG, text)
    except OSError as error:
        raise _unwritable(folder / CONFIG, error) from None
