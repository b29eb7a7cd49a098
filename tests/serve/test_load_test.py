"""The load test against the server: what `encast run` wrote is what the server answers, to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from local import artifact, local_service, served

from encast.cli.main import main
from encast.serve.protocols.openai import OPENAI
from encast.serve.protocols.rerank import RERANK

ROWS = [{"text": "the cat is here"}, {"text": "a dog"}, {"text": "the cat " * 30}]
RANKINGS = [{"query": "the cat", "documents": ["a dog", "the cat is here", "cat"]}, {"query": "a", "documents": ["b"]}]


@pytest.mark.parametrize(
    ("name", "protocol", "rows", "columns"),
    [
        ("embed", "openai", ROWS, []),
        ("embed", "openai-floats", ROWS, []),
        ("embed", "jina", RANKINGS, ["--pair-column", "documents"]),
        ("rerank", "cohere", RANKINGS, ["--pair-column", "documents"]),
    ],
)
def test_answers_equal_those_of_a_file(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
    protocol: str,
    rows: list[dict[str, object]],
    columns: list[str],
) -> None:
    base = tmp_path_factory.getbasetemp()
    texts, reference = tmp_path / "texts.jsonl", tmp_path / "reference.jsonl"
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = ["--task", "rerank"] if columns else []
    assert main(["run", str(artifact(base, name)), str(texts), *task, "--output", str(reference)]) == 0
    cut = [] if columns else ["--field", "truncate_prompt_tokens=-1"]  # as `encast run` does by default
    options = [*cut, "--protocol", protocol, "--texts", str(texts), *columns, "--reference", str(reference), "--json"]
    with served(local_service(base, name), [OPENAI, RERANK]) as url:
        assert main(["loadtest", url, "--clients", "3", "--requests", "8", *options]) == 0
        found = json.loads(capfd.readouterr().out)
        assert found["requests"]["answered"] == 24
        assert found["tokens_per_s"] > 0
        known = [json.loads(line) for line in reference.read_text().splitlines()]
        if columns:
            known[0]["ranking"][0]["score"] += 0.5
        else:
            known[0]["embedding"][3] += 0.5
        reference.write_text("".join(json.dumps(record) + "\n" for record in known))
        assert main(["loadtest", url, "--clients", "1", "--requests", str(len(rows)), *options]) == 3
        assert json.loads(capfd.readouterr().out)["errors"] == {"wrong answer": 1}
