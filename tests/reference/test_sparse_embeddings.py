"""SPLADE against torch: what SpladePooling of sentence-transformers computes of a masked-LM of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="compares with transformers, which needs torch")
transformers = pytest.importorskip("transformers", reason="compares with transformers")

from checkpoints import TRAINABLE, make_checkpoint  # noqa: E402

import encast  # noqa: E402

TEXTS = ["the cat sat on the mat", "a", "b c [MASK] d " * 5]


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("arch", TRAINABLE)
def test_weights(arch: str, activation: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / arch, arch, "embed_sparse", layers=2, hidden=32, heads=2, splade=activation)
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float64).eval()
    artifact = encast.compile(folder, tmp_path / "model.encast", dtype="f32", exact=True)
    with encast.load(artifact, threads=1) as engine:
        found = engine.embed_sparse(TEXTS)
        for encoding, vector in zip(engine.session.tokenizer.encode(TEXTS), found, strict=True):
            with torch.no_grad():
                weights = torch.log1p(torch.relu(model(input_ids=torch.tensor([encoding.ids])).logits[0]))
                if activation == "log1p_relu":
                    weights = torch.log1p(weights)
            wanted = torch.amax(weights, dim=0).numpy()
            got = np.zeros_like(wanted)
            got[vector.indices] = vector.values
            np.testing.assert_allclose(got, wanted, atol=2e-5)
