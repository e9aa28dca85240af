"""The roughly one hundred generated tasks of the `reasoning-gym` package: `data.task = "reasoning_gym:leg_counting"`.

In: a random stream, and options for `reasoning_gym.create_dataset`, of which `size` limits the number of problems.
Out: problems whose prompt is the task's question with its own instructions. Invariant: the task's own verifier scores
a completion, on the text between the last `<answer>` and `</answer>`, or on the whole completion without such tags.
Partial credit is kept. There are no demonstrations, so no cold start.
"""

from __future__ import annotations

import dataclasses
import difflib
import random
from collections.abc import Mapping
from typing import Any

from gspo.data.sources import plain
from gspo.data.task import Problem, same_text
from gspo.errors import ConfigError

_SIZE = 100_000


def build(variant: str, **options: Any) -> ReasoningGym:
    """The task `variant` of reasoning-gym, with its own options."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ConfigError(
            f"data.task=reasoning_gym:{variant}: the package is not installed; run: pip install reasoning-gym"
        ) from None
    if variant not in DATASETS:
        raise ConfigError(_unknown_variant(variant, list(DATASETS)))
    known = [f.name for f in dataclasses.fields(DATASETS[variant][1])]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"data.task_options.{option}: reasoning_gym:{variant} has no such option; it has: {', '.join(known)}"
            )
    try:
        # The seed is fixed, because the random stream of the run already selects the entries.
        return ReasoningGym(reasoning_gym.create_dataset(variant, **{"seed": 0, "size": _SIZE, **options}))
    # reasoning-gym checks its options with assert.
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"data.task_options: reasoning_gym:{variant} refuses them (size is {_SIZE} unless set): {error}"
        ) from None


class ReasoningGym:
    alphabet = ""
    has_demonstrations = False

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.unique_problems: int | None = len(dataset)

    def generate(self, rng: random.Random) -> Problem:
        entry = self.dataset[rng.randrange(len(self.dataset))]
        answer = "" if entry["answer"] is None else str(entry["answer"])
        question = entry["question"].strip()
        return Problem(prompt=question, answer=answer, key=same_text(question), columns={"entry": _pack(dict(entry))})

    def score(self, completion: str, columns: Mapping[str, Any]) -> float:
        return float(self.dataset.score_answer(_final_answer(completion), _unpack(columns["entry"])))


def _unknown_variant(variant: str, names: list[str]) -> str:
    close = difflib.get_close_matches(variant, names, n=3) or sorted(names)
    return f"data.task: reasoning-gym has no task {variant!r}; write reasoning_gym:NAME with one of: {', '.join(close)}"


def _final_answer(completion: str) -> str:
    end = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, max(end, 0))
    return completion[start + len("<answer>") : end].strip() if start >= 0 else completion.strip()


# Verifiers compare tuples and look up integer keys, which JSON does not have. Regenerating the entry from its index
# does not work: a few tasks depend on Python's per-process hash seed.
def _pack(value: Any) -> Any:
    if isinstance(value, tuple):
        return {"__tuple__": [_pack(v) for v in value]}
    if isinstance(value, list):
        return [_pack(v) for v in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _pack(v) for key, v in value.items()}
        return {"__items__": [[_pack(key), _pack(v)] for key, v in value.items()]}
    return plain(value)


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(v) for v in value]
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"__tuple__"}:
        return tuple(_unpack(v) for v in value["__tuple__"])
    if set(value) == {"__items__"}:
        return {_unpack(key): _unpack(v) for key, v in value["__items__"]}
    return {key: _unpack(v) for key, v in value.items()}
