"""Dynamic sampling: until the batch is full, and what happens to batches that stay short."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from gspo import config as settings
from gspo.build import run_objective
from gspo.clock import Clock
from gspo.config import Config
from gspo.data.order import Taken
from gspo.errors import ConfigError, DataError, RewardError
from gspo.learner import checkpoint
from gspo.learner.plan import update_count
from gspo.rollout.gather import Gatherer, RolloutState
from gspo.step import collect, learn
from gspo.trainer import resume, train
from gspo.types import Group, Prompt, Score, Status


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def groups(count: int, *, unscored: int = 0) -> list[Group]:
    prompt = Prompt(id="p", content="", text="", token_ids=(0,))
    scores = [Score(status=Status.UNSCORED if i < unscored else Status.SCORED, reward=1.0) for i in range(4)]
    return [Group(prompt=prompt, completions=[None] * 4, scores=scores) for _ in range(count)]  # type: ignore[list-item]


def gather(kept: Callable[[int], bool], budget: Any, *, patience: int = 10, unscored: int = 0) -> tuple[Any, list[int]]:
    """The result, and the sizes of the requests, if group number i is kept where `kept(i)`."""
    numbers = iter(range(10**6))
    gatherer = Gatherer(
        want=4,
        budget=budget,
        start=RolloutState(batch=3, cursor=7),
        keep=lambda group: kept(next(numbers)),
        patience=patience,
        max_unscored=0.5,
    )
    requests = []
    for request in gatherer:
        requests.append(request.count)
        gatherer.add(groups(request.count, unscored=unscored), Taken(indices=[0] * request.count))
    return gatherer.result(0, None, None), requests


def test_full_samples_until_the_batch_is_full() -> None:
    result, requests = gather(lambda i: i % 9 == 8, "full")
    assert (len(result.rollouts.groups), result.missing) == (4, 0)
    assert sum(requests) == 36  # the fourth group that is kept is number 35
    assert result.after == RolloutState(batch=4, cursor=7 + 36)
    limited, requests = gather(lambda i: i % 9 == 8, 3)
    assert (len(limited.rollouts.groups), limited.missing, sum(requests)) == (1, 3, 12)


def test_full_gives_up_after_a_pass_over_the_data_without_a_group_to_keep() -> None:
    result, requests = gather(lambda i: i in (0, 5), "full", patience=10)
    assert (len(result.rollouts.groups), result.missing) == (2, 2)
    assert sum(requests[:-1]) < 5 + 1 + 10 <= sum(requests)
    nothing, requests = gather(lambda i: False, "full", patience=10)
    assert (nothing.missing, sum(requests)) == (4, 12)


def test_full_gives_up_on_a_broken_reward_at_once() -> None:
    result, requests = gather(lambda i: False, "full", patience=10**9, unscored=3)
    assert (requests, result.missing) == ([4], 4)
    _, requests = gather(lambda i: False, "full", patience=20, unscored=2)  # half of them is not too many
    assert sum(requests) == 20


@pytest.mark.parametrize("mini_batches", [1, 3, 4, 7])
@pytest.mark.parametrize("full", [7, 16, 48])
def test_the_number_of_optimizer_steps_is_in_proportion(mini_batches: int, full: int) -> None:
    for completions in range(1, full + 1):
        count = update_count(mini_batches, completions, full=full)
        assert count == max(1, ceil(Fraction(mini_batches * completions, full)))
        # No update has more completions than in a full batch, and one fewer update would.
        assert Fraction(completions, count) <= Fraction(full, mini_batches)
        assert count == 1 or Fraction(completions, count - 1) > Fraction(full, mini_batches)
    assert update_count(mini_batches, full, full=full) == mini_batches
    assert update_count(mini_batches, 2 * full, full=full) == mini_batches


def test_a_short_batch_gets_fewer_updates(tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny("learner.mini_batches=4"))
    batch = collect(parts, RolloutState(), clock=Clock()).rollouts.groups
    whole = learn(parts, batch, step=1)
    half = learn(parts, batch[:2], step=1)
    one = learn(parts, batch[:1], step=1)
    assert whole is not None
    assert half is not None
    assert one is not None
    assert (len(whole.updates), len(half.updates), len(one.updates)) == (4, 2, 1)


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "empty", "true", '""'])
def test_a_wrong_budget_is_refused(tiny: Callable[..., Config], value: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout.refill_budget.*(whole number, or one of 'full'|at least 1)"):
        tiny("objective.keep=mixed", f"rollout.refill_budget={value}")


def test_a_budget_is_a_number_or_full(tiny: Callable[..., Config]) -> None:
    config = tiny("objective.keep=mixed", "rollout.refill_budget=full")
    assert config.rollout.refill_budget == "full"
    assert settings.from_flat(settings.flat(config), where="test") == config
    assert tiny("objective.keep=mixed", "rollout.refill_budget=7").rollout.refill_budget == 7
    with pytest.raises(ConfigError, match="has no effect unless groups are filtered"):
        run_objective(tiny("rollout.refill_budget=full"))


@pytest.fixture
def rare(tiny: Callable[..., Config], tmp_path: Path) -> Callable[..., Config]:
    """A reward that differs within few groups."""
    (tmp_path / "rare.py").write_text(
        "def rare(prompts, completions, **columns):\n    return [float(c.count(' ') > 1) for c in completions]\n"
    )

    def make(*overrides: str, run_dir: str = "run") -> Config:
        return tiny(
            "objective.keep=mixed",
            f"reward.functions={tmp_path}/rare.py:rare",
            "eval.every=0",
            *overrides,
            run_dir=run_dir,
        )

    return make


def test_a_run_fills_its_batches_and_resumes_bitwise(rare: Callable[..., Config], display: Any) -> None:
    whole = rare("rollout.refill_budget=full")
    train(whole, display)
    rows = read_jsonl(Path(whole.run_dir) / "metrics.jsonl")[1:]
    assert [row["groups/missing"] for row in rows] == [0, 0, 0]
    assert all(row["groups/sampled"] - row["groups/discarded"] == 4 for row in rows)
    assert any(row["groups/sampled"] > 12 for row in rows), "the default budget would have been enough"
    parts = rare("rollout.refill_budget=full", run_dir="parts")
    train(replace(parts, steps=1), display)
    resume(parts.run_dir, display, steps=3)
    first, second = (Path(c.run_dir) / "metrics.jsonl" for c in (whole, parts))
    assert first.read_bytes() == second.read_bytes()


def test_a_short_batch_is_reported(rare: Callable[..., Config], display: Any) -> None:
    config = rare("rollout.refill_budget=3", "learner.mini_batches=4")
    train(config, display)
    rows = read_jsonl(Path(config.run_dir) / "metrics.jsonl")[1:]
    short = [row for row in rows if row["groups/missing"] and row["samples/trained"]]
    assert short
    events = [e for e in read_jsonl(Path(config.run_dir) / "events.jsonl") if e["event"] == "short_batch"]
    assert [(e["step"], e["groups"], e["wanted"], e["sampled"]) for e in events] == [
        (row["step"], 4 - row["groups/missing"], 4, 12) for row in rows if row["groups/missing"]
    ]
    messages = [m for m in display.messages if "the batch is short" in m]
    assert len(messages) == 1
    assert f"step {short[0]['step']}: the batch is short: of 12 sampled groups only" in messages[0]
    assert 'rollout.refill_budget = 3); raise rollout.refill_budget or set it to "full"' in messages[0]


@pytest.mark.parametrize(
    ("body", "kind", "what"),
    [
        ("[1.0] * len(completions)", DataError, "none of 60 groups, a whole pass .*Train the last checkpoint on other"),
        ("[0.0] * len(completions)", DataError, "0 of 240 completions were correct. Use easier problems, .*cold_start"),
        ("[float('nan')] * len(completions)", RewardError, "16 of 16 completions could not be scored"),
    ],
)
def test_nothing_to_train_on_ends_the_run_with_a_checkpoint(
    tiny: Callable[..., Config], display: Any, tmp_path: Path, body: str, kind: type[Exception], what: str
) -> None:
    (tmp_path / "same.py").write_text(f"def same(prompts, completions, **columns):\n    return {body}\n")
    functions = f"reward.functions={tmp_path}/same.py:same"
    config = tiny("objective.keep=mixed", "rollout.refill_budget=full", functions, "eval.every=0")
    with pytest.raises(kind, match=what):
        train(config, display)
    assert checkpoint.saved(Path(config.run_dir) / "checkpoints")
    assert (Path(config.run_dir) / "rollouts/000001.jsonl").is_file()


def test_a_batch_of_truncated_completions_is_not_blamed_on_the_rewards(
    tiny: Callable[..., Config], display: Any
) -> None:
    """The rewards differ, but `overlong_filter` drops all completions."""
    never_end = ("rollout.min_tokens=10", "objective.shape=overlong_filter", "rollout.refill_budget=full")
    with pytest.raises(DataError, match=r"240 were truncated at rollout.max_tokens.* Raise rollout.max_tokens"):
        train(tiny("objective.keep=mixed", *never_end, "eval.every=0"), display)
