"""Who may import whom: the layers of the design, read off the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import encast

SOURCE = Path(__file__).parent.parent.parent / "src" / "encast"

# What each part may import from encast, beside itself, types included. The longest matching name decides; a part that
# stands nowhere in the table fails the test, so that a new one gets its place by decision. ARCHITECTURE.md shows the
# packages' rows.
ALLOWED: dict[str, set[str]] = {
    "__init__": {"batch", "calibrate", "compile", "engine", "errors", "quant"},
    "errors": set(),
    "knobs": {"errors"},
    "crossover": set(),
    "machine": set(),
    "files": {"errors"},
    "pages": {"errors"},
    "ceilings": {"errors", "files", "knobs", "machine", "_core"},
    "batch": {"errors"},
    "ir": {"errors"},
    "quant": {"errors"},
    "importers": {"errors", "ir"},
    "archs": {"errors", "ir"},
    "sparsity": {"errors", "files", "importers", "archs", "ir"},
    "passes": {"crossover", "errors", "ir", "quant"},
    "artifact": {"errors", "files", "ir", "_core"},
    "journal": {"errors", "artifact", "files"},
    "lower": {"crossover", "errors", "ir", "knobs", "machine", "_core"},
    "backends": {"errors", "batch", "ir"},
    "backends.cards": {"errors", "batch", "artifact"},
    "backends.cpu": {"errors", "batch", "artifact", "lower", "knobs", "machine", "_core"},
    "backends.devices": {"errors", "artifact"},
    "backends.gpu.adapt": {"errors", "ir", "passes", "quant"},
    "backends.gpu.card": {"errors", "ceilings.card"},
    "backends.groups": {"errors", "machine"},
    "tasks": {"errors", "batch", "ir.meta", "backends.base"},
    "engine": {"errors", "batch", "ir", "artifact", "backends", "tasks", "tune.configuration"},
    "tune": {"errors", "batch", "backends", "engine", "journal", "launch", "measure"},
    "tune.requests": {"errors", "batch", "artifact", "engine", "measure"},
    "tune.configuration": {"errors", "artifact", "backends.devices", "backends.groups", "ceilings", "data"},
    "calibrate": {"errors", "ir", "batch", "importers", "archs", "passes", "quant", "backends.reference", "tasks"},
    "compile": {"errors", "ir", "importers", "archs", "passes", "quant", "artifact", "verify", "_core"},
    "verify": {"errors", "artifact", "backends.cpu", "batch", "ir", "launch.process", "tasks.classify"},
    "compress": {
        "archs",
        "artifact",
        "batch",
        "budget",
        "compile",
        "data",
        "engine",
        "errors",
        "files",
        "importers",
        "jobs.layout",
        "jobs.sealed",
        "machine",
        "measure",
        "pages",
        "scoring",
        "sparsity",
        "tasks",
    },
    "profile": {"errors", "batch", "backends", "ceilings", "ir", "measure", "pages", "_core"},
    "profile.ablate": {"errors", "artifact", "backends", "compile", "lower"},
    "data": {"errors", "files"},
    "metrics": {"errors"},
    "scoring": {"errors", "data", "engine", "metrics", "tasks"},
    # Batch jobs; whoever computes them, the bytes are written here.
    "jobs": {"errors", "data", "engine", "files", "tasks"},
    "jobs.worker": {"errors", "artifact", "backends.cards", "data", "engine", "tasks", "_core"},
    "cluster": {"errors", "data", "jobs"},
    "cluster.replica": {"errors", "backends.cards", "data", "jobs", "machine"},
    # A gateway is a server of HTTP too.
    "cluster.gateway": {"serve.errors", "serve.keys", "serve.operations", "serve.service", "serve.within"},
    "cluster.upstream": {"serve.within"},
    "cluster.ingress": {"errors", "serve.http", "serve.keys", "serve.service"},
    "cluster.settings": {"errors", "artifact", "serve.options", "serve.service"},
    "cluster.child": {"errors", "artifact", "launch.process"},
    "cluster.deploy": {"errors"},
    "budget": {
        "errors",
        "archs",
        "artifact",
        "backends.base",
        "batch",
        "ceilings",
        "compile",
        "data",
        "engine",
        "importers",
        "ir",
        "journal",
        "quant",
        "scoring",
    },
    "launch": {"errors", "machine"},
    # What measures and what makes traffic: below bench, tune and whatever sends requests.
    "measure": {"errors", "batch", "data"},
    "measure.workloads": {"errors", "batch", "tasks", "data"},
    "measure.input_spec": {"errors", "tasks", "importers", "archs"},
    "measure.texts": {"errors", "tasks", "data"},
    # The messages that a server and its clients exchange.
    "kserve": set(),
    "serve": {"errors", "tasks"},
    "serve.metrics": {"measure.price"},
    "serve.shadow": {"errors", "artifact", "tasks"},
    "serve.engine": {
        "errors",
        "artifact",
        "backends",
        "batch",
        "engine",
        "launch",
        "machine",
        "tasks",
    },
    "serve.cards": {"artifact", "backends", "batch", "engine", "tasks"},
    "serve.canary": {"artifact", "backends.reference", "engine", "ir.meta", "tasks"},
    "serve.children": {"errors", "launch.process"},
    "serve.front": {"errors", "artifact", "engine", "launch.process"},
    "serve.options": {"errors", "backends.devices"},
    "serve.reference": {"errors", "ceilings.store", "files"},
    "serve.sources": {"errors", "artifact", "ceilings.store", "compile", "files", "importers.hub"},
    "serve.supervisor": {"errors", "artifact", "measure.price"},
    "serve.instances": {"errors", "backends.cpu", "batch", "tasks"},
    "serve.join": {"errors", "batch", "tasks"},
    "serve.places": {"backends.groups"},
    "serve.protocols.open_inference": {"errors", "tasks", "ir.meta"},
    "serve.protocols.kserve_grpc": {"errors", "kserve"},
    "loadtest": {"errors", "kserve", "measure", "pages"},
    "bench": {"errors", "files", "batch", "launch", "machine", "measure"},
    "bench.models": {"measure", "errors", "data", "importers", "sparsity", "tasks"},
    "bench.agreement": {"errors", "batch", "backends.reference"},
    "bench.roofline": {"batch", "ceilings", "ir", "knobs", "_core"},
    "bench.cache": {"errors", "ceilings"},
    "bench.launcher": {"errors", "launch", "machine"},
    "bench.comparison": {"measure", "errors", "batch", "ceilings", "launch", "machine"},
    "bench.peers": {"errors", "batch", "backends.base", "importers", "archs", "ir"},
    "bench.peers.encast": {"backends.gpu.device", "batch", "compile", "engine"},
    "bench.report": {"measure", "errors", "pages"},
}
NOBODY_IMPORTS = {
    "cli": "only people call the command line",
    "bench": "the engine and the compiler need no benchmark",
    "serve": "the server uses the rest, and nothing but another server needs it",
    "cluster": "Ray is needed where the user asks for it, and nowhere else",
    "compress": "training needs torch, and a model runs without",
    "loadtest": "it knows a server by its protocols alone",
}
# But these modules, whose rows above name what.
SAVE = {"serve": {"cluster.gateway", "cluster.upstream", "cluster.ingress", "cluster.settings"}}

# Packages from the index: who may import them, at any time.
OUTSIDE: dict[str, set[str] | None] = {
    "numpy": None,
    "huggingface_hub": {"importers"},
    "tokenizers": {"importers", "tasks"},
    "safetensors": {"bench.models", "compress"},
    "typer": {"cli"},
    "rich": {"cli"},
    "pyarrow": {"data"},
    "hydra": {"bench.config"},
    "omegaconf": {"bench.config"},
    "yaml": {"bench", "compress.recipe", "measure.price"},
    "optuna": {"tune.search"},
    "psutil": {"bench", "measure.processes"},
    "scipy": {"measure.statistics", "tune.cost_model", "tune.evaluate", "tune.search"},
    "jinja2": {"pages"},
    "markupsafe": {"pages"},
    "vl_convert": {"pages"},
    "msgspec": {"compress", "serve"},
    "ray": {"cluster"},
    "opentelemetry": {"serve.tracing"},
    "prometheus_client": {"serve.metrics"},
    "httptools": {"cluster.upstream", "loadtest", "serve.http"},
    "starlette": {"cluster.ingress", "serve"},
    "uvicorn": {"serve.http"},
    "uvloop": {"cluster.ingress", "loadtest", "serve.front"},
    "orjson": {"loadtest", "serve"},
    "google": {"kserve", "loadtest.kserve_grpc", "serve.protocols.kserve_grpc"},
    "grpc": {"loadtest.kserve_grpc", "serve.protocols.kserve_grpc", "serve.tls"},
    # Runtimes that are measured, and what they are converted with.
    "ctranslate2": {"bench.peers"},
    "deepsparse": {"bench.peers"},
    "jax": {"bench.peers"},
    "mxnet": {"bench.peers"},
    "nncf": {"bench.peers"},
    "onnx": {"bench.peers"},
    "onnxruntime": {"bench.peers", "verify"},
    "tensorrt": {"bench.peers"},
    "openvino": {"bench.peers"},
    "sentence_transformers": {"bench.peers"},
    "tensorflow": {"bench.peers", "verify"},
    "torch": {"backends.gpu", "bench.peers", "compress"},
    "torchao": {"bench.peers"},
    "triton": {"backends.gpu.kernels"},
    "transformers": {"bench.peers", "compress"},
    "tvm": {"bench.peers"},
}
HEAVY = {"torch", "transformers", "onnx", "hydra", "onnxruntime", "tensorflow", "pyarrow", "tokenizers", "typer"}
HEAVY |= {"jinja2", "ray", "triton", "vl_convert"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        yield name.removesuffix(".__init__") or name, ast.parse(path.read_text(encoding="utf-8"))


def imports(name: str, module: ast.Module) -> Iterator[str]:
    """Dotted names that a module imports, in its functions and for its types too."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative imports hide where a name comes from; write encast.{node.module}"
            # The name may be a submodule or a thing inside; either way the parent is imported.
            inner = node.module in ("encast.backends", "encast.importers")
            yield from (f"{node.module}.{alias.name}" if inner else str(node.module) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            yield from (str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant))


