"""What a run needs of a cluster: the resources of each process, and how many processes the nodes have room for.

In: the settings, the number of ranks, and the resources of each node. Out: a `Placement`. Invariant: needs no Ray, so
that a run that cannot be placed is refused before anything is reserved. Ranks come first, because more reward workers
can share one place, but fewer ranks are another run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gspo.config import Config
from gspo.errors import ConfigError

Resources = Mapping[str, float]
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The processes of a run and the resources that each of them reserves. Ray counts them; it does not limit them."""

    ranks: int
    rank: Resources
    workers: int
    """Places for reward workers. Each holds one or more of them."""
    worker: Resources

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks != 1)} with {_listed(self.rank)} each"
        return f"{ranks}, {self.workers} reward worker{'s' * (self.workers != 1)} with {_listed(self.worker)} each"


def plan(config: Config, ranks: int, nodes: Sequence[Resources]) -> Placement:
    """The processes of a run with these settings. A rank gets a GPU if its model is to be on one."""
    if config.rollout.engine_options.get("start"):
        raise ConfigError(
            "rollout.engine_options.start: servers cannot be placed on a cluster yet; start them with gspo serve and "
            "name them in rollout.engine_options.servers, or leave out --cluster"
        )
    device = config.model.device
    on_gpu = device.startswith("cuda") or (device == "auto" and any(node.get("GPU", 0) >= 1 for node in nodes))
    rank = {"CPU": float(config.model.threads or 1), **({"GPU": 1.0} if on_gpu else {})}
    return Placement(ranks=ranks, rank=rank, workers=config.reward.workers, worker={"CPU": 1.0})


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
    `multiple` of this number, and at least one place for reward workers. None if there is no such placement."""
    for ranks in range(wanted.ranks, 0, -1):
        for workers in range(wanted.workers, 0, -1) if ranks % multiple == 0 else ():
            smaller = replace(wanted, ranks=ranks, workers=workers)
            if _fits(smaller, nodes):
                return smaller
    return None


def described(nodes: Sequence[Resources]) -> str:
    """What the nodes have, in words."""
    kinds = ("CPU", "GPU")
    each = [_listed({kind: node[kind] for kind in kinds if node.get(kind)}) or "nothing" for node in nodes]
    return f"the cluster has {len(nodes)} node{'s' * (len(nodes) != 1)} ({'; '.join(each)})"


def _fits(wanted: Placement, nodes: Sequence[Resources]) -> bool:
    left = []
    ranks = wanted.ranks
    for node in nodes:
        here = min(ranks, _times(wanted.rank, node))
        ranks -= here
        left.append({kind: amount - here * wanted.rank.get(kind, 0.0) for kind, amount in node.items()})
    return not ranks and sum(_times(wanted.worker, node) for node in left) >= wanted.workers


def _times(bundle: Resources, node: Resources) -> int:
    return max(0, min(math.floor(node.get(kind, 0.0) / amount + _ROUNDING) for kind, amount in bundle.items()))


def _listed(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items())
