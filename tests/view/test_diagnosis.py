"""Every diagnosis rule, with a run that triggers it and one that does not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from shown_runs import metrics, timings

import gspo
from gspo.checkpoints.resume_checks import may_change
from gspo.config import from_tree
from gspo.objectives.describe import resolved
from gspo.objectives.objective import change, settings_of
from gspo.record.alarms import ALARMS
from gspo.record.run_format import _facts, format_1_facts, to_json
from gspo.view.diagnosis import RULES, WINDOW, RunFacts, diagnose


def facts(
    row: Callable[[int], dict[str, Any]] = metrics,
    *,
    steps: int = 2 * WINDOW,
    evaluations: list[dict[str, Any]] | None = None,
    times: Callable[[int], dict[str, Any]] = timings,
    events: list[dict[str, Any]] | None = None,
    state: str = "running",
    **settings: Any,
) -> RunFacts:
    """The facts of a healthy run, with changes; a setting `rollout.top_p` is written `rollout__top_p`."""
    tree = {"objective": {"name": "gspo"}, "learner": {"mini_batches": 4}, "rollout": {"max_tokens": 64}}
    for key, value in settings.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name] = value
    return RunFacts(
        rows=[row(s) for s in range(1, steps + 1)],
        evaluations=evaluations or [],
        timings=[times(s) for s in range(1, steps + 1)][-WINDOW:],
        events=events or [],
        settings=tree | {"steps": 100},
        objective=format_1_facts(tree),
        state=state,
    )


def every_step(**changed: Any) -> Callable[[int], dict[str, Any]]:
    """Metrics with the same changes at every step."""
    return lambda step: metrics(step, **changed)


def at_step(number: int, key: str, value: int) -> Callable[[int], dict[str, Any]]:
    """Metrics in which a count is 0 except at one step."""
    return lambda step: metrics(step, **{key: value if step == number else 0})


def phase(**share: float) -> Callable[[int], dict[str, Any]]:
    """Timings with these seconds of the 1 s of every step."""
    return lambda step: timings(step, **share)


def ranks(*sampling: float) -> Callable[[int], dict[str, Any]]:
    """Timings of a run on several ranks."""
    times = {f"rank/{rank}/rollout_s": value for rank, value in enumerate(sampling)}
    return lambda step: timings(step) | times


def evaluation(step: int, accuracy: float, reward: float = 0.5, half: float = 0.03) -> dict[str, Any]:
    return {
        "step": step,
        "eval/accuracy": accuracy,
        "eval/accuracy_low": accuracy - half,
        "eval/accuracy_high": accuracy + half,
        "reward/mean": reward,
    }


def rewarded(step: int, value: float) -> dict[str, Any]:
    """An evaluation in which nothing is correct, but completions get partial credit."""
    reward = {"eval/reward": value, "eval/reward_low": value - 0.03, "eval/reward_high": value + 0.03}
    return evaluation(step, 0.0) | reward


def penalized(**changed: Any) -> Callable[[int], dict[str, Any]]:
    """No completion is ever correct, but short ones have a smaller length penalty."""
    row = {"groups__uniform_fraction": 1.0, "reward__mean": 0.0, "reward__length_penalty": 0.3, "advantage__std": 0.5}
    return every_step(**row | changed)


@dataclass(frozen=True)
class Case:
    name: str
    level: str
    fires: RunFacts
    quiet: RunFacts
    """A run just below the threshold."""
    says: str
    """Part of the sentence or the remedy: the numbers it is based on, or the suggestion."""


IMPROVED = [evaluation(0, 0.3), evaluation(20, 0.6, 0.5)]
CASES = [
    Case(
        "error",
        "bad",
        facts(events=[{"event": "error", "error": "RewardError", "message": "broken"}]),
        facts(events=[{"event": "error"}, {"event": "resume"}]),
        "RewardError: broken",
    ),
    Case("exited unexpectedly", "bad", facts(state="ended"), facts(state="stopped"), "at step 40 of 100"),
    Case(
        "alarm",
        "bad",
        facts(events=[{"event": "alarm", "step": 38, "name": "repetition", "message": "try x"}]),
        facts(events=[{"event": "alarm", "step": 3, "name": "repetition", "message": "old"}]),
        "step 38, repetition: try x",
    ),
    Case(
        "rolled back",
        "warn",
        facts(events=[{"event": "rollback", "step": 30, "message": "rollback 1 (repetition): back to step 30"}]),
        facts(events=[{"event": "resume", "step": 30}]),
        "Rollback 1 (repetition): back to step 30.",
    ),
    Case(
        "ended early",
        "note",
        facts(
            events=[
                {"event": "early_stop", "step": 40, "message": "no gain"},
                {"event": "checkpoint"},
                {"event": "stop"},
            ]
        ),
        facts(events=[{"event": "early_stop", "step": 40, "message": "no gain"}, {"event": "resume", "step": 40}]),
        "ended early at step 40: no gain",
    ),
    Case(
        "learning",
        "good",
        facts(evaluations=[evaluation(0, 0.3), evaluation(40, 0.5)]),
        facts(evaluations=[evaluation(0, 0.3), evaluation(40, 0.34)]),
        "from 30 % to 50 % at step 40",
    ),
    Case(
        "learning",
        "good",
        facts(evaluations=[rewarded(0, 0.3), rewarded(40, 0.5)]),
        facts(evaluations=[rewarded(0, 0.3), rewarded(40, 0.34)]),
        "The mean held-out reward rose from 0.3 at step 0 to 0.5 at step 40",
    ),
    Case(
        "reward drop",
        "bad",
        facts(evaluations=[rewarded(0, 0.5), rewarded(40, 0.3)]),
        facts(evaluations=[rewarded(0, 0.3), rewarded(40, 0.26)]),
        "fell from 0.5 at step 0 to 0.3 at step 40",
    ),
    Case(
        "overfitting or reward hacking",
        "bad",
        facts(evaluations=[*IMPROVED, evaluation(40, 0.4, 0.8)]),
        facts(evaluations=[*IMPROVED, evaluation(40, 0.56, 0.8)]),
        "rose from 0.5 to 0.8",
    ),
    Case(
        "accuracy drop",
        "bad",
        facts(evaluations=[*IMPROVED, evaluation(40, 0.4, 0.4)]),
        facts(evaluations=[evaluation(0, 0.3), evaluation(40, 0.3, 0.4)]),
        "below its best of 60 % at step 20",
    ),
    Case(
        "plateau",
        "note",
        facts(lambda s: metrics(s, reward__mean=0.5 + 0.01 * (s % 3))),
        facts(lambda s: metrics(s, reward__mean=0.3 + 0.01 * s)),
        "has not changed",
    ),
    Case(
        "no trainable samples",
        "bad",
        facts(lambda s: metrics(s, samples__trained=8 * (s % 2))),
        facts(every_step(samples__trained=8)),
        "10 of the last 20 steps had no trainable samples",
    ),
    Case(
        "no gradient",
        "bad",
        facts(every_step(grad__norm=0.0, advantage__std=0.0, reward__mean=0.0, reward__correct_fraction=0.0)),
        facts(every_step(advantage__std=0.0)),
        "rewards within every group are equal (mean 0, 0 % of the completions correct)",
    ),
    Case(
        "no gradient",
        "warn",
        facts(lambda s: metrics(s, grad__norm=float(s % 4 > 0), advantage__std=0.0, reward__correct_fraction=1.0)),
        facts(lambda s: metrics(s, grad__norm=float(s % 10 > 0), advantage__std=0.0)),
        "Use harder problems.",
    ),
    Case(
        "no gradient",
        "bad",
        facts(every_step(grad__norm=0.0, advantage__std=1.0, clip__fraction_tokens=1.0), learner__old_logp="sampler"),
        facts(every_step(grad__norm=0.0, samples__trained=0)),  # "no trainable samples" reports it
        'Set learner.old_logp = "recompute"',
    ),
    Case(
        "no gradient",
        "bad",
        facts(every_step(grad__norm=0.0, advantage__std=1.0), steps=1),
        facts(every_step(grad__norm=1e-9, advantage__std=1.0), steps=1),
        "leaves out every token",
    ),
    Case(
        "uniform groups",
        "warn",
        facts(every_step(groups__uniform_fraction=0.71)),
        facts(every_step(groups__uniform_fraction=0.4)),
        "71 % of the sampled groups",
    ),
    Case(
        "penalty only",
        "warn",
        facts(penalized()),
        facts(penalized(groups__uniform_fraction=0.9)),
        "only the length penalty: in 100 % of the groups",
    ),
    Case(
        "penalty only",
        "warn",
        facts(penalized(reward__length_penalty=0.0, kl__ref=0.1), objective__kl_in="reward"),
        facts(penalized(reward__length_penalty=0.0, kl__ref=0.1)),
        "only the KL penalty",
    ),
    Case(
        "penalty only",
        "warn",
        facts(penalized(kl__ref=0.1, reward__std=0.0), objective__name="reinforce_pp"),
        facts(penalized(kl__ref=0.1, reward__std=0.3), objective__name="reinforce_pp"),
        "only the length penalty and the KL penalty",
    ),
    Case(
        "unscored",
        "warn",
        facts(at_step(39, "samples__unscored", 3)),
        facts(at_step(2, "samples__unscored", 3)),
        "3 completions",
    ),
    Case(
        "tool calls in another format",
        "warn",
        facts(every_step(**{"conversation/other_format/json_block": 3})),
        facts(at_step(39, "conversation/other_format/json_block", 3)),
        "60 turns of the last 20 steps would be tool calls in format json_block",
    ),
    Case(
        "truncated completions",
        "warn",
        facts(every_step(length__truncated_fraction=0.3)),
        facts(every_step(length__truncated_fraction=0.05)),
        "30 % of the completions are truncated at the limit of 64",
    ),
    Case(
        "length drift",
        "note",
        facts(lambda s: metrics(s, length__mean=10.0 * s - 150)),
        facts(lambda s: metrics(s, length__mean=100.0 + s)),
        "doubled",
    ),
    Case("one update per batch", "note", facts(learner__mini_batches=1), facts(), "every importance ratio is 1"),
    Case(
        "clip range too wide",
        "warn",
        facts(every_step(clip__fraction_tokens=0.0, clip__fraction_sequences=0.0)),
        facts(every_step(clip__fraction_tokens=0.01)),
        "4.0e-03",
    ),
    Case(
        "clip range too narrow",
        "warn",
        facts(every_step(clip__fraction_sequences=0.8)),
        facts(every_step(clip__fraction_sequences=0.8), objective__name="grpo"),
        "80 % of the completions are clipped",
    ),
    Case(
        "entropy drop",
        "warn",
        facts(lambda s: metrics(s, entropy__mean=0.8 * 0.93**s)),
        facts(lambda s: metrics(s, entropy__mean=0.8 * 0.98**s)),
        "stops exploring",
    ),
    Case(
        "large policy updates",
        "warn",
        facts(every_step(kl__old_new=0.2)),
        facts(every_step(kl__old_new=0.01)),
        "0.2 nats",
    ),
    Case(
        "sampler-learner mismatch",
        "warn",
        facts(every_step(mismatch__k3=5e-3), rollout__top_p=0.9),
        facts(every_step(mismatch__k3=1e-5)),
        "top_p",
    ),
    Case(
        "rounding noise",
        "warn",
        facts(every_step(noise__beyond_clip=0.4, noise__log_ratio=4e-3)),
        facts(every_step(noise__beyond_clip=0.2, noise__log_ratio=2e-3)),
        "sequence-level log-ratios by 4.0e-03 and moves 40 %",
    ),
    Case(
        "skipped updates",
        "warn",
        facts(at_step(30, "grad__skipped", 1)),
        facts(at_step(5, "grad__skipped", 1)),
        "1 updates",
    ),
    Case(
        "expert flips",
        "note",
        facts(every_step(routing__flip_fraction=0.09)),
        facts(every_step(routing__flip_fraction=0.01)),
        "9.0 %",
    ),
    Case(
        "load imbalance",
        "note",
        facts(every_step(routing__load_max=12.0)),
        facts(every_step(routing__load_max=3.0)),
        "12.0 times",
    ),
    Case(
        "rollouts too old",
        "warn",
        facts(every_step(lag__updates=8.0, lag__steps=2.0, mismatch__ess=0.6)),
        facts(every_step(lag__updates=8.0, lag__steps=2.0, mismatch__ess=0.95)),
        "8 optimizer updates old on average (2 steps)",
    ),
    Case(
        "rollouts too old",
        "warn",
        facts(every_step(lag__updates=4.0, lag__steps=1.0, clip__fraction_sequences=0.7), learner__old_logp="sampler"),
        facts(every_step(lag__updates=0.0, lag__steps=0.0, clip__fraction_sequences=0.7), learner__old_logp="sampler"),
        "are clipped, because ratios start from the sampler",
    ),
    Case(
        "long completions dropped",
        "warn",
        facts(
            every_step(
                lag__dropped_fraction=0.1, lag__dropped_correct_fraction=0.2, **{"reward__correct_fraction": 0.5}
            )
        ),
        facts(every_step(lag__dropped_fraction=0.01)),
        "in their groups 20 % of the others are correct, in all 50 %",
    ),
    Case(
        "time in scoring",
        "note",
        facts(times=phase(reward=0.6)),
        facts(times=phase(reward=0.1)),
        "60 % of the step time",
    ),
    Case("time in evaluation", "note", facts(times=phase(eval=0.5)), facts(times=phase(eval=0.1)), "eval.every"),
    Case(
        "straggler",
        "warn",
        facts(times=ranks(0.5, 1.2, 0.6)),
        facts(times=ranks(0.5, 0.8, 0.7)),
        "Rank 1 is slower than the others: it samples for 1.2 s, they for 0.55 s, in 20 of the last 20 steps.",
    ),
    Case(
        "straggler",
        "warn",
        facts(times=ranks(1.2, 0.5)),
        facts(times=ranks(1.2, 0.5), rollout__prompts=3),  # rank 0 has two of the three prompts
        "Check what else uses its machine or GPU.",
    ),
    Case(
        "straggler",
        "warn",
        facts(times=lambda step: ranks(*((0.5, 1.5) if step % 10 else (0.5, 0.5)))(step)),
        facts(times=lambda step: ranks(*((0.5, 1.5) if step % 2 else (1.5, 0.5)))(step)),
        "in 18 of the last 20 steps",
    ),
    Case("straggler", "warn", facts(times=ranks(0.5, 1.5)), facts(times=ranks(0.5, 1.5), steps=9), "ranks/1.log"),
    Case(
        "time in sampling",
        "note",
        facts(times=phase(rollout=0.9)),
        facts(times=phase(rollout=0.6)),
        "90 % of the step time is sampling",
    ),
    Case(
        "time in sampling",
        "note",
        facts(
            every_step(sampler__running_mean=12.3), times=phase(rollout=0.9), rollout__prompts=8, rollout__group_size=8
        ),
        facts(times=phase(rollout=0.6)),
        "12 of 64 are sampled concurrently",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_rule_fires_on_its_run_and_not_just_below_the_threshold(case: Case) -> None:
    found = {f.name: f for f in diagnose(case.fires)}
    assert case.name in found
    assert found[case.name].level == case.level
    assert case.says in found[case.name].what + found[case.name].remedy
    assert case.name not in {f.name for f in diagnose(case.quiet)}


def test_every_rule_has_a_case() -> None:
    for rule in RULES:
        assert any(rule(case.fires) is not None for case in CASES), rule.__name__


def test_an_alarm_of_abandoned_steps_is_not_reported() -> None:
    alarm = {"event": "alarm", "step": 38, "name": "repetition", "message": "try x"}
    rollback = {"event": "rollback", "step": 30, "message": "rollback 1"}
    assert "alarm" not in {f.name for f in diagnose(facts(events=[alarm, rollback]))}
    assert "alarm" in {f.name for f in diagnose(facts(events=[rollback, alarm]))}
    assert "alarm" in {f.name for f in diagnose(facts(events=[alarm | {"step": 30}, rollback]))}


def test_a_rollback_of_long_ago_is_only_a_note() -> None:
    found = diagnose(facts(events=[{"event": "rollback", "step": 3, "message": "rollback 1"}]))
    assert [f.level for f in found if f.name == "rolled back"] == ["note"]


def test_a_healthy_run_has_no_problems() -> None:
    assert [f.name for f in diagnose(facts(evaluations=[evaluation(0, 0.3), evaluation(40, 0.6)]))] == [
        "learning",
        "no problems",
    ]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_run_with_few_steps_has_no_findings(steps: int) -> None:
    bad = facts(every_step(groups__uniform_fraction=1.0, length__truncated_fraction=1.0), steps=steps)
    assert diagnose(bad) == []


def test_the_most_severe_finding_comes_first() -> None:
    found = diagnose(
        facts(
            every_step(groups__uniform_fraction=0.9),
            events=[{"event": "error", "error": "E", "message": "w"}],
            learner__mini_batches=1,
        )
    )
    assert [f.level for f in found] == sorted((f.level for f in found), key=["bad", "warn", "note", "good"].index)
    assert found[0].name == "error"


def test_dynamic_sampling_is_not_suggested_if_it_is_enabled() -> None:
    found = {f.name: f for f in diagnose(facts(every_step(groups__uniform_fraction=0.7, groups__discarded=9)))}
    assert "dynamic sampling" not in found["uniform groups"].remedy


def test_dynamic_sampling_is_suggested_only_if_it_can_fill_a_batch() -> None:
    def remedy(share: float, **settings: Any) -> str:
        found = diagnose(facts(every_step(groups__uniform_fraction=share), **settings))
        return next(f.remedy for f in found if f.name == "uniform groups")

    assert "dynamic sampling" in remedy(0.6)
    assert "dynamic sampling" in remedy(0.75, rollout__refill_budget=5)
    assert "dynamic sampling" not in remedy(0.75)
    assert "dynamic sampling" not in remedy(1.0)


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("uniform", "partial credit"),
        ("overlong", "rollout.max_tokens"),
        ("unscored", "the reward raises"),
        ("alone", "rollout.group_size"),
        ("empty", "stop tokens"),
        ("other", "events"),
    ],
)
def test_steps_without_trainable_samples_have_a_reason_and_a_remedy(reason: str, says: str) -> None:
    rows = {
        "samples__trained": 0,
        f"samples__dropped__{reason}": 8,
        "samples__dropped__empty": 2 + 8 * (reason == "empty"),
    }
    finding = next(f for f in diagnose(facts(every_step(**rows))) if f.name == "no trainable samples")
    assert says in finding.remedy
    assert "refill_budget = " not in finding.remedy


def test_a_penalty_gives_uniform_groups_a_training_signal_only_if_it_acts() -> None:
    """It does not act if the advantages are 0 or the groups are discarded."""
    some, no_advantage, discarded = (
        next(f.what for f in diagnose(facts(penalized(**c))) if f.name == "uniform groups")
        for c in ({"groups__uniform_fraction": 0.7}, {"advantage__std": 0.0}, {"groups__discarded": 9})
    )
    assert "no training signal beyond the length penalty." in some
    assert "100 % of the sampled groups give no training signal." in no_advantage
    assert "100 % of the sampled groups give no training signal." in discarded


@pytest.mark.parametrize(
    ("settings", "suggested"),
    [
        ({}, True),
        ({"objective__shape": "none", "objective__name": "dapo"}, True),
        ({"objective__shape": "overlong_filter"}, False),
        ({"objective__name": "dapo"}, False),
    ],
)
def test_a_shape_is_not_suggested_if_one_is_set(settings: dict[str, str], suggested: bool) -> None:
    found = diagnose(facts(every_step(length__truncated_fraction=1.0), **settings))
    remedy = next(f.remedy for f in found if f.name == "truncated completions")
    assert "rollout.max_tokens" in remedy
    assert ("objective.shape" in remedy) == suggested


def test_a_token_level_objective_that_clips_little_gives_no_warning() -> None:
    """A clip fraction below 0.1 % is normal for GRPO; 0 is not."""
    few = facts(every_step(clip__fraction_tokens=5e-4), objective__name="grpo")
    none = facts(every_step(clip__fraction_tokens=0.0), objective__name="grpo")
    assert "clip range too wide" not in {f.name for f in diagnose(few)}
    assert "clip range too wide" in {f.name for f in diagnose(none)}


@pytest.mark.parametrize(
    ("dtype", "start"),
    [
        (
            "bfloat16",
            'Set model.dtype = "float16", which rounds eight times finer at the same cost, or "float32", widen',
        ),
        ("float16", 'Set model.dtype = "float32", widen'),
        ("float32", "Widen objective.clip_low"),
    ],
)
def test_a_finer_precision_is_suggested_if_there_is_one(dtype: str, start: str) -> None:
    noisy = facts(every_step(noise__beyond_clip=0.4, noise__log_ratio=4e-3), model__dtype=dtype)
    remedy = next(f.remedy for f in diagnose(noisy) if f.name == "rounding noise")
    assert remedy.startswith(start)


def test_uniform_groups_without_verdicts_give_no_advice_on_difficulty() -> None:
    def row(step: int) -> dict[str, Any]:
        return {k: v for k, v in metrics(step, groups__uniform_fraction=0.9).items() if k != "reward/correct_fraction"}

    remedy = next(f.remedy for f in diagnose(facts(row)) if f.name == "uniform groups")
    assert "easier" not in remedy
    assert "harder" not in remedy


@pytest.mark.parametrize("settings", [{"objective": "gspo"}, {"learner": {"mini_batches": "4"}}, {"rollout": [1]}, {}])
def test_settings_of_another_type_are_no_error(settings: dict[str, Any]) -> None:
    rows = [metrics(s) for s in range(1, 41)]
    events = [{"event": "alarm"}]
    objective = format_1_facts(settings)
    diagnose(
        RunFacts(
            rows=rows,
            evaluations=[],
            timings=[],
            events=events,
            settings=settings,
            objective=objective,
            state="ended",
        )
    )


# ------------------------------------------------------------------------------------- advice that the objective takes


def decline(step: int) -> dict[str, Any]:
    """Everything goes wrong at once, and entropy falls."""
    return metrics(
        step,
        groups__uniform_fraction=0.6,
        groups__discarded=0,
        length__truncated_fraction=0.5,
        entropy__mean=2.0 if step <= WINDOW + 3 else 0.1,
        mismatch__k3=5e-3,
        routing__flip_fraction_sampler=0.02,
        routing__flip_fraction=0.1,
        routing__load_max=20.0,
    )


NAMES = [n for n in gspo.objective_names() if n != "ppo_clip"]


@pytest.mark.parametrize("old_logp", ["recompute", "sampler"])
@pytest.mark.parametrize(("name", "given"), [*((n, {}) for n in NAMES), ("gspo", {"normalize": "separate"})])
def test_no_advice_that_the_objective_refuses(name: str, given: dict[str, str], old_logp: str) -> None:
    objective = gspo.objective(name, **given)
    run = facts(decline, learner__old_logp=old_logp, rollout__refill_budget=3)
    recorded = json.loads(to_json(resolved(objective)))["objective"]
    run = replace(run, objective=_facts(recorded, Path("run.json")))
    found = {f.name: f for f in diagnose(run)}
    assert {"uniform groups", "truncated completions", "entropy drop", "sampler-learner mismatch"} <= found.keys()
    advised = [
        (key, choice)
        for finding in found.values()
        for key, choice in re.findall(r'objective\.(\w+)(?: = "(\w+)")?', finding.remedy or "")
    ]
    assert advised
    for key, choice in advised:
        # Applying what is advised must be possible; a setting without a choice is at least one that there is.
        assert key in settings_of(objective), key
        if choice:
            change(objective, {key: choice})
    text = " ".join(f.remedy or "" for f in found.values())
    assert ('routing.replay = "old"' in text) is (old_logp == "recompute")
    if old_logp == "sampler" and "objective.mismatch" in text:
        assert 'learner.old_logp = "recompute"' in text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "set learner.mini_batches = 1, which makes every ratio exactly 1"),
        ({"routing__replay": "old"}, 'set learner.mini_batches = 1 and routing.replay = "off", which'),
        ({"objective__clip_low": "auto:0.15"}, "set learner.mini_batches = 1 and a fixed clip range, which"),
        ({"learner__old_logp": "sampler"}, 'recompute the old log-probs (learner.old_logp = "recompute")'),
    ],
)
def test_the_remedy_for_rounding_noise_goes_with_the_other_settings(settings: dict[str, str], words: str) -> None:
    """Each of these settings is refused with one update per batch."""
    noisy = facts(every_step(noise__beyond_clip=0.4, noise__log_ratio=4e-3), **settings)
    assert words in next(f.remedy for f in diagnose(noisy) if f.name == "rounding noise")
    alarm = next(alarm for alarm in ALARMS if alarm.name == "rounding noise")
    assert words in alarm.message(from_tree(noisy.settings, where="test"))


def test_no_alarm_advises_to_resume_with_what_a_resume_cannot_change() -> None:
    for alarm in ALARMS:
        if "resume from" in alarm.what:
            assert all(map(may_change, re.findall(r"\b(?:objective|learner|rollout|model)\.\w+", alarm.what))), alarm


def test_an_adaptive_range_is_not_advised_if_rollbacks_narrow_it() -> None:
    for row, name in (
        (every_step(clip__fraction_tokens=0.0), "clip range too wide"),
        (every_step(clip__fraction_sequences=0.9), "clip range too narrow"),
    ):
        for settings, advised in (({}, True), ({"alarms__rollback_clip": 0.5}, False)):
            remedy = next(f.remedy for f in diagnose(facts(row, **settings)) if f.name == name)
            assert ("auto:0.15" in remedy) is advised
            assert "objective.clip_low and clip_high" in remedy


def test_a_narrower_clip_range_is_advised_only_if_there_is_one() -> None:
    fallen = facts(evaluations=[evaluation(0, 0.6), evaluation(20, 0.3)])
    for name, advised in (("gspo", True), ("vespo", False)):
        recorded = json.loads(to_json(resolved(gspo.objective(name))))["objective"]
        run = replace(fallen, objective=_facts(recorded, Path("run.json")))
        remedy = next(f.remedy for f in diagnose(run) if f.name == "accuracy drop")
        assert ("clip range" in remedy) is advised


def test_a_run_that_recorded_no_settings_gets_the_advice_of_its_time() -> None:
    old = {k: v for k, v in resolved(gspo.objective("minirl")).items() if k not in ("settings", "takes_penalties")}
    found = _facts(old, Path("run.json"))
    assert "mismatch" not in found.settings
    assert "clip_high" in found.settings
    assert "mismatch" in _facts(old | {"name": "gspo"}, Path("run.json")).settings
