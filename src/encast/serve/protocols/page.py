"""The page at ``/``, and the numbers that it shows."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from importlib import resources

from encast.serve.call import Call
from encast.serve.metrics import Live
from encast.serve.operations import ErrorBody, Operation, Protocol, Reply, error_body
from encast.serve.service import Service

__all__ = ["page"]


def page(live: Callable[[], Awaitable[bytes]], *, html: bool = True) -> Protocol:
    """The page, unless not ``html``, and ``/encast/v1/stats``. ``live`` gives the supervisor's ``Live`` as JSON."""
    content = resources.files("encast.serve").joinpath("page/index.html").read_bytes()
    headers = {
        "content-security-policy": _policy(content.decode()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    async def show(service: Service, call: Call, body: None) -> Reply:
        return Reply(content, headers, "text/html; charset=utf-8")

    async def stats(service: Service, call: Call, body: None) -> Reply:
        return Reply(await live(), {"cache-control": "no-store"})

    # The page holds nothing of the server; what it asks for asks for the key.
    about = "A page that shows how the server does and tries every task"
    shown = Operation(
        "GET", "/", "page.show", about, show, media_type="text/html", runs=False, open=True
    )  # fmt: skip
    numbers = Operation(
        "GET", "/encast/v1/stats", "page.stats", "How the server does", stats, answer=Live, runs=False
    )  # fmt: skip
    return Protocol("page", [shown, numbers] if html else [numbers], error_body, error_type=ErrorBody)


def _policy(content: str) -> str:
    """The page may run its own script, show its own style and ask its own server; nothing else."""
    hashes = []
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", content, re.DOTALL)
        hashes.append(f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'")
    rest = "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; {'; '.join(hashes)}; {rest}"
