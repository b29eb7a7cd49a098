"""Windows of long texts: against windows that are cut here, run alone and put together in NumPy."""

from __future__ import annotations

import functools
import json
import math
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from fake_engine import VOCAB, fake_engine
from m3_checkpoints import make_m3_checkpoint
from tokenizers import Tokenizer as Backend

import encast
import encast.artifact
from encast.batch import Batch
from encast.engine import Engine
from encast.errors import InputError
from encast.jobs.answers import need_options
from encast.tasks import SparseVector, embed_ids
from encast.tasks.embed_sparse import embed_sparse_ids
from encast.tasks.table import RunOptions

LONG = "the cat sat on a mat and b c d e f g ab ba cab " * 5
TEXTS = ["a b c", LONG, "", "b " * 90, "d e f g " * 30]


@functools.cache
def _artifact(base: Path, arch: str, head: str, **options: Any) -> Path:
    name = "-".join([arch, head, *(f"{key}={value}" for key, value in sorted(options.items()))])
    if head == "embed":
        options |= {"pooling": ("mean",)}
    folder = make_checkpoint(base / "windows" / name, arch, head, layers=2, hidden=32, heads=2, **options)
    if head == "embed":
        settings = {"prompts": {"query": "ask a: "}, "default_prompt_name": None}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return encast.compile(folder, folder.with_suffix(".encast"), dtype="f32", task=head)


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


def _backend(path: Path) -> Backend:
    backend = Backend.from_str(encast.artifact.open(path).tokenizer_json)
    backend.no_padding()
    backend.no_truncation()
    return backend


def _tokens(backend: Backend, text: str) -> list[int]:
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids


