"""F1 of entities: a prediction counts when its span and its type are exactly the gold ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from encast.errors import InputError

__all__ = ["EntityScore", "entity_f1", "entity_spans", "is_bio"]


@dataclass(frozen=True)
class EntityScore:
    """Over all sentences together; 0 where a denominator is 0."""

    precision: float
    recall: float
    f1: float


def is_bio(label: str) -> bool:
    """Whether a label is ``O``, ``B-X`` or ``I-X``, all that entities are read from."""
    prefix, _, kind = label.partition("-")
    return label == "O" or (prefix in ("B", "I") and bool(kind))


def entity_spans(labels: Sequence[str]) -> set[tuple[int, int, str]]:
    """``(first word, one past the last, type)`` of every entity in one sentence's BIO labels.

    As the CoNLL evaluation has it: ``B-X`` begins an entity, and so does ``I-X`` after anything but
    ``B-X`` or ``I-X``; ``O``, the end and every other label but ``I-X`` end it.
    """
    spans: set[tuple[int, int, str]] = set()
    start, kind = 0, ""
    for index, label in enumerate([*labels, "O"]):
        prefix, _, own = label.partition("-")
        if kind and not (prefix == "I" and own == kind):
            spans.add((start, index, kind))
            kind = ""
        if not kind and prefix in ("B", "I") and own:
            start, kind = index, own
    return spans


def entity_f1(predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]) -> EntityScore:
    """Micro-averaged precision, recall and F1 of the entities in sentences of BIO labels.

    Raises ``InputError`` when the numbers of sentences or of a sentence's words differ.
    """
    if len(predicted) != len(gold):
        raise InputError(f"{len(predicted)} sentences are predicted, {len(gold)} are gold")
    hits = guesses = truths = 0
    for index, (guess, truth) in enumerate(zip(predicted, gold, strict=True)):
        if len(guess) != len(truth):
            raise InputError(f"sentence {index} has {len(guess)} predicted and {len(truth)} gold labels")
        found, wanted = entity_spans(guess), entity_spans(truth)
        hits, guesses, truths = hits + len(found & wanted), guesses + len(found), truths + len(wanted)
    precision = hits / guesses if guesses else 0.0
    recall = hits / truths if truths else 0.0
    return EntityScore(precision, recall, 2 * hits / (guesses + truths) if guesses + truths else 0.0)
