"""ModernBERT at the lengths and with the windows of the published models, against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="compares with transformers, which needs torch")
transformers = pytest.importorskip("transformers", reason="compares with transformers")

from checkpoints import make_checkpoint  # noqa: E402

import encast  # noqa: E402


@pytest.mark.parametrize("length", [1, 129, 1500])
def test_long_texts(length: int, tmp_path: Path) -> None:
    """transformers makes angles in f32: at position p they are off by up to p / 2^24, and so are sines and cosines."""
    config = {"local_attention": 128}
    folder = make_checkpoint(tmp_path / "model", "modernbert", "features", layers=3, positions=2048, config=config)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    ids = np.random.default_rng(3).integers(5, 200, length)
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor(ids)[None]).last_hidden_state[0].numpy()
    artifact = encast.compile(folder, tmp_path / "model.encast", dtype="f32", exact=True)
    with encast.load(artifact, threads=1) as engine:
        (got,) = engine.forward([ids.tolist()])
    assert np.abs(got - wanted).max() < 2e-5 * np.abs(wanted).max() * max(1.0, length / 64)