def _windows(
    path: Path, text: str, most: int, stride: int, before: str = ""
) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Ids of every window, and which tokens of the text are in it. ``before`` is in each."""
    backend = _backend(path)
    fixed = _tokens(backend, before.rstrip())  # byte-level BPE has the space in the token after it
    text_ids = _tokens(backend, before + text)[len(fixed) :]
    left, right = backend.encode("a").ids[:1], backend.encode("a").ids[-1:]
    room = most - 2 - len(fixed)
    spans = []
    begin = 0
    while True:
        end = min(len(text_ids), begin + room)
        spans.append((begin, end))
        if end == len(text_ids):
            return [left + fixed + text_ids[a:b] + right for a, b in spans], spans
        begin = end - stride


def _mean(rows: list[Any], spans: list[tuple[int, int]]) -> Any:
    weights = np.array([end - begin for begin, end in spans], np.float64)
    return (np.stack(rows).astype(np.float64) * weights[:, None]).sum(axis=0) / weights.sum()


def _softmax(logits: Any) -> Any:
    powers = np.exp(logits.astype(np.float64) - logits.max())
    return powers / powers.sum()


# Embeddings


@pytest.mark.parametrize(("arch", "normalize"), [("bert", True), ("bert", False), ("roberta", True)])
@pytest.mark.parametrize("stride", [None, 0, 7, "most"])
@pytest.mark.parametrize("prompt", ["", "query"])
@pytest.mark.parametrize("pooling", [None, "mean", "max"])
def test_embeddings(arch: str, normalize: bool, stride: Any, prompt: str, pooling: Any, base: Path) -> None:
    path = _artifact(base, arch, "embed", normalize=normalize)
    with encast.load(path, threads=1) as engine:
        before = "ask a: " if prompt else ""
        most = engine.max_length
        room = most - 2 - len(_tokens(_backend(path), before.rstrip()))
        shared = {None: room // 2, "most": room - 1}.get(stride, stride)
        ids, spans = _windows(path, LONG, most, shared, before)
        assert len(ids) > 2
        alone = [engine.drive(embed_ids(engine.session, [one]))[0] for one in ids]
        expected = np.stack(alone).max(axis=0) if pooling == "max" else _mean(alone, spans)
        if normalize:
            expected = expected / np.linalg.norm(expected)
        options: dict[str, Any] = {"on_long": "windows", "prompt_name": prompt, "pooling": pooling}
        found = engine.embed([LONG], stride=shared if stride == "most" else stride, **options)
        np.testing.assert_allclose(found[0], expected, rtol=1e-6, atol=1e-7)


def test_the_first_numbers_of_pooled_embeddings(base: Path) -> None:
    with encast.load(_artifact(base, "bert", "embed", normalize=True), threads=1) as engine:
        whole = engine.embed([LONG], on_long="windows")
        short = engine.embed([LONG], on_long="windows", truncate_dim=5)
        np.testing.assert_allclose(short, whole[:, :5] / np.linalg.norm(whole[:, :5]), rtol=1e-6)


def test_a_token_that_is_half_prompt_is_in_the_first_window_alone() -> None:
    """ "cat" and "s" are one word, whose tokens end beyond the prompt "the ca"."""
    engine = fake_engine("embed", max_length=6)
    object.__setattr__(engine.session, "prompts", {"p": "the ca"})
    engine.embed(["t mat sat on"], on_long="windows", stride=0, prompt_name="p")
    batch = engine.runnable.batches[0]  # type: ignore[attr-defined]
    rows = np.split(batch.token_ids, batch.cu_seqlens[1:-1])
    the, cat, mat, sat, on = (VOCAB[word] for word in ("the", "cat", "mat", "sat", "on"))
    assert [row[1:-1].tolist() for row in rows] == [[the, cat, mat, sat], [the, on]]


def test_a_prompt_that_ends_with_a_word_is_whole_in_every_window() -> None:
    engine = fake_engine("embed", max_length=6)
    object.__setattr__(engine.session, "prompts", {"p": "the cat"})
    engine.embed([" sat on mat"], on_long="windows", stride=0, prompt_name="p")
    batch = engine.runnable.batches[0]  # type: ignore[attr-defined]
    rows = np.split(batch.token_ids, batch.cu_seqlens[1:-1])
    the, cat, sat, on, mat = (VOCAB[word] for word in ("the", "cat", "sat", "on", "mat"))
    assert [row[1:-1].tolist() for row in rows] == [[the, cat, sat, on], [the, cat, mat]]


# Classes and scores


@pytest.mark.parametrize("kind", ["single_label", "multi_label", "regression"])
@pytest.mark.parametrize("pooling", [None, "mean", "max"])
def test_classes(kind: str, pooling: Any, base: Path) -> None:
    names = {"single_label": "single_label_classification", "multi_label": "multi_label_classification"}
    path = _artifact(base, "bert", "classify", problem_type=names.get(kind, kind), labels=3)
    with encast.load(path, threads=1) as engine:
        ids, spans = _windows(path, LONG, engine.max_length, 9)
        rows = [engine.runnable.run("logits", Batch.of([one]))[0] for one in ids]
        if kind == "single_label":
            scores = [_softmax(row) for row in rows]
        else:
            scores = rows if kind == "regression" else [1 / (1 + np.exp(-row.astype(np.float64))) for row in rows]
        expected = np.max(np.stack(scores), axis=0) if pooling == "max" else _mean(scores, spans)
        (found,) = engine.classify([LONG], on_long="windows", stride=9, pooling=pooling)
        assert list(found.scores.values()) == pytest.approx(expected.tolist(), rel=1e-12)
        best = 0 if kind == "regression" else int(expected.argmax())
        assert found.score == pytest.approx(expected[best], rel=1e-12)
        assert found.label == (None if kind == "regression" else list(found.scores)[best])


def _pairs(path: Path, first: str, second: str, most: int, stride: int) -> Iterator[tuple[Any, Any, int]]:
    """The logits' input of every window of a pair, and how much of the second text it has."""
    backend = _backend(path)
    one, two = _tokens(backend, first), _tokens(backend, second)
    cls, sep = backend.encode("").ids
    room = most - 3 - len(one)
    begin, end = 0, 0
    while end < len(two):
        end = min(begin + room, len(two))
        ids = [cls, *one, sep, *two[begin:end], sep]
        yield ids, [0] * (len(one) + 2) + [1] * (end - begin + 1), end - begin
        begin = end - stride


def test_pairs_have_windows_of_their_second_text(base: Path) -> None:
    path = _artifact(base, "bert", "classify", problem_type="single_label_classification", labels=3)
    with encast.load(path, threads=1) as engine:
        made = list(_pairs(path, "the cat", LONG, engine.max_length, 5))
        scores = [_softmax(engine.runnable.run("logits", Batch.of([ids], [types]))[0]) for ids, types, _ in made]
        expected = _mean(scores, [(0, count) for _, _, count in made])
        found = engine.classify([("the cat", "b"), ("the cat", LONG), LONG], on_long="windows", stride=5)
        assert list(found[1].scores.values()) == pytest.approx(expected.tolist(), rel=1e-12)
        assert found[0] == engine.classify([("the cat", "b")])[0]
        assert found[2] == engine.classify([LONG], on_long="windows", stride=5)[0]


