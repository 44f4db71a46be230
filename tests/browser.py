"""A headless Chromium, driven over its own debugging protocol: enough to open a page and ask what happened."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
]


def find() -> str | None:
    """The path of a Chromium or Chrome on this machine, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


class Page:
    """One tab. ``events`` holds everything the browser reported since the last ``open``."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.sent = 0
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and wait for its answer; events that arrive meanwhile are kept."""
        self.sent += 1
        self.socket.send(json.dumps({"id": self.sent, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.sent:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self.events.append(message)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def resize(self, width: int, height: int = 900) -> None:
        """Set the width and height of the window, in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, url: str, seconds: float = 30) -> None:
        """Open a page and wait until it is loaded and its mathematics is typeset."""
        self.events = []
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + seconds
        while self.evaluate("document.readyState") != "complete" or self.evaluate("location.href") == "about:blank":
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} did not load in {seconds} s")
            time.sleep(0.02)
        self.evaluate("Promise.resolve(window.MathJax && MathJax.startup && MathJax.startup.promise).then(() => 1)")
        self.settle()

    def settle(self) -> None:
        """Wait for two frames: what a script schedules on load or on a new width has been done, and reported."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def requests(self) -> list[str]:
        """The address of everything the page asked for."""
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """Console errors, uncaught exceptions and files that did not load."""
        found = []
        for event in self.events:
            method, params = event["method"], event.get("params", {})
            if method == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                found.append(details.get("exception", {}).get("description", details["text"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
                found.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))
            elif method == "Network.loadingFailed" and not params.get("canceled"):
                found.append(f"a {params['type']} did not load: {params['errorText']}")
        return found

    def screenshot(self, path: Path, full: bool = False) -> None:
        """Save what the window shows, or the whole page, as a PNG."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def launch(profile: Path) -> Iterator[Page]:
    """Start a browser with a fresh profile in the folder ``profile``; it is ended on the way out.

    Raises: RuntimeError where there is no browser or it does not start.
    """
    import websocket

    path = find()
    if path is None:
        raise RuntimeError("no Chromium on this machine")
    process = subprocess.Popen(
        [path, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port_file = profile / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not (port_file.exists() and re.match(r"\d+\n", port_file.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{path} did not start")
            time.sleep(0.05)
        port = port_file.read_text().splitlines()[0]
        import urllib.request

        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
            target = next(t for t in json.load(answer) if t["type"] == "page")
        socket = websocket.create_connection(
            target["webSocketDebuggerUrl"], timeout=60, suppress_origin=True, http_no_proxy=["127.0.0.1", "localhost"]
        )
        try:
            yield Page(socket)
        finally:
            socket.close()
    finally:
        process.terminate()
        process.wait(timeout=30)
