"""The values that travel between the stages of a training step.

Shape legend, used as a suffix on tensors and lists: `P` prompts, `G` completions of one prompt, `B` sequences
(= prompts x completions), `N` packed sampled tokens, `T` padded width, `V` vocabulary: `reward_G`, `advantage_B`,
`logp_N`. Other suffixes that cross module borders: `M` those of the `N` tokens whose log-probs the learner computed
before training (all, or one mini-batch), `I` input tokens (prompt and completion), `L` MoE layers, `K` experts per
token, `E` experts, `U` distinct prompts, `R` rows of a forward pass. Any other suffix is defined in the docstring of
the module that uses it.

Four policies, four names: `logp` (current policy), `logp_old` (the learner at the start of the batch), `logp_sampler`
(the distribution the engine sampled from), `logp_ref` (frozen reference). Log-probs are always float32.

Invariant: everything here is frozen, and nothing here imports torch, so tools that only read a run directory start
fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import compress
from typing import Any

Messages = list[dict[str, Any]]
"""A chat: `[{"role": "user", "content": "..."}, ...]`."""


UNIFORM_TOLERANCE = 1.2e-7
"""Rewards of a group that differ by at most this, absolutely or relative to the largest, are equal: float32 epsilon."""


class StopReason(StrEnum):
    """Why a completion ended."""

    EOS = "eos"
    """The model sampled an end token, which is part of the completion and is trained on."""
    STOP = "stop"
    """Its text contains a stop string, which is part of the completion and is trained on."""
    LENGTH = "length"
    """It was truncated at the token limit."""
    CUT = "cut"
    """It has not ended: one call sampled as many tokens as it was allowed to, and a later call continues it. No
    completion that is scored has this reason."""


class Status(StrEnum):
    """Whether a completion has a reward."""

    SCORED = "scored"
    UNSCORED = "unscored"
    """A reward raised, hung or returned an invalid value. Neither right nor wrong: excluded from every mean and
    denominator."""


class ConversationEnd(StrEnum):
    """Why a conversation with an environment ended."""

    DONE = "done"
    """The environment said so."""
    TURNS = "turns"
    """It reached `environment.max_turns`."""
    TURN_TOKENS = "turn_tokens"
    """A turn was truncated at `environment.turn_tokens`."""
    TOKENS = "tokens"
    """It reached `rollout.max_tokens`, or the next observation would have."""
    TIME = "time"
    """The environment's calls took longer than `environment.max_seconds` in all."""
    FAILED = "failed"
    """The environment or the machine failed. The completion is unscored."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the model sampled between two observations."""

    start: int
    """Index of its first token in `Completion.token_ids`."""
    end: int
    """Index after its last token."""
    text: str = ""
    """What it wrote, without special tokens."""
    reward: float | None = None
    """The environment's reward for this turn; `None` if it gave none."""
    calls: tuple[str, ...] = ()
    """The names of the tools that it called."""
    failed_calls: int = 0
    """Calls that were malformed, or whose arguments or tool raised an error. The model has seen the error."""
    other_format: str = ""
    """A format in which this would have been a tool call, if it is none in `environment.tool_format`."""


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A run of tokens of a conversation that were read one after the other. A chat template that rewrites earlier
    turns begins another branch, which shares the tokens before the first change."""

    start: int
    """Index of its first own token in `Completion.token_ids`."""
    parent: int
    """Index of the branch whose beginning it shares; -1 for the first, which begins with the prompt."""
    shared: int
    """How many tokens of the prompt and of its parent come before its own; 0 for the first."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """How a completion came about in which an environment answered the model."""

    turns: tuple[Turn, ...]
    end: ConversationEnd
    failure: str | None = None
    """Why there is no reward, as in `Score.failure`; `None` unless the environment failed."""

    @property
    def reward(self) -> float:
        """The sum of its turns' rewards."""
        return sum(turn.reward for turn in self.turns if turn.reward is not None)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One problem, ready to sample from."""

    id: str
    """Stable identity within the data set (`train/17`). Random streams are keyed by it."""
    content: str | Messages
    """The prompt in the data file: text, or chat messages. Rewards receive this."""
    text: str
    """What the model sees, after the chat template."""
    token_ids: tuple[int, ...]
    key: str = ""
    """Equal for duplicate problems. No key is in both the training set and the held-out set."""
    source: str = ""
    """Name of the source in `data.mix` or of the evaluation set; empty for a problem of `[data]` itself."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other fields (`answer`, ...), passed to rewards by name. JSON values only."""
    demonstration: str = ""
    """A correct completion, for the cold start; empty if the row has none."""
    conversation: str = ""
    """Set for a turn of a conversation whose next turn continues from this prompt and its completion: the engine may
    keep their KV cache under this name, until `Engine.end_conversations`."""

    def without_columns(self) -> Prompt:
        """The prompt as other processes get it: with the text of its messages alone. The rest of a message and the
        row's other fields may be any JSON, such as a number of more than 64 bits, and only rewards read them."""
        content = self.content
        if not isinstance(content, str):
            content = [{key: value for key, value in m.items() if isinstance(value, str)} for m in content]
        return replace(self, content=content, columns={})


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings. `temperature = 0` is greedy decoding."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """`0` keeps the whole vocabulary."""
    stop: tuple[str, ...] = ()
    """Stop strings: a completion ends with the token that completes one of them in its text."""
    min_tokens: int = 0
    """End tokens have probability 0 at the first `min_tokens` positions, and stop strings that are complete before
    they are over do not count."""
    thinking_budget: int = 0
    """Tokens after which `thinking_end` is inserted, unless the text contains it by then; `0` disables it."""
    thinking_end: str = "</think>"
    """What is inserted, and what closes a completion's thinking by itself, except for whitespace around it."""
    greedy_last: bool = False
    """Whether the last completion of each prompt is greedy, so one prefill serves sampled and greedy completions."""

    @property
    def greedy(self) -> Sampling:
        """Greedy decoding with the same limits and stop strings."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=0)


@dataclass(frozen=True, kw_only=True)
class Routes:
    """The experts the sampling engine routed a sequence to, packed as [tokens, layers, top_k] in C order."""

    experts: bytes
    """One entry for every token of prompt and completion except the last, which no forward pass has read. Those of the
    last tokens of other branches mean nothing."""
    layers: int
    """Number of MoE layers; dense layers are not counted."""
    top_k: int
    width: int
    """Bytes per expert index: 1 or 2 (little-endian)."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive tokens of a completion that the same weights sampled."""

    start: int
    """Index of its first token in `Completion.token_ids`."""
    end: int
    """Index after its last token."""
    version: int
    """Number of optimizer steps behind the weights."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled completion: the tokens after the prompt, and which of them the model sampled."""

    prompt_id: str
    sample: int
    """Index among the prompt's completions: 0 .. G-1."""
    token_ids: tuple[int, ...]
    """All tokens after the prompt, including the end token when the stop reason is EOS, and the stop string when it is
    STOP: the model reads all of them."""
    text: str
    """Decoded without special tokens."""
    logp_sampler: tuple[float, ...]
    """Log-prob of each sampled token under the distribution it was actually sampled from."""
    stop: StopReason
    version: int
    """Number of optimizer steps behind the sampling policy's weights when the completion started."""
    spans: tuple[tuple[int, int], ...] = ()
    """Weight versions and the first token each one sampled, if weights changed mid-completion; otherwise empty."""
    routes: Routes | None = None
    """`None` for a dense model, if the engine does not report routing, or if it was not requested."""
    sampled: tuple[bool, ...] = ()
    """Which of `token_ids` the model sampled; empty if all. The others were given to it between its own tokens, as the
    result of a tool or the end of its thinking is: they are part of the context, and are not trained on."""
    thinking_cut: bool = False
    """Whether `Sampling.thinking_end` was inserted because the thinking budget was spent."""
    conversation: Conversation | None = None
    """Its turns, if an environment answered the model; `None` for a single turn without an environment."""
    branches: tuple[Branch, ...] = ()
    """How `token_ids` follow each other if the chat template has rewritten earlier turns; empty if each token follows
    the one before it. All branches are one sequence, and each of its sampled tokens occurs once in `token_ids`."""

    def __post_init__(self) -> None:
        assert len(self.sampled) in (0, len(self.token_ids))
        assert all(b.parent < i and b.start <= len(self.token_ids) for i, b in enumerate(self.branches))

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """The tokens that the model sampled."""
        return tuple(compress(self.token_ids, self.sampled)) if self.sampled else self.token_ids

    @property
    def sampled_count(self) -> int:
        """How many tokens the model sampled: those that are trained on and count toward limits and budgets."""
        return sum(self.sampled) if self.sampled else len(self.token_ids)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Which weights sampled which tokens, in order; they cover all tokens."""
        spans = self.spans or ((self.version, 0),)
        ends = [first for _, first in spans[1:]] + [len(self.token_ids)]
        return tuple(Segment(start=first, end=end, version=v) for (v, first), end in zip(spans, ends, strict=True))

    @property
    def sampled_by_version(self) -> tuple[tuple[int, int], ...]:
        """How many of `sampled_ids` each version of the weights has sampled, in order: (version, number)."""
        parts = [(s.version, self.sampled[s.start : s.end], s.end - s.start) for s in self.segments]
        return tuple((version, sum(own) if self.sampled else length) for version, own, length in parts)


@dataclass(frozen=True, kw_only=True)
class Score:
    """A completion's reward: a number, or the reason why there is none."""

    status: Status
    reward: float | None = None
    """Weighted sum of the parts, before shaping. A function that abstained counts as the mean of its values for the
    other completions of the group. `None` if unscored."""
    correct: bool | None = None
    """Counts toward accuracy. `None` if unscored, or if the first reward function abstained."""
    parts: Mapping[str, float | None] = field(default_factory=dict)
    """Each reward function's own value; `None` if it abstained or failed."""
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Keywords by which reward functions explain their values, for example `timeout` from `code_tests`."""
    step_rewards: tuple[tuple[int, float], ...] = ()
    """Parts of the reward that belong to a turn or step, in order: the index of its last token among the sampled ones,
    and the value. They add up to `reward`. Empty if the reward is for the whole completion."""
    failure: str | None = None
    """Why it is unscored, in one line that starts with the kind: `raised: ...`, `timeout: ...`, `not_run: ...` (the
    batch ran out of time), `died: ...` (the worker crashed), `memory: ...`, `invalid: ...`, `abstained: ...`."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt with its completions and their scores."""

    prompt: Prompt
    completions: Sequence[Completion]
    scores: Sequence[Score]

    def __post_init__(self) -> None:
        assert len(self.completions) == len(self.scores)

    @property
    def uniform(self) -> bool:
        """Whether all scored completions have the same reward, so the reward gives the group no learning signal."""
        return equal_rewards([score.reward for score in self.scores if score.reward is not None])


def branch_paths(prompt: int, tokens: int, branches: Sequence[Branch]) -> list[list[int]]:
    """What the model reads in each branch, as indices into the prompt and the completion after it. `prompt` and
    `tokens` are their lengths."""
    if not branches:
        return [list(range(prompt + tokens))]
    ends = [*(branch.start for branch in branches[1:]), tokens]
    paths: list[list[int]] = []
    for branch, end in zip(branches, ends, strict=True):
        if branch.parent < 0:
            paths.append(list(range(prompt + end)))
        else:
            paths.append([*paths[branch.parent][: branch.shared], *range(prompt + branch.start, prompt + end)])
    return paths


def without_columns(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The groups as other processes get them."""
    return tuple(replace(group, prompt=group.prompt.without_columns()) for group in groups)


def equal_rewards(rewards: Sequence[float]) -> bool:
    """Whether rewards are equal up to rounding. True for an empty sequence."""
    return not rewards or max(rewards) - min(rewards) <= UNIFORM_TOLERANCE * max(1.0, *map(abs, rewards))
