"""Several cards in one engine: here the CPU twice, by the same steps (``torch-cpu``)."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-gpu")

from checkpoints import make_checkpoint

import encast
from encast.backends.cards import CardError, Cards
from encast.backends.devices import find_devices
from encast.backends.gpu.runnable import GpuRunnable
from encast.batch import Batch
from encast.cli.main import main
from encast.engine import Engine
from encast.errors import InputError, ResourceError

TWO = ["torch-cpu", "torch-cpu"]
TEXTS = [f"{'the cat sat on the mat ' * (index % 5)}for {index}" for index in range(40)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cards")
    made = make_checkpoint(folder / "bert", "bert", "embed", layers=1, pooling=("mean",), normalize=True)
    return encast.compile(made, folder / "model.encast", dtype="f32")


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with encast.load(path, device=TWO, batch_tokens=64) as loaded:
        yield loaded


def cards_of(engine: Engine) -> list[GpuRunnable]:
    assert isinstance(engine.runnable, Cards)
    return engine.runnable._runnables


def both_at_once(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The first run of each card waits for that of the other; returns who ran."""
    both, first, real = threading.Barrier(2, timeout=30), threading.local(), GpuRunnable.run
    used: set[int] = set()

    def run(self: Any, *arguments: Any) -> Any:
        used.add(id(self))
        if not hasattr(first, "over"):
            first.over = True
            both.wait()
        return real(self, *arguments)

    monkeypatch.setattr(GpuRunnable, "run", run)
    return used


