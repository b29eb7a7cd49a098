"""What a model takes, read off its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from encast.archs import build_graph
from encast.errors import InputError
from encast.importers import Checkpoint, open_checkpoint
from encast.tasks.tokenize import Tokenizer

__all__ = ["InputSpec", "input_spec_of", "read_input_spec"]


@dataclass(frozen=True)
class InputSpec:
    """Ids below ``vocab``, sequences of up to ``max_len`` tokens, texts by its tokenizer.

    ``type_vocab``: token types, 0 when it has none. ``tokenizer`` makes it when texts are to be read.
    """

    vocab: int
    max_len: int
    type_vocab: int
    tokenizer: Callable[[], Tokenizer]

    def check(self, what: str, lengths: Sequence[int]) -> None:
        """Raises ``InputError`` when a sequence is shorter or longer than the model takes."""
        for length in (min(lengths), max(lengths)):
            if not 1 <= length <= self.max_len:
                raise InputError(f"{what}: a sequence of {length} tokens; this model takes 1 to {self.max_len}")


def read_input_spec(checkpoint: Path) -> InputSpec:
    """Of a folder; raises what ``open_checkpoint`` and ``build_graph`` raise."""
    return input_spec_of(open_checkpoint(checkpoint))


def input_spec_of(checkpoint: Checkpoint) -> InputSpec:
    """Of an open checkpoint. Texts are cut as ``compile`` lets an artifact cut them."""
    meta = build_graph(checkpoint, task="features").meta

    def tokenizer() -> Tokenizer:
        files = checkpoint.tokenizer
        longest = meta.longest_text(files.max_length)
        return Tokenizer(files.json, max_length=longest, truncation_side=files.truncation_side)

    return InputSpec(meta.vocab, meta.max_len, meta.type_vocab, tokenizer)
