"""The family, one row each: advantage x ratio x trust region x aggregate.

A row reads: compare each reply with its group by `advantage`, measure how far the policy has moved by `ratio`, believe
the move within `trust_region`, and weigh the tokens by `aggregate`; `Clip(low, high)` is the usual range. The other slots (which groups to `keep`, how to
`shape` the reward, a KL penalty, ...) are neutral unless a row or a user sets them; see `objective.py`.
`gspo objectives` prints this table; `docs/objectives.md` is made from it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gspo.errors import ConfigError
from gspo.objectives.advantage import batch_whitened, centered, external, leave_one_out, rescaled, z_score
from gspo.objectives.aggregate import ConstantLength, sequence_mean, sequence_sum, token_mean
from gspo.objectives.objective import Objective, change
from gspo.objectives.ratio import none, product, sequence, token
from gspo.objectives.trust_region import (
    CappedWeight,
    Clip,
    DropCovariance,
    GammaWeight,
    LogClipThenMean,
    MaskedWeight,
    MassGate,
    PenalizeCovariance,
    SoftGate,
    Unbounded,
)

TABLE: dict[str, Objective] = {
    # Sequence level: one ratio per reply.
    "gspo": Objective(paper="arXiv:2507.18071", advantage=z_score, ratio=sequence, trust_region=Clip(3e-4, 4e-4), aggregate=sequence_mean, per="sequence"),
    "gspo_token": Objective(paper="arXiv:2507.18071", advantage=z_score, ratio=sequence, trust_region=Clip(3e-4, 4e-4), aggregate=sequence_mean),
    "luspo": Objective(paper="arXiv:2602.05261", advantage=z_score, ratio=sequence, trust_region=Clip(2e-3, 2.5e-3), aggregate=sequence_sum, per="sequence"),
    "gmpo": Objective(paper="arXiv:2507.20673", advantage=z_score, ratio=token, trust_region=LogClipThenMean(0.4, 0.4), aggregate=sequence_mean, per="sequence"),
    "vespo": Objective(paper="arXiv:2602.10693", advantage=centered, ratio=product, trust_region=GammaWeight(k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0), aggregate=token_mean, per="sequence"),
    # Token level, hard clip.
    "grpo": Objective(paper="arXiv:2402.03300", advantage=z_score, ratio=token, trust_region=Clip(0.2, 0.2), aggregate=sequence_mean, kl=0.04),
    "dr_grpo": Objective(paper="arXiv:2503.20783", advantage=centered, ratio=token, trust_region=Clip(0.2, 0.2), aggregate=ConstantLength(max_length=3000)),
    "dapo": Objective(paper="arXiv:2503.14476", advantage=z_score, ratio=token, trust_region=Clip(0.2, 0.28), aggregate=token_mean, keep="mixed", shape="soft_overlong"),
    "reinforce_pp": Objective(paper="arXiv:2501.03262", advantage=batch_whitened, ratio=token, trust_region=Clip(0.2, 0.2), aggregate=token_mean, kl=0.001, kl_in="reward"),
    "ppo_clip": Objective(paper="arXiv:1707.06347", advantage=external, ratio=token, trust_region=Clip(0.2, 0.2), aggregate=token_mean),
    # Token level, soft or weighted.
    "sapo": Objective(paper="arXiv:2511.20347", advantage=z_score, ratio=token, trust_region=SoftGate(tau_pos=1.0, tau_neg=1.05), aggregate=sequence_mean),
    "maspo": Objective(paper="arXiv:2602.17550", advantage=z_score, ratio=token, trust_region=MassGate(sigma_base=1.0, mass_power=0.3, beta_pos=0.03, beta_neg=0.03, sigma_high=10.0, factor_low=0.1, factor_high=10.0), aggregate=token_mean),
    "cispo": Objective(paper="arXiv:2506.13585", advantage=z_score, ratio=token, trust_region=CappedWeight(weight_cap=5.0), aggregate=token_mean),
    "minirl": Objective(paper="arXiv:2512.01374", advantage=centered, ratio=token, trust_region=MaskedWeight(0.2, 0.27, weight_cap=5.0), aggregate=sequence_sum),
    # Token level, a few tokens singled out by covariance.
    "clip_cov": Objective(paper="arXiv:2505.22617", advantage=z_score, ratio=token, trust_region=DropCovariance(select_fraction=2e-4, cov_low=1.0, cov_high=5.0, clip_low=1.0, clip_high=1.0), aggregate=token_mean),
    "kl_cov": Objective(paper="arXiv:2505.22617", advantage=z_score, ratio=token, trust_region=PenalizeCovariance(select_fraction=2e-3, cov_kl=1.0), aggregate=token_mean),
    # No ratio.
    "gpg": Objective(paper="arXiv:2504.02546", advantage=rescaled, ratio=none, trust_region=Unbounded(), aggregate=token_mean),
    "rloo": Objective(paper="arXiv:2402.14740", advantage=leave_one_out, ratio=none, trust_region=Unbounded(), aggregate=sequence_sum, per="sequence"),
}  # fmt: skip


def objective(name: str, **settings: Any) -> Objective:
    """A row of the table with changed settings: `gspo.objective("gspo", clip_low=3e-4, clip_high=4e-4)`."""
    if not isinstance(name, str) or name not in TABLE:
        raise ConfigError(f"no objective {name!r}; there are: {', '.join(TABLE)}")
    return change(replace(TABLE[name], name=name), settings)


def objective_names() -> list[str]:
    """The rows of the table."""
    return list(TABLE)
