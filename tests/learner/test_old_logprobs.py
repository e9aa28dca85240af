"""Old log-probs: recomputed by the learner, or those of the engine if they are close enough."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo.clock import Clock
from gspo.config import Config
from gspo.errors import ConfigError, MismatchError
from gspo.record.metrics import mismatch, step_metrics
from gspo.record.run_dir import read_jsonl
from gspo.reduction import combined
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.gather import RolloutState
from gspo.step import collect, learn
from gspo.trainer import resume, train

SAMPLER = "learner.old_logp=sampler"
INTERPOLATE = "learner.old_logp=interpolate"


def add_noise(monkeypatch: pytest.MonkeyPatch, amount: float) -> None:
    """Add pseudo-random noise of up to `amount` to the engine's log-probs."""
    generate = LocalEngine.generate

    def generate_with_noise(self: Any, prompts: Any, options: Any) -> Any:
        return [
            [
                dataclasses.replace(
                    c,
                    logp_sampler=tuple(
                        v + amount * math.sin(12.9898 * i + 78.233 * t)
                        for i, (v, t) in enumerate(zip(c.logp_sampler, c.token_ids, strict=True))
                    ),
                )
                for c in group
            ]
            for group in generate(self, prompts, options)
        ]

    monkeypatch.setattr(LocalEngine, "generate", generate_with_noise)


def test_the_engines_log_probs_are_the_old_log_probs(tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny(SAMPLER))
    groups = collect(parts, RolloutState(), clock=Clock()).rollouts.groups
    result = learn(parts, groups, step=1)
    assert result is not None
    reported = [v for c in result.samples for v in c.completion.logp_sampler]
    assert torch.equal(result.tokens.logp_old_N, torch.tensor(reported))
    assert 0 < len(result.log_rho_M) < len(reported), "only one mini-batch is compared"
    assert len(result.log_rho_M) == len(result.entropy_M)
    assert result.log_rho_M.abs().max() < 1e-4


def test_with_an_exact_engine_both_sources_train_equally(
    tiny: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    for name, overrides in (("a", ()), ("b", (SAMPLER,))):
        train(tiny(*overrides, run_dir=name), display)
    ours, theirs = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("a", "b"))
    for key in ("reward/mean", "loss/policy", "grad/norm", "ratio/sequence_log_std"):
        assert [r[key] for r in ours[1:]] == pytest.approx([r[key] for r in theirs[1:]], rel=2e-2, abs=1e-5), key


