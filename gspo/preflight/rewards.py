"""The rewards: whether they load, know a right answer when they see one, and how they take the sampled replies.

A reward is tried in the run's own worker processes, with the run's deadlines.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import islice
from typing import Any

from gspo.data.problems import PromptOrder, demonstrations
from gspo.data.task import build_task
from gspo.errors import ConfigError
from gspo.preflight.case import Case
from gspo.preflight.files import shown
from gspo.preflight.findings import Finding, fail, note, ok, warning
from gspo.preflight.pace import duration, rollout_seconds
from gspo.reward.reward import RewardPool
from gspo.types import UNIFORM_TOLERANCE, Completion, Prompt, Score, StopReason

TRIED = 32
"""Problems whose own answers are tried."""
SOLUTIONS = ("canonical_solution", "code", "solution", "answer")
"""Fields that hold a program which passes the row's tests."""


def check_functions(case: Case) -> Iterator[Finding]:
    assert case.problems is not None
    data = case.config.data
    task = (data.task, data.task_options) if data.task else None
    case.rewards = pool = RewardPool(case.config.reward, task)
    case.stack.callback(pool.close)
    pool.check_columns(set().union(*(p.columns for p in case.problems.train)))
    yield ok(f"{', '.join(pool.names)} can be loaded and called with the data's fields.", functions=list(pool.names))


# ------------------------------------------------------------------------------------------------- known answers


@dataclass(frozen=True, kw_only=True)
class KnownAnswer:
    """A problem with replies that state its own answer, for one reward function."""

    prompt: Prompt
    texts: tuple[str, ...]


def check_known(case: Case) -> Iterator[Finding]:
    assert case.rewards is not None
    specs = case.config.reward.functions or ("task_answer",)
    for place, (name, spec) in enumerate(zip(case.rewards.names, specs, strict=True)):
        known = _known(case, spec) if spec in BUILT_IN or place == 0 else []
        if known:
            yield from _judged(case, name, spec, known)
            yield from _planted(case, name, spec, known)
    if "code_tests" in specs:
        yield from _tests(case)
    yield from _empty(case)


def _judged(case: Case, name: str, spec: str, known: Sequence[KnownAnswer]) -> Iterator[Finding]:
    """What the function says of the data's own answers."""
    assert case.rewards is not None
    started = time.monotonic()
    scores = case.rewards.score([(k.prompt, [_reply(case, k.prompt, i, t) for i, t in enumerate(k.texts)]) for k in known])  # fmt: skip
    each = (time.monotonic() - started) / sum(len(k.texts) for k in known)
    best = [max((v for s in group if (v := s.parts.get(name)) is not None), default=None) for group in scores]
    failed = [s.failure for group in scores for s in group if s.failure and not s.failure.startswith("abstained")]
    right = sum(v is not None and v > case.config.reward.correct_above for v in best)
    numbers: dict[str, Any] = {"function": name, "tried": len(known), "right": right, "seconds": each}
    if failed:
        share = len(failed) / sum(len(k.texts) for k in known)
        level = fail if share > case.config.reward.max_unscored_fraction else warning
        yield level(f"{name} could not score {share:.0%} of the replies that state the data's own answers; the first reason: {failed[0]}", "Fix the reward function, or the data that it fails on.", **numbers)  # fmt: skip
    elif right == len(known):
        yield ok(f"{name} gives full marks to the data's own answers ({right} of {len(known)}), {duration(each)} per reply.", **numbers)  # fmt: skip
    else:
        yield _missed(case, name, spec, known, best, right, numbers)


