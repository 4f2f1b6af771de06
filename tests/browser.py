"""A real browser for the tests of the HTML report: a headless Chromium, spoken to over a pipe (the DevTools protocol).

Needs no package: `--remote-debugging-pipe` reads and writes JSON on two file descriptors. A width is set by the
protocol, because a window has a smallest width of its own.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "NLPCONVERT_BROWSER"
"""Path of the browser to use; "none" on a machine that truly has none, where these tests are then skipped by name."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --no-default-browser-check "
    "--disable-background-networking --disable-component-update --disable-default-apps --disable-extensions "
    "--disable-sync --hide-scrollbars --mute-audio --remote-debugging-pipe"
).split()
ADVICE = (
    "no browser was found for the tests of the HTML report. On Debian: apt-get install chromium (`make test` does it "
    f"as root or with sudo); elsewhere install Chrome or Chromium, or set {VARIABLE} to its path. Where there truly is "
    f"none, {VARIABLE}=none skips these tests."
)
PATIENCE = 60.0
"""Seconds to wait for one answer: the machine may be busy."""


def find() -> str | None:
    """The browser's path; None where none was found."""
    given = os.environ.get(VARIABLE)
    if given:
        return given
    found = (shutil.which(name) for name in NAMES)
    return next((path for path in (*found, *(p for p in PLACES if Path(p).exists())) if path), None)


@dataclass
class Page:
    """What was seen of one page at one width."""

    width: int
    scroll_width: int
    text: str
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    """Addresses that were asked for beyond the page itself and data: addresses."""
    answers: dict[str, Any] = field(default_factory=dict)


class Browser:
    """One running browser. `look` opens a file anew each time."""

    def __init__(self, path: str, profile: Path) -> None:
        read, self._to = os.pipe()
        self._from, written = os.pipe()
        command = [path, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        # The protocol's descriptors are 3 and 4. Above them first, so that setting one does not close the other;
        # bash, because other shells take numbers of one digit only.
        theirs = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (read, written)]
        shell = ["bash", "-c", f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}', "bash", *command]
        self._process = subprocess.Popen(shell, pass_fds=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for each in (read, written, *theirs):
            os.close(each)
        self._number = 0
        self._rest = b""
        self._events: list[dict[str, Any]] = []
        self._session = ""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **values: Any) -> Any:
        """One command and its result. RuntimeError with the browser's words."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(time.monotonic() + PATIENCE)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._events.append(answer)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(until - time.monotonic(), 0))
            if not ready:
                raise RuntimeError(f"the browser did not answer within {PATIENCE:.0f} s")
            part = os.read(self._from, 1 << 20)
            if not part:
                raise RuntimeError(f"the browser ended: exit code {self._process.wait(timeout=10)}")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def look(self, file: Path, width: int, *, height: int = 800, dark: bool = False, questions: Any = None) -> Page:
        """Opens a file at a width of so many CSS pixels; `questions` are JavaScript expressions by name."""
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        address = file.resolve().as_uri()
        self.ask("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._next(time.monotonic() + PATIENCE))
        found = Page(
            width=self.value("window.innerWidth"),
            scroll_width=self.value("document.documentElement.scrollWidth"),
            text=self.value("document.body.innerText"),
            answers={name: self.value(question) for name, question in (questions or {}).items()},
        )
        for event in self._events:
            values = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.errors.append(str(values["exceptionDetails"].get("text")))
            elif event["method"] == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
                found.errors.append(json.dumps(values["args"]))
            elif event["method"] == "Log.entryAdded":
                found.errors.append(values["entry"]["text"])
            elif event["method"] == "Network.requestWillBeSent":
                url = values["request"]["url"]
                if url != address and not url.startswith("data:"):
                    found.requests.append(url)
        return found

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives in the open page. RuntimeError where it raises."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """The whole open page as a PNG: for a person's eyes, no test compares it."""
        data = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(data["data"]))

    def close(self) -> None:
        """Ends the browser and waits for it."""
        try:
            self._session = ""
            self.ask("Browser.close")
            self._process.wait(timeout=20)
        except (OSError, RuntimeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            os.close(self._to)
            os.close(self._from)


@contextmanager
def running(path: str, profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile, closed at the end."""
    browser = Browser(path, profile)
    try:
        yield browser
    finally:
        browser.close()


def main() -> None:
    """python -m tests.browser: which browser, exit code 1 without one. With FILE.html PREFIX [dark]: screenshots of a
    report at a phone's and a desktop's width, to look at."""
    import tempfile

    path = find()
    if path is None or path == "none":
        sys.exit(ADVICE)
    if len(sys.argv) < 3:
        print(path)
        return
    file, prefix, dark = Path(sys.argv[1]), sys.argv[2], len(sys.argv) > 3
    with tempfile.TemporaryDirectory() as profile, running(path, Path(profile)) as browser:
        for width in (375, 1280):
            page = browser.look(file, width, dark=dark)
            browser.screenshot(Path(f"{prefix}-{width}.png"))
            print(f"{page.width} px: content {page.scroll_width} px; errors {page.errors}; requests {page.requests}")


if __name__ == "__main__":
    main()
