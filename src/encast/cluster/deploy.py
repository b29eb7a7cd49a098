"""``encast serve --ray``: an application on a cluster for as long as the command lives."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from encast.cluster.connection import connect, head_answers
from encast.cluster.settings import Settings
from encast.errors import InputError, ResourceError

__all__ = ["NAME", "serve_on_ray"]

NAME = "encast"
"""Of the application."""

_LOOK_S = 2.0
_REACH_S = 30.0
_RELOAD_S = 330.0
_SPARE_S = 15.0
_POLL_S = 0.2
_SHOWN = 5
_SLOW_S = 30.0
_SLOW = (
    "Ray Serve has not started all servers yet; `ray status` shows whether the CPUs and GPUs that they take are free"
)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def serve_on_ray(
    address: str, settings: Settings, say: Callable[[str], None], announce: Callable[[dict[str, Any]], None] | None
) -> int:
    """Serves until SIGTERM or SIGINT, then takes the application away; returns the exit code. SIGHUP opens artifacts
    and keys again. ``say`` prints a line for people; ``announce`` is told, once it serves, what and where.

    Raises ``EncastError`` where the application cannot be made, and where it or the cluster is lost.
    """
    ray = connect(address)
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    if NAME in serve.status().applications:
        raise InputError(
            f"an application {NAME!r} is on the cluster at {address} already; end its command, or take it away with: "
            f"python -c \"from ray import serve; serve.delete('{NAME}')\""
        )
    try:
        return _Application(ray, serve, settings, say, announce).serve()
    finally:
        ray.shutdown()


class _Application:
    """What ``serve_on_ray`` keeps on the cluster."""

    def __init__(
        self,
        ray: Any,
        serve: Any,
        settings: Settings,
        say: Callable[[str], None],
        announce: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self._ray, self._serve, self._settings, self._say, self._announce = ray, serve, settings, say, announce
        self._signals: list[int] = []
        self._woken = threading.Event()

    def serve(self) -> int:
        """See ``serve_on_ray``."""
        from encast.cluster.serving import application, places

        _, room = places(self._settings)
        if self._settings.replicas is not None and self._settings.replicas[0] > room:
            raise ResourceError(
                f"{self._settings.replicas[0]} servers are asked for, and {room} fit on the nodes that there are; ask "
                "for fewer, or for MIN-MAX where nodes may come"
            )
        # Gateways have ports of their own: Ray's proxies would have nothing to do.
        self._serve.start(proxy_location="Disabled")
        slow = threading.Timer(_SLOW_S, self._say, [_SLOW])
        slow.daemon = True
        slow.start()
        try:
            self._serve.run(application(self._settings), name=NAME, route_prefix=None)
        except RuntimeError:
            reason = self._reason()
            self._serve.delete(NAME)
            raise ResourceError(f"the servers could not be started: {reason}") from None
        except KeyboardInterrupt:
            self._serve.delete(NAME, _blocking=False)
            raise
        finally:
            slow.cancel()
        # A signal ended the start; from here on it is heard, and what was accepted is answered.
        before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        try:
            self._tell()
            self._wait()
            self._end()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return 0

    def _end(self) -> None:
        """Gateways first, so that what they have accepted still has servers. A second signal waits for nothing."""
        if not head_answers(self._ray):
            return
        self._say("ending: what was accepted is answered first")
        drain_s = self._settings.drain_s()
        self._beside(lambda: self._serve.get_app_handle(NAME).broadcast("drain"), drain_s + _SPARE_S)
        self._serve.delete(NAME, _blocking=False)
        end = time.monotonic() + drain_s + _SPARE_S
        while len(self._ends()) < 2 and time.monotonic() < end and NAME in self._serve.status().applications:
            time.sleep(_POLL_S)

    def _beside(self, call: Callable[[], Any], seconds: float) -> list[Any]:
        """The answers of all replicas, or their exceptions; none if a second signal to end came, or time ran out. In a
        thread, so that signals are heard meanwhile.
        """
        answers: list[Any] = []

        def ask() -> None:
            with contextlib.suppress(Exception):  # no time, or no replica
                answers.extend(call().results(timeout_s=seconds, return_exceptions=True))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        while asking.is_alive() and len(self._ends()) < 2:
            asking.join(_POLL_S)
        return list(answers)

    def _note(self, number: int, _: Any) -> None:
        self._signals.append(number)
        self._woken.set()

    def _ends(self) -> list[int]:
        return [number for number in self._signals if number != signal.SIGHUP]

    def _tell(self) -> None:
        gateways = self._addresses()
        urls = [f"http://{f'[{host}]' if ':' in host else host}:{port}" for host, port in gateways]
        servers = self._status().deployments["servers"].replica_states
        count = sum(number for state, number in servers.items() if state == "RUNNING")
        if self._announce is not None:
            self._announce({"urls": urls, "servers": count, "models": sorted(self._settings.models)})
        models = ", ".join(self._settings.models)
        shown = " and ".join(urls[:_SHOWN]) + (f" and {len(urls) - _SHOWN} more" if len(urls) > _SHOWN else "")
        self._say(f"serving {models} by {count} server{'s' if count != 1 else ''} at {shown}")

    def _addresses(self) -> list[tuple[str, int]]:
        found = self._beside(lambda: self._serve.get_app_handle(NAME).broadcast("address"), _REACH_S)
        return sorted({one for one in found if not isinstance(one, Exception)})

    def _wait(self) -> None:
        lost_at = 0.0
        while not self._ends():
            self._woken.wait(_LOOK_S)
            self._woken.clear()
            if signal.SIGHUP in self._signals:
                self._signals[:] = self._ends()
                self._reload()
            known = self._known()
            if known is not None:
                lost_at = 0.0
                if not known:
                    raise ResourceError(f"the application {NAME!r} was taken away from the cluster by somebody else")
            elif not lost_at:
                lost_at = time.monotonic()
            elif time.monotonic() - lost_at > _REACH_S:
                raise ResourceError("the head of the Ray cluster is gone; start it again, then this command")

    def _known(self) -> bool | None:
        """Whether the cluster has the application; None where it does not say."""
        if head_answers(self._ray):
            with contextlib.suppress(Exception):  # Ray Serve's controller is started again where it ended
                return NAME in self._serve.status().applications
        return None

    def _reload(self) -> None:
        problems = []
        for name in ("servers", "gateways"):
            handle = self._serve.get_deployment_handle(name, NAME)
            answers = self._beside(lambda handle=handle: handle.broadcast("reload"), _RELOAD_S)  # type: ignore[misc]
            problems += [str(one) for one in answers if one] if answers else [f"the {name} did not answer"]
        for problem in problems:
            self._say(problem)
        self._say("reloaded" if not problems else "not all servers were reloaded; what they served they serve on")

    def _status(self) -> Any:
        return self._serve.status().applications[NAME]

    def _reason(self) -> str:
        """The last line of what Ray Serve says of a deployment that did not come up."""
        status = self._status()
        messages = [one.message for one in status.deployments.values() if one.message] or [status.message]
        lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
        errors = [line for line in lines if "Error: " in line]
        return " ".join((errors or lines or ["Ray Serve does not say why"])[-1].split())[:1000]
