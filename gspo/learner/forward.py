"""Log-probs of sampled tokens under a model, by the learner's forward pass.

In: a micro-batch, or a plan of them. Out: `logp_N` and `entropy_N` in float32. Invariant: the policy is the
distribution that was sampled from, so logits are divided by the sampling temperature, and end tokens that could not be
sampled (`rollout.min_tokens`) have probability 0. The EOS token counts; prompt, padding and tokens that the model was
given do not. If memory runs out, micro-batches are halved; the gradient is the same up to rounding, because token
weights belong to the optimizer step and not to the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from gspo.activity import activity, counted
from gspo.learner.plan import Plan
from gspo.model.compiled_layers import compiled_layers, prepare_layers
from gspo.model.context_parallel import gather_logprobs
from gspo.model.kernels.fused_linear_logprobs import LOWEST, fused_linear_logprobs
from gspo.model.lm_head import bypass_head, gradient_buffer, lm_head, supports_logits_to_keep
from gspo.model.micro_batch import MicroBatch
from gspo.model.out_of_memory import out_of_memory, release_memory
from gspo.model.packed_forward import run_forward
from gspo.model.sharding import full, reshard, synchronize_gradients
from gspo.ranks.group import ONE, Ranks

if TYPE_CHECKING:
    from gspo.context import LearnContext
    from gspo.learner.batch import TrainBatch
    from gspo.learner.result import GradientResult
    from gspo.learner.routing_replay import RoutingStats
    from gspo.model.routing import RouterTrace


def completion_logprobs(
    model: Any, batch: MicroBatch, temperature: float, *, entropy_gradient: bool = False, head_buffer: bool = True
) -> tuple[Tensor, Tensor]:
    """(logp_N, entropy_N). The entropy carries a gradient only with `entropy_gradient`. Without `head_buffer`, the
    gradient of the LM head flows through autograd even if an optimizer has a float32 buffer for it."""
    head = lm_head(model)
    if head is None:
        return _from_logits(model, batch, temperature, entropy_gradient)
    with bypass_head(head), compiled_layers(model, batch):
        hidden = run_forward(model, batch)
    if not torch.is_grad_enabled():
        hidden = hidden.detach()  # compiled layers always have a graph
    # Read after the forward pass, while the layers that FSDP gathers for it are whole.
    weight = full(head.weight)
    logp_N, entropy_N = fused_linear_logprobs(
        hidden.flatten(0, 1)[batch.output_N],
        weight,
        batch.target_N,
        temperature,
        weight_gradient=gradient_buffer(weight) if head_buffer else None,
        excluded=batch.excluded,
    )
    return logp_N.float(), (entropy_N if entropy_gradient else entropy_N.detach()).float()


def _from_logits(model: Any, batch: MicroBatch, temperature: float, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """`completion_logprobs` for models whose logits are more than hidden states times a matrix."""
    # Outputs before the first position that predicts a sampled token are never read, so the LM head skips them.
    width = batch.input_ids.shape[1]
    column_N = batch.output_N % width
    first = int(column_N.min()) if supports_logits_to_keep(model) and len(column_N) else 0
    with compiled_layers(model, batch):
        logits = run_forward(model, batch, **({"logits_to_keep": width - first} if first else {}))
    if not torch.is_grad_enabled():
        logits = logits.detach()  # compiled layers always have a graph
    # In float32 from here on: log-ratios are compared with clip ranges of a few 1e-4, which bfloat16 rounding reaches.
    logits_NV = logits[batch.output_N // width, column_N - first].float() / temperature
    if batch.excluded is not None:
        lowest = logits_NV.new_tensor(LOWEST)
        logits_NV = logits_NV.index_put((batch.excluded.rows[:, None], batch.excluded.ids), lowest)
    normalizer_N = torch.logsumexp(logits_NV, dim=-1)
    logp_N = logits_NV.gather(-1, batch.target_N.unsqueeze(-1)).squeeze(-1) - normalizer_N
    # Without a bonus the entropy is only reported, and its graph would hold another tensor of size [N, V].
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        scores_NV = logits_NV if entropy_gradient else logits_NV.detach()
        probability_NV = torch.softmax(scores_NV, dim=-1)
        entropy_N = torch.logsumexp(scores_NV, dim=-1) - (probability_NV * scores_NV).sum(-1)
    return logp_N, entropy_N


@torch.no_grad()
def plan_logprobs(
    model: Any,
    plan: Plan,
    temperature: float,
    device: torch.device,
    *,
    update: int | None = None,
    routed: Callable[[MicroBatch], AbstractContextManager[Any]] = lambda micro: nullcontext(),
    ranks: Ranks = ONE,
) -> tuple[Tensor, Tensor]:
    """Packed (logp_N, entropy_N) of a whole plan, or of one of its optimizer steps (0 elsewhere), without gradient.

    Each forward runs inside `routed(micro_batch)`. Every rank gets the values that all of them compute."""
    lm_head(model)  # its first call runs a trial forward, which must not be recorded by `routed`
    logp_N, entropy_N = torch.zeros(plan.tokens, device=device), torch.zeros(plan.tokens, device=device)
    updates = plan.updates if update is None else plan.updates[update : update + 1]
    # A stack, so that the halves of a micro-batch that did not fit are computed next, in the plan's order.
    waiting = [micro for micro_batches in reversed(updates) for micro in reversed(micro_batches)]
    with activity("log-probs", total=len(waiting), unit="micro-batches") as doing:
        while waiting:
            doing.done = max(0, doing.total - len(waiting))
            cpu_batch = waiting.pop()
            batch = cpu_batch.own.to(device)
            try:
                prepare_layers(model, batch)  # likewise
                with routed(batch):
                    logp_N[batch.at_N], entropy_N[batch.at_N] = completion_logprobs(model, batch, temperature)
            except Exception as error:
                halves = plan.halves(cpu_batch)
                # Another rank would wait for the forward that failed.
                if not out_of_memory(error) or len(halves) < 2 or ranks.several:
                    raise
                waiting += reversed(halves)
    # No backward pass frees what is still gathered. An update without a gradient has none either, and changes weights.
    reshard(model)
    return ranks.sum(logp_N), ranks.sum(entropy_N)


# ---- training forwards


class RoutingReplay(Protocol):
    """How the model routes in the forwards of one batch. `routing_replay.py` records and replays experts."""

    @property
    def repeats(self) -> bool:
        """Whether a training forward with unchanged weights is the old forward again, with nothing more to record."""

    def old(self, micro: MicroBatch) -> AbstractContextManager[None]:
        """The context of the forward that gives the old log-probs."""

    def old_from_sampler(self) -> None:
        """The old log-probs are the engine's: take its experts as those of the old policy."""

    def learning(self, micro: MicroBatch) -> AbstractContextManager[RouterTrace | None]:
        """The context of a training forward and its backward pass."""

    def balance_loss(self, micro: MicroBatch, trace: RouterTrace | None, update_index: int) -> Tensor | float:
        """This micro-batch's share of the auxiliary load-balancing loss."""

    def outcome(self, model: Any) -> RoutingStats | None:
        """Routing statistics of the batch; None if nothing was recorded."""


