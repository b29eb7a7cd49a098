"""Tokenizers built from vocabulary files equal those of transformers, token by token.

Needs transformers (the reference) and, for unigram models, sentencepiece (to train one).
"""

# ruff: noqa: RUF001  (look-alike characters are what is tested)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from encast.importers.files import Folder
from encast.importers.sentence_modules import TransformerSettings
from encast.importers.tokenizer import read_tokenizer

transformers = pytest.importorskip("transformers")

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Größe, naïve café, Ångström: accents everywhere; coöperate!",
    "数据压缩 is hard; 東京都 and 서울 too.",
    "numbers 1,234.56 and 2024-01-31, prices like 5,99 € or £7",
    "He said \"hello\" and then 'bye'. (Really?) [yes]",
    "emoji \U0001f600 and family \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "Привет, мир! Как дела?",
] * 8

TEXTS = [
    "",
    " ",
    "hello",
    "  leading and trailing  ",
    "two  spaces\tand\ttabs\nand\r\nlines",
    *CORPUS[:7],
    "ﬁ ligature, ｆｕｌｌｗｉｄｔｈ, ²³, Å (Kelvin), İstanbul, ß ẞ, Σίσυφος ΣΊΣΥΦΟΣ",
    "combining e\u0301 o\u0308 \u0915\u094d\u0937 zero\u200bwidth \u00adsoft\u00a0hard \u3000wide",
    "control \x00\x01\x02 \x7f \x85 \ufffd \ufeff \u2028 \u2029",
    "x" * 150 + " " + "長" * 120 + " " + "-" * 101,
    "[CLS] a [SEP] b [MASK] c [PAD] [UNK] [mask] [MASK]s",
    "<s> a </s> b <mask> c <pad> <unk> <MASK> x<mask>y  <mask> z",
    "``quoted'' text, don't 'stop'",
    "flags \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd \u2764\ufe0f",
    "added extra-token and extra-tokens EXTRA-TOKEN <special-one>",
    "▁already ▁▁ marked",
    "\u0130\u0131 \u01c5 \u1e9e \ufb03",
]


def compare(folder: Path, model_type: str, tokenizer_class: str) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours = read_tokenizer(Folder(folder), {"model_type": model_type}, TransformerSettings())
    theirs = getattr(transformers, tokenizer_class).from_pretrained(folder)
    tokenizer = Tokenizer.from_str(ours.json)
    for text in TEXTS:
        mine, expected = tokenizer.encode(text), theirs(text, return_offsets_mapping=True)
        assert mine.ids == expected["input_ids"], text
        assert mine.offsets == expected["offset_mapping"], text
    for text, pair in zip(TEXTS[1:], reversed(TEXTS[1:]), strict=True):  # transformers takes an empty pair for none
        mine, expected = tokenizer.encode(text, pair), theirs(text, pair, return_token_type_ids=True)
        assert mine.ids == expected["input_ids"], (text, pair)
        assert mine.type_ids == expected["token_type_ids"], (text, pair)
    for role, token in ours.special_tokens.items():
        assert str(getattr(theirs, role + "_token")) == token
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1


# WordPiece

WORD_PIECES = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "<pad>", "</s>", "<unk>", "<mask>",
    "the", "quick", "brown", "fox", "hello", "extra", "##s", "-", "token", "x", "##x", "a", "b", "c",
    "數", "数", "据", "é", "e", "café", "cafe", "naive", "grosse", "gr", "##ö", "##o", "##ß", "##e", ",", ".", "!",
    "Hello", "HELLO", "mask", "##mask", "[", "]", "<", ">", "/", "s", "σ", "##ς", "ι", "i", "\u0130", "special", "one",
]  # fmt: skip
WORD_PIECES += [chr(code) for code in range(33, 127) if chr(code) not in WORD_PIECES]
WORD_PIECES += ["##" + chr(code) for code in range(97, 123) if "##" + chr(code) not in WORD_PIECES]
LAST = len(WORD_PIECES)
ROLES = {role + "_token": f"[{role.upper()}]" for role in ("unk", "sep", "pad", "cls", "mask")}


