"""Decoding with a paged KV cache, the same without one, and their comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from interpreted import CUDA
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from gspo.rollout.engine import Controls, EngineContext, controls_for
from gspo.rollout.engines import local
from gspo.rollout.local import paged
from gspo.rollout.local.sampling import DecodeResult, Queue, make_queue
from gspo.types import Prompt, Sampling

DEVICE = torch.device("cuda" if CUDA else "cpu")
VOCABULARY, EOS = 48, 0


def model_of(kind: str, fields: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), dtype=dtype).eval()
    return model.to(DEVICE)


class Letters:
    """A tokenizer with one letter per token."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("A") for letter in text]}

    def batch_decode(self, ids_B: Sequence[Sequence[int]], **options: Any) -> list[str]:
        return ["".join(chr(ord("A") + i) for i in ids) for ids in ids_B]


def prompt_of(length: int) -> Prompt:
    ids = tuple((5 * length + 3 * j + 2) % VOCABULARY for j in range(length))
    return Prompt(id=f"p/{length}", content="", text="", token_ids=ids)


LENGTHS = (1, 3, 65, 64, 130, 7, 2, 66)


SAMPLING = Sampling(max_tokens=90)


def controls_of(sampling: Sampling) -> Controls:
    return controls_for(EngineContext(model=None, tokenizer=Letters(), stop_ids=(EOS,)), sampling)


def queue_of(lengths: Sequence[int], samples: int, sampling: Sampling = SAMPLING) -> Queue:
    return make_queue([prompt_of(n) for n in lengths], samples=samples, sampling=sampling, seed=1, stream="train/0")


def decode_paged(
    model: Any, lengths: Sequence[int] = LENGTHS, samples: int = 3, sampling: Sampling | None = None, **options: Any
) -> DecodeResult:
    sampling = sampling or SAMPLING
    queue = queue_of(lengths, samples, sampling)
    settings = {"slots": 8, "prefill_tokens": 100, **options}
    with torch.no_grad():
        return paged.PagedBatch(model, queue, controls_of(sampling), **settings).run()


def decode_plain(
    model: Any, lengths: Sequence[int] = LENGTHS, samples: int = 3, sampling: Sampling | None = None, **options: Any
) -> DecodeResult:
    """The same with the loop for models that cannot use a paged KV cache."""
    context = EngineContext(model=model, tokenizer=None, stop_ids=(EOS,))
    engine = local.LocalEngine(context, slots=5, prefill_tokens=64)
    engine.paged = False
    queue = queue_of(lengths, samples, sampling or SAMPLING)
    with torch.no_grad():
        return engine._decode(model, queue, controls_of(sampling or SAMPLING), options.get("routers"))


def assert_same(ours: DecodeResult, theirs: DecodeResult, tolerance: float = 2e-5) -> None:
    assert ours.token_ids == theirs.token_ids
    assert ours.ends == theirs.ends
    for a, b in zip(ours.logp, theirs.logp, strict=True):
        assert a == pytest.approx(b, abs=tolerance)


def logprob_error(model: Any, lengths: Sequence[int], samples: int, result: DecodeResult) -> float:
    """The largest of `logprob_errors`."""
    return float(logprob_errors(model, lengths, samples, result).max())


@torch.no_grad()
def logprob_errors(model: Any, lengths: Sequence[int], samples: int, result: DecodeResult) -> Tensor:
    """The differences between the log-probs of completions and a plain forward pass of each prompt and its tokens."""
    queue = queue_of(lengths, samples)
    errors = []
    for u, ids, logp in zip(queue.prompt_of_B, result.token_ids, result.logp, strict=True):
        prompt = queue.prompt_U[u]
        logits = model(input_ids=torch.tensor([[*prompt, *ids]], device=model.device)).logits[0].float()
        token = torch.tensor(ids, device=model.device)[:, None]
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, token)[:, 0]
        errors.append((expected - torch.tensor(logp, device=model.device)).abs())
    return torch.cat(errors)
