"""A vLLM that is a few lines of torch, so that the code of engine `vllm` around it is tested without vLLM.

It samples each request with a generator seeded by the request alone, and honors the arguments of `SamplingParams` that
`Request.settings` makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gspo.model.micro_batch import padded
from gspo.rollout.vllm.host import Check, Request, RequestOutput
from gspo.rollout.vllm.policy import LearnerPolicy


class SimulatedVllm:
    """A `Host`. With `experts` (layers times choices), the experts of a token are its position, repeated."""

    def __init__(self, model: Any, experts: int = 0) -> None:
        self.model = model
        self.choices = experts
        self.experts = bool(experts)
        self.asked: list[Request] = []
        self._label: str | None = None

    def label(self) -> str | None:
        return self._label

    def sync(self, policy: LearnerPolicy, label: str, check: Check) -> None:
        self._label = label
        check(lambda requests: self.generate(requests, routes=False))
        self.asked.clear()

    def close(self) -> None:
        self._label = None

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], *, routes: bool) -> list[RequestOutput]:
        self.asked += requests
        settings = [request.settings() for request in requests]
        generators = [torch.Generator().manual_seed(s["seed"]) for s in settings]
        ids_B: list[tuple[int, ...]] = [() for _ in requests]
        logp_B: list[list[float]] = [[] for _ in requests]
        while open_B := [
            b
            for b, s in enumerate(settings)
            if len(ids_B[b]) < s["max_tokens"] and not set(ids_B[b][-1:]) & set(s["stop_token_ids"])
        ]:
            inputs = [requests[b].prompt_ids + ids_B[b] for b in open_B]
            logits = self.model(input_ids=padded(inputs, self.model.device)).logits
            for row, b in enumerate(open_B):
                token, logp = _sample(logits[row, len(inputs[row]) - 1], settings[b], len(ids_B[b]), generators[b])
                ids_B[b] += (token,)
                logp_B[b].append(logp)
        assert self._label is not None
        return [
            RequestOutput(
                token_ids=ids,
                logp=tuple(logp),
                stopped=ids[-1] in s["stop_token_ids"],
                spans=((self._label, 0),),
                experts=self._experts(len(r.prompt_ids) + len(ids) - 1) if routes else None,
            )
            for r, s, ids, logp in zip(requests, settings, ids_B, logp_B, strict=True)
        ]

    def _experts(self, tokens: int) -> bytes:
        return torch.arange(tokens, dtype=torch.int16).repeat_interleave(self.choices).numpy().tobytes()


def _sample(
    logits: torch.Tensor, settings: dict[str, Any], count: int, generator: torch.Generator
) -> tuple[int, float]:
    assert settings["top_p"] == 1
    assert settings["top_k"] == -1
    logits = logits.float().clone()
    if count < settings["min_tokens"]:
        logits[settings["stop_token_ids"]] = -torch.inf
    if settings["temperature"] == 0:
        return int(logits.argmax()), float(logits.log_softmax(-1).max())
    logp = (logits / settings["temperature"]).log_softmax(-1)
    token = int(torch.multinomial(logp.exp(), 1, generator=generator))
    return token, float(logp[token])
