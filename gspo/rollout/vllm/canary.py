"""The canary: after a weight update, does the engine compute with the new weights?

In: a few prompts. Out: nothing, or `WeightSyncError`. Invariant: no token that was sampled before this check passed is
trained on. Equal digests prove that the weights arrived. The canary shows that they are in use, and used as the learner
uses them: a kernel that kept its own copy, or a tensor in the wrong place, raises no error anywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gspo.errors import FLOAT16_HINT, WeightSyncError
from gspo.model.micro_batch import TokenSequence
from gspo.rollout.vllm.host import Generate, Request, RequestOutput
from gspo.rollout.vllm.policy import LearnerPolicy
from gspo.types import Prompt, Sampling

PROMPTS = 4
TOKENS = 16
TOLERANCE = {torch.float32: 1e-3}
"""Largest mean |difference| of log-probs that counts as rounding. Measured: 1e-6 in float32; 0.02 in bfloat16, also for
MoE models."""
LOW_PRECISION = 0.15
"""The same for all other dtypes."""


def check_canary(
    generate: Generate,
    policy: LearnerPolicy,
    prompts: Sequence[Prompt],
    *,
    limit: int,
    temperature: float,
    stop_ids: tuple[int, ...],
    label: str,
) -> float:
    """The mean |difference| of log-probs between engine and learner over a few tokens; raises if it is too large.

    The tokens are sampled at the run's temperature, which also proves that the engine reports log-probs after
    temperature."""
    # Without top-p and top-k: the learner's log-probs are over the whole vocabulary.
    sampling = Sampling(max_tokens=min(TOKENS, limit), temperature=temperature)
    requests = [
        Request(prompt_ids=p.token_ids, seed=i, sampling=sampling, stop_ids=stop_ids, salt=label)
        for i, p in enumerate(prompts[:PROMPTS])
    ]
    outputs = generate(requests)
    unexpected = {name for output in outputs for name, _ in output.spans} - {label}
    if unexpected:
        raise WeightSyncError(
            f"engine 'vllm': after weights {label!r} were sent it samples with {sorted(unexpected)[0]!r}"
        )
    difference = _mean_difference(policy, requests, outputs, temperature)
    dtype = policy.model.dtype
    # `not <=` instead of `>`: NaN must fail the check.
    if not difference <= TOLERANCE.get(dtype, LOW_PRECISION):
        hint = FLOAT16_HINT if math.isnan(difference) and dtype == torch.float16 else ""
        raise WeightSyncError(
            f"engine 'vllm': it does not compute what the learner computes: log-probs differ by {difference:.2g} per "
            "token on average after the weights were sent; check that this vLLM supports the model's architecture "
            f'exactly, or set rollout.engine = "local"{hint}'
        )
    return difference


def _mean_difference(
    policy: LearnerPolicy, requests: Sequence[Request], outputs: Sequence[RequestOutput], temperature: float
) -> float:
    """Mean |log-prob of the engine - log-prob of the learner|."""
    sequences = [
        TokenSequence(prompt_ids=request.prompt_ids, completion_ids=output.token_ids)
        for request, output in zip(requests, outputs, strict=True)
    ]
    learner = policy.logprobs(sequences, temperature)
    total = sum(
        float((logp - torch.tensor(output.logp)).abs().sum()) for logp, output in zip(learner, outputs, strict=True)
    )
    return total / max(1, sum(len(output.token_ids) for output in outputs))
