"""Fetching a checkpoint from the Hugging Face hub, or finding it in the local cache."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from encast.errors import CheckpointError
from encast.importers.keras_hub import HUB_FILES, HUB_SHARDS
from encast.importers.late_interaction import METADATA
from encast.importers.m3_heads import M3_FILES
from encast.importers.model_files import PYTORCH_FILES, WEIGHT_FILES
from encast.importers.tensor_bundle import DATA_FILE
from encast.importers.tokenizer_build import SENTENCEPIECE_FILES

__all__ = ["choose_files", "looks_like_hub_id", "resolve_hub"]

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_SHARD = re.compile(r"(?:model|pytorch_model|tf_model)-\d+-of-\d+\.(safetensors|bin|h5)")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SECONDS_FOR_THE_LIST = 5.0

_SMALL_FILES = {
    "adapter_config.json",  # which says that the weights are not all
    "added_tokens.json",
    "config.json",
    "config_sentence_transformers.json",
    "merges.txt",
    "modules.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    METADATA,
    *M3_FILES,
    *SENTENCEPIECE_FILES,
}
_MODULE_FOLDER = re.compile(r"\d+_\w+")
_SAVED_MODEL = re.compile(r"saved_model\.pb|variables/variables\.(index|data-\d{5}-of-\d{5})")
_ASSET = re.compile(r"assets(?:\.extra)?/([^/]+)")


def looks_like_hub_id(source: str) -> bool:
    """``name`` or ``owner/name``; not a path such as ``./name``, ``/name``, ``~/name`` or ``a/b/c``."""
    return _HUB_ID.fullmatch(source) is not None and ".." not in source and "--" not in source


def choose_files(names: list[str]) -> list[str]:
    """The files of a repository that an import reads: the preferred weights of each folder, configs, tokenizer."""
    chosen: list[str] = []
    folders: dict[str, set[str]] = {}
    for name in names:
        path = PurePosixPath(name)
        if len(path.parts) == 1 or (len(path.parts) == 2 and _MODULE_FOLDER.fullmatch(path.parts[0])):
            folders.setdefault("" if len(path.parts) == 1 else path.parts[0], set()).add(path.name)
    top = folders.get("", set())
    tensorflow = set() if top & set(PYTORCH_FILES) else _tensorflow_files(names)
    for folder, files in folders.items():
        wanted = {name for name in files if name in _SMALL_FILES or re.fullmatch(r"sentence_.*_config\.json", name)}
        accepted = PYTORCH_FILES if tensorflow and not folder else WEIGHT_FILES
        weights = next((name for name in accepted if name in files), None)
        if weights is not None:
            wanted.add(weights)
            if weights.endswith(".index.json"):
                suffix = {"pytorch_model": "bin", "tf_model": "h5"}.get(weights.partition(".")[0], "safetensors")
                wanted.update(name for name in files if (shard := _SHARD.fullmatch(name)) and shard[1] == suffix)
        chosen.extend(f"{folder}/{name}" if folder else name for name in wanted)
    if not tensorflow and not top & set(WEIGHT_FILES):
        # Of shards the list alone, which is enough to say that they are not read.
        preset = HUB_FILES if "model.weights.h5" in top else (HUB_SHARDS,)
        chosen.extend(set(preset) & set(names))
    return sorted({*chosen, *tensorflow})


def _tensorflow_files(names: list[str]) -> set[str]:
    """What is read of TensorFlow checkpoints or a SavedModel, with their config; empty when there are none."""
    if "saved_model.pb" in names:
        small = {*_SMALL_FILES, "bert_config.json"}
        assets = {name for name in names if (match := _ASSET.fullmatch(name)) and match[1] in small}
        return assets | {name for name in names if name == "bert_config.json" or _SAVED_MODEL.fullmatch(name)}
    data = {name: match[1] for name in names if (match := DATA_FILE.fullmatch(name)) and f"{match[1]}.index" in names}
    if not data:
        return set()
    wanted = {"bert_config.json", "checkpoint", *data}
    wanted.update(f"{prefix}.{suffix}" for prefix in data.values() for suffix in ("index", "meta"))
    return wanted & set(names)


def resolve_hub(repo: str, revision: str | None = None) -> tuple[Path, str | None]:
    """The local folder of a hub repository and its commit, downloading what is missing.

    Without a network the local cache serves, and with ``HF_HUB_OFFLINE=1`` nothing else is asked. Raises
    ``CheckpointError`` when neither has it.
    """
    try:
        import huggingface_hub as hub
    except ImportError:
        raise CheckpointError(
            f"{repo!r} is no local folder, and the package huggingface_hub, which fetches models, is not installed; "
            "install it or give a folder"
        ) from None
    # The hub's client raises errors of whatever network library its version uses, hence the broad handlers.
    try:
        # Not list_repo_files: without a network it asks six times, for 24 seconds. This asks once.
        info = hub.HfApi().model_info(repo, revision=revision, timeout=_SECONDS_FOR_THE_LIST)
        files = choose_files([file.rfilename for file in info.siblings or []])
    except Exception as error:
        folder = _cached(hub, repo, revision, error)
    else:
        if not {"config.json", "modules.json", "bert_config.json", "saved_model.pb"} & set(files):
            raise CheckpointError(
                f"the hub repository {repo!r} has no config.json, nor a checkpoint of TensorFlow with "
                "bert_config.json; it holds no model of this kind"
            )
        try:
            folder = Path(hub.snapshot_download(repo, revision=revision, allow_patterns=files))
        except Exception as error:
            folder = _cached(hub, repo, revision, error)
    return folder, folder.name if _COMMIT.fullmatch(folder.name) else None


def _cached(hub: Any, repo: str, revision: str | None, error: Exception) -> Path:
    try:
        return Path(hub.snapshot_download(repo, revision=revision, local_files_only=True))
    except Exception:
        first_line = (str(error).strip().splitlines() or [""])[0][:300]
        raise CheckpointError(
            f"{repo!r}: no folder of this name, the hub did not give it ({type(error).__name__}: {first_line}), and it "
            "is not in the local cache. Check the name, the network and, for private models, `hf auth login`; to work "
            f"offline run `hf download {repo}` on a machine with a network and give the folder"
        ) from error
