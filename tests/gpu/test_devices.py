"""The devices "cuda" and "torch-cpu" of ``encast.load``: answers, options, and what is refused at load."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-gpu")

from cases import open_case
from checkpoints import make_checkpoint
from m3_checkpoints import make_m3_checkpoint
from models import compiled_graph

import encast
from encast import artifact
from encast.backends.gpu import device as devices
from encast.backends.gpu import program as programs
from encast.backends.gpu.runnable import GpuRunnable
from encast.backends.gpu.steps import STEPS
from encast.cli.main import main
from encast.errors import ArtifactError, InputError, ResourceError, UnsupportedModelError
from encast.sparsity import Pattern, prune_checkpoint

TEXTS = ["abc de", "a", "the cat sat on the mat " * 6, "b c d e f g"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("devices") / "bert", "bert", "embed", pooling=("mean",), normalize=True
    )


@pytest.fixture(scope="module")
def path(folder: Path) -> Path:
    return encast.compile(folder, folder.with_name("f32.encast"), dtype="f32")


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
def test_texts_to_embeddings(dtype: str, folder: Path, tmp_path: Path) -> None:
    """From the packed weights of an artifact, beside the CPU's kernels."""
    made = encast.compile(folder, tmp_path / "model.encast", dtype=dtype)
    with encast.load(made, threads=1) as cpu, encast.load(made, device="torch-cpu") as gpu:
        a, b = cpu.embed(TEXTS), gpu.embed(TEXTS)
    assert (a * b).sum(axis=1).min() > {"f32": 1 - 1e-6, "bf16": 0.9998, "int8": 0.99}[dtype]
    if dtype == "f32":
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_the_three_embeddings_of_m3(tmp_path: Path) -> None:
    make_m3_checkpoint(tmp_path / "m3")
    made = encast.compile(tmp_path / "m3", tmp_path / "model.encast", dtype="f32", task="embed_m3")
    with encast.load(made, threads=1) as cpu, encast.load(made, device="torch-cpu") as gpu:
        for a, b in zip(cpu.embed_m3(TEXTS), gpu.embed_m3(TEXTS), strict=True):
            np.testing.assert_allclose(a.embedding, b.embedding, atol=2e-5)
            np.testing.assert_array_equal(a.sparse.indices, b.sparse.indices)
            np.testing.assert_allclose(a.sparse.values, b.sparse.values, atol=2e-5)
            np.testing.assert_allclose(a.tokens.vectors, b.tokens.vectors, atol=2e-5)


def test_sparse_products_are_made_dense(tmp_path: Path, folder: Path) -> None:
    prune_checkpoint(folder, tmp_path / "pruned", pattern=Pattern(4, 1), sparsity=0.8)
    dense, sparse = (
        encast.compile(tmp_path / "pruned", tmp_path / f"{choice}.encast", sparse=choice)
        for choice in ("never", "always")
    )
    answers = []
    for one in (dense, sparse):
        with encast.load(one, device="torch-cpu") as engine:
            answers.append(engine.embed(TEXTS))
            report = engine.runnable.report()  # type: ignore[attr-defined]
    np.testing.assert_array_equal(*answers)
    assert any("sparse products are dense" in line for line in report)


def test_a_report_says_what_runs(folder: Path, tmp_path: Path) -> None:
    made = encast.compile(folder, tmp_path / "model.encast", dtype="int8")
    with encast.load(made, device="torch-cpu", dtype="f16") as engine:
        report = engine.runnable.report()  # type: ignore[attr-defined]
    assert report[0].startswith("device: cpu (the CPU, by PyTorch), PyTorch ")
    assert "values: float16" in report
    assert "changed: 3 x int8 products inside attention are bf16" in report
    (steps,) = (line for line in report if line.startswith("by "))
    assert steps.startswith("by PyTorch: ")
    assert {"attention", "linear_int8"} <= {*steps[12:].split(", ")}


