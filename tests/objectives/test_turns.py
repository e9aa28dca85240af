"""Ratios per turn, and advantages from rewards of steps, against the formulas written out."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import Tensor

import gspo
from gspo.errors import ConfigError
from gspo.objectives.advantage import token_advantages
from gspo.objectives.objective import Objective
from gspo.objectives.samples import TrainSample
from gspo.objectives.sequences import Sequences, Tokens
from gspo.objectives.table import objective
from gspo.types import Completion, Prompt, Score, Status, StopReason

TURN = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
MASK = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 1, 1, 0, 1, 0]]).bool()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    old = -torch.rand(2, 6, generator=generator, dtype=torch.float64) - 0.1
    logp = (old + 0.05 * torch.randn(2, 6, generator=generator, dtype=torch.float64)).requires_grad_()
    return logp, old, torch.randn(2, 6, generator=generator, dtype=torch.float64)


def test_the_ratio_of_a_turn_is_the_mean_over_its_tokens() -> None:
    logp, old, advantage = inputs()
    chosen = gspo.objective("gspo_turn", clip_low=5e-3, clip_high=6e-3)
    loss = gspo.policy_loss(chosen, logp, old, advantage, MASK, turn=TURN).loss
    (gradient,) = torch.autograd.grad(loss, logp)

    expected = torch.zeros((), dtype=torch.float64)
    clipped = 0
    for b in range(2):
        terms = []
        for turn in range(3):
            at = [t for t in range(6) if MASK[b, t] and TURN[b, t] == turn]
            if not at:
                continue
            ratio = torch.stack([logp[b, t] - old[b, t] for t in at]).mean().detach().exp()
            for t in at:
                own = ratio * (logp[b, t] - logp[b, t].detach()).exp()
                bounded = own.clamp(1 - 5e-3, 1 + 6e-3)
                clipped += int(bounded * advantage[b, t] < own * advantage[b, t])
                terms.append(torch.minimum(own * advantage[b, t], bounded * advantage[b, t]))
        expected = expected - torch.stack(terms).mean() / 2
    assert 0 < clipped < int(MASK.sum())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logp)[0])


def test_without_turns_it_is_the_ratio_of_the_completion() -> None:
    logp, old, advantage = inputs()
    ours, theirs = (gspo.policy_loss(name, logp, old, advantage, MASK).loss for name in ("gspo_turn", "gspo_token"))
    assert torch.equal(ours, theirs)


def advantages(name: str, steps: list[tuple[tuple[int, float], ...]], rewards: list[float], **changes: str) -> Tensor:
    """The advantages of one group with completions of 4 tokens."""
    samples = [
        TrainSample(
            group=0,
            sample=i,
            prompt=Prompt(id="p", content="", text="", token_ids=(1,)),
            completion=Completion(
                prompt_id="p",
                sample=i,
                token_ids=(1, 2, 3, 4),
                text="",
                logp_sampler=(0.0,) * 4,
                stop=StopReason.EOS,
                version=0,
            ),
            score=Score(status=Status.SCORED, reward=reward, step_rewards=own),
            reward=reward,
        )
        for i, (own, reward) in enumerate(zip(steps, rewards, strict=True))
    ]
    zeros = torch.zeros(4 * len(samples))
    index = torch.arange(len(samples)).repeat_interleave(4)
    tokens = Tokens(zeros, zeros, zeros, Sequences(index, len(samples)))
    chosen: Objective = objective(name, **changes)
    return token_advantages(chosen, tokens, samples)[1].view(-1, 4)


def test_a_token_gets_the_normalized_rewards_of_the_steps_from_there_on() -> None:
    steps = [((1, 0.5), (3, 1.0)), ((0, 0.0), (2, 0.25), (3, 0.0)), ()]
    # The third has no steps: its reward is one at its end. The first was shaped, which belongs to its last step.
    found = advantages("gspo_token", steps, [1.3, 0.25, 0.6])
    values = [0.5, 0.8, 0.0, 0.25, 0.0, 0.6]
    mean, std = statistics.fmean(values), statistics.stdev(values)
    a, b, c, d, e, f = ((value - mean) / std for value in values)
    expected = [[a + b, a + b, b, b], [c + d + e, d + e, d + e, e], [f] * 4]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_without_steps_or_with_credit_for_completions_all_tokens_share_an_advantage() -> None:
    steps: list[tuple[tuple[int, float], ...]] = [((0, 1.0), (3, 0.0)), ((0, 0.0), (3, 0.0)), ()]
    rewards = [1.0, 0.0, 0.5]
    plain = advantages("grpo", [()] * 3, rewards)
    assert torch.equal(advantages("gspo_token", [()] * 3, rewards), plain)
    assert torch.equal(advantages("gspo_token", steps, rewards, credit="completion"), plain)
    assert torch.equal(advantages("grpo", steps, rewards), plain)
    assert not torch.equal(advantages("grpo", steps, rewards, credit="steps"), plain)


def test_objectives_with_one_advantage_per_completion_refuse_credit_for_steps() -> None:
    with pytest.raises(ConfigError, match="credit makes no sense here: it has one advantage per completion"):
        gspo.objective("gspo", credit="steps")
    with pytest.raises(ConfigError, match="credit must be one of completion, steps"):
        gspo.objective("grpo", credit="turns")
