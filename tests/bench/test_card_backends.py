"""Backends on a GPU: what they compute, by PyTorch on the CPU, and what the laboratory asks of those on a card."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_tensorrt
import numpy as np
import pytest
import yaml
from checkpoints import make_checkpoint
from lab import backends, measure
from torch_threads import one_operation_at_a_time  # noqa: F401, a fixture of all tests here

import encast.bench
from encast.backends.reference import Reference
from encast.batch import Batch
from encast.bench.agreement import LEAST_COSINE, plain_graph
from encast.bench.peers.base import BackendSpec, ModelFiles, Peer, load_peer
from encast.bench.peers.card import captured
from encast.bench.roofline import peak_is_known
from encast.ceilings.card import CardCeilings, keep_card
from encast.errors import InputError, ResourceError

CONF = Path(encast.bench.__file__).parent / "conf" / "backend"
YAMLS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(CONF.glob("*-cuda-*.yaml"))}
ONNX = [name for name in YAMLS if name.startswith("onnxruntime")]
TENSORRT = [name for name in YAMLS if name.startswith("tensorrt")]
LENGTHS = (3, 11, 7, 16, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = make_checkpoint(tmp_path_factory.mktemp("models") / "bert", "bert", "features", layers=1, vocab=320)
    return ModelFiles("tiny", folder, "sha-of-tiny")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of TensorRT, which needs a card to be imported."""
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt)
    monkeypatch.setattr("encast.bench.peers.tensorrt.TensorRT.device", "cpu")
    monkeypatch.setattr("encast.bench.peers.tensorrt.TensorRT._card", lambda _: "the CPU")
    fake_tensorrt.built.clear()


def batch_of(seed: int, lengths: tuple[int, ...] = LENGTHS) -> Batch:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(50, 320, length).tolist() for length in lengths]
    return Batch.of(rows, [rng.integers(0, 2, length).tolist() for length in lengths])


def make(name: str, model: ModelFiles, cache: Path, **options: Any) -> Peer:
    """A backend as its YAML says; skipped where its packages are not installed, card or no card."""
    found = load_peer(YAMLS[name]["peer"])
    if (why := super(found, found).missing()) is not None:
        pytest.skip(f"{name}: {why}")
    given = {key: value for key, value in YAMLS[name].items() if key not in ("name", "peer", "dtype")}
    return found(model, YAMLS[name]["dtype"], 1, cache, **{**given, **options})


def cosine(states: Any, model: ModelFiles, batch: Batch) -> float:
    wanted = Reference(plain_graph(model.checkpoint)).evaluate("last_hidden_state", batch)
    assert states.dtype == np.float32
    assert states.shape == wanted.shape
    return float(np.mean((states * wanted).sum(1) / np.linalg.norm(states, axis=1) / np.linalg.norm(wanted, axis=1)))


