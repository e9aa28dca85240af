"""Inputs for the objective tests: padded batches with ragged masks, and a helper that calls `gspo.policy_loss` on
them."""

import dataclasses
from dataclasses import dataclass

import torch

import gspo

SEQUENCE_ROWS = ("gspo", "luspo", "gmpo", "vespo", "rloo")
"""Objectives that refuse an advantage that varies within a sequence."""
COV_ROWS = ("clip_cov", "kl_cov")
HARD_CLIP_ROWS = ("gspo", "gspo_token", "luspo", "grpo", "dr_grpo", "dapo", "reinforce_pp", "ppo_clip", "clip_cov")
OWN_SAMPLER_ROWS = ("vespo", "minirl")
"""Objectives that already divide by the sampler's probabilities and so refuse `mismatch`."""
ALL_ROWS = (
    "gspo", "gspo_token", "grpo", "dr_grpo", "dapo", "luspo", "gmpo", "sapo", "vespo", "maspo", "cispo", "gpg", "rloo",
    "reinforce_pp", "minirl", "clip_cov", "kl_cov", "ppo_clip",
)  # fmt: skip
TOKEN_ROWS = tuple(row for row in ALL_ROWS if row not in SEQUENCE_ROWS)
MIXED_CLIP = {
    "gspo": {"clip_low": 8e-3, "clip_high": 9e-3},
    "gspo_token": {"clip_low": 8e-3, "clip_high": 9e-3},
    "luspo": {"clip_low": 8e-3, "clip_high": 9e-3},
}
"""Clip ranges for sequence-level objectives that clip some but not all sequences of `random_case(scale=0.05)`."""


@dataclass(frozen=True, kw_only=True)
class Case:
    logp: torch.Tensor
    logp_old: torch.Tensor
    advantage: torch.Tensor
    mask: torch.Tensor
    logp_sampler: torch.Tensor | None = None
    logp_ref: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    selected: torch.Tensor | None = None

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)

    def map(self, f):
        """Apply f to every tensor that is not `None`."""
        fields = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        return Case(**{k: None if v is None else f(v) for k, v in fields.items()})

    def to(self, dtype):
        return self.map(lambda x: x.to(dtype) if x.is_floating_point() else x)

    def rows(self, at):
        return self.map(lambda x: x[at])


def random_mask(generator, B, T, empty=True):
    """Ragged, with holes (tool tokens); the first and the last position are masked in some rows."""
    mask = torch.rand(B, T, generator=generator) < 0.75
    length = torch.randint(1, T + 1, (B,), generator=generator)
    mask &= torch.arange(T) < length[:, None]
    mask[:, 0] |= ~mask.any(1)
    if empty and B > 1:
        mask[B // 2] = False
    return mask


def random_case(seed, *, B=6, T=8, scale=0.3, empty=True, mask=None, advantage=None, per_token=False):
    """Float64. `scale` is the standard deviation of log pi - log pi_old."""
    g = torch.Generator().manual_seed(seed)
    noise = lambda: torch.randn(B, T, generator=g, dtype=torch.float64)  # noqa: E731
    old = -0.05 - 3 * torch.rand(B, T, generator=g, dtype=torch.float64)
    if mask is None:
        mask = random_mask(g, B, T, empty)
    if advantage is None:
        advantage = noise() if per_token else noise()[:, 0]
        if B > 3:
            advantage[-1] = 0.0
    return Case(
        logp=old + scale * noise(),
        logp_old=old,
        advantage=advantage,
        mask=mask,
        logp_sampler=old + 0.05 * noise(),
        logp_ref=old + 0.3 * noise(),
        entropy=torch.rand(B, T, generator=g, dtype=torch.float64) * 2,
        selected=(torch.rand(B, T, generator=g) < 0.3) & mask,
    )


def evaluate(objective, case, *, row=None, sampler=False, ref=False, entropy=False, weights=None, selected=True):
    """(out, d loss / d logp). Optional inputs are passed only on request; `selected` only to the two covariance
    objectives."""
    row = row or objective
    logp = case.logp.detach().clone().requires_grad_(True)
    optional = {}
    if sampler:
        optional["logp_sampler"] = case.logp_sampler
    if ref:
        optional["logp_ref"] = case.logp_ref
    if entropy:
        optional["entropy"] = case.entropy
    if weights is not None:
        optional["weights"] = weights
    if selected and row in COV_ROWS:
        optional["selected"] = case.selected
    out = gspo.policy_loss(objective, logp, case.logp_old, case.advantage, case.mask, **optional)
    assert out.loss.shape == ()
    (grad,) = torch.autograd.grad(out.loss, logp)
    return out, grad


def bare(row, **settings):
    """The objective without its KL term, so that no reference is needed."""
    return gspo.objective(row, **({"kl": 0.0} if row in ("grpo", "reinforce_pp") else {}), **settings)
