"""What a run needs of a cluster: the resources of each process, and how many processes the nodes have room for.

In: the settings, the number of ranks, and the resources of each node. Out: a `Placement`. Invariant: needs no Ray, so
that a run that cannot be placed is refused before anything is reserved. Ranks come first, because more reward workers
can share one place, but fewer ranks are another run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gspo.config import Config
from gspo.errors import ConfigError

Resources = Mapping[str, float]
RANK, SERVER, WORKER = "rank", "server", "reward worker"
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The processes of a run and the resources that each of them reserves. Ray counts them; it does not limit them."""

    ranks: int
    rank: Resources
    workers: int
    """Places for reward workers. Each holds one or more of them."""
    worker: Resources
    servers: int = 0
    """Servers of the sampling engine that the run starts."""
    server: Resources = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(
            f"{count} {kind}{'s' * (count != 1)} with {_listed(resources)} each"
            for kind, count, resources in self.kinds
            if count
        )

    @property
    def kinds(self) -> list[tuple[str, int, Resources]]:
        """(kind, number, resources of each), in the order in which they are placed: large ones first, because small
        ones fit into what is left."""
        kinds = [
            (RANK, self.ranks, self.rank),
            (SERVER, self.servers, self.server),
            (WORKER, self.workers, self.worker),
        ]
        return sorted(kinds, key=lambda kind: (-kind[2].get("GPU", 0.0), -kind[2].get("CPU", 0.0)))

    @property
    def cpus(self) -> int:
        """The CPUs that all processes reserve together."""
        return math.ceil(sum(count * resources.get("CPU", 0.0) for _, count, resources in self.kinds))


def plan(config: Config, ranks: int, nodes: Sequence[Resources]) -> Placement:
    """The processes of a run with these settings. A rank gets a GPU if its model is to be on one."""
    device, options = config.model.device, config.rollout.engine_options
    on_gpu = device.startswith("cuda") or (device == "auto" and any(node.get("GPU", 0) >= 1 for node in nodes))
    rank = {"CPU": float(config.model.threads or 1), **({"GPU": 1.0} if on_gpu else {})}
    servers, settings = options.get("start", 0), options.get("settings", {})
    gpus = float(settings.get("tensor_parallel_size", 1)) if on_gpu else 0.0
    return Placement(
        ranks=ranks,
        rank=rank,
        workers=config.reward.workers,
        worker={"CPU": 1.0},
        servers=servers if isinstance(servers, int) else 0,
        server={"CPU": 1.0, **({"GPU": gpus} if gpus else {})},
    )


def check_fits(wanted: Placement, nodes: Sequence[Resources]) -> None:
    """Raise a `ConfigError` that says what the cluster lacks for a new run."""
    if _fits(wanted, nodes):
        return
    raise ConfigError(
        f"--cluster: there is no room for {wanted}; {described(nodes)}; add nodes (ray start --address=...), or lower "
        "--nproc, model.threads or reward.workers"
    )


def shrunk(wanted: Placement, nodes: Sequence[Resources], multiple: int) -> Placement | None:
    """As much of a placement as the nodes have room for, to resume a run on fewer of them: as many ranks as possible, a
    `multiple` of this number, and of all other kinds at least one. None if there is no such placement."""
    kinds = (range(wanted.ranks, 0, -1), range(wanted.servers, min(wanted.servers, 1) - 1, -1))
    for ranks, servers, workers in itertools.product(*kinds, range(wanted.workers, 0, -1)):
        smaller = replace(wanted, ranks=ranks, servers=servers, workers=workers)
        if ranks % multiple == 0 and _fits(smaller, nodes):
            return smaller
    return None


def described(nodes: Sequence[Resources]) -> str:
    """What the nodes have, in words."""
    kinds = ("CPU", "GPU")
    each = [_listed({kind: node[kind] for kind in kinds if node.get(kind)}) or "nothing" for node in nodes]
    return f"the cluster has {len(nodes)} node{'s' * (len(nodes) != 1)} ({'; '.join(each)})"


def _fits(wanted: Placement, nodes: Sequence[Resources]) -> bool:
    left = [dict(node) for node in nodes]
    for _, count, resources in wanted.kinds:
        for node in left:
            here = min(count, _times(resources, node)) if count else 0
            count -= here
            for kind, amount in resources.items():
                node[kind] = node.get(kind, 0.0) - here * amount
        if count:
            return False
    return True


def _times(bundle: Resources, node: Resources) -> int:
    return max(0, min(math.floor(node.get(kind, 0.0) / amount + _ROUNDING) for kind, amount in bundle.items()))


def _listed(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items())
