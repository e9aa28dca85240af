"""Parsing of arms and seeds from the command line."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gspo.errors import ConfigError
from gspo.view.compare.arms import parse_arm, parse_arms, parse_seeds, slug


def test_the_arms_of_the_paper() -> None:
    arms = parse_arms("grpo, grpo+replay,gspo")
    assert [a.label for a in arms] == ["grpo", "grpo+replay", "gspo"]
    assert [a.overrides for a in arms] == [
        ["objective.name=grpo"],
        ["objective.name=grpo", "routing.replay=old"],
        ["objective.name=gspo"],
    ]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("gspo+replay=sampler", ["routing.replay=sampler"]),
        ("grpo+kl=0+clip_high=0.27", ["objective.kl=0", "objective.clip_high=0.27"]),
        ("gspo+clip_low=auto:0.15", ["objective.clip_low=auto:0.15"]),
        ("gspo+clip-low=1e-3", ["objective.clip_low=1e-3"]),
        ("gspo+learner.learning_rate=1e-4", ["learner.learning_rate=1e-4"]),
        ("grpo+kl=1e+3", ["objective.kl=1e+3"]),
        ("grpo+kl=+1E+3+replay", ["objective.kl=+1E+3", "routing.replay=old"]),
        ("grpo+kl_estimator=k3+", ["objective.kl_estimator=k3+"]),
        ("grpo+kl_estimator=k3++kl=0.1", ["objective.kl_estimator=k3+", "objective.kl=0.1"]),
        ("gspo+learner.schedule=linear+keep=mixed", ["learner.schedule=linear", "objective.keep=mixed"]),
    ],
)
def test_options(text: str, options: list[str]) -> None:
    (arm,) = parse_arms(text)
    assert list(arm.options) == options
    assert arm.objective == text.partition("+")[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an arm without a name"),
        ("grpo,", "an arm without a name"),
        ("+replay", "an arm without a name"),
        ("grpo,gspo,grpo", "'grpo' is given twice"),
        ("grpo+rplay", "'rplay' is not an option"),
        ("grpo+my_file.py:score", "is not an option"),
        ("grpo+data.held_out=3", "the same for all arms"),
        ("grpo+cold_start.steps=3", "the same for all arms"),
        ("grpo+model.build=tiny_moe", "the same for all arms"),
        ("grpo+model.build_options.num_experts=4", "the same for all arms"),
        ("grpo+model.path=x", "the same for all arms"),
        ("grpo+objective.name=gspo", "the same for all arms"),
        ("grpo+kl=\x1b[31m", "unprintable characters"),
        ("grpo+kl=\udcff", "unprintable characters"),
    ],
)
def test_invalid_arms_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        parse_arms(text)
    assert "\n" not in str(error.value)


NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(lambda name: name != "replay")
NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers().map(str),
    st.floats(min_value=1, max_value=1e30).map(lambda x: f"{x:e}"),
    st.floats(min_value=1, max_value=1e30).map(lambda x: f"+{x:E}"),
)


@given(objective=NAMES, options=st.lists(st.tuples(NAMES, NUMBERS), max_size=4))
@example(objective="grpo", options=[("kl", "1e+22"), ("e", "5e+5"), ("e", "1")])
def test_numbers_with_a_plus_sign_are_not_split(objective: str, options: list[tuple[str, str]]) -> None:
    label = "+".join([objective, *(f"{key}={value}" for key, value in options)])
    arm = parse_arm(label)
    assert arm.objective == objective
    assert list(arm.options) == [f"objective.{key}={value}" for key, value in options]


@given(st.text(max_size=30))
@example("+")
@example("a+b=c+")
@example(",".join(["x"] * 3))
def test_any_text_is_parsed_or_refused_with_a_one_line_error(text: str) -> None:
    try:
        arms = parse_arms(text)
    except ConfigError as refused:
        lines = str(refused).splitlines()
    else:
        lines = [arm.label for arm in arms if arm.objective][:1]
    assert len(lines) == 1


@given(st.lists(st.text(min_size=1, max_size=200), min_size=2, max_size=6, unique=True))
@example(["gspo+kl=0.1", "gspo+kl=0_1", "gspo/kl=0.1", "gspo:kl=0.1"])
@example(["a" * 80, "a" * 81, "a" * 82])
@example(["..", ".", "../x"])
def test_slugs_are_safe_and_unique_file_names(labels: list[str]) -> None:
    slugs = [slug(label) for label in labels]
    assert len(set(slugs)) == len(labels)
    assert all(re.fullmatch(r"[A-Za-z0-9_+=-][A-Za-z0-9._+=-]{0,79}", s) for s in slugs)


def test_common_labels_are_their_own_slug() -> None:
    assert slug("grpo+replay") == "grpo+replay"
    assert slug("gspo+clip_low=3e-4") == "gspo+clip_low=3e-4"


@pytest.mark.parametrize(
    ("text", "seeds"), [("0", [0]), ("0,1,2", [0, 1, 2]), ("0-4", [0, 1, 2, 3, 4]), ("7, 1-2", [7, 1, 2])]
)
def test_seeds(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "-1", "1,", "3-1", "0,0", "0-2,1", "1.5", "0-99999999", "٣"])
def test_invalid_seeds_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--seeds"):
        parse_seeds(text)
