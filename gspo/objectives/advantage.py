"""How much better a completion is than the others of its group.

In: `reward_B` (NaN where unscored) and the group of each completion. Out: `advantage_B`, and for a batch of a run
`advantage_N`. Invariant: an unscored completion gets 0 and is in no mean, std or count. A rule of scope `group` gives
exactly 0 to a group whose scored rewards are equal, or that has fewer than two of them; a rule of scope `batch` does so
only if this holds for the whole batch. Equality is tested on the rewards themselves, because a mean of equal floats can
be off by an ulp, and dividing by a std of that size makes it large (0.1 in float32 gave |A| = 0.95 with eps = 1e-8). A
KL penalty that belongs to the reward is detached.

Several reward functions are summed before the rule compares them, or the rule compares each of them alone (`separate`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from gspo.errors import ConfigError
from gspo.objectives.kl import KL_ESTIMATORS
from gspo.objectives.ratio import check_choice
from gspo.objectives.sequences import Sequences, Tokens
from gspo.types import UNIFORM_TOLERANCE

if TYPE_CHECKING:
    from gspo.objectives.objective import Objective
    from gspo.objectives.samples import TrainSample

Scope = Literal["group", "batch", "external"]
CANCELED = 1e-9
"""A sum below this share of its terms, in float64, is what rounding left of a sum of 0."""


class AdvantageRule:
    """(reward_B in float64 with NaN for unscored, group_B as 0..P-1, P) -> advantage_B.

    A rule is a function with the decorator `@advantage_rule`, or a frozen dataclass whose fields are settings of the
    objective."""

    scope: Scope = "group"
    """What a completion is compared with: its `group`, the whole `batch`, or nothing, because the advantages are
    `external` (the caller supplies them)."""
    per_token: Callable[[Tensor, Tensor, Sequences], Tensor] | None = None
    """(reward_B, penalty_N, sequences) -> advantage_N, for a rule whose advantages differ between the tokens of a
    completion. A run uses it instead of the rule itself."""
    nonnegative_rewards: bool = False
    """Whether the rule is undefined for rewards below 0, so that penalties on the reward make no sense with it."""

    def __call__(self, reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
        raise NotImplementedError

    def ineffective(self) -> dict[str, str]:
        """Settings that have no effect with the values of the others, and why."""
        return {}


class FunctionRule(AdvantageRule):
    """A rule made by `@advantage_rule` from a function."""

    __name__: str

    def __init__(self, compute: Callable[[Tensor, Tensor, int], Tensor], scope: Scope, nonnegative: bool) -> None:
        self.compute = compute
        self.scope = scope
        self.nonnegative_rewards = nonnegative
        update_wrapper(self, compute)

    def __call__(self, reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
        return self.compute(reward_B, group_B, groups)

    def __reduce__(self) -> str:
        # Pickle and copy by name, as functions are: rows of the table stay equal to their copies.
        return self.__name__

    def __repr__(self) -> str:
        return self.__name__


def advantage_rule(
    scope: Scope, *, nonnegative_rewards: bool = False
) -> Callable[[Callable[[Tensor, Tensor, int], Tensor]], FunctionRule]:
    """Turn a function into an advantage rule of that scope."""
    return lambda compute: FunctionRule(compute, scope, nonnegative_rewards)


@advantage_rule("group")
def z_score(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """(R - mean) / std within the group; std with Bessel's correction, no epsilon."""
    centered_B = centered(reward_B, group_B, groups)
    count_P = _sum(torch.isfinite(reward_B).double(), group_B, groups)
    # No epsilon, as in the papers. It would not protect a group with equal rewards, and `centered` has already set such
    # a group to exactly 0. Bessel's correction is that of other frameworks; it matters once filtering makes group sizes
    # differ.
    variance_P = _sum(centered_B**2, group_B, groups) / (count_P - 1).clamp(min=1)
    # A group with equal rewards has variance 0 and would be 0 / 0.
    return torch.where(centered_B == 0, 0.0, centered_B / variance_P.sqrt()[group_B])


