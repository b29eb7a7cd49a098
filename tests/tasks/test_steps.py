"""Tasks as generators: what they ask for, what they are sent, and what they see of a refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_engine import HIDDEN, VOCAB, fake_engine

from encast.errors import InputError, ResourceError
from encast.tasks import Run, Session, Steps, drive, embed, embed_ids, fill_mask, hidden_states


def test_a_task_asks_for_runs_and_answers_with_the_rows_it_is_sent() -> None:
    session = fake_engine("embed", batch_tokens=7).session
    steps = embed(session, ["cat", "cat sat", "mat"])
    runs = [next(steps), steps.send(np.float32([[1] * HIDDEN, [2] * HIDDEN]))]
    with pytest.raises(StopIteration) as end:
        steps.send(np.float32([[3] * HIDDEN]))
    asked = [(run.output, run.piece.first, run.piece.batch.seqs, run.select) for run in runs]
    assert asked == [("embedding", 0, 2, None), ("embedding", 2, 1, None)]
    assert end.value.value[:, 0].tolist() == [1, 2, 3]


def test_a_task_checks_what_it_is_given_before_it_asks() -> None:
    session = fake_engine("fill_mask").session
    for steps in (fill_mask(session, [5]), fill_mask(session, ["[MASK]"], top_k=0), embed(session, ["cat"])):
        with pytest.raises(InputError):
            next(steps)


def test_a_refused_run_is_explained_and_thrown_into_the_task() -> None:
    engine = fake_engine("embed", vocab=VOCAB["paris"], batch_tokens=4)
    seen: list[InputError] = []

    def task(session: Session) -> Steps[str]:
        for piece in session.stream(["the cat", "in paris"]):
            try:
                yield Run("embedding", piece)
            except InputError as error:
                seen.append(error)
        return "done"

    assert engine.drive(task(engine.session)) == "done"
    assert len(seen) == 1
    assert str(seen[0]).startswith("texts[1] has the token 'paris'")
    assert seen[0].__suppress_context__
    with pytest.raises(InputError, match=r"texts\[1\] has the token 'paris'"):
        engine.embed(["the cat", "in paris"])


def test_other_errors_of_a_run_reach_the_driver_as_they_are() -> None:
    class Lost:
        def run(self, *_: Any) -> Any:
            raise ResourceError("lost")

        def close(self) -> None: ...

    session = fake_engine("embed").session
    with pytest.raises(ResourceError, match="lost"):
        drive(session, Lost(), embed(session, ["cat"]))


def test_hidden_states_of_texts() -> None:
    engine = fake_engine("embed", batch_tokens=6)
    texts = ["the cat", "", "sat on mat in paris"]
    states = engine.drive(hidden_states(engine.session, texts))
    for state, encoding in zip(states, engine.session.tokenizer.encode(texts), strict=True):
        assert state.shape == (len(encoding), HIDDEN)
        assert state[:, 0].tolist() == encoding.ids
    assert engine.drive(hidden_states(engine.session, [])) == []


def test_ids_are_embedded_as_they_are() -> None:
    engine = fake_engine("embed", lambda ids: [ids[0], ids[-1], len(ids), 0], batch_tokens=8)
    rows = [[1, 2, 3], [4] * 5, [5], [6] * 20, [7, 8]]
    vectors = engine.drive(embed_ids(engine.session, rows))
    assert vectors.dtype == np.float32
    assert vectors.tolist() == [[row[0], row[-1], len(row), 0] for row in rows]
    assert [batch.tokens for batch in engine.runnable.batches] == [8, 1, 20, 2]  # type: ignore[attr-defined]
    assert engine.drive(embed_ids(engine.session, [])).shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], r"input\[1\] has 0 token ids; give 1 to 32"),
        ([1] * 33, r"input\[1\] has 33 token ids; give 1 to 32"),
        ([1, len(VOCAB)], rf"input\[1\] holds {len(VOCAB)}; .* from 0 to {len(VOCAB) - 1}"),
        ([-1], r"input\[1\] holds -1"),
        ([2**40], r"input\[1\] holds 1099511627776"),
        ([True], r"input\[1\] holds True"),
        ([1.0], r"input\[1\] holds 1\.0"),
        (["cat"], r"input\[1\] holds 'cat'"),
    ],
)
def test_ids_that_the_model_does_not_take(row: list[Any], message: str) -> None:
    engine = fake_engine("embed", batch_tokens=1)
    with pytest.raises(InputError, match=message):
        engine.drive(embed_ids(engine.session, [[1], row]))
    assert engine.runnable.batches == []  # type: ignore[attr-defined]


def test_ids_need_an_artifact_that_embeds() -> None:
    engine = fake_engine("tag")
    with pytest.raises(InputError, match="compiled for 'tag'"):
        engine.drive(embed_ids(engine.session, [[1]]))
