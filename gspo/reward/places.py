"""Reward workers on the nodes of a Ray cluster.

In: the calls of a `RewardPool`. Out: the answers, as those of a `WorkerProcess` on this machine. Invariant: the worker
process, its deadlines, its memory limit and its sandboxes are those of `process.py`, and they are applied on the
worker's own node, so neither the network nor Ray can use up a completion's time. A call whose node is lost raises
`WorkerLost`, which blames nobody. What is sent is JSON; Ray pickles strings only.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any

from gspo.cluster import connect
from gspo.errors import ConfigError, RewardError
from gspo.reward.function import RewardWarning, RunFacts, Source
from gspo.reward.process import (
    START_LIMIT_S,
    ScoringCancelled,
    WorkerDied,
    WorkerHung,
    WorkerLost,
    WorkerOverMemory,
    WorkerProcess,
)
from gspo.reward.sandbox.clock import PATIENCE_ALONE
from gspo.reward.second_try import SecondTry
from gspo.reward.traits import Service

MOVES = 3
"""How often a worker is moved to another node before the run ends."""
CALLS = 64
"""Calls that an actor accepts at the same time."""
_SLICE_S = 0.1


class RewardHost:
    """The actor that runs reward workers on its node. Its methods are called through Ray, from several threads."""

    def __init__(self, setup: str) -> None:
        given = json.loads(setup)
        self._sources = [Source(**source) for source in given["sources"]]
        self._facts = RunFacts(**given["facts"])
        self._memory_mb = given["memory_mb"]
        self._workers: dict[str, _HostedWorker] = {}
        self._lock = threading.Lock()
        warnings.simplefilter("ignore", RewardWarning)  # sent back instead

    def ask(self, request: str) -> str:
        """Let a worker do something. Its first request starts it."""
        given = json.loads(request)
        with self._lock:
            if given["do"] == "kill":
                found = self._workers.pop(given["worker"], None)
            else:
                found = self._workers.get(given["worker"]) or _HostedWorker(self._process)
                self._workers[given["worker"]] = found
        if given["do"] == "kill":
            if found:
                found.end()
            return "{}"
        assert found
        return json.dumps(found.ask(given))

    def _process(self, closing: Callable[[], bool]) -> WorkerProcess:
        return WorkerProcess(self._sources, closing, facts=self._facts, memory_mb=self._memory_mb)


class _HostedWorker:
    """A worker process and the thread to which it belongs."""

    def __init__(self, make: Callable[[Callable[[], bool]], WorkerProcess]) -> None:
        self._ended = False
        self._worker = make(lambda: self._ended)
        self._thread = ThreadPoolExecutor(max_workers=1)

    def ask(self, given: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._thread.submit(self._do, given).result()
        except RuntimeError:  # it was ended meanwhile
            return {"ended": "cancelled"}

    def end(self) -> None:
        self._ended = True
        self._thread.submit(self._worker.kill)
        self._thread.shutdown(wait=False)

    def _do(self, given: Mapping[str, Any]) -> dict[str, Any]:
        worker = self._worker
        try:
            if given["do"] == "start":
                worker.start()
                return {}
            worker.prepare()
            return self._loaded() if given["do"] == "prepare" else self._call(given)
        except (ConfigError, RewardError) as error:
            return {"ended": "config" if isinstance(error, ConfigError) else "reward", "message": str(error)}
        except ScoringCancelled:
            return {"ended": "cancelled"}

    def _loaded(self) -> dict[str, Any]:
        worker = self._worker
        services = [asdict(service) if service else None for service in worker.services]
        return {
            "needs": worker.needs,
            "about": worker.about,
            "bounded_s": worker.bounded_s,
            "services": services,
            "warnings": worker.warnings,
        }

    def _call(self, given: Mapping[str, Any]) -> dict[str, Any]:
        worker, timeout_s = self._worker, given["timeout_s"]
        with ExitStack() as stack:
            second = stack.enter_context(SecondTry(timeout_s)) if given["second"] else None
            try:
                answers = worker.call(given["request"], timeout_s, second=second)
                return {"answers": answers, "usage": worker.usage, "printed": worker.printed()}
            except WorkerHung as hung:
                worker.kill()
                used_s = hung.processor_s if math.isfinite(hung.processor_s) else None
                kept_waiting = second is not None and second.kept_waiting
                ended = {"ended": "hung", "processor_s": used_s, "kept_waiting": kept_waiting}
            except WorkerDied as error:
                ended = {"ended": "memory" if isinstance(error, WorkerOverMemory) else "died", "message": str(error)}
        return ended | {"printed": worker.printed()}


class RewardPlaces:
    """The actors that run reward workers: one in each place that the launcher has reserved."""

    def __init__(
        self, cluster: Mapping[str, Any], sources: Sequence[Source], *, facts: RunFacts, memory_mb: int
    ) -> None:
        self._stack = ExitStack()
        self._ray = self._stack.enter_context(connect.joined(cluster["address"], namespace=cluster["namespace"]))
        self._setup = json.dumps(
            {"sources": [asdict(source) for source in sources], "facts": asdict(facts), "memory_mb": memory_mb}
        )
        self._actor = self._ray.remote(RewardHost)
        group = self._ray.util.get_placement_group(cluster["rewards"])
        self._hosts = [
            self._host(num_cpus=1, **connect.schedule_in(self._ray, group, place)) for place in range(cluster["places"])
        ]
        self._next = itertools.count()
        self._lock = threading.Lock()

    def worker(self, closing: Callable[[], bool]) -> PlacedWorker:
        """A worker in the next place."""
        return PlacedWorker(self, self._ray, next(self._next) % len(self._hosts), closing)

    def host(self, place: int) -> Any:
        """The actor of a place."""
        return self._hosts[place]

    def replace(self, place: int, lost: Any) -> None:
        """Start another actor for a place whose node is gone, on any node. It reserves nothing: a run should rather be
        slower than wait for a node that may never come."""
        with self._lock:
            if self._hosts[place] is lost:  # another worker of this place may have done it
                self._hosts[place] = self._host(num_cpus=0, scheduling_strategy="SPREAD")

    def close(self) -> None:
        """End all actors, and with them their workers."""
        for host in self._hosts:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(host)
        self._stack.close()

    def _host(self, **options: Any) -> Any:
        return self._actor.options(max_concurrency=CALLS, **options).remote(self._setup)


class PlacedSecondTry(SecondTry):
    """The second try of a call on another node, where its busy-looping process runs, too."""

    def __enter__(self) -> PlacedSecondTry:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class PlacedWorker:
    """A `WorkerProcess` on another node, with the same methods. Belongs to one thread."""

    def __init__(self, places: RewardPlaces, ray: Any, place: int, closing: Callable[[], bool]) -> None:
        self._places = places
        self._ray = ray
        self._place = place
        self._host = places.host(place)
        self._closing = closing
        self._numbers = itertools.count()
        self._name = self._new_name()
        self._ready = False
        self._moves = 0
        self._printed = ""
        self.pid: int | None = None
        """Always `None`: it is a process of another machine."""
        self.needs: list[list[str]] = []
        self.about: list[str] = []
        self.bounded_s: list[float] = []
        self.services: list[Service | None] = []
        self.usage: dict[str, float] = {}

    def start(self) -> None:
        """Start the process without waiting for it."""
        with suppress(self._ray.exceptions.RayError):
            self._send("start")

    def prepare(self) -> None:
        """Wait until the process has loaded the functions, on another node if its own is gone."""
        while not self._ready:
            try:
                loaded = self._ask("prepare", 2 * START_LIMIT_S)
            except WorkerLost as error:
                self._moves += 1
                if self._moves > MOVES:
                    raise RewardError(
                        f"reward.workers: a worker was moved {MOVES} times and lost again: {error}"
                    ) from None
                continue
            self._raise_if_refused(loaded)
            for text in loaded["warnings"]:
                warnings.warn(text, RewardWarning, stacklevel=2)
            self.needs, self.about, self.bounded_s = loaded["needs"], loaded["about"], loaded["bounded_s"]
            self.services = [Service(**fields) if fields else None for fields in loaded["services"]]
            self._ready = True

    def call(
        self,
        request: Mapping[str, Any],
        timeout_s: float,
        unwanted: Callable[[], bool] = lambda: False,
        second: SecondTry | None = None,
    ) -> list[dict[str, Any]]:
        """As `WorkerProcess.call`. Raises `WorkerLost` as well."""
        limit_s = timeout_s * (PATIENCE_ALONE if second else 1) + START_LIMIT_S
        given = {"request": request, "timeout_s": timeout_s, "second": second is not None}
        self._printed = ""
        answer = self._ask("call", limit_s, unwanted, **given)
        self._printed = answer.get("printed", "")
        self._raise_if_refused(answer)
        ended = answer.get("ended")
        if ended == "hung":
            if second is not None:
                second.kept_waiting = answer["kept_waiting"]
            hung = WorkerHung()
            used_s = answer["processor_s"]
            hung.processor_s = math.inf if used_s is None else used_s
            raise hung
        if ended:
            raise (WorkerOverMemory if ended == "memory" else WorkerDied)(answer["message"])
        self.usage = answer["usage"]
        answers: list[dict[str, Any]] = answer["answers"]
        return answers

    def second_try(self, timeout_s: float) -> SecondTry:
        """For a call that may have been slow because of its machine."""
        return PlacedSecondTry(timeout_s)

    def printed(self) -> str:
        """The tail of the functions' output in the last call."""
        return self._printed

    def kill(self) -> None:
        """Let the node kill the process. What is asked next starts another one."""
        with suppress(self._ray.exceptions.RayError):
            self._send("kill")
        self._name = self._new_name()
        self._ready = False

    def _new_name(self) -> str:
        return f"{id(self)}-{next(self._numbers)}"

    def _raise_if_refused(self, answer: Mapping[str, Any]) -> None:
        ended = answer.get("ended")
        if ended in ("config", "reward"):
            raise (ConfigError if ended == "config" else RewardError)(answer["message"])
        if ended == "cancelled":
            raise ScoringCancelled

    def _send(self, do: str, **more: Any) -> Any:
        return self._host.ask.remote(json.dumps({"worker": self._name, "do": do, **more}))

    def _ask(
        self, do: str, limit_s: float, unwanted: Callable[[], bool] = lambda: False, **more: Any
    ) -> dict[str, Any]:
        until = time.monotonic() + limit_s
        try:
            sent = self._send(do, **more)
            while not self._ray.wait([sent], timeout=_SLICE_S)[0]:
                if self._closing() or unwanted():
                    self.kill()
                    raise ScoringCancelled
                if time.monotonic() > until:
                    raise WorkerLost(f"its node has not answered for {limit_s:g} s")
            answer: dict[str, Any] = json.loads(self._ray.get(sent, timeout=START_LIMIT_S))
            return answer
        except self._ray.exceptions.RayError as error:
            self._move()
            raise WorkerLost(connect.reason(error)) from None
        except WorkerLost:
            self._move()
            raise

    def _move(self) -> None:
        self._places.replace(self._place, self._host)
        self._host = self._places.host(self._place)
        self._name = self._new_name()
        self._ready = False