@pytest.mark.parametrize("pooling", [None, "max", "mean"])
def test_documents_have_the_score_of_their_best_window(pooling: Any, base: Path) -> None:
    path = _artifact(base, "bert", "classify", labels=1)
    documents = ["a b", LONG, "f e d " * 40]
    with encast.load(path, threads=1) as engine:
        expected = []
        for document in documents:
            made = list(_pairs(path, "the cat", document, engine.max_length, 6))
            logits = [engine.runnable.run("logits", Batch.of([ids], [types]))[0] for ids, types, _ in made]
            mean = _mean(logits, [(0, count) for _, _, count in made])
            expected.append(float(mean[0] if pooling == "mean" else np.max(logits)))
        found = engine.rerank("the cat", documents, on_long="windows", stride=6, pooling=pooling)
        order = np.argsort([-score for score in expected], kind="stable").tolist()
        assert [index for index, _ in found] == order
        assert [score for _, score in found] == pytest.approx([expected[at] for at in order], rel=1e-6)


def test_reranking_by_embeddings_compares_pooled_ones(base: Path) -> None:
    with encast.load(_artifact(base, "bert", "embed", normalize=True), threads=1) as engine:
        query, *rows = engine.embed([LONG, *TEXTS], on_long="windows", stride=3, pooling="max")
        found = engine.rerank(LONG, TEXTS, on_long="windows", stride=3, pooling="max")
        assert dict(found) == pytest.approx({index: float(query @ row) for index, row in enumerate(rows)}, rel=1e-5)


# Sparse embeddings


def _largest(vectors: list[SparseVector]) -> dict[int, float]:
    found: dict[int, float] = {}
    for vector in vectors:
        for index, value in zip(vector.indices.tolist(), vector.values.tolist(), strict=True):
            found[index] = max(value, found.get(index, 0.0))
    return dict(sorted(found.items()))


@pytest.mark.parametrize("model", ["splade", "m3"])
@pytest.mark.parametrize("most", [None, 4])
def test_sparse_weights_are_the_largest_of_all_windows(model: str, most: int | None, base: Path) -> None:
    path = _m3(base) if model == "m3" else _artifact(base, "bert", "embed_sparse", splade="relu")
    with encast.load(path, threads=1) as engine:
        ids, _ = _windows(path, LONG, engine.max_length, 4)
        assert len(ids) > 2
        alone = [engine.drive(embed_sparse_ids(engine.session, [one]))[0] for one in ids]
        expected = _largest(alone)
        if most is not None:
            kept = sorted(expected, key=lambda token: (-expected[token], token))[:most]
            expected = {token: expected[token] for token in sorted(kept)}
        (found,) = engine.embed_sparse([LONG], on_long="windows", stride=4, max_active_dims=most)
        assert dict(zip(found.indices.tolist(), found.values.tolist(), strict=True)) == expected


@functools.cache
def _m3(base: Path) -> Path:
    folder = base / "windows-m3"
    make_m3_checkpoint(folder)
    return encast.compile(folder, base / "windows-m3.encast", dtype="f32", task="embed_sparse")


# Tags


def _labels_by_hand(engine: Engine, path: Path, text: str, stride: int) -> list[tuple[str, float]]:
    ids, spans = _windows(path, text, engine.max_length, stride)
    rows = [engine.runnable.run("logits", Batch.of([one]))[1:-1] for one in ids]
    labels = list(engine.meta.labels or ())
    found = []
    for token in range(spans[-1][1]):
        nearest = [min(token - begin, end - 1 - token) if begin <= token < end else -1 for begin, end in spans]
        at = nearest.index(max(nearest))
        scores = _softmax(rows[at][token - spans[at][0]])
        found.append((labels[int(scores.argmax())], float(scores.max())))
    return found


@pytest.mark.parametrize("stride", [0, 1, 11, 40])
def test_tokens_have_the_label_of_the_window_with_most_context(stride: int, base: Path) -> None:
    path = _artifact(base, "bert", "tag", labels=5)
    with encast.load(path, threads=1) as engine:
        (found,) = engine.tag([LONG], on_long="windows", stride=stride)
        expected = _labels_by_hand(engine, path, LONG, stride)
        assert [token.label for token in found.tokens] == [label for label, _ in expected]
        assert [token.score for token in found.tokens] == pytest.approx([score for _, score in expected], rel=1e-12)
        offsets = _backend(path).encode(LONG, add_special_tokens=False).offsets
        assert [(token.start, token.end) for token in found.tokens] == offsets
        for entity in found.entities:
            assert LONG[entity.start : entity.end] == entity.text


