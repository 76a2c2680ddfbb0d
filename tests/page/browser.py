"""A headless Chromium, driven by chromedriver over the W3C WebDriver protocol."""

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

_TIMEOUT_S = 60
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name of a reference to an element


def missing_programs() -> list[str]:
    """What of Debian's packages chromium and chromium-driver is not there."""
    return [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]


class Browser:
    """One window. Leaving the `with` statement ends it."""

    def __init__(self, profile: Path, width: int = 1600, height: int = 1200):
        """`profile`: an empty folder, for cookies and the like."""
        self._port_log = profile / "chromedriver.log"
        with self._port_log.open("w") as output:
            self._driver = subprocess.Popen(
                [shutil.which("chromedriver"), "--port=0", f"--log-path={profile}/driver.txt"],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._base = f"http://127.0.0.1:{self._wait_for_port()}"
        # Without a sandbox of its own, since containers have no rights to make one.
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--force-prefers-reduced-motion",
            f"--user-data-dir={profile}/data",
        ]
        answer = self._call(
            "POST",
            "/session",
            {
                "capabilities": {
                    "alwaysMatch": {
                        "browserName": "chrome",
                        "goog:chromeOptions": {"binary": shutil.which("chromium"), "args": flags},
                        "goog:loggingPrefs": {"browser": "ALL"},
                    }
                }
            },
        )
        self._base += f"/session/{answer['sessionId']}"
        self.resize(width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(OSError):
            self._call("DELETE", "", None)
        self._driver.terminate()
        try:
            self._driver.wait(10)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            self._driver.wait()

    def _wait_for_port(self) -> int:
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline and self._driver.poll() is None:
            for line in self._port_log.read_text().splitlines():
                if "started successfully on port " in line:
                    return int(line.rsplit(" ", 1)[1].rstrip("."))
            time.sleep(0.05)
        raise RuntimeError(f"chromedriver does not start: {self._port_log.read_text()}")

    def _call(self, method: str, path: str, body):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._base + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.read().decode()}") from error

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def resize(self, width: int, height: int) -> None:
        """Makes the page's inside `width` x `height` CSS pixels, also below a window's least width."""
        self._call(
            "POST",
            "/goog/cdp/execute",
            {
                "cmd": "Emulation.setDeviceMetricsOverride",
                "params": {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
            },
        )

    def run(self, script: str, *arguments):
        """The value that the body of a function, `script`, returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def run_async(self, script: str, *arguments):
        """The value that `script` passes to the function that is its last argument."""
        return self._call("POST", "/execute/async", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """The text that a person sees of the first element that `selector` finds; None: there is none."""
        return self.run("return document.querySelector(arguments[0])?.innerText ?? null", selector)

    def find(self, selector: str) -> str:
        return self._call("POST", "/element", {"using": "css selector", "value": selector})[_ELEMENT]

    def click(self, selector: str) -> None:
        self._call("POST", f"/element/{self.find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        self._call("POST", f"/element/{self.find(selector)}/value", {"text": text})

    def press(self, keys: str) -> None:
        """Presses keys, one after the other, where the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def errors(self) -> list[str]:
        """What the console has got since the last call, of errors alone."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def wait_for(self, condition, what: str, timeout: float = 20.0) -> float:
        """Waits until condition() holds. Returns the seconds it took. AssertionError."""
        begin = time.monotonic()
        while not condition():
            if time.monotonic() - begin > timeout:
                raise AssertionError(f"not within {timeout:g} s: {what}")
            time.sleep(0.02)
        return time.monotonic() - begin

    def screenshot(self, path: Path) -> None:
        """Writes what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot", None)))
