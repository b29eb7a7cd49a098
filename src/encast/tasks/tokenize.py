"""Text to token ids, with truncation as the checkpoint's tokenizer asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Literal

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from encast.errors import ArtifactError, InputError, translated
from encast.tasks.texts import Text

__all__ = ["Encoding", "OnLong", "Tokenizer", "TooLongError", "need_on_long", "prompt_tokens", "shared_tokens"]

OnLong = Literal["truncate", "error", "windows"]
"""What a text beyond the model's length becomes: its beginning (or end, as the checkpoint's tokenizer says), an
``InputError``, or windows whose answers are put together, see ``tasks/windows.py``."""

_MASKS = ("[MASK]", "<mask>")


class TooLongError(InputError):
    """A text has more than ``most`` tokens, and was not to be cut; ``index`` is its place in the caller's list."""

    def __init__(self, index: int, most: int) -> None:
        super().__init__(
            f"texts[{index}] is longer than {most} tokens; shorten it, or let it be cut with on_long='truncate'"
        )
        self.index, self.most = index, most


def need_on_long(on_long: object) -> None:
    """Raises ``InputError`` for what a task without windows does not know."""
    if on_long == "windows":
        raise InputError(
            "on_long is 'windows', which embed, embed_sparse, classify, rerank (but by embeddings of tokens) and tag "
            "take; here 'truncate' and 'error' are known"
        )
    if on_long not in ("truncate", "error"):
        raise InputError(f"on_long is {on_long!r}; 'truncate' and 'error' are known")