def test_entities_go_on_from_window_to_window() -> None:
    labels = ["O", "B-PER", "I-PER"]
    by_id = {VOCAB["john"]: 1, VOCAB["smith"]: 2}
    engine = fake_engine(
        "tag", lambda ids: np.eye(3)[[by_id.get(int(at), 0) for at in ids]] * 4, labels=labels, max_length=6
    )
    text = "the cat sat John Smith smith sat on mat John"
    (found,) = engine.tag([text], on_long="windows", stride=0)
    assert [(entity.text, entity.start) for entity in found.entities] == [("John Smith smith", 12), ("John", 40)]


# What holds for all of them


def _ask(engine: Engine, texts: list[str], **options: Any) -> list[Any]:
    if engine.task == "embed":
        return [vector.tobytes() for vector in engine.embed(texts, **options)]
    if engine.task == "embed_sparse":
        return [(one.indices.tolist(), one.values.tolist()) for one in engine.embed_sparse(texts, **options)]
    if engine.task == "classify":
        pairs = [("a b", text) for text in texts]
        return [*engine.classify(texts, **options), *engine.classify(pairs, **options)]
    return [*engine.tag(texts, **options)]


HEADS = {"embed": {"normalize": True}, "embed_sparse": {"splade": "relu"}, "classify": {"labels": 3}, "tag": {}}


@pytest.mark.parametrize("head", HEADS)
def test_a_text_that_fits_has_the_same_bits(head: str, base: Path) -> None:
    with encast.load(_artifact(base, "bert", head, **HEADS[head]), threads=1) as engine:
        room = engine.max_length - 2 - 3 * (head == "classify")  # pairs have two more tokens and a separator
        exact = "b " * room
        texts = ["", "a", "the cat", exact]
        (read,) = engine.session.tokenizer.encode([("a b", exact) if head == "classify" else exact])
        assert len(read) == engine.max_length
        assert not read.overflowing
        assert _ask(engine, texts, on_long="windows") == _ask(engine, texts)
        more = [exact + "c"]
        assert _ask(engine, more, on_long="windows")[-1] != _ask(engine, more)[-1]
        assert _ask(engine, more, on_long="windows")[-1] != _ask(engine, [exact])[-1]


@pytest.mark.parametrize("head", HEADS)
def test_answers_do_not_depend_on_neighbours_order_or_runs(head: str, base: Path) -> None:
    path = _artifact(base, "bert", head, **HEADS[head])
    options = {"on_long": "windows", "stride": 5}
    with encast.load(path, threads=1) as one, encast.load(path, threads=2, batch_tokens=7, pin=False) as other:
        texts = [*TEXTS, "g f e " * 50]
        together = _ask(one, texts, **options)
        half = len(together) // len(texts)
        alone = [_ask(one, [text], **options) for text in texts]
        assert together == [part[at] for at in range(half) for part in alone]
        backwards = _ask(other, texts[::-1], **options)
        assert together == [backwards[at] for part in range(half) for at in _reversed(part, len(texts))]


def _reversed(part: int, size: int) -> range:
    return range((part + 1) * size - 1, part * size - 1, -1)


def test_windows_run_in_pieces_and_are_made_as_they_are_needed() -> None:
    engine = fake_engine("embed", max_length=32, batch_tokens=256)
    pieces = engine.session.windows(["cat " * 40_000, "mat"], stride=29)
    tracemalloc.start()
    try:
        sizes = [(piece.batch.tokens, piece.batch.seqs) for piece in pieces]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(tokens for tokens, _ in sizes) <= 256
    assert sum(count for _, count in sizes) == 40_000 - 30 + 1 + 1
    # The ids of all windows are 1,200,000 numbers, of which a list takes 8 bytes each.
    assert peak < 8_000_000


def test_a_refused_token_is_named_with_its_text() -> None:
    engine = fake_engine("embed", vocab=VOCAB["paris"], max_length=8)
    with pytest.raises(InputError, match=r"texts\[2\] has the token 'paris'"):
        engine.embed(["cat " * 30, "the", "cat " * 30 + "paris"], on_long="windows")


# What is refused


@pytest.mark.parametrize("stride", [-1, 6, 10**6, 2.5, True, "2"])
def test_a_stride_that_fits_no_window_is_refused_whatever_the_texts_are(stride: Any) -> None:
    for task in ("embed", "classify", "tag", "embed_sparse"):
        engine = fake_engine(task, max_length=8)
        with pytest.raises(InputError, match=r"stride is .*; a window holds 6 tokens of the text, give 0 to 5"):
            getattr(engine, task)(["cat"], on_long="windows", stride=stride)


