"""Authentication and security headers of the dashboard.

In: any request. Out: the application's response, or a refusal. Checks, in this order: the host is a loopback name
(against DNS rebinding), no other page sends the request (Origin, Sec-Fetch-Site), the request has no body, and it has
the session token. The page's own files are public: they exchange the one-time key after the `#` of the link for the
token at `/api/session` and keep it in the browser's local storage. A cookie would not do, because a browser sends
cookies to every port of a host, and so to any other program that listens there. Invariant: every path, known or not,
passes all checks.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Mapping
from typing import Any

HOSTS = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Completions must not stay in the browser's cache on disk.
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
NO_KEY = (
    "This page needs the link that 'gspo watch' printed; each link opens one browser. "
    "Each time a link is used, a new one is printed.\n"
)
SESSION = "/api/session"
PUBLIC = ("/", "/page/")
"""The page's own files: this path, and everything below this folder."""


class SessionKeys:
    """The session token and the one-time key of the next link."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.token = secrets.token_urlsafe(32)
        self._once = secrets.token_urlsafe(32)
        self._announce = announce

    @property
    def once(self) -> str:
        """The key of the next link."""
        return self._once

    def exchange(self, key: str) -> bool:
        """Use a key. A valid key is replaced by a new one."""
        if not _same(key, self._once):
            return False
        self._once = secrets.token_urlsafe(32)
        # A used link is worthless in a browser's history or a shell's scrollback.
        self._announce(self._once)
        return True


class Guard:
    """The outermost layer of the application."""

    def __init__(self, app: Any, keys: SessionKeys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Respond to one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        # latin-1 decodes any bytes, and a client may send any.
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        refusal = self._refusal(headers)
        bearer = _bearer(headers)
        if refusal:
            await _send_text(send, *refusal)
        elif _public(scope["path"]) or _same(bearer, self.keys.token):
            await self._forward(scope, receive, send)
        elif scope["path"] == SESSION and scope["method"] == "GET" and self.keys.exchange(bearer):
            await _send_text(send, 200, self.keys.token)
        else:
            await _send_text(send, 401, NO_KEY)

    def _refusal(self, headers: Mapping[str, str]) -> tuple[int, str] | None:
        host = headers.get("host", "")
        # DNS rebinding: a foreign name that resolves to 127.0.0.1 makes a browser treat this server as that site.
        if host.rpartition(":")[0] not in HOSTS and host not in HOSTS:
            return 421, "unknown host\n"
        if headers.get("origin", f"http://{host}") != f"http://{host}":
            return 403, "cross-origin requests are not allowed\n"
        # Browsers set it and scripts cannot; it also covers requests without an Origin, such as images.
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return 403, "cross-origin requests are not allowed\n"
        # No handler reads a body, so one could only occupy the connection.
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return 413, "requests must not have a body\n"
        return None

    async def _forward(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        async def send_with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                extra = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        await self.app(scope, receive, send_with_headers)


def _same(given: str, wanted: str) -> bool:
    """Compare in constant time, so that response times leak nothing about the token."""
    # As bytes, because compare_digest raises an error for text that is not ASCII, and a header may contain any.
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), wanted.encode())


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token if scheme == "Bearer" else ""


def _public(path: str) -> bool:
    page, folder = PUBLIC
    return path == page or path.startswith(folder)


async def _send_text(send: Any, status: int, text: str) -> None:
    body = text.encode()
    headers = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body)), **HEADERS}
    encoded = [(key.encode(), value.encode()) for key, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
