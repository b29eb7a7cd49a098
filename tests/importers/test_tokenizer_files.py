"""Tokenizers of checkpoints, checked without transformers: small vocabularies, hand-worked ids."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import word_piece
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from encast.errors import CheckpointError, EncastError, UnsupportedModelError
from encast.importers.files import Folder
from encast.importers.sentence_modules import TransformerSettings
from encast.importers.sentencepiece_model import parse_sentencepiece
from encast.importers.tokenizer import TokenizerFiles, read_tokenizer


def read(folder: Path, model_type: str = "bert", **settings: Any) -> TokenizerFiles:
    return read_tokenizer(Folder(folder), {"model_type": model_type}, TransformerSettings(**settings))


def ids(files: TokenizerFiles, text: str, pair: str | None = None) -> list[int]:
    return list(Tokenizer.from_str(files.json).encode(text, pair).ids)


def configure(folder: Path, **config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def save_json(folder: Path, **parts: Any) -> str:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2, "A": 3}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[UNK]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for name, value in parts.items():
        setattr(tokenizer, name, value)
    tokenizer.save(str(folder / "tokenizer.json"))
    return (folder / "tokenizer.json").read_text()


# tokenizer.json


def test_tokenizer_json_is_used_as_it_is(tmp_path: Path) -> None:
    text = save_json(tmp_path)
    word_piece(tmp_path)
    files = read(tmp_path)
    assert files.json == text
    assert files.vocab_size == 4
    assert files.special_tokens == {"unk": "[UNK]"}


def test_vocab_size_is_one_more_than_the_largest_id(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 70}, unk_token="[UNK]"))
    tokenizer.add_tokens(["b"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    expected = 1 + max(tokenizer.get_vocab().values())
    assert read(tmp_path).vocab_size == expected >= 71


def test_lowering_comes_before_other_normalisation(tmp_path: Path) -> None:
    save_json(tmp_path, normalizer=normalizers.Replace("b", "a"))
    assert ids(read(tmp_path), "A B b") == [3, 2, 0]
    assert ids(read(tmp_path, do_lower_case=True), "A B b") == [0, 0, 0]


def test_lowering_twice_changes_nothing(tmp_path: Path) -> None:
    text = save_json(tmp_path, normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]))
    assert read(tmp_path, do_lower_case=True).json == text
    text = save_json(tmp_path, normalizer=normalizers.BertNormalizer(lowercase=True))
    assert read(tmp_path, do_lower_case=True).json == text
    text = save_json(tmp_path, normalizer=normalizers.BertNormalizer(lowercase=False))
    assert read(tmp_path, do_lower_case=True).json != text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"{}", "tokenizers library"),
        (b"[1]", "tokenizers library"),
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        (b'{"model": ' + b"[" * 100_000, "tokenizers library"),
        (b'{"version": "1.0", "model": {"type": "WordPiece", "vocab": {"a": -1}}}', "tokenizers library"),
        (
            b'{"version": "1.0", "model": {"type": "WordLevel", "vocab": {}, "unk_token": "x"}}',
            "empty|tokenizers library",
        ),
    ],
)
def test_damaged_tokenizer_json(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path)
    assert "tokenizer.json" in str(caught.value)


# tokenizer_config.json beside tokenizer.json


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (True, None, True)),
        ({"do_lower_case": False}, (False, None, True)),
        ({"do_lower_case": None}, (True, None, True)),
        ({"tokenizer_class": "BertTokenizer", "do_lower_case": False}, (False, None, True)),
        ({"tokenizer_class": "DistilBertTokenizerFast", "strip_accents": False}, (True, False, True)),
        ({"tokenizer_class": "ElectraTokenizer", "tokenize_chinese_chars": False}, (True, None, False)),
        ({"tokenizer_class": "MPNetTokenizerFast", "do_lower_case": False, "strip_accents": True}, (False, True, True)),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False}, (True, None, True)),
        (
            {"tokenizer_class": "TokenizersBackend", "do_lower_case": False, "model_input_names": ["token_type_ids"]},
            (True, None, True),
        ),
        ({"tokenizer_class": "SomebodysTokenizer", "do_lower_case": False}, (True, None, True)),
    ],
)
def test_fields_of_bert_change_the_normaliser(tmp_path: Path, config: dict[str, Any], expected: Any) -> None:
    text = save_json(tmp_path, normalizer=normalizers.BertNormalizer())
    configure(tmp_path, **config)
    files = read(tmp_path)
    found = json.loads(files.json)["normalizer"]
    assert tuple(found[name] for name in ("lowercase", "strip_accents", "handle_chinese_chars")) == expected
    assert ids(files, "A b") == ([0, 1] if expected[0] else [3, 1])
    if expected == (True, None, True):
        assert files.json == text


@pytest.mark.parametrize("config", [{}, {"strip_accents": None}, {"tokenizer_class": "MPNetTokenizer"}])
def test_absent_fields_of_bert_are_the_classs_defaults(tmp_path: Path, config: dict[str, Any]) -> None:
    other = normalizers.BertNormalizer(lowercase=False, strip_accents=False, handle_chinese_chars=False)
    save_json(tmp_path, normalizer=other)
    configure(tmp_path, **config)
    assert ids(read(tmp_path), "\u00c1 b") == [0, 1]
    (tmp_path / "tokenizer_config.json").unlink()
    assert ids(read(tmp_path), "\u00c1") == [0]
    assert ids(read(tmp_path, "modernbert"), "A") == [3]
    configure(tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    assert ids(read(tmp_path), "A \u00e1") == [3, 2]


@pytest.mark.parametrize("lowers", [False, True])
def test_fields_that_another_normaliser_contradicts_are_refused(tmp_path: Path, lowers: bool) -> None:
    text = save_json(
        tmp_path, normalizer=normalizers.Sequence([normalizers.NFC(), *[normalizers.Lowercase()] * lowers])
    )
    configure(tmp_path, do_lower_case=lowers, strip_accents=None, tokenize_chinese_chars=True)
    assert read(tmp_path).json == text
    configure(tmp_path, do_lower_case=not lowers)
    with pytest.raises(
        UnsupportedModelError, match=rf"tokenizer_config\.json: do_lower_case is {str(not lowers).lower()}"
    ):
        read(tmp_path)


NEW = {"content": "new", "lstrip": True}


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({}, {"added_tokens.json": {"new": 4}}, [0, 4]),
        ({}, {"special_tokens_map.json": {"additional_special_tokens": ["new"]}}, [0, 4]),
        ({"additional_special_tokens": ["newer", NEW]}, {}, [0, 5]),
        ({"extra_special_tokens": {"image_token": "new"}}, {}, [0, 4]),
        ({"mask_token": "new", "extra_special_tokens": ["newer"]}, {}, [0, 4]),
        ({"added_tokens_decoder": {"4": NEW, "0": {"content": "a", "special": True}}}, {}, [0, 4]),
        ({"added_tokens_decoder": {"0": {"content": "a"}}}, {}, [0, 2]),
        ({}, {}, [2]),
    ],
)
@pytest.mark.parametrize("name", ["BertTokenizer", "PreTrainedTokenizerFast"])
def test_tokens_that_only_other_files_name(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any], expected: list[int], name: str
) -> None:
    text = save_json(tmp_path)
    configure(tmp_path, tokenizer_class=name, **config)
    for file, content in files.items():
        (tmp_path / file).write_text(json.dumps(content))
    found = read(tmp_path)
    assert ids(found, "anew") == expected
    assert (found.json == text) == (not config and not files)


def test_flags_of_added_tokens_decoder_count_and_those_of_added_tokens_json_do_not(tmp_path: Path) -> None:
    text = save_json(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"[UNK]": 2}')
    assert read(tmp_path).json == text
    configure(tmp_path, added_tokens_decoder={"2": {"content": "[UNK]", "lstrip": True}})
    assert Tokenizer.from_str(read(tmp_path).json).encode("a [UNK]").offsets == [(0, 1), (1, 7)]


def test_a_new_token_with_another_id_than_it_gets(tmp_path: Path) -> None:
    save_json(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"new": 5}')
    with pytest.raises(CheckpointError, match=r"'new' is said to have id 5, the vocabulary gives it 4"):
        read(tmp_path)


def test_a_classs_own_tokens_are_special_where_they_are_words(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0, "[MASK]": 1, "[UNK]": 2}, unk_token="[UNK]")).save(
        str(tmp_path / "tokenizer.json")
    )
    assert ids(read(tmp_path), "a[MASK]") == [0, 1]
    assert read(tmp_path).vocab_size == 3
    configure(tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    assert ids(read(tmp_path), "a[MASK]") == [2]


def pieces_of(files: TokenizerFiles, text: str) -> list[str]:
    tokenizer = Tokenizer.from_str(files.json)
    text = text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)
    assert tokenizer.pre_tokenizer is not None
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
META = pre_tokenizers.Metaspace(prepend_scheme="always")
SPLIT_META = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), META])
ALBERT = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()])


@pytest.mark.parametrize(
    ("name", "parts", "config", "before", "after"),
    [
        ("RobertaTokenizerFast", {"pre_tokenizer": BYTES}, {"add_prefix_space": True}, ["Ab"], ["\u0120Ab"]),
        ("RobertaTokenizer", {"pre_tokenizer": BYTES}, {"add_prefix_space": False}, ["Ab"], ["Ab"]),
        ("XLMRobertaTokenizer", {"pre_tokenizer": SPLIT_META}, {"add_prefix_space": False}, ["▁Ab"], ["Ab"]),
        ("CamembertTokenizerFast", {"pre_tokenizer": META}, {"add_prefix_space": False}, ["▁Ab"], ["Ab"]),
        (
            "AlbertTokenizer",
            {"pre_tokenizer": META, "normalizer": ALBERT},
            {"do_lower_case": False, "add_prefix_space": False},
            ["▁ab"],
            ["Ab"],
        ),
        ("AlbertTokenizer", {"pre_tokenizer": META}, {"do_lower_case": True}, ["▁Ab"], ["▁ab"]),
        ("DebertaV2TokenizerFast", {"pre_tokenizer": META}, {"do_lower_case": True}, ["▁Ab"], ["▁ab"]),
        ("PreTrainedTokenizerFast", {"pre_tokenizer": META}, {"do_lower_case": True}, ["▁Ab"], ["▁Ab"]),
    ],
)
def test_fields_of_other_classes(
    tmp_path: Path, name: str, parts: dict[str, Any], config: dict[str, Any], before: list[str], after: list[str]
) -> None:
    text = save_json(tmp_path, **parts)
    configure(tmp_path, tokenizer_class=name)
    assert read(tmp_path).json == text
    assert pieces_of(read(tmp_path), "Ab") == before
    configure(tmp_path, tokenizer_class=name, **config)
    assert pieces_of(read(tmp_path), "Ab") == after


def test_accents_and_punctuation_as_told(tmp_path: Path) -> None:
    save_json(tmp_path, pre_tokenizer=META, normalizer=ALBERT)
    assert pieces_of(read(tmp_path, "albert"), "\u00e9") == ["▁e"]
    configure(tmp_path, keep_accents=True)
    assert pieces_of(read(tmp_path, "albert"), "\u00e9") == ["▁\u00e9"]
    save_json(tmp_path, pre_tokenizer=META, normalizer=normalizers.Lowercase())
    configure(tmp_path, keep_accents=False)
    assert pieces_of(read(tmp_path, "albert"), "\u00c9") == ["▁e"]
    for given, expected in ((True, ["▁a", "▁,", "▁b"]), (False, ["▁a,b"])):
        configure(tmp_path, split_by_punct=given)
        files = read(tmp_path, "deberta-v2")
        assert pieces_of(files, "a,b") == expected
        (tmp_path / "tokenizer.json").write_text(files.json)


# Token types


def types(files: TokenizerFiles) -> list[int]:
    return list(Tokenizer.from_str(files.json).encode("a", "b a").type_ids)


WITHOUT_TYPES: dict[str, Any] = {"model_input_names": ["input_ids", "attention_mask"]}
CLS_SEP = [("a", 0), ("b", 1)]
TYPED = processors.TemplateProcessing(single="a:0 $A:0", pair="a:0 $A:0 b:0 $B:1 b:1", special_tokens=CLS_SEP)
TRIM = processors.ByteLevel(trim_offsets=True)


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (None, [0, 1, 1]),
        (TRIM, [0, 1, 1]),
        (TYPED, [0, 0, 0, 1, 1, 1]),
        (processors.Sequence([TRIM, TYPED]), [0, 0, 0, 1, 1, 1]),
        (processors.Sequence([TRIM]), [0, 1, 1]),
        (processors.BertProcessing(("b", 1), ("a", 0)), [0, 0, 0, 1, 1, 1]),
        (processors.RobertaProcessing(("b", 1), ("a", 0)), [0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_models_without_token_types_get_zeros(tmp_path: Path, processor: Any, expected: list[int]) -> None:
    parts = {} if processor is None else {"post_processor": processor}
    text = save_json(tmp_path, **parts)
    files = read(tmp_path)
    assert (files.json, types(files)) == (text, expected)
    configure(tmp_path, **WITHOUT_TYPES)
    untyped = read(tmp_path)
    assert types(untyped) == [0] * len(expected)
    for pair in (None, "b a"):
        assert ids(untyped, "a", pair) == ids(files, "a", pair)
    assert untyped.special_count == files.special_count
    if not any(expected):
        assert untyped.json == text


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"tokenizer_class": "DistilBertTokenizerFast"}, 0),
        ({"tokenizer_class": "DistilBertTokenizer"}, 0),
        ({"tokenizer_class": "DistilBertTokenizer", "model_input_names": ["input_ids", "token_type_ids"]}, 1),
        ({"tokenizer_class": "BertTokenizer"}, 1),
        ({"tokenizer_class": "BertTokenizer", **WITHOUT_TYPES}, 0),
        ({"tokenizer_class": "PreTrainedTokenizerFast", **WITHOUT_TYPES}, 0),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, 1),
        ({"tokenizer_class": "PreTrainedTokenizer"}, 1),
        ({"tokenizer_class": "TokenizersBackend"}, 0),
        ({"tokenizer_class": "TokenizersBackend", "model_input_names": ["input_ids", "token_type_ids"]}, 1),
    ],
)
@pytest.mark.parametrize("built", [False, True])
def test_what_says_that_a_model_has_token_types(
    tmp_path: Path, config: dict[str, Any], expected: int, built: bool
) -> None:
    word_piece(tmp_path)
    if not built:
        (tmp_path / "tokenizer.json").write_text(read(tmp_path).json)
    configure(tmp_path, **config)
    assert max(types(read(tmp_path))) == expected


def test_a_class_in_the_models_config_has_no_token_types(tmp_path: Path) -> None:
    save_json(tmp_path, post_processor=TYPED)
    for name, expected in (("BertTokenizer", 1), ("DistilBertTokenizer", 0)):
        files = read_tokenizer(Folder(tmp_path), {"tokenizer_class": name}, TransformerSettings())
        assert max(types(files)) == expected


# WordPiece


@pytest.mark.parametrize("model_type", ["bert", "distilbert", "electra"])
def test_word_piece(tmp_path: Path, model_type: str) -> None:
    word_piece(tmp_path)
    files = read(tmp_path, model_type)
    assert ids(files, "Hello worlds, x", "world") == [2, 5, 6, 8, 9, 1, 3, 6, 3]
    assert files.special_tokens == {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
    assert files.vocab_size == 10
    assert files.truncation_side == "right"


def test_word_piece_keeps_case_when_told(tmp_path: Path) -> None:
    word_piece(tmp_path)
    configure(tmp_path, do_lower_case=False)
    assert ids(read(tmp_path), "Hello hello") == [2, 7, 5, 3]


def test_mpnet_separates_pairs_twice(tmp_path: Path) -> None:
    tokens = ["<s>", "<pad>", "</s>", "[UNK]", "hello", "<mask>"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n")
    files = read(tmp_path, "mpnet")
    assert ids(files, "hello <mask>", "hello") == [0, 4, 5, 2, 2, 4, 2]
    assert files.special_tokens["cls"] == "<s>"


def test_class_in_tokenizer_config_wins_over_model_type(tmp_path: Path) -> None:
    word_piece(tmp_path)
    configure(tmp_path, tokenizer_class="BertTokenizerFast")
    assert ids(read(tmp_path, "roberta"), "hello") == [2, 5, 3]


def test_added_tokens_extend_the_vocabulary(tmp_path: Path) -> None:
    word_piece(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<new>": 10}')
    files = read(tmp_path)
    assert ids(files, "hello <new>") == [2, 5, 10, 3]
    assert files.vocab_size == 11


def test_added_token_with_another_id_than_the_vocabulary_gives(tmp_path: Path) -> None:
    word_piece(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<new>": 12}')
    with pytest.raises(CheckpointError, match=r"'<new>' is said to have id 12, the vocabulary gives it 10"):
        read(tmp_path)


# Byte-level BPE


def byte_level(folder: Path) -> None:
    vocab = {
        token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "b", "Ġ", "ab", "Ġab"])
    }
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\na b\nĠ ab\n", encoding="utf-8")


def test_roberta(tmp_path: Path) -> None:
    byte_level(tmp_path)
    files = read(tmp_path, "roberta")
    assert ids(files, "ab ab", "ba") == [0, 8, 9, 2, 2, 6, 5, 2]
    configure(tmp_path, add_prefix_space=True)
    assert ids(read(tmp_path, "roberta"), "ab") == [0, 9, 2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("merges.txt", "a b c\n", "line 1 must be two tokens"),
        ("merges.txt", "a b\n\na b\n", "line 2 must be two tokens"),
        ("merges.txt", "a zz\n", "tokenizers library"),
        ("vocab.json", '["a"]', "must be an object from tokens to ids"),
        ("vocab.json", '{"a": 1.5}', "must be an object from tokens to ids"),
        ("vocab.json", '{"a": 1, "b": 1}', "two tokens share an id"),
        ("vocab.json", '{"a": 1, "a": 2}', "stands twice"),
    ],
)
def test_damaged_byte_level_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    byte_level(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, "roberta")


# Unigram


def field(number: int, value: bytes | int | float) -> bytes:
    """One field of a protocol buffer: varint, 32-bit float or bytes."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def sentencepiece(pieces: list[tuple[str, float, int]], *more: bytes) -> bytes:
    parts = [field(1, field(1, text.encode()) + field(2, score) + field(3, kind)) for text, score, kind in pieces]
    return b"".join([*parts, *more])


