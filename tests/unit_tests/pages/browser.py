"""A headless Chromium that tests talk to through two pipes (Chrome DevTools Protocol)."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pytest_megatron.base.files import JsonValue

DEADLINE_S = 60
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--remote-debugging-pipe", "--hide-scrollbars", "--disable-extensions", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--force-color-profile=srgb", "--force-device-scale-factor=1", "about:blank"),
)


def find_chromium() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name)) is not None), None)


class Browser:
    """One page in one browser.

    Attributes:
        requests: URLs that it asked for, in order.
        blocked: Why requests were not sent.
        complaints: What it wrote to the console, and errors that nobody caught.
    """

    def __init__(self, to: int, of: int) -> None:
        self._to, self._of, self._rest, self._number = to, of, b"", 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.blocked: list[str] = []
        self.complaints: list[str] = []
        targets = self.ask("Target.getTargets")["targetInfos"]
        assert isinstance(targets, list)
        (page,) = [t for t in targets if isinstance(t, dict) and t["type"] == "page"]
        attached = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = str(attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: JsonValue) -> dict[str, JsonValue]:
        """Send a command; return its answer."""
        self._number += 1
        message: dict[str, JsonValue] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                result = found["result"]
                assert isinstance(result, dict)
                return result

    def open(self, path: Path, *, width: int = 1200, height: int = 900) -> None:
        """Load a file and wait until its scripts have run."""
        self.requests, self.blocked, self.complaints = [], [], []
        self.resize(width, height)
        self.ask("Page.navigate", url=path.resolve().as_uri())
        self._wait_for("Page.loadEventFired")
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def resize(self, width: int, height: int) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def use_colours(self, scheme: str) -> None:
        """Prefer `light` or `dark`."""
        features: list[JsonValue] = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", features=features)

    def run(self, expression: str) -> JsonValue:
        """Return what a JavaScript expression gives; promises are waited for."""
        answer = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        result = answer["result"]
        assert isinstance(result, dict)
        return result.get("value")

    def _wait_for(self, method: str) -> None:
        while self._next().get("method") != method:
            pass

    def _next(self) -> dict[str, JsonValue]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._of], [], [], DEADLINE_S)
            assert ready, f"the browser says nothing within {DEADLINE_S} s"
            received = os.read(self._of, 1 << 16)
            assert received, "the browser ended"
            self._rest += received
        line, _, self._rest = self._rest.partition(b"\0")
        message: JsonValue = json.loads(line)
        assert isinstance(message, dict)
        self._note(message)
        return message

    def _note(self, message: dict[str, JsonValue]) -> None:
        params = message.get("params")
        if not isinstance(params, dict):
            return
        match message.get("method"):
            case "Network.requestWillBeSent":
                request = params["request"]
                assert isinstance(request, dict)
                self.requests.append(str(request["url"]))
            case "Network.loadingFailed":
                self.blocked.append(str(params.get("blockedReason")))
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Log.entryAdded":
                self.complaints.append(json.dumps(params))
            case _:
                return


@contextmanager
def chromium(program: str) -> Iterator[Browser]:
    """Start a browser with a profile of its own; nothing of it is left afterwards."""
    its_input, our_end = os.pipe()
    our_other_end, its_output = os.pipe()
    its_input, its_output = (_above_9(descriptor) for descriptor in (its_input, its_output))
    with tempfile.TemporaryDirectory(prefix="pages-chromium-") as profile:
        # The browser reads commands from descriptor 3 and answers on 4.
        command = ["bash", "-c", 'exec "$@" 3<&"$IN" 4>&"$OUT"', "chromium"]
        process = subprocess.Popen(
            [*command, program, *_ARGUMENTS[:-1], f"--user-data-dir={profile}", _ARGUMENTS[-1]],
            pass_fds=(its_input, its_output),
            env={**os.environ, "IN": str(its_input), "OUT": str(its_output), "HOME": profile},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(its_input)
        os.close(its_output)
        try:
            browser = Browser(our_end, our_other_end)
            yield browser
            browser._session = None
            browser.ask("Browser.close")
            process.wait(DEADLINE_S)
        finally:
            os.close(our_end)
            os.close(our_other_end)
            process.kill()
            process.wait()


def _above_9(descriptor: int) -> int:
    """Return another number for a descriptor, out of the way of 3 and 4."""
    other = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return other
