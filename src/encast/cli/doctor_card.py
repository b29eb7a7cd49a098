"""``encast doctor --device``: what a card is, what it multiplies, and what it can do at most."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from encast.backends.devices import need_card
from encast.ceilings.card import CardCeilings, find_card, keep_card
from encast.cli.doctor import Finding, size_text
from encast.errors import EncastError, need_modules

__all__ = ["CardReport"]


class CardReport:
    """Of the device "cuda", "cuda:N" or "torch-cpu"; with ``measure`` its ceilings are measured and kept.

    ``failure``: why they could not be kept. Raises ``InputError`` for another device, ``ResourceError`` where it is not
    there.
    """

    def __init__(self, device: str, measure: bool) -> None:
        place = need_card(device)
        need_modules("cuda", "torch")
        from encast.backends.gpu.card import describe
        from encast.backends.gpu.card import measure as measure_card

        self.device, self.card = device, describe(*place)
        self.failure: EncastError | None = None
        self._problem: str | None = None
        self.ceilings: CardCeilings | None
        if measure:
            self.ceilings = measure_card(*place)
            try:
                keep_card(self.ceilings)
            except EncastError as error:
                self.failure = error
        else:
            self.ceilings, self._problem = find_card(self.card.name)

    def findings(self) -> Iterator[Finding]:
        if self.card.without_triton is not None:
            yield Finding("card", f"PyTorch computes all steps: {self.card.without_triton}", "mend that, for speed")
        if self._problem is not None:
            yield Finding("card", self._problem, f"measure: encast doctor --measure --device {self.device}")

    def lines(self) -> Iterator[tuple[str, str]]:
        card = self.card
        memory = "" if card.memory_bytes is None or card.free_bytes is None else (
            f", {size_text(card.memory_bytes)}, {size_text(card.free_bytes)} free"
        )  # fmt: skip
        capability = "" if card.capability is None else f", compute capability {card.capability}"
        yield "card", f"{self.device}: {card.name}{capability}{memory}"
        yield "", f"PyTorch {card.torch}" + ("" if card.cuda is None else f", CUDA {card.cuda}")
        yield "", f"multiplies {', '.join(card.dtypes)}"
        for reason in card.without.values():
            yield "", reason
        if self.ceilings is None:
            yield "", f"ceilings not measured; to measure: encast doctor --measure --device {self.device}"
            return
        yield "", f"ceilings measured {self.ceilings.measured:%Y-%m-%d %H:%M} UTC"
        for dtype, rate in self.ceilings.ops_per_second.items():
            yield "", f"{dtype:<16}{rate / 1e12:10.1f}  Top/s"
        yield "", f"{'memory':<16}{self.ceilings.bytes_per_second / 1e9:10.1f}  GB/s read and written"

    def document(self) -> dict[str, Any]:
        measured = None if self.ceilings is None else self.ceilings.to_json()
        return {"device": self.device, **dataclasses.asdict(self.card), "ceilings": measured}
