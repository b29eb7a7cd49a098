"""``encast run --device`` over jobs; here on the CPU, by the same steps (``torch-cpu``)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-gpu")
torch.set_num_threads(1)  # as in tests/gpu: threads of tiny products only wait for each other

from job_rows import answers, content, text  # noqa: E402

import encast  # noqa: E402
import encast.cluster.replica as replicas  # noqa: E402
from encast.backends.gpu.runnable import GpuRunnable  # noqa: E402
from encast.cli.main import main  # noqa: E402
from encast.cluster.replica import Replica  # noqa: E402
from encast.errors import ResourceError  # noqa: E402
from encast.jobs.folder import JOB_FILE, read_begun  # noqa: E402
from encast.jobs.sealed import seal, unseal  # noqa: E402


def run(*arguments: Any) -> int:
    return main(["run", *map(str, arguments)])


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("".join(text(number) + "\n" for number in range(40)))
    return path


@pytest.fixture
def job(artifact: Path, rows: Path, tmp_path: Path) -> Path:
    """Finished, in four shards."""
    out = tmp_path / "out"
    assert run(artifact, rows, "-o", f"{out}/", "--shard-rows", 10, "--device", "torch-cpu", "--dtype", "bf16") == 0
    return out


def test_a_job_has_the_answers_of_the_device(artifact: Path, job: Path, rows: Path, tmp_path: Path) -> None:
    found = np.float32([one["embedding"] for one in answers(job)])
    texts = rows.read_text().splitlines()
    with encast.load(artifact, device="torch-cpu", dtype="bf16") as card, encast.load(artifact, threads=1) as cpu:
        # Other batches; products of bf16 may sum in another order.
        np.testing.assert_allclose(found, card.embed(texts), atol=2e-2)
        assert np.abs(found - cpu.embed(texts)).max() > 1e-4, "that is bf16"
    before = content(job)
    for part in sorted(job.glob("part-*"))[1:3]:
        part.unlink()
    assert run(artifact, rows, "-o", job, "--shard-rows", 10, "--device", "torch-cpu", "--dtype", "bf16") == 0
    assert content(job) == before


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "--device was torch-cpu, now it is cpu"),
        (["--device", "torch-cpu"], "--dtype was bf16, now it is f32"),
        (["--device", "torch-cpu", "--dtype", "f16"], "--dtype was bf16, now it is f16"),
    ],
)
def test_a_job_is_of_one_device_and_dtype(
    artifact: Path, job: Path, rows: Path, options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(artifact, rows, "-o", job, "--shard-rows", 10, *options) == 2
    assert f"holds another job: {reason}" in capsys.readouterr().err


def test_which_card_is_no_matter_and_f32_is_the_default(artifact: Path, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(artifact, rows, "-o", f"{out}/", "--device", "torch-cpu") == 0
    before = content(out)
    assert run(artifact, rows, "-o", f"{out}/", "--device", "torch-cpu", "--dtype", "f32") == 0
    assert content(out) == before
    begun = read_begun(out)
    assert begun is not None
    assert (begun.job.device, begun.job.dtype) == ("torch-cpu", "f32")


def test_another_kind_of_card_is_refused(
    artifact: Path, job: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (job / "part-00001.jsonl").unlink()
    real = GpuRunnable.numbers
    monkeypatch.setattr(GpuRunnable, "numbers", lambda self: {**real(self), "the card": "NVIDIA L4"})
    arguments = (artifact, rows, "-o", job, "--shard-rows", 10, "--device", "torch-cpu", "--dtype", "bf16")
    assert run(*arguments) == 2
    said = capsys.readouterr().err
    assert "answers would have other bits here: the card is NVIDIA L4, elsewhere it is the CPU, by PyTorch" in said
    monkeypatch.undo()
    assert run(*arguments) == 0


def test_a_job_that_was_begun_before_there_were_devices_goes_on(artifact: Path, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(artifact, rows, "-o", f"{out}/") == 0
    told = unseal((out / JOB_FILE).read_bytes())
    assert (told["job"].pop("device"), told["job"].pop("dtype")) == ("cpu", None)
    (out / JOB_FILE).write_bytes(seal(told))
    before = content(out)
    assert run(artifact, rows, "-o", f"{out}/") == 0
    assert content(out) == before


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--device", "torch-cpu", "--threads", "2"], "device 'torch-cpu' does not take threads"),
        (["--device", "torch-cpu", "--instances", "2"], "device 'torch-cpu' does not take instances"),
        (["--device", "torch-cpu", "--dtype", "f64"], "--dtype is 'f64'; f32, f16, bf16, f8, f16-acc16 are known"),
        (["--device", "reference"], "the device is 'reference'; cuda, cuda:1, ... are cards"),
        (["--device", "cuda:1", "--ray", "auto"], "with --ray it is cuda, without a number: Ray gives each worker"),
        (["--device", "cuda:0", "--device", "cuda:1", "--ray", "auto"], "--device is cuda:0 and cuda:1; with --ray it"),
        (["--device", "cpu", "--device", "cuda:1"], "several devices are cards"),
        (["--dtype", "f16"], "device 'cpu' does not take dtype"),
        (["--device", "cuda"], "device 'cuda'"),
    ],
)
def test_what_is_refused_begins_no_job(
    artifact: Path, rows: Path, tmp_path: Path, options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if options == ["--device", "cuda"] and torch.cuda.is_available():
        pytest.skip("there is a card")
    assert run(artifact, rows, "-o", f"{tmp_path}/out/", *options) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_card_that_fails_ends_the_job(
    artifact: Path, job: Path, rows: Path, devices: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Else each shard that is left would be tried on it, and be named as failed."""
    for part in job.glob("part-*"):
        part.unlink()
    tried = []

    def fail(self: Any, *_: Any) -> None:
        tried.append(self)
        raise RuntimeError("CUDA error: misaligned address\nCompile with")

    monkeypatch.setattr(GpuRunnable, "run", fail)
    again = ["-o", job, "--shard-rows", 10, "--dtype", "bf16"] + ["--device", "torch-cpu"] * devices
    assert run(artifact, rows, *again) == 2
    said = capsys.readouterr().err
    assert "error: torch-cpu: the card failed (CUDA error: misaligned address); after an error of CUDA" in said
    assert "defect" not in said
    monkeypatch.undo()
    assert run(artifact, rows, *again) == 0


@pytest.mark.parametrize(
    ("error", "ends"), [(RuntimeError("CUDA error: misaligned address"), True), (ResourceError("no memory"), False)]
)
def test_a_process_ends_with_its_card(
    artifact: Path, job: Path, rows: Path, error: Exception, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would fail at once whatever shard it is given, and be given all of them."""

    def run(self: Any, *_: Any) -> None:
        raise error

    codes: list[int] = []
    monkeypatch.setattr(replicas, "see_held_cards", lambda count: None)
    monkeypatch.setattr(GpuRunnable, "run", run)
    monkeypatch.setattr(os, "_exit", codes.append)
    replica = Replica(str(job), str(artifact), [str(rows)], None, 2)
    told: Any = replica.numbers()
    assert json.dumps(told).count(torch.__version__) == 1
    assert replica.run(0).kind == ("CardError" if ends else "ResourceError")  # type: ignore[union-attr]
    assert codes == [1] * ends
