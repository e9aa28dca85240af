"""An independent implementation of every objective: the papers' formulas over a ragged list of sequences.

In: padded [B, T] tensors (a `cases.Case`). Out: the scalar loss (-J), differentiable in `logp`. Invariant: nothing is
shared with `gspo.objectives`. Indexing removes masked positions first, so padding cannot contribute by construction.
There are no token weights; each objective divides by its own counts. Empty sequences are removed before anything is
counted.
"""

import math
import statistics
from dataclasses import dataclass

import torch


@dataclass(kw_only=True)
class Sequence:
    """The unmasked tokens of one sequence."""

    logp: torch.Tensor
    old: torch.Tensor
    advantage: torch.Tensor
    sampler: torch.Tensor | None
    ref: torch.Tensor | None
    entropy: torch.Tensor | None
    selected: torch.Tensor | None
    factor: torch.Tensor
    """Constant factor of each token's policy term: mismatch correction and off-policy mask."""

    def __len__(self):
        return len(self.logp)

    @property
    def behavior(self):
        return self.old if self.sampler is None else self.sampler

    @property
    def log_ratio(self):
        return (self.logp - self.old).clamp(-20, 20)

    @property
    def sequence_advantage(self):
        return self.advantage[0]


def sequences(case):
    ragged = []
    for i in range(case.mask.shape[0]):
        at = case.mask[i].nonzero().squeeze(-1)
        if len(at) == 0:
            continue
        pick = lambda x, at=at, i=i: None if x is None else x[i][at]  # noqa: E731
        advantage = case.advantage[i][at] if case.advantage.ndim == 2 else case.advantage[i].expand(len(at))
        logp = pick(case.logp)
        ragged.append(
            Sequence(
                logp=logp,
                old=pick(case.logp_old),
                advantage=advantage,
                sampler=pick(case.logp_sampler),
                ref=pick(case.logp_ref),
                entropy=pick(case.entropy),
                selected=pick(case.selected),
                factor=torch.ones_like(logp),
            )
        )
    return ragged


# --- aggregation: one vector of token values per sequence -> scalar ---------------------------------------------------


def token_mean(values):
    return sum(v.sum() for v in values) / sum(len(v) for v in values)


def sequence_mean_of_token_mean(values):
    return sum(v.mean() for v in values) / len(values)


def sequence_mean_of_token_sum(values):
    return sum(v.sum() for v in values) / len(values)


def constant_length(values, max_length=3000):
    return sum(v.sum() for v in values) / (len(values) * max_length)


# --- trust regions ----------------------------------------------------------------------------------------------------


def ppo_term(ratio, A, clip_low, clip_high, dual_clip=None):
    term = torch.minimum(ratio * A, ratio.clamp(1 - clip_low, 1 + clip_high) * A)
    if dual_clip is not None:
        term = torch.where(A < 0, torch.maximum(term, dual_clip * A), term)
    return term


def _token_ppo(seqs, aggregate, clip_low, clip_high, dual_clip):
    return aggregate(
        [q.factor * ppo_term(q.log_ratio.exp(), q.advantage, clip_low, clip_high, dual_clip) for q in seqs]
    )


# --- one function per objective: sequences -> J without KL and entropy ------------------------------------------------


def ppo_clip(seqs, clip_low=0.2, clip_high=0.2, dual_clip=None):
    return _token_ppo(seqs, token_mean, clip_low, clip_high, dual_clip)


def reinforce_pp(seqs, clip_low=0.2, clip_high=0.2, dual_clip=None):
    return _token_ppo(seqs, token_mean, clip_low, clip_high, dual_clip)


def grpo(seqs, clip_low=0.2, clip_high=0.2, dual_clip=None):
    return _token_ppo(seqs, sequence_mean_of_token_mean, clip_low, clip_high, dual_clip)


def dapo(seqs, clip_low=0.2, clip_high=0.28, dual_clip=None):
    return _token_ppo(seqs, token_mean, clip_low, clip_high, dual_clip)


def dr_grpo(seqs, clip_low=0.2, clip_high=0.2, dual_clip=None, max_length=3000):
    return _token_ppo(seqs, lambda v: constant_length(v, max_length), clip_low, clip_high, dual_clip)


def weighted_mean(x, factor):
    """Value mean_t(factor) * exp(mean_t x), where the gradient of token t has factor_t, not the mean factor.

    A sequence ratio with a correction per token: s_i is computed from all tokens, then every token's copy of it
    (equation 14) is multiplied by that token's weight. With a constant factor this is exp(mean x) times the factor.
    """
    mean = x.mean()
    value = mean.detach().exp() * factor.mean()
    through = (factor * (x - x.detach())).mean() * mean.detach().exp()
    return value + through


