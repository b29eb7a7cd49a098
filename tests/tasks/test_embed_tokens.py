"""Embeddings of tokens: markers, lengths, skipped tokens, and what one text's vectors depend on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from fake_engine import VOCAB, fake_engine
from late_checkpoints import LAYOUTS, make_late_checkpoint

import encast
from encast.cli.main import main
from encast.engine import Engine
from encast.errors import InputError, UnsupportedModelError
from encast.ir.meta import TokenForm
from encast.tasks import max_sim

FORM = TokenForm(
    query_marker=VOCAB["who"],
    document_marker=VOCAB["what"],
    query_length=7,
    document_length=9,
    expansion=VOCAB["[MASK]"],
    most_unseen=4,
    skip=(VOCAB[","], VOCAB["."]),
)


def ids_as_vectors(form: TokenForm | None = FORM) -> Engine:
    """An engine whose vector of a token is its id, over and over."""
    engine = fake_engine("embed_tokens", lambda ids: np.repeat(ids[:, None], 4, axis=1))
    return Engine(replace(engine.session, token_form=form), engine.runnable)


def read(engine: Engine, text: str, **options: Any) -> list[str]:
    """The tokens that have vectors."""
    (found,) = engine.embed_tokens([text], **options)
    assert (found.token_ids.dtype, found.vectors.dtype) == (np.int32, np.float32)
    np.testing.assert_array_equal(found.vectors, np.repeat(found.token_ids[:, None], 4, axis=1))
    names = {index: token for token, index in VOCAB.items()}
    return [names[token] for token in found.token_ids.tolist()]


def test_a_query_is_marked_and_filled_up() -> None:
    masks = ["[MASK]"]
    assert read(ids_as_vectors(), "the cat", kind="query") == ["[CLS]", "who", "the", "cat", "[SEP]", *masks * 2]
    assert read(ids_as_vectors(), "", kind="query") == ["[CLS]", "who", "[SEP]", *masks * 4]
    assert read(ids_as_vectors(), "the , .", kind="query") == ["[CLS]", "who", "the", ",", ".", "[SEP]", *masks]
    plain = ids_as_vectors(replace(FORM, expansion=None))
    assert read(plain, "the cat", kind="query") == ["[CLS]", "who", "the", "cat", "[SEP]"]


def test_a_document_is_marked_and_has_no_vectors_of_what_is_skipped() -> None:
    assert read(ids_as_vectors(), "the cat, the.") == ["[CLS]", "what", "the", "cat", "the", "[SEP]"]
    unmarked = ids_as_vectors(replace(FORM, document_marker=None, skip=()))
    assert read(unmarked, "the cat.") == ["[CLS]", "the", "cat", ".", "[SEP]"]


def test_long_texts_are_cut_to_the_length_of_their_kind() -> None:
    engine = ids_as_vectors()
    text = "the cat sat on the mat , john"
    assert read(engine, text, kind="query") == ["[CLS]", "who", "the", "cat", "sat", "on", "[SEP]"]
    assert read(engine, text) == ["[CLS]", "what", "the", "cat", "sat", "on", "the", "mat", "[SEP]"]
    assert read(engine, "the cat sat on", kind="query", on_long="error")[-1] == "[SEP]"
    with pytest.raises(InputError, match=r"texts\[1\] is longer than 7 tokens"):
        engine.embed_tokens(["a", "the cat sat on mat"], kind="query", on_long="error")
    left = fake_engine("embed_tokens", lambda ids: np.repeat(ids[:, None], 4, axis=1))
    left.session.tokenizer.truncation_side = "left"
    side = Engine(replace(left.session, token_form=FORM), left.runnable)
    assert read(side, text, kind="query") == ["[CLS]", "who", "the", "mat", ",", "john", "[SEP]"]
    # Longer than the tokenizer keeps, too.
    assert read(engine, "cat " * 80) == ["[CLS]", "what", *["cat"] * 6, "[SEP]"]


def test_what_is_refused() -> None:
    engine = ids_as_vectors()
    with pytest.raises(InputError, match="kind is 'passage'"):
        engine.embed_tokens(["a"], kind="passage")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="on_long is 'cut'"):
        engine.embed_tokens(["a"], on_long="cut")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"compiled for 'embed'.*--task embed_tokens"):
        fake_engine("embed").embed_tokens(["a"])
    broken = fake_engine("embed_tokens", lambda ids: np.full((len(ids), 4), np.nan))
    with pytest.raises(InputError, match="not a finite number"):
        Engine(replace(broken.session, token_form=FORM), broken.runnable).embed_tokens(["a"])
    assert engine.embed_tokens([]) == []


def test_max_sim_is_the_sum_of_the_best() -> None:
    query = np.float32([[1, 0], [0, 1]])
    document = np.float32([[0.5, 0.25], [0, -1], [0.25, 0.5]])
    assert max_sim(query, document) == 1.0
    assert max_sim(query[:1], document[1:2]) == 0.0
    for wrong in (document[:0], document[0], np.float32([[1, 2, 3]])):
        with pytest.raises(InputError, match=r"\[n, dim\] and \[m, dim\]"):
            max_sim(query, wrong)


def test_rerank_is_by_max_sim() -> None:
    engine = fake_engine("embed_tokens", lambda ids: np.eye(8)[ids % 8])
    engine = Engine(replace(engine.session, token_form=replace(FORM, expansion=None)), engine.runnable)
    documents = ["the cat sat", "mat", "john smith lives in new york"]
    (query,) = engine.embed_tokens(["the cat"], kind="query")
    scores = [max_sim(query.vectors, one.vectors) for one in engine.embed_tokens(documents)]
    wanted = sorted(enumerate(scores), key=lambda one: -one[1])
    assert engine.rerank("the cat", documents) == wanted
    assert len({score for _, score in wanted}) > 1


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_vectors_depend_on_their_text_alone_and_are_the_references(layout: str, dtype: str, tmp_path: Path) -> None:
    """Bit by bit: whatever else is in the batch, and however many threads; masks at the end are no text's own."""
    folder = make_late_checkpoint(tmp_path / layout, "bert", layout)
    path = encast.compile(folder, tmp_path / "model.encast", dtype=dtype)
    texts = ["the cat", "", "b c [MASK] d [MASK]", "to be, or not to be! " * 4]
    with (
        encast.load(path, threads=1) as one,
        encast.load(path, threads=2, pin=False) as two,
        encast.load(path, device="reference") as reference,
    ):
        for kind in ("query", "document"):
            together = two.embed_tokens(texts, kind=kind)
            exact = reference.embed_tokens(texts, kind=kind)
            for text, found, wanted in zip(texts, together, exact, strict=True):
                (alone,) = one.embed_tokens([text], kind=kind)
                np.testing.assert_array_equal(alone.vectors, found.vectors)
                np.testing.assert_array_equal(alone.token_ids, found.token_ids)
                np.testing.assert_allclose(np.linalg.norm(found.vectors, axis=1), 1, atol=1e-6)
                cosines = (found.vectors * wanted.vectors).sum(axis=1)
                assert cosines.min() > (1 - 1e-6 if dtype == "f32" else 0.98)


