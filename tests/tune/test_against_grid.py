"""``benchmarks/tune_against_grid.py``: what its calls keep, and when they refuse to go on."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from encast.backends.groups import Setup
from encast.tune.measurement import Measurement, Trial
from encast.tune.space import make_space

LENGTHS = [4, 8, 8, 16]
CONDITIONS: dict[str, Any] = {"artifact": "a", "slo": None, "seed": 3}


@pytest.fixture(scope="module")
def script() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "tune_against_grid.py"
    spec = importlib.util.spec_from_file_location("tune_against_grid", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Machine:
    """Rates that grow with the cores, some ``noise`` above and below; if it ``dies``, the sixth measurement fails."""

    def __init__(self, noise: float = 0.0, dies: bool = False) -> None:
        self.noise, self.dies, self.calls = noise, dies, 0

    def probe(self, tokens: int, threads: int, instances: int) -> float:
        return 1e-4 + tokens * 1e-5 / threads

    def measure(self, setups: Sequence[Setup]) -> list[Measurement]:
        found = []
        for setup in setups:
            self.calls += 1
            rate = 100.0 * setup.cores * (1 + self.noise * (-1) ** (self.calls // 3))
            failed = "killed" if self.dies and self.calls == 6 else None
            found.append(Measurement(0.0 if failed else rate, rate, seconds=1.0, failed=failed))
        return found


def test_a_folder_is_of_the_conditions_of_its_first_call(script: Any, tmp_path: Path) -> None:
    script.keep(CONDITIONS, tmp_path)
    (tmp_path / "grid.jsonl").write_text("")
    script.keep(CONDITIONS, tmp_path)
    with pytest.raises(SystemExit, match=r"their slo is None, now it is \{'p99_ms': 10\}; give another --work"):
        script.keep({**CONDITIONS, "slo": {"p99_ms": 10}}, tmp_path)
    (tmp_path / "conditions.json").unlink()
    with pytest.raises(SystemExit, match=r"holds files, but no conditions.json"):
        script.keep(CONDITIONS, tmp_path)


def test_an_unfinished_search_is_not_kept(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def call(end: float) -> Any:
        return script.tuned_choice(tmp_path, CONDITIONS, make_space(4, LENGTHS), Machine(), LENGTHS, None, end)

    assert call(time.monotonic()) is None
    assert "search: 1 trials; call again" in capsys.readouterr().out
    assert not (tmp_path / "tuned.json").exists()
    found = call(math.inf)
    assert json.loads((tmp_path / "tuned.json").read_text()) == found == call(0.0)
    assert found["trials"] <= found["grid"] / 4


@pytest.mark.parametrize(("noise", "rounds"), [(0.0, 5), (0.2, 8)])
def test_rounds_end_when_the_ratio_is_known(script: Any, tmp_path: Path, noise: float, rounds: int) -> None:
    machine = Machine(noise)
    by_turns = script.compared(*_grid(script, tmp_path), machine, 8, math.inf)
    assert machine.calls == 4 * rounds
    assert {len(by_turns.rates(trial.setup)) for trial in by_turns.trials} == {rounds}


def test_a_round_with_a_failure_is_lost(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, grid, tuned = _grid(script, tmp_path)
    assert script.compared(lines, grid, tuned, Machine(dies=True), 8, math.inf) is None
    assert "comparison: round 2 is lost, " in (said := capsys.readouterr().out)
    assert "killed" in said
    assert len(lines.trials) == 4
    assert script.compared(lines, grid, tuned, Machine(), 8, math.inf) is lines


def _grid(script: Any, folder: Path) -> Any:
    setups = make_space(4, LENGTHS).setups
    grid = script.Lines(folder / "grid.jsonl")
    grid.trials = [Trial(setup, Measurement(100.0 + index, 1.0), "grid") for index, setup in enumerate(setups)]
    return script.Lines(folder / "by_turns.jsonl"), grid, {"chosen": grid.trials[0].to_json()}
