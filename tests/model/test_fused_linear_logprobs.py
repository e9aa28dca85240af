"""Fused linear log-probs: the same values and gradients as plain logits, and no work for rows without gradient."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from families import BASE, FAMILIES
from interpreted import CUDA, INTERPRETED, run_interpreted
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from gspo.config import LearnerConfig
from gspo.learner import forward as logprobs
from gspo.learner.optimizer import Optimizer
from gspo.learner.plan import make_plan
from gspo.model.kernels import fused_linear_logprobs as fused
from gspo.model.kernels.fused_linear_logprobs import fused_linear_logprobs
from gspo.model.lm_head import lm_head, obstacle_to_head
from gspo.model.micro_batch import ExcludedTokens, TokenSequence

DEVICE = torch.device("cuda" if CUDA else "cpu")


def plain(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = ((hidden @ weight.T) / temperature).log_softmax(-1)
    return logp.gather(-1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def case(rows: int, size: int, vocabulary: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, size, generator=generator, dtype=torch.float64)
    weight = 0.5 * torch.randn(vocabulary, size, generator=generator, dtype=torch.float64)
    target = torch.randint(vocabulary, (rows,), generator=generator)
    return hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), target.to(DEVICE)


def run(head: Any, hidden: Tensor, weight: Tensor, target: Tensor, gains: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Values and gradients of a weighted sum of log-probs and entropies."""
    hidden, weight = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    logp, entropy = head(hidden, weight, target, 0.7)
    (gains[0].to(logp.dtype) * logp + gains[1].to(logp.dtype) * entropy).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return logp.detach(), entropy.detach(), hidden.grad, weight.grad


