"""The cold start of a run: its demonstrations and accuracy checks. `learner/sft.py` has the fine-tuning itself.

In: the components of a run. Out: a policy that solves some problems. Invariant: the cold start is a function of the
config alone. So a run that was stopped during it repeats it with the same result.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from gspo.context import RunContext
from gspo.data.chat import render
from gspo.data.problems import all_demonstrations, identities, with_instructions
from gspo.errors import RewardError
from gspo.evaluation import evaluate
from gspo.learner.sft import FineTuneResult, fine_tune
from gspo.model.micro_batch import TokenSequence
from gspo.record.progress import Display
from gspo.types import Prompt, Sampling

CHECKED = 128
"""Fresh problems per accuracy check of the cold start."""


def run_cold_start(context: RunContext, display: Display) -> FineTuneResult:
    """Fine-tune on the task's demonstrations until sampled accuracy on fresh problems is high enough."""
    config, rollout = context.config.cold_start, context.config.rollout
    fresh = _fresh_problems(context)

    def accuracy(step: int) -> float:
        # Fine-tuning reads the same endless stream, so it does not get these problems unless the task repeats one.
        prompts = [next(fresh)[0] for _ in range(CHECKED)]
        sampling = Sampling(max_tokens=rollout.max_tokens, temperature=rollout.temperature)
        evaluation = evaluate(
            context.engine,
            context.rewards,
            prompts,
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

    sequences = (TokenSequence(prompt_ids=p.token_ids, completion_ids=ids) for p, ids in fresh)
    result = fine_tune(context.policy, config, sequences, accuracy, report)
    # The cold start has its own optimizer. Without this, the master weights would still be those before it.
    context.optimizer.adopt_weights()
    reached = "reached" if result.accuracy >= config.stop_accuracy else "did NOT reach"
    display.message(
        f"cold start: {result.steps} supervised steps, {reached} sampled accuracy {config.stop_accuracy:.0%} "
        f"(now {result.accuracy:.0%})"
    )
    return result


def _fresh_problems(context: RunContext) -> Iterator[tuple[Prompt, tuple[int, ...]]]:
    """Endless (prompt, demonstration ids). None asks the same as a problem that is evaluated."""
    tokenizer, config = context.policy.tokenizer, context.config
    evaluated = set().union(*map(identities, context.problems.evaluated))
    demonstrated = all_demonstrations(config.data, config.seed, exclude=evaluated)
    for number, (source, data, problem) in zip(count(), demonstrated, strict=False):
        text, ids = render(with_instructions(problem.prompt, data), tokenizer, chat=data.chat)
        prompt = Prompt(
            id=f"cold/{number}",
            content=problem.prompt,
            text=text,
            token_ids=ids,
            source=source,
            columns={"answer": problem.answer, **problem.columns},
        )
        completion = tokenizer(problem.demonstration, add_special_tokens=False)["input_ids"]
        yield prompt, (*completion, context.policy.end_id)
