"""The beginning of a new run: its summary, and the cold start.

In: the components of a run. Out: a policy that solves some problems. Invariant: the cold start is a function of the
config alone. So a run that was stopped during it repeats it with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

from gspo.context import RunContext
from gspo.data.chat import render
from gspo.data.problems import demonstrations, shown
from gspo.errors import RewardError
from gspo.evaluation import evaluate
from gspo.learner.sft import ColdStart, cold_start
from gspo.model.micro_batch import TokenSequence
from gspo.model.quantization import numbers_in
from gspo.record.progress import Display
from gspo.types import Prompt, Sampling

CHECKED = 128
"""Fresh problems per accuracy check of the cold start."""


def describe(context: RunContext, run: object, display: Display, warn: Callable[[str], None]) -> None:
    """Display the model, the data and the objective of the run, and warn about settings that bias training."""
    config, problems = context.config, context.problems
    size, trained = (
        sum(numbers_in(p) for p in context.policy.model.parameters() if p.requires_grad >= only)
        for only in (False, True)
    )
    share = f" ({_human(trained)} in adapters are trained)" if trained < size else ""
    display.message(
        f"{type(context.policy.model).__name__}, {_human(size)} parameters{share} on {context.policy.device}; "
        f"{len(problems.train)} training and {len(problems.held_out)} held-out problems; "
        f"objective {context.objective.name}; run directory {run}"
    )
    if problems.crowded:
        warn(problems.crowded)
    elif problems.overlapping:
        display.message(f"left out {problems.overlapping} training problems that ask the same as a held-out one")
    if problems.skipped:
        display.message(f"left out {problems.skipped} bad rows (data.on_bad_row = skip)")
    if config.rollout.top_p < 1 or config.rollout.top_k:
        warn(
            "with rollout.top_p or rollout.top_k the engine samples from a truncated distribution, and the learner's "
            "log-probs are of the full one: mismatch/k3 will show it; top_p = 1 and top_k = 0 are safe"
        )


def _human(count: int) -> str:
    return f"{count / 1e6:.2f}M" if count >= 1e5 else f"{count / 1e3:.1f}K"


def supervised_start(context: RunContext, display: Display) -> ColdStart:
    """Fine-tune on the task's demonstrations until sampled accuracy on fresh problems is high enough."""
    config, rollout = context.config.cold_start, context.config.rollout
    fresh = _fresh_problems(context)

    def accuracy(step: int) -> float:
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
    result = cold_start(context.policy, config, sequences, accuracy, report)
    # The cold start has its own optimizer. Without this, the master weights would still be those before it.
    context.optimizer.adopt_weights()
    reached = "reached" if result.accuracy >= config.stop_accuracy else "did NOT reach"
    display.message(
        f"cold start: {result.steps} supervised steps, {reached} sampled accuracy {config.stop_accuracy:.0%} "
        f"(now {result.accuracy:.0%})"
    )
    return result


def _fresh_problems(context: RunContext) -> Iterator[tuple[Prompt, tuple[int, ...]]]:
    """Endless (prompt, demonstration ids). None asks the same as a held-out problem."""
    tokenizer, data = context.policy.tokenizer, context.config.data
    held_out = {p.key for p in context.problems.held_out}
    for number, problem in zip(count(), demonstrations(data, context.config.seed, exclude=held_out), strict=False):
        text, ids = render(shown(problem.prompt, data), tokenizer, chat=data.chat)
        columns = {"answer": problem.answer, **problem.columns}
        prompt = Prompt(id=f"cold/{number}", content=problem.prompt, text=text, token_ids=ids, columns=columns)
        completion = tokenizer(problem.demonstration, add_special_tokens=False)["input_ids"]
        yield prompt, (*completion, context.policy.end_id)
