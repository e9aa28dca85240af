"""A real HTTP server on loopback that plays an OpenAI-compatible endpoint, by a script."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

FENCED = re.compile(
    r"^----- response ([0-9a-f]{16}) begins -----\n(.*)\n----- response \1 ends -----$", re.DOTALL | re.MULTILINE
)


@dataclass
class Action:
    """What the server does with a request."""

    body: Any = None
    """JSON; bytes are sent as they are."""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_s: float = 0.0


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: Any

    @property
    def question(self) -> str:
        return self.body["messages"][0]["content"]

    @property
    def completion(self) -> str:
        """What the judge reads between the fences; it must be there exactly once."""
        (found,) = FENCED.findall(self.question)
        return found[1]


def chat(text: str, finish: str = "stop") -> Action:
    return Action({"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]})


class Endpoint:
    """`script` answers POST requests; the list of models is always there."""

    def __init__(self, script: Callable[[Request], Action]) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.models = ["judge", "reward-model"]
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"endpoint": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    @property
    def posts(self) -> list[Request]:
        with self._lock:
            return [request for request in self.requests if request.method == "POST"]

    def act(self, request: Request) -> Action:
        with self._lock:
            self.requests.append(request)
        if request.method == "GET":
            return Action({"data": [{"id": name} for name in self.models]})
        return self.script(request)

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Endpoint:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # The default of 5 drops connections that are made at the same time, which are then tried again after a second.
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    endpoint: Endpoint

    def do_GET(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _serve(self, body: Any) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        action = self.endpoint.act(Request(self.command, self.path, headers, body))
        time.sleep(action.wait_s)
        data = action.body if isinstance(action.body, bytes) else json.dumps(action.body).encode()
        try:
            self.send_response(action.status)
            for name, value in {"Content-Length": str(len(data)), **action.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass  # the client's deadline has passed

    def log_message(self, format: str, *args: Any) -> None:
        pass