def sequence_ppo(q, clip_low, clip_high, dual_clip):
    """mean_t factor_t * min(s A, clip(s) A), case by case."""
    A, s = q.sequence_advantage, (q.logp - q.old).detach().mean().exp().item()
    flat = q.factor.mean() * A
    if A > 0 and s > 1 + clip_high:
        return flat * (1 + clip_high)
    if A < 0 and s < 1 - clip_low:
        return flat * (1 - clip_low)
    if dual_clip is not None and A < 0 and s > dual_clip:
        return flat * dual_clip
    return A * weighted_mean(q.logp - q.old, q.factor)


NORM = {"mean": lambda T: T, "sqrt": math.sqrt, "none": lambda T: 1}


def gspo(seqs, clip_low=3e-4, clip_high=4e-4, dual_clip=None, length_norm="mean"):
    """Equation 5 of arXiv:2507.18071."""
    if length_norm != "mean":
        return gspo_token(seqs, clip_low, clip_high, dual_clip, length_norm)
    return sum(sequence_ppo(q, clip_low, clip_high, dual_clip) for q in seqs) / len(seqs)


def luspo(seqs, clip_low=2e-3, clip_high=2.5e-3, dual_clip=None):
    return sum(len(q) * sequence_ppo(q, clip_low, clip_high, dual_clip) for q in seqs) / len(seqs)


def gspo_token(seqs, clip_low=3e-4, clip_high=4e-4, dual_clip=None, length_norm="mean"):
    """Equations 13 and 14 of arXiv:2507.18071, with another power of the length in s on request."""
    per_sequence = []
    for q in seqs:
        log_s = ((q.logp - q.old).sum() / NORM[length_norm](len(q))).clamp(-20, 20)
        s = log_s.exp().detach() * (q.logp - q.logp.detach()).exp()
        per_sequence.append((q.factor * ppo_term(s, q.advantage, clip_low, clip_high, dual_clip)).mean())
    return sum(per_sequence) / len(seqs)


def gspo_turn(seqs, clip_low=3e-4, clip_high=4e-4, dual_clip=None):
    """Completions of a single turn; `test_turns.py` has several."""
    return gspo_token(seqs, clip_low, clip_high, dual_clip)


def gmpo(seqs, clip_low=0.4, clip_high=0.4):
    total = 0.0
    for q in seqs:
        A, d = q.sequence_advantage, q.logp - q.old
        if A > 0:
            d = d.clamp(max=clip_high)
        elif A < 0:
            d = d.clamp(min=-clip_low)
        total = total + A * weighted_mean(d, q.factor)
    return total / len(seqs)


def sapo(seqs, tau_pos=1.0, tau_neg=1.05):
    per_token = []
    for q in seqs:
        tau = q.advantage.new_tensor([tau_pos if A > 0 else tau_neg for A in q.advantage.tolist()])
        gate = 4 / tau / (1 + torch.exp(-tau * (q.log_ratio.exp() - 1)))
        per_token.append(q.factor * gate * q.advantage)
    return sequence_mean_of_token_mean(per_token)


def vespo_phi(log_w, c1, c2):
    return math.exp(c2 + c1 * log_w - c2 * math.exp(log_w)) if log_w < 500 else 0.0


def vespo(
    seqs,
    k_pos=2.0,
    lambda_pos=3.0,
    k_neg=3.0,
    lambda_neg=2.0,
    denominator="old",
    sampler_cap=2.0,
    length_norm="none",
):
    per_token = []
    for q in seqs:
        log_w = (q.logp.detach() - q.old).sum().item()
        if denominator == "sampler":
            log_w += sum(math.log(min(math.exp(x), sampler_cap)) for x in (q.old - q.sampler).tolist())
        log_w /= NORM[length_norm](len(q))
        c1, c2 = (k_pos, lambda_pos) if q.sequence_advantage >= 0 else (k_neg, lambda_neg)
        per_token.append(q.factor * vespo_phi(log_w, c1, c2) * q.advantage * q.logp)
    return token_mean(per_token)


def fspo(seqs, clip_low=0.03, clip_high=0.03):
    """min(W A, exp(clip(log W)) A) of the product W. In the token form each of the T tokens has this value, and its own
    part of the gradient of W."""
    total = 0.0
    for q in seqs:
        A, T = q.sequence_advantage, len(q)
        log_w = (q.logp - q.old).sum().item()
        low, high = -clip_low * math.sqrt(T), clip_high * math.sqrt(T)
        if A > 0 and log_w > high:
            total = total + q.factor.sum() * A * math.exp(high)
        elif A < 0 and log_w < low:
            total = total + q.factor.sum() * A * math.exp(low)
        else:
            w = math.exp(max(-20.0, min(20.0, log_w)))
            total = total + (q.factor * (w + w * (q.logp - q.logp.detach()))).sum() * A
    return total / len(seqs)


