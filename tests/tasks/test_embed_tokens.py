"""Embeddings of tokens: markers, lengths, skipped tokens, and what one text's vectors depend on."""

from __future__ import annotations

import importlib
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
from encast import artifact as artifacts
from encast.artifact import artifact_sha
from encast.batch import Batch
from encast.cli.main import main
from encast.engine import Engine
from encast.errors import InputError, UnsupportedModelError
from encast.ir.meta import TokenForm
from encast.serve.canary import canary_run
from encast.tasks import max_sim
from encast.tasks.embed_tokens import KINDS, token_rows
from encast.tasks.rerank import rerank
from encast.tasks.session import drive

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
    assert max_sim(query, document[:0]) == -2.0
    assert max_sim(query[:0], document) == 0.0
    assert max_sim([[1, 0]], [[0.5, 0.25]]) == 0.5  # type: ignore[arg-type]
    for wrong in (document[0], np.float32([[1, 2, 3]])):
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


def test_max_sim_of_many_tokens_is_that_of_few() -> None:
    query, document = np.random.RandomState(0).randn(2, 5, 3000, 24).astype(np.float32)[:, 0]
    best = (query[:7].astype(np.float64) @ document.astype(np.float64).T).max(axis=1)
    np.testing.assert_allclose(max_sim(query[:7], document), best.sum(), rtol=1e-12)


def test_rerank_puts_a_document_without_vectors_last() -> None:
    engine = fake_engine("embed_tokens", lambda ids: -np.eye(8)[ids % 8])
    form = replace(FORM, document_marker=None, skip=tuple(sorted({VOCAB[one] for one in ("[CLS]", "[SEP]", ".")})))
    engine = Engine(replace(engine.session, token_form=form), engine.runnable)
    ranking = engine.rerank("the cat", [". .", "the cat", "mat"])
    assert ranking[-1] == (0, -7.0)
    assert [index for index, _ in ranking[:2]] in ([1, 2], [2, 1])


def test_rerank_scores_little_at_a_time_and_no_pair_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runs = ids_as_vectors(), []
    model = engine.runnable.run

    def run(output: str, batch: Batch, select: Any = None) -> Any:
        runs.append(batch.seqs)
        return model(output, batch, select)

    monkeypatch.setattr(engine.runnable, "run", run)
    ranking = engine.rerank("the cat", ["mat"] * 6)
    # The query has 7 vectors of 4 numbers, each document 4.
    monkeypatch.setattr(importlib.import_module("encast.tasks.embed_tokens"), "_STEP_PRODUCTS", 7 * 4 * 4 * 2)
    assert engine.rerank("the cat", ["mat"] * 6) == ranking
    assert runs == [1, 6, 1, 2, 2, 2]
    drive(engine.session, engine.runnable, rerank(engine.session, "the cat", ["mat"], most_products=7 * 4 * 4))
    with pytest.raises(InputError, match=r"documents\[1\] has 5 tokens and the query 7, of 4 numbers; .*: shorten one"):
        drive(
            engine.session,
            engine.runnable,
            rerank(engine.session, "the cat", ["mat", "the mat"], most_products=7 * 4 * 4),
        )


def test_a_long_text_of_a_reranking_is_named_by_its_place() -> None:
    """As for embeddings: the query is text 0."""
    engine, long = ids_as_vectors(), "the cat sat on the mat , john"
    with pytest.raises(InputError, match=r"texts\[0\] is longer than 7"):
        engine.rerank(long, ["a"], on_long="error")
    with pytest.raises(InputError, match=r"texts\[2\] is longer than 9"):
        engine.rerank("a", ["a", long], on_long="error")


def test_the_marker_may_take_a_placeholder_s_place() -> None:
    engine = ids_as_vectors(replace(FORM, placeholder=". "))
    assert read(engine, "the cat") == ["[CLS]", "what", "the", "cat", "[SEP]"]
    assert read(engine, "the cat", kind="query") == ["[CLS]", "who", "the", "cat", "[SEP]", "[MASK]", "[MASK]"]
    assert read(engine, "the cat sat on the mat , john", kind="query")[2:] == ["the", "cat", "sat", "on", "[SEP]"]


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


def test_ranges_are_of_what_the_engine_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibration and the canary of a server see the ids that queries and documents have."""
    folder = make_late_checkpoint(tmp_path / "model")
    read: list[tuple[int, ...]] = []

    def note(batches: Any) -> None:
        for batch in batches:
            ends = batch.cu_seqlens[1:-1]
            read.extend(tuple(row.tolist()) for row in np.split(batch.token_ids, ends))

    monkeypatch.setattr(
        importlib.import_module("encast.calibrate"), "_observe", lambda graph, batches, progress: note(batches) or {}
    )
    encast.calibrate(folder, ["the cat, a", "b"])
    with encast.load(encast.compile(folder, tmp_path / "model.encast"), threads=1) as engine:
        run = canary_run(engine.session)
        form = engine.session.token_form
        assert form is not None
        texts = ["the cat, a", "b"]
        rows = {tuple(row) for kind in KINDS for row in token_rows(engine.session.tokenizer, form, kind, texts)}
    assert set(read) == rows
    assert len(read) == 4
    read.clear()
    note([run.piece.batch])
    firsts = [row[1] for row in read]
    assert firsts == [form.query_marker] * 4 + [form.document_marker] * 4
    assert form.expansion in run.piece.batch.token_ids


def test_the_hash_of_an_artifact_covers_what_its_card_says_of_texts(tmp_path: Path) -> None:
    """A server that reloads, and keeps answers of the reference, knows artifacts by it."""
    made = {}
    for name, settings in (
        ("one", {}),
        ("same", {}),
        ("longer", {"query_length": 13}),
        ("unskipped", {"skiplist_words": []}),
    ):
        folder = make_late_checkpoint(tmp_path / name, settings=settings)
        made[name] = artifact_sha(artifacts.open(encast.compile(folder, tmp_path / f"{name}.encast")))
    assert made["one"] == made["same"]
    assert len(set(made.values())) == 3
    artifacts.update_card(tmp_path / "one.encast", accuracy={"f1": 0.5})
    assert artifact_sha(artifacts.open(tmp_path / "one.encast")) == made["one"]
