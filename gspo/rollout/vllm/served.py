"""vLLM behind addresses: one or more servers with the same model, given or started by the run itself.

In: requests. Out: a reply for each, or `EngineError`. Invariant: a reply is used only if it is whole, sound and drawn by
weights that were sent; what a server fails to do is done by another, or by the same one once it is back and holds the
weights again. A request is tried `TRIES` times, a server of our own is started anew `RESTARTS` times, and nothing waits
longer than its deadline.
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

from gspo.errors import EngineError
from gspo.rollout.vllm.experts import from_text
from gspo.rollout.vllm.host import Check, Reply, Request
from gspo.rollout.vllm.http import Client, Fault
from gspo.rollout.vllm.serve import Process
from gspo.rollout.vllm.transfer import Offer, send
from gspo.rollout.vllm.weights import ADAPTER

TRIES = 4
RESTARTS = 3
PATIENCE = 3
"""Faults in a row after which a server is taken to be down even if it says that it is well."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long to wait for what, in seconds."""

    request_s: float = 600.0
    """One reply."""
    check_s: float = 5.0
    """Between looks at servers that are working, and for their answer."""
    sync_s: float = 300.0
    """Each call of a weight transfer."""
    absent_s: float = 300.0
    """Without any server that works; also for one of our own to start."""


@dataclass(kw_only=True, eq=False)
class Server:
    """One server and what is known of it."""

    client: Client
    process: Process | None = None
    """None: somebody else's."""
    up: bool = True
    faults: int = 0
    """In a row."""
    restarts: int = 0
    gone: bool = False
    """Started anew too often: left out for good."""
    labels: set[str] = field(default_factory=set)
    """Weights that were proved to be in use by it."""
    syncing: bool = False
    reviving: Future[None] | None = None


@dataclass(kw_only=True)
class _Job:
    index: int
    request: Request
    tries: int = 0
    avoid: Server | None = None


