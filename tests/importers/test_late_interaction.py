"""Checkpoints of token embeddings: what PyLate's and stanford's files say, and what in them is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from late_checkpoints import make_late_checkpoint
from safetensors.numpy import load_file, save_file

from encast.archs import build_graph
from encast.errors import EncastError
from encast.importers import open_checkpoint


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def refused(folder: Path, match: str) -> None:
    with pytest.raises(EncastError, match=match):
        build_graph(open_checkpoint(folder))


def test_what_pylate_leaves_out_has_its_defaults(tmp_path: Path) -> None:
    names = ("query_prefix", "document_prefix", "query_length", "document_length", "attend_to_expansion_tokens")
    names = (*names, "skiplist_words", "do_query_expansion", "similarity_fn_name", "prompts", "__version__")
    checkpoint = open_checkpoint(make_late_checkpoint(tmp_path, settings=dict.fromkeys(names), positions=200))
    form = checkpoint.token_form
    assert form is not None
    assert (form.query_length, form.document_length, checkpoint.tokenizer.max_length) == (32, 180, 180)
    assert (form.query_marker, form.document_marker, form.expansion, form.most_unseen) == (198, 199, 4, 29)
    # Ten of the words of punctuation are tokens here, the others count as the unknown one.
    assert len(form.skip) == 12
    assert 1 in form.skip


def test_both_layouts_say_the_same(tmp_path: Path) -> None:
    for attend in (False, True):
        forms = []
        for layout, words in (("pylate", {"skiplist_words": None}), ("stanford", {})):
            folder = make_late_checkpoint(tmp_path / f"{layout}{attend}", layout=layout, attend=attend, settings=words)
            forms.append(open_checkpoint(folder).token_form)
        assert forms[0] is not None
        assert forms[1] == replace(forms[0], placeholder=". ")
        assert forms[0].most_unseen == (0 if attend else 9)


def test_a_query_without_expansion_hides_nothing(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_late_checkpoint(tmp_path, settings={"do_query_expansion": False}))
    form = checkpoint.token_form
    assert form is not None
    assert (form.expansion, form.most_unseen) == (None, 0)
    assert not any(node.op == "hide_keys" for node in build_graph(checkpoint).nodes)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"query_length": 2}, "query_length must be a whole number from 3 on"),
        ({"document_length": "180"}, "document_length must be a whole number"),
        ({"query_prefix": 7}, "query_prefix must be a text"),
        ({"query_prefix": "[X] "}, r"no token '\[X\] ', which marks queries"),
        ({"skiplist_words": ["a", 1]}, "skiplist_words must be a list of texts"),
        ({"attend_to_expansion_tokens": "no"}, "attend_to_expansion_tokens must be true or false"),
        ({"similarity_fn_name": "cosine"}, "similarity_fn_name is 'cosine'; supported: MaxSim"),
        ({"pool_factor": 2}, "'pool_factor' is not understood"),
        ({"truncate_dim": 8}, "'truncate_dim' is not understood"),
        ({"default_prompt_name": "query"}, "default_prompt_name is 'query'"),
    ],
)
def test_pylate_settings_that_are_refused(settings: dict[str, Any], match: str, tmp_path: Path) -> None:
    refused(make_late_checkpoint(tmp_path, settings=settings), match)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"query_maxlen": None}, "query_maxlen is missing"),
        ({"attend_to_mask_tokens": None}, "attend_to_mask_tokens is missing"),
        ({"dim": 23}, r"'linear.weight' has shape \[24, 32\], the config promises \[23, 32\]"),
        ({"similarity": "l2"}, "similarity is 'l2'; supported: cosine"),
        ({"interaction": "flipr"}, "interaction is 'flipr'; supported: colbert"),
        ({"relu": True}, "relu is a value of type bool; supported: False"),
        ({"whiten": True}, "'whiten' is not understood"),
        ({"doc_token_id": "[unused1]"}, r"no token '\[unused1\]', which marks documents"),
    ],
)
def test_stanford_settings_that_are_refused(settings: dict[str, Any], match: str, tmp_path: Path) -> None:
    refused(make_late_checkpoint(tmp_path, layout="stanford", settings=settings), match)


def test_files_that_are_missing_or_do_not_fit(tmp_path: Path) -> None:
    pylate = make_late_checkpoint(tmp_path / "pylate", dims=(24, 12))
    (pylate / "config_sentence_transformers.json").rename(pylate / "kept")
    refused(pylate, "config_sentence_transformers.json is missing; it says the prefixes")
    (pylate / "kept").rename(pylate / "config_sentence_transformers.json")
    edit(pylate / "2_Dense" / "config.json", use_residual=True)
    refused(pylate, "'use_residual' is not understood")
    edit(pylate / "2_Dense" / "config.json", use_residual=False, module_input_name="sentence_embedding")
    refused(pylate, "module_input_name is 'sentence_embedding'; token_embeddings is supported")
    edit(pylate / "2_Dense" / "config.json", module_input_name="token_embeddings", in_features=20)
    save_file({"linear.weight": np.zeros((12, 20), np.float32)}, pylate / "2_Dense" / "model.safetensors")
    refused(pylate, "dense module 1 has a weight of shape .*24 wide")
    edit(pylate / "1_Dense" / "config.json", out_features=25)
    refused(pylate, "linear.weight has shape")

    stanford = make_late_checkpoint(tmp_path / "stanford", layout="stanford")
    (stanford / "artifact.metadata").rename(stanford / "kept")
    refused(stanford, "artifact.metadata is missing; it says the markers")
    (stanford / "kept").rename(stanford / "artifact.metadata")
    tensors = load_file(stanford / "model.safetensors")
    del tensors["linear.weight"]
    save_file(tensors, stanford / "model.safetensors")
    refused(stanford, "'linear.weight' is missing")


def test_modules_and_tokenizers_that_are_refused(tmp_path: Path) -> None:
    folder = make_late_checkpoint(tmp_path / "late")
    edit(folder / "tokenizer_config.json", padding_side="left")
    refused(folder, "padding_side is 'left'")
    edit(folder / "tokenizer_config.json", padding_side="right")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": None}))
    refused(folder, "needs a tokenizer that puts special tokens before and after a text")
    modules = json.loads((folder / "modules.json").read_text())
    pooling = {"idx": 2, "name": "2", "path": "2_Pooling", "type": "sentence_transformers.models.Pooling"}
    (folder / "modules.json").write_text(json.dumps([*modules, pooling]))
    refused(folder, "Dense modules of pylate follow a Transformer")
    modules[1]["type"] = "pylate.models.Gated"
    (folder / "modules.json").write_text(json.dumps(modules))
    refused(folder, "has type 'pylate.models.Gated'")


def test_lengths_beyond_the_positions_are_refused(tmp_path: Path) -> None:
    import encast

    folder = make_late_checkpoint(tmp_path / "late", settings={"document_length": 49})
    with pytest.raises(EncastError, match="documents may have 49 tokens, and the positions of the model end at 48"):
        encast.compile(folder, tmp_path / "out.encast")
