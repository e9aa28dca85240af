"""Adaptive clip range: it meets its target, logs the range it used, and refuses settings that make no sense."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gspo
from gspo.build import run_objective
from gspo.config import Config
from gspo.errors import ConfigError
from gspo.objectives.adaptive_clip import LIMITS, AdaptiveClip, at_limit, take_adaptive
from gspo.objectives.objective import Objective
from gspo.objectives.sequences import Sequences, Tokens
from gspo.objectives.table import TABLE
from gspo.record.run_dir import read_jsonl
from gspo.trainer import train

RANGED = [name for name, row in TABLE.items() if row.trust_region.clip_range is not None]
SEQUENCE_ROWS = ("gspo", "gspo_token", "gspo_turn", "luspo")
BOTH = ("clip_low", "clip_high")
STD = 0.1
"""Standard deviation of a token's log-ratio."""
LENGTH = 16
"""Tokens per completion."""


def test_objectives_with_a_clip_range_are_covered() -> None:
    assert set(RANGED) >= {"gspo", "grpo", "gmpo", "minirl", "clip_cov", "dapo"}


def tokens_of(step: int, *, count: int = 500, std: float = STD, still: float = 0.0) -> Tokens:
    """Completions whose log-ratios are noise. A fraction `still` has not moved at all, as in a first mini-batch."""
    generator = torch.Generator().manual_seed(step)
    index_N = torch.arange(count).repeat_interleave(LENGTH)
    advantage_B = torch.randn(count, generator=generator)
    move_N = std * torch.randn(count * LENGTH, generator=generator)
    move_N[index_N < still * count] = 0.0
    old_N = torch.full_like(move_N, -1.0)
    return Tokens(
        logp_N=old_N + move_N,
        logp_old_N=old_N,
        advantage_N=advantage_B[index_N],
        sequences=Sequences(index_N, count),
        selected_N=torch.zeros_like(index_N, dtype=torch.bool),
    )


def with_range(name: str, low: float, high: float) -> Objective:
    region: Any = TABLE[name].trust_region
    return replace(TABLE[name], name=name, trust_region=replace(region, clip_low=low, clip_high=high))


def share_clipped(name: str, low: float, high: float, tokens: Tokens) -> float:
    """Fraction of clipped tokens by the definition of each objective's range."""
    log_ratio_N: Tensor = (tokens.logp_N - tokens.logp_old_N).double()
    if name in SEQUENCE_ROWS:
        log_ratio_N = log_ratio_N.view(-1, LENGTH).mean(1).repeat_interleave(LENGTH)
    if name == "fspo":
        log_ratio_N = log_ratio_N.view(-1, LENGTH).sum(1).repeat_interleave(LENGTH) / LENGTH**0.5
    move_N = log_ratio_N if name in ("gmpo", "fspo") else log_ratio_N.exp() - 1
    a_N = tokens.advantage_N
    return float((((a_N > 0) & (move_N > high)) | ((a_N < 0) & (move_N < -low))).double().mean())


def typical(name: str) -> float:
    """Standard deviation of the log-ratio that the objective clips."""
    return STD / LENGTH**0.5 if name in SEQUENCE_ROWS else STD  # fspo: the sum over sqrt(LENGTH)


def followed(
    name: str, row: Objective, auto: AdaptiveClip, *, steps: int = 40, **process: Any
) -> list[tuple[float, float]]:
    """(scale, fraction clipped) of every step. The trust region itself reports the same fraction."""
    scale = 1.0
    seen = []
    for step in range(steps):
        tokens = tokens_of(step, **process)
        used = auto.scaled(row, scale)
        region: Any = used.trust_region
        share = share_clipped(name, region.clip_low, region.clip_high, tokens)
        reported = region(tokens, used.ratio(tokens)).clipped_N.double().mean()
        assert share == pytest.approx(float(reported), abs=2e-3)
        seen.append((scale, share))
        scale = auto.next_scale(row, scale, tokens)
    return seen


