"""A headless Chromium for tests, driven over its own protocol (DevTools) through one WebSocket.

    Browser ── commands by number ──► websocket ──► chromium        a Tab is a session of its own on that socket
            ◄── replies, events ──────

Everything is asked synchronously by tests; a loop of this object's own turns meanwhile.  What scripts of a page throw,
and what the browser complains of (a policy that was broken), is kept in `Tab.complaints`.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

SECONDS = 40.0
"""For anything that is waited for: a loaded machine with two cores takes its time."""
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-port=0"
).split()


def chromium() -> str:
    """Its path; skips the test where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")


class Browser:
    """One browser process with an empty profile."""

    def __init__(self, process: subprocess.Popen[bytes], profile: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._tabs: dict[str, Tab] = {}
        self._process = process
        self._loop.run_until_complete(self._connect(self._address(profile / "DevToolsActivePort")))

    def _address(self, file: Path) -> str:
        """Where the browser listens, once it does."""
        deadline = time.monotonic() + SECONDS
        while not (file.exists() and file.read_text().count("\n")):
            assert self._process.poll() is None, "chromium ended"
            assert time.monotonic() < deadline, "chromium does not start"
            time.sleep(0.05)
        port, path = file.read_text().split("\n")[:2]
        return f"ws://127.0.0.1:{port}{path}"

    async def _connect(self, address: str) -> None:
        self._http = aiohttp.ClientSession()
        self._socket = await self._http.ws_connect(address, max_msg_size=0)
        self._reader = self._loop.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                if future := self._replies.pop(said["id"], None):
                    future.set_result(said)
            elif tab := self._tabs.get(said.get("sessionId", "")):
                tab.happened(said["method"], said["params"])
        for future in self._replies.values():
            future.set_exception(ConnectionError("the browser has gone"))

    def call(self, method: str, session: str = "", **parameters: Any) -> Any:
        """One command, and its result."""
        return self._loop.run_until_complete(self._call(method, session, parameters))

    async def _call(self, method: str, session: str, parameters: dict[str, Any]) -> Any:
        number = next(self._numbers)
        future = self._replies[number] = self._loop.create_future()
        message = {"id": number, "method": method, "params": parameters}
        await self._socket.send_json({**message, "sessionId": session} if session else message)
        async with asyncio.timeout(SECONDS):
            said = await future
        assert "error" not in said, (method, said["error"])
        return said["result"]

    def rest(self, seconds: float) -> None:
        """Lets events come in."""
        self._loop.run_until_complete(asyncio.sleep(seconds))

    def open(self, address: str = "about:blank", **settings: Any) -> Tab:
        """A tab of its own profile; `settings` as of `Tab.look_as`."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self._tabs[session] = Tab(self, session, context)
        for domain in ("Page", "Runtime", "Log"):
            tab.call(f"{domain}.enable")
        tab.call("Emulation.setScrollbarsHidden", hidden=True)
        if settings:
            tab.look_as(**settings)
        if address != "about:blank":
            tab.go(address)
        return tab

    def close(self) -> None:
        """Ends the connection, not the process."""

        async def end() -> None:
            await self._socket.close()
            await self._reader
            await self._http.close()

        self._loop.run_until_complete(end())
        self._loop.close()


class Tab:
    """A page that is open."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self.browser = browser
        self._session = session
        self._context = context
        self.complaints: list[str] = []
        self.requests: list[str] = []
        """Addresses that were asked for, once `watch_requests` was called."""

    def call(self, method: str, **parameters: Any) -> Any:
        return self.browser.call(method, self._session, **parameters)

    def close(self) -> None:
        """Closes it, and forgets its profile."""
        self.browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def happened(self, method: str, told: dict[str, Any]) -> None:
        """An event of the protocol."""
        if method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and told["entry"]["source"] in (
            "security",
            "violation",
            "javascript",
        ):
            self.complaints.append(told["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])

    def watch_requests(self) -> None:
        self.call("Network.enable")

    def look_as(
        self, width: int = 1440, height: int = 900, *, dark: bool = False, still: bool = False,
        scripts: bool = True, scale: float = 1.0,
    ) -> None:  # fmt: skip
        """What kind of screen and person the page sees."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)

    def go(self, address: str) -> None:
        """Goes there, and returns once it answers."""
        told = self.call("Page.navigate", url=address)
        assert not told.get("errorText"), told

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are waited for."""
        told = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def text(self, selector: str) -> str:
        """What an element says."""
        return str(self.run(f"document.querySelector({selector!r})?.textContent ?? ''"))

    def html(self) -> str:
        """The document as it is, for where no script may run; empty while another one is on its way."""
        try:
            root = self.call("DOM.getDocument", depth=0)["root"]["nodeId"]
            return str(self.call("DOM.getOuterHTML", nodeId=root)["outerHTML"])
        except AssertionError:
            return ""

    def until(self, expression: str, seconds: float = SECONDS) -> Any:
        """The first value of the expression that is true."""
        deadline = time.monotonic() + seconds
        # A page on its way may not have what is looked at, or goes while it is looked at.
        guarded = f"(() => {{ try {{ return {expression} }} catch {{ return null }} }})()"
        while not (value := self.run(guarded)):
            assert time.monotonic() < deadline, (
                expression,
                self.complaints,
                self.run("document.body?.innerText"),
            )
            self.browser.rest(0.05)
        return value

    def key(self, key: str, code: int = 0, **more: Any) -> None:
        """Presses and lets go of a key."""
        text = key if len(key) == 1 else {"Enter": "\r"}.get(key, "")
        known = {"windowsVirtualKeyCode": code or KEYS.get(key, 0), **more}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, **known)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **known)

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.call("Input.insertText", text=text)

    def names(self) -> list[tuple[str, str]]:
        """(role, name) of all that a screen reader comes across."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (each["role"]["value"], each.get("name", {}).get("value", ""))
            for each in nodes
            if not each.get("ignored")
        ]

    def shot(self, path: Path, *, whole: bool = False) -> None:
        """A picture of what is to be seen, or of the whole page."""
        told = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))


KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38}
KEYS |= {"ArrowRight": 39, "ArrowDown": 40}


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser, ended at the end."""
    with tempfile.TemporaryDirectory(prefix="kvs", ignore_cleanup_errors=True) as folder:
        profile = Path(folder)
        process = subprocess.Popen(
            [chromium(), *FLAGS, f"--user-data-dir={profile}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            browser = Browser(process, profile)
            try:
                yield browser
            finally:
                browser.close()
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
