"""A small HTTP server in a thread of its own, for metrics and health checks.

It has its own event loop, so a stalled scraper does not affect the agent, and a stalled agent does not delay a health
check. It is not http.server, which has a thread per connection and no time limit for a whole request.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

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
