"""The generated task's own verdict on the completion. The default reward when `data.task` is set.

Thinking (`<think>`) is left out; thinking that never ends leaves an empty completion. `task` and `task_options` come
from `data.task` and `data.task_options`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from gspo.data.task import Task, build_task
from gspo.reward.final_answer import after_thinking
from gspo.reward.reply import reply_text

EXAMPLE: dict[str, Any] = {"reply": "1+2=3|3", "columns": {"answer": "3"}, "options": {"task": "addition"}}


def score(
    prompts: list[Any],
    completions: list[Any],
    *,
    task: str,
    task_options: Mapping[str, Any] = {},
    **columns: Any,
) -> list[float]:
    built = _built(task, json.dumps(task_options))
    rows = [{name: values[i] for name, values in columns.items()} for i in range(len(completions))]
    said = [after_thinking(reply_text(c)) or "" for c in completions]
    return [built.score(text, row) for text, row in zip(said, rows, strict=True)]


def check(task: str, task_options: Mapping[str, Any] = {}) -> None:
    """Refuse an unknown task or option before the run starts; building it here also keeps that out of the deadlines."""
    _built(task, json.dumps(task_options))


@functools.cache
def _built(task: str, options: str) -> Task:
    return build_task(task, json.loads(options))