@pytest.mark.parametrize("name", [name for name in YAMLS if name not in TENSORRT])
def test_all_compute_the_model(name: str, model: ModelFiles, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = {} if name in ONNX else {"device": "torch-cpu"}
    peer = make(name, model, cache, **on_cpu)
    if name in ONNX:
        monkeypatch.setattr(type(peer), "provider", "CPUExecutionProvider")
        monkeypatch.setattr(type(peer), "provider_options", {})
    peer.export()
    peer.open()
    try:
        calls = [(peer.bind(batch), batch) for batch in (batch_of(0), batch_of(1), batch_of(2, (9, 9)))]
        for call, batch in (*calls, *calls[::-1]):
            assert cosine(call(), model, batch) >= LEAST_COSINE[YAMLS[name]["dtype"]]
        assert peer.facts()["version"]
    finally:
        peer.close()


def test_narrow_values_are_what_they_say(model: ModelFiles, cache: Path) -> None:
    """Products in f16 and f8 are off by their rounding: neither is f32 under another name."""
    off = {}
    for name in ("encast-cuda-f32", "encast-cuda-f16", "encast-cuda-bf16", "encast-cuda-f8"):
        peer = make(name, model, cache, device="torch-cpu")
        peer.open()
        off[name] = 1 - cosine(peer.bind(batch_of(0))(), model, batch_of(0))
        peer.close()
    f32, f16, bf16, f8 = off.values()
    assert f32 < f16 / 5 < f16 < bf16 / 5 < bf16 < f8 / 5


@pytest.mark.parametrize("name", YAMLS)
def test_without_a_card_there_is_a_reason(name: str, model: ModelFiles, cache: Path, monkeypatch: Any) -> None:
    make(name, model, cache)
    if name in ONNX:
        providers = ["CPUExecutionProvider"]
        monkeypatch.setattr("onnxruntime.get_available_providers", lambda: providers)
    else:
        torch = pytest.importorskip("torch")
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        monkeypatch.delattr(fake_tensorrt, "__version__")  # as a module that cannot be imported has none
    found = load_peer(YAMLS[name]["peer"]).missing()
    assert found is not None
    assert ("bench-onnxruntime-cuda" if name in ONNX else "finds no CUDA card") in found


def test_onnx_runtime_does_not_fall_back(model: ModelFiles, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run on the CPU and warn."""
    peer = make("onnxruntime-cuda-f32", model, cache)
    peer.export()
    fallen = SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr("onnxruntime.InferenceSession", lambda *_, **__: fallen)
    with pytest.raises(ResourceError, match="CUDAExecutionProvider does not start here, and CPUExecutionProvider"):
        peer.open()


@pytest.mark.parametrize("name", TENSORRT)
def test_an_engine_is_of_the_very_shape_and_dtype(name: str, model: ModelFiles, cache: Path) -> None:
    def opened() -> Any:
        peer = make(name, model, cache, builder_optimization_level=4)
        peer.open()
        return peer

    peer, batch = opened(), batch_of(0)
    assert cosine(peer.bind(batch)(), model, batch) >= LEAST_COSINE[peer.dtype]
    assert peer.tried, "the engine was built where the cold start would have been timed"
    (engine,) = fake_tensorrt.built
    assert engine.config.builder_optimization_level == 4
    assert not engine.config.flags, "f32 would be TF32"
    states = "f4" if name == "tensorrt-cuda-f32" else "f2"
    assert engine.types == [("i8", (5, 16))] * 3 + [(states, (5, 16, 64))]
    assert [*peer.facts()["build_seconds"]] == ["5x16"]
    peer.close()
    peer, other = opened(), batch_of(1, (16, 16, 16, 16, 16))
    assert cosine(peer.bind(other)(), model, other) >= LEAST_COSINE[peer.dtype]
    assert not peer.tried
    assert fake_tensorrt.built == [engine], "it was kept"


@pytest.mark.parametrize("empty", [True, False])
def test_what_tensorrt_says_is_in_the_error(
    empty: bool, model: ModelFiles, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx = pytest.importorskip("onnx")
    peer: Any = make("tensorrt-cuda-f16", model, cache)
    file = tmp_path / "model.onnx"
    file.write_bytes(onnx.ModelProto().SerializeToString() if empty else b"no graph")
    monkeypatch.setattr(type(peer), "_export", lambda *_: file)
    peer.open()
    said = "cannot build an engine: Network must" if empty else "cannot read the graph: Failed to parse"
    with pytest.raises(ResourceError, match=rf"TensorRT 11\.4\.0\.106 {said}"):
        peer.bind(batch_of(0))


def test_an_old_tensorrt_is_not_measured(model: ModelFiles, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("tensorrt-cuda-f16", model, cache)
    monkeypatch.setattr(fake_tensorrt, "__version__", "10.16.1.11")
    monkeypatch.setattr("encast.bench.peers.tensorrt.why_no_card", lambda: None)
    found = load_peer(YAMLS["tensorrt-cuda-f16"]["peer"]).missing()
    assert found is not None
    assert found.endswith("pip install 'encast[bench-tensorrt]'")
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tensorrt" else name)
    found = load_peer(YAMLS["tensorrt-cuda-f16"]["peer"]).missing()
    assert found == "not installed (tensorrt): pip install 'encast[bench-tensorrt]'"


def test_a_capture_has_run_before_and_answers_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    runs: list[int] = []
    graph = SimpleNamespace(replay=lambda: runs.append(-1))
    stream = SimpleNamespace(cuda_stream=7, synchronize=lambda: runs.append(0))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda _, stream: nullcontext())

    class Ids:
        """Stands for the memory that a graph reads by its address."""

    def run_of(ids: Ids) -> Callable[[int], object]:
        def run(address: int) -> object:
            assert ids
            runs.append(address)
            return object()

        return run

    ids = Ids()
    replay, alive = captured(run_of(ids), "cuda"), weakref.ref(ids)
    del ids
    assert runs == [7, 0, 7]
    assert replay() is replay()
    assert runs[3:] == [-1, -1]
    assert alive() is not None, "the graph would read what others have written there since"
    del replay
    gc.collect()
    assert alive() is None


def test_options_are_checked(model: ModelFiles, cache: Path) -> None:
    with pytest.raises(InputError, match="mode is 'fast'; one of eager, reduce-overhead, max-autotune is needed"):
        make("pytorch-cuda-f16", model, cache, mode="fast")
    peer = make("pytorch-cuda-f16", model, cache, device="torch-cpu")
    peer.open()
    with pytest.raises(InputError, match="the model takes 0 to 319"):
        peer.bind(Batch.of([[320]]))


@pytest.mark.parametrize(
    ("device", "on_card"),
    [
        ("cuda", True),
        ("cuda:1", True),
        ("torch-cpu", True),
        ("cpu", False),
        ("CPU", False),
        ("AUTO", False),
    ],
)
def test_which_devices_are_cards(device: str, on_card: bool) -> None:
    """A word of another runtime takes no rule away."""
    assert BackendSpec("mine", "mine.py:Mine", "f32", None, {"device": device}).on_card == on_card
    assert not BackendSpec("mine", "mine.py:Mine", "f32").on_card


@pytest.mark.serial("starts processes on processors of their own and times them")
def test_processors_are_no_limit_of_a_card(tmp_path: Path) -> None:
    quick = {"peer": "Honest", "dtype": "f32"}
    folder = backends(tmp_path, here=quick, card={**quick, "device": "cuda:1"})
    rows = measure(folder, ["here", "card"])
    assert [rows[name]["status"] for name in ("here", "card")] == ["ok", "ok"], [row["reason"] for row in rows.values()]
    assert rows["card"]["limit"] is None
    assert (rows["here"]["limit"] is not None) == peak_is_known()


@pytest.mark.serial("starts processes on processors of their own and times them")
def test_a_row_of_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("ENCAST_CACHE_DIR", str(tmp_path / "kept"))
    keep_card(CardCeilings("the CPU, by PyTorch", datetime.now(timezone.utc), {"f16": 1e15}, 1e12))
    options = {"peer": "OnTorch", "dtype": "f16", "device": "torch-cpu", "exact": False, "values": "f16"}
    row = measure(backends(tmp_path, ours=options), ["ours"])["ours"]
    assert row["status"] == "ok", row["reason"]
    assert row["agreement"]["bound"] == LEAST_COSINE["f16"]
    assert row["limit"]["ops_per_second"] == 1e15, "the card's, which doctor has measured"
    assert 0 < row["limit"]["fraction"] < 1
    assert "values: float16" in row["backend"]["facts"]["report"]