def within(name: str, parts: set[str]) -> bool:
    return any(name == part or name.startswith(part + ".") for part in parts)


def rule_of(name: str) -> set[str] | None:
    fitting = [part for part in ALLOWED if within(name, {part})]
    return ALLOWED[max(fitting, key=len)] if fitting else None


MODULES = list(modules())


def test_every_name_of_the_tables_exists() -> None:
    parts = {*ALLOWED, *NOBODY_IMPORTS}.union(*ALLOWED.values(), *(users for users in OUTSIDE.values() if users))
    for part in parts:
        path = SOURCE / part.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file() or path.with_suffix(".pyi").is_file(), part
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    assert [package for package in {*OUTSIDE, *HEAVY} if not re.search(rf"\b{package}\b", text)] == []


def test_every_row_is_used() -> None:
    """A row that nothing needs would let the next import pass without a decision."""
    used: dict[str, set[str]] = {}
    for name, module in MODULES:
        rows = [part for part in ALLOWED if within(name, {part})]
        if rows:
            targets = {imported.removeprefix("encast.") for imported in imports(name, module)}
            used.setdefault(max(rows, key=len), set()).update(targets)
    for part, allowed in ALLOWED.items():
        if part == "__init__":  # its imports are names in a table
            continue
        idle = {one for one in allowed if not any(within(target, {one}) for target in used.get(part, ()))}
        assert not idle, f"{part} imports nothing of {sorted(idle)}"