PIECES = [("▁a", -1.0, 1), ("▁b", -2.0, 1), ("b", -3.0, 1), ("▁", -4.0, 1)]
FAIRSEQ = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *PIECES]


def test_xlm_roberta_moves_pieces_behind_four_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "sentencepiece.bpe.model").write_bytes(sentencepiece(FAIRSEQ, field(2, field(3, 1))))
    files = read(tmp_path, "xlm-roberta")
    assert ids(files, "a bb x<mask>", "b") == [0, 4, 5, 6, 7, 3, 8, 2, 2, 5, 2]
    assert files.vocab_size == 9
    assert files.special_tokens["mask"] == "<mask>"


def test_camembert_moves_pieces_behind_five(tmp_path: Path) -> None:
    (tmp_path / "sentencepiece.bpe.model").write_bytes(sentencepiece(FAIRSEQ))
    files = read(tmp_path, "camembert")
    # <unk>NOTUSED is 4; the model's own <s> and </s> follow at 5 and 6.
    assert ids(files, "a bb <mask>") == [5, 7, 8, 9, 11, 6]


def test_albert(tmp_path: Path) -> None:
    special = [("<pad>", 0.0, 3), ("<unk>", 0.0, 2), ("[CLS]", 0.0, 3), ("[SEP]", 0.0, 3), ("[MASK]", 0.0, 3)]
    (tmp_path / "spiece.model").write_bytes(sentencepiece([*special, *PIECES]))
    files = read(tmp_path, "albert")
    assert ids(files, "A b\u0301b", "b") == [2, 5, 6, 7, 3, 6, 3]
    configure(tmp_path, do_lower_case=False)
    assert ids(read(tmp_path, "albert"), "A b") == [2, 8, 1, 6, 3]


