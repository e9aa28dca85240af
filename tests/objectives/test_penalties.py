"""KL estimators, KL and entropy in the loss, and the soft overlong penalty."""

import oracle
import pytest
import torch
from cases import (
    evaluate,
    f64,
    random_case,
)

import gspo

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


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
def test_gradient_is_that_of_the_reverse_kl(estimator):
    torch.testing.assert_close(kl_gradient(estimator)[0], exact_gradient(True)[0], rtol=1e-10, atol=1e-14)


def test_plain_k3_has_the_gradient_of_the_forward_kl():
    grad = kl_gradient("k3")[0]
    torch.testing.assert_close(grad, exact_gradient(False)[0], rtol=1e-10, atol=1e-14)
    assert (grad - exact_gradient(True)[0]).abs().max() > 0.05


def test_k1_in_the_loss_regularizes_nothing():
    assert kl_gradient("k1")[0].abs().max() < 1e-12


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3+", "k3_ratio"])
def test_value_is_unbiased(estimator):
    assert kl_gradient(estimator)[1] == pytest.approx(exact_gradient(True)[1], rel=1e-10)


def test_k3_ratio_stays_right_off_policy():
    """Samples from pi_old, another pi: the ratio-corrected value and gradient are still those of KL(pi || ref)."""
    policy = (4, 1, 2, 3)
    grad, value = kl_gradient("k3_ratio", policy=policy)
    want, exact = exact_gradient(True, policy=policy)
    assert value == pytest.approx(exact, rel=1e-10)
    torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-14)
    assert (kl_gradient("k2", policy=policy)[0] - want).abs().max() > 0.01


@pytest.mark.parametrize("row", ["gspo", "luspo", "gmpo", "vespo"])
def test_k3_ratio_uses_the_token_ratio_in_sequence_rows(row):
    """TRL multiplies by s_i at sequence level, which is not the token's ratio."""
    case = random_case(1, scale=0.3).replace(advantage=torch.zeros(6, dtype=torch.float64))
    out, _ = evaluate(gspo.objective(row, kl=1.0, kl_estimator="k3_ratio"), case, row=row, ref=True)
    k3 = (case.logp_ref - case.logp).exp() - 1 - (case.logp_ref - case.logp)
    want = (oracle.token_weights(row, case.mask) * (case.logp - case.logp_old).exp() * k3).sum()
    assert out.loss.item() == pytest.approx(want.item(), rel=1e-10)


def test_k1_in_the_reward_is_k2_in_the_loss():
    actions = torch.tensor([a for a, n in enumerate(COUNTS) for _ in range(n)])
    logits = f64(*COUNTS).log().requires_grad_(True)
    logp, ref = logits.log_softmax(0)[actions][:, None], f64(*REFERENCE).log()[actions][:, None]
    k1 = (logp - ref).detach().squeeze(1)
    out = gspo.policy_loss("gpg", logp, logp.detach(), -k1, torch.ones(10, 1, dtype=torch.bool))
    (grad,) = torch.autograd.grad(out.loss, logits)
    torch.testing.assert_close(grad, kl_gradient("k2")[0], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (20481, -1.0), (10**6, -1.0)],
)
def test_soft_overlong(length, penalty):
    got = gspo.soft_overlong(length, 20480, 4096)
    assert isinstance(got, float)
    assert got == pytest.approx(penalty, abs=1e-12)


def test_the_overlong_penalty_has_a_floor():
    assert gspo.soft_overlong(10_000, 100, 20) == -1.0


def test_published_kl_of_reinforce_pp_and_grpo():
    """reinforce_pp's is in the reward, where policy_loss cannot show it."""
    reinforce, grpo = gspo.objective("reinforce_pp"), gspo.objective("grpo")
    assert (reinforce.kl, reinforce.kl_in) == (0.001, "reward")
    assert (grpo.kl, grpo.kl_in) == (0.04, "loss")


def test_soft_overlong_needs_a_cache():
    assert gspo.soft_overlong(9, 10, 1) == 0
    assert gspo.soft_overlong(10, 10, 1) == -1
    with pytest.raises(ValueError, match="cache"):
        gspo.soft_overlong(5, 10, 0)
    with pytest.raises(ValueError, match="cache"):
        gspo.soft_overlong(5, 10, 11)
