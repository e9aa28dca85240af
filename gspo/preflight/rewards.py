"""The rewards: whether they load, score known answers as correct, and score the sampled completions.

In: the context. Out: findings, and the rewards of the run. Invariant: a reward is tested in the run's own worker
processes, with the run's deadlines.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import chain, islice
from typing import Any

from gspo.build import reward_pool
from gspo.data.order import PromptOrder
from gspo.data.problems import demonstrations
from gspo.data.task import build_task
from gspo.errors import ConfigError
from gspo.preflight.context import PreflightContext
from gspo.preflight.data import excerpt
from gspo.preflight.findings import Finding, fail, note, ok, warning
from gspo.preflight.machine import human
from gspo.preflight.step_time import duration, rollout_seconds
from gspo.reward.traits import RewardTraits, Service, in_form, reward_traits
from gspo.types import UNIFORM_TOLERANCE, Completion, Prompt, Score, StopReason

TRIED = 32
"""Number of problems whose own answers are scored."""
FORMS = tuple(map(in_form, ("ANSWER", "\\boxed{ANSWER}", "#### ANSWER", "<answer>ANSWER</answer>")))
"""Forms to try with a user's own function, which may require any of them."""


def check_functions(context: PreflightContext) -> Iterator[Finding]:
    assert context.problems is not None
    context.rewards = pool = reward_pool(context.config)
    context.stack.callback(pool.close)
    pool.check_columns([*context.problems.train, *chain.from_iterable(context.problems.sets.values())])
    yield ok(f"{', '.join(pool.names)} can be loaded and called with the data's fields.", functions=list(pool.names))


# ------------------------------------------------------------------------------------------- models and endpoints

TRIAL = ("What is 2 + 2?", "2 + 2 = 4")
"""What a judge or a reward model is asked first. It is not from the data."""


def check_services(context: PreflightContext) -> Iterator[Finding]:
    """One real request to each model or endpoint that a reward asks."""
    assert context.rewards is not None
    assert context.problems is not None
    if not context.rewards.services:
        yield ok("No reward asks a model or an endpoint.")
    names = set().union(*(p.columns for p in context.problems.train))
    for name, service in context.rewards.services.items():
        asking = (
            source
            for source in context.config.problem_sections
            if name in [function.name for function in context.rewards.functions_of(source)]
        )
        prompt = Prompt(
            id="trial",
            content=TRIAL[0],
            text=TRIAL[0],
            token_ids=(0,),
            source=next(asking),
            columns=dict.fromkeys(names, "example") | {"answer": "4"},
        )
        started = time.monotonic()
        ((score,),) = context.rewards.score([(prompt, _completions(context, prompt, [TRIAL[1]]))], functions=[name])
        yield _trial(context, name, service, score, time.monotonic() - started)


def _asked(context: PreflightContext, name: str) -> int:
    """Completions of a step that the function scores: those of the sources that use it."""
    assert context.rewards is not None
    weights = {source: section.weight for source, section in context.config.data.mix.items()} or {"": 1.0}
    asking = sum(
        weight
        for source, weight in weights.items()
        if name in [function.name for function in context.rewards.functions_of(source)]
    )
    return math.ceil(context.completions * asking / sum(weights.values()))


def _trial(context: PreflightContext, name: str, service: Service, score: Score, seconds: float) -> Finding:
    assert context.rewards is not None
    about = context.rewards.about.get(name, name)
    if score.failure and not score.failure.startswith("abstained"):
        return fail(
            f"{name} ({about}) could not score a trial completion: {score.failure}",
            f"Correct reward.options.{name}, or raise reward.timeout_s (now {context.config.reward.timeout_s:g}).",
            seconds=seconds,
        )
    asked = _asked(context, name)
    rounds = math.ceil(asked / service.at_once)
    said = "abstained on" if score.reward is None else f"gave {score.parts[name]:.3g} to"
    memory = context.rewards.service_memory(name)
    return ok(
        f"{name} ({about}) {said} a made-up completion after {duration(seconds)}. It scores {asked} of the "
        f"{context.completions} completions of a step, which takes about {duration(rounds * seconds)}, "
        f"{service.at_once} at a time. Its process uses {human(memory)} of memory.",
        function=name,
        seconds=seconds,
        step_s=rounds * seconds,
        memory=memory,
    )


# ------------------------------------------------------------------------------------------------- known answers


