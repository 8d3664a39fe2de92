"""A headless Chromium for tests, driven over the WebDriver protocol by chromedriver."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

# Root may not use Chromium's sandbox; the rest keeps it from looking for a network or a GPU.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip


class Browser:
    """One session of a chromedriver that listens on `port`."""

    def __init__(self, port: int, chromium: str, profile: Path) -> None:
        self.base = f"http://127.0.0.1:{port}/session"
        options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._send("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self.base += "/" + made["sessionId"]

    def open(self, page: Path | str, width: int, height: int = 900, dark: bool = False) -> None:
        """Show a file, or the page at an address, in a window of this size and wait until it is drawn."""
        phone = width < 640
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._send("POST", "/url", {"url": page if isinstance(page, str) else page.as_uri()})
        self.settle()

    def settle(self) -> None:
        """Wait for two frames: what was asked for in one is drawn by the next."""
        frames = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        self._send("POST", "/execute/async", {"script": frames, "args": []})

    def run(self, script: str, *arguments: object) -> Any:
        """What a script gives: ``return document.title``; it has its `arguments`."""
        return self._send("POST", "/execute/sync", {"script": script, "args": [*arguments]})

    def point(self, x: float, y: float) -> None:
        """Move the mouse to a place of the window, in pixels."""
        moves = [{"type": "pointerMove", "x": round(x), "y": round(y), "duration": 0}]
        self._send("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": moves}]})
        self.settle()

    def messages(self) -> list[str]:
        """What the console has said since the last call."""
        return [entry["message"] for entry in self._send("POST", "/se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        """Write what the whole page looks like, as PNG."""
        found = self.devtools("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(found["data"]))

    def devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        """Send a command of the DevTools protocol."""
        return self._send("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def close(self) -> None:
        """End the session and with it Chromium."""
        self._send("DELETE", "", None)

    def _send(self, method: str, path: str, body: Any) -> Any:
        text = None if body is None else json.dumps(body).encode()
        request = Request(self.base + path, text, {"Content-Type": "application/json"}, method=method)
        try:
            with urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose profile lies in `folder`. Fails, saying what to install, where there is none."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        raise AssertionError(
            "the report's pages are tested in headless Chromium, which is not installed: "
            "apt-get install chromium chromium-driver"
        )
    process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "started successfully" in line)
        found = re.search(r"port (\d+)", line)
        assert found, line
        session = Browser(int(found[1]), chromium, folder / "profile")
        yield session
        session.close()
    finally:
        process.terminate()
        process.wait()
