"""Headless Chromium, driven over the pipe it was started with: no driver, no package, no port.

The protocol is Chromium's DevTools protocol: JSON messages that end with a NUL byte, read by the browser from its file
descriptor 3 and written to 4.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-headless-shell", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")


def find_chromium() -> str | None:
    """Return the browser to use: what $OPTIMC_CHROMIUM names, or what is installed; None if there is none."""
    found = (shutil.which(name) for name in (os.environ.get("OPTIMC_CHROMIUM", ""), *NAMES) if name)
    return next((path for path in found if path), None)


class Browser:
    """One page of one browser process. What its console complains about and whom it calls is kept."""

    def __init__(self, path: str, profile: Path) -> None:
        to_browser, self._out = _high_pipe()
        self._in, from_browser = _high_pipe()
        command = [path, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        places = [(os.POSIX_SPAWN_DUP2, to_browser, 3), (os.POSIX_SPAWN_DUP2, from_browser, 4)]
        log = (os.POSIX_SPAWN_OPEN, 2, profile / "stderr.txt", os.O_WRONLY | os.O_CREAT, 0o600)
        self._pid = os.posix_spawn(path, command, os.environ, file_actions=[*places, log], setpgroup=0)
        os.close(to_browser)
        os.close(from_browser)
        self._unread = b""
        self._last_id = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requested: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Load `url` and wait until all of it is there."""
        self.complaints.clear()
        self.requested.clear()
        answer = self._call("Page.navigate", url=url)
        assert "errorText" not in answer, f"{url}: {answer['errorText']}"
        self.wait_for(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression; a promise is waited for."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait_for(self, script: str, timeout_s: float = 10) -> Any:
        """Return the expression's value as soon as it is true; fail if it does not become so."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.evaluate(script)):
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {script}\n{self.complaints}"
            time.sleep(0.02)
        return value

    def text(self, selector: str) -> str:
        """Return the text of the first element that matches."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")

    def click(self, selector: str) -> None:
        """Click the first element that matches."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, text: str) -> None:
        """Type into whatever has the focus; a line break is the Enter key."""
        for line, ends in ((line.rstrip("\n"), line.endswith("\n")) for line in text.splitlines(keepends=True)):
            self._call("Input.insertText", text=line)
            if ends:
                enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
                self._call("Input.dispatchKeyEvent", type="keyDown", **enter)
                self._call("Input.dispatchKeyEvent", type="keyUp", **enter)

    def close(self) -> None:
        """End the browser with all its processes."""
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._out)
        os.close(self._in)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._notice(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            assert select.select([self._in], [], [], 30)[0], "the browser is silent"
            received = os.read(self._in, 1 << 20)
            assert received, "the browser has ended"
            self._unread += received
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _notice(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])


def _high_pipe() -> tuple[int, int]:
    """Return a pipe whose ends are no descriptor the browser is to have."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