def late(seen: list[tuple[float, float]]) -> float:
    return sum(share for _, share in seen[-10:]) / 10


@pytest.mark.parametrize("name", RANGED)
@pytest.mark.parametrize("wrong_by", [0.01, 100.0], ids=["far too narrow", "far too wide"])
@pytest.mark.parametrize("target", [0.03, 0.15])
def test_the_target_is_met_from_a_range_that_is_far_off(name: str, wrong_by: float, target: float) -> None:
    # 3 : 4, as in the paper: one scale has to serve both sides.
    low = 0.75 * typical(name) * wrong_by
    row = with_range(name, low, low * 4 / 3)
    seen = followed(name, row, AdaptiveClip(target=target, sides=BOTH))
    assert not 0.5 * target < seen[0][1] < 2 * target
    assert late(seen) == pytest.approx(target, rel=0.2)


@pytest.mark.parametrize("name", ["grpo", "gmpo", "minirl"])
@pytest.mark.parametrize("start", [0.03, 3.0])
def test_large_moves_are_measured_in_the_space_of_the_clip_range(name: str, start: float) -> None:
    """Moves so large that r - 1 and log r differ."""
    seen = followed(name, with_range(name, start, start), AdaptiveClip(target=0.15, sides=BOTH), std=1.5)
    assert late(seen) == pytest.approx(0.15, rel=0.06)


def test_tokens_of_a_first_mini_batch_count_in_the_fraction() -> None:
    seen = followed("gspo", with_range("gspo", 3e-4, 4e-4), AdaptiveClip(target=0.1, sides=BOTH), still=0.5)
    assert late(seen) == pytest.approx(0.1, rel=0.2)


def test_the_change_per_step_is_bounded_and_no_step_overshoots() -> None:
    for wrong_by in (0.01, 100.0):
        row = with_range("grpo", 0.1 * wrong_by, 0.1 * wrong_by)
        scales = [scale for scale, _ in followed("grpo", row, AdaptiveClip(target=0.15, sides=BOTH))]
        for a, b in pairwise(scales):
            assert abs(math.log(b / a)) <= 1.0 + 1e-9
        far = [s for s in scales if abs(math.log(s * wrong_by)) > 1]
        assert len(far) > 3
        assert far == sorted(far, reverse=wrong_by > 1)


@pytest.mark.parametrize(("side", "other"), [("clip_low", "clip_high"), ("clip_high", "clip_low")])
@pytest.mark.parametrize("name", ["gspo", "grpo", "gmpo"])
def test_one_side_adapts_and_the_other_stays(name: str, side: str, other: str) -> None:
    # The fixed side clips a little on its own; the target is for both together.
    row = with_range(name, *([1.5 * typical(name)] * 2))
    fixed = getattr(row.trust_region, other)
    narrow = replace(row, trust_region=replace(row.trust_region, **{side: fixed / 100}))  # type: ignore[type-var]
    auto = AdaptiveClip(target=0.15, sides=(side,))
    assert getattr(auto.scaled(narrow, 7.0).trust_region, other) == fixed
    assert getattr(auto.scaled(narrow, 7.0).trust_region, side) == pytest.approx(7 * fixed / 100)
    seen = followed(name, narrow, auto)
    assert late(seen) == pytest.approx(0.15, rel=0.2)


def test_scaling_changes_the_range_and_nothing_else() -> None:
    row = gspo.objective("minirl", clip_low=0.1, clip_high=0.3, weight_cap=4.0, entropy=0.01)  # type: ignore[operator]
    scaled = AdaptiveClip(target=0.1, sides=BOTH).scaled(row, 2.0)
    region: Any = scaled.trust_region
    assert (region.clip_low, region.clip_high, region.weight_cap) == (0.2, 0.6, 4.0)
    assert replace(scaled, trust_region=row.trust_region) == row


