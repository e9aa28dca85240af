"""What every implementation must show (algorithms.md section 14), and one test per known bug of sections 1.2 and 11.

Expected numbers are written out from the formulas here; only the micro-batch tests compare the code with itself.
"""

import math
import random
import warnings

import cases
import oracle
import pytest
import torch
from cases import COV_ROWS, HARD_CLIP_ROWS, OWN_SAMPLER_ROWS, SEQUENCE_ROWS, bare, evaluate, random_case
from hypothesis import given, settings
from hypothesis import strategies as st

import gspo

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ROWS = gspo.objective_names()
ADVANTAGE_ROWS = [row for row in ROWS if row != "ppo_clip"]
GSPO_LIKE = ("gspo", "gspo_token", "luspo")
TOKEN_CLIP_ROWS = ("grpo", "dr_grpo", "dapo", "reinforce_pp", "ppo_clip")


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def one_token(log_ratios, advantage, *, logp_old=-1.0):
    """One sequence of one token per log-ratio: its ratio is both the token's and the sequence's."""
    log_ratios = f64(*log_ratios)[:, None]
    old = torch.full_like(log_ratios, logp_old)
    advantage = torch.as_tensor(advantage, dtype=torch.float64).expand(len(log_ratios))
    return cases.Case(
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
    return gspo.objective(row, **kw, **cases.MIXED_CLIP.get(row, {}))


def kl_in_loss(row, **settings):
    return gspo.objective(row, **({"kl_in": "loss"} if row == "reinforce_pp" else {}), **settings)


# --- 1. GSPO and GSPO-token -------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-4, 1e-3, 0.1, 1.0]))
def test_property_1_gspo_token_equals_gspo_for_a_constant_advantage(seed, scale):
    case = random_case(seed, scale=scale)
    out, grad = evaluate("gspo", case)
    token_out, token_grad = evaluate("gspo_token", case)
    assert out.loss.item() == pytest.approx(token_out.loss.item(), rel=1e-12)
    torch.testing.assert_close(grad, token_grad, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("row", GSPO_LIKE)
def test_property_1_a_sequence_is_clipped_iff_its_ratio_left_on_the_side_of_its_advantage(row):
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


def test_property_1_a_reply_is_clipped_whole_or_not_at_all():
    case = random_case(0, B=40, scale=1e-3, empty=False)
    _, grad = evaluate("gspo", case)
    zero = (grad == 0) & case.mask
    assert torch.equal(zero.any(1), (zero | ~case.mask).all(1))
    assert 0 < int(zero.any(1).sum()) < 40


# --- 2. on-policy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS)
def test_property_2_on_policy_the_gradient_is_the_advantage_times_the_weight(row):
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


# --- 3. micro-batches (and section 1.2) -------------------------------------------------------------------------------


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
def test_property_3_and_1_2_micro_batches_add_up_to_the_step(row):
    """Also the bugs of verl's geo_mean (gmpo), VESPO's agg_loss (vespo) and TRL's num_items_in_batch (dapo, cispo)."""
    objective = all_options(row)
    for seed in range(4):
        case = random_case(seed, B=13, T=9, scale=0.05)
        whole, whole_grad, total, grad = step(objective, row, case, seed=seed)
        assert total == pytest.approx(whole, rel=1e-10, abs=1e-14)
        torch.testing.assert_close(grad, whole_grad, rtol=1e-10, atol=1e-14)
        assert grad.abs().max() > 1e-6


@pytest.mark.parametrize("row", ROWS)
def test_property_3_the_test_above_can_fail(row):
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
def test_property_3_single_sequences_add_up(row):
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
def test_property_3_order_of_sequences(row):
    objective = all_options(row)
    case = random_case(2, B=9, scale=0.05)
    options = {"sampler": True, "ref": True, "entropy": True, "row": row}
    out, grad = evaluate(objective, case, **options)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    shuffled, shuffled_grad = evaluate(objective, case.rows(order), **options)
    assert shuffled.loss.item() == pytest.approx(out.loss.item(), rel=1e-12)
    torch.testing.assert_close(shuffled_grad, grad[order], rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("row", COV_ROWS)
def test_trap_1_2_cov_rows_refuse_to_select_within_a_micro_batch(row):
    """The selection is over the step: a micro-batch that comes with weights must come with its selection."""
    case = random_case(0)
    objective = gspo.objective(row, select_fraction=0.5)
    weights = gspo.token_weights(objective, case.mask)
    with pytest.raises(ValueError, match="selected"):
        evaluate(objective, case, row=row, weights=weights, selected=False)


def test_trap_1_2_fully_masked_sequences_are_not_counted():
    case = random_case(0, B=6)
    empty = ~case.mask.any(1)
    assert empty.any()
    for row in ROWS:
        out, grad = evaluate(bare(row), case, row=row)
        fewer, fewer_grad = evaluate(bare(row), case.rows(~empty), row=row)
        assert out.loss.item() == pytest.approx(fewer.loss.item(), rel=1e-12), row
        torch.testing.assert_close(grad[~empty], fewer_grad, rtol=1e-11, atol=1e-15)


def test_trap_1_2_dr_grpo_divides_by_a_constant_and_not_by_the_padded_width():
    case = random_case(0)
    wider = case.map(lambda x: torch.cat([x, x.new_zeros(len(x), 50)], 1) if x.ndim == 2 else x)
    a, _ = evaluate("dr_grpo", case)
    b, _ = evaluate("dr_grpo", wider)
    assert a.loss.item() == b.loss.item()
    half, _ = evaluate(gspo.objective("dr_grpo", max_length=6000), case, row="dr_grpo")
    assert half.loss.item() == pytest.approx(a.loss.item() / 2, rel=1e-12)


# --- 4. padding -------------------------------------------------------------------------------------------------------


def spoil(case, bad):
    """Garbage at every masked position of every [B, T] input; the mask itself stays."""
    hidden = ~case.mask
    return case.map(
        lambda x: x if x.ndim != 2 else x | hidden if x.dtype == torch.bool and x is not case.mask else
        x if x.dtype == torch.bool else x.masked_fill(hidden, bad)
    )  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf"), 1e30, -1e30])
def test_property_4_garbage_at_masked_positions_does_not_leak(row, bad):
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
def test_property_4_garbage_in_a_token_advantage_does_not_leak(row):
    case = random_case(3, scale=0.05, per_token=True)
    out, grad = evaluate(bare(row), case, row=row)
    spoiled, spoiled_grad = evaluate(bare(row), spoil(case, float("nan")), row=row)
    assert spoiled.loss.item() == pytest.approx(out.loss.item(), rel=1e-12)
    torch.testing.assert_close(spoiled_grad, grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("row", COV_ROWS)
def test_property_4_garbage_does_not_change_the_selection(row):
    case = random_case(3, B=8, T=20)
    kw = {"cov_low": 0.1, "cov_high": 5.0} if row == "clip_cov" else {}
    objective = gspo.objective(row, select_fraction=0.2, **kw)
    bad = spoil(case, float("nan"))
    a = gspo.select_tokens(objective, case.logp, case.logp_old, case.advantage, case.mask, seed=1)
    b = gspo.select_tokens(objective, bad.logp, bad.logp_old, bad.advantage, bad.mask, seed=1)
    assert a.any()
    assert torch.equal(a, b)


@pytest.mark.parametrize("row", ROWS)
def test_property_4_appended_and_inserted_padding_changes_nothing(row):
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
def test_property_4_nothing_to_train_on(row):
    case = random_case(0).replace(mask=torch.zeros(6, 8, dtype=torch.bool))
    out, grad = evaluate(bare(row), spoil(case, float("nan")), row=row)
    assert out.loss.item() == 0
    assert (grad == 0).all()
    assert (gspo.token_weights(row, case.mask) == 0).all()


def test_4_4_c_the_length_is_the_masked_count_in_exponent_and_aggregate():
    """Two model tokens around a tool call of three: s_i is the mean over two."""
    logp_old = torch.full((1, 5), -1.0, dtype=torch.float64)
    logp = logp_old + f64(0.1, 5.0, 5.0, 5.0, 0.3)[None]
    mask = torch.tensor([[True, False, False, False, True]])
    case = cases.Case(logp=logp, logp_old=logp_old, advantage=f64(-1.0), mask=mask)
    out, grad = evaluate("gspo", case)
    assert out.loss.item() == pytest.approx(math.exp(0.2), rel=1e-12)
    assert grad.squeeze(0).tolist() == pytest.approx([math.exp(0.2) / 2, 0, 0, 0, math.exp(0.2) / 2], rel=1e-12)
    assert out.stats["ratio_max"] == pytest.approx(math.exp(0.2), rel=1e-6)


# --- 5. degenerate groups ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ADVANTAGE_ROWS)
def test_property_5_a_uniform_group_has_advantage_exactly_zero(row):
    for reward in (0.0, 1.0, -1.0, 0.1, 0.9, 1.1, 0.3, 1e-3, 1 / 3, 123.4):
        for size in (2, 3, 5, 6, 7, 8, 12, 16, 31, 64):
            for rewards in ([reward] * size, torch.full((size,), reward, dtype=torch.float32)):
                got = gspo.group_advantage(row, rewards, ["p"] * size)
                assert (got == 0).all(), (reward, size)


@pytest.mark.parametrize("row", [row for row in ADVANTAGE_ROWS if row != "reinforce_pp"])
def test_property_5_a_uniform_group_beside_others(row):
    got = gspo.group_advantage(row, [0.1] * 6 + [1.0, 0.0, 0.3], ["u"] * 6 + ["v"] * 3)
    assert (got[:6] == 0).all()
    assert (got[6:] != 0).any()


@pytest.mark.parametrize("row", oracle.Z_SCORE)
def test_property_5_rounding_noise_in_a_uniform_group_is_not_blown_up(row):
    """1.1 pitfall 1: compare max - min with a tolerance. 0.1 + 0.2 and 0.3 are one reward."""
    got = gspo.group_advantage(row, [0.1 + 0.2, 0.3, 0.3, 0.3], [0] * 4)
    assert (got == 0).all()
    noisy = torch.full((8,), 0.9)
    noisy[3] = torch.nextafter(noisy[3], torch.tensor(2.0))
    assert (gspo.group_advantage(row, noisy, [0] * 8) == 0).all()


@pytest.mark.parametrize("row", [row for row in ADVANTAGE_ROWS if row != "reinforce_pp"])
def test_property_5_a_singleton_group_has_advantage_exactly_zero(row):
    got = gspo.group_advantage(row, [1.0, 0.7, 1.0, 0.0], ["alone", "b", "b", "b"])
    assert got[0] == 0
    assert torch.isfinite(got).all()
    assert (got[1:] != 0).any()
    assert gspo.group_advantage(row, [0.7], ["x"]).tolist() == [0]


@pytest.mark.parametrize("row", ADVANTAGE_ROWS)
def test_property_5_an_unscored_sample_has_advantage_zero_and_does_not_move_the_others(row):
    nan = float("nan")
    want = gspo.group_advantage(row, [1.0, 0.0, 0.5, 0.0, 1.0], ["a", "a", "a", "b", "b"])
    for missing in (None, nan):
        got = gspo.group_advantage(
            row, [missing, 1.0, 0.0, missing, 0.5, 0.0, 1.0, missing], ["a", "a", "a", "a", "a", "b", "b", "c"]
        )
        assert got[[0, 3, 7]].tolist() == [0, 0, 0]
        assert got[[1, 2, 4, 5, 6]].tolist() == pytest.approx(want.tolist(), rel=1e-6)
    tensor = torch.tensor([nan, 1.0, 0.0, nan, 0.5, 0.0, 1.0, nan])
    got = gspo.group_advantage(row, tensor, ["a", "a", "a", "a", "a", "b", "b", "c"])
    assert got[[1, 2, 4, 5, 6]].tolist() == pytest.approx(want.tolist(), rel=1e-6)


@pytest.mark.parametrize("row", [row for row in ADVANTAGE_ROWS if row != "reinforce_pp"])
def test_property_5_one_scored_sample_left_is_a_singleton(row):
    got = gspo.group_advantage(row, [1.0, None, None, 1.0, 0.0], ["a", "a", "a", "b", "b"])
    assert got[:3].tolist() == [0, 0, 0]


@pytest.mark.parametrize("row", ADVANTAGE_ROWS)
def test_property_5_nothing_scored(row):
    assert gspo.group_advantage(row, [None, float("nan")], [0, 0]).tolist() == [0, 0]


# --- group advantages: invariances ------------------------------------------------------------------------------------

REWARDS = [1.0, 0.0, 0.25, 1.0, 0.0, 0.5, 0.75, 1.0, 0.0, 0.7]
GROUPS = [0, 1, 0, 1, 0, 1, 2, 2, 1, 2]


@pytest.mark.parametrize("row", ADVANTAGE_ROWS)
def test_advantage_does_not_change_when_rewards_are_shifted(row):
    base = gspo.group_advantage(row, REWARDS, GROUPS)
    moved = gspo.group_advantage(row, [r + 3 for r in REWARDS], GROUPS)
    torch.testing.assert_close(moved, base, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("row", ADVANTAGE_ROWS)
@pytest.mark.parametrize("factor", [1e-4, 0.1, 7.0, 1e4])
def test_advantage_under_scaled_rewards(row, factor):
    """z-scores and whitened advantages do not move (an eps in the denominator would show); the others scale."""
    base = gspo.group_advantage(row, REWARDS, GROUPS).double()
    scaled = gspo.group_advantage(row, [r * factor for r in REWARDS], GROUPS).double()
    invariant = row in oracle.Z_SCORE or row == "reinforce_pp"
    torch.testing.assert_close(scaled, base if invariant else base * factor, rtol=1e-5, atol=1e-6 * factor)


@pytest.mark.parametrize("row", ADVANTAGE_ROWS)
def test_advantage_follows_a_permutation(row):
    order = torch.randperm(len(REWARDS), generator=torch.Generator().manual_seed(3)).tolist()
    base = gspo.group_advantage(row, REWARDS, GROUPS)
    got = gspo.group_advantage(row, [REWARDS[i] for i in order], [GROUPS[i] for i in order])
    torch.testing.assert_close(got, base[order], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("row", ADVANTAGE_ROWS)
@pytest.mark.parametrize(
    "name",
    [str, lambda g: ("prompt", g), lambda g: frozenset([g]), lambda g: [None, "x", (1, 2)][g], lambda g: 10**12 - g],
    ids=["str", "tuple", "frozenset", "mixed", "int"],
)
def test_groups_may_have_any_hashable_name(row, name):
    base = gspo.group_advantage(row, REWARDS, GROUPS)
    got = gspo.group_advantage(row, REWARDS, [name(g) for g in GROUPS])
    torch.testing.assert_close(got, base, rtol=0, atol=0)


@pytest.mark.parametrize("row", ADVANTAGE_ROWS)
def test_groups_may_be_a_tensor_of_ids(row):
    """Elements of a tensor hash by identity, so a naive dictionary would make every sample its own group."""
    base = gspo.group_advantage(row, REWARDS, GROUPS)
    torch.testing.assert_close(gspo.group_advantage(row, REWARDS, torch.tensor(GROUPS)), base, rtol=0, atol=0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_rewards_and_groups(data):
    row = data.draw(st.sampled_from(ADVANTAGE_ROWS))
    n = data.draw(st.integers(1, 12))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0, -1.0, 0.1, 0.5, None]), min_size=n, max_size=n))
    groups = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    if row == "reinforce_pp":
        groups = [0] * n
    got = gspo.group_advantage(row, rewards, groups)
    assert got.tolist() == pytest.approx(oracle.group_advantage(row, rewards, groups), rel=1e-5, abs=1e-6)


def test_lengths_of_rewards_and_groups_must_agree():
    with pytest.raises((ValueError, AssertionError)):
        gspo.group_advantage("gspo", [1.0, 0.0, 1.0], [0, 0])


# --- 6. SAPO ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("A", [1.5, -0.8])
@pytest.mark.parametrize("tau", [0.3, 1.0, 1.05, 4.0])
def test_property_6_sapo_gate_is_sech_squared(A, tau):
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


def test_property_6_sapo_is_gspo_with_a_smooth_gate_up_to_the_spread_of_the_sequence():
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


# --- 7. VESPO ---------------------------------------------------------------------------------------------------------


def vespo_phi(log_w, A, **settings):
    """phi(W) read off the gradient of a one-token sequence."""
    _, grad = evaluate(gspo.objective("vespo", **settings), one_token([log_w], A), row="vespo")
    return -grad.item() / A


@pytest.mark.parametrize("A", [1.0, -1.0])
@pytest.mark.parametrize("per_token", [-17.0, -1.0, 1.0, 17.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_property_7_vespo_is_finite_for_log_w_of_ten_thousand(A, per_token, dtype):
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
def test_property_7_vespo_peaks_at_c1_over_c2(A, c1, c2, top):
    peak = vespo_phi(math.log(c1 / c2), A)
    assert peak == pytest.approx((c1 / c2) ** c1 * math.exp(c2 - c1), rel=1e-10)
    assert peak == pytest.approx(top, abs=0.006)
    for log_w in (-3.0, -1.0, 0.0, 0.2, 0.7, 1.5, 3.0):
        phi = vespo_phi(log_w, A)
        assert phi == pytest.approx(math.exp(c2 + c1 * log_w - c2 * math.exp(log_w)), rel=1e-9)
        assert phi < peak
    assert vespo_phi(0.0, A) == pytest.approx(1, rel=1e-12)


def test_property_7_vespo_weight_is_the_product_over_the_sequence():
    """No length normalisation: twice the tokens at the same log-ratio is W squared."""
    old = torch.full((1, 8), -1.0, dtype=torch.float64)
    case = cases.Case(logp=old + 0.1, logp_old=old, advantage=f64(1.0), mask=torch.ones(1, 8).bool())
    _, grad = evaluate("vespo", case)
    phi = math.exp(3 + 2 * 0.8 - 3 * math.exp(0.8))
    assert grad.flatten().tolist() == pytest.approx([-phi / 8] * 8, rel=1e-10)


# --- 8. GMPO ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("A", [1.0, -1.0])
def test_property_8_gmpo_clips_single_tokens_one_sided_in_log_space(A):
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


# --- 9. CISPO ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("A", [1.0, -1.0])
def test_property_9_cispo_never_drops_a_token(A):
    case = one_token([-5.0, -0.5, 0.0, 1.0, 2.0, 3.0], A)
    out, grad = evaluate("cispo", case)
    weight = ratios(case).clamp(max=5.0)
    torch.testing.assert_close(grad.squeeze(1), -A * weight / 6, rtol=1e-12, atol=0)
    assert (grad != 0).all()
    assert out.loss.item() == pytest.approx(-(A * weight * case.logp.squeeze(1)).mean().item(), rel=1e-12)


# --- 10. KL estimators ------------------------------------------------------------------------------------------------

COUNTS = (1, 2, 3, 4)
REFERENCE = (0.4, 0.1, 0.3, 0.2)


def kl_gradient(estimator, *, policy=COUNTS, row="gspo"):
    """d/d logits of the KL term, with every action as often among the samples as its probability says (pi_old)."""
    actions = torch.tensor([a for a, n in enumerate(COUNTS) for _ in range(n)])
    logits = (f64(*policy) / sum(policy)).log().requires_grad_(True)
    take = lambda p: p.log_softmax(0)[actions][:, None]  # noqa: E731
    out = gspo.policy_loss(
        gspo.objective(row, kl=1.0, kl_estimator=estimator),
        take(logits),
        take(f64(*COUNTS).log()),
        torch.zeros(10, dtype=torch.float64),
        torch.ones(10, 1, dtype=torch.bool),
        logp_ref=take(f64(*REFERENCE).log()),
    )
    return torch.autograd.grad(out.loss, logits)[0], out.loss.item()


def exact_gradient(reverse, *, policy=COUNTS):
    logits = (f64(*policy) / sum(policy)).log().requires_grad_(True)
    log_p, log_q = logits.log_softmax(0), f64(*REFERENCE).log()
    kl = (log_p.exp() * (log_p - log_q)).sum() if reverse else (log_q.exp() * (log_q - log_p)).sum()
    return torch.autograd.grad(kl, logits)[0], kl.item()


@pytest.mark.parametrize("estimator", ["k2", "k3+", "k3_ratio"])
def test_property_10_gradient_is_that_of_the_reverse_kl(estimator):
    torch.testing.assert_close(kl_gradient(estimator)[0], exact_gradient(True)[0], rtol=1e-10, atol=1e-14)


def test_property_10_plain_k3_has_the_gradient_of_the_forward_kl():
    grad = kl_gradient("k3")[0]
    torch.testing.assert_close(grad, exact_gradient(False)[0], rtol=1e-10, atol=1e-14)
    assert (grad - exact_gradient(True)[0]).abs().max() > 0.05


def test_property_10_k1_in_the_loss_regularises_nothing():
    assert kl_gradient("k1")[0].abs().max() < 1e-12


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3+", "k3_ratio"])
def test_property_10_value_is_unbiased(estimator):
    assert kl_gradient(estimator)[1] == pytest.approx(exact_gradient(True)[1], rel=1e-10)


def test_property_10_k3_ratio_stays_right_off_policy():
    """Samples from pi_old, another pi: the ratio-corrected value and gradient are still those of KL(pi || ref)."""
    policy = (4, 1, 2, 3)
    grad, value = kl_gradient("k3_ratio", policy=policy)
    want, exact = exact_gradient(True, policy=policy)
    assert value == pytest.approx(exact, rel=1e-10)
    torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-14)
    assert (kl_gradient("k2", policy=policy)[0] - want).abs().max() > 0.01


@pytest.mark.parametrize("row", ["gspo", "luspo", "gmpo", "vespo"])
def test_property_10_k3_ratio_uses_the_token_ratio_in_sequence_rows(row):
    """TRL multiplies by s_i at sequence level, which is not the token's ratio."""
    case = random_case(1, scale=0.3).replace(advantage=torch.zeros(6, dtype=torch.float64))
    out, _ = evaluate(gspo.objective(row, kl=1.0, kl_estimator="k3_ratio"), case, row=row, ref=True)
    k3 = (case.logp_ref - case.logp).exp() - 1 - (case.logp_ref - case.logp)
    want = (oracle.token_weights(row, case.mask) * (case.logp - case.logp_old).exp() * k3).sum()
    assert out.loss.item() == pytest.approx(want.item(), rel=1e-10)


def test_9_k1_in_the_reward_is_k2_in_the_loss():
    actions = torch.tensor([a for a, n in enumerate(COUNTS) for _ in range(n)])
    logits = f64(*COUNTS).log().requires_grad_(True)
    logp, ref = logits.log_softmax(0)[actions][:, None], f64(*REFERENCE).log()[actions][:, None]
    k1 = (logp - ref).detach().squeeze(1)
    out = gspo.policy_loss("gpg", logp, logp.detach(), -k1, torch.ones(10, 1, dtype=torch.bool))
    (grad,) = torch.autograd.grad(out.loss, logits)
    torch.testing.assert_close(grad, kl_gradient("k2")[0], rtol=1e-10, atol=1e-14)


# --- 11. soft overlong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (20481, -1.0), (10**6, -1.0)],
)
def test_property_11_soft_overlong(length, penalty):
    got = gspo.soft_overlong(length, 20480, 4096)
    assert isinstance(got, float)
    assert got == pytest.approx(penalty, abs=1e-12)


# --- 12. warnings and refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", GSPO_LIKE)
@pytest.mark.parametrize("kw", [{"clip_low": 0.2, "clip_high": 0.2}, {"clip_low": 0.01}, {"clip_high": 0.01}], ids=str)
def test_property_12_warns_of_a_token_clip_range_on_a_sequence_ratio(row, kw):
    with pytest.warns(UserWarning, match="clip"):
        gspo.objective(row, **kw)


@pytest.mark.parametrize("row", [*TOKEN_CLIP_ROWS, "clip_cov", "minirl"])
def test_property_12_warns_of_a_sequence_clip_range_on_a_token_ratio(row):
    with pytest.warns(UserWarning, match="clip"):
        gspo.objective(row, clip_low=3e-4, clip_high=4e-4)


@pytest.mark.parametrize("row", ROWS)
def test_property_12_defaults_do_not_warn(row):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gspo.objective(row)


@pytest.mark.parametrize("row", GSPO_LIKE)
def test_property_12_warns_when_the_denominator_is_the_inference_engine(row):
    case = random_case(0, scale=1e-3)
    same = case.replace(logp_sampler=case.logp_old.clone())
    with pytest.warns(UserWarning, match=r"sampler|mismatch"):
        evaluate(row, same, sampler=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate(row, case, sampler=True)
        evaluate(row, case)
        evaluate(gspo.objective(row, mismatch="token_tis"), same, row=row, sampler=True)
        evaluate("dapo", same, sampler=True)


def test_warns_when_grpo_has_no_reference_for_its_default_kl():
    case = random_case(0)
    with pytest.warns(UserWarning, match="ref"):
        evaluate("grpo", case)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate("grpo", case, ref=True)
        evaluate(gspo.objective("grpo", kl=0.0), case, row="grpo")


@pytest.mark.parametrize("row", ROWS)
def test_refuses_an_explicit_kl_without_a_reference(row):
    objective = kl_in_loss(row, kl=0.1)
    with pytest.raises(ValueError, match="logp_ref"):
        evaluate(objective, random_case(0), row=row)


def test_refuses_an_unknown_row_and_lists_the_rows():
    with pytest.raises(ValueError, match="gspo_token") as caught:
        gspo.objective("gspoo")
    assert all(row in str(caught.value) for row in ROWS)
    case = random_case(0)
    with pytest.raises(ValueError, match="gspo_token"):
        gspo.policy_loss("gspoo", case.logp, case.logp_old, case.advantage, case.mask)
    with pytest.raises(ValueError, match="gspo_token"):
        gspo.group_advantage("gspoo", [1.0], [0])


@pytest.mark.parametrize("row", ROWS)
def test_refuses_an_unknown_setting_and_names_the_valid_ones(row):
    with pytest.raises(ValueError, match="clip_lo_") as caught:
        gspo.objective(row, clip_lo_=0.1)
    assert "kl_estimator" in str(caught.value)
    for name in {"gspo": ["clip_low", "clip_high"], "sapo": ["tau_pos", "tau_neg"], "cispo": ["weight_cap"]}.get(
        row, []
    ):
        assert name in str(caught.value)


OWN_SETTINGS = {
    "clip_low": (*HARD_CLIP_ROWS, "minirl", "gmpo"),
    "clip_high": (*HARD_CLIP_ROWS, "minirl", "gmpo"),
    "dual_clip": HARD_CLIP_ROWS,
    "weight_cap": ("cispo", "minirl"),
    "tau_pos": ("sapo",),
    "tau_neg": ("sapo",),
    "k_pos": ("vespo",),
    "lambda_neg": ("vespo",),
    "max_length": ("dr_grpo",),
    "sigma_base": ("maspo",),
    "mass_power": ("maspo",),
    "select_fraction": COV_ROWS,
    "cov_low": ("clip_cov",),
    "cov_high": ("clip_cov",),
    "cov_kl": ("kl_cov",),
}
VALUE = {"dual_clip": 3.0, "weight_cap": 4.0, "max_length": 100, "select_fraction": 0.1, "cov_high": 6.0}


@pytest.mark.parametrize("setting", OWN_SETTINGS)
@pytest.mark.parametrize("row", ROWS)
def test_a_setting_is_taken_by_its_rows_and_refused_by_name_elsewhere(row, setting):
    value = VALUE.get(setting, 0.5)
    if row in OWN_SETTINGS[setting]:
        gspo.objective(row, **{setting: value})
    else:
        with pytest.raises(ValueError, match=setting):
            gspo.objective(row, **{setting: value})


@pytest.mark.parametrize(
    ("setting", "value", "valid"),
    [
        ("kl_estimator", "k4", "k3_ratio"),
        ("kl_in", "advantage", "reward"),
        ("mismatch", "tis", "token_tis"),
        ("keep", "some", "mixed"),
        ("shape", "hard", "soft_overlong"),
    ],
)
def test_refuses_an_unknown_choice_and_names_the_valid_ones(setting, value, valid):
    extra = {"kl": 0.1} if setting.startswith("kl") else {}
    with pytest.raises(ValueError, match=setting) as caught:
        gspo.objective("dapo", **extra, **{setting: value})
    assert valid in str(caught.value)


@pytest.mark.parametrize("row", ROWS)
def test_every_row_may_have_its_kl_in_the_loss(row):
    gspo.objective(row, kl=0.1, kl_in="loss")


def test_rewards_that_are_not_seen_cannot_carry_the_kl():
    with pytest.raises(ValueError, match="kl_in"):
        gspo.objective("ppo_clip", kl=0.1, kl_in="reward")


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mismatch", ["token_tis", "icepop", "sequence_mask", "sequence_tis"])
def test_mismatch_needs_the_sampler_or_is_refused(row, mismatch):
    if row in OWN_SAMPLER_ROWS:
        with pytest.raises(ValueError, match="mismatch"):
            gspo.objective(row, mismatch=mismatch)
        return
    objective = bare(row, mismatch=mismatch)
    with pytest.raises(ValueError, match="logp_sampler"):
        evaluate(objective, random_case(0), row=row)


@pytest.mark.parametrize("row", ROWS)
def test_an_entropy_bonus_needs_the_entropy(row):
    objective = bare(row, entropy=0.01)
    with pytest.raises(ValueError, match="entropy"):
        evaluate(objective, random_case(0), row=row)


@pytest.mark.parametrize("row", SEQUENCE_ROWS)
def test_a_sequence_row_refuses_an_advantage_per_token(row):
    with pytest.raises(ValueError, match="gspo_token"):
        evaluate(row, random_case(0, per_token=True))


@pytest.mark.parametrize("bad", [0.0, 0.5, 1.0, -3.0])
def test_dual_clip_must_exceed_one(bad):
    with pytest.raises(ValueError, match="dual_clip"):
        gspo.objective("grpo", dual_clip=bad)


@pytest.mark.parametrize(
    ("row", "kw", "named"),
    [
        ("gspo", {"mismatch_high": 3.0}, "mismatch_high"),
        ("gspo", {"mismatch_low": 0.3}, "mismatch_low"),
        ("gspo", {"mismatch": "token_tis", "mismatch_low": 0.3}, "mismatch_low"),
        ("gspo", {"mismatch": "sequence_tis", "mismatch_low": 0.3}, "mismatch_low"),
        ("gspo", {"kl_estimator": "k2"}, "kl_estimator"),
    ],
)
def test_refuses_a_setting_without_effect(row, kw, named):
    """design.md: an option that is set but has no effect is an error that says so."""
    with pytest.raises(ValueError, match=named):
        gspo.objective(row, **kw)


# --- dual clip (section 2.2) ------------------------------------------------------------------------------------------


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
def test_2_1_where_the_ppo_gradient_is_zero(row):
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


# --- numerical guards (section 1.3) and precision ---------------------------------------------------------------------


@pytest.mark.parametrize("row", [*TOKEN_CLIP_ROWS, "maspo"])
def test_1_3_token_log_ratios_are_clamped_at_twenty(row):
    out, grad = evaluate(bare(row), one_token([30.0], -1.0, logp_old=-40.0), row=row)
    assert out.loss.item() * (3000 if row == "dr_grpo" else 1) == pytest.approx(math.exp(20), rel=1e-9)
    assert grad.item() == 0


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("A", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_1_3_extreme_log_ratios_stay_finite(row, A, dtype):
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
    assert all(math.isfinite(value) for value in out.stats.values())


@pytest.mark.parametrize("row", ROWS)
def test_1_3_precision_is_that_of_the_inputs_and_at_least_float32(row):
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


def test_1_3_gspo_keeps_its_clip_range_in_float32():
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


# --- section 11, one by one -------------------------------------------------------------------------------------------


def two_lengths():
    """A sequence of 2 and one of 6 tokens, slightly off-policy, inside every clip range."""
    old = torch.full((2, 6), -1.0, dtype=torch.float64)
    mask = torch.tensor([[True] * 2 + [False] * 4, [True] * 6])
    return cases.Case(logp=old + 1e-5, logp_old=old, advantage=f64(1.0, -2.0), mask=mask)


def test_bug_11_1_gspo_does_not_weigh_sequences_by_length():
    out, grad = evaluate("gspo", two_lengths())
    assert out.loss.item() == pytest.approx(0.5 * math.exp(1e-5), rel=1e-12)
    assert grad.sum(1).tolist() == pytest.approx([-0.5 * math.exp(1e-5), 1.0 * math.exp(1e-5)], rel=1e-12)
    _, luspo = evaluate("luspo", two_lengths())
    assert luspo.sum(1).tolist() == pytest.approx([-0.5 * 2 * math.exp(1e-5), 6.0 * math.exp(1e-5)], rel=1e-12)


@pytest.mark.parametrize("row", GSPO_LIKE)
def test_bug_11_2_gspo_applies_its_dual_clip(row):
    case = one_token([math.log(4.0)], -1.0)
    free, free_grad = evaluate(row, case)
    out, grad = evaluate(gspo.objective(row, dual_clip=3.0), case, row=row)
    assert (free.loss.item(), free_grad.item()) == (pytest.approx(4.0), pytest.approx(4.0))
    assert (out.loss.item(), grad.item()) == (pytest.approx(3.0), 0.0)


def test_bug_11_3_default_clip_of_gspo_is_the_published_one():
    _, grad = evaluate("gspo", one_token([3.9e-4, 4.1e-4], 1.0))
    assert (grad == 0).flatten().tolist() == [False, True]
    _, grad = evaluate("gspo", one_token([-2.9e-4, -3.1e-4], -1.0))
    assert (grad == 0).flatten().tolist() == [False, True]


def test_bug_11_4_cispo_cap_is_an_absolute_bound_and_a_small_one_is_suspicious():
    case = one_token([math.log(5.5)], 1.0)
    _, grad = evaluate("cispo", case)
    assert -grad.item() == pytest.approx(5.0)
    _, grad = evaluate(gspo.objective("cispo", weight_cap=1.28), case, row="cispo")
    assert -grad.item() == pytest.approx(1.28)
    with pytest.warns(UserWarning, match="weight_cap"):
        gspo.objective("cispo", weight_cap=0.28)


def test_bug_11_5_gmpo_clip_is_in_log_space():
    """0.38 is inside a log clip of .4, although e^.38 = 1.46 is outside 1 + .4."""
    _, grad = evaluate("gmpo", one_token([0.38, 0.41], 1.0))
    assert (grad == 0).flatten().tolist() == [False, True]
    _, grad = evaluate("gmpo", one_token([-0.45, -0.38], -1.0))
    assert (grad == 0).flatten().tolist() == [True, False]


@pytest.mark.parametrize("high", [1.0, 5.0])
@pytest.mark.parametrize("low", [0.0, -1.0])
def test_bug_11_6_gpg_alpha_counts_informative_samples(low, high):
    """8 samples, 4 of them in uniform groups: alpha = 2, whatever the two rewards are called."""
    rewards = [high] * 2 + [low] * 2 + [high, low, low, low]
    got = gspo.group_advantage("gpg", rewards, [0, 0, 1, 1, 2, 2, 2, 2])
    span = high - low
    assert got.tolist() == pytest.approx([0] * 4 + [2 * 0.75 * span] + [-2 * 0.25 * span] * 3, rel=1e-6)


def test_bug_11_7_kl_cov_coefficient_is_one():
    case = one_token([0.2, -0.3], 1.0).replace(selected=torch.tensor([[True], [False]]))
    out, grad = evaluate("kl_cov", case)
    r = ratios(case)
    assert out.loss.item() == pytest.approx((-r.sum().item() + 0.2) / 2, rel=1e-12)
    assert grad.flatten().tolist() == pytest.approx([(-r[0].item() + 1) / 2, -r[1].item() / 2], rel=1e-12)


def test_3_5_kl_cov_does_not_clip_and_clip_cov_silences():
    case = one_token([3.0, 3.0], 1.0).replace(selected=torch.tensor([[True], [False]]))
    _, grad = evaluate("kl_cov", case)
    assert grad[1].item() == pytest.approx(-math.exp(3) / 2)
    case = one_token([0.1, 0.1], 1.0).replace(selected=torch.tensor([[True], [False]]))
    out, grad = evaluate("clip_cov", case)
    assert grad.flatten().tolist() == pytest.approx([0.0, -math.exp(0.1) / 2], rel=1e-12)
    assert out.loss.item() == pytest.approx(-math.exp(0.1) / 2, rel=1e-12), "zero their loss; the count stays"


def test_3_5_clip_cov_selects_nothing_where_the_fraction_is_below_one_token():
    """verl's max(int(r N), 1) drops a token of every small micro-batch: 2e-4 of 4096 is 0.8, so none."""
    case = random_case(0, B=16, T=256, mask=torch.ones(16, 256, dtype=torch.bool))
    case = case.replace(advantage=case.advantage * 3)
    for row, fraction in [("clip_cov", 2e-4), ("kl_cov", 2e-4)]:
        objective = gspo.objective(row, select_fraction=fraction)
        assert not gspo.select_tokens(objective, case.logp, case.logp_old, case.advantage, case.mask).any()
        weights = gspo.token_weights(objective, case.mask)
        evaluate(objective, case, row=row, weights=weights, selected=False)


def test_bug_11_8_sapo_reads_both_temperatures():
    case = one_token([0.5, 0.5], f64(1.0, -1.0))
    _, base = evaluate("sapo", case)
    _, pos = evaluate(gspo.objective("sapo", tau_pos=3.0), case, row="sapo")
    _, neg = evaluate(gspo.objective("sapo", tau_neg=3.0), case, row="sapo")
    assert (pos[0] != base[0], pos[1] == base[1], neg[0] == base[0], neg[1] != base[1]) == (True,) * 4
    z = math.exp(0.5) - 1
    gate = lambda tau: math.exp(0.5) / math.cosh(tau * z / 2) ** 2  # noqa: E731
    assert base.flatten().tolist() == pytest.approx([-gate(1.0) / 2, gate(1.05) / 2], rel=1e-12)


def test_bug_11_9_vespo_defaults():
    assert vespo_phi(0.3, 1.0) == pytest.approx(math.exp(3 + 2 * 0.3 - 3 * math.exp(0.3)), rel=1e-10)
    assert vespo_phi(0.3, -1.0) == pytest.approx(math.exp(2 + 3 * 0.3 - 2 * math.exp(0.3)), rel=1e-10)


@pytest.mark.parametrize("row", [row for row in ROWS if row not in OWN_SAMPLER_ROWS])
def test_bug_11_10_no_sampler_correction_unless_asked_for(row):
    case = random_case(0, scale=0.05)
    far = case.replace(logp_sampler=case.logp_old - 1.0)
    out, grad = evaluate(bare(row), far, row=row, sampler=True)
    base, base_grad = evaluate(bare(row), case, row=row)
    assert out.loss.item() == base.loss.item()
    assert torch.equal(grad, base_grad)


def test_bug_11_10_sequence_mask_is_geometric_and_sequence_tis_is_the_product():
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
def test_bug_11_11_bounds_act_on_the_ratio_and_not_on_its_inverse(mismatch):
    objective = gspo.objective("dapo", mismatch=mismatch, mismatch_low=0.5, mismatch_high=5.0)
    for rho, kept in [(4.0, True), (0.6, True), (0.25, False), (5.5, False)]:
        case = one_token([0.0], 1.0)
        case = case.replace(logp_sampler=case.logp_old - math.log(rho))
        _, grad = evaluate(objective, case, row="dapo", sampler=True)
        want = 0.0 if not kept else rho if mismatch == "icepop" else 1.0
        assert -grad.item() == pytest.approx(want, rel=1e-12)


def test_8_1_token_tis_has_no_lower_bound():
    for rho, want in [(0.01, 0.01), (1.5, 1.5), (2.5, 2.0)]:
        case = one_token([0.0], 1.0)
        case = case.replace(logp_sampler=case.logp_old - math.log(rho))
        _, grad = evaluate(gspo.objective("dapo", mismatch="token_tis"), case, row="dapo", sampler=True)
        assert -grad.item() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("row", ROWS)
def test_bug_11_12_weights_are_those_of_the_optimiser_step(row):
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
        want = per_step or n / sequences / (3000 if row == "dr_grpo" else 1)
        assert weights.double().sum().item() == pytest.approx(want, rel=1e-6)


def test_bug_11_13_the_overlong_penalty_has_a_floor():
    assert gspo.soft_overlong(10_000, 100, 20) == -1.0


def test_bug_11_14_the_deviation_is_bessels_without_eps():
    assert gspo.group_advantage("gspo", [1.0] + [0.0] * 15, [0] * 16)[0].item() == pytest.approx(3.75, rel=1e-6)
    assert gspo.group_advantage("gspo", [1e-5, 0.0], [0, 0])[0].item() == pytest.approx(math.sqrt(0.5), rel=1e-6)


def test_bug_11_14_rloo_leaves_the_sample_out_of_its_baseline():
    got = gspo.group_advantage("rloo", [1.0, 0.0, 0.5, 0.2], [0] * 4)
    want = [1.0 - 0.7 / 3, 0.0 - 1.7 / 3, 0.5 - 1.2 / 3, 0.2 - 1.5 / 3]
    assert got.tolist() == pytest.approx(want, rel=1e-5)
    assert gspo.group_advantage("rloo", [1.0], [0]).tolist() == [0]


@pytest.mark.parametrize("row", ROWS)
def test_bug_11_15_the_off_policy_mask_leaves_the_denominator_alone(row):
    """Three sequences, one negative and drifted: its gradient is 0 and the others' are what they were."""
    old = torch.full((3, 4), -1.0, dtype=torch.float64)
    drift = f64(-0.01, -0.6, -0.6)[:, None].expand(3, 4)
    case = cases.Case(
        logp=old + drift, logp_old=old, advantage=f64(-1.0, -1.0, 1.0), mask=torch.ones(3, 4).bool(),
        selected=torch.zeros(3, 4, dtype=torch.bool),
    )  # fmt: skip
    wide = {"clip_low": 0.9, "clip_high": 0.9} if row in (*HARD_CLIP_ROWS, "gmpo", "minirl") else {}
    _, base = evaluate(bare(row, **wide), case, row=row)
    _, grad = evaluate(bare(row, off_policy_mask=0.5, **wide), case, row=row)
    assert (base[1] != 0).all()
    assert (grad[1] == 0).all()
    torch.testing.assert_close(grad[[0, 2]], base[[0, 2]], rtol=1e-12, atol=0)


@pytest.mark.parametrize("row", [row for row in ROWS if row not in OWN_SAMPLER_ROWS])
def test_bug_11_16_kl_and_entropy_are_not_multiplied_by_the_sampler_weight(row):
    """Everything masked out by the correction: what is left is KL and entropy with their full weight."""
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


# --- the interface ----------------------------------------------------------------------------------------------------


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


def test_published_kl_of_reinforce_pp_and_grpo():
    """reinforce_pp's is in the reward, where policy_loss cannot show it."""
    reinforce, grpo = gspo.objective("reinforce_pp"), gspo.objective("grpo")
    assert (reinforce.kl, reinforce.kl_in) == (0.001, "reward")
    assert (grpo.kl, grpo.kl_in) == (0.04, "loss")


def test_statistics_of_the_reference_and_of_the_sampler_are_k3_over_tokens():
    case = random_case(0, scale=0.05)
    out, _ = evaluate(gspo.objective("dapo", kl=0.1), case, row="dapo", sampler=True, ref=True)
    k3 = lambda log_r: (log_r.exp() - 1 - log_r)[case.mask].mean().item()  # noqa: E731
    assert out.stats["kl_ref"] == pytest.approx(k3(case.logp_ref - case.logp), rel=1e-6)
    assert out.stats["mismatch_k3"] == pytest.approx(k3(case.logp_old - case.logp_sampler), rel=1e-6)


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


def test_soft_overlong_needs_a_cache():
    assert gspo.soft_overlong(9, 10, 1) == 0
    assert gspo.soft_overlong(10, 10, 1) == -1
    with pytest.raises(ValueError, match="cache"):
        gspo.soft_overlong(5, 10, 0)
    with pytest.raises(ValueError, match="cache"):
        gspo.soft_overlong(5, 10, 11)


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
def test_5_4_maspo_widths(A, logp_old, log_ratio, sigma):
    _, grad = evaluate("maspo", one_token([log_ratio], A, logp_old=logp_old))
    r = math.exp(log_ratio)
    assert -grad.item() / A == pytest.approx(math.exp(-((r - 1) ** 2) / (2 * sigma**2)) * r, rel=1e-9)