class ServedHost:
    """A `Host` of several servers."""

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        in_flight: int,
        limits: Limits,
        transfer: str,
        tell: Callable[[str], None],
        experts: bool,
        layers: Sequence[int] = (),
        dtype: str = "",
        folder: Path | None = None,
        adapters: bool = False,
    ) -> None:
        self.servers, self.in_flight, self.limits, self.transfer = list(servers), in_flight, limits, transfer
        self.adapters = adapters
        """Whether the low-rank adapter travels as an adapter, which requests then ask for by its name."""
        self.tell, self.experts, self.layers, self.dtype = tell, experts, layers, dtype
        self._pool = ThreadPoolExecutor(in_flight * len(servers) + len(servers) + 2)
        self.folder = folder
        self.last_fault = "none was reached"
        self._revival = threading.Lock()
        # Requests of another run on the same server must not have the same names.
        self._name, self._numbers = secrets.token_hex(4), itertools.count()
        self._offer: Callable[[], Offer] | None = None
        self._check: Check | None = None
        self._workers: dict[str, int] = {}
        for server in self.servers:
            self._meet(server)

    # ---- weights

    def label(self) -> str | None:
        labels = {self._label_of(server) for server in self.servers}
        return labels.pop() if len(labels) == 1 and any(s.up for s in self.servers) else None

    def _label_of(self, server: Server) -> str | None:
        """None: it is down, or has come back without its weights."""
        try:
            label = str(server.client.get("/weight_info", timeout_s=self.limits.check_s)["weight_version"])
        except (Fault, KeyError, TypeError):
            self._down(server, "does not say which weights it has")
            return None
        return label if server.up else None

    def sync(self, model: Any, label: str, check: Check) -> None:
        """Bring all servers that can be reached to the model's weights; those that fail are down until they have them."""
        self._offer, self._check = lambda: Offer(model, label, adapters=self.adapters), check
        offer = self._offer()
        until = time.monotonic() + self.limits.absent_s
        try:
            while True:
                for server in self.servers:
                    if server.up or self._returns(server):
                        self._try_to_bring(server, offer)
                if any(s.up for s in self.servers):
                    return
                self._wait_for_any(until)
        finally:
            offer.close()

    def _try_to_bring(self, server: Server, offer: Offer) -> bool:
        try:
            self._bring(server, offer)
        except Fault as fault:
            self.last_fault = str(fault)
            self._down(server, str(fault))
        return server.up

    def _bring(self, server: Server, offer: Offer) -> None:
        """Weights and canary for one server; it is up, and its tokens are trusted, only when both have passed."""
        assert self._check is not None
        server.up, server.syncing = False, True
        try:
            server.client.get("/health", timeout_s=self.limits.check_s)
            self._meet(server)
            workers = self._workers[server.client.address]
            send(offer, server.client, way=self.transfer, workers=workers, timeout_s=self.limits.sync_s)
            self._check(lambda requests: [self._ask(server, r, trusted={offer.label}) for r in requests])
            server.labels.add(offer.label)
            server.up, server.faults = True, 0
        finally:
            server.syncing = False

    def _returns(self, server: Server) -> bool:
        """Whether a server that was out can be talked to again. It is looked after in the background, where it may go on
        beside learning: that touches no weights."""
        with self._revival:
            if server.gone or server.syncing:
                return False
            if server.reviving is None:
                server.reviving = self._pool.submit(self._awaken, server)
            if not server.reviving.done():
                return False
            done, server.reviving = server.reviving, None
        try:
            done.result()
            return True
        except Fault as fault:
            self.last_fault = str(fault)
        except EngineError as error:
            self.last_fault, server.gone = str(error), True
            self.tell(f"vLLM server {server.client.address} is left out from now on: {error}")
            if all(s.gone for s in self.servers):
                raise
        return False

    def _awaken(self, server: Server) -> None:
        """Start a server of our own anew; wait until another's answers."""
        if server.process is not None:
            self._restart(server)
        else:
            time.sleep(min(1.0, self.limits.check_s))
            server.client.get("/health", timeout_s=self.limits.check_s)

    def _meet(self, server: Server) -> None:
        """What must be known of a server that may be new: its type, how many workers it has; and that experts are to be noted."""
        address = server.client.address
        types = server.client.workers("gspo_dtype", timeout_s=self.limits.sync_s) if self.dtype else [""]
        if any(found != self.dtype for found in types):
            raise EngineError(
                f"{address}: computes in {types[0]}, the learner in {self.dtype}; start it with: gspo serve MODEL --dtype={self.dtype}"
            )
        method = "gspo_watch_routes" if self.experts else "gspo_received"
        found = server.client.workers(method, timeout_s=self.limits.sync_s)
        self._workers[address] = len(found)
        if self.experts and "0" in found:
            raise EngineError(
                f"{address}: cannot tell the experts of its replies; start it with: gspo serve MODEL --experts, or set rollout.engine_options.experts = false"
            )

    def _restart(self, server: Server) -> None:
        assert server.process is not None
        if server.restarts >= RESTARTS:
            raise EngineError(
                f"a vLLM server was started {RESTARTS} times anew and failed again; its log is {server.process.log}"
            )
        server.restarts += 1
        self.tell(
            f"vLLM server {server.client.address} is started anew ({server.restarts} of at most {RESTARTS} times)"
        )
        server.process.start()
        server.client = Client(server.process.address, server.process.token)
        try:
            server.process.wait_ready(self.limits.absent_s)
        except EngineError as error:
            raise Fault(str(error)) from error

    def _down(self, server: Server, why: str) -> None:
        if server.up:
            self.tell(f"vLLM server {server.client.address} is out: {why}")
        server.up = False
        server.client.hang_up()

    def _wait_for_any(self, until: float) -> None:
        starting = any(
            s.process is not None and s.reviving is not None for s in self.servers
        )  # that has its own deadline
        if time.monotonic() > until and not starting:
            raise EngineError(
                f"engine 'vllm': no server has worked for {self.limits.absent_s:g} s; the last fault: {self.last_fault}"
            )
        time.sleep(min(1.0, self.limits.check_s))

    # ---- replies

    def generate(self, requests: Sequence[Request], *, routes: bool) -> list[Reply]:
        self._forget_experts()
        batch = _Batch(self, requests, routes)
        try:
            return batch.run()
        except BaseException:
            for server in self.servers:
                server.client.hang_up()  # vLLM drops requests that nobody waits for
            raise

    def _ask(self, server: Server, request: Request, *, routes: bool = False, trusted: set[str] | None = None) -> Reply:
        """One reply of one server, whole and sound, drawn by weights that are `trusted` (else: proved to be in use)."""
        name = f"gspo{self._name}x{next(self._numbers)}"
        body = {"request_id": name, "token_ids": list(request.prompt_ids), "sampling_params": request.settings()}
        body |= {"model": ADAPTER} if self.adapters else {}
        answer = server.client.post("/inference/v1/generate", body, timeout_s=self.limits.request_s)
        if trusted is None:
            self._let_it_be_proved(server)
        reply = sound_reply(answer, request, server.labels if trusted is None else trusted, server.client.address)
        return replace(reply, experts=self._experts_of(server, name, answer)) if routes else reply

    def _let_it_be_proved(self, server: Server) -> None:
        """Weights that were sent under way are judged before what they drew."""
        until = time.monotonic() + self.limits.sync_s
        while server.syncing and time.monotonic() < until:
            time.sleep(0.01)

    def _experts_of(self, server: Server, name: str, answer: Any) -> bytes | None:
        own = answer["choices"][0].get("routed_experts")
        try:
            if own is not None:
                return from_text(own, self.layers)
            (texts, *_) = server.client.workers("gspo_take_routes", [name], timeout_s=self.limits.check_s)
            text = texts[0] if isinstance(texts, list) and texts else None
            return base64.b64decode(text, validate=True) if isinstance(text, str) else None
        except (ValueError, TypeError, IndexError, KeyError, EOFError) as error:
            raise Fault(f"{server.client.address}: experts that are none: {type(error).__name__}: {error}") from error

    def _forget_experts(self) -> None:
        """What was noted for replies that nobody asked the experts of would pile up."""
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
        if self.folder is not None and not any(s.restarts for s in self.servers):  # else its logs are worth reading
            shutil.rmtree(self.folder, ignore_errors=True)


