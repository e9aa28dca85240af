"""The learner's policy as an engine elsewhere needs it: its weights as whole tensors, and its log-probs.

In: a model, which may be sharded over ranks. Out: one whole tensor at a time, on the leader. Invariant: no rank ever
holds more than one whole tensor, or what FSDP gathers for one layer, besides its shards. The other ranks run the
functions at the end of this file meanwhile (`gspo/follower.py`), and stay in step if sending fails on the leader.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gspo.errors import RankError
from gspo.model.adapter import is_adapter_parameter
from gspo.model.micro_batch import TokenSequence
from gspo.model.sharding import full, reshard
from gspo.ranks.group import ONE, Ranks
from gspo.rollout.engine import eval_mode
from gspo.rollout.vllm.weights import Digest, Part, fingerprint, named_weights, shapes_of

Pairs = Iterator[tuple[str, Tensor]]


class LearnerPolicy:
    """The policy of the learner. Its methods are for the leader."""

    def __init__(self, model: Any, ranks: Ranks = ONE) -> None:
        self.model = model
        self._ranks = ranks
        self._base = ("", "")
        """Fingerprint and digest of the base weights."""

    def fingerprint(self, *, adapters: bool = True) -> str:
        """A string that changes when training changes the weights; see `weights.fingerprint`."""
        return fingerprint(self.model, adapters=adapters)

    def shapes(self, part: Part) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Name, dtype and shape of each tensor of a part, in the order in which `send` passes them."""
        return shapes_of(self.model, part)

    def size(self, part: Part) -> int:
        """Bytes of a part."""
        return sum(dtype.itemsize * shape.numel() for _, dtype, shape in self.shapes(part))

    def send(self, part: Part, take: Callable[[Pairs], object]) -> str:
        """Pass a part of the weights to `take`, one whole tensor at a time; the digest of all of them."""
        digest = Digest()
        pairs = digest.track(whole_tensors(self.model, part, self._ranks))
        failure: Exception | None = None
        with self._ranks.together("send_weights", part=part):
            try:
                take(pairs)
            except RankError:
                raise
            # A server that fails concerns the leader alone: the run continues with another.
            except Exception as error:
                failure = error
            # The others gather all of them, whatever `take` has done with them.
            for _ in pairs:
                pass
        if failure is not None:
            raise failure
        return digest.text()

    def base_digest(self) -> str:
        """The digest of the base weights. It is computed again only if they have changed, as they are frozen."""
        now = self.fingerprint(adapters=False)
        if self._base[0] != now:
            self._base = (now, self.send(Part.BASE, lambda pairs: None))
        return self._base[1]

    def adapter(self) -> dict[str, Tensor]:
        """The weights of the LoRA adapters, which are small, as whole tensors by parameter name."""
        found: dict[str, Tensor] = {}
        self.send(Part.ADAPTER, found.update)
        return found

    def logprobs(self, sequences: Sequence[TokenSequence], temperature: float) -> list[Tensor]:
        """The log-probs of the completions of a few sequences."""
        with self._ranks.together("score", sequences=list(sequences), temperature=temperature):
            return logprobs(self.model, sequences, temperature)


# --- What all ranks do ---


def whole_tensors(model: Any, part: Part, ranks: Ranks = ONE) -> Pairs:
    """The tensors of a part, one at a time. All ranks must exhaust it."""
    with ranks.peers_answer():
        if part is not Part.ADAPTER:
            yield from named_weights(model, merge=part is Part.MERGED)
            return
        for name, weight in model.named_parameters():
            if is_adapter_parameter(name):
                yield name, full(weight.detach())


@torch.no_grad()
def logprobs(model: Any, sequences: Sequence[TokenSequence], temperature: float) -> list[Tensor]:
    """The log-probs of the completions of a few sequences, which are computed one by one, and for most models with the
    logits of the completion alone: with an engine on the same GPU there is no room for the logits of whole prompts."""
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    found = []
    for sequence in sequences:
        length = len(sequence.completion_ids)
        ids_1T = torch.tensor([sequence.prompt_ids + sequence.completion_ids], device=model.device)
        options = {"logits_to_keep": length + 1} if keeps else {}
        with eval_mode(model):
            logits = model(input_ids=ids_1T, **options).logits[0, -length - 1 : -1]
        logp = (logits.float() / temperature).log_softmax(-1).gather(1, ids_1T[0, -length:, None]).squeeze(1)
        found.append(logp.cpu())
    reshard(model)
    return found
