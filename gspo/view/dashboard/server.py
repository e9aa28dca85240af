"""The dashboard server, `gspo watch`.

In: run directories. Out: a page on 127.0.0.1, until Ctrl-C. Only GET is implemented, so requests cannot change
anything. Invariant: it listens on loopback only, holds a bounded number of connections for a bounded time, and reads
the run directory from its own process, so it does not disturb training.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gspo.errors import panics_as_errors
from gspo.network.loopback import loopback_listener, server
from gspo.view.dashboard import handlers
from gspo.view.dashboard.guard import Guard, SessionKeys
from gspo.view.dashboard.watchlist import NAME, WatchedRun, Watchlist

PAGE = Path(__file__).parent / "page"
FILES = {
    "style.css": "text/css",
    "chart.js": "text/javascript",
    "tokens.js": "text/javascript",
    "evaluation.js": "text/javascript",
    "app.js": "text/javascript",
}
RESPONSE_S = 30.0
"""Timeout of a response that the client does not read."""


def watch(paths: Sequence[str | Path], *, port: int = 0, ready: Callable[[str], None] = print) -> int:
    """Serve the page until interrupted; `ready` receives the lines to print for the user."""
    watchlist = Watchlist(paths)
    listener = loopback_listener(port)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    keys = SessionKeys(announce=lambda key: ready(f"opened; for another browser: {address}/#key={key}"))
    app = application(watchlist, keys)
    forward = f"ssh -L {address.rpartition(':')[2]}:{address[7:]} HOST"
    ready(f"{len(watchlist.runs)} {'run' if len(watchlist.runs) == 1 else 'runs'} at {address}/#key={keys.once}")
    ready(f"from another machine: {forward}, then open the same link there. Ctrl-C stops the server.")
    with contextlib.suppress(KeyboardInterrupt):
        server(app, response_s=RESPONSE_S).run(sockets=[listener])
    return 0


def application(watchlist: Watchlist, keys: SessionKeys) -> Guard:
    """The application behind the guard."""
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    def watched(request: Any) -> WatchedRun:
        name = request.path_params["run"]
        # Looked up in the list, never used as a path.
        if not NAME.fullmatch(name) or name not in watchlist.runs:
            raise handlers.NotFoundError(f"no run {name[:64]!r}")
        return watchlist.runs[name]

    def encode(handler: Callable[[Any], Any], request: Any) -> bytes:
        with panics_as_errors():
            return handlers.encode(handler(request))

    def route(path: str, handler: Callable[[Any], Any]) -> Route:
        async def respond(request: Any) -> Response:
            try:
                # In a thread: a handler reads files and would block the event loop for all other requests.
                body = await asyncio.to_thread(encode, handler, request)
            except handlers.NotFoundError as error:
                return Response(f"not found: {error}\n", 404, media_type="text/plain")
            except handlers.BadQueryError as error:
                return Response(f"{error}\n", 400, media_type="text/plain")
            except Exception as error:
                # Only a number, which is also printed on the terminal: a traceback may contain private data.
                number = secrets.token_hex(4)
                print(f"gspo watch: error {number}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                return Response(f"error {number}: see the terminal of gspo watch\n", 500, media_type="text/plain")
            # The page polls. An unchanged response costs no transfer and no redraw.
            etag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
            if request.headers.get("if-none-match") == etag:
                return Response(status_code=304, headers={"etag": etag})
            return Response(body, media_type="application/json", headers={"etag": etag})

        return Route(path, respond, methods=["GET"])

    async def index(request: Any) -> Response:
        return Response((PAGE / "index.html").read_bytes(), media_type="text/html; charset=utf-8")

    async def file(request: Any) -> Response:
        name = request.path_params["name"]
        # A fixed list: whatever a URL contains, it never becomes a path.
        if name not in FILES:
            return Response("not found\n", 404, media_type="text/plain")
        return Response((PAGE / name).read_bytes(), media_type=f"{FILES[name]}; charset=utf-8")

    def number(request: Any, name: str) -> int:
        text = request.path_params[name]
        if not (text.isascii() and text.isdecimal() and len(text) <= 9):
            raise handlers.NotFoundError(f"{name} {text[:20]!r}")
        return int(text)

    def place(request: Any) -> tuple[int, int, int]:
        return number(request, "step"), number(request, "group"), number(request, "sample")

    def completion(request: Any) -> Any:
        return handlers.completion(watched(request), *place(request))

    def evaluation(request: Any) -> Any:
        return handlers.evaluation(watched(request), number(request, "step"), request.query_params)

    def evaluated_completion(request: Any) -> Any:
        return handlers.evaluated_completion(watched(request), *place(request))

    routes = [
        Route("/", index, methods=["GET"]),
        Route("/page/{name}", file, methods=["GET"]),
        route("/api/setup", lambda _: handlers.page_setup()),
        route("/api/runs", lambda _: handlers.runs(watchlist)),
        route("/api/runs/{run}", lambda r: handlers.overview(watched(r), r.query_params)),
        route("/api/runs/{run}/about", lambda r: handlers.about(watched(r))),
        route("/api/runs/{run}/steps/{step}", lambda r: handlers.step(watched(r), number(r, "step"), r.query_params)),
        route("/api/runs/{run}/steps/{step}/{group}/{sample}", completion),
        route("/api/runs/{run}/evaluations/{step}", evaluation),
        route("/api/runs/{run}/evaluations/{step}/{group}/{sample}", evaluated_completion),
    ]
    return Guard(Starlette(routes=routes), keys)
