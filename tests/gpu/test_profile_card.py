"""``encast profile --device``: every step of a card's program beside its bound, by PyTorch on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-gpu")


from checkpoints import make_checkpoint

import encast
from encast.backends.gpu.runnable import GpuRunnable
from encast.batch import Batch
from encast.bench.agreement import plain_graph
from encast.bench.roofline import Sizes
from encast.ceilings.card import CardCeilings, keep_card
from encast.cli.main import main
from encast.profile.card import profile_card
from encast.profile.workload import of_batches

CARD = CardCeilings(
    "the CPU, by PyTorch",
    datetime(2026, 1, 1, tzinfo=timezone.utc),
    dict.fromkeys(("f32", "f16", "bf16", "f8", "int8"), 1e12),
    1e11,
)
BATCHES = (Batch.of([[1, 2, 3], [4] * 7]), Batch.of([[5] * 12]))


@pytest.fixture(autouse=True)
def a_cache_of_our_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ENCAST_CACHE_DIR", str(tmp_path / "cache"))
    keep_card(CARD)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("profile") / "bert", "bert", "embed", layers=2, pooling=("mean",))


def opened(folder: Path, tmp_path: Path, dtype: str, values: str | None) -> Any:
    return encast.load(encast.compile(folder, tmp_path / "m.encast", dtype=dtype), device="torch-cpu", dtype=values)


@pytest.mark.parametrize(("dtype", "values"), [("f32", None), ("f32", "f8"), ("bf16", None), ("int8", "f16")])
def test_a_trace_is_a_run(folder: Path, tmp_path: Path, dtype: str, values: str | None) -> None:
    with opened(folder, tmp_path, dtype, values) as engine:
        answer, steps, ahead = engine.runnable.trace("embedding", BATCHES[0])
        assert answer.tobytes() == engine.runnable.run("embedding", BATCHES[0]).tobytes()
        assert ahead
        assert all(seconds >= 0 for _, seconds in steps)
        _, fewer, _ = engine.runnable.trace("last_hidden_state", BATCHES[0])
        assert len(fewer) < len(steps), "what the output does not need does not run"


@pytest.mark.parametrize("arch", ["bert", "deberta-v2"])
@pytest.mark.parametrize(
    ("dtype", "values", "product"), [("f32", "f16", "f16"), ("int8", None, "int8"), ("f32", "f8", "f8")]
)
def test_work_is_that_of_the_plain_graph(
    arch: str, dtype: str, values: str | None, product: str, tmp_path: Path
) -> None:
    """Products and attention, however passes have fused them; two batches add up."""
    folder = make_checkpoint(tmp_path / "m", arch, "features", layers=2)
    graph = plain_graph(folder)
    products = [
        node for node in graph.nodes if node.op == "linear" and graph.type_of(node.outputs[0]).shape[0] == "tokens"
    ]
    weights = sum(graph.constants[node.inputs[1]].array.size for node in products)
    sizes = replace(Sizes.of(graph), weights=weights)  # a card multiplies zeros too
    with opened(folder, tmp_path, dtype, values) as engine:
        made = profile_card(
            "m", engine.runnable, "last_hidden_state", of_batches("two", BATCHES), CARD, seconds=0, repeats=1
        )
    assert sum(row.operations for row in made.rows) == sum(sizes.operations(batch) for batch in BATCHES)
    assert {row.dtype for row in made.rows if row.op.startswith("linear")} == {product}
    rows = {row.name: row for row in made.rows}
    up = next(row for name, row in rows.items() if name.endswith("intermediate.dense"))
    assert (up.count, up.shape[0]) == (2, 22)
    assert up.arithmetic == pytest.approx(up.operations / 1e12)
    read = 2 * up.shape[1] * up.shape[2] * len(BATCHES) * {"f16": 2, "int8": 1, "f8": 1}[product]
    assert read < up.bytes < read + 2 * 22 * 4 * (up.shape[1] + up.shape[2]) + 4 * 4 * 2 * 3 * up.shape[1]
    assert made.seconds == pytest.approx(sum(row.seconds for row in made.rows))


def test_the_command(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(encast.compile(folder, tmp_path / "m.encast"))
    quick = ["profile", path, "--device", "torch-cpu", "--batch", "2", "--length", "8", "--repeats", "1"]
    assert main([*quick, "--dtype", "f16"]) == 0
    out = capfd.readouterr().out
    assert "embedding of 2x8 on the CPU, by PyTorch" in out
    assert "values: float16" in out
    assert "encoder.layer.*.intermediate.dense (x2)" in out
    assert "median and quartiles of 1 calls" in out
    assert main([*quick, "--layers", "--json", "-"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert {"encoder.layer.0.intermediate.dense", "encoder.layer.1.intermediate.dense"} <= {
        row["name"] for row in document["rows"]
    }
    assert document["steps_seconds"] == pytest.approx(sum(row["seconds"] for row in document["rows"]))


def test_ceilings_are_measured_where_none_are_kept(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENCAST_CACHE_DIR", str(tmp_path / "empty"))
    path = str(encast.compile(folder, tmp_path / "m.encast"))
    quick = ["--batch", "1", "--length", "4", "--repeats", "1"]
    assert main(["profile", path, "--device", "torch-cpu", *quick]) == 0
    assert "encast doctor --measure --device torch-cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "torch-cpu", "--threads", "1"], "--threads is for the processor; leave it out with --device"),
        (["--device", "torch-cpu", "--ablate"], "--ablate is for the processor"),
        (["--device", "reference"], "the device is 'reference'; cuda, cuda:1, ... are cards"),
        (["--dtype", "f16"], "--dtype is for cards; give --device too"),
        (["--device", "torch-cpu", "--length", "8", "--output", "logits"], "--output is 'logits'; this artifact has"),
    ],
)
def test_what_does_not_go_together(
    options: list[str], words: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(encast.compile(folder, tmp_path / "m.encast"))
    assert main(["profile", path, *options]) == 2
    assert words in capsys.readouterr().err


def test_selected_rows(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", "bert", "fill_mask")
    with opened(folder, tmp_path, "f32", None) as engine:
        made = profile_card("m", engine.runnable, "logits", of_batches("two", BATCHES), CARD, seconds=0, repeats=1)
        vocab = engine.meta.vocab
    assert any(row.shape[:2] == (3, vocab) for row in made.rows), "a row a sequence"


def test_an_empty_batch_has_no_trace(folder: Path, tmp_path: Path) -> None:
    empty = Batch(np.zeros(0, np.int32), np.zeros(1, np.int32))
    with opened(folder, tmp_path, "f32", None) as engine:
        assert isinstance(engine.runnable, GpuRunnable)
        with pytest.raises(encast.InputError, match="nothing to trace"):
            engine.runnable.trace("embedding", empty)


def test_ceilings_without_the_dtype_are_refused(folder: Path, tmp_path: Path) -> None:
    """Else its products would count as free."""
    lacks = replace(CARD, ops_per_second={"f32": 1e12})
    with opened(folder, tmp_path, "int8", None) as engine, pytest.raises(encast.InputError, match="no product of int8"):
        profile_card("m", engine.runnable, "embedding", of_batches("two", BATCHES), lacks, seconds=0, repeats=1)


def test_steps_that_the_host_held_up_are_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encast.backends.gpu.clocks.HostClock.ahead", False)
    with opened(folder, tmp_path, "f32", None) as engine:
        made = profile_card("m", engine.runnable, "embedding", of_batches("two", BATCHES), CARD, seconds=0, repeats=1)
    assert "WARNING: steps waited for the host" in "\n".join(made.lines())
