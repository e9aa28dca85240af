"""HTTP calls to a server, each with a deadline.

In: a path and JSON. Out: the JSON of the response. Invariant: a call ends by its deadline whatever the server does
(`gspo/network/http_calls.py`). Every failure is one of two kinds: a `Fault`, worth a retry here or elsewhere, or an
`EngineError`, which a retry would only repeat.
"""

from __future__ import annotations

import http.client
import json
from typing import Any

from gspo.errors import EngineError
from gspo.network.http_calls import HttpCalls

# A response is one completion with its experts. The limit bounds what a faulty server can send.
MOST_BYTES = 1 << 28


class Fault(Exception):
    """A server misbehaved: it is dead, hangs, or returns an invalid response."""


class Client:
    """Calls to one server."""

    def __init__(self, address: str, token: str) -> None:
        self.address = address.removeprefix("http://").rstrip("/")
        self.token = token
        self._calls = HttpCalls(self.address, most_bytes=MOST_BYTES)

    def get(self, path: str, *, timeout_s: float) -> Any:
        return self._call("GET", path, None, timeout_s)

    def post(self, path: str, body: Any = None, *, timeout_s: float, plain: bool = False) -> Any:
        """`plain`: the response is text, not JSON, and is ignored."""
        return self._call("POST", path, body if body is not None else {}, timeout_s, plain)

    def workers(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """The result of a call of the worker extension (`worker.py`), from every worker."""
        response = self.post("/collective_rpc", {"method": method, "args": list(args)}, timeout_s=timeout_s)
        results = response.get("results") if isinstance(response, dict) else None
        if not isinstance(results, list) or not results:
            raise Fault(f"{self.address}: its workers did not respond to {method}")
        return results

    def hang_up(self) -> None:
        """End every running call with a `Fault`."""
        self._calls.hang_up()

    def _call(self, method: str, path: str, body: Any, timeout_s: float, plain: bool = False) -> Any:
        payload = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        try:
            response = self._calls.send(method, path, headers=headers, payload=payload, timeout_s=timeout_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Fault(f"{self.address}{path}: {type(error).__name__}: {error}") from error
        return self._parse(path, response.status, b"" if plain and response.status == 200 else response.body)

    def _parse(self, path: str, status: int, text: bytes) -> Any:
        excerpt = text[:300].decode(errors="replace").strip()
        if status == 401:
            raise EngineError(f"{self.address}: wrong token; set GSPO_SERVE_TOKEN to that of the server")
        if status == 404:
            raise EngineError(f"{self.address}{path}: no such path; start the server with: gspo serve MODEL")
        # 408 (timeout) and 429 (too many requests) are worth a retry.
        if 400 <= status < 500 and status not in (408, 429):
            raise EngineError(f"{self.address}{path}: refused ({status}): {excerpt}")
        if status != 200:
            raise Fault(f"{self.address}{path}: status {status}: {excerpt}")
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise Fault(f"{self.address}{path}: the response is not JSON: {excerpt}") from error
