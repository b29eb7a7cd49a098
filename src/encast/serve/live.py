"""The live line: how the server does, on standard error once a second."""

from __future__ import annotations

import asyncio
import shutil
import sys
from typing import TextIO

from encast.serve.metrics import Live, Registry

__all__ = ["LiveLine", "live_text"]


def live_text(live: Live) -> str:
    """One line about the last second; dollars are at the rate of the last minute."""
    second = live.second
    parts = [
        f"{second.texts_s:,.0f} inferences/s",
        f"{second.tokens_s:,.0f} tokens/s",
        f"queue {live.queue_rows:,} ({live.queue_tokens:,} tokens)",
        f"p50 {_ms(second.p50_ms)}",
        f"p99 {_ms(second.p99_ms)}",
        f"{second.rejected_s:,.0f} rejected/s",
    ]
    if second.failed_s:
        parts.append(f"{second.failed_s:,.0f} failed/s")
    if live.usd_per_million is not None:
        parts.append(f"${live.usd_per_million:.3g} per million")
    if not live.ready:
        parts.insert(0, "not ready")
    return "  ".join(parts)


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g} ms" if value < 1000 else f"{value:,.0f} ms"


class LiveLine:
    """Rewrites one line of a terminal; elsewhere each is a line of its own. Call ``clear`` before other output."""

    def __init__(self, registry: Registry, stream: TextIO = sys.stderr) -> None:
        self._registry, self._stream, self._terminal = registry, stream, stream.isatty()

    async def run(self) -> None:
        """Shows it every second, until cancelled."""
        while True:
            await asyncio.sleep(1)
            # In a thread: a terminal that was stopped with Ctrl-S takes nothing.
            await asyncio.to_thread(self.show)

    def show(self) -> None:
        """Shows it once."""
        text = live_text(self._registry.live())
        if self._terminal:
            self._write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
        else:
            self._write(text + "\n")

    def clear(self) -> None:
        """Makes room on a terminal."""
        if self._terminal:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # the terminal has gone; the server goes on
            self._terminal = False
