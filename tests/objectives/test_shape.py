"""Length shaping: a name, a list, both together."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gspo
from gspo import config as settings
from gspo.build import run_objective
from gspo.config import Config
from gspo.errors import ConfigError
from gspo.objectives import describe
from gspo.objectives.samples import drop_reason, train_samples
from gspo.record import run_format
from gspo.trainer import resume, train
from gspo.types import Completion, Group, Prompt, Score, Status, StopReason
from gspo.view.compare.arms import parse_arms

BOTH = ("overlong_filter", "soft_overlong")


def completion(sample: int, length: int, stop: StopReason) -> Completion:
    tokens = tuple(range(length))
    return Completion(
        prompt_id="p", sample=sample, token_ids=tokens, text="", logp_sampler=(-1.0,) * length, stop=stop, version=0
    )


def group(*members: tuple[int, StopReason]) -> Group:
    completions = [completion(i, length, stop) for i, (length, stop) in enumerate(members)]
    scores = [Score(status=Status.SCORED, reward=float(i), correct=True) for i in range(len(members))]
    return Group(prompt=Prompt(id="p", content="", text="", token_ids=(0,)), completions=completions, scores=scores)


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        ("none", ()),
        ([], ()),
        ((), ()),
        ("soft_overlong", ("soft_overlong",)),
        (["overlong_filter"], ("overlong_filter",)),
        (["overlong_filter", "soft_overlong"], BOTH),
        (["soft_overlong", "overlong_filter"], BOTH),  # the order has no effect, so there is one
        ("overlong_filter,soft_overlong", BOTH),  # as a command line gives a list
    ],
)
def test_shape_is_a_name_or_a_list(given: Any, shape: tuple[str, ...]) -> None:
    assert gspo.objective("gspo", shape=given).shape == shape


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["soft_overlong", "soft_overlong"], "twice"),
        (["soft_overlong", "none"], "must be none, or a list of overlong_filter and soft_overlong"),
        (["hard"], "must be none, or a list"),
        (3, "must be none, or a list"),
        ([3], "must be none, or a list"),
        ([["soft_overlong"]], "must be none, or a list"),
        ({"soft_overlong": 1}, "must be none, or a list"),
        ("", "must be none, or a list"),
    ],
)
def test_a_wrong_shape_is_refused(given: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        gspo.objective("gspo", shape=given)


def test_the_filter_drops_truncated_completions_and_the_penalty_acts_on_the_others() -> None:
    objective = gspo.objective("gspo", shape=list(BOTH), overlong_limit=10, overlong_cache=4)
    members = group((3, StopReason.EOS), (8, StopReason.EOS), (9, StopReason.EOS), (10, StopReason.LENGTH))
    samples = train_samples([members], objective, max_tokens=10)
    # 0 up to 6 tokens, then -1/4 per token. The truncated completion is gone, not penalized.
    assert [s.sample for s in samples] == [0, 1, 2]
    assert [s.reward for s in samples] == [0.0, 1.0 - 2 / 4, 2.0 - 3 / 4]
    assert drop_reason(members.completions[3], members.scores[3], objective) == "overlong"


def test_settings_of_the_penalty_need_it_in_the_list() -> None:
    with pytest.raises(ConfigError, match="overlong_cache has no effect"):
        gspo.objective("gspo", shape=["overlong_filter"], overlong_cache=3)
    gspo.objective("gspo", shape=list(BOTH), overlong_cache=3)


def test_a_ramp_that_no_completion_reaches_is_refused_in_a_list_too(tiny: Callable[..., Config]) -> None:
    config = tiny("objective.shape=overlong_filter,soft_overlong", "objective.overlong_limit=100")
    with pytest.raises(ConfigError, match="never applies"):
        run_objective(config)


def test_a_run_combines_them_resumes_and_says_so(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny("steps=2", "eval.every=0", 'objective.shape=["overlong_filter", "soft_overlong"]')
    train(config, display)
    run = Path(config.run_dir)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all("reward/length_penalty" in row and "samples/dropped/overlong" in row for row in rows[1:])
    facts = run_format.read(run).objective
    assert facts is not None
    assert facts.shape == "overlong_filter,soft_overlong"
    assert settings.load(run / "config.toml").objective.settings["shape"] == list(BOTH)
    assert resume(run, display, steps=3).step == 3


def test_descriptions_show_the_list() -> None:
    records = {record["name"]: record for record in json.loads(json.dumps(describe.as_data()))}
    assert records["dapo"]["options"]["shape"] == ["soft_overlong"]
    assert records["gspo"]["settings"]["shape"] == []
    line = next(line for line in describe.as_text().splitlines() if line.startswith("dapo"))
    assert "shape=soft_overlong" in line
    assert describe.resolved(gspo.objective("gspo"))["shape"] == "none"
    both = replace(gspo.objective("gspo"), shape=BOTH)
    assert describe.resolved(both)["shape"] == "overlong_filter,soft_overlong"


def test_an_arm_of_a_comparison_may_have_a_list() -> None:
    arms = parse_arms('gspo,dapo+shape=["overlong_filter","soft_overlong"]+kl=0,grpo')
    assert [arm.objective for arm in arms] == ["gspo", "dapo", "grpo"]
    config = settings.override({}, arms[1].overrides, where="test")
    assert gspo.objective("dapo", **config.objective.settings).shape == BOTH
