"""What every task works with: a model's facts and its tokenizer; and how a task asks for runs of the model.

A task is a generator: it yields a ``Run``, is sent the rows that the model gives, and returns its answer. So it needs
no model in its own process, and whoever drives it decides where and when a run happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, TypeVar

import numpy as np

from encast.backends.base import Runnable, SideBySide
from encast.batch import Batch, Int32
from encast.errors import InputError, UndefinedError
from encast.ir.meta import GraphMeta, TokenForm
from encast.tasks.texts import Text
from encast.tasks.tokenize import Encoding, OnLong, Tokenizer, shared_tokens
from encast.tasks.windows import Window, cut_windows

__all__ = ["F32", "Piece", "Run", "Runs", "Session", "Steps", "drive", "need_count", "need_finite", "pack"]

F32 = np.ndarray[Any, np.dtype[np.float32]]

_MOST_BATCH_TOKENS = (1 << 31) - 1
"""Offsets into a batch are int32."""

_GROUP_ROWS = 4096
_GROUP_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Piece:
    """Neighbouring rows that run together; ``first`` is the index of the first in the caller's list.

    ``encodings`` are empty where the rows are token ids that the caller gave, and where they are ``windows``.
    """

    first: int
    encodings: Sequence[Encoding]
    batch: Batch
    windows: Sequence[Window] = ()


@dataclass(frozen=True, eq=False)
class Run:
    """A run of the model that a task asks for; see ``Runnable.run``. ``of``: those among which it is, if there are
    any."""

    output: str
    piece: Piece
    select: Int32 | None = None
    of: Runs | None = None


class Runs(Iterator[Run]):
    """A run of every piece, in order. No run needs the rows of another, so that whoever drives the task may begin some
    before it asks for them. ``select``: makes that of a piece.
    """

    def __init__(
        self, output: str, pieces: Iterable[Piece], select: Callable[[Piece], Int32 | None] = lambda _: None
    ) -> None:
        self._made = (Run(output, piece, select(piece), self) for piece in pieces)
        self._seen: deque[Run] = deque()
        self._error: Exception | None = None

    def look(self) -> Run | None:
        """A run that the task will ask for after those that were looked at before; None after the last. An error in
        making it is the task's, when it comes there."""
        try:
            run = next(self._made, None)
        except Exception as error:
            self._error = error
            return None
        if run is not None:
            self._seen.append(run)
        return run

    def __next__(self) -> Run:
        if self._seen:
            return self._seen.popleft()
        if self._error is not None:
            raise self._error
        return next(self._made)


T = TypeVar("T")
Steps = Generator[Run, F32, T]
"""A task at work: asks for runs, is sent the rows of each, and returns a ``T``.

A run that the model refuses is thrown into it as an ``InputError``.
"""


