"""vLLM on servers: one or more servers with the same model, given by address or started by the run.

In: requests. Out: the output of each, or `EngineError`. Invariant: an output is used only if it is complete, valid
and sampled from weights that were sent. If a server fails, another takes its requests, or the same one after it is
back and holds the weights again. A request is tried `TRIES` times, a server of the run is restarted `RESTARTS` times,
and nothing waits longer than its deadline.
"""

from __future__ import annotations

import base64
import itertools
import math
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gspo.activity import Activity, activity
from gspo.errors import EngineError
from gspo.rollout.vllm.experts import pack_served_experts
from gspo.rollout.vllm.host import Check, Request, RequestOutput
from gspo.rollout.vllm.http import Client, Fault
from gspo.rollout.vllm.launch_server import Process
from gspo.rollout.vllm.policy import LearnerPolicy
from gspo.rollout.vllm.transfer import Offer, send
from gspo.rollout.vllm.weights import ADAPTER

TRIES = 4
RESTARTS = 3
PATIENCE = 3
"""Consecutive faults after which a server counts as down even if its health check passes."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Deadlines, in seconds."""

    request_s: float = 600.0
    """For one completion."""
    check_s: float = 5.0
    """Between health checks of busy servers, and for their response."""
    sync_s: float = 300.0
    """For each call of a weight transfer."""
    absent_s: float = 300.0
    """Without any working server; also for the start of a server."""


@dataclass(kw_only=True, eq=False)
class Server:
    """One server and its state."""

    client: Client
    process: Process | None = None
    """None if the run did not start it."""
    up: bool = True
    faults: int = 0
    """Consecutive faults."""
    restarts: int = 0
    gone: bool = False
    """Whether it was restarted too often and is no longer used."""
    labels: set[str] = field(default_factory=set)
    """Weights that it was proved to use."""
    syncing: bool = False
    reviving: Future[None] | None = None


@dataclass(kw_only=True)
class _Job:
    index: int
    request: Request
    tries: int = 0
    avoid: Server | None = None


