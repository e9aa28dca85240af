"""A dashboard of its own for a test: a real process, a real socket."""

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
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class ServedHost:
    """`gspo watch` in a process, asked over HTTP."""

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
        raise AssertionError("gspo watch ended")

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def ask(self, path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None, body: bytes | None = None) -> Answer:  # fmt: skip
        """One request, with nothing but the headers given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body=body, headers=dict(headers or {}))
            response = connection.getresponse()
            return Answer(status=response.status, headers=dict(response.getheaders()), body=response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        """A request of a page that may ask."""
        if not self.token:
            self.token = self.exchange(self.link).body.decode()
            self.link = self.next_link()
        return self.ask(path, headers={**self.allowed, **headers})

    def exchange(self, link: str, *, method: str = "GET") -> Answer:
        """What the page does first with the key in its link."""
        return self.ask(
            "/api/session", method=method, headers={"Authorization": f"Bearer {link.partition('#key=')[2]}"}
        )

    @property
    def allowed(self) -> dict[str, str]:
        """The header of a request that may be made."""
        return {"Authorization": f"Bearer {self.token}"}


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., ServedHost]]:
    """Starts dashboards and ends them after the tests of a file."""
    with ExitStack() as stack:

        def start(*runs: Path, env: Mapping[str, str] | None = None) -> ServedHost:
            command = [sys.executable, "-m", "gspo.cli", "watch", *map(str, runs)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return ServedHost(process)

        yield start
