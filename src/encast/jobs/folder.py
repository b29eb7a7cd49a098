"""The folder of a job: its shards' files, and which of them are finished.

``part-00000.jsonl`` holds the answers of a shard, ``part-00000.errors.jsonl`` its bad rows, if there are any. Both come
with a rename, the answers last. ``.encast/job.json`` says what the job is. ``.encast/finished.jsonl`` gets a line for
every finished shard, and is locked while a process runs the job. ``manifest.json`` comes when all are finished.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from encast.errors import InputError, ResourceError
from encast.files import LineFile, sync_folder, write_whole
from encast.jobs.job import Job, Shard

__all__ = ["JOB_FILE", "Done", "JobFolder", "error_path", "part_path", "read_job"]

_HIDDEN = ".encast"
JOB_FILE = f"{_HIDDEN}/job.json"
FINISHED = f"{_HIDDEN}/finished.jsonl"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Done:
    """A finished shard: ``rows`` have answers, ``bad`` have none; ``bytes`` of the file of answers."""

    shard: int
    rows: int
    bad: int
    bytes: int


def part_path(folder: Path, number: int, format: str) -> Path:
    return folder / f"part-{number:05d}.{format}"


def error_path(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.errors.jsonl"


def read_job(folder: Path) -> Job | None:
    """The job that the folder is of; None when it is of none. Raises ``InputError``."""
    path = folder / JOB_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); choose another --output") from None
    return Job.parse(text, str(path))


class JobFolder:
    """The folder while this process, and no other, runs its job; a context manager. Methods raise ``ResourceError``."""

    def __init__(self, path: Path) -> None:
        """Makes the folder where there is none. Raises ``InputError`` where it holds other things, or another process
        runs its job."""
        self.path = path
        self._made = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            strange = sorted(one.name for one in path.iterdir() if one.name != _HIDDEN)
            if strange and not (path / JOB_FILE).exists():
                raise InputError(
                    f"{path}: the folder holds {strange[0]} and no job; give --output an empty or a new folder"
                )
            (path / _HIDDEN).mkdir(exist_ok=True)
            busy = InputError(f"{path}: another process runs this job; wait for it, or choose another --output")
            self._finished = LineFile(path / FINISHED, busy, create=True)
        except OSError as error:
            raise ResourceError(f"{path}: cannot be written ({error.strerror}); choose another --output") from None
        try:
            self.job = read_job(path)
            self.done: dict[int, Done] = {}
            """Finished shards by their numbers."""
            self.numbers: dict[str, Any] | None = None
            """What the bits of the finished answers depend on besides the job, see ``worker.Worker.numbers``."""
            if self.job:
                self._read(self.job)
        except BaseException:
            self._finished.close()
            raise

    def _read(self, job: Job) -> None:
        self._finished.cut()
        for line in self._finished.whole.splitlines():
            try:
                entry = json.loads(line)
                if "numbers" in entry:
                    self.numbers = entry["numbers"]
                    continue
                done = Done(**entry)
            except (ValueError, TypeError):
                raise InputError(f"{self.path / FINISHED}: damaged ({line[:60]!r}); choose another --output") from None
            if self.has(done, job.format):
                self.done[done.shard] = done
        if not self.done:
            self.numbers = None  # nothing is there that other machines could differ from

    def has(self, done: Done, format: str) -> bool:
        """Whether the file of a finished shard is here, whole."""
        try:
            return part_path(self.path, done.shard, format).stat().st_size == done.bytes
        except OSError:
            return False

    def begin(self, job: Job) -> None:
        """Writes what the job is; from then on its shards may be written."""
        with self._writing():
            write_whole(self.path / JOB_FILE, job.text())
            sync_folder(self.path / _HIDDEN)
        self.job = job

    def note_numbers(self, numbers: dict[str, Any]) -> None:
        with self._writing():
            self._finished.append(json.dumps({"numbers": numbers}).encode() + b"\n")
        self.numbers = numbers

    def note(self, done: Done) -> None:
        """A shard is finished, and stays so."""
        with self._writing():
            sync_folder(self.path)  # the names of its files, before they are counted on
            self._finished.append(json.dumps(asdict(done)).encode() + b"\n")
        self.done[done.shard] = done

    def reopen(self) -> None:
        """Something is left to do: a manifest would say that nothing is."""
        with self._writing():
            (self.path / MANIFEST).unlink(missing_ok=True)

    def complete(self, shards: list[Shard], format: str) -> None:
        """All shards are finished: writes the manifest."""
        parts = [
            {
                "file": part_path(self.path, shard.number, format).name,
                "input": shard.input.name,
                "first_row": shard.span.first,
                "rows": self.done[shard.number].rows,
                "bad_rows": self.done[shard.number].bad,
                "bytes": self.done[shard.number].bytes,
            }
            for shard in shards
        ]
        with self._writing():
            write_whole(self.path / MANIFEST, json.dumps({"parts": parts}, indent=1) + "\n")

    def sweep(self) -> None:
        """Removes what killed workers have half written; call it while no worker of this job runs."""
        with self._writing():
            for left in self.path.glob(".part-*.tmp"):
                left.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ResourceError(
                f"{self.path}: cannot be written ({error.strerror}); make room, then run the same command again"
            ) from None

    def close(self) -> None:
        """Lets others run the job; where none was begun, nothing stays."""
        if self.job is None:
            with contextlib.suppress(OSError):
                (self.path / FINISHED).unlink()
                (self.path / _HIDDEN).rmdir()
                if self._made:
                    self.path.rmdir()
        self._finished.close()

    def __enter__(self) -> JobFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
