"""The tokenizers that are made of GluonNLP's vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gluon_files import pair, small_bert, vocabulary

from encast.errors import CheckpointError, EncastError
from encast.importers import open_checkpoint


def bert(tmp_path: Path, tokens: list[str], name: str = "net", **special: Any) -> Any:
    """The tokenizer of a BERT with that vocabulary."""
    path = small_bert(tmp_path, name, len(SPECIAL) + len(tokens))
    roles = {"padding_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    (tmp_path / "vocab.json").write_bytes(vocabulary([*SPECIAL, *tokens], **{**roles, **special}))
    return open_checkpoint(path).tokenizer


SPECIAL = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]


def lowers(tokenizer: Any) -> bool:
    return bool(json.loads(tokenizer.json)["normalizer"]["lowercase"])


@pytest.mark.parametrize(
    ("tokens", "name", "expected"),
    [
        (["hello", "##s"], "net", True),
        (["hello", "Hello", "##s"], "net", False),
        (["Hello", "##s"], "bert_12_768_12_book_corpus_wiki_en_uncased-75cc780f", True),
        (["hello", "##s"], "bert_12_768_12_wiki_cn_cased-885ebb9a", False),
        (["hello", "##s"], "briefcased", True),
        (["hello", "Hello", "##s"], "uncasedness", False),
    ],
)
def test_lowering(tmp_path: Path, tokens: list[str], name: str, expected: bool) -> None:
    assert lowers(bert(tmp_path, tokens, name)) is expected


def test_names_that_contradict_each_other(tmp_path: Path) -> None:
    path = small_bert(tmp_path, "my_cased", 6)
    (tmp_path / "wiki_uncased.vocab").write_bytes(vocabulary([*SPECIAL, "a"], cls_token="[CLS]", sep_token="[SEP]"))
    with pytest.raises(
        CheckpointError, match=r"'wiki_uncased\.vocab' and 'my_cased\.params' say both cased and uncased"
    ):
        _ = open_checkpoint(path).tokenizer
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    assert lowers(open_checkpoint(path).tokenizer)


@pytest.mark.parametrize("words", [5, 7, 1000])
def test_a_vocabulary_of_another_model(tmp_path: Path, words: int) -> None:
    path = small_bert(tmp_path, words=words)
    (tmp_path / "net.vocab").write_bytes(vocabulary([*SPECIAL, "a"], cls_token="[CLS]", sep_token="[SEP]"))
    with pytest.raises(CheckpointError, match=rf"has 6 tokens, and the table of words in net\.params has {words} rows"):
        _ = open_checkpoint(path).tokenizer


def test_no_token_is_added_behind_the_table(tmp_path: Path) -> None:
    path = small_bert(tmp_path, words=4)
    (tmp_path / "net.vocab").write_bytes(vocabulary(["[UNK]", "[CLS]", "[SEP]", "a"]))
    tokenizer = open_checkpoint(path).tokenizer
    assert tokenizer.vocab_size == 4
    assert set(tokenizer.special_tokens) == {"unk", "cls", "sep"}


def test_special_tokens_are_those_of_the_vocabulary(tmp_path: Path) -> None:
    """Other files beside it may be of another model."""
    (tmp_path / "special_tokens_map.json").write_text('{"unk_token": "<unk>", "cls_token": "<s>"}')
    (tmp_path / "added_tokens.json").write_text('{"<more>": 6}')
    tokenizer = bert(tmp_path, ["a"])
    assert (tokenizer.special_tokens["cls"], tokenizer.vocab_size) == ("[CLS]", 6)
    (tmp_path / "tokenizer_config.json").write_text('{"unk_token": {"content": "<unk>"}}')
    with pytest.raises(
        CheckpointError, match=r"tokenizer_config\.json: unk_token is '<unk>', which .*vocab\.json does not have"
    ):
        bert(tmp_path, ["a"])


def test_lowering_is_asked_for_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match='"do_lower_case": true'):
        bert(tmp_path, ["\u4e2d", "##\u6587"])
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert lowers(bert(tmp_path, ["\u4e2d", "##\u6587"])) is False


def test_ids_are_those_of_the_vocabulary(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(bert(tmp_path, ["hello", "##s"]).json)
    assert tokenizer.encode("hellos HELLO?").ids == [2, 5, 6, 5, 0, 3]
    assert tokenizer.encode("hello", "hello").type_ids == [0, 0, 0, 1, 1]


def test_special_tokens_of_releases_before_0_9(tmp_path: Path) -> None:
    path = small_bert(tmp_path, words=6)
    content = {"idx_to_token": ["<u>", "<p>", "<c>", "<s>", "a", "##b"], "unknown_token": "<u>"}
    content |= {"padding_token": "<p>", "cls_token": "<c>", "sep_token": "<s>", "bos_token": None}
    (tmp_path / "only.vocab").write_text(json.dumps(content))
    special = open_checkpoint(path).tokenizer.special_tokens
    assert {role: special.get(role) for role in ("unk", "pad", "cls", "sep")} == {
        "unk": "<u>", "pad": "<p>", "cls": "<c>", "sep": "<s>"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "idx_to_token must be a list of tokens"),
        ({"idx_to_token": {}}, "idx_to_token must be a list of tokens"),
        ({"idx_to_token": []}, "a list of strings"),
        ({"idx_to_token": ["a", ""]}, "none of them empty"),
        ({"idx_to_token": ["a", 1]}, "a list of strings"),
        ({"idx_to_token": ["a", "\ud800"]}, "half of a surrogate pair"),
        ({"idx_to_token": ["a", "b", "a"]}, "'a' stands twice"),
        ({"idx_to_token": ["a"], "token_to_idx": {"a": 1}}, "say different ids"),
        ({"idx_to_token": ["a"], "identifiers_to_tokens": 1}, "must be an object"),
        ({"idx_to_token": ["a"], "unknown_token": "b"}, "special token for unk, 'b', is none"),
        ({"idx_to_token": ["a"], "mask_token": {}}, "special token for mask, a value of type dict, is none"),
        ({"idx_to_token": ["a\n##b", "##c"]}, "ends in white space"),
        ({"idx_to_token": ["\u2581a", "\u2581b"]}, "pieces of a sentencepiece model"),
        ({"idx_to_token": ["a", "##b"]}, r"net\.vocab: names no special token for unk, and '\[UNK\]' is none of its"),
        ({"idx_to_token": ["[UNK]", "[SEP]", "a"]}, r"net\.vocab: names no special token for cls, and '\[CLS\]'"),
        ({"idx_to_token": ["[UNK]", "[CLS]", "a"]}, r"net\.vocab: names no special token for sep, and '\[SEP\]'"),
    ],
)
def test_damaged_vocabularies(tmp_path: Path, content: Any, message: str) -> None:
    tokens = content.get("idx_to_token") if isinstance(content, dict) else None
    path = small_bert(tmp_path, words=len(tokens or "a"))
    (tmp_path / "net.vocab").write_text(json.dumps(content))
    with pytest.raises(EncastError, match=message):
        _ = open_checkpoint(path).tokenizer


def test_which_vocabulary(tmp_path: Path) -> None:
    path = small_bert(tmp_path)
    checkpoint = open_checkpoint(path)
    with pytest.raises(
        CheckpointError, match=r"no vocabulary for net\.params; accepted are net\.vocab, net\.vocab\.json"
    ):
        _ = checkpoint.tokenizer
    for name in ("a.vocab", "b.vocab"):
        (tmp_path / name).write_bytes(vocabulary(SPECIAL))
    with pytest.raises(CheckpointError, match=r"there are 'a\.vocab', 'b\.vocab': rename the right one"):
        _ = open_checkpoint(path).tokenizer


# RoBERTa's


def test_pairs_of_roberta_have_one_separator(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    hugging_face, gluon = pair(tmp_path, "roberta", "classify")
    ours = Tokenizer.from_str(open_checkpoint(gluon).tokenizer.json)
    theirs = Tokenizer.from_str(open_checkpoint(hugging_face).tokenizer.json)
    first, last = ours.token_to_id("<s>"), ours.token_to_id("</s>")
    a, b = theirs.encode("the cat", add_special_tokens=False), theirs.encode("sat", add_special_tokens=False)
    assert ours.encode("the cat", "sat").ids == [first, *a.ids, last, *b.ids, last]
    assert ours.encode("the cat").ids == theirs.encode("the cat").ids
    for text in ("the cat", " the cat", "  the  cat "):
        assert ours.encode(text).offsets == theirs.encode(text).offsets
    assert set(ours.encode("the cat", "sat").type_ids) == {0}


def test_bounds_of_roberta_have_the_names_of_its_vocabulary(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    _, gluon = pair(tmp_path, "roberta", "classify")
    text = (gluon.parent / "net.vocab").read_text()
    (gluon.parent / "net.vocab").write_text(text.replace('"<s>"', '"<begin>"').replace('"</s>"', '"<end>"'))
    tokenizer = open_checkpoint(gluon).tokenizer
    tokens = Tokenizer.from_str(tokenizer.json).encode("the").tokens
    assert (tokens[0], tokens[-1]) == ("<begin>", "<end>")
    assert (tokenizer.special_tokens["cls"], tokenizer.special_tokens["sep"]) == ("<begin>", "<end>")


def test_merges_of_roberta(tmp_path: Path) -> None:
    _, gluon = pair(tmp_path, "roberta", "features")
    ranks = gluon.parent / "openai_webtext_bpe_ranks-396d4d8e.json"
    expected = open_checkpoint(gluon).tokenizer.json
    (gluon.parent / "merges.txt").rename(ranks)
    assert open_checkpoint(gluon).tokenizer.json == expected
    ranks.unlink()
    with pytest.raises(CheckpointError, match=r"no merges; .*openai_webtext_bpe_ranks-396d4d8e\.json"):
        _ = open_checkpoint(gluon).tokenizer


def test_a_tokenizer_json_takes_the_place_of_a_vocabulary(tmp_path: Path) -> None:
    _, gluon = pair(tmp_path, "roberta", "features")
    (gluon.parent / "tokenizer.json").write_text(open_checkpoint(gluon).tokenizer.json)
    for name in ("merges.txt", "net.vocab"):
        (gluon.parent / name).unlink()
    checkpoint = open_checkpoint(gluon)
    assert checkpoint.tokenizer.special_tokens["mask"] == "<mask>"
    assert sorted(checkpoint.provenance["files"]) == ["config.json", "net.params", "tokenizer.json"]


def test_a_padding_token_elsewhere_is_refused(tmp_path: Path) -> None:
    _, gluon = pair(tmp_path, "roberta", "features")
    vocab = json.loads((gluon.parent / "net.vocab").read_text())["idx_to_token"]
    (gluon.parent / "net.vocab").write_bytes(vocabulary(["<a>", *vocab], unknown_token="<unk>"))
    with pytest.raises(CheckpointError, match="token 1 must be <pad>"):
        _ = open_checkpoint(gluon).tokenizer
