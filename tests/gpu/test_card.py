"""``encast doctor --device``: what a card is, and its ceilings, by PyTorch on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-gpu")

from encast.backends.gpu import card as cards
from encast.backends.gpu import device as devices
from encast.ceilings.card import find_card
from encast.cli.main import main
from encast.errors import ResourceError

NAME = "the CPU, by PyTorch"


@pytest.fixture(autouse=True)
def a_cache_of_our_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ENCAST_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["doctor", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_ceilings_of_every_dtype() -> None:
    found = cards.measure("torch-cpu", None)
    assert found.card == NAME
    assert list(found.ops_per_second) == ["f32", "f16", "bf16", "f8", "int8"]
    assert all(rate > 1e6 for rate in (*found.ops_per_second.values(), found.bytes_per_second))


def test_a_dtype_that_has_no_product_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: Any, **__: Any) -> None:
        raise RuntimeError("torch._scaled_mm is only supported on devices of compute capability 8.9")

    monkeypatch.setattr(torch, "_scaled_mm", without)
    assert list(cards.product_rates(torch.device("cpu"), 16)) == ["f32", "f16", "bf16", "int8"]


def test_a_card_without_room_has_no_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than those of some dtypes."""

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "_int_mm", full)
    with pytest.raises(ResourceError, match="no memory is left to measure with"):
        cards.measure("torch-cpu", None)


def test_doctor_measures_and_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = doctor(capsys, "--device", "torch-cpu")
    assert code == 0
    assert f"card        torch-cpu: {NAME}" in out
    assert "ceilings not measured; to measure: encast doctor --measure --device torch-cpu" in out
    code, out, _ = doctor(capsys, "--device", "torch-cpu", "--measure")
    assert code == 0
    assert "Top/s" in out
    kept, problem = find_card(NAME)
    assert kept is not None
    assert problem is None
    code, out, _ = doctor(capsys, "--device", "torch-cpu", "--json")
    assert json.loads(out)["card"]["ceilings"]["operations_per_second"] == dict(kept.ops_per_second)
    assert json.loads(out)["ceilings"] is None, "the processor was not measured"


def test_doctor_names_what_is_wrong(capsys: pytest.CaptureFixture[str], a_cache_of_our_own: Path) -> None:
    doctor(capsys, "--device", "torch-cpu", "--measure")
    next(a_cache_of_our_own.glob("card-*.json")).write_text("{")
    _, out, _ = doctor(capsys, "--device", "torch-cpu")
    assert "holds no ceilings of this card" in out
    code, _, err = doctor(capsys, "--device", "cpu")
    assert code == 2
    assert "the device is 'cpu'; cuda, cuda:1, ... are cards" in err


def test_a_card_without_f8_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up A100 with a Triton that does not run."""
    gib = 1 << 30
    made_up = SimpleNamespace(shared_memory_per_block_optin=164 << 10)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in {
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "A100",
        "get_device_capability": lambda *_: (8, 0),
        "get_device_properties": lambda *_: made_up,
        "mem_get_info": lambda *_: (30 * gib, 40 * gib),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for module in (devices, cards):
        monkeypatch.setattr(module, "why_no_triton", lambda _: "Triton is not installed")
    found = cards.describe("cuda", None)
    assert (found.name, found.capability, found.memory_bytes, found.free_bytes) == ("A100", "8.0", 40 * gib, 30 * gib)
    assert found.dtypes == ("f32", "f16", "bf16", "f16-acc16", "int8")
    assert "compute capability 9.0" in found.without["f8"]
    assert found.without_triton == "Triton is not installed"
