"""Reward functions that are normalized separately (GDPO), against a plain computation of the paper's formulas."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gspo
from gspo.build import run_objective
from gspo.clock import Clock
from gspo.config import Config
from gspo.errors import ConfigError
from gspo.objectives.samples import keeps_group
from gspo.rollout.gather import RolloutState
from gspo.step import collect, learn
from gspo.trainer import resume, train
from gspo.types import Completion, Group, Prompt, Score, Status, StopReason
from gspo.view.replay.replay import Request, compute

Rows = list[list[float | None]]


def z_scores(values: list[float | None]) -> list[float]:
    """Of one function in one group; an abstention is in no mean and gets 0."""
    known = [v for v in values if v is not None]
    if len(known) < 2 or max(known) - min(known) < 1e-6:
        return [0.0] * len(values)
    mean, std = statistics.mean(known), statistics.stdev(known)
    return [0.0 if v is None else (v - mean) / std for v in values]


def gdpo(rows: Rows, groups: list[int], weights: list[float]) -> list[float]:
    """Equations 4 to 6 of arXiv:2601.05242, without epsilon."""
    total = [0.0] * len(rows)
    for g in set(groups):
        members = [i for i, other in enumerate(groups) if other == g]
        for k, weight in enumerate(weights):
            for i, z in zip(members, z_scores([rows[i][k] for i in members]), strict=True):
                total[i] += weight * z
    scored = [i for i, row in enumerate(rows) if any(v is not None for v in row)]
    mean = statistics.mean(total[i] for i in scored)
    std = statistics.stdev([total[i] for i in scored])
    return [(a - mean) / std if i in scored else 0.0 for i, a in enumerate(total)]


def random_rows(seed: int, *, abstain: float) -> tuple[Rows, list[int]]:
    rng = random.Random(seed)
    scales = (1.0, 100.0, 0.01)
    rows = [[None if rng.random() < abstain else rng.choice((0, 0.5, 1)) * s for s in scales] for _ in range(24)]
    return rows, [i // 6 for i in range(24)]


@pytest.mark.parametrize("abstain", [0.0, 0.4])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 0.25, -2.0]])
@pytest.mark.parametrize("seed", range(3))
def test_separate_advantages_are_those_of_the_paper(seed: int, weights: list[float], abstain: float) -> None:
    rows, groups = random_rows(seed, abstain=abstain)
    got = gspo.group_advantage(gspo.objective("gspo", normalize="separate"), rows, groups, weights=weights)
    assert got.tolist() == pytest.approx(gdpo(rows, groups, weights), rel=1e-5, abs=1e-6)


def test_weights_are_1_by_default_and_tensors_work() -> None:
    objective = gspo.objective("gspo", normalize="separate")
    rows, groups = random_rows(7, abstain=0.2)
    tensor = torch.tensor([[math.nan if v is None else v for v in row] for row in rows], dtype=torch.float64)
    got = gspo.group_advantage(objective, tensor, groups)
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx(gdpo(rows, groups, [1.0] * 3), rel=1e-9, abs=1e-9)


def test_the_scale_of_a_function_does_not_matter() -> None:
    objective = gspo.objective("gspo", normalize="separate")
    rows, groups = random_rows(5, abstain=0.0)
    scaled = [[row[0], 1000 * (row[1] or 0.0), row[2]] for row in rows]
    torch.testing.assert_close(
        gspo.group_advantage(objective, rows, groups), gspo.group_advantage(objective, scaled, groups)
    )


def test_functions_that_contradict_each_other_cancel_exactly() -> None:
    """Rounding leaves about 1e-17 of a sum of 0, and dividing by a std of that size would make it 1."""
    rows: Rows = [[x, 0.3 - x] for x in (0.1, 0.2, 0.7, 0.15, 0.9, 0.33)]
    got = gspo.group_advantage(gspo.objective("gspo", normalize="separate"), rows, [0, 0, 0, 1, 1, 1])
    assert got.tolist() == [0.0] * 6


def test_an_abstention_on_everything_is_unscored_and_in_no_spread() -> None:
    objective = gspo.objective("gspo", normalize="separate")
    rows: Rows = [[1.0, 0.0], [0.0, 0.0], [None, None], [0.5, 1.0]]
    got = gspo.group_advantage(objective, rows, [0, 0, 0, 0])
    without = gspo.group_advantage(objective, [rows[i] for i in (0, 1, 3)], [0, 0, 0])
    assert got[2] == 0
    torch.testing.assert_close(got[[0, 1, 3]], without)


@pytest.mark.parametrize("row", ["dr_grpo", "rloo", "gpg"])
def test_other_rules_are_applied_to_each_function(row: str) -> None:
    rows, groups = random_rows(3, abstain=0.3)
    rule = [gspo.group_advantage(row, [r[k] for r in rows], groups).double() for k in range(3)]
    total = rule[0] + 2 * rule[1] + 3 * rule[2]
    got = gspo.group_advantage(gspo.objective(row, normalize="separate"), rows, groups, weights=[1, 2, 3])
    torch.testing.assert_close(got.double(), total / total.std(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("gspo", {"normalize": "each"}, "must be one of sum, separate"),
        ("reinforce_pp", {"normalize": "separate"}, "compares completions across the batch"),
        ("ppo_clip", {"normalize": "separate"}, "advantages come from outside"),
        ("dapo", {"normalize": "separate"}, "length penalty"),
        ("rloo", {"normalize": "separate", "kl": 0.1, "kl_in": "reward"}, "KL penalty"),
    ],
)
def test_what_separate_rewards_do_not_go_with(name: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        gspo.objective(name, **settings)


@pytest.mark.parametrize(
    ("rewards", "weights", "why"),
    [
        ([1.0, 0.0], None, r"shape \[B, K\]"),
        ([[1.0, 0.0], [0.0, 1.0]], [1.0, 1.0, 1.0], r"shape \[B, 3\]"),
    ],
)
def test_rewards_of_another_shape_are_refused(rewards: Any, weights: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        gspo.group_advantage(gspo.objective("gspo", normalize="separate"), rewards, [0, 0], weights=weights)
    with pytest.raises(ConfigError, match="only with normalize"):
        gspo.group_advantage("gspo", [1.0, 0.0], [0, 0], weights=[1.0])


def scored_group(*parts: dict[str, float | None]) -> Group:
    completions = [
        Completion(
            prompt_id="p",
            sample=i,
            token_ids=(1,),
            text="",
            logp_sampler=(-1.0,),
            stop=StopReason.EOS,
            version=0,
        )
        for i in range(len(parts))
    ]
    scores = [
        Score(status=Status.SCORED, reward=sum(v or 0.0 for v in p.values()), correct=True, parts=p) for p in parts
    ]
    return Group(prompt=Prompt(id="p", content="", text="", token_ids=(0,)), completions=completions, scores=scores)


def test_a_group_is_kept_if_a_function_with_a_weight_differs() -> None:
    summed = gspo.objective("gspo", keep="mixed")
    separate = gspo.objective("gspo", keep="mixed", normalize="separate")
    opposed = scored_group({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0})
    assert not keeps_group(summed, opposed)
    assert keeps_group(separate, opposed)
    same = scored_group({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.0})
    assert not keeps_group(separate, same)
    assert not keeps_group(separate, scored_group({"a": 1.0, "b": None}, {"a": 1.0, "b": 2.0}))
    only_b = scored_group({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 3.0})
    assert keeps_group(separate, only_b)
    assert not keeps_group(replace(separate, reward_weights=(1.0, 0.0)), only_b)


def test_a_group_without_trainable_completions_is_not_kept() -> None:
    """Neither a group in which every completion is truncated and filtered nor one that could not be scored."""
    separate = gspo.objective("gspo", keep="mixed", normalize="separate", shape="overlong_filter")
    group = scored_group({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0})
    truncated = replace(group, completions=[replace(c, stop=StopReason.LENGTH) for c in group.completions])
    failed = Score(status=Status.UNSCORED, parts={"a": None, "b": None}, failure="error: b")
    for objective in (separate, replace(separate, reward_weights=(1.0, 0.5))):
        assert keeps_group(objective, group)
        assert not keeps_group(objective, truncated)
        assert not keeps_group(objective, replace(group, scores=[failed, failed]))


@pytest.fixture
def two(tiny: Callable[..., Config], tmp_path: Path) -> Callable[..., Config]:
    """A run with two reward functions, one of which abstains on some completions."""
    (tmp_path / "two.py").write_text(
        "def length(prompts, completions, **columns):\n"
        "    return [100.0 * (len(c) % 4) for c in completions]\n"
        "def spaces(prompts, completions, **columns):\n"
        "    return [None if len(c) % 5 == 0 else float(c.count(' ')) for c in completions]\n"
    )
    functions = f"reward.functions={tmp_path}/two.py:length,{tmp_path}/two.py:spaces"

    def make(*overrides: str, run_dir: str = "run") -> Config:
        settings = ("reward.weights=1,0.5", "objective.normalize=separate", "eval.every=0")
        return tiny(functions, *settings, *overrides, run_dir=run_dir)

    return make


def test_a_step_trains_on_separate_advantages(two: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(two())
    batch = collect(parts, RolloutState(), clock=Clock())
    learned = learn(parts, batch.rollouts.groups, step=1)
    assert learned is not None
    rows: Rows = [[s.score.parts["length"], s.score.parts["spaces"]] for s in learned.samples]
    assert any(None in row for row in rows)
    expected = gdpo(rows, [s.group for s in learned.samples], [1.0, 0.5])
    assert learned.advantage_B.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_run_resumes_bitwise_and_replays_exactly(two: Callable[..., Config], display: Any, tmp_path: Path) -> None:
    whole, cut = two("steps=2", run_dir="whole"), two("steps=1", run_dir="cut")
    train(whole, display)
    train(cut, display)
    resume(cut.run_dir, display, steps=2)
    first, second = (Path(c.run_dir) / "metrics.jsonl" for c in (whole, cut))
    assert first.read_bytes() == second.read_bytes()
    objectives = "gspo,gspo+normalize=separate"
    found = compute(Request(run=whole.run_dir, step=2, objectives=objectives, out=str(tmp_path / "out")))
    assert found.exact
    assert [s.label for s in found.skipped] == ["gspo+normalize=separate"]  # the run's own, with its weights
    records = [json.loads(line) for line in (Path(whole.run_dir) / "rollouts/000001.jsonl").read_text().splitlines()]
    assert any(r["trained"] and r["parts"]["spaces"] is None for r in records)


@pytest.mark.parametrize(
    "overrides",
    [
        ("reward.weights=1,0",),
        ("reward.functions={one}", "reward.weights=[]"),
        ("reward.functions=[]", "reward.weights=[]"),  # the verifier of the generated task
    ],
)
def test_separate_needs_two_functions_with_a_weight(
    two: Callable[..., Config], tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    given = [o.replace("{one}", f"{tmp_path}/two.py:length") for o in overrides]
    with pytest.raises(ConfigError, match="two or more reward functions with a weight, and there are 1"):
        run_objective(two(*given))
