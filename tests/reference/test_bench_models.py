"""The random checkpoints of ``encast bench`` are what transformers would have written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from encast.archs import build_graph
from encast.backends.reference import Reference
from encast.batch import Batch
from encast.bench.models import make_model
from encast.importers import open_checkpoint

torch = pytest.importorskip("torch", reason="make test-reference installs torch and transformers")
transformers = pytest.importorskip("transformers", reason="make test-reference installs torch and transformers")


@pytest.mark.parametrize("arch", ["bert", "distilbert"])
def test_transformers_reads_a_random_checkpoint_whole(tmp_path: Path, arch: str) -> None:
    sizes = {"layers": 2, "hidden": 64, "inner": 256, "heads": 4, "vocab": 500, "positions": 64, "seed": 3}
    checkpoint = make_model({"name": arch, "kind": "random", "arch": arch, **sizes}, tmp_path).checkpoint
    model, told = transformers.AutoModel.from_pretrained(checkpoint, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    ids = [[2, 17, 300, 444, 3], [2, 9, 3]]
    with torch.inference_mode():
        expected = [model.eval()(torch.tensor([row])).last_hidden_state[0].numpy() for row in ids]
    found = Reference(build_graph(open_checkpoint(checkpoint), task="features")).evaluate(
        "last_hidden_state", Batch.of(ids)
    )
    np.testing.assert_allclose(found, np.concatenate(expected), atol=2e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer("w1 w20")["input_ids"] == [2, 6, 25, 3]
