"""The load test against the server: what `encast run` wrote is what the server answers, to the bit."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc_local import grpc_served
from local import artifact, local_service, served

from encast.cli.main import main
from encast.serve.protocols.kserve import KSERVE
from encast.serve.protocols.openai import OPENAI
from encast.serve.protocols.rerank import RERANK
from encast.serve.protocols.tei import TEI
from encast.serve.service import Service

ROWS = [{"text": "the cat is here"}, {"text": "a dog"}, {"text": "the cat " * 5}]
LONG = [*ROWS, {"text": "the cat " * 30}]
RANKINGS = [{"query": "the cat", "documents": ["a dog", "the cat is here", "cat"]}, {"query": "a", "documents": ["b"]}]


@contextlib.contextmanager
def _serving(protocol: str, service: Service) -> Iterator[str]:
    if protocol == "kserve-grpc":
        with grpc_served(service) as address:
            yield f"http://{address}"
    else:
        with served(service, [OPENAI, RERANK, TEI, KSERVE]) as url:
            yield url


@pytest.mark.parametrize(
    ("name", "protocol", "rows", "options"),
    [
        ("embed", "openai", ROWS, []),
        ("embed", "openai-floats", LONG, ["--field", "truncate_prompt_tokens=-1"]),  # `encast run` cuts by default
        ("embed", "tei-embed", LONG, ["--field", "truncate=true"]),
        ("classify", "tei-predict", ROWS, []),
        ("rerank", "tei-rerank", RANKINGS, ["--pair-column", "documents"]),
        ("embed", "jina", RANKINGS, ["--pair-column", "documents"]),
        ("rerank", "cohere", RANKINGS, ["--pair-column", "documents"]),
        ("embed", "kserve", ROWS, []),
        ("embed", "kserve-grpc", ROWS, ["--model", "embed"]),
    ],
)
def test_answers_equal_those_of_a_file(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
    protocol: str,
    rows: list[dict[str, object]],
    options: list[str],
) -> None:
    base = tmp_path_factory.getbasetemp()
    texts, reference = tmp_path / "texts.jsonl", tmp_path / "reference.jsonl"
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = ["--task", "rerank"] if rows is RANKINGS else []
    assert main(["run", str(artifact(base, name)), str(texts), *task, "--output", str(reference)]) == 0
    options = [*options, "--protocol", protocol, "--texts", str(texts), "--reference", str(reference), "--json"]
    with _serving(protocol, local_service(base, name)) as url:
        assert main(["loadtest", url, "--clients", "3", "--requests", "8", *options]) == 0
        found = json.loads(capfd.readouterr().out)
        assert found["requests"]["answered"] == 24
        assert protocol == "kserve-grpc" or found["tokens_per_s"] > 0
        known = [json.loads(line) for line in reference.read_text().splitlines()]
        if rows is RANKINGS:
            known[0]["ranking"][0]["score"] += 0.5
        elif "scores" in known[0]:
            known[0]["scores"][1]["score"] += 0.5
        else:
            known[0]["embedding"][3] += 0.5
        reference.write_text("".join(json.dumps(record) + "\n" for record in known))
        assert main(["loadtest", url, "--clients", "1", "--requests", str(len(rows)), *options]) == 3
        assert json.loads(capfd.readouterr().out)["errors"] == {"wrong answer": 1}
