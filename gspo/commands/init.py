"""`gspo init`: write a commented recipe, from options or questions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.commands.arguments import positive
from gspo.commands.command import Command, no_overrides
from gspo.errors import ConfigError, GspoError
from gspo.record.run_dir import replace_text, writing


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked if the option is not given, and what counts as an answer."""

    text: str
    default: Any
    read: Callable[[str], Any] = str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", nargs="?", default="recipe.toml", help="file to write (default: recipe.toml)")
    add("--model", help="model directory, hub name or .gguf file")
    add("--data", help="problems: a data file, a hub dataset, or the name of a generated task")
    add("--reward", metavar="NAME", help="reward function: a built-in one, or FILE.py:FUNCTION")
    add("--objective", metavar="NAME", help="objective (default: gspo)")
    add("--lora", type=_rank, metavar="RANK", help="train LoRA adapters of this rank; 0 trains all weights (default)")
    add("--max-tokens", type=positive, metavar="N", help="most tokens of a completion (default: 512)")
    add("--steps", type=positive, metavar="N", help="training steps (default: 200)")
    add("--yes", action="store_true", help="ask nothing: use the defaults for what is not given")
    add("--force", action="store_true", help="replace the file if it exists")


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    no_overrides(overrides)
    path = Path(options.recipe)
    if path.suffix != ".toml":
        raise ConfigError(f"{path}: a recipe is a .toml file; write for example gspo init {path.name}.toml")
    if path.exists() and not options.force:
        raise ConfigError(f"{path}: exists; choose another name, or replace it with --force")
    ask = sys.stdin.isatty() and not options.yes
    text = _recipe(options, path.stem, ask=ask)
    with writing(path, "choose another directory"):
        replace_text(path, text)
    print(f"Wrote {path}. Next:\n  gspo doctor {path}\n  gspo train {path}")
    return 0


def _recipe(options: argparse.Namespace, name: str, *, ask: bool) -> str:
    from gspo.commands import new_recipe
    from gspo.commands.new_recipe import fields_of, kind_of

    model = _answer(options, "model", Question(text="Model", default="Qwen/Qwen2.5-0.5B-Instruct"), ask=ask)
    data = _answer(
        options,
        "data",
        Question(text="Problems (a .jsonl, .json, .csv or .parquet file, a hub dataset or a task)", default=None),
        ask=ask,
        check=lambda given: fields_of(given),
    )
    task = kind_of(data) == "task"
    if task and options.reward:
        raise ConfigError(f"--reward: the task {data} has a verifier of its own; leave the option out")
    default = "" if task else fields_of(data).reward
    reward = (
        ""
        if task
        else _answer(options, "reward", Question(text="Reward", default=default), ask=ask, check=_check_reward)
    )
    objective = _answer(
        options, "objective", Question(text="Objective", default="gspo"), ask=ask, check=_check_objective
    )
    lora = _answer(options, "lora", Question(text="LoRA rank (0: all weights)", default=0, read=_rank), ask=ask)
    tokens = Question(text="Most tokens of a completion", default=512, read=positive)
    steps = Question(text="Training steps", default=200, read=positive)
    return new_recipe.recipe_text(
        new_recipe.Answers(
            name=name,
            model=model,
            data=data,
            reward=reward,
            objective=objective,
            lora=lora,
            max_tokens=_answer(options, "max_tokens", tokens, ask=ask),
            steps=_answer(options, "steps", steps, ask=ask),
        )
    )


def _answer(
    options: argparse.Namespace,
    name: str,
    question: Question,
    *,
    ask: bool,
    check: Callable[[str], Any] = lambda given: None,
) -> Any:
    """The value of an option, or the answer to its question, which is repeated until it is valid."""
    given = getattr(options, name)
    if given is not None:
        check(given)
        return given
    if not ask:
        if question.default is None:
            raise ConfigError(f"--{name}: give it, because there is no default")
        return question.default
    while True:
        default = "" if question.default is None else f" [{question.default}]"
        try:
            text = input(f"{question.text}{default}: ").strip()
        except EOFError:
            raise ConfigError("no answer; give options instead, see gspo init --help") from None
        try:
            value = question.read(text) if text else question.default
            if value is None:
                continue
            check(value)
        except (GspoError, argparse.ArgumentTypeError) as error:
            print(f"  {error}")
            continue
        return value


def _rank(text: str) -> int:
    return 0 if text == "0" else positive(text)


def _check_reward(given: str) -> None:
    from gspo.commands.new_recipe import reward_problem

    if problem := reward_problem(given):
        raise problem


def _check_objective(given: str) -> None:
    from gspo.objectives.table import objective

    objective(given)


COMMAND = Command(
    name="init",
    help="Write a commented recipe, from options or questions.",
    add_arguments=add_arguments,
    run=run,
    single_process=True,
)
