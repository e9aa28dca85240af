"""Inputs for the objective tests: padded batches with ragged masks, and a helper that calls `gspo.policy_loss` on
them."""

import dataclasses
from dataclasses import dataclass

import torch

import gspo

SEQUENCE_ROWS = ("gspo", "luspo", "fspo", "gmpo", "sspo", "vespo", "rloo")
"""Objectives that refuse an advantage that varies within a sequence."""
COV_ROWS = ("clip_cov", "kl_cov")
HARD_CLIP_ROWS = (
    "gspo", "gspo_token", "gspo_turn", "luspo", "grpo", "dr_grpo", "dapo", "reinforce_pp", "maxrl", "ppo_clip",
    "clip_cov",
)  # fmt: skip
OWN_SAMPLER_ROWS = ("minirl", "dppo_tv", "dppo_kl", "trm")
"""Objectives that already divide by the sampler's probabilities and so refuse `mismatch`."""
ALL_ROWS = (
    "gspo", "gspo_token", "gspo_turn", "grpo", "dr_grpo", "dapo", "luspo", "gmpo", "sapo", "vespo", "maspo", "cispo",
    "gpg", "rloo",
    "reinforce_pp", "minirl", "clip_cov", "kl_cov", "ppo_clip", "fspo", "sspo", "maxrl", "minpro", "dppo_tv", "dppo_kl",
    "trm",
)  # fmt: skip
TOKEN_ROWS = tuple(row for row in ALL_ROWS if row not in SEQUENCE_ROWS)
MIXED_CLIP = {
    "gspo": {"clip_low": 8e-3, "clip_high": 9e-3},
    "gspo_token": {"clip_low": 8e-3, "clip_high": 9e-3},
    "gspo_turn": {"clip_low": 8e-3, "clip_high": 9e-3},
    "luspo": {"clip_low": 8e-3, "clip_high": 9e-3},
}
"""Clip ranges for sequence-level objectives that clip some but not all sequences of `random_case(scale=0.05)`."""
ROWS = gspo.objective_names()
ADVANTAGE_ROWS = [row for row in ROWS if row != "ppo_clip"]
GSPO_LIKE = ("gspo", "gspo_token", "luspo")
TOKEN_CLIP_ROWS = ("grpo", "dr_grpo", "dapo", "reinforce_pp", "maxrl", "ppo_clip")
CONSTANT_LENGTH_ROWS = ("dr_grpo", "dppo_tv", "dppo_kl")


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


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def one_token(log_ratios, advantage, *, logp_old=-1.0):
    """One sequence of one token per log-ratio: its ratio is both the token's and the sequence's."""
    log_ratios = f64(*log_ratios)[:, None]
    old = torch.full_like(log_ratios, logp_old)
    advantage = torch.as_tensor(advantage, dtype=torch.float64).expand(len(log_ratios))
    return Case(
        logp=old + log_ratios,
        logp_old=old,
        advantage=advantage,
        mask=torch.ones_like(old, dtype=torch.bool),
        selected=torch.zeros_like(old, dtype=torch.bool),
    )


def ratios(case):
    return (case.logp - case.logp_old).exp().squeeze(1)


def all_options(row):
    kw = {"kl": 0.2, "kl_estimator": "k3", "entropy": 0.05, "off_policy_mask": 0.02}
    if row == "reinforce_pp":
        kw |= {"kl_in": "loss"}
    if row not in OWN_SAMPLER_ROWS:
        kw |= {"mismatch": "token_tis", "mismatch_high": 1.05}
    if row in HARD_CLIP_ROWS:
        kw |= {"dual_clip": 2.05 if row == "clip_cov" else 1.3}
    if row == "kl_cov":
        kw |= {"select_fraction": 0.2}
    if row == "clip_cov":
        kw |= {"select_fraction": 0.2, "cov_low": 0.0, "cov_high": 10.0}
    return gspo.objective(row, **kw, **MIXED_CLIP.get(row, {}))


def kl_in_loss(row, **settings):
    return gspo.objective(row, **({"kl_in": "loss"} if row == "reinforce_pp" else {}), **settings)
