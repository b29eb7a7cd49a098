"""Truncation, padding, pairs, token types and groups of rows."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from fake_engine import VOCAB, fake_engine, tokenizer_json

from encast.errors import ArtifactError, InputError
from encast.tasks import session
from encast.tasks.tokenize import Tokenizer, TooLongError


def _ids(*tokens: str) -> list[int]:
    return [VOCAB[token] for token in tokens]


def test_padding_and_truncation_of_the_file_are_not_followed() -> None:
    tokenizer = Tokenizer(tokenizer_json(padded=True), max_length=20)
    one, many = tokenizer.encode(["cat", "cat " * 50])
    assert one.ids == _ids("[CLS]", "cat", "[SEP]")
    assert len(many) == 20
    assert many.ids[-1] == VOCAB["[SEP]"]


def test_truncation_side() -> None:
    text = "the cat sat on mat"
    right = Tokenizer(tokenizer_json(), max_length=4).encode([text])[0]
    left = Tokenizer(tokenizer_json(), max_length=4, truncation_side="left").encode([text])[0]
    assert right.ids == _ids("[CLS]", "the", "cat", "[SEP]")
    assert left.ids == _ids("[CLS]", "on", "mat", "[SEP]")


def test_a_pair_is_cut_at_its_longer_part_and_typed() -> None:
    engine = fake_engine("classify", lambda ids: [0.0, 1.0], max_length=8)
    engine.classify([("who", "the cat sat on mat in paris")])
    batch = engine.runnable.batches[0]  # type: ignore[attr-defined]
    assert batch.token_ids.tolist() == _ids("[CLS]", "who", "[SEP]", "the", "cat", "sat", "on", "[SEP]")
    assert batch.token_type_ids.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("lengths", [(700, 701), (701, 700), (700, 700), (90, 2000), (2000, 90), (61, 60), (5, 900)])
@pytest.mark.parametrize("max_length", [16, 17])
def test_shortening_long_pairs_changes_no_token(side: str, lengths: tuple[int, int], max_length: int) -> None:
    tokenizer = Tokenizer(tokenizer_json(), max_length=max_length, truncation_side=side)
    words = ["cat", "sat", "mat", "john", "smith", "bz"]
    pair = tuple(" ".join(words[(i * i + part) % 6] for i in range(lengths[part])) for part in (0, 1))
    assert tokenizer.encode([pair])[0].ids == tokenizer._cutting.encode(*pair).ids


def test_two_very_long_texts_are_paired_without_their_rests() -> None:
    tokenizer = Tokenizer(tokenizer_json(), max_length=16)
    (encoding,) = tokenizer.encode([("cat " * 25_000, "mat " * 25_000)])
    assert len(encoding) == 16
    assert len(encoding.overflowing) < 100
    assert len(tokenizer.windows("cat " * 25_000, "mat " * 100)[0].overflowing) < 100


@pytest.mark.parametrize("type_vocab", [0, 1])
def test_models_without_a_second_token_type_get_none(type_vocab: int) -> None:
    engine = fake_engine("classify", lambda ids: [0.0, 1.0], type_vocab=type_vocab)
    engine.classify([("who", "cat")])
    assert engine.runnable.batches[0].token_type_ids is None  # type: ignore[attr-defined]


def test_long_texts_are_an_error_when_asked() -> None:
    engine = fake_engine("embed", max_length=8)
    assert engine.embed(["cat " * 6], on_long="error").shape[0] == 1
    with pytest.raises(TooLongError, match=r"texts\[1\] is longer than 8 tokens") as long:
        engine.embed(["cat", "cat " * 7], on_long="error")
    assert (long.value.index, long.value.most) == (1, 8)
    with pytest.raises(InputError, match="truncate"):
        engine.embed(["cat"], on_long="never")  # type: ignore[arg-type]


def test_answers_keep_the_order_of_the_texts_across_groups_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_GROUP_ROWS", 3)
    monkeypatch.setattr(session, "_GROUP_CHARACTERS", 40)
    words = [word for word in VOCAB if word.isalpha() and len(word) > 2]
    texts = [words[i % len(words)] + " cat" * (i % 7) for i in range(50)]
    engine = fake_engine("embed", lambda ids: [ids[1], len(ids), 0, 0], batch_tokens=12)
    vectors = engine.embed(texts)
    assert vectors[:, 0].tolist() == [VOCAB[words[i % len(words)]] for i in range(50)]
    assert vectors[:, 1].tolist() == [3 + i % 7 for i in range(50)]
    batches = engine.runnable.batches  # type: ignore[attr-defined]
    assert max(batch.tokens for batch in batches) <= 12
    assert max(batch.seqs for batch in batches) <= 3


def test_a_token_beyond_the_embedding_is_named() -> None:
    engine = fake_engine("embed", vocab=VOCAB["paris"])
    with pytest.raises(InputError, match=r"texts\[2\] has the token 'paris'"):
        engine.embed(["cat", "the", "in paris"])


def _with_cls(token_id: int) -> str:
    """A tokenizer whose post-processor names an id that its vocabulary does not have."""
    described = json.loads(tokenizer_json())
    described["post_processor"]["special_tokens"]["[CLS]"]["ids"] = [token_id]
    return json.dumps(described)


@pytest.mark.parametrize("token_id", [len(VOCAB), 2**31 - 1, 2**31, 2**32 - 1])
def test_ids_that_only_the_post_processor_knows_are_refused(token_id: int) -> None:
    engine = fake_engine("embed", json_text=_with_cls(token_id))
    with pytest.raises(InputError, match=rf"texts\[0\] has the token .* with id {token_id},"):
        engine.embed(["cat"])


def _with_model(**model: Any) -> str:
    return json.dumps({**json.loads(tokenizer_json(specials=False)), "model": model, "added_tokens": []})


def _with_normaliser(units: int) -> str:
    """A compiled normalisation that leads outside of itself, which makes the library panic."""
    table = (4 * units).to_bytes(4, "little") + b"\xff\xff\x0f\x00" * units
    charsmap = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    return json.dumps({**json.loads(tokenizer_json()), "normalizer": charsmap})


@pytest.mark.parametrize(
    ("json_text", "reason"),
    [
        (_with_model(type="WordLevel", vocab={"cat": 0}, unk_token="[UNK]"), "UNK"),
        (_with_model(type="Unigram", vocab=[["c", 0.0]], unk_id=None), "unk_id"),
        (_with_normaliser(1), "index out of bounds"),
    ],
    ids=["no unknown token", "no unknown id", "panic"],
)
def test_what_the_library_raises_while_encoding_is_an_input_error(json_text: str, reason: str) -> None:
    tokenizer = Tokenizer(json_text, max_length=16)
    with pytest.raises(InputError, match=rf"texts\[7\] cannot be tokenised: .*{reason}"):
        tokenizer.encode(["dog"], first=7)
    with pytest.raises(InputError, match=r"one of texts\[0\] to texts\[1\]"):
        tokenizer.encode(["dog", "dog"])
    with pytest.raises(InputError, match=reason):
        tokenizer.windows("dog", "dog")


@pytest.mark.parametrize("error", [RuntimeError("Already borrowed"), MemoryError(), TypeError("no str")])
def test_what_is_not_the_fault_of_a_text_is_no_input_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def encode(self, *given: object, **options: object) -> None:
            raise error

        encode_batch = encode_batch_fast = encode

        def num_special_tokens_to_add(self, is_pair: bool) -> int:
            return 3

    tokenizer = Tokenizer(tokenizer_json(), max_length=16)
    monkeypatch.setattr(tokenizer, "_cutting", Failing())
    monkeypatch.setattr(tokenizer, "_whole", Failing())
    for call in (
        lambda: tokenizer.encode(["cat"]),
        lambda: tokenizer.encode(["cat"], offsets=True),
        lambda: tokenizer.whole(["cat"]),
        lambda: tokenizer.windows("cat", "cat"),
    ):
        with pytest.raises(type(error)) as raised:
            call()
        assert raised.value is error


def test_an_empty_text_needs_special_tokens() -> None:
    assert fake_engine("embed").embed([""]).shape[0] == 1
    engine = fake_engine("embed", json_text=tokenizer_json(specials=False))
    with pytest.raises(InputError, match=r"texts\[1\] has no tokens"):
        engine.embed(["cat", ""])


@pytest.mark.parametrize("text", ["", "{}", '{"version": "1.0", "model": {"type": "None"}}', "\x00"])
def test_what_is_no_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        Tokenizer(text, max_length=8)


def test_no_room_for_text_is_refused() -> None:
    with pytest.raises(ArtifactError, match="at most 3 tokens"):
        Tokenizer(tokenizer_json(), max_length=3)


def _covered(windows: list[Any]) -> set[int]:
    return {
        offset
        for w in windows
        for offset, part in zip([o[0] for o in w.offsets], w.sequence_ids, strict=True)
        if part == 1
    }


@pytest.mark.parametrize("stride", [None, 0, 1, 3])
def test_windows_cover_the_context(stride: int | None) -> None:
    tokenizer = Tokenizer(tokenizer_json(), max_length=12)
    context = " ".join(["cat", "sat", "mat"][i % 3] for i in range(40))
    windows = tokenizer.windows("who is", context, stride)
    assert _covered(windows) == set(range(0, len(context), 4))
    assert all(len(window) <= 12 for window in windows)
    assert all(window.ids[:4] == _ids("[CLS]", "who", "is", "[SEP]") for window in windows)
    shared = 3 if stride is None else stride  # half of the room of a default stride of 128
    first, second = [[o for o, p in zip(w.offsets, w.sequence_ids, strict=True) if p == 1] for w in windows[:2]]
    assert first[len(first) - shared :] == second[:shared] or shared == 0
    assert second[shared][0] == first[-1][0] + 4


def test_windows_without_room_for_a_question_drop_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(tokenizer_json(), max_length=4)
    calls = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(whole, name)

        def encode(self, *args: Any, **options: Any) -> Any:
            calls.append(args)
            return whole.encode(*args, **options)

    whole = tokenizer._whole
    monkeypatch.setitem(tokenizer.__dict__, "_whole", Counting())
    windows = tokenizer.windows("who " * 500, "cat sat", 0)
    assert [window.ids for window in windows] == [_ids("[CLS]", "[SEP]", word, "[SEP]") for word in ("cat", "sat")]
    assert len(calls) == 3


def test_windows_cut_a_question_that_leaves_no_room() -> None:
    tokenizer = Tokenizer(tokenizer_json(), max_length=11)
    windows = tokenizer.windows("who " * 100, "cat sat mat " * 4)
    assert all(window.ids.count(VOCAB["who"]) == 4 and len(window) <= 11 for window in windows)
    assert len(_covered(windows)) == 12


@pytest.mark.parametrize("stride", [-1, 7, 1000])
def test_windows_refuse_a_stride_that_does_not_fit(stride: int) -> None:
    with pytest.raises(InputError, match="give 0 to 6"):
        Tokenizer(tokenizer_json(), max_length=12).windows("who is", "cat " * 40, stride)


def test_packing_equals_the_encodings() -> None:
    encodings = Tokenizer(tokenizer_json(), max_length=12).encode(["cat", ("who", "the cat")])
    batch = session.pack([one.ids for one in encodings], [one.type_ids for one in encodings])
    assert batch.cu_seqlens.tolist() == [0, 3, 9 - 0]
    assert batch.token_ids.tolist() == encodings[0].ids + encodings[1].ids
    assert batch.token_type_ids is not None
    assert batch.token_type_ids.tolist() == encodings[0].type_ids + encodings[1].type_ids
    assert batch.token_ids.dtype == batch.cu_seqlens.dtype == batch.token_type_ids.dtype == np.int32
