"""The supervisor's children: replaced when they end unasked, gone for good when they are told so."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

import encast.serve.children as children
from encast.errors import ResourceError
from encast.serve.children import Child
from encast.serve.options import ServeOptions


class Nothing(msgspec.Struct):
    """The settings of a child that needs none."""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the children run."""
    (tmp_path / "short_lived.py").write_text("import sys; sys.exit(3)")
    (tmp_path / "long_lived.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def with_child(module: str, work: Callable[[Child, list[tuple[int, bool]]], Coroutine[Any, Any, None]]) -> None:
    """``work(child, ends)`` with a child that is up; ``ends``: pid and ``ending`` of every ``ended``."""

    async def main() -> None:
        ends: list[tuple[int, bool]] = []
        ours, theirs = socket.socketpair()
        with ours, theirs:

            class Some(Child):
                def settings(self, control_fd: int) -> tuple[msgspec.Struct, int]:
                    return Nothing(), ours.fileno()

            Some.module = module
            child = Some("the child", ServeOptions(), lambda *_: None, lambda one, pid: ends.append((pid, one.ending)))
            await work(child, ends)
            child.stop()
            await asyncio.wait({child.keeping}, timeout=30)

    asyncio.run(main())


async def until(true: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not true():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), 30)


@pytest.mark.parametrize("end", [lambda child: child.dismiss(0.1, print), lambda child: child.stop()])
def test_one_that_waits_for_its_next_start_ends_at_once(end: Callable[[Child], Awaitable[None] | None]) -> None:
    async def work(child: Child, ends: list[tuple[int, bool]]) -> None:
        child.is_up()
        await until(lambda: child.pid > 0)
        child._quick = 12  # the next pause is long
        await until(lambda: len(ends) == 1)
        begin = time.monotonic()
        ending = end(child)
        if ending is not None:
            await ending
        await asyncio.wait({child.keeping}, timeout=30)
        assert time.monotonic() - begin < 2
        assert [ended for _, ended in ends] == [False, True]

    with_child("short_lived", work)


def test_the_pid_of_one_that_was_dismissed_is_told() -> None:
    async def work(child: Child, ends: list[tuple[int, bool]]) -> None:
        child.is_up()
        await until(lambda: child.pid > 0)
        pid = child.pid
        child.stop()
        await asyncio.wait({child.keeping}, timeout=30)
        assert ends == [(pid, True)]

    with_child("long_lived", work)


def test_one_that_cannot_be_forked_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, refused = asyncio.create_subprocess_exec, 0

    async def exec(*args: Any, **given: Any) -> Any:
        nonlocal refused
        if refused < 1:
            refused += 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await fork(*args, **given)

    async def work(child: Child, ends: list[tuple[int, bool]]) -> None:
        child.is_up()
        await until(lambda: child.pid > 0)
        assert ends == [(0, False)]
        assert refused == 1

    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(children.asyncio, "create_subprocess_exec", exec)
    with_child("long_lived", work)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_one_that_never_starts_is_given_up() -> None:
    async def work(child: Child, ends: list[tuple[int, bool]]) -> None:
        with pytest.raises(ResourceError, match="the child ended with exit code 3"):
            await child.first
        assert [ended for _, ended in ends] == [False, False, True]

    with_child("short_lived", work)