class ServerHost:
    """A `Host` of several servers."""

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        in_flight: int,
        limits: Limits,
        transfer: str,
        warn: Callable[[str], None],
        experts: bool,
        layers: Sequence[int] = (),
        dtype: str = "",
        folder: Path | None = None,
        adapters: bool = False,
    ) -> None:
        self.servers = list(servers)
        self.in_flight = in_flight
        self.limits = limits
        self.transfer = transfer
        self.adapters = adapters
        """Whether the LoRA adapter is sent as an adapter, which requests then select by its name."""
        self.warn = warn
        self.experts = experts
        self.layers = layers
        self.dtype = dtype
        # Threads for all requests in flight, and for health checks and revivals.
        self._pool = ThreadPoolExecutor(in_flight * len(servers) + len(servers) + 2)
        self.folder = folder
        self.last_fault = "no server was reached"
        self._revival = threading.Lock()
        # Requests of another run on the same server must not have the same ids.
        self._name = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._offer: Callable[[], Offer] | None = None
        self._check: Check | None = None
        self._workers: dict[str, int] = {}
        for server in self.servers:
            self._handshake(server)

    # --- Weights ---

    def label(self) -> str | None:
        labels = {self._label_of(server) for server in self.servers}
        return labels.pop() if len(labels) == 1 and any(s.up for s in self.servers) else None

    def _label_of(self, server: Server) -> str | None:
        """The label of a server's weights; None if it is down or came back without its weights."""
        try:
            label = str(server.client.get("/weight_info", timeout_s=self.limits.check_s)["weight_version"])
        except (Fault, KeyError, TypeError):
            self._down(server, "it does not report which weights it holds")
            return None
        return label if server.up else None

    def sync(self, policy: LearnerPolicy, label: str, check: Check) -> None:
        """Send the policy's weights to all reachable servers. A server that fails is down until it holds them."""
        self._offer = lambda: Offer(policy, label, adapters=self.adapters)
        self._check = check
        offer = self._offer()
        until = time.monotonic() + self.limits.absent_s
        try:
            while True:
                for server in self.servers:
                    if server.up or self._is_back(server):
                        self._try_sync(server, offer)
                if any(s.up for s in self.servers):
                    return
                self._wait_for_any(until)
        finally:
            offer.close()

    def _try_sync(self, server: Server, offer: Offer) -> bool:
        try:
            self._sync_server(server, offer)
        except Fault as fault:
            self.last_fault = str(fault)
            self._down(server, str(fault))
        return server.up

    def _sync_server(self, server: Server, offer: Offer) -> None:
        """Send weights to one server and run the canary. It is up, and its tokens are trusted, only if both pass."""
        assert self._check is not None
        server.up = False
        server.syncing = True
        try:
            server.client.get("/health", timeout_s=self.limits.check_s)
            self._handshake(server)
            workers = self._workers[server.client.address]
            send(offer, server.client, transfer=self.transfer, workers=workers, timeout_s=self.limits.sync_s)
            self._check(lambda requests: [self._ask(server, r, trusted={offer.label}) for r in requests])
            server.labels.add(offer.label)
            server.up = True
            server.faults = 0
        finally:
            server.syncing = False

    def _is_back(self, server: Server) -> bool:
        """Whether a server that was down responds again. It is revived in the background, also during training: that
        touches no weights."""
        with self._revival:
            if server.gone or server.syncing:
                return False
            if server.reviving is None:
                server.reviving = self._pool.submit(self._revive_server, server)
            if not server.reviving.done():
                return False
            revival = server.reviving
            server.reviving = None
        try:
            revival.result()
            return True
        except Fault as fault:
            self.last_fault = str(fault)
        except EngineError as error:
            self.last_fault = str(error)
            server.gone = True
            self.warn(f"vLLM server {server.client.address} is not used any more: {error}")
            if all(s.gone for s in self.servers):
                raise
        return False

    def _revive_server(self, server: Server) -> None:
        """Restart a server that the run started; for any other, wait until it responds."""
        if server.process is not None:
            self._restart(server)
        else:
            time.sleep(min(1.0, self.limits.check_s))
            server.client.get("/health", timeout_s=self.limits.check_s)

    def _handshake(self, server: Server) -> None:
        """Check a server's dtype, count its workers, and start recording experts. It may have been restarted since."""
        address = server.client.address
        types = server.client.workers("gspo_dtype", timeout_s=self.limits.sync_s) if self.dtype else [""]
        if any(found != self.dtype for found in types):
            raise EngineError(
                f"{address}: computes in {types[0]}, the learner in {self.dtype}; start it with: gspo serve MODEL "
                f"--dtype={self.dtype}"
            )
        method = "gspo_watch_routes" if self.experts else "gspo_received"
        found = server.client.workers(method, timeout_s=self.limits.sync_s)
        self._workers[address] = len(found)
        if self.experts and "0" in found:
            raise EngineError(
                f"{address}: cannot report the experts of its completions; start it with: gspo serve MODEL --experts, "
                "or set rollout.engine_options.experts = false"
            )

    def _restart(self, server: Server) -> None:
        assert server.process is not None
        if server.restarts >= RESTARTS:
            raise EngineError(
                f"a vLLM server was restarted {RESTARTS} times and failed again; its log is {server.process.log}"
            )
        server.restarts += 1
        self.warn(f"vLLM server {server.client.address} is restarted ({server.restarts} of at most {RESTARTS} times)")
        server.process.start()
        server.client = Client(server.process.address, server.process.token)
        try:
            server.process.wait_ready(self.limits.absent_s)
        except EngineError as error:
            raise Fault(str(error)) from error

    def _down(self, server: Server, why: str) -> None:
        if server.up:
            self.warn(f"vLLM server {server.client.address} is down: {why}")
        server.up = False
        server.client.hang_up()

    def _wait_for_any(self, until: float) -> None:
        # A server that is starting has a deadline of its own.
        starting = any(s.process is not None and s.reviving is not None for s in self.servers)
        if time.monotonic() > until and not starting:
            raise EngineError(
                f"engine 'vllm': no server has worked for {self.limits.absent_s:g} s; the last fault: {self.last_fault}"
            )
        time.sleep(min(1.0, self.limits.check_s))

    # --- Generation ---

    def generate(self, requests: Sequence[Request], *, routes: bool) -> list[RequestOutput]:
        self._clear_experts()
        batch = _Batch(self, requests, routes)
        try:
            return batch.run()
        except BaseException:
            for server in self.servers:
                server.client.hang_up()  # vLLM aborts requests whose client has disconnected
            raise

    def _ask(
        self, server: Server, request: Request, *, routes: bool = False, trusted: set[str] | None = None
    ) -> RequestOutput:
        """One valid output of one server, sampled from weights in `trusted` (default: those it was proved to use)."""
        name = f"gspo{self._name}x{next(self._numbers)}"
        body = {"request_id": name, "token_ids": list(request.prompt_ids), "sampling_params": request.settings()}
        body |= {"model": ADAPTER} if self.adapters else {}
        body |= {"cache_salt": request.salt} if request.salt else {}
        response = server.client.post("/inference/v1/generate", body, timeout_s=self.limits.request_s)
        if trusted is None:
            self._await_sync(server)
        output = parse_output(response, request, server.labels if trusted is None else trusted, server.client.address)
        return replace(output, experts=self._experts_of(server, name, response)) if routes else output

    def _await_sync(self, server: Server) -> None:
        """Wait for a weight update that began during the request: it decides whether the new tokens are trusted."""
        until = time.monotonic() + self.limits.sync_s
        while server.syncing and time.monotonic() < until:
            time.sleep(0.01)

    def _experts_of(self, server: Server, name: str, response: Any) -> bytes | None:
        encoded = response["choices"][0].get("routed_experts")
        try:
            if encoded is not None:
                return pack_served_experts(encoded, self.layers)
            (texts, *_) = server.client.workers("gspo_take_routes", [name], timeout_s=self.limits.check_s)
            text = texts[0] if isinstance(texts, list) and texts else None
            return base64.b64decode(text, validate=True) if isinstance(text, str) else None
        except (ValueError, TypeError, IndexError, KeyError, EOFError) as error:
            raise Fault(f"{server.client.address}: invalid experts: {type(error).__name__}: {error}") from error

    def _clear_experts(self) -> None:
        """Drop the experts of requests that were never asked for. They would accumulate."""
        for server in self.servers if self.experts else ():
            try:
                if server.up:
                    server.client.post(
                        "/collective_rpc", {"method": "gspo_forget_routes"}, timeout_s=self.limits.check_s
                    )
            except Fault as fault:
                self._down(server, str(fault))

    def close(self) -> None:
        for server in self.servers:
            server.client.hang_up()
            if server.process is not None:
                server.process.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)
        # After a restart, the logs in the folder are worth reading.
        if self.folder is not None and not any(s.restarts for s in self.servers):
            shutil.rmtree(self.folder, ignore_errors=True)


