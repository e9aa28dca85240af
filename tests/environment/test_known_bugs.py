"""Mistakes that other trainers have made with conversations, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from conversations import END, TOKENIZER, conversations, rows, sample, written

import gspo
from gspo.environment.rewards import ConversationRewards
from gspo.objectives.samples import train_samples
from gspo.types import Completion, ConversationEnd, Group, Score, Status

OWN = """
import os, time
from gspo.environment import Environment, ToolUnavailable, tool

class Slow(Environment):
    "The first answer of some rows comes late."
    def reset(self, row):
        self.row, self.steps = row, 0
        return "Begin with " + row["prompt"]
    def step(self, message):
        self.steps += 1
        if self.steps == 1 and self.row.get("file"):
            while not os.path.exists(self.row["file"]): time.sleep(0.01)
        return f"heard {message['content']}", 0.5, self.steps == 3

class Broken(Environment):
    @tool
    def search(self, text: str) -> str:
        "Search."
        if text == "down": raise ToolUnavailable("the server is down")
        raise ValueError("a wrong query")
    def score(self, message):
        return 1.0
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("environments"), OWN)


def turn_of(key: str) -> int:
    return int(key.rpartition("\x1f")[2])


def test_the_text_of_the_model_is_not_duplicated(own: str) -> None:
    with conversations(lambda content, key: f"t{turn_of(key)}", f"{own}:Slow", rows({"prompt": "x"})) as parts:
        engine, below, prompts = parts
        (done,) = sample(engine, prompts)
    last = str(TOKENIZER.decode(below.rounds[-1][0].token_ids))
    assert last == "<user>Begin with x<assistant>t0<end><user>heard t0<assistant>t1<end><user>heard t1<assistant>"
    assert str(TOKENIZER.decode([*prompts[0].token_ids, *done.token_ids])) == f"{last}t2<end>"
    assert done.text.count("t0") == 2, "once by the model, once in the answer"


def test_the_first_message_is_there_for_conversations_that_join_a_later_round(own: str, tmp_path: Path) -> None:
    file = tmp_path / "go"

    def answer(content: str, key: str) -> str:
        if turn_of(key) == 2 and not key.startswith("train/1"):
            file.touch()  # the others are over before the late one is answered
        return "ab"

    problems = rows({"prompt": "x"}, {"prompt": "late", "file": str(file)})
    with conversations(answer, f"{own}:Slow", problems, patience_s=0.05) as (engine, below, prompts):
        done = sample(engine, prompts)
    late = [prompt for round_ in below.rounds for prompt in round_ if prompt.id.startswith("train/1")]
    assert len(late) == 3
    assert all(str(TOKENIZER.decode(p.token_ids)).startswith("<user>Begin with late<assistant>") for p in late)
    assert [c.conversation.reward for c in done if c.conversation] == [1.5, 1.5]


def test_the_mask_of_observations_survives_truncation(own: str) -> None:
    observation = "<user>heard abc<assistant>"
    ends = set()
    with conversations(lambda content, key: "abc", f"{own}:Slow", rows({"prompt": "x"})) as (engine, _, prompts):
        for limit in (2, 4, 20, 24, 26, 27, 28, 45, 200):
            (done,) = sample(engine, prompts, max_tokens=limit)
            assert len(done.token_ids) <= limit
            assert len(done.sampled or done.token_ids) == len(done.token_ids)
            own_ids = done.sampled_ids
            assert own_ids == tuple([*ids("abc"), END] * 3)[: len(own_ids)]
            given = [i for i, mine in zip(done.token_ids, done.sampled, strict=False) if not mine]
            assert given == (ids(observation) * 2)[: len(given)]
            assert len(done.logp_sampler) == len(own_ids)
            assert done.conversation is not None
            ends.add(done.conversation.end)
    assert ends == {ConversationEnd.TOKENS, ConversationEnd.DONE}


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def test_conversations_whose_tools_were_down_are_not_trained_on(own: str) -> None:
    """The environment would have given all of them a reward of 1."""

    def answer(content: str, key: str) -> str:
        return {"down": "search(down)", "wrong": "search(wrong)"}.get(content, "the answer")

    problems = rows({"prompt": "down"}, {"prompt": "wrong"}, {"prompt": "none"})
    with conversations(answer, f"{own}:Broken", problems) as (engine, _, prompts):
        done = sample(engine, prompts)
    assert [status for status, _ in scores(done, prompts[0])] == [Status.UNSCORED, Status.SCORED, Status.SCORED]
    group = Group(prompt=prompts[0], completions=done, scores=[score for _, score in scores(done, prompts[0])])
    trained = train_samples([group], gspo.objective("gspo"), max_tokens=400)
    assert [s.sample for s in trained] == [1, 2]
    # A call that failed because of the model is told to it, counted, and trained on.
    assert done[1].conversation is not None
    assert done[1].conversation.turns[0].failed_calls == 1
    assert "error: ValueError: a wrong query" in done[1].text


def scores(done: list[Completion], prompt: object) -> list[tuple[Status, Score]]:
    rewards = ConversationRewards("own", correct_above=0.5, pool=None)
    found = rewards.score([(prompt, [c]) for c in done])  # type: ignore[list-item]
    return [(score.status, score) for (score,) in found]


@pytest.mark.parametrize("content", ["m['content']", "m['content'].split('</think>')[-1]"], ids=["keeps", "drops"])
def test_every_turn_reads_what_a_server_would_show_it(content: str, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates that drop thinking: training on the whole history would train on contexts that never occur."""
    monkeypatch.setattr(TOKENIZER, "chat_template", str(TOKENIZER.chat_template).replace("m['content']", content))

    def answer(text: str, key: str) -> str:
        return f"<think>so {turn_of(key)}</think>say {turn_of(key)}"

    with conversations(answer, f"{own}:Slow", rows({"prompt": "x"})) as (engine, below, prompts):
        sample(engine, prompts)
    messages = [{"role": "user", "content": "Begin with x"}]
    for number, (read,) in enumerate(below.rounds):
        expected = TOKENIZER.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"]
        assert list(read.token_ids) == list(expected)
        said = answer("", f"\x1f{number}")
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"heard {said}"}]
    assert len(below.rounds) == 3