@dataclass(frozen=True)
class Session:
    """``dim`` is the size of an embedding; ``batch_tokens`` bounds the tokens of one run. ``prompts``: name to text, of
    which ``default_prompt`` names the one that embedding uses unless told otherwise. ``unit``: whether the model scales
    embeddings to length 1. Of sparse embeddings, ``logarithms``: see ``SPLADE_ACTIVATIONS``; ``max_active_dims``: how
    many weights of a text stay, None for all. ``token_form``: of embeddings of tokens, else None.
    ``unweighted``: of sparse embeddings that are weights of a text's tokens (BGE-M3), the tokens without one, rising.

    Memory of a call is bounded by ``batch_tokens`` (for each run under way, where there are several) and by a group of
    4,096 rows or 2^20 characters that are tokenised together, besides the answers themselves. Bits of an answer do not
    depend on either.
    """

    meta: GraphMeta
    tokenizer: Tokenizer
    dim: int
    batch_tokens: int
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    unit: bool = False
    logarithms: int = 1
    max_active_dims: int | None = None
    token_form: TokenForm | None = None
    unweighted: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        need_count("batch_tokens", self.batch_tokens, _MOST_BATCH_TOKENS)

    def prompt(self, name: str | None) -> str:
        """The text that goes before every text to embed, as sentence-transformers does: the prompt of that name,
        the checkpoint's default for None, nothing for "". Raises ``InputError`` for a name that it lacks.
        """
        name = self.default_prompt if name is None else name
        if not name:
            return ""
        if name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise InputError(f'prompt_name is {name!r}; this artifact\'s prompts: {known} (and "" for no prompt)')
        return self.prompts[name]

    def need(self, method: str, *tasks: str) -> None:
        """Raises ``InputError`` unless the artifact was compiled for one of ``tasks``."""
        if not self.meta.can(*tasks):
            raise InputError(
                f"{method} needs an artifact of the task {' or '.join(map(repr, tasks))}, this one was compiled for "
                f"{self.meta.task!r}; compile a checkpoint that has such a head with --task {tasks[0]} "
                f"(encast.compile(..., task={tasks[0]!r}))"
            )

    def stream(
        self,
        rows: Sequence[Text],
        *,
        offsets: bool = False,
        on_long: OnLong = "truncate",
        weight: Callable[[Encoding], int] = len,
    ) -> Iterator[Piece]:
        """Tokenises rows and cuts them into pieces whose weights sum to at most ``batch_tokens``."""
        for first, group in self.groups(rows):
            encodings = self.tokenizer.encode(group, offsets=offsets, on_long=on_long, first=first)
            yield from self.pieces(encodings, first=first, weight=weight)

    def windows(
        self,
        rows: Sequence[Text],
        *,
        stride: int | None = None,
        prompt: str = "",
        offsets: bool = False,
        weight: Callable[[Window], int] = len,
    ) -> Iterator[Piece]:
        """Like ``stream``, but nothing is cut off: rows that are longer than the model reads become windows, see
        ``cut_windows``. They are made as they are needed, so that a long text takes no more memory than its tokens.

        ``prompt``: what every row begins with. Raises ``InputError`` for one that leaves no room, and for a ``stride``
        that does not fit a window, whatever the rows are.
        """
        room = self.tokenizer.room(prompt)
        if room < 1:
            raise InputError(
                f"the prompt and special tokens are {self.tokenizer.max_length - room} tokens, which leaves no room "
                f"for a text in the {self.tokenizer.max_length} that the model reads; choose another prompt_name"
            )
        shared_tokens(room, stride, "the text")
        for windows in _gathered(self._each_window(rows, stride, len(prompt), offsets), weight, self.batch_tokens):
            yield Piece(windows[0].index, (), self._pack(windows), windows)

    def _each_window(self, rows: Sequence[Text], stride: int | None, prompt: int, offsets: bool) -> Iterator[Window]:
        for first, group in self.groups(rows):
            # Offsets say where the prompt ends.
            encodings = self.tokenizer.read(group, offsets=offsets or prompt > 0, first=first)
            for index, encoding in enumerate(encodings, first):
                pair = not isinstance(rows[index], str)
                yield from cut_windows(
                    encoding, index, max_length=self.tokenizer.max_length, stride=stride, prompt=prompt, pair=pair
                )

    def groups(self, rows: Sequence[Text]) -> Iterator[tuple[int, Sequence[Text]]]:
        """The rows that are tokenised together, with the index of the first of each."""
        return _groups(rows)

    def pieces(
        self, encodings: Sequence[Encoding], *, first: int = 0, weight: Callable[[Encoding], int] = len
    ) -> Iterator[Piece]:
        """Cuts encodings into pieces; one that weighs more than ``batch_tokens`` runs alone."""
        for part in _gathered(encodings, weight, self.batch_tokens):
            yield Piece(first, part, self._pack(part))
            first += len(part)

    def id_pieces(
        self,
        rows: Sequence[Sequence[int]],
        types: Sequence[Sequence[int]] | None = None,
        *,
        weight: Callable[[Sequence[int]], int] = len,
    ) -> Iterator[Piece]:
        """Cuts rows of token ids into pieces whose weights sum to at most ``batch_tokens``; a row that weighs more runs
        alone. ``types``: of every token, all 0 when left out.
        """
        begin = 0
        for part in _gathered(rows, weight, self.batch_tokens):
            end = begin + len(part)
            yield Piece(begin, (), pack(part, None if types is None else types[begin:end]))
            begin = end

    def _pack(self, rows: Sequence[Encoding] | Sequence[Window]) -> Batch:
        types = [row.type_ids for row in rows] if self.meta.type_vocab > 1 else []
        # All 0 where the rows are no pairs, which is what None means.
        return pack([row.ids for row in rows], types if any(map(any, types)) else None)

    def explain(self, run: Run, error: InputError) -> InputError:
        """What to say of a run that the model refused with ``error``: a refused id's text and token, else ``error``."""
        vocab = self.meta.vocab
        piece = run.piece
        rows = [(window.index, window.ids) for window in piece.windows]
        rows += [(index, encoding.ids) for index, encoding in enumerate(piece.encodings, piece.first)]
        for index, ids in rows:
            for token in ids:
                if token >= vocab:
                    explained = InputError(
                        f"texts[{index}] has the token {self.tokenizer.token(token)!r} with id {token}, the model "
                        f"embeds ids 0 to {vocab - 1}; the checkpoint's tokenizer and weights do not belong "
                        "together, or its embedding was not resized after adding tokens"
                    )
                    explained.__suppress_context__ = True  # as after `raise ... from None`: it stands for ``error``
                    return explained
        return error


