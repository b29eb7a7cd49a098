"""``encast serve --device``: an instance on each card; here on the CPU, by the same steps (``torch-cpu``)."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-gpu")
torch.set_num_threads(1)  # as in tests/gpu: threads of tiny products only wait for each other

from checkpoints import make_checkpoint  # noqa: E402
from servers import start_server  # noqa: E402

import encast  # noqa: E402
from encast import artifact  # noqa: E402
from encast.backends.devices import check_cards  # noqa: E402
from encast.backends.gpu.runnable import GpuRunnable  # noqa: E402
from encast.batch import Batch  # noqa: E402
from encast.cli.main import main  # noqa: E402
from encast.errors import InputError, ResourceError  # noqa: E402
from encast.serve.cards import Cards, DeadCardError  # noqa: E402
from encast.serve.engine import open_model  # noqa: E402
from encast.serve.options import ServeOptions  # noqa: E402
from encast.serve.supervisor import differs  # noqa: E402

ALONE = {"OMP_NUM_THREADS": "1"}
TEXTS = ["the cat", "he is on that with the of and " * 4, "for was"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cards")
    made = make_checkpoint(folder / "bert", "bert", "embed", pooling=("mean",), normalize=True)
    return encast.compile(made, folder / "m.encast", dtype="f32")


def embed(url: str, texts: list[str]) -> np.ndarray[Any, Any]:
    body = json.dumps({"model": "m", "texts": texts}).encode()
    request = Request(f"{url}/encast/v1/embed", body, {"content-type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        return np.array(json.load(answer)["results"], np.float32)


def test_a_server_answers_as_the_device_does(path: Path) -> None:
    arguments = (f"m={path}", "--device", "torch-cpu", "--card-dtype", "bf16", "--max-wait-ms", "60000")
    with start_server(*arguments, env=ALONE) as server, encast.load(path, threads=1) as cpu:
        (line,) = (line for line in server.out if "serving" in line)
        assert "m (embed, f32; torch-cpu in bf16, 8192 tokens)" in line
        assert any("device: cpu (the CPU, by PyTorch)" in line for line in server.err), "what runs is said"
        assert "encast: values: bfloat16" in server.err
        with encast.load(path, device="torch-cpu", dtype="bf16") as card:
            wanted = card.embed(TEXTS)
        found = embed(server.url, TEXTS)
        # Texts that share a batch are packed, and products of bf16 may sum in another order for other sizes.
        np.testing.assert_allclose(found, wanted, atol=2e-3)
        assert np.abs(found - cpu.embed(TEXTS)).max() > 1e-4, "that is bf16"
        assert server.end() == 0


def test_each_card_has_an_instance_and_they_run_side_by_side(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(str(path), ServeOptions(devices=("torch-cpu", "torch-cpu"), batch_tokens=512))
    assert (model.words, model.setup.batch_tokens) == ("torch-cpu and torch-cpu, 512 tokens", 512)
    (places,) = model.queue.places.by_group
    assert [place.instance for place in places] == [0, 1]
    assert model.queue.places.between == dict.fromkeys(places), "none stops for another"
    assert len({id(one) for one in model.runnable._runnables}) == 2
    both, real = threading.Barrier(2, timeout=30), GpuRunnable.run

    def run(self: Any, *arguments: Any) -> Any:
        both.wait()
        return real(self, *arguments)

    monkeypatch.setattr(GpuRunnable, "run", run)
    batch, answers = Batch.of([[7, 8, 9]]), {}

    def ask(instance: int) -> None:
        answers[instance] = model.runnable.run("embedding", batch, group=0, instance=instance)

    threads = [threading.Thread(target=ask, args=(instance,)) for instance in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    np.testing.assert_array_equal(answers[0], answers[1])
    model.queue.places.start(places[0])
    assert model.queue.places._may_start(places[1], type("Held", (), {"cpus": set(), "threads": 0})())


@pytest.mark.parametrize("batch_tokens", [None, 3000])
def test_the_warm_up_runs_every_size_up_to_the_largest_batch(
    batch_tokens: int | None, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, real = [], Cards.run

    def run(self: Any, output: str, batch: Batch, *arguments: Any, **options: Any) -> Any:
        seen.append((batch.tokens, int(np.diff(batch.cu_seqlens).max())))
        return real(self, output, batch, *arguments, **options)

    monkeypatch.setattr(Cards, "run", run)
    model = open_model(str(path), ServeOptions(devices=("torch-cpu",), batch_tokens=batch_tokens))
    largest = batch_tokens or 8192
    assert model.queue.limits.batch_tokens == largest
    assert {tokens for tokens, _ in seen} >= {8, 12, 48, 1024, 1536, 2048, largest}
    assert max(tokens for tokens, _ in seen) == largest
    assert max(longest for _, longest in seen) == 48, "the model's longest text"
    assert model.queue.limits.max_tokens == 1 << 22


@pytest.mark.parametrize("dtype", ["f16", "f8"])
def test_the_canary_is_right_in_the_dtype_of_the_card(dtype: str, path: Path) -> None:
    """The supervisor compares it with the float64 reference."""
    with start_server(f"m={path}", "--device", "torch-cpu", "--card-dtype", dtype, env=ALONE) as server:
        assert embed(server.url, TEXTS).shape == (3, 64)


@pytest.mark.parametrize(("moved", "error"), [(1e-6, False), (1.0, True)])
def test_cards_need_not_give_the_same_bits_to_the_canary(
    moved: float, error: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Cards.run

    def run(self: Any, *arguments: Any, instance: int, **options: Any) -> Any:
        rows = real(self, *arguments, instance=instance, **options)
        rows[:, 0] += moved * instance
        return rows

    monkeypatch.setattr(Cards, "run", run)
    options = ServeOptions(devices=("torch-cpu", "torch-cpu"), batch_tokens=64)
    with pytest.raises(InputError, match="2 different answers to the canary") if error else contextlib.nullcontext():
        open_model(str(path), options)


def test_an_error_of_cuda_ends_the_thread_and_a_shortage_of_memory_does_not(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a dead card, which fails at once, would be the one that is free."""
    cards, batch = Cards(artifact.open(path), ["torch-cpu"], None), Batch.of([[7, 8]])

    def fails(error: Exception) -> None:
        def run(*arguments: Any) -> None:
            raise error

        monkeypatch.setattr(GpuRunnable, "run", run)

    fails(RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(DeadCardError, match="illegal memory access"):
        cards.run("embedding", batch, group=0, instance=0)
    assert not issubclass(DeadCardError, Exception)
    fails(ResourceError("cuda:0: no memory is left"))
    with pytest.raises(ResourceError):
        cards.run("embedding", batch, group=0, instance=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "gpu"], "device is 'gpu'; a server takes cuda, cuda:1"),
        (["--device", "cuda:x"], "device is 'cuda:x'; .* 'cuda:1' for the second card"),
        (["--device", "reference"], r"device is 'reference'; a server takes cuda, cuda:1"),
        (["--device", "cpu"], "device is 'cpu'; a server takes cuda, cuda:1, .*without any runs on the CPU"),
        (["--device", "cuda:1", "--device", "cuda:01"], "device is 'cuda:01', which is given twice"),
        (["--device", "cuda", "--device", "cuda:0"], "device is 'cuda:0', which is given twice"),
        (["--device", "cuda", "--card-dtype", "f64"], "card's dtype is 'f64'; one of f32, f16, bf16, f8"),
        (["--device", "cuda", "--threads", "2"], "--device has one instance a card"),
        (["--device", "cuda", "--instances", "2"], "--device has one instance a card"),
        (["--card-dtype", "f16"], "--card-dtype is for cards; give --device too"),
    ],
)
def test_what_is_refused(arguments: list[str], message: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(path), *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_several_cards() -> None:
    check_cards(("cuda:0", "cuda:1"), "f16", "a server")


def test_a_card_that_is_not_there_ends_the_server_with_the_reason(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    with pytest.raises(ResourceError, match="device 'cuda'"):
        open_model(str(path), ServeOptions(devices=("cuda",)))
    assert main(["serve", str(path), "--device", "cuda", "--port", "0"]) != 0
    assert "device 'cuda'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("devices", "moved", "wrong"),
    [((), 0.0, ""), ((), 1e-6, "other bits"), (("cuda",), 1e-6, ""), (("cuda",), 0.5, "cosine 0")],
)
def test_the_canary_of_an_engine_that_was_replaced(devices: tuple[str, ...], moved: float, wrong: str) -> None:
    """Each is judged by its own options: the shadow of a server on cards runs on the CPU."""
    engine: Any = SimpleNamespace(name="e", options=ServeOptions(devices=devices), least_cosine=0.999)
    engine.canary = np.array([0.6, 0.8], np.float32).tobytes()
    found = differs(engine, np.array([0.6 + moved, 0.8], np.float32).tobytes())
    assert bool(found) == bool(wrong)
    assert wrong in found
