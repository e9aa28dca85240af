"""Servers for this user alone: access control, a listener on loopback, and time limits of connections.

In: an ASGI application and a token. Out: the application's response, or a refusal. Checks, in this order: the host is a
loopback name (against DNS rebinding), no page of another site sends the request (Origin, Sec-Fetch-Site), the body is
not too large, and the request has the token. Invariant: every path, known or not, passes all checks. The dashboard and
the model server are built on it.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError

HOSTS = ("127.0.0.1", "localhost", "[::1]")
MOST_CONNECTIONS = 800
"""Open connections of a server. Below the usual limit of 1,024 open files of a process."""
CROWD = 150
IDLE_S = 8.0
"""Timeout of a connection without a complete request."""
CROWDED_IDLE_S = 2.0
"""The same with more than `CROWD` open connections."""
_FOREIGN = "cross-origin requests are not allowed\n"


class AccessControl:
    """The outermost layer of an application."""

    headers: Mapping[str, str] = {
        "x-content-type-options": "nosniff",
        # Completions must not stay in a cache on disk.
        "cache-control": "no-store",
        "cross-origin-resource-policy": "same-origin",
    }
    """Headers of every response."""
    most_body = 0
    """The largest body of a request, in bytes."""

    def __init__(self, app: Any, token: str) -> None:
        self.app = app
        self.token = token

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
            await self.send(send, *refusal)
        elif self.public(scope["path"]) or same(bearer, self.token):
            await self._forward(scope, receive, send)
        else:
            await self.send(send, *self.unauthorized(scope, bearer))

    def public(self, path: str) -> bool:
        """Whether a path needs no token."""
        return False

    def unauthorized(self, scope: Mapping[str, Any], bearer: str) -> tuple[int, str]:
        """The status and text of the response to a request without the token."""
        return 401, "This server needs the token that it was started with.\n"

    def content(self, status: int, text: str) -> tuple[str, str]:
        """The media type and body of a response by this layer."""
        return "text/plain; charset=utf-8", text

    async def send(self, send: Any, status: int, text: str) -> None:
        """Respond without the application."""
        kind, content = self.content(status, text)
        body = content.encode()
        headers = {"content-type": kind, "content-length": str(len(body)), **self.headers}
        encoded = [(key.encode(), value.encode()) for key, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": encoded})
        await send({"type": "http.response.body", "body": body})

    def _refusal(self, headers: Mapping[str, str]) -> tuple[int, str] | None:
        host = headers.get("host", "")
        # DNS rebinding: a foreign name that resolves to 127.0.0.1 makes a browser treat this server as that site.
        if host.rpartition(":")[0] not in HOSTS and host not in HOSTS:
            return 421, "unknown host\n"
        if headers.get("origin", f"http://{host}") != f"http://{host}":
            return 403, _FOREIGN
        # Browsers set it and scripts cannot; it also covers requests without an Origin, such as images.
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return 403, _FOREIGN
        length = headers.get("content-length", "0")
        # A body that nobody reads, or one without an end, could only occupy the connection.
        if not self.most_body and (length != "0" or "transfer-encoding" in headers):
            return 413, "requests must not have a body\n"
        if "transfer-encoding" in headers:
            return 411, "a request must give the length of its body (Content-Length)\n"
        if not length.isdecimal() or len(length) > 12 or int(length) > self.most_body:
            return 413, f"the body of a request may have at most {self.most_body} bytes\n"
        return None

    async def _forward(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        async def send_with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                extra = [(k.encode(), v.encode()) for k, v in self.headers.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        await self.app(scope, receive, send_with_headers)


def same(given: str, wanted: str) -> bool:
    """Compare in constant time, so that response times leak nothing about a secret."""
    # As bytes, because compare_digest raises an error for text that is not ASCII, and a header may contain any.
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), wanted.encode())


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token if scheme == "Bearer" else ""


def access_token(variable: str, path: Path) -> tuple[str, str, Path | None]:
    """The token of a server that other programs connect to, where they find it, and the file that was written: the
    value of an environment variable, or a new one in a file that only this user can read."""
    if token := os.environ.get(variable):
        return token, f"the token is the value of {variable}", None
    token = secrets.token_urlsafe(32)
    with suppress(FileNotFoundError):
        path.unlink()
    # O_EXCL and the mode at creation: nobody else can have opened the file before the token is in it.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token + "\n")
    return token, f"the token is in {path}", path


def loopback_listener(port: int) -> socket.socket:
    """A listening socket on 127.0.0.1; any free port for 0."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Without it, a port stays taken for a minute after the server stops.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(256)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"--port {port}: cannot listen on this port ({error}); choose another, or leave it out"
        ) from None
    return listener


def server(app: Any, *, response_s: float | None) -> Any:
    """A uvicorn server of an application. `response_s` limits the time from a request to the end of its response."""
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http=_protocol(response_s),
            ws="none",
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=5,
            # Headers that never end would otherwise fill the memory.
            h11_max_incomplete_event_size=16384,
            server_header=False,
        )
    )


def _protocol(response_s: float | None) -> Any:
    """uvicorn's HTTP protocol with timeouts. It has none for incomplete requests and responses that are not read."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class TimeoutProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._since = self.loop.time()
            self._last_state = (self.cycle, False)
            self._timer = self.loop.call_later(CROWDED_IDLE_S, self._check)

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(exc)

        def _check(self) -> None:
            """Abort a connection whose state has not changed for too long."""
            busy = self.cycle is not None and not self.cycle.response_complete
            if (self.cycle, busy) != self._last_state:
                self._since = self.loop.time()
                self._last_state = (self.cycle, busy)
            idle = CROWDED_IDLE_S if len(self.connections) > CROWD else IDLE_S
            limit = response_s if busy else idle
            # A second early, because the next check is a second away.
            if limit is not None and self.loop.time() - self._since > limit - 1:
                # Not `close`, which waits until the client has read what is buffered.
                self.transport.abort()
            else:
                self._timer = self.loop.call_later(1.0, self._check)

    return TimeoutProtocol