def sspo(seqs, tau_pos=1.0, tau_neg=1.05):
    """The geometric mean of SAPO's gates."""
    total = 0.0
    for q in seqs:
        A = q.sequence_advantage
        tau = tau_pos if A > 0 else tau_neg
        log_gate = -torch.nn.functional.softplus(-tau * (q.log_ratio.exp() - 1)) + math.log(4 / tau)
        total = total + A * weighted_mean(log_gate, q.factor)
    return total / len(seqs)


def maxrl(seqs, clip_low=0.2, clip_high=0.2, dual_clip=None):
    return _token_ppo(seqs, token_mean, clip_low, clip_high, dual_clip)


def minpro(seqs, weight_cap=5.0):
    per_token = []
    for q in seqs:
        r = q.log_ratio.detach().exp().tolist()
        weight = [r[t] * min(r[:t], default=1.0) for t in range(len(q))]
        weight = [max(math.exp(-20), min(w, weight_cap)) for w in weight]
        per_token.append(q.factor * q.logp.new_tensor(weight) * q.advantage * q.logp)
    return token_mean(per_token)


def _to_sampler(q, keep):
    ratio = (q.logp - q.behavior).clamp(-20, 20).exp()
    return q.factor * torch.where(torch.tensor(keep), ratio * q.advantage, torch.zeros_like(ratio))


def _dppo(seqs, delta_low, delta_high, max_length, divergence):
    per_token = []
    for q in seqs:
        keep = []
        for logp, mu, A in zip(q.logp.tolist(), q.behavior.tolist(), q.advantage.tolist(), strict=True):
            far = divergence(math.exp(logp), math.exp(mu), logp - mu)
            keep.append(not ((A > 0 and logp > mu and far > delta_high) or (A < 0 and logp < mu and far > delta_low)))
        per_token.append(_to_sampler(q, keep))
    return constant_length(per_token, max_length)


def dppo_tv(seqs, delta_low=0.15, delta_high=0.15, max_length=3000):
    return _dppo(seqs, delta_low, delta_high, max_length, lambda p, mu, log_r: abs(p - mu))


def binary_kl(p, mu, log_r):
    """KL between two coins that show heads with probability mu and p."""
    rest_mu, rest_p = max(1 - mu, 1e-8), max(1 - p, 1e-8)
    return -mu * log_r + (1 - mu) * math.log(rest_mu / rest_p)


def dppo_kl(seqs, delta_low=0.05, delta_high=0.05, max_length=3000):
    return _dppo(seqs, delta_low, delta_high, max_length, binary_kl)


def trm(seqs, max_divergence=2.5):
    per_token = []
    for q in seqs:
        largest = max(x * x / 2 for x in (q.logp - q.behavior).tolist())
        per_token.append(_to_sampler(q, [largest <= max_divergence] * len(q)))
    return token_mean(per_token)


def maspo(
    seqs,
    sigma_base=1.0,
    mass_power=0.3,
    beta_pos=0.03,
    beta_neg=0.03,
    sigma_high=10.0,
    factor_low=0.1,
    factor_high=10.0,
):
    per_token = []
    for q in seqs:
        ratio = q.log_ratio.exp()
        terms = []
        for t in range(len(q)):
            r, A = ratio[t].item(), q.advantage[t].item()
            sigma = min(max(sigma_base / math.exp(q.old[t].item()) ** mass_power, sigma_base), sigma_high)
            if A > 0:
                sigma *= min(max(1 + beta_pos * A, factor_low), factor_high)
            else:
                sigma *= min(max(1 / (1 - beta_neg * A), factor_low), factor_high)
            outward = (A > 0 and r > 1) or (A < 0 and r < 1)
            gate = math.exp(-((r - 1) ** 2) / (2 * sigma**2)) if outward else 1.0
            terms.append(gate * ratio[t] * A)
        per_token.append(q.factor * torch.stack(terms))
    return token_mean(per_token)


def cispo(seqs, weight_cap=5.0):
    return token_mean(
        [q.factor * q.log_ratio.exp().clamp(max=weight_cap).detach() * q.advantage * q.logp for q in seqs]
    )


def gpg(seqs):
    return token_mean([q.factor * q.advantage * q.logp for q in seqs])


