"""What ``encast bench --list`` shows: groups, fields with their defaults, prices. All of it is read off the YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from encast.bench.config import CONF, GROUPS, STUDY, available, need_groups, yaml_of
from encast.measure.price import read_prices

__all__ = ["Listing", "fields_of", "listing"]

_LINE = re.compile(r"(?P<indent> *)(?P<name>\w+):(?: +(?P<value>\S.*))?")
_NO_FIELDS = ("defaults", "name", "scenario", "kind", "jobs")


@dataclass(frozen=True)
class Listing:
    """``groups``: by group and name, the first line of its YAML. ``fields``: of the configuration, and of scenarios
    and workloads by ``scenario=NAME``. ``prices``: the machines that ``price=`` knows."""

    groups: Mapping[str, Mapping[str, str]]
    fields: Mapping[str, Mapping[str, Mapping[str, str]]]
    prices: Mapping[str, str]

    def lines(self) -> Iterator[str]:
        for group, names in self.groups.items():
            yield f"{group}:"
            width = max([24, *map(len, names)])
            for name, text in names.items():
                yield f"  {name:{width}} {text}".rstrip()
                yield from self._fields(f"{group}={name}", "    ")
        yield "fields of every scenario:"
        yield from self._fields("", "  ")
        yield "price:"
        for name, text in self.prices.items():
            yield f"  {name:24} {text}"

    def _fields(self, of: str, indent: str) -> Iterator[str]:
        for name, field in self.fields.get(of, {}).items():
            setting = f"{name}={field['default']}"
            yield f"{indent}{setting:{36 - len(indent)}} {field['text']}".rstrip()


def listing(folders: Sequence[Path] = ()) -> Listing:
    """Of the ready-made groups and those of ``folders``. Raises ``InputError`` where a folder holds none."""
    need_groups(folders)
    groups = {group: available(group, folders) for group in (STUDY, *GROUPS)}
    fields = {"": fields_of(CONF / "config.yaml")}
    for group in ("workload", "scenario"):
        for name in groups[group]:
            fields[f"{group}={name}"] = fields_of(yaml_of(group, name, folders), f"{group}.")
    prices = {name: f"{price.usd_per_hour:g} USD/h; {price.source}" for name, price in read_prices().items()}
    return Listing(groups, fields, prices)


def fields_of(path: Path, prefix: str = "") -> dict[str, Mapping[str, str]]:
    """The fields of a YAML of plain sections: ``default`` as the YAML writes it, and ``text``, the comment above."""
    found: dict[str, Mapping[str, str]] = {}
    comment: list[str] = []
    section = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        match = _LINE.fullmatch(line)
        if line.lstrip().startswith("#"):
            comment.append(line.strip(" #"))
        elif match is not None and match["name"] not in _NO_FIELDS:
            section = section if match["indent"] else ""
            if match["value"] is None:
                section = f"{match['name']}."
            else:
                found[f"{prefix}{section}{match['name']}"] = {"default": match["value"], "text": " ".join(comment)}
            comment = []
        else:
            comment = []
    return found
