"""Extreme log-ratios stay finite, and the precision is that of the inputs and at least float32."""

import math

import cases
import pytest
import torch
from cases import (
    ROWS,
    TOKEN_CLIP_ROWS,
    all_options,
    bare,
    evaluate,
    f64,
    one_token,
    random_case,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("row", [*TOKEN_CLIP_ROWS, "maspo"])
def test_token_log_ratios_are_clamped_at_twenty(row):
    out, grad = evaluate(bare(row), one_token([30.0], -1.0, logp_old=-40.0), row=row)
    assert out.loss.item() * (3000 if row == "dr_grpo" else 1) == pytest.approx(math.exp(20), rel=1e-9)
    assert grad.item() == 0


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("A", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_ratios_stay_finite(row, A, dtype):
    """Both in one sequence and alone; ties at infinity would show as NaN in the gradient."""
    d = torch.tensor([[1e3, -1e3, 0.0], [1e3, 1e3, 1e3], [-1e3, -1e3, -1e3]], dtype=dtype)
    old = torch.full_like(d, -1.0)
    case = cases.Case(
        logp=old + d, logp_old=old, advantage=torch.full((3,), A, dtype=dtype), mask=torch.ones(3, 3).bool(),
        selected=torch.zeros(3, 3, dtype=torch.bool),
    )  # fmt: skip
    out, grad = evaluate(bare(row), case, row=row)
    assert math.isfinite(out.loss.item())
    assert torch.isfinite(grad).all()
    # There is no token of a low or a high probability, whose shares are NaN.
    stats = [
        value for name, value in out.stats.items() if name not in ("clip_probability_low", "clip_probability_high")
    ]
    assert all(math.isfinite(value) for value in stats)


@pytest.mark.parametrize("row", ROWS)
def test_precision_is_that_of_the_inputs_and_at_least_float32(row):
    objective = all_options(row)
    options = {"sampler": True, "ref": True, "entropy": True, "row": row}
    case = random_case(0, scale=0.05)
    for dtype, expected in [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ]:
        out, grad = evaluate(objective, case.to(dtype), **options)
        assert out.loss.dtype == expected
        assert grad.dtype == dtype
        rounded = case.to(dtype).to(torch.float64)
        want, _ = evaluate(objective, rounded, **options)
        assert out.loss.item() == pytest.approx(want.loss.item(), rel=1e-4, abs=1e-6)


def test_gspo_keeps_its_clip_range_in_float32():
    """Differences of 1e-5 in the mean log-ratio of 4096 tokens decide the clip and must survive the sum."""
    T = 4096
    for log_s, clipped in [(4e-4 + 2e-5, True), (4e-4 - 2e-5, False)]:
        g = torch.Generator().manual_seed(0)
        old = -3 * torch.rand(1, T, generator=g, dtype=torch.float64)
        noise = 0.1 * torch.randn(1, T, generator=g, dtype=torch.float64)
        logp = old + noise - noise.mean() + log_s
        case = cases.Case(logp=logp, logp_old=old, advantage=f64(1.0), mask=torch.ones(1, T).bool()).to(torch.float32)
        out, grad = evaluate("gspo", case)
        assert out.stats["clip_fraction_sequences"] == float(clipped)
        assert bool((grad == 0).all()) is clipped