def test_masks_are_seen_only_where_the_checkpoint_says_so(tmp_path: Path) -> None:
    """What fills a query changes no other token's vector, or does."""
    changed = {}
    for attend in (False, True):
        made = []
        for length in (8, 12):
            name = f"{attend}-{length}"
            folder = make_late_checkpoint(tmp_path / name, attend=attend, settings={"query_length": length})
            with encast.load(encast.compile(folder, tmp_path / f"{name}.encast", dtype="f32"), threads=1) as engine:
                made.append(engine.embed_tokens(["the cat"], kind="query")[0].vectors)
        changed[attend] = [not np.array_equal(a, b) for a, b in zip(*made, strict=False)]
    assert changed[False] == [False] * 8
    assert all(changed[True])


def test_a_checkpoint_says_its_task(tmp_path: Path) -> None:
    folder = make_late_checkpoint(tmp_path / "late")
    with pytest.raises(UnsupportedModelError, match="embeddings of tokens; ask for 'embed_tokens', not 'embed'"):
        encast.compile(folder, tmp_path / "out.encast", task="embed")
    stanford = make_late_checkpoint(tmp_path / "stanford", layout="stanford")
    with encast.load(encast.compile(stanford, tmp_path / "features.encast", task="features"), threads=1) as engine:
        assert engine.task == "features"
    wide = make_late_checkpoint(tmp_path / "local", "modernbert", config={"local_attention": 16})
    with pytest.raises(UnsupportedModelError, match=r"as many as 9 masks that no token sees.*attention is 8"):
        encast.compile(wide, tmp_path / "out.encast")
    deberta = make_late_checkpoint(tmp_path / "deberta", "deberta-v2")
    with pytest.raises(UnsupportedModelError, match=r"vectors of distances \(DeBERTa, relative_key\) cannot hide"):
        encast.compile(deberta, tmp_path / "out.encast")
    assert not (tmp_path / "out.encast").exists()


def test_the_command_line_writes_them(tmp_path: Path) -> None:
    folder = make_late_checkpoint(tmp_path / "late", settings={"prompts": {"query": "the "}})
    path = encast.compile(folder, tmp_path / "model.encast", dtype="int8")
    texts, out = tmp_path / "texts.txt", tmp_path / "out.jsonl"
    texts.write_text("the cat\na b, c\n")
    with encast.load(path, threads=1) as engine:
        for kind, more in (("document", []), ("query", ["--kind", "query", "--prompt-name", "query"])):
            prompt = "query" if more else None
            wanted = engine.embed_tokens(["the cat", "a b, c"], kind=kind, prompt_name=prompt)
            assert main(["run", str(path), str(texts), "-o", str(out), *more]) == 0
            assert main(["run", str(path), str(texts), "-o", str(tmp_path / "out.parquet"), *more]) == 0
            rows = [json.loads(line) for line in out.read_text().splitlines()]
            columns = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pydict()
            for index, one in enumerate(wanted):
                assert rows[index]["token_ids"] == columns["token_ids"][index] == one.token_ids.tolist()
                np.testing.assert_array_equal(np.float32(rows[index]["vectors"]), one.vectors)
                np.testing.assert_array_equal(np.float32(columns["vectors"][index]), one.vectors)
    assert main(["run", str(path), str(texts), "-o", str(out), "--kind", "passage"]) == 2


def test_hidden_states_go_into_parquet_too(tmp_path: Path) -> None:
    folder = make_late_checkpoint(tmp_path / "late")
    path = encast.compile(folder, tmp_path / "model.encast", dtype="f32", task="features")
    texts, out = tmp_path / "texts.txt", tmp_path / "out.parquet"
    texts.write_text("the cat\n")
    assert main(["run", str(path), str(texts), "-o", str(out)]) == 0
    (states,) = pyarrow.parquet.read_table(out).to_pydict()["last_hidden_state"]
    with encast.load(path, threads=1) as engine:
        (ids,) = (encoding.ids for encoding in engine.session.tokenizer.encode(["the cat"]))
        np.testing.assert_array_equal(np.float32(states), engine.forward([ids])[0])
