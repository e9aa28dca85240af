"""The objectives of 2025 and 2026 with the values they are known for, and the settings of sequence ratios."""

import math

import cases
import oracle
import pytest
import torch
from cases import bare, evaluate, f64, one_token, random_case, ratios

import gspo
from gspo.objectives.sequences import Sequences, Tokens
from gspo.objectives.table import TABLE

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def against_oracle(row, objective, case, **settings):
    out, grad = evaluate(objective, case, row=row, sampler=True)
    want, want_grad = oracle.loss_and_grad(row, case.replace(logp_ref=None, entropy=None), kl=0.0, **settings)
    torch.testing.assert_close(out.loss.detach(), want, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(grad, want_grad, rtol=1e-9, atol=1e-12)
    return out, grad


def probability(p, mu, A):
    """One token of probability `p` that the sampler drew with probability `mu`."""
    case = one_token([0.0], A)
    return case.replace(logp=f64(math.log(p))[None], logp_old=f64(-0.7)[None], logp_sampler=f64(math.log(mu))[None])


@pytest.mark.parametrize(
    ("p", "mu", "A", "kept"),
    [
        (0.64, 0.5, 1.0, True),  # |pi - mu| = 0.14
        (0.66, 0.5, 1.0, False),  # 0.16, in the direction of A
        (0.66, 0.5, -1.0, True),  # 0.16 against it
        (0.34, 0.5, -1.0, False),
        (0.34, 0.5, 1.0, True),
        (1e-1, 1e-3, 1.0, True),  # a ratio of 100, which a clip of 0.2 would drop
        (0.8, 0.99, -1.0, False),  # a ratio of 0.81, which a clip of 0.2 would keep
    ],
)
def test_dppo_tv_judges_the_probability_and_not_the_ratio(p, mu, A, kept):
    out, grad = evaluate("dppo_tv", probability(p, mu, A), sampler=True)
    assert grad.item() * 3000 == pytest.approx(-A * p / mu if kept else 0.0, rel=1e-9)
    assert out.stats["clip_fraction_tokens"] == float(not kept)


def test_dppo_kl_is_the_kl_of_two_coins():
    """KL(0.5, p) = -0.5 log(4 p (1 - p)) reaches 0.05 at p = 0.654."""
    for p, kept in [(0.65, True), (0.66, False), (0.34, True)]:
        kl = -0.5 * math.log(4 * p * (1 - p))
        assert (kl <= 0.05 or p < 0.5) is kept
        _, grad = evaluate("dppo_kl", probability(p, 0.5, 1.0), sampler=True)
        assert (grad.item() != 0) is kept
    _, grad = evaluate("dppo_kl", probability(0.34, 0.5, -1.0), sampler=True)
    assert grad.item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pair", [(0.0, 0.0), (-1e-9, -50.0), (-50.0, -1e-9), (-1e-7, 0.0), (-200.0, -200.0)])
def test_dppo_kl_is_finite_for_certain_tokens(pair, dtype):
    logp, mu = (torch.tensor([[x]], dtype=dtype) for x in pair)
    case = one_token([0.0], 1.0).to(dtype).replace(logp=logp, logp_old=mu, logp_sampler=mu)
    divergence_N = TABLE["dppo_kl"].trust_region.divergence(logp[0], mu[0])
    assert torch.isfinite(divergence_N).all()
    assert divergence_N.item() >= -1e-6
    out, grad = evaluate("dppo_kl", case, sampler=True)
    assert math.isfinite(out.loss.item())
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("row", ["dppo_tv", "dppo_kl", "trm"])
def test_the_recomputed_policy_takes_no_part(row):
    """They measure against the sampler; the old policy only stands in for it where it is unknown."""
    case = random_case(0, scale=0.3)
    out, grad = evaluate(row, case, sampler=True)
    other, other_grad = evaluate(row, case.replace(logp_old=case.logp_old - 1.0), row=row, sampler=True)
    assert out.loss.item() == other.loss.item()
    assert torch.equal(grad, other_grad)


def test_trm_drops_a_whole_completion_for_one_token():
    """0.5 x^2 = 2.5 at x = 2.236, on either side."""
    old = torch.full((4, 5), -3.0, dtype=torch.float64)
    moves = torch.full_like(old, 0.1)
    moves[0, 2], moves[1, 2], moves[2, 2], moves[3, 2] = 2.3, -2.3, 2.2, -2.2
    case = cases.Case(logp=old + moves, logp_old=old, advantage=f64(1, 1, 1, -1), mask=torch.ones(4, 5).bool())
    out, grad = evaluate("trm", case)
    want = -moves.exp() * f64(1, 1, 1, -1)[:, None] / 20
    want[:2] = 0
    torch.testing.assert_close(grad, want, rtol=1e-12, atol=0)
    assert out.stats["clip_fraction_sequences"] == 0.5


def test_fspo_has_the_gradient_of_the_clipped_product():
    """Independent autograd of 1/G sum_i min(W A, exp(clip(log W, -c sqrt(T), c sqrt(T))) A), the paper's objective."""
    for seed in range(4):
        case = random_case(seed, B=12, T=9, scale=0.05, empty=False)
        logp = case.logp.clone().requires_grad_()
        terms = []
        for i in range(len(case.mask)):
            at = case.mask[i]
            log_w, band = (logp[i] - case.logp_old[i])[at].sum(), 0.03 * math.sqrt(int(at.sum()))
            A = case.advantage[i]
            terms.append(torch.minimum(log_w.exp() * A, log_w.clamp(-band, band).exp() * A))
        (want,) = torch.autograd.grad(-torch.stack(terms).mean(), logp)
        out, grad = evaluate("fspo", case)
        torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-14)
        assert 0 < out.stats["clip_fraction_sequences"] < 1


