"""The interface between the vLLM engine and a vLLM, in this process or behind an address.

In: requests, and weights under a label. Out: the output of each request. Invariant: a `RequestOutput` says which
weights sampled each of its tokens, by the labels that `sync` gave them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gspo.types import Sampling

if TYPE_CHECKING:
    from gspo.rollout.vllm.policy import LearnerPolicy


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion to sample."""

    prompt_ids: tuple[int, ...]
    seed: int
    """Seed of its own random stream."""
    sampling: Sampling
    stop_ids: tuple[int, ...]
    salt: str = ""
    """Label of the weights at the time of the request. Only requests with the same one share cached keys and values: a
    request that runs during a weight update leaves keys and values of older weights behind."""

    def settings(self) -> dict[str, Any]:
        """The arguments of vLLM's `SamplingParams`. Only our stop tokens end a completion; the model's own
        end-of-sequence token is ignored. Stop strings and the thinking budget need a tokenizer, which vLLM does not
        have here: `engines/vllm.py` applies them."""
        s = self.sampling
        return {
            "n": 1,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k or -1,
            "seed": self.seed,
            "max_tokens": s.max_tokens,
            # Our stop tokens have probability 0 before, also in the log-probs.
            "min_tokens": s.min_tokens,
            "stop_token_ids": list(self.stop_ids),
            "ignore_eos": True,
            # The log-prob of the sampled token alone.
            "logprobs": 0,
            # Text is decoded here, with the run's own tokenizer.
            "detokenize": False,
        }


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The completion of a request."""

    token_ids: tuple[int, ...]
    logp: tuple[float, ...]
    stopped: bool
    """Whether it ended with a stop token, not at the length limit."""
    spans: tuple[tuple[str, int], ...]
    """Labels of the weights, each with the first token that they sampled."""
    experts: bytes | None = None
    """[tokens, layers, top_k] of prompt and completion except the last token, int16 in C order; None if unknown."""


Generate = Callable[[Sequence[Request]], list[RequestOutput]]
"""Samples from one particular vLLM."""
Check = Callable[[Generate], None]
"""Checks that one vLLM computes what the learner computes; raises `WeightSyncError` if not."""


class Host(Protocol):
    """One or more vLLM instances with the same model."""

    @property
    def experts(self) -> bool:
        """Whether they can report the experts of a completion."""
        ...

    def label(self) -> str | None:
        """The label of the weights that all of them hold; None if they differ or are not ours."""
        ...

    def sync(self, policy: LearnerPolicy, label: str, check: Check) -> None:
        """Send the policy's weights under this label and check each instance; `WeightSyncError` if a transfer is
        faulty."""
        ...

    def generate(self, requests: Sequence[Request], *, routes: bool) -> list[RequestOutput]:
        """The output of each request, in order."""
        ...

    def close(self) -> None: ...
