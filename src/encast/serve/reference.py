"""The float64 reference's answer to the canary: computed once for an artifact, then kept in the cache directory."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from encast.ceilings.store import cache_dir
from encast.errors import EncastError
from encast.files import write_whole

__all__ = ["reference_answer"]

_SECONDS = 120.0
"""For models so large that the reference is no way to start a server."""


async def reference_answer(artifact: Path, sha256: str) -> tuple[bytes | None, str]:
    """The answer as f32 bytes; None, and the reason, where there is none to be had."""
    kept = _place(sha256)
    if kept is not None:
        try:
            return bytes.fromhex(kept.read_text(encoding="ascii")), ""
        except (OSError, ValueError):
            pass  # computed again
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "encast.serve.canary", str(artifact),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        answer, problem = await asyncio.wait_for(process.communicate(), _SECONDS)
    except asyncio.TimeoutError:
        return None, f"it takes longer than {_SECONDS:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = problem.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
        return None, lines[-1][:300]
    if kept is not None:
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_whole(kept, answer.hex())
        except OSError:
            pass  # the next start computes it again
    return answer, ""


def _place(sha256: str) -> Path | None:
    try:
        return cache_dir() / "served" / "canaries" / sha256
    except EncastError:
        return None
