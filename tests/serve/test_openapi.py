"""The OpenAPI document: what it says holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local import ARTIFACTS, client, local_service
from starlette.testclient import TestClient

from encast.serve.models import Models
from encast.serve.operations import Protocol
from encast.serve.protocols.encast import ENCAST
from encast.serve.protocols.kserve import KSERVE
from encast.serve.protocols.openai import OPENAI
from encast.serve.protocols.rerank import RERANK
from encast.serve.protocols.tei import TEI
from encast.serve.service import Service

PROTOCOLS: list[Protocol] = [OPENAI, RERANK, TEI, KSERVE, ENCAST]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def service(base: Path) -> Service:
    return local_service(base, *ARTIFACTS)


@pytest.fixture(scope="module")
def app(service: Service) -> TestClient:
    return client(service, PROTOCOLS)


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    if isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from nodes(part)


def test_it_lists_every_operation_and_all_it_refers_to(app: TestClient, base: Path) -> None:
    document = app.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    found = {(path, method) for path, methods in document["paths"].items() for method in methods}
    expected = {(one.path.replace(":path", ""), one.method.lower()) for p in PROTOCOLS for one in p.operations}
    assert found == expected
    few = client(local_service(base, "tag"), PROTOCOLS).get("/openapi.json").json()["paths"]
    assert {path for path in few if path.startswith("/encast")} == {
        "/encast/v1/tag", "/encast/v1/hidden-states", "/encast/v1/tokenize",
    }  # fmt: skip
    for node in nodes(document):
        if "$ref" in node:
            assert node["$ref"].removeprefix("#/components/schemas/") in document["components"]["schemas"]


def test_every_example_is_answered(app: TestClient) -> None:
    document, count = app.get("/openapi.json").json(), 0
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            content = described.get("requestBody", {}).get("content", {}).get("application/json", {})
            for example in content.get("examples", {}).values():
                found = app.request(method, path.format(model="embed", version="1"), json=example["value"])
                assert found.status_code == 200, (path, example, found.text)
                count += 1
    assert count >= 12


def test_documented_statuses(app: TestClient) -> None:
    document = app.get("/openapi.json").json()
    embeddings = document["paths"]["/v1/embeddings"]["post"]["responses"]
    assert set(embeddings) == {"200", "400", "404", "408", "413", "415", "429", "500", "503", "504"}
    assert "422" in document["paths"]["/v2/rerank"]["post"]["responses"]
    assert set(document["paths"]["/v1/models"]["get"]["responses"]) == {"200", "400", "500", "504"}


def test_keys_are_documented_where_they_are_asked_for(app: TestClient, service: Service) -> None:
    assert "security" not in json.dumps(app.get("/openapi.json").json())
    locked = Service(service.models, authorise=lambda header: "me" if header == "Bearer k" else None)
    document = client(locked, PROTOCOLS).get("/openapi.json", headers={"authorization": "Bearer k"}).json()
    assert document["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    open = {(one.method.lower(), one.path.replace(":path", "")) for p in PROTOCOLS for one in p.operations if one.open}
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            assert described.get("security") == (None if (method, path) in open else [{"key": []}])
            assert ("401" in described["responses"]) == ((method, path) not in open)


def test_it_follows_a_reload(service: Service) -> None:
    changed = Service(service.models)
    app = client(changed, PROTOCOLS)
    assert "/encast/v1/tag" in app.get("/openapi.json").json()["paths"]
    changed.models = Models({"embed": service.models.by_name["embed"]})
    assert "/encast/v1/tag" not in app.get("/openapi.json").json()["paths"]
