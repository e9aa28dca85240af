"""Corrections for a sampler that differs from the learner: mismatch weights and the off-policy mask."""

import math

import cases
import oracle
import pytest
import torch
from cases import (
    HARD_CLIP_ROWS,
    OWN_SAMPLER_ROWS,
    ROWS,
    bare,
    evaluate,
    f64,
    kl_in_loss,
    one_token,
    random_case,
)

import gspo

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("row", [row for row in ROWS if row not in OWN_SAMPLER_ROWS])
def test_no_sampler_correction_unless_asked_for(row):
    case = random_case(0, scale=0.05)
    far = case.replace(logp_sampler=case.logp_old - 1.0)
    out, grad = evaluate(bare(row), far, row=row, sampler=True)
    base, base_grad = evaluate(bare(row), case, row=row)
    assert out.loss.item() == base.loss.item()
    assert torch.equal(grad, base_grad)


def test_sequence_mask_is_geometric_and_sequence_tis_is_the_product():
    """64 tokens at pi_old/mu = 1.02: geometric mean 1.02, product 3.55."""
    old = torch.full((1, 64), -1.0, dtype=torch.float64)
    case = cases.Case(logp=old, logp_old=old, advantage=f64(1.0), mask=torch.ones(1, 64).bool())
    case = case.replace(logp_sampler=old - math.log(1.02))
    kept = gspo.objective("gspo", mismatch="sequence_mask", mismatch_low=0.9, mismatch_high=1.1)
    out, _ = evaluate(kept, case, row="gspo", sampler=True)
    assert out.loss.item() == pytest.approx(-1.0), "inside the band the weight is 1, not the ratio"
    default, grad = evaluate(gspo.objective("gspo", mismatch="sequence_mask"), case, row="gspo", sampler=True)
    assert default.loss.item() == 0
    assert (grad == 0).all()
    out, _ = evaluate(gspo.objective("gspo", mismatch="sequence_tis"), case, row="gspo", sampler=True)
    assert out.loss.item() == pytest.approx(-2.0)
    wide = gspo.objective("gspo", mismatch="sequence_tis", mismatch_high=10.0)
    out, _ = evaluate(wide, case, row="gspo", sampler=True)
    assert out.loss.item() == pytest.approx(-(1.02**64), rel=1e-9)


@pytest.mark.parametrize("mismatch", ["sequence_mask", "icepop"])
def test_bounds_act_on_the_ratio_and_not_on_its_inverse(mismatch):
    objective = gspo.objective("dapo", mismatch=mismatch, mismatch_low=0.5, mismatch_high=5.0)
    for rho, kept in [(4.0, True), (0.6, True), (0.25, False), (5.5, False)]:
        case = one_token([0.0], 1.0)
        case = case.replace(logp_sampler=case.logp_old - math.log(rho))
        _, grad = evaluate(objective, case, row="dapo", sampler=True)
        want = 0.0 if not kept else rho if mismatch == "icepop" else 1.0
        assert -grad.item() == pytest.approx(want, rel=1e-12)


def test_token_tis_has_no_lower_bound():
    for rho, want in [(0.01, 0.01), (1.5, 1.5), (2.5, 2.0)]:
        case = one_token([0.0], 1.0)
        case = case.replace(logp_sampler=case.logp_old - math.log(rho))
        _, grad = evaluate(gspo.objective("dapo", mismatch="token_tis"), case, row="dapo", sampler=True)
        assert -grad.item() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("row", ROWS)
def test_the_off_policy_mask_leaves_the_denominator_alone(row):
    """Three sequences, one negative and drifted: its gradient is 0 and the others' are what they were."""
    old = torch.full((3, 4), -1.0, dtype=torch.float64)
    drift = f64(-0.01, -0.6, -0.6)[:, None].expand(3, 4)
    case = cases.Case(
        logp=old + drift, logp_old=old, advantage=f64(-1.0, -1.0, 1.0), mask=torch.ones(3, 4).bool(),
        selected=torch.zeros(3, 4, dtype=torch.bool),
    )  # fmt: skip
    wide = {"clip_low": 0.9, "clip_high": 0.9} if row in (*HARD_CLIP_ROWS, "gmpo", "minirl") else {}
    wide |= {"clip_low": 9.0, "clip_high": 9.0} if row == "fspo" else {}
    wide |= {"delta_low": 1.0} if row.startswith("dppo") else {}
    _, base = evaluate(bare(row, **wide), case, row=row)
    _, grad = evaluate(bare(row, off_policy_mask=0.5, **wide), case, row=row)
    assert (base[1] != 0).all()
    assert (grad[1] == 0).all()
    torch.testing.assert_close(grad[[0, 2]], base[[0, 2]], rtol=1e-12, atol=0)


@pytest.mark.parametrize("row", [row for row in ROWS if row not in OWN_SAMPLER_ROWS])
def test_kl_and_entropy_are_not_multiplied_by_the_sampler_weight(row):
    """The correction masks every token, so only KL and entropy remain, with their full weight."""
    case = random_case(0, scale=0.05)
    case = case.replace(logp_sampler=case.logp_old - 3.0)
    objective = kl_in_loss(row, kl=0.5, kl_estimator="k2", entropy=0.1, mismatch="sequence_mask")
    out, grad = evaluate(objective, case, row=row, sampler=True, ref=True, entropy=True)
    weights, delta = oracle.token_weights(row, case.mask), case.logp - case.logp_ref
    want = (weights * (0.5 * 0.5 * delta**2 - 0.1 * case.entropy)).sum()
    assert out.loss.item() == pytest.approx(want.item(), rel=1e-10)
    torch.testing.assert_close(grad, weights * 0.5 * delta, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("row", ROWS)
def test_off_policy_mask_does_not_touch_kl_and_entropy(row):
    case = random_case(0, scale=0.05)
    case = case.replace(logp=case.logp - 5.0, advantage=torch.full((6,), -1.0, dtype=torch.float64))
    case = case.replace(logp_ref=case.logp + 0.3)
    objective = kl_in_loss(row, kl=0.5, kl_estimator="k2", entropy=0.1, off_policy_mask=1.0)
    out, _ = evaluate(objective, case, row=row, ref=True, entropy=True)
    weights = oracle.token_weights(row, case.mask)
    want = (weights * (0.5 * 0.5 * 0.3**2 - 0.1 * case.entropy)).sum()
    if row != "kl_cov":
        assert out.loss.item() == pytest.approx(want.item(), rel=1e-10)
