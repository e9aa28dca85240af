"""Log-probs of given tokens, and the most likely tokens next to them.

In: a model and sequences of tokens. Out: for each token after the first, its log-prob given the tokens before it.
Invariant: these are the model's own log-probs, at temperature 1 and without top-p or top-k, from plain forward passes.
Logits are materialized for `CHUNK` positions at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo.model.lm_head import bypass_head, lm_head
from gspo.model.micro_batch import padded
from gspo.rollout.engine import eval_mode

CHUNK = 512


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """The log-probs of a sequence. Entry `i` belongs to token `i + 1`."""

    logp: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]
    """The most likely tokens in this place with their log-probs, the most likely one first."""


def token_logprobs(
    model: Any, ids_B: Sequence[tuple[int, ...]], *, top: Sequence[int], batch_tokens: int
) -> list[TokenLogprobs]:
    """The log-probs of sequences, in their order."""
    done: dict[int, TokenLogprobs] = {}
    # Sequences of similar lengths are padded little.
    order = sorted(range(len(ids_B)), key=lambda b: -len(ids_B[b]))
    while order:
        count = max(1, batch_tokens // len(ids_B[order[0]]))
        batch, order = order[:count], order[count:]
        found = _batch(model, [ids_B[b] for b in batch], [top[b] for b in batch])
        done |= dict(zip(batch, found, strict=True))
    return [done[b] for b in range(len(ids_B))]


@torch.no_grad()
def _batch(model: Any, ids_B: Sequence[tuple[int, ...]], top_B: Sequence[int]) -> list[TokenLogprobs]:
    ids_BT = padded(ids_B, model.device)
    head = lm_head(model)
    with eval_mode(model):
        with bypass_head(head) if head is not None else nullcontext():
            last_BT = model(input_ids=ids_BT, use_cache=False).logits
        return [
            _sequence(last_BT[b, : len(ids) - 1], ids_BT[b, 1 : len(ids)], head, top_B[b])
            for b, ids in enumerate(ids_B)
        ]


def _sequence(last_T: Tensor, next_T: Tensor, head: Any, top: int) -> TokenLogprobs:
    """From the model's outputs at each position and the tokens that follow."""
    logp: list[float] = []
    tops: list[tuple[tuple[int, float], ...]] = []
    for start in range(0, len(next_T), CHUNK):
        part = last_T[start : start + CHUNK]
        logp_TV = (part if head is None else head(part)).float().log_softmax(-1)
        logp += logp_TV.gather(1, next_T[start : start + CHUNK, None]).squeeze(1).tolist()
        best = logp_TV.topk(min(top, logp_TV.shape[1]), dim=-1)
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            tops.append(tuple(zip(ids, values, strict=True)))
    return TokenLogprobs(logp=tuple(logp), top=tuple(tops))
