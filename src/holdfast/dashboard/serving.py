"""Serves the dashboard on a listening socket: for `holdfast dashboard`, and for the process beside a coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
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
    handle_signals: bool = True,
    on_feeds: Callable[[JobFeeds, uvicorn.Server], None] = lambda _feeds, _server: None,
) -> None:
    """Serve on this listening socket until a signal, or until what `on_feeds` was given is asked to stop. Without
    sources: all jobs of this user."""
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
        server = uvicorn.Server(config)
        if not handle_signals:
            server.capture_signals = _no_signals  # type: ignore[method-assign]
        on_feeds(feeds, server)
        await server.serve(sockets=[sock])
        feeds.stop()


@contextlib.contextmanager
def _no_signals() -> Iterator[None]:
    yield
