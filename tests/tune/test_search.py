"""The search on machines that are known: it finds the best with few trials, stops, resumes and survives interrupts."""

from __future__ import annotations

import collections
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from full_disk import files_of_at_most
from surfaces import DESKTOP, SERVER, RecordedMachine, Surface

from encast.backends.groups import Setup
from encast.errors import InputError, ResourceError
from encast.tune.measurement import Measurement, Trial
from encast.tune.search import Options, default_trials, search
from encast.tune.slo import Slo
from encast.tune.space import make_space

LENGTHS = SERVER.lengths


SURFACES = pytest.mark.parametrize("surface", [SERVER, DESKTOP], ids=["server", "desktop"])


@SURFACES
def test_the_record_is_what_the_simulation_gives(surface: Surface) -> None:
    """A sample of it: all takes minutes (``python tests/tune/surfaces.py`` writes it)."""
    machine = RecordedMachine(surface, 0, surface.slo)
    assert set(machine.rates) == set(surface.space.setups)
    setups = sorted(machine.rates, key=lambda setup: setup.text)
    for setup in setups[:: len(setups) // 4]:
        rate, excess, most = machine.rates[setup]
        assert round(surface.saturated(setup), 1) == most
        assert surface.sustained(setup) == pytest.approx((rate, excess), rel=1e-3, abs=0.06)


@pytest.mark.parametrize("limited", [True, False], ids=["p99", "none"])
@pytest.mark.parametrize(
    ("surface", "seed"),
    [(SERVER, 0), (SERVER, 1), (DESKTOP, 37), (DESKTOP, 117)],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_best_of_the_grid_is_found_with_a_quarter_of_its_trials(surface: Surface, limited: bool, seed: int) -> None:
    """Within 3 % of it, always: by the record, so that the noise of what the search measures is not in the result.

    Seeds 0 on the server and 37 and 117 on the desktop are ones that searches have failed: a stop before the ridge of
    the best was found, a spoilt trial of the best, and a final that took luck for speed.
    """
    machine = RecordedMachine(surface, seed, surface.slo if limited else None)
    options = Options(trials=default_trials(surface.space), seed=seed)
    found = search(surface.space, machine, surface.lengths, machine.slo, options)
    assert machine.true_rate(found.chosen.setup) >= 0.97 * machine.best
    assert len(found.trials) == len(machine.measured) <= len(surface.space.setups) / 4
    assert not found.interrupted


class Small:
    """Four cores, on which throughput is a formula."""

    def __init__(self, interrupt_at: int | None = None, fail: Sequence[str] = ()) -> None:
        self.space = make_space(4, LENGTHS)
        self.calls, self.interrupt_at, self.fail = 0, interrupt_at, fail
        self.probes = self.trials = 0

    def rate(self, setup: Setup) -> float:
        wide = setup.groups[-1].threads
        return 1000.0 * setup.cores / 4 * (1 - 0.1 * (wide - 2) ** 2) * (1 - 300 / (setup.batch_tokens + 1200))

    def probe(self, tokens: int, threads: int, instances: int) -> float:
        self.probes += 1
        return 1e-4 + tokens * 1e-5 / threads

    def measure(self, setups: Sequence[Setup]) -> list[Measurement]:
        self.calls += 1
        if self.calls == self.interrupt_at:
            raise KeyboardInterrupt
        self.trials += len(setups)
        return [self.measured(setup, len(setups)) for setup in setups]

    def measured(self, setup: Setup, at_once: int) -> Measurement:
        if any(word in setup.text for word in self.fail):
            return Measurement.failure(ResourceError("out of memory"))
        return Measurement(self.rate(setup), self.rate(setup), {"p99": 1.0})

    @property
    def best(self) -> float:
        return max(map(self.rate, self.space.setups))


def run(machine: Small, **options: Any) -> Any:
    return search(machine.space, machine, LENGTHS, None, Options(**{"trials": 40, **options}))


def test_a_small_machine_is_searched_to_its_best() -> None:
    machine = Small()
    heard: list[int] = []
    found = run(machine, trials=len(machine.space.setups), say=lambda trial, number: heard.append(number))
    assert machine.rate(found.chosen.setup) >= 0.97 * machine.best
    assert heard == list(range(1, len(found.trials) + 1))
    assert {trial.source for trial in found.trials} == {"cost model", "tpe", "final"}
    assert found.stopped == "the last 10 proposals were no better"
    assert len(found.trials) < len(machine.space.setups) / 2  # the cost model knows nothing of this formula


def test_the_first_trials_divide_the_cores_in_different_ways() -> None:
    machine = Small()
    points = [machine.space.setups[trial.setup] for trial in run(machine, trials=3).trials]
    assert len({(point.kind, point.wide) for point in points}) == 3


@pytest.mark.parametrize("trials", [1, 2, 3, 7, 8, 13, 19, 20])
def test_all_trials_that_are_allowed_are_made_and_no_more(trials: int) -> None:
    machine = Small()
    found = run(machine, trials=trials)
    assert len(found.trials) == trials
    assert [trial.source for trial in found.trials].count("final") == (6 if trials >= 19 else 0)
    assert found.chosen.setup in machine.space.setups
    with pytest.raises(InputError, match="at least 1"):
        run(machine, trials=0)


def test_time_is_kept_and_one_trial_is_made_at_least() -> None:
    found = run(Small(), seconds=0.0)
    assert len(found.trials) == 1
    assert found.cut
    assert found.stopped == "the 0 seconds were over"


def test_a_final_that_time_ends_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Slow(Small):
        def measure(self, setups: Sequence[Setup]) -> list[Measurement]:
            nonlocal now
            now += 100.0 * (len(setups) > 1)
            return super().measure(setups)

    monkeypatch.setattr("encast.tune.search.time", SimpleNamespace(monotonic=lambda: now))
    journal = tmp_path / "x.journal"
    found = run(Slow(), seconds=50.0, journal=journal)
    assert now == 100.0, "one round, which was under way when the time was over"
    assert found.cut
    assert found.stopped == "the 50 seconds were over"
    found = run(Slow(), journal=journal, resume=True)
    assert not found.cut
    assert "seconds" not in found.stopped


def test_an_interrupt_keeps_the_best_so_far() -> None:
    machine = Small(interrupt_at=7)
    found = run(machine)
    assert found.interrupted
    assert len(found.trials) == 6
    assert found.chosen.measurement.rate >= 0.95 * max(trial.measurement.rate for trial in found.trials)
    with pytest.raises(KeyboardInterrupt):
        run(Small(interrupt_at=1))


def test_resuming_goes_on_where_it_stopped(tmp_path: Path) -> None:
    journal = tmp_path / "x.journal"
    key = {"artifact": "a", "slo": None}
    first = run(Small(interrupt_at=7), journal=journal, key=key)
    with pytest.raises(InputError, match=r"holds what an earlier search measured; go on with it by --resume"):
        run(Small(), journal=journal, key=key)
    machine = Small()
    found = run(machine, journal=journal, key=key, resume=True)
    assert machine.probes == 0
    assert found.trials[:6] == first.trials
    assert len(found.trials) == 6 + sum(1 for _ in found.trials[6:])
    assert machine.rate(found.chosen.setup) >= 0.97 * machine.best


def test_resuming_something_else_is_refused(tmp_path: Path) -> None:
    journal = tmp_path / "x.journal"
    with pytest.raises(InputError, match="does not exist, so there is nothing to resume"):
        run(Small(), journal=journal, resume=True)
    run(Small(interrupt_at=3), journal=journal, key={"artifact": "a"})
    with pytest.raises(InputError, match=r"its artifact is 'a', now it is 'b'"):
        run(Small(), journal=journal, key={"artifact": "b"}, resume=True)


@pytest.mark.parametrize("content", ["nonsense\n", "{}\n", "[1]\n", '{"op_code": 99}\n', "\x00\xff\n", "nonsense"])
def test_a_file_that_is_no_journal(content: str, tmp_path: Path) -> None:
    journal = tmp_path / "x.journal"
    journal.write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=r"is no journal of `encast tune`"):
        run(Small(), journal=journal, resume=True)
    assert journal.read_bytes() == content.encode("latin-1")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"probe": "8,1,1", "seconds": "soon"}, "TypeError"),
        ({"probe": "8,1,1", "seconds": 0}, r"the probe 8,1,1 took 0 s"),
        ({"seconds": 1.0}, "KeyError"),
        ([3], "TypeError"),
        ({"trial": {"setup": None}}, "InputError: setup is null"),
        ("[" * 100_000, "ArtifactError: it is not well-formed JSON: .*recursion"),
        ('{"probe": "8,1,1", "probe": "8,1,1"}', "the key 'probe' stands twice"),
        ('{"probe": "8,1,1", "seconds": Infinity}', "Infinity is no JSON number"),
        ({"probe": "8,1,1", "seconds": 10**400}, "the probe 8,1,1 took 1000"),
        ('{"probe": "8,1,1", "seconds": 1e400}', "the probe 8,1,1 took inf s"),
        ({"probe": "8,1,1", "seconds": 5e-324}, "the probe 8,1,1 took 5e-324 s"),
    ],
)
def test_a_journal_with_other_things_in_it(entry: Any, said: str, tmp_path: Path) -> None:
    """``entry``: a line of it, or what is to be one."""
    journal = tmp_path / "x.journal"
    run(Small(interrupt_at=3), journal=journal)
    with journal.open("a") as file:
        file.write((entry if isinstance(entry, str) else json.dumps(entry)) + "\n")
    with pytest.raises(
        InputError,
        match=rf"x\.journal is no journal of `encast tune` \(line 14, .*{said}.*; remove it, or name another",
    ):
        run(Small(), journal=journal, resume=True)


