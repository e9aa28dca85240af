"""Masked positions take no part: garbage and padding change nothing, and lengths count unmasked tokens."""

import math

import cases
import pytest
import torch
from cases import (
    COV_ROWS,
    ROWS,
    all_options,
    bare,
    evaluate,
    f64,
    random_case,
)

import gspo

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def spoil(case, bad):
    """Garbage at every masked position of every [B, T] input; the mask itself stays."""
    hidden = ~case.mask
    return case.map(
        lambda x: x if x.ndim != 2 else x | hidden if x.dtype == torch.bool and x is not case.mask else
        x if x.dtype == torch.bool else x.masked_fill(hidden, bad)
    )  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf"), 1e30, -1e30])
def test_garbage_at_masked_positions_does_not_leak(row, bad):
    objective = all_options(row)
    options = {"sampler": True, "ref": True, "entropy": True, "row": row}
    case = random_case(3, scale=0.05)
    out, grad = evaluate(objective, case, **options)
    spoiled, spoiled_grad = evaluate(objective, spoil(case, bad), **options)
    assert spoiled.loss.item() == pytest.approx(out.loss.item(), rel=1e-12)
    assert (spoiled_grad[~case.mask] == 0).all()
    torch.testing.assert_close(spoiled_grad, grad, rtol=1e-12, atol=1e-15)
    for name, value in out.stats.items():
        assert spoiled.stats[name] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), name


@pytest.mark.parametrize("row", cases.TOKEN_ROWS)
def test_garbage_in_a_token_advantage_does_not_leak(row):
    case = random_case(3, scale=0.05, per_token=True)
    out, grad = evaluate(bare(row), case, row=row)
    spoiled, spoiled_grad = evaluate(bare(row), spoil(case, float("nan")), row=row)
    assert spoiled.loss.item() == pytest.approx(out.loss.item(), rel=1e-12)
    torch.testing.assert_close(spoiled_grad, grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("row", COV_ROWS)
def test_garbage_does_not_change_the_selection(row):
    case = random_case(3, B=8, T=20)
    kw = {"cov_low": 0.1, "cov_high": 5.0} if row == "clip_cov" else {}
    objective = gspo.objective(row, select_fraction=0.2, **kw)
    bad = spoil(case, float("nan"))
    a = gspo.select_tokens(objective, case.logp, case.logp_old, case.advantage, case.mask, seed=1)
    b = gspo.select_tokens(objective, bad.logp, bad.logp_old, bad.advantage, bad.mask, seed=1)
    assert a.any()
    assert torch.equal(a, b)


@pytest.mark.parametrize("row", ROWS)
def test_appended_and_inserted_padding_changes_nothing(row):
    objective = all_options(row)
    options = {"sampler": True, "ref": True, "entropy": True, "row": row}
    case = random_case(5, B=5, T=6, scale=0.05)
    out, grad = evaluate(objective, case, **options)
    where = torch.tensor([0, 2, 3, 5, 6, 9])  # the old columns in a width of 12, with gaps before, between and after

    def widen(x):
        if x.ndim != 2:
            return x
        wide = torch.full((len(x), 12), False if x.dtype == torch.bool else float("nan"), dtype=x.dtype)
        wide[:, where] = x
        return wide

    wide, wide_grad = evaluate(objective, case.map(widen), **options)
    assert wide.loss.item() == pytest.approx(out.loss.item(), rel=1e-12)
    torch.testing.assert_close(wide_grad[:, where], grad, rtol=1e-12, atol=1e-15)
    assert int((wide_grad != 0).sum()) == int((grad != 0).sum())


@pytest.mark.parametrize("row", ROWS)
def test_nothing_to_train_on(row):
    case = random_case(0).replace(mask=torch.zeros(6, 8, dtype=torch.bool))
    out, grad = evaluate(bare(row), spoil(case, float("nan")), row=row)
    assert out.loss.item() == 0
    assert (grad == 0).all()
    assert (gspo.token_weights(row, case.mask) == 0).all()


def test_the_length_is_the_masked_count_in_exponent_and_aggregate():
    """Two model tokens around a tool call of three: s_i is the mean over two."""
    logp_old = torch.full((1, 5), -1.0, dtype=torch.float64)
    logp = logp_old + f64(0.1, 5.0, 5.0, 5.0, 0.3)[None]
    mask = torch.tensor([[True, False, False, False, True]])
    case = cases.Case(logp=logp, logp_old=logp_old, advantage=f64(-1.0), mask=mask)
    out, grad = evaluate("gspo", case)
    assert out.loss.item() == pytest.approx(math.exp(0.2), rel=1e-12)
    assert grad.squeeze(0).tolist() == pytest.approx([math.exp(0.2) / 2, 0, 0, 0, math.exp(0.2) / 2], rel=1e-12)
    assert out.stats["ratio_max"] == pytest.approx(math.exp(0.2), rel=1e-6)
