"""Value and gradient of every objective against the oracle in float64: default settings, changed settings, options."""

import copy
import pickle

import cases
import oracle
import pytest
import torch
from cases import COV_ROWS, HARD_CLIP_ROWS, OWN_SAMPLER_ROWS, bare, evaluate, random_case
from hypothesis import given, settings
from hypothesis import strategies as st

import gspo

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ROWS = gspo.objective_names()
TOKEN_ROWS = [row for row in ROWS if row not in cases.SEQUENCE_ROWS]

CHANGED = {
    "gspo": [
        {"clip_low": 8e-3, "clip_high": 5e-3},
        {"clip_low": 0.2, "clip_high": 0.3},
        {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.4},
        {"clip_low": 0.05, "clip_high": 0.04, "length_norm": "sqrt"},
    ],
    "gspo_token": [
        {"clip_low": 8e-3, "clip_high": 5e-3},
        {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.4},
        {"clip_low": 0.1, "clip_high": 0.2, "length_norm": "none"},
    ],
    "gspo_turn": [{"clip_low": 8e-3, "clip_high": 5e-3}, {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.4}],
    "luspo": [{"clip_low": 8e-3, "clip_high": 5e-3}, {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.4}],
    "grpo": [{"clip_low": 0.1, "clip_high": 0.4}, {"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.5}],
    "dr_grpo": [{"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.5}, {"max_length": 17}],
    "dapo": [{"clip_low": 0.05, "clip_high": 0.5}, {"dual_clip": 1.5}],
    "reinforce_pp": [{"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.5}],
    "ppo_clip": [{"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.5}],
    "gmpo": [{"clip_low": 0.1, "clip_high": 0.25}, {"clip_low": 0.8, "clip_high": 0.05}],
    "sapo": [{"tau_pos": 0.5, "tau_neg": 3.0}, {"tau_pos": 2.5, "tau_neg": 0.7}],
    "vespo": [
        {"k_pos": 1.7, "lambda_pos": 1.1, "k_neg": 2.3, "lambda_neg": 4.1},
        {"length_norm": "sqrt"},
        {"length_norm": "mean", "k_neg": 2.0},
    ],
    "maspo": [
        {"sigma_base": 0.2, "mass_power": 0.5, "beta_pos": 0.4, "beta_neg": 0.6},
        {"sigma_base": 0.3, "mass_power": 0.8, "sigma_high": 0.5, "beta_pos": 2.0, "factor_high": 1.5},
        {"sigma_base": 0.3, "beta_neg": 3.0, "factor_low": 0.6},
    ],
    "cispo": [{"weight_cap": 1.1}, {"weight_cap": 1.5}],
    "gpg": [{}],
    "rloo": [{}],
    "minirl": [{"clip_low": 0.1, "clip_high": 0.15, "weight_cap": 1.05}, {"clip_low": 0.05, "clip_high": 0.6}],
    "clip_cov": [{"clip_low": 0.2, "clip_high": 0.3}, {"dual_clip": 2.4}],
    "kl_cov": [{"cov_kl": 0.1}, {"cov_kl": 3.0}],
    "fspo": [{"clip_low": 0.2, "clip_high": 0.05}, {"clip_low": 0.01, "clip_high": 0.6}],
    "sspo": [{"tau_pos": 0.5, "tau_neg": 3.0}, {"tau_pos": 2.5, "tau_neg": 0.7}],
    "maxrl": [{"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.5}],
    "minpro": [{"weight_cap": 1.05}, {"weight_cap": 1.5}],
    "dppo_tv": [{"delta_low": 0.02, "delta_high": 0.1}, {"delta_low": 0.3, "max_length": 17}],
    "dppo_kl": [{"delta_low": 0.002, "delta_high": 0.01}, {"delta_low": 0.2, "max_length": 17}],
    "trm": [{"max_divergence": 0.02}, {"max_divergence": 0.3}],
}


def assert_matches(
    row, case, objective, *, rtol=1e-9, atol=1e-12, sampler=False, ref=False, with_entropy=False, **oracle_kw
):
    out, grad = evaluate(objective, case, row=row, sampler=sampler, ref=ref, entropy=with_entropy)
    seen = case.replace(
        logp_sampler=case.logp_sampler if sampler else None,
        logp_ref=case.logp_ref if ref else None,
        entropy=case.entropy if with_entropy else None,
    ).to(torch.float64)
    want, want_grad = oracle.loss_and_grad(row, seen, **oracle_kw)
    torch.testing.assert_close(out.loss.detach().double(), want, rtol=rtol, atol=atol)
    torch.testing.assert_close(grad.double(), want_grad, rtol=rtol, atol=atol)
    return out, grad


@pytest.mark.parametrize("row", ROWS)
def test_a_copy_of_an_objective_is_equal_to_it(row):
    """Objectives travel between processes, and a copy still knows its components."""
    objective = gspo.objective(row)
    assert copy.deepcopy(objective) == objective
    assert pickle.loads(pickle.dumps(objective)) == objective


def test_every_row_has_an_oracle():
    assert sorted(ROWS) == sorted(oracle.ROWS) == sorted(oracle.AGGREGATE) == sorted(CHANGED)


def test_the_oracle_is_not_vacuous():
    """At the scales used below every objective has a gradient, and no two objectives have the same one."""
    case = random_case(0, B=40, T=20, scale=0.5).replace(logp_ref=None, logp_sampler=None)
    grads = {row: oracle.loss_and_grad(row, case)[1] for row in oracle.ROWS}
    for row, grad in grads.items():
        assert grad[case.mask].abs().max() > 1e-5, row
    pairs = [(a, b) for a in grads for b in grads if a < b]
    same = [(a, b) for a, b in pairs if torch.allclose(grads[a], grads[b], rtol=1e-6, atol=1e-12)]
    clip = {("ppo_clip", "reinforce_pp"), ("maxrl", "ppo_clip"), ("maxrl", "reinforce_pp")}
    assert set(same) <= clip | {("gspo", "gspo_token"), ("gspo", "gspo_turn"), ("gspo_token", "gspo_turn")}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("scale", [1e-4, 3e-2, 0.4, 3.0])
def test_default_settings(row, scale):
    for seed in range(4):
        case = random_case(seed, scale=scale)
        assert_matches(row, case, row, ref=row == "grpo")
        assert_matches(row, case, gspo.objective(row), ref=row == "grpo")


@pytest.mark.parametrize("row", TOKEN_ROWS)
def test_advantage_per_token(row):
    for seed in range(4):
        assert_matches(row, random_case(seed, scale=0.3, per_token=True), bare(row), kl=0.0)
        assert_matches(row, random_case(seed, scale=2e-4, per_token=True), bare(row), kl=0.0)


@pytest.mark.parametrize("row", cases.SEQUENCE_ROWS)
def test_advantage_per_token_that_is_constant_in_each_sequence(row):
    case = random_case(1, scale=2e-4)
    wide = case.advantage[:, None].expand(case.mask.shape).clone()
    wide[~case.mask] = 17.0
    out, grad = evaluate(row, case.replace(advantage=wide))
    want, want_grad = evaluate(row, case)
    assert out.loss.item() == pytest.approx(want.loss.item(), rel=1e-12)
    torch.testing.assert_close(grad, want_grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("row", "changed"), [(row, kw) for row in CHANGED for kw in CHANGED[row]], ids=str)
def test_changed_settings(row, changed):
    for seed in range(5):
        for scale in (0.02, 0.4, 1.5):
            assert_matches(row, random_case(seed, scale=scale), bare(row, **changed), kl=0.0, **changed)


@pytest.mark.parametrize(("row", "changed"), [(row, kw) for row in CHANGED for kw in CHANGED[row] if kw], ids=str)
def test_changed_settings_take_effect(row, changed):
    """Each changed setting changes the value or gradient of at least one of the cases above: none is ignored."""
    for name in changed:
        without = {k: v for k, v in changed.items() if k != name}
        moved = False
        for seed in range(5):
            for scale in (0.02, 0.4, 1.5):
                case = random_case(seed, scale=scale)
                out, grad = evaluate(bare(row, **changed), case, row=row)
                base, base_grad = evaluate(bare(row, **without), case, row=row)
                moved |= not torch.allclose(grad, base_grad, rtol=1e-9, atol=1e-13) or out.loss != base.loss
        assert moved, f"{row}: {name} has no effect"


@st.composite
def any_case(draw):
    B, T = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    bits = draw(st.lists(st.booleans(), min_size=B * T, max_size=B * T))
    advantage = draw(st.lists(st.sampled_from([-2.0, -0.7, -1e-3, 0.0, 1e-3, 0.6, 1.9]), min_size=B, max_size=B))
    scale = draw(st.sampled_from([0.0, 1e-6, 3e-4, 1e-2, 0.3, 1.0, 4.0]))
    mask = torch.tensor(bits).view(B, T)
    seed = draw(st.integers(0, 2**20))
    advantage_B = torch.tensor(advantage, dtype=torch.float64)
    return random_case(seed, B=B, T=T, scale=scale, mask=mask, advantage=advantage_B)


@pytest.mark.parametrize("row", ROWS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(case=any_case(), change=st.integers(0, 3))
def test_any_input(row, case, change):
    """Ragged masks with holes, empty sequences, empty batches, log-ratios of every size, A of both signs and zero."""
    changed = (CHANGED[row] + [{}] * 4)[change]
    assert_matches(row, case, bare(row, **changed), kl=0.0, atol=1e-11, **changed)


@pytest.mark.parametrize("row", ROWS)
def test_float32_is_close(row):
    for seed in range(3):
        for scale in (0.01, 0.4):
            case = random_case(seed, scale=scale).to(torch.float32)
            out, _ = assert_matches(row, case, bare(row), rtol=2e-4, atol=2e-6, kl=0.0)
            assert out.loss.dtype == torch.float32


@pytest.mark.parametrize("row", ["gspo", "gspo_token", "luspo", "gmpo", "sapo", "grpo", "maspo"])
def test_gradient_is_the_finite_difference_of_the_loss(row):
    """maspo detaches its gate, so its difference quotient only matches where the gate is 1."""
    changed = cases.MIXED_CLIP.get(row, {})
    objective = bare(row, **changed)
    case = random_case(5, B=4, T=4, scale=0.03)
    if row == "maspo":
        case = case.replace(logp=case.logp_old - 0.1 * case.advantage.sign()[:, None])
    _, grad = evaluate(objective, case, row=row)
    assert grad.abs().max() > 1e-3
    h = 1e-6
    for i, t in case.mask.nonzero().tolist():
        if row == "gspo_token":  # its value is s_i at every token; GSPO has the same gradient
            objective = bare("gspo", **changed)
        step = torch.zeros_like(case.logp)
        step[i, t] = h
        up, _ = evaluate(objective, case.replace(logp=case.logp + step), row=row)
        down, _ = evaluate(objective, case.replace(logp=case.logp - step), row=row)
        quotient = (up.loss - down.loss).item() / (2 * h)
        assert quotient == pytest.approx(grad[i, t].item(), rel=1e-5, abs=1e-8)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3+", "k3_ratio"])
def test_kl_in_the_loss(row, estimator):
    for seed in range(2):
        kw = {"kl": 0.3, "kl_estimator": estimator} | ({"kl_in": "loss"} if row == "reinforce_pp" else {})
        assert_matches(row, random_case(seed, scale=0.2), gspo.objective(row, **kw), ref=True, **kw)


@pytest.mark.parametrize("row", [row for row in ROWS if row not in ("ppo_clip", "maxrl")])
def test_kl_in_the_reward_adds_nothing_to_the_loss(row):
    case = random_case(0, scale=0.2)
    assert_matches(row, case, gspo.objective(row, kl=0.3, kl_estimator="k1", kl_in="reward"), ref=True, kl=0.0)


def test_default_kl():
    """grpo: 0.04 k3 in the loss. reinforce_pp: 0.001 k1 in the reward. The others: none, even with a reference."""
    case = random_case(3, scale=0.2)
    for row in ROWS:
        with_ref, _ = evaluate(row, case, ref=True)
        without, _ = evaluate(bare(row), case, row=row)
        if row == "grpo":
            k3 = oracle.sequence_mean_of_token_mean([oracle.kl_values(q, "k3") for q in oracle.sequences(case)])
            assert (with_ref.loss - without.loss).item() == pytest.approx(0.04 * k3.item(), rel=1e-9)
        else:
            assert with_ref.loss.item() == pytest.approx(without.loss.item(), rel=1e-12), row


@pytest.mark.parametrize("row", ROWS)
def test_entropy_bonus(row):
    case = random_case(0, scale=0.2)
    objective = gspo.objective(row, entropy=0.1, **({"kl": 0.0} if row in ("grpo", "reinforce_pp") else {}))
    entropy = case.entropy.clone().requires_grad_(True)
    selected = {"selected": case.selected} if row in COV_ROWS else {}
    inputs = (case.logp, case.logp_old, case.advantage, case.mask)
    out = gspo.policy_loss(objective, *inputs, entropy=entropy, **selected)
    want = oracle.loss(row, case.replace(logp_ref=None, logp_sampler=None), entropy=0.1, kl=0.0)
    assert out.loss.item() == pytest.approx(want.item(), rel=1e-10)
    (grad,) = torch.autograd.grad(out.loss, entropy)
    torch.testing.assert_close(grad, -0.1 * oracle.token_weights(row, case.mask), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("sampler", [False, True])
def test_off_policy_mask(row, sampler):
    kept = dropped = 0
    for seed in range(4):
        case = random_case(seed, scale=0.1, empty=False)
        objective = bare(row, off_policy_mask=0.02)
        assert_matches(row, case, objective, sampler=sampler, off_policy_mask=0.02, kl=0.0)
        mu = case.logp_sampler if sampler else case.logp_old
        drift = ((mu - case.logp) * case.mask).sum(1) / case.mask.sum(1)
        dropped += int(((case.advantage < 0) & (drift > 0.02)).sum())
        kept += int(((case.advantage > 0) & (drift > 0.02)).sum()) * int(((case.advantage < 0) & (drift <= 0.02)).sum())
    assert kept
    assert dropped


MISMATCH = [
    {"mismatch": "token_tis"},
    {"mismatch": "token_tis", "mismatch_high": 1.03},
    {"mismatch": "icepop"},
    {"mismatch": "icepop", "mismatch_low": 0.97, "mismatch_high": 1.05},
    {"mismatch": "sequence_mask"},
    {"mismatch": "sequence_mask", "mismatch_low": 0.98, "mismatch_high": 1.01},
    {"mismatch": "sequence_tis"},
    {"mismatch": "sequence_tis", "mismatch_high": 1.02},
]


@pytest.mark.parametrize("row", [row for row in ROWS if row not in OWN_SAMPLER_ROWS])
@pytest.mark.parametrize("kw", MISMATCH, ids=str)
def test_mismatch_correction(row, kw):
    """At the sequence level each token's weight multiplies that token's part of the gradient
    (`oracle.weighted_mean`)."""
    for seed in range(3):
        case = random_case(seed, scale=0.1)
        if len(kw) == 1:  # widen the gap, so that the default bounds act
            factor = {"token_tis": 15, "icepop": 30, "sequence_mask": 0.03, "sequence_tis": 8}[kw["mismatch"]]
            case = case.replace(logp_sampler=case.logp_old + factor * (case.logp_sampler - case.logp_old))
        assert_matches(row, case, bare(row, **kw), sampler=True, kl=0.0, **kw)


@pytest.mark.parametrize("row", OWN_SAMPLER_ROWS)
def test_objectives_that_divide_by_the_sampler(row):
    for seed in range(4):
        case = random_case(seed, scale=0.2)
        with_sampler, _ = assert_matches(row, case, row, sampler=True)
        without, _ = assert_matches(row, case, row)
        # Weights of 1 / 3000 per token make the losses of the objectives with a constant length small.
        assert abs((with_sampler.loss - without.loss).item()) > (1e-8 if row in cases.CONSTANT_LENGTH_ROWS else 1e-5)


@pytest.mark.parametrize("row", ROWS)
def test_all_options_at_once(row):
    kw = {"kl": 0.2, "kl_estimator": "k2", "entropy": 0.05, "off_policy_mask": 0.02}
    if row not in OWN_SAMPLER_ROWS:
        kw |= {"mismatch": "sequence_tis", "mismatch_high": 1.02}
    if row == "reinforce_pp":
        kw |= {"kl_in": "loss"}
    if row in HARD_CLIP_ROWS:
        kw |= {"dual_clip": 2.05 if row == "clip_cov" else 1.3}
    for seed in range(3):
        case = random_case(seed, scale=0.1)
        assert_matches(row, case, gspo.objective(row, **kw), sampler=True, ref=True, with_entropy=True, **kw)


@pytest.mark.parametrize("row", ROWS)
def test_token_weights(row):
    mask = random_case(2).mask
    weights = gspo.token_weights(row, mask)
    assert weights.shape == mask.shape
    assert (weights[~mask] == 0).all()
    torch.testing.assert_close(weights.double(), oracle.token_weights(row, mask), rtol=1e-6, atol=1e-12)


def test_token_weights_of_dr_grpo_follow_max_length():
    mask = random_case(2).mask
    weights = gspo.token_weights(gspo.objective("dr_grpo", max_length=50), mask)
    torch.testing.assert_close(
        weights.double(), oracle.token_weights("dr_grpo", mask, max_length=50), rtol=1e-6, atol=0
    )


# --- group advantages -------------------------------------------------------------------------------------------------

REWARDS = [1.0, 0.0, 0.25, 1.0, 0.0, 0.5, 1.0, 1.0, 0.0, 0.7, 0.7, 0.3]
GROUPS = ["a", "b", "a", "b", "a", "b", "c", "c", "b", "d", "a", "d"]


@pytest.mark.parametrize("row", [row for row in ROWS if row != "ppo_clip"])
def test_group_advantage(row):
    want = oracle.group_advantage(row, REWARDS, GROUPS)
    for rewards in (REWARDS, torch.tensor(REWARDS), torch.tensor(REWARDS, dtype=torch.float64)):
        got = gspo.group_advantage(row, rewards, GROUPS)
        assert got.is_floating_point()
        assert got.shape == (12,)
        assert got.tolist() == pytest.approx(want, rel=1e-5, abs=1e-7)
    assert gspo.group_advantage(gspo.objective(row), REWARDS, GROUPS).tolist() == pytest.approx(
        want, rel=1e-5, abs=1e-7
    )


@pytest.mark.parametrize("row", [row for row in ROWS if row != "ppo_clip"])
def test_group_advantage_with_unscored_samples(row):
    rewards = [None if i in (3, 7) else float("nan") if i == 2 else r for i, r in enumerate(REWARDS)]
    if row == "reinforce_pp":  # the paper does not say if a single scored completion of a group is in the batch mean
        rewards[7] = 1.0
    want = oracle.group_advantage(row, rewards, GROUPS)
    got = gspo.group_advantage(row, rewards, GROUPS)
    assert got.tolist() == pytest.approx(want, rel=1e-5, abs=1e-7)
    for i in (2, 3):
        assert got[i] == 0


def test_ppo_clip_takes_its_advantages_from_outside():
    with pytest.raises(ValueError, match="advantage"):
        gspo.group_advantage("ppo_clip", [1.0, 0.0], [0, 0])


# --- the two covariance objectives ------------------------------------------------------------------------------------


def cov_case(seed, B=8, T=40):
    case = random_case(seed, B=B, T=T, scale=0.3)
    return case.replace(advantage=case.advantage * 2)


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.1, 0.33, 1.0])
def test_kl_cov_selects_the_top_fraction_of_the_whole_step(fraction):
    for seed in range(3):
        case = cov_case(seed)
        objective = gspo.objective("kl_cov", select_fraction=fraction)
        got = gspo.select_tokens(objective, case.logp, case.logp_old, case.advantage, case.mask)
        assert got.dtype == torch.bool
        assert not got[~case.mask].any()
        count = int(fraction * int(case.mask.sum()))
        assert int(got.sum()) == count
        cov = oracle.covariance(case)
        rest = case.mask & ~got
        if count and rest.any():
            assert cov[got].min() >= cov[rest].max()


def test_clip_cov_selects_among_the_unclipped_tokens_in_the_band():
    for seed in range(5):
        case = cov_case(seed)
        kw = {"select_fraction": 0.05, "cov_low": 0.1, "cov_high": 2.0, "clip_low": 0.1, "clip_high": 0.15}
        objective = gspo.objective("clip_cov", **kw)
        got = gspo.select_tokens(objective, case.logp, case.logp_old, case.advantage, case.mask, seed=seed)
        cov, A = oracle.covariance(case), case.advantage[:, None]
        r = (case.logp - case.logp_old).exp()
        clipped = ((A > 0) & (r > 1.15)) | ((A < 0) & (r < 0.9))
        in_band = case.mask & (cov >= 0.1) & (cov <= 2.0)
        candidates = in_band & ~clipped
        assert (in_band & clipped).any()
        assert not (got & ~candidates).any()
        assert int(got.sum()) == min(int(0.05 * int(case.mask.sum())), int(candidates.sum()))


def test_clip_cov_takes_all_candidates_when_they_are_few():
    case = cov_case(0)
    objective = gspo.objective("clip_cov", select_fraction=1.0, cov_low=0.1, cov_high=2.0)
    got = gspo.select_tokens(objective, case.logp, case.logp_old, case.advantage, case.mask)
    cov, A, r = oracle.covariance(case), case.advantage[:, None], (case.logp - case.logp_old).exp()
    clipped = ((A > 0) & (r > 2)) | ((A < 0) & (r < 0))
    assert torch.equal(got, case.mask & (cov >= 0.1) & (cov <= 2.0) & ~clipped)


def test_clip_cov_selection_is_seeded_and_random():
    case = cov_case(1)
    objective = gspo.objective("clip_cov", select_fraction=0.05, cov_low=0.0, cov_high=10.0)

    def select(seed):
        return gspo.select_tokens(objective, case.logp, case.logp_old, case.advantage, case.mask, seed=seed)

    assert torch.equal(select(3), select(3))
    candidates = case.mask & (oracle.covariance(case) >= 0)
    counts = sum(select(seed).double() for seed in range(300))[candidates]
    assert counts.min() > 0, "some candidate is never selected"
    assert counts.max() < 3.5 * counts.mean(), "the selection is not uniform"


@pytest.mark.parametrize("row", COV_ROWS)
def test_default_selection_is_the_published_one(row):
    case = cov_case(2, B=40, T=400)
    case = case.replace(advantage=case.advantage * 2)
    n = int(case.mask.sum())
    got = gspo.select_tokens(row, case.logp, case.logp_old, case.advantage, case.mask)
    assert int(got.sum()) == int({"clip_cov": 2e-4, "kl_cov": 2e-3}[row] * n) > 0
    if row == "clip_cov":
        many = gspo.select_tokens(
            gspo.objective("clip_cov", select_fraction=1.0), case.logp, case.logp_old, case.advantage, case.mask
        )
        cov = oracle.covariance(case)[many]
        assert 1 <= cov.min() < 1.1
        assert 4.9 < cov.max() <= 5


def test_kl_cov_selects_without_selected_when_the_whole_step_is_one_batch():
    case = cov_case(0)
    objective = gspo.objective("kl_cov", select_fraction=0.1)
    selected = gspo.select_tokens(objective, case.logp, case.logp_old, case.advantage, case.mask)
    out, grad = evaluate(objective, case, row="kl_cov", selected=False)
    want, want_grad = oracle.loss_and_grad("kl_cov", case.replace(selected=selected))
    assert out.loss.item() == pytest.approx(want.item(), rel=1e-10)
    torch.testing.assert_close(grad, want_grad, rtol=1e-10, atol=1e-14)


def test_clip_cov_selects_without_selected_when_the_whole_step_is_one_batch():
    case = cov_case(0)
    case = case.replace(advantage=torch.where(case.advantage == 0, 0.5, case.advantage))
    objective = gspo.objective("clip_cov", select_fraction=0.1, cov_low=0.0, cov_high=10.0)
    _, grad = evaluate(objective, case, row="clip_cov", selected=False)
    silent = case.mask & (grad == 0)
    unclipped = oracle.loss_and_grad("clip_cov", case.replace(selected=torch.zeros_like(case.mask)))[1] != 0
    assert int((silent & unclipped).sum()) == int(0.1 * int(case.mask.sum()))


@pytest.mark.parametrize("row", [row for row in ROWS if row not in COV_ROWS])
def test_other_objectives_select_nothing(row):
    case = random_case(0)
    with pytest.raises(ValueError, match=row):
        gspo.select_tokens(row, case.logp, case.logp_old, case.advantage, case.mask)
