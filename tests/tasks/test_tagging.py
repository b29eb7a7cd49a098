"""Entities from BIO labels as transformers' pipeline groups them, token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import ENTITY_CASES, ENTITY_TEXTS, Case, make_case
from fake_engine import VOCAB, fake_engine
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

import encast
from encast.tasks.tag import label_words

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def _rule(by_token: dict[str, str], labels: list[str] = LABELS) -> Any:
    by_id = {VOCAB[token]: labels.index(label) for token, label in by_token.items()}

    def rule(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        logits = np.zeros((len(ids), len(labels)))
        logits[np.arange(len(ids)), [by_id.get(int(at), 0) for at in ids]] = 4.0
        return logits

    return rule


def _found(text: str, by_token: dict[str, str], labels: list[str] = LABELS) -> list[tuple[str, str]]:
    (tagging,) = fake_engine("tag", _rule(by_token, labels), labels=labels).tag([text])
    for entity in tagging.entities:
        assert text[entity.start : entity.end] == entity.text
        assert entity.score == pytest.approx(np.exp(4) / (np.exp(4) + len(labels) - 1))
    return [(entity.label, entity.text) for entity in tagging.entities]


def test_words_group_into_entities() -> None:
    found = _found(
        "John  Smith lives in New York.",
        {"john": "B-PER", "smith": "I-PER", "new": "B-LOC", "york": "I-LOC"},
    )
    assert found == [("PER", "John  Smith"), ("LOC", "New York")]


def test_every_token_has_its_own_label() -> None:
    # "bz" is b + ##z.
    assert _found("bz cat", {"b": "B-PER", "##z": "I-PER"}) == [("PER", "bz")]
    assert _found("bz cat", {"b": "B-PER", "##z": "B-LOC"}) == [("PER", "b"), ("LOC", "z")]
    assert _found("bz cat", {"##z": "B-LOC"}) == [("LOC", "z")]
    assert _found("bz cat", {"b": "B-PER"}) == [("PER", "b")]


def test_b_begins_and_a_change_of_type_divides() -> None:
    assert _found("john smith", {"john": "B-PER", "smith": "B-PER"}) == [("PER", "john"), ("PER", "smith")]
    assert _found("john york", {"john": "B-PER", "york": "I-LOC"}) == [("PER", "john"), ("LOC", "york")]
    assert _found("the york new", {"york": "I-LOC", "new": "I-LOC"}) == [("LOC", "york new")]
    assert _found("john the smith", {"john": "B-PER", "smith": "I-PER"}) == [("PER", "john"), ("PER", "smith")]


def test_other_schemes() -> None:
    bilou = ["O", "B-X", "I-X", "L-X", "U-X"]
    assert _found("john smith paris york", {"john": "B-X", "smith": "L-X", "paris": "U-X", "york": "U-X"}, bilou) == [
        ("X", "john"),
        ("X", "smith"),
        ("X", "paris york"),
    ]
    assert _found("cat john smith", {"john": "PER", "smith": "PER"}, ["O", "PER"]) == [("PER", "john smith")]
    assert _found("cat john smith", {"john": "B-PER", "smith": "PER"}, ["O", "PER", "B-PER"]) == [("PER", "john smith")]
    work = ["O", "B-creative-work", "creative-work"]
    assert _found("john the smith", {"john": "B-creative-work", "smith": "creative-work"}, work) == [
        ("creative-work", "john"),
        ("work", "smith"),
    ]


@pytest.mark.parametrize("case", ENTITY_CASES, ids=lambda case: case.name)
def test_entities_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    path = encast.compile(make_case(tmp_path, case), tmp_path / "tag.encast", dtype="f32")
    with encast.load(path, threads=1) as engine:
        found = [tagging.entities for tagging in engine.tag(ENTITY_TEXTS)]
    golden = json.loads((Path(__file__).parents[1] / "golden" / "entities.json").read_text())[case.name]
    for text, ours, theirs in zip(ENTITY_TEXTS, found, golden, strict=True):
        assert [(one.label, one.start, one.end) for one in ours] == [(label, *at) for label, _, *at in theirs], text
        assert [one.score for one in ours] == pytest.approx([score for _, score, *_ in theirs], abs=1e-5)
        assert [one.text for one in ours] == [text[begin:end] for _, _, begin, end in theirs]


def test_tokens_carry_offsets_and_no_special_ones() -> None:
    (tagging,) = fake_engine("tag", _rule({"b": "B-PER"}), labels=LABELS).tag(["the bz"])
    assert [(t.label, t.start, t.end, t.word) for t in tagging.tokens] == [
        ("O", 0, 3, 0),
        ("B-PER", 4, 5, 1),
        ("O", 5, 6, 1),
    ]


def test_empty_text_has_no_entities() -> None:
    (tagging,) = fake_engine("tag", _rule({}), labels=LABELS).tag([""])
    assert tagging.entities == []
    assert tagging.tokens == []


def test_labels_of_split_words() -> None:
    engine = fake_engine("tag", _rule({"b": "B-PER", "york": "B-LOC", "-": "I-LOC"}), labels=LABELS, max_length=12)
    sentences = [["bz", "cat", "york"], ["cat-york"], ["\u200b", "york"], ["cat"] * 20 + ["york"], []]
    assert engine.drive(label_words(engine.session, sentences)) == [
        ["B-PER", "O", "B-LOC"],
        ["O"],
        ["O", "B-LOC"],
        ["O"] * 21,
        [],
    ]


def _spacing_tokenizer() -> str:
    """A tokenizer that counts the space before a word to the word, as SentencePiece models do."""
    vocab = {"[UNK]": 0, "\u2581john": 1, "\u2581smith": 2, "\u2581the": 3}
    backend = Backend(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return str(backend.to_str())


def test_a_space_before_a_word_is_no_part_of_it() -> None:
    text = "the john smith"
    assert Backend.from_str(_spacing_tokenizer()).encode(text).offsets[1] == (3, 8)
    engine = fake_engine(
        "tag", lambda ids: np.eye(3)[np.minimum(ids, 2) * (ids < 3)], labels=LABELS[:3], json_text=_spacing_tokenizer()
    )
    (entity,) = engine.tag([text])[0].entities
    assert (entity.text, entity.start, entity.end) == ("john smith", 4, 14)
    assert engine.drive(label_words(engine.session, [text.split()])) == [["O", "B-PER", "I-PER"]]
    engine = fake_engine(
        "answer", lambda ids: np.repeat((ids == 2)[:, None] * 5.0, 2, axis=1), json_text=_spacing_tokenizer()
    )
    answer = engine.answer("the", text)
    assert (answer.text, answer.start, answer.end) == ("smith", 9, 14)
