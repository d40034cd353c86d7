"""Shows this agent to others: torchelastic's events, notices, Prometheus metrics, health checks. All of it is off by
default.

    with observing(options, journal, say, node=…, look=…, view=…): run the job

Metrics and health checks are served by a small HTTP server in a thread of its own. It has its own event loop, so a
stalled scraper does not affect the agent, and a stalled agent does not delay a health check. It is not http.server,
which has a thread per connection and no time limit for a whole request. No decision depends on this package.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from holdfast.journal import Journal
from holdfast.listening import bind_named
from holdfast.protocol.errors import MissingPackageError, PortInUseError
from holdfast.protocol.options import Endpoint, RunOptions
from holdfast.protocol.rank_progress import JobView, RankProgress

if TYPE_CHECKING:
    from holdfast.metrics.listeners import Vitals

Look = Callable[[], tuple[RankProgress, ...]]
View = Callable[[], JobView | None]

REQUEST_BYTES_MAX = 8192
REQUEST_S_MAX = 5.0
"""Limit from the connection to the last byte of the answer (s)."""
CONNECTIONS_MAX = 32
"""Number of connections at the same time; a further one replaces the oldest. Silent clients must not keep out the
health check that decides whether a pod lives."""
CLOSE_S_MAX = 1.0


class HttpResponse(NamedTuple):
    status: int
    content_type: str
    body: bytes


Pages = Mapping[str, Callable[[], HttpResponse]]
"""Page functions by path. Called in the server's thread."""


class Server:
    """Serves pages on bound sockets until `close`."""

    def __init__(self, doors: list[tuple[socket.socket, Pages]]) -> None:
        self._doors = doors
        self._connections: dict[asyncio.StreamWriter, None] = {}
        """Open connections, the oldest first."""
        self._began = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-observing", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. Blocks for CLOSE_S_MAX at most; the thread is a daemon."""
        if self._began.wait(CLOSE_S_MAX) and self._loop is not None and self._over is not None:
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(CLOSE_S_MAX)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        servers = [
            await asyncio.start_server(self._connected(pages), sock=sock, limit=REQUEST_BYTES_MAX)
            for sock, pages in self._doors
        ]
        self._began.set()
        await self._over.wait()
        for server in servers:
            server.close()

    def _connected(self, pages: Pages) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(self._connections) >= CONNECTIONS_MAX:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                oldest.transport.abort()
            self._connections[writer] = None
            try:
                async with asyncio.timeout(REQUEST_S_MAX):
                    await _converse(reader, writer, pages)
            except (OSError, TimeoutError):
                pass
            finally:
                self._connections.pop(writer, None)
                writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

        return serve


async def _converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pages: Pages) -> None:
    """Answer one request."""
    from http import HTTPStatus  # only an agent that serves needs it

    try:
        request = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        request = b""
    except asyncio.IncompleteReadError:
        return
    method, answer = _answer(request, pages)
    head = (
        f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\n"
        f"Content-Type: {answer.content_type}\r\nContent-Length: {len(answer.body)}\r\n"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + (b"" if method == "HEAD" else answer.body))
    await writer.drain()


def _answer(request: bytes, pages: Pages) -> tuple[str, HttpResponse]:
    words = request.partition(b"\r\n")[0].decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/"):
        return "", _text(400, "not HTTP, or too long")
    method, target = words[0], words[1].partition("?")[0]
    if method not in ("GET", "HEAD"):
        return method, _text(405, "GET and HEAD only")
    page = pages.get(target)
    if page is None:
        return method, _text(404, f"the pages are {', '.join(sorted(pages))}")
    try:
        return method, page()
    except Exception as error:  # noqa: BLE001 - the answer reports it
        return method, _text(500, f"{type(error).__name__}: {error}")


def _text(status: int, text: str) -> HttpResponse:
    return HttpResponse(status, "text/plain; charset=utf-8", text.encode() + b"\n")


@contextlib.contextmanager
def observing(
    options: RunOptions, journal: Journal, say: Callable[..., None], *, node: str, look: Look, view: View
) -> Iterator[None]:
    """Observe the job while it runs, and report its end. `look` returns the progress of this node's workers, `view`
    the coordinator's view.

    Raises PortInUseError and MissingPackageError before the job starts.
    """
    with contextlib.ExitStack() as stack:
        if options.event_log_handler == "console":
            from holdfast.metrics.listeners import TorchEvents

            journal.listen(TorchEvents(options, lambda line: say(line, prefix="")).heard)
        if options.notify:
            from holdfast.metrics.notices import Notices, Sender

            sender = Sender(options.notify, lambda to, why: journal.write("notice_lost", to=to, why=why))
            stack.callback(sender.close)
            journal.listen(Notices(options.job.run_id, node, sender.send).heard)
        if options.metrics is not None or options.health is not None:
            from holdfast.metrics.listeners import Vitals

            vitals = Vitals(options.job.run_id, node, look, view, journal.fault)
            server = serve(options, vitals, journal, say)
            if server is not None:
                stack.callback(server.close)
            stack.callback(vitals.close)
            journal.listen(vitals.heard)
            vitals.start()
        yield


def serve(options: RunOptions, vitals: Vitals, journal: Journal, say: Callable[..., None]) -> Server | None:
    """Start the server. Returns None if only a variable of torchrun requested a port, and that port is in use."""
    wanted: dict[Endpoint, Pages] = {}
    if options.metrics is not None:
        wanted[options.metrics] = metrics_pages(vitals)
    if options.health is not None:
        wanted[options.health] = {**wanted.get(options.health, {}), **health_pages(vitals)}
    doors: list[tuple[socket.socket, Pages]] = []
    try:
        for place, pages in wanted.items():
            what = [name for name, at in (("metrics", options.metrics), ("health", options.health)) if at == place]
            try:
                sock = bind_named(place, " and ".join(f"--{name}" for name in what))
            except PortInUseError as error:
                if not options.health_if_free or what != ["health"]:
                    raise
                say(f"no health check is served (TORCHELASTIC_HEALTH_CHECK_PORT): {error}")
                continue
            doors.append((sock, pages))
            address = str(Endpoint(host=place.host, port=sock.getsockname()[1]))
            journal.write("serving", what=what, address=address)
            if place.port == 0:
                say(f"{' and '.join(what)} at http://{address}")
    except PortInUseError:
        for sock, _ in doors:
            sock.close()
        raise
    if not doors:
        return None
    server = Server(doors)
    server.start()
    return server


def metrics_pages(vitals: Vitals) -> Pages:
    try:
        from holdfast.metrics.exposition import CONTENT_TYPE, Metrics
    except ModuleNotFoundError as error:
        raise MissingPackageError("--metrics needs prometheus-client: pip install 'holdfast[metrics]'") from error
    metrics = Metrics(lambda: vitals.facts)
    return {"/metrics": lambda: HttpResponse(200, CONTENT_TYPE, metrics.text())}


def health_pages(vitals: Vitals) -> Pages:
    import json

    from holdfast.metrics.listeners import health

    def page(key: str) -> HttpResponse:
        state = health(vitals.facts, time.monotonic())
        return HttpResponse(200 if state[key] else 503, "application/json", json.dumps(state).encode() + b"\n")

    def alive() -> HttpResponse:
        return page("alive")

    return {"/": alive, "/health": alive, "/healthz": alive, "/livez": alive, "/readyz": lambda: page("ready")}
