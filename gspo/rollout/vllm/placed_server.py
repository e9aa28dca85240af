"""vLLM servers of a run on the nodes of a Ray cluster.

In: the places that the launcher has reserved, and what a server is started with. Out: a `Process` on another node.
Invariant: the server, its token and its weights are those of a server on this machine. Only the config of the model is
sent, as text; the weights follow over the transfers of `transfer.py`. The server listens on the address of its node,
and ends if the learner does.
"""

from __future__ import annotations

import base64
import json
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from gspo.cluster import connect
from gspo.cluster.host import ProcessHost
from gspo.errors import EngineError
from gspo.rollout.vllm.launch_server import Process, command, environment

START_S = 120.0
"""Seconds that an actor has to start."""
END_S = 15.0


class ServerPlaces:
    """The places for servers."""

    def __init__(self, cluster: Mapping[str, Any]) -> None:
        self._stack = ExitStack()
        self._cluster = cluster
        self._ray = self._stack.enter_context(connect.joined(cluster["address"], namespace=cluster["namespace"]))
        self._group = self._ray.util.get_placement_group(cluster["servers"])

    @property
    def count(self) -> int:
        return int(self._cluster["server_places"])

    def server(self, place: int, folder: Path, *, experts: bool, more: Sequence[str]) -> PlacedServer:
        """A server in a place, for the model whose config is in a folder."""
        host = self._ray.remote(ProcessHost).options(
            num_cpus=1,
            num_gpus=self._cluster["server_gpus"],
            max_concurrency=4,
            **connect.schedule_in(self._ray, self._group, place),
        )
        return PlacedServer(self._ray, host, folder, log=folder / f"server-{place}.log", experts=experts, more=more)


class PlacedServer(Process):
    """A server on another node, in the care of an actor."""

    def __init__(self, ray: Any, host: Any, folder: Path, *, log: Path, experts: bool, more: Sequence[str]) -> None:
        super().__init__(str(folder), log=log, experts=experts, more=more)
        self._ray = ray
        self._host = host
        self._actor: Any = None
        self._ended = threading.Event()

    def start(self) -> None:
        self.stop()
        self._actor, self._ended = self._host.remote(), threading.Event()
        log = self.log.open("ab")
        try:
            about = json.loads(self._ask(self._actor.about.remote()))
            files = {file.name: file.read_text(encoding="utf-8") for file in Path(self.model).glob("*.json")}
            model = self._ask(self._actor.write.remote(json.dumps(files)))
            self.address = f"{about['address']}:{about['port']}"
            _, *arguments = command(
                model, host=about["address"], port=about["port"], experts=self.experts, more=self.more
            )
            given = {
                "arguments": arguments,
                "environment": environment(self.token, {}),
                "folder": model,
                # The server ends its own children then.
                "last_signal": int(signal.SIGTERM),
            }
            self._ask(self._actor.start.remote(json.dumps(given)))
        except self._ray.exceptions.RayError as error:
            log.write(f"{connect.reason(error)}\n".encode())
            log.close()
            self._ended.set()
            return
        threading.Thread(target=self._poll, args=(self._actor, log, self._ended), daemon=True).start()

    @property
    def running(self) -> bool:
        return self._actor is not None and not self._ended.is_set()

    def stop(self) -> None:
        if self._actor is not None:
            with suppress(self._ray.exceptions.RayError):
                self._ray.get(self._actor.end.remote(), timeout=END_S)
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(self._actor)
            self._ended.set()
        self._actor = None

    def _ask(self, reference: Any) -> str:
        return str(self._ray.get(reference, timeout=START_S))

    def _poll(self, actor: Any, log: Any, ended: threading.Event) -> None:
        """Write its output to the log, until it has ended. The actor ends a server that is not polled."""
        with log:
            while not ended.is_set():
                try:
                    report = json.loads(self._ask(actor.poll.remote()))
                except self._ray.exceptions.RayError as error:
                    report = {"output": [], "code": -1}
                    log.write(f"{connect.reason(error)}\n".encode())
                for _, data in report["output"]:
                    log.write(base64.b64decode(data))
                log.flush()
                if report["code"] is not None:
                    ended.set()


def server_places() -> ServerPlaces | None:
    """The places for the servers of this run; None if they run on this machine."""
    cluster = connect.membership()
    if cluster is None or not cluster.get("servers"):
        return None
    try:
        return ServerPlaces(cluster)
    except ValueError as error:  # Ray does not find the placement group
        raise EngineError(f"rollout.engine_options.start: the places of the servers are gone: {error}") from error