@dataclass(frozen=True, kw_only=True)
class KnownAnswer:
    """A problem with completions that state its own answer, for one reward function."""

    prompt: Prompt
    texts: tuple[str, ...]


def check_known(context: PreflightContext) -> Iterator[Finding]:
    assert context.rewards is not None
    if context.environment is not None:
        yield note("Not tried: with an environment, a reward is for a whole conversation.")
        return
    if asked := sorted(context.rewards.services):
        yield note(f"Not tried with {', '.join(asked)}: each completion would cost a request.")
    for source in context.config.problem_sections:
        functions = [function for function in context.rewards.functions_of(source) if function.name not in asked]
        decisive = context.rewards.functions_of(source)[0]
        for function in functions:
            traits = reward_traits(function.spec)
            known = (
                _known(context, source, function.spec, traits) if traits.has_known_form or function is decisive else []
            )
            if known:
                yield from _known_answers(context, function.name, traits, known)
            if known and not traits.sandbox:  # a program has no final answer that could be wrong after correct working
                yield from _wrong_answers(context, function.name, known)
        if any(reward_traits(function.spec).sandbox for function in functions):
            yield from _tests(context, source)
        if functions:
            yield from _empty(context, source)
    if context.cold and any(source.solution_field for source in context.config.data.sources.values()):
        yield _demonstrations_of_data(context)


def _of(source: str) -> str:
    """Which problems a finding is about, if there are several sources."""
    return f" of {source}" if source else ""


def _demonstrations_of_data(context: PreflightContext) -> Finding:
    """Whether the reward scores the data's own demonstrations as correct. The cold start leaves out the others."""
    assert context.rewards is not None
    assert context.problems is not None
    field = " and ".join(
        f"{'data' if not name else f'data.mix.{name}'}.solution_field = {source.solution_field!r}"
        for name, source in context.config.data.sources.items()
        if source.solution_field
    )
    having = [p for p in context.problems.train if p.demonstration]
    if not having:
        return fail(
            f"No training problem has a demonstration ({field}), so the cold start has nothing to train on.",
            "Set data.solution_field to the field that contains them, or cold_start.steps = 0.",
            demonstrations=0,
        )
    tried = [having[i] for i in PromptOrder(len(having), context.config.seed).take(0, min(TRIED, len(having)))]
    scores = context.rewards.score([(p, _completions(context, p, [p.demonstration])) for p in tried])
    wrong = [p.id for p, (score,) in zip(tried, scores, strict=True) if not score.correct]
    what = f"{len(tried) - len(wrong)} of {len(tried)} demonstrations are scored as correct ({field}; {len(having)} of "
    what += f"{len(context.problems.train)} training problems have one)."
    numbers: dict[str, Any] = {"demonstrations": len(having), "tried": len(tried), "wrong": len(wrong)}
    if not wrong:
        return ok(what, **numbers)
    level = fail if len(wrong) == len(tried) else warning
    return level(
        what,
        "Fix these rows or the reward: the cold start leaves out demonstrations that are not scored as correct.",
        detail=[f"not scored as correct: {', '.join(wrong[:5])}"],
        **numbers,
    )


def _known_answers(
    context: PreflightContext, name: str, traits: RewardTraits, known: Sequence[KnownAnswer]
) -> Iterator[Finding]:
    """How the function scores the data's own answers."""
    assert context.rewards is not None
    started = time.monotonic()
    scores = _score(context, [(k.prompt, k.texts) for k in known])
    each = (time.monotonic() - started) / sum(len(k.texts) for k in known)
    best = [max((v for s in group if (v := s.parts.get(name)) is not None), default=None) for group in scores]
    # Abstaining is a reward's right; `_missed` reports it separately.
    failed = [s.failure for group in scores for s in group if s.failure and not s.failure.startswith("abstained")]
    right = sum(v is not None and v > context.config.reward.correct_above for v in best)
    numbers: dict[str, Any] = {"function": name, "tried": len(known), "right": right, "seconds": each}
    of = _of(known[0].prompt.source)
    if failed:
        share = len(failed) / sum(len(k.texts) for k in known)
        level = fail if share > context.config.reward.max_unscored_fraction else warning
        yield level(
            f"{name} could not score {share:.0%} of the completions that state the data's own answers{of}; the first "
            f"reason: {failed[0]}",
            "Fix the reward function, or the data that it fails on.",
            **numbers,
        )
    elif right == len(known):
        yield ok(
            f"{name} scores the data's own answers{of} as correct ({right} of {len(known)}), {duration(each)} per "
            "completion.",
            **numbers,
        )
    else:
        yield _missed(context, name, traits, known, best, right, numbers)