class NoRouting:
    """Routing of a dense model, or of an MoE model whose routing is not recorded: does nothing."""

    repeats = True

    def old(self, micro: MicroBatch) -> AbstractContextManager[None]:
        return nullcontext()

    def old_from_sampler(self) -> None:
        pass

    def learning(self, micro: MicroBatch) -> AbstractContextManager[None]:
        return nullcontext()

    def balance_loss(self, micro: MicroBatch, trace: RouterTrace | None, update_index: int) -> float:
        return 0.0

    def outcome(self, model: Any) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class TrainForward:
    """A forward pass with gradient."""

    logp_N: Tensor
    entropy_N: Tensor
    balance_loss: Callable[[], Tensor | float] = lambda: 0.0
    """This micro-batch's share of the auxiliary load-balancing loss."""


def micro_batches(context: LearnContext, batch: TrainBatch, update_index: int) -> Iterator[MicroBatch]:
    """The micro-batches of an optimizer step on the device. If the model is sharded, ranks exchange gradients in the
    backward pass of the last one, which holds the sum."""
    model, device = context.policy.model, context.policy.device
    own = batch.plan.updates[update_index]
    name = f"update {update_index + 1}/{len(batch.plan.updates)}"
    for index, micro in enumerate(counted(own, name, total=len(own), unit="micro-batches"), start=1):
        synchronize_gradients(model, index == len(own))
        yield micro.to(device)


