"""Access control of a server that `gspo` started: every request needs the token, whatever its path.

In: a request. Out: the response of vLLM, or 401. Loaded by `vllm serve` as a middleware, because vLLM's own API key
protects only the OpenAI paths, and the others change weights. Invariant: the token comes in an environment variable, so
that no process list shows it.
"""

from __future__ import annotations

import hmac
import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any

TOKEN = "GSPO_SERVE_TOKEN"
PARENT = "GSPO_SERVE_PARENT"
"""Id of the process that started this server. The server exits with it; unset for a server that runs on its own."""


class Guard:
    """The outermost ASGI middleware of the server."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.token = os.environ.get(TOKEN, "")
        if not self.token:
            raise RuntimeError(f"{TOKEN} is not set")
        if os.environ.get(PARENT):
            threading.Thread(target=_exit_with, args=(int(os.environ[PARENT]),), daemon=True).start()

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan" or self._authorized(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"This server needs the token it was started with.\n"})

    def _authorized(self, scope: Mapping[str, Any]) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        # Takes the same time for every wrong token, so that a token cannot be guessed byte by byte.
        return hmac.compare_digest(given, f"Bearer {self.token}".encode())


def _exit_with(parent: int) -> None:
    """Exit when the parent process is gone: a learner that was killed cannot stop its servers."""
    while os.getppid() == parent:
        time.sleep(1)
    # The group, because vLLM's engine and workers are processes of their own.
    os.killpg(os.getpgrp(), signal.SIGTERM)