@pytest.mark.parametrize("name", ["sequences_per_s", "excess", "memory_bytes", "requests", "seconds"])
@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e400"])
def test_a_trial_with_a_number_beyond_all_bounds(name: str, number: str, tmp_path: Path) -> None:
    journal = tmp_path / "x.journal"
    run(Small(interrupt_at=3), journal=journal)
    *lines, last = journal.read_text().splitlines()
    trial = {**json.loads(last)["trial"], name: "HERE"}
    journal.write_text("\n".join([*lines, json.dumps({"trial": trial}).replace('"HERE"', number), ""]))
    with pytest.raises(InputError, match=r"is no journal .*line 13, InputError: no measurement"):
        run(Small(), journal=journal, resume=True)


def test_a_journal_is_of_one_search_at_a_time(tmp_path: Path) -> None:
    journal = tmp_path / "x.journal"
    run(Small(interrupt_at=3), journal=journal)
    said: list[int] = []

    class Meanwhile(Small):
        def measure(self, setups: Sequence[Setup]) -> list[Measurement]:
            with pytest.raises(InputError, match=r"another `encast tune` writes to .*x\.journal; wait for its end"):
                run(Small(), journal=journal, resume=True)
            return super().measure(setups)

    run(Meanwhile(interrupt_at=3), journal=journal, resume=True, say=lambda trial, number: said.append(number))
    assert said[:3] == [1, 2, 3], "those of before are told first"
    run(Small(interrupt_at=1), journal=journal, resume=True)  # it is free again


