"""A fake vLLM server that works, or fails in a chosen way. It reads weights from files and reports their digest."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from gspo.rollout.vllm.weights import digest

STOP = 1


class FakeVllm:
    """`fault` is what goes wrong with completions, after the first `after`; `sync_fault` what goes wrong with
    weights."""

    def __init__(self, *, fault: str = "", after: int = 0, sync_fault: str = "") -> None:
        self.fault = fault
        self.after = after
        self.sync_fault = sync_fault
        self.label = "default"
        self.received = ""
        self.asked: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True
        self.server.handle_error = lambda *args: None  # type: ignore[method-assign]  # clients disconnect
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def faulty(self) -> str:
        return self.fault if len(self.asked) > self.after else ""

    def respond(self, path: str, body: dict[str, Any]) -> Any:
        self.calls.append(path)
        if path == "/weight_info":
            return {"weight_version": self.label}
        if path == "/collective_rpc":
            return {"results": [self.received] if body["method"] == "gspo_received" else ["True"]}
        if path == "/update_weights" and self.sync_fault != "nothing applied":
            self._take(Path(body["update_info"]["path"]))
        if path == "/finish_weight_update":
            self.label = body.get("weight_version", self.label)
        return {}

    def _take(self, path: Path) -> None:
        tensors = load_file(path)
        if self.sync_fault == "a tensor dropped":
            tensors.popitem()
        self.received = digest(tensors.items())

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        """Tokens that depend only on the seed, with a stop token."""
        self.asked.append(body)
        settings = body["sampling_params"]
        length = min(settings["max_tokens"], 3 + settings["seed"] % 5)
        ids = [2 + (settings["seed"] + i) % 7 for i in range(length)]
        stopped = length < settings["max_tokens"]
        if stopped:
            ids[-1] = STOP
        choice = {
            "index": 0,
            "token_ids": ids,
            "finish_reason": "stop" if stopped else "length",
            "logprobs": {"content": [{"token_id": i, "logprob": -1.0} for i in ids]},
            "weight_versions": [{"version": self.label, "start": 0, "end": length}],
        }
        return {"choices": [_corrupt(choice, self.faulty)][: 0 if self.faulty == "no choice" else 1]}


def _corrupt(choice: dict[str, Any], fault: str) -> dict[str, Any]:
    content = choice["logprobs"]["content"]
    changes: dict[str, dict[str, Any]] = {
        "log-prob missing": {"logprobs": {"content": content[:-1]}},
        "log-prob NaN": {"logprobs": {"content": [{"logprob": float("nan")}, *content[1:]]}},
        "token missing": {"token_ids": choice["token_ids"][:-1], "logprobs": {"content": content[:-1]}},
        "aborted": {"finish_reason": "abort"},
        "other weights": {"weight_versions": [{"version": "somebody's", "start": 0, "end": 1}]},
        "no versions": {"weight_versions": None},
        "text for tokens": {"token_ids": ["a"] * len(content)},
    }
    return choice | changes.get(fault, {})


def _handler(fake: FakeVllm) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            if fake.faulty == "stopped":
                time.sleep(60)
            self._send(200, b"" if self.path == "/health" else json.dumps(fake.respond(self.path, {})).encode())

        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            text = self.rfile.read(size)
            if len(text) < size:  # the client has disconnected
                return
            body = json.loads(text)
            path = self.path.partition("?")[0]
            if path != "/inference/v1/generate":
                if path == "/update_weights" and fake.sync_fault == "hangs":
                    time.sleep(60)
                if path == "/update_weights" and fake.sync_fault == "dies":
                    self.connection.close()
                    return
                self._send(*_response(fake, path, body))
                return
            text = json.dumps(fake.completion(body)).encode()
            if fake.faulty in ("hangs", "stopped"):
                time.sleep(60)
            elif fake.faulty == "dies":
                self.connection.close()
            elif fake.faulty == "half a body":
                self._send(200, text, cut=len(text) // 2)
            elif fake.faulty.startswith("status"):
                self._send(int(fake.faulty.split()[1]), b"out of luck")
            elif fake.faulty == "garbage":
                self._send(200, b"<html>hello</html>")
            else:
                self._send(200, text)

        def _send(self, status: int, text: bytes, cut: int | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text[:cut])
            if cut is not None:
                self.close_connection = True

    return Handler


def _response(fake: FakeVllm, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    if path == "/update_weights" and fake.sync_fault == "status 500":
        return 500, b"no"
    return 200, json.dumps(fake.respond(path, body)).encode()
