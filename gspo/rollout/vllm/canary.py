"""After weights were sent: does the engine compute with them?

In: a few prompts. Out: nothing, or `WeightSyncError`. Invariant: no token is used for learning that was drawn before this
has passed. Equal digests prove that the weights arrived; this shows that they are in use, as the learner uses them: a
kernel that kept a copy of its own, or a tensor that was put in the wrong place, raises no error anywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gspo.errors import WeightSyncError
from gspo.rollout.rows import evaluating, padded
from gspo.rollout.vllm.host import Draw, Reply, Request
from gspo.types import Prompt, Sampling

PROMPTS = 4
TOKENS = 16
TOLERANCE = {torch.float32: 1e-3}
"""Mean |difference| of log-probabilities that is still rounding. Seen: 1e-6 in float32; 0.02 in bfloat16, of experts too."""
LOW_PRECISION = 0.15


def check_canary(
    draw: Draw, model: Any, prompts: Sequence[Prompt], *, limit: int, stop_ids: tuple[int, ...], label: str
) -> float:
    """The mean |difference| between engine and learner over some tokens that are drawn for this; raises when it is too large."""
    sampling = Sampling(max_tokens=min(TOKENS, limit))
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
    apart = _apart(model, requests, replies)
    if not apart <= TOLERANCE.get(model.dtype, LOW_PRECISION):
        raise WeightSyncError(
            f"engine 'vllm': it does not compute what the learner computes: log-probabilities differ by {apart:.2g} per token on "
            "average after the weights were sent; is the model's architecture one that this vLLM loads exactly?"
        )
    return apart


@torch.no_grad()
def _apart(model: Any, requests: Sequence[Request], replies: Sequence[Reply]) -> float:
    """Mean |log-probability of the engine - of the learner|; NaN counts as far."""
    ids_BT = padded([q.prompt_ids + r.token_ids for q, r in zip(requests, replies, strict=True)], model.device)
    with evaluating(model):
        logp_BTV = model(input_ids=ids_BT).logits[:, :-1].float().log_softmax(-1)
    logp_BT = logp_BTV.gather(2, ids_BT[:, 1:, None]).squeeze(2).cpu()
    total, count = 0.0, 0
    for b, (request, reply) in enumerate(zip(requests, replies, strict=True)):
        first = len(request.prompt_ids) - 1
        ours = logp_BT[b, first : first + len(reply.token_ids)]
        total += float((ours - torch.tensor(reply.logp)).abs().sum())
        count += len(reply.token_ids)
    return total / max(1, count)
