"""A pruned model measured end to end, small and short: sparse beside dense products, every set-up, the page of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab import backends, measure_all

from encast.bench.agreement import LEAST_COSINE
from encast.bench.report.build import Options, build_document
from encast.bench.report.load import load
from encast.measure.price import parse_price
from encast.pages.document import to_markdown

pytestmark = pytest.mark.serial("times processes on cores of their own")


def test_a_pruned_model_dense_and_sparse(tmp_path: Path) -> None:
    given = ["model.sparsity=0.8", "scenario=max_throughput", "scenario.batch=[1,2]", "scenario.instances=1"]
    rows = measure_all(backends(tmp_path), ["encast-int8-sparse", "encast-int8"], *given, "experiment=zeros")
    assert [(row["backend"]["name"], row["point"]["batch"], row["status"], row["reason"]) for row in rows] == [
        (name, batch, "ok", None) for batch in (1, 2) for name in ("encast-int8-sparse", "encast-int8")
    ]
    assert {row["model"]["name"] for row in rows} == {"minilm-4x1-0.8"}
    assert [row["backend"]["facts"].get("sparse") for row in rows[:2]] == ["always", None]
    assert all(row["agreement"]["cosine_mean"] >= LEAST_COSINE["int8"] for row in rows), "with what is pruned"
    assert "encast-int8" in rows[0]["ratio_to"], "measured by turns"
    page = to_markdown(build_document(load([tmp_path / "out" / "zeros"]), Options(price=parse_price("0.17/h"))))
    assert "each with the best set-up of its own" in page
    assert "minilm-4x1-0.8" in page
    assert "Dollars per million" in page
