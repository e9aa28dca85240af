"""Group advantages: degenerate groups, unscored samples, invariances, and the normalization of each objective."""

import math

import oracle
import pytest
import torch
from cases import (
    ADVANTAGE_ROWS,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import gspo

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("row", ADVANTAGE_ROWS)
def test_a_uniform_group_has_advantage_exactly_zero(row):
    for reward in (0.0, 1.0, *(() if row == "maxrl" else (-1.0,)), 0.1, 0.9, 1.1, 0.3, 1e-3, 1 / 3, 123.4):
        for size in (2, 3, 5, 6, 7, 8, 12, 16, 31, 64):
            for rewards in ([reward] * size, torch.full((size,), reward, dtype=torch.float32)):
                got = gspo.group_advantage(row, rewards, ["p"] * size)
                assert (got == 0).all(), (reward, size)


@pytest.mark.parametrize("row", [row for row in ADVANTAGE_ROWS if row != "reinforce_pp"])
def test_a_uniform_group_beside_others(row):
    got = gspo.group_advantage(row, [0.1] * 6 + [1.0, 0.0, 0.3], ["u"] * 6 + ["v"] * 3)
    assert (got[:6] == 0).all()
    assert (got[6:] != 0).any()


@pytest.mark.parametrize("row", oracle.Z_SCORE)
def test_rounding_noise_in_a_uniform_group_is_not_blown_up(row):
    """max - min is compared with a tolerance: 0.1 + 0.2 and 0.3 are one reward."""
    got = gspo.group_advantage(row, [0.1 + 0.2, 0.3, 0.3, 0.3], [0] * 4)
    assert (got == 0).all()
    noisy = torch.full((8,), 0.9)
    noisy[3] = torch.nextafter(noisy[3], torch.tensor(2.0))
    assert (gspo.group_advantage(row, noisy, [0] * 8) == 0).all()


@pytest.mark.parametrize("row", [row for row in ADVANTAGE_ROWS if row != "reinforce_pp"])
def test_a_singleton_group_has_advantage_exactly_zero(row):
    got = gspo.group_advantage(row, [1.0, 0.7, 1.0, 0.0], ["alone", "b", "b", "b"])
    assert got[0] == 0
    assert torch.isfinite(got).all()
    assert (got[1:] != 0).any()
    assert gspo.group_advantage(row, [0.7], ["x"]).tolist() == [0]


@pytest.mark.parametrize("row", ADVANTAGE_ROWS)
def test_an_unscored_sample_has_advantage_zero_and_does_not_move_the_others(row):
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
def test_one_scored_sample_left_is_a_singleton(row):
    got = gspo.group_advantage(row, [1.0, None, None, 1.0, 0.0], ["a", "a", "a", "b", "b"])
    assert got[:3].tolist() == [0, 0, 0]


@pytest.mark.parametrize("row", ADVANTAGE_ROWS)
def test_nothing_scored(row):
    assert gspo.group_advantage(row, [None, float("nan")], [0, 0]).tolist() == [0, 0]


REWARDS = [1.0, 0.0, 0.25, 1.0, 0.0, 0.5, 0.75, 1.0, 0.0, 0.7]


GROUPS = [0, 1, 0, 1, 0, 1, 2, 2, 1, 2]


@pytest.mark.parametrize("row", [row for row in ADVANTAGE_ROWS if row != "maxrl"])
def test_advantage_does_not_change_when_rewards_are_shifted(row):
    base = gspo.group_advantage(row, REWARDS, GROUPS)
    moved = gspo.group_advantage(row, [r + 3 for r in REWARDS], GROUPS)
    torch.testing.assert_close(moved, base, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("row", ADVANTAGE_ROWS)
@pytest.mark.parametrize("factor", [1e-4, 0.1, 7.0, 1e4])
def test_advantage_under_scaled_rewards(row, factor):
    """z-scores, whitened and mean-scaled advantages do not move (an eps in the denominator would show); the others
    scale."""
    base = gspo.group_advantage(row, REWARDS, GROUPS).double()
    scaled = gspo.group_advantage(row, [r * factor for r in REWARDS], GROUPS).double()
    invariant = row in (*oracle.Z_SCORE, "reinforce_pp", "maxrl")
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
    values = [0.0, 1.0, 0.1, 0.5, None] + ([] if row == "maxrl" else [-1.0])
    rewards = data.draw(st.lists(st.sampled_from(values), min_size=n, max_size=n))
    groups = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    if row == "reinforce_pp":
        groups = [0] * n
    got = gspo.group_advantage(row, rewards, groups)
    assert got.tolist() == pytest.approx(oracle.group_advantage(row, rewards, groups), rel=1e-5, abs=1e-6)


def test_lengths_of_rewards_and_groups_must_agree():
    with pytest.raises((ValueError, AssertionError)):
        gspo.group_advantage("gspo", [1.0, 0.0, 1.0], [0, 0])


@pytest.mark.parametrize("high", [1.0, 5.0])
@pytest.mark.parametrize("low", [0.0, -1.0])
def test_gpg_alpha_counts_informative_samples(low, high):
    """8 samples, 4 of them in uniform groups: alpha = 2, whatever the two rewards are called."""
    rewards = [high] * 2 + [low] * 2 + [high, low, low, low]
    got = gspo.group_advantage("gpg", rewards, [0, 0, 1, 1, 2, 2, 2, 2])
    span = high - low
    assert got.tolist() == pytest.approx([0] * 4 + [2 * 0.75 * span] + [-2 * 0.25 * span] * 3, rel=1e-6)


def test_the_deviation_is_bessels_without_eps():
    assert gspo.group_advantage("gspo", [1.0] + [0.0] * 15, [0] * 16)[0].item() == pytest.approx(3.75, rel=1e-6)
    assert gspo.group_advantage("gspo", [1e-5, 0.0], [0, 0])[0].item() == pytest.approx(math.sqrt(0.5), rel=1e-6)


def test_rloo_leaves_the_sample_out_of_its_baseline():
    got = gspo.group_advantage("rloo", [1.0, 0.0, 0.5, 0.2], [0] * 4)
    want = [1.0 - 0.7 / 3, 0.0 - 1.7 / 3, 0.5 - 1.2 / 3, 0.2 - 1.5 / 3]
    assert got.tolist() == pytest.approx(want, rel=1e-5)
    assert gspo.group_advantage("rloo", [1.0], [0]).tolist() == [0]


def test_maxrl_divides_by_the_success_rate():
    """K successes of N: (N - K) / K for a success and -1 for a failure, so a rare success weighs most."""
    for successes in (1, 2, 7):
        got = gspo.group_advantage("maxrl", [1.0] * successes + [0.0] * (8 - successes), [0] * 8)
        want = [(8 - successes) / successes] * successes + [-1.0] * (8 - successes)
        assert got.tolist() == pytest.approx(want, rel=1e-6)


def test_maxrl_gives_nothing_to_a_group_without_success_and_refuses_negative_rewards():
    assert gspo.group_advantage("maxrl", [0.0, 0.0, 1.0, 0.0], [0, 0, 1, 1]).tolist() == [0, 0, 1, -1]
    for rewards in ([1.0, -1.0], [0.0, 0.0, -1e-3], [-1.0, None]):
        with pytest.raises(ValueError, match="0 or more"):
            gspo.group_advantage("maxrl", rewards, [0] * len(rewards))


def test_maxrl_refuses_penalties_on_the_reward():
    with pytest.raises(ValueError, match="overlong_filter"):
        gspo.objective("maxrl", shape="soft_overlong")
    with pytest.raises(ValueError, match="kl_in"):
        gspo.objective("maxrl", kl=0.1, kl_in="reward")
    gspo.objective("maxrl", shape="overlong_filter", kl=0.1)


def test_vespo_may_divide_by_the_deviation():
    rewards, groups = [1.0, 0.0, 0.0, 0.5, 0.1], [0, 0, 0, 1, 1]
    scaled = gspo.objective("vespo", advantage_scale="std")
    assert torch.equal(gspo.group_advantage(scaled, rewards, groups), gspo.group_advantage("gspo", rewards, groups))
    assert torch.equal(gspo.group_advantage("vespo", rewards, groups), gspo.group_advantage("dr_grpo", rewards, groups))
    with pytest.raises(ValueError, match="advantage_scale"):
        gspo.objective("vespo", advantage_scale="mean")


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "sapo"])
def test_an_objective_may_leave_the_deviation_out(name):
    rewards, groups = [1.0, 0.0, 0.0, 0.5, 0.1], [0, 0, 0, 1, 1]
    plain = gspo.group_advantage(gspo.objective(name, advantage_scale="none"), rewards, groups)
    assert torch.equal(plain, gspo.group_advantage("dr_grpo", rewards, groups))
    assert not torch.equal(plain, gspo.group_advantage(name, rewards, groups))
