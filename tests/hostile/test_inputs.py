"""Texts that nobody should send. Every method survives them or says what is wrong and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_engine import VOCAB, fake_engine

from encast.errors import InputError

Call = Callable[[Any], Any]


def _calls() -> dict[str, Call]:
    wide = len(VOCAB)
    return {
        "embed": fake_engine("embed").embed,
        "classify": fake_engine("classify", lambda ids: [0.0, 1.0]).classify,
        "tag": fake_engine("tag", lambda ids: np.zeros((len(ids), 3))).tag,
        "fill_mask": fake_engine("fill_mask", lambda ids: np.zeros((len(ids), wide))).fill_mask,
        "rerank": lambda texts: fake_engine("embed").rerank("who", texts),
        "answer": lambda texts: fake_engine("answer", lambda ids: np.zeros((len(ids), 2))).answer(texts, texts),
    }


CALLS = _calls()
ODD_TEXTS = {
    "empty": "",
    "blank": " \t\r\n\u00a0\u2028",
    "long": "cat " * 25_000,
    "one word": "c" * 100_000,
    "NUL": "cat\0sat\0",
    "emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467" * 10,
    "right to left": "\u202e\u0645\u0631\u062d\u0628\u0627",
    "combining": "e" + "\u0301" * 1000,
    "controls": "".join(map(chr, range(32))),
    "noncharacters": "\ufffe\uffff\U0010ffff",
    "special tokens": "[CLS] [SEP] [PAD] [UNK]",
}


@pytest.mark.parametrize("text", ODD_TEXTS.values(), ids=ODD_TEXTS)
@pytest.mark.parametrize("name", CALLS)
def test_odd_texts_are_answered(name: str, text: str) -> None:
    text = "[MASK] " + text if name == "fill_mask" else text
    assert len(CALLS[name](["cat [MASK]", text, "[MASK]"])) == 3


@pytest.mark.parametrize("name", CALLS)
def test_lone_surrogates_are_refused_with_their_place(name: str) -> None:
    with pytest.raises(InputError, match=r"\[1\] holds a lone surrogate \(U\+D83D\) at character 4.*decode"):
        CALLS[name](["cat [MASK]", "cat \ud83d [MASK]"])


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "wrong", [None, 7, b"cat", 1.5, {"text": "cat"}, object()], ids=lambda wrong: type(wrong).__name__
)
def test_other_types_are_refused_with_their_index(name: str, wrong: Any) -> None:
    with pytest.raises(InputError, match=rf"\[1\].* is of type {type(wrong).__name__}"):
        CALLS[name](["cat [MASK]", wrong])


@pytest.mark.parametrize("name", [name for name in CALLS if name != "answer"])
@pytest.mark.parametrize("wrong", ["cat", b"cat", None, 5, {"cat": 1}, {"cat"}], ids=repr)
def test_what_is_no_list_is_refused(name: str, wrong: Any) -> None:
    with pytest.raises(InputError, match="list"):
        CALLS[name](wrong)


@pytest.mark.parametrize("row", [("a",), ("a", "b", "c"), [], ("a", None), ("a", "\udc00")], ids=repr)
def test_classify_refuses_what_is_no_pair(row: Any) -> None:
    with pytest.raises(InputError, match=r"texts\[1\]"):
        CALLS["classify"](["cat", row])


def test_strings_of_numpy_and_generators_are_texts() -> None:
    embed = fake_engine("embed").embed
    assert embed(np.array(["cat", "mat"])).shape[0] == 2
    assert embed(text for text in ["cat"]).shape[0] == 1  # type: ignore[arg-type]


def test_a_long_context_is_read_to_its_end() -> None:
    def rule(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.repeat((ids == VOCAB["paris"]).astype(np.float32)[:, None], 2, axis=1)

    context = "cat " * 25_000 + "paris"
    answer = fake_engine("answer", rule).answer("where", context)
    assert (answer.text, answer.end) == ("paris", len(context))
