"""A step that is split over ranks has the metrics of the whole step, each reduced as its definition says."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo.clock import Clock
from gspo.config import Config
from gspo.context import RunContext
from gspo.learner.plan import Positions
from gspo.learner.result import LearnResult
from gspo.learner.routing_replay import RoutingStats
from gspo.objectives.loss import Loss
from gspo.objectives.objective import Objective
from gspo.objectives.sequences import Sequences
from gspo.record.metric_definitions import METRICS, Metric, Reduction
from gspo.record.metrics import step_metrics
from gspo.record.run_dir import read_jsonl
from gspo.reduction import Family, Gather, Max, Mean, Metrics, Reduced, Same, Sum, combined
from gspo.rollout.engine import DecodeStats
from gspo.rollout.gather import CollectResult, RolloutBatch, RolloutState
from gspo.step import collect, learn
from gspo.trainer import train

SOME = """
import zlib

def some(prompts, completions, **columns):
    numbers = [zlib.crc32(c.encode()) for c in completions]
    return [None if n % 4 == 0 else float(n % 3) for n in numbers]

def easy_or_hard(prompts, completions, **columns):
    easy = [zlib.crc32(p.encode()) % 3 == 0 for p in prompts]
    return [1.0 if e else value for e, value in zip(easy, some(prompts, completions))]