@pytest.mark.parametrize(("objective", "amount"), [("gspo", 0.05), ("dapo", 0.6)])
def test_noise_beyond_the_clip_range_is_refused_before_training_on_it(
    objective: str, amount: float, tiny: Callable[..., Config], parts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_noise(monkeypatch, amount)
    parts = parts_of(tiny(SAMPLER, f"objective.name={objective}"))
    before = [p.clone() for p in parts.policy.model.parameters()]
    groups = collect(parts, RolloutState(), clock=Clock()).rollouts.sampled
    with pytest.raises(MismatchError, match=r"old_logp.*recompute"):
        learn(parts, groups, step=1)
    assert all(torch.equal(a, b) for a, b in zip(before, parts.policy.model.parameters(), strict=True))


def test_noise_within_the_clip_range_is_accepted(
    tiny: Callable[..., Config], parts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same noise exceeds GSPO's clip range, but not DAPO's of 0.2."""
    add_noise(monkeypatch, 0.05)
    parts = parts_of(tiny(SAMPLER, "objective.name=dapo"))
    groups = collect(parts, RolloutState(), clock=Clock()).rollouts.sampled
    assert learn(parts, groups, step=1) is not None


def test_a_refused_run_resumes_with_recomputed_log_probs(
    tiny: Callable[..., Config], display: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        add_noise(patched, 0.05)
        with pytest.raises(MismatchError, match="The run is saved"):
            train(tiny(SAMPLER), display)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('old_logp = "sampler"', 'old_logp = "recompute"'))
    assert resume(tmp_path / "run", display).step == 3


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((SAMPLER, "learner.mini_batches=1"), "saves nothing"),
        ((SAMPLER, "objective.mismatch=token_tis"), "mismatch: token_tis has no effect"),
        ((SAMPLER, "objective.name=vespo", "objective.denominator=sampler"), 'denominator: "sampler" has no effect'),
        ((SAMPLER, "model.build=tiny_moe", "routing.replay=old"), 'replay = "sampler"'),
        ((SAMPLER, "model.build=tiny_moe", "routing.balance_loss=0.01"), "balance_loss = 0"),
        (("learner.allow_mismatch=true",), 'has no effect with learner.old_logp = "recompute"'),
        (("learner.old_logp=interpolate",), "differ only with rollout.max_lag"),
        ((INTERPOLATE, "rollout.max_lag=1", "learner.mini_batches=1"), "saves nothing"),
        ((INTERPOLATE, "rollout.max_lag=1", "learner.allow_mismatch=true"), "allow_mismatch: has no effect"),
        ((INTERPOLATE, "rollout.max_lag=1", "objective.name=clip_cov"), "needs old log-probs before the first update"),
        ((INTERPOLATE, "rollout.max_lag=1", "model.build=tiny_moe"), "routing.record = false"),
    ],
)
def test_incompatible_settings_are_refused(
    overrides: tuple[str, ...], words: str, tiny: Callable[..., Config], display: Any
) -> None:
    with pytest.raises(ConfigError, match=words):
        train(tiny(*overrides), display)


@pytest.mark.parametrize(
    "routing", [(), ("routing.record=false",), ("routing.replay=sampler",)], ids=["record", "no record", "R3"]
)
def test_an_moe_model_can_use_sampler_log_probs(
    routing: tuple[str, ...], tiny: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    assert train(tiny(SAMPLER, "model.build=tiny_moe", *routing), display).step == 3
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")[1:]
    recorded = "routing/flip_fraction" in rows[0]
    assert recorded is (routing != ("routing.record=false",))
    if routing == ("routing.replay=sampler",):
        assert [r["routing/flip_fraction"] for r in rows] == [0, 0, 0], "the engine's experts are replayed"
        assert any(r["routing/flip_fraction_native"] for r in rows)
    assert all(r["mismatch/k3"] < 1e-3 for r in rows)


def test_with_an_exact_engine_flips_are_counted_against_the_engines_experts(
    tiny: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    """In float32 the engine routes as the learner does, so both sources count the same flips."""
    for name, overrides in (("a", ()), ("b", (SAMPLER,))):
        train(tiny("model.build=tiny_moe", "steps=1", *overrides, run_dir=name), display)
    ours, theirs = (read_jsonl(tmp_path / name / "metrics.jsonl")[1] for name in ("a", "b"))
    assert ours["routing/flip_fraction"] > 0
    for key in ("routing/flip_fraction", "routing/flip_fraction_first", "routing/flip_fraction_sampler"):
        assert theirs[key] == pytest.approx(ours[key], abs=2e-3), key


@pytest.mark.parametrize("objective", ["gspo", "vespo"])
def test_noise_beyond_the_clip_range_is_trained_on_with_a_warning_if_allowed(
    objective: str, tiny: Callable[..., Config], display: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise of a product grows with its tokens, so VESPO needs less of it per token."""
    add_noise(monkeypatch, 0.3)
    noisy = (SAMPLER, f"objective.name={objective}")
    with pytest.raises(MismatchError, match="allow_mismatch"):
        train(tiny(*noisy), display)
    train(tiny(*noisy, "learner.allow_mismatch=true", run_dir="allowed"), display)
    events = read_jsonl(tmp_path / "allowed" / "events.jsonl")
    warnings = [e["message"] for e in events if e["event"] == "warning" and "old_logp" in e["message"]]
    assert len(warnings) == 1, "once per process"
    rows = read_jsonl(tmp_path / "allowed" / "metrics.jsonl")[1:]
    if objective == "gspo":
        assert all(r["noise/log_ratio"] > 1e-2 for r in rows)
        assert all(r["noise/beyond_clip"] > 0.5 for r in rows)


def test_a_refused_run_resumes_with_the_override(
    tiny: Callable[..., Config], display: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_noise(monkeypatch, 0.05)
    with pytest.raises(MismatchError, match="The run is saved"):
        train(tiny(SAMPLER), display)
    assert resume(tmp_path / "run", display, overrides=["learner.allow_mismatch=true"]).step == 3


@pytest.mark.parametrize("objective", ["dppo_tv", "dppo_kl", "trm"])
def test_objectives_to_the_sampler_need_no_old_forward(
    objective: str, tiny: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    """They never read the recomputed log-probs, so both sources train alike."""
    for name, overrides in (("a", ()), ("b", (SAMPLER,))):
        train(tiny(f"objective.name={objective}", *overrides, run_dir=name), display)
    ours, theirs = (read_jsonl(tmp_path / name / "metrics.jsonl")[1:] for name in ("a", "b"))
    for key in ("reward/mean", "loss/policy", "ratio/mean", "clip/fraction_tokens"):
        assert [r[key] for r in ours] == pytest.approx([r[key] for r in theirs], rel=1e-5, abs=1e-8), key


def test_mismatch_metrics_match_values_computed_by_hand() -> None:
    """Two tokens: rho = 1 and rho = 4."""
    found = combined([mismatch(torch.tensor([0.0, math.log(4)]))])
    assert found == pytest.approx(
        {
            "mismatch/abs_mean": math.log(4) / 2,
            "mismatch/abs_max": math.log(4),
            "mismatch/k1": -math.log(4) / 2,
            "mismatch/k3": (3 - math.log(4)) / 2,
            "mismatch/chi2": 15 / 2,
            "mismatch/ess": 2.5**2 / 8.5,
            "mismatch/extreme_fraction": 0.5,
        }
    )


def test_every_step_has_mismatch_metrics(tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny())
    collected = collect(parts, RolloutState(), clock=Clock())
    learned = learn(parts, collected.rollouts.groups, step=1)
    found = combined([step_metrics(parts.objective, collected, learned)])
    assert found["mismatch/abs_max"] < 1e-4
    assert found["mismatch/ess"] == pytest.approx(1, abs=1e-6)
    assert found["mismatch/extreme_fraction"] == 0


def older_batch(parts: Any) -> tuple[Any, Any]:
    """The results of training on two batches that the first weights sampled: the second one is two updates old."""
    first = collect(parts, RolloutState(), clock=Clock())
    second = collect(parts, first.after, clock=Clock())
    results = [learn(parts, c.rollouts.groups, step=step) for step, c in enumerate((first, second), start=1)]
    assert results[0] is not None
    assert results[1] is not None
    return results[0], results[1]


def test_interpolated_log_probs_lie_between_the_policies_by_their_versions(
    tiny: Callable[..., Config], parts_of: Any
) -> None:
    settings = ("rollout.max_lag=1", "learner.learning_rate=1e-2", "objective.name=grpo", "objective.kl=0")
    exact, _ = older_batch(parts_of(tiny(*settings, run_dir="exact")))
    fresh, old = older_batch(parts_of(tiny(*settings, INTERPOLATE, run_dir="interpolated")))
    # Not older than the current weights: the sampler's own log-probs, except in the first update, which is exact.
    difference_N = (fresh.tokens.logp_old_N - exact.tokens.logp_old_N).abs()
    assert difference_N.max() < 1e-4
    sampler_N, current_N = old.tokens.logp_sampler_N, old.tokens.logp_N
    moved_N = (current_N - sampler_N).abs() > 1e-3
    share_N = ((old.tokens.logp_old_N - sampler_N) / (current_N - sampler_N))[moved_N]
    # Two updates old. In the first update, pi_old is the current policy. One update later, two thirds of the way.
    assert len(share_N) > 20
    is_first_N, is_second_N = (share_N - 1).abs() < 1e-3, (share_N - 2 / 3).abs() < 1e-3
    assert is_first_N.any()
    assert is_second_N.any()
    assert (is_first_N | is_second_N).all()
    assert len(old.log_rho_M) < len(sampler_N), (
        "no forward of its own: only the first update's tokens are known exactly"
    )


def test_older_weights_are_no_noise_of_the_engine(tiny: Callable[..., Config], parts_of: Any) -> None:
    """Ratios that start from the sampler contain what training has changed since. That is no reason to stop."""
    fresh, old = older_batch(parts_of(tiny(SAMPLER, "rollout.max_lag=1", "learner.learning_rate=1e-2")))
    assert fresh.noise is not None
    assert old.noise is None
    assert old.excess == ""
    assert old.log_rho_M.abs().max() > 1e-3
