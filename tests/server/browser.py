"""A real browser, driven over its DevTools pipe: Chromium's own protocol, and nothing to install."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Any

from tests.waiting import HANG_S, wait_for

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
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
    "--remote-debugging-pipe",
)
# The browser reads from descriptor 3 and writes to 4, whatever they were here.
_LAUNCH = """import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_KEYS = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowDown": 40, "Home": 36}


class Browser:
    """One page of a browser of its own; `with` ends it and removes its profile."""

    def __init__(self, *, width: int = 1440, height: int = 1000, password: str | None = None) -> None:
        """`password` is what somebody would type when the browser asks for one."""
        assert CHROMIUM is not None, "no Chromium here"
        self.errors: list[str] = []  # exceptions and console errors
        self.urls: list[str] = []  # everything that was asked for
        self.num_asked = 0  # how often for a password
        self._size = (width, height)
        self._password = password
        self._numbers = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._buffer = b""
        self._session: str | None = None

    def __enter__(self) -> "Browser":
        self._profile = tempfile.mkdtemp(prefix="kvq-browser-")
        their_read, self._to = os.pipe()
        self._from, their_write = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (their_read, their_write)]
        for end in (their_read, their_write):
            os.close(end)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _LAUNCH,
                *map(str, ends),
                CHROMIUM,
                *_FLAGS,
                f"--user-data-dir={self._profile}",
            ],
            pass_fds=ends,
            stderr=subprocess.DEVNULL,
        )
        for end in ends:
            os.close(end)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        if self._password is not None:
            self.call("Fetch.enable", handleAuthRequests=True)
        self.resize(*self._size)
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        self._write("Browser.close", {})
        try:
            self._process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, url: str) -> None:
        """Go there, and wait for the document."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, expression: str) -> Any:
        """The value of an expression in the page, awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """The expression's value once it is true."""
        return wait_for(lambda: self.run(expression), expression)

    def rest(self, seconds: float) -> None:
        """Let time pass; what the browser says is heard meanwhile."""
        deadline = monotonic() + seconds
        while (left := deadline - monotonic()) > 0:
            self._read(left)

    def press(self, key: str) -> None:
        """A key, as a keyboard sends it."""
        code = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def resize(self, width: int, height: int, *, ratio: float = 1, is_phone: bool = False) -> None:
        """Another window, or a phone's."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=ratio,
            mobile=is_phone,
        )

    def prefer(self, **features: str) -> None:
        """What the user's system prefers: `color_scheme="light"`, `reduced_motion="reduce"`."""
        named = [
            {"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()
        ]
        self.call("Emulation.setEmulatedMedia", features=named)

    def screenshot(self, path: Path | None = None, *, whole: bool = False) -> bytes:
        """The page as a PNG; `whole` with what has to be scrolled to."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        png = base64.b64decode(answer["data"])
        if path is not None:
            path.write_bytes(png)
        return png

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = self._write(method, params)
        wait_for(lambda: self._read(0.5) or number in self._answers, f"an answer to {method}")
        answer = self._answers.pop(number)
        assert "error" not in answer, (method, answer.get("error"))
        return answer["result"]

    def _write(self, method: str, params: dict[str, Any]) -> int:
        self._numbers += 1
        message = {"id": self._numbers, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        return self._numbers

    def _read(self, seconds: float) -> None:
        if not select.select([self._from], [], [], seconds)[0]:
            return
        part = os.read(self._from, 1 << 20)
        assert part, "the browser ended"
        *messages, self._buffer = (self._buffer + part).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self._note(message["method"], message["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(json.dumps(params["entry"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Fetch.requestPaused":
            self._write("Fetch.continueRequest", {"requestId": params["requestId"]})
        elif method == "Fetch.authRequired":
            self.num_asked += 1
            answer = {"response": "ProvideCredentials", "username": "any", "password": self._password}
            self._write(
                "Fetch.continueWithAuth", {"requestId": params["requestId"], "authChallengeResponse": answer}
            )