@advantage_rule("group")
def centered(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """R - mean within the group."""
    scored_B = torch.isfinite(reward_B)
    value_B = torch.where(scored_B, reward_B, 0.0)
    count_P = _sum(scored_B.double(), group_B, groups)
    mean_P = _sum(value_B, group_B, groups) / count_P.clamp(min=1)
    return torch.where(scored_B & mixed(reward_B, group_B, groups)[group_B], value_B - mean_P[group_B], 0.0)


@dataclass(frozen=True)
class GroupCentered(AdvantageRule):
    """R - mean within the group, divided by the group's std unless `advantage_scale = "none"`. The std has Bessel's
    correction and no epsilon."""

    advantage_scale: str = "std"

    def __post_init__(self) -> None:
        check_choice("advantage_scale", self.advantage_scale, ("std", "none"))

    def __call__(self, reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
        rule = z_score if self.advantage_scale == "std" else centered
        return rule(reward_B, group_B, groups)


@advantage_rule("group", nonnegative_rewards=True)
def mean_scaled(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """(R - mean) / mean within the group (MaxRL). Rewards are 0 or more; a group whose rewards are all 0 has no
    advantage."""
    scored_B = torch.isfinite(reward_B)
    value_B = torch.where(scored_B, reward_B, 0.0)
    lowest = float(value_B.min()) if len(value_B) else 0.0
    if lowest < 0:
        # A mean near 0 would blow the advantage up and a negative one would turn its sign around.
        raise ConfigError(
            "objective: it divides by the mean reward of a group, so rewards must be 0 or more, and one is "
            f"{lowest:g}; use rewards such as 0 and 1, or an objective that divides by the standard deviation (grpo)"
        )
    count_P = _sum(scored_B.double(), group_B, groups)
    mean_P = _sum(value_B, group_B, groups) / count_P.clamp(min=1)
    centered_B = centered(reward_B, group_B, groups)
    # A group with a centered reward other than 0 has a reward above 0, and so has a mean above 0.
    return torch.where(centered_B == 0, 0.0, centered_B / mean_P[group_B])


@advantage_rule("group")
def leave_one_out(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """R - mean of the others in the group = k/(k-1) (R - mean)."""
    count_P = _sum(torch.isfinite(reward_B).double(), group_B, groups)
    # A group of one has a centered reward of exactly 0. The clamp keeps its factor finite, because 0 * inf is NaN.
    return centered(reward_B, group_B, groups) * (count_P / (count_P - 1).clamp(min=1))[group_B]


@advantage_rule("group")
def rescaled(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """alpha (R - mean), alpha = scored completions / scored completions in groups with different rewards (GPG)."""
    scored_B = torch.isfinite(reward_B)
    useful_B = scored_B & mixed(reward_B, group_B, groups)[group_B]
    # Uniform groups have no gradient but stay in the denominator of the loss; alpha makes up for them. The count is of
    # completions with a signal: a count of nonzero rewards would include groups that are all correct.
    alpha = scored_B.sum() / useful_B.sum().clamp(min=1)
    return alpha * centered(reward_B, group_B, groups)


@advantage_rule("batch")
def batch_whitened(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """(R - mean) / std over the whole batch (REINFORCE++). A run whitens over tokens, see `whitened_returns`."""
    return z_score(reward_B, torch.zeros_like(group_B), 1)


def whitened_returns(reward_B: Tensor, penalty_N: Tensor, sequences: Sequences) -> Tensor:
    """REINFORCE++ per token: G_t = R - sum of penalties from t on, then (G - mean) / std over all tokens of the batch.

    The tokens of a sequence must be contiguous and in order."""
    # One cumulative sum over the whole batch, less its value at the first token of the sequence. Float64 keeps the
    # difference exact enough for a small penalty late in a large batch.
    penalty_N = penalty_N.double()
    before_N = penalty_N.cumsum(0) - penalty_N
    first_B = torch.zeros(sequences.count, dtype=torch.long, device=penalty_N.device)
    first_B[1:] = sequences.length_B.cumsum(0)[:-1].long()
    # The last sequences may have no tokens and would start beyond the end. Their value is never read.
    start_B = before_N[first_B.clamp(max=len(before_N) - 1)]
    to_go_N = sequences.expand(sequences.sum(penalty_N)) - (before_N - sequences.expand(start_B))
    return_N = sequences.expand(reward_B.to(penalty_N)) - to_go_N
    return z_score(return_N, torch.zeros_like(sequences.index_N), 1)


batch_whitened.per_token = whitened_returns


@advantage_rule("external")
def external(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Supplied by the caller, for example from a critic."""
    raise AssertionError("the caller supplies the advantages")


def separate(rule: AdvantageRule, reward_BK: Tensor, weight_K: Sequence[float], group_B: Tensor, groups: int) -> Tensor:
    """GDPO (arXiv:2601.05242): A = sum_k w_k rule(R_k), divided by the std of A over the batch (Bessel).

    NaN marks a function that abstained. It adds 0 to the completion's advantage, and the completion is in none of that
    function's means and stds. Weights act after each function is normalized. The mean over the batch is 0 already,
    because it is 0 within each group."""
    advantage_KB = torch.stack([w * rule(reward_BK[:, k], group_B, groups) for k, w in enumerate(weight_K)])
    total_B = advantage_KB.sum(0)
    # Functions that contradict each other cancel up to rounding, which the division would blow up.
    total_B = torch.where(total_B.abs() <= CANCELED * advantage_KB.abs().sum(0), 0.0, total_B)
    counts_K = torch.tensor([bool(w) for w in weight_K], device=reward_BK.device)
    scored_B = (torch.isfinite(reward_BK) & counts_K).any(1)
    spread = total_B[scored_B].std() if scored_B.sum() > 1 else total_B.new_zeros(())
    return total_B / spread if spread else total_B


def mixed(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Whether each group's scored rewards differ `[P]`. The rule of `types.Group.uniform`."""
    scored_B = torch.isfinite(reward_B)
    # A group without scored rewards keeps low = inf and high = -inf, and is not mixed.
    low_P = torch.full((groups,), torch.inf, dtype=reward_B.dtype, device=reward_B.device)
    high_P = -low_P
    low_P = low_P.scatter_reduce(0, group_B, torch.where(scored_B, reward_B, torch.inf), "amin")
    high_P = high_P.scatter_reduce(0, group_B, torch.where(scored_B, reward_B, -torch.inf), "amax")
    tolerance_P = UNIFORM_TOLERANCE * torch.maximum(low_P.abs(), high_P.abs()).clamp(min=1.0)
    return high_P - low_P > torch.where(tolerance_P.isfinite(), tolerance_P, 0.0)


def apply_rule(
    rule: AdvantageRule,
    reward_B: Sequence[float | None] | Sequence[Sequence[float | None]] | Tensor,
    group_B: Sequence[Hashable] | Tensor,
    weight_K: Sequence[float] | None = None,
) -> Tensor:
    """Number the groups, compute in float64, and return the reward's dtype, but at least float32.

    With weights, rewards are `[B, K]`, and each of the K functions is normalized separately. Without any weight in
    `weight_K`, all are 1."""
    reward = _as_tensor(reward_B, functions=None if weight_K is None else len(weight_K))
    ids = group_B.tolist() if isinstance(group_B, Tensor) else list(group_B)
    if len(ids) != len(reward):
        raise ConfigError(f"group_advantage: {len(reward)} rewards but {len(ids)} group ids; give one id per reward")
    number: dict[Hashable, int] = {}
    try:
        index_B = torch.tensor([number.setdefault(i, len(number)) for i in ids], dtype=torch.long, device=reward.device)
    except TypeError:
        raise ConfigError(
            "group_advantage: group ids must be hashable, one per completion, for example numbers or strings"
        ) from None
    given = reward_B.dtype if isinstance(reward_B, Tensor) else torch.float32
    dtype = torch.promote_types(given, torch.float32) if given.is_floating_point else torch.float32
    if weight_K is not None:
        return separate(rule, reward, weight_K or [1.0] * reward.shape[1], index_B, len(number)).to(dtype)
    return rule(reward, index_B, len(number)).to(dtype)


def token_advantages(objective: Objective, tokens: Tokens, samples: Sequence[TrainSample]) -> tuple[Tensor, Tensor]:
    """(reward_B, advantage_N) of a batch, by the objective's rule. The reward is shaped, and less the KL penalty where
    that belongs to the reward."""
    sequences = tokens.sequences
    penalty_N = torch.zeros_like(tokens.logp_old_N)
    if objective.kl and objective.kl_in == "reward":
        penalty_N = objective.kl * KL_ESTIMATORS[objective.resolved_kl_estimator](tokens)
    shaped_B = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    # Before the group's mean and std, so the penalty is rescaled together with the reward.
    reward_B = shaped_B - sequences.sum(penalty_N.double()).cpu()
    if objective.advantage.per_token is not None:
        # Such a rule subtracts the penalty itself, token by token, so it gets the reward without the penalty.
        return reward_B, objective.advantage.per_token(shaped_B, penalty_N, sequences).float()
    groups = [s.group for s in samples]
    if objective.credit == "steps" and any(s.score.step_rewards for s in samples):
        return reward_B, step_advantages(objective.advantage, reward_B, sequences, samples).to(penalty_N)
    if objective.normalize == "separate":
        parts_BK = [list(s.score.parts.values()) for s in samples]
        advantage_B = apply_rule(objective.advantage, parts_BK, groups, objective.reward_weights).float()
    else:
        advantage_B = apply_rule(objective.advantage, reward_B, groups).float()
    return reward_B, sequences.expand(advantage_B.to(penalty_N.device))


def step_advantages(
    rule: AdvantageRule, reward_B: Tensor, sequences: Sequences, samples: Sequence[TrainSample]
) -> Tensor:
    """A_t = sum of the normalized step rewards from t on, each normalized by the rule among all step rewards of its
    group (arXiv:2402.03300, section 4.1.3). A completion without step rewards has one, at its last token.

    What the shaped reward differs by from the sum of its steps belongs to the last step. The tokens of a sequence must
    be contiguous and in order."""
    lengths = sequences.length_B.long().tolist()
    value_S: list[float] = []
    group_S: list[int] = []
    place_S: list[tuple[int, int]] = []
    for b, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        steps = sample.score.step_rewards or ((length - 1, 0.0),)
        rest = float(reward_B[b]) - sum(value for _, value in steps)
        for number, (at, value) in enumerate(steps):
            value_S.append(value + (rest if number == len(steps) - 1 else 0.0))
            group_S.append(sample.group)
            place_S.append((b, at))
    advantage_S = apply_rule(rule, value_S, group_S).double().tolist()
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    advantage_N = torch.zeros(starts[-1], dtype=torch.float64)
    for (b, at), advantage in zip(place_S, advantage_S, strict=True):
        advantage_N[starts[b] : starts[b] + at + 1] += advantage
    return advantage_N


def _as_tensor(
    reward_B: Sequence[float | None] | Sequence[Sequence[float | None]] | Tensor, functions: int | None
) -> Tensor:
    """Rewards `[B]`, or `[B, K]` for a number of functions (0: any)."""
    if isinstance(reward_B, Tensor):
        reward = reward_B.detach().double()
    else:
        reward = torch.tensor(_with_nan(reward_B), dtype=torch.float64)
    if functions is None and reward.dim() != 1:
        raise ConfigError(f"group_advantage: rewards must be one per completion, shape [B], not {list(reward.shape)}")
    if functions is not None and (reward.dim() != 2 or functions not in (0, reward.shape[1])):
        raise ConfigError(
            f'group_advantage: with normalize="separate", rewards must be one per completion and function, shape '
            f"[B, {functions or 'K'}], with as many weights, not {list(reward.shape)}"
        )
    return reward


def _with_nan(value: Any) -> Any:
    """The same numbers, nested as before, with NaN for None."""
    if isinstance(value, Sequence):
        return [_with_nan(v) for v in value]
    return float("nan") if value is None else float(value)


def _sum(x_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    return torch.zeros(groups, dtype=x_B.dtype, device=x_B.device).index_add(0, group_B, x_B)
