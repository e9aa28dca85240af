"""The cold start of a run: its demonstrations and accuracy checks. `learner/sft.py` has the fine-tuning itself.

In: the components of a run. Out: a policy that solves some problems. Invariant: the cold start is a function of the
config and the data alone. So a run that was stopped during it repeats it with the same result. It trains on no held-out
problem, and accuracy is checked on problems that it does not train on. A demonstration of the data that the reward does
not score as correct, that is too long, or that the tokenizer changes is excluded and counted, never trained on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from gspo.context import RunContext
from gspo.data.chat import follows_template, render
from gspo.data.problems import all_demonstrations, identities, with_instructions
from gspo.environment.engine import ConversationEngine
from gspo.errors import DataError, RewardError
from gspo.evaluation import evaluate
from gspo.learner.sft import fine_tune
from gspo.model.micro_batch import TokenSequence
from gspo.record.progress import Display
from gspo.types import Completion, Prompt, Score, Status, StopReason

CHECKED = 128
"""Problems per accuracy check of the cold start, if the data has enough of them."""
MOST_PLAYED = 4096
"""Maximum number of demonstrations of an environment."""
ASIDE = 5
"""One of so many problems of the data is set aside for accuracy checks, up to `CHECKED`."""
FAULTS = {
    "wrong": "are not scored as correct by the reward",
    "unscored": "could not be scored",
    "too_long": "are longer than rollout.max_tokens",
    "garbled": "are changed by the tokenizer, or contain an end token",
}
"""Why a demonstration is excluded -> how a message states it."""


@dataclass(frozen=True, kw_only=True)
class ColdStartResult:
    """How the cold start ended."""

    steps: int
    accuracy: float
    """Sampled accuracy at the last check."""
    demonstrations: Mapping[str, int] = field(default_factory=dict)
    """Counts of the data's demonstrations: `demonstrations` that can be used, and of those excluded by reason. Empty
    for a generated task, whose demonstrations are correct by construction."""


@dataclass(frozen=True, kw_only=True)
class _Lessons:
    """What the cold start trains on, and what it is checked on."""

    sequences: Iterator[TokenSequence]
    """Endless."""
    fresh: Callable[[], Sequence[Prompt]]
    """The problems of the next accuracy check. None of them is trained on."""
    counts: Mapping[str, int] = field(default_factory=dict)


def run_cold_start(context: RunContext, display: Display) -> ColdStartResult:
    """Fine-tune on demonstrations until sampled accuracy on other problems is high enough."""
    config, rollout = context.config.cold_start, context.config.rollout
    tasks = any(source.task for source in context.config.data.sources.values())
    if context.conversations is not None:
        lessons = _from_environment(context, context.conversations, display)
    else:
        lessons = _from_task(context) if tasks else _from_data(context, display)

    def accuracy(step: int) -> float:
        sampling = replace(rollout.sampling, top_p=1.0, top_k=0)
        evaluation = evaluate(
            context.engine,
            context.rewards,
            lessons.fresh(),
            samples=1,
            sampling=sampling,
            seed=context.config.seed,
            stream=f"cold-start/{step}",
        )
        if not evaluation.verdicts:
            failure = evaluation.scores[0].failure
            raise RewardError(f"cold start: no completion could be scored; the first failure: {failure}")
        return evaluation.accuracy.value

    def report(step: int, loss: float, reached: float) -> None:
        display.cold_start(step, config.steps, loss, reached)

    result = fine_tune(
        context.policy, config, context.config.learner, lessons.sequences, accuracy, report, context.ranks
    )
    # The cold start has its own optimizer. Without this, the master weights would still be those before it.
    with context.ranks.together("adopt_weights"):
        context.optimizer.adopt_weights()
    reached = "reached" if result.accuracy >= config.stop_accuracy else "did NOT reach"
    display.message(
        f"cold start: {result.steps} supervised steps, {reached} sampled accuracy {config.stop_accuracy:.0%} "
        f"(now {result.accuracy:.0%})"
    )
    return ColdStartResult(steps=result.steps, accuracy=result.accuracy, demonstrations=lessons.counts)


# ---- demonstrations of a generated task


def _from_task(context: RunContext) -> _Lessons:
    problems = _fresh_problems(context)
    # Fine-tuning and checks read the same endless stream, so neither gets a problem of the other unless the task
    # repeats one.
    return _Lessons(
        sequences=(TokenSequence(prompt_ids=p.token_ids, completion_ids=ids) for p, ids in problems),
        fresh=lambda: [next(problems)[0] for _ in range(CHECKED)],
    )


def _fresh_problems(context: RunContext) -> Iterator[tuple[Prompt, tuple[int, ...]]]:
    """Endless (prompt, demonstration ids). None asks the same as a problem that is evaluated."""
    tokenizer, config = context.policy.tokenizer, context.config
    evaluated = set().union(*map(identities, context.problems.evaluated))
    demonstrated = all_demonstrations(config.data, config.seed, exclude=evaluated)
    for number, (source, data, problem) in zip(count(), demonstrated, strict=False):
        text, ids = render(with_instructions(problem.prompt, data), tokenizer, chat=data.chat)
        columns = {"answer": problem.answer, **problem.columns}
        prompt = Prompt(
            id=f"cold/{number}", content=problem.prompt, text=text, token_ids=ids, source=source, columns=columns
        )
        yield prompt, (*_token_ids(context, problem.demonstration), context.policy.end_id)


def _token_ids(context: RunContext, text: str) -> list[int]:
    ids: list[int] = context.policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


# ---- demonstrations of an environment


def _from_environment(context: RunContext, conversations: ConversationEngine, display: Display) -> _Lessons:
    """Conversations that the environment demonstrates, with its own observations. Only the model's turns are trained
    on."""
    config, seed = context.config, context.config.seed
    fresh, others = _set_aside(context)
    tried = others[: min(MOST_PLAYED, config.cold_start.steps * config.cold_start.batch)]
    played = [(p, c) for p, c in zip(tried, conversations.play(tried), strict=True) if c is not None]
    scores = context.rewards.score([(p, [c]) for p, c in played])
    faults = [
        "too_long"
        if len(c.token_ids) > config.rollout.max_tokens
        else "unscored"
        if score.status is Status.UNSCORED
        else ""
        if score.correct
        else "wrong"
        for (_, c), (score,) in zip(played, scores, strict=True)
    ]
    usable = [
        TokenSequence(prompt_ids=p.token_ids, completion_ids=c.token_ids, sampled=c.sampled, branches=c.branches)
        for (p, c), fault in zip(played, faults, strict=True)
        if not fault
    ]
    counts = {"demonstrations": len(usable)} | {name: n for name in FAULTS if (n := faults.count(name))}
    if not usable:
        found = "; ".join(f"{n} {FAULTS[name]}" for name, n in counts.items() if name in FAULTS)
        raise DataError(
            f"cold_start.steps: no demonstration of environment {config.environment.name} can be used "
            f"({found or 'it has none for these problems'}); fix demonstrate, or set cold_start.steps = 0"
        )
    _report(played, faults, counts, display)
    return _Lessons(sequences=_epochs(usable, seed), fresh=lambda: fresh, counts=counts)


def _set_aside(context: RunContext) -> tuple[list[Prompt], list[Prompt]]:
    """Training problems in seeded order: those for the accuracy checks, and those that ask something else."""
    problems = list(context.problems.train)
    random.Random(f"{context.config.seed}/cold_start").shuffle(problems)
    fresh = problems[: max(1, min(CHECKED, len(problems) // ASIDE))]
    aside = {p.key for p in fresh}
    return fresh, [p for p in problems if p.key not in aside]


# ---- demonstrations of the data


def _from_data(context: RunContext, display: Display) -> _Lessons:
    config, seed = context.config, context.config.seed
    # Held-out problems and their duplicates are not in here.
    problems = list(context.problems.train)
    fresh, others = _set_aside(context)
    others = [p for p in others if p.demonstration]
    # More are never used, and scoring them may take long.
    tried = [(p, _demonstration(context, p)) for p in others[: config.cold_start.steps * config.cold_start.batch]]
    faults = _faults(context, tried)
    usable = [
        TokenSequence(prompt_ids=p.token_ids, completion_ids=c.token_ids)
        for (p, c), fault in zip(tried, faults, strict=True)
        if not fault
    ]
    counts = {"demonstrations": len(usable)} | {name: n for name in FAULTS if (n := faults.count(name))}
    _report(tried, faults, counts, display)
    display.message(f"cold start: {len(fresh)} other training problems measure its accuracy")
    _check_template(context, [p for (p, _), fault in zip(tried, faults, strict=True) if not fault], display)
    if not usable:
        found = "; ".join(f"{n} {FAULTS[name]}" for name, n in counts.items() if name in FAULTS)
        raise DataError(
            f"data.solution_field: no demonstration of the data can be used "
            f"({found or _no_demonstrations(context, len(problems) - len(fresh))}); "
            "fix the field or the reward, or set cold_start.steps = 0"
        )
    return _Lessons(sequences=_epochs(usable, seed), fresh=lambda: fresh, counts=counts)


def _no_demonstrations(context: RunContext, rows: int) -> str:
    sources = context.config.data.sources.values()
    named = sorted({repr(source.solution_field) for source in sources if source.solution_field})
    fields = set().union(*(p.columns for p in context.problems.train))
    if all(source.answer_field != "answer" for source in sources):
        fields.discard("answer")  # a copy of the field that contains the answer
    others = f"; other fields: {', '.join(sorted(fields))}" if fields else ""
    return f"none of the {rows} training rows has one in field {' or '.join(named)}{others}"


def _demonstration(context: RunContext, prompt: Prompt) -> Completion:
    """A demonstration as if the model had sampled it: it ends with the end token, and its text is what an engine would
    decode."""
    ids = (*_token_ids(context, prompt.demonstration), context.policy.end_id)
    return Completion(
        prompt_id=prompt.id,
        sample=0,
        token_ids=ids,
        text=context.policy.tokenizer.decode(ids, skip_special_tokens=True),
        logp_sampler=(0.0,) * len(ids),
        stop=StopReason.EOS,
        version=0,
    )


def _faults(context: RunContext, tried: Sequence[tuple[Prompt, Completion]]) -> list[str]:
    """Why each demonstration cannot be used; empty if it can."""
    scores = context.rewards.score([(prompt, [completion]) for prompt, completion in tried])
    return [_fault(context, p, c, s) for (p, c), (s,) in zip(tried, scores, strict=True)]


def _fault(context: RunContext, prompt: Prompt, completion: Completion, score: Score) -> str:
    if len(completion.token_ids) > context.config.rollout.max_tokens:
        return "too_long"
    ends_early = not set(context.policy.stop_ids).isdisjoint(completion.token_ids[:-1])
    # Many tokenizers drop or add a space at the ends, which is harmless.
    if ends_early or completion.text.strip() != prompt.demonstration.strip():
        return "garbled"
    if score.status is Status.UNSCORED:
        return "unscored"
    return "" if score.correct else "wrong"


def _report(
    tried: Sequence[tuple[Prompt, Completion]], faults: Sequence[str], counts: Mapping[str, int], display: Display
) -> None:
    display.message(f"cold start: {counts['demonstrations']} of {len(tried)} demonstrations are trained on")
    for name, what in [(name, what) for name, what in FAULTS.items() if name in counts]:
        first = next(p.id for (p, _), fault in zip(tried, faults, strict=True) if fault == name)
        display.message(
            f"warning: {counts[name]} of {len(tried)} demonstrations {what} and are excluded; the first: {first}"
        )


def _check_template(context: RunContext, prompts: Sequence[Prompt], display: Display) -> None:
    """Warn if the chat template would write the demonstrations in another way. One shows it."""
    tokenizer = context.policy.tokenizer
    for prompt in prompts[:1]:
        data = context.config.data.sources[prompt.source]
        chat = with_instructions(prompt.content, data)
        if not follows_template(prompt.text, chat, prompt.demonstration, tokenizer, chat=data.chat):
            display.message(
                "warning: the chat template does not write an assistant message right after the prompt (it may add "
                f"thinking tags, or change the text); demonstrations such as that of {prompt.id} are trained on as "
                f"they are in field {data.solution_field!r}, so write them as the model is to answer"
            )


def _epochs(sequences: Sequence[TokenSequence], seed: int) -> Iterator[TokenSequence]:
    """Endless, in a new order each time."""
    for epoch in count():
        order = list(sequences)
        random.Random(f"{seed}/cold_start/{epoch}").shuffle(order)
        yield from order