def word_piece_folder(folder: Path, config: dict[str, Any] | None, ending: str = "\n") -> Path:
    (folder / "vocab.txt").write_bytes((ending.join(WORD_PIECES) + ending).encode())
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"do_lower_case": False},
        {"do_lower_case": False, "strip_accents": True},
        {"do_lower_case": True, "strip_accents": False},
        {"tokenize_chinese_chars": False},
        {"bos_token": None, "model_max_length": 128},
        {"mask_token": {"content": "[MASK]", "lstrip": True, "__type": "AddedToken"}},
        {"unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "mask_token": "<mask>"},
        {"additional_special_tokens": ["<special-one>", "hello"]},
        {"extra_special_tokens": {"image_token": "<special-one>"}},
        {
            "added_tokens_decoder": {
                "0": {"content": "[PAD]", "special": True, "normalized": False},
                "4": {"content": "[MASK]", "special": True, "normalized": False, "lstrip": True},
                str(len(WORD_PIECES)): {"content": "extra-token", "special": False, "normalized": True},
            }
        },
    ],
)
@pytest.mark.parametrize("model_type", ["bert", "distilbert", "electra"])
def test_bert(tmp_path: Path, config: dict[str, Any] | None, model_type: str) -> None:
    compare(word_piece_folder(tmp_path, config), model_type, "BertTokenizer")


@pytest.mark.parametrize("ending", ["\r\n", " \n", "\u2003\n"])
def test_bert_line_endings(tmp_path: Path, ending: str) -> None:
    compare(word_piece_folder(tmp_path, None, ending), "bert", "BertTokenizer")


def test_bert_vocab_oddities(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes("\n".join([*WORD_PIECES, "fox", "", "\x1c", "\u2028", "last"]).encode())
    compare(tmp_path, "bert", "BertTokenizer")


def test_extra_tokens_of_config_and_map(tmp_path: Path) -> None:
    word_piece_folder(tmp_path, {"additional_special_tokens": ["<special-one>"]})
    tokens = {"additional_special_tokens": ["extra-token"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    compare(tmp_path, "bert", "BertTokenizer")


def test_special_tokens_map_and_added_tokens(tmp_path: Path) -> None:
    word_piece_folder(tmp_path, {"do_lower_case": True})
    tokens = {"mask_token": {"content": "<mask>", "lstrip": True}, "additional_special_tokens": ["<special-one>"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"extra-token": len(WORD_PIECES)}))
    compare(tmp_path, "bert", "BertTokenizer")


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"do_lower_case": False, "bos_token": None},
        {"unk_token": "<unk>"},
        {"mask_token": {"content": "<mask>", "lstrip": False, "__type": "AddedToken"}},
        {
            "added_tokens_decoder": {
                "5": {"content": "<s>", "special": True, "normalized": True},
                "9": {"content": "<mask>", "special": True, "normalized": False, "lstrip": True},
            }
        },
    ],
)
def test_mpnet(tmp_path: Path, config: dict[str, Any] | None) -> None:
    compare(word_piece_folder(tmp_path, config), "mpnet", "MPNetTokenizer")


@pytest.mark.parametrize("mask", ["<mask>", {"content": "<mask>", "lstrip": False}])
def test_mpnet_special_tokens_map(tmp_path: Path, mask: Any) -> None:
    word_piece_folder(tmp_path, {"do_lower_case": True})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"mask_token": mask}))
    compare(tmp_path, "mpnet", "MPNetTokenizer")


def as_json(folder: Path, model_type: str, name: str, config: dict[str, Any], *files: str) -> None:
    """Compares with ``config`` beside the tokenizer.json that ``files`` make without it."""
    made = read_tokenizer(Folder(folder), {"model_type": model_type}, TransformerSettings()).json
    for file in files:
        (folder / file).unlink()
    (folder / "tokenizer.json").write_text(made)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, **config}))
    compare(folder, model_type, name.removesuffix("Fast"))
    assert read_tokenizer(Folder(folder), {}, TransformerSettings()).json != made


