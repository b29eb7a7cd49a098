"""What the passes did: fusions found against fusions promised, as plain data for the card."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from encast.errors import ArtifactError
from encast.ir import FusionPromise
from encast.ir.blocks import Shares

__all__ = ["SPARSE_PRODUCT", "FusionReport", "Miss", "Outcome", "PassRecord", "count_fusions"]

OUTSIDE = -1
"""The ``layer`` of nodes outside of the encoder layers."""

SPARSE_PRODUCT = "sparse"
"""A product that leaves out its zeros counts among the fusions by this name. Not the config promises it but who
compiles: each product that is to be sparse is expected to leave something out."""


@dataclass(frozen=True)
class Miss:
    """A place where ``fusion`` was looked for and not made: which node, and which condition failed."""

    fusion: str
    layer: int
    node: str
    reason: str


@dataclass
class Outcome:
    """What one pass did. ``fused`` holds a pair (fusion, layer) a fusion; ``changes`` counts rewrites. ``zeros``: of
    the weights of int8 products, by the product's name, where the pass looked. ``kept``: of the weights of int8
    products, how many rows of how many hold the integers that they were stored as."""

    changes: int = 0
    fused: list[tuple[str, int]] = field(default_factory=list)
    missed: list[Miss] = field(default_factory=list)
    zeros: dict[str, Shares] = field(default_factory=dict)
    kept: dict[str, tuple[int, int]] = field(default_factory=dict)


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
    every product to the dtype of its operands. ``passes`` tells what each pass changed. ``zeros`` maps the name of
    every int8 product, dense or sparse, to the shares of its weight. ``kept`` maps it to how many rows of how many of
    its weight hold the integers that they were stored as; the card has that elsewhere.
    """

    counts: Mapping[str, Mapping[int, tuple[int, int]]]
    misses: tuple[Miss, ...]
    passes: tuple[PassRecord, ...]
    linears: Mapping[str, str]
    zeros: Mapping[str, Shares] = field(default_factory=dict)
    kept: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def describe_misses(self) -> str:
        """A line a miss, for people."""
        asked = any(miss.fusion == SPARSE_PRODUCT for miss in self.misses)
        promised = "the config promises" + (" or --sparse asks for" if asked else "")
        lines = [f"{len(self.misses)} fusions that {promised} were not made:"]
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
            "zeros": {name: found._asdict() for name, found in self.zeros.items()},
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
                # Artifacts of before the shares were noted have none.
                {
                    str(name): Shares(_share(found["zero"]), _share(found["left"]))
                    for name, found in data.get("zeros", {}).items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ArtifactError(f"the fusion report is malformed: {type(error).__name__}: {error}") from None


def _share(value: Any) -> float:
    share = float(value)
    if not 0 <= share < math.inf:
        raise ValueError(f"a share of {value}")
    return share


def count_fusions(
    expected: Mapping[str, FusionPromise], layers: int, outcomes: Iterable[Outcome]
) -> tuple[dict[str, dict[int, tuple[int, int]]], tuple[Miss, ...]]:
    """Expected against actual fusions, and why each shortfall came about.

    ``expected`` is ``graph.meta.expected``. Sparse products have counts where there are some or were to be.
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
    useless = [miss for miss in missed if miss.fusion == SPARSE_PRODUCT]
    asked = Counter(layer for name, layer in made.elements() if name == SPARSE_PRODUCT)
    asked.update(miss.layer for miss in useless)
    if asked:
        counts[SPARSE_PRODUCT] = {layer: (asked[layer], made[SPARSE_PRODUCT, layer]) for layer in sorted(asked)}
    return counts, (*misses, *useless)
