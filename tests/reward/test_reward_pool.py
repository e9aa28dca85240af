"""Scoring a batch of completions without faults: calling convention, weights, statuses, order."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gspo.errors import RewardError
from gspo.types import Status

ECHO = """
    import json
    def score(prompts, completions, **columns):
        print(json.dumps([prompts, completions, columns]), file=open({log!r}, "a"))
        return [float(len(c)) for c in completions]
"""


def test_columns_arrive_as_in_trl(make_pool, reward_file, group, tmp_path):
    log = tmp_path / "log"
    pool = make_pool(reward_file(ECHO.format(log=str(log))))
    scores = pool.score([group(["a", "bb"], content="Q", answer="7", tags=["x", {"y": None}])])
    assert [s.reward for s in scores[0]] == [1.0, 2.0]
    prompts, completions, columns = json.loads(log.read_text())
    assert prompts == ["Q", "Q"]
    assert completions == ["a", "bb"]
    assert columns == {
        "answer": ["7", "7"],
        "tags": [["x", {"y": None}]] * 2,
        "completion_ids": [[0, 1], [1, 2]],
    }


def test_chat_prompts_give_chat_completions(make_pool, reward_file, group, tmp_path):
    log = tmp_path / "log"
    pool = make_pool(reward_file(ECHO.format(log=str(log))))
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    pool.score([group(["a", "b"], content=messages)])
    prompts, completions, _ = json.loads(log.read_text())
    assert prompts == [messages, messages]
    assert completions == [[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "b"}]]


@pytest.mark.parametrize(
    "head",
    [
        "def score(completions, answer):",
        "def score(prompts, completions, answer=None, other=3):",
        "def score(completions, **kwargs):\n    answer = kwargs['answer']; assert kwargs['prompts'] == ['Q', 'Q']",
        "async def score(completions, answer, **kwargs):",
    ],
)
def test_only_what_the_function_names_is_passed(make_pool, reward_file, group, head):
    pool = make_pool(reward_file(f"{head}\n    return [float(c == a) for c, a in zip(completions, answer)]"))
    scores = pool.score([group(["7", "8"], content="Q", answer="7", more="ignored")])
    assert [s.reward for s in scores[0]] == [1.0, 0.0]


def test_a_missing_column_is_named(make_pool, reward_file, group):
    pool = make_pool(reward_file("def score(completions, solution): return [1.0] * len(completions)"))
    (score,) = pool.score([group(["a"], answer="7")])[0]
    assert score.failure == "raised: score: needs solution, but the data's columns are answer"


def test_options_reach_the_function(make_pool, reward_file, group):
    name = reward_file("def score(completions, *, bonus=1, **_): return [bonus] * len(completions)")
    pool = make_pool(name, options={name: {"bonus": 2.5}})
    assert pool.score([group(["a"], bonus="a column of the same name")])[0][0].reward == 2.5


def test_weights_parts_and_correct(make_pool, reward_file, group):
    first = reward_file(
        "def right(completions, **_): return [float(c == 'yes') for c in completions]", function="right"
    )
    second = reward_file("def long(completions, **_): return [len(c) for c in completions]", "b.py", function="long")
    pool = make_pool(first, second, weights=(2.0, -0.5), correct_above=0.5)
    yes, no = pool.score([group(["yes", "no"])])[0]
    assert pool.names == ("right", "long")
    assert (yes.status, yes.reward, yes.correct, yes.parts) == (Status.SCORED, 0.5, True, {"right": 1.0, "long": 3.0})
    assert (no.status, no.reward, no.correct, no.parts) == (Status.SCORED, -1.0, False, {"right": 0.0, "long": 2.0})


def test_two_functions_of_one_name_keep_their_parts_apart(make_pool, reward_file, group):
    a, b = (reward_file(f"def score(completions, **_): return [{n}] * len(completions)", f"{n}.py") for n in (1, 2))
    assert make_pool(a, b).score([group(["x"])])[0][0].parts == {a: 1.0, b: 2.0}


def test_abstaining(make_pool, reward_file, group):
    first = reward_file(
        "def a(completions, **_): return [1.0 if c == 'one' else None for c in completions]", "a.py", "a"
    )
    second = reward_file(
        "def b(completions, **_): return [None if c == 'none' else 0.25 for c in completions]", "b.py", "b"
    )
    one, two, none = make_pool(first, second).score([group(["one", "two", "none"])])[0]
    assert (one.reward, one.correct) == (1.25, True)
    # The first function has no opinion on the second completion, which is not a 0: its only other value is 1.
    assert (two.status, two.reward, two.correct, two.parts) == (Status.SCORED, 1.25, None, {"a": None, "b": 0.25})
    assert (none.status, none.reward, none.correct) == (Status.UNSCORED, None, None)
    assert none.failure == "abstained: every reward returned None"


def test_an_abstention_counts_as_the_mean_of_the_group(make_pool, reward_file, group):
    verifier = reward_file(
        "def v(completions, **_): return [None if c == '?' else float(c) for c in completions]", "v.py", "v"
    )
    form = reward_file("def f(completions, **_): return [0.5 if c == '?' else 1.0 for c in completions]", "f.py", "f")
    pool = make_pool(verifier, form, weights=(2.0, -1.0))
    (known, unknown, alone) = pool.score([group(["1", "0", "0", "?"]), group(["3", "?", "?"]), group(["?", "?"])])
    assert [s.reward for s in known] == pytest.approx([2 - 1, -1, -1, 2 / 3 - 0.5])
    assert [s.reward for s in unknown] == pytest.approx([6 - 1, 6 - 0.5, 6 - 0.5])  # another group, another mean
    assert [s.reward for s in alone] == pytest.approx([-0.5, -0.5])  # nothing to compare: the other function alone
    # Centered within the group, the verifier says nothing about the completion that it abstained on.
    plain = [s.reward + 1.0 * s.parts["f"] for s in known]
    assert plain[3] == pytest.approx(sum(plain) / 4)


def test_a_function_without_a_weight_does_not_score_a_completion(make_pool, reward_file, group):
    verifier = reward_file(
        "def v(completions, **_): return [None if c == '?' else 1.0 for c in completions]", "v.py", "v"
    )
    length = reward_file("def n(completions, **_): return [float(len(c)) for c in completions]", "n.py", "n")
    known, unknown = make_pool(verifier, length, weights=(1.0, 0.0)).score([group(["x", "?"])])[0]
    assert (known.reward, known.status) == (1.0, Status.SCORED)
    assert (unknown.reward, unknown.status) == (None, Status.UNSCORED)
    assert unknown.failure == "abstained: every reward with a weight returned None"


def test_values_of_an_unscored_completion_are_in_no_mean(make_pool, reward_file, group):
    first = reward_file(
        "def a(completions, **_): return [{'?': None, 'x': 9.0}.get(c, 1.0) for c in completions]", "a.py", "a"
    )
    second = reward_file(
        "def b(completions, **_): return [float('nan') if c == 'x' else 0.0 for c in completions]", "b.py", "b"
    )
    one, unknown, failed = make_pool(first, second).score([group(["1", "?", "x"])])[0]
    assert (one.reward, unknown.reward, failed.reward) == (1.0, 1.0, None)


def test_a_failure_of_one_function_leaves_the_other_parts(make_pool, reward_file, group):
    good = reward_file("def good(completions, **_): return [1] * len(completions)", "a.py", "good")
    bad = reward_file("def bad(completions, **_): 1 / 0", "b.py", "bad")
    (score,) = make_pool(good, bad).score([group(["x"])])[0]
    assert (score.status, score.reward, score.parts) == (Status.UNSCORED, None, {"good": 1.0, "bad": None})
    assert score.failure == "raised: bad: ZeroDivisionError: division by zero (b.py:1)"


def test_order_does_not_depend_on_timing(make_pool, reward_file, group):
    pool = make_pool(
        reward_file("""
            import random, time
            def score(completions, **_):
                time.sleep(random.random() / 20)
                return [float(c) for c in completions]
        """),
        workers=3,
    )
    groups = [group([str(10 * g + i) for i in range(3)], id=f"train/{g}") for g in range(20)]
    for _ in range(2):
        rewards = [[s.reward for s in scores] for scores in pool.score(groups)]
        assert rewards == [[10.0 * g + i for i in range(3)] for g in range(20)]


def test_empty_batches_and_groups(make_pool, reward_file, group):
    pool = make_pool(reward_file("def score(completions, **_): return [1] * len(completions)"))
    assert pool.score([]) == []
    assert [len(s) for s in pool.score([group([]), group(["a"]), group([])])] == [0, 1, 0]


def test_any_text_reaches_the_function_unchanged(make_pool, reward_file, group):
    texts = ["", "\ud800 lone", "\x00\x1b[31m", "line\nbreak\u2028", "🦀" * 1000, "x" * 2_000_000]
    pool = make_pool(
        reward_file("""
            def score(completions, texts, **_):
                return [float(c == t) for c, t in zip(completions, texts[0], strict=True)]
        """)
    )
    assert [s.reward for s in pool.score([group(texts, texts=texts)])[0]] == [1.0] * len(texts)


def test_columns_that_are_not_json_are_named(make_pool, reward_file, group):
    pool = make_pool(reward_file("def score(completions, **_): return [1] * len(completions)"))
    with pytest.raises(RewardError, match=r"prompt train/0: column when must hold JSON values, not \{1\}"):
        pool.score([group(["a"], when={1})])
    assert pool.score([group(["a"])])[0][0].reward == 1.0


def test_nan_in_a_column_reaches_the_function(make_pool, reward_file, group):
    pool = make_pool(reward_file("def score(completions, x): return [float(v != v) for v in x]"))
    assert pool.score([group(["a"], x=float("nan"))])[0][0].reward == 1.0


def test_a_file_edited_during_the_run_changes_nothing(make_pool, reward_file, group):
    code = (
        "import os\ndef score(completions, **_):\n    return [{} if c != 'die' else os._exit(1) for c in completions]"
    )
    pool = make_pool(reward_file(code.format(1)))
    reward_file(code.format(2))
    assert [s.reward for s in pool.score([group(["a", "die", "b"])])[0]] == [1.0, None, 1.0]
    assert pool.score([group(["a"])])[0][0].reward == 1.0


def test_closed_pool_raises_an_error(make_pool, reward_file, group):
    pool = make_pool(reward_file("def score(completions, **_): return [1] * len(completions)"))
    pool.close()
    pool.close()
    assert pool.pids() == []
    with pytest.raises(RewardError, match="closed"):
        pool.score([group(["a"])])


def test_the_worker_imports_no_torch(make_pool, reward_file, group):
    pool = make_pool(
        "math_answer",
        "exact_answer",
        "task_answer",
        reward_file("import sys\ndef score(completions, **_): return ['torch' in sys.modules] * len(completions)"),
        task=("countdown", {}),
    )
    assert pool.score([group(["7"], answer="7", target=7, numbers=[7])])[0][0].parts["score"] == 0.0
    code = "import sys, gspo.reward.reward; sys.exit('torch' in sys.modules or 'math_verify' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


STEPS = """
    def tokens(prompts, completions, completion_ids, **columns):
        return [[0.5] * len(ids) if len(ids) > 1 else {{0: 2.0}} for ids in completion_ids]
    def marked(prompts, completions, **columns):
        return [{{1: 1.0, 0: -1.0}}, 3.0]
