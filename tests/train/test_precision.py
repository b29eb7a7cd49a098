"""What "auto" stands for: the same each time."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="make test-train installs torch and transformers")
pytest.importorskip("transformers", reason="make test-train installs torch and transformers")

from checkpoints import make_checkpoint

from encast.compress import precision
from encast.compress.model import load_model
from encast.compress.recipe import FineTune
from encast.compress.stages import Context, examples_of
from encast.compress.state import StateFolder
from encast.compress.train import Trainer
from encast.data.datasets import Dataset, Labelled
from encast.importers import open_checkpoint


@pytest.mark.parametrize(
    ("wanted", "device", "native", "width", "found"),
    [
        ("auto", "cpu", True, 384, "bf16"),
        ("auto", "cpu", True, 128, "bf16"),
        ("auto", "cpu", True, 96, "f32"),
        ("auto", "cpu", False, 384, "f32"),
        ("auto", "cuda", True, 64, "bf16"),
        ("auto", "cuda", False, 768, "f32"),
        ("bf16", "cpu", False, 64, "bf16"),
        ("f32", "cpu", True, 768, "f32"),
    ],
)
def test_the_rule(
    monkeypatch: pytest.MonkeyPatch, wanted: str, device: str, native: bool, width: int, found: str
) -> None:
    monkeypatch.setattr(precision, "can_bf16", lambda device: native)
    assert precision.choose_precision(wanted, torch.device(device), width) == found


def test_processors_without_the_products_and_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for native in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda native=native: native)
        assert precision.can_bf16(torch.device("cpu")) == native
    assert not precision.can_bf16(torch.device("meta"))


@pytest.mark.parametrize(("arch", "hidden", "found"), [("bert", 96, "f32"), ("distilbert", 128, "bf16")])
def test_the_width_is_that_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, hidden: int, found: str
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    source = make_checkpoint(tmp_path / arch, arch, "features", layers=1, hidden=hidden, heads=2)
    data = Dataset("here", "classes", [Labelled("the", "a"), Labelled("of", "b")])
    context = Context("classify", data, None, "accuracy", 0, 1, "cpu", None, lambda *_: None)
    stage = FineTune(epochs=0)
    task, examples = examples_of(stage, open_checkpoint(source), context)
    model = load_model(open_checkpoint(source), task, seed=0)
    trainer = Trainer(model, stage, examples, products=[], state=StateFolder(tmp_path / "state"), seed=0)
    assert trainer.run().record["precision"] == found
