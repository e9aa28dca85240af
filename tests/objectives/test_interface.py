"""What a caller of `policy_loss` can rely on, for every objective: inputs, statistics, gradients."""

import cases
import oracle
import pytest
import torch
from cases import (
    COV_ROWS,
    ROWS,
    all_options,
    bare,
    evaluate,
    random_case,
)

import gspo

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("row", ROWS)
def test_on_policy_the_gradient_is_the_advantage_times_the_weight(row):
    for seed in range(3):
        case = random_case(seed, scale=0.0)
        case = case.replace(selected=torch.zeros_like(case.mask))
        _, grad = evaluate(bare(row), case, row=row)
        want = -oracle.token_weights(row, case.mask) * case.advantage[:, None]
        torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("row", ROWS)
def test_on_policy_statistics(row):
    case = random_case(0, scale=0.0)
    out, _ = evaluate(bare(row), case.replace(selected=torch.zeros_like(case.mask)), row=row)
    assert all(isinstance(value, float) for value in out.stats.values())
    assert out.stats["clip_fraction_tokens"] == 0
    assert out.stats["clip_fraction_sequences"] == 0
    assert out.stats["ratio_mean"] == pytest.approx(1, abs=1e-12)
    assert out.stats["ratio_max"] == pytest.approx(1, abs=1e-12)


def test_rows_on_offer():
    assert sorted(ROWS) == sorted(cases.ALL_ROWS)
    assert len(set(ROWS)) == len(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_inputs_are_not_written_to(row):
    case = random_case(0)
    before = case.map(torch.clone)
    evaluate(all_options(row), case, row=row, sampler=True, ref=True, entropy=True)
    gspo.token_weights(row, case.mask)
    for name in ("logp", "logp_old", "advantage", "mask", "logp_sampler", "logp_ref", "entropy", "selected"):
        assert torch.equal(getattr(case, name), getattr(before, name)), name


@pytest.mark.parametrize("row", ROWS)
def test_the_same_call_gives_the_same_loss_and_the_promised_statistics(row):
    case = random_case(0, scale=0.05)
    out, _ = evaluate(bare(row), case, row=row)
    twice, _ = evaluate(bare(row), case, row=row)
    assert out.loss.item() == twice.loss.item()
    assert set(out.stats) >= {"clip_fraction_tokens", "clip_fraction_sequences", "ratio_mean", "ratio_max"}


@pytest.mark.parametrize("row", ROWS)
def test_only_logp_and_entropy_carry_a_gradient(row):
    case = random_case(0, scale=0.05).map(lambda x: x.clone().requires_grad_(x.is_floating_point()))
    out = gspo.policy_loss(
        all_options(row),
        case.logp,
        case.logp_old,
        case.advantage,
        case.mask,
        logp_sampler=case.logp_sampler,
        logp_ref=case.logp_ref,
        entropy=case.entropy,
        **({"selected": case.selected} if row in COV_ROWS else {}),
    )
    constants = (case.logp_old, case.advantage, case.logp_sampler, case.logp_ref)
    grads = torch.autograd.grad(out.loss, (*constants, case.logp, case.entropy), allow_unused=True)
    assert all(grad is None or (grad == 0).all() for grad in grads[:4])
    assert all((grad != 0).any() for grad in grads[4:])


@pytest.mark.parametrize("row", ROWS)
def test_a_mask_of_zeros_and_ones_is_a_mask(row):
    case = random_case(0, scale=0.05)
    want, _ = evaluate(bare(row), case, row=row)
    for dtype in (torch.float32, torch.int64, torch.uint8):
        out, _ = evaluate(bare(row), case.replace(mask=case.mask.to(dtype)), row=row)
        assert out.loss.item() == want.loss.item()
    with pytest.raises((ValueError, AssertionError), match="mask"):
        evaluate(bare(row), case.replace(mask=case.mask.float() * 0.5), row=row)


def test_statistics_of_the_reference_and_of_the_sampler_are_k3_over_tokens():
    case = random_case(0, scale=0.05)
    out, _ = evaluate(gspo.objective("dapo", kl=0.1), case, row="dapo", sampler=True, ref=True)
    k3 = lambda log_r: (log_r.exp() - 1 - log_r)[case.mask].mean().item()  # noqa: E731
    assert out.stats["kl_ref"] == pytest.approx(k3(case.logp_ref - case.logp), rel=1e-6)
    assert out.stats["mismatch_k3"] == pytest.approx(k3(case.logp_old - case.logp_sampler), rel=1e-6)
