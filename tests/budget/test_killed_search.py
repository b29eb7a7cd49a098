"""A search that is killed goes on from its journal, and an artifact that was there stays there."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import outliers
import pytest

from encast import artifact
from encast.budget import Found, find, workshop
from encast.data.datasets import Dataset
from encast.errors import InputError

KILLS = 20


def search(made: Path, data: Dataset, out: Path, **options: Any) -> Found:
    """On a machine whose speeds are always the same; what was ended goes on."""
    workshop.race = outliers.times_by_size
    journal = out.with_name(out.name + ".journal")
    return find(made, data, out=out, journal=journal, **{"max_drop": 0.03, "resume": True, **options})


def search_in_child(made: Path, data: Dataset, out: Path, result: Path, cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)
    result.write_text(json.dumps(search(made, data, out).to_json()))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dataset]:
    folder = tmp_path_factory.mktemp("killed")
    made = outliers.checkpoint(folder / "model", "embed", guilty=(0,), layers=1, pooling=("mean",), normalize=True)
    return made, outliers.own_scores(folder, made, 60)


@pytest.fixture(autouse=True)
def real_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workshop, "race", workshop.race)


def test_killed_at_random_moments_it_comes_to_the_same_answer(model: tuple[Path, Dataset], tmp_path: Path) -> None:
    made, data = model
    out, result = tmp_path / "m.encast", tmp_path / "result.json"
    wanted = search(made, data, out).to_json()
    assert wanted["chosen"]["wide"] == [["encoder.layer.0.output.dense", "bf16"]]
    assert len(wanted["layers"]) == 5
    journal = tmp_path / "m.encast.journal"
    source = random.Random(11)
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["encast.budget", "encast.artifact.open", "outliers"])
    kills = finished = 0
    artifact.replace(out, tmp_path / "first.encast")
    while kills < KILLS or not finished:
        before = _lines(journal)
        child = context.Process(target=search_in_child, args=(made, data, out, result, os.sched_getaffinity(0)))
        child.start()
        lines = before + source.randint(1, 4)
        while child.is_alive() and (kills == KILLS or _lines(journal) < lines):
            time.sleep(0.002)
        if kills < KILLS:
            time.sleep(source.random() * 0.1)
            child.kill()
        child.join(60)
        if child.exitcode != 0:
            assert child.exitcode == -9
            kills += 1
            if out.exists():
                artifact.open(out).verify()
            else:
                assert not any('"raced"' in line for line in _whole(journal)), "a candidate was in, and is gone"
            continue
        finished += 1
        assert json.loads(result.read_text()) == wanted
        artifact.open(out).verify()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["first.encast", "m.encast", "result.json"]
        artifact.replace(out, tmp_path / "first.encast")
    assert kills == KILLS


def _whole(journal: Path) -> list[str]:
    text = journal.read_text() if journal.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def _lines(journal: Path) -> int:
    return len(_whole(journal))


class TestInterrupted:
    @pytest.fixture
    def out(self, model: tuple[Path, Dataset], tmp_path: Path) -> Path:
        """Where a search was interrupted at its third layer."""

        def interrupt(step: str, done: int, total: int | None) -> None:
            if step.startswith("layer") and done == 3:
                raise KeyboardInterrupt

        out = tmp_path / "m.encast"
        with pytest.raises(KeyboardInterrupt, match=r"m\.encast\.journal has what was measured; --resume goes on"):
            search(*model, out, progress=interrupt)
        return out

    def test_the_best_so_far_is_there_and_nothing_else(self, out: Path) -> None:
        assert sorted(path.name for path in out.parent.iterdir()) == ["m.encast", "m.encast.journal"]
        assert artifact.open(out).graph.meta.dtype == "bf16"

    def test_it_needs_resume(self, model: tuple[Path, Dataset], out: Path) -> None:
        journal = out.with_name("m.encast.journal")
        with pytest.raises(InputError, match=r"holds what an earlier search measured; go on with it by --resume"):
            find(*model, out=out, journal=journal, max_drop=0.03)
        with pytest.raises(InputError, match=r"absent does not exist, so there is nothing to resume"):
            find(*model, out=out, journal=out.with_name("absent"), max_drop=0.03, resume=True)

    def test_a_journal_of_another_search_is_refused(self, model: tuple[Path, Dataset], out: Path) -> None:
        made, data = model
        journal = out.with_name("m.encast.journal")
        before = journal.read_bytes()
        fewer = replace(data, rows=data.rows[:-1])
        others: list[tuple[str, Dataset, dict[str, Any]]] = [
            ("data", fewer, {}),
            ("metric", data, {"metric": "pearson"}),
            ("max_drop", data, {"max_drop": 0.02}),
            ("sparse", data, {"sparse": "always"}),
            ("exact", data, {"exact": True}),
            ("task", data, {"task": "features"}),
        ]
        for name, rows, options in others:
            with pytest.raises(InputError, match=rf"journal is of another search: its {name} is"):
                find(made, rows, out=out, journal=journal, resume=True, **{"max_drop": 0.03, **options})
        assert journal.read_bytes() == before

    @pytest.mark.parametrize("damage", ["gone", "damaged", "another", "another task"])
    def test_what_became_of_the_artifact_meanwhile_does_not_matter(
        self, model: tuple[Path, Dataset], out: Path, damage: str
    ) -> None:
        if damage == "gone":
            out.rename(out.with_name("moved.encast"))
        elif damage == "another task":
            workshop.compile(model[0], out, task="features", dtype="bf16")
        elif damage == "damaged":
            (out / "card.json").write_bytes(b"{}")
        else:
            workshop.compile(model[0], out, dtype="f32", exact=True)
        found = search(*model, out)
        assert found.chosen.plan.wide == (("encoder.layer.0.output.dense", "bf16"),)
        artifact.open(out).verify()


class TestWithoutJournal:
    """What --resume does before a search has one, and after its end."""

    @pytest.fixture
    def said(self) -> list[str]:
        return []

    @pytest.fixture
    def say(self, said: list[str]) -> Any:
        return lambda step, done, total: said.append(step)

    def test_it_begins_anew(self, model: tuple[Path, Dataset], tmp_path: Path, said: list[str], say: Any) -> None:
        out = tmp_path / "m.encast"
        with pytest.raises(KeyboardInterrupt):
            search(*model, out, progress=_interrupt)
        assert not list(tmp_path.iterdir())
        found = search(*model, out, progress=say)
        assert said[:2] == ["m.encast.journal does not exist: the search begins anew", "score f32"]
        assert found.chosen.plan.wide == (("encoder.layer.0.output.dense", "bf16"),)

    def test_a_search_that_is_done_gives_its_result(
        self, model: tuple[Path, Dataset], tmp_path: Path, said: list[str], say: Any
    ) -> None:
        out = tmp_path / "m.encast"
        found = search(*model, out)
        card = (out / "card.json").read_bytes()
        assert search(*model, out, progress=say) == found
        assert said == ["the search is done: m.encast has what it found"]
        assert (out / "card.json").read_bytes() == card
        assert [path.name for path in tmp_path.iterdir()] == ["m.encast"]
        nothing = search(*model, tmp_path / "0.encast", max_drop=0.0)
        assert nothing.missed is not None
        assert search(*model, tmp_path / "0.encast", max_drop=0.0) == nothing

    @pytest.mark.parametrize("found", [{}, {"chosen": 3}, None, []])
    def test_a_record_that_no_search_wrote_is_not_believed(
        self, model: tuple[Path, Dataset], tmp_path: Path, found: Any
    ) -> None:
        out = tmp_path / "m.encast"
        search(*model, out)
        kept = artifact.open(out).card["search"]
        artifact.update_card(out, search={**kept, "found": found})
        with pytest.raises(InputError, match="not known to be of this search"):
            search(*model, out)

    def test_a_journal_of_nothing_is_begun_again(self, model: tuple[Path, Dataset], tmp_path: Path) -> None:
        """That of a search for another budget, ended before it measured anything."""
        out = tmp_path / "m.encast"
        workshop.compile(model[0], out, dtype="bf16")
        journal = tmp_path / "m.encast.journal"
        with pytest.raises(KeyboardInterrupt):
            find(*model, out=out, journal=journal, max_drop=0.5, progress=_interrupt)
        assert journal.exists()
        found = find(*model, out=out, journal=journal, max_drop=0.03)
        assert found.max_drop == 0.03

    @pytest.mark.parametrize("other", ["another budget", "compiled", "damaged"])
    def test_an_artifact_of_something_else_stays(self, model: tuple[Path, Dataset], tmp_path: Path, other: str) -> None:
        out = tmp_path / "m.encast"
        if other == "compiled":
            workshop.compile(model[0], out, dtype="bf16")
        else:
            search(*model, out, max_drop=0.03 if other == "damaged" else 0.5)
        if other == "damaged":
            (out / "weights.safetensors").write_bytes(b"")
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        with pytest.raises(InputError, match=r"journal does not exist, .* not known to be of this search; leave --res"):
            search(*model, out)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        assert [path.name for path in tmp_path.iterdir()] == ["m.encast"]

    def test_a_search_that_is_to_replace_one_goes_on(self, model: tuple[Path, Dataset], tmp_path: Path) -> None:
        """Its journal says so, whenever it was ended."""
        out = tmp_path / "m.encast"
        workshop.compile(model[0], out, dtype="f32", exact=True)
        with pytest.raises(KeyboardInterrupt, match="--resume goes on"):
            search(*model, out, progress=_interrupt, resume=False)
        with pytest.raises(KeyboardInterrupt, match="--resume goes on"):
            search(*model, out, progress=_interrupt, resume=False)  # nothing was measured that this would lose
        assert search(*model, out).chosen.plan.wide == (("encoder.layer.0.output.dense", "bf16"),)


def _interrupt(step: str, done: int, total: int | None) -> None:
    if step == "score f32":
        raise KeyboardInterrupt


def test_a_target_that_became_something_else_loses_no_measurement(model: tuple[Path, Dataset], tmp_path: Path) -> None:
    out = tmp_path / "m.encast"

    def spoil(step: str, done: int, total: int | None) -> None:
        if step.startswith("time int8 but"):
            (out / "thesis.txt").write_text("")

    with pytest.raises(InputError, match=r"holds 'thesis\.txt', so it is no encast artifact and is not replaced"):
        search(*model, out, progress=spoil)
    lines = _lines(tmp_path / "m.encast.journal")
    assert lines > 10
    (out / "thesis.txt").unlink()
    assert search(*model, out).chosen.plan.wide == (("encoder.layer.0.output.dense", "bf16"),)