@pytest.mark.parametrize("room", [0, 10])
def test_a_disk_that_fills_names_the_journal_and_loses_nothing(room: int, tmp_path: Path) -> None:
    journal, machine = tmp_path / "x.journal", Small()
    run(Small(interrupt_at=8), journal=journal)
    whole = journal.read_bytes()
    journal.unlink()
    with (
        files_of_at_most(len(whole) + room),
        pytest.raises(
            ResourceError,
            match=r"x\.journal: the journal .* cannot be written \(File too large\); make room, then --resume goes on",
        ),
    ):
        run(Small(), journal=journal)
    assert journal.read_bytes() == whole, "whole lines alone"
    heard: list[Trial] = []
    found = run(machine, journal=journal, resume=True, say=lambda trial, number: heard.append(trial))
    assert machine.probes == 0
    assert machine.rate(found.chosen.setup) >= 0.97 * machine.best
    assert len(heard) == len(found.trials) == machine.trials + 7
    assert len(journal.read_bytes().splitlines()) == 1 + 10 + len(found.trials), "a key, ten probes, all trials"


@pytest.mark.parametrize("room", [0, 10])
def test_a_full_disk_leaves_no_journal(room: int, tmp_path: Path) -> None:
    journal = tmp_path / "x.journal"
    with (
        files_of_at_most(room),
        pytest.raises(ResourceError, match=r"x\.journal: .* \(File too large\); make room, or"),
    ):
        run(Small(), journal=journal)
    assert list(tmp_path.iterdir()) == []
    head = len(json.dumps({"key": {}})) + 1
    with files_of_at_most(head + room), pytest.raises(ResourceError, match=r"\(File too large\); make room$"):
        run(Small(), journal=journal)
    assert list(tmp_path.iterdir()) == [], "a promise to go on would be of nothing"


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("written", [0, 6])
def test_a_search_killed_at_its_first_line_begins_anew(written: int, resume: bool, tmp_path: Path) -> None:
    journal = tmp_path / "x.journal"
    journal.write_bytes(json.dumps({"key": {"cores": 4}}).encode()[:written])
    run(Small(interrupt_at=3), journal=journal, key={"cores": 4}, resume=resume)
    assert json.loads(journal.read_bytes().splitlines()[0]) == {"key": {"cores": 4}}
    machine = Small()
    run(machine, journal=journal, key={"cores": 4}, resume=True)
    assert machine.probes == 0


