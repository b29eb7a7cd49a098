"""The recipes in ``deploy/``: valid for what reads them, and true of the server that they start.

KServe's own fields are those of the resource definitions of KServe 0.20.0 (``config/crd/full``), against which
``deploy/kserve.yaml`` was checked whole.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from encast.serve.protocols.health import HEALTH
from encast.serve.protocols.page import page

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"

_RUNTIME_FIELDS = {
    "affinity", "annotations", "builtInAdapter", "containers", "disabled", "grpcDataEndpoint", "grpcEndpoint",
    "hostIPC", "httpDataEndpoint", "imagePullSecrets", "labels", "multiModel", "nodeSelector", "protocolVersions",
    "replicas", "resourceClaims", "schedulerName", "storageHelper", "supportedModelFormats", "tolerations", "volumes",
    "workerSpec",
}  # fmt: skip
_FORMAT_FIELDS = {"autoSelect", "name", "priority", "version"}
_PROTOCOLS = {"v1", "v2", "grpc-v1", "grpc-v2"}


async def _live() -> bytes:
    return b""


def _paths() -> set[str]:
    """What a probe or a scraper may ask for."""
    return {operation.path for protocol in (HEALTH, page(_live)) for operation in protocol.operations}


def _documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def _only(documents: list[Any], kind: str) -> Any:
    (found,) = (one for one in documents if one["kind"] == kind)
    return found


def _words(name: str) -> list[str]:
    """The words of a recipe that are read by ``encast serve``, comments that name options included."""
    if name.endswith(".yaml"):
        lists = re.findall(r"args: (\[.*\])", (DEPLOY / name).read_text())
        return [word for one in lists for word in yaml.safe_load(one)]
    return re.findall(r"--[a-z][a-z-]*(?=[\s\"',.;]|$)", (DEPLOY / name).read_text())


def _value(words: list[str], option: str, default: str) -> str:
    return words[words.index(option) + 1] if option in words else default


def _pod(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The specification of the recipe's pod, and its container."""
    documents = _documents(name)
    if name == "kubernetes.yaml":
        spec = _only(documents, "Deployment")["spec"]["template"]["spec"]
    else:
        spec = _only(documents, "ServingRuntime")["spec"]
    (container,) = spec["containers"]
    return spec, container


@pytest.fixture(scope="module")
def options() -> set[str]:
    """The options of ``encast serve``."""
    command = [sys.executable, "-m", "encast.cli.main", "serve", "--help"]
    wide = {**os.environ, "COLUMNS": "250", "TERM": "dumb", "NO_COLOR": "1"}
    text = subprocess.run(command, capture_output=True, text=True, check=True, env=wide).stdout
    return set(re.findall(r"--[a-z][a-z0-9-]*", text))


@pytest.mark.parametrize("name", ["Containerfile", "encast.service", "kserve.yaml", "kubernetes.yaml"])
def test_options_exist(name: str, options: set[str]) -> None:
    others = {"--from-file", "--interval", "--timeout", "--start-period", "--system", "--uid", "--create-home"}
    others |= {"--no-cache-dir", "--rm", "--now", "--from"}
    asked = {word for word in _words(name) if word.startswith("--")}
    assert asked - others
    assert asked - others <= options


@pytest.mark.parametrize("name", ["kserve.yaml", "kubernetes.yaml"])
def test_probes_and_ports_are_the_servers(name: str) -> None:
    paths = _paths()
    spec, container = _pod(name)
    words = container["args"]
    served = {8080, int(_value(words, "--grpc-port", "0"))}
    assert {port["containerPort"] for port in container["ports"]} <= served
    names = {port.get("name"): port["containerPort"] for port in container["ports"]}
    probes = [probe for key, probe in container.items() if key.endswith("Probe")]
    assert len(probes) >= 2
    for probe in probes:
        assert probe["httpGet"]["path"] in paths
        port = probe["httpGet"]["port"]
        assert names.get(port, port) == 8080
    notes = _documents(name)[0]["spec"].get("annotations", {})
    assert {value for key, value in notes.items() if key.endswith("/path")} <= paths
    assert not (notes and "--api-keys" in words), "a scraper that follows annotations sends no key"
    mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
    assert mounted == {volume["name"] for volume in spec.get("volumes", ())}


def test_every_way_to_end_gives_time_to_drain() -> None:
    spec, container = _pod("kubernetes.yaml")
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > pause + float(_value(container["args"], "--drain-s", "30"))
    # Kubernetes' own grace period: a ServingRuntime cannot set one.
    assert float(_value(_pod("kserve.yaml")[1]["args"], "--drain-s", "30")) < 30
    unit = (DEPLOY / "encast.service").read_text()
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert float(seconds) > 30
    assert re.search(r"^KillMode=mixed$", unit, re.MULTILINE), "a signal to every process would end those that answer"


