"""Files written by torch itself are read to the same values."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encast.errors import CheckpointError
from encast.importers.files import Folder
from encast.importers.model_files import read_tensors

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("options", [{}, {"pickle_protocol": 3}, {"pickle_protocol": 4}, {"pickle_protocol": 5}])
def test_state_dict(tmp_path: Path, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Embedding(11, 5))
    model.register_buffer("position_ids", torch.arange(9).expand((1, -1)))
    state = model.state_dict()
    state["half"] = torch.randn(3, 4).half()
    state["bfloat16"] = torch.randn(3, 4).bfloat16()
    state["double"] = torch.randn(3, 4).double()
    state["transposed"] = torch.randn(6, 4).t()
    state["slice"] = torch.randn(10, 10)[2:5, 1::3]
    state["tied"] = state["0.weight"]
    state["parameter"] = torch.nn.Parameter(torch.randn(4))
    state["scalar"] = torch.tensor(1.5)
    state["empty"] = torch.empty(0, 3)
    torch.save(state, tmp_path / "pytorch_model.bin", **options)
    tensors = read_tensors(Folder(tmp_path))
    assert set(tensors) == set(state)
    for name, tensor in state.items():
        if name == "position_ids":
            np.testing.assert_array_equal(tensors.i64(name), tensor.numpy())
        else:
            np.testing.assert_array_equal(tensors.f32(name), tensor.detach().float().numpy())


def test_plain_dict(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    np.testing.assert_array_equal(read_tensors(Folder(tmp_path)).f32("w"), [1, 1])


def test_legacy_format_says_how_to_convert(tmp_path: Path) -> None:
    state = OrderedDict(w=torch.ones(2))
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"torch before 1\.6.*convert it where torch is installed"):
        read_tensors(Folder(tmp_path))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"epoch": 3, "state_dict": {"w": [1]}}, "'epoch' is a int and no tensor.*training checkpoint"),
        ([1, 2], "holds a list"),
        (torch.nn.Linear(2, 2), "only a plain dict of tensors"),
    ],
)
def test_other_objects(tmp_path: Path, value: Any, message: str) -> None:
    torch.save(value, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        read_tensors(Folder(tmp_path))
