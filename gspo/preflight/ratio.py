"""The learner's log-probs of fresh completions: two forward passes must agree, and agree with the engine.

In: the context with sampled groups. Out: findings, log-probs and times. Invariant: forward and backward passes are the
run's own functions on the run's own micro-batches. No weight changes.
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

from gspo.learner.batch import batch_routing, token_sequence
from gspo.learner.forward import RoutingReplay, completion_logprobs, plan_logprobs
from gspo.learner.plan import Plan, make_plan
from gspo.model.compiled_layers import compile_seconds
from gspo.model.free_memory import free_memory
from gspo.model.lm_head import lm_head
from gspo.model.micro_batch import MicroBatch
from gspo.model.packed_forward import supports_packing
from gspo.objectives.objective import settings_of
from gspo.objectives.rounding import rounding_noise
from gspo.objectives.sequences import Sequences
from gspo.preflight.context import PATIENCE_S, PreflightContext
from gspo.preflight.findings import Finding, fail, note, ok, warning
from gspo.preflight.memory import LOGIT_BYTES, activation_bytes, logits_held
from gspo.preflight.model_size import shape_of
from gspo.record.alarms import NOISY, run_rounding_remedy
from gspo.rollout.engine import engine_traits
from gspo.types import Completion, Prompt


@dataclass(frozen=True, kw_only=True)
class LogprobsByPolicy:
    """Log-probs of the sampled completions by policy, for the tokens that were computed."""

    plan: Plan
    routing: RoutingReplay
    old_N: Tensor
    new_N: Tensor
    sampler_N: Tensor
    known_N: Tensor
    micro_batches: int


def check_ratio(context: PreflightContext) -> Iterator[Finding]:
    budget = context.config.learner.micro_batch_tokens
    fitting, width = _fitting(context)
    if fitting < width:
        yield fail(f"Training on even one row of {width} tokens does not fit the free memory.", "See memory below.")
        return
    if fitting < budget:
        yield note(f"learner.micro_batch_tokens = {budget} does not fit the free memory; this check used {fitting}.")
    logprobs = _measure(context, min(budget, fitting))
    context.logprobs = logprobs
    old_N = logprobs.old_N[logprobs.known_N]
    new_N = logprobs.new_N[logprobs.known_N]
    count = logprobs.micro_batches
    where = f"{len(old_N)} fresh completion tokens in {count} micro-batch{'es' * (count > 1)}"
    # Bitwise, because a run relies on it: the first update's ratios must be exactly 1.
    if torch.equal(old_N, new_N):
        yield ok(
            f"On {where} the training forward pass reproduces the old log-probs bitwise: every ratio is exactly 1.",
            tokens=len(old_N),
            deviation=0.0,
        )
        return
    token = float((new_N - old_N).abs().max())
    sequences = Sequences(logprobs.plan.sequence_N.to(old_N.device), len(logprobs.plan.sequences))
    whole = float(sequences.mean(logprobs.new_N - logprobs.old_N).abs().max())
    # Far below the clip range of GSPO.
    level = warning if whole <= 1e-5 else fail
    yield level(
        f"On {where} two forward passes of the same weights disagree: log-ratios are up to {token:.2g} for a token and "
        f"{whole:.2g} for a whole completion, and all should be 0.",
        "Something in the model is random or depends on state: look for dropout or noise in its config and code; on a "
        "GPU also for non-deterministic kernels.",
        tokens=len(old_N),
        deviation=token,
        sequence_deviation=whole,
    )


def _fitting(context: PreflightContext) -> tuple[int, int]:
    """(tokens of a micro-batch that fit the memory that is free now, tokens of the longest row)."""
    assert context.policy is not None
    model = context.policy.model
    shape = shape_of(model)
    size = next(model.parameters()).element_size()
    width = max(len(g.prompt.token_ids) + len(c.token_ids) for g in context.groups or () for c in g.completions)
    checkpointing = context.config.model.gradient_checkpointing
    budget = context.config.learner.micro_batch_tokens
    logits = logits_held(context.workload, budget) * LOGIT_BYTES / budget
    # As if layers were not compiled, which needs more: the trial that decides it has not run yet.
    per_token = activation_bytes(shape, size, width, checkpointing=checkpointing) + logits
    gradients = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    # A margin for fragmentation and for what the formula does not count.
    room = 0.8 * free_memory(context.policy.device)[0] - gradients
    return int(max(0.0, room) / per_token), width


def _measure(context: PreflightContext, budget: int) -> LogprobsByPolicy:
    """Old forward pass, training forward pass and backward pass, in whole micro-batches, until `PATIENCE_S` is over."""
    assert context.policy is not None
    config = context.config
    policy = context.policy
    samples = _samples(context)
    plan = make_plan(
        [token_sequence(p, c, policy, config.rollout.min_tokens) for _, p, c in samples],
        [group for group, _, _ in samples],
        mini_batches=config.learner.mini_batches,
        token_budget=budget,
        pad_id=policy.pad_id,
        seed=f"{config.seed}/mini-batches/1",
        # The run's own layout: packed and padded rows round differently.
        packed=supports_packing(policy.model),
    )
    routing = batch_routing(policy, config.routing, plan, [c.routes for _, _, c in samples])
    old_N = torch.zeros(plan.tokens, device=policy.device)
    new_N = torch.zeros(plan.tokens, device=policy.device)
    known_N = torch.zeros(plan.tokens, dtype=torch.bool, device=policy.device)
    started, compiled_s = time.monotonic(), compile_seconds()
    done = rows = 0
    for cpu_batch in chain.from_iterable(plan.updates):
        if done and time.monotonic() - started > PATIENCE_S:
            break
        micro = cpu_batch.to(policy.device)
        # One micro-batch at a time, so that the check can stop when its time is over.
        alone = replace(plan, updates=((cpu_batch,),))
        old_N += plan_logprobs(policy.model, alone, config.rollout.temperature, policy.device, routed=routing.old)[0]
        new_N[micro.at_N] = _train(context, micro, routing)
        known_N[micro.at_N] = True
        done += 1
        rows += len(micro.sequence_ids)
    # None frees the memory of the gradients for the checks that follow.
    policy.model.zero_grad(set_to_none=True)
    if context.timings:
        # Compiling takes as long as many steps, and a run compiles once.
        train_s = time.monotonic() - started - (compile_seconds() - compiled_s)
        context.timings = replace(context.timings, trained=rows, train_s=train_s)
    logp_sampler = [x for _, _, c in samples for x in c.logp_sampler]
    return LogprobsByPolicy(
        plan=plan,
        routing=routing,
        old_N=old_N,
        new_N=new_N,
        sampler_N=torch.tensor(logp_sampler, dtype=torch.float32, device=policy.device),
        known_N=known_N,
        micro_batches=done,
    )


def _samples(context: PreflightContext) -> list[tuple[int, Prompt, Completion]]:
    """(group, prompt, completion) of every completion with sampled tokens."""
    return [
        (number, group.prompt, c)
        for number, group in enumerate(context.groups or ())
        for c in group.completions
        if c.sampled_count
    ]


def _train(context: PreflightContext, micro: MicroBatch, routing: RoutingReplay) -> Tensor:
    """One training forward and backward pass; the first also counts the bytes that autograd keeps."""
    assert context.policy is not None
    model = context.policy.model
    # With checkpointing autograd keeps only inputs of layers here, and the peak comes in the backward pass.
    counting = context.activation_bytes is None and not context.config.model.gradient_checkpointing
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        # Autograd saves many views of one storage, and weights as they are: count each storage once, and no weight.
        storage = tensor.untyped_storage()
        if counting and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with routing.learning(micro):
        with torch.autograd.graph.saved_tensors_hooks(keep, _same):
            logp_N, _ = completion_logprobs(model, micro, context.config.rollout.temperature)
        # Any loss will do: the check measures time and memory of a backward pass.
        (-logp_N.mean()).backward()
    if counting:
        # The LM head is a line of its own in the memory estimate.
        head = logp_N.numel() * shape_of(model).vocabulary * 4 if lm_head(model) is None else 0
        context.activation_bytes = max(0, sum(kept.values()) - head) / micro.input_ids.numel()
    # Kernels run asynchronously: without this the measured time would be that of their launches.
    if context.policy.device.type == "cuda":
        torch.cuda.synchronize(context.policy.device)
    return logp_N.detach()


def _same(tensor: Tensor) -> Tensor:
    return tensor


# ------------------------------------------------------------------------------------------------- temperature


def check_temperature(context: PreflightContext) -> Iterator[Finding]:
    assert context.policy is not None
    logprobs = context.logprobs
    if logprobs is None:
        yield note("Not compared: the learner's log-probs could not be computed.")
        return
    temperature = context.config.rollout.temperature
    difference, k3 = _distance(logprobs, logprobs.old_N)
    numbers: dict[str, Any] = {"temperature": temperature, "mean_difference": difference, "k3": k3}
    what = (
        f"At temperature {temperature:g} the engine's log-probs differ from the learner's by {difference:.2g} per "
        f"token on average (k3 {k3:.2g})"
    )
    ignored = math.inf
    if temperature != 1:
        computed = _computed(logprobs)
        plain_N, _ = plan_logprobs(
            context.policy.model, computed, 1.0, context.policy.device, routed=logprobs.routing.old
        )
        ignored, k3_ignored = _distance(logprobs, plain_N)
        numbers |= {"mean_difference_ignored": ignored, "k3_ignored": k3_ignored}
        what += f"; if the engine ignored the temperature it would be {ignored:.2g} (k3 {k3_ignored:.2g})"
    yield _agreement(context, what, difference, ignored, numbers)
    yield from _rounding(context, logprobs)


def _agreement(
    context: PreflightContext, what: str, difference: float, ignored: float, numbers: dict[str, Any]
) -> Finding:
    rollout = context.config.rollout
    # Measured: 1e-6 in float32, 0.007 in bfloat16 (docs/log.md).
    tolerance = 1e-3 if context.config.model.dtype == "float32" else 0.05
    # Clearly closer to the log-probs without temperature than to those with it.
    if difference > 1e-3 and ignored < difference / 2:
        return fail(
            f"{what}. So the engine samples, or reports, at another temperature than the learner.",
            "Make the engine apply rollout.temperature and report log-probs at that temperature, or set "
            "rollout.temperature = 1.",
            **numbers,
        )
    if rollout.top_p < 1 or rollout.top_k:
        top_p = [f"top_p = {rollout.top_p:g}"] if rollout.top_p < 1 else []
        top_k = [f"top_k = {rollout.top_k}"] if rollout.top_k > 0 else []
        return note(
            f"{what}. With {' and '.join(top_p + top_k)} the engine samples from a truncated distribution, and the "
            "learner computes the full one.",
            "Set rollout.top_p = 1 and rollout.top_k = 0, or expect mismatch/k3 to stay at about this value.",
            **numbers,
        )
    if difference > tolerance:
        return warning(
            f"{what}, more than rounding explains in {context.config.model.dtype}.",
            "The engine and the learner do not compute the same policy: compare weights, precision and chat template."
            f"{_correction(context)}",
            **numbers,
        )
    return ok(f"{what}: they agree up to rounding.", **numbers)


def _correction(context: PreflightContext) -> str:
    """A hint at `objective.mismatch`, if the run could use it."""
    objective = context.objective
    usable = objective is not None and "mismatch" in settings_of(objective)
    if not usable or context.config.learner.old_logp == "sampler":
        return ""
    return " objective.mismatch corrects for a part of the difference."


def _rounding(context: PreflightContext, logprobs: LogprobsByPolicy) -> Iterator[Finding]:
    """Whether rounding alone exceeds the clip range."""
    rollout = context.config.rollout
    objective = context.objective
    # An engine with the learner's own weights and the full distribution differs from the learner by rounding alone.
    only_rounding = engine_traits(rollout.engine).shares_weights and rollout.top_p == 1 and not rollout.top_k
    if objective is None or context.config.learner.mini_batches < 2 or not only_rounding:
        return
    sequence_N = logprobs.plan.sequence_N.to(logprobs.known_N.device)[logprobs.known_N]
    sequences = Sequences(sequence_N, len(logprobs.plan.sequences))
    noise = rounding_noise(objective, sequences, (logprobs.old_N - logprobs.sampler_N)[logprobs.known_N])
    if noise is None or noise.beyond_clip < NOISY:
        return
    unit = "completions" if objective.clips_sequences else "tokens"
    remedy = run_rounding_remedy(context.config)
    yield warning(
        f"In {context.config.model.dtype} rounding alone moves log-ratios by {noise.log_ratio:.1e} and takes "
        f"{noise.beyond_clip:.0%} of the {unit} out of the clip range: what is clipped would be random.",
        f"{remedy[:1].upper()}{remedy[1:]}.",
        log_ratio=noise.log_ratio,
        beyond_clip=noise.beyond_clip,
    )


def _computed(logprobs: LogprobsByPolicy) -> Plan:
    """The plan without the micro-batches that were not computed."""
    micro_batches = list(chain.from_iterable(logprobs.plan.updates))[: logprobs.micro_batches]
    return replace(logprobs.plan, updates=(tuple(micro_batches),))


def _distance(logprobs: LogprobsByPolicy, logp_N: Tensor) -> tuple[float, float]:
    """Mean |log rho| and mean rho - 1 - log rho (k3), rho = learner's / engine's probability."""
    # In float64: k3 is a difference of nearly equal numbers.
    log_N = (logp_N - logprobs.sampler_N)[logprobs.known_N].double()
    return float(log_N.abs().mean()), float((log_N.exp() - 1 - log_N).mean())