@pytest.mark.parametrize("on_long", ["truncate", "error"])
@pytest.mark.parametrize("option", [{"stride": 0}, {"pooling": "mean"}])
def test_options_of_windows_need_windows(on_long: Any, option: dict[str, Any]) -> None:
    asked = {"embed": "embed", "classify": "classify", "tag": "tag", "embed_sparse": "embed_sparse", "rerank": "embed"}
    for method, task in asked.items():
        if method in ("tag", "embed_sparse") and "pooling" in option:
            continue
        arguments = ("cat", ["cat"]) if method == "rerank" else (["cat"],)
        with pytest.raises(InputError, match=r"is for windows; ask for them with on_long='windows'"):
            getattr(fake_engine(task), method)(*arguments, on_long=on_long, **option)


@pytest.mark.parametrize("option", [{"stride": 0}, {"pooling": "mean"}])
def test_reranking_by_embeddings_of_tokens_has_no_options_of_windows(option: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="rerank by embeddings of tokens has no windows: leave it out"):
        fake_engine("embed_tokens").rerank("cat", ["cat"], **option)


def test_unknown_values_are_refused() -> None:
    engine = fake_engine("embed")
    with pytest.raises(InputError, match="'truncate', 'error' and 'windows' are known"):
        engine.embed(["cat"], on_long="window")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="pooling is 'min'; 'mean' and 'max' are known"):
        engine.embed(["cat"], on_long="windows", pooling="min")  # type: ignore[arg-type]


def test_tasks_without_windows_say_so() -> None:
    message = "on_long is 'windows', which embed, embed_sparse, classify, rerank .* and tag take"
    with pytest.raises(InputError, match=message):
        fake_engine("fill_mask").fill_mask(["[MASK]"], on_long="windows")
    for call in (lambda engine: engine.embed_tokens(["a"], on_long="windows"),
                 lambda engine: engine.rerank("a", ["a"], on_long="windows")):  # fmt: skip
        with pytest.raises(InputError, match=message):
            call(fake_engine("embed_tokens"))


def test_a_job_of_masks_refuses_windows_before_it_reads_a_row() -> None:
    session = fake_engine("fill_mask").session
    need_options(session, "fill_mask", RunOptions())
    for options in (RunOptions("windows"), RunOptions(stride=3), RunOptions(pooling="max")):
        with pytest.raises(InputError, match=r"on_long is 'windows'|fill_mask has no such option"):
            need_options(session, "fill_mask", options)


def test_a_prompt_or_a_first_text_that_leaves_no_room_is_refused() -> None:
    engine = fake_engine("embed", lambda ids: [len(ids), 0, 0, 0], max_length=8)
    object.__setattr__(engine.session, "prompts", {"p": "the cat sat on mat in ", "q": "the cat sat on mat "})
    with pytest.raises(InputError, match="are 8 tokens, which leaves no room for a text in the 8 that the model reads"):
        engine.embed(["cat"], on_long="windows", prompt_name="p")
    # One token a window is the least there is.
    assert engine.embed(["cat cat cat"], on_long="windows", prompt_name="q")[0, 0] == 8
    batch = engine.runnable.batches[-1]  # type: ignore[attr-defined]
    assert (batch.seqs, batch.tokens) == (3, 24)
    pairs = fake_engine("classify", lambda ids: [0.0, 1.0], max_length=8)
    pairs.classify([("the cat sat on", "cat cat")], on_long="windows")
    pairs.classify([("the cat sat on mat", "")], on_long="windows")
    with pytest.raises(InputError, match=r"stride is 3; a window holds 2 tokens of texts\[1\], give 0 to 1"):
        pairs.classify(["cat", ("the cat sat", "cat " * 9)], on_long="windows", stride=3)
    for second in ("cat", ""):
        with pytest.raises(InputError, match=r"texts\[1\]: its first text has [56] tokens.*leaves no room"):
            pairs.classify(["cat", ("the cat sat on mat" + " mat" * (not second), second)], on_long="windows")


def test_numbers_that_are_not_finite_stay_so() -> None:
    engine = fake_engine("classify", lambda ids: [math.nan if VOCAB["mat"] in ids else 1.0], max_length=8)
    for pooling in ("mean", "max"):
        (found,) = engine.classify(["cat " * 20 + "mat " + "cat " * 20], on_long="windows", pooling=pooling)  # type: ignore[arg-type]
        assert math.isnan(found.score)
