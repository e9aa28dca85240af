"""Every rule of the plain-language panel, with a run that triggers it and one that does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from shown_runs import metrics, timings

from gspo.objectives.advantage import batch_whitened
from gspo.objectives.table import TABLE
from gspo.objectives.trust_region import Clip, MaskedWeight
from gspo.view.diagnosis import RULES, SEQUENCE_ROWS, SHAPED_ROWS, TOKEN_ROWS, WHITENED_ROWS, WINDOW, RunFacts, diagnose


def look(
    row: Callable[[int], dict[str, Any]] = metrics, *, steps: int = 2 * WINDOW, evaluations: list[dict[str, Any]] | None = None,
    times: Callable[[int], dict[str, Any]] = timings, events: list[dict[str, Any]] | None = None,
    state: str = "running", **settings: Any,
) -> RunFacts:  # fmt: skip
    tree = {"objective": {"name": "gspo"}, "learner": {"mini_batches": 4}, "rollout": {"max_tokens": 64}}
    for key, value in settings.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name] = value
    return RunFacts(
        rows=[row(s) for s in range(1, steps + 1)], evaluations=evaluations or [], timings=[times(s) for s in range(1, steps + 1)][-WINDOW:],
        events=events or [], settings=tree | {"steps": 100}, state=state,
    )  # fmt: skip


def evaluation(step: int, accuracy: float, reward: float = 0.5, half: float = 0.03) -> dict[str, Any]:
    return {"step": step, "eval/accuracy": accuracy, "eval/accuracy_low": accuracy - half, "eval/accuracy_high": accuracy + half, "reward/mean": reward}  # fmt: skip


def punished(step: int, **changed: Any) -> dict[str, Any]:
    """No reply is ever right, but short ones lose less."""
    row = {"groups__uniform_fraction": 1.0, "reward__mean": 0.0, "reward__length_penalty": 0.3, "advantage__std": 0.5}
    return metrics(step, **row | changed)


@dataclass(frozen=True)
class Case:
    name: str
    level: str
    fires: RunFacts
    not_quite: RunFacts
    says: str
    """Part of the sentence or the remedy: the numbers it rests on, or what to try."""


CASES = [
    Case("error", "bad", look(events=[{"event": "error", "error": "RewardError", "what": "broken"}]), look(events=[{"event": "error"}, {"event": "resume"}]), "RewardError: broken"),
    Case("ended without a word", "bad", look(state="ended"), look(state="stopped"), "at step 40 of 100"),
    Case("alarm", "bad", look(events=[{"event": "alarm", "step": 38, "name": "repetition", "what": "try x"}]), look(events=[{"event": "alarm", "step": 3, "name": "repetition", "what": "old"}]), "step 38, repetition: try x"),
    Case("learning", "good", look(evaluations=[evaluation(0, 0.3), evaluation(40, 0.5)]), look(evaluations=[evaluation(0, 0.3), evaluation(40, 0.34)]), "from 30 % to 50 % at step 40"),
    Case("reward without accuracy", "bad", look(evaluations=[evaluation(0, 0.3), evaluation(20, 0.6, 0.5), evaluation(40, 0.4, 0.8)]), look(evaluations=[evaluation(0, 0.3), evaluation(20, 0.6, 0.5), evaluation(40, 0.56, 0.8)]), "rose from 0.5 to 0.8"),
    Case("forgetting", "bad", look(evaluations=[evaluation(0, 0.3), evaluation(20, 0.6, 0.5), evaluation(40, 0.4, 0.4)]), look(evaluations=[evaluation(0, 0.3), evaluation(40, 0.3, 0.4)]), "below its best of 60 % at step 20"),
    Case("plateau", "note", look(lambda s: metrics(s, reward__mean=0.5 + 0.01 * (s % 3))), look(lambda s: metrics(s, reward__mean=0.3 + 0.01 * s)), "has not moved"),
    Case("trained on nothing", "bad", look(lambda s: metrics(s, samples__trained=8 * (s % 2))), look(lambda s: metrics(s, samples__trained=8)), "10 of the last 20 steps trained on nothing"),
    Case("uniform groups", "warn", look(lambda s: metrics(s, groups__uniform_fraction=0.71)), look(lambda s: metrics(s, groups__uniform_fraction=0.4)), "71 % of the sampling"),
    Case("only a penalty is learned", "warn", look(lambda s: punished(s)), look(lambda s: punished(s, groups__uniform_fraction=0.9)), "Only the length penalty is being learned: in 100 % of the groups"),
    Case("only a penalty is learned", "warn", look(lambda s: punished(s, reward__length_penalty=0.0, kl__ref=0.1), objective__kl_in="reward"), look(lambda s: punished(s, reward__length_penalty=0.0, kl__ref=0.1)), "Only the KL penalty is being learned"),
    Case("only a penalty is learned", "warn", look(lambda s: punished(s, kl__ref=0.1, reward__std=0.0), objective__name="reinforce_pp"), look(lambda s: punished(s, kl__ref=0.1, reward__std=0.3), objective__name="reinforce_pp"), "Only the length penalty and the KL penalty"),
    Case("unscored", "warn", look(lambda s: metrics(s, samples__unscored=int(s == 39) * 3)), look(lambda s: metrics(s, samples__unscored=int(s == 2) * 3)), "3 replies"),
    Case("length limit", "warn", look(lambda s: metrics(s, length__truncated_fraction=0.3)), look(lambda s: metrics(s, length__truncated_fraction=0.05)), "30 % of the replies are cut at the limit of 64"),
    Case("length drift", "note", look(lambda s: metrics(s, length__mean=10.0 * s - 150)), look(lambda s: metrics(s, length__mean=100.0 + s)), "doubled"),
    Case("one update per batch", "note", look(learner__mini_batches=1), look(), "every ratio is 1"),
    Case("clip never fires", "warn", look(lambda s: metrics(s, clip__fraction_tokens=0.0, clip__fraction_sequences=0.0)), look(lambda s: metrics(s, clip__fraction_tokens=0.01)), "4.0e-03"),
    Case("clip always fires", "warn", look(lambda s: metrics(s, clip__fraction_sequences=0.8)), look(lambda s: metrics(s, clip__fraction_sequences=0.8), objective__name="grpo"), "80 % of the replies are clipped"),
    Case("entropy falls", "warn", look(lambda s: metrics(s, entropy__mean=0.8 * 0.93**s)), look(lambda s: metrics(s, entropy__mean=0.8 * 0.98**s)), "ceasing to explore"),
    Case("large steps", "warn", look(lambda s: metrics(s, kl__old_new=0.2)), look(lambda s: metrics(s, kl__old_new=0.01)), "0.2 nats"),
    Case("mismatch", "warn", look(lambda s: metrics(s, mismatch__k3=5e-3), rollout__top_p=0.9), look(lambda s: metrics(s, mismatch__k3=1e-5)), "top_p"),
    Case("rounding noise", "warn", look(lambda s: metrics(s, noise__beyond_clip=0.4, noise__log_ratio=4e-3)), look(lambda s: metrics(s, noise__beyond_clip=0.2, noise__log_ratio=2e-3)), "replies' log-ratios by 4.0e-03, and 40 %"),
    Case("skipped updates", "warn", look(lambda s: metrics(s, grad__skipped=int(s == 30))), look(lambda s: metrics(s, grad__skipped=int(s == 5))), "1 updates"),
    Case("experts flip", "note", look(lambda s: metrics(s, routing__flip_fraction=0.09)), look(lambda s: metrics(s, routing__flip_fraction=0.01)), "9.0 %"),
    Case("uneven experts", "note", look(lambda s: metrics(s, routing__load_max=12.0)), look(lambda s: metrics(s, routing__load_max=3.0)), "12.0 times"),
    Case("time: scoring", "note", look(times=lambda s: timings(s, reward=0.6)), look(times=lambda s: timings(s, reward=0.1)), "60 % of the time"),
    Case("time: evaluating", "note", look(times=lambda s: timings(s, eval=0.5)), look(times=lambda s: timings(s, eval=0.1)), "eval.every"),
    Case("time: sampling", "note", look(times=lambda s: timings(s, rollout=0.9)), look(times=lambda s: timings(s, rollout=0.6)), "90 % of the time goes into sampling"),
    Case("time: sampling", "note", look(lambda s: metrics(s, sampler__live_mean=12.3), times=lambda s: timings(s, rollout=0.9), rollout__prompts=8, rollout__replies=8), look(times=lambda s: timings(s, rollout=0.6)), "12 are drawn together, of 64"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_rule_fires_on_its_run_and_not_on_another(case: Case) -> None:
    found = {f.name: f for f in diagnose(case.fires)}
    assert case.name in found
    assert found[case.name].level == case.level
    assert case.says in found[case.name].what + found[case.name].remedy
    assert case.name not in {f.name for f in diagnose(case.not_quite)}


def test_every_rule_has_a_case() -> None:
    """A rule that no case makes speak has no test."""
    for rule in RULES:
        assert any(rule(case.fires) is not None for case in CASES), rule.__name__


def test_a_healthy_run_is_called_healthy() -> None:
    assert [f.name for f in diagnose(look(evaluations=[evaluation(0, 0.3), evaluation(40, 0.6)]))] == [
        "learning",
        "no trouble",
    ]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_run_that_has_just_begun_is_not_judged(steps: int) -> None:
    bad = look(lambda s: metrics(s, groups__uniform_fraction=1.0, length__truncated_fraction=1.0), steps=steps)
    assert diagnose(bad) == []


def test_the_gravest_comes_first() -> None:
    found = diagnose(
        look(
            lambda s: metrics(s, groups__uniform_fraction=0.9),
            events=[{"event": "error", "error": "E", "what": "w"}],
            learner__mini_batches=1,
        )
    )
    assert [f.level for f in found] == sorted((f.level for f in found), key=["bad", "warn", "note", "good"].index)
    assert found[0].name == "error"


def test_dynamic_sampling_is_not_advised_where_it_is_on() -> None:
    found = {f.name: f for f in diagnose(look(lambda s: metrics(s, groups__uniform_fraction=0.7, groups__discarded=9)))}
    assert "dynamic sampling" not in found["uniform groups"].remedy


def test_dynamic_sampling_is_advised_only_where_it_can_fill_a_batch() -> None:
    def remedy(share: float, **settings: Any) -> str:
        found = diagnose(look(lambda s: metrics(s, groups__uniform_fraction=share), **settings))
        return next(f.remedy for f in found if f.name == "uniform groups")

    assert "dynamic sampling" in remedy(0.6)
    assert "dynamic sampling" in remedy(0.75, rollout__refill_budget=5)
    assert "dynamic sampling" not in remedy(0.75)
    assert "dynamic sampling" not in remedy(1.0)


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("not_mixed", "partial credit"),
        ("overlong", "rollout.max_tokens"),
        ("unscored", "reward that raises"),
        ("alone", "rollout.replies"),
        ("empty", "stop tokens"),
        ("other", "events"),
    ],
)
def test_steps_that_trained_on_nothing_say_why_and_what_to_do(reason: str, says: str) -> None:
    rows = {
        "samples__trained": 0,
        f"samples__left_out__{reason}": 8,
        "samples__left_out__empty": 2 + 8 * (reason == "empty"),
    }
    finding = next(f for f in diagnose(look(lambda s: metrics(s, **rows))) if f.name == "trained on nothing")
    assert says in finding.remedy
    assert "refill_budget = " not in finding.remedy


def test_uniform_groups_teach_nothing_only_where_nothing_is_added_to_the_reward() -> None:
    """Where advantages are 0, or the groups are discarded, a penalty changes nothing."""
    some, all_cut, discarded = (
        next(f.what for f in diagnose(look(lambda s, c=c: punished(s, **c))) if f.name == "uniform groups")
        for c in ({"groups__uniform_fraction": 0.7}, {"advantage__std": 0.0}, {"groups__discarded": 9})
    )
    assert "teaches nothing but the length penalty." in some
    assert "100 % of the sampling teaches nothing." in all_cut
    assert "100 % of the sampling teaches nothing." in discarded


@pytest.mark.parametrize(
    ("settings", "advised"),
    [
        ({}, True),
        ({"objective__shape": "none", "objective__name": "dapo"}, True),
        ({"objective__shape": "overlong_filter"}, False),
        ({"objective__name": "dapo"}, False),
    ],
)
def test_a_shape_is_not_advised_where_one_is_set(settings: dict[str, str], advised: bool) -> None:
    found = diagnose(look(lambda s: metrics(s, length__truncated_fraction=1.0), **settings))
    remedy = next(f.remedy for f in found if f.name == "length limit")
    assert "rollout.max_tokens" in remedy
    assert ("objective.shape" in remedy) == advised


def test_rows_that_shape_or_whiten_are_those_of_the_table() -> None:
    assert {name: row.shape for name, row in TABLE.items() if row.shape != "none"} == SHAPED_ROWS
    assert {name for name, row in TABLE.items() if row.advantage is batch_whitened} == set(WHITENED_ROWS)
    assert {name for name, row in TABLE.items() if row.kl_in == "reward"} == set(WHITENED_ROWS)


def test_rows_that_clip_whole_replies_are_those_of_the_table() -> None:
    assert set(SEQUENCE_ROWS) == {name for name, row in TABLE.items() if row.clips_sequences}
    clipping = {name for name, row in TABLE.items() if isinstance(row.trust_region, Clip | MaskedWeight)}
    assert set(TOKEN_ROWS) == clipping - set(SEQUENCE_ROWS)


def test_a_token_row_that_clips_little_is_not_warned_about() -> None:
    """A thousandth of the tokens is ordinary for GRPO; never is not."""
    few, none = (look(lambda s, share=share: metrics(s, clip__fraction_tokens=share), objective__name="grpo") for share in (5e-4, 0.0))  # fmt: skip
    assert "clip never fires" not in {f.name for f in diagnose(few)}
    assert "clip never fires" in {f.name for f in diagnose(none)}


def test_uniform_groups_without_verdicts_say_nothing_about_difficulty() -> None:
    def row(step: int) -> dict[str, Any]:
        return {k: v for k, v in metrics(step, groups__uniform_fraction=0.9).items() if k != "reward/correct_fraction"}

    remedy = next(f.remedy for f in diagnose(look(row)) if f.name == "uniform groups")
    assert "easier" not in remedy
    assert "harder" not in remedy


@pytest.mark.parametrize("settings", [{"objective": "gspo"}, {"learner": {"mini_batches": "4"}}, {"rollout": [1]}, {}])
def test_settings_of_another_kind_are_no_error(settings: dict[str, Any]) -> None:
    odd = RunFacts(rows=[metrics(s) for s in range(1, 41)], evaluations=[], timings=[], events=[{"event": "alarm"}], settings=settings, state="ended")  # fmt: skip
    diagnose(odd)