def _missed(
    case: Case, name: str, spec: str, known: Sequence[KnownAnswer], best: Sequence[float | None], right: int, numbers: dict[str, Any]
) -> Finding:  # fmt: skip
    silent = sum(v is None for v in best)
    at = next(i for i, v in enumerate(best) if v is None or v <= case.config.reward.correct_above)
    example = [f"{known[at].prompt.id}: expected {known[at].prompt.columns.get('answer')!r:.80}, tried {shown(known[at].texts[0], 120)!r}, value {best[at]}"]  # fmt: skip
    if spec not in BUILT_IN:
        return note(f"{name} calls {right} of {len(known)} replies right that merely state the data's own answer; fine if it asks for more than that.", "Look at the example: would a right reply look like this?", detail=example, **numbers)  # fmt: skip
    if silent == len(known) and len(case.config.reward.functions) < 2:
        return fail(f"{name} abstains on every one of the data's own answers, so no reply could ever be scored.", "The expected answers are not of the kind this reward reads; use another (exact_answer for words), or set data.answer_field and data.answer_after.", detail=example, **numbers)  # fmt: skip
    cause = f", and abstains on {silent}" if silent else ""
    return warning(f"{name} calls only {right} of {len(known)} of the data's own answers right{cause}: where it does not, no reply can be right.", "Check data.answer_field, data.answer_after and the reward's options against the example, or take these rows out.", detail=example, **numbers)  # fmt: skip


def _planted(case: Case, name: str, spec: str, known: Sequence[KnownAnswer]) -> Iterator[Finding]:
    """A wrong final answer after right working must not be right: it is what a model learns to write otherwise."""
    assert case.rewards is not None
    if spec == "code_tests":
        return
    planted = [(k, texts) for k in known if (texts := _wrong_at_last(k, known))]
    groups = [(k.prompt, [_reply(case, k.prompt, i, t) for i, t in enumerate(texts)]) for k, texts in planted]
    scores = case.rewards.score(groups)
    fooled = [
        (k, text)
        for (k, texts), group in zip(planted, scores, strict=True)
        for text, score in zip(texts, group, strict=True)
        if (score.parts.get(name) or 0.0) > case.config.reward.correct_above
    ]
    if fooled:
        count, (first, text) = sum(len(texts) for _, texts in planted), fooled[0]
        answer = first.prompt.columns.get("answer")
        example = [f"{first.prompt.id}: expected {answer!r:.80}, tried {shown(text, 240)!r}"]
        yield warning(
            f"{name} calls {len(fooled)} of {count} completions right whose final answer is wrong after right working.",
            "Make it read the final answer alone: what follows the thinking, in the form that the prompt asks for.",
            detail=example,
            function=name,
            fooled=len(fooled),
            planted=count,
        )


def _wrong_at_last(known: KnownAnswer, others: Sequence[KnownAnswer]) -> list[str]:
    """Its own answer as working, in thought and aloud, and then a wrong answer in the same form."""
    right = _first_answer(known)
    wrong = _off_by_one(right)
    if wrong is not None and all(right in text for text in known.texts):
        pairs = [(text, wrong.join(text.rsplit(right, 1))) for text in known.texts]
    else:
        other = next((o for o in others if _first_answer(o) != right and len(o.texts) == len(known.texts)), None)
        pairs = list(zip(known.texts, other.texts, strict=True)) if other else []
    return [text for good, bad in pairs for text in (f"<think>{good}</think>\n{bad}", f"First: {good}\nNo. {bad}")]


def _first_answer(known: KnownAnswer) -> str:
    answer = known.prompt.columns.get("answer")
    return str(answer[0] if isinstance(answer, list) and answer else answer)


def _off_by_one(answer: str) -> str | None:
    """The next number; None if it is none."""
    try:
        number = Decimal(answer.replace(",", ""))
    except InvalidOperation:
        return None
    return str(number + 1) if number.is_finite() and abs(number) < 10**15 else None


def _empty(case: Case) -> Iterator[Finding]:
    """A reward that an empty reply can earn will be earned by empty replies."""
    assert case.rewards is not None
    prompts = _some(case)
    scores = case.rewards.score([(p, [_reply(case, p, 0, "")]) for p in prompts])
    right = sum(group[0].correct is True for group in scores)
    if right:
        yield warning(f"An empty reply counts as correct on {right} of {len(prompts)} problems.", "Make the first reward function ask for an answer; the model will find this out.", empty_correct=right)  # fmt: skip


