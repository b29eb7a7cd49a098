"""The files of a shard while they are written: complete under temporary names first, then in their places."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from encast.data import BadRow, open_writer
from encast.data.output import OutputFile
from encast.data.rows import bad_row_line
from encast.errors import ResourceError
from encast.files import sync_folder
from encast.jobs.layout import Done, Layout, written

__all__ = ["ShardFiles"]


class ShardFiles:
    """Call ``add`` for all answers, ``complete``, then ``place``; or ``discard``. Methods raise ``ResourceError`` where
    nothing can be written."""

    def __init__(
        self, layout: Layout, number: int, input: str, columns: Mapping[str, Any], format: str, width: int | None
    ) -> None:
        """``input``: the name of the shard's input; ``columns``: of answers, see ``data.writers``."""
        self._layout, self._number, self._name = layout, number, {"input": input}
        self._format = format
        self._errors: OutputFile | None = None
        self._numbers: OutputFile | None = None
        self._rows: list[int] = []
        self._bad = 0
        self._done: Done | None = None
        with self._writing():
            self._writer = open_writer(
                layout.answers(number),
                {"input": "str", "row": "int", **columns},
                format,
                width=width,
                scratch=layout.scratch,
            )

    @property
    def count(self) -> int:
        """Answers so far, bad rows with them."""
        return len(self._rows) + self._bad

    def add(self, answers: Sequence[dict[str, Any] | BadRow]) -> None:
        records = []
        for answer in answers:
            if isinstance(answer, BadRow):
                if self._errors is None:
                    self._errors = OutputFile(self._layout.errors(self._number), scratch=self._layout.scratch)
                self._errors.append(bad_row_line(answer, **self._name))
                self._bad += 1
            else:
                records.append({**self._name, **answer})
                self._rows.append(answer["row"])
        self._writer.write(records)

    def complete(self) -> None:
        """Everything is on the disk, under temporary names."""
        with self._writing():
            self._writer.complete()
            if self._errors is not None:
                self._errors.complete()
            if self._format == "npy":
                data = io.BytesIO()
                np.save(data, np.array(self._rows, np.int64))
                self._numbers = OutputFile(self._layout.numbers(self._number), scratch=self._layout.scratch)
                self._numbers.append(data.getvalue())
                self._numbers.complete()
            answers = written(self._writer.output.temporary)
            errors = written(self._errors.temporary) if self._errors else None
            numbers = written(self._numbers.temporary) if self._numbers else None
        self._done = Done(self._number, len(self._rows), self._bad, answers, errors, numbers)

    def place(self) -> Done:
        """Puts the files into their places, the answers last: where these are, everything is. The names are on the disk
        when it returns."""
        assert self._done is not None
        with self._writing():
            for one in (self._errors, self._numbers, self._writer.output):
                if one is not None:
                    one.place()
            sync_folder(self._layout.folder)
        return self._done

    def discard(self) -> None:
        for one in (self._writer.output, self._errors, self._numbers):
            if one is not None:
                one.discard()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ResourceError) as error:
            if not self._layout.scratch.is_dir():
                raise ResourceError(
                    f"{self._layout.folder}: is no longer the folder of this job, it was removed or another job has "
                    "taken it; nothing is written there"
                ) from None
            if isinstance(error, ResourceError):
                raise
            raise ResourceError(
                f"{error.filename or self._layout.folder}: cannot be written ({error.strerror}); make room, or check "
                "the disk"
            ) from None
