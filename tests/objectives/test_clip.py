"""Hard clipping of sequences (GSPO) and tokens (GRPO and its relatives), and the dual clip of negative advantages."""

import math

import cases
import pytest
import torch
from cases import (
    GSPO_LIKE,
    HARD_CLIP_ROWS,
    TOKEN_CLIP_ROWS,
    bare,
    evaluate,
    f64,
    one_token,
    random_case,
    ratios,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import gspo

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-4, 1e-3, 0.1, 1.0]))
def test_gspo_token_equals_gspo_for_a_constant_advantage(seed, scale):
    case = random_case(seed, scale=scale)
    out, grad = evaluate("gspo", case)
    token_out, token_grad = evaluate("gspo_token", case)
    assert out.loss.item() == pytest.approx(token_out.loss.item(), rel=1e-12)
    torch.testing.assert_close(grad, token_grad, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("row", GSPO_LIKE)
def test_a_sequence_is_clipped_iff_its_ratio_left_on_the_side_of_its_advantage(row):
    low, high = {"gspo": (3e-4, 4e-4), "gspo_token": (3e-4, 4e-4), "luspo": (2e-3, 2.5e-3)}[row]
    for A in (1.3, -1.3):
        for s in (1 - 5e-3, 1 - low - 1e-6, 1 - low + 1e-6, 1.0, 1 + high - 1e-6, 1 + high + 1e-6, 1 + 5e-3):
            mask = torch.tensor([[True, True, False, True, False]])
            log_ratio = math.log(s) + f64(0.3, -0.5, 9.0, 0.2, 9.0)[None]
            old = torch.full((1, 5), -1.0, dtype=torch.float64)
            case = cases.Case(logp=old + log_ratio, logp_old=old, advantage=f64(A), mask=mask)
            out, grad = evaluate(row, case)
            clipped = (A > 0 and s > 1 + high) or (A < 0 and s < 1 - low)
            if clipped:
                assert (grad == 0).all(), (A, s)
            else:
                each = -A * s * (1 if row == "luspo" else 1 / 3)
                torch.testing.assert_close(grad, each * mask.double(), rtol=1e-10, atol=0)
            assert out.stats["clip_fraction_sequences"] == float(clipped)
            assert out.stats["clip_fraction_tokens"] == float(clipped)
            bound = min(max(s, 1 - low), 1 + high)
            value = -min(s * A, bound * A) * (3 if row == "luspo" else 1)
            assert out.loss.item() == pytest.approx(value, rel=1e-12)


def test_a_completion_is_clipped_whole_or_not_at_all():
    case = random_case(0, B=40, scale=1e-3, empty=False)
    _, grad = evaluate("gspo", case)
    zero = (grad == 0) & case.mask
    assert torch.equal(zero.any(1), (zero | ~case.mask).all(1))
    assert 0 < int(zero.any(1).sum()) < 40


@pytest.mark.parametrize("row", HARD_CLIP_ROWS)
def test_dual_clip_bounds_a_negative_advantage_and_nothing_else(row):
    objective = bare(row, dual_clip=2.5)
    for A, log_ratio, value, slope in [
        (-1.2, math.log(3.0), -2.5 * 1.2, 0.0),
        (-1.2, math.log(2.4), -2.4 * 1.2, -2.4 * 1.2),
        (1.2, math.log(0.5), 0.5 * 1.2, 0.5 * 1.2),
    ]:
        out, grad = evaluate(objective, one_token([log_ratio], A), row=row)
        length = 3000 if row == "dr_grpo" else 1
        assert out.loss.item() * length == pytest.approx(-value, rel=1e-12)
        assert grad.item() * length == pytest.approx(-slope, rel=1e-12, abs=1e-300)
        assert out.stats["clip_fraction_tokens"] == float(slope == 0)


@pytest.mark.parametrize("row", [*TOKEN_CLIP_ROWS, "clip_cov"])
def test_where_the_ppo_gradient_is_zero(row):
    objective = bare(row, clip_low=0.2, clip_high=0.3)
    for A in (1.0, -1.0):
        case = one_token([math.log(r) for r in (0.5, 0.79, 0.81, 1.0, 1.29, 1.31, 2.0)], A)
        out, grad = evaluate(objective, case, row=row)
        zero = (grad == 0).flatten().tolist()
        assert zero == ([False] * 5 + [True] * 2 if A > 0 else [True] * 2 + [False] * 5)
        assert out.stats["clip_fraction_tokens"] == pytest.approx(2 / 7)
        assert out.stats["clip_fraction_sequences"] == pytest.approx(2 / 7)
        assert out.stats["ratio_max"] == pytest.approx(2.0, rel=1e-6)
        assert out.stats["ratio_mean"] == pytest.approx(ratios(case).mean().item(), rel=1e-6)


def test_clip_fraction_of_sequences_counts_those_with_a_clipped_token():
    d = f64(*[0.5, 0.0, 0.0, 0.0], *[0.0] * 4, *[0.5, 0.5, 0.0, 0.0], *[0.0, 0.0, 9.0, 9.0]).view(4, 4)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[3, 2:] = False
    old = torch.full_like(d, -1.0)
    case = cases.Case(logp=old + d, logp_old=old, advantage=torch.ones(4, dtype=torch.float64), mask=mask)
    out, _ = evaluate("dapo", case)
    assert out.stats["clip_fraction_tokens"] == pytest.approx(3 / 14)
    assert out.stats["clip_fraction_sequences"] == pytest.approx(2 / 4)


def two_lengths():
    """A sequence of 2 and one of 6 tokens, slightly off-policy, inside every clip range."""
    old = torch.full((2, 6), -1.0, dtype=torch.float64)
    mask = torch.tensor([[True] * 2 + [False] * 4, [True] * 6])
    return cases.Case(logp=old + 1e-5, logp_old=old, advantage=f64(1.0, -2.0), mask=mask)


def test_gspo_does_not_weigh_sequences_by_length():
    out, grad = evaluate("gspo", two_lengths())
    assert out.loss.item() == pytest.approx(0.5 * math.exp(1e-5), rel=1e-12)
    assert grad.sum(1).tolist() == pytest.approx([-0.5 * math.exp(1e-5), 1.0 * math.exp(1e-5)], rel=1e-12)
    _, luspo = evaluate("luspo", two_lengths())
    assert luspo.sum(1).tolist() == pytest.approx([-0.5 * 2 * math.exp(1e-5), 6.0 * math.exp(1e-5)], rel=1e-12)


@pytest.mark.parametrize("row", GSPO_LIKE)
def test_gspo_applies_its_dual_clip(row):
    case = one_token([math.log(4.0)], -1.0)
    free, free_grad = evaluate(row, case)
    out, grad = evaluate(gspo.objective(row, dual_clip=3.0), case, row=row)
    assert (free.loss.item(), free_grad.item()) == (pytest.approx(4.0), pytest.approx(4.0))
    assert (out.loss.item(), grad.item()) == (pytest.approx(3.0), 0.0)


def test_default_clip_of_gspo_is_the_published_one():
    _, grad = evaluate("gspo", one_token([3.9e-4, 4.1e-4], 1.0))
    assert (grad == 0).flatten().tolist() == [False, True]
    _, grad = evaluate("gspo", one_token([-2.9e-4, -3.1e-4], -1.0))
    assert (grad == 0).flatten().tolist() == [False, True]