def _missed(
    context: PreflightContext,
    name: str,
    traits: RewardTraits,
    known: Sequence[KnownAnswer],
    best: Sequence[float | None],
    right: int,
    numbers: dict[str, Any],
) -> Finding:
    abstained = sum(v is None for v in best)
    # Not `v <= threshold`: with a threshold of NaN, which the settings check reports, no comparison holds.
    at = next(i for i, v in enumerate(best) if v is None or not v > context.config.reward.correct_above)
    prompt = known[at].prompt
    of = _of(prompt.source)
    tried = excerpt(known[at].texts[0], 120)
    example = [f"{prompt.id}: expected {prompt.columns.get('answer')!r:.80}, tried {tried!r}, value {best[at]}"]
    if not traits.has_known_form:
        return note(
            f"{name} scores {right} of {len(known)} completions{of} as correct that only state the data's own answer; "
            "that is fine if it requires more.",
            "Look at the example: would a correct completion look like this?",
            detail=example,
            **numbers,
        )
    assert context.rewards is not None
    if abstained == len(known) and len(context.rewards.functions_of(prompt.source)) < 2:
        return fail(
            f"{name} abstains on every one of the data's own answers{of}, so no completion could ever be scored.",
            "The expected answers are not of the kind that this reward reads; use another (exact_answer for words), "
            "or set data.answer_field and data.answer_after.",
            detail=example,
            **numbers,
        )
    cause = f", and abstains on {abstained}" if abstained else ""
    return warning(
        f"{name} scores only {right} of {len(known)} of the data's own answers{of} as correct{cause}: on the other "
        "problems no completion can be correct.",
        "Check data.answer_field, data.answer_after and the reward's options against the example, or remove these "
        "rows.",
        detail=example,
        **numbers,
    )


def _wrong_answers(context: PreflightContext, name: str, known: Sequence[KnownAnswer]) -> Iterator[Finding]:
    """A wrong final answer after correct working must not score as correct: a model would learn to exploit it."""
    assert context.rewards is not None
    planted = [(k, texts) for k in known if (texts := _wrong_at_last(k, known))]
    scores = _score(context, [(k.prompt, texts) for k, texts in planted])
    fooled = [
        (k, text)
        for (k, texts), group in zip(planted, scores, strict=True)
        for text, score in zip(texts, group, strict=True)
        if (score.parts.get(name) or 0.0) > context.config.reward.correct_above
    ]
    if fooled:
        count = sum(len(texts) for _, texts in planted)
        first, text = fooled[0]
        answer = first.prompt.columns.get("answer")
        example = [f"{first.prompt.id}: expected {answer!r:.80}, tried {excerpt(text, 240)!r}"]
        yield warning(
            f"{name} scores {len(fooled)} of {count} completions{_of(first.prompt.source)} as correct whose final "
            "answer is wrong after correct working.",
            "Make it read the final answer only: what follows the thinking, in the form that the prompt asks for.",
            detail=example,
            function=name,
            fooled=len(fooled),
            planted=count,
        )


def _wrong_at_last(known: KnownAnswer, others: Sequence[KnownAnswer]) -> list[str]:
    """The correct answer as working, inside and outside of think tags, followed by a wrong answer in the same form."""
    right = _first_answer(known)
    wrong = _off_by_one(right)
    if wrong is not None and all(right in text for text in known.texts):
        # Only the last occurrence is replaced: the form may contain the same digits.
        pairs = [(text, wrong.join(text.rsplit(right, 1))) for text in known.texts]
    else:
        other = next((o for o in others if _first_answer(o) != right and len(o.texts) == len(known.texts)), None)
        pairs = list(zip(known.texts, other.texts, strict=True)) if other else []
    # A reward that searches the whole completion for the answer would be fooled by both.
    return [text for good, bad in pairs for text in (f"<think>{good}</think>\n{bad}", f"First: {good}\nNo. {bad}")]


def _first_answer(known: KnownAnswer) -> str:
    answer = known.prompt.columns.get("answer")
    return str(answer[0] if isinstance(answer, list) and answer else answer)


