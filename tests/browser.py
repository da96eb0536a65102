"""A headless Chromium for tests, spoken to through a pipe: no port, no driver, no other package.

The DevTools protocol over --remote-debugging-pipe: JSON messages that end in a zero byte; Chromium reads
them from its file descriptor 3 and answers on 4.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

FOUND = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "no Chromium found; on Debian: apt-get install --no-install-recommends chromium"

PATIENCE = 120.0
"""Seconds until a silent browser counts as broken; no test waits for it otherwise."""

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)

# Chromium wants exactly the descriptors 3 and 4, which a parent process cannot promise its child.
_LAUNCHER = (
    "import os, sys\n"
    "os.dup2(int(sys.argv[1]), 3)\n"
    "os.dup2(int(sys.argv[2]), 4)\n"
    "os.execv(sys.argv[3], sys.argv[3:])\n"
)


class Browser:
    """A running Chromium; a context that ends it."""

    def __init__(self) -> None:
        assert FOUND is not None, MISSING
        self._home = tempfile.mkdtemp(prefix="chromium-")
        theirs, self._out = os.pipe()
        self._in, answers = os.pipe()
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64) for descriptor in (theirs, answers)]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _LAUNCHER, *map(str, high), FOUND),
                *(*_FLAGS, f"--user-data-dir={self._home}", "about:blank"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=high,
            start_new_session=True,
        )
        for descriptor in (theirs, answers, *high):
            os.close(descriptor)
        self._sent = 0
        self._rest = b""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.send("Browser.close")
            self._process.wait(20)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            pass
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            os.close(self._out)
            os.close(self._in)
            shutil.rmtree(self._home, ignore_errors=True)

    def send(self, order: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The result of a DevTools order; events that come meanwhile are kept."""
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": order, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self.receive()).get("id") != self._sent:
            self.events.append(answer)
        assert "error" not in answer, f"{order}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def receive(self) -> dict[str, Any]:
        """The next message from the browser."""
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._in, 1 << 20) if ready else b""
            assert part, "Chromium ended or fell silent"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(
        self,
        place: Path | str,
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        scripts: bool = True,
    ) -> Page:
        """A page from a file or an address, loaded, in a window of its own; dark: what the system prefers."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.send("Emulation.setEmulatedMedia", media="", features=[scheme])
        page.send("Emulation.setScriptExecutionDisabled", value=not scripts)
        page.send("Page.navigate", url=place if isinstance(place, str) else place.resolve().as_uri())
        page.wait_for("Page.loadEventFired")
        return page


class Page:
    """A loaded page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def send(self, order: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(order, self._session, **parameters)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The parameters of all events of this name so far."""
        return [
            event["params"]
            for event in self._browser.events
            if event.get("method") == name and event.get("sessionId") == self._session
        ]

    def wait_for(self, name: str) -> None:
        while not self.events(name):
            self._browser.events.append(self._browser.receive())

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, promises awaited."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self) -> str:
        """The words that the page shows, also where its own scripts are off."""
        return str(self.evaluate("document.body.innerText"))

    def problems(self) -> list[str]:
        """Errors and warnings of the console, uncaught exceptions, requests that failed."""
        calls = self.events("Runtime.consoleAPICalled")
        told = [str(call["args"]) for call in calls if call["type"] in ("error", "warning", "assert")]
        told += [str(thrown["exceptionDetails"]) for thrown in self.events("Runtime.exceptionThrown")]
        entries = [event["entry"] for event in self.events("Log.entryAdded")]
        told += [entry["text"] for entry in entries if entry["level"] in ("error", "warning")]
        return told + [failed["errorText"] for failed in self.events("Network.loadingFailed")]

    def requests(self) -> list[str]:
        """The addresses that the page asked for."""
        return [event["request"]["url"] for event in self.events("Network.requestWillBeSent")]

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """What the window shows, or the whole page, as PNG."""
        options: dict[str, Any] = {}
        if whole:
            size = self.send("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            options = {"captureBeyondViewport": True, "clip": clip}
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", **options)["data"]))

    def pdf(self) -> bytes:
        """The page as it would be printed."""
        answer = self.send("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        return base64.b64decode(answer["data"])
