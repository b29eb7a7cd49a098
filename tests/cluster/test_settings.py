"""What a config file and a command line may say of servers on Ray, and the recipe for KubeRay."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from encast.cli.serve import serve_command
from encast.cli.serve_ray import given_options
from encast.cluster.cards import devices_of
from encast.cluster.settings import OPTIONS, OWN_OPTIONS, Settings
from encast.cluster.size import given_size
from encast.errors import ArtifactError, InputError

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "deploy" / "rayservice.yaml"

# Of the command that deploys, not of its servers.
COMMAND = {
    "host", "port", "json", "ray", "replicas", "replica-cpus", "replica-gpus", "queued-tokens", "gateways", "help",
}  # fmt: skip


def command() -> Any:
    app = typer.Typer(add_completion=False)
    app.command()(serve_command)
    return typer.main.get_command(app)


def test_every_option_of_serve_has_its_place() -> None:
    names = {parameter.name.replace("_", "-") for parameter in command().params} - {"artifact"}
    assert names - COMMAND == OPTIONS | set(OWN_OPTIONS)


def test_what_the_user_gave_reaches_the_servers(artifact: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(artifact), "--ray", "auto", "--max-wait-ms", "500", "--no-page", "--cors", "a", "--cors", "b"]
    words += ["--api-keys", "keys", "--max-body-mb", "2", "--drain-s", "7", "--log", "log", "--log-texts"]
    words += ["--shadow", "new.encast:10%"]
    with command().make_context("serve", words) as context:
        options = given_options(context)
    settings = Settings.of({"models": context.params["artifact"], "options": options})
    assert settings.models == {"bert": str(artifact)}
    assert settings.arguments() == [
        "--max-wait-ms", "500.0", "--no-page", "--cors", "a", "--cors", "b", "--max-body-mb", "2.0",
        "--drain-s", "7.0", "--log", str(tmp_path / "log"), "--log-texts",
        "--shadow", f"{tmp_path / 'new.encast'}:10%",
    ]  # fmt: skip
    assert settings.keys == str(tmp_path / "keys")
    assert (settings.limits().max_body_bytes, settings.limits().timeout_s, settings.drain_s()) == (2 << 20, 30, 7)


def test_a_server_on_cards_is_told_which_by_its_replica(artifact: Path) -> None:
    words = [str(artifact), "--ray", "auto", "--device", "cuda", "--card-dtype", "f16", "--replica-gpus", "2"]
    with command().make_context("serve", words) as context:
        options = given_options(context)
    settings = Settings.of(
        {"models": str(artifact), "options": options, "replica_gpus": context.params["replica_gpus"]}
    )
    assert (settings.card, settings.replica_gpus) == ("cuda", 2)
    assert settings.arguments() == ["--card-dtype", "f16"]
    assert devices_of("cuda", 3) == ["cuda:0", "cuda:1", "cuda:2"]
    assert devices_of("torch-cpu", 2) == ["torch-cpu", "torch-cpu"]
    in_a_file = {"device": "cuda", "card-dtype": "f16"}
    assert Settings.of({"models": str(artifact), "options": in_a_file}).card == "cuda"
    assert Settings.of({"models": str(artifact)}).card is None


def test_a_config_file_may_be_short(artifact: Path) -> None:
    for models in (str(artifact), [str(artifact)], [f"bert={artifact}"], {"bert": str(artifact)}):
        settings = Settings.of({"models": models})
        assert settings.models == {"bert": str(artifact)}
    assert (settings.host, settings.port, settings.replicas, settings.gateways) == ("0.0.0.0", 8080, None, None)
    for given, found in ((4, (4, 4)), ("4", (4, 4)), ("2-8", (2, 8)), ([2, 8], (2, 8))):
        assert Settings.of({"models": models, "replicas": given}).replicas == found


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"model": "x"}, "args has model; known are models, options, host"),
        ({"models": []}, "models is []; give NAME: PATH of each artifact"),
        ({"replicas": "8-2"}, "replicas is '8-2'; give a number, or the least and the most as 2-8"),
        ({"replicas": 0}, "replicas is 0"),
        ({"port": 80.5}, "port is 80.5; give a whole number from 0 to 65535"),
        ({"replica_cpus": "many"}, "replica_cpus is 'many'; give a number of 0.01 at least"),
        ({"options": ["max-wait-ms"]}, "give names of options of encast serve with their values"),
        ({"options": {"max-wait": 5}}, "there is no option 'max-wait' for servers on Ray; there are alias, api-keys"),
        ({"options": {"tls-cert": "x"}}, "--tls-cert is for one machine; gateways speak HTTP: end TLS in the load"),
        ({"options": {"drain-s": "long"}}, "option drain-s is 'long'; give a number from 0 to 1e+09"),
        ({"options": {"max-body-mb": float("inf")}}, "option max-body-mb is inf; give a number from 0 to 1e+09"),
        ({"options": {"log": "-"}}, "--log - would mix the lines of all servers"),
        ({"options": {"device": "cuda:1"}}, "--device is cuda:1; on Ray it is cuda, without a number: Ray chooses"),
        ({"options": {"device": ["cuda:0", "cuda:1"]}}, "--device is cuda:0 and cuda:1; on Ray it is cuda"),
        ({"options": {"device": ["cuda", "torch-cpu"]}}, "--device is cuda and torch-cpu; on Ray it is cuda"),
        ({"options": {"device": "gpu"}}, "device is 'gpu'; a server takes cuda"),
        ({"options": {"device": "cuda", "card-dtype": "f64"}}, "the card's dtype is 'f64'; one of f32, f16, bf16, f8"),
        ({"options": {"device": "cuda", "instances": 2}}, "--device has one instance a card"),
        ({"options": {"card-dtype": "f16"}}, "--card-dtype is for cards; give --device too"),
        ({"replica_gpus": 1}, "replica_gpus (--replica-gpus) is for cards; give the option device too"),
        ({"replica_gpus": 0.5}, "replica_gpus is 0.5; give a whole number of 1 at least"),
    ],
)
def test_what_is_wrong_is_named(artifact: Path, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=re.escape(reason)):
        Settings.of({"models": {"a": str(artifact)}, **more})


def test_a_model_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="gone"):
        Settings.of({"models": {"a": str(tmp_path / "gone.encast")}})


# The recipe


def recipe() -> Any:
    return yaml.safe_load(RECIPE.read_text())


def config() -> Any:
    return yaml.safe_load(recipe()["spec"]["serveConfigV2"])


def test_the_recipe_is_a_ray_service() -> None:
    """The fields of KubeRay's definition, as far as they are used, and pods that Kubernetes takes."""
    found = recipe()
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayService")
    assert set(found["spec"]) == {"serveConfigV2", "rayClusterConfig"}
    cluster = found["spec"]["rayClusterConfig"]
    assert set(cluster) == {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"}
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert set(head) == {"rayStartParams", "template"}
    assert set(workers) == {*head, "groupName", "replicas", "minReplicas", "maxReplicas"}
    port = config()["applications"][0]["args"]["port"]
    for group in (head, workers):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "it"}, **group["template"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
        (container,) = group["template"]["spec"]["containers"]
        # The name by which KubeRay finds what its service and its probes ask.
        assert {"name": "serve", "containerPort": port} in container["ports"]
    spec = workers["template"]["spec"]
    options = config()["applications"][0]["args"]["options"]
    assert spec["terminationGracePeriodSeconds"] > options["drain-s"] + 15 + 2
    limits = spec["containers"][0]["resources"]["limits"]
    assert float(limits["cpu"]) == config()["applications"][0]["args"]["replica_cpus"]


def test_the_recipe_serves(artifact: Path) -> None:
    (application,) = config()["applications"]
    args = {**application["args"], "models": {name: str(artifact) for name in application["args"]["models"]}}
    assert Settings.of(args).replicas == (2, 8)
    # What is updated in place are the models that there are.
    (servers,) = application["deployments"]
    assert servers["user_config"]["models"] == application["args"]["models"]
    module, _, name = application["import_path"].partition(":")
    text = (ROOT / "src" / Path(*module.split("."))).with_suffix(".py").read_text()
    assert f"def {name}(" in text
    assert f'"{servers["name"]}"' in text


def test_what_is_other_on_cards_fits_the_recipe(artifact: Path) -> None:
    page = (ROOT / "docs" / "serve" / "ray.md").read_text()
    (block,) = (one for one in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "replica_gpus" in one)
    found = yaml.safe_load(block)
    assert set(found) == {"args", "resources"}
    args, before = found["args"], config()["applications"][0]["args"]
    assert set(args) - set(before) == {"replica_gpus"}
    settings = Settings.of({**args, "models": str(artifact)})
    assert settings.card == "cuda"
    assert given_size(settings) is not None, "nodes with cards may come later"
    workers = recipe()["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]
    workers["spec"]["containers"][0]["resources"] = found["resources"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "it"}, **workers}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    limits = found["resources"]["limits"]
    assert (float(limits["cpu"]), int(limits["nvidia.com/gpu"])) == (settings.replica_cpus, settings.replica_gpus)


def test_the_recipe_names_the_versions() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.+)"$', project, re.MULTILINE)
    text = RECIPE.read_text()
    assert set(re.findall(r"image: encast-ray:(\S+)", text)) == {version}
    assert recipe()["spec"]["rayClusterConfig"]["rayVersion"] in text.partition("spec:")[0]
