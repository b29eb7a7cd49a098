"""The folder of a job: its shards' files, and which of them are finished.

``part-00000.jsonl`` holds the answers of a shard, ``part-00000.errors.jsonl`` its bad rows, if there are any. Both come
with a rename out of ``.encast/ID``, the answers last. ``.encast/job.json`` says what the job is, ``.encast/shards.bin``
where its shards begin. ``.encast/finished.jsonl``, the journal, gets a line for every finished shard with the digests
of its files, and is locked while a process runs the job. ``manifest.json`` comes when all are finished.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from encast.errors import InputError, ResourceError
from encast.files import LineFile, open_regular, sync_folder, write_whole
from encast.jobs.job import Begun, Cut, Job, Shards
from encast.jobs.layout import HIDDEN, Done, Layout, written
from encast.jobs.sealed import seal, unseal

__all__ = ["FINISHED", "JOB_FILE", "JobFolder", "read_begun"]

JOB_FILE = f"{HIDDEN}/job.json"
SHARD_TABLE = f"{HIDDEN}/shards.bin"
FINISHED = f"{HIDDEN}/finished.jsonl"
MANIFEST = "manifest.json"

_CHECKERS = 8
"""Threads that read finished files."""
_CHECKED_AT_ONCE = 1024


def read_begun(folder: Path) -> Begun | None:
    """The job that the folder is of; None when it is of none. Raises ``InputError``."""
    path = folder / JOB_FILE
    try:
        data = _content(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); choose another --output") from None
    try:
        return Begun.parse(data, _content(folder / SHARD_TABLE))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: is not the file of a job, or a damaged one ({getattr(error, 'strerror', None) or error}); choose "
            "another --output"
        ) from None


def _content(path: Path) -> bytes:
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        return file.read()


class JobFolder:
    """The folder while this process, and no other, runs its job; a context manager. Methods raise ``ResourceError``.

    ``locked`` is False where the file system cannot keep others out.
    """

    def __init__(self, path: Path) -> None:
        """Makes the folder where there is none. Raises ``InputError`` where it holds other things or is damaged, or
        another process runs its job."""
        self.path = path
        self._made = not path.exists()
        self._journal = self._opened()
        self.locked = self._journal.locked
        try:
            self.begun = read_begun(path)
            self.done: dict[int, Done] = {}
            """Finished shards by their numbers; ``check`` says which are."""
            self.numbers: dict[str, Any] | None = None
            """What the bits of the finished answers depend on besides the job, see ``worker.Worker.numbers``."""
            self._noted = self._read()
        except BaseException:
            self._journal.close()
            raise

    def _opened(self) -> LineFile:
        busy = InputError(f"{self.path}: another process runs this job; wait for it, or choose another --output")
        for last in (False, False, True):
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                strange = sorted(one.name for one in self.path.iterdir() if one.name != HIDDEN)
                if strange and not (self.path / JOB_FILE).exists():
                    raise InputError(
                        f"{self.path}: the folder holds {strange[0]} and no job; give --output an empty or a new folder"
                    )
                (self.path / HIDDEN).mkdir(exist_ok=True)
                return LineFile(self.path / FINISHED, busy, create=True)
            except FileNotFoundError:  # a process that began no job removes what it made
                if last:
                    raise busy from None
            except OSError as error:
                raise ResourceError(
                    f"{error.filename or self.path}: cannot be written ({error.strerror}); choose another --output"
                ) from None
        raise busy

    def _read(self) -> dict[int, Done]:
        """The shards that the journal calls finished. A last line that a crash cut off is passed over."""
        noted: dict[int, Done] = {}
        lines = self._journal.whole.splitlines()
        for at, line in enumerate(lines):
            try:
                entry = unseal(line)
                if at == 0:
                    if self.begun is not None and entry != {"job": self.begun.id}:
                        raise ValueError("it is of another job")
                elif entry.keys() == {"machine"}:
                    self.numbers = entry["machine"]
                else:
                    done = Done.parse(entry)
                    if self.begun is not None and done.rows + done.bad != self.begun.shards[done.shard].span.rows:
                        raise ValueError(f"shard {done.shard} has other rows")
                    noted[done.shard] = done
            except (ValueError, IndexError) as error:
                raise InputError(
                    f"{self.path / FINISHED}: line {at + 1} is damaged ({error}); put a copy of the file back, or "
                    "choose another --output"
                ) from None
        if noted and self.begun is None:
            raise InputError(
                f"{self.path}: {len(noted)} shards are finished, and {JOB_FILE} is gone, which says of what; put it "
                "back, or choose another --output"
            )
        if self.begun is not None and not lines:
            raise InputError(
                f"{self.path / FINISHED}: is empty, so that nothing says what is finished; put a copy of the file "
                "back, or choose another --output"
            )
        return noted

    def check(self, update: Callable[[int, float], None]) -> int:
        """Reads the files of all shards that the journal calls finished, and holds them against their digests. Returns
        how many shards are not as they were written; they count as not finished. ``update`` is told how many are read,
        and which part of all it is."""
        if self.begun is None:
            return 0
        with self._writing():
            self._journal.cut()
        layout = Layout(self.path, self.begun)

        def whole(done: Done) -> bool:
            files = layout.files(done)
            try:
                return all(path.stat().st_size == told.bytes for path, told in files) and all(
                    written(path) == told for path, told in files
                )
            except OSError:  # whatever keeps it from being read: it is written again, or cannot be
                return False

        pool = ThreadPoolExecutor(min(_CHECKERS, os.cpu_count() or 1))
        noted = list(self._noted.values())
        try:
            with self._writing():
                for begin in range(0, len(noted), _CHECKED_AT_ONCE):
                    some = noted[begin : begin + _CHECKED_AT_ONCE]
                    for at, (done, good) in enumerate(zip(some, pool.map(whole, some), strict=True), begin + 1):
                        if good:
                            self.done[done.shard] = done
                        update(at, at / len(noted))
        finally:
            pool.shutdown(cancel_futures=True)  # an interrupt need not wait for all files
        if not self.done:
            self.numbers = None  # nothing is there that other machines could differ from
        return len(noted) - len(self.done)

    def has(self, done: Done) -> bool:
        """Whether the files of a finished shard are seen here, of their sizes."""
        try:
            with os.scandir(self.path):  # has a network file system look again
                return all(path.stat().st_size == told.bytes for path, told in self._layout().files(done))
        except OSError:
            return False

    def _layout(self) -> Layout:
        assert self.begun is not None
        return Layout(self.path, self.begun)

    def begin(self, job: Job, cuts: Sequence[Cut]) -> Begun:
        """Writes what the job is; from then on its shards may be written."""
        assert self.begun is None
        begun = Begun(uuid.uuid4().hex, job, Shards(job, cuts))
        content, table = begun.files()
        with self._writing():
            self._journal.clear()  # at most the beginning of a job whose file was never written
            self._journal.append(seal({"job": begun.id}))
            write_whole(self.path / SHARD_TABLE, table)
            write_whole(self.path / JOB_FILE, content)
            sync_folder(self.path / HIDDEN)
        self.begun = begun
        return begun

    def note_numbers(self, numbers: dict[str, Any]) -> None:
        with self._writing():
            self._journal.append(seal({"machine": numbers}))
        self.numbers = numbers

    def note(self, done: Done) -> None:
        """A shard is finished, its files have their names, and that stays so."""
        with self._writing():
            self._journal.append(seal(vars(done)))
        self.done[done.shard] = done

    def reopen(self) -> None:
        """Something is left to do: a manifest would say that nothing is."""
        with self._writing():
            (self.path / MANIFEST).unlink(missing_ok=True)

    def complete(self) -> None:
        """All shards are finished: writes the manifest."""
        assert self.begun is not None
        layout, parts = self._layout(), []
        for shard in self.begun.shards:
            done = self.done[shard.number]
            parts.append(
                {
                    "file": layout.answers(shard.number).name,
                    "input": shard.input.name,
                    "first_row": shard.span.first,
                    "rows": done.rows,
                    "bad_rows": done.bad,
                    "bytes": done.answers.bytes,
                    "sha256": done.answers.sha256,
                }
            )
        with self._writing():
            write_whole(self.path / MANIFEST, json.dumps({"parts": parts}, indent=1) + "\n")

    def sweep(self) -> None:
        """Readies the place of unfinished files, and removes what killed workers of this job have left there; call it
        while none of its workers runs."""
        with self._writing():
            scratch = self._layout().scratch
            scratch.mkdir(exist_ok=True)
            for left in scratch.iterdir():
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
        # Without locks, what is there may be another process's, which has not begun its job yet either.
        if self.locked and self.begun is None and not (self.path / JOB_FILE).exists():
            # Still locked: who has opened the same file meanwhile finds that it is gone.
            with contextlib.suppress(OSError):
                (self.path / FINISHED).unlink()
                (self.path / HIDDEN).rmdir()
                if self._made:
                    self.path.rmdir()
        self._journal.close()

    def __enter__(self) -> JobFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
