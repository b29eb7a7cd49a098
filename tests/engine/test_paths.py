"""Artifacts in folders whose names are no UTF-8, which file systems allow."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from cases import open_case, task_of
from checkpoints import CASES

import encast


def test_an_artifact_opens_below_a_folder_whose_name_is_no_utf8(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = open_case("bert-embed", tmp_path_factory)
    made = encast.compile(case.folder, tmp_path / "plain.encast", dtype="int8", task=task_of(CASES["bert-embed"]))
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    odd.mkdir()
    moved = shutil.copytree(made, odd / "model.encast")
    with encast.load(moved, threads=1) as engine:
        assert len(engine.forward([[1, 2, 3]])) == 1
