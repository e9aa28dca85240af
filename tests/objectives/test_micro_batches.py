"""A step gives the same loss and gradient however it is split into micro-batches or ordered."""

import random

import oracle
import pytest
import torch
from cases import CONSTANT_LENGTH_ROWS, COV_ROWS, ROWS, all_options, bare, evaluate, random_case

import gspo

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def uneven_micro_batches(B, seed):
    order = list(range(B))
    random.Random(seed).shuffle(order)
    cuts, rest = [], order
    while rest:
        size = random.Random(seed * 31 + len(rest)).randint(1, 4)
        cuts.append(torch.tensor(rest[:size]))
        rest = rest[size:]
    return cuts


def step(objective, row, case, *, seed=0):
    """The whole step as one batch, and as uneven micro-batches in random order with weights fixed beforehand."""
    if row in COV_ROWS:
        selected = gspo.select_tokens(objective, case.logp, case.logp_old, case.advantage, case.mask, seed=7)
        assert selected.any()
        case = case.replace(selected=selected)
    options = {"sampler": True, "ref": True, "entropy": True, "row": row}
    whole, whole_grad = evaluate(objective, case, **options)
    weights = gspo.token_weights(objective, case.mask)
    total, grad = 0.0, torch.zeros_like(case.logp)
    for at in uneven_micro_batches(len(case.mask), seed):
        out, part = evaluate(objective, case.rows(at), weights=weights[at], **options)
        total += out.loss.item()
        grad[at] += part
    return whole.loss.item(), whole_grad, total, grad


@pytest.mark.parametrize("row", ROWS)
def test_micro_batches_add_up_to_the_step(row):
    """Also the bugs of verl's geo_mean (gmpo), VESPO's agg_loss (vespo) and TRL's num_items_in_batch (dapo, cispo)."""
    objective = all_options(row)
    for seed in range(4):
        case = random_case(seed, B=13, T=9, scale=0.05)
        whole, whole_grad, total, grad = step(objective, row, case, seed=seed)
        assert total == pytest.approx(whole, rel=1e-10, abs=1e-14)
        torch.testing.assert_close(grad, whole_grad, rtol=1e-10, atol=1e-14)
        assert grad.abs().max() > 1e-6


