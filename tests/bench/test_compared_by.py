"""What a ratio is of: told wherever it stands beside a number of something else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from small_reports import Rows, document, few
from synthetic_rows import Experiment, write

from encast.cli.bench import _result
from encast.pages.document import Table, to_html, to_markdown


def test_a_ratio_of_another_number_than_the_one_shown_says_so(tmp_path: Path) -> None:
    """Sooner at the tail and later on average: the winner has a ratio below 1."""
    two = ("encast-int8", "openvino-int8")
    for points in (1, 2):
        made = Experiment("stream", backends=two)
        rows: Rows = []
        for share in (0.5, 0.8)[:points]:
            rows += made.point("open_loop", {"batch": 1, "length": 32, "arrivals": "poisson", "load": share}, noisy=0)
        for row in rows:
            own = row["backend"]["name"] == "encast-int8"
            row["metrics"]["latency_ms"].update(p99=10.0 if own else 12.0)
            row["compared_by"] = "mean latency"
            (other,) = set(two) - {row["backend"]["name"]}
            row["ratio_to"] = {other: {"ratio": 0.8 if own else 1.25, "low": None, "high": None}}
        shown = document(write(tmp_path / str(points), rows))
        for said in (to_markdown(shown), to_html(shown)):
            assert "of mean latency, the numbers beside them of latency (p99)" in said
            assert "by mean latency; fastest by latency (p99)" in said
        (table,) = [one for one in shown.sections[0].blocks if isinstance(one, Table)]
        assert table.lines[0][4].text == "encast-int8"
        assert table.lines[0][-1].text == "0.80x as fast as openvino-int8"
        for row in rows:
            row["compared_by"] = "latency (p99)"
        assert "numbers beside them" not in to_markdown(document(write(tmp_path / str(points), rows)))


def test_a_plot_of_ratios_names_what_they_are_of(tmp_path: Path) -> None:
    rows = few()
    for row in rows:
        row["compared_by"] = "throughput"
    page = to_html(document(write(tmp_path, rows)))
    assert "Times as fast as openvino-int8, by throughput against length" in page


@pytest.mark.parametrize(
    ("metrics", "by", "said"),
    [
        ({"latency_ms": {"p50": 2.0}, "sequences_per_s": 500.0}, "mean latency", "fast as b by mean latency"),
        ({"latency_ms": {"p50": 2.0}, "sequences_per_s": 500.0}, "throughput", "fast as b by throughput"),
        ({"latency_ms": {"p50": 2.0}, "sequences_per_s": 500.0}, "latency (p50)", "fast as b"),
        ({"sequences_per_s": 500.0}, "throughput", "fast as b"),
        ({"cold_start_s": {"total": 2.0}, "cold_start_s_interval": None, "starts": 3}, "cold start", "fast as b"),
    ],
)
def test_the_console_names_what_ratios_are_of(metrics: Mapping[str, Any], by: str, said: str) -> None:
    ratio = {"ratio": 1.5, "low": None, "high": None}
    row = {"metrics": metrics, "compared_by": by, "ratio_to": {"b": ratio}, "cost": None, "noise": None}
    assert _result(row).endswith(f"1.50 times as {said}")
    assert ("starts in 2.000 s, " in _result(row)) == ("cold_start_s" in metrics)
