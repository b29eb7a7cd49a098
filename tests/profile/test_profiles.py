"""Profiles of small models: what adds up, what is written, and that nothing in a name gets out."""

from __future__ import annotations

import dataclasses
import itertools
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from profiles import CEILINGS, compiled

import encast
from encast import _core, artifact
from encast._core import Plan
from encast.backends.cpu import CpuRunnable
from encast.crossover import DENSE_ROWS, DenseRows
from encast.errors import InputError
from encast.lower import Target
from encast.profile.ablate import ANSWER_BOUNDS, Ablated, ablate, checkpoint_of, difference
from encast.profile.document import chrome_trace, to_document
from encast.profile.measure import Measured, Quartiles, Runner, measure
from encast.profile.plot import to_page
from encast.profile.report import HAND_OFF, Kernel, Profile, build_profile, step_kernels
from encast.profile.table import ablation_lines, table_lines
from encast.profile.workload import of_lengths

HOSTILE = "</script><script>alert(1)</script>\"'&<img src=x onerror=alert(1)>\x00\x1b"


def profile_of(
    path: Path,
    output: str,
    *,
    layers: bool = False,
    threads: int = 2,
    lengths: tuple[int, ...] = (5, 17, 30, 40, 3),
    batch_tokens: int = 60,
    target: Target | None = None,
) -> Profile:
    opened = artifact.open(path)
    runnable = CpuRunnable(opened, threads=threads, pin=False, target=target)
    plan = Plan(runnable.plan)
    workload = of_lengths("two batches", lengths, opened.graph.meta, batch_tokens, seed=0)
    runner = Runner(runnable, output, workload, selected=plan.outputs[output].rows == "selected")
    catalog = {row["name"]: Kernel(row["name"], row["isa"], row["min_rows"]) for row in _core.kernels()}
    measured = measure(runner, len(plan.steps), seconds=0, repeats=2)
    kernels = step_kernels([names for _, names in runnable.kernels()], catalog)
    profile = build_profile("small.encast", output, plan, kernels, workload, CEILINGS, threads, measured, layers=layers)
    runnable.close()
    return profile


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize(
    ("case", "output"),
    [("bert-embed", "embedding"), ("mpnet-fill_mask", "logits"), ("albert-odd", "last_hidden_state")],
)
def test_it_adds_up(case: str, output: str, dtype: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    profile = profile_of(compiled(case, dtype, tmp_path_factory), output)
    steps = sum(row.seconds for row in profile.rows)
    assert steps + profile.waiting + profile.outside == pytest.approx(profile.total)
    assert sum(row.share for row in profile.rows) == pytest.approx(profile.busy)
    assert all(row.seconds > 0 and row.bound.seconds > 0 for row in profile.rows)
    assert profile.limit.seconds > 0


def test_layers_add_up_to_their_rows(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = compiled("bert-embed", "int8", tmp_path_factory)
    every, grouped = profile_of(path, "embedding", layers=True), profile_of(path, "embedding")
    assert all(len(row.steps) == 1 for row in every.rows)
    assert sorted(step for row in grouped.rows for step in row.steps) == [row.steps[0] for row in every.rows]
    products = [sum(row.work.products for row in profile.rows) for profile in (every, grouped)]
    assert products[0] == products[1] > 0
    assert any("*" in row.name and len(row.steps) > 1 for row in grouped.rows)
    assert not any("*" in row.name for row in every.rows)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Takes texts of 600 tokens; its four heads of 16 columns fill one panel."""
    folder = make_checkpoint(tmp_path_factory.mktemp("long") / "model", "bert", "embed", positions=600)
    return encast.compile(folder, folder.with_suffix(".encast"), dtype="int8", task="embed", strict=True)


LONG, SHORT = (530, 20), (30,) * 8


@pytest.mark.parametrize(
    ("lengths", "head_rows"), [(LONG, 0), (SHORT, 240), (LONG + SHORT, 240)], ids=["long", "short", "both"]
)
def test_it_says_what_ran_in_tasks_of_heads(lengths: tuple[int, ...], head_rows: int, long_model: Path) -> None:
    """A chunk with a text of over 512 tokens cannot, whatever the plan says."""
    target = dataclasses.replace(Target.here(), tiles=False, head_tokens=128)
    profile = profile_of(
        long_model, "embedding", layers=True, threads=1, lengths=lengths, batch_tokens=550, target=target
    )
    rows, hidden = sum(lengths), 64
    product, attention = (
        next(row for row in profile.rows if row.kind == kind and row.head_rows is not None)
        for kind in ("linear", "attention")
    )
    assert product.head_rows == attention.head_rows == head_rows
    assert product.shape[0] == attention.shape[0] == rows
    # Queries, keys and values: written by the one and read by the other, where they lay.
    made = {"block": head_rows * 3 * hidden * 4, "arena": (rows - head_rows) * 3 * hidden * 4}
    assert attention.work.value_bytes.get("block", 0) == made["block"]
    assert attention.work.value_bytes["arena"] == made["arena"] + rows * hidden * 4
    assert product.work.value_bytes.get("block", 0) == made["block"]
    assert product.work.value_bytes["arena"] == made["arena"] + rows * (hidden + 8)
    assert sum(row.head_rows is not None for row in profile.rows) == 2 * 3, "of three layers"
    line = f"heads       {head_rows / rows:.1%} of attention ran in tasks of heads, with the product before it"
    assert line in list(table_lines(profile))
    assert [step["head_rows"] for step in to_document(profile)["steps"]] == [row.head_rows for row in profile.rows]
    slices = [event["args"] for event in chrome_trace(profile)["traceEvents"] if event["ph"] == "X"]
    in_heads = sum(one["rows"] for one in slices if one["step"] == attention.steps[0] and one["head_task"])
    assert in_heads == head_rows


def test_waiting_longer_than_the_bound_is_hand_off(tmp_path_factory: pytest.TempPathFactory) -> None:
    row = profile_of(compiled("bert-embed", "f32", tmp_path_factory), "embedding").rows[1]
    assert dataclasses.replace(row, waiting=2 * row.bound.seconds).holds == HAND_OFF
    assert dataclasses.replace(row, waiting=0.0).holds == row.bound.holds


def test_noise_is_said(tmp_path_factory: pytest.TempPathFactory) -> None:
    profile = profile_of(compiled("bert-embed", "f32", tmp_path_factory), "embedding")
    calm = dataclasses.replace(profile.measured, forward=Quartiles(1.0, 1.01, 1.02, 9))
    noisy = dataclasses.replace(profile.measured, forward=Quartiles(1.0, 1.2, 1.5, 9))
    assert dataclasses.replace(profile, measured=calm).warnings == ()
    (warning,) = dataclasses.replace(profile, measured=noisy).warnings
    assert "not to be trusted" in warning
    lines = list(table_lines(dataclasses.replace(profile, measured=noisy)))
    assert lines[0] == f"WARNING: {warning}"
    doubtful = dataclasses.replace(profile.ceilings, doubts=("L3: it swung",))
    assert "it swung" in dataclasses.replace(profile, measured=calm, ceilings=doubtful).warnings[0]


def test_document(tmp_path_factory: pytest.TempPathFactory) -> None:
    profile = profile_of(compiled("bert-embed", "int8", tmp_path_factory), "embedding")
    document = json.loads(json.dumps(to_document(profile, [Ablated("a", "b", Quartiles(1, 1.5, 2, 7), 0.0)])))
    assert document["format"] == 1
    assert document["workload"] == {"what": "two batches", "batches": 2, "sequences": 5, "tokens": 95}
    steps = document["steps"]
    assert sum(step["seconds"] for step in steps) + document["waiting_seconds"] + document[
        "outside_seconds"
    ] == pytest.approx(document["total_seconds"])
    for step in steps:
        assert {"name", "kind", "kernel", "shape", "dtype", "plan_steps", "share", "unit", "bytes", "holds"} <= set(
            step
        )
        assert step["fraction"] == pytest.approx(step["bound"]["seconds"] / step["seconds"])
        assert step["bound"]["seconds"] == max(
            step["bound"]["arithmetic_seconds"], *step["bound"]["memory_seconds"].values()
        )
    assert document["ablations"][0]["time_ratio"]["median"] == 1.5
    assert to_document(profile)["ablations"] is None


def test_chrome_trace(tmp_path_factory: pytest.TempPathFactory) -> None:
    profile = profile_of(compiled("bert-embed", "int8", tmp_path_factory), "embedding")
    trace = json.loads(json.dumps(chrome_trace(profile)))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert names == {0: "thread 0", 1: "thread 1"}
    assert len(slices) == sum(len(traced.events) for traced in profile.measured.sample)
    assert {event["args"]["batch"] for event in slices} == {0, 1}
    for thread in names:
        track = [event for event in slices if event["tid"] == thread]
        for one, two in itertools.pairwise(track):
            assert one["ts"] + one["dur"] <= two["ts"] + 1e-6, "slices of a track do not overlap"
    assert {event["cat"] for event in slices} >= {"embed", "linear", "attention", "norm"}
    assert any(event["name"].startswith("encoder.layer.1.") for event in slices)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def _hostile(profile: Profile) -> Profile:
    rows = tuple(dataclasses.replace(row, name=HOSTILE, kernel=HOSTILE, dtype=row.dtype) for row in profile.rows)
    return dataclasses.replace(profile, artifact=HOSTILE, output=HOSTILE, rows=rows)


def test_the_page_is_alone_and_escaped(tmp_path_factory: pytest.TempPathFactory) -> None:
    plain = profile_of(compiled("bert-embed", "int8", tmp_path_factory), "embedding")
    text = to_page(_hostile(plain))
    page, plain_page = _Page(), _Page()
    page.feed(text)
    plain_page.feed(to_page(plain))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain_page.tags], "a name made an element"
    assert [sorted(attributes) for _, attributes in page.tags] == [sorted(a) for _, a in plain_page.tags]
    assert "\x00" not in text
    assert "\x1b" not in text
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not any({"src", "href", "xlink:href"} & attributes.keys() for _, attributes in page.tags)
    assert "http" not in text.replace("http-equiv", "")
    assert "default-src 'none'" in text
    marks = [tag for tag, _ in page.tags].count("title") - 1  # the page's own
    assert marks == len([row for row in plain.rows if row.work.products + row.work.elements])
    assert text.count("<tr>") == 1 + len(plain.rows) + 3, "the heading, the steps, and what they do not account for"


ANSWERS = [
    ("bert-embed", "embedding", "int8"),
    ("bert-embed", "embedding", "bf16"),
    ("bert-embed", "embedding", "f32"),
    ("mpnet-fill_mask", "logits", "int8"),
]


@pytest.mark.parametrize(("case", "output", "dtype"), ANSWERS)
def test_ablations_leave_answers_right(
    case: str, output: str, dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    opened = artifact.open(compiled(case, dtype, tmp_path_factory))
    runnable = CpuRunnable(opened, threads=2 if dtype == "int8" else 1, pin=False)
    workload = of_lengths("two batches", [5, 17, 30, 40, 3], opened.graph.meta, 60, seed=0)
    runner = Runner(runnable, output, workload, selected=output == "logits")
    found = {
        one.name: one
        for one in ablate(opened, runner, selected=output == "logits", checkpoint=None, seconds=0, rounds=1)
    }
    fusions = {"qkv_fusion", "epilogue_fusion", "norm_fusion", "head_tasks", "row_blocks"}
    assert {*fusions, "fast_math", "padding_removal"} <= set(found)
    assert not [one for one in found.values() if one.wrong]
    apart = {"epilogue_fusion"} | ({"head_tasks"} if "stage heads" not in runnable.plan else set())
    for name in fusions - apart:
        assert found[name].difference == 0.0, f"{name}: the same sums have the same bits"
        assert found[name].ratio is not None
    assert found["padding_removal"].difference is None
    wider = {"int8": {"int8_over_bf16", "int8_over_f32"}, "bf16": {"bf16_over_f32"}, "f32": set()}
    assert {name for name in found if "_over_" in name} == wider[dtype]
    runnable.close()
    lines = list(ablation_lines(list(found.values())))
    assert lines[1].startswith("qkv_fusion")
    assert "same bits" in lines[1]


def test_unknown_optimisations() -> None:
    with pytest.raises(InputError, match="without names 'qkv'; qkv_fusion, "):
        Target({}, without=frozenset({"qkv"}))


def test_a_wrong_answer_is_seen() -> None:
    import numpy as np

    a = np.ones((2, 3), np.float32)
    assert difference([a], [a.copy()]) == 0
    assert difference([-a * 0], [a * 0]) > 0
    moved = difference([a * np.float32(1.5)], [a])
    assert moved == pytest.approx(0.5)
    assert Ablated("x", "", None, moved, ANSWER_BOUNDS["int8"]).wrong
    assert Ablated("x", "", None, float("nan"), ANSWER_BOUNDS["int8"]).wrong
    assert not Ablated("x", "", None, 0.0, 0.0).wrong
    (_, line) = ablation_lines([Ablated("x", "", Quartiles(1, 1, 1, 7), moved, ANSWER_BOUNDS["int8"])])
    assert "MORE THAN" in line


def test_the_checkpoint_must_be_the_same(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    card: dict[str, Any] = artifact.open(compiled("bert-embed", "int8", tmp_path_factory)).card
    folder, reason = checkpoint_of(card, None)
    assert folder is not None
    assert reason == ""
    assert checkpoint_of(card, tmp_path / "nowhere")[1].endswith("is no folder; give --checkpoint")
    (tmp_path / "config.json").write_text("{}")
    assert "config.json" in checkpoint_of({"source": {"files": {"config.json": "0" * 64}}}, tmp_path)[1]
    assert "lacks" in checkpoint_of({"source": {"files": {"model.safetensors": "0" * 64}}}, tmp_path)[1]
    for source in (None, ["x"], {}, {"source": str(tmp_path)}, {"source": str(tmp_path), "files": ["config.json"]}):
        assert "does not list" in checkpoint_of({"source": source}, None)[1]
    for name in ("", None, 3):
        assert "does not name" in checkpoint_of({"source": {"source": name, "files": {"config.json": "0"}}}, None)[1]
    for outside in ("/dev/zero", "../secret", "/dev/fd/0"):
        assert "lacks" in checkpoint_of({"source": {"files": {outside: "0" * 64}}}, tmp_path)[1]


def test_trace_cost_is_never_negative() -> None:
    measured = Measured(Quartiles(1, 1, 1, 1), Quartiles(0.5, 0.5, 0.5, 1), None, 0.1, [])  # type: ignore[arg-type]
    assert measured.trace_cost == 0


def test_products_are_counted_in_the_form_that_ran(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to eight rows a thread are dense, and up to sixteen of two threads that share them."""
    folder = make_checkpoint(tmp_path_factory.mktemp("both") / "model", "bert", "embed", positions=600)
    monkeypatch.setitem(DENSE_ROWS, _core.isa_best(), (DenseRows(2.0, 8, 8),))
    dense, sparse, both = (
        encast.compile(folder, folder.with_suffix(f".{form}.encast"), dtype="int8", task="embed", sparse=form)
        for form in ("never", "always", "auto")
    )

    def products(path: Path, tokens: int, threads: int) -> tuple[set[str], int, int]:
        profile = profile_of(path, "embedding", threads=threads, lengths=(tokens,), batch_tokens=100)
        rows = [row for row in profile.rows if row.kind in ("linear", "sparse")]
        forms = {row.kernel.split("_")[0] for row in rows}
        return forms, sum(row.work.products for row in rows), sum(row.work.weight_bytes for row in rows)

    for threads, few in ((1, 8), (2, 16)):
        assert products(both, few, threads) == products(dense, few, threads)
        assert products(both, few + 1, threads) == products(sparse, few + 1, threads)
    forms, multiplied, read = products(both, 72, 1)  # a tile and a rest
    assert forms == {"sparse"}
    assert products(dense, 72, 1)[1] <= multiplied <= products(sparse, 72, 1)[1]
    assert read > products(sparse, 72, 1)[2]
