"""Writing: what stands on disk afterwards, whatever happens in between."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import batch
from made import FILES, TOKENIZER, compiled_graph, write_artifact
from safetensors import safe_open

from encast import artifact
from encast.artifact import card as cards
from encast.artifact.pack import StoredSpec
from encast.artifact.safetensors import layout
from encast.backends.reference import Reference
from encast.errors import ArtifactError, GraphError, InputError, ResourceError
from encast.files import exchange, sync_folder


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
def test_round_trip(tmp_path: Path, dtype: str) -> None:
    graph, card = compiled_graph(dtype)
    path = artifact.write(tmp_path / "m.encast", graph, TOKENIZER, card)
    assert sorted(os.listdir(path)) == sorted(FILES)
    opened = artifact.open(path)
    opened.verify()
    assert str(opened.graph) == str(graph)
    assert opened.graph.meta == graph.meta
    # What artifacts hold since the first: no field may change its name or its form.
    assert json.loads((path / "graph.json").read_bytes())["meta"] == {
        "arch": "bert",
        "task": "fill_mask",
        "hidden": 30,
        "layers": 1,
        "heads": 2,
        "vocab": 70,
        "type_vocab": 2,
        "max_len": 24,
        "labels": None,
        "problem_type": None,
        "similarity": "cosine",
        "expected": {
            "qkv": {"per_layer": 1, "other": 0},
            "attention": {"per_layer": 1, "other": 0},
            "linear_activation": {"per_layer": 1, "other": 0},
            "add_layer_norm": {"per_layer": 2, "other": 0},
            "embed_layer_norm": {"per_layer": 0, "other": 1},
        },
        "math": "fast",
        "dtype": dtype,
    }
    assert opened.tokenizer_json == TOKENIZER
    assert opened.card["fusions"] == card["fusions"]
    assert opened.card["sizes"] == {name: (path / name).stat().st_size for name in FILES if name != "card.json"}
    assert opened.weights_path == path / "weights.safetensors"
    loaded = opened.load_graph()
    for name, constant in graph.constants.items():
        assert np.array_equal(loaded.constants[name].array, constant.array), name
        assert loaded.constants[name].array.dtype == constant.array.dtype
    requests = batch(graph)
    wanted = Reference(graph).run("last_hidden_state", requests)
    assert np.array_equal(Reference(loaded).run("last_hidden_state", requests), wanted)


def test_tensors_are_aligned_and_any_safetensors_library_reads_them(tmp_path: Path) -> None:
    opened = artifact.open(write_artifact(tmp_path / "m.encast", "f32"))
    data = opened.weights_path.read_bytes()
    with safe_open(str(opened.weights_path), "numpy") as file:
        assert set(file.keys()) == set(opened.tensors)
        assert file.metadata() == {"format": "encast", "format_version": "2"}
        for name, tensor in opened.tensors.items():
            assert name.startswith("__pad.") or tensor.offset % 64 == 0
            stored = file.get_tensor(name)
            assert stored.shape == tensor.shape
            assert stored.tobytes() == data[tensor.offset : tensor.offset + tensor.nbytes]
    assert any(name.startswith("__pad.") for name in opened.tensors)


def test_what_came_meanwhile_is_not_removed(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "m.encast")

    def progress(done: int, total: int) -> None:
        (path / "thesis.txt").write_text("mine")

    with pytest.raises(InputError, match=r"thesis\.txt"):
        write_artifact(path, progress=progress)
    assert (path / "thesis.txt").read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.encast"]


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = write_artifact(tmp_path / "m.encast", progress=lambda done, total: seen.append((done, total)))
    size = (path / "weights.safetensors").stat().st_size
    assert seen == sorted(seen)
    assert seen[-1] == (size, size)


def test_an_artifact_is_replaced(tmp_path: Path) -> None:
    write_artifact(tmp_path / "m.encast", "f32")
    path = write_artifact(tmp_path / "m.encast", "int8")
    assert artifact.open(path).graph.meta.dtype == "int8"
    assert os.listdir(tmp_path) == ["m.encast"]


def test_a_damaged_artifact_and_an_empty_folder_are_replaced(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "m.encast")
    (path / "card.json").unlink()
    (path / "graph.json").write_text("{")
    artifact.open(write_artifact(tmp_path / "m.encast")).verify()
    (tmp_path / "empty.encast").mkdir()
    artifact.open(write_artifact(tmp_path / "empty.encast")).verify()


def test_a_link_is_followed(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "real.encast")
    (tmp_path / "link.encast").symlink_to(path)
    write_artifact(tmp_path / "link.encast", "f32")
    assert (tmp_path / "link.encast").is_symlink()
    assert artifact.open(path).graph.meta.dtype == "f32"


@pytest.mark.parametrize("kind", ["file", "other folder", "no parent"])
def test_what_is_no_artifact_stays(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "m.encast"
    if kind == "file":
        target.write_text("mine")
    elif kind == "other folder":
        write_artifact(target)
        (target / "notes.txt").write_text("mine")
    else:
        target = tmp_path / "nowhere" / "m.encast"
    before = everything(tmp_path)
    with pytest.raises(InputError, match="choose another"):
        write_artifact(target)
    assert everything(tmp_path) == before


def interrupt_at(fraction: float) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done >= fraction * total:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("replacing", [False, True])
def test_an_interrupt_leaves_what_was_there(tmp_path: Path, fraction: float, replacing: bool) -> None:
    if replacing:
        write_artifact(tmp_path / "m.encast", "f32")
    before = everything(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        write_artifact(tmp_path / "m.encast", progress=interrupt_at(fraction))
    assert everything(tmp_path) == before
    assert os.listdir(tmp_path) == (["m.encast"] if replacing else [])


@pytest.mark.parametrize(("atomic", "call"), [(True, 0), (True, 1), (True, 2), *((False, call) for call in range(4))])
def test_a_failure_at_any_rename_or_sync_leaves_one_whole_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, atomic: bool, call: int
) -> None:
    """Old or new, never neither: the calls are two syncs of folders, and between them one exchange or two renames."""
    write_artifact(tmp_path / "m.encast", "f32")
    calls = iter(range(100))

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if next(calls) == call:
                raise KeyboardInterrupt
            return real(*arguments)

        return run

    monkeypatch.setattr(os, "rename", failing(os.rename))
    # The package's attribute of that name is the function.
    writing = sys.modules["encast.artifact.write"]
    monkeypatch.setattr(writing, "exchange", failing(exchange) if atomic else lambda a, b: False)
    monkeypatch.setattr(writing, "sync_folder", failing(sync_folder))
    with pytest.raises(KeyboardInterrupt):
        write_artifact(tmp_path / "m.encast", "int8")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["m.encast"]
    opened = artifact.open(tmp_path / "m.encast")
    opened.verify()
    assert opened.graph.meta.dtype == ("int8" if call == (2 if atomic else 3) else "f32")


def test_an_artifact_is_moved_in_the_place_of_another(tmp_path: Path) -> None:
    write_artifact(tmp_path / "m.encast", "f32")
    write_artifact(tmp_path / "n.encast", "int8")
    assert artifact.replace(tmp_path / "n.encast", tmp_path / "m.encast") == tmp_path / "m.encast"
    assert os.listdir(tmp_path) == ["m.encast"]
    artifact.open(tmp_path / "m.encast").verify()
    assert artifact.open(tmp_path / "m.encast").graph.meta.dtype == "int8"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    with pytest.raises(InputError, match=r"other holds 'thesis\.txt', so it is no encast artifact and is not replaced"):
        artifact.replace(tmp_path / "m.encast", tmp_path / "other")


def test_the_exchange_of_two_folders_leaves_no_moment_without(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    if not exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange names")
    assert [(tmp_path / name / "content").read_text() for name in ("a", "b")] == ["b", "a"]
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "a", tmp_path / "absent")


class FullDisk:
    """A file on a disk that takes only so many bytes more."""

    def __init__(self, file: Any, free: list[int]) -> None:
        self._file, self._free = file, free

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *details: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        self._free[0] -= len(data)
        if self._free[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self._file.write(data))


@pytest.mark.parametrize("free", [0, 3000, 20_000, 60_000])
@pytest.mark.parametrize("replacing", [False, True])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, replacing: bool) -> None:
    if replacing:
        write_artifact(tmp_path / "m.encast", "f32")
    before = everything(tmp_path)
    real, left = Path.open, [free]

    def limited(self: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = real(self, mode, *arguments, **options)
        return FullDisk(file, left) if "x" in mode or "w" in mode else file

    monkeypatch.setattr(Path, "open", limited)
    with pytest.raises(ResourceError, match=r"No space left on device.*MiB are free"):
        write_artifact(tmp_path / "m.encast")
    monkeypatch.undo()
    assert everything(tmp_path) == before
    assert os.listdir(tmp_path) == (["m.encast"] if replacing else [])


def test_a_limit_of_the_operating_system(tmp_path: Path) -> None:
    """The kernel itself refuses the bytes, in a process of its own."""
    script = f"""
        import resource, sys
        sys.path[:0] = {sys.path!r}
        from pathlib import Path
        from made import write_artifact
        from encast.errors import ResourceError
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        try:
            write_artifact(Path({str(tmp_path)!r}) / "m.encast")
        except ResourceError as error:
            sys.exit(f"refused: {{error}}")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "refused:" in done.stderr
    assert "File too large" in done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_an_unwritable_folder(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    with pytest.raises(ResourceError, match="Permission denied"):
        write_artifact(folder / "m.encast")


def test_a_broken_graph_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    graph, card = compiled_graph()
    graph.outputs["logits"] = "nothing"
    with pytest.raises(GraphError):
        artifact.write(tmp_path / "m.encast", graph, TOKENIZER, card)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["__pad.0", "__metadata__"])
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(ArtifactError, match="reserved or taken"):
        layout([StoredSpec(name, "f32", (4,), name, "dense")], {})


