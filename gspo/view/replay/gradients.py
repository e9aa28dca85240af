"""Gradients of many losses on one mini-batch, and how they lie to each other.

In: coefficients dL/dlogp of each loss. Out: a Gram matrix of inner products, from which norms and cosines follow.
Invariant: all losses share one forward per micro-batch; each costs one vector-Jacobian product on its graph.

Small models: every gradient is held in float32 and the Gram matrix is exact. Where that would take more than `HELD_BYTES`,
each gradient is folded into `BUCKETS` numbers by a random signed hash (count sketch), which keeps inner products on
average: a cosine then has a standard error of at most sqrt(2 / BUCKETS) = 0.0007, and a norm half of that, relatively.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.learner.batch import TrainBatch
from gspo.learner.forward import completion_logprobs
from gspo.model.load import Policy

HELD_BYTES = 2 << 30
BUCKETS = 1 << 22
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Direction:
    """The coefficients of one loss, over all tokens of the batch."""

    logp_N: Tensor
    entropy_N: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Gram:
    """Inner products of gradients."""

    inner: Tensor
    """[directions, directions], float64."""
    balance: Tensor | None
    """Inner products of the auxiliary load-balancing loss's gradient with every direction, then with itself."""
    standard_error: float
    """Of a cosine; 0: exact."""

    def norm(self, i: int) -> float:
        return float(self.inner[i, i].clamp(min=0).sqrt())

    def cosine(self, i: int, j: int) -> float | None:
        """None where a gradient is 0."""
        norms = self.norm(i) * self.norm(j)
        return max(-1.0, min(1.0, float(self.inner[i, j]) / norms)) if norms else None

    def norm_in_run(self, i: int) -> float:
        """The norm with the load-balancing loss, which a run adds to any objective."""
        if self.balance is None:
            return self.norm(i)
        return float((self.inner[i, i] + 2 * self.balance[i] + self.balance[-1]).clamp(min=0).sqrt())


class _Store:
    """Adds gradients up, as they are or folded."""

    def __init__(self, weights: Sequence[Tensor], count: int, held_bytes: int) -> None:
        self.sizes = [w.numel() for w in weights]
        self.folded = 4 * count * sum(self.sizes) > held_bytes
        width = BUCKETS if self.folded else sum(self.sizes)
        self.rows = torch.zeros(count, width, device=weights[0].device if self.folded else "cpu")

    def add(self, row: int, gradients: Sequence[Tensor | None]) -> None:
        start = 0
        for number, (gradient, size) in enumerate(zip(gradients, self.sizes, strict=True)):
            if gradient is not None:
                flat = gradient.detach().flatten().float()
                if self.folded:
                    self._fold(row, number, flat)
                else:
                    self.rows[row, start : start + size] += flat.cpu()
            start += size

    def _fold(self, row: int, number: int, flat: Tensor) -> None:
        """The hash of a weight is a function of its tensor's number and its place, drawn anew every time."""
        generator = torch.Generator(device=flat.device).manual_seed(number)
        for part in flat.split(_CHUNK * 16):
            draw = torch.randint(0, 2 * BUCKETS, (len(part),), generator=generator, device=flat.device)
            self.rows[row].index_add_(0, draw >> 1, torch.where((draw & 1).bool(), part, -part))

    def gram(self) -> Tensor:
        total = torch.zeros(len(self.rows), len(self.rows), dtype=torch.float64)
        for part in self.rows.split(_CHUNK, dim=1):
            wide = part.double()
            total += (wide @ wide.T).cpu()
        return total


def gram(policy: Policy, batch: TrainBatch, index: int, directions: Sequence[Direction], *, held_bytes: int = HELD_BYTES) -> Gram:  # fmt: skip
    """Inner products of the directions' gradients in optimiser step `index`, at the weights as they are."""
    weights = [p for p in policy.model.parameters() if p.requires_grad]
    store, balanced = _Store(weights, len(directions) + 1, held_bytes), False
    entropy = any(d.entropy_N is not None for d in directions)
    for cpu_batch in batch.plan.updates[index]:
        micro = cpu_batch.to(policy.device)
        with batch.routing.learning(micro) as seen:
            logp_N, entropy_N = completion_logprobs(policy.model, micro, batch.temperature, entropy_gradient=entropy)
            for row, direction in enumerate(directions):
                outputs, given = [logp_N], [direction.logp_N[micro.at_N]]
                if direction.entropy_N is not None:
                    outputs, given = [logp_N, entropy_N], [*given, direction.entropy_N[micro.at_N]]
                if any(bool(g.any()) for g in given):
                    store.add(row, torch.autograd.grad(outputs, weights, given, retain_graph=True, allow_unused=True))
            auxiliary = batch.routing.balance_loss(micro, seen, index)
            if isinstance(auxiliary, Tensor):
                balanced = True
                store.add(len(directions), torch.autograd.grad(auxiliary, weights, retain_graph=True, allow_unused=True))  # fmt: skip
    inner = store.gram()
    return Gram(
        inner=inner[:-1, :-1],
        balance=inner[-1] if balanced else None,
        standard_error=(2 / BUCKETS) ** 0.5 if store.folded else 0.0,
    )
