"""Who may see the page and act on it: the checks that every request passes before anything else.

- The Host must be an address or a name of this machine, so that no foreign name leads a browser here (DNS rebinding).
- The first visit brings the token of the printed address, and gets a cookie that scripts and other sites cannot use.
- A change is a POST with that cookie, the page's own Origin, and a second token that only the page can read.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",  # Plotly styles its pictures so; no text of a journal becomes HTML
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_ENCODED = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]


@dataclass(frozen=True)
class Keys:
    """The secrets of one server, all derived from ``token``: they stay the same if it starts again with it.

    Attributes:
        token: Stands in the printed address.
        cookie: What a browser keeps after its first visit.
        act: What the page sends with every change.
    """

    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def cookie(self) -> str:
        return self._derived("cookie")

    @property
    def act(self) -> str:
        return self._derived("act")

    def _derived(self, purpose: str) -> str:
        return hmac.new(self.token.encode(), purpose.encode(), hashlib.sha256).hexdigest()


class DashboardGuard:
    """The outermost layer of the server: lets a request in, or answers it.

    Args:
        app: The pages.
        keys: The secrets.
        port: The port of the server; cookies of other servers on this machine have other names.
        host: The address on which the server listens.
    """

    def __init__(self, app: ASGIApp, keys: Keys, port: int, host: str) -> None:
        self._app, self._keys = app, keys
        self._cookie = f"elastune-{port}"
        self._port = port
        self._names = {"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
        self._wide = not _is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        answer = self._refusal(Request(scope))
        if answer is not None:
            await answer(scope, receive, _with_headers(send))
        else:
            await self._app(scope, receive, _with_headers(send))

    def _refusal(self, request: Request) -> Response | None:
        """The answer to a request that is not let in; None for one that is."""
        host = request.headers.get("host", "")
        if not self._is_own(host):
            return _no(421, "this server has no such name: use the printed address")
        if request.method not in ("GET", "HEAD", "POST"):
            return _no(405, "GET or POST")
        token = request.query_params.get("token")
        if token is not None and request.method == "GET" and request.url.path == "/":
            if not _same(token, self._keys.token):
                return _no(403, "the token is not that of this server: use the address that it printed last")
            answer = RedirectResponse("/", status_code=303)
            answer.set_cookie(self._cookie, self._keys.cookie, httponly=True, samesite="strict", path="/")
            return answer
        if not _same(request.cookies.get(self._cookie, ""), self._keys.cookie):
            return _no(403, "open the address that elastune dashboard printed: it has the token")
        if request.method == "POST":
            if request.headers.get("origin") != f"http://{host}":
                return _no(403, "a change must come from the page itself: its Origin is another one")
            if not _same(request.headers.get("x-elastune-token", ""), self._keys.act):
                return _no(403, "a change needs the page's token: load the page again")
        return None

    def _is_own(self, host: str) -> bool:
        """Whether the Host header names this machine: by address, or by one of its own names."""
        try:
            parts = urlsplit(f"//{host}")
            name, port = (parts.hostname or "").lower(), parts.port
        except ValueError:
            return False
        if (port or 80) != self._port or parts.path or "@" in host:
            return False
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return address.is_loopback or self._wide


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())


def _no(status: int, why: str) -> Response:
    return PlainTextResponse(f"{why}\n", status_code=status)


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = message.get("headers", [])
            there = {name for name, _ in given}  # a file of a library says that browsers may keep it
            own = [(name, value) for name, value in _ENCODED if name not in there]
            message = {**message, "headers": [*given, *own]}
        await send(message)

    return sending
