"""Who may speak to a server that `gspo` started: whoever has the token, whatever the path.

Loaded by `vllm serve` as a middleware, because vLLM's own key guards only the paths of the OpenAI interface, and the others
change weights. The token comes in an environment variable, so that no process list shows it.
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
"""Process that started this server and without which it is not to go on; unset: none."""


class Guard:
    """The outermost layer of the server."""

    def __init__(self, app: Any) -> None:
        self.app, self.token = app, os.environ.get(TOKEN, "")
        if not self.token:
            raise RuntimeError(f"{TOKEN} is not set")
        if os.environ.get(PARENT):
            threading.Thread(target=_end_with, args=(int(os.environ[PARENT]),), daemon=True).start()

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan" or self._knows(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"This server needs the token it was started with.\n"})

    def _knows(self, scope: Mapping[str, Any]) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, f"Bearer {self.token}".encode())


def _end_with(parent: int) -> None:
    """A learner that was killed cannot stop its servers, so they watch it."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpgrp(), signal.SIGTERM)
