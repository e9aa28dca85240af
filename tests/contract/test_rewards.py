"""The contract of a reward, tested for every file in `gspo/reward/rewards`. A new file is tested automatically.

A reward file has `score(prompts, completions, <columns>, *, <options>, **columns)`, a docstring, an `EXAMPLE` whose
completion it scores as correct, and `TRAITS`. The endpoints that examples name are played by a server in this process.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from endpoints import Action, Endpoint, Request, chat

from gspo.config import RewardConfig
from gspo.reward.function import built_in_names
from gspo.reward.reward import RewardPool
from gspo.reward.traits import reward_traits
from gspo.types import Completion, Prompt, Status, StopReason

NAMES = built_in_names()

HOSTILE = [
    "",
    " \n\t",
    "\x00",
    "a\x00b\x1b[31m",
    "\ud800",
    "x\udfff####",
    "x" * 1_000_000,
    "{" * 2000 + "}" * 2000,
    r"\boxed{" * 200 + "1" + "}" * 200,
    r"\frac{" * 200,
    "$" * 1001,
    "$$\\[\\(\\boxed{\\text{",
    "٣٤",
    "①²½Ⅷ",
    "\u202e72\u2066",
    "e\u0301" * 100,
    "👨‍👩‍👧‍👦",
    "#### ####",
    "-",
    ".",
    "+-1,2,,3..4",
    "9" * 5000,
    "0x10 1e999 nan inf -inf",
    "__import__('os').system('true')",
    "<think></think><think>",
]


def play(request: Request) -> Action:
    """A judge, and a reward model, that likes the example of its file and nothing else."""
    if request.path == "/v1/chat/completions":
        return chat("Score: 10" if request.completion == module("llm_judge").EXAMPLE["completion"] else "Score: 2")
    assert request.path == "/classify"
    likes = request.body["messages"][-1]["content"] == module("reward_model").EXAMPLE["completion"]
    return Action({"data": [{"probs": [1.0 if likes else 0.25]}]})


@pytest.fixture(autouse=True)
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint | None]:
    """Examples that name an endpoint use this one."""
    with Endpoint(play) as server:
        for name in NAMES:
            options = module(name).EXAMPLE["options"]
            if "url" in options:
                address = server.url if options["url"].endswith("/v1") else server.root
                monkeypatch.setitem(options, "url", address)
        yield server


def module(name: str) -> ModuleType:
    return importlib.import_module(f"gspo.reward.rewards.{name}")


def call(name: str, texts: list[str], *, chat: bool = False) -> list[Any]:
    example = copy.deepcopy(module(name).EXAMPLE)
    completions = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
    columns = {key: [copy.deepcopy(value) for _ in texts] for key, value in example["columns"].items()}
    columns["completion_ids"] = [[1, 2] for _ in texts]
    return module(name).score(prompts=["?"] * len(texts), completions=completions, **columns, **example["options"])


@pytest.mark.parametrize("name", NAMES)
def test_shape_of_the_file(name):
    parameters = inspect.signature(module(name).score).parameters.values()
    assert [p.name for p in parameters][:2] == ["prompts", "completions"]
    assert any(p.kind is p.VAR_KEYWORD for p in parameters), "accept **columns: the data may have more columns"
    assert module(name).__doc__
    assert json.loads(json.dumps(module(name).EXAMPLE)).keys() == {"completion", "columns", "options"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chat", [False, True])
def test_the_example_is_correct(name, chat):
    assert call(name, [module(name).EXAMPLE["completion"]], chat=chat) == [1.0]


@pytest.mark.parametrize("name", NAMES)
def test_a_known_answer_of_its_traits_is_correct(name):
    example = module(name).EXAMPLE
    make = reward_traits(name).known_answers
    known = make(example["columns"], example["options"]) if make else []
    assert call(name, known) == [1.0] * len(known)


@pytest.mark.parametrize("name", NAMES)
def test_hostile_completions(name):
    """No exception. One value per completion: a number from 0 to 1, `None`, or a failure of that completion alone."""
    values = call(name, HOSTILE)
    assert len(values) == len(HOSTILE)
    for value in values:
        assert value is None or isinstance(value, Exception) or (isinstance(value, float) and 0.0 <= value <= 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_the_value_does_not_depend_on_the_batch_or_its_order(name):
    texts = [module(name).EXAMPLE["completion"], *(text for text in HOSTILE if len(text) < 10_000)]
    expected = call(name, texts)
    order = list(range(len(texts)))
    random.Random(0).shuffle(order)
    assert call(name, [texts[i] for i in order]) == [expected[i] for i in order]
    assert [call(name, [text])[0] for text in texts] == expected
    assert expected[0] == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_through_the_pool(name):
    example = module(name).EXAMPLE
    texts = [example["completion"], *HOSTILE[:6]]
    prompt = Prompt(id="p", content="?", text="?", token_ids=(1,), columns={**example["columns"], "other": [1]})
    completions = [
        Completion(prompt_id="p", sample=i, token_ids=(), text=text, logp_sampler=(), stop=StopReason.LENGTH, version=0)
        for i, text in enumerate(texts)
    ]
    config = RewardConfig(functions=(name,), options={name: example["options"]}, workers=1, timeout_s=30.0)
    with RewardPool(config) as pool:
        (scores,) = pool.score([(prompt, completions)])
    assert (scores[0].status, scores[0].reward, scores[0].correct) == (Status.SCORED, 1.0, True)
    assert [s.reward for s in scores[1:]] == call(name, texts[1:])


@pytest.mark.parametrize("name", NAMES)
def test_no_completions(name):
    assert call(name, []) == []
