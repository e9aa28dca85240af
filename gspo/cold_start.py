"""How a fresh run begins: a few words about it, and the supervised start.

In: the parts of a run. Out: a policy that solves some problems. Invariant: what is done here is a function of the config
alone, so a run that was stopped during it begins it anew, with the same outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

from gspo.context import RunContext
from gspo.data.chat import render
from gspo.data.problems import demonstrations, shown
from gspo.errors import RewardError
from gspo.evaluation import evaluate
from gspo.learner.plan import TokenSequence
from gspo.learner.sft import ColdStart, cold_start
from gspo.model.quantization import numbers_in
from gspo.record.progress import Display
from gspo.types import Prompt, Sampling

CHECKED = 128
"""Fresh problems per accuracy check of the cold start."""


def describe(parts: RunContext, run: object, display: Display, warn: Callable[[str], None]) -> None:
    """Say what is about to be trained."""
    config, problems = parts.config, parts.problems
    size, trained = (
        sum(numbers_in(p) for p in parts.policy.model.parameters() if p.requires_grad >= only) for only in (False, True)
    )
    share = f" ({_human(trained)} in adapters are trained)" if trained < size else ""
    display.message(
        f"{type(parts.policy.model).__name__}, {_human(size)} parameters{share} on {parts.policy.device}; "
        f"{len(problems.train)} training and {len(problems.held_out)} held-out problems; objective {parts.objective.name}; "
        f"run directory {run}"
    )
    if problems.crowded:
        warn(problems.crowded)
    elif problems.overlapping:
        display.message(f"left out {problems.overlapping} training problems that ask the same as a held-out one")
    if problems.skipped:
        display.message(f"left out {problems.skipped} bad rows (data.on_bad_row = skip)")
    if config.rollout.top_p < 1 or config.rollout.top_k:
        warn("sampling with top_p or top_k draws from a truncated distribution that the learner's probabilities are not: mismatch/k3 will show it; 1 and 0 are safe")  # fmt: skip


def _human(count: int) -> str:
    return f"{count / 1e6:.2f}M" if count >= 1e5 else f"{count / 1e3:.1f}K"


def supervised_start(parts: RunContext, display: Display) -> ColdStart:
    """Fine-tune on the task's demonstrations until sampled accuracy on fresh problems is high enough."""
    config, rollout = parts.config.cold_start, parts.config.rollout
    fresh = _fresh_problems(parts)

    def accuracy(step: int) -> float:
        prompts = [next(fresh)[0] for _ in range(CHECKED)]
        sampling = Sampling(max_tokens=rollout.max_tokens, temperature=rollout.temperature)
        done = evaluate(parts.engine, parts.rewards, prompts, samples=1, sampling=sampling, seed=parts.config.seed, stream=f"cold-start/{step}")  # fmt: skip
        if not done.verdicts:
            raise RewardError(f"cold start: not one reply could be scored; the first: {done.scores[0][0].failure}")
        return done.accuracy.value

    def report(step: int, loss: float, reached: float) -> None:
        display.cold_start(step, config.steps, loss, reached)

    rows = (TokenSequence(prompt_ids=p.token_ids, completion_ids=reply) for p, reply in fresh)
    done = cold_start(parts.policy, config, rows, accuracy, report)
    parts.optimizer.adopt_weights()
    reached = "reached" if done.accuracy >= config.stop_accuracy else "did NOT reach"
    display.message(f"cold start: {done.steps} supervised steps, {reached} sampled accuracy {config.stop_accuracy:.0%} (now {done.accuracy:.0%})")  # fmt: skip
    return done


def _fresh_problems(parts: RunContext) -> Iterator[tuple[Prompt, tuple[int, ...]]]:
    """Endless (prompt, demonstration ids), none of which asks the same as a held-out problem."""
    tokenizer, data = parts.policy.tokenizer, parts.config.data
    held_out = {p.key for p in parts.problems.held_out}
    for number, problem in zip(count(), demonstrations(data, parts.config.seed, exclude=held_out), strict=False):
        text, ids = render(shown(problem.prompt, data), tokenizer, chat=data.chat)
        columns = {"answer": problem.answer, **problem.columns}
        prompt = Prompt(id=f"cold/{number}", content=problem.prompt, text=text, token_ids=ids, columns=columns)
        reply = tokenizer(problem.demonstration, add_special_tokens=False)["input_ids"]
        yield prompt, (*reply, parts.policy.end_id)
