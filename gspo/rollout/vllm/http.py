"""HTTP calls to a server, each with a deadline.

In: a path and JSON. Out: the JSON of the response. Invariant: a call ends by its deadline whatever the server does (no
response, half a response, a byte a minute). Every failure is one of two kinds: a `Fault`, worth a retry here or
elsewhere, or an `EngineError`, which a retry would only repeat.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from gspo.errors import EngineError

# A response is one completion with its experts. The limit bounds what a faulty server can send.
MOST_BYTES = 1 << 28
CONNECT_S = 10.0


class Fault(Exception):
    """A server misbehaved: it is dead, hangs, or returns an invalid response."""


class Client:
    """Calls to one server."""

    def __init__(self, address: str, token: str) -> None:
        self.address = address.removeprefix("http://").rstrip("/")
        self.token = token
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

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
        with self._lock:
            for connection in self._open:
                _shut_down(connection)

    def _call(self, method: str, path: str, body: Any, timeout_s: float, plain: bool = False) -> Any:
        until = time.monotonic() + timeout_s
        connection = http.client.HTTPConnection(self.address, timeout=min(CONNECT_S, timeout_s))
        try:
            payload = None if body is None else json.dumps(body)
            headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
            # Connecting has a short limit of its own: a host that is gone answers nothing at all.
            connection.connect()
            connection.sock.settimeout(timeout_s)
            with self._deadline(connection.sock, until):
                connection.request(method, path, body=payload, headers=headers)
                response = connection.getresponse()
                text = self._read(response)
            # A connection that was shut down at the deadline may look like a complete response.
            if time.monotonic() >= until:
                raise TimeoutError
        except (OSError, http.client.HTTPException, ValueError) as error:
            late = time.monotonic() >= until
            reason = "TimeoutError: the response took too long" if late else f"{type(error).__name__}: {error}"
            raise Fault(f"{self.address}{path}: {reason}") from error
        finally:
            connection.close()
        return self._parse(path, response.status, b"" if plain and response.status == 200 else text)

    @contextmanager
    def _deadline(self, connection: socket.socket, until: float) -> Iterator[None]:
        """Inside, `hang_up` and the deadline end the call. A socket timeout is not enough: it applies to each read,
        and a server that sends a byte a minute never exceeds it."""
        timer = threading.Timer(until - time.monotonic(), _shut_down, [connection])
        timer.daemon = True
        timer.start()
        with self._lock:
            self._open.add(connection)
        try:
            yield
        finally:
            timer.cancel()
            with self._lock:
                self._open.discard(connection)

    def _read(self, response: Any) -> bytes:
        text: bytes = response.read(MOST_BYTES + 1)
        if response.length and len(text) <= MOST_BYTES:
            raise ValueError(f"the response was truncated, {response.length} bytes before its end")
        if len(text) > MOST_BYTES:
            raise ValueError(f"the response has more than {MOST_BYTES} bytes")
        return text

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


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
