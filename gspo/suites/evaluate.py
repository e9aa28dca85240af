"""Evaluate a model on a suite: settings, contamination, sampling, result.

In: the settings of a model and a suite. Out: a `SuiteResult`. Invariant: whatever differs from the protocol is named in
the result, and problems that the model was trained on are excluded.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from gspo.build import engine_for, policy_for, reward_pool, tokenizer_for
from gspo.config import Config
from gspo.contamination import contaminated, texts_of, trained_on
from gspo.errors import ConfigError, GspoError
from gspo.evaluation import evaluate
from gspo.suites.result import SuiteResult
from gspo.suites.suite import SuiteProblem, SuiteSource, prompts_of
from gspo.types import Sampling

PROTOCOL = ("max_tokens", "temperature", "top_p", "top_k", "min_tokens", "stop", "thinking_budget")
"""Settings of `[rollout]` that change a score."""

FIXED = ("data.", "eval.", "environment.", "reward.functions", "reward.weights", "reward.correct_above")
"""Settings that have no effect on a suite, or would change what it measures."""


def suite_settings(tree: Mapping[str, Any], source: SuiteSource) -> dict[str, Any]:
    """The settings of an evaluation on the suite with the model and engine of `tree`."""
    suite = source.suite
    rollout = {k: v for k, v in tree.get("rollout", {}).items() if k in ("engine", "engine_options")}
    rollout |= {"max_tokens": suite.max_tokens, "top_p": suite.top_p}
    if suite.temperature:
        rollout["temperature"] = suite.temperature
    reward = {"functions": [suite.scorer.reward], "timeout_s": suite.scorer.timeout_s}
    if suite.scorer.options:
        reward["options"] = {suite.scorer.reward: dict(suite.scorer.options)}
    # The context limits the prompt, not a setting: the problems of a benchmark are not chosen.
    data = {**source.data_settings(), "held_out": 0, "max_prompt_tokens": 1 << 20}
    return {"model": tree.get("model", {}), "data": data, "rollout": rollout, "reward": reward}


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse settings that a suite fixes."""
    for override in overrides:
        key = override.lstrip("-").partition("=")[0]
        if key.startswith(FIXED):
            raise ConfigError(
                f"--{key}: --suite fixes the problems, their prompts and how they are scored; "
                "leave it out, or evaluate on your own settings with --data"
            )


def evaluate_on_suite(
    config: Config, source: SuiteSource, *, samples: int | None, limit: int | None, seed: int
) -> SuiteResult:
    """Sample and score the completions of the protocol."""
    problems = source.problems()
    with ExitStack() as stack:
        # Before the model, so that a reward that cannot be loaded is found early.
        rewards = reward_pool(config)
        stack.callback(rewards.close)
        tokenizer = tokenizer_for(config)
        prompts = prompts_of(source, problems, tokenizer)
        seen = set(_contaminated(config, problems, tokenizer))
        unseen = [i for i in range(len(problems)) if i not in seen]
        kept = unseen[:limit]
        if not kept:
            raise ConfigError(f"--suite {source.name}: {config.model.path} was trained on all of its problems")
        policy = policy_for(config, tokenizer, routers=False)
        engine = engine_for(config, policy)
        stack.callback(engine.close)
        evaluation = evaluate(
            engine,
            rewards,
            [prompts[i] for i in kept],
            samples=samples or source.suite.samples,
            sampling=_sampling(config, source),
            seed=seed,
            stream=f"eval/suite/{source.name}",
        )
    return SuiteResult(
        source=source,
        model=config.model.path,
        problems=[problems[i] for i in kept],
        evaluation=evaluation,
        samples=samples or source.suite.samples,
        deviations=_deviations(config, source, samples, limit if len(kept) < len(unseen) else None),
        contaminated=[prompts[i].id for i in sorted(seen)],
    )


def _contaminated(config: Config, problems: Sequence[SuiteProblem], tokenizer: Any) -> list[int]:
    try:
        seen = trained_on(config.model.path, tokenizer)
    except GspoError as error:
        effect = "its training data cannot be read, so problems that it was trained on are not excluded"
        warnings.warn(f"{config.model.path}: {effect}: {error}", stacklevel=2)
        return []
    return contaminated([p.problem for p in problems], texts_of(seen))


def _greedy(config: Config, source: SuiteSource) -> bool:
    """Whether the protocol is greedy and no setting asks for another temperature."""
    # A temperature of 0 is no setting, because training cannot use it.
    return not source.suite.temperature and config.rollout.temperature == Config().rollout.temperature


def _sampling(config: Config, source: SuiteSource) -> Sampling:
    sampling = config.rollout.sampling
    return sampling.greedy if _greedy(config, source) else sampling


def _deviations(config: Config, source: SuiteSource, samples: int | None, limit: int | None) -> dict[str, Any]:
    suite = source.suite
    published = Sampling(max_tokens=suite.max_tokens, temperature=suite.temperature, top_p=suite.top_p)
    ours = _sampling(config, source)
    found = {
        f"rollout.{name}": getattr(ours, name) for name in PROTOCOL if getattr(ours, name) != getattr(published, name)
    }
    if samples not in (None, suite.samples):
        found["samples"] = samples
    if limit is not None:
        found["limit"] = limit
    options = config.reward.options.get(suite.scorer.reward, {})
    found |= {f"reward.options.{k}": v for k, v in options.items() if v != suite.scorer.options.get(k)}
    return found
