"""The shadow: a sample is compared with a reference, and no answer waits for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local import LocalRunner, artifact, engine

import encast.artifact as artifacts
from encast.errors import InputError
from encast.serve.metrics import Counts
from encast.serve.models import Timing
from encast.serve.shadow import ShadowRunner, compare, parse_shadow, shadowed
from encast.tasks.session import Run


class Runner(LocalRunner):
    """Says when it was closed."""

    closed = False

    async def close(self) -> None:
        self.closed = True


async def settled(shadow: ShadowRunner) -> None:
    while shadow._tasks:
        await asyncio.wait(shadow._tasks)


def set_up(base: Path, share: float, reference: str = "embed") -> tuple[Runner, Runner, Counts, ShadowRunner, Run]:
    main, other, counts = Runner(engine(base, "embed")), Runner(engine(base, reference)), Counts()
    shadow = ShadowRunner(main, other, share, counts, model="minilm", task="embed")
    run = Run("embedding", next(engine(base, "embed").session.stream(["a cat", "the dog barks"])))
    return main, other, counts, shadow, run


async def ask(runner: Any, run: Run) -> Any:
    return await runner.run(run, arrived=0.0, deadline=1e12, before=0, size=0, timing=Timing())


def test_a_share_of_the_runs_is_compared(tmp_path_factory: pytest.TempPathFactory) -> None:
    async def main() -> None:
        ours, reference, counts, shadow, run = set_up(tmp_path_factory.getbasetemp(), 0.25)
        alone = await ask(ours, run)
        for _ in range(12):
            assert (await ask(shadow, run)).tobytes() == alone.tobytes()
            await settled(shadow)
        assert len(reference.runs) == 3
        assert counts.counters["shadow_compared_total", ("minilm",)] == 3
        buckets = counts.histograms["shadow_drift", ("minilm", "cosine_distance")]
        assert buckets[0] == 6, "the same artifact drifts by nothing: two texts of three runs"

    asyncio.run(main())


def test_another_model_drifts(tmp_path_factory: pytest.TempPathFactory) -> None:
    async def main() -> None:
        _, _, counts, shadow, run = set_up(tmp_path_factory.getbasetemp(), 1.0, "other-embed")
        await ask(shadow, run)
        await settled(shadow)
        buckets = counts.histograms["shadow_drift", ("minilm", "cosine_distance")]
        assert buckets[-1] > 0.1
        assert buckets[0] == 0

    asyncio.run(main())


def test_answers_do_not_wait_and_what_is_too_much_is_dropped(tmp_path_factory: pytest.TempPathFactory) -> None:
    async def main() -> None:
        _, reference, counts, shadow, run = set_up(tmp_path_factory.getbasetemp(), 1.0)
        reference.go.clear()
        for _ in range(20):
            await asyncio.wait_for(ask(shadow, run), 30)
        assert counts.counters == {("shadow_dropped_total", ("minilm",)): 12}
        reference.go.set()
        await settled(shadow)
        assert counts.counters["shadow_compared_total", ("minilm",)] == 8

    asyncio.run(main())


def test_a_reference_that_fails_is_nobodys_failure(tmp_path_factory: pytest.TempPathFactory) -> None:
    async def main() -> None:
        main, reference, counts, shadow, run = set_up(tmp_path_factory.getbasetemp(), 1.0)
        reference.fails.append(InputError("broken"))
        await ask(shadow, run)
        await settled(shadow)
        assert counts.counters == {("shadow_dropped_total", ("minilm",)): 1}
        main.full_from, main.backlog_s = 7, 8.0
        assert (shadow.full(6), shadow.full(7), shadow.backlog_s) == (False, True, 8.0)
        main.fails.append(InputError("ours"))
        with pytest.raises(InputError, match="ours"):
            await ask(shadow, run)
        assert not shadow._tasks, "a run without an answer is not compared"
        await shadow.close()
        assert main.closed
        assert reference.closed

    asyncio.run(main())


def test_what_is_measured() -> None:
    a = np.array([[1, 0], [3, 4], [0, 0]], np.float32)
    b = np.array([[0, 1], [6, 8], [0, 1]], np.float32)
    measure, drifts, changed = compare("embedding", "embed", a, b)
    assert (measure, changed) == ("cosine_distance", 0)
    assert drifts == pytest.approx([1, 0, 1])
    assert compare("logits", "classify", a, b) == ("logit_difference", [1.0, 4.0, 1.0], 2)
    assert compare("logits", "answer", a, b)[2] == 0, "rows of tokens have no label"


@pytest.mark.parametrize(("text", "artifact", "share"), [("f32.encast:1%", "f32.encast", 0.01), ("a:b:100%", "a:b", 1)])
def test_the_option(text: str, artifact: str, share: float) -> None:
    assert parse_shadow(text) == (artifact, share)


@pytest.mark.parametrize(
    "text", ["f32.encast", "f32.encast:1", "f32.encast:0%", "f32.encast:101%", ":1%", "a:x%", "a:nan%"]
)
def test_a_wrong_option(text: str) -> None:
    with pytest.raises(InputError, match=r"f32\.encast:1%"):
        parse_shadow(text)


def test_only_the_same_task_and_tokens_are_compared(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.getbasetemp()
    opened = {name: artifacts.open(artifact(base, name)) for name in ("embed", "other-embed", "classify", "rerank")}
    models = {"tags": opened["classify"], "ours": opened["embed"]}
    assert shadowed(models, opened["other-embed"]) == "ours"
    with pytest.raises(InputError, match="tags has other labels; ours has the task embed, not classify"):
        shadowed(models, opened["rerank"])
