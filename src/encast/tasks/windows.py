"""Texts that are longer than the model reads, as windows of their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from encast.errors import InputError
from encast.tasks.tokenize import Encoding, prompt_tokens, shared_tokens

__all__ = ["Source", "Window", "cut_windows"]


@dataclass(frozen=True, eq=False)
class Source:
    """A text that windows are parts of: ``index`` in the caller's list, and what the tokenizer says of the whole of it.

    Tokens ``head`` to ``tail`` are shared out among the windows; those before and after them (special ones, a prompt,
    the first text of a pair) are in every window.
    """

    index: int
    encoding: Encoding
    ids: list[int]
    type_ids: list[int]
    head: int
    tail: int


@dataclass(frozen=True, eq=False)
class Window:
    """Tokens ``begin`` to ``end`` of a text, and what is in all of its windows. A text that the model can read whole is
    one window, which is all of it.
    """

    source: Source
    begin: int
    end: int

    def __len__(self) -> int:
        return len(self.source.ids) - (self.source.tail - self.source.head) + self.tokens

    @property
    def index(self) -> int:
        """That of the text in the caller's list."""
        return self.source.index

    @property
    def tokens(self) -> int:
        """How many tokens of the text are in this window, without those that are in all of its windows."""
        return self.end - self.begin

    @property
    def is_first(self) -> bool:
        """Whether the text begins with it."""
        return self.begin == self.source.head

    @property
    def is_last(self) -> bool:
        """Whether the text ends with it."""
        return self.end == self.source.tail

    @property
    def ids(self) -> list[int]:
        """The token ids as the model reads them."""
        return self._of(self.source.ids)

    @property
    def type_ids(self) -> list[int]:
        """The type of each token."""
        return self._of(self.source.type_ids)

    def _of(self, whole: list[int]) -> list[int]:
        return whole[: self.source.head] + whole[self.begin : self.end] + whole[self.source.tail :]


def cut_windows(
    encoding: Encoding, index: int, *, max_length: int, stride: int | None, prompt: int = 0, pair: bool = False
) -> Iterator[Window]:
    """The windows of a text, in order, each of at most ``max_length`` tokens.

    Neighbours share ``stride`` tokens of the text, see ``shared_tokens``; all windows but the last are full. The first
    is what is left of the text when its end is cut off. ``prompt``: the characters of the text that every window
    begins with; a token that is only in part of them is the text's. Of a pair every window has the whole first text.

    Raises ``InputError`` where the prompt or the first text leaves no room, and for a ``stride`` that does not fit.
    """
    ids, type_ids = encoding.ids, encoding.type_ids
    if len(ids) <= max_length:
        yield Window(Source(index, encoding, ids, type_ids, 0, len(ids)), 0, len(ids))
        return
    parts = encoding.sequence_ids
    shared_out = [place for place, part in enumerate(parts) if part == int(pair)]
    head, tail = (shared_out[0], shared_out[-1] + 1) if shared_out else (len(ids), len(ids))
    if prompt:
        head += prompt_tokens(encoding.offsets[head:tail], prompt)
    room = max_length - (len(ids) - (tail - head))
    if room < 1:
        what = f"first text has {parts.count(0)} tokens" if pair else "prompt is too long"
        raise InputError(
            f"texts[{index}]: its {what}, which leaves no room for windows of the text after it in the {max_length} "
            "tokens that the model reads; shorten it"
        )
    shared = shared_tokens(room, stride, f"texts[{index}]")
    source = Source(index, encoding, ids, type_ids, head, tail)
    for begin in range(head, tail, room - shared):
        end = min(begin + room, tail)
        yield Window(source, begin, end)
        if end == tail:
            return
