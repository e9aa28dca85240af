"""The completions to sample, grouped by prompt, and the result of decoding them.

In: the prompts of one call. Out: a `Queue`; an engine admits requests in its order. Invariant: each request carries
its own random stream, so the order affects speed and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gspo.rollout.engine import DecodeStats, stream_key
from gspo.rollout.local.sampling import GREEDY
from gspo.types import Prompt, Routes


@dataclass(frozen=True, kw_only=True)
class Queue:
    """The requests of one call."""

    prompt_U: list[tuple[int, ...]]
    """Distinct prompts, longest first. Neighbors have similar lengths, so prefill pads little."""
    prompt_of_B: list[int]
    """Index into `prompt_U` of each request's prompt; never decreasing."""
    place_B: list[tuple[int, int]]
    """Where the completion belongs: (index of the prompt in the call, sample)."""
    key_B: list[int]
    """The random stream of each request; `GREEDY` for greedy decoding."""


def make_queue(prompts: Sequence[Prompt], *, samples: int, seed: int, stream: str, greedy_last: bool = False) -> Queue:
    """`samples` requests for every prompt."""

    def key(p: int, sample: int) -> int:
        greedy = greedy_last and sample == samples - 1
        return GREEDY if greedy else stream_key(seed, stream, prompts[p].id, sample)

    # The ids break ties: the iteration order of a set is not defined.
    distinct = sorted({prompt.token_ids for prompt in prompts}, key=lambda ids: (-len(ids), ids))
    index = {ids: u for u, ids in enumerate(distinct)}
    order = sorted(range(len(prompts)), key=lambda p: index[prompts[p].token_ids])
    place_B = [(p, sample) for p in order for sample in range(samples)]
    return Queue(
        prompt_U=distinct,
        prompt_of_B=[index[prompts[p].token_ids] for p, _ in place_B],
        place_B=place_B,
        key_B=[key(p, sample) for p, sample in place_B],
    )


@dataclass(frozen=True, kw_only=True)
class DecodeResult:
    """The sampled completions, in queue order."""

    token_ids: list[list[int]]
    logp: list[list[float]]
    stopped: list[bool]
    """Whether the completion ended with a stop token, not at the length limit."""
    routes: Sequence[Routes | None]
    decoded: DecodeStats
