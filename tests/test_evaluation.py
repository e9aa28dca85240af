"""pass@k, avg@k and their intervals."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from gspo.cli import main
from gspo.config import Config
from gspo.evaluation import Evaluation, MeanEstimate, evaluate
from gspo.trainer import train
from gspo.types import Completion, Group, Prompt, Score, Status, StopReason


def evaluation(*verdicts: str) -> Evaluation:
    """One string per problem: + correct, - wrong, ? unscored."""
    scored = {
        True: Score(status=Status.SCORED, reward=1.0, correct=True),
        False: Score(status=Status.SCORED, reward=0.0, correct=False),
    }
    unscored = Score(status=Status.UNSCORED, failure="raised: x")
    prompt = Prompt(id="0", content="", text="", token_ids=())
    completion = Completion(
        prompt_id="0", sample=0, token_ids=(), text="", logp_sampler=(), stop=StopReason.EOS, version=0
    )
    return Evaluation(
        groups=[
            Group(
                prompt=prompt,
                completions=[completion] * len(row),
                scores=[unscored if v == "?" else scored[v == "+"] for v in row],
            )
            for row in verdicts
        ]
    )


def test_pass_at_k_is_the_mean_over_all_ways_to_choose_k() -> None:
    row = "+--+-"
    for k in (1, 2, 3, 5):
        ways = [any(v == "+" for v in chosen) for chosen in itertools.combinations(row, k)]
        assert evaluation(row).pass_at(k).value == pytest.approx(sum(ways) / len(ways))


def test_avg_at_k_uses_k_completions() -> None:
    assert evaluation("+-", "++").avg_at(1).value == 1.0
    assert evaluation("+-", "++").avg_at(2).value == 0.75


def test_unscored_completions_are_neither_correct_nor_wrong() -> None:
    result = evaluation("+?", "??", "-+")
    assert result.unscored == 3
    assert result.accuracy.value == pytest.approx((1.0 + 0.5) / 2)
    assert result.avg_at(2).value == 0.5
    assert math.isnan(evaluation("??").accuracy.value)


def test_intervals_contain_the_value_and_keep_a_width_at_the_ends() -> None:
    certain = evaluation(*["+"] * 20).accuracy
    assert certain.value == certain.high == 1.0
    assert 0.8 < certain.low < 0.9
    half = evaluation(*["+", "-"] * 50).accuracy
    assert (half.low, half.high) == (pytest.approx(0.404, abs=1e-3), pytest.approx(0.596, abs=1e-3))


def test_the_reward_has_a_t_interval_over_problems() -> None:
    """The mean of each problem counts once, however many of its completions could be scored."""
    unscored = evaluation("??", "?", "??", "?").groups
    rewards = [(0.0, 0.5), (0.75,), (1.0,), ()]
    groups = [
        dataclasses.replace(group, scores=[*scored, *group.scores[len(scored) :]])
        for group, values in zip(unscored, rewards, strict=True)
        for scored in [[Score(status=Status.SCORED, reward=value, correct=False) for value in values]]
    ]
    result = Evaluation(groups=groups)
    means = [0.25, 0.75, 1.0]
    half = 4.3027 * statistics.stdev(means) / math.sqrt(3)
    assert result.accuracy.value == 0.0
    assert result.reward.value == pytest.approx(2 / 3)
    assert (result.reward.low, result.reward.high) == (pytest.approx(2 / 3 - half), pytest.approx(2 / 3 + half))
    assert evaluation("+", "+").reward == MeanEstimate(value=1.0)  # equal values tell nothing about the spread
    assert math.isnan(evaluation("??").reward.value)


def test_a_run_with_custom_model_sizes_is_evaluated(
    tiny: Callable[..., Config], display: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny("model.build_options={num_hidden_layers = 1, hidden_size = 32}", "steps=1", "eval.every=0")
    train(config, display)
    assert main(["eval", config.run_dir]) == 0
    assert "8 problems" in capsys.readouterr().out


def test_a_missing_file_is_reported_before_a_missing_reward(
    tiny: Callable[..., Config], display: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(
        "reward.functions=[]", "steps=1", "eval.every=0"
    )  # the task's own verifier, which a data file does not have
    train(config, display)
    assert main(["eval", config.run_dir, "--data", "missing.jsonl"]) == 1
    message = capsys.readouterr().err
    assert "missing.jsonl" in message
    assert "reward.functions" not in message


def test_an_evaluation_prefills_every_prompt_once(tiny: Callable[..., Config], parts_of: Any) -> None:
    config = tiny()
    parts = parts_of(config)
    problems = parts.problems.held_out
    sampling = config.rollout.sampling
    done = evaluate(
        parts.engine, parts.rewards, problems, samples=3, greedy=True, sampling=sampling, seed=0, stream="eval"
    )
    # Decoding begins with the last token of a prompt.
    assert parts.engine.decoded.prefilled == sum(len(prompt.token_ids) - 1 for prompt in problems)
    assert [len(group.completions) for group in done.groups] == [3] * len(problems)
    assert done.greedy is not None