def rloo(seqs):
    return sum((q.factor * q.logp).sum() * q.sequence_advantage for q in seqs) / len(seqs)


def minirl(seqs, clip_low=0.2, clip_high=0.27, weight_cap=5.0):
    total = 0.0
    for q in seqs:
        stale = q.log_ratio.exp().detach()
        dropped = ((q.advantage > 0) & (stale > 1 + clip_high)) | ((q.advantage < 0) & (stale < 1 - clip_low))
        weight = (q.logp.detach() - q.behavior).clamp(-20, 20).exp().clamp(max=weight_cap)
        total = total + (q.factor * (~dropped) * weight * q.advantage * q.logp).sum()
    return total / len(seqs)


def clip_cov(seqs, clip_low=1.0, clip_high=1.0, dual_clip=None):
    per_token = []
    for q in seqs:
        term = ppo_term(q.log_ratio.exp(), q.advantage, clip_low, clip_high, dual_clip)
        per_token.append(q.factor * torch.where(q.selected, torch.zeros_like(term), term))
    return token_mean(per_token)


def kl_cov(seqs, cov_kl=1.0):
    per_token = []
    for q in seqs:
        penalty = torch.where(q.selected, cov_kl * (q.logp - q.old).abs(), torch.zeros_like(q.logp))
        per_token.append(q.factor * (q.log_ratio.exp() * q.advantage - penalty))
    return token_mean(per_token)


ROWS = {
    f.__name__: f
    for f in (
        gspo, gspo_token, gspo_turn, grpo, dr_grpo, dapo, luspo, gmpo, sapo, vespo, maspo, cispo, gpg, rloo,
        reinforce_pp, minirl, clip_cov, kl_cov, ppo_clip, fspo, sspo, maxrl, minpro, dppo_tv, dppo_kl, trm,
    )
}  # fmt: skip

AGGREGATE = {
    "gspo": sequence_mean_of_token_mean,
    "gspo_token": sequence_mean_of_token_mean,
    "gspo_turn": sequence_mean_of_token_mean,
    "grpo": sequence_mean_of_token_mean,
    "dr_grpo": constant_length,
    "dapo": token_mean,
    "luspo": sequence_mean_of_token_sum,
    "gmpo": sequence_mean_of_token_mean,
    "sapo": sequence_mean_of_token_mean,
    "vespo": token_mean,
    "maspo": token_mean,
    "cispo": token_mean,
    "gpg": token_mean,
    "rloo": sequence_mean_of_token_sum,
    "reinforce_pp": token_mean,
    "minirl": sequence_mean_of_token_sum,
    "clip_cov": token_mean,
    "kl_cov": token_mean,
    "ppo_clip": token_mean,
    "fspo": sequence_mean_of_token_sum,
    "sspo": sequence_mean_of_token_mean,
    "maxrl": token_mean,
    "minpro": token_mean,
    "dppo_tv": constant_length,
    "dppo_kl": constant_length,
    "trm": token_mean,
}
"""How each objective averages per-token values: its KL and entropy terms, and its token weights."""

KL_DEFAULT = {"grpo": 0.04}
"""Objectives whose loss has a KL term by default. reinforce_pp has one too, but in the reward."""


# --- options ----------------------------------------------------------------------------------------------------------


def mismatch_factor(q, mode, low, high):
    """The correction of pi_old/mu for each token of q."""
    rho = (q.old - q.sampler).exp()
    if mode == "token_tis":
        return rho.clamp(max=2.0 if high is None else high)
    if mode == "icepop":
        low, high = (0.5 if low is None else low), (5.0 if high is None else high)
        return torch.where((rho >= low) & (rho <= high), rho, torch.zeros_like(rho))
    if mode == "sequence_mask":
        low, high = (0.999 if low is None else low), (1.001 if high is None else high)
        geometric_mean = math.exp((q.old - q.sampler).mean().item())
        return torch.full_like(rho, 1.0 if low <= geometric_mean <= high else 0.0)
    if mode == "sequence_tis":
        product = math.exp(min((q.old - q.sampler).sum().item(), 20.0))
        return torch.full_like(rho, min(product, 2.0 if high is None else high))
    raise AssertionError(mode)


def kl_values(q, estimator):
    log_r = q.ref - q.logp
    k1, k2, k3 = -log_r, 0.5 * log_r**2, log_r.exp() - 1 - log_r
    if estimator == "k3+":
        return k3.detach() + k2 - k2.detach()
    if estimator == "k3_ratio":
        return (q.logp - q.old).exp() * k3
    return {"k1": k1, "k2": k2, "k3": k3}[estimator]


