"""A recipe for the user's model and problems, with a comment on every setting.

In: what the recipe is for. Out: the text of a TOML file. Invariant: the text is a valid recipe; the comments are the
help texts of the settings, so that they say what `gspo train --help` says.
"""

from __future__ import annotations

import re
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo import config as settings
from gspo.data.sources import check_file, read_file
from gspo.data.task import build_task
from gspo.errors import ConfigError, DataError
from gspo.site import linked

PROMPT_FIELDS = ("question", "problem", "prompt", "text", "input", "query", "instruction")
"""Likely names of the field with the problem, most likely first."""
ANSWER_FIELDS = ("answer", "target", "solution", "expected", "output", "label")
TEST_FIELDS = ("tests", "test_list", "test")
"""Fields that the reward `code_tests` reads."""
BOXED = "Think step by step, and put the final answer in \\boxed{}."
MARKED = "Think step by step. End with a line that holds only #### and the final answer, for example: #### 72"
PROGRAM = "Answer with one Python block."
SHORT = "Answer with the result only."
FILE_TYPES = (".jsonl", ".json", ".csv", ".parquet", ".gz")
WIDTH = 110


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What a new recipe is for."""

    name: str
    model: str
    data: str
    """A data file, a generated task, or a dataset on the hub (its name contains a slash)."""
    reward: str
    """Name of a reward function, or `FILE.py:FUNCTION`; empty for a generated task."""
    objective: str
    lora: int
    """Rank of LoRA adapters; 0 trains all weights."""
    max_tokens: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Fields:
    """How the rows of a data file are read."""

    prompt: str = PROMPT_FIELDS[0]
    answer: str = ANSWER_FIELDS[0]
    marker: str = ""
    """Text before the answer in the answer field."""
    tests: bool = False
    """Whether the rows have tests for programs."""

    @property
    def reward(self) -> str:
        """The built-in reward that fits such rows."""
        return "code_tests" if self.tests else "math_answer"


def kind_of(data: str) -> str:
    """The key of `[data]` that names these problems: `path`, `hub` or `task`."""
    if Path(data).suffix in FILE_TYPES or Path(data).is_file():
        return "path"
    return "hub" if "/" in data else "task"


def fields_of(data: str) -> Fields:
    """The fields of a data file, by their usual names in its first row; the defaults for other problems."""
    if kind_of(data) == "task":
        build_task(data, {})  # refuses an unknown one
    if kind_of(data) != "path":
        return Fields()
    check_file(data)
    rows = read_file(data)
    if not rows:
        raise DataError(f"{data}: has no rows")
    row = rows[0].fields
    if rows[0].fault:
        raise DataError(f"{rows[0].where}: {rows[0].fault}")
    tests = any(name in row for name in TEST_FIELDS)
    prompt = next((name for name in PROMPT_FIELDS if name in row), None)
    answer = "" if tests else next((name for name in ANSWER_FIELDS if name in row and name != prompt), None)
    if prompt is None or answer is None:
        what = "problem" if prompt is None else "expected answer"
        raise DataError(
            f"{data}: no field with a usual name holds the {what}; its fields are {', '.join(row)}; rename one to "
            f"{(PROMPT_FIELDS if prompt is None else ANSWER_FIELDS)[0]!r}"
        )
    return Fields(
        prompt=prompt, answer=answer, marker="####" if answer and "####" in str(row[answer]) else "", tests=tests
    )


def recipe_text(answers: Answers) -> str:
    """The recipe as TOML with comments."""
    text = _text(answers, fields_of(answers.data))
    settings.check(settings.from_tree(tomllib.loads(text), where="gspo init"))
    return text


def _text(answers: Answers, fields: Fields) -> str:
    chosen, optional = _settings(answers, fields)
    helps = {key: text for key, _, _, text in settings.help_texts()}
    lines = [
        "# Written by gspo init. Check it, then train:",
        "#",
        f"#   gspo doctor {answers.name}.toml",
        f"#   gspo train {answers.name}.toml",
        "#",
        "# A setting after '# ' is not in effect; remove the '# ' to use it. All settings: gspo train --help.",
        f"name = {settings.toml_value(answers.name)}",
    ]
    for table in dict.fromkeys(map(_table, [*chosen, *optional])):
        if table:
            lines += ["", f"[{table}]"]
        for values, start in ((chosen, ""), (optional, "# ")):
            for key, value in values.items():
                if _table(key) == table:
                    lines += _comment(helps[key])
                    lines.append(f"{start}{key.removeprefix(f'{table}.')} = {settings.toml_value(value)}")
    return "\n".join(lines) + "\n"


def _table(key: str) -> str:
    """The table of a dotted key; empty for a setting of the whole run."""
    return key.partition(".")[0] if "." in key else ""


def _comment(text: str) -> Sequence[str]:
    """The first two sentences of a help text as comment lines."""
    plain = linked(" ".join(text.split()).replace("`", ""))
    sentences = re.split(r"(?<=[.:]) (?=[A-Z0-9])", plain)[:2]
    return [f"# {line}" for line in textwrap.wrap(" ".join(sentences), WIDTH, break_on_hyphens=False)]


def _settings(answers: Answers, fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the recipe, and those that are worth a look, by dotted key."""
    kind = kind_of(answers.data)
    rows: Mapping[str, Any] = {}
    if kind != "task":
        instruction = PROGRAM if answers.reward == "code_tests" else MARKED if fields.marker else BOXED
        rows = {
            "data.prompt_field": fields.prompt,
            "data.answer_field": fields.answer,
            **({"data.answer_after": fields.marker} if fields.marker else {}),
            "data.instruction": instruction if answers.reward in ("code_tests", "math_answer") else SHORT,
        }
    marked = fields.marker and answers.reward == "math_answer"
    chosen: dict[str, Any] = {
        "steps": answers.steps,
        "model.path": answers.model,
        **({"model.lora.rank": answers.lora} if answers.lora else {}),
        f"data.{kind}": answers.data,
        **rows,
        "data.held_out": 256 if kind == "task" else _held_out(answers.data, kind),
        "rollout.prompts": 32,
        "rollout.group_size": 8,
        "rollout.max_tokens": answers.max_tokens,
        **({"reward.functions": [answers.reward]} if answers.reward else {}),
        **({"reward.options": {"math_answer": {"marker": fields.marker}}} if marked else {}),
        "objective.name": answers.objective,
        "learner.mini_batches": 4,
        # LoRA needs a higher rate than training all weights.
        "learner.learning_rate": 2e-5 if answers.lora else 1e-6,
        "eval.every": 20,
        "checkpoint.every": 20,
    }
    optional: dict[str, Any] = {
        "seed": 0,
        "model.dtype": "bfloat16",
        "model.gradient_checkpointing": True,
        **({"data.hub_config": "main"} if kind == "hub" else {}),
        **({} if kind == "task" else {"data.held_out_path": "test.jsonl"}),
        "rollout.temperature": 1.0,
        "rollout.engine": "vllm",
        "learner.micro_batch_tokens": 16384,
        "eval.samples": 1,
        "checkpoint.keep_best": True,
        "log.sinks": ["tensorboard"],
    }
    return chosen, optional


def _held_out(data: str, kind: str) -> int:
    """A fifth of a small file."""
    return 256 if kind == "hub" else min(256, max(1, len(read_file(data)) // 5))


def reward_problem(reward: str) -> ConfigError | None:
    """Why this is not the name of a reward function; None if it is one."""
    from gspo.reward import rewards

    known = sorted(p.stem for p in Path(rewards.__path__[0]).glob("*.py") if p.stem != "__init__")
    if reward in known or (reward.partition(":")[0].endswith(".py") and ":" in reward):
        return None
    return ConfigError(f"{reward!r} is not a reward; choose one of {', '.join(known)}, or FILE.py:FUNCTION")