def charsmap(units: list[int], texts: bytes) -> bytes:
    units = units + [0] * (256 - len(units))
    return struct.pack("<I", 4 * len(units)) + struct.pack(f"<{len(units)}I", *units) + texts


def test_charsmap_is_applied(tmp_path: Path) -> None:
    # A trie over 256 units that maps "z" to "b": the root's offset is 1, so the byte z leads to unit 1 ^ 0x7a, whose
    # offset is 2 and whose leaf bit is set, so that the value (0) is at its position ^ 2.
    position = 1 ^ ord("z")
    units = [0] * 256
    units[0] = 1 << 10
    units[position] = 2 << 10 | 1 << 8 | ord("z")
    units[position ^ 2] = 1 << 31
    normaliser = field(3, field(2, charsmap(units, b"b\0")))
    (tmp_path / "sentencepiece.bpe.model").write_bytes(sentencepiece(FAIRSEQ, normaliser))
    assert ids(read(tmp_path, "xlm-roberta"), "a z") == [0, 4, 5, 2]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (b"\xff\xff\xff\xffabc", "does not fit its size"),
        (b"\x04", "does not fit its size"),
        (charsmap([1 << 20], b"\0"), "leads outside of itself"),
        (charsmap([1 << 10 | 1 << 8, 1 << 31 | 77], b"b\0"), "names a text that it does not have"),
        (charsmap([1 << 10 | 1 << 8, 1 << 31 | 1], "é\0".encode()), "names a text that it does not have"),
        (charsmap([1 << 10], b"\xff"), "damaged"),
    ],
)
def test_hostile_charsmaps(tmp_path: Path, table: bytes, message: str) -> None:
    (tmp_path / "sentencepiece.bpe.model").write_bytes(sentencepiece(FAIRSEQ, field(3, field(2, table))))
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, "xlm-roberta")


