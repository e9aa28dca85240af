"""What the vLLM engine asks of a vLLM, wherever that runs: in this process, or behind an address.

Invariant: a `Reply` says which weights drew each of its tokens, by the labels that `sync` gave them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gspo.types import Sampling


@dataclass(frozen=True, kw_only=True)
class Request:
    """One reply to draw."""

    prompt_ids: tuple[int, ...]
    seed: int
    """Of its own random stream."""
    sampling: Sampling
    stop_ids: tuple[int, ...]

    def settings(self) -> dict[str, Any]:
        """As vLLM's `SamplingParams` has them. Only our own stop tokens end a reply; no default of the model's acts."""
        s = self.sampling
        return {
            "n": 1,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k or -1,
            "seed": self.seed,
            "max_tokens": s.max_tokens,
            "stop_token_ids": list(self.stop_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        }


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What came of it."""

    token_ids: tuple[int, ...]
    logp: tuple[float, ...]
    ended: bool
    """By a stop token; else at the limit."""
    spans: tuple[tuple[str, int], ...]
    """Labels of the weights, each with the first token that they drew."""
    experts: bytes | None = None
    """[tokens, layers, top_k] of prompt and reply but the last token, int16 in C order; None: not known."""


Draw = Callable[[Sequence[Request]], list[Reply]]
Check = Callable[[Draw], None]
"""Whether one vLLM computes what the learner computes, given a way to draw from it; raises `WeightSyncError` if not."""


class Host(Protocol):
    """One or more vLLMs with the same model."""

    @property
    def experts(self) -> bool:
        """Whether they can tell which experts drew a reply."""
        ...

    def label(self) -> str | None:
        """The label of the weights that all of them hold; None: not all the same, or not ours."""
        ...

    def sync(self, model: Any, label: str, check: Check) -> None:
        """Give them the model's weights, under this label, and check each. `WeightSyncError` when they did not arrive whole."""
        ...

    def generate(self, requests: Sequence[Request], *, routes: bool) -> list[Reply]:
        """A reply for each request, in order."""
        ...

    def close(self) -> None: ...
