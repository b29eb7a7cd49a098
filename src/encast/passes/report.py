"""What the passes did: fusions found against fusions promised, as plain data for the card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from encast.errors import ArtifactError
from encast.ir import FusionPromise

__all__ = ["FusionReport", "Miss", "Outcome", "PassRecord", "count_fusions"]

OUTSIDE = -1
"""The ``layer`` of nodes outside of the encoder layers."""


@dataclass(frozen=True)
class Miss:
    """A place where ``fusion`` was looked for and not made: which node, and which condition failed."""

    fusion: str
    layer: int
    node: str
    reason: str


@dataclass
class Outcome:
    """What one pass did. ``fused`` holds a pair (fusion, layer) a fusion; ``changes`` counts rewrites."""

    changes: int = 0
    fused: list[tuple[str, int]] = field(default_factory=list)
    missed: list[Miss] = field(default_factory=list)


@dataclass(frozen=True)
class PassRecord:
    """A line of the report: the pass, its rewrites, and the number of nodes after it."""

    name: str
    changes: int
    nodes: int


@dataclass(frozen=True)
class FusionReport:
    """Fusions that the config promises against those made.

    ``counts[fusion][layer] = (expected, actual)``, layer -1 for everything outside of the encoder layers.
    ``misses`` has an entry for every place with fewer fusions than expected. ``linears`` maps the name of
    every product to the dtype of its operands. ``passes`` tells what each pass changed.
    """

    counts: Mapping[str, Mapping[int, tuple[int, int]]]
    misses: tuple[Miss, ...]
    passes: tuple[PassRecord, ...]
    linears: Mapping[str, str]

    def describe_misses(self) -> str:
        """A line a miss, for people."""
        lines = [f"{len(self.misses)} fusions that the config promises were not made:"]
        for miss in self.misses:
            place = "outside of the layers" if miss.layer == OUTSIDE else f"layer {miss.layer}"
            at = f" at {miss.node!r}" if miss.node else ""
            lines.append(f"  {place}: {miss.fusion}{at}: {miss.reason}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "counts": {
                fusion: [{"layer": layer, "expected": pair[0], "actual": pair[1]} for layer, pair in layers.items()]
                for fusion, layers in self.counts.items()
            },
            "misses": [vars(miss) for miss in self.misses],
            "passes": [vars(record) for record in self.passes],
            "linears": dict(self.linears),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> FusionReport:
        """The inverse of ``to_json``; raises ``ArtifactError`` on anything else."""
        try:
            return FusionReport(
                {
                    str(fusion): {int(row["layer"]): (int(row["expected"]), int(row["actual"])) for row in rows}
                    for fusion, rows in data["counts"].items()
                },
                tuple(
                    Miss(str(m["fusion"]), int(m["layer"]), str(m["node"]), str(m["reason"])) for m in data["misses"]
                ),
                tuple(PassRecord(str(p["name"]), int(p["changes"]), int(p["nodes"])) for p in data["passes"]),
                {str(name): str(dtype) for name, dtype in data["linears"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(f"the fusion report is malformed: {type(error).__name__}: {error}") from None


def count_fusions(
    expected: Mapping[str, FusionPromise], layers: int, outcomes: Iterable[Outcome]
) -> tuple[dict[str, dict[int, tuple[int, int]]], tuple[Miss, ...]]:
    """Expected against actual fusions, and why each shortfall came about.

    ``expected`` is ``graph.meta.expected``.
    """
    outcomes = list(outcomes)
    made = Counter(pair for outcome in outcomes for pair in outcome.fused)
    missed = [miss for outcome in outcomes for miss in outcome.missed]
    counts: dict[str, dict[int, tuple[int, int]]] = {}
    misses: list[Miss] = []
    for fusion, promise in expected.items():
        wanted = dict.fromkeys(range(layers), promise.per_layer) | {OUTSIDE: promise.other}
        wanted |= {layer: 0 for name, layer in made if name == fusion and layer not in wanted}
        counts[fusion] = {layer: (count, made[fusion, layer]) for layer, count in wanted.items()}
        for layer, (count, actual) in counts[fusion].items():
            if actual >= count:
                continue
            reasons = [miss for miss in missed if (miss.fusion, miss.layer) == (fusion, layer)]
            misses += reasons or [Miss(fusion, layer, "", "no node begins the pattern")]
    return counts, tuple(misses)
