"""Rewards before the run: on the data's own answers, on sampled completions, and the sandbox for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from examination import SAMPLED

from gspo.config import Config
from gspo.preflight import rewards
from gspo.reward.sandbox import probe
from gspo.reward.traits import reward_traits

FILE = ["data.task=", "data.task_options={}", "data.task_size=20000", "data.held_out=2"]
COMPLETIONS = (*SAMPLED, "reward functions", "reward on completions")
KNOWN = ("data", "reward functions", "known answers")


@pytest.fixture
def rewarded(tiny: Callable[..., Config], tmp_path: Path) -> Callable[..., Config]:
    """A config whose reward is a function with this body; `c` is a completion."""

    def make(body: str, *overrides: str) -> Config:
        file = tmp_path / "mine.py"
        score = "def score(completions, **columns):\n    return [one(c) for c in completions]\n"
        file.write_text(f"import time\ndef one(c):\n    {body}\n{score}")
        return tiny(f"reward.functions={file}:score", *overrides)

    return make


def test_a_reward_that_differs_between_completions_passes(rewarded: Callable[..., Config], examined: Any) -> None:
    found = examined(rewarded("return len(c) % 3"), *COMPLETIONS)
    assert found.levels("reward functions") == ["ok"]
    assert found.levels("reward on completions") == ["ok", "ok"]
    numbers = found["reward on completions"][0].numbers
    assert (numbers["low"], numbers["high"]) == (0, 2)
    assert numbers["std"] > 0.3


@pytest.mark.parametrize(
    ("body", "level", "words"),
    [
        ("raise KeyError('no such thing')", "FAIL", "raised: score: KeyError: 'no such thing'"),
        ("return None if len(c) % 5 else 'text'", "FAIL", "could not be scored"),
        ("return ValueError('a few') if len(c) % 3 == 0 else 1.0 * (len(c) % 2)", "warning", "ValueError: a few"),
        ("return 1.0", "warning", "All are equal"),
    ],
    ids=["raises", "nonsense", "raises at times", "constant"],
)
def test_a_reward_that_is_broken(
    rewarded: Callable[..., Config], examined: Any, body: str, level: str, words: str
) -> None:
    finding = examined(rewarded(body), *COMPLETIONS)["reward on completions"][0]
    assert finding.level == level
    assert words in finding.what


def test_a_slow_reward_is_a_warning(rewarded: Callable[..., Config], examined: Any) -> None:
    config = rewarded("time.sleep(0.3); return len(c) % 3", "rollout.prompts=500")
    finding = examined(config, *COMPLETIONS, prompts=2)["reward on completions"][-1]
    assert finding.level == "warning"
    assert finding.numbers["seconds"] >= 0.1
    assert "reward.workers" in finding.do


def test_a_reward_that_cannot_be_loaded_fails(tiny: Callable[..., Config], examined: Any) -> None:
    found = examined(tiny("reward.functions=nowhere.py:score"), "data", "reward functions", "known answers")
    assert found.levels("reward functions") == ["FAIL"]
    assert "rewards could not be loaded" in found.only("not checked").what


def test_a_reward_that_needs_another_field_fails(tiny: Callable[..., Config], tmp_path: Path, examined: Any) -> None:
    (tmp_path / "needs.py").write_text("def score(completions, solution, **columns):\n    return [1.0]\n")
    finding = examined(tiny(f"reward.functions={tmp_path}/needs.py:score"), *KNOWN).only("reward functions")
    assert finding.level == "FAIL"
    assert "needs solution" in finding.what


# ------------------------------------------------------------------------------------------------- known answers


@pytest.fixture
def with_answers(tiny: Callable[..., Config], tmp_path: Path) -> Callable[..., Config]:
    """A config of problems with these expected answers."""

    def make(answers: list[Any], *overrides: str) -> Config:
        path = tmp_path / "problems.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": a}) + "\n" for i, a in enumerate(answers)))
        return tiny(*FILE, f"data.path={path}", *overrides)

    return make


@pytest.mark.parametrize(
    ("answers", "overrides", "level", "words"),
    [
        (["72", "1/2", "-3"], ["reward.functions=math_answer"], "ok", "as correct"),
        (["a #### 72", "b #### 7"], ["reward.functions=exact_answer", "data.answer_after=####"], "ok", "as correct"),
        (["Paris", "Rome"], ["reward.functions=math_answer"], "FAIL", "abstains on every one"),
        (["72", "Paris"], ["reward.functions=math_answer"], "warning", "and abstains on"),
    ],
)
def test_the_data_s_own_answers(
    with_answers: Callable[..., Config], examined: Any, answers: list[str], overrides: list[str], level: str, words: str
) -> None:
    finding = examined(with_answers(answers * 4, *overrides), *KNOWN)["known answers"][0]
    assert finding.level == level
    assert words in finding.what


def test_the_marker_option_of_a_reward_is_used(with_answers: Callable[..., Config], examined: Any) -> None:
    marker = 'reward.options.exact_answer={marker = "####"}'
    found = examined(with_answers(["7"] * 8, "reward.functions=exact_answer", marker), *KNOWN)
    assert found.levels("known answers") == ["ok"]


def test_a_custom_reward_that_requires_more_is_only_noted(rewarded: Callable[..., Config], examined: Any) -> None:
    finding = examined(rewarded("return 0.0"), *KNOWN).only("known answers")
    assert finding.level == "note"
    assert "0 of 32" in finding.what
    failing = examined(rewarded("raise KeyError(c)"), *KNOWN)["known answers"][0]
    assert failing.level == "FAIL"


def test_an_empty_completion_that_is_correct_is_a_warning(rewarded: Callable[..., Config], examined: Any) -> None:
    found = examined(rewarded("return 1.0"), *KNOWN)
    assert found.levels("known answers") == ["ok", "warning", "warning"]
    assert "empty completion" in found["known answers"][2].what


@pytest.mark.parametrize(
    ("body", "fooled"),
    [
        ("return float(answer in c)", True),
        ("return float(answer in c.split('</think>')[-1])", True),
        ("return float(answer == c.rpartition('####')[2].strip())", False),
    ],
    ids=["anywhere", "anywhere after the thinking", "final answer only"],
)
def test_a_wrong_final_answer_after_correct_working_is_scored(
    with_answers: Callable[..., Config], tmp_path: Path, examined: Any, body: str, fooled: bool
) -> None:
    score = "def score(completions, answer, **_):\n    return list(map(one, completions, answer))\n"
    (tmp_path / "mine.py").write_text(f"def one(c, answer):\n    {body}\n{score}")
    found = examined(with_answers(["72", "18"] * 4, f"reward.functions={tmp_path}/mine.py:score"), *KNOWN)
    warned = [f for f in found["known answers"] if "wrong after correct working" in f.what]
    assert bool(warned) == fooled
    assert not fooled or "73" in "".join(warned[0].detail) or "19" in "".join(warned[0].detail)


@pytest.mark.parametrize("name", ["math_answer", "exact_answer", "last_number"])
@pytest.mark.parametrize(
    "answers", [["72", "18"], ["1/2", "3/4"], ["1,080", "-7"]], ids=["whole", "fractions", "signs"]
)
def test_built_in_rewards_are_not_fooled_by_correct_working(
    with_answers: Callable[..., Config], examined: Any, name: str, answers: list[str]
) -> None:
    found = examined(with_answers(answers * 4, f"reward.functions={name}"), *KNOWN)
    assert found.levels("known answers") == ["ok"]


def test_demonstrations_of_a_task_score(tiny: Callable[..., Config], examined: Any, monkeypatch: Any) -> None:
    config = tiny("reward.functions=[]")
    assert examined(config, *KNOWN).levels("known answers") == ["ok"]
    demonstrated = rewards._demonstrated

    def nonsense(*arguments: Any) -> Any:
        return [rewards.KnownAnswer(prompt=k.prompt, texts=("nonsense",)) for k in demonstrated(*arguments)]

    monkeypatch.setattr(rewards, "_demonstrated", nonsense)
    finding = examined(config, *KNOWN).only("known answers")
    assert finding.level == "warning"
    assert finding.numbers["right"] == 0


def test_tests_that_do_not_work_in_the_sandbox_are_reported(
    tiny: Callable[..., Config], tmp_path: Path, examined: Any
) -> None:
    rows = [["import no_such_module\nassert f(1) == 1"]] * 12
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "tests": t}) + "\n" for i, t in enumerate(rows)))
    config = tiny(*FILE, f"data.path={path}", "data.answer_field=", "reward.functions=code_tests")
    finding = examined(config, *KNOWN)["known answers"][0]
    assert finding.level == "FAIL"
    assert "The tests of 10 of 10 problems do not work" in finding.what
    assert "no_such_module" in finding.detail[0]


def test_solutions_of_programming_problems_are_tried() -> None:
    make = reward_traits("code_tests").known_answers
    assert make is not None
    columns = {"canonical_solution": "    return 1\n", "test": "..."}
    assert make(columns, {}) == ["```python\n    return 1\n\n```"]
    assert make({"tests": []}, {}) == []


# ------------------------------------------------------------------------------------------------- sandbox


@pytest.mark.parametrize(
    ("functions", "works", "level"),
    [
        ("code_tests", True, "ok"),
        ("code_tests", False, "FAIL"),
        ("exact_answer", True, "ok"),
        ("exact_answer", False, "note"),
    ],
)
def test_the_sandbox(
    tiny: Callable[..., Config], examined: Any, monkeypatch: Any, functions: str, works: bool, level: str
) -> None:
    class Bubblewrap:
        number = 5

        def __str__(self) -> str:
            return "L5 bubblewrap"

    best = (Bubblewrap(), ()) if works else (None, ("none is installed",))
    monkeypatch.setattr(probe, "_best", lambda python, packages: best)
    finding = examined(tiny(f"reward.functions={functions}"), "sandbox").only("sandbox")
    assert finding.level == level
    assert ("L5 bubblewrap" if works else "none works here") in finding.what


def test_programs_without_protection_are_a_warning(
    tiny: Callable[..., Config], examined: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(probe, "_best", lambda python, packages: (None, ("none here",)))
    config = tiny("reward.functions=code_tests", "reward.options.code_tests.allow_unsafe=true")
    found = examined(config, "sandbox")
    assert found.levels("sandbox")[0] == "warning"
    assert "no protection" in found["sandbox"][0].what
