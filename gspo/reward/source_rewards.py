"""Which reward functions score the problems of which source.

In: the settings. Out: for each source of training problems and each evaluation set, its functions, located, with their
weights. Invariant: a function with the same options is loaded once, however many sources use it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gspo.config import Config, problem_sections
from gspo.errors import ConfigError, RewardError
from gspo.reward.function import Source, chosen_functions, find_sources


@dataclass(frozen=True, kw_only=True)
class SourceRewards:
    """The reward functions of one source, as the settings name them."""

    functions: tuple[str, ...]
    weights: tuple[float, ...] = ()
    """One per function; empty if all are 1."""
    task: tuple[str, Mapping[str, Any]] | None = None
    """The generated task of the source and its options."""
    key: str = "reward.functions"
    """The setting that names the functions. Errors use it."""

    @property
    def weights_key(self) -> str:
        """The setting that gives the weights."""
        return "reward.weights" if self.key == "reward.functions" else f"{self.key}_weights"


@dataclass(frozen=True, kw_only=True)
class ScoringRule:
    """How the completions of a source are scored."""

    functions: tuple[int, ...]
    """Indices of the functions."""
    weights: tuple[float, ...]
    decisive: int
    """The function that decides about correctness."""


def source_rewards(config: Config) -> dict[str, SourceRewards]:
    """The reward functions of every source and evaluation set, by its name; the name of `[data]` itself is empty."""
    found = {}
    for (key, section), name in zip(problem_sections(config), config.problem_sections, strict=True):
        task = (section.task, section.task_options) if section.task else None
        own: tuple[str, ...] = getattr(section, "reward", ())
        found[name] = (
            SourceRewards(functions=own, weights=getattr(section, "reward_weights", ()), task=task, key=f"{key}.reward")
            if own
            else SourceRewards(functions=config.reward.functions, weights=config.reward.weights, task=task)
        )
    return found


def locate(
    rewards: Mapping[str, SourceRewards], options: Mapping[str, Any]
) -> tuple[list[Source], dict[str, ScoringRule]]:
    """Every function once, with a name that no other has, and the rule of each source."""
    _check_options(rewards, options)
    used: dict[tuple[str, str], tuple[str, Source]] = {}
    indices: dict[str, list[int]] = {}
    for name, reward in rewards.items():
        found = _find(reward, options)
        keys = [(source.spec, json.dumps(dict(source.options), sort_keys=True, default=repr)) for source in found]
        for key, source in zip(keys, found, strict=True):
            used.setdefault(key, (name, source))
        indices[name] = [list(used).index(key) for key in keys]
    names = [source.name for _, source in used.values()]
    # The same function with other options, such as the verifiers of two tasks.
    sources = [
        source if names.count(source.name) == 1 else replace(source, name=f"{owner}.{source.name}")
        for owner, source in used.values()
    ]
    rules = {
        name: ScoringRule(
            functions=tuple(indices[name]),
            weights=reward.weights or (1.0,) * len(indices[name]),
            decisive=indices[name][0],
        )
        for name, reward in rewards.items()
    }
    return sources, rules


def _find(reward: SourceRewards, options: Mapping[str, Any]) -> list[Source]:
    chosen = chosen_functions(reward.functions, reward.task is not None)
    try:
        return find_sources(reward.functions, {k: v for k, v in options.items() if k in chosen}, reward.task)
    except (ConfigError, RewardError) as error:
        raise type(error)(str(error).replace("reward.functions", reward.key)) from None


def _check_options(rewards: Mapping[str, SourceRewards], options: Mapping[str, Any]) -> None:
    known = {spec: None for r in rewards.values() for spec in chosen_functions(r.functions, r.task is not None)}
    for key in options:
        if key not in known:
            raise ConfigError(f"reward.options.{key}: not among reward.functions {list(known)}")