@pytest.mark.parametrize("name", ["gspo", "grpo", "gmpo", "minirl"])
def test_a_step_that_cannot_meet_the_target_leaves_the_range(name: str) -> None:
    """At most half of the tokens move in the direction of their advantage, and some have not moved."""
    row = with_range(name, typical(name), typical(name))
    for target, still in ((0.7, 0.0), (0.2, 0.9)):
        for scale in (0.01, 1.0, 30.0):
            tokens = tokens_of(1, still=still)
            assert AdaptiveClip(target=target, sides=BOTH).next_scale(row, scale, tokens) == scale


def test_a_fixed_side_that_clips_too_much_drives_the_other_side_to_its_limit() -> None:
    row = with_range("grpo", 1e-6, 0.1)
    seen = followed("grpo", row, AdaptiveClip(target=0.1, sides=("clip_high",)))
    assert seen[-1][0] == LIMITS[1]
    why = at_limit(LIMITS[1])
    assert why is not None
    assert "wider" in why


def test_the_scale_stays_within_its_limits() -> None:
    auto = AdaptiveClip(target=0.1, sides=BOTH)
    seen = followed("grpo", with_range("grpo", 1e4, 1e4), auto)
    assert seen[-1][0] == LIMITS[0]
    why = at_limit(LIMITS[0])
    assert why is not None
    assert "narrower" in why
    seen = followed("grpo", with_range("grpo", 1e-9, 1e-9), auto)
    assert seen[-1][0] == LIMITS[1]
    assert at_limit(1.0) is None


def test_nan_log_probs_leave_the_range() -> None:
    # The update of a diverged step is skipped, and the step has no information about the range. NaN sorts before every
    # number, so the quantile is NaN.
    row = with_range("grpo", 0.1, 0.1)
    tokens = tokens_of(1)
    auto = AdaptiveClip(target=0.1, sides=BOTH)
    broken = replace(tokens, logp_N=torch.full_like(tokens.logp_N, math.nan))
    assert auto.next_scale(row, 1.0, broken) == 1.0


# --- Settings ---


def test_adaptive_settings_are_split_from_the_others() -> None:
    row = replace(TABLE["gspo"], name="gspo")
    auto, rest = take_adaptive(row, {"clip_low": "auto:0.15", "clip_high": "auto:0.15", "kl": 0.1})
    assert auto == AdaptiveClip(target=0.15, sides=BOTH)
    assert rest == {"kl": 0.1}
    auto, rest = take_adaptive(row, {"clip_high": "auto:.2", "clip_low": 3e-4})
    assert auto == AdaptiveClip(target=0.2, sides=("clip_high",))
    assert rest == {"clip_low": 3e-4}
    assert take_adaptive(row, {"clip_low": 0.1}) == (None, {"clip_low": 0.1})


@pytest.mark.parametrize("text", ["auto:", "auto:2", "auto:x", "auto:0", "auto:1", "auto:-0.1", "auto:nan", "auto:inf"])
def test_a_bad_share_is_refused(text: str, tiny: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"objective\.clip_low.*auto:SHARE"):
        run_objective(tiny(f"objective.clip_low={text}"))


@pytest.mark.parametrize("text", ["auto", "automatic", "0.1auto:"])
def test_other_strings_are_refused(text: str, tiny: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match="must be a number"):
        run_objective(tiny(f"objective.clip_low={text}"))


def test_two_targets_are_refused(tiny: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match="the same share"):
        run_objective(tiny("objective.clip_low=auto:0.1", "objective.clip_high=auto:0.2"))


@pytest.mark.parametrize("name", ["cispo", "sapo", "maspo", "vespo", "kl_cov", "gpg", "rloo"])
def test_an_objective_without_a_clip_range_is_refused(name: str, tiny: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=f"objective.clip_high: '{name}' has no clip range"):
        run_objective(tiny(f"objective.name={name}", "objective.clip_high=auto:0.1"))