def _tests(case: Case) -> Iterator[Finding]:
    """Tests that do not work in the sandbox fail with any program, so one that does nothing shows it."""
    assert case.rewards is not None
    prompts = _some(case)
    scores = case.rewards.score([(p, [_reply(case, p, 0, "pass")]) for p in prompts])
    reasons = [(p.id, s.failure) for p, (s,) in zip(prompts, scores, strict=True) if s.failure]
    if reasons:
        level = fail if len(reasons) / len(prompts) > case.config.reward.max_unscored_fraction else warning
        yield level(
            f"The tests of {len(reasons)} of {len(prompts)} problems do not work: their completions stay unscored.",
            "Fix these rows or take them out; docs/sandbox.md says what tests can do.",
            detail=[f"{where}: {shown(reason, 400)}" for where, reason in reasons[:3]],
            unusable=len(reasons),
        )


def _known(case: Case, spec: str) -> list[KnownAnswer]:
    if spec == "task_answer":
        return _demonstrated(case)
    options = case.config.reward.options.get(spec, {})
    made = [KnownAnswer(prompt=p, texts=tuple(BUILT_IN.get(spec, _any)(p.columns, options))) for p in _some(case)]
    return [known for known in made if known.texts]


def _some(case: Case) -> list[Prompt]:
    assert case.problems is not None
    train = case.problems.train
    return [train[i] for i in PromptOrder(len(train), case.config.seed).take(0, min(TRIED, len(train)))]


def _demonstrated(case: Case) -> list[KnownAnswer]:
    data = case.config.data
    if not build_task(data.task, data.task_options).has_demonstrations:
        return []
    problems = list(islice(demonstrations(data, case.config.seed), TRIED))
    return [
        KnownAnswer(
            prompt=Prompt(
                id=f"demonstration {i}", content=p.prompt, text=p.prompt, token_ids=(0,), columns={"answer": p.answer, **p.columns}
            ),
            texts=(p.demonstration,),
        )
        for i, p in enumerate(problems)
    ]  # fmt: skip


def _marked(columns: Mapping[str, Any], options: Mapping[str, Any], plain: str) -> list[str]:
    answer = columns.get("answer")
    answer = answer[0] if isinstance(answer, list) and answer else answer
    if answer is None or isinstance(answer, list | dict):
        return []
    marker = options.get("marker", "")
    return [f"{marker} {answer}" if marker else plain.replace("ANSWER", str(answer))]