def drive(session: Session, runnable: Runnable, steps: Steps[T]) -> T:
    """The answer of a task whose runs happen here, one after the other or, where the runnable is a ``SideBySide``, some
    at once. Which sequences share a run does not depend on that, nor the order in which the task is given rows.
    """
    if isinstance(runnable, SideBySide):
        ahead = _Ahead(runnable)
        try:
            return _drive(session, ahead.run, steps)
        finally:
            ahead.end()
    return _drive(session, lambda run: runnable.run(run.output, run.piece.batch, run.select), steps)


class _Ahead:
    """Runs that have begun, some of them before the task asked for them."""

    def __init__(self, runnable: SideBySide) -> None:
        self._runnable = runnable
        self._begun: dict[Run, Future[F32]] = {}

    def _begin(self, run: Run) -> None:
        self._begun[run] = self._runnable.begin(run.output, run.piece.batch, run.select)

    def run(self, run: Run) -> F32:
        if run not in self._begun:
            self._begin(run)
        while run.of is not None and len(self._begun) < self._runnable.at_once:
            after = run.of.look()
            if after is None:
                break
            self._begin(after)
        future = self._begun[run]
        wait((future,))  # an interrupt leaves it to ``end``
        del self._begun[run]
        return future.result()

    def end(self) -> None:
        """Where the task broke off nothing of it runs on."""
        wait([future for future in self._begun.values() if not future.cancel()])


def _drive(session: Session, rows_of: Callable[[Run], F32], steps: Steps[T]) -> T:
    try:
        run = next(steps)
        while True:
            try:
                rows = rows_of(run)
            except InputError as error:
                run = steps.throw(session.explain(run, error))
            else:
                run = steps.send(rows)
    except StopIteration as end:
        answer: T = end.value
        return answer


Array = TypeVar("Array", bound=np.ndarray[Any, Any])
Row = TypeVar("Row")


def need_count(name: str, value: object, most: int) -> None:
    """Raises ``InputError`` unless the option's value is a whole number from 1 to ``most``."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InputError(f"{name} is {value!r}; a whole number from 1 to {most} is needed")


def need_finite(values: Array) -> Array:
    """The values; raises ``UndefinedError`` when one is NaN or infinite."""
    if not np.isfinite(values).all():
        raise UndefinedError("the model's answer is not a finite number; its weights overflow f32 on this text")
    return values


def pack(token_ids: Sequence[Sequence[int]], type_ids: Sequence[Sequence[int]] | None) -> Batch:
    """A packed batch of rows of ids.

    Tokenizers may name ids up to 2^32 - 1; those past int32 become negative.
    """
    cu_seqlens = np.fromiter(accumulate(map(len, token_ids), initial=0), np.int32, len(token_ids) + 1)
    tokens = int(cu_seqlens[-1])
    return Batch(_flat(token_ids, tokens), cu_seqlens, None if type_ids is None else _flat(type_ids, tokens))


def _gathered(rows: Iterable[Row], weight: Callable[[Row], int], most: int) -> Iterator[list[Row]]:
    """Neighbours that weigh at most ``most`` together; what weighs more stands alone."""
    part: list[Row] = []
    total = 0
    for row in rows:
        heavy = weight(row)
        if part and total + heavy > most:
            yield part
            part, total = [], 0
        part.append(row)
        total += heavy
    if part:
        yield part


def _flat(rows: Iterable[Sequence[int]], tokens: int) -> Int32:
    return np.fromiter(chain.from_iterable(rows), np.uint32, tokens).view(np.int32)


def _groups(rows: Sequence[Text]) -> Iterator[tuple[int, Sequence[Text]]]:
    begin = characters = 0
    for index, row in enumerate(rows):
        size = len(row) if isinstance(row, str) else len(row[0]) + len(row[1])
        if index > begin and (index - begin >= _GROUP_ROWS or characters + size > _GROUP_CHARACTERS):
            yield begin, rows[begin:index]
            begin, characters = index, 0
        characters += size
    if begin < len(rows):
        yield begin, rows[begin:]
