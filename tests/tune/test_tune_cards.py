"""``encast tune --device`` without a card: the space, the batches to capture, turns in one process, the file."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from profiles import compiled

import encast
from encast import artifact as artifacts
from encast.backends.groups import InstanceGroup, Setup
from encast.batch import Batch
from encast.cli.main import main
from encast.errors import InputError, ResourceError
from encast.tune import cards as tune_cards
from encast.tune.cards import CardEvaluator
from encast.tune.configuration import Cards, Configuration, card_setup
from encast.tune.cost_model import card_probe_plan
from encast.tune.measurement import Measurement
from encast.tune.search import Options, search
from encast.tune.shapes import one_of_each
from encast.tune.slo import Slo
from encast.tune.space import make_card_space

H100 = Cards(("NVIDIA H100 80GB HBM3",), "f16")


@pytest.fixture
def artifact(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(compiled("bert-embed", "int8", tmp_path_factory))


def test_a_set_up_is_the_tokens_of_a_batch() -> None:
    setups = list(make_card_space(3, [5, 40]).setups)
    assert {setup.groups for setup in setups} == {(InstanceGroup(3, 1),)}
    sizes = sorted(setup.batch_tokens for setup in setups)
    assert sizes[:3] == [256, 384, 512]
    assert sizes[-3:] == [16384, 24576, 32768]
    assert len(sizes) == 15
    assert make_card_space(1, [20_000]).batch_tokens == (24576, 32768)
    assert make_card_space(1, [40_000]).batch_tokens == (40_000,)
    with pytest.raises(InputError, match="no text"):
        make_card_space(1, [])


def test_what_is_timed_first() -> None:
    assert card_probe_plan(1, [20] * 9, 32768) == [(20, 1, 1), (405, 1, 1), (8192, 1, 1)]
    assert card_probe_plan(4, [20], 32768)[-1] == (8192, 1, 4)
    assert card_probe_plan(1, [9000], 16384) == [(9000, 1, 1)]


@pytest.mark.parametrize("batch_tokens", [5, 33, 300])
def test_every_batch_of_a_queue_has_its_graph_beforehand(batch_tokens: int) -> None:
    lengths = [7, 3, 30, 3, 12, 5]

    def bucket(tokens: int, texts: int) -> tuple[int, int]:
        return math.ceil(tokens / 16), texts.bit_length()

    found = one_of_each(lengths, batch_tokens, bucket)

    def tokens_of(first: int, texts: int) -> int:
        return sum(lengths[(first + index) % len(lengths)] for index in range(texts))

    possible = {
        bucket(tokens_of(first, texts), texts)
        for first, texts in itertools.product(range(len(lengths)), range(1, 200))
        if texts == 1 or tokens_of(first, texts) <= batch_tokens
    }
    made = [bucket(tokens_of(*batch), batch[1]) for batch in found]
    assert len(made) == len(set(made))
    assert set(made) == possible


class Fake:
    """Stands for a search's machine: batches above ``most`` tokens fail."""

    def __init__(self, most: int) -> None:
        self.most = most

    def probe(self, tokens: int, threads: int, instances: int) -> float:
        return 1e-3 + tokens * 1e-6

    def measure(self, setups: Sequence[Setup]) -> list[Measurement]:
        return [
            Measurement(float(setup.batch_tokens), 1.0)
            if setup.batch_tokens <= self.most
            else Measurement.failure(ResourceError("no memory is left"))
            for setup in setups
        ]


def test_batches_that_the_memory_does_not_hold_are_passed_over() -> None:
    space = make_card_space(1, [20, 40])
    found = search(space, Fake(1024), [20, 40], None, Options(trials=30))
    assert found.chosen.setup == card_setup(1, 1024)
    assert {trial.setup for trial in found.trials} == set(space.setups), "all of them are measured"
    with pytest.raises(ResourceError, match="no set-up could be measured: no memory is left"):
        search(space, Fake(0), [20, 40], None, Options(trials=30))


