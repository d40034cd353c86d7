"""The dashboard over HTTP: its server, who may come in, its pages and streams.

All addresses are relative, so that a proxy may serve them under any prefix.

/                     the only job's page, or the list of jobs (`jobs` is its data)
compare?run=A&run=B   two runs of that list in numbers
job/NAME/             the page of a job
job/NAME/events       server-sent events: now, story, curve, load_curves; end: the job has ended, and this was all
job/NAME/logs         server-sent events: lines of logs; ?ranks=0-3&generation=2&text=…; end: as above
job/NAME/log/G/R/S    one whole file, as plain text
job/NAME/profile/P/F  one file of a profile
job/NAME/act          POST {"do", "host"}: the command of that name: stacks, save, stop, kill, drain, exclude, readmit;
                      {"do": "profile", "ranks": "0-3", "steps": 5 or "for_s": 5}

A login link carries a token; the browser that opens it gets a cookie. On loopback the token works once: the link is
visible on a screen, in a history, in a log. At any other address it works again, because several people are on call;
requests may carry it as `Authorization: Bearer` too. A POST has to come from our own page (Origin). The content
security policy allows no script or style in the markup, and nothing from another host.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import mimetypes
import os
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.dashboard.feed import CLIENTS_MAX, LAST_BYTES, JobFeed, JobFeeds, LogLines
from holdfast.dashboard.job_source import ShownJob, encoded, jobs_here, summary_of
from holdfast.extensions.dashboard.credentials import Credentials
from holdfast.extensions.profile.messages import ASKED_S_MAX, NAME, profile_request
from holdfast.extensions.save.messages import SAVE_S
from holdfast.protocol.errors import HoldfastError, UsageError
from holdfast.protocol.ranks_text import ranks_of
from holdfast.runtime.running import ASKED_S

STATIC = Path(__file__).parent / "static"
SEND_S_MAX = 30.0
"""A browser that takes nothing for this long is disconnected; it connects again when it reads."""
CLOSE_S_MAX = 0.5
"""Limit for the end of a stream to a browser that takes nothing."""
GRACE_S = 1
"""Limit for requests in progress when the server ends (whole seconds)."""
LOGS_EVERY_S = 0.5
"""Interval of reading the log files for one page."""
BODY_BYTES_MAX = 4096
COMPARED_MAX = 2
"""Number of runs in one comparison."""
ABOUT_A_HOST = ("drain", "exclude", "readmit")
ACTIONS = {"profile": ASKED_S_MAX, "save": SAVE_S, **dict.fromkeys(("stop", "kill", *ABOUT_A_HOST), ASKED_S)}
"""Time for which the page waits for the answer to each action (s)."""
EXCLUDED_S = 3600.0
"""Time for which the page's button excludes a host; the command has an option for it."""


async def show(
    sock: socket.socket, credentials: Credentials, name: str, folders: Sequence[Path], pid: int | None
) -> None:
    """Serve one job, or all jobs of this user if `name` is empty, until Ctrl-C."""
    await serve(sock, credentials, [ShownJob(name, folders, pid=pid)] if name else [])


async def serve(
    sock: socket.socket,
    credentials: Credentials,
    sources: list[ShownJob],
    *,
    on_used: Callable[[], None] = lambda: None,
    until: Callable[[JobFeeds], Awaitable[None]] | None = None,
) -> None:
    """Serve on this listening socket until `until` has returned; by default until a signal.

    Without sources, all jobs of this user are served. `on_used` is called when the login link was used.
    """
    async with asyncio.TaskGroup() as tasks:
        feeds = JobFeeds(tasks, sources)
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


