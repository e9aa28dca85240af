"""Checks on a fresh batch: ratios are 1, temperatures agree, rewards differ within groups. Deviations are reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from examination import SAMPLED

from gspo.config import Config
from gspo.model.load import load_policy
from gspo.preflight import model, ratio, sampling
from gspo.rollout.engine import build_engine

LEARNING = (*SAMPLED, "ratio", "temperature")


def varied(group: int, sample: int) -> float:
    return float(sample % 2)


@pytest.mark.parametrize(
    "override", ["model.build=tiny_dense", "model.build=tiny_moe", "model.gradient_checkpointing=true"]
)
def test_the_ratio_is_one_and_no_weight_changes(
    tiny: Callable[..., Config], examined: Any, override: str, monkeypatch: Any
) -> None:
    before: dict[str, torch.Tensor] = {}

    def remember(*args: Any, **options: Any) -> Any:
        policy = load_policy(*args, **options)
        before.update({k: v.clone() for k, v in policy.model.state_dict().items()})
        return policy

    monkeypatch.setattr("gspo.build.load_policy", remember)
    found = examined(tiny(override, "rollout.temperature=0.7"), *LEARNING, value=varied)
    assert found.levels("ratio") == ["ok"]
    assert found.only("ratio").numbers["deviation"] == 0.0
    assert found.only("ratio").numbers["tokens"] > 50
    after = found.context.policy.model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert all(p.grad is None for p in found.context.policy.model.parameters())
    assert found.levels("temperature") == ["ok"]
    numbers = found.only("temperature").numbers
    assert numbers["mean_difference"] < 1e-5
    assert numbers["mean_difference_ignored"] > 0.01, "the test must be able to tell the temperatures apart"


@pytest.mark.parametrize(("noise", "level"), [(1e-7, "warning"), (0.05, "FAIL")])
def test_a_noisy_model_is_reported(
    tiny: Callable[..., Config], examined: Any, monkeypatch: Any, noise: float, level: str
) -> None:
    def noisy(*args: Any, **options: Any) -> Any:
        policy = load_policy(*args, **options)
        policy.model.lm_head.register_forward_hook(lambda m, i, out: out + noise * torch.randn_like(out))
        return policy

    monkeypatch.setattr("gspo.build.load_policy", noisy)
    finding = examined(tiny(), *SAMPLED, "ratio", value=varied).only("ratio")
    assert finding.level == level
    assert finding.numbers["deviation"] > 0
    assert "dropout" in finding.do


@pytest.mark.parametrize(
    ("dtype", "levels", "advised"),
    [
        ("bfloat16", ["ok", "warning"], 'Set model.dtype = "float16"'),
        ("float16", ["ok", "warning"], 'Set model.dtype = "float32"'),
        ("float32", ["ok"], ""),
    ],
)
def test_rounding_beyond_the_clip_range_is_reported(
    tiny: Callable[..., Config], examined: Any, dtype: str, levels: list[str], advised: str
) -> None:
    # The ranges are those of the noise in each precision.
    clip = 1e-5 if dtype == "float16" else 1e-4
    narrow = (f"objective.clip_low={clip}", f"objective.clip_high={clip}")
    found = examined(tiny(f"model.dtype={dtype}", *narrow), "objective", *LEARNING, value=varied)
    assert found.levels("temperature") == levels
    assert all(f.do.startswith(advised) for f in found["temperature"][1:])


class IgnoresTemperature:
    """An engine that always samples at temperature 1."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.reports_routes = engine.reports_routes
        self.close = engine.close

    def generate(self, prompts: Any, options: Any) -> Any:
        return self.engine.generate(prompts, replace(options, sampling=replace(options.sampling, temperature=1.0)))


