"""Calls to a server, each with a deadline.

In: a path and JSON. Out: the JSON of the answer. Invariant: a call ends by its deadline whatever the server does (no answer,
half an answer, a byte a minute), and what goes wrong is one of two: `Fault`, worth trying again or elsewhere, or an
`EngineError`, which another try would only repeat.
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

MOST_BYTES = 1 << 28
CONNECT_S = 10.0


class Fault(Exception):
    """A server did not do what it should: it is dead, hangs, or answers nonsense."""


class Client:
    """One server's address."""

    def __init__(self, address: str, token: str) -> None:
        self.address = address.removeprefix("http://").rstrip("/")
        self.token = token
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    def get(self, path: str, *, timeout_s: float) -> Any:
        return self._call("GET", path, None, timeout_s)

    def post(self, path: str, body: Any = None, *, timeout_s: float, plain: bool = False) -> Any:
        """`plain`: the answer is words, not JSON, and of no interest."""
        return self._call("POST", path, body if body is not None else {}, timeout_s, plain)

    def workers(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """What every worker answers to a call of the extension (`worker.py`)."""
        answer = self.post("/collective_rpc", {"method": method, "args": list(args)}, timeout_s=timeout_s)
        found = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(found, list) or not found:
            raise Fault(f"{self.address}: no answer of its workers to {method}")
        return found

    def hang_up(self) -> None:
        """End every call that is under way with a `Fault`."""
        with self._lock:
            for line in self._open:
                _hang_up(line)

    def _call(self, method: str, path: str, body: Any, timeout_s: float, plain: bool = False) -> Any:
        until = time.monotonic() + timeout_s
        connection = http.client.HTTPConnection(self.address, timeout=min(CONNECT_S, timeout_s))
        try:
            sent = None if body is None else json.dumps(body)
            headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
            connection.connect()
            connection.sock.settimeout(timeout_s)
            with self._line(connection.sock, until):
                connection.request(method, path, body=sent, headers=headers)
                response = connection.getresponse()
                text = self._read(response)
            if time.monotonic() >= until:
                raise TimeoutError
        except (OSError, http.client.HTTPException, ValueError) as error:
            late = time.monotonic() >= until
            said = "TimeoutError: the answer took too long" if late else f"{type(error).__name__}: {error}"
            raise Fault(f"{self.address}{path}: {said}") from error
        finally:
            connection.close()
        return self._answer(path, response.status, b"" if plain and response.status == 200 else text)

    @contextmanager
    def _line(self, line: socket.socket, until: float) -> Iterator[None]:
        """Inside, `hang_up` and the deadline end the call. (A socket's own timeout does not: a byte a minute keeps within it.)"""
        bell = threading.Timer(until - time.monotonic(), _hang_up, [line])
        bell.daemon = True
        bell.start()
        with self._lock:
            self._open.add(line)
        try:
            yield
        finally:
            bell.cancel()
            with self._lock:
                self._open.discard(line)

    def _read(self, response: Any) -> bytes:
        text: bytes = response.read(MOST_BYTES + 1)
        if response.length and len(text) <= MOST_BYTES:
            raise ValueError(f"the answer was cut off, {response.length} bytes before its end")
        if len(text) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        return text

    def _answer(self, path: str, status: int, text: bytes) -> Any:
        said = text[:300].decode(errors="replace").strip()
        if status == 401:
            raise EngineError(f"{self.address}: wrong token; set GSPO_SERVE_TOKEN to that of the server")
        if status == 404:
            raise EngineError(f"{self.address}{path}: no such path; start the server with: gspo serve MODEL")
        if 400 <= status < 500 and status not in (408, 429):
            raise EngineError(f"{self.address}{path}: refused ({status}): {said}")
        if status != 200:
            raise Fault(f"{self.address}{path}: status {status}: {said}")
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise Fault(f"{self.address}{path}: no JSON: {said}") from error


def _hang_up(line: socket.socket) -> None:
    with suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
