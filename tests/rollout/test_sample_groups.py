"""`sample_groups`, through every caller: what it returns, and what its callers measure.

Time is counted by a fake clock: sampling takes 10 seconds a call, scoring 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import gspo.clock
from gspo.clock import Clock
from gspo.config import Config
from gspo.context import RunContext
from gspo.evaluation import evaluate
from gspo.preflight.context import PreflightContext
from gspo.preflight.sampling import check_sampling
from gspo.rollout.engine import GenerateOptions
from gspo.rollout.gather import RolloutState, sample_groups
from gspo.step import collect
from gspo.types import Score, Status


class TimedCalls:
    """Forwards to a component. One method advances the fake clock and records the arguments that it is called with."""

    def __init__(self, component: Any, method: str, advance: Callable[[], None]) -> None:
        self.component = component
        self.calls: list[tuple[Any, ...]] = []

        def timed(*args: Any) -> Any:
            advance()
            self.calls.append(args)
            return getattr(component, method)(*args)

        setattr(self, method, timed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.component, name)


@pytest.fixture
def timed(tiny: Callable[..., Config], parts_of: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Build the components of a run whose engine and rewards advance a fake clock."""
    now = [0.0]
    monkeypatch.setattr(gspo.clock, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def advance_by(seconds: float) -> Callable[[], None]:
        def advance() -> None:
            now[0] += seconds

        return advance

    def build(*overrides: str, rewards: Any = None) -> RunContext:
        context = parts_of(tiny(*overrides))
        engine = TimedCalls(context.engine, "generate", advance_by(10))
        return replace(context, engine=engine, rewards=TimedCalls(rewards or context.rewards, "score", advance_by(3)))

    return build


def test_every_prompt_gets_a_scored_group(timed: Any) -> None:
    context, clock = timed(), Clock()
    prompts = context.problems.held_out[:3]
    groups = sample_groups(
        context.engine,
        context.rewards,
        prompts,
        GenerateOptions(samples=2, sampling=context.config.rollout.sampling, seed=5, stream="here", version=7),
        clock=clock,
    )
    assert [g.prompt for g in groups] == prompts
    assert [[(c.prompt_id, c.sample, c.version) for c in g.completions] for g in groups] == [
        [(p.id, 0, 7), (p.id, 1, 7)] for p in prompts
    ]
    assert all(len(g.scores) == 2 and s.reward is not None for g in groups for s in g.scores)
    assert clock.seconds == {"rollout": 10, "reward": 3}


class EqualRewards:
    """The same reward for every completion, so that no group is mixed."""

    def score(self, groups: Any) -> list[list[Score]]:
        return [[Score(status=Status.SCORED, reward=1.0, correct=True) for _ in cs] for _, cs in groups]


def test_a_batch_measures_all_of_its_requests(timed: Any) -> None:
    context = timed("objective.keep=mixed", "rollout.refill_budget=3", rewards=EqualRewards())
    clock = Clock()
    collected = collect(context, RolloutState(batch=4, cursor=8), clock=clock)
    assert clock.seconds == {"rollout": 30, "reward": 9}
    calls = [options for _, options in context.engine.calls]
    assert [c.stream for c in calls] == ["train/5/8", "train/5/12", "train/5/16"]
    assert all(c.routes and c.version == collected.version for c in calls)
    assert collected.after == RolloutState(batch=5, cursor=20)


def test_an_evaluation_is_no_part_of_the_time_of_rollouts(timed: Any) -> None:
    context, clock = timed(), Clock()
    with clock.measure("eval"):
        done = evaluate(
            context.engine,
            context.rewards,
            context.problems.held_out,
            samples=2,
            greedy=True,
            sampling=context.config.rollout.sampling,
            seed=0,
            stream="eval",
        )
    assert clock.seconds == {"eval": 13}
    assert [len(g.completions) for g in done.groups] == [2] * len(context.problems.held_out)
    ((_, options),) = context.engine.calls
    assert options.sampling.greedy_last
    assert not options.routes


def test_the_doctor_measures_its_last_chunk(timed: Any) -> None:
    context = timed()
    preflight = PreflightContext(
        config=context.config,
        prompts=4,
        objective=context.objective,
        tokenizer=context.policy.tokenizer,
        skeleton=context.policy.model,
        problems=context.problems,
        rewards=context.rewards,
        policy=context.policy,
        engine=context.engine,
    )
    list(check_sampling(preflight))
    assert preflight.timings is not None
    assert (preflight.timings.completions, preflight.timings.rollout_s, preflight.timings.reward_s) == (16, 10, 3)
    assert preflight.groups == list(collect(context, RolloutState(), clock=Clock()).rollouts.sampled)