def test_a_single_mini_batch_is_refused(tiny: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"objective\.clip_high: nothing is ever clipped"):
        run_objective(tiny("objective.clip_high=auto:0.1", "learner.mini_batches=1"))


def test_the_library_function_refuses_an_adaptive_range() -> None:
    with pytest.raises(ConfigError, match=r"clip_low must be a number.*adapts is for runs"):
        gspo.objective("gspo", clip_low="auto:0.1")  # type: ignore[operator]


# --- Runs ---


def test_a_run_logs_the_range_it_used_and_checkpoints_the_scale(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny("objective.clip_low=auto:0.1", "objective.clip_high=auto:0.1", "steps=5", "eval.every=0")
    train(config, display)
    run = Path(config.run_dir)
    rows = read_jsonl(run / "metrics.jsonl")[1:]
    scales = [json.loads((run / f"checkpoints/{step:06d}/trainer.json").read_text())["clip_scale"] for step in range(6)]
    assert scales[0] == 1.0
    assert len(set(scales)) > 3
    for row, scale in zip(rows, scales, strict=False):  # a step uses the scale of the checkpoint before it
        assert row["clip/low"] == pytest.approx(3e-4 * scale)
        assert row["clip/high"] == pytest.approx(4e-4 * scale)
    # The clipped tokens are those outside of the logged range.
    for step, row in enumerate(rows, start=1):
        samples = [r for r in read_jsonl(run / f"rollouts/{step:06d}.jsonl") if "sequence_ratio" in r]
        clipped = total = 0
        for r in samples:
            move = r["sequence_ratio"] - 1
            out = (r["advantage"] > 0 and move > row["clip/high"]) or (r["advantage"] < 0 and move < -row["clip/low"])
            clipped += out * len(r["token_ids"])
            total += len(r["token_ids"])
        assert row["clip/fraction_tokens"] == pytest.approx(clipped / total)


def test_a_fixed_range_is_logged_and_does_not_change(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny("steps=2", "eval.every=0", "objective.clip_low=2e-3", "objective.clip_high=3e-3")
    train(config, display)
    rows = read_jsonl(Path(config.run_dir) / "metrics.jsonl")[1:]
    assert [(r["clip/low"], r["clip/high"]) for r in rows] == [(2e-3, 3e-3)] * 2
    state = json.loads((Path(config.run_dir) / "checkpoints/000002/trainer.json").read_text())
    assert state["clip_scale"] == 1.0


def test_a_run_gets_close_to_its_target(tiny: Callable[..., Config], display: Any) -> None:
    """On a model that learns; the objective's own range clips several times as much."""
    ask = ("objective.clip_low=auto:0.1", "objective.clip_high=auto:0.1", "learner.mini_batches=4")
    short = ("eval.every=0", "steps=12", "checkpoint.every=99")
    config = tiny(*ask, "learner.learning_rate=1e-4", "rollout.prompts=8", *short)
    train(config, display)
    shares = [r["clip/fraction_tokens"] for r in read_jsonl(Path(config.run_dir) / "metrics.jsonl")[1:]]
    assert shares[0] > 0.3
    assert 0.05 < sum(shares[-6:]) / 6 < 0.18


def test_a_run_reports_once_that_its_range_is_at_its_limit(tiny: Callable[..., Config], display: Any) -> None:
    options = ("objective.clip_low=1e-9", "objective.clip_high=auto:0.01", "steps=9", "eval.every=0")
    config = tiny(*options, "checkpoint.every=99", "rollout.max_tokens=5")
    with pytest.warns(UserWarning, match="narrow"):
        train(config, display)
    events = [e for e in read_jsonl(Path(config.run_dir) / "events.jsonl") if e["event"] == "clip_range_limit"]
    assert len(events) == 1
    assert sum("stops adapting" in message for message in display.messages) == 1