def test_architecture_shows_the_packages() -> None:
    """Whole packages: what single modules of them may import besides stands in the table above alone."""
    rows = {part: sorted(allowed) for part, allowed in ALLOWED.items() if "." not in part and part != "__init__"}
    page = (SOURCE.parent.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    cells = {part: ", ".join(f"`{one}`" for one in allowed) or "nothing" for part, allowed in rows.items()}
    table = "\n".join(f"| `{part}` | {cell} |" for part, cell in cells.items())
    assert table in page, f"the table of imports in ARCHITECTURE.md should be\n{table}"


@pytest.mark.parametrize(("name", "module"), MODULES, ids=[name for name, _ in MODULES])
def test_layers(name: str, module: ast.Module) -> None:
    part = name.split(".")[0]
    if part == "cli":  # it imports everything
        return
    allowed = rule_of(name)
    assert allowed is not None, f"{name} has no place in ALLOWED; decide what it may import"
    for imported in imports(name, module):
        if not imported.startswith("encast."):
            # `from encast import part` goes through the package's face, which knows the engine and the compiler.
            assert imported != "encast", f"{name}: import the part, as `import encast.part as part`"
            continue
        target = imported.removeprefix("encast.")
        for room, reason in NOBODY_IMPORTS.items():
            may = part == room or name in SAVE.get(room, ())
            assert may or not within(target, {room}), f"{name} imports {imported}: {reason}"
        assert within(target, {part} | allowed), f"{name} imports {imported}; it may import {sorted(allowed)}"


@pytest.mark.parametrize(("name", "module"), MODULES, ids=[name for name, _ in MODULES])
def test_packages_from_the_index(name: str, module: ast.Module) -> None:
    for imported in imports(name, module):
        package = imported.split(".")[0]
        if package in sys.stdlib_module_names or package == "encast":
            continue
        assert package in OUTSIDE, f"{name} imports {package}, which is no dependency of encast"
        users = OUTSIDE[package]
        assert users is None or within(name, users), f"{name} imports {package}; only {sorted(users)} may"


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def loaded_by(code: str) -> set[str]:
    """Names and packages in ``sys.modules`` after the code ran in a fresh interpreter, beyond what started it."""
    names = run(f"import sys; before = set(sys.modules)\n{code}\nprint(*(set(sys.modules) - before))").split()
    return {*names, *(name.split(".")[0] for name in names)}


def test_importing_encast_pulls_in_nothing_heavy() -> None:
    assert not loaded_by("import encast") & (HEAVY | {"numpy", "encast._core"})


def test_using_the_engine_pulls_in_no_framework() -> None:
    names = loaded_by("import encast; encast.Engine, encast.compile, encast.QuantSpec, encast.Batch")
    assert "encast.engine" in names
    assert not names & (HEAVY - {"tokenizers"})


def test_the_command_line_loads_verbs_when_they_run() -> None:
    names = loaded_by("import encast.cli.main")
    assert "typer" in names
    assert not names & {"numpy", "encast.engine", "encast.compile", "tokenizers"}


@pytest.mark.parametrize("name", ["calibrate", "compile"])
def test_functions_named_like_their_modules_stay_functions(name: str) -> None:
    """The module of the same name must not hide it, in whichever order they are imported."""
    for first in (f"import encast.{name}", f"from encast.{name} import {name}", f"import encast; encast.{name}"):
        run(
            f"{first}\nimport encast, sys, inspect\nassert inspect.isfunction(encast.{name}), encast.{name}\n"
            f"assert inspect.ismodule(sys.modules['encast.{name}'])"
        )


def test_the_public_names() -> None:
    names = run("import encast\nfor name in encast.__all__:\n    getattr(encast, name)\n    print(name)").split()
    assert {"compile", "load", "Engine", "Batch", "QuantSpec", "EncastError", "__version__"} <= set(names)
    with pytest.raises(AttributeError, match=r"it has .*compile"):
        _ = encast.nonsense