def test_a_triton_that_was_installed_under_another_name(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As builds of PyTorch do (pytorch-triton)."""
    triton = pytest.importorskip("triton")

    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", absent)
    _, graph = compiled_graph("bert-embed", "f32", tmp_path_factory)
    gpu = GpuRunnable(graph, "torch-cpu", kernels="triton")
    assert gpu.numbers()["Triton"] == triton.__version__


def test_other_options_are_refused(path: Path) -> None:
    for options, message in (
        ({"threads": 2}, "device 'torch-cpu' does not take threads; leave it out"),
        ({"pin": False}, "device 'torch-cpu' does not take pin"),
        ({"dtype": "f64"}, r"dtype is 'f64'; 'f32', 'f16', 'bf16', 'f8', 'f16-acc16' are known"),
    ):
        with pytest.raises(InputError, match=message):
            encast.load(path, device="torch-cpu", **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"device 'cpu' does not take dtype; .* choose the device 'cuda', which does"):
        encast.load(path, dtype="f16")
    with pytest.raises(InputError, match="kernels is 'fast'"):
        GpuRunnable(artifact.open(path).load_graph(), "torch-cpu", kernels="fast")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:one", "cuda:-1", "cpu:0", "torch-cpu:0", "cuda:\u0661"])
def test_unknown_devices(name: str, path: Path) -> None:
    with pytest.raises(InputError, match=r"device is .* known, and 'cuda:1' for the second card"):
        encast.load(path, device=name)


def test_a_damaged_weight_is_found(path: Path, tmp_path: Path) -> None:
    import shutil

    damaged = shutil.copytree(path, tmp_path / "damaged.encast")
    weights = bytearray((damaged / "weights.safetensors").read_bytes())
    weights[-70] ^= 1
    (damaged / "weights.safetensors").write_bytes(weights)
    with pytest.raises(ArtifactError, match="does not match its checksum"):
        encast.load(damaged, device="torch-cpu")


def test_no_pytorch(path: Path) -> None:
    code = f"""
import sys, importlib.abc
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split('.')[0] in ('torch', 'triton'):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hide())
import importlib.util, encast, encast.errors
found = encast.errors.find_spec
encast.errors.find_spec = lambda name: None if name == 'torch' else found(name)
with encast.load({str(path)!r}, threads=1) as engine:
    engine.forward([[1, 2]])
try:
    encast.load({str(path)!r}, device='cuda')
except encast.errors.InputError as error:
    print(error)