def test_answers_have_the_bits_that_one_card_gives(path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call is on both cards at once: each of the first runs waits for the other."""
    with encast.load(path, device="torch-cpu", batch_tokens=64) as one:
        vectors, states = one.embed(TEXTS), one.forward([[7, 8, 9] * 6] * 9)
    used = both_at_once(monkeypatch)
    np.testing.assert_array_equal(engine.embed(TEXTS), vectors)
    assert used == set(map(id, cards_of(engine)))
    np.testing.assert_array_equal(engine.forward([[7, 8, 9] * 6] * 9), states)


def test_what_is_said_of_each_card(engine: Engine) -> None:
    assert engine.at_once == 4, "two a card"
    cards: Any = engine.runnable
    assert sum(line.startswith("device: cpu (the CPU, by PyTorch)") for line in cards.report()) == 2
    assert cards.numbers() == {
        "the card": "the CPU, by PyTorch", "PyTorch": torch.__version__, "CUDA": str(torch.version.cuda),
        "Triton": "not used",
    }  # fmt: skip


def test_a_card_that_fails_is_named_and_the_other_one_goes_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    real, bad = GpuRunnable.run, cards_of(engine)[1]
    cards: Any = engine.runnable
    monkeypatch.setattr(cards, "_names", ("cuda:0", "cuda:1"))

    def run(self: Any, *arguments: Any) -> Any:
        if self is bad:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with")
        return real(self, *arguments)

    monkeypatch.setattr(GpuRunnable, "run", run)

    def embed_until_it_had_a_run() -> None:
        while True:
            engine.embed(TEXTS)

    message = r"cuda:1: the card failed \(CUDA error: an illegal memory access was encountered\); .* start it again$"
    with pytest.raises(CardError, match=message):
        embed_until_it_had_a_run()
    batch = Batch.of([[7, 8, 9]])
    assert cards.run("embedding", batch, instance=0).shape == (1, 64)
    monkeypatch.setattr(GpuRunnable, "run", real)
    assert engine.embed(TEXTS).shape == (40, 64)


def test_closing_ends_the_threads_after_the_runs_that_have_begun(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = encast.load(path, device=TWO)
    cards: Any = engine.runnable
    begun, go_on, real = threading.Event(), threading.Event(), GpuRunnable.run

    def run(self: Any, *arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return real(self, *arguments)

    monkeypatch.setattr(GpuRunnable, "run", run)
    future = cards.begin("embedding", Batch.of([[7, 8, 9]]))
    assert begun.wait(30)
    threads = list(cards._threads._threads)
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    go_on.set()
    closing.join(30)
    assert future.result(0).shape == (1, 64)
    assert threads
    assert not any(thread.is_alive() for thread in threads)
    engine.close()
    with pytest.raises(InputError, match="the engine is closed"):
        engine.embed(TEXTS)
    with pytest.raises(InputError, match="the model is closed"):
        cards.run("embedding", Batch.of([[7]]))


def test_a_forked_child_is_told_that_it_has_no_threads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with encast.load(path, device=TWO) as engine:
        here = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: here + 1)
        with pytest.raises(
            ResourceError, match="a forked child has none of its threads; load the artifact in the child"
        ):
            engine.embed(TEXTS)
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        ([], {}, r"device is an empty list; name .* \['cuda:0', 'cuda:1'\]"),
        (["cuda:0", "cuda:1", "cuda:00"], {}, "device is 'cuda:00', which is given twice; a card has one instance"),
        (("cuda", "cuda:0"), {}, "device is 'cuda:0', which is given twice"),
        (["cpu", "cuda:0"], {}, r"device is \['cpu', 'cuda:0'\]; several devices are cards, .* nothing else"),
        (["cuda:0", "torch-cpu"], {}, r"device is \['cuda:0', 'torch-cpu'\]; several devices"),
        (["reference", "reference"], {}, r"device is \['reference', 'reference'\]; several"),
        (["cuda:0", "gpu"], {}, "device is 'gpu'; .* are known"),
        (["cuda:0", 1], {}, "device is 1; .* are known"),
        ({"cuda:0"}, {}, "device is .* are known"),
        (TWO, {"instances": 2}, "device 'torch-cpu' does not take instances; leave it out"),
        (TWO, {"dtype": "f64"}, "dtype is 'f64'; 'f32', 'f16'"),
    ],
)
def test_what_is_refused(path: Path, device: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        encast.load(path, device=device, **options)


def test_a_list_of_one_is_that_device(path: Path) -> None:
    with encast.load(path, device=["torch-cpu"], dtype="bf16") as engine:
        assert isinstance(engine.runnable, GpuRunnable)
    with encast.load(path, device=["cpu"], threads=1) as engine:
        assert engine.embed(["a"]).shape == (1, 64)
    find_devices(("cuda:0", "cuda:1"), ("dtype",))


def test_the_command_line(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.txt").write_text("\n".join(TEXTS * 5) + "\n")
    given = ["run", str(path), str(tmp_path / "rows.txt"), "--batch-tokens", "64", "--json"]
    one, two = (str(tmp_path / f"{count}.jsonl") for count in (1, 2))
    assert main([*given, "-o", one, "--device", "torch-cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "torch-cpu"
    assert main([*given, "-o", two, "--device", "torch-cpu", "--device", "torch-cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == TWO
    assert Path(one).read_bytes() == Path(two).read_bytes()


def test_a_job_shares_its_rows_out_and_goes_on_with_other_cards_of_the_kind(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [str(tmp_path / f"{number}.txt") for number in range(3)]
    for number, name in enumerate(inputs):
        Path(name).write_text("\n".join(TEXTS[number:] * 2) + "\n")

    def job(output: str, *options: str) -> int:
        given = ["run", str(path), *inputs, "-o", str(tmp_path / output), "--shard-rows", "16", "--batch-tokens", "64"]
        return main([*given, *options])

    assert job("one", "--device", "torch-cpu", "--dtype", "bf16") == 0
    with monkeypatch.context() as patched:
        used = both_at_once(patched)
        assert job("two", "--device", "torch-cpu", "--device", "torch-cpu", "--dtype", "bf16") == 0
    assert len(used) == 2
    parts = sorted(one.name for one in (tmp_path / "one").glob("part-*"))
    assert len(parts) == 15
    assert all((tmp_path / "one" / part).read_bytes() == (tmp_path / "two" / part).read_bytes() for part in parts)
    (tmp_path / "one" / parts[3]).unlink()
    assert job("one", "--device", "torch-cpu", "--device", "torch-cpu", "--dtype", "bf16") == 0
    assert (tmp_path / "one" / parts[3]).read_bytes() == (tmp_path / "two" / parts[3]).read_bytes()
