"""What a made-up model takes, for random ids."""

from __future__ import annotations

from typing import Any

from encast.measure.input_spec import InputSpec


def inputs(vocab: int = 2000, max_len: int = 512, type_vocab: int = 2) -> InputSpec:
    def none() -> Any:
        raise AssertionError("random ids need no tokenizer")

    return InputSpec(vocab, max_len, type_vocab, none)