@pytest.mark.parametrize(
    "data",
    [
        b"\n",
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\xff" * 20,
        field(1, 3),
        field(1, field(1, b"\xff")),
        field(1, field(1, b"a") + field(2, float("nan"))),
        field(1, field(2, b"abc")),
        field(2, b"")[:1],
        b"\x0b",
        field(2, field(3, 1)),
    ],
)
def test_damaged_sentencepiece_models(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"m\.model: .*sentencepiece model"):
        parse_sentencepiece(data, "m.model")


def test_other_sentencepiece_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "sentencepiece.bpe.model").write_bytes(sentencepiece(FAIRSEQ, field(2, field(3, 2))))
    with pytest.raises(UnsupportedModelError, match="model_type 2; only unigram"):
        read(tmp_path, "xlm-roberta")


# What surrounds a tokenizer


@pytest.mark.parametrize(
    ("configured", "sentence", "expected"),
    [
        (512, 256, 256),
        (128, 256, 256),
        (128, 10**9, None),
        (None, None, None),
        (1000000000000000019884624838656, None, None),
        (1e30, 384, 384),
        (512, None, 512),
    ],
)
def test_max_length(tmp_path: Path, configured: Any, sentence: int | None, expected: int | None) -> None:
    word_piece(tmp_path)
    configure(tmp_path, model_max_length=configured)
    assert read(tmp_path, max_seq_length=sentence).max_length == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_max_length": 0}, "model_max_length must be a positive integer"),
        ({"model_max_length": "512"}, "model_max_length must be a positive integer"),
        ({"model_max_length": 2.5}, "model_max_length must be a positive integer"),
        ({"model_input_names": "input_ids"}, "model_input_names must be a list of strings"),
        ({"truncation_side": "middle"}, "truncation_side is 'middle'"),
        ({"do_lower_case": "yes"}, "do_lower_case must be true or false"),
        ({"tokenizer_class": 3}, "tokenizer_class must be a string"),
        ({"split_special_tokens": True}, r"tokenizer_config\.json: split_special_tokens is true"),
        ({"split_special_tokens": 1}, "split_special_tokens must be true or false"),
        ({"mask_token": {"content": 3}}, "a special token must be a string"),
        ({"mask_token": {"content": "x", "lstrip": "no"}}, "a special token must be a string"),
        ({"extra_special_tokens": "x"}, "must be a list of tokens"),
        ({"added_tokens_decoder": {"x": {"content": "y"}}}, "added_tokens_decoder must map ids"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder must be an object"),
        ({"cls_token": None}, "cls_token is null"),
        ({"unk_token": "<absent>"}, "lacks the unknown token '<absent>'"),
        ({"tokenizer_class": "BertJapaneseTokenizer"}, "'BertJapaneseTokenizer' cannot be built"),
    ],
)
def test_settings_errors(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    word_piece(tmp_path)
    configure(tmp_path, **config)
    with pytest.raises(EncastError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("bert", r"accepted are tokenizer\.json or, for this model, vocab\.txt"),
        ("roberta", r"vocab\.json with merges\.txt"),
        ("albert", r"spiece\.model"),
        ("gpt2", "cannot be built from vocabulary files"),
    ],
)
def test_no_tokenizer(tmp_path: Path, model_type: str, message: str) -> None:
    with pytest.raises(EncastError, match=message):
        read(tmp_path, model_type)
