"""The trust regions beyond the PPO clip: SAPO, VESPO, GMPO, CISPO, MASPO, MiniRL, Clip-Cov and KL-Cov.

Expected numbers are written out from the papers' formulas.
"""

import math

import cases
import pytest
import torch
from cases import (
    COV_ROWS,
    evaluate,
    f64,
    one_token,
    random_case,
    ratios,
)

import gspo

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("A", [1.5, -0.8])
@pytest.mark.parametrize("tau", [0.3, 1.0, 1.05, 4.0])
def test_sapo_gate_is_sech_squared(A, tau):
    objective = gspo.objective("sapo", tau_pos=tau, tau_neg=tau)
    case = one_token([-1.0, -0.3, -0.01, 0.0, 0.01, 0.3, 0.7], A)
    out, grad = evaluate(objective, case, row="sapo")
    r = ratios(case)
    want = r / torch.cosh(tau * (r - 1) / 2) ** 2
    torch.testing.assert_close(grad.squeeze(1), -A * want / len(r), rtol=1e-10, atol=1e-14)
    f = 4 / tau * torch.sigmoid(tau * (r - 1))
    assert out.loss.item() == pytest.approx(-(A * f).mean().item(), rel=1e-12)
    assert f[3].item() == pytest.approx(2 / tau)
    assert -grad[3].item() * len(r) / A == pytest.approx(1, rel=1e-12), "w(1) = 1 for any tau"


def test_sapo_is_gspo_with_a_smooth_gate_up_to_the_spread_of_the_sequence():
    """|mean_t g(z_t) - g(mean_t z_t)| <= (tau^2/4) Var, with the gates g read off the code's own gradient."""
    tau = 1.0
    case = random_case(0, B=20, T=12, scale=0.1, empty=False)
    case = case.replace(advantage=torch.ones(20, dtype=torch.float64))
    _, grad = evaluate(gspo.objective("sapo", tau_pos=tau, tau_neg=tau), case, row="sapo")
    worst = 0.0
    for i in range(20):
        at = case.mask[i]
        r = (case.logp - case.logp_old)[i][at].exp()
        z, gate = r - 1, -grad[i][at] * 20 * int(at.sum()) / r
        gap = (gate.mean() - 1 / torch.cosh(tau * z.mean() / 2) ** 2).abs().item()
        assert gap <= tau**2 / 4 * z.var(unbiased=False).item() + 1e-12
        worst = max(worst, gap)
    assert worst > 1e-5


def vespo_phi(log_w, A, **settings):
    """phi(W) read off the gradient of a one-token sequence."""
    _, grad = evaluate(gspo.objective("vespo", **settings), one_token([log_w], A), row="vespo")
    return -grad.item() / A


