"""A real browser for tests of pages: headless Chromium over its DevTools protocol, through a pair of pipes. Needs no
package beside it.
"""

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
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
PATIENCE_SECONDS = 60.0


def find_chromium() -> str:
    for name in NAMES:
        if path := shutil.which(name):
            return path
    raise AssertionError(
        "The report page is tested in a real browser, and there is no Chromium here. Install it: apt-get install "
        "chromium (or `make browser`)"
    )


class Tab:
    """One page. `complaints` are what its console and the browser's log say; `requests` every address it asked for."""

    def __init__(self, browser: "Browser", session: str):
        self._browser, self._session = browser, session
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **params: Any) -> Any:
        return self._browser.call(method, self._session, **params)

    def evaluate(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, path: Path) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=path.absolute().as_uri())
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.evaluate("location.protocol + document.readyState") != "file:complete":
            assert time.monotonic() < deadline, "the page does not load"
            time.sleep(0.02)
        self.settle()

    def settle(self) -> None:
        """Two frames: what was asked to be drawn has been drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def resize(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.settle()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.settle()

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **(text if kind == "keyDown" else {}))
        self.settle()

    def picture(self, path: Path, *, whole: bool = True) -> None:
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])
        )


class Browser:
    def __init__(self, process: subprocess.Popen, commands: int, answers: int):
        self._process, self._commands, self._answers = process, commands, answers
        self._numbers = itertools.count(1)
        self._tabs: dict[str, Tab] = {}
        self._unread = b""

    def tab(self) -> Tab:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._tabs[session] = Tab(self, session)
        return self._tabs[session]

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], PATIENCE_SECONDS)
            assert ready, "Chromium does not answer"
            more = os.read(self._answers, 2**20)
            assert more, f"Chromium ended with code {self._process.poll()}"
            self._unread += more
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        tab = self._tabs.get(event.get("sessionId", ""))
        if tab is None:
            return
        params = event.get("params", {})
        if event["method"] == "Network.requestWillBeSent":
            tab.requests.append(params["request"]["url"])
        elif event["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            tab.complaints.append(json.dumps(params))


@contextmanager
def chromium() -> Iterator[Browser]:
    program = find_chromium()
    with tempfile.TemporaryDirectory(prefix="outsize-browser-", ignore_cleanup_errors=True) as home:
        to_read, commands = os.pipe()
        answers, to_write = os.pipe()
        # Chromium reads from 3 and writes to 4, so the shell moves our ends there; from 10 on, no two of them can be in
        # each other's way.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_read, to_write)]
        os.close(to_read)
        os.close(to_write)
        move = 'in=$1 out=$2; shift 2; exec "$@" 3<&"$in" 4>&"$out"'
        process = subprocess.Popen(
            [
                "bash",
                "-c",
                move,
                "bash",
                *map(str, ends),
                program,
                *FLAGS,
                f"--user-data-dir={home}/profile",
                "about:blank",
            ],
            pass_fds=ends,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": home},
        )
        for end in ends:
            os.close(end)
        try:
            yield Browser(process, commands, answers)
        finally:
            os.close(commands)
            os.close(answers)
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