class Process:
    """Stands for a ``Worker`` on cards."""

    started: ClassVar[list[Process]] = []

    def __init__(self, setup: Setup, job: dict[str, Any], prefix: Sequence[str], words: str) -> None:
        self.setup, self.job, self.words, self.closed = setup, job, words, False
        self.opened = {"ready": True, "cards": ["A", "B"]}
        self.asked: list[tuple[str, int | None]] = []
        self.started.append(self)

    def ask(self, command: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.asked.append((command["do"], command.get("batch_tokens")))
        if command["do"] == "use" and command["batch_tokens"] == 999:
            self.closed = True
            raise ResourceError("the process ended")
        return {"rate": 100.0, "texts": 1, "runs_ns": [1], "nanoseconds": 5e6}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def evaluator(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tune_cards, "Worker", Process)
    monkeypatch.setattr(Process, "started", [])
    requests = Batch.of([[1, 2, 3]])
    options: dict[str, Any] = {"output": "embedding", "selects": False, "slo": None}
    with CardEvaluator(Path("m"), requests, devices=["cuda:0", "cuda:1"], dtype="f16", **options) as made:
        yield made


def test_set_ups_take_turns_in_one_process(evaluator: CardEvaluator) -> None:
    assert evaluator.names == ("A", "B")
    assert evaluator.probe(64, 1, 2) == 5e-3
    first, second = evaluator.measure([card_setup(2, 256), card_setup(2, 512)])
    (process,) = Process.started
    assert process.setup.groups == (InstanceGroup(2, 1),)
    assert (process.job["devices"], process.job["dtype"]) == (["cuda:0", "cuda:1"], "f16")
    assert process.asked == [("probe", None)] + 3 * [("use", 256), ("saturate", None), ("use", 512), ("saturate", None)]
    assert first.rate == second.rate == 100.0
    assert first.memory_bytes is None
    process.asked.clear()
    evaluator.measure([card_setup(2, 512)])
    assert process.asked == 3 * [("saturate", None)], "what is in use already is not captured again"
    evaluator.close()
    assert process.closed


def test_a_process_that_died_is_replaced(evaluator: CardEvaluator) -> None:
    dead, alive = evaluator.measure([card_setup(2, 999), card_setup(2, 512)])
    assert dead.failed == "the process ended"
    assert alive.rate == 100.0
    assert [process.closed for process in Process.started] == [True, False]
    assert Process.started[1].asked[0] == ("use", 512)


def test_the_file_of_cards_comes_back(tmp_path: Path) -> None:
    made = Configuration(card_setup(1, 4096), artifact_sha="x", cards=H100, slo=Slo(99, 10.0))
    made.write(tmp_path / "x.json")
    document = json.loads((tmp_path / "x.json").read_text())
    assert document["chosen"] == {"batch_tokens": 4096}
    assert document["cards"] == {"names": ["NVIDIA H100 80GB HBM3"], "dtype": "f16"}
    assert "machine" not in document
    assert Configuration.of(tmp_path / "x.json", batch_tokens=1) == made
    assert "cards" not in Configuration(card_setup(1, 4096)).to_json(), "files for cores are as before"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cards": {}}, "cards is {}; the names of one card or more"),
        ({"cards": {"names": "H100"}}, "the names of one card or more"),
        ({"cards": {"names": []}}, "the names of one card or more"),
        ({"cards": {"names": ["H100", 3]}}, "the names of one card or more"),
        ({"cards": {"names": [""]}}, "the names of one card or more"),
        ({"cards": {"names": ["H100\x1b[2J"]}}, r"'H100\\x1b\[2J'.*the names of one card or more"),
        ({"cards": {"names": ["H100"], "dtype": "f64"}}, "the names of one card or more"),
        ({"cards": {"names": ["H100"], "driver": "1"}}, "the names of one card or more"),
        ({"chosen": {"batch_tokens": 0}}, r"chosen is \{'batch_tokens': 0\}; of cards"),
        ({"chosen": {"batch_tokens": True}}, "another number from 1 to 1048576"),
        ({"chosen": {"groups": [{"instances": 1, "threads": 1}]}}, "of cards, which have one instance each"),
    ],
)
def test_bad_files_of_cards(fields: dict[str, Any], message: str) -> None:
    good = {"schema": 1, "cards": {"names": ["H100"]}, "chosen": {"batch_tokens": 64}}
    assert Configuration.of(good, batch_tokens=1).cards == Cards(("H100",), None)
    with pytest.raises(InputError, match=message):
        Configuration.of({**good, **fields}, batch_tokens=1)


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (H100, []),
        (Cards(("NVIDIA L4",), "f16"), ["tuned on NVIDIA H100 80GB HBM3, f16, and this is NVIDIA L4, f16"]),
        (
            Cards(H100.names, None),
            ["tuned on NVIDIA H100 80GB HBM3, f16, and this is NVIDIA H100 80GB HBM3, as compiled"],
        ),
        (
            Cards(H100.names * 2, "f16"),
            ["tuned on NVIDIA H100 80GB HBM3, f16, and this is 2 cards (NVIDIA H100 80GB HBM3), f16"],
        ),
    ],
)
def test_other_cards_are_told_apart(here: Cards, said: list[str], artifact: str) -> None:
    tuned = Configuration(card_setup(1, 64), cards=H100)
    assert tuned.mismatches(artifacts.open(artifact), here) == said


def test_the_processor_refuses_what_is_for_cards(
    artifact: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    Configuration(card_setup(1, 64), cards=H100).write(file)
    message = r"is for a card \(NVIDIA H100 80GB HBM3, f16\), and this is the processor; choose the device"
    with pytest.raises(InputError, match=message):
        encast.load(artifact, config=file)
    assert main(["launch", "--config", str(file), "--dry-run", "--", "true"]) == 2
    assert "and this is the processor" in capsys.readouterr().err


def test_cards_have_options_of_their_own(artifact: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tune", artifact, "--workload", "8:4", "--out", str(tmp_path / "x.json")]
    for more, message in (
        (["--device", "gpu"], "device is 'gpu'; --device takes cuda, cuda:1"),
        (["--device", "cuda", "--device", "cuda:0"], "which is given twice"),
        (["--device", "cuda", "--card-dtype", "f64"], "card's dtype is 'f64'"),
        (["--card-dtype", "f16"], "--card-dtype is for cards; give --device too"),
    ):
        assert main([*arguments, *more]) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