@pytest.mark.parametrize(
    ("row", "changed"),
    [
        *((row, {"length_norm": norm}) for row in ("gspo", "luspo", "vespo") for norm in ("sqrt", "none", "mean")),
        ("vespo", {"denominator": "sampler", "sampler_cap": 1.02}),
    ],
    ids=str,
)
def test_micro_batches_add_up_with_other_sequence_ratios(row, changed):
    clip = {} if row == "vespo" else {"clip_low": 0.05, "clip_high": 0.05}
    for seed in range(2):
        case = random_case(seed, B=13, T=9, scale=0.05)
        whole, whole_grad, total, grad = step(bare(row, **changed, **clip), row, case, seed=seed)
        assert total == pytest.approx(whole, rel=1e-10, abs=1e-14)
        torch.testing.assert_close(grad, whole_grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("row", ROWS)
def test_the_test_above_can_fail(row):
    """Means per micro-batch, averaged: what the public frameworks did. It must differ from the step, for every row."""
    objective = all_options(row)
    case = random_case(1, B=13, T=9, scale=0.05)
    if row in COV_ROWS:
        case = case.replace(
            selected=gspo.select_tokens(objective, case.logp, case.logp_old, case.advantage, case.mask, seed=7)
        )
    options = {"sampler": True, "ref": True, "entropy": True, "row": row}
    whole, whole_grad = evaluate(objective, case, **options)
    grad, losses = torch.zeros_like(case.logp), []
    cuts = uneven_micro_batches(13, 1)
    for at in cuts:
        out, part = evaluate(objective, case.rows(at), **options)
        losses.append(out.loss.item())
        grad[at] += part / len(cuts)
    assert sum(losses) / len(losses) != pytest.approx(whole.loss.item(), rel=1e-4)
    assert (grad - whole_grad).abs().max() > 1e-3 * whole_grad.abs().max()


@pytest.mark.parametrize("row", ROWS)
def test_single_sequences_add_up(row):
    """The extreme cut, with empty sequences as micro-batches of their own; each must still be able to run backward."""
    objective = all_options(row)
    case = random_case(4, B=7, T=5, scale=0.05)
    if row in COV_ROWS:
        case = case.replace(
            selected=gspo.select_tokens(objective, case.logp, case.logp_old, case.advantage, case.mask, seed=7)
        )
    options = {"sampler": True, "ref": True, "entropy": True, "row": row}
    whole, whole_grad = evaluate(objective, case, **options)
    weights = gspo.token_weights(objective, case.mask)
    parts = [evaluate(objective, case.rows([i]), weights=weights[[i]], **options) for i in range(7)]
    assert sum(out.loss.item() for out, _ in parts) == pytest.approx(whole.loss.item(), rel=1e-10)
    torch.testing.assert_close(torch.cat([grad for _, grad in parts]), whole_grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("row", ROWS)
def test_order_of_sequences(row):
    objective = all_options(row)
    case = random_case(2, B=9, scale=0.05)
    options = {"sampler": True, "ref": True, "entropy": True, "row": row}
    out, grad = evaluate(objective, case, **options)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    shuffled, shuffled_grad = evaluate(objective, case.rows(order), **options)
    assert shuffled.loss.item() == pytest.approx(out.loss.item(), rel=1e-12)
    torch.testing.assert_close(shuffled_grad, grad[order], rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("row", COV_ROWS)
def test_cov_rows_refuse_to_select_within_a_micro_batch(row):
    """The selection is over the step: a micro-batch that comes with weights must come with its selection."""
    case = random_case(0)
    objective = gspo.objective(row, select_fraction=0.5)
    weights = gspo.token_weights(objective, case.mask)
    with pytest.raises(ValueError, match="selected"):
        evaluate(objective, case, row=row, weights=weights, selected=False)


def test_fully_masked_sequences_are_not_counted():
    case = random_case(0, B=6)
    empty = ~case.mask.any(1)
    assert empty.any()
    for row in ROWS:
        out, grad = evaluate(bare(row), case, row=row)
        fewer, fewer_grad = evaluate(bare(row), case.rows(~empty), row=row)
        assert out.loss.item() == pytest.approx(fewer.loss.item(), rel=1e-12), row
        torch.testing.assert_close(grad[~empty], fewer_grad, rtol=1e-11, atol=1e-15)


def test_dr_grpo_divides_by_a_constant_and_not_by_the_padded_width():
    case = random_case(0)
    wider = case.map(lambda x: torch.cat([x, x.new_zeros(len(x), 50)], 1) if x.ndim == 2 else x)
    a, _ = evaluate("dr_grpo", case)
    b, _ = evaluate("dr_grpo", wider)
    assert a.loss.item() == b.loss.item()
    half, _ = evaluate(gspo.objective("dr_grpo", max_length=6000), case, row="dr_grpo")
    assert half.loss.item() == pytest.approx(a.loss.item() / 2, rel=1e-12)


@pytest.mark.parametrize("row", ROWS)
def test_weights_are_those_of_the_optimizer_step(row):
    """A step is a part of the generation batch: its weights come from its own mask and from nothing else."""
    mask = random_case(0, B=12).mask
    first, second = gspo.token_weights(row, mask[:5]), gspo.token_weights(row, mask[5:])
    per_step = {
        "token_mean": 1.0,
        "sequence_mean_of_token_mean": 1.0,
        "sequence_mean_of_token_sum": None,
        "constant_length": None,
    }[oracle.AGGREGATE[row].__name__]
    for weights, part in [(first, mask[:5]), (second, mask[5:])]:
        n, sequences = int(part.sum()), int(part.any(1).sum())
        want = per_step or n / sequences / (3000 if row in CONSTANT_LENGTH_ROWS else 1)
        assert weights.double().sum().item() == pytest.approx(want, rel=1e-6)