@pytest.mark.parametrize("A", [1.0, -1.0])
@pytest.mark.parametrize("per_token", [-17.0, -1.0, 1.0, 17.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vespo_is_finite_for_log_w_of_ten_thousand(A, per_token, dtype):
    T = round(1e4 / abs(per_token))
    old = torch.full((1, T), -1.0, dtype=dtype)
    case = cases.Case(
        logp=old + per_token, logp_old=old, advantage=torch.tensor([A], dtype=dtype), mask=torch.ones(1, T).bool()
    )
    out, grad = evaluate("vespo", case)
    assert math.isfinite(out.loss.item())
    assert torch.isfinite(grad).all()
    assert grad.abs().max() < 1e-10


@pytest.mark.parametrize(("A", "c1", "c2", "top"), [(1.0, 2, 3, 1.21), (-1.0, 3, 2, 1.24)])
def test_vespo_peaks_at_c1_over_c2(A, c1, c2, top):
    peak = vespo_phi(math.log(c1 / c2), A)
    assert peak == pytest.approx((c1 / c2) ** c1 * math.exp(c2 - c1), rel=1e-10)
    assert peak == pytest.approx(top, abs=0.006)
    for log_w in (-3.0, -1.0, 0.0, 0.2, 0.7, 1.5, 3.0):
        phi = vespo_phi(log_w, A)
        assert phi == pytest.approx(math.exp(c2 + c1 * log_w - c2 * math.exp(log_w)), rel=1e-9)
        assert phi < peak
    assert vespo_phi(0.0, A) == pytest.approx(1, rel=1e-12)


def test_vespo_weight_is_the_product_over_the_sequence():
    """No length normalization: twice the tokens at the same log-ratio is W squared."""
    old = torch.full((1, 8), -1.0, dtype=torch.float64)
    case = cases.Case(logp=old + 0.1, logp_old=old, advantage=f64(1.0), mask=torch.ones(1, 8).bool())
    _, grad = evaluate("vespo", case)
    phi = math.exp(3 + 2 * 0.8 - 3 * math.exp(0.8))
    assert grad.flatten().tolist() == pytest.approx([-phi / 8] * 8, rel=1e-10)


@pytest.mark.parametrize("A", [1.0, -1.0])
def test_gmpo_clips_single_tokens_one_sided_in_log_space(A):
    d = f64(0.6, 0.38, -0.38, -0.6)[None]
    old = torch.full_like(d, -1.0)
    case = cases.Case(logp=old + d, logp_old=old, advantage=f64(A), mask=torch.ones(1, 4).bool())
    out, grad = evaluate("gmpo", case)
    mean = (0.4 + 0.38 - 0.38 - 0.6) / 4 if A > 0 else (0.6 + 0.38 - 0.38 - 0.4) / 4
    clipped = 0 if A > 0 else 3
    assert out.loss.item() == pytest.approx(-A * math.exp(mean), rel=1e-12)
    want = [0.0 if t == clipped else -A * math.exp(mean) / 4 for t in range(4)]
    assert grad.flatten().tolist() == pytest.approx(want, rel=1e-12)
    assert out.stats["clip_fraction_tokens"] == pytest.approx(0.25)
    assert out.stats["clip_fraction_sequences"] == 1


@pytest.mark.parametrize("A", [1.0, -1.0])
def test_cispo_never_drops_a_token(A):
    case = one_token([-5.0, -0.5, 0.0, 1.0, 2.0, 3.0], A)
    out, grad = evaluate("cispo", case)
    weight = ratios(case).clamp(max=5.0)
    torch.testing.assert_close(grad.squeeze(1), -A * weight / 6, rtol=1e-12, atol=0)
    assert (grad != 0).all()
    assert out.loss.item() == pytest.approx(-(A * weight * case.logp.squeeze(1)).mean().item(), rel=1e-12)


def test_minirl_drops_tokens_by_staleness_and_weighs_them_by_the_sampler():
    for A in (1.0, -1.0):
        case = one_token([math.log(r) for r in (0.79, 0.81, 1.26, 1.28)], A)
        case = case.replace(logp_sampler=case.logp_old - 0.5)
        _, grad = evaluate("minirl", case, sampler=True)
        keep = f64(1, 1, 1, 0) if A > 0 else f64(0, 1, 1, 1)
        torch.testing.assert_close(grad.squeeze(1), -A * keep * ratios(case) * math.exp(0.5) / 4, rtol=1e-12, atol=0)
    case = one_token([0.0], 1.0).replace(logp_sampler=f64(-3.0)[:, None])
    _, grad = evaluate("minirl", case, sampler=True)
    assert grad.item() == pytest.approx(-5.0)


def test_cispo_cap_is_an_absolute_bound_and_a_small_one_is_suspicious():
    case = one_token([math.log(5.5)], 1.0)
    _, grad = evaluate("cispo", case)
    assert -grad.item() == pytest.approx(5.0)
    _, grad = evaluate(gspo.objective("cispo", weight_cap=1.28), case, row="cispo")
    assert -grad.item() == pytest.approx(1.28)
    with pytest.warns(UserWarning, match="weight_cap"):
        gspo.objective("cispo", weight_cap=0.28)


def test_gmpo_clip_is_in_log_space():
    """0.38 is inside a log clip of .4, although e^.38 = 1.46 is outside 1 + .4."""
    _, grad = evaluate("gmpo", one_token([0.38, 0.41], 1.0))
    assert (grad == 0).flatten().tolist() == [False, True]
    _, grad = evaluate("gmpo", one_token([-0.45, -0.38], -1.0))
    assert (grad == 0).flatten().tolist() == [True, False]


def test_kl_cov_coefficient_is_one():
    case = one_token([0.2, -0.3], 1.0).replace(selected=torch.tensor([[True], [False]]))
    out, grad = evaluate("kl_cov", case)
    r = ratios(case)
    assert out.loss.item() == pytest.approx((-r.sum().item() + 0.2) / 2, rel=1e-12)
    assert grad.flatten().tolist() == pytest.approx([(-r[0].item() + 1) / 2, -r[1].item() / 2], rel=1e-12)


def test_kl_cov_does_not_clip_and_clip_cov_silences():
    case = one_token([3.0, 3.0], 1.0).replace(selected=torch.tensor([[True], [False]]))
    _, grad = evaluate("kl_cov", case)
    assert grad[1].item() == pytest.approx(-math.exp(3) / 2)
    case = one_token([0.1, 0.1], 1.0).replace(selected=torch.tensor([[True], [False]]))
    out, grad = evaluate("clip_cov", case)
    assert grad.flatten().tolist() == pytest.approx([0.0, -math.exp(0.1) / 2], rel=1e-12)
    assert out.loss.item() == pytest.approx(-math.exp(0.1) / 2, rel=1e-12), "zero their loss; the count stays"


def test_clip_cov_selects_nothing_where_the_fraction_is_below_one_token():
    """verl's max(int(r N), 1) drops a token of every small micro-batch: 2e-4 of 4096 is 0.8, so none."""
    case = random_case(0, B=16, T=256, mask=torch.ones(16, 256, dtype=torch.bool))
    case = case.replace(advantage=case.advantage * 3)
    for row, fraction in [("clip_cov", 2e-4), ("kl_cov", 2e-4)]:
        objective = gspo.objective(row, select_fraction=fraction)
        assert not gspo.select_tokens(objective, case.logp, case.logp_old, case.advantage, case.mask).any()
        weights = gspo.token_weights(objective, case.mask)
        evaluate(objective, case, row=row, weights=weights, selected=False)


def test_sapo_reads_both_temperatures():
    case = one_token([0.5, 0.5], f64(1.0, -1.0))
    _, base = evaluate("sapo", case)
    _, pos = evaluate(gspo.objective("sapo", tau_pos=3.0), case, row="sapo")
    _, neg = evaluate(gspo.objective("sapo", tau_neg=3.0), case, row="sapo")
    assert (pos[0] != base[0], pos[1] == base[1], neg[0] == base[0], neg[1] != base[1]) == (True,) * 4
    z = math.exp(0.5) - 1
    gate = lambda tau: math.exp(0.5) / math.cosh(tau * z / 2) ** 2  # noqa: E731
    assert base.flatten().tolist() == pytest.approx([-gate(1.0) / 2, gate(1.05) / 2], rel=1e-12)


def test_vespo_defaults():
    assert vespo_phi(0.3, 1.0) == pytest.approx(math.exp(3 + 2 * 0.3 - 3 * math.exp(0.3)), rel=1e-10)
    assert vespo_phi(0.3, -1.0) == pytest.approx(math.exp(2 + 3 * 0.3 - 2 * math.exp(0.3)), rel=1e-10)


@pytest.mark.parametrize("row", COV_ROWS)
def test_one_batch_selects_as_select_tokens_does_by_default(row):
    case = random_case(1, B=8, T=20, empty=False)
    kw = {"cov_low": 0.0, "cov_high": 10.0} if row == "clip_cov" else {}
    objective = gspo.objective(row, select_fraction=0.15, **kw)
    selected = gspo.select_tokens(objective, case.logp, case.logp_old, case.advantage, case.mask)
    out, grad = evaluate(objective, case, row=row, selected=False)
    want, want_grad = evaluate(objective, case.replace(selected=selected), row=row)
    assert out.loss.item() == want.loss.item()
    assert torch.equal(grad, want_grad)


@pytest.mark.parametrize(
    ("A", "logp_old", "log_ratio", "sigma"),
    [
        (1.0, math.log(0.5), 0.4, 0.5**-0.3 * 1.03),
        (-1.0, math.log(0.5), -0.4, 0.5**-0.3 / 1.03),
        (0.01, -20.0, 2.9, 10.0 * 1.0003),  # sigma_high
        (1000.0, 0.0, 2.0, 10.0),  # factor_high
        (-1000.0, 0.0, -0.05, 0.1),  # factor_low
        (1.0, math.log(0.5), -0.4, math.inf),  # moving back: no gate
        (-1.0, math.log(0.5), 0.4, math.inf),
    ],
)
def test_maspo_widths(A, logp_old, log_ratio, sigma):
    _, grad = evaluate("maspo", one_token([log_ratio], A, logp_old=logp_old))
    r = math.exp(log_ratio)
    assert -grad.item() / A == pytest.approx(math.exp(-((r - 1) ** 2) / (2 * sigma**2)) * r, rel=1e-9)
