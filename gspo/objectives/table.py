"""All objectives, one row each: advantage x ratio x trust region x aggregate.

In: the name of a row and changed settings. Out: an `Objective`. Invariant: everything that defines an objective is in
its row, or is a default of the row's components.

A row compares each completion with its group by `advantage`, measures how far the policy has moved by `ratio`, trusts
the move within `trust_region`, and weights the tokens by `aggregate`. The published constants are the defaults of the
trust regions: `Clip()` is PPO's range of 0.2 on both sides. The other slots (which groups to `keep`, how to `shape`
the reward, a KL penalty, ...) are neutral unless a row or a user sets them; see `objective.py`. `gspo objectives`
prints this table, and `docs/objectives.md` is generated from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from gspo.errors import ConfigError
from gspo.objectives.advantage import (
    AdvantageRule,
    GroupCentered,
    batch_whitened,
    external,
    leave_one_out,
    mean_scaled,
    rescaled,
)
from gspo.objectives.aggregate import ConstantLength, sequence_mean, sequence_sum, token_mean
from gspo.objectives.custom import is_custom, load
from gspo.objectives.objective import Objective, change
from gspo.objectives.ratio import (
    ProductRatio,
    Ratio,
    SequenceRatio,
    TurnRatio,
    none,
    prefix_minimum,
    token,
    token_to_sampler,
)
from gspo.objectives.trust_region import (
    BinaryKlMask,
    CappedWeight,
    Clip,
    CompletionMask,
    DropCovariance,
    GammaWeight,
    LengthBand,
    LogClipThenMean,
    MaskedWeight,
    MassGate,
    PenalizeCovariance,
    SoftGate,
    SoftGateThenMean,
    TotalVariationMask,
    TrustRegion,
    Unbounded,
)


def row(
    arxiv: str,
    advantage: AdvantageRule,
    ratio: Ratio,
    trust_region: TrustRegion,
    aggregate: Callable[[Tensor], Tensor],
    **slots: Any,
) -> Objective:
    """A row of the table: the paper, the four components, and the other slots that are not neutral."""
    return Objective(
        paper=f"arXiv:{arxiv}",
        advantage=advantage,
        ratio=ratio,
        trust_region=trust_region,
        aggregate=aggregate,
        **slots,
    )


STD, CENTERED = GroupCentered("std"), GroupCentered("none")

TABLE: dict[str, Objective] = {
    # Sequence level: one ratio per completion.
    # GSPO's range was chosen for long completions of a large model. Shorter completions need a wider one.
    "gspo": row("2507.18071", STD, SequenceRatio(), Clip(3e-4, 4e-4), sequence_mean, advantage_per="sequence"),
    # The same value and gradient as gspo, unless the advantage differs between the tokens of a completion.
    "gspo_token": row("2507.18071", STD, SequenceRatio(), Clip(3e-4, 4e-4), sequence_mean, credit="steps"),
    # One ratio per turn of a conversation, between GSPO's one per completion and GRPO's one per token.
    "gspo_turn": row("2511.20718", STD, TurnRatio(), Clip(3e-4, 4e-4), sequence_mean, credit="steps"),
    "luspo": row("2602.05261", STD, SequenceRatio(), Clip(2e-3, 2.5e-3), sequence_sum, advantage_per="sequence"),
    # The gradient of the product of all ratios is a sum over tokens, so FSPO does not divide by the length.
    "fspo": row("2509.09177", STD, SequenceRatio("none"), LengthBand(), sequence_sum, advantage_per="sequence"),
    "gmpo": row("2507.20673", STD, token, LogClipThenMean(), sequence_mean, advantage_per="sequence"),
    "sspo": row("2602.19327", STD, token, SoftGateThenMean(), sequence_mean, advantage_per="sequence"),
    "vespo": row("2602.10693", CENTERED, ProductRatio(), GammaWeight(), token_mean, advantage_per="sequence"),
    # Token level, hard clip.
    "grpo": row("2402.03300", STD, token, Clip(), sequence_mean, kl=0.04),
    "dr_grpo": row("2503.20783", CENTERED, token, Clip(), ConstantLength()),
    "dapo": row("2503.14476", STD, token, Clip(0.2, 0.28), token_mean, keep="mixed", shape=("soft_overlong",)),
    "reinforce_pp": row("2501.03262", batch_whitened, token, Clip(), token_mean, kl=0.001, kl_in="reward"),
    "maxrl": row("2602.02710", mean_scaled, token, Clip(), token_mean),
    "ppo_clip": row("1707.06347", external, token, Clip(), token_mean),
    # Token level, soft or weighted.
    "sapo": row("2511.20347", STD, token, SoftGate(), sequence_mean),
    "maspo": row("2602.17550", STD, token, MassGate(), token_mean),
    "cispo": row("2506.13585", STD, token, CappedWeight(), token_mean),
    "minirl": row("2512.01374", CENTERED, token, MaskedWeight(), sequence_sum),
    "minpro": row("2601.22718", STD, prefix_minimum, CappedWeight(), token_mean),
    # Token level, ratio to the sampler, unbounded where it is not masked.
    "dppo_tv": row("2602.04879", CENTERED, token_to_sampler, TotalVariationMask(), ConstantLength()),
    "dppo_kl": row("2602.04879", CENTERED, token_to_sampler, BinaryKlMask(), ConstantLength()),
    "trm": row("2512.23075", STD, token_to_sampler, CompletionMask(), token_mean),
    # Token level, with a few tokens selected by covariance.
    "clip_cov": row("2505.22617", STD, token, DropCovariance(), token_mean),
    "kl_cov": row("2505.22617", STD, token, PenalizeCovariance(), token_mean),
    # No ratio.
    "gpg": row("2504.02546", rescaled, none, Unbounded(), token_mean),
    # The log-prob of a completion is the sum over its tokens, so RLOO does not divide by the length.
    "rloo": row("2402.14740", leave_one_out, none, Unbounded(), sequence_sum, advantage_per="sequence"),
}


def objective(name: str, **settings: Any) -> Objective:
    """An objective of the table with changed settings: `gspo.objective("gspo", clip_low=3e-4, clip_high=4e-4)`.

    `file.py:name` is an objective of your own."""
    return change(base_objective(name), settings)


def base_objective(name: str) -> Objective:
    """A row of the table, or the objective of a user's file, with its default settings."""
    if is_custom(name):
        return load(name)
    if not isinstance(name, str) or name not in TABLE:
        raise ConfigError(f"no objective {name!r}; there are: {', '.join(TABLE)}, or write file.py:name")
    return replace(TABLE[name], name=name)


def objective_names() -> list[str]:
    """The names of all objectives."""
    return list(TABLE)
