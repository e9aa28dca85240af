"""A few groups of the first step, sampled by the run's own engine and scored by its rewards.

In: the context with an engine. Out: findings, groups and times. Invariant: prompts and random streams are those of step
1, so without a cold start the run itself would sample the same completions.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from gspo.clock import Clock
from gspo.data.order import SamplingOrder
from gspo.evaluation import interval
from gspo.model.free_memory import free_memory
from gspo.objectives.objective import Objective
from gspo.objectives.samples import keeps_group
from gspo.preflight.context import PATIENCE_S, PreflightContext, Timings
from gspo.preflight.data import excerpt
from gspo.preflight.findings import Finding, fail, note, ok, warning
from gspo.preflight.machine import digits, human
from gspo.preflight.memory import estimate
from gspo.preflight.step_time import batches_per_step
from gspo.rollout.engine import GenerateOptions
from gspo.rollout.gather import sample_groups, with_unique_ids
from gspo.types import Group, Prompt, StopReason

CHUNKS = (2, 2, 4, 8)
"""Prompts per chunk; no chunk starts after `PATIENCE_S`."""


def check_sampling(context: PreflightContext) -> Iterator[Finding]:
    if refusal := _no_room(context):
        yield fail(refusal, "Lower rollout.max_tokens or rollout.group_size, or use more memory; see memory below.")
        return
    chunks = [context.prompts] if context.prompts else CHUNKS
    wanted = min(sum(chunks), context.config.rollout.prompts)
    prompts = iter(_first_prompts(context, wanted))
    groups: list[Group] = []
    started = time.monotonic()
    for chunk in chunks:
        if len(groups) < wanted and (not groups or time.monotonic() - started < PATIENCE_S):
            groups += _sample(context, list(islice(prompts, min(chunk, wanted - len(groups)))))
    context.groups = groups
    yield _lengths(context, groups)
    yield from _calls(groups)


def _calls(groups: Sequence[Group]) -> Iterator[Finding]:
    """Tool calls that `environment.tool_format` does not read."""
    found = [c.conversation for g in groups for c in g.completions if c.conversation is not None]
    turns = [turn for conversation in found for turn in conversation.turns]
    missed = Counter(turn.other_format for turn in turns if turn.other_format)
    if missed:
        style, count = missed.most_common(1)[0]
        called = sum(bool(turn.calls) for turn in turns)
        yield warning(
            f"{count} of {len(turns)} turns would be tool calls in format {style}, which environment.tool_format does "
            f"not read. {called} turns call a tool.",
            f'Set environment.tool_format = "{style}", or ask for the other format in data.instruction.',
            missed=count,
            called=called,
        )


def _no_room(context: PreflightContext) -> str:
    """Why not even the first chunk can be sampled; empty if it can."""
    # Running out of CPU memory would get the process killed without an error message.
    assert context.policy is not None
    need = sum(line.bytes for line in estimate(context.workload).phases["sampling"])
    least = need * min(1.0, CHUNKS[0] * context.config.rollout.group_size / context.completions)
    free = free_memory(context.policy.device)[0]
    if least <= free:
        return ""
    return f"Sampling even {CHUNKS[0]} groups needs {human(least)} of memory, and {human(free)} are free."


def _first_prompts(context: PreflightContext, count: int) -> list[Prompt]:
    assert context.problems is not None
    train = context.problems.train
    # The order of the run, so that the doctor sees the first step's own prompts.
    taken = SamplingOrder.of(train, context.config.data, context.config.seed).take(0, count)
    return with_unique_ids([train[i] for i in taken.indices])


def _sample(context: PreflightContext, prompts: Sequence[Prompt]) -> list[Group]:
    """One chunk of groups. Its times replace those of the chunk before, because the last chunk is the largest."""
    assert context.engine is not None
    assert context.rewards is not None
    rollout = context.config.rollout
    clock = Clock()
    groups = sample_groups(
        context.engine,
        context.rewards,
        prompts,
        GenerateOptions(
            samples=rollout.group_size,
            sampling=rollout.sampling,
            seed=context.config.seed,
            stream="train/1/0",  # that of the first batch of step 1
            version=0,
            routes=True,  # routing replay in the next check needs the experts
        ),
        clock=clock,
    )
    context.timings = Timings(
        completions=len(prompts) * rollout.group_size,
        rollout_s=clock.seconds["rollout"],
        reward_s=clock.seconds["reward"],
    )
    return groups


def _lengths(context: PreflightContext, groups: Sequence[Group]) -> Finding:
    completions = [c for g in groups for c in g.completions]
    truncated = sum(c.stop is StopReason.LENGTH for c in completions) / len(completions)
    rollout = context.config.rollout
    what = (
        f"{len(groups)} prompts x {rollout.group_size} completions of {context.completion_length:.0f} tokens on average"
        f"; {truncated:.0%} were truncated at rollout.max_tokens = {rollout.max_tokens}."
    )
    detail = [f"completion: {excerpt(completions[0].text) or '(empty)'}"]
    numbers: dict[str, Any] = {"groups": len(groups), "mean_length": context.completion_length, "truncated": truncated}
    if context.cold:
        sentence = f"{what} The model has not had its cold start yet, so its completions say little."
        return note(sentence, detail=detail, **numbers)
    if truncated > 0.5:
        remedy = (
            "Raise rollout.max_tokens; if completions continue after the answer, check the stop tokens and the chat "
            "template, or end them with a stop string (rollout.stop)."
        )
        return warning(what, remedy, detail=detail, **numbers)
    return ok(what, detail=detail, **numbers)


# ------------------------------------------------------------------------------------------------- uniform groups


def check_uniform(context: PreflightContext) -> Iterator[Finding]:
    assert context.groups is not None
    assert context.objective is not None
    share = interval([float(g.uniform) for g in context.groups])
    mixed = context.objective.keep == "mixed"
    penalty = " apart from the length penalty" if "soft_overlong" in context.objective.shape and not mixed else ""
    what = (
        f"{share.value:.0%} of the groups [{share.low:.0%} to {share.high:.0%}] have equal rewards and no training "
        f"signal{penalty}{_kinds(context.groups)}"
    )
    numbers: dict[str, Any] = {
        "share": share.value,
        "low": share.low,
        "high": share.high,
        "groups": len(context.groups),
    }
    if context.cold:
        yield _after_cold_start(context, what, numbers)
    elif share.value > 0.9:
        few = " (More --prompts give a narrower interval.)" if len(context.groups) < 8 else ""
        yield warning(f"{what}: there is almost nothing to train on.", _remedy(context.groups) + few, **numbers)
    elif share.value > 0.5:
        waste = "are replaced by further sampling" if mixed else "are wasted"
        yield note(f"{what}; more than half of the completions {waste}.", _remedy(context.groups), **numbers)
    else:
        yield ok(f"{what}.", **numbers)
    if mixed and not context.cold:
        yield from _refill(context, context.groups, context.objective)


def _kinds(groups: Sequence[Group]) -> str:
    uniform = [[s.correct for s in g.scores] for g in groups if g.uniform]
    right = sum(all(c) for c in uniform)
    wrong = sum(not any(c) for c in uniform)
    return f" ({wrong} all wrong, {right} all right)" if uniform else ""


def _remedy(groups: Sequence[Group]) -> str:
    uniform = [[s.correct for s in g.scores] for g in groups if g.uniform]
    if sum(all(c) for c in uniform) > len(uniform) / 2:
        return "The problems are too easy for this model: take harder ones, or a higher temperature."
    return (
        "The problems are too hard for this model, or the reward does not read its completions: look at the "
        "completions, take easier problems, more rollout.group_size, a reward with partial credit, or a cold start."
    )


def _after_cold_start(context: PreflightContext, what: str, numbers: dict[str, Any]) -> Finding:
    p = context.config.cold_start.stop_accuracy
    g = context.config.rollout.group_size
    # p^g + (1 - p)^g is convex in p, so problems of different difficulty have more uniform groups on average.
    least = p**g + (1 - p) ** g
    return note(
        f"{what} now, before the cold start; after it, at an accuracy of {p:.0%}, at least {least:.0%} of the groups "
        "would be uniform (if all problems are equally hard), and more if they differ.",
        **numbers,
        least_after_cold_start=least,
    )


def _refill(context: PreflightContext, groups: Sequence[Group], objective: Objective) -> Iterator[Finding]:
    budget = context.config.rollout.refill_budget
    mixed = interval([float(keeps_group(objective, g)) for g in groups])
    if not mixed.value:
        yield warning(
            f'keep = "mixed" would discard all of the {len(groups)} sampled groups: steps would train on nothing.',
            _remedy(groups),
        )
    elif budget == "full":
        yield ok(
            f'keep = "mixed" keeps {mixed.value:.0%} of the groups, so a step samples about '
            f"{digits(batches_per_step(context), 2)} batches of prompts until it is full "
            '(rollout.refill_budget = "full").'
        )
    elif mixed.value * budget < 1:
        needed = math.ceil(1 / mixed.value)
        prompts = context.config.rollout.prompts
        yield warning(
            f'keep = "mixed" keeps {mixed.value:.0%} of the groups, so a step of {prompts} groups needs about {needed} '
            f"batches of prompts, and rollout.refill_budget = {budget}: steps would train on fewer groups.",
            f'Set rollout.refill_budget = {needed} (a step then samples up to {needed} batches) or "full", '
            "or take problems that are neither too easy nor too hard.",
        )