@pytest.mark.parametrize(
    "config",
    [
        {"do_lower_case": False},
        {"strip_accents": False},
        {"do_lower_case": False, "strip_accents": True},
        {"tokenize_chinese_chars": False, "do_lower_case": True, "strip_accents": None},
    ],
)
@pytest.mark.parametrize(
    ("model_type", "name"), [("bert", "BertTokenizer"), ("bert", "BertTokenizerFast"), ("mpnet", "MPNetTokenizer")]
)
def test_fields_beside_the_json_of_bert(tmp_path: Path, config: dict[str, Any], model_type: str, name: str) -> None:
    as_json(word_piece_folder(tmp_path, None), model_type, name, config, "vocab.txt")


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("bert", None),
        ("bert", {}),
        ("distilbert", {"strip_accents": None}),
        ("electra", {"tokenizer_class": "ElectraTokenizer"}),
        ("mpnet", {}),
        ("modernbert", {"tokenizer_class": "BertTokenizer", **ROLES}),
    ],
)
def test_absent_fields_beside_the_json_of_bert(tmp_path: Path, model_type: str, config: dict[str, Any] | None) -> None:
    word_piece_folder(tmp_path, None)
    of = "mpnet" if model_type == "mpnet" else "bert"
    tokenizer = Tokenizer.from_str(read_tokenizer(Folder(tmp_path), {"model_type": of}, TransformerSettings()).json)
    (tmp_path / "vocab.txt").unlink()
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    compare(tmp_path, model_type, "AutoTokenizer")


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({}, {"added_tokens.json": {"extra-token": LAST, "<special-one>": LAST + 1}}),
        ({}, {"added_tokens.json": {"x": WORD_PIECES.index("x"), "[PAD]": 0}}),
        ({}, {"special_tokens_map.json": {"additional_special_tokens": ["<special-one>", "hello"]}}),
        (
            {"additional_special_tokens": ["hello"]},
            {
                "special_tokens_map.json": {"additional_special_tokens": ["<special-one>"]},
                "added_tokens.json": {"extra-token": LAST},
            },
        ),
        ({"extra_special_tokens": ["extra-token", "<special-one>"], "bos_token": "<s>", "eos_token": "new"}, {}),
        ({"extra_special_tokens": {"image_token": "<special-one>"}}, {}),
        ({"mask_token": "<special-one>"}, {}),
        (
            {
                "added_tokens_decoder": {
                    **{str(i): {"content": token, "special": True} for i, token in enumerate(WORD_PIECES[:5])},
                    "4": {"content": "[MASK]", "special": True, "normalized": False, "lstrip": True},
                    str(WORD_PIECES.index("fox")): {"content": "fox", "special": True},
                    str(LAST): {"content": "extra-token", "special": False, "normalized": True},
                },
                "extra_special_tokens": ["<special-one>"],
            },
            {},
        ),
    ],
)
@pytest.mark.parametrize("name", ["BertTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend"])
def test_tokens_that_only_files_beside_the_json_name(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any], name: str
) -> None:
    made = read_tokenizer(Folder(word_piece_folder(tmp_path, None)), {"model_type": "bert"}, TransformerSettings()).json
    (tmp_path / "vocab.txt").unlink()
    (tmp_path / "tokenizer.json").write_text(made)
    types = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, **types, **ROLES, **config}))
    for file, content in files.items():
        (tmp_path / file).write_text(json.dumps(content))
    compare(tmp_path, "bert", name)


# Byte-level BPE


@pytest.fixture(scope="module")
def roberta_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roberta")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.model.save(str(folder))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"add_prefix_space": True},
        {"add_prefix_space": True, "trim_offsets": False},
        {"mask_token": {"content": "<mask>", "lstrip": True, "__type": "AddedToken"}, "errors": "replace"},
        {"additional_special_tokens": ["<special-one>"]},
    ],
)
def test_roberta(tmp_path: Path, roberta_files: Path, config: dict[str, Any] | None) -> None:
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((roberta_files / name).read_bytes())
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    compare(tmp_path, "roberta", "RobertaTokenizer")


