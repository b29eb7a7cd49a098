"""Prompts of a sentence-embedding checkpoint go before the text, as sentence-transformers puts them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import CASES, make_case

import encast
from encast.errors import InputError


@pytest.fixture(scope="module")
def prompted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("prompted")
    folder = make_case(base, CASES["bert-embed"])
    prompts = {"query": "ask a ", "passage": "read a "}
    settings = {"prompts": prompts, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return encast.compile(folder, base / "prompted.encast", dtype="f32")


def test_the_default_prompt_is_used(prompted: Path) -> None:
    with encast.load(prompted) as engine:
        plain = engine.embed(["b c", "ask a b c", "read a b c"], prompt_name="")
        np.testing.assert_array_equal(engine.embed(["b c"]), plain[1:2])
        np.testing.assert_array_equal(engine.embed(["b c"], prompt_name="passage"), plain[2:3])
        assert not np.array_equal(plain[0], plain[1])


def test_an_unknown_prompt_is_named(prompted: Path) -> None:
    with encast.load(prompted) as engine, pytest.raises(InputError, match=r"'document'.*'query', 'passage'"):
        engine.embed(["b"], prompt_name="document")
