"""A few groups of the first step, sampled by the run's own engine and scored by its rewards.

The prompts and random streams are those of step 1, so without a cold start these are replies that the run itself would
draw.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from gspo.data.problems import PromptOrder
from gspo.evaluation import interval
from gspo.objectives.objective import Objective
from gspo.objectives.samples import keeps_group
from gspo.preflight.case import PATIENCE_S, Case, Timings
from gspo.preflight.files import shown
from gspo.preflight.findings import Finding, fail, note, ok, warning
from gspo.preflight.machine import free_memory, human
from gspo.preflight.memory import estimate
from gspo.rollout.gather import distinct
from gspo.types import Group, Prompt, StopReason

CHUNKS = (2, 2, 4, 8)
"""Prompts to sample, a chunk at a time, while there is patience."""


def check_sampling(case: Case) -> Iterator[Finding]:
    if refusal := _no_room(case):
        yield fail(refusal, "Lower rollout.max_tokens or rollout.replies, or use more memory; see memory below.")
        return
    chunks = [case.prompts] if case.prompts else CHUNKS
    wanted = min(sum(chunks), case.config.rollout.prompts)
    prompts = iter(_first_prompts(case, wanted))
    groups: list[Group] = []
    started = time.monotonic()
    for chunk in chunks:
        if len(groups) < wanted and (not groups or time.monotonic() - started < PATIENCE_S):
            groups += _draw(case, list(islice(prompts, min(chunk, wanted - len(groups)))))
    case.groups = groups
    yield _lengths(case, groups)


def _no_room(case: Case) -> str:
    """Why not even the first chunk can be sampled; empty: it can. Better refused than killed by the system."""
    assert case.policy is not None
    gpu = case.policy.device.type == "cuda"
    need = sum(line.bytes for line in estimate(case, gpu=gpu).phases["sampling"])
    least = need * min(1.0, CHUNKS[0] * case.config.rollout.replies / case.replies)
    free = free_memory(case.policy.device)[0]
    return f"Sampling even {CHUNKS[0]} groups needs {human(least)} of memory, and {human(free)} are free." if least > free else ""  # fmt: skip


def _first_prompts(case: Case, count: int) -> list[Prompt]:
    assert case.problems is not None
    train = case.problems.train
    return distinct([train[i] for i in PromptOrder(len(train), case.config.seed).take(0, count)])


def _draw(case: Case, prompts: Sequence[Prompt]) -> list[Group]:
    """One chunk of groups; its times are kept, since the last chunk is the largest."""
    assert case.engine is not None
    assert case.rewards is not None
    rollout, started = case.config.rollout, time.monotonic()
    replies_P = case.engine.generate(
        prompts, samples=rollout.replies, sampling=rollout.sampling, seed=case.config.seed, stream="train/1/0", version=0, routes=True
    )  # fmt: skip
    sampled = time.monotonic()
    scores_P = case.rewards.score(list(zip(prompts, replies_P, strict=True)))
    case.pace = Timings(
        replies=len(prompts) * rollout.replies, rollout_s=sampled - started, reward_s=time.monotonic() - sampled
    )
    return [Group(prompt=p, completions=c, scores=s) for p, c, s in zip(prompts, replies_P, scores_P, strict=True)]


def _lengths(case: Case, groups: Sequence[Group]) -> Finding:
    replies = [c for g in groups for c in g.completions]
    cut = sum(c.stop is StopReason.LENGTH for c in replies) / len(replies)
    limit = case.config.rollout.max_tokens
    what = f"{len(groups)} prompts x {case.config.rollout.replies} replies of {case.reply_length:.0f} tokens on average; {cut:.0%} were cut at rollout.max_tokens = {limit}."
    detail = [f"reply: {shown(replies[0].text) or '(empty)'}"]
    numbers: dict[str, Any] = {"groups": len(groups), "mean_length": case.reply_length, "cut": cut}
    if case.cold:
        return note(f"{what} The model has not had its cold start yet, so its replies say little.", detail=detail, **numbers)  # fmt: skip
    if cut > 0.5:
        return warning(what, "Raise rollout.max_tokens; if replies ramble on after the answer, look at what ends a reply and at the chat template.", detail=detail, **numbers)  # fmt: skip
    return ok(what, detail=detail, **numbers)


# ------------------------------------------------------------------------------------------------- uniform groups


def check_uniform(case: Case) -> Iterator[Finding]:
    assert case.groups is not None
    assert case.objective is not None
    share = interval([float(g.uniform) for g in case.groups])
    mixed = case.objective.keep == "mixed"
    penalty = " but the length penalty" if case.objective.shape == "soft_overlong" and not mixed else ""
    what = f"{share.value:.0%} of the groups [{share.low:.0%} to {share.high:.0%}] have equal rewards throughout and teach nothing{penalty}{_kinds(case.groups)}"
    numbers: dict[str, Any] = {"share": share.value, "low": share.low, "high": share.high, "groups": len(case.groups)}
    if case.cold:
        yield _after_cold_start(case, what, numbers)
    elif share.value > 0.9:
        few = " (More --prompts give a narrower interval.)" if len(case.groups) < 8 else ""
        yield warning(f"{what}: there is next to nothing to learn from.", _remedy(case.groups) + few, **numbers)
    elif share.value > 0.5:
        waste = "are replaced by further sampling" if mixed else "are sampled in vain"
        yield note(f"{what}; more than half of the replies {waste}.", _remedy(case.groups), **numbers)
    else:
        yield ok(f"{what}.", **numbers)
    if mixed and not case.cold:
        yield from _refill(case, case.groups, case.objective)


def _kinds(groups: Sequence[Group]) -> str:
    uniform = [[s.correct for s in g.scores] for g in groups if g.uniform]
    right, wrong = sum(all(c) for c in uniform), sum(not any(c) for c in uniform)
    return f" ({wrong} all wrong, {right} all right)" if uniform else ""


def _remedy(groups: Sequence[Group]) -> str:
    uniform = [[s.correct for s in g.scores] for g in groups if g.uniform]
    if sum(all(c) for c in uniform) > len(uniform) / 2:
        return "The problems are too easy for this model: take harder ones, or a higher temperature."
    return "The problems are too hard for this model, or the reward does not read its replies: look at the replies, take easier problems, more rollout.replies, a reward with partial credit, or a cold start."


def _after_cold_start(case: Case, what: str, numbers: dict[str, Any]) -> Finding:
    p, g = case.config.cold_start.stop_accuracy, case.config.rollout.replies
    least = p**g + (1 - p) ** g
    return note(
        f"{what} now, before the cold start; after it, at an accuracy of {p:.0%}, at least {least:.0%} of the groups would be uniform (all problems equally hard), and more where they differ.",
        **numbers, least_after_cold_start=least,
    )  # fmt: skip


def _refill(case: Case, groups: Sequence[Group], objective: Objective) -> Iterator[Finding]:
    budget, mixed = case.config.rollout.refill_budget, interval([float(keeps_group(objective, g)) for g in groups])
    if not mixed.value:
        yield warning(
            f'keep = "mixed" would discard all of the {len(groups)} sampled groups: steps would train on nothing.',
            _remedy(groups),
        )
    elif mixed.value * budget < 1:
        needed, prompts = math.ceil(1 / mixed.value), case.config.rollout.prompts
        yield warning(
            f'keep = "mixed" keeps {mixed.value:.0%} of the groups, so a step of {prompts} groups needs about {needed} '
            f"batches of prompts, and rollout.refill_budget = {budget}: steps would train on fewer groups.",
            f"Set rollout.refill_budget = {needed} (a step then samples up to {needed} batches), "
            "or take problems that are neither too easy nor too hard.",
        )