"""

MOE = ("model.build=tiny_moe", "learner.learning_rate=3e-2")
STEPS = {
    "dense": ("objective.kl=0.1",),
    "tokens": ("objective.name=grpo", "learner.mini_batches=3"),
    "unscored": ("reward.functions=some",),
    "two rewards": ("reward.functions=some,easy_or_hard",),
    "refill, soft overlong": ("objective.name=dapo", "reward.functions=easy_or_hard"),
    "MoE": (*MOE, "learner.mini_batches=3", "routing.replay=old", "routing.balance_loss=0.01"),
    "MoE, one update": (*MOE, "learner.mini_batches=1"),
    "sampler": ("learner.old_logp=sampler",),
}


Step = tuple[Objective, CollectResult, LearnResult]


@pytest.fixture(params=STEPS.values(), ids=STEPS.keys())
def step(request: Any, tiny: Callable[..., Config], parts_of: Any, tmp_path: Path) -> Step:
    (tmp_path / "some.py").write_text(SOME)
    parts: RunContext = parts_of(tiny(*(_with_files(override, tmp_path) for override in request.param)))
    collected = collect(parts, RolloutState(), clock=Clock())
    learned = learn(parts, collected.rollouts.groups, step=1)
    assert learned is not None
    return parts.objective, noted(collected), learned


def _with_files(override: str, folder: Path) -> str:
    key, _, names = override.partition("functions=")
    return f"{key}functions={json.dumps([f'{folder}/some.py:{n}' for n in names.split(',')])}" if names else override


def noted(collected: CollectResult) -> CollectResult:
    """With notes on some completions, one of them on a single one."""
    groups = collected.rollouts.groups
    words = {0: ("even", "once"), 2: ("even",)}
    first = [replace(s, notes={"code": words[i]} if i in words else {}) for i, s in enumerate(groups[0].scores)]
    rollouts = replace(collected.rollouts, groups=(replace(groups[0], scores=first), *groups[1:]))
    return replace(collected, rollouts=rollouts)


# ---------------------------------------------------------------------------- splitting


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_ranks_combine_to_the_metrics_of_the_whole_step(step: Step, ranks: int) -> None:
    """With seven ranks some have no group, or no completion to train on."""
    objective, collected, learned = step
    whole = combined([step_metrics(objective, collected, learned)])
    parts = [step_metrics(objective, *part) for part in split(collected, learned, ranks)]
    for order in (parts, parts[::-1]):
        found = combined(order)
        assert set(found) == set(whole)
        for key, value in whole.items():
            if isinstance(value, int):
                assert found[key] == value, key
            else:
                assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-12, nan_ok=True), key


def split(
    collected: CollectResult, learned: LearnResult, ranks: int
) -> Iterator[tuple[CollectResult, LearnResult | None]]:
    """Group i on rank i modulo `ranks`. A rank with nothing to train on has learned nothing, or from zero tokens."""
    kept, discarded = collected.rollouts.groups, collected.rollouts.discarded
    rows = [[i for i, s in enumerate(learned.samples) if s.group % ranks == rank] for rank in range(ranks)]
    learners = [rank for rank in range(ranks) if rows[rank] or rank % 2]
    computed_B = learned.tokens.sequences.sum(learned.computed_N.double()) > 0
    computing = [rank for rank in learners if computed_B[rows[rank]].any()]
    for rank in range(ranks):
        batch = RolloutBatch(groups=kept[rank::ranks], discarded=discarded[rank::ranks])
        decoded = collected.decoded
        if decoded is not None:
            decoded = DecodeStats(**{name: share(count, rank, ranks) for name, count in vars(decoded).items()})
        part = None
        if rank in learners:
            part = part_of(learned, rows[rank], ranks, learners.index(rank), len(learners))
            number = computing.index(rank) if rank in computing else None
            part = with_computed_share(part, learned, rows[rank], number, len(computing))
        # Each rank has to fill its own part of the batch.
        missing = share(collected.missing, rank, ranks)
        yield replace(collected, rollouts=batch, decoded=decoded, wanted=len(batch.groups) + missing), part


def part_of(learned: LearnResult, rows: Sequence[int], ranks: int, learner: int, learners: int) -> LearnResult:
    """The sequences `rows` as a rank of their own, with its share of what does not belong to a sequence."""
    tokens = learned.tokens
    mine_N = torch.isin(tokens.sequences.index_N, torch.tensor(rows, dtype=torch.long))
    number_B = torch.full((len(learned.samples),), -1)
    number_B[list(rows)] = torch.arange(len(rows))
    taken = tokens.take(mine_N.nonzero().squeeze(-1))
    return replace(
        learned,
        samples=tuple(replace(learned.samples[i], group=learned.samples[i].group // ranks) for i in rows),
        advantage_B=learned.advantage_B[list(rows)],
        tokens=replace(taken, sequences=Sequences(number_B[taken.sequences.index_N], len(rows))),
        computed_N=learned.computed_N[mine_N],
        ratio_N=learned.ratio_N[mine_N],
        clipped_N=learned.clipped_N[mine_N],
        losses=tuple(loss_share(loss, learner, learners) for loss in learned.losses),
    )


def with_computed_share(
    part: LearnResult, learned: LearnResult, rows: Sequence[int], learner: int | None, learners: int
) -> LearnResult:
    """The part with its share of what belongs to computed completions; `learner` is None if it has none of them."""
    mine_N = torch.isin(learned.tokens.sequences.index_N, torch.tensor(rows, dtype=torch.long))
    # With old log-probs of the sampler the learner has computed those of the first mini-batch only.
    mine_M = mine_N[learned.computed_N]
    if len(learned.log_rho_M) != len(mine_M):
        mine_M = torch.arange(len(learned.log_rho_M)) % learners == (-1 if learner is None else learner)
    positions = vars(learned.positions).items()
    return replace(
        part,
        entropy_M=learned.entropy_M[mine_M],
        log_rho_M=learned.log_rho_M[mine_M],
        rounding_M=None if learned.rounding_M is None else learned.rounding_M[mine_M],
        positions=Positions(**{k: 0 if learner is None else share(v, learner, learners) for k, v in positions}),
        routed=None
        if learned.routed is None or learner is None
        else routed_part(learned.routed, mine_N, learner, learners),
    )


def routed_part(routed: RoutingStats, mine_N: Tensor, learner: int, learners: int) -> RoutingStats:
    by_token = ("flipped_N", "native_N", "sampler_N", "update_N")
    return replace(
        routed,
        **{name: getattr(routed, name)[mine_N] for name in by_token},
        load_LE=share(routed.load_LE, learner, learners),
        **{name: share(getattr(routed, name), learner, learners) for name in ("stored_bytes", "sampler_bytes")},
        balance_losses=tuple(loss / learners for loss in routed.balance_losses),
    )


def loss_share(loss: Loss, learner: int, learners: int) -> Loss:
    weight = 2 * (learner + 1) / (learners * (learners + 1))  # uneven, with sum 1
    return replace(loss, **{name: weight * getattr(loss, name) for name in ("policy", "kl", "entropy")})


def share(total: Any, rank: int, ranks: int) -> Any:
    """Whole numbers that add up to the total."""
    return total * (rank + 1) // ranks - total * rank // ranks


def test_a_rank_that_diverged_shows_in_the_maximum_and_one_without_values_does_not() -> None:
    most = [Max.of(torch.tensor([1.0, 2.0])), Max.of(torch.zeros(0)), Max.of(torch.tensor([math.nan]))]
    assert combined([{"most": m} for m in most[:2]]) == {"most": 2.0}
    assert math.isnan(combined([{"most": m} for m in most])["most"])
    assert math.isnan(combined([{"most": most[1]}])["most"])


# ---------------------------------------------------------------------------- definitions

MEANS = {Reduction.MEAN, Reduction.GROUP_MEAN, Reduction.COMPLETION_MEAN, Reduction.TOKEN_MEAN}
CARRIED = {
    Same: {Reduction.SAME},
    Sum: {Reduction.SUM},
    Max: {Reduction.MAX},
    Gather: {Reduction.GATHER},
    Mean: MEANS,
}


def test_every_metric_is_reduced_as_its_definition_says(step: Step) -> None:
    objective, collected, learned = step
    completions = sum(len(g.completions) for g in collected.rollouts.sampled)
    limits = {
        Reduction.GROUP_MEAN: (1, len(collected.rollouts.sampled)),
        Reduction.COMPLETION_MEAN: (1, completions),
        Reduction.TOKEN_MEAN: (len(learned.samples) + 1, math.inf),
    }
    for key, carried in members(step_metrics(objective, collected, learned)):
        declared = definition(key).reduction
        assert declared in CARRIED[type(carried)], key
        if isinstance(carried, Mean) and carried.count and declared in limits:
            least, most = limits[declared]
            assert least <= carried.count <= most, key


def test_what_a_run_writes_besides_is_the_same_on_all_ranks(
    tiny: Callable[..., Config], parts_of: Any, display: Any
) -> None:
    parts = parts_of(tiny(run_dir="parts"))
    collected = collect(parts, RolloutState(), clock=Clock())
    learned = learn(parts, collected.rollouts.groups, step=1)
    carried = combined([step_metrics(parts.objective, collected, learned)])
    written = read_jsonl(train(tiny("steps=1"), display).run / "metrics.jsonl")[1]
    assert set(carried) < set(written)
    assert {definition(key).reduction for key in set(written) - set(carried)} == {Reduction.SAME}


def members(metrics: Metrics) -> Iterator[tuple[str, Reduced]]:
    for key, carried in metrics.items():
        if isinstance(carried, Family):
            yield from ((key, member) for member in (*carried.members.values(), carried.absent) if member is not None)
        else:
            yield key, carried


def definition(key: str) -> Metric:
    """The definition of a metric; upper-case parts of its key stand for a name."""
    return next(m for m in METRICS if re.fullmatch(re.sub(r"\b[A-Z]+\b", ".+", m.key), key) or m.key == key)
