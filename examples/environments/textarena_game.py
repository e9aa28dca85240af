"""A game of textarena (https://pypi.org/project/textarena, `pip install textarena`) as an environment.

In: rows whose prompts differ, which the instruction of the game is appended to, and perhaps the name of a game as
`game`. Out: the game's own reward when it is over. Invariant: all conversations of a row play the same instance of the
game.

    [data]
    path = "games.jsonl"                  # rows such as {"number": 1}
    prompt_template = "Game {number}."
    answer_field = ""

    [environment]
    name = "examples/environments/textarena_game.py:Game"
    options.game = "GuessTheNumber-v0-raw"
"""

import textarena

from gspo.environment import Environment

MODEL = 0
"""The player. Games of one player only: there is no opponent."""


class Game(Environment):
    def __init__(self, game: str = "GuessTheNumber-v0-raw") -> None:
        self.name = game

    def reset(self, row):
        self.game = textarena.make(row.get("game", self.name))
        self.game.reset(num_players=1, seed=self.rng.randrange(2**31))
        return f"{row['prompt']}\n{self.news()}".strip()

    def step(self, message):
        done, _ = self.game.step(message["content"])
        if not done:
            return self.news() or "Go on.", None, False
        rewards, _ = self.game.close()
        return [], float((rewards or {}).get(MODEL, 0.0)), True

    def news(self) -> str:
        """What the game has said since the last move. It repeats the model's own moves, which the model knows."""
        _, said = self.game.get_observation()
        return "\n".join(text for speaker, text, *_ in said if speaker != MODEL)
