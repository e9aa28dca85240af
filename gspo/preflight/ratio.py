"""The learner's log-probabilities of fresh replies: twice the same, and those of the engine.

Invariant: forwards and backwards are the run's own functions on the run's own micro-batches; no weight changes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gspo.learner.forward import completion_logprobs, plan_logprobs
from gspo.learner.packing import reads_packed
from gspo.learner.plan import MicroBatch, Plan, TokenSequence, make_plan
from gspo.learner.routing_replay import NoRouting, route
from gspo.model.lm_head import lm_head
from gspo.objectives.rounding import rounding_noise
from gspo.objectives.sequences import Sequences
from gspo.preflight.case import PATIENCE_S, Case
from gspo.preflight.findings import Finding, fail, note, ok, warning
from gspo.preflight.machine import free_memory
from gspo.preflight.memory import LOGIT_BYTES, activation_bytes, logits_held, shape_of
from gspo.record.alarms import NOISY
from gspo.types import Completion, Prompt


@dataclass(frozen=True, kw_only=True)
class LogprobsByPolicy:
    """Log-probabilities of the sampled replies by policy, for the tokens that were computed."""

    plan: Plan
    routing: NoRouting
    old_N: Tensor
    new_N: Tensor
    sampler_N: Tensor
    known_N: Tensor
    micro_batches: int


def check_ratio(case: Case) -> Iterator[Finding]:
    budget = case.config.learner.micro_batch_tokens
    fitting, width = _fitting(case)
    if fitting < width:
        yield fail(f"Learning from even one row of {width} tokens does not fit the free memory.", "See memory below.")
        return
    if fitting < budget:
        yield note(f"learner.micro_batch_tokens = {budget} does not fit the free memory; this check used {fitting}.")
    fresh = _fresh(case, min(budget, fitting))
    case.fresh = fresh
    old_N, new_N = fresh.old_N[fresh.known_N], fresh.new_N[fresh.known_N]
    where = f"{len(old_N)} fresh reply tokens in {fresh.micro_batches} micro-batch{'es' * (fresh.micro_batches > 1)}"
    if torch.equal(old_N, new_N):
        yield ok(f"On {where} the learning forward repeats the old log-probabilities to the bit: every ratio is exactly 1.", tokens=len(old_N), deviation=0.0)  # fmt: skip
        return
    token = float((new_N - old_N).abs().max())
    sequences = Sequences(fresh.plan.sequence_N.to(old_N.device), len(fresh.plan.rows))
    whole = float(sequences.mean(fresh.new_N - fresh.old_N).abs().max())
    level = warning if whole <= 1e-5 else fail
    yield level(
        f"On {where} two forwards of the same weights disagree: log-ratios up to {token:.2g} for a token and {whole:.2g} for a whole reply, where all should be 0.",
        "Something in the model is random or depends on the moment: look for dropout or noise in its config and code; on a GPU also for non-deterministic kernels.",
        tokens=len(old_N), deviation=token, sequence_deviation=whole,
    )  # fmt: skip


def _fitting(case: Case) -> tuple[int, int]:
    """Tokens of a micro-batch that the memory that is free now allows for, and of the longest row."""
    assert case.policy is not None
    model = case.policy.model
    shape, size = shape_of(model), next(model.parameters()).element_size()
    width = max(len(g.prompt.token_ids) + len(c.token_ids) for g in case.groups or () for c in g.completions)
    checkpointing = case.config.model.gradient_checkpointing
    budget = case.config.learner.micro_batch_tokens
    logits = logits_held(case, budget, shape.vocabulary) * LOGIT_BYTES / budget
    per_token = activation_bytes(shape, size, width, checkpointing=checkpointing) + logits
    room = 0.8 * free_memory(case.policy.device)[0] - sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    return int(max(0.0, room) / per_token), width


def _fresh(case: Case, budget: int) -> LogprobsByPolicy:
    """Old and learning forward, and backward, of the sampled replies: whole micro-batches, while patience lasts."""
    assert case.policy is not None
    config, policy, replies = case.config, case.policy, _replies(case)
    plan = make_plan(
        [TokenSequence(prompt_ids=p.token_ids, completion_ids=c.token_ids) for _, p, c in replies], [g for g, _, _ in replies],
        mini_batches=config.learner.mini_batches, token_budget=budget, pad_id=policy.pad_id, seed=f"{config.seed}/mini-batches/1",
        packed=reads_packed(policy.model),
    )  # fmt: skip
    routing = route(policy.routers, plan, [c.routes for _, _, c in replies], replay=config.routing.replay, balance=config.routing.balance_loss, device=policy.device)  # fmt: skip
    old_N, new_N = torch.zeros(plan.tokens, device=policy.device), torch.zeros(plan.tokens, device=policy.device)
    known_N = torch.zeros(plan.tokens, dtype=torch.bool, device=policy.device)
    started, done, rows = time.monotonic(), 0, 0
    for cpu_batch in chain.from_iterable(plan.updates):
        if done and time.monotonic() - started > PATIENCE_S:
            break
        micro = cpu_batch.to(policy.device)
        alone = replace(plan, updates=((cpu_batch,),))
        old_N += plan_logprobs(policy.model, alone, config.rollout.temperature, policy.device, routed=routing.old)[0]
        new_N[micro.at_N] = _learn(case, micro, routing)
        known_N[micro.at_N] = True
        done, rows = done + 1, rows + len(micro.rows)
    policy.model.zero_grad(set_to_none=True)
    if case.pace:
        case.pace = replace(case.pace, learned=rows, learn_s=time.monotonic() - started)
    sampler_N = torch.tensor([x for _, _, c in replies for x in c.logp_sampler], dtype=torch.float32, device=policy.device)  # fmt: skip
    return LogprobsByPolicy(plan=plan, routing=routing, old_N=old_N, new_N=new_N, sampler_N=sampler_N, known_N=known_N, micro_batches=done)  # fmt: skip


def _replies(case: Case) -> list[tuple[int, Prompt, Completion]]:
    """(group, prompt, reply) of every reply that has tokens."""
    return [
        (number, group.prompt, c)
        for number, group in enumerate(case.groups or ())
        for c in group.completions
        if c.token_ids
    ]


def _learn(case: Case, micro: MicroBatch, routing: NoRouting) -> Tensor:
    """One learning forward and backward; the first also counts what autograd keeps."""
    assert case.policy is not None
    model, counting = case.policy.model, case.activation_bytes is None and not case.config.model.gradient_checkpointing
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if counting and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with routing.learning(micro):
        with torch.autograd.graph.saved_tensors_hooks(keep, _same):
            logp_N, _ = completion_logprobs(model, micro, case.config.rollout.temperature)
        (-logp_N.mean()).backward()
    if counting:
        head = logp_N.numel() * shape_of(model).vocabulary * 4 if lm_head(model) is None else 0
        case.activation_bytes = max(0, sum(kept.values()) - head) / micro.input_ids.numel()
    if case.policy.device.type == "cuda":
        torch.cuda.synchronize(case.policy.device)
    return logp_N.detach()


def _same(tensor: Tensor) -> Tensor:
    return tensor


# ------------------------------------------------------------------------------------------------- temperature


def check_temperature(case: Case) -> Iterator[Finding]:
    assert case.policy is not None
    fresh, rollout = case.fresh, case.config.rollout
    if fresh is None:
        yield note("Not compared: the learner's log-probabilities could not be computed.")
        return
    temperature = rollout.temperature
    apart, k3 = _distance(fresh, fresh.old_N)
    numbers: dict[str, Any] = {"temperature": temperature, "mean_difference": apart, "k3": k3}
    what = f"At temperature {temperature:g} the engine's log-probabilities differ from the learner's by {apart:.2g} per token on average (k3 {k3:.2g})"
    ignored = math.inf
    if temperature != 1:
        plain_N, _ = plan_logprobs(case.policy.model, _computed(fresh), 1.0, case.policy.device, routed=fresh.routing.old)  # fmt: skip
        ignored, k3_ignored = _distance(fresh, plain_N)
        numbers |= {"mean_difference_ignored": ignored, "k3_ignored": k3_ignored}
        what += f"; with the temperature ignored it would be {ignored:.2g} (k3 {k3_ignored:.2g})"
    yield _agreement(case, what, apart, ignored, numbers)
    yield from _rounding(case, fresh)


def _agreement(case: Case, what: str, apart: float, ignored: float, numbers: dict[str, Any]) -> Finding:
    rollout = case.config.rollout
    tolerance = 1e-3 if case.config.model.dtype == "float32" else 0.05
    if apart > 1e-3 and ignored < apart / 2:
        return fail(f"{what}. So the engine draws, or reports, at another temperature than the learner.", "Make the engine apply rollout.temperature and report log-probabilities after it, or set rollout.temperature = 1.", **numbers)  # fmt: skip
    if rollout.top_p < 1 or rollout.top_k:
        names = " and ".join(n for n, on in ((f"top_p = {rollout.top_p:g}", rollout.top_p < 1), (f"top_k = {rollout.top_k}", rollout.top_k > 0)) if on)  # fmt: skip
        return note(f"{what}. {names} makes the engine draw from a truncated distribution that the learner's is not.", "Set rollout.top_p = 1 and rollout.top_k = 0, or expect mismatch/k3 to stay at about this.", **numbers)  # fmt: skip
    if apart > tolerance:
        return warning(f"{what}, more than rounding explains in {case.config.model.dtype}.", "The engine and the learner do not compute the same policy: compare weights, precision and chat template; objective.mismatch corrects for a part.", **numbers)  # fmt: skip
    return ok(f"{what}: they agree but for rounding.", **numbers)


def _rounding(case: Case, fresh: LogprobsByPolicy) -> Iterator[Finding]:
    """What the difference, where it is rounding, would do to the ratio that the objective clips."""
    rollout, objective = case.config.rollout, case.objective
    if objective is None or case.config.learner.mini_batches < 2 or rollout.engine != "local" or rollout.top_p < 1 or rollout.top_k:  # fmt: skip
        return
    sequence_N = fresh.plan.sequence_N.to(fresh.known_N.device)[fresh.known_N]
    sequences = Sequences(sequence_N, len(fresh.plan.rows))
    noise = rounding_noise(objective, sequences, (fresh.old_N - fresh.sampler_N)[fresh.known_N])
    if noise is None or noise.beyond_clip < NOISY:
        return
    unit = "replies" if objective.clips_sequences else "tokens"
    yield warning(
        f"In {case.config.model.dtype} rounding alone moves log-ratios by {noise.log_ratio:.1e}, and takes {noise.beyond_clip:.0%} of the {unit} out of the clip range: what is clipped would be chance.",
        'Set model.dtype = "float32", widen objective.clip_low and objective.clip_high, or set learner.mini_batches = 1.',
        log_ratio=noise.log_ratio, beyond_clip=noise.beyond_clip,
    )  # fmt: skip


def _computed(fresh: LogprobsByPolicy) -> Plan:
    """The plan as far as it was gone through."""
    micro_batches = list(chain.from_iterable(fresh.plan.updates))[: fresh.micro_batches]
    return replace(fresh.plan, updates=(tuple(micro_batches),))


def _distance(fresh: LogprobsByPolicy, logp_N: Tensor) -> tuple[float, float]:
    """Mean |log rho| and mean rho - 1 - log rho, rho = learner's / engine's."""
    log_N = (logp_N - fresh.sampler_N)[fresh.known_N].double()
    return float(log_N.abs().mean()), float((log_N.exp() - 1 - log_N).mean())