class _Batch:
    """The requests of one call: waiting, being worked on, done."""

    def __init__(self, host: ServedHost, requests: Sequence[Request], routes: bool) -> None:
        self.host, self.routes = host, routes
        self.waiting = [_Job(index=i, request=r) for i, r in enumerate(requests)][::-1]
        self.replies: list[Reply | None] = [None] * len(requests)
        self.working: dict[Future[Reply], tuple[Server, _Job]] = {}
        self.checks: dict[Future[Any], Server] = {}
        self.looked = time.monotonic()
        self.since_any = time.monotonic()

    def run(self) -> list[Reply]:
        while any(reply is None for reply in self.replies):
            self._hand_out()
            self._collect()
            self._look()
            self._revive()
        return [reply for reply in self.replies if reply is not None]

    def _hand_out(self) -> None:
        """Waiting requests to the servers with the fewest, and not again to the one that failed if there is another."""
        while self.waiting:
            load = Counter(server for server, _ in self.working.values())
            ready = [s for s in self.host.servers if s.up and load[s] < self.host.in_flight]
            if not ready:
                return
            job = self.waiting.pop()
            others = [s for s in ready if s is not job.avoid] or ready
            server = min(others, key=lambda s: load[s])
            job.tries += 1
            future = self.host._pool.submit(self.host._ask, server, job.request, routes=self.routes)
            self.working[future] = (server, job)

    def _collect(self) -> None:
        if not self.working:
            time.sleep(0.05)
            return
        done, _ = wait(self.working, timeout=min(1.0, self.host.limits.check_s), return_when=FIRST_COMPLETED)
        for future in done:
            self._finished(*self.working.pop(future), future)

    def _finished(self, server: Server, job: _Job, future: Future[Reply]) -> None:
        try:
            self.replies[job.index] = future.result()
            server.faults = 0
        except Fault as fault:
            self.host.last_fault = str(fault)
            server.faults += 1
            if server.faults >= PATIENCE:
                self.host._down(server, f"{server.faults} faults in a row, the last: {fault}")
            if job.tries >= TRIES:
                raise EngineError(f"engine 'vllm': a request failed {TRIES} times; the last time: {fault}") from fault
            job.avoid = server
            self.waiting.append(job)

    def _look(self) -> None:
        """Servers that work on something must answer a question in between: one that hangs is found long before the
        deadline of a request."""
        for future in [f for f in self.checks if f.done()]:
            server = self.checks.pop(future)
            if future.exception() is not None:
                self.host.last_fault = str(future.exception())
                self.host._down(server, self.host.last_fault)
        if time.monotonic() - self.looked < self.host.limits.check_s:
            return
        self.looked = time.monotonic()
        at_work = {server for server, _ in self.working.values()}
        busy = [s for s in self.host.servers if s.up and s in at_work and s not in self.checks.values()]
        for server in busy:
            self.checks[self.host._pool.submit(server.client.get, "/health", timeout_s=self.host.limits.check_s)] = (
                server
            )

    def _revive(self) -> None:
        """Servers that are out come back when they are there again and hold the weights."""
        if any(s.up for s in self.host.servers):
            self.since_any = time.monotonic()
        elif time.monotonic() - self.since_any > self.host.limits.absent_s:
            raise EngineError(
                f"engine 'vllm': no server has worked for {self.host.limits.absent_s:g} s; the last fault: {self.host.last_fault}"
            )
        for server in self.host.servers:
            at_work = any(s is server for s, _ in self.working.values())
            if not server.up and not at_work and self.host._returns(server):
                self._bring_back(server)

    def _bring_back(self, server: Server) -> None:
        """In this thread: the learner's model is not for others while it may be used here."""
        assert self.host._offer is not None
        offer = self.host._offer()
        try:
            if self.host._try_to_bring(server, offer):
                self.host.tell(f"vLLM server {server.client.address} is back, with the learner's weights")
        finally:
            offer.close()


