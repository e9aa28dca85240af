"""After weights were sent: does the engine compute with them?

In: a few prompts. Out: nothing, or `WeightSyncError`. Invariant: no token is used for learning that was drawn before this
has passed. Equal digests prove that the weights arrived; this shows that they are in use, as the learner uses them: a
kernel that kept a copy of its own, or a tensor that was put in the wrong place, raises no error anywhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from gspo.errors import WeightSyncError
from gspo.rollout.local.states import eval_mode
from gspo.rollout.vllm.host import Draw, Reply, Request
from gspo.types import Prompt, Sampling

PROMPTS = 4
TOKENS = 16
TOLERANCE = {torch.float32: 1e-3}
"""Mean |difference| of log-probabilities that is still rounding. Seen: 1e-6 in float32; 0.02 in bfloat16, of experts too."""
LOW_PRECISION = 0.15


def check_canary(
    draw: Draw,
    model: Any,
    prompts: Sequence[Prompt],
    *,
    limit: int,
    temperature: float,
    stop_ids: tuple[int, ...],
    label: str,
) -> float:
    """The mean |difference| between engine and learner over some tokens that are drawn for this, at the run's temperature, which
    also proves that the engine's numbers are those after it; raises when it is too large."""
    sampling = Sampling(max_tokens=min(TOKENS, limit), temperature=temperature)
    requests = [
        Request(prompt_ids=p.token_ids, seed=i, sampling=sampling, stop_ids=stop_ids)
        for i, p in enumerate(prompts[:PROMPTS])
    ]
    replies = draw(requests)
    strange = {name for reply in replies for name, _ in reply.spans} - {label}
    if strange:
        raise WeightSyncError(
            f"engine 'vllm': after weights {label!r} were sent it samples with {sorted(strange)[0]!r}"
        )
    apart = _apart(model, requests, replies, temperature)
    if not apart <= TOLERANCE.get(model.dtype, LOW_PRECISION):
        raise WeightSyncError(
            f"engine 'vllm': it does not compute what the learner computes: log-probabilities differ by {apart:.2g} per token on "
            "average after the weights were sent; is the model's architecture one that this vLLM loads exactly?"
        )
    return apart


@torch.no_grad()
def _apart(model: Any, requests: Sequence[Request], replies: Sequence[Reply], temperature: float) -> float:
    """Mean |log-probability of the engine - of the learner|; NaN counts as far. One reply after the other, and of most models
    the logits of the reply alone: beside an engine the card has no room for those of whole prompts."""
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    total, count = 0.0, 0
    for request, reply in zip(requests, replies, strict=True):
        drawn = len(reply.token_ids)
        ids_1T = torch.tensor([request.prompt_ids + reply.token_ids], device=model.device)
        with eval_mode(model):
            logits = model(input_ids=ids_1T, **({"logits_to_keep": drawn + 1} if keeps else {})).logits[
                0, -drawn - 1 : -1
            ]
        logp = (logits.float() / temperature).log_softmax(-1).gather(1, ids_1T[0, -drawn:, None]).squeeze(1)
        total += float((logp.cpu() - torch.tensor(reply.logp)).abs().sum())
        count += drawn
    return total / max(1, count)
