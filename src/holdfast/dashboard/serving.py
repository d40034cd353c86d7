"""Serves the dashboard on a listening socket: for `holdfast dashboard`, and for the process beside a coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import uvicorn

from holdfast.dashboard.access import Access
from holdfast.dashboard.feed import JobFeeds
from holdfast.dashboard.job_source import ShownJob
from holdfast.dashboard.web_app import Pages
from holdfast.supervisor.dashboard_host import Credentials

GRACE_S = 1
"""At the end, for requests in progress."""


async def show(
    sock: socket.socket, credentials: Credentials, name: str, folders: Sequence[Path], pid: int | None
) -> None:
    """Serve one job, or all jobs of this user if `name` is empty, until Ctrl-C."""
    source = ShownJob(name, pid=pid)
    for folder in folders:
        source.add_folder(folder)
    await serve(sock, credentials, [source] if name else [])


async def serve(
    sock: socket.socket,
    credentials: Credentials,
    sources: list[ShownJob],
    *,
    on_used: Callable[[], None] = lambda: None,
    until: Callable[[JobFeeds], Awaitable[None]] | None = None,
) -> None:
    """Serve on this listening socket until `until` has returned; by default until a signal. Without sources: all jobs
    of this user."""
    async with asyncio.TaskGroup() as tasks:
        feeds = JobFeeds(tasks, sources, all_jobs=not sources)
        config = uvicorn.Config(
            Access(Pages(feeds).app(), credentials, on_used),
            access_log=False,
            h11_max_incomplete_event_size=16 * 1024,
            http="h11",
            lifespan="off",
            log_level="warning",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
            ws="none",
        )
        server = _Server(config, feeds, signals=until is None)
        ender = tasks.create_task(_end(server, until(feeds))) if until is not None else None
        await server.serve(sockets=[sock])
        feeds.stop()
        if ender is not None:
            ender.cancel()


async def _end(server: uvicorn.Server, ending: Awaitable[None]) -> None:
    await ending
    server.should_exit = True


class _Server(uvicorn.Server):
    """Ends the streams before it waits for the requests in progress: they would end with a traceback each."""

    def __init__(self, config: uvicorn.Config, feeds: JobFeeds, *, signals: bool) -> None:
        super().__init__(config)
        self._feeds = feeds
        self._signals = signals

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals() if self._signals else contextlib.nullcontext():
            yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._feeds.closing.set()
        await super().shutdown(sockets)