@pytest.mark.parametrize("document", _documents("kubernetes.yaml"), ids=lambda document: document["kind"])
def test_kubernetes_takes_it(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_kubernetes_parts_belong_together() -> None:
    documents = _documents("kubernetes.yaml")
    labels = _only(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert _only(documents, kind)["spec"]["selector"]["matchLabels"].items() <= labels.items()
    service = _only(documents, "Service")["spec"]
    assert service["selector"].items() <= labels.items()
    ports = {port["name"] for port in _pod("kubernetes.yaml")[1]["ports"]}
    assert {port["targetPort"] for port in service["ports"]} <= ports


def test_kserve_takes_it() -> None:
    documents = _documents("kserve.yaml")
    runtime = _only(documents, "ServingRuntime")
    service = _only(documents, "InferenceService")
    assert (runtime["apiVersion"], service["apiVersion"]) == ("serving.kserve.io/v1alpha1", "serving.kserve.io/v1beta1")
    spec, container = _pod("kserve.yaml")
    assert set(spec) <= _RUNTIME_FIELDS
    assert set(spec["protocolVersions"]) <= _PROTOCOLS
    for one in spec["supportedModelFormats"]:
        assert set(one) <= _FORMAT_FIELDS
        assert one["priority"] >= 1
    assert container["name"] == "kserve-container", "the name that KServe looks for"
    assert "{{.Name}}=/mnt/models" in container["args"], "KServe's name and place of the model"
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in {one["name"] for one in spec["supportedModelFormats"]}
    assert model["protocolVersion"] in spec["protocolVersions"]
    # Its container is one of Kubernetes'.
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "it"}, "spec": {"containers": spec["containers"]}}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_takes_it(tmp_path: Path) -> None:
    unit = (DEPLOY / "encast.service").read_text()
    (program,) = re.findall(r"^ExecStart=(\S+) ", unit, re.MULTILINE)
    path = tmp_path / "encast.service"
    path.write_text(unit.replace(program, "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def _instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Containerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def test_container_is_built_from_what_there_is() -> None:
    known = {"FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"}
    instructions = _instructions()
    assert {word for word, _ in instructions} <= known
    images = [rest.split()[0] for word, rest in instructions if word == "FROM"]
    assert len(set(images)) == 1, "a virtual environment runs on the interpreter that made it"
    stages = {rest.split()[2] for word, rest in instructions if word == "FROM" and " AS " in rest}
    made = set(re.findall(r"-m venv (\S+)", " ".join(rest for word, rest in instructions if word == "RUN")))
    for rest in (rest for word, rest in instructions if word == "COPY"):
        *sources, _ = shlex.split(rest)
        if sources[0].startswith("--from="):
            assert sources.pop(0).partition("=")[2] in stages
            assert set(sources) <= made
        else:
            assert all((ROOT / source).exists() for source in sources)
    # What the build needs is not left out, and nothing that was built here comes in.
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in kept)
    project = (ROOT / "pyproject.toml").read_text()
    needed = {
        "pyproject.toml",
        "CMakeLists.txt",
        "core",
        "cmake",
        "src",
        *re.findall(r'^readme = "(.+)"', project, re.M),
    }
    assert needed <= kept
    assert "**/*.so" in lines


def test_container_serves_and_is_watched() -> None:
    instructions = dict(_instructions())
    entry = json.loads(instructions["ENTRYPOINT"])
    assert entry[:2] == ["encast", "serve"]
    assert _value(entry, "--host", "") == "0.0.0.0", "loopback is not reached from outside of a container"
    port = _value(entry, "--port", "8080")
    _, _, command = instructions["HEALTHCHECK"].partition("CMD ")
    paths = _paths()
    (at, path) = re.findall(r"http://127\.0\.0\.1:(\d+)(/[^']*)'", " ".join(json.loads(command)))[0]
    assert (at, path in paths) == (port, True)
    assert port in instructions["EXPOSE"].split()
    assert instructions["USER"].isdecimal(), "Kubernetes checks runAsNonRoot by number"


def test_recipes_name_one_version() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    images = itertools.chain.from_iterable(
        re.findall(r"image: encast:(\S+)", (DEPLOY / name).read_text()) for name in ("kserve.yaml", "kubernetes.yaml")
    )
    assert set(images) == {version}
