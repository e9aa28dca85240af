"""The generated task's own score of the completion. The default reward if `data.task` is set.

Thinking (`<think>`) is removed; thinking that never ends leaves an empty completion. `task` and `task_options` come
from `data.task` and `data.task_options`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from gspo.data.task import Task, build_task
from gspo.reward.completion_text import completion_text
from gspo.reward.final_answer import after_thinking
from gspo.reward.traits import RewardTraits

EXAMPLE: dict[str, Any] = {"completion": "1+2=3|3", "columns": {"answer": "3"}, "options": {"task": "addition"}}
TRAITS = RewardTraits(reads_demonstrations=True)


def score(
    prompts: list[Any],
    completions: list[Any],
    *,
    task: str,
    task_options: Mapping[str, Any] = {},
    **columns: Any,
) -> list[float]:
    built_task = _cached_task(task, json.dumps(task_options))
    rows = [{name: values[i] for name, values in columns.items()} for i in range(len(completions))]
    texts = [after_thinking(completion_text(c)) or "" for c in completions]
    return [built_task.score(text, row) for text, row in zip(texts, rows, strict=True)]


def check(task: str, task_options: Mapping[str, Any] = {}) -> None:
    """Reject an unknown task or option before the run starts. This also builds the task outside of any deadline."""
    _cached_task(task, json.dumps(task_options))


@functools.cache
def _cached_task(task: str, options: str) -> Task:
    return build_task(task, json.loads(options))