def test_fspo_clips_short_and_long_completions_equally():
    """The band follows the spread of the sum. A fixed range clips long completions more, and 1/T clips short ones."""
    g = torch.Generator().manual_seed(0)
    shares = {}
    for T in (4, 256):
        old = torch.full((4000, T), -1.0, dtype=torch.float64)
        move = 0.03 * torch.randn(4000, T, generator=g, dtype=torch.float64)
        case = cases.Case(logp=old + move, logp_old=old, advantage=torch.ones(4000), mask=torch.ones(4000, T).bool())
        for name in ("fspo", "gspo"):
            clip = {} if name == "fspo" else {"clip_low": 3e-3, "clip_high": 3e-3}
            out, _ = evaluate(gspo.objective(name, **clip), case.to(torch.float64), row=name)
            shares[name, T] = out.stats["clip_fraction_sequences"]
    assert shares["fspo", 4] == pytest.approx(0.159, abs=0.02)  # above one standard deviation
    assert shares["fspo", 256] == pytest.approx(shares["fspo", 4], abs=0.02)
    assert shares["gspo", 4] > 0.4
    assert shares["gspo", 256] < 0.1


def test_sspo_is_the_geometric_mean_of_sapo_gates():
    case = random_case(3, B=4, T=6, scale=0.5, empty=False)
    logp = case.logp.clone().requires_grad_()
    J = 0.0
    for i in range(4):
        at, A = case.mask[i], case.advantage[i]
        tau = 1.0 if A > 0 else 1.05
        r = (logp[i] - case.logp_old[i])[at].exp()
        gate = 4 / tau * torch.sigmoid(tau * (r - 1))
        J = J + A * gate.prod() ** (1 / int(at.sum())) / 4
    (want,) = torch.autograd.grad(-J, logp)
    out, grad = evaluate("sspo", case)
    assert out.loss.item() == pytest.approx(-J.item(), rel=1e-12)
    torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-14)
    _, gspo_grad = evaluate(gspo.objective("gspo", clip_low=9.0, clip_high=9.0), case, row="gspo")
    assert not torch.allclose(grad, gspo_grad, rtol=1e-2)


def test_one_token_completions_make_sspo_sapo_and_minpro_cispo():
    case = one_token([-1.0, -0.2, 0.0, 0.4, 1.3], f64(1, -1, 1, -1, 1))
    for row, twin in (("sspo", "sapo"), ("minpro", "cispo")):
        out, grad = evaluate(row, case)
        want, want_grad = evaluate(twin, case)
        assert out.loss.item() == pytest.approx(want.loss.item(), rel=1e-12)
        torch.testing.assert_close(grad, want_grad, rtol=1e-12, atol=0)
    assert ratios(case).max() < 5


def test_minpro_weighs_by_the_smallest_earlier_ratio():
    r = f64(2.0, 0.5, 1.5, 0.25, 3.0)
    old = torch.full((1, 5), -2.0, dtype=torch.float64)
    case = cases.Case(logp=old + r.log(), logp_old=old, advantage=f64(1.0), mask=torch.ones(1, 5).bool())
    _, grad = evaluate("minpro", case)
    # Up to the second token it is the exact prefix ratio: 2, then 2 x 0.5.
    want = [2.0, 0.5 * 2.0, 1.5 * 0.5, 0.25 * 0.5, 3.0 * 0.25]
    assert (-5 * grad).flatten().tolist() == pytest.approx(want, rel=1e-12)


def test_minpro_reads_the_order_of_tokens_within_each_sequence():
    """Packed tokens of several sequences may be mixed, as long as each keeps its own order."""
    index = torch.tensor([1, 0, 1, 3, 0, 1, 3, 0])
    x = torch.tensor([0.5, 2.0, -1.0, 0.1, 1.0, 3.0, 0.2, 4.0])
    got = Sequences(index, 5).minimum_before(x)
    assert got.tolist() == pytest.approx([0.0, 0.0, 0.5, 0.0, 2.0, -1.0, 0.1, 1.0])
    assert Sequences(index[:0], 5).minimum_before(x[:0]).tolist() == []


def test_masked_tokens_are_no_prefix():
    case = random_case(5, B=3, T=6, scale=0.4, mask=torch.ones(3, 6).bool())
    wide = case.map(lambda x: torch.cat([x[:, :2], x[:, :1] + 7, x[:, 2:]], 1) if x.ndim == 2 else x)
    mask = torch.ones(3, 7).bool()
    mask[:, 2] = False
    out, grad = evaluate("minpro", case)
    held, held_grad = evaluate("minpro", wide.replace(mask=mask, selected=None))
    assert held.loss.item() == pytest.approx(out.loss.item(), rel=1e-12)
    torch.testing.assert_close(held_grad[mask].view(3, 6), grad, rtol=1e-12, atol=1e-15)