def shared_tokens(room: int, stride: int | None, what: str) -> int:
    """How many tokens neighbouring windows share that hold ``room`` tokens of ``what``: ``stride``, by default 128, or
    half of a window when that is less. Raises ``InputError`` for a ``stride`` that does not fit a window.
    """
    shared = min(128, room // 2) if stride is None else stride
    if not isinstance(shared, int) or isinstance(shared, bool) or not 0 <= shared < room:
        raise InputError(f"stride is {shared!r}; a window holds {room} tokens of {what}, give 0 to {room - 1}")
    return shared


def prompt_tokens(offsets: Sequence[tuple[int, int]], prompt: int) -> int:
    """How many tokens of a text, with these offsets, lie whole within its first ``prompt`` characters."""
    return next((place for place, (_, end) in enumerate(offsets) if end > prompt), len(offsets))


class Tokenizer:
    """A ``tokenizers`` tokenizer that never pads and cuts rows at ``max_length`` tokens.

    ``max_length`` counts special tokens. Both library objects inside are configured once and only read
    afterwards, so that one instance serves any number of threads. The library tokenises a batch on all
    cores unless the environment says ``TOKENIZERS_PARALLELISM=false``.
    """

    def __init__(
        self,
        json_text: str,
        *,
        max_length: int,
        truncation_side: str | None = None,
        mask_token: str | None = None,
    ) -> None:
        """``truncation_side`` ("left" or "right") defaults to what the JSON says, then to "right".

        Raises ``ArtifactError`` when the JSON is no tokenizer or ``max_length`` leaves no room for text.
        """
        self._json = json_text
        self.max_length = max_length
        cutting = self._load()
        stored = cutting.truncation or {}
        self.truncation_side = truncation_side or str(stored.get("direction", "right")).lower()
        special = cutting.num_special_tokens_to_add(True)
        if max_length <= special:
            raise ArtifactError(
                f"tokenizer: at most {max_length} tokens a row, of which {special} are special tokens of a pair; "
                "that is less than a compiled artifact has; compile the checkpoint again"
            )
        cutting.enable_truncation(max_length, strategy="longest_first", direction=self.truncation_side)
        self._cutting = cutting
        self._mask_token = mask_token

    def _load(self) -> Backend:
        with translated(
            lambda reason: ArtifactError(f"tokenizer.json is not a tokenizer ({reason}); compile the checkpoint again")
        ):
            backend = Backend.from_str(self._json)
        backend.no_padding()
        backend.no_truncation()
        return backend

    @cached_property
    def _whole(self) -> Backend:
        """The tokenizer without truncation; made at its first use, because large vocabularies take a while."""
        return self._load()

    @cached_property
    def mask_token_id(self) -> int | None:
        """The id of the mask token; None when the tokenizer has none."""
        added = {item["content"] for item in json.loads(self._json).get("added_tokens") or []}
        for token in (self._mask_token, *(mask for mask in _MASKS if mask in added)):
            if token is not None and (found := self._cutting.token_to_id(token)) is not None:
                return found
        return None

    @property
    def mask_token(self) -> str | None:
        """The text of the mask token; None when the tokenizer has none."""
        return None if self.mask_token_id is None else self._cutting.id_to_token(self.mask_token_id)

    def token(self, token_id: int) -> str:
        """The text of one token, without marks of word pieces; "" for ids that no token has."""
        text = self._cutting.decode([token_id], skip_special_tokens=False)
        return text.strip() or (self._cutting.id_to_token(token_id) or "")

    def whole(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Encoding]:
        """Encodings with character offsets, one a text, of any length: nothing is cut off. Raises ``InputError``."""
        with _answering("one of the texts"):
            return self._whole.encode_batch(texts, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids below 2^32, put together by the checkpoint's decoder; unknown ids are left out."""
        return self._cutting.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def encode(
        self, rows: Sequence[Text], *, offsets: bool = False, on_long: OnLong = "truncate", first: int = 0
    ) -> list[Encoding]:
        """Encodings with special tokens, one a row, each at most ``max_length`` tokens.

        Without ``offsets`` their character offsets are not computed. ``first`` is the index of the first
        row in the caller's list, for messages. Raises ``TooLongError`` for a row that is longer when
        ``on_long`` is "error", ``InputError`` for one that has no token at all.
        """
        need_on_long(on_long)
        encodings = self._encode(self._cutting, rows, offsets, first)
        if on_long == "error":
            for index, encoding in enumerate(encodings, first):
                if encoding.overflowing:
                    raise TooLongError(index, self.max_length)
        return encodings

    def read(self, rows: Sequence[Text], *, offsets: bool = False, first: int = 0) -> list[Encoding]:
        """Like ``encode``, of any length: nothing is cut off."""
        return self._encode(self._whole, rows, offsets, first)

    def _encode(self, backend: Backend, rows: Sequence[Text], offsets: bool, first: int) -> list[Encoding]:
        try:
            # The whole of a pair is one encoding, and nothing to shorten.
            cut = backend is self._cutting
            batch = [self._shortened(row) if cut and not isinstance(row, str) else row for row in rows]
            encodings = backend.encode_batch(batch) if offsets else backend.encode_batch_fast(batch)
        except BaseException:
            last = first + len(rows) - 1
            with _answering(f"texts[{first}]" if first == last else f"one of texts[{first}] to texts[{last}]"):
                raise
        lengths = list(map(len, encodings))
        if 0 in lengths:
            index = first + lengths.index(0)
            raise InputError(f"texts[{index}] has no tokens, and this tokenizer adds no special ones; leave it out")
        return encodings

    def room(self, prompt: str) -> int:
        """How many tokens of a text the model reads after this prompt; negative where the prompt is too long."""
        with _answering("the prompt"):
            # With a text after it: its last space may be part of that's first token.
            read = self._whole.encode(prompt * 2, add_special_tokens=False)
        asked = prompt_tokens(read.offsets, len(prompt)) if prompt else 0
        return self.max_length - self._whole.num_special_tokens_to_add(False) - asked

    def windows(
        self, question: str, context: str, stride: int | None = None, *, at_most_half: bool = False
    ) -> list[Encoding]:
        """Encodings of (question, part of the context) that together cover the whole context.

        Neighbouring windows share ``stride`` tokens of the context, see ``shared_tokens``. A question that
        leaves less than half of ``max_length`` is cut at its end. Offsets refer to the whole context. Raises
        ``InputError`` when ``stride`` is negative or does not fit a window, and with ``at_most_half`` when it is over
        half of one: windows then have at most twice the tokens of the context, whatever a stranger asks for.
        """
        backend = self._whole
        room = self.max_length - backend.num_special_tokens_to_add(True)
        with _answering("the context or the question"):
            read = backend.encode(context, add_special_tokens=False)
            asked = backend.encode(question, add_special_tokens=False)
            while len(asked) > room // 2:
                # Not by Encoding.truncate: what it cuts off would be paired with every window, see _shortened.
                end = asked.offsets[room // 2 - 1][1] if room > 1 else 0
                question = question[: min(end, len(question) - 1)]
                asked = backend.encode(question, add_special_tokens=False)
        room -= len(asked)
        overlap = shared_tokens(room, stride, "the context")
        if at_most_half and overlap > room // 2:
            raise InputError(
                f"stride is {stride!r}; it is at most half of the {room} tokens of the context in a window"
            )
        if len(read) <= room:
            return [backend.post_process(asked, read)]
        read.truncate(room, stride=overlap)
        return [backend.post_process(asked, part) for part in (read, *read.overflowing)]

    def _shortened(self, pair: tuple[str, str]) -> tuple[str, str]:
        """A pair that is cut to the same tokens as the given one, without parts far beyond the cut.

        The library also encodes all that it cuts off, in windows, each of one text with each of the other:
        two texts of 100,000 characters would take minutes. The cut depends on the lengths only as far as
        ``max_length`` and on which text is the longer one.
        """
        if min(map(len, pair)) <= 4 * self.max_length:
            return pair
        first, second = (self._whole.encode(text, add_special_tokens=False).offsets for text in pair)
        longer = len(first) > len(second)
        return self._beginning(pair[0], first, 2 + longer), self._beginning(pair[1], second, 3 - longer)

    def _beginning(self, text: str, offsets: list[tuple[int, int]], factor: int) -> str:
        keep = factor * self.max_length
        if len(offsets) <= keep:
            return text
        return text[: offsets[keep - 1][1]] if self.truncation_side == "right" else text[offsets[-keep][0] :]


@contextmanager
def _answering(which: str) -> Iterator[None]:
    """Turns what the library says of a text or a vocabulary (one without an unknown token, say) into ``InputError``.

    That is an Exception of no narrower class, or a panic. All else (a borrowed object, no memory) is not the text's
    fault, and stays what it is.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        with translated(
            lambda reason: InputError(
                f"{which} cannot be tokenised: {reason}; leave it out, or mend the checkpoint's tokenizer and compile "
                "again"
            )
        ):
            raise
