"""Who may ask, and how answers are marked. In: any request. Out: the application's answer, or a refusal.

Checks, in this order: the host is this machine's loopback name (a page elsewhere cannot rebind its name to it), no other
page asks (Origin, Sec-Fetch-Site), the request has no body, and it carries the session's token. The files of the page itself
are the same for everybody and need none: they read the one-time key that the link has behind its `#`, exchange it for the
token at `/api/session`, and keep that in the browser's storage. No cookie holds it, because a browser sends cookies to every
port of a host, and so to whatever other program listens there. Invariant: every path, known or not, goes through all of it.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Mapping
from typing import Any

HOSTS = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
NO_KEY = "This page needs the link that 'gspo watch' printed; each link opens one browser. A new one is printed each time one was used.\n"
SESSION = "/api/session"
PUBLIC = ("/", "/page/")
"""The page's own files: this path, and what is below this folder."""


class SessionKeys:
    """The session's secret, and the one-time key of the next link."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.token = secrets.token_urlsafe(32)
        self._once = secrets.token_urlsafe(32)
        self._announce = announce

    @property
    def once(self) -> str:
        """The key that the next link carries."""
        return self._once

    def exchange(self, key: str) -> bool:
        """Use up a key; there is a new one afterwards."""
        if not _same(key, self._once):
            return False
        self._once = secrets.token_urlsafe(32)
        self._announce(self._once)
        return True


class Guard:
    """The outermost layer of the application."""

    def __init__(self, app: Any, keys: SessionKeys) -> None:
        self.app, self.keys = app, keys

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        refusal, bearer = self._refusal(headers), _bearer(headers)
        if refusal:
            await _plain(send, *refusal)
        elif _public(scope["path"]) or _same(bearer, self.keys.token):
            await self._answer(scope, receive, send)
        elif scope["path"] == SESSION and scope["method"] == "GET" and self.keys.exchange(bearer):
            await _plain(send, 200, self.keys.token)
        else:
            await _plain(send, 401, NO_KEY)

    def _refusal(self, headers: Mapping[str, str]) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if host.rpartition(":")[0] not in HOSTS and host not in HOSTS:
            return 421, "unknown host\n"
        if headers.get("origin", f"http://{host}") != f"http://{host}":
            return 403, "another page may not ask\n"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return 403, "another page may not ask\n"
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return 413, "a request has no body here\n"
        return None

    async def _answer(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        async def marked(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                extra = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        await self.app(scope, receive, marked)


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), wanted.encode())


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token if scheme == "Bearer" else ""


def _public(path: str) -> bool:
    page, folder = PUBLIC
    return path == page or path.startswith(folder)


async def _plain(send: Any, status: int, text: str) -> None:
    body = text.encode()
    headers = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body)), **HEADERS}
    await send({"type": "http.response.start", "status": status, "headers": [(k.encode(), v.encode()) for k, v in headers.items()]})  # fmt: skip
    await send({"type": "http.response.body", "body": body})
