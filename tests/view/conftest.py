"""A dashboard process with a real socket for tests."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True, kw_only=True)
class Response:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Dashboard:
    """A `gspo watch` process and requests to it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.link = self.next_link()
        self.port = int(re.search(r":(\d+)/", self.link)[1])  # type: ignore[index]
        self.token = ""

    def next_link(self) -> str:
        assert self.process.stdout
        for line in self.process.stdout:
            if found := re.search(r"http://\S+key=\S+", line):
                return found[0]
        raise AssertionError("gspo watch exited")

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def request(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> Response:
        """Send one request with only the given headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body=body, headers=dict(headers or {}))
            response = connection.getresponse()
            return Response(status=response.status, headers=dict(response.getheaders()), body=response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Response:
        """Send an authenticated GET request."""
        if not self.token:
            self.token = self.exchange(self.link).body.decode()
            self.link = self.next_link()
        return self.request(path, headers={**self.authorization, **headers})

    def exchange(self, link: str, *, method: str = "GET") -> Response:
        """Exchange the key of a link for the token, as the page does."""
        key = link.partition("#key=")[2]
        return self.request("/api/session", method=method, headers={"Authorization": f"Bearer {key}"})

    @property
    def authorization(self) -> dict[str, str]:
        """The header of an authenticated request."""
        return {"Authorization": f"Bearer {self.token}"}


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., Dashboard]]:
    """Starts dashboards and stops them after the tests of a file."""
    with ExitStack() as stack:

        def start(*runs: Path, env: Mapping[str, str] | None = None) -> Dashboard:
            command = [sys.executable, "-m", "gspo.cli", "watch", *map(str, runs)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return Dashboard(process)

        yield start