def test_the_umask_decides_who_may_read(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        path = write_artifact(tmp_path / "m.encast")
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o755
    assert (path / "weights.safetensors").stat().st_mode & 0o777 == 0o644


class TestUpdateCard:
    def test_sets_what_was_measured(self, tmp_path: Path) -> None:
        path = write_artifact(tmp_path / "m.encast")
        before = artifact.open(path).card
        artifact.update_card(path, accuracy={"STS-B": {"spearman": 86.6}})
        opened = artifact.open(path)
        opened.verify()
        assert opened.card["accuracy"] == {"STS-B": {"spearman": 86.6}}
        assert {**opened.card, "accuracy": {}, "checksum": ""} == {**before, "checksum": ""}
        assert sorted(os.listdir(path)) == sorted(FILES)

    def test_what_compile_wrote_is_fixed(self, tmp_path: Path) -> None:
        path = write_artifact(tmp_path / "m.encast")
        with pytest.raises(InputError, match="'dtype'"):
            artifact.update_card(path, dtype="f32")

    def test_a_failure_leaves_the_card(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_artifact(tmp_path / "m.encast")
        before = everything(path)

        def full(source: Any, target: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(cards.os, "replace", full)
        with pytest.raises(ResourceError, match="No space left"):
            artifact.update_card(path, accuracy={})
        monkeypatch.undo()
        assert everything(path) == before

    def test_numbers_that_json_lacks_are_refused(self, tmp_path: Path) -> None:
        path = write_artifact(tmp_path / "m.encast")
        with pytest.raises(ValueError, match="JSON"):
            artifact.update_card(path, accuracy={"a": float("nan")})
        json.loads((path / "card.json").read_bytes())
