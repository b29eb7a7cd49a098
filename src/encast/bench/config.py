"""From overrides to jobs: Hydra's groups and grammar, errors that list what exists, and no field that nobody reads.

``backend=a,b`` and ``backend=[a,b]`` are the same: systems of one comparison. With ``--multirun`` lists after any
other name make a job for each combination, the last name varying fastest. ``study=NAME`` stands for the command lines
of a YAML of that name, whatever else is given after each of them.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from encast.bench.environments import interpreter
from encast.bench.launcher import Launcher
from encast.bench.peers.base import CARD_DTYPES, DTYPES, BackendSpec
from encast.bench.timing import Limits, Timing
from encast.errors import InputError

__all__ = [
    "CONF",
    "DEFAULT_LAUNCHER",
    "GROUPS",
    "STUDY",
    "Job",
    "available",
    "load_jobs",
    "need_groups",
    "settings",
    "yaml_of",
]

CONF = Path(__file__).parent / "conf"
GROUPS = ("backend", "model", "workload", "scenario", "launcher")
STUDY = "study"
"""The group of ready-made command lines; not a part of the configuration."""
DEFAULT_BACKEND = "encast-int8"
DEFAULT_LAUNCHER = "one"
"""As in ``conf/config.yaml``."""

_SPEC = ("name", "peer", "dtype", "python")

S = TypeVar("S")


@dataclass(frozen=True)
class Job:
    """One comparison: its systems are measured in interleaved rounds. Mappings are as their YAML and overrides say."""

    backends: tuple[BackendSpec, ...]
    model: Mapping[str, Any]
    workload: Mapping[str, Any]
    scenario: Mapping[str, Any]
    launcher: Launcher
    timing: Timing
    limits: Limits
    experiment: str | None
    out: str | None
    cache: str | None
    price: str | None
    given: Mapping[str, Any] = field(default_factory=dict)
    """Groups and fields that the command line sets: a scenario that has no use for one refuses it, and rows say in
    which of them the jobs of a sweep differ."""

    def record(self) -> dict[str, Any]:
        """Plain JSON, everything resolved."""
        return asdict(self)


def settings(job: Mapping[str, Any]) -> dict[str, Any]:
    """What tells the rows of a ``Job.record`` from others: ``backend`` by name, model, workload, scenario, launcher.

    Without the places of classes, which another version of encast may have elsewhere.
    """
    backends = {
        spec["name"]: {name: value for name, value in spec.items() if name != "peer"} for spec in job["backends"]
    }
    scenario = {name: value for name, value in job["scenario"].items() if name != "scenario"}
    return {
        "backend": backends,
        **{group: job[group] for group in ("model", "workload", "launcher")},
        "scenario": scenario,
    }


def available(group: str, folders: Sequence[Path] = ()) -> dict[str, str]:
    """The names of a group, each with the first line of comment of its YAML; ``folders`` are searched first."""
    found: dict[str, str] = {}
    for folder in (*folders, CONF):
        for path in sorted((folder / group).glob("*.yaml")):
            first = path.read_text(encoding="utf-8").partition("\n")[0]
            found.setdefault(path.stem, first.removeprefix("#").strip() if first.startswith("#") else "")
    return found


def yaml_of(group: str, name: str, folders: Sequence[Path] = ()) -> Path:
    """The file of a name that ``available`` has."""
    places = (folder / group / f"{name}.yaml" for folder in (*folders, CONF))
    return next(place for place in places if place.is_file())


def need_groups(folders: Sequence[Path]) -> None:
    """Raises ``InputError`` for a folder of ``--conf`` that holds no group."""
    for folder in folders:
        if not any((folder / group).is_dir() for group in (STUDY, *GROUPS)):
            raise InputError(f"{folder}: holds none of the folders {', '.join((STUDY, *GROUPS))}; give their parent")


def load_jobs(overrides: Sequence[str], *, multirun: bool = False, folders: Sequence[Path] = ()) -> list[Job]:
    """The jobs of a command line, all of them checked before the first one runs.

    ``overrides``: Hydra's ``NAME=VALUE``, where NAME is a group or the path of a field. ``folders`` hold groups of
    one's own (``FOLDER/backend/NAME.yaml``). Raises ``InputError`` for names and fields that there are not, listing
    those that there are, and for values of the wrong kind.
    """
    need_groups(folders)
    choices = _Choices(folders)
    given = [choices.parse(override) for override in overrides]
    rest = [one for one in given if one.key_or_group != STUDY]
    studies = [str(one.value()) for one in given if one.key_or_group == STUDY]
    jobs = []
    for line in choices.lines(studies[-1]) if studies else [[]]:
        backends = choices.backends([*line, *rest])
        given_after = {one.key_or_group for one in rest}
        # A value that is given beside a study takes the place of all that the study sweeps over.
        kept = [one for one in line if one.key_or_group not in given_after]
        others = [one for one in (*kept, *rest) if one.key_or_group != "backend"]
        variants = [choices.variants(one, multirun or bool(studies)) for one in others]
        jobs += [choices.job(backends, combination) for combination in itertools.product(*variants)]
    return jobs


class _Choices:
    """The groups and their YAML, read with Hydra."""

    def __init__(self, folders: Sequence[Path]) -> None:
        from hydra.core.override_parser.overrides_parser import OverridesParser

        self._folders = [folder.resolve() for folder in folders]
        self._parser = OverridesParser.create()
        self._composed: dict[tuple[str, ...], dict[str, Any]] = {}

    def names(self, group: str) -> list[str]:
        return list(available(group, self._folders))

    def check(self, group: str, name: str) -> None:
        if name not in self.names(group):
            raise InputError(f"there is no {group} {name!r}; there are {', '.join(self.names(group))}")

    def lines(self, study: str) -> list[list[Any]]:
        """The command lines of a study: ``jobs`` of its YAML, a list of overrides each."""
        import yaml  # type: ignore[import-untyped]

        self.check(STUDY, study)
        path = yaml_of(STUDY, study, self._folders)
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
            lines = [[text for text in line if isinstance(text, str)] for line in found]
            whole = bool(lines) and lines == found
        except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
            whole = False
        if not whole:
            raise InputError(f"{path}: a study holds `jobs`, a list of lists of overrides such as [model=minilm]")
        return [[self.parse(text) for text in line] for line in lines]

    def backends(self, overrides: Iterable[Any]) -> list[str]:
        """The names of the systems, of the last override that gives some."""
        names = [DEFAULT_BACKEND]
        for override in overrides:
            if override.key_or_group == "backend":
                texts = self._swept(override) if override.is_sweep_override() else None
                values = override.value() if texts is None else [self.parse(f"value={text}").value() for text in texts]
                values = values if isinstance(values, list) else [values]
                names = [str(name) for one in values for name in (one if isinstance(one, list) else [one])]
        if not names:
            raise InputError("backend=[] names no backend; give one or more of " + ", ".join(self.names("backend")))
        twice = [name for index, name in enumerate(names) if name in names[:index]]
        if twice:
            raise InputError(f"backend {twice[0]!r} is named twice; a backend stands once in a comparison")
        for name in names:
            self.check("backend", name)
        return names

    def variants(self, override: Any, multirun: bool) -> list[Any]:
        """The overrides of one value each that a sweep stands for."""
        name = override.get_key_element()
        if not override.is_sweep_override():
            return [override]
        if not multirun:
            instead = "" if name in GROUPS else f", or write a list, {name}=[...], where the field takes one"
            raise InputError(f"{override.input_line}: several values make several jobs; add --multirun{instead}")
        return [self.parse(f"{name}={value}") for value in self._swept(override)]

    def parse(self, override: str) -> Any:
        """Hydra's ``Override``; only assignments are accepted."""
        from hydra.errors import HydraException

        try:
            parsed = self._parser.parse_override(override)
        except HydraException as error:
            first = str(error).splitlines()[0]
            raise InputError(f"{override!r} is no override ({first}); write NAME=VALUE, quoted 'NAME=\"...\"' where "
                             "VALUE holds what the shell or the grammar takes for itself") from None  # fmt: skip
        if parsed.is_add() or parsed.is_force_add() or parsed.is_delete() or parsed.package is not None:
            raise InputError(f"{override!r}: fields can be set, not added, removed or moved; write NAME=VALUE")
        if parsed.key_or_group.partition(".")[0] == "hydra":
            raise InputError(f"{override!r}: Hydra's own settings are fixed; --conf FOLDER adds groups of your own")
        return parsed

    def job(self, backends: Sequence[str], overrides: Sequence[Any]) -> Job:
        chosen = {one.key_or_group: str(one.value()) for one in overrides if one.key_or_group in GROUPS}
        for group, name in chosen.items():
            self.check(group, name)
        composed = (*GROUPS, "data")  # fields of models and workloads interpolate ``data``
        whole = self._compose([one.input_line for one in overrides if one.key_or_group in composed])
        whole["backend"] = {name: self._backend(name) for name in backends}
        for group in ("scenario", "launcher"):
            if group in chosen:
                whole[group] = {"name": chosen[group], **whole[group]}
        if "scenario" in chosen:
            self._find_file(whole["scenario"], "scenario", chosen["scenario"])
        for one in overrides:
            if one.key_or_group not in composed:
                _assign(whole, one.key_or_group, one.value())
        return _job(whole, {str(one.key_or_group): one.value() for one in overrides})

    def _swept(self, override: Any) -> list[str]:
        """The values of a sweep as the grammar writes them."""
        from hydra.errors import HydraException

        try:
            return list(override.sweep_string_iterator())
        except HydraException:
            raise InputError(f"{override.input_line!r}: give the values, NAME=A,B or NAME=range(A,B)") from None

    def _backend(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self._compose([f"+backend={name}"])["backend"]
        self._find_file(found, "peer", name)
        return found

    def _find_file(self, config: dict[str, Any], key: str, name: str) -> None:
        """Makes the path of ``FILE.py:Class`` absolute: beside the YAML that names it, else in the working folder."""
        place, colon, cls = str(config.get(key)).rpartition(":")
        if not colon or not place.endswith(".py") or Path(place).is_absolute():
            return
        beside = yaml_of("backend" if key == "peer" else "scenario", name, self._folders).parent / place
        here = Path(place).resolve()
        found = next((path for path in (beside, here) if path.is_file()), None)
        if found is None:
            raise InputError(f"{key}: {config[key]}: there is no file {beside}, beside the YAML, and no {here}")
        config[key] = f"{found}:{cls}"

    def _compose(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Groups and fields as the YAML says; most jobs of a sweep differ in fields alone."""
        from hydra import compose, initialize_config_dir
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError

        if (chosen := tuple(overrides)) in self._composed:
            return copy.deepcopy(self._composed[chosen])
        search = [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in self._folders)}]"]
        try:
            with warnings.catch_warnings(), initialize_config_dir(str(CONF), version_base=None):
                warnings.simplefilter("ignore")
                config = compose("config", overrides=[*overrides, *(search if self._folders else [])])
                plain: Any = OmegaConf.to_container(config, resolve=True)
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise InputError(f"{' '.join(overrides) or CONF}: {' '.join(str(error).split())}") from None
        self._composed[chosen] = plain
        return dict(copy.deepcopy(plain))


def _assign(config: dict[str, Any], path: str, value: Any) -> None:
    """Sets a field that is there already."""
    node: Any = config
    *parents, last = path.split(".")
    for depth, part in enumerate([*parents, last]):
        if not isinstance(node, dict) or part not in node:
            where = ".".join([*parents, last][:depth])
            names = [] if not isinstance(node, dict) else [*map(str, node), *([] if where else [STUDY])]
            there = ", ".join(names) if isinstance(node, dict) else "no fields of its own"
            raise InputError(f"there is no field {path!r}; {where or 'the configuration'} has {there}")
        if depth < len(parents):
            node = node[part]
    if isinstance(node[last], dict):
        raise InputError(
            f"{path} has fields of its own; set one of {', '.join(f'{path}.{name}' for name in node[last])}"
        )
    node[last] = value


def _job(config: Mapping[str, Any], given: Mapping[str, Any]) -> Job:
    experiment, out, cache, price = (
        None if config[name] is None else str(config[name]) for name in ("experiment", "out", "cache", "price")
    )
    launcher = _section(Launcher, "launcher", config["launcher"])
    if launcher.preset is None and launcher.instances is None and launcher.cores_per_instance is None:
        raise InputError(
            f"launcher={launcher.name} does not say how many instances; give launcher.instances=N, "
            "launcher.cores_per_instance=N or both"
        )
    if config["workload"].get("file") == "-":
        raise InputError(
            "workload.file is standard input, which can be read once: by one job of a sweep, and not to resume; keep "
            "it in a file"
        )
    return Job(
        backends=tuple(_spec(name, dict(fields)) for name, fields in config["backend"].items()),
        model=config["model"],
        workload=config["workload"],
        scenario=config["scenario"],
        launcher=launcher,
        timing=_section(Timing, "timing", config["timing"]),
        limits=_section(Limits, "limits", config["limits"]),
        experiment=experiment,
        out=out,
        cache=cache,
        price=price,
        given=given,
    )


def _spec(name: str, config: dict[str, Any]) -> BackendSpec:
    for needed in ("peer", "dtype"):
        if not isinstance(config.get(needed), str):
            raise InputError(f"backend {name}: its YAML needs {needed}; see encast-int8.yaml in {CONF / 'backend'}")
    if config["dtype"] not in DTYPES:
        common = ", ".join(dtype for dtype in DTYPES if dtype not in CARD_DTYPES)
        raise InputError(
            f"backend.{name}.dtype is {config['dtype']!r}; one of {common} is needed, or on a GPU "
            f"{' or '.join(CARD_DTYPES)}"
        )
    options = {key: value for key, value in config.items() if key not in _SPEC}
    return BackendSpec(name, config["peer"], config["dtype"], interpreter(config.get("python")), options)


def _section(cls: type[S], where: str, config: Mapping[str, Any]) -> S:
    """A dataclass of plain fields from a section; a wrong kind of value is refused."""
    kinds = {one.name: str(one.type) for one in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(map(str, config)) - set(kinds))
    if unknown:
        raise InputError(f"there is no field {where}.{unknown[0]}; {where} has {', '.join(kinds)}")
    return cls(**{name: _value(f"{where}.{name}", kinds[name], value) for name, value in config.items()})


def _value(name: str, kind: str, value: Any) -> Any:
    if value is None and kind.endswith("None"):
        return None
    kind = kind.removesuffix(" | None")
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "int" and number and int(value) == value and value >= 1:
        return int(value)
    if kind == "float" and number and value > 0:
        return float(value)
    if kind == "str" and (number or isinstance(value, str)):
        return str(value)
    wanted = {"bool": "true or false", "int": "a whole number above 0", "float": "a number above 0", "str": "a text"}
    raise InputError(f"{name} is {value!r}; {wanted[kind]} is needed")
