"""The page about metrics, logs and traces, and the dashboard, name what there is and all of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from local import client, local_service
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from encast.serve.logs import Log
from encast.serve.metrics import METRICS
from encast.serve.protocols.encast import ENCAST
from encast.serve.tracing import Tracing

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    (found,) = re.findall(rf"^## {title}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def column(title: str, number: int = 0) -> list[str]:
    """The names in a column of a section's table."""
    rows = [line.strip("| ").split(" | ") for line in section(title).splitlines() if line.startswith("| ")][2:]
    return re.findall(r"`([\w.-]+)`", " ".join(row[number] for row in rows if len(row) > number))


def test_the_table_of_metrics() -> None:
    rows = [
        f"| `encast_{one.name}` | {one.kind} | {', '.join(f'`{label}`' for label in one.labels) or '-'} | {one.help} |"
        for one in METRICS.values()
    ]
    table = "\n".join(rows)
    assert table in PAGE, f"the table in docs/reference/metrics.md should be\n{table}"


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], list[dict[str, Any]], Any]:
    """The headers of an answer, the log's lines and the spans of an answer and of a refusal."""
    path = tmp_path_factory.mktemp("log") / "log"
    log, exporter = Log(str(path), texts=True), InMemorySpanExporter()
    tracing = Tracing(exporter)
    service = local_service(tmp_path_factory.getbasetemp(), "embed")
    service.finished += [log.finished, tracing.finished]
    with client(service, [ENCAST]) as http:
        headers = http.post("/encast/v1/embed", json={"texts": ["a"]}).headers
        http.post("/encast/v1/embed", json={"texts": ["a"], "model": "absent"})
    log.close()
    tracing.close()
    return dict(headers), [json.loads(line) for line in path.read_text().splitlines()], exporter.get_finished_spans()


def test_the_headers(asked: Any) -> None:
    assert {name for name in asked[0] if name.startswith("x-")} == set(column("Headers"))


def test_the_fields_of_the_log(asked: Any) -> None:
    assert {field for line in asked[1] for field in line} == set(column("Log"))


def test_the_spans(asked: Any) -> None:
    spans = asked[2]
    assert {span.name for span in spans} - {"encast.embed"} == set(column("Traces"))
    assert {name for span in spans for name in span.attributes} == set(column("Traces", 1))


def test_the_dashboard_names_metrics_that_exist_and_all_of_them() -> None:
    dashboard = json.loads((DOCS / "serve" / "grafana.json").read_text(encoding="utf-8"))
    series = {}
    for metric in METRICS.values():
        for ending in ("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",):
            series[f"encast_{metric.name}{ending}"] = metric
    seen = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"encast_\w+", target["expr"])
            assert names
            for name in names:
                assert name in series, f"{panel['title']}: {name}"
                seen.add(series[name].name)
            labels = {label for name in names for label in series[name].labels}
            used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            for group in re.findall(r"by \(([^)]*)\)", target["expr"]):
                used |= set(group.split(", ")) - {"le"}
            assert used <= labels, panel["title"]
    assert seen == set(METRICS)


def test_the_dashboards_panels_do_not_overlap() -> None:
    dashboard = json.loads((DOCS / "serve" / "grafana.json").read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
