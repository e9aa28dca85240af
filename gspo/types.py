"""The values that travel between the stages of a training step.

Shape legend, used as a suffix on every tensor and list: `P` prompts, `G` replies of one prompt, `B` sequences
(= prompts x replies), `N` packed reply tokens, `T` padded width, `V` vocabulary: `reward_G`, `advantage_B`, `logp_N`.

Four policies, four names: `logp` (being learned), `logp_old` (learner's weights and forward at the start of the batch),
`logp_sampler` (what the engine sampled with), `logp_ref` (frozen reference). Log-probabilities are float32, always.

Invariant: everything here is frozen, and nothing here imports torch, so that readers of a run directory stay light.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

Messages = list[dict[str, Any]]
"""A chat: `[{"role": "user", "content": "..."}, ...]`."""


UNIFORM_TOLERANCE = 1.2e-7
"""Rewards of a group that differ by no more than this, or than this share of the largest, are equal: float32's resolution."""


class StopReason(StrEnum):
    """Why a reply ended."""

    EOS = "eos"
    """The model ended it; the end token is part of the reply and is trained on."""
    LENGTH = "length"
    """It was cut at the token limit."""


class Status(StrEnum):
    """What became of a reply's reward."""

    SCORED = "scored"
    UNSCORED = "unscored"
    """A reward raised, hung or returned nonsense. Neither right nor wrong: kept out of every mean and denominator."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One problem, ready to sample from."""

    id: str
    """Stable identity within the data set (`train/17`); random streams are keyed by it."""
    content: str | Messages
    """What the data file said: text, or chat messages. Rewards see this."""
    text: str
    """What the model sees, after the chat template."""
    token_ids: tuple[int, ...]
    key: str = ""
    """Equal for problems that ask the same; no key is both trained on and held out."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other fields (`answer`, ...), passed to rewards by name. JSON values only."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How replies are drawn. `temperature = 0` is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    greedy_last: bool = False
    """Whether the last completion of each prompt is greedy, so that one prefill serves both kinds."""

    @property
    def greedy(self) -> Sampling:
        """The same limit, always taking the likeliest token."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=0)


@dataclass(frozen=True, kw_only=True)
class Routes:
    """The experts that computed a sequence in the sampling engine, compact: [tokens, layers, top_k] in C order."""

    experts: bytes
    """For every token of prompt and reply but the last, which no forward has read."""
    layers: int
    """MoE layers; dense ones are not counted."""
    top_k: int
    width: int
    """Bytes per choice: 1 or 2 (little-endian)."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled reply."""

    prompt_id: str
    sample: int
    """Which of the prompt's replies this is: 0 .. G-1."""
    token_ids: tuple[int, ...]
    """Generated tokens, the end token included when the stop reason is EOS."""
    text: str
    """Decoded without special tokens."""
    logp_sampler: tuple[float, ...]
    """Log-probability of each token under the distribution it was actually drawn from."""
    stop: StopReason
    version: int
    """Optimiser updates the sampling policy had seen when the reply began."""
    spans: tuple[tuple[int, int], ...] = ()
    """Where weights changed while it was drawn: each version with its first token; empty: one version drew it all."""
    routes: Routes | None = None
    """None: a dense model, an engine that does not know, or nobody asked."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """A reply's reward: a number, or the reason why there is none."""

    status: Status
    reward: float | None = None
    """Weighted sum of the parts, before shaping. None when unscored."""
    correct: bool | None = None
    """Decides accuracy. None when unscored, or when the first reward function abstained."""
    parts: Mapping[str, float | None] = field(default_factory=dict)
    """Each reward function's own value; None where it abstained or failed."""
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Words of reward functions on how their values came about, where they have any: `code_tests`: `timeout`."""
    failure: str | None = None
    """Why it is unscored, in one line that starts with the kind: `raised: ...`, `timeout: ...`, `untried: ...` (the batch's
    time was up), `died: ...` (the worker crashed), `memory: ...`, `nonsense: ...`, `abstained: ...`."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt with its replies and their scores."""

    prompt: Prompt
    completions: Sequence[Completion]
    scores: Sequence[Score]

    def __post_init__(self) -> None:
        assert len(self.completions) == len(self.scores)

    @property
    def uniform(self) -> bool:
        """Whether all scored replies have the same reward, so that the group teaches nothing, or a penalty beside it alone."""
        return equal_rewards([score.reward for score in self.scores if score.reward is not None])


def equal_rewards(rewards: Sequence[float]) -> bool:
    """Whether rewards are the same up to rounding; also of none."""
    return not rewards or max(rewards) - min(rewards) <= UNIFORM_TOLERANCE * max(1.0, *map(abs, rewards))
