"""`gspo train --cluster`: Ray places the ranks of a run and its reward workers, and the run is resumed if one is lost.

In: what to run, and where. Out: an exit code. Invariant: Ray places and supervises. The ranks are the processes that
`torchrun` would start, with the same variables, and do not know how they were started. A run is resumed only if a
process or a node was lost, from its last checkpoint, and not more often than was asked for. No process outlives this
one, and every wait has a deadline.
"""

from __future__ import annotations

import base64
import codecs
import json
import os
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo import __version__
from gspo.cluster import connect
from gspo.cluster.host import LEASE_S, ProcessHost
from gspo.cluster.plan import RANK, SERVER, WORKER, Placement, check_fits, described, plan, shrunk
from gspo.config import Config
from gspo.errors import ConfigError, RankError
from gspo.ranks.environment import CLUSTER, LAUNCHED, LEADER_SILENT, RANK_LOST, signal_name

PLACE_S = 120.0
"""Seconds within which the processes of a run must be placed. A node that was lost is listed for some of them."""
TRY_S = 5.0
"""Seconds that one attempt to reserve resources may take before the nodes are counted again."""
START_S = 120.0
"""Seconds that an actor has to start."""
SILENT_S = 60.0
"""Seconds without an answer after which an actor is given up. Ray usually notices a lost node earlier."""
UNNOTICED_S = 120.0
"""Seconds that the leader has to end with its own error after another rank is lost."""
GRACE_S = 10.0
"""Seconds that the other ranks have to end after the leader."""
LINES = 12
"""How many of its last lines an error carries of a rank."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to run."""

    config: Config
    arguments: Sequence[str]
    """Of each rank, for the first start."""
    run: Path
    """The run directory, which all nodes and this process see."""
    cluster: str
    ranks: int
    restarts: int
    idle: Callable[[Path], bool]
    """Whether no process works in a run directory."""

    @property
    def arguments_again(self) -> Sequence[str]:
        """Of each rank, after a restart."""
        started = (self.run / "config.toml").exists() and "--resume" not in self.arguments
        return ["train", "--resume", str(self.run)] if started else self.arguments

    @property
    def remedy(self) -> str:
        if not (self.run / "config.toml").exists():
            return ""
        return f"\ncontinue with: gspo train --resume {self.run} --cluster {self.cluster} --nproc {self.ranks}"


def launch_on_cluster(order: Order) -> int:
    """Run to the end, with restarts; the exit code is that of the leader."""
    needed = plan(order.config, order.ranks, [])
    name = f"gspo-{secrets.token_hex(4)}"
    with connect.joined(order.cluster, namespace=name, cpus=needed.cpus) as ray:
        wanted = plan(order.config, order.ranks, connect.nodes(ray))
        check_fits(wanted, connect.nodes(ray))
        for attempt in range(order.restarts + 1):
            again = attempt > 0
            with (
                _placed(ray, wanted, order, f"{name}-{attempt}", again=again) as (placement, groups),
                _Run(ray, order, placement, groups, again=again) as run,
            ):
                code, lost = run.wait()
            if lost is None:
                return code
            if attempt < order.restarts:
                _await_idle(order)
                _report(f"{lost}\nresuming the run (restart {attempt + 1} of {order.restarts})")
        raise RankError(f"{lost}\nthe run was restarted {order.restarts} times (--restarts){order.remedy}")


def _await_idle(order: Order) -> None:
    """A rank that cannot be reached ends by itself. Until then it may write into the run directory."""
    until = time.monotonic() + LEASE_S + GRACE_S
    while (order.run / "config.toml").exists() and not order.idle(order.run):
        if time.monotonic() > until:
            raise RankError(f"{order.run}: a rank that cannot be reached still works in it; end it{order.remedy}")
        time.sleep(0.5)


@contextmanager
def _placed(ray: Any, wanted: Placement, order: Order, name: str, *, again: bool) -> Iterator[tuple[Placement, Any]]:
    """Reserve the resources of a run. A run that is resumed may get less, if that is all there is."""
    until = time.monotonic() + PLACE_S
    while True:
        nodes = connect.nodes(ray)
        fitting = shrunk(wanted, nodes, order.config.learner.context_parallel) if again else wanted
        if fitting is not None and (groups := _reserved(ray, fitting, name)) is not None:
            break
        if time.monotonic() > until:
            free = ray.available_resources()
            raise RankError(
                f"--cluster: there was no room for {wanted} within {PLACE_S:g} s; {described(nodes)}, of which "
                f"{free.get('CPU', 0):g} CPU, {free.get('GPU', 0):g} GPU are free{order.remedy}"
            )
        time.sleep(0.5)
    if fitting != wanted:
        _report(f"{wanted} no longer fit ({described(nodes)}); the run continues with {fitting}")
    try:
        yield fitting, groups
    finally:
        _release(ray, groups)