def _math(columns: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    return _marked(columns, options, "\\boxed{ANSWER}")


def _exact(columns: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    return _marked(columns, options, "ANSWER")


def _program(columns: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    programs = [columns[name] for name in SOLUTIONS if isinstance(columns.get(name), str)]
    return [f"```python\n{program}\n```" for program in programs[:1]]


def _any(columns: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """A user's own function may ask for any form."""
    forms = ("ANSWER", "\\boxed{ANSWER}", "#### ANSWER", "<answer>ANSWER</answer>")
    return [text for form in forms for text in _marked(columns, {}, form)]


BUILT_IN = {
    "math_answer": _math,
    "exact_answer": _exact,
    "last_number": _exact,
    "code_tests": _program,
    "task_answer": _any,
}
"""How a right reply looks, for rewards whose demands are known."""


def _reply(case: Case, prompt: Prompt, sample: int, text: str) -> Completion:
    ids = tuple(case.tokenizer(text, add_special_tokens=False)["input_ids"]) if case.tokenizer else ()
    return Completion(prompt_id=prompt.id, sample=sample, token_ids=ids, text=text, logp_sampler=(0.0,) * len(ids), stop=StopReason.EOS, version=0)  # fmt: skip


# ------------------------------------------------------------------------------------------------- sampled replies


def check_replies(case: Case) -> Iterator[Finding]:
    assert case.groups is not None
    scores = [s for g in case.groups for s in g.scores]
    failed = [s.failure for s in scores if s.failure]
    if failed:
        yield _failures(case, failed, len(scores))
    rewards = [s.reward for s in scores if s.reward is not None]
    if rewards:
        yield _spread(case, scores, rewards)
    yield from _slow(case)


def _failures(case: Case, failed: Sequence[str], count: int) -> Finding:
    share, most = len(failed) / count, case.config.reward.max_unscored_fraction
    what = f"{len(failed)} of {count} sampled replies could not be scored; the first reason: {failed[0]}"
    if share > most:
        return fail(what, f"The run would stop at its first step (reward.max_unscored_fraction = {most:g}); fix the reward.", unscored=len(failed))  # fmt: skip
    return warning(what, "Such replies are left out of learning; fix the reward if it is not the reply's fault.", unscored=len(failed))  # fmt: skip


def _spread(case: Case, scores: Sequence[Score], rewards: Sequence[float]) -> Finding:
    low, high = min(rewards), max(rewards)
    correct = [s.correct for s in scores if s.correct is not None]
    right = f"; {sum(correct) / len(correct):.0%} count as correct" if correct else ""
    what = f"Rewards of {len(rewards)} sampled replies: mean {statistics.fmean(rewards):.3g}, from {low:.3g} to {high:.3g}, standard deviation {statistics.pstdev(rewards):.3g}{right}."
    numbers: dict[str, Any] = {
        "mean": statistics.fmean(rewards),
        "low": low,
        "high": high,
        "std": statistics.pstdev(rewards),
    }
    if high - low > UNIFORM_TOLERANCE * max(1.0, abs(low), abs(high)):
        return ok(what, **numbers)
    if case.cold:
        return note(f"{what} All are equal, as is to be expected before the cold start.", **numbers)
    return warning(f"{what} All are equal: nothing can be learned from them.", "Look at the reply above: does the reward read what the model writes?", **numbers)  # fmt: skip


def _slow(case: Case) -> Iterator[Finding]:
    pace = case.pace
    if pace is None:
        return
    reward = pace.reward_s * case.replies / pace.replies
    other = rollout_seconds(case, pace, case.replies / pace.replies) + (pace.learn_s * case.replies / pace.learned if pace.learned else 0.0)  # fmt: skip
    each = pace.reward_s / pace.replies
    if reward > other and reward > 5.0:
        yield warning(
            f"Scoring takes {duration(each)} per reply, {duration(reward)} per step: longer than sampling and learning together ({duration(other)}).",
            f"Make the reward faster, or raise reward.workers (now {case.config.reward.workers}).",
            seconds=each,
        )
    else:
        yield ok(f"Scoring takes {duration(each)} per reply, {duration(reward)} per step.", seconds=each)


# ------------------------------------------------------------------------------------------------- sandbox


def check_sandbox(case: Case) -> Iterator[Finding]:
    from gspo.reward.sandbox.probe import sandbox_level

    used = "code_tests" in case.config.reward.functions
    options = case.config.reward.options.get("code_tests", {})
    wanted = {k: v for k, v in options.items() if k in ("python", "packages", "allow_unsafe")}
    try:
        level = sandbox_level(**wanted)
    except ConfigError as error:
        if used:
            raise
        yield note(f"No sandbox for model-written programs works here; code_tests is not among the rewards, so none is needed. ({error})")  # fmt: skip
        return
    if used and level.number == 0:
        yield warning(f"Model-written programs would run with no protection: {level}.", "Install bubblewrap and leave allow_unsafe out.", level=level.number)  # fmt: skip
    elif used:
        yield ok(f"Model-written programs run in {level}.", level=level.number)
    else:
        yield ok(f"Not needed by these rewards; there is {level}.", level=level.number)
