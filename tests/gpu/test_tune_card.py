"""``encast tune --device``, and what takes its file; on the CPU, by the steps of a card (``torch-cpu``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-gpu")
pytest.importorskip("optuna", reason="Optuna is not installed: the extra bench")

from checkpoints import make_checkpoint

import encast
from encast.backends.gpu.graphs import bucket, bucket_of
from encast.backends.gpu.runnable import GpuRunnable
from encast.backends.groups import Setup, setup_to_json
from encast.cli.main import main
from encast.errors import InputError, StrictError
from encast.serve.engine import open_model
from encast.serve.options import ServeOptions
from encast.tune.cards import CardEvaluator
from encast.tune.configuration import card_setup
from encast.tune.measurement import Measurement
from encast.tune.process import requests_file
from encast.tune.space import make_card_space
from encast.tune.worker import _CardSession

HERE = "the CPU, by PyTorch"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    made = make_checkpoint(folder / "bert", "bert", "embed", pooling=("mean",), normalize=True)
    return encast.compile(made, folder / "m.encast", dtype="f32")


def batch(*lengths: int) -> encast.Batch:
    return encast.Batch.of([[7] * length for length in lengths])


def test_full_batches_have_no_padding() -> None:
    assert all(bucket(tokens, 1) == (tokens, 2) for tokens in make_card_space(1, [8]).batch_tokens)


def test_a_set_up_captures_the_graphs_of_all_its_batches(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each card; after that a measurement meets no batch without a graph."""
    requests = batch(3, 40, 8, 21, 5)
    job = {
        "setup": setup_to_json(card_setup(2, 1)),
        "artifact": str(path),
        "requests": str(requests_file(tmp_path, requests.token_ids, requests.cu_seqlens, None)),
        "output": "embedding",
        "selects": False,
        "devices": ["torch-cpu", "torch-cpu"],
        "dtype": "bf16",
    }
    session = _CardSession(job)
    assert session.ready() == {"ready": True, "cards": (HERE, HERE)}
    seen: dict[int, set[Any]] = {}
    real = GpuRunnable.run

    def run(self: Any, output: str, given: encast.Batch, select: Any = None) -> Any:
        assert self.stored == torch.bfloat16
        seen.setdefault(id(self), set()).add(bucket_of(given))
        return real(self, output, given, select)

    monkeypatch.setattr(GpuRunnable, "run", run)
    session.use({"batch_tokens": 128})
    first, second = seen.values()
    assert first == second
    captured = set(first)
    assert {tokens for tokens, _ in captured} == {32, 64, 96, 128}
    found = session.saturate({"seconds": 0.1, "longest": 1.0})
    assert found["rate"] > 0
    stream = {"rate": 200.0, "seconds": 0.2, "seed": 0, "percent": 50.0, "give_up_ns": 10**10}
    assert session.stream(stream)["texts"] == 40
    assert set().union(*seen.values()) == captured
    seen.clear()
    probe = session.probe({"tokens": 100, "seconds": 0.01, "instances": 1})
    assert probe["nanoseconds"] > 0
    assert len(seen) == 2, "every card was warm before a run was timed"


def test_one_process_measures_set_ups_by_turns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encast.tune.evaluate._BURST_SECONDS", 0.05)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options: dict[str, Any] = {"output": "embedding", "selects": False, "slo": None}
    with CardEvaluator(path, batch(8, 20, 8), devices=["torch-cpu"], dtype=None, **options) as evaluator:
        assert evaluator.names == (HERE,)
        process = evaluator._worker
        small, odd = evaluator.measure([card_setup(1, 64), card_setup(1, 8)])
        assert evaluator._worker is process
    assert small.failed is None
    assert small.rate > 0
    assert odd.failed is None, "a longer text runs alone"


class Made:
    """Stands for ``CardEvaluator``: batches of 1024 tokens are best."""

    names = (HERE,)

    def __init__(self, *_: Any, **options: Any) -> None:
        assert (options["devices"], options["dtype"]) == (["torch-cpu"], "bf16")

    def __enter__(self) -> Made:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def probe(self, tokens: int, threads: int, instances: int) -> float:
        return 1e-3 + tokens * 1e-6

    def measure(self, setups: Sequence[Setup]) -> list[Measurement]:
        rates = [1000.0 - abs(np.log2(setup.batch_tokens / 1024)) for setup in setups]
        return [Measurement(float(rate), 2000.0, {"p99": 5.0}) for rate in rates]


