"""``prune_checkpoint`` and ``encast prune``: what gets zeros, what stays, and what may not go wrong."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import safetensors_bytes, torch_zip
from checkpoints import ARCHS, make_checkpoint
from families import FAMILIES
from full_disk import files_of_at_most

import encast
from encast.cli.main import main
from encast.errors import CheckpointError, EncastError, InputError, ResourceError
from encast.importers import Checkpoint, open_checkpoint
from encast.sparsity import Pattern, magnitude_mask, prune_checkpoint

HALF = {"pattern": Pattern(4, 1), "sparsity": 0.5}


def bits(checkpoint: Checkpoint, name: str) -> bytes:
    return checkpoint.tensors.stored(name).elements().tobytes()


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head", ["features", "classify"])
def test_the_products_of_the_layers_get_zeros_and_nothing_else(arch: str, head: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "dense", arch, head, layers=2)
    before_files = files(source)
    pruned = prune_checkpoint(source, tmp_path / "sparse", **HALF)
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "sparse")
    names = {weight.tensor for weight in pruned}
    layers = 1 if arch == "albert" else 2  # albert's share their weights
    # Queries, keys and values may be one tensor, and so may the two halves of a gated product; or they are one more.
    products = {"modernbert": 4, "new": 4, "nomic_bert": 7, "gte": 7}.get(arch, 6)
    if arch in FAMILIES:
        products = FAMILIES[arch].products
    assert len(names) == len(pruned) == products * layers
    assert all(
        re.search(r"\.\d+\.", name) and name.endswith(".weight") and "norm" not in name.lower() for name in names
    )
    assert list(after.tensors)
    assert set(after.tensors) == set(before.tensors)
    for name in before.tensors:
        assert after.tensors.dtype(name) == before.tensors.dtype(name)
        assert after.tensors.shape(name) == before.tensors.shape(name)
        if name not in names:
            assert bits(after, name) == bits(before, name), name
    for weight in pruned:
        old, new = before.tensors.f32(weight.tensor), after.tensors.f32(weight.tensor)
        # Blocks are rows that are neighbours in the product.
        order = FAMILIES[arch].order(weight.tensor, len(old), 4) if arch in FAMILIES else None
        order = np.arange(len(old)) if order is None else order
        stays = magnitude_mask(old[order], Pattern(4, 1), 0.5)
        np.testing.assert_array_equal(new[order], np.where(stays, old[order], 0))
        assert weight.shape == old.shape
        assert weight.zeros_before == np.mean(old == 0)
        assert weight.zeros_after == np.mean(new == 0)
        assert 0.45 < weight.zeros_after < 0.55
    assert files(source) == before_files
    others = {name: digest for name, digest in before_files.items() if name != "model.safetensors"}
    assert {
        name: digest for name, digest in files(tmp_path / "sparse").items() if name != "model.safetensors"
    } == others


def test_the_result_compiles_and_answers(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "dense", "bert", "embed", pooling=("mean",))
    prune_checkpoint(source, tmp_path / "same", pattern=Pattern(4, 1), sparsity=0)
    prune_checkpoint(source, tmp_path / "sparse", pattern=Pattern(4, 1), sparsity=0.8)
    rows = {}
    for name in ("dense", "same", "sparse"):
        with encast.load(encast.compile(tmp_path / name, tmp_path / f"{name}.encast", dtype="f32")) as engine:
            rows[name] = engine.embed(["a text", "another one"])
    assert rows["same"].tobytes() == rows["dense"].tobytes()
    assert np.isfinite(rows["sparse"]).all()
    assert not np.array_equal(rows["sparse"], rows["dense"])


@pytest.mark.parametrize("dtype", ["f2", "u2", "f8"])
def test_a_dtype_is_kept_bit_by_bit(dtype: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "dense", "bert", "features", layers=1)
    tensors = open_checkpoint(source).tensors
    arrays = {
        name: (tensors.f32(name).view(np.uint32) >> 16).astype(np.uint16)
        if dtype == "u2"
        else tensors.f32(name).astype(dtype)
        for name in tensors
    }
    (source / "model.safetensors").write_bytes(safetensors_bytes(arrays))
    pruned = {weight.tensor for weight in prune_checkpoint(source, tmp_path / "sparse", **HALF)}
    before, after = open_checkpoint(source).tensors, open_checkpoint(tmp_path / "sparse").tensors
    for name in before:
        old, new = before.stored(name).elements(), after.stored(name).elements()
        assert new.dtype == old.dtype
        if name in pruned:
            old = np.where(magnitude_mask(before.f32(name), Pattern(4, 1), 0.5), old, 0)
        np.testing.assert_array_equal(new, old)


def test_shards_and_torch_files_become_one_file(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "bert", "features", layers=1)
    tensors = open_checkpoint(plain).tensors
    arrays = {name: tensors.f32(name) for name in tensors}
    shards, torch = (Path(shutil.copytree(plain, tmp_path / name)) for name in ("shards", "torch"))
    for folder in (shards, torch):
        (folder / "model.safetensors").unlink()
    place = {name: f"part-{index % 2}.data" for index, name in enumerate(arrays)}
    for file in set(place.values()):
        own = {name: array for name, array in arrays.items() if place[name] == file}
        (shards / file).write_bytes(safetensors_bytes(own))
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    (torch / "pytorch_model.bin").write_bytes(torch_zip(arrays))
    found = {}
    for folder in (plain, shards, torch):
        prune_checkpoint(folder, tmp_path / f"{folder.name}-sparse", **HALF)
        after = open_checkpoint(tmp_path / f"{folder.name}-sparse")
        assert {name for name in files(after.root) if "model" in name or "part" in name} == {"model.safetensors"}
        found[folder.name] = {name: bits(after, name) for name in sorted(after.tensors)}
    assert found["shards"] == found["plain"]
    assert found["torch"] == found["plain"]


def test_modules_stay_and_exports_go(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "dense", "bert", "embed", pooling=("mean",), dense=((8, "Tanh"),))
    assert any("Dense" in name for name in files(source))
    (source / "onnx").mkdir()
    (source / "onnx" / "model.onnx").write_text("another model now")
    (source / "tf_model.h5").write_text("another model now")
    (source / "README.md").write_text("of the model")
    prune_checkpoint(source, tmp_path / "sparse", **HALF)
    left = {"onnx/model.onnx", "tf_model.h5"}
    assert set(files(tmp_path / "sparse")) == set(files(source)) - left
    assert (tmp_path / "sparse" / "README.md").read_text() == "of the model"
    same = [name for name in files(source) if "Dense" in name]
    assert [files(source)[name] for name in same] == [files(tmp_path / "sparse")[name] for name in same]
    before, after = (open_checkpoint(path).modules for path in (source, tmp_path / "sparse"))
    assert before is not None
    assert after is not None
    assert before.pooling_modes == after.pooling_modes
    np.testing.assert_array_equal(before.dense[0].weight, after.dense[0].weight)


def test_a_model_in_a_folder_of_its_own(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "dense", "bert", "embed", pooling=("mean",))
    modules = json.loads((source / "modules.json").read_text())
    inner = source / "0_Transformer"
    inner.mkdir()
    for path in list(source.iterdir()):
        if path.is_file() and path.name not in ("modules.json", "config_sentence_transformers.json"):
            path.rename(inner / path.name)
    modules[0]["path"] = "0_Transformer"
    (source / "modules.json").write_text(json.dumps(modules))
    prune_checkpoint(source, tmp_path / "sparse", **HALF)
    assert (tmp_path / "sparse" / "0_Transformer" / "model.safetensors").is_file()
    assert not (tmp_path / "sparse" / "model.safetensors").exists()
    assert set(files(tmp_path / "sparse")) == set(files(source))


def test_linked_folders_are_followed(tmp_path: Path) -> None:
    """The model's own folder is a link, and another one leads to the same place."""
    source = make_checkpoint(tmp_path / "model", "bert", "embed", pooling=("mean",))
    modules = json.loads((source / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (tmp_path / "whole").mkdir()
    (source / "modules.json").rename(tmp_path / "whole" / "modules.json")
    (tmp_path / "whole" / "modules.json").write_text(json.dumps(modules))
    for path in list(source.iterdir()):
        if path.is_dir():
            path.rename(tmp_path / "whole" / path.name)
    (tmp_path / "whole" / "0_Transformer").symlink_to(source)
    (tmp_path / "whole" / "a_link").symlink_to(source)
    prune_checkpoint(tmp_path / "whole", tmp_path / "sparse", **HALF)
    assert open_checkpoint(tmp_path / "sparse").modules is not None
    assert (tmp_path / "sparse" / "0_Transformer" / "model.safetensors").is_file()
    assert not (tmp_path / "sparse" / "a_link" / "model.safetensors").exists()
    assert not any(path.is_symlink() for path in (tmp_path / "sparse").rglob("*"))


def test_links_become_files(tmp_path: Path) -> None:
    """As in the hub's cache, whose snapshots are links."""
    source = make_checkpoint(tmp_path / "blobs", "bert", "features", layers=1)
    (tmp_path / "snapshot").mkdir()
    for path in source.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    prune_checkpoint(tmp_path / "snapshot", tmp_path / "sparse", **HALF)
    shutil.rmtree(source)
    assert not any(path.is_symlink() for path in (tmp_path / "sparse").iterdir())
    assert len(open_checkpoint(tmp_path / "sparse").tensors)


def test_kept_weights_stay(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "dense", "bert", "features", layers=2)
    pruned = prune_checkpoint(source, tmp_path / "sparse", keep=["*.layer.0.*", "*attention*"], **HALF)
    assert [weight.tensor for weight in pruned] == [
        "encoder.layer.1.intermediate.dense.weight",
        "encoder.layer.1.output.dense.weight",
    ]


class TestRefusals:
    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        return make_checkpoint(tmp_path / "dense", "bert", "features", layers=1)

    def refused(self, source: Path, out: Path, error: type[EncastError], words: str, **options: object) -> None:
        before = {path: path.is_dir() or path.is_symlink() or path.read_bytes() for path in source.parent.rglob("*")}
        with pytest.raises(error, match=words):
            prune_checkpoint(source, out, **{**HALF, **options})  # type: ignore[arg-type]
        assert {
            path: path.is_dir() or path.is_symlink() or path.read_bytes() for path in source.parent.rglob("*")
        } == before

    def test_nothing_is_replaced(self, source: Path, tmp_path: Path) -> None:
        self.refused(source, source, InputError, "exists already")
        (tmp_path / "file").write_text("x")
        self.refused(source, tmp_path / "file", InputError, "exists already")
        (tmp_path / "link").symlink_to("nowhere")
        self.refused(source, tmp_path / "link", InputError, "exists already")

    def test_places(self, source: Path, tmp_path: Path) -> None:
        self.refused(source, tmp_path / "absent" / "sparse", InputError, "does not exist")
        self.refused(source, source / "sparse", InputError, "in the checkpoint itself")

    def test_options(self, source: Path, tmp_path: Path) -> None:
        self.refused(source, tmp_path / "sparse", InputError, "0.8 is 80 %", sparsity=80)
        self.refused(source, tmp_path / "sparse", InputError, "matches none of the 6 weights", keep=["*.dnese.*"])

    def test_a_link_around_the_checkpoint_or_the_copy(self, source: Path, tmp_path: Path) -> None:
        for link, to in (("up", ".."), ("loop", "."), ("far", tmp_path.parent)):
            (source / link).symlink_to(to)
            self.refused(source, tmp_path / "sparse", CheckpointError, rf"{link} is a link to a folder that")
            (source / link).unlink()
        (source / "deep").mkdir()
        (source / "deep" / "back").symlink_to("../deep")
        self.refused(source, tmp_path / "sparse", CheckpointError, "back is a link to a folder that")

    def test_what_cannot_be_copied(self, source: Path, tmp_path: Path) -> None:
        (source / "lost.txt").symlink_to("nowhere")
        self.refused(source, tmp_path / "sparse", CheckpointError, r"lost\.txt is a link to nothing")
        (source / "lost.txt").unlink()
        os.mkfifo(source / "pipe")
        with pytest.raises(CheckpointError, match="pipe is no file and no folder"):
            prune_checkpoint(source, tmp_path / "sparse", **HALF)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]

    def test_odd_places(self, source: Path) -> None:
        for out in ("a\0b", "x" * 300, source / "config.json" / "sparse"):
            with pytest.raises(InputError):
                prune_checkpoint(source, out, **HALF)

    def test_a_damaged_checkpoint(self, source: Path, tmp_path: Path) -> None:
        (source / "config.json").write_text("{}")
        self.refused(source, tmp_path / "sparse", EncastError, "config.json")

    def test_a_weight_that_is_no_number(self, source: Path, tmp_path: Path) -> None:
        tensors = open_checkpoint(source).tensors
        arrays = {name: tensors.f32(name).copy() for name in tensors}
        arrays["encoder.layer.0.output.dense.weight"][3, 5] = np.nan
        (source / "model.safetensors").write_bytes(safetensors_bytes(arrays))
        self.refused(source, tmp_path / "sparse", CheckpointError, r"nan at index \[3, 5\]")

    def test_a_full_disk_leaves_nothing(self, source: Path, tmp_path: Path) -> None:
        with files_of_at_most(100_000):
            self.refused(source, tmp_path / "sparse", ResourceError, "cannot be written")


class TestCommand:
    def test_by_default_the_name_says_what_was_done(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        make_checkpoint(tmp_path / "model", "bert", "classify", layers=2)
        monkeypatch.chdir(tmp_path)
        assert main(["prune", "model", "--pattern", "4x1", "--sparsity", "0.8"]) == 0
        said = capsys.readouterr().out
        assert "bert.encoder.layer.*.intermediate.dense.weight (x2)" in said
        assert "80.0%" in said
        assert "Nothing was trained" in said
        assert open_checkpoint("model-4x1-0.8").architecture == "BertForSequenceClassification"

    def test_json(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        source, out = make_checkpoint(tmp_path / "model", "bert", "features", layers=1), tmp_path / "out"
        assert main(["prune", str(source), "--sparsity", "0.5", "--keep", "*attention*", "-o", str(out), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["checkpoint"], document["pattern"], document["sparsity"]) == (str(out), "4x1", 0.5)
        assert [weight["shape"] for weight in document["weights"]] == [[128, 64], [64, 128]]
        assert all(weight["zeros_after"] == 0.5 for weight in document["weights"])

    def test_errors_are_sentences(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        source = make_checkpoint(tmp_path / "model", "bert", "features", layers=1)
        assert main(["prune", str(source), "--sparsity", "0.5", "--pattern", "4by1", "-o", str(tmp_path / "out")]) == 2
        assert "OUTPUTSxINPUTS" in capsys.readouterr().err
        assert main(["prune", str(source), "--sparsity", "80", "-o", str(tmp_path / "out")]) == 2
        assert "0.8 is 80 %" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