@pytest.mark.parametrize("full", [False, True])
def test_probes_are_kept(full: bool, tmp_path: Path) -> None:
    class Ended(Small):
        def probe(self, tokens: int, threads: int, instances: int) -> float:
            if self.probes == 3:
                raise KeyboardInterrupt
            return super().probe(tokens, threads, instances)

    journal = tmp_path / "x.journal"
    with pytest.raises(KeyboardInterrupt, match=r"x\.journal has what was measured; --resume goes on"):
        run(Ended(), journal=journal)
    if full:
        size = journal.stat().st_size
        journal.unlink()
        with files_of_at_most(size + 10), pytest.raises(ResourceError, match="make room, then --resume goes on"):
            run(Small(), journal=journal)
    with pytest.raises(InputError, match=r"holds what an earlier search measured; go on with it by --resume"):
        run(Small(), journal=journal)
    machine = Small()
    run(machine, journal=journal, resume=True)
    assert machine.probes == 10 - 3


def test_a_search_killed_in_the_middle_goes_on(tmp_path: Path) -> None:
    """Of a process that was killed the journal ends anywhere, also within a line."""
    journal = tmp_path / "x.journal"
    run(Small(interrupt_at=7), journal=journal)
    journal.write_bytes(journal.read_bytes()[:-5])
    machine = Small()
    found = run(machine, journal=journal, resume=True)
    assert machine.probes == 0
    assert len(found.trials) == 5 + machine.trials
    entries = [json.loads(line) for line in journal.read_bytes().splitlines()]
    assert [Trial.from_json(entry["trial"]) for entry in entries if "trial" in entry] == list(found.trials)
    assert machine.rate(found.chosen.setup) >= 0.97 * machine.best


def test_nothing_is_left_of_a_search_that_measured_nothing(tmp_path: Path) -> None:
    journal = tmp_path / "x.journal"

    class Ended(Small):
        def probe(self, tokens: int, threads: int, instances: int) -> float:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Ended(), journal=journal)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ResourceError, match="no set-up could be measured"):
        run(Small(fail=["x"]), journal=journal)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ResourceError, match="journal of the search cannot be used"):
        run(Small(), journal=tmp_path / "absent" / "x.journal")


def test_half_of_the_finalists_stay_after_every_five_rounds() -> None:
    machine = Small()
    found = run(machine, trials=len(machine.space.setups))
    rounds = collections.Counter(trial.setup for trial in found.trials if trial.source == "final")
    assert sorted(rounds.values()) == [5, 5, 5, 10, 15, 15]
    by_rate = sorted(rounds, key=machine.rate)
    assert [rounds[setup] for setup in by_rate] == [5, 5, 5, 10, 15, 15], "the better ones"
    assert machine.rate(found.chosen.setup) == machine.rate(by_rate[-1])