@contextmanager
def training_forward(
    context: LearnContext, batch: TrainBatch, micro: MicroBatch, update_index: int
) -> Iterator[TrainForward]:
    """The forward of a micro-batch of an optimizer step. The backward pass belongs inside the context too."""
    # Their first calls run trial forwards, which routers that are being watched would record.
    lm_head(context.policy.model)
    prepare_layers(context.policy.model, micro)
    # The first optimizer step has the weights of the old policy, so its forwards can be the old ones, too.
    is_old = update_index == 0 and batch.old.by_training
    # Gradient checkpointing repeats the forward during the backward pass, and it must choose the same experts.
    own = micro.own
    with batch.routing.old(own) if is_old else batch.routing.learning(own) as trace:
        logp_N, entropy_N = completion_logprobs(
            context.policy.model,
            own,
            batch.temperature,
            entropy_gradient=bool(context.objective.entropy),
        )
        if context.ranks.context is not None:
            logp_N, entropy_N = gather_logprobs(micro, context.ranks.context, logp_N, entropy_N)
        if is_old:
            batch.old.fill(micro.at_N, logp_N, entropy_N)
        elif batch.old.age_N is not None:
            batch.old.interpolate(micro.at_N, logp_N, context.optimizer.updates)
        yield TrainForward(
            logp_N=logp_N,
            entropy_N=entropy_N,
            balance_loss=lambda: batch.routing.balance_loss(own, trace, update_index),
        )


# ---- out of memory, and float16 overflow


class Attempt:
    """One try of an update. Its context swallows an out-of-memory error if smaller micro-batches may help."""

    result: GradientResult
    """Set by the caller, inside the context."""

    def __init__(self, batch: TrainBatch, update_index: int, halvings: int, *, may_halve: bool) -> None:
        self.batch = batch
        self.halvings = halvings
        self.smaller: Plan | None = None
        self._update_index = update_index
        self._may_halve = may_halve

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        # Any other error is not about memory, and smaller micro-batches would only repeat it.
        if error is not None and self._may_halve and out_of_memory(error):
            # None for single sequences, which are not split.
            self.smaller = self.batch.plan.halved(self._update_index)
        return self.smaller is not None


def attempts(context: LearnContext, batch: TrainBatch, update_index: int) -> Iterator[Attempt]:
    """Attempts at the gradients of an update: `for attempt in attempts(...): with attempt: attempt.result = ...`.

    After an out-of-memory error the next one has micro-batches of half the size. After an overflow in float16 it has
    half the loss scale. The last one succeeds or raises."""
    halvings = 0
    while True:
        # Other ranks wait for a forward that failed, so a rank of several cannot repeat it.
        attempt = Attempt(batch, update_index, halvings, may_halve=not context.ranks.several)
        yield attempt
        if attempt.smaller is not None:
            # By now the traceback of the error, which held the tensors that did not fit, is gone.
            batch = replace(batch, plan=attempt.smaller)
            halvings += 1
            context.policy.model.zero_grad(set_to_none=True)
            release_memory()
        elif not context.optimizer.retry_after_overflow(loss_finite=attempt.result.finite):
            return
