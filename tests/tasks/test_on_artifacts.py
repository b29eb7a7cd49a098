"""Every head of every architecture, from texts to answers, on compiled artifacts and the native backend."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import ARCHS, HEADS, make_checkpoint

import encast
import encast.artifact
from encast.engine import Engine, session_of
from encast.errors import InputError
from encast.tasks import drive, embed, embed_ids

TEXTS = ["abc de", "", "a", "the cat sat on the mat " * 20, "\u00e9\u4e2d\U0001f600 x\0y", "b c d e f g"]


@functools.cache
def _compiled(base: Path, arch: str, head: str) -> Path:
    options: dict[str, Any] = {"pooling": ("mean",), "normalize": True} if head == "embed" else {}
    if head == "classify":
        options["labels"] = 1
    folder = make_checkpoint(base / "tasks" / f"{arch}-{head}", arch, head, layers=2, hidden=32, heads=2, **options)
    return encast.compile(folder, folder.with_suffix(".encast"), dtype="f32", task=head)


def _ask(engine: Engine, texts: list[str]) -> list[Any]:
    """One comparable answer a text, whatever the head."""
    if engine.task == "features":
        ids = [encoding.ids for encoding in engine.session.tokenizer.encode(texts)]
        return [state.tobytes() for state in engine.forward(ids)]
    if engine.task == "embed":
        return [vector.tobytes() for vector in engine.embed(texts)]
    if engine.task == "embed_sparse":
        return [[one.indices.tolist(), one.values.tolist()] for one in engine.embed_sparse(texts)]
    if engine.task == "classify":
        return engine.classify([(text, "abc") for text in texts])
    if engine.task == "answer":
        return engine.answer(texts, [text * 3 for text in texts], stride=2)  # type: ignore[return-value]
    if engine.task == "tag":
        return engine.tag(texts)
    return engine.fill_mask([f"{engine.session.tokenizer.mask_token} {text}" for text in texts], top_k=3)


@pytest.mark.parametrize(("arch", "head"), list(itertools.product(ARCHS, HEADS)))
def test_answers_do_not_depend_on_neighbours_order_or_runs(
    arch: str, head: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = _compiled(tmp_path_factory.getbasetemp(), arch, head)
    with encast.load(path, threads=1) as one, encast.load(path, threads=2, batch_tokens=7, pin=False) as other:
        together = _ask(one, TEXTS)
        assert len(together) == len(TEXTS)
        assert together == [_ask(one, [text])[0] for text in TEXTS]
        assert together == _ask(other, TEXTS[::-1])[::-1]


@pytest.mark.parametrize("head", HEADS)
def test_answers_agree_with_the_reference(head: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = _compiled(tmp_path_factory.getbasetemp(), "bert", head)
    with encast.load(path) as native, encast.load(path, device="reference") as reference:
        a, b = _ask(native, TEXTS[:3]), _ask(reference, TEXTS[:3])
    if head in ("features", "embed"):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(np.frombuffer(x, np.float32), np.frombuffer(y, np.float32), atol=2e-5)
        return
    numbers = [[value for value in _flat(answers) if isinstance(value, float)] for answers in (a, b)]
    others = [[value for value in _flat(answers) if not isinstance(value, float)] for answers in (a, b)]
    assert others[0] == others[1]
    assert numbers[0] == pytest.approx(numbers[1], abs=2e-4)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_text_and_its_ids_have_the_same_embedding(arch: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with encast.load(_compiled(tmp_path_factory.getbasetemp(), arch, "embed")) as engine:
        ids = [encoding.ids for encoding in engine.session.tokenizer.encode(TEXTS)]
        assert engine.drive(embed_ids(engine.session, ids)).tobytes() == engine.embed(TEXTS).tobytes()


def test_a_session_without_a_model_serves_runs_of_another_engine(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = _compiled(tmp_path_factory.getbasetemp(), "bert", "embed")
    session = session_of(encast.artifact.open(path), batch_tokens=16)
    assert session.batch_tokens == 16
    with encast.load(path) as engine:
        assert engine.session.batch_tokens == 8192
        assert session.dim == engine.dim
        assert drive(session, engine.runnable, embed(session, TEXTS)).tobytes() == engine.embed(TEXTS).tobytes()


def _flat(value: Any) -> list[Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for part in value for leaf in _flat(part)] if isinstance(value, list) else [value]


def test_the_card_decides_where_texts_are_cut(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = _compiled(tmp_path_factory.getbasetemp(), "bert", "embed")
    with encast.load(path) as engine:
        assert engine.max_length <= engine.meta.max_len
        ids = engine.session.tokenizer.encode(["a " * 1000])[0].ids
        assert len(ids) == engine.max_length
        with pytest.raises(InputError, match="longer than"):
            engine.embed(["a " * 1000], on_long="error")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "'cpu', 'cuda', 'torch-cpu', 'reference'"),
        ({"threads": 0}, "threads"),
        ({"threads": 1.5}, "threads"),
        ({"instances": 0}, "instances"),
        ({"batch_tokens": 0}, "batch_tokens"),
    ],
)
def test_load_refuses(options: Any, message: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(InputError, match=message):
        encast.load(_compiled(tmp_path_factory.getbasetemp(), "bert", "embed"), **options)
