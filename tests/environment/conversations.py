"""Conversations without a model: an engine that answers from a function, with made-up log-probs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gspo import config as settings
from gspo.environment.engine import ConversationEngine
from gspo.environment.setup import RunEnvironment
from gspo.model.load import char_tokenizer
from gspo.rollout.engine import DecodeStats, GenerateOptions
from gspo.types import Completion, Prompt, Sampling, StopReason

TOKENIZER = char_tokenizer("".join(map(chr, range(32, 127))) + "\n")
END = TOKENIZER.eos_token_id


class FunctionEngine:
    """Each turn is `answer(content of the turn's prompt, its id)`, and the log-prob of token i of a turn is -i - 1."""

    about = ""
    decoded: DecodeStats | None = None
    reports_routes = False

    def __init__(self, answer: Callable[[str, str], str], *, end: bool = True) -> None:
        self.answer = answer
        self.end = end
        self.rounds: list[list[Prompt]] = []
        self.samplings: list[Sampling] = []

    def generate(self, prompts: Sequence[Prompt], options: GenerateOptions) -> list[list[Completion]]:
        self.rounds.append(list(prompts))
        self.samplings.append(options.sampling)
        return [[self._completion(prompt, options.sampling, options.version)] for prompt in prompts]

    def _completion(self, prompt: Prompt, sampling: Sampling, version: int) -> Completion:
        text = self.answer(str(prompt.content), prompt.id)
        ids = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], *([END] if self.end else [])]
        whole = len(ids) <= sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        stop = StopReason.LENGTH if not whole else StopReason.EOS if self.end else StopReason.STOP
        return Completion(
            prompt_id=prompt.id,
            sample=0,
            token_ids=tuple(ids),
            text=text,
            logp_sampler=tuple(-1.0 - i for i in range(len(ids))),
            stop=stop,
            version=version,
        )

    def sync(self, version: int) -> None:
        """Nothing to send."""

    def end_conversations(self, conversations: Sequence[str]) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""


class _Policy:
    tokenizer = TOKENIZER
    stop_ids = (END,)
    position_limit = None


def rows(*columns: Mapping[str, Any]) -> list[Prompt]:
    """Problems with these fields, of which `prompt` is the text."""
    return [
        Prompt(
            id=f"train/{i}",
            content=one["prompt"],
            text=one["prompt"],
            token_ids=(1,),
            columns={k: v for k, v in one.items() if k != "prompt"},
        )
        for i, one in enumerate(columns)
    ]


@contextmanager
def conversations(
    answer: Callable[[str, str], str], name: str, prompts: Sequence[Prompt], *, end: bool = True, **changes: Any
) -> Iterator[tuple[ConversationEngine, FunctionEngine, list[Prompt]]]:
    """An engine for conversations, the engine below it, and the problems as the environment begins them."""
    # Patient, so that rounds do not depend on the speed of the machine.
    environment = {"name": name, "tool_format": "call", "patience_s": 600.0, **changes}
    tree = {"model": {"build": "tiny_dense"}, "data": {"task": "addition"}, "environment": environment}
    config = settings.override(tree, [], where="test")
    settings.check(config)
    opened = RunEnvironment(config)
    try:
        below = FunctionEngine(answer, end=end)
        ready = opened.open(prompts, TOKENIZER)
        yield opened.engine(below, _Policy()), below, ready  # type: ignore[arg-type]
    finally:
        opened.close()


def sample(engine: ConversationEngine, prompts: Sequence[Prompt], samples: int = 1, **limits: Any) -> list[Completion]:
    """All conversations, one after the other."""
    sampling = Sampling(**{"max_tokens": 400, **limits})
    options = GenerateOptions(samples=samples, sampling=sampling, seed=0, stream="train/1", version=3)
    groups = engine.generate(prompts, options)
    return [completion for group in groups for completion in group]


def written(folder: Path, text: str) -> str:
    """A file with environments; its path."""
    file = folder / "own.py"
    file.write_text(text)
    return str(file)
