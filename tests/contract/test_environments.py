"""The contract of an environment, tested for every file in `gspo/environment/environments`, and what each of them does.

A new file is tested automatically: it has a class `ENVIRONMENT` with a docstring, tools with schemas, and a
conversation that ends. Whatever the model writes, the completion is scored.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Mapping
from typing import Any

import pytest

from gspo.environment import Environment, ToolCall, ToolError
from gspo.environment.environment import built_in_names, environments, first_messages, schemas, take_step
from gspo.environment.environments.calculator import Calculator
from gspo.environment.environments.guess_number import GuessNumber
from gspo.environment.environments.python_tool import PythonTool
from gspo.environment.tool_calls import Parsed

ROW = {"prompt": "How many?", "answer": "7", "largest": 31, "expression": "3+4"}
HOSTILE = ["", "\x00", "\ud800", "9" * 5000, "nan", "1e999", "(" * 3000, "٣", "7" * 50, "__import__('os')", "7;7", "-7"]


def built(name: str) -> Environment:
    module = importlib.import_module(f"{environments.__name__}.{name}")
    environment: Environment = module.ENVIRONMENT()
    environment.rng = random.Random(0)
    first_messages(environment, ROW)
    return environment


def say(environment: Environment, content: str = "", *calls: ToolCall) -> dict[str, Any]:
    return take_step(environment, Parsed(content=content, calls=calls))


@pytest.mark.parametrize("name", built_in_names())
def test_every_environment_keeps_the_contract(name: str) -> None:
    environment = built(name)
    module = importlib.import_module(type(environment).__module__)
    assert module.__doc__
    assert type(environment).__doc__
    assert module.ENVIRONMENT is type(environment)
    json.dumps(schemas(environment))
    assert first_messages(environment, ROW) == first_messages(built(name), ROW)
    for content in HOSTILE:
        environment = built(name)
        for _ in range(20):
            answer = say(environment, content)
            if answer["done"]:
                break
            assert answer["messages"]
        assert answer["done"]
        assert answer["reward"] is not None
    for schema in schemas(built(name)):
        tool = schema["function"]["name"]
        for arguments in ({}, {"nothing": 1}, *({key: 5} for key in schema["function"]["parameters"]["properties"])):
            environment = built(name)
            answer = say(environment, "", ToolCall(name=tool, arguments=arguments))
            assert answer["failed"] == 1
            assert answer["messages"][0]["content"].startswith("error: ")
            assert not answer["done"]


@pytest.mark.parametrize("name", built_in_names())
def test_demonstrations_are_worth_their_reward(name: str) -> None:
    total = 0.0
    for seed in range(10):
        environment = built(name)
        environment.rng = random.Random(seed)
        for turn in environment.demonstrate(ROW):
            answer = say(environment, "", turn) if isinstance(turn, ToolCall) else say(environment, turn)
        total += answer["reward"] or 0.0 if environment.demonstrate(ROW) else 1.0
    assert total > 0


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3 + 4*2", "11"),
        ("(3+4)*-2", "-14"),
        ("10/4", "2.5"),
        ("1/3", "0.3333333333"),
        ("2×3÷4", "1.5"),
        ("0.1+0.2", "0.3"),
        ("12345678901234567890*2", "24691357802469135780"),
    ],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert Calculator().calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1/0", "division by zero"),
        ("2**9", "expected a number"),
        ("(1", "not closed"),
        ("1 2 x", "cannot read"),
        ("9" * 300, "longer than"),
        ("9" * 40 + "*" + "9" * 40, "too large"),
        ("", "expected a number"),
    ],
)
def test_the_calculator_explains_what_is_wrong(expression: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        Calculator().calculate(expression)


def test_a_call_may_cost_something() -> None:
    environment = Calculator(call_cost=0.25)
    environment.reset(ROW)
    assert say(environment, "", ToolCall(name="calculate", arguments={"expression": "3+4"}))["reward"] == -0.25
    assert say(environment, "It is 7.")["reward"] == 1.0


def game(*guesses: str, **options: int) -> list[tuple[str, float | None, bool]]:
    environment = GuessNumber(**options)
    environment.reset(ROW)
    answers: list[Mapping[str, Any]] = [say(environment, guess) for guess in guesses]
    return [(a["messages"][0]["content"] if a["messages"] else "", a["reward"], a["done"]) for a in answers]


def test_the_game_answers_guesses() -> None:
    higher, lower = ("higher", None, False), ("lower", None, False)
    assert game("3", "9", "7") == [higher, lower, ("", 1.0, True)]
    assert game("x", "3", max_guesses=2) == [("a number", None, False), ("", 0.0, True)]


def test_the_python_tool_shows_output_and_exceptions() -> None:
    tool = PythonTool(limit_s=2.0, longest_output=300)
    assert tool.python("print(3 + 4)") == "7\n"
    assert "ZeroDivisionError: division by zero" in tool.python("print('a')\n1 / 0")
    assert tool.python("x = 1") == "(the program printed nothing)"
    assert "SyntaxError" in tool.python("1 +")
    assert tool.python("print('x' * 10**4)").startswith("… (truncated)")
    assert "timeout" in tool.python("while True: pass")
    assert "PermissionError" in tool.python("import socket\nsocket.socket()")
