"""Embeddings of tokens against torch: what PyLate and ColBERT make of an encoder of transformers.

The tokens are built here in the way of the published code. PyLate's tokenizer pads a query with masks up to its length,
and a marker goes behind the first token; ColBERT's puts a full stop before each text and the marker in its place. The
attention mask says which tokens are seen.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="compares with transformers, which needs torch")
transformers = pytest.importorskip("transformers", reason="compares with transformers")

from late_checkpoints import make_late_checkpoint, projections  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

import encast  # noqa: E402

TEXTS = ["the cat sat on the mat.", "a", "", "b c [MASK] d [MASK]", "to be, or not to be! that is " * 4]
LENGTHS = {"query": 12, "document": 20}
_CLASSES = {"bert": "BertModel", "roberta": "RobertaModel"}


def encoder(folder: Path, place: Path) -> Any:
    """The checkpoint's encoder alone, in float64."""
    config = json.loads((folder / "config.json").read_text())
    if config["architectures"] == ["HF_ColBERT"]:
        tensors = load_file(folder / "model.safetensors")
        prefix = next(name for name in tensors if "embeddings" in name).partition("embeddings")[0]
        bare = {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}
        place.mkdir()
        save_file(bare, place / "model.safetensors", metadata={"format": "pt"})
        (place / "config.json").write_text(json.dumps({**config, "architectures": [_CLASSES[config["model_type"]]]}))
        folder = place
    attention = "sdpa" if config["model_type"] == "modernbert" else "eager"
    return transformers.AutoModel.from_pretrained(folder, dtype=torch.float64, attn_implementation=attention).eval()


def tokens_of(folder: Path, text: str, kind: str, attend: bool, layout: str) -> tuple[list[int], list[int]]:
    """Ids, and which of them are seen."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    mask = next(tokenizer.token_to_id(one) for one in ("[MASK]", "<mask>") if tokenizer.token_to_id(one) is not None)
    length = LENGTHS[kind] - (layout == "pylate")
    tokenizer.enable_truncation(length)
    if kind == "query":
        tokenizer.enable_padding(length=length, pad_id=mask)
    marker = tokenizer.token_to_id("[Q] " if kind == "query" else "[D] ")
    if layout == "pylate":
        found = tokenizer.encode(text)
        ids = [found.ids[0], marker, *found.ids[1:]]
        seen = [1, 1, *found.attention_mask[1:]]
    else:
        found = tokenizer.encode(". " + text)
        ids, seen = [found.ids[0], marker, *found.ids[2:]], found.attention_mask
    return ids, [1] * len(ids) if attend else seen


def vectors_of(model: Any, weights: list[Any], ids: list[int], seen: list[int]) -> Any:
    with torch.no_grad():
        x = model(input_ids=torch.tensor([ids]), attention_mask=torch.tensor([seen])).last_hidden_state[0]
        for weight in weights:
            x = torch.nn.functional.linear(x, torch.from_numpy(weight).to(torch.float64))
        return torch.nn.functional.normalize(x, p=2, dim=1).numpy()


@pytest.mark.parametrize("attend", [False, True])
@pytest.mark.parametrize(
    ("arch", "layout", "dims"),
    [
        ("bert", "pylate", (24,)),
        ("bert", "stanford", (40,)),
        ("roberta", "stanford", (24,)),
        ("modernbert", "pylate", (48, 24)),
        ("xlm-roberta", "pylate", (24,)),
        ("mpnet", "pylate", (24,)),
    ],
)
def test_vectors(arch: str, layout: str, dims: tuple[int, ...], attend: bool, tmp_path: Path) -> None:
    # Masks at the end of a query see the tokens that are theirs alone where a local attention reaches so far.
    config = {"local_attention": 20} if arch == "modernbert" else {}
    folder = make_late_checkpoint(tmp_path / arch, arch, layout, dims=dims, attend=attend, config=config)
    model, weights = encoder(folder, tmp_path / "encoder"), projections(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = [".", ",", "!"] if layout == "pylate" else string.punctuation
    unknown = next(tokenizer.token_to_id(one) for one in ("[UNK]", "<unk>") if tokenizer.token_to_id(one) is not None)
    if layout == "pylate":
        skipped = {tokenizer.token_to_id(word) or unknown for word in words}
    else:
        skipped = {tokenizer.encode(word, add_special_tokens=False).ids[0] for word in words}
    artifact = encast.compile(folder, tmp_path / "model.encast", dtype="f32", exact=True)
    with encast.load(artifact, threads=1) as engine:
        assert (engine.task, engine.dim, engine.max_length) == ("embed_tokens", dims[-1], 20)
        for kind in ("query", "document"):
            found = engine.embed_tokens(TEXTS, kind=kind)
            for text, one in zip(TEXTS, found, strict=True):
                ids, seen = tokens_of(folder, text, kind, attend, layout)
                wanted = vectors_of(model, weights, ids, seen)
                kept = [place for place, token in enumerate(ids) if kind == "query" or token not in skipped]
                assert one.token_ids.tolist() == [ids[place] for place in kept]
                np.testing.assert_allclose(one.vectors, wanted[kept], atol=2e-5)