def test_set_ups_that_cannot_run_are_passed_over() -> None:
    machine = Small(fail=["2x2"])
    found = run(machine)
    failed = [trial for trial in found.trials if trial.measurement.failed is not None]
    assert failed
    assert len(failed) == len({trial.setup for trial in failed})
    assert all(trial.measurement.failed == "out of memory" for trial in failed)
    assert found.chosen.measurement.failed is None
    with pytest.raises(ResourceError, match="out of memory"):
        run(Small(fail=["x"]))


@pytest.mark.parametrize("lost", [Measurement.failure(ResourceError("killed")), Measurement(0.0, 9.0, excess=7.0)])
def test_a_final_in_which_all_are_lost_leaves_the_best_of_before(lost: Measurement) -> None:
    class Crowded(Small):
        def measured(self, setup: Setup, at_once: int) -> Measurement:
            return lost if at_once > 1 else super().measured(setup, at_once)

    machine = Crowded()
    found = run(machine)
    assert "final" in {trial.source for trial in found.trials}
    assert found.chosen.measurement.rate >= 0.97 * max(trial.measurement.rate for trial in found.trials)


def test_a_finalist_that_fails_is_out_and_the_others_go_on() -> None:
    class Tight(Small):
        killed: Setup | None = None

        def measured(self, setup: Setup, at_once: int) -> Measurement:
            if at_once > 1 and self.killed in (None, setup):
                self.killed = setup
                return Measurement.failure(ResourceError("killed"))
            return super().measured(setup, at_once)

    machine = Tight()
    found = run(machine, trials=60)
    final = [trial for trial in found.trials if trial.source == "final"]
    assert [trial.setup for trial in final if trial.measurement.failed is not None] == [machine.killed]
    assert found.chosen in final
    assert found.chosen.measurement.failed is None
    rounds = [sum(trial.setup == setup for trial in final) for setup in {trial.setup for trial in final}]
    assert sorted(rounds)[:2] != [1, 1], "only the one that failed is out"


def test_all_of_few_set_ups_may_fail() -> None:
    machine = Small(fail=["x"])
    machine.space = make_space(1, [4000])
    with pytest.raises(ResourceError, match="no set-up could be measured: out of memory"):
        run(machine, trials=40)


def test_the_first_trials_may_fail_but_not_all() -> None:
    class Late(Small):
        def measured(self, setup: Setup, at_once: int) -> Measurement:
            self.fail = ["x"] if self.calls <= self.failures else []
            return super().measured(setup, at_once)

        failures = 2

    found = run(Late(), seconds=0.0)
    assert [trial.measurement.failed for trial in found.trials] == ["out of memory"] * 2 + [None]
    assert found.chosen == found.trials[-1]
    with pytest.raises(ResourceError, match="no set-up could be measured: out of memory"):
        run(Late(), trials=2)
    machine = Small(fail=["x"])
    with pytest.raises(ResourceError):
        run(machine)
    assert machine.calls == 3


def test_what_kept_no_limit_is_not_what_failed() -> None:
    """Of a search with trials, failures at the end of it do not end it."""

    class Broken(Small):
        def measured(self, setup: Setup, at_once: int) -> Measurement:
            if self.calls > 5:
                return Measurement.failure(ResourceError("killed"))
            return Measurement(0.0, 9.0, excess=1e12)  # worse than anything, but measured

    found = run(Broken(), trials=12)
    assert len(found.trials) == 12
    assert found.chosen.measurement.failed is None


def test_a_limit_that_nothing_keeps() -> None:
    class Late(Small):
        def measured(self, setup: Setup, at_once: int) -> Measurement:
            return Measurement(0.0, 100.0, excess=2.0 + setup.groups[-1].threads)

    found = search(Late().space, Late(), LENGTHS, Slo(99, 0.01), Options(trials=20))
    assert found.chosen.measurement.rate == 0
    assert found.chosen.measurement.excess == min(trial.measurement.excess for trial in found.trials)
    found = search(Late().space, Late(interrupt_at=5), LENGTHS, Slo(99, 0.01), Options(trials=20))
    assert found.interrupted
    assert len(found.trials) == 4
    assert found.chosen.measurement.excess == min(trial.measurement.excess for trial in found.trials)


def test_trials_are_plain_json() -> None:
    found = run(Small(), trials=8)
    for trial in found.trials:
        assert Trial.from_json(json.loads(json.dumps(trial.to_json()))) == trial
