"""Who may use the dashboard, and what a browser may do with its pages.

A login link carries a token; the browser that opens it gets a cookie. On loopback the token works once: the link is
on a screen, in a history, in a log. At any other address it works again, for several people are on call; requests may
carry it as `Authorization: Bearer` too. A POST has to come from our own page (Origin). The content security policy
allows no script or style in the markup, and nothing from another host.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.supervisor.dashboard_host import Credentials

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
        try:
            sent = SimpleCookie(headers.get("cookie", "")).get(name)
        except CookieError:
            return False
        return sent is not None and hmac.compare_digest(sent.value.encode(), value.encode())

    def _has_token(self, headers: Headers) -> bool:
        kind, _, token = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and not self._credentials.once and self._is_token(token)

    def _is_token(self, token: str) -> bool:
        return bool(self._token) and hmac.compare_digest(token.encode(), self._token.encode())


def from_own_page(headers: Headers) -> bool:
    """Whether a page of this dashboard sent the request. A proxy may have changed Host; another site's page cannot set
    X-Forwarded-Host, and the cookie is not sent with its requests either (SameSite)."""
    origin = urlsplit(headers.get("origin", ""))
    hosts = {headers.get("host", ""), headers.get("x-forwarded-host", "")} - {""}
    return origin.scheme in ("http", "https") and origin.netloc in hosts
