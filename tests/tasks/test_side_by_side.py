"""A runnable that computes several runs of one call at once: same batches, same answers, same errors, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fake_engine import HIDDEN, VOCAB, fake_engine

from encast.backends.base import SideBySide
from encast.batch import Batch
from encast.engine import Engine
from encast.errors import InputError, ResourceError

TEXTS = ["the cat sat", "a mat", "john smith lives in paris", "where is the cat", "new york", "who works for acme"]
LONG = ["the cat sat on the mat in new york " * 3, "a cat", "john smith works for acme corp in paris " * 2]


class Several(SideBySide):
    """``runnable`` on two threads; ``before(number)``: what a run does first, runs counted as they begin."""

    def __init__(self, runnable: Any, before: Callable[[int], object] = lambda _: None, at_once: int = 4) -> None:
        self.runnable, self.before, self.at_once = runnable, before, at_once
        self.pool = ThreadPoolExecutor(2)
        self.given: list[list[int]] = []
        self.futures: list[Future[Any]] = []

    def begin(self, output: str, batch: Batch, select: Any = None) -> Future[Any]:
        number = len(self.given)
        self.given.append(batch.token_ids.tolist())

        def run() -> Any:
            self.before(number)
            return self.runnable.run(output, batch, select)

        self.futures.append(self.pool.submit(run))
        return self.futures[-1]

    def run(self, output: str, batch: Batch, select: Any = None) -> Any:
        return self.begin(output, batch, select).result()

    def close(self) -> None:
        self.pool.shutdown()


def _rule(ids: Any) -> Any:
    return np.sin(ids.sum() + np.arange(HIDDEN))


def _rows(ids: Any) -> Any:
    return np.sin(ids[:, None] + np.arange(HIDDEN))


CALLS: dict[str, tuple[str, Callable[[Engine], Any]]] = {
    "embed": ("embed", lambda engine: engine.embed(TEXTS)),
    "windows": ("embed", lambda engine: engine.embed(LONG, on_long="windows")),
    "forward": ("embed", lambda engine: engine.forward([[5, 6, 7], [8] * 9, [9, 10], [11] * 5, [12] * 7])),
    "classify": ("classify", lambda engine: engine.classify(TEXTS)),
    "tag": ("tag", lambda engine: engine.tag(TEXTS)),
    "tag windows": ("tag", lambda engine: engine.tag(LONG, on_long="windows")),
    "answer": ("answer", lambda engine: engine.answer(TEXTS, LONG * 2)),
    "fill_mask": ("fill_mask", lambda engine: engine.fill_mask([f"{text} [MASK]" for text in TEXTS])),
}


@pytest.mark.parametrize("name", CALLS)
def test_batches_and_answers_are_those_of_runs_one_after_the_other(name: str) -> None:
    """Though of two runs the later one ends first."""
    task, call = CALLS[name]
    engine = fake_engine(task, _rows if task in ("tag", "answer", "fill_mask") else _rule, batch_tokens=11)
    wanted = call(engine)
    batches = [batch.token_ids.tolist() for batch in engine.runnable.batches]  # type: ignore[attr-defined]
    assert len(batches) > 2
    second = threading.Event()

    def before(number: int) -> None:
        assert number or second.wait(10)
        if number == 1:
            second.set()

    several = Several(engine.runnable, before)
    found = call(Engine(engine.session, several))
    several.close()
    assert several.given == batches
    assert repr(found) == repr(wanted)


def test_so_many_runs_have_begun_at_once_and_no_more() -> None:
    engine = fake_engine("embed", batch_tokens=1)
    most: list[int] = []

    def before(number: int) -> None:
        most.append(len(several.given) - sum(future.done() for future in several.futures))

    several = Several(engine.runnable, before, at_once=3)
    Engine(engine.session, several).embed(TEXTS * 3)
    several.close()
    assert len(several.given) == 18
    assert 2 <= max(most) <= 3


@pytest.mark.parametrize("error", [ResourceError("cuda:1: the card failed"), MemoryError("none is left")])
def test_when_one_of_several_runs_fails_nothing_runs_on(error: Exception) -> None:
    engine, begun, go_on = fake_engine("embed", batch_tokens=1), threading.Event(), threading.Event()

    def before(number: int) -> None:
        if number == 0:
            assert begun.wait(30)
            threading.Timer(0.1, go_on.set).start()
            raise error
        begun.set()
        assert go_on.wait(30)

    several = Several(engine.runnable, before)
    with pytest.raises(type(error), match=str(error)):
        Engine(engine.session, several).embed(TEXTS)
    assert all(future.done() for future in several.futures), "whoever is told of the error may close the engine"
    assert several.futures[1].exception() is None, "what had begun has ended"
    assert several.futures[3].cancelled(), "what waited for a thread does not begin"
    assert len(several.given) == 4
    several.close()


def test_of_several_errors_the_first_in_the_order_of_the_texts_is_told() -> None:
    """Whichever run is refused first, and also before that of a text that was tokenised ahead of it."""
    engine = fake_engine("embed", vocab=VOCAB["paris"], batch_tokens=1)
    second = threading.Event()

    def before(number: int) -> None:
        assert number != 1 or second.wait(10)
        if number == 2:
            second.set()

    texts = ["the cat", "in paris", "for acme"]
    several = Several(engine.runnable, before)
    with pytest.raises(InputError, match=r"texts\[1\] has the token 'paris'"):
        Engine(engine.session, several).embed(texts)
    engine = fake_engine("embed", vocab=VOCAB["paris"])
    several, long = Several(engine.runnable), "cat " * 50
    with pytest.raises(InputError, match=r"texts\[4095\] has the token 'paris'"):
        Engine(engine.session, several).embed(["cat"] * 4095 + ["paris", long], on_long="error")
    with pytest.raises(InputError, match=r"texts\[4096\] is longer than 32 tokens"):
        Engine(engine.session, several).embed(["cat"] * 4096 + [long], on_long="error")
    several.close()