def sound_reply(answer: Any, request: Request, labels: set[str], where: str) -> Reply:
    """The reply in an answer, or a `Fault` that says what is wrong with it."""
    try:
        (choice,) = answer["choices"]
        ids = tuple(choice["token_ids"])
        logp = tuple(float(at["logprob"]) for at in choice["logprobs"]["content"])
        reason = choice["finish_reason"]
        spans = tuple((str(s["version"]), int(s["start"])) for s in choice["weight_versions"] or ())
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise Fault(f"{where}: not the answer of a vLLM: {type(error).__name__}: {error}") from error
    ended = bool(ids) and ids[-1] in request.stop_ids
    wrong = {
        "no tokens": not ids,
        "token ids that are none": not all(type(i) is int and i >= 0 for i in ids),
        "too many tokens": len(ids) > request.sampling.max_tokens,
        "tokens without log-probabilities": len(logp) != len(ids),
        "log-probabilities that are none": not all(math.isfinite(v) and v < 1e-3 for v in logp),
        f"an end for no reason ({reason})": reason not in ("stop", "length"),
        "an end before its end token or the limit": not ended and len(ids) < request.sampling.max_tokens,
        "tokens after the end": any(i in request.stop_ids for i in ids[:-1]),
        "weights that were never sent": not spans or not {label for label, _ in spans} <= labels,
    }
    for what, holds in wrong.items():
        if holds:
            raise Fault(f"{where}: a reply with {what}")
    return Reply(token_ids=ids, logp=tuple(min(v, 0.0) for v in logp), ended=ended, spans=spans)