def test_fields_beside_the_json_of_roberta(tmp_path: Path, roberta_files: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((roberta_files / name).read_bytes())
    as_json(tmp_path, "roberta", "RobertaTokenizer", {"add_prefix_space": True}, "vocab.json", "merges.txt")


# Unigram


def train(folder: Path, name: str, **options: Any) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    with open(folder / name, "wb") as out:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS),
            model_writer=out,
            vocab_size=options.pop("vocab_size", 220),
            model_type="unigram",
            character_coverage=1.0,
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, None),
        ({"normalization_rule_name": "identity"}, None),
        ({"normalization_rule_name": "nmt_nfkc_cf"}, {"mask_token": {"content": "<mask>", "lstrip": True}}),
        ({"user_defined_symbols": ["extra-token", "€"]}, {"add_prefix_space": False}),
        ({}, {"additional_special_tokens": ["<special-one>"]}),
        ({"user_defined_symbols": ["extra-token"]}, {"additional_special_tokens": []}),
    ],
)
def test_xlm_roberta(tmp_path: Path, options: dict[str, Any], config: dict[str, Any] | None) -> None:
    train(tmp_path, "sentencepiece.bpe.model", unk_id=0, bos_id=1, eos_id=2, **options)
    if config is not None:
        if isinstance(config.get("mask_token"), dict):
            config = {**config, "mask_token": {**config["mask_token"], "__type": "AddedToken"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    compare(tmp_path, "xlm-roberta", "XLMRobertaTokenizer")


def test_unigram_special_tokens_map(tmp_path: Path) -> None:
    train(tmp_path, "sentencepiece.bpe.model", unk_id=0, bos_id=1, eos_id=2, user_defined_symbols=["extra-token"])
    tokens = {"additional_special_tokens": ["<special-one>"], "mask_token": {"content": "<mask>", "lstrip": True}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    compare(tmp_path, "xlm-roberta", "XLMRobertaTokenizer")


@pytest.mark.parametrize("config", [None, {"additional_special_tokens": ["<s>NOTUSED", "</s>NOTUSED"]}])
def test_camembert(tmp_path: Path, config: dict[str, Any] | None) -> None:
    train(tmp_path, "sentencepiece.bpe.model", unk_id=0, bos_id=1, eos_id=2)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    compare(tmp_path, "camembert", "CamembertTokenizer")


@pytest.mark.parametrize(
    "config",
    [None, {"do_lower_case": False}, {"keep_accents": True}, {"do_lower_case": False, "keep_accents": True}],
)
def test_albert(tmp_path: Path, config: dict[str, Any] | None) -> None:
    train(
        tmp_path,
        "spiece.model",
        pad_id=0,
        unk_id=1,
        bos_id=-1,
        eos_id=-1,
        control_symbols=["[CLS]", "[SEP]", "[MASK]"],
        user_defined_symbols=["(", ")", '"', "-", ".", "£", "€"],
        vocab_size=240,
    )
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    compare(tmp_path, "albert", "AlbertTokenizer")


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"do_lower_case": True},
        {"split_by_punct": True},
        {"add_prefix_space": False},
        {"do_lower_case": False, "sp_model_kwargs": {}, "vocab_type": "spm"},
        {"mask_token": {"content": "[MASK]", "lstrip": True, "__type": "AddedToken"}},
    ],
)
def test_deberta(tmp_path: Path, config: dict[str, Any] | None) -> None:
    """As the published models have it: [MASK] is no piece, and comes behind them."""
    train(
        tmp_path,
        "spm.model",
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        pad_piece="[PAD]",
        bos_piece="[CLS]",
        eos_piece="[SEP]",
        unk_piece="[UNK]",
    )
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    compare(tmp_path, "deberta-v2", "DebertaV2Tokenizer")
