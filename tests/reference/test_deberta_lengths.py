"""DeBERTa's distances, and texts at the lengths of the published models, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="compares with transformers, which needs torch")
transformers = pytest.importorskip("transformers", reason="compares with transformers")

from checkpoints import make_checkpoint  # noqa: E402
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position  # noqa: E402

import encast  # noqa: E402
from encast.ir.relative import distance_rows  # noqa: E402


@pytest.mark.parametrize(("span", "furthest"), [(256, 512), (256, 1024), (128, 512), (512, 1024), (8, 48), (48, 100)])
def test_buckets_are_those_of_transformers(span: int, furthest: int) -> None:
    distances = np.arange(-2 * furthest, 2 * furthest + 1)
    buckets = make_log_bucket_position(torch.from_numpy(distances), span, furthest).long().numpy()
    wanted = np.clip(buckets + span, 0, 2 * span - 1)
    np.testing.assert_array_equal(distance_rows(distances, span, furthest), wanted)


V3 = {"position_buckets": 256, "layer_norm_eps": 1e-7}
V2 = {**V3, "share_att_key": True, "conv_kernel_size": 3, "conv_act": "gelu"}


@pytest.mark.parametrize("length", [1, 129, 300, 512])
@pytest.mark.parametrize("config", [V3, V2], ids=["v3", "v2-xlarge"])
def test_long_texts(config: dict[str, Any], length: int, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "deberta-v2", "features", layers=3, positions=512, config=config)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = np.random.default_rng(3).integers(5, 200, length)
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor(ids)[None]).last_hidden_state[0].numpy()
    artifact = encast.compile(folder, tmp_path / "model.encast", dtype="f32", exact=True, strict=True)
    with encast.load(artifact, threads=1) as engine:
        (got,) = engine.forward([ids.tolist()])
    assert np.abs(got - wanted).max() < 2e-5 * np.abs(wanted).max()


def test_padding_of_transformers_changes_nothing(tmp_path: Path) -> None:
    """Also beside the convolution, which padding must not reach."""
    folder = make_checkpoint(tmp_path / "model", "deberta-v2", "features", positions=512, config=V2)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    texts = [np.random.default_rng(length).integers(5, 200, length).tolist() for length in (3, 40, 17)]
    padded = torch.tensor([text + [0] * (40 - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (40 - len(text)) for text in texts])
    with torch.no_grad():
        wanted = model(input_ids=padded, attention_mask=mask).last_hidden_state.numpy()
    artifact = encast.compile(folder, tmp_path / "model.encast", dtype="f32", exact=True, strict=True)
    with encast.load(artifact, threads=1) as engine:
        for text, got, rows in zip(texts, engine.forward(texts), wanted, strict=True):
            assert np.abs(got - rows[: len(text)]).max() < 2e-5 * np.abs(rows).max()