# --- settings of sequence ratios --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length_norm", ["mean", "sqrt", "none"])
@pytest.mark.parametrize("row", ["gspo", "gspo_token", "vespo"])
def test_length_norm(row, length_norm):
    clip = {} if row == "vespo" else {"clip_low": 0.05, "clip_high": 0.04}
    for seed in range(4):
        case = random_case(seed, B=9, T=12, scale=0.05)
        objective = bare(row, length_norm=length_norm, **clip)
        against_oracle(row, objective, case, length_norm=length_norm, **clip)


def test_length_norm_divides_the_log_ratio_by_a_power_of_the_length():
    T = 16
    old = torch.full((1, T), -1.0, dtype=torch.float64)
    tokens = Tokens(
        logp_N=old[0] + 0.01,
        logp_old_N=old[0],
        advantage_N=torch.ones(T, dtype=torch.float64),
        sequences=Sequences(torch.zeros(T, dtype=torch.long), 1),
    )
    for name, want in (("mean", 0.01), ("sqrt", 0.04), ("none", 0.16)):
        got = gspo.objective("gspo", length_norm=name).ratio(tokens)
        assert got.tolist() == pytest.approx([want] * T)


def test_only_the_mean_has_a_usual_clip_range():
    """0.2 hardly ever clips a mean of log-ratios; for a sum over the completion nobody knows what is usual."""
    with pytest.warns(gspo.ObjectiveWarning, match="so wide"):
        gspo.objective("gspo", clip_low=0.2, clip_high=0.2)
    with pytest.warns(gspo.ObjectiveWarning, match="heavy-tailed"):
        gspo.objective("gspo", mismatch="sequence_tis")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gspo.objective("gspo", clip_low=0.2, clip_high=0.2, length_norm="none")
        gspo.objective("gspo", length_norm="sqrt", mismatch="sequence_tis")
        gspo.objective("fspo", clip_low=0.02, clip_high=0.05)
    with pytest.warns(gspo.ObjectiveWarning, match="so narrow"):
        gspo.objective("fspo", clip_low=3e-4, clip_high=4e-4)


# --- VESPO's denominator ----------------------------------------------------------------------------------------------


def test_vespo_divides_by_the_recomputed_policy_unless_asked_for_the_sampler():
    case = random_case(1, scale=0.1)
    far = case.replace(logp_sampler=case.logp_old - 0.3)
    out, grad = evaluate("vespo", far, sampler=True)
    without, without_grad = evaluate("vespo", case)
    assert out.loss.item() == without.loss.item()
    assert torch.equal(grad, without_grad)
    sampler = gspo.objective("vespo", denominator="sampler")
    other, _ = evaluate(sampler, far, row="vespo", sampler=True)
    assert other.loss.item() != pytest.approx(out.loss.item(), rel=1e-2)


@pytest.mark.parametrize(
    ("row", "kw", "message"),
    [
        ("dppo_tv", {"delta_low": 2.0}, "never above 1"),
        ("dppo_tv", {"delta_high": 1.0}, "never above 1"),
        ("trm", {"max_divergence": 0.0}, "for rounding alone"),
        ("fspo", {"length_norm": "mean"}, "length_norm=none"),
    ],
)
def test_a_bound_that_never_or_always_acts_has_a_warning(row, kw, message):
    with pytest.warns(gspo.ObjectiveWarning, match=message):
        gspo.objective(row, **kw)


@pytest.mark.parametrize("sampler_cap", [None, 1.02, 1.2])
def test_vespo_to_the_sampler_truncates_the_correction_of_each_token(sampler_cap):
    given = {} if sampler_cap is None else {"sampler_cap": sampler_cap}
    for seed in range(4):
        case = random_case(seed, scale=0.1)
        objective = gspo.objective("vespo", denominator="sampler", **given)
        against_oracle("vespo", objective, case, denominator="sampler", **given)


def test_rounding_multiplies_up_in_the_ratio_to_the_sampler():
    """With noise of bfloat16's size, before any update: 1 to the old policy, well below 1 to the sampler."""
    g = torch.Generator().manual_seed(0)
    B, T = 64, 2000
    old = torch.full((B, T), -1.0, dtype=torch.float64)
    mu = old + 0.015 * torch.randn(B, T, generator=g, dtype=torch.float64)  # k3 of 1.1e-4
    case = cases.Case(
        logp=old, logp_old=old, advantage=torch.ones(B).double(), mask=torch.ones(B, T).bool(), logp_sampler=mu
    )
    _, own = evaluate("vespo", case, sampler=True)
    _, engine = evaluate(gspo.objective("vespo", denominator="sampler"), case, row="vespo", sampler=True)
    assert (-own * B * T).mean().item() == pytest.approx(1.0, rel=1e-9)
    assert (-engine * B * T).mean().item() < 0.9