class _Batch:
    """The requests of one call: waiting, running, done."""

    def __init__(self, host: ServerHost, requests: Sequence[Request], routes: bool) -> None:
        self.host = host
        self.routes = routes
        # Reversed, so that `pop` takes the first.
        self.waiting = [_Job(index=i, request=r) for i, r in enumerate(requests)][::-1]
        self.outputs: list[RequestOutput | None] = [None] * len(requests)
        self.doing: Activity
        self.running: dict[Future[RequestOutput], tuple[Server, _Job]] = {}
        self.checks: dict[Future[Any], Server] = {}
        self.checked_at = time.monotonic()
        self.last_up = time.monotonic()

    def run(self) -> list[RequestOutput]:
        with activity("sampling", total=len(self.outputs), unit="completions") as self.doing:
            while any(output is None for output in self.outputs):
                self._dispatch()
                self._collect()
                self._check_health()
                self._revive()
        return [output for output in self.outputs if output is not None]

    def _dispatch(self) -> None:
        """Send waiting requests to the least loaded servers, and a retry to another server than the one that failed."""
        while self.waiting:
            load = Counter(server for server, _ in self.running.values())
            ready = [s for s in self.host.servers if s.up and load[s] < self.host.in_flight]
            if not ready:
                return
            job = self.waiting.pop()
            others = [s for s in ready if s is not job.avoid] or ready
            server = min(others, key=lambda s: load[s])
            job.tries += 1
            future = self.host._pool.submit(self.host._ask, server, job.request, routes=self.routes)
            self.running[future] = (server, job)

    def _collect(self) -> None:
        if not self.running:
            time.sleep(0.05)
            return
        # With a timeout, so that health checks and revivals continue while requests run.
        done, _ = wait(self.running, timeout=min(1.0, self.host.limits.check_s), return_when=FIRST_COMPLETED)
        for future in done:
            self._handle(*self.running.pop(future), future)

    def _handle(self, server: Server, job: _Job, future: Future[RequestOutput]) -> None:
        try:
            self.outputs[job.index] = output = future.result()
            self.doing.done += 1
            self.doing.tokens += len(output.token_ids)
            server.faults = 0
        except Fault as fault:
            self.host.last_fault = str(fault)
            server.faults += 1
            # A health check may pass on a server whose engine is stuck.
            if server.faults >= PATIENCE:
                self.host._down(server, f"{server.faults} faults in a row, the last: {fault}")
            if job.tries >= TRIES:
                raise EngineError(f"engine 'vllm': a request failed {TRIES} times; the last time: {fault}") from fault
            job.avoid = server
            # At the end, which is taken next: a retry must not wait for the whole batch.
            self.waiting.append(job)

    def _check_health(self) -> None:
        """Check busy servers. A server that hangs is found long before the deadline of its requests."""
        for future in [f for f in self.checks if f.done()]:
            server = self.checks.pop(future)
            if future.exception() is not None:
                self.host.last_fault = str(future.exception())
                self.host._down(server, self.host.last_fault)
        if time.monotonic() - self.checked_at < self.host.limits.check_s:
            return
        self.checked_at = time.monotonic()
        busy = {server for server, _ in self.running.values()}
        for server in [s for s in self.host.servers if s.up and s in busy and s not in self.checks.values()]:
            check = self.host._pool.submit(server.client.get, "/health", timeout_s=self.host.limits.check_s)
            self.checks[check] = server

    def _revive(self) -> None:
        """Use servers again that were down, once they respond and hold the weights."""
        if any(s.up for s in self.host.servers):
            self.last_up = time.monotonic()
        elif time.monotonic() - self.last_up > self.host.limits.absent_s:
            raise EngineError(
                f"engine 'vllm': no server has worked for {self.host.limits.absent_s:g} s; the last fault: "
                f"{self.host.last_fault}"
            )
        for server in self.host.servers:
            busy = any(s is server for s, _ in self.running.values())
            if not server.up and not busy and self.host._is_back(server):
                self._sync_again(server)

    def _sync_again(self, server: Server) -> None:
        """Send the weights to a revived server. This happens in the calling thread, not in the background: otherwise
        the learner could change its weights meanwhile."""
        assert self.host._offer is not None
        offer = self.host._offer()
        try:
            if self.host._try_sync(server, offer):
                self.host.warn(f"vLLM server {server.client.address} is back, with the learner's weights")
        finally:
            offer.close()