def test_an_engine_that_ignores_the_temperature_fails(
    tiny: Callable[..., Config], examined: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("gspo.build.build_engine", lambda *args: IgnoresTemperature(build_engine(*args)))
    finding = examined(tiny("rollout.temperature=0.7"), *LEARNING, value=varied).only("temperature")
    assert finding.level == "FAIL"
    assert finding.numbers["mean_difference_ignored"] < 1e-5 < finding.numbers["mean_difference"]
    assert finding.numbers["k3"] > finding.numbers["k3_ignored"]
    assert "rollout.temperature" in finding.do


@pytest.mark.parametrize(("override", "name"), [("rollout.top_p=0.5", "top_p = 0.5"), ("rollout.top_k=3", "top_k = 3")])
def test_top_p_and_top_k_are_named(tiny: Callable[..., Config], examined: Any, override: str, name: str) -> None:
    finding = examined(tiny(override), *LEARNING, value=varied).only("temperature")
    assert finding.level == "note"
    assert name in finding.what
    assert finding.numbers["mean_difference"] > 0.1


class ShiftedLogprobs(IgnoresTemperature):
    """An engine whose log-probs are off for another reason."""

    def generate(self, prompts: Any, options: Any) -> Any:
        groups = self.engine.generate(prompts, options)
        return [[replace(c, logp_sampler=tuple(x - 0.2 for x in c.logp_sampler)) for c in group] for group in groups]


def test_another_disagreement_is_a_warning(tiny: Callable[..., Config], examined: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("gspo.build.build_engine", lambda *args: ShiftedLogprobs(build_engine(*args)))
    finding = examined(tiny("rollout.temperature=0.7"), *LEARNING, value=varied).only("temperature")
    assert finding.level == "warning"
    assert finding.numbers["mean_difference"] == pytest.approx(0.2, abs=1e-3)


# ------------------------------------------------------------------------------------------------- groups


def uniform_half(group: int, sample: int) -> float:
    return float(sample % 2) if group % 2 else 0.0


@pytest.mark.parametrize(
    ("value", "level", "share", "words"),
    [
        (varied, "ok", 0.0, ""),
        (lambda g, i: 0.0, "warning", 1.0, "too hard"),
        (lambda g, i: 1.0, "warning", 1.0, "too easy"),
        (lambda g, i: 0.0 if g < 3 else float(i % 2), "note", 0.75, "too hard"),
    ],
)
def test_uniform_groups(
    tiny: Callable[..., Config], examined: Any, value: Callable[[int, int], float], level: str, share: float, words: str
) -> None:
    found = examined(tiny(), *SAMPLED, "objective", "uniform groups", value=value, prompts=4)
    finding = found.only("uniform groups")
    assert (finding.level, finding.numbers["share"]) == (level, share)
    assert finding.numbers["low"] <= share <= finding.numbers["high"]
    assert finding.numbers["high"] - finding.numbers["low"] > 0.3, "four groups give a wide interval"
    assert words in finding.do


@pytest.mark.parametrize(("name", "mentioned"), [("gspo", True), ("dapo", False)])
def test_uniform_groups_have_a_length_penalty_unless_they_are_discarded(
    tiny: Callable[..., Config], examined: Any, name: str, mentioned: bool
) -> None:
    config = tiny(f"objective.name={name}", "objective.shape=soft_overlong")
    found = examined(config, *SAMPLED, "objective", "uniform groups", value=uniform_half, prompts=4)
    assert ("no training signal apart from the length penalty" in found["uniform groups"][0].what) is mentioned


def test_a_refill_budget_that_is_too_small(tiny: Callable[..., Config], examined: Any) -> None:
    names = (*SAMPLED, "objective", "uniform groups")
    right = examined(tiny("objective.name=dapo"), *names, value=varied, prompts=4)
    assert right.levels("uniform groups") == ["ok"]
    config = tiny("objective.name=dapo", "rollout.refill_budget=3")
    wrong = examined(config, *names, value=lambda g, i: 1.0 if g == i == 0 else 0.0, prompts=4)
    assert wrong.levels("uniform groups") == ["note", "warning"]
    assert "needs about 4 batches" in wrong["uniform groups"][1].what
    assert "refill_budget = 4" in wrong["uniform groups"][1].do
    hopeless = examined(config, *names, value=lambda g, i: 0.0, prompts=4)["uniform groups"][1]
    assert "would discard all of the 4 sampled groups: steps would train on nothing" in hopeless.what
    assert "inf" not in hopeless.what
    assert "refill_budget" not in hopeless.do


def test_before_a_cold_start_nothing_is_worse_than_a_note(tiny: Callable[..., Config], examined: Any) -> None:
    config = tiny("cold_start.steps=5", "cold_start.stop_accuracy=0.5")
    found = examined(config, *SAMPLED, "objective", "uniform groups", value=lambda g, i: 0.0)
    assert found.levels("sampling") == ["note"]
    assert found.levels("uniform groups") == ["note"]
    assert found.only("uniform groups").numbers["least_after_cold_start"] == pytest.approx(2 * 0.5**4)


def test_truncated_completions_are_a_warning(tiny: Callable[..., Config], examined: Any) -> None:
    assert examined(tiny("rollout.max_tokens=2"), *SAMPLED, value=varied).levels("sampling") == ["warning"]
    assert examined(tiny("rollout.max_tokens=120"), *SAMPLED, value=varied).levels("sampling") == ["ok"]


def test_the_completions_are_those_of_the_first_step(tiny: Callable[..., Config], examined: Any, parts_of: Any) -> None:
    from gspo.clock import Clock
    from gspo.rollout.gather import RolloutState
    from gspo.step import collect

    config = tiny()
    groups = examined(config, *SAMPLED, value=varied).context.groups
    sampled = collect(parts_of(config), RolloutState(), clock=Clock()).rollouts.sampled
    assert [g.prompt.id for g in groups] == [g.prompt.id for g in sampled]
    assert [c.text for g in groups for c in g.completions] == [c.text for g in sampled for c in g.completions]


def test_a_slow_machine_samples_fewer_groups(tiny: Callable[..., Config], examined: Any, monkeypatch: Any) -> None:
    for module in (sampling, ratio):
        monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    found = examined(tiny("rollout.prompts=16"), *LEARNING, value=varied)
    assert len(found.context.groups) == sampling.CHUNKS[0]
    assert found.levels("ratio") == ["ok"]
    assert math.isfinite(found.only("temperature").numbers["k3"])


# ------------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize(
    ("overrides", "level", "words"),
    [
        (["model.build=tiny_dense"], "ok", "dense"),
        (["model.build=tiny_moe"], "ok", "2 routers, each choosing 2 of 8 experts; replay is possible"),
        (["model.build=tiny_moe", "routing.replay=sampler"], "ok", "routing.replay = sampler"),
        (["model.build=tiny_moe", "routing.record=false"], "note", "not recorded"),
    ],
)
def test_experts(tiny: Callable[..., Config], examined: Any, overrides: list[str], level: str, words: str) -> None:
    finding = examined(tiny(*overrides), "tokenizer", "model files", "model", "experts").only("experts")
    assert finding.level == level
    assert words in finding.what


def test_experts_that_cannot_be_replayed(tiny: Callable[..., Config], examined: Any, monkeypatch: Any) -> None:
    from gspo.errors import ConfigError

    def refuse(*args: Any) -> None:
        raise ConfigError("no")

    monkeypatch.setattr(model, "check_replay", refuse)
    names = ("tokenizer", "model files", "model", "experts")
    assert examined(tiny("model.build=tiny_moe"), *names).levels("experts") == ["note"]
    monkeypatch.setattr("gspo.model.load.find_routers", lambda model: None)
    assert examined(tiny("model.build=tiny_moe"), *names).levels("experts") == ["warning"]
