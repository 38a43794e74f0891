"""A headless Chromium that opens a page from the disk, presses keys, clicks, and saves downloads in a folder.

It is driven over a pipe by the DevTools protocol: messages in JSON that end with a zero byte, on the file descriptors 3
and 4 of the browser.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

EXECUTABLE = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(EXECUTABLE is None, reason="neither chromium nor google-chrome is installed")


class Browser:
    """One page in a browser of its own.

    Args:
        page: File to open.
        downloads: Folder of downloads; it also has the profile.
    """

    def __init__(self, page: Path, downloads: Path) -> None:
        self.page, self.downloads = page, downloads
        self.number, self.rest, self.session = 0, b"", None
        self.downloaded: list[str] = []

    def __enter__(self) -> Browser:
        to_browser, self.write = os.pipe()
        self.read, from_browser = os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --no-first-run --remote-debugging-pipe"
        profile = self.downloads / "profile"
        command = f'exec "$0" {flags} "--user-data-dir={profile}" about:blank 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(
            ["bash", "-c", command, str(EXECUTABLE)], pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads), eventsEnabled=True)
        target = self.send("Target.createTarget", url=self.page.as_uri())["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.wait(lambda: self.value("location.protocol + document.readyState") == "file:complete")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.session = None
        try:
            self.send("Browser.close")
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self.read)
            os.close(self.write)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; names of finished downloads are collected meanwhile."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + 60
        while time.monotonic() < until:
            answer = self._receive(until)
            if answer.get("method") == "Browser.downloadProgress" and answer["params"]["state"] == "completed":
                self.downloaded.append(answer["params"]["guid"])
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return dict(answer["result"])
        raise TimeoutError(method)

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.read], [], [], max(until - time.monotonic(), 0.0))
            if not ready or not (more := os.read(self.read, 1 << 16)):
                raise TimeoutError("the browser does not answer")
            self.rest += more
        message, self.rest = self.rest.split(b"\0", 1)
        return dict(json.loads(message))

    def wait(self, holds: Any) -> None:
        """Wait until a condition holds."""
        until = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < until, "the browser takes too long"
            time.sleep(0.05)

    def reload(self) -> None:
        """Load the page anew; its storage stays."""
        self.value("window.before = true")
        self.send("Page.reload")
        self.wait(lambda: self.value("(window.before || '') + document.readyState") == "complete")

    def value(self, script: str) -> Any:
        """Return the value of an expression on the page."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def click(self, id: str) -> None:
        """Click the middle of an element."""
        self.value(f"document.getElementById({id!r}).scrollIntoView()")
        box = self.value(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
            f"(document.getElementById({id!r}).getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def save(self) -> Path:
        """Click the button that saves, and return the downloaded file."""
        before, done = set(self.downloads.glob("*.csv")), len(self.downloaded)
        self.click("save")
        self.wait(lambda: self.value("1") and len(self.downloaded) > done)
        (found,) = set(self.downloads.glob("*.csv")) - before
        return found