def loss(
    row,
    case,
    *,
    kl=None,
    kl_estimator="k3",
    kl_in="loss",
    entropy=0.0,
    off_policy_mask=None,
    mismatch="none",
    mismatch_low=None,
    mismatch_high=None,
    **settings,
):
    """-J of one whole optimizer step."""
    seqs = sequences(case)
    if not seqs:
        return case.logp.new_zeros(())
    for q in seqs:
        if mismatch != "none":
            q.factor = q.factor * mismatch_factor(q, mismatch, mismatch_low, mismatch_high)
        if off_policy_mask is not None:
            drift = (q.behavior - q.logp).mean().item()
            q.factor = q.factor * (0.0 if q.sequence_advantage < 0 and drift > off_policy_mask else 1.0)
    J = ROWS[row](seqs, **settings)
    aggregate = AGGREGATE[row]
    if "max_length" in settings:
        aggregate = lambda v: constant_length(v, settings["max_length"])  # noqa: E731
    if kl is None:
        kl = KL_DEFAULT.get(row, 0.0) if case.logp_ref is not None else 0.0
    if kl and kl_in == "loss":
        J = J - kl * aggregate([kl_values(q, kl_estimator) for q in seqs])
    if entropy:
        J = J + entropy * aggregate([q.entropy for q in seqs])
    return -J


def loss_and_grad(row, case, **settings):
    logp = case.logp.detach().clone().requires_grad_(True)
    value = loss(row, case.replace(logp=logp), **settings)
    if not value.requires_grad:
        return value.detach(), torch.zeros_like(logp)
    (grad,) = torch.autograd.grad(value, logp)
    return value.detach(), grad


def token_weights(row, mask, **settings):
    """d aggregate / d token value: the weight of every token."""
    value = torch.zeros(mask.shape, dtype=torch.float64, requires_grad=True)
    ragged = [value[i][mask[i]] for i in range(len(mask)) if mask[i].any()]
    aggregate = AGGREGATE[row]
    total = aggregate(ragged, *settings.values())
    (grad,) = torch.autograd.grad(total, value)
    return grad


def covariance(case):
    """Cov_j `[B, T]` over all unmasked tokens, 0 at masked positions."""
    m = case.mask
    A = case.advantage if case.advantage.ndim == 2 else case.advantage[:, None].expand(m.shape)
    logp, adv = case.logp[m], A[m]
    out = torch.zeros(m.shape, dtype=logp.dtype)
    out[m] = (logp - sum(logp.tolist()) / len(logp)) * (adv - sum(adv.tolist()) / len(adv))
    return out


# --- group advantages -------------------------------------------------------------------------------------------------

Z_SCORE = (
    "gspo", "gspo_token", "gspo_turn", "grpo", "dapo", "luspo", "gmpo", "sapo", "maspo", "cispo", "clip_cov", "kl_cov",
    "fspo", "sspo", "minpro", "trm",
)  # fmt: skip
CENTERED = ("dr_grpo", "vespo", "minirl", "dppo_tv", "dppo_kl")


def group_advantage(row, rewards, groups):
    """Python floats; `None` and NaN are unscored."""
    scored = [r is not None and not math.isnan(r) for r in rewards]
    members = {}
    for i, g in enumerate(groups):
        if scored[i]:
            members.setdefault(g, []).append(i)
    out = [0.0] * len(rewards)
    if row == "reinforce_pp":
        all_rewards = [r for r, ok in zip(rewards, scored, strict=True) if ok]
        if len(set(all_rewards)) < 2:
            return out
        mean, std = statistics.fmean(all_rewards), statistics.stdev(all_rewards)
        return [(r - mean) / std if ok else 0.0 for r, ok in zip(rewards, scored, strict=True)]
    uniform = [g for g, at in members.items() if len({rewards[i] for i in at}) == 1]
    n_scored, n_uniform = sum(scored), sum(len(members[g]) for g in uniform)
    for g, at in members.items():
        if g in uniform:
            continue
        values = [rewards[i] for i in at]
        mean, k = statistics.fmean(values), len(at)
        for i in at:
            centered = rewards[i] - mean
            if row in Z_SCORE:
                out[i] = centered / statistics.stdev(values)
            elif row in CENTERED:
                out[i] = centered
            elif row == "maxrl":
                out[i] = centered / mean
            elif row == "rloo":
                out[i] = k / (k - 1) * centered
            elif row == "gpg":
                out[i] = n_scored / (n_scored - n_uniform) * centered
            else:
                raise AssertionError(row)
    return out