def _off_by_one(answer: str) -> str | None:
    """The answer plus one; `None` if it is not a number."""
    try:
        number = Decimal(answer.replace(",", ""))
    except InvalidOperation:
        return None
    return str(number + 1) if number.is_finite() and abs(number) < 10**15 else None


def _empty(context: PreflightContext, source: str) -> Iterator[Finding]:
    """A model will find out that an empty completion scores as correct."""
    assert context.rewards is not None
    prompts = _some(context, source)
    scores = _score(context, [(p, [""]) for p in prompts])
    right = sum(group[0].correct is True for group in scores)
    if right:
        yield warning(
            f"An empty completion counts as correct on {right} of {len(prompts)} problems{_of(source)}.",
            "Make the first reward function require an answer; the model will exploit this.",
            empty_correct=right,
        )


def _tests(context: PreflightContext, source: str) -> Iterator[Finding]:
    """Tests that do not work in the sandbox fail with any program, so a program that does nothing shows it."""
    assert context.rewards is not None
    prompts = _some(context, source)
    # A program that does nothing: whatever fails then is the fault of the tests.
    scores = _score(context, [(p, ["pass"]) for p in prompts])
    reasons = [(p.id, s.failure) for p, (s,) in zip(prompts, scores, strict=True) if s.failure]
    if reasons:
        level = fail if len(reasons) / len(prompts) > context.config.reward.max_unscored_fraction else warning
        yield level(
            f"The tests of {len(reasons)} of {len(prompts)} problems{_of(source)} do not work: their completions stay "
            "unscored.",
            "Fix or remove these rows; docs/sandbox.md says what tests can do.",
            detail=[f"{where}: {excerpt(reason, 400)}" for where, reason in reasons[:3]],
            unusable=len(reasons),
        )


def _score(context: PreflightContext, texts: Sequence[tuple[Prompt, Sequence[str]]]) -> list[list[Score]]:
    """Scores of the functions that cost nothing: no judge and no reward model is asked for a made-up completion."""
    assert context.rewards is not None
    free = [name for name in context.rewards.names if name not in context.rewards.services]
    return context.rewards.score([(p, _completions(context, p, t)) for p, t in texts], functions=free)


def _known(context: PreflightContext, source: str, spec: str, traits: RewardTraits) -> list[KnownAnswer]:
    if traits.reads_demonstrations:
        return _demonstrated(context, source)
    options = context.config.reward.options.get(spec, {})
    texts = traits.known_answers or _any_form
    answers = [KnownAnswer(prompt=p, texts=tuple(texts(p.columns, options))) for p in _some(context, source)]
    return [known for known in answers if known.texts]


