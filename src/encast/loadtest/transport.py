"""How a request gets to the server over HTTP and an answer back, by aiohttp. The README says what it costs."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple

import aiohttp
from yarl import URL

__all__ = ["FailedError", "Http", "Reply"]


class Reply(NamedTuple):
    """``refusal``: empty with an answer, else the kind of error, such as ``HTTP 500``; ``body`` then says why.

    ``rejected``: for lack of room (429). ``fault``: for what was asked, which no later request changes. ``tokens``: by
    the headers of encast and of TEI.
    """

    body: bytes
    refusal: str = ""
    rejected: bool = False
    fault: bool = False
    retry_after: str | None = None
    tokens: str | None = None


class FailedError(Exception):
    """No reply; the message is the kind of failure: ``connection refused``, ``connection reset``, ``timeout``."""


class Http:
    """A pool of connections that are kept open. No request is sent twice, no redirect followed."""

    def __init__(self, url: str, path: str, headers: Mapping[str, str], timeout: float) -> None:
        self._base = url.rstrip("/")
        self._url = URL(self._base + path)
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **headers}
        self._timeout = aiohttp.ClientTimeout(total=timeout)

    async def __aenter__(self) -> Http:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=self._timeout,
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()

    async def send(self, body: bytes) -> Reply:
        """Raises ``FailedError``."""
        return await self._ask("POST", self._url, body)

    async def get(self, path: str) -> Reply:
        """Raises ``FailedError``."""
        return await self._ask("GET", URL(self._base + path), None)

    async def _ask(self, method: str, url: URL, body: bytes | None) -> Reply:
        try:
            async with self._session.request(method, url, data=body, allow_redirects=False) as response:
                answer, status, headers = await response.read(), response.status, response.headers
                if status == 200:
                    return Reply(answer, tokens=headers.get("x-tokens") or headers.get("x-compute-tokens"))
                fault = status < 500 and status != 429
                return Reply(answer, f"HTTP {status}", status == 429, fault, headers.get("Retry-After"))
        except asyncio.TimeoutError:
            raise FailedError("timeout") from None
        except (aiohttp.ClientError, OSError) as error:
            raise FailedError(_kind(error)) from None


def _kind(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED:
        return "connection refused"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection: {error.os_error.strerror or error}"
    if isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, aiohttp.ClientOSError)):
        return "connection reset"
    return f"{type(error).__name__}: {error}"[:120]
