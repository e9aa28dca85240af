"""HTTP requests with a deadline.

In: an address, a path, headers and a payload. Out: status, headers and body of the response. Invariant: a request ends
by its deadline whatever the server does (no response, half a response, a byte a minute), and a response is never larger
than its limit. Redirects are not followed, so the headers reach no other server. Every failure is an `OSError`, an
`http.client.HTTPException` or a `ValueError`; a deadline that passed is a `TimeoutError`.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

CONNECT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Response:
    """A complete response."""

    status: int
    headers: Mapping[str, str]
    """By name in lowercase."""
    body: bytes


class HttpCalls:
    """Requests to one server. Several threads may call it."""

    def __init__(self, address: str, *, most_bytes: int, tls: bool = False) -> None:
        self._address = address
        self._most_bytes = most_bytes
        self._tls = ssl.create_default_context() if tls else None
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    def send(
        self, method: str, path: str, *, headers: Mapping[str, str], payload: bytes | None, timeout_s: float
    ) -> Response:
        """Send one request and read its response."""
        until = time.monotonic() + timeout_s
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._address, timeout=min(CONNECT_S, timeout_s))
        try:
            # Connecting has a short limit of its own: a host that is gone answers nothing at all.
            plain = socket.create_connection((connection.host, connection.port), min(CONNECT_S, timeout_s))
            connection.sock = plain
            with self._deadline(plain, until):
                plain.settimeout(timeout_s)
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls:
                    connection.sock = self._tls.wrap_socket(plain, server_hostname=connection.host)
                connection.request(method, path, body=payload, headers=dict(headers))
                response = connection.getresponse()
                body = self._read(response)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if time.monotonic() >= until:
                raise TimeoutError("the response took too long") from error
            raise
        finally:
            connection.close()
        # A connection that was shut down at the deadline may look like a complete response.
        if time.monotonic() >= until:
            raise TimeoutError("the response took too long")
        named = {name.lower(): value for name, value in response.getheaders()}
        return Response(status=response.status, headers=named, body=body)

    def hang_up(self) -> None:
        """End every running request with an error."""
        with self._lock:
            for connection in self._open:
                _shut_down(connection)

    @contextmanager
    def _deadline(self, connection: socket.socket, until: float) -> Iterator[None]:
        """Inside, `hang_up` and the deadline end the request. A socket timeout is not enough: it applies to each read,
        and a server that sends a byte a minute never exceeds it."""
        # A duplicate, because TLS takes over the descriptor of the connection itself.
        guard = connection.dup()
        timer = threading.Timer(until - time.monotonic(), _shut_down, [guard])
        timer.daemon = True
        timer.start()
        with self._lock:
            self._open.add(guard)
        try:
            yield
        finally:
            timer.cancel()
            with self._lock:
                self._open.discard(guard)
                guard.close()

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        body = response.read(self._most_bytes + 1)
        if response.length and len(body) <= self._most_bytes:
            raise ValueError(f"the response was truncated, {response.length} bytes before its end")
        if len(body) > self._most_bytes:
            raise ValueError(f"the response has more than {self._most_bytes} bytes")
        return body


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
