"""Somebody else's environments: games of textarena, by the example, with the package or with a stand-in."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from conversations import conversations, rows, sample

from gspo.types import ConversationEnd

EXAMPLE = Path(__file__).parents[2] / "examples/environments/textarena_game.py"
# The interface that textarena 0.7.4 has: what its own GuessTheNumber returned when it was tried.
STAND_IN = """
import random

class Guess:
    def reset(self, num_players, seed):
        assert num_players == 1
        self.number, self.moves, self.said = random.Random(seed).randint(1, 20), 0, [(-1, "Guess a number.", 1)]
    def get_observation(self):
        said, self.said = self.said, []
        return 0, said
    def step(self, action):
        self.moves += 1
        guess = int(action.strip("[]"))
        self.said += [(0, action, 2), (-1, f"The target number is {'higher' if guess < self.number else 'lower'}.", 4)]
        self.won = guess == self.number
        return self.won or self.moves == 10, {}
    def close(self):
        return {0: 1.0 if self.won else 0.5}, {0: {"turn_count": self.moves}}

def make(name):
    assert name == "GuessTheNumber-v0-raw"
    return Guess()
"""


@pytest.mark.parametrize("package", ["stand-in", "textarena"])
def test_a_game_is_played_to_its_end(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if package == "stand-in":
        (tmp_path / "textarena.py").write_text(STAND_IN)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    elif importlib.util.find_spec("textarena") is None:
        pytest.skip("textarena is not installed")
    bounds: dict[str, list[int]] = {}

    def bisect(content: str, key: str) -> str:
        """The middle of what is possible after the moves so far: the engine sees the last turn only."""
        prompt, _, turn = key.rpartition("\x1f")
        low, high = bounds.setdefault(prompt, [1, 20])
        if turn != "0":
            read = below.rounds[-1][[p.id for p in below.rounds[-1]].index(key)].token_ids
            said = str(engine._template.tokenizer.decode(read))
            guess = int(re.findall(r"\[(\d+)\]", said)[-1])
            low, high = (guess + 1, high) if said.rfind("higher") > said.rindex("[") else (low, guess - 1)
            bounds[prompt] = [low, high]
        return f"[{(low + high) // 2}]"

    problems = rows({"prompt": "Game 1."}, {"prompt": "Play well."})
    options = {"max_turns": 12, "timeout_s": 120.0}
    with conversations(bisect, f"{EXAMPLE}:Game", problems, **options) as (engine, below, prompts):
        done = sample(engine, prompts, 2, max_tokens=3000)
    assert prompts[1].text.startswith("<user>Play well.")
    assert all("uess" in prompt.text for prompt in prompts)
    for completion in done:
        assert completion.conversation is not None
        assert completion.conversation.failure is None
        assert completion.conversation.end is ConversationEnd.DONE
        assert len(completion.conversation.turns) <= 5
        assert completion.conversation.reward == 1.0
    # All conversations of a row play the same game.
    assert [c.token_ids for c in done[0::2]] == [c.token_ids for c in done[1::2]]