def _reserved(ray: Any, placement: Placement, name: str) -> dict[str, Any] | None:
    """The placement groups of ranks, servers and reward workers, by name; None if they do not get their resources."""
    groups: dict[str, Any] = {}
    for kind, count, resources in placement.kinds:
        if not count:
            continue
        # Ranks talk to each other all the time, so they are placed together. The others only wait for work.
        strategy = "PACK" if kind == RANK else "SPREAD"
        groups[kind] = ray.util.placement_group([dict(resources)] * count, strategy=strategy, name=f"{name} {kind}")
        if not groups[kind].wait(timeout_seconds=TRY_S):
            _release(ray, groups)
            return None
    return groups


def _release(ray: Any, groups: Mapping[str, Any]) -> None:
    for group in groups.values():
        with suppress(ray.exceptions.RayError):
            ray.util.remove_placement_group(group)


@dataclass(kw_only=True, eq=False)
class _Rank:
    """A process of the run, as this process sees it."""

    actor: Any
    node: str
    rank: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    pending: Any = None
    heard: float = 0.0
    code: int | None = None
    lost: str = ""
    """Why nothing more will be heard of it."""
    last: deque[str] = field(default_factory=lambda: deque(maxlen=LINES))
    decoders: dict[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.code is not None or bool(self.lost)

    @property
    def failed(self) -> bool:
        """Whether it was killed, or its machine is gone."""
        return bool(self.lost) or (self.code is not None and self.code < 0)


class _Run:
    """One start of the run: its ranks, from their placement to their end."""

    def __init__(self, ray: Any, order: Order, placement: Placement, groups: Mapping[str, Any], *, again: bool) -> None:
        self._ray = ray
        self._order = order
        self._placement = placement
        self._groups = groups
        self._arguments = order.arguments_again if again else order.arguments
        self._ranks: list[_Rank] = []
        self._stopped_by: int | None = None
        self._signals: list[int] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> _Run:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._handlers[number] = signal.signal(number, self._forward)
        try:
            self._place()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for rank in self._ranks:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(rank.actor)  # the kernel kills the process with it
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: Any) -> None:
        """The leader is to save a checkpoint, and to let the others end. `_listen` sends it, because this may have
        interrupted a call of Ray."""
        self._stopped_by = self._stopped_by or number
        self._signals.append(number)

    def _place(self) -> None:
        host = self._ray.remote(ProcessHost)
        group, resources = self._groups[RANK], self._placement.rank
        table = self._ray.util.placement_group_table(group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        ranks = []
        own = self._ray.get_runtime_context().get_node_id()
        # The leader is on the node of this process if a rank is. Ranks of a node follow each other, as those of a
        # context group should.
        for place in sorted(table, key=lambda place: (table[place] != own, table[place], place)):
            actor = host.options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                max_concurrency=4,
                **connect.schedule_in(self._ray, group, place),
            ).remote()
            ranks.append(_Rank(actor=actor, node=addresses[table[place]]))
        self._ranks = ranks
        for number, rank in enumerate(ranks):
            rank.rank = number
            rank.about = json.loads(self._answer(rank, rank.actor.about.remote()) or "{}")
            if rank.about and rank.about["version"] != __version__:
                raise ConfigError(
                    f"--cluster: node {rank.node} has gspo {rank.about['version']}, this one has {__version__}; "
                    "install the same version on all nodes"
                )
        for rank in [] if any(rank.lost for rank in ranks) else ranks:
            error = self._answer(rank, rank.actor.start.remote(json.dumps(self._command(rank))))
            if error:
                raise ConfigError(
                    f"--cluster: node {rank.node}: {error}; all nodes need the folder in which the run is started, "
                    "for example on a shared file system"
                )

    def _answer(self, rank: _Rank, reference: Any) -> str:
        try:
            return str(self._ray.get(reference, timeout=START_S))
        except self._ray.exceptions.GetTimeoutError:
            rank.lost = f"its node has not answered for {START_S:g} s"
        except self._ray.exceptions.RayError as error:
            rank.lost = connect.reason(error)
        return ""

    def _command(self, rank: _Rank) -> dict[str, Any]:
        leader = self._ranks[0]
        beside = [other for other in self._ranks if other.node == rank.node]
        threads = self._order.config.model.threads or max(1, rank.about["cores"] // len(beside))
        environment = {
            "RANK": str(rank.rank),
            "LOCAL_RANK": str(beside.index(rank)),
            "WORLD_SIZE": str(len(self._ranks)),
            "LOCAL_WORLD_SIZE": str(len(beside)),
            "MASTER_ADDR": leader.about["address"],
            "MASTER_PORT": str(leader.about["port"]),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            LAUNCHED: str(self._order.ranks),
            CLUSTER: json.dumps(self._membership()),
        }
        for name in ("GSPO_UNTESTED_NCCL",):
            environment |= {name: os.environ[name]} if name in os.environ else {}
        return {"arguments": ["-m", "gspo", *self._arguments], "environment": environment, "folder": os.getcwd()}

    def _membership(self) -> dict[str, Any]:
        return {
            "given": self._order.cluster,
            "address": connect.address_of(self._ray),
            "namespace": self._ray.get_runtime_context().namespace,
            "rewards": self._name_of(WORKER),
            "places": self._placement.workers,
            "servers": self._name_of(SERVER) if self._placement.servers else "",
            "server_places": self._placement.servers,
            "server_gpus": self._placement.server.get("GPU", 0),
        }

    def _name_of(self, kind: str) -> str:
        return str(self._ray.util.placement_group_table(self._groups[kind])["name"])

    # ---- supervision

    def wait(self) -> tuple[int, str | None]:
        """The exit code of the leader, and if the run is to be resumed, which rank was lost and why."""
        leader, failed_at = self._ranks[0], 0.0
        while not leader.ended:
            self._listen()
            failed = [rank for rank in self._ranks[1:] if rank.failed or rank.code == LEADER_SILENT]
            failed_at = failed_at or (time.monotonic() if failed else 0.0)
            if any(rank.code == LEADER_SILENT for rank in failed):
                leader.lost = "it does not respond (ranks.timeout_s)"
            elif failed and time.monotonic() > failed_at + UNNOTICED_S:
                leader.lost = f"it has not noticed within {UNNOTICED_S:g} s that rank {failed[0].rank} is lost"
        lost = next((rank for rank in self._ranks[1:] if rank.failed), None)
        until = time.monotonic() + GRACE_S
        while not all(rank.ended for rank in self._ranks) and time.monotonic() < until:
            self._listen()
        # A leader that has ended with the error of another rank has seen it before this process has.
        lost = lost or next((rank for rank in self._ranks[1:] if rank.failed and leader.code == RANK_LOST), None)
        return self._judged(leader, lost)

    def _judged(self, leader: _Rank, lost: _Rank | None) -> tuple[int, str | None]:
        code = leader.code
        if leader.lost or (code is not None and code < 0):
            if self._stopped_by:  # the user wanted it to end
                _report(self._described(leader) + self._order.remedy)
                return 128 + self._stopped_by, None
            return 1, self._described(leader)
        assert code is not None
        if self._stopped_by and code >= 128:
            return code, None
        if code == RANK_LOST or (code and code < 128 and lost is not None):
            return 1, self._described(lost) if lost else "a rank was lost, as the leader has reported"
        return code, None

    def _described(self, rank: _Rank) -> str:
        if rank.lost:
            what = f"was lost: {rank.lost}"
        elif rank.code is not None and rank.code < 0:
            what = f"was killed by {signal_name(-rank.code)}"
        else:
            what = f"ended with exit code {rank.code}"
        lines = _last_lines(self._order.run / "ranks" / f"{rank.rank}.log") or list(rank.last)
        text = "; its last lines:\n  " + "\n  ".join(lines) if lines else ""
        return f"rank {rank.rank} on {rank.node} {what}{text}"

    def _listen(self) -> None:
        """Take what the ranks report, and notice those that report nothing."""
        now = time.monotonic()
        while self._signals:
            self._ranks[0].actor.send.remote(self._signals.pop(0))
        living = [rank for rank in self._ranks if not rank.ended]
        for rank in living:
            if rank.pending is None:
                rank.pending, rank.heard = rank.actor.poll.remote(), now
        pending = {rank.pending: rank for rank in living}
        self._ray.wait(list(pending), timeout=0.5)  # returns when one has answered
        done, _ = self._ray.wait(list(pending), num_returns=len(pending), timeout=0)
        for reference in done:
            rank = pending[reference]
            rank.pending = None
            try:
                self._take(rank, json.loads(self._ray.get(reference, timeout=START_S)))
            except self._ray.exceptions.RayError as error:
                rank.lost = connect.reason(error)
        for rank in living:
            if rank.pending is not None and now > rank.heard + SILENT_S:
                rank.lost = f"its node has not answered for {SILENT_S:g} s"

    def _take(self, rank: _Rank, report: Mapping[str, Any]) -> None:
        for stream, data in report["output"]:
            decoder = rank.decoders.setdefault(stream, codecs.getincrementaldecoder("utf-8")("replace"))
            text = decoder.decode(base64.b64decode(data))
            rank.last.extend(line for line in text.splitlines() if line.strip())
            rank.log.append(text)
            if rank.rank == 0:
                print(text, end="", flush=True, file=sys.stdout if stream == "out" else sys.stderr)
        rank.code = report["code"]
        self._write_log(rank)
        if rank.rank and rank.code and rank.log:  # it has no log of its own yet
            print("".join(rank.log), end="", flush=True, file=sys.stderr)

    def _write_log(self, rank: _Rank) -> None:
        """Append what a rank has printed to its log, once the run has a directory. Followers that see the directory
        write there themselves, and print nothing."""
        if rank.log and (self._order.run / "config.toml").exists():
            with suppress(OSError):
                folder = self._order.run / "ranks"
                folder.mkdir(exist_ok=True)
                log = os.open(
                    folder / f"{rank.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644
                )
                with open(log, "a", encoding="utf-8") as file:
                    file.write("".join(rank.log))
                rank.log.clear()


def _last_lines(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-LINES:]


def _report(text: str) -> None:
    print(f"gspo: {text}", file=sys.stderr, flush=True)