"""


def test_rewards_of_steps_add_up_and_the_rest_belongs_to_the_last_step(make_pool, reward_file, group):
    file = reward_file(STEPS.format()).rpartition(":")[0]
    pool = make_pool(f"{file}:tokens", f"{file}:marked", weights=(2.0, 1.0))
    ((first, second),) = pool.score([group(["ab", "abcd"], content="Q")])
    assert first.reward == 2.0
    assert first.step_rewards == ((0, 0.0), (1, 2.0))
    assert first.parts == {"tokens": 1.0, "marked": 0.0}
    # The second function judges the second completion as a whole.
    assert second.reward == sum(value for _, value in second.step_rewards)
    assert second.step_rewards[-1] == (len(second.step_rewards) - 1, 1.0 + 3.0)


@pytest.mark.parametrize(
    ("value", "failure"),
    [
        ("[1.0]", "invalid: score: 1 step rewards, not one for each of 2 tokens"),
        ("{5: 1.0}", "invalid: score: a step reward must be a finite number at the index of a token"),
        ("{'0': 1.0}", "invalid: score: a step reward must be"),
        ("[1.0, None]", "invalid: score: a step reward must be"),
        ("{}", "invalid: score: returned {} (dict): no step rewards"),
    ],
)
def test_rewards_of_steps_must_fit_the_tokens(make_pool, reward_file, group, value, failure):
    pool = make_pool(reward_file(f"def score(prompts, completions, **columns):\n    return [{value}]\n"))
    ((score,),) = pool.score([group(["ab"], content="Q")])
    assert score.status is Status.UNSCORED
    assert score.failure.startswith(failure)
