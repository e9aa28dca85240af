"""Building a pool rejects unusable functions with a one-line error that names the location and the fix."""

from __future__ import annotations

import sys

import pytest
from processes import settled

from gspo.errors import ConfigError, RewardError

GOOD = "def score(completions, **_): return [1.0] * len(completions)"


def refused(make_pool, *functions, **settings):
    with pytest.raises((ConfigError, RewardError)) as caught:
        make_pool(*functions, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return caught.type, message


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("def score(completions, **_)\n    return 1", RewardError, ["SyntaxError", "mine.py", "line 1"]),
        ("import no_such_module", RewardError, ["No module named 'no_such_module'", "mine.py:1"]),
        ("import sys; sys.exit(3)", RewardError, ["SystemExit", "mine.py:score"]),
        ("import os; os._exit(3)", RewardError, ["exit code 3", "mine.py:score"]),
        ("raise ValueError('first\\nsecond')", RewardError, ["ValueError: first second"]),
        ("def other(completions): pass", ConfigError, ["has no score", "its functions: other"]),
        ("score = 3", RewardError, ["is not a function"]),
        ("def score(): pass", RewardError, ["(prompts, completions)", "def score(prompts, completions, **columns)"]),
        ("def score(a, b): pass", RewardError, ["(prompts, completions)"]),
        ("def score(prompts, completions, /): pass", RewardError, ["(prompts, completions)"]),
    ],
)
def test_bad_files(make_pool, reward_file, code, kind, words):
    name = reward_file(code)
    caught, message = refused(make_pool, name)
    assert caught is kind
    assert all(word in message for word in [*words, name])


def test_user_code_is_never_imported_by_the_trainer(make_pool, reward_file, tmp_path):
    before = set(sys.modules)
    make_pool(reward_file(f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getppid()))\n{GOOD}"))
    assert (tmp_path / "pid").exists()
    assert not [name for name in set(sys.modules) - before if name.startswith("reward_file_")]


@pytest.mark.parametrize(
    ("functions", "settings", "words"),
    [
        (["math_answr"], {}, "did you mean math_answer?"),
        (["nothing"], {}, "known: code_tests, completion_format"),
        (["missing.py:score"], {}, "no file"),
        (["missing.py"], {}, "missing.py:score"),
        (["module.path:score"], {}, "file.py:function"),
        ([], {}, "name at least one"),
        (["exact_answer", "exact_answer"], {}, "named twice"),
        (["task_answer"], {}, "set data.task"),
        (["exact_answer"], {"options": {"exact_answer": {"markr": "#"}}}, "did you mean marker?"),
        (["exact_answer"], {"options": {"exact_answer": {"answer": "7"}}}, "unknown option 'answer'"),
        (["exact_answer"], {"options": {"exact_answer": 3}}, "table of options"),
        (["exact_answer"], {"options": {"math_answer": {}}}, "not among reward.functions"),
        (["completion_format"], {}, "reward.options.completion_format.pattern"),
        (["completion_format"], {"options": {"completion_format": {"pattern": "(("}}}, "not a regular expression"),
        (["exact_answer"], {"weights": (1.0, 2.0)}, "2 weights for 1 functions"),
        (["exact_answer"], {"weights": (float("nan"),)}, "finite"),
    ],
)
def test_bad_settings(make_pool, functions, settings, words):
    kind, message = refused(make_pool, *functions, **settings)
    assert kind is ConfigError
    assert words in message


def test_unknown_option_of_a_user_function(make_pool, reward_file):
    name = reward_file("def score(completions, scale=1): return [scale] * len(completions)")
    kind, message = refused(make_pool, name, options={name: {"scael": 2}})
    assert kind is ConfigError
    assert "did you mean scale?" in message


def test_file_can_import_its_siblings_and_shadows_no_standard_module(make_pool, reward_file, group):
    reward_file("VALUE = 3.0", "sibling.py")
    reward_file("raise AssertionError('hid the standard library')", "random.py")
    name = reward_file(f"import sibling, random\nrandom.random()\n{GOOD.replace('1.0', 'sibling.VALUE')}", "json.py")
    assert make_pool(name).score([group(["a"])])[0][0].reward == 3.0


def test_one_file_with_two_functions_is_imported_once(make_pool, reward_file, group, tmp_path):
    log = str(tmp_path / "log")
    name = reward_file(f"open({log!r}, 'a').write('x')\n{GOOD}\nother = score")
    make_pool(name, name.replace(":score", ":other")).score([group(["a"])])
    assert (tmp_path / "log").read_text() == "x"


def test_a_failed_construction_leaves_no_process(make_pool, reward_file, children):
    before = children()
    refused(make_pool, reward_file("import no_such_module"), workers=3)
    assert settled(children, before) == before
