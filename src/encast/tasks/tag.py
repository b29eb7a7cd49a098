"""Token classification: entities with character offsets, and the labels of tokens and words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from encast.tasks.classify import label_names, softmax
from encast.tasks.pooling import wants_windows
from encast.tasks.session import F32, Runs, Session, Steps, need_finite
from encast.tasks.texts import check_texts
from encast.tasks.tokenize import Encoding, OnLong

__all__ = ["Entity", "Tagging", "TokenLabel", "label_words", "tag", "text_tokens", "word_tokens"]


@dataclass(frozen=True)
class TokenLabel:
    """The best label of one token, ``text[start:end]``, and its probability; ``word`` counts words."""

    label: str
    score: float
    start: int
    end: int
    word: int


@dataclass(frozen=True)
class Entity:
    """Neighbouring tokens of one type: ``text[start:end]``; ``score`` is the mean of its tokens' scores."""

    label: str
    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True)
class Tagging:
    """What was found in one text: its entities, and the label of every token (special ones left out)."""

    entities: list[Entity]
    tokens: list[TokenLabel]


def tag(
    session: Session, texts: object, *, on_long: OnLong = "truncate", stride: int | None = None
) -> Steps[list[Tagging]]:
    """One ``Tagging`` a text.

    Entities are those of transformers' ``TokenClassificationPipeline`` with ``aggregation_strategy="simple"``. Each
    token has its own label, whatever word it is of. Tokens group with the one before when both are of one type:
    ``B-X`` begins an entity, ``I-X`` and ``X`` continue one of type X and else begin one, ``O`` is outside. Other
    prefixes (``E-``, ``S-``, ...) are a part of the type as tokens are grouped. An entity's label is that of its first
    token without what comes before its first dash; its score the mean of theirs. ``text`` is what stands at the
    offsets, where transformers' ``word`` puts tokens together again; no space before a token counts to it, as
    byte-level BPE has it. Tokens beyond the model's length are not labelled, unless
    ``on_long="windows"``: then every token has the label of the window (see ``cut_windows``) in which it has most
    context, counted in tokens of the text on its side with fewer; of equals, the first.
    """
    session.need("tag", "tag")
    windowed = wants_windows(on_long, stride)
    rows = check_texts(texts)
    if windowed:
        return (yield from _of_windows(rows, session, stride))
    found: list[Tagging] = []
    for run in Runs("logits", session.stream(rows, offsets=True, on_long=on_long)):
        logits, piece = need_finite((yield run)), run.piece
        names = label_names(session.meta, logits.shape[1])
        for index, encoding in enumerate(piece.encodings):
            begin, end = piece.batch.cu_seqlens[index : index + 2]
            text = rows[piece.first + index]
            tokens = _label_tokens(encoding, logits[begin:end], names, text)
            found.append(Tagging(_group_entities(tokens, text), tokens))
    return found


def _of_windows(rows: Sequence[str], session: Session, stride: int | None) -> Steps[list[Tagging]]:
    found: list[Tagging] = []
    best, most = np.empty((0, 0), np.float32), np.empty(0, np.int64)
    for run in Runs("logits", session.windows(rows, stride=stride, offsets=True)):
        logits, piece = need_finite((yield run)), run.piece
        names = label_names(session.meta, logits.shape[1])
        for index, window in enumerate(piece.windows):
            source = window.source
            if window.is_first:
                best = np.zeros((len(source.ids), len(names)), np.float32)
                most = np.full(len(source.ids), -1)
            begin = int(piece.batch.cu_seqlens[index]) + source.head
            before = np.arange(window.tokens)
            context = np.minimum(before, before[::-1])
            better = np.flatnonzero(context > most[window.begin : window.end])
            most[window.begin + better] = context[better]
            best[window.begin + better] = logits[begin + better]
            if window.is_last:
                text = rows[window.index]
                tokens = _label_tokens(source.encoding, best, names, text)
                found.append(Tagging(_group_entities(tokens, text), tokens))
    return found


def label_words(session: Session, sentences: Sequence[Sequence[str]]) -> Steps[list[list[str]]]:
    """A label for every word of sentences that are already split, for scoring against gold labels.

    The words are joined by spaces and tokenised as a text; a word has the label of its first token, and
    "O" when it has none (cut off, or nothing that the tokenizer knows).
    """
    labelled: list[list[str]] = []
    taggings = yield from tag(session, [" ".join(words) for words in sentences])
    for words, tagging in zip(sentences, taggings, strict=True):
        found = word_tokens(words, [(token.start, token.end) for token in tagging.tokens])
        labelled.append(["O" if place is None else tagging.tokens[place].label for place in found])
    return labelled


def word_tokens(words: Sequence[str], spans: Sequence[tuple[int, int]]) -> list[int | None]:
    """The place of each word's first token; None where it has none (cut off, or nothing that the tokenizer knows).

    ``spans``: the characters of each token, in the words joined by spaces.
    """
    found: list[int | None] = []
    begin = at = 0
    for word in words:
        end = begin + len(word)
        while at < len(spans) and spans[at][1] <= begin:
            at += 1
        found.append(at if at < len(spans) and spans[at][0] < end else None)
        begin = end + 1
    return found


def text_tokens(encoding: Encoding, text: str) -> Iterator[tuple[int, int, int, int]]:
    """Of every token that is no special one its place, its word's number and its characters ``text[start:end]``."""
    for place, (word, (start, end)) in enumerate(zip(encoding.word_ids, encoding.offsets, strict=True)):
        if word is None:  # a special token
            continue
        while start < end and text[start].isspace():
            start += 1  # some tokenizers count the space before a word to the word
        yield place, word, start, end


def _split_label(label: str) -> tuple[str, str]:
    """``(prefix, type)``: ``B-PER`` is ``("B", "PER")``; a label without ``B-`` or ``I-`` is a type that continues."""
    return (label[0], label[2:]) if label.startswith(("B-", "I-")) else ("I", label)


def _label_tokens(encoding: Encoding, logits: F32, names: list[str], text: str) -> list[TokenLabel]:
    tokens = []
    rows = logits.astype(np.float64)
    for place, word, start, end in text_tokens(encoding, text):
        scores = softmax(rows[place])
        best = int(np.argmax(scores))
        tokens.append(TokenLabel(names[best], float(scores[best]), start, end, word))
    return tokens


def _group_entities(tokens: Sequence[TokenLabel], text: str) -> list[Entity]:
    groups: list[list[TokenLabel]] = []
    kind = ""
    for token in tokens:
        prefix, own = _split_label(token.label)
        if groups and own == kind and prefix != "B":
            groups[-1].append(token)
        else:
            groups.append([token])
        kind = own
    entities = []
    for group in groups:
        start, end = group[0].start, group[-1].end
        label = group[0].label.split("-", 1)[-1]
        if label != "O":
            entities.append(Entity(label, text[start:end], start, end, float(np.mean([one.score for one in group]))))
    return entities