def gains_of(rows: int, idle: float = 0.3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    some = (torch.rand(rows, generator=generator) >= idle).double()
    made = torch.randn(2, rows, generator=generator, dtype=torch.float64) * some
    return made[0].to(DEVICE), made[1].to(DEVICE)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("held", [1, 400, 10**9], ids=["chunks of 256", "chunks of 512", "one chunk"])
@pytest.mark.parametrize("idle", [0.0, 0.3, 1.0])
def test_values_and_gradients_match_plain_logits(held: int, idle: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HELD", "HELD_CPU"):
        monkeypatch.setattr(fused, name, held if held != 400 else 37 * 512)
    hidden, weight, target = case(37, 24, 1001, torch.float64)
    gains = gains_of(37, idle)
    for found, expected in zip(
        run(fused_linear_logprobs, hidden, weight, target, gains),
        run(plain, hidden, weight, target, gains),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


EXCLUDED = ExcludedTokens(rows=torch.tensor([0, 2, 3, 17, 36]), ids=torch.tensor([0, 255, 256, 1000]))


def excluding(excluded: ExcludedTokens) -> tuple[Any, Any]:
    """The fused and the plain computation with excluded tokens."""

    def masked(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = (hidden @ weight.T) / temperature
        mask = torch.zeros_like(logits, dtype=torch.bool)
        mask[excluded.rows.to(DEVICE)[:, None], excluded.ids.to(DEVICE)] = True
        logp = logits.masked_fill(mask, -torch.inf).log_softmax(-1)
        return logp.gather(-1, target[:, None])[:, 0], -(logp.exp() * logp.masked_fill(mask, 0)).sum(-1)

    return partial(fused_linear_logprobs, excluded=excluded.to(DEVICE)), masked


@pytest.mark.parametrize("held", [1, 10**9], ids=["chunks of 256", "one chunk"])
@pytest.mark.parametrize("idle", [0.0, 0.3, 1.0])
def test_excluded_tokens_have_no_probability_and_no_gradient(
    held: int, idle: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HELD", "HELD_CPU"):
        monkeypatch.setattr(fused, name, held)
    hidden, weight, target = case(37, 24, 1001, torch.float64)
    target = target.clamp(1, 254)  # an excluded token is never sampled
    gains = gains_of(37, idle)
    ours, theirs = (run(head, hidden, weight, target, gains) for head in excluding(EXCLUDED))
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(ours[0], run(fused_linear_logprobs, hidden, weight, target, gains)[0])


def test_excluding_a_token_that_is_almost_certain_keeps_precision() -> None:
    """A model that wants to end at once. The share of all other tokens is below float32's epsilon."""
    hidden, weight, target = case(37, 24, 1001, torch.float32)
    weight[0] = 40 * hidden[17] / hidden[17].square().sum()
    target = target.clamp(1, 254)
    gains = gains_of(37, 0.0)
    ours, masked = excluding(EXCLUDED)
    exact = run(masked, hidden.double(), weight.double(), target, gains)
    found = run(ours, hidden, weight, target, gains)
    assert run(plain, hidden.double(), weight.double(), target, gains)[0][17] < -40
    for value, expected in zip(found, exact, strict=True):
        assert distance(value, expected) < 1e-5


def test_large_logits_neither_overflow_nor_vanish() -> None:
    hidden, weight, target = case(9, 24, 300, torch.float64)
    gains = gains_of(9, 0.0)
    for found, expected in zip(
        run(fused_linear_logprobs, 300 * hidden, weight, target, gains),
        run(plain, 300 * hidden, weight, target, gains),
        strict=True,
    ):
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_no_larger_than_with_plain_logits(dtype: torch.dtype) -> None:
    hidden, weight, target = case(64, 64, 2000, dtype)
    gains = gains_of(64)
    exact = run(plain, hidden.double(), weight.double(), target, gains)
    ours = [
        distance(a, b) for a, b in zip(run(fused_linear_logprobs, hidden, weight, target, gains), exact, strict=True)
    ]
    theirs = [distance(a, b) for a, b in zip(run(plain, hidden, weight, target, gains), exact, strict=True)]
    for our, their in zip(ours, theirs, strict=True):
        assert our <= 1.1 * their + 1e-6
    assert max(ours[:2]) < 1e-5, "values have float32 precision"


@pytest.mark.parametrize("idle", [0.5, 1.0])
def test_rows_without_gradient_are_skipped_in_the_backward(idle: float, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, target = case(40, 24, 300, torch.float32)
    gains = gains_of(40, idle)
    seen: list[int] = []
    original = fused.TorchKernels.logit_gradient
    monkeypatch.setattr(
        fused.TorchKernels, "logit_gradient", lambda h, *rest: (seen.append(len(h)), original(h, *rest))
    )
    gradient = run(fused_linear_logprobs, hidden, weight, target, gains)[2]
    busy = (gains[0] != 0) | (gains[1] != 0)
    assert seen == ([int(busy.sum())] if busy.any() else [])
    assert (gradient[~busy] == 0).all()


def test_the_weight_gradient_accumulates_in_float32() -> None:
    """One large micro-batch, then many whose gradients bfloat16 would round away."""
    hidden, weight, target = case(8, 24, 300, torch.bfloat16)
    exact = torch.zeros_like(weight, dtype=torch.float64)
    buffer = torch.zeros_like(weight, dtype=torch.float32)
    rounded = torch.zeros_like(weight)
    weight.requires_grad_()
    for size in [1.0] + [1e-3] * 30:
        gains = (torch.full((8,), size, device=DEVICE), torch.zeros(8, device=DEVICE))
        gradient = run(plain, hidden.double(), weight.double(), target, gains)[3]
        exact += gradient
        rounded = rounded + gradient.bfloat16()
        logp, _ = fused_linear_logprobs(hidden, weight, target, 0.7, weight_gradient=buffer)
        (gains[0] * logp).sum().backward()
    assert weight.grad is None
    assert distance(buffer, exact) < 5e-3
    assert distance(rounded, exact) > distance(buffer, exact)


# --- In a model ---


ROWS = [
    TokenSequence(prompt_ids=(5, 6, 7), completion_ids=(8, 9, 1)),
    TokenSequence(prompt_ids=(4,), completion_ids=(3, 2, 9, 7, 6)),
]


def built(kind: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**BASE, **fields})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3", "gpt-oss", "mixtral"])
def test_a_model_matches_its_plain_logits(name: str, tied: bool) -> None:
    model = FAMILIES[name].model(torch.float64, tie_word_embeddings=tied)
    micro = make_plan(ROWS, [0, 1], mini_batches=1, token_budget=99, pad_id=0, seed="").updates[0][0]
    assert lm_head(model) is not None
    found = []
    for function in (
        logprobs.completion_logprobs,
        lambda m, b, t, entropy_gradient: logprobs._from_logits(m, b, t, True),
    ):
        logp_N, entropy_N = function(model, micro, 0.7, entropy_gradient=True)
        (logp_N.sum() + 0.3 * entropy_N.sum()).backward()
        found.append(
            (
                logp_N.detach(),
                entropy_N.detach(),
                torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]),
            )
        )
        model.zero_grad()
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # plain logits round to float32


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        ("gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8}, "changes its logits after"),
        ("cohere", {"logit_scale": 0.5}, "changes its logits after"),
        ("granite", {"logits_scaling": 4.0}, "changes its logits after"),
        ("phi", {}, "has a bias"),
    ],
)
def test_families_that_postprocess_logits_use_plain_logits(kind: str, fields: dict[str, Any], why: str) -> None:
    model = built(kind, **fields)
    micro = make_plan(ROWS, [0, 1], mini_batches=1, token_budget=99, pad_id=0, seed="").updates[0][0]
    with pytest.warns(RuntimeWarning, match=why):
        logp_N, entropy_N = logprobs.completion_logprobs(model, micro, 0.7)
    assert why in str(obstacle_to_head(model))
    expected = (model(input_ids=micro.input_ids).logits / 0.7).log_softmax(-1).flatten(0, 1)[micro.output_N]
    torch.testing.assert_close(logp_N, expected.gather(-1, micro.target_N[:, None])[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy_N, -(expected.exp() * expected).sum(-1), rtol=1e-4, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logprobs.completion_logprobs(model, micro, 0.7)  # the warning comes once per model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_gradients_of_bfloat16_weights_are_stored_in_float32_and_applied(tied: bool) -> None:
    model = built("qwen3", head_dim=8, tie_word_embeddings=tied).bfloat16()
    exact = built("qwen3", head_dim=8, tie_word_embeddings=tied)
    exact.load_state_dict(model.state_dict())
    optimizer = Optimizer(model, LearnerConfig(learning_rate=1e-2, max_grad_norm=1e9), 10)
    rows = [TokenSequence(prompt_ids=r.prompt_ids, completion_ids=r.completion_ids) for r in ROWS * 4]
    for net in (model, exact):
        plan = make_plan(rows, range(8), mini_batches=1, token_budget=1, pad_id=0, seed="")
        for micro in plan.updates[0]:
            logprobs.completion_logprobs(net, micro, 0.7)[0].sum().backward()
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert p.grad is not None
        assert p.grad.dtype == torch.float32
        assert distance(p.grad, q.grad) < 0.05, name
    before = model.get_output_embeddings().weight.clone()
    assert optimizer.step(loss_finite=True).applied
    assert not torch.equal(before, model.get_output_embeddings().weight)
    assert all(p.grad is None for p in model.parameters())


# --- The Triton kernels: on a GPU, else in Triton's interpreter, which must be enabled before Triton is imported ---


def test_triton_kernels_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.skipif(not (CUDA or INTERPRETED), reason="run by the test above")
@pytest.mark.parametrize("idle", [0.0, 0.4])
@pytest.mark.parametrize(("rows", "size", "vocabulary"), [(70, 96, 333), (33, 64, 128), (1, 72, 1), (130, 64, 700)])
def test_on_triton(rows: int, size: int, vocabulary: int, idle: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from gspo.model.kernels import fused_linear_logprobs_triton as triton_kernels

    for name in ("HELD", "HELD_CPU"):
        monkeypatch.setattr(fused, name, 256 * rows)
    # The interpreter cannot multiply bfloat16.
    hidden, weight, target = case(rows, size, vocabulary, torch.bfloat16 if CUDA else torch.float16)
    gains = gains_of(rows, idle)
    exact = run(plain, hidden.double(), weight.double(), target, gains)
    torch_only = [
        distance(a, b) for a, b in zip(run(fused_linear_logprobs, hidden, weight, target, gains), exact, strict=True)
    ]
    monkeypatch.setattr(fused, "_kernels", lambda hidden: triton_kernels)
    found = run(fused_linear_logprobs, hidden, weight, target, gains)
    assert all(part.isfinite().all() for part in found)
    if vocabulary == 1:
        assert max(float(part.abs().max()) for part in found) < 1e-5
        return
    errors = [distance(a, b) for a, b in zip(found, exact, strict=True)]
    assert max(errors[:2]) < 1e-5, "values have float32 precision"
    assert all(ours < 2 * theirs + 1e-6 for ours, theirs in zip(errors[2:], torch_only[2:], strict=True))