def _any_form(columns: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    return [text for form in FORMS for text in form(columns, {})]


def _some(context: PreflightContext, source: str) -> list[Prompt]:
    """Some problems of a source of training problems or of an evaluation set."""
    assert context.problems is not None
    found = context.problems.sets.get(source) or [p for p in context.problems.train if p.source == source]
    return [found[i] for i in PromptOrder(len(found), context.config.seed).take(0, min(TRIED, len(found)))]


def _demonstrated(context: PreflightContext, source: str) -> list[KnownAnswer]:
    data = context.config.problem_sections[source]
    if not data.task or not build_task(data.task, data.task_options).has_demonstrations:
        return []
    problems = list(islice(demonstrations(data, context.config.seed), TRIED))
    known = []
    for i, problem in enumerate(problems):
        prompt = Prompt(
            id=f"demonstration {i}",
            content=problem.prompt,
            text=problem.prompt,
            token_ids=(0,),
            source=source,
            columns={"answer": problem.answer, **problem.columns},
        )
        known.append(KnownAnswer(prompt=prompt, texts=(problem.demonstration,)))
    return known


def _completions(context: PreflightContext, prompt: Prompt, texts: Sequence[str]) -> list[Completion]:
    return [_completion(context, prompt, sample, text) for sample, text in enumerate(texts)]


def _completion(context: PreflightContext, prompt: Prompt, sample: int, text: str) -> Completion:
    ids = tuple(context.tokenizer(text, add_special_tokens=False)["input_ids"]) if context.tokenizer else ()
    return Completion(
        prompt_id=prompt.id,
        sample=sample,
        token_ids=ids,
        text=text,
        logp_sampler=(0.0,) * len(ids),
        stop=StopReason.EOS,
        version=0,
    )


# --------------------------------------------------------------------------------------------- sampled completions


def check_completions(context: PreflightContext) -> Iterator[Finding]:
    assert context.groups is not None
    scores = [s for g in context.groups for s in g.scores]
    failed = [s.failure for s in scores if s.failure]
    if failed:
        yield _failures(context, failed, len(scores))
    rewards = [s.reward for s in scores if s.reward is not None]
    if rewards:
        yield _distribution(context, scores, rewards)
    yield from _slow(context)


def _failures(context: PreflightContext, failed: Sequence[str], count: int) -> Finding:
    most = context.config.reward.max_unscored_fraction
    what = f"{len(failed)} of {count} sampled completions could not be scored; the first reason: {failed[0]}"
    if len(failed) / count > most:
        remedy = f"The run would stop at its first step (reward.max_unscored_fraction = {most:g}); fix the reward."
        return fail(what, remedy, unscored=len(failed))
    remedy = "Such completions are not trained on; fix the reward if the completion is not the cause."
    return warning(what, remedy, unscored=len(failed))


def _distribution(context: PreflightContext, scores: Sequence[Score], rewards: Sequence[float]) -> Finding:
    low, high = min(rewards), max(rewards)
    correct = [s.correct for s in scores if s.correct is not None]
    right = f"; {sum(correct) / len(correct):.0%} count as correct" if correct else ""
    mean = statistics.fmean(rewards)
    std = statistics.pstdev(rewards)
    what = (
        f"Rewards of {len(rewards)} sampled completions: mean {mean:.3g}, from {low:.3g} to {high:.3g}, standard "
        f"deviation {std:.3g}{right}."
    )
    numbers: dict[str, Any] = {"mean": mean, "low": low, "high": high, "std": std}
    # The same tolerance as in training, relative for large rewards.
    if high - low > UNIFORM_TOLERANCE * max(1.0, abs(low), abs(high)):
        return ok(what, **numbers)
    if context.cold:
        return note(f"{what} All are equal, as expected before the cold start.", **numbers)
    return warning(
        f"{what} All are equal: they contain no training signal.",
        "Look at the completion above: does the reward read what the model writes?",
        **numbers,
    )


def _slow(context: PreflightContext) -> Iterator[Finding]:
    timings = context.timings
    if timings is None:
        return
    scale = context.completions / timings.completions
    reward = timings.reward_s * scale
    train = timings.train_s * context.completions / timings.trained if timings.trained else 0.0
    other = rollout_seconds(context, timings, scale) + train
    each = timings.reward_s / timings.completions
    if reward > other and reward > 5.0:
        yield warning(
            f"Scoring takes {duration(each)} per completion, {duration(reward)} per step: longer than sampling and "
            f"training together ({duration(other)}).",
            f"Make the reward faster, or raise {_parallelism(context)}.",
            seconds=each,
        )
    else:
        yield ok(f"Scoring takes {duration(each)} per completion, {duration(reward)} per step.", seconds=each)


def _parallelism(context: PreflightContext) -> str:
    if context.rewards is not None and context.rewards.services:
        return f"concurrency or batch in the options of {', '.join(context.rewards.services)}"
    return f"reward.workers (now {context.config.reward.workers})"


# ------------------------------------------------------------------------------------------------- sandbox


def check_sandbox(context: PreflightContext) -> Iterator[Finding]:
    from gspo.reward.sandbox.probe import sandbox_level

    config = context.config.reward
    specs = context.config.reward_functions
    used = next(((spec, sandbox) for spec in specs if (sandbox := reward_traits(spec).sandbox)), None)
    try:
        level = used[1](config.options.get(used[0], {})) if used else sandbox_level()
    except ConfigError as error:
        if used:
            raise
        yield note(
            "No sandbox for model-written programs works here; none of the rewards runs programs, so none is needed. "
            f"({error})"
        )
        return
    if used and level.number == 0:
        yield warning(
            f"Model-written programs would run with no protection: {level}.",
            "Install bubblewrap and remove allow_unsafe.",
            level=level.number,
        )
    elif used:
        yield ok(f"Model-written programs run in {level}.", level=level.number)
    else:
        yield ok(f"Not needed by these rewards; available: {level}.", level=level.number)
