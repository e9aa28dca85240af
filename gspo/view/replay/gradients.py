"""Inner products of the gradients of many losses on one mini-batch.

In: coefficients dL/dlogp of each loss. Out: a Gram matrix of inner products, which gives norms and cosines.
Invariant: all losses share one forward pass per micro-batch; each costs one vector-Jacobian product on its graph.

For small models, every gradient is stored in float32 and the Gram matrix is exact. If that needs more than
`EXACT_BYTES`, each gradient is compressed to `BUCKETS` numbers by a random signed hash (count sketch), which preserves
inner products in expectation: a cosine then has a standard error of at most sqrt(2 / BUCKETS) = 0.0007, and a norm half
of that, relatively.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.activity import activity
from gspo.learner.batch import TrainBatch
from gspo.learner.forward import completion_logprobs
from gspo.learner.loss_scale import INITIAL
from gspo.model.load import Policy

EXACT_BYTES = 2 << 30
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
    """Of a cosine; `0` if exact."""

    def norm(self, i: int) -> float:
        return float(self.inner[i, i].clamp(min=0).sqrt())

    def cosine(self, i: int, j: int) -> float | None:
        """Cosine similarity; `None` if a gradient is 0."""
        norms = self.norm(i) * self.norm(j)
        # Rounding, or a sketch, can exceed 1.
        return max(-1.0, min(1.0, float(self.inner[i, j]) / norms)) if norms else None

    def norm_in_run(self, i: int) -> float:
        """The norm including the load-balancing loss, which a run adds to every objective."""
        if self.balance is None:
            return self.norm(i)
        # If the two gradients nearly cancel, rounding can leave a sum below 0.
        return float((self.inner[i, i] + 2 * self.balance[i] + self.balance[-1]).clamp(min=0).sqrt())


class _GradientStore:
    """Accumulates gradients, either exactly or as a sketch."""

    def __init__(self, weights: Sequence[Tensor], count: int, exact_bytes: int) -> None:
        self.sizes = [w.numel() for w in weights]
        self.sketched = 4 * count * sum(self.sizes) > exact_bytes
        width = BUCKETS if self.sketched else sum(self.sizes)
        # Whole gradients of many objectives do not fit next to the model on a GPU.
        self.rows = torch.zeros(count, width, device=weights[0].device if self.sketched else "cpu")

    def add(self, row: int, gradients: Sequence[Tensor | None]) -> None:
        start = 0
        for number, (gradient, size) in enumerate(zip(gradients, self.sizes, strict=True)):
            if gradient is not None:
                flat = gradient.detach().flatten().float()
                if self.sketched:
                    self._add_sketch(row, number, flat)
                else:
                    self.rows[row, start : start + size] += flat.cpu()
            start += size

    def _add_sketch(self, row: int, number: int, flat: Tensor) -> None:
        """Add a tensor's gradient to its buckets.

        The hash depends only on the tensor's number and the position in it, so all rows use the same one. It is
        regenerated on every call, because storing it would take as much memory as the gradient.
        """
        generator = torch.Generator(device=flat.device).manual_seed(number)
        for part in flat.split(_CHUNK * 16):
            # One random integer gives both the bucket and, by its last bit, the sign.
            hashes = torch.randint(0, 2 * BUCKETS, (len(part),), generator=generator, device=flat.device)
            self.rows[row].index_add_(0, hashes >> 1, torch.where((hashes & 1).bool(), part, -part))

    def gram(self) -> Tensor:
        total = torch.zeros(len(self.rows), len(self.rows), dtype=torch.float64)
        # In chunks, because the whole matrix in float64 would double the memory.
        for part in self.rows.split(_CHUNK, dim=1):
            chunk = part.double()
            total += (chunk @ chunk.T).cpu()
        return total


def _weight_gradients(
    outputs: Sequence[Tensor], weights: Sequence[Tensor], coefficients: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients of sum(coefficient * output), scaled in float16 so that they neither underflow nor overflow."""
    scale = INITIAL if any(w.dtype == torch.float16 for w in weights) else 1.0
    while True:
        scaled = [c * scale for c in coefficients]
        gradients = torch.autograd.grad(outputs, weights, scaled, retain_graph=True, allow_unused=True)
        if scale == 1 or all(bool(g.isfinite().all()) for g in gradients if g is not None):
            return [None if g is None else g.float() / scale for g in gradients]
        scale /= 2


def gram(
    policy: Policy,
    batch: TrainBatch,
    index: int,
    directions: Sequence[Direction],
    *,
    exact_bytes: int = EXACT_BYTES,
) -> Gram:
    """Inner products of the directions' gradients in optimizer step `index`, at the current weights."""
    weights = [p for p in policy.model.parameters() if p.requires_grad]
    store = _GradientStore(weights, len(directions) + 1, exact_bytes)
    balanced = False
    # The graph of the entropy costs memory, and few objectives need it.
    entropy = any(d.entropy_N is not None for d in directions)
    micros = batch.plan.updates[index]
    with activity("gradients", total=len(micros) * len(directions), unit="backward passes") as doing:
        for cpu_batch in micros:
            micro = cpu_batch.to(policy.device)
            with batch.routing.learning(micro) as seen:
                # Without the optimizer's buffer: `autograd.grad` would miss the gradient in it, and the next update of
                # the replayed step would contain it.
                logp_N, entropy_N = completion_logprobs(
                    policy.model, micro, batch.temperature, entropy_gradient=entropy, head_buffer=False
                )
                # Every backward pass keeps the graph, because all directions share this forward pass.
                for row, direction in enumerate(directions):
                    outputs = [logp_N]
                    coefficients = [direction.logp_N[micro.at_N]]
                    if direction.entropy_N is not None:
                        outputs.append(entropy_N)
                        coefficients.append(direction.entropy_N[micro.at_N])
                    if any(bool(c.any()) for c in coefficients):  # all 0 if the whole micro-batch is clipped
                        store.add(row, _weight_gradients(outputs, weights, coefficients))
                    doing.done += 1
                auxiliary = batch.routing.balance_loss(micro, seen, index)
                if isinstance(auxiliary, Tensor):
                    balanced = True
                    gradient = _weight_gradients([auxiliary], weights, [torch.ones_like(auxiliary)])
                    # In a row of its own: the balance loss is the same for all objectives and would pull their cosines
                    # together.
                    store.add(len(directions), gradient)
    inner = store.gram()
    return Gram(
        inner=inner[:-1, :-1],
        balance=inner[-1] if balanced else None,
        standard_error=(2 / BUCKETS) ** 0.5 if store.sketched else 0.0,
    )