def parse_output(response: Any, request: Request, labels: set[str], where: str) -> RequestOutput:
    """The output in a response; a `Fault` that says what is wrong if it is invalid."""
    try:
        (choice,) = response["choices"]
        ids = tuple(choice["token_ids"])
        logp = tuple(float(at["logprob"]) for at in choice["logprobs"]["content"])
        reason = choice["finish_reason"]
        spans = tuple((str(s["version"]), int(s["start"])) for s in choice["weight_versions"] or ())
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise Fault(f"{where}: not the response of a vLLM: {type(error).__name__}: {error}") from error
    stopped = bool(ids) and ids[-1] in request.stop_ids
    problems = {
        "no tokens": not ids,
        "invalid token ids": not all(type(i) is int and i >= 0 for i in ids),
        "too many tokens": len(ids) > request.sampling.max_tokens,
        "tokens without log-probs": len(logp) != len(ids),
        "invalid log-probs": not all(math.isfinite(v) and v < 1e-3 for v in logp),
        f"an unknown finish reason ({reason})": reason not in ("stop", "length"),
        "an end before a stop token or the limit": not stopped and len(ids) < request.sampling.max_tokens,
        "tokens after a stop token": any(i in request.stop_ids for i in ids[:-1]),
        "weights that were never sent": not spans or not {label for label, _ in spans} <= labels,
    }
    for problem, found in problems.items():
        if found:
            raise Fault(f"{where}: a completion with {problem}")
    # Rounding can make a log-prob slightly positive.
    return RequestOutput(token_ids=ids, logp=tuple(min(v, 0.0) for v in logp), stopped=stopped, spans=spans)
