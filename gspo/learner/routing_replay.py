"""Routing replay of one rollout batch: the experts of the old policy, those of training forwards, and the flips.

In: the routers, the plan and, if the engine reports them, the experts of the sampler. Out: contexts to run the forwards
in, and statistics. Invariant: experts are stored by input token of the plan (prompts and completions, concatenated),
and a forward finds them through `MicroBatch.input_at`. So they follow a token through any split, order, packing or
sharing of prompts. Padding has no experts and is never counted.

    replay = "off"       every forward selects its own experts; flips are only counted
    replay = "old"       R2: training forwards replay the experts of the forward that gave the old log-probs
    replay = "sampler"   R3: that forward, and with it the training forwards, replays the experts of the sampler

With `learner.old_logp = "sampler"` there is no old forward beyond the first mini-batch, and the old policy's experts
are those that the engine reported. Tokens without a report are neither replayed nor counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo.clock import Clock
from gspo.errors import ConfigError
from gspo.learner.plan import Plan
from gspo.model.lm_head import supports_logits_to_keep
from gspo.model.micro_batch import MicroBatch
from gspo.model.out_of_memory import out_of_memory
from gspo.model.packed_forward import run_forward
from gspo.model.routing import ForcedExperts, Routers, RouterTrace, count_expert_changes
from gspo.ranks.group import ONE, Ranks
from gspo.types import Routes


@dataclass(frozen=True, kw_only=True)
class RoutingStats:
    """Routing statistics of a step. A flip is an expert that differs from that of an earlier forward. Flips are counted
    per sampled token, at the position that predicts it, summed over layers."""

    flipped_N: Tensor
    """Experts used by the training forward that the old one did not use; 0 everywhere under replay."""
    native_N: Tensor
    """The same for the experts that the routers would have selected without replay."""
    sampler_N: Tensor
    """Experts used by the old forward that the sampler did not use; -1 if the engine did not report them."""
    update_N: Tensor
    """Updates between the old and the training forward; -1 if not measured."""
    load_LE: Tensor
    """How often the old forward used each expert, over prompt and completion tokens."""
    choices: int
    """Experts per token over all layers: layers x top-k."""
    replayed: bool
    balance_losses: tuple[float, ...]
    """The auxiliary loss of each optimizer step, coefficient included; empty without that loss."""
    stored_bytes: int = 0
    """Memory of the stored experts."""
    sampler_bytes: int = 0
    """Bytes of the experts that the engine reported."""
    seconds: float = 0.0
    """Time of the host that recording and replaying took."""


class RecordedRouting:
    """Owns the experts of one batch while it is trained on."""

    def __init__(
        self,
        routers: Routers,
        plan: Plan,
        sampled: Sequence[Routes | None],
        *,
        replay: str,
        balance: float,
        device: torch.device,
        ranks: Ranks = ONE,
    ) -> None:
        self.ranks = ranks
        self.routers = routers
        self.plan = plan
        self.replay = replay
        self.balance = balance
        self.clock = Clock()
        self.sampler_bytes = sum(len(routes.experts) for routes in sampled if routes is not None)
        shape = (plan.input_tokens, routers.layers, routers.top_k)
        self.old_ILK = torch.zeros(shape, dtype=routers.compact, device=device)
        """The experts that the old policy's forward used."""
        self.native_ILK = torch.zeros_like(self.old_ILK) if balance else None
        """The experts it would have used without replay."""
        self.old_known_I: Tensor | None = None
        """Input tokens whose experts in the old policy's forward are known; None if all are."""
        with self.clock.measure("routing"):
            self.sampler_ILK, self.known_I = self._sampler_experts(sampled, device)
        self.flipped_N, self.native_N, self.sampler_N = (
            torch.full((plan.tokens,), start, dtype=torch.int16, device=device) for start in (0, 0, -1)
        )
        self._balance: dict[tuple[int, tuple[int, ...]], float] = {}
        self._shares_cache: dict[int, tuple[Tensor, int]] = {}

    def _sampler_experts(self, sampled: Sequence[Routes | None], device: torch.device) -> tuple[Tensor, Tensor]:
        chosen_ILK = torch.zeros(self.old_ILK.shape, dtype=self.old_ILK.dtype)
        known_I = torch.zeros(len(chosen_ILK), dtype=torch.bool)
        # The same memory in numpy: a batch has hundreds of short spans, and torch takes several times as long for each.
        chosen, known = chosen_ILK.numpy(), known_I.numpy()
        for start, sequence, routes in zip(self.plan.input_starts, self.plan.sequences, sampled, strict=True):
            if routes is None:
                if self.replay == "sampler":
                    raise ConfigError(
                        'routing.replay = "sampler": the engine did not report the experts of its completions; '
                        'use an engine that reports them, or set routing.replay = "old"'
                    )
                continue
            # The engine samples the last token of a branch but never reads it, so it has no experts to report.
            reported = self._reported(routes, sequence.length - 1)
            chosen[start : start + len(reported)] = reported
            known[start : start + sequence.length] = True
            known[start + sequence.unread] = False
        if chosen.size and int(chosen.max()) >= self.routers.experts:
            raise ConfigError(
                f"the engine reported expert {int(chosen.max())}, but the model has {self.routers.experts}: "
                "it does not run this model; start the engine with the model of the run"
            )
        return chosen_ILK.to(device), known_I.to(device)

    def _reported(self, routes: Routes, tokens: int) -> NDArray[Any]:
        """The experts that an engine reported for a sequence, if their shape fits this model."""
        reported = self.routers.unpack(routes).numpy()
        shape = (tokens, self.routers.layers, self.routers.top_k)
        if reported.shape != shape:
            raise ConfigError(
                f"the engine reported experts of shape {reported.shape} (tokens, layers, experts per token) "
                f"instead of {shape}: it does not run this model; start the engine with the model of the run"
            )
        return reported

    # ---- old and training forwards

    @property
    def repeats(self) -> bool:
        return self.replay == "off" and not self.balance

    @contextmanager
    def old(self, micro: MicroBatch) -> Iterator[None]:
        with self.clock.measure("routing"):
            forced = self._forced_experts(micro, self.sampler_ILK, self.known_I) if self.replay == "sampler" else None
        with self.routers.watch(forced, clock=self.clock) as trace:
            yield
        with self.clock.measure("routing"):
            self._store_old(micro, trace)

    def _store_old(self, micro: MicroBatch, trace: RouterTrace) -> None:
        used_ILK = trace.used_ILK
        at_I = micro.input_at.flatten()
        real_I = micro.times.flatten() > 0
        self.old_ILK[at_I[real_I]] = used_ILK[real_I]
        if self.native_ILK is not None:
            self.native_ILK[at_I[real_I]] = trace.native_ILK[real_I]
        at_N = self._input_of(micro)
        differ_N = count_expert_changes(used_ILK[micro.output_N], self.sampler_ILK[at_N])
        self.sampler_N[micro.at_N] = torch.where(self.known_I[at_N], differ_N, -1).to(torch.int16)

    def old_from_sampler(self) -> None:
        self.old_ILK = torch.where(self.known_I[:, None, None], self.sampler_ILK, self.old_ILK)
        self.old_known_I = self.known_I

    @contextmanager
    def learning(self, micro: MicroBatch) -> Iterator[RouterTrace]:
        with self.clock.measure("routing"):
            forced = None if self.replay == "off" else self._forced_experts(micro, self.old_ILK, self.old_known_I)
        with self.routers.watch(forced, logits=bool(self.balance), clock=self.clock) as trace:
            yield trace
        with self.clock.measure("routing"):
            self._count_flips(micro, trace)

    def _count_flips(self, micro: MicroBatch, trace: RouterTrace) -> None:
        old_NLK = self.old_ILK[self._input_of(micro)]
        output_N = micro.output_N
        self.flipped_N[micro.at_N] = count_expert_changes(trace.used_ILK[output_N], old_NLK).to(torch.int16)
        self.native_N[micro.at_N] = count_expert_changes(trace.native_ILK[output_N], old_NLK).to(torch.int16)

    def _forced_experts(self, micro: MicroBatch, chosen_ILK: Tensor, known_I: Tensor | None) -> ForcedExperts:
        at_I = micro.input_at.flatten()
        real_I, at_I = at_I >= 0, at_I.clamp(min=0)
        return ForcedExperts(chosen_ILK=chosen_ILK[at_I], known_I=real_I if known_I is None else real_I & known_I[at_I])

    def _input_of(self, micro: MicroBatch) -> Tensor:
        """Input tokens of the plan at the positions that predict sampled tokens."""
        return micro.input_at.flatten()[micro.output_N]

    # ---- statistics

    def outcome(self, model: Any) -> RoutingStats | None:
        if not any(self.plan.updates):
            return None
        with self.clock.measure("routing"):
            updates_N = self._updates_between(model)
        stored = (
            self.old_ILK,
            self.sampler_ILK,
            self.known_I,
            *(() if self.native_ILK is None else (self.native_ILK,)),
        )
        ranks = self.ranks
        seconds = torch.tensor(self.clock.seconds["routing"], dtype=torch.float64)
        return RoutingStats(
            # A rank counts the flips of its own tokens. Those of others are 0 here, and -1 where that means unknown.
            flipped_N=ranks.sum(self.flipped_N),
            native_N=ranks.sum(self.native_N),
            sampler_N=ranks.max(self.sampler_N),
            update_N=ranks.max(updates_N),
            load_LE=ranks.sum(self._load()),
            choices=self.routers.layers * self.routers.top_k,
            replayed=self.replay != "off",
            balance_losses=self._balance_losses(),
            stored_bytes=int(ranks.sum(torch.tensor(sum(tensor.nbytes for tensor in stored)))),
            sampler_bytes=self.sampler_bytes,
            seconds=float(ranks.max(seconds)),
        )

    def _load(self) -> Tensor:
        """How often the old forward used each expert, by layer."""
        # Counted at the end, so that a forward that was repeated, after memory ran out, counts once.
        used_ILK, times_I = self._inputs(self.old_ILK, chain.from_iterable(self.plan.updates))
        return self._count(used_ILK, times_I).long()

    def _inputs(self, chosen_ILK: Tensor, micro_batches: Iterable[MicroBatch]) -> tuple[Tensor, Tensor]:
        """The experts of the input tokens of some micro-batches, and how many sequences contain each token."""
        micros = list(micro_batches)
        at_I = torch.cat([micro.input_at.flatten() for micro in micros]).to(chosen_ILK.device)
        times_I = torch.cat([micro.times.flatten() for micro in micros]).to(chosen_ILK.device)
        return chosen_ILK[at_I.clamp(min=0)], times_I

    def _count(self, chosen_ILK: Tensor, times_I: Tensor) -> Tensor:
        """How often each expert was selected, by layer. A token of a shared prompt counts once for every sequence that
        contains it."""
        layers = range(self.routers.layers)
        return torch.stack([_expert_counts(chosen_ILK[:, i], times_I, self.routers.experts) for i in layers])

    def _balance_losses(self) -> tuple[float, ...]:
        updates = sorted({update for update, _ in self._balance})
        sums = [sum(loss for (at, _), loss in self._balance.items() if at == update) for update in updates]
        return tuple(self.ranks.sum(torch.tensor(sums, dtype=torch.float64)).tolist())

    def _updates_between(self, model: Any) -> Tensor:
        """How many updates came before each token's training forward."""
        updates_N = torch.full_like(self.flipped_N, -1)
        for index, micro_batches in enumerate(self.plan.updates):
            for micro in (m.to(updates_N.device) for m in micro_batches):
                measured_N = True if self.old_known_I is None else self.old_known_I[self._input_of(micro)]
                updates_N[micro.at_N] = torch.where(torch.as_tensor(measured_N), index, -1).to(updates_N.dtype)
        if len(self.plan.updates) == 1:
            # No training forward came after an update, so one more forward measures the flips that the update caused.
            self._probe(model, self.plan.updates[0][len(self.plan.updates[0]) // 2], updates_N)
        return updates_N

    def _probe(self, model: Any, cpu_batch: MicroBatch, updates_N: Tensor) -> None:
        """Count the flips of a forward without training, over a micro-batch or, if memory runs out, half of it."""
        micro = cpu_batch.to(updates_N.device)
        # Only the routers matter here, so the LM head computes as little as it can.
        options = {"logits_to_keep": 1} if supports_logits_to_keep(model) else {}
        forced = None if self.replay == "off" else self._forced_experts(micro, self.old_ILK, self.old_known_I)
        try:
            with self.routers.watch(forced) as trace, torch.no_grad():
                run_forward(model, micro, **options)
        except Exception as error:
            # Other ranks would wait for the forward that failed.
            if not out_of_memory(error) or self.ranks.several:
                raise
            # A statistic must not end the run: if a single sequence does not fit, it is not measured.
            if len(micro.sequence_ids) > 1:
                self._probe(model, self.plan.halves(cpu_batch)[0], updates_N)
            return
        self._count_flips(micro, trace)
        updates_N[micro.at_N] = 1

    # ---- auxiliary load-balancing loss

    def balance_loss(self, micro: MicroBatch, trace: RouterTrace | None, update_index: int) -> Tensor | float:
        """Coefficient x E sum_e f_e P_e, mean over layers; 1 when the load is even (Switch, arXiv:2101.03961).

        Both factors use native routing, without replay. `f`, the share of selections that fall on an expert, comes
        from the old policy over the whole optimizer step, computed before it is split. `P`, the mean router
        probability, comes from the policy in training. So the loss is a sum over tokens, and micro-batching does not
        change it."""
        if not self.balance or trace is None:
            return 0.0
        share_LE, tokens = self._shares(update_index)
        times_I = micro.times.flatten().float()
        terms = [
            (share_LE[layer] * (times_I @ torch.softmax(logits_IE.float(), dim=-1))).sum()
            for layer, logits_IE in sorted(trace.logits.items())
        ]
        loss = self.balance * self.routers.experts * torch.stack(terms).mean() / tokens
        # After an out-of-memory error the update restarts with smaller micro-batches, whose losses replace these.
        same_update = [key for key in self._balance if key[0] == update_index]
        outdated = [key for key in same_update if not set(key[1]).isdisjoint(micro.sequence_ids)]
        for key in outdated:
            del self._balance[key]
        self._balance[update_index, micro.sequence_ids] = float(loss.detach())
        return loss

    def _shares(self, update_index: int) -> tuple[Tensor, int]:
        """Share of each expert by layer, and the number of tokens, in an optimizer step."""
        if update_index not in self._shares_cache:
            self._shares_cache[update_index] = self._compute_shares(update_index)
        return self._shares_cache[update_index]

    def _compute_shares(self, update_index: int) -> tuple[Tensor, int]:
        assert self.native_ILK is not None
        native_ILK, times_I = self._inputs(self.native_ILK, self.plan.updates[update_index])
        tokens = int(self.ranks.sum(times_I.sum()))
        counts_LE = self.ranks.sum(self._count(native_ILK, times_I))
        return counts_LE.float() / (tokens * self.routers.top_k), tokens


def _expert_counts(chosen_IK: Tensor, times_I: Tensor, experts: int) -> Tensor:
    """How often each expert was selected, with each token counted `times_I` times."""
    # bincount adds float32 weights in float32, which loses counts above 2^24.
    weights = times_I.double().unsqueeze(-1).expand(chosen_IK.shape).flatten()
    return torch.bincount(chosen_IK.flatten().long(), weights=weights, minlength=experts)