class Action(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a POST: a command's name and what it needs."""

    do: str
    host: str = ""
    ranks: str = ""
    steps: int = 0
    for_s: float = 0.0


class EventStream(Response):
    """Server-sent events until the browser has gone, takes nothing, the messages end, or the server does."""

    def __init__(self, messages: AsyncGenerator[bytes, None], closing: asyncio.Event) -> None:
        super().__init__(media_type="text/event-stream")
        self._messages = messages
        self._closing = closing

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        tasks = [asyncio.ensure_future(each) for each in (self._pump(send), _gone(receive), self._closing.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        # Without this last message uvicorn reports a response that was not completed.
        pump = tasks[0]
        if self._closing.is_set() or (not pump.cancelled() and pump.exception() is None):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S_MAX):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        if not pump.cancelled() and (error := pump.exception()) and not isinstance(error, OSError):
            raise error

    async def _pump(self, send: Send) -> None:
        async with contextlib.aclosing(self._messages) as messages:
            async for message in messages:
                async with asyncio.timeout(SEND_S_MAX):
                    await send({"type": "http.response.body", "body": message, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


Endpoint = Callable[[Request], Awaitable[Response]]


class Pages:
    """The endpoints of one dashboard."""

    def __init__(self, feeds: JobFeeds) -> None:
        self._feeds = feeds
        self._profiling = False
        """Whether a profile is being taken for this dashboard."""
        self._files = {str(path.relative_to(STATIC)): path.read_bytes() for path in STATIC.rglob("*") if path.is_file()}

    def app(self) -> Starlette:
        def on_job(path: str, endpoint: Endpoint, method: str = "GET") -> Route:
            return Route(f"/job/{{name}}/{path}", endpoint, methods=[method])

        return Starlette(
            routes=[
                Route("/", self.first),
                Route("/jobs", self.jobs),
                Route("/compare", self.compare),
                Route("/static/{path:path}", self.static),
                on_job("", self.page),
                on_job("events", self.events),
                on_job("logs", self.logs),
                on_job("log/{generation:int}/{rank:int}/{stream}", self.log),
                on_job("profile/{profile}/{file}", self.profile),
                on_job("act", self.act, "POST"),
            ],
            exception_handlers={HoldfastError: _refusal},
        )

    async def first(self, _request: Request) -> Response:
        if self._feeds.all_jobs:
            return self._html("", "jobs")
        return RedirectResponse(f"./job/{quote(self._feeds.names[0])}/", 303)

    async def jobs(self, _request: Request) -> Response:
        if not self._feeds.all_jobs:
            raise HTTPException(404)
        return _json(await asyncio.to_thread(jobs_here))

    async def compare(self, request: Request) -> Response:
        if not self._feeds.all_jobs:
            raise HTTPException(404)
        found = {each["name"]: each["folder"] for each in await asyncio.to_thread(jobs_here)}
        names = request.query_params.getlist("run")[:COMPARED_MAX]
        if not names or not all(found.get(name) for name in names):
            raise HTTPException(404, "no such run on this machine")
        return _json([await asyncio.to_thread(summary_of, name, found[name]) for name in names])

    async def static(self, request: Request) -> Response:
        name = request.path_params["path"]
        if name not in self._files:
            raise HTTPException(404)
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(self._files[name], media_type=kind, headers={"Cache-Control": "no-cache"})

    async def page(self, request: Request) -> Response:
        await self._feed(request)
        return self._html("../../", "job")

    async def events(self, request: Request) -> Response:
        feed = await self._feed(request)
        if self._feeds.clients >= CLIENTS_MAX:
            return PlainTextResponse(f"{CLIENTS_MAX} browsers are connected\n", 503)
        return EventStream(feed.messages(), self._feeds.closing)

    async def logs(self, request: Request) -> Response:
        feed, query = await self._feed(request), request.query_params
        ranks = frozenset(ranks_of([query["ranks"]] if query.get("ranks") else None))
        if not query.get("generation", "0").isdecimal():
            raise UsageError("generation: a number")
        lines = LogLines(feed.source, ranks, int(query.get("generation", "0")), query.get("text", ""), feed.log_sizes)
        return EventStream(_log_messages(lines, feed), self._feeds.closing)

    async def log(self, request: Request) -> Response:
        feed, wanted = await self._feed(request), request.path_params
        key = (wanted["generation"], wanted["rank"], wanted["stream"])
        for file in feed.source.log_files():
            if (file.generation, file.rank, file.stream) == key:
                with contextlib.suppress(OSError):
                    content = await asyncio.to_thread(_content, file.path)
                    return StreamingResponse(content, media_type="text/plain; charset=utf-8")
        raise HTTPException(404, "no such log on this machine")

    async def profile(self, request: Request) -> Response:
        feed, wanted = await self._feed(request), request.path_params
        path = feed.source.profile_file(wanted["profile"], wanted["file"])
        if path is None:
            raise HTTPException(404, "no such file on this machine")
        kind = "text/plain; charset=utf-8" if path.suffix == ".txt" else "application/octet-stream"
        return FileResponse(path, media_type=kind, filename=path.name, content_disposition_type="inline")

    async def act(self, request: Request) -> Response:
        feed, body = await self._feed(request), b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY_BYTES_MAX:
                raise HTTPException(413)
        try:
            action = msgspec.json.decode(body, type=Action)
        except msgspec.MsgspecError as error:
            raise UsageError(f"not an action: {error}") from None

        by = f"holdfast {action.do}, from the dashboard at {request.client.host if request.client else '?'},"
        if action.do == "stacks":
            return _json(await asyncio.to_thread(feed.source.stacks, by))
        if action.do not in ACTIONS:
            raise UsageError(f"{action.do!r} is not an action")
        about: dict[str, object] = {}
        if action.do == "profile":
            ranks, name = ranks_of([action.ranks], "ranks"), time.strftime(NAME)
            about = profile_request(ranks, action.steps, action.for_s or None, name)
        elif action.do in ABOUT_A_HOST:
            about = {"host": action.host, "for_s": EXCLUDED_S}
        return _json(await self._ask(feed, action.do, by, about))

    async def _ask(self, feed: JobFeed, question: str, by: str, about: dict[str, object]) -> dict[str, Any]:
        ask = partial(feed.source.act, question, about, by=by, within_s=ACTIONS[question])
        if question != "profile":
            return await asyncio.to_thread(ask)
        if self._profiling:  # each waits in a thread for minutes, and asyncio has few threads
            raise UsageError("this page takes one profile at a time; `holdfast profile` takes more")
        self._profiling = True
        try:
            return await asyncio.to_thread(ask)
        finally:
            self._profiling = False

    async def _feed(self, request: Request) -> JobFeed:
        feed = await self._feeds.feed(request.path_params["name"])
        if feed is None:
            raise HTTPException(404, "no such job on this machine")
        return feed

    def _html(self, root: str, page: str) -> Response:
        text = self._files["index.html"].decode().replace("{root}", root).replace("{page}", page)
        return Response(text, media_type="text/html")


def _content(path: Path) -> Iterator[bytes]:
    """The file up to its present end; its worker may go on writing. Raises OSError here, not while it is sent."""
    file = open(path, "rb")  # noqa: SIM115 - the generator closes it
    size_bytes = os.fstat(file.fileno()).st_size

    def chunks(left_bytes: int) -> Iterator[bytes]:
        with file:
            while chunk := file.read(min(left_bytes, LAST_BYTES)):
                left_bytes -= len(chunk)
                yield chunk

    return chunks(size_bytes)


async def _log_messages(lines: LogLines, feed: JobFeed) -> AsyncGenerator[bytes, None]:
    """Server-sent events with new lines, until the job has ended and everything was sent."""
    while True:
        ended = feed.ended  # read before the files: what is written until then is sent
        news = await asyncio.to_thread(lines.read)
        if ended and news is None:
            yield b"event: end\ndata: {}\n\n"
            return
        yield b"data: " + encoded(news) + b"\n\n" if news is not None else b":\n\n"
        await asyncio.sleep(LOGS_EVERY_S)


def _json(value: Any, status: int = 200) -> Response:
    return Response(encoded(value), status, media_type="application/json")


async def _refusal(_request: Request, error: Exception) -> Response:
    """An error of the caller or of the job, as the command would print it."""
    assert isinstance(error, HoldfastError)
    return _json({"code": error.code, "error": str(error)}, 409)


# --- who may come in --------------------------------------------------------------------------------------------------

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LOGIN = "/login"
COOKIE_HEADER_BYTES_MAX = 64 * 1024
"""Limit of the Cookie header. It is generous: browsers send the cookies of all pages of this host, whatever their
port."""
DENIED = (
    "This dashboard needs its login link.\n\n"
    "The link is in the first lines of the job's output; on loopback it works once.\n"
    "`holdfast dashboard` on any node of the job prints another one.\n"
)


class Access:
    """ASGI middleware in front of everything. `on_used` is called when the link was used and works no more."""

    def __init__(self, app: ASGIApp, credentials: Credentials, on_used: Callable[[], None]) -> None:
        self._app = app
        self._credentials = credentials
        self._token = credentials.token
        self._on_used = on_used

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._answer(Request(scope))
        await (answer or self._app)(scope, receive, send_with_headers)

    def _answer(self, request: Request) -> Response | None:
        """The answer to a request that is not passed on; None: it may pass."""
        if request.url.path.endswith(LOGIN) and request.method == "GET":
            return self._login(request)
        if not (self._has_cookie(request.headers) or self._has_token(request.headers)):
            return PlainTextResponse(DENIED, 401)
        if request.method not in ("GET", "HEAD") and not from_own_page(request.headers):
            return PlainTextResponse("this request does not come from a page of this dashboard\n", 403)
        return None

    def _login(self, request: Request) -> Response:
        if self._is_token(request.query_params.get("token", "")):
            if self._credentials.once:
                self._token = ""
                self._on_used()
        elif not self._has_cookie(request.headers):
            return PlainTextResponse(DENIED, 401)
        # Relative, and a cookie without a path: behind a proxy we do not know our prefix.
        answer = RedirectResponse("./", 303)
        name, value = self._credentials.cookie()
        answer.set_cookie(name, value, path=None, httponly=True, samesite="lax")
        return answer

    def _has_cookie(self, headers: Headers) -> bool:
        name, value = self._credentials.cookie()
        sent = cookie_of(headers.get("cookie", ""), name)
        return hmac.compare_digest(sent.encode(), value.encode())

    def _has_token(self, headers: Headers) -> bool:
        kind, _, token = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and not self._credentials.once and self._is_token(token)

    def _is_token(self, token: str) -> bool:
        return bool(self._token) and hmac.compare_digest(token.encode(), self._token.encode())


def cookie_of(header: str, name: str) -> str:
    """The value of our cookie; empty: there is none.

    Anybody who reaches the port can send this header, so its length and the work for each byte are bounded:
    http.cookies takes seconds for some headers of 64 kB.
    """
    if len(header) > COOKIE_HEADER_BYTES_MAX:
        return ""
    for each in header.split(";"):
        key, _, value = each.partition("=")
        if key.strip() == name:
            return value.strip()
    return ""


def from_own_page(headers: Headers) -> bool:
    """Whether a page of this dashboard sent the request.

    A proxy may have changed Host. Another site's page cannot set X-Forwarded-Host, and the cookie is not sent with its
    requests either (SameSite).
    """
    origin = urlsplit(headers.get("origin", ""))
    hosts = {headers.get("host", ""), headers.get("x-forwarded-host", "")} - {""}
    return origin.scheme in ("http", "https") and origin.netloc in hosts
