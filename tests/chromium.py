"""Headless Chromium over its debugging pipe: no driver, no port, and no network beyond this machine."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# The protocol wants descriptors 3 and 4, whatever the numbers of ours are.
_MOVE = """
import fcntl, os, sys
here = [fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3]]
for one, wanted in zip(here, (3, 4)):
    os.dup2(one, wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Chromium:
    """A browser with one page. ``requests``: what it asked for; ``complaints``: errors, warnings, exceptions.

    Unless ``online``, its network is off altogether.
    """

    def __init__(self, seconds: float = 60.0, *, online: bool = False) -> None:
        assert EXECUTABLE is not None
        self._seconds = seconds
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        arguments = [
            EXECUTABLE,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            f"--user-data-dir={self._profile.name}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        command = [sys.executable, "-c", _MOVE, str(theirs_in), str(theirs_out), *arguments]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        if not online:
            offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
            self.call("Network.emulateNetworkConditions", **offline)

    def open(self, page: Path | str, *, width: int = 1280, dark: bool = False) -> None:
        """Loads a file or a URL, at a width in CSS pixels, by day or by night."""
        self.requests.clear()
        self.complaints.clear()
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=phone)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media="", features=scheme)
        self._loaded = False
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        deadline = time.monotonic() + self._seconds
        while not self._loaded:
            self._receive(deadline)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """The value of a JavaScript expression once it is true."""
        deadline = time.monotonic() + self._seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"{expression} is not true after {self._seconds} s"
            time.sleep(0.02)
        return value

    def click(self, selector: str) -> None:
        """Presses the mouse over the middle of an element."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{find}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        x, y = self.evaluate(
            f"(box => [box.x + box.width / 2, box.y + box.height / 2])({find}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def write(self, selector: str, text: str) -> None:
        """Puts text in the place of what a field holds, as by typing."""
        self.click(selector)
        self.evaluate(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path, *, top: float = 0, height: float = 900, width: float = 1280) -> None:
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self._seconds
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            block = os.read(self._in, 1 << 20) if ready else b""
            assert block, f"Chromium said nothing within {self._seconds} s, or ended ({self._process.poll()})"
            self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(parameters["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])
        elif method == "Page.loadEventFired":
            self._loaded = True

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()