@pytest.fixture
def tuned(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """What the command writes and, in ``capsys``, says."""
    monkeypatch.setattr("encast.tune.cards.CardEvaluator", Made)
    arguments = ["--workload", "8:10,40:3", "--slo", "p99=10ms", "--device", "torch-cpu", "--card-dtype", "bf16"]
    file = tmp_path / "x.json"
    assert main(["tune", str(path), *arguments, "--out", str(file)]) == 0
    return file


def test_the_file_and_what_takes_it(path: Path, tuned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(tuned.read_text())
    assert document["cards"] == {"names": [HERE], "dtype": "bf16"}
    assert document["chosen"] == {"batch_tokens": 1024}
    assert document["front"][0]["setup"] == {"batch_tokens": 1024}
    assert "cores" not in document["trials"][0]
    assert len({row["setup"]["batch_tokens"] for row in document["trials"]}) == 15
    shown = capsys.readouterr().out
    assert shown.startswith("1024 tokens: 1,000 texts/s, the most with p99 within 10 ms\n")
    assert "set-up: tokens of one batch" in shown
    assert f"encast serve ARTIFACT --device torch-cpu --card-dtype bf16 --config {tuned}" in shown
    with encast.load(path, device="torch-cpu", dtype="bf16", config=tuned, strict=True) as engine:
        assert engine.session.batch_tokens == 1024
    with encast.load(path, device="torch-cpu", dtype="bf16", config=tuned, batch_tokens=64) as engine:
        assert engine.session.batch_tokens == 64
    served = ServeOptions(devices=("torch-cpu",), card_dtype="bf16", config=str(tuned))
    model = open_model(str(path), served)
    assert model.queue.limits.batch_tokens == model.setup.batch_tokens == 1024


def test_another_dtype_or_number_of_cards_is_a_warning(path: Path, tuned: Path) -> None:
    with pytest.warns(UserWarning, match=rf"tuned on {HERE}, bf16, and this is {HERE}, as compiled; run `encast tune`"):
        encast.load(path, device="torch-cpu", config=tuned).close()
    with pytest.raises(StrictError, match="and this is"):
        encast.load(path, device="torch-cpu", config=tuned, strict=True)
    two = ServeOptions(devices=("torch-cpu", "torch-cpu"), card_dtype="bf16", config=str(tuned), batch_tokens=64)
    with pytest.warns(UserWarning, match=rf"and this is 2 cards \({HERE}\), bf16"):
        model = open_model(str(path), two)
    with pytest.warns(UserWarning, match=rf"and this is 2 cards \({HERE}\), bf16"):
        encast.load(path, device=["torch-cpu", "torch-cpu"], dtype="bf16", config=tuned).close()
    assert model.queue.limits.batch_tokens == model.setup.batch_tokens == 64, "the option goes before the file"


def test_what_is_for_the_processor_is_refused(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("encast.serve.supervisor.Supervisor", None)  # it is said before anything starts
    document = {"schema": 1, "chosen": {"groups": [{"instances": 1, "threads": 1}], "batch_tokens": 64}}
    with pytest.raises(InputError, match="config is for the processor: it says instances and threads"):
        encast.load(path, device="torch-cpu", config=document)
    file = tmp_path / "x.json"
    file.write_text(json.dumps(document))
    assert main(["serve", str(path), "--device", "torch-cpu", "--config", str(file)]) == 2
    assert "is for the processor" in capsys.readouterr().err
    file.write_text(json.dumps({"schema": 1, "cards": {"names": [HERE]}, "chosen": {"batch_tokens": 64}}))
    assert main(["serve", str(path), "--config", str(file)]) == 2
    assert "and this is the processor" in capsys.readouterr().err
    with pytest.raises(InputError, match="'reference' does not take config"):
        encast.load(path, device="reference", config=file)
