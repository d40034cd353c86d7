"""For tests of the dashboard: a small HTTP client, a server on made-up jobs, and a real browser."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from holdfast.dashboard.job_source import Json, ShownJob, now_of, stacks_of
from holdfast.dashboard.web_app import serve
from holdfast.extensions.dashboard.credentials import Credentials
from holdfast.listening import bind_named
from holdfast.protocol.options import Endpoint
from holdfast.protocol.rank_progress import JobView, StacksView
from tests.support.limits import limit_s

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
AXE = Path(__file__).parent / "axe" / "axe.min.js"


class Visitor:
    """A client of one dashboard. `link`: its login link, or another address there."""

    def __init__(self, link: str) -> None:
        self.link = link
        self.host = urlsplit(link).netloc
        self.cookie = ""

    def ask(self, method: str, path: str, body: str = "", **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.host, timeout=limit_s(20))
        sent = {"Cookie": self.cookie} if self.cookie else {}
        try:
            connection.request(method, path, body or None, sent | headers)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> bytes:
        status, _, body = self.ask("GET", path)
        assert status == 200, (status, body)
        return body

    def login(self) -> int:
        parts = urlsplit(self.link)
        status, headers, _ = self.ask("GET", f"{parts.path}?{parts.query}")
        self.cookie = headers.get("set-cookie", self.cookie).partition(";")[0]
        return status

    def act(self, path: str, **action: Any) -> tuple[int, Any]:
        status, _, body = self.ask("POST", path, json.dumps(action), Origin=f"http://{self.host}")
        return status, json.loads(body)

    @contextlib.contextmanager
    def stream(self, path: str) -> Iterator[Iterator[tuple[str, Any]]]:
        """Server-sent events: kind and data."""
        connection = http.client.HTTPConnection(self.host, timeout=limit_s(20))
        try:
            connection.request("GET", path, headers={"Cookie": self.cookie})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            yield _events(answer)
        finally:
            connection.close()


def _events(answer: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    kind = ""
    while line := answer.readline().decode().rstrip("\n"):
        while line:
            name, _, text = line.partition(": ")
            kind = text if name == "event" else kind
            if name == "data":
                yield kind, json.loads(text)
            line = answer.readline().decode().rstrip("\n")


class MadeUpJob(ShownJob):
    """A job that only the test knows. Assign `view` and `told` to change it."""

    def __init__(self, view: JobView, told: Json, stacks: StacksView | None = None) -> None:
        super().__init__("made-up")
        self.view = view
        self.told = told
        self.stacks_view = stacks
        self.asked: list[tuple[str, str]] = []
        self.about = ""
        self.profiled: Json = {}
        self._read_told: Json | None = None

    def now(self) -> Json:
        return {"whole": True, **now_of(self.view)}

    def read(self) -> bool:
        fresh, self._read_told = self.told is not self._read_told, self.told
        return fresh

    def story(self) -> Json:
        return self.told

    def stacks(self, by: str = "") -> Json:
        assert self.stacks_view is not None
        return {"at": 0.0, "whole": True, **stacks_of(self.stacks_view)}

    def act(self, question: str, about: Mapping[str, Any], *, by: str, within_s: float) -> Json:
        self.asked.append((question, by))
        self.about = about.get("host", "")
        return self.profiled if question == "profile" else {"nodes": 2}


class Served:
    """A dashboard in a thread."""

    def __init__(self, *sources: ShownJob, once: bool = True) -> None:
        self.credentials = Credentials.make(once=once)
        self._sock = bind_named(Endpoint(host="127.0.0.1", port=0), "--port")
        self.address = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self.used = 0
        self._stop: Any = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(list(sources))))
        self._thread.start()
        assert self._ready.wait(limit_s(20))

    def visitor(self) -> Visitor:
        return Visitor(f"{self.address}/login?token={self.credentials.token}")

    def entered(self) -> Visitor:
        """A visitor who has used the login link."""
        made = self.visitor()
        assert made.login() == 303
        return made

    async def _serve(self, sources: list[ShownJob]) -> None:
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()

        async def stopped(_feeds: Any) -> None:
            self._stop = lambda: loop.call_soon_threadsafe(stopping.set)
            self._ready.set()
            await stopping.wait()

        def used() -> None:
            self.used += 1

        await serve(self._sock, self.credentials, sources, on_used=used, until=stopped)

    def close(self) -> None:
        self._stop()
        self._thread.join(limit_s(20))
        self._sock.close()


@contextlib.contextmanager
def served(*sources: ShownJob, once: bool = True) -> Iterator[Served]:
    made = Served(*sources, once=once)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def browsing(link: str, **context: Any) -> Iterator[Any]:
    """A page of a new Chromium, logged in by the link, with `problems` and `requests` that it met."""
    if CHROMIUM is None:
        pytest.skip("no chromium on the PATH (tools/debian.sh installs it)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        page = browser.new_context(**context).new_page()
        page.set_default_timeout(limit_s(10) * 1000)
        page.problems, page.requests = [], []
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("console", lambda said: page.problems.append(said.text) if said.type in ("error", "warning") else None)
        page.on("request", lambda request: page.requests.append(request.url))
        page.goto(link, wait_until="load")
        try:
            yield page
        finally:
            browser.close()


def axe(page: Any) -> list[str]:
    """Serious faults of the page for people who cannot see it as others do."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {each['help']}: {[node['html'][:120] for node in each['nodes']][:3]}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]