"""
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "not installed: torch; pip install 'encast[cuda]'"


def test_a_pytorch_without_cuda(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ResourceError, match=r"is built without CUDA; install one that is .*encast\[cuda\]"):
        encast.load(path, device="cuda")


def test_no_card(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ResourceError, match="PyTorch finds no CUDA card"):
        encast.load(path, device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ResourceError, match=r"device 'cuda:7': there are cards 0 to 1"):
        encast.load(path, device="cuda:7")


def test_a_card_without_the_products(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    card: Any = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(
        ResourceError, match=r"Tesla T4 \(compute capability 7.5\) has no products of bf16, which need 8.0"
    ):
        devices.stored_dtype("bf16", card)
    assert devices.stored_dtype("f16", card) == torch.float16
    if find_spec("triton") is not None:
        assert devices.why_no_triton(card) == "Triton needs compute capability 8.0, the card has 7.5"
    devices.need_int8(card)
    with pytest.raises(ResourceError, match=r"'f8' needs a card .* 9.0 or 10.x, Tesla T4 has 7.5; give dtype='f16'"):
        devices.stored_dtype("f8", card)
    assert devices.stored_dtype("f16-acc16", card) == torch.float16
    # Of an int8 artifact attention is bf16, unless values are f16.
    _, graph = compiled_graph("bert-embed", "int8", tmp_path_factory)
    monkeypatch.setattr("encast.backends.gpu.runnable.choose_device", lambda kind, index: card)
    with pytest.raises(ResourceError, match=r"has no products of bf16.*give dtype='f16'"):
        GpuRunnable(graph, "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    with pytest.raises(ResourceError, match=r"has no products of int8, which need 7\.5; compile to f32"):
        GpuRunnable(graph, "cuda", dtype="f16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    with pytest.raises(ResourceError, match=r"no products of f16 with sums in f16, which need 7\.0; give dtype='f16'"):
        devices.stored_dtype("f16-acc16", card)


@pytest.mark.parametrize("is_cuda", [True, False])
def test_programs_hand_their_steps_to_cards_one_at_a_time(is_cuda: bool) -> None:
    """What products are summed in is a setting of the process. The CPU has none, and its programs run side by side."""
    held = []

    def step(context: Any) -> Any:
        held.append((programs._HANDING.locked(), context.half_sums))
        return torch.zeros(1)

    call = programs._Call(None, step, (), ("made",), ())  # type: ignore[arg-type]
    program = programs.Program((call,), "made", torch.float16, by_length=True, selects=False, half_sums=True)
    waited = []

    def groups() -> None:
        waited.append(programs._HANDING.locked())

    ids = SimpleNamespace(is_cuda=is_cuda)
    batch: Any = SimpleNamespace(token_ids=ids, token_type_ids=None, select=None, groups=groups)
    program.run(batch)
    assert held == [(is_cuda, True)]
    assert waited == [False], "what waits for a card keeps no other from its steps"
    assert not programs._HANDING.locked()


def test_which_cards_have_room_for_the_tiles_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, shared, runs in (
        ((8, 9), 99, False),
        ((9, 0), 227, True),
        ((10, 0), 227, True),
        ((12, 0), 99, False),
    ):
        properties = SimpleNamespace(shared_memory_per_block_optin=shared << 10)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        assert devices.runs_products(torch.device("cuda", 0)) == runs


def test_f8_of_integers_is_refused_at_load(tmp_path_factory: pytest.TempPathFactory) -> None:
    _, graph = compiled_graph("bert-embed", "int8", tmp_path_factory)
    with pytest.raises(InputError, match="dtype is 'f8', and the artifact has weights of int8; compile the checkpoint"):
        GpuRunnable(graph, "torch-cpu", dtype="f8")


def test_a_graph_that_was_not_fused_is_refused_at_load(tmp_path_factory: pytest.TempPathFactory) -> None:
    plain = open_case("bert-features", tmp_path_factory).graph
    with pytest.raises(UnsupportedModelError, match=r"attention_scores has no step of its own on this device"):
        GpuRunnable(plain, "torch-cpu")


def test_a_closed_model_says_so(path: Path) -> None:
    gpu = GpuRunnable(artifact.open(path).load_graph(), "torch-cpu")
    gpu.close()
    gpu.close()
    with pytest.raises(InputError, match="the model is closed"):
        gpu.run("last_hidden_state", encast.Batch.of([[1]]))


def test_a_model_that_is_closed_beside_a_run_ends_it(path: Path) -> None:
    """``close`` waits for the run that has begun, and one that waits for its turn finds the model closed."""
    gpu = GpuRunnable(artifact.open(path).load_graph(), "torch-cpu")
    begun, go_on, answers = threading.Event(), threading.Event(), []
    program = gpu._programs["last_hidden_state"]

    def slow(packed: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return program.run(packed)

    gpu._programs["last_hidden_state"] = SimpleNamespace(run=slow, by_length=True, selects=False)  # type: ignore[assignment]

    def ask() -> None:
        try:
            answers.append(gpu.run("last_hidden_state", encast.Batch.of([[1]])).shape)
        except Exception as error:
            answers.append(error)

    threads = [threading.Thread(target=ask)]
    threads[0].start()
    assert begun.wait(60)
    threads.append(threading.Thread(target=gpu.close))
    threads[1].start()
    threads[1].join(0.1)
    assert threads[1].is_alive()
    go_on.set()
    for thread in threads:
        thread.join(60)
    ask()
    assert answers[0] == (1, 64)
    assert isinstance(answers[1], InputError)
    assert "the model is closed" in str(answers[1])


def test_a_batch_that_the_memory_does_not_hold(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.\nmore")

    gpu = GpuRunnable(artifact.open(path).load_graph(), "torch-cpu")
    monkeypatch.setattr("encast.backends.gpu.runnable.pack", full)
    with pytest.raises(
        ResourceError, match=r"no memory is left for a batch of 2 tokens \(CUDA.* 9.00 GiB\.\); .* smaller batch_tokens"
    ):
        gpu.run("last_hidden_state", encast.Batch.of([[1, 2]]))
    monkeypatch.setattr("encast.backends.gpu.runnable.build", full)
    with pytest.raises(ResourceError, match=r"no memory is left for the model's weights .*give dtype='f16'"):
        GpuRunnable(artifact.open(path).load_graph(), "torch-cpu")


class _NoCompiler:
    @property
    def active(self) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore")


def test_a_triton_that_cannot_launch_leaves_pytorchs_steps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: make test-gpu")
    card: Any = torch.device("cuda", 0)
    used = []

    def build(graph: Any, steps: Any, *_: Any, **__: Any) -> Any:
        used.append(steps)
        return {}, {"attention": "PyTorch"}

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr("triton.runtime.driver", _NoCompiler())
    monkeypatch.setattr("encast.backends.gpu.runnable.choose_device", lambda kind, index: card)
    monkeypatch.setattr("encast.backends.gpu.runnable.build", build)
    graph = artifact.open(path).load_graph()
    gpu = GpuRunnable(graph, "cuda", cuda_graphs=False)
    assert used == [STEPS]
    (line,) = (line for line in gpu.report() if line.startswith("without Triton's kernels: "))
    assert line.endswith("headers: Failed to find C compiler. Please specify via CC environment variable.")
    with pytest.raises(ResourceError, match=r"kernels is 'triton': Triton's driver does not work.*leave kernels out"):
        GpuRunnable(graph, "cuda", kernels="triton", cuda_graphs=False)
    assert not any(
        "without Triton" in line for line in GpuRunnable(graph, "cuda", kernels="torch", cuda_graphs=False).report()
    )
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=SimpleNamespace(utils=None)))
    assert devices.why_no_triton(card) is None


def test_requests_are_checked(path: Path) -> None:
    with encast.load(path, device="torch-cpu") as engine, pytest.raises(InputError, match="the model takes 0 to 199"):
        engine.forward([[1, 200]])


def test_the_command_line(path: Path, tmp_path: Path) -> None:
    from encast.cli.main import main

    (tmp_path / "rows.txt").write_text("\n".join(TEXTS) + "\n")
    for device in ("cpu", "torch-cpu"):
        arguments = ["run", str(path), str(tmp_path / "rows.txt"), "-o", str(tmp_path / f"{device}.npy")]
        assert main([*arguments, "--device", device]) == 0
    np.testing.assert_allclose(np.load(tmp_path / "cpu.npy"), np.load(tmp_path / "torch-cpu.npy"), atol=2e-5)
    assert main([*arguments, "--device", "torch-cpu", "--threads", "2"]) == 2


def test_eval_measures_the_device(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.tsv"
    rows.write_text("text\tpair\tscore\nabc de\ta\t1\nthe cat\tthe mat\t3\nb c d\tb c\t5\n")
    made = tmp_path / "model.encast"
    shutil.copytree(path, made)
    asked = ["eval", str(made), str(rows), "--device", "torch-cpu", "--dtype", "f16"]
    assert main([*asked, "--against", str(made), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["dtype"]) == ("torch-cpu", "f16")
    assert 0.999 < found["against"]["agreement"]["cosine_min"] < 1, "the other one was measured in f32"
    assert main(asked[:3]) == 0
    name = f"{tmp_path.name}/rows.tsv"
    kept = artifact.open(made).card["accuracy"]
    assert set(kept) == {name, f"{name} on torch-cpu, f16"}
    assert "device" not in kept[name]
    capsys.readouterr()
    assert main([*asked[:3], "--dtype", "f16"]) == 2
    assert "device 'cpu' does not take dtype" in capsys.readouterr().err
    assert set(artifact.open(made).card["accuracy"]) == set(kept)
