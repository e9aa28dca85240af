"""Sampling on several ranks without whole weights: each forward pass gathers a layer, computes it, and frees it.

In: a sharded model. Out: ranks that sample completions of their own, with one collective more per forward. Invariant:
all ranks run the same number of forwards, because each needs the shards of all of them. Before a forward the ranks tell
each other whether they still sample. One that is done computes a token that nobody reads until all are done. So a stop
request takes effect on all ranks at the same forward.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from gspo.errors import RankError
from gspo.model.sharding import reshard
from gspo.ranks.group import Ranks
from gspo.rollout.engine import eval_mode
from gspo.signals import Interrupted, stop_pending

_DONE, _SAMPLES, _STOPS = range(3)


class ForwardError(RankError):
    """This rank has left a forward that the others are still in."""


class Lockstep:
    """A context in which all ranks sample. It is left when all of them are done, or when the leader stops them."""

    def __init__(self, model: Any, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks
        self._hooks: list[Any] = []
        self._agreed = False
        """Whether the ranks have agreed on the next forward."""
        self._in_forward = False

    def __enter__(self) -> Lockstep:
        # Before the hook with which FSDP gathers weights.
        self._hooks = [
            self._model.register_forward_pre_hook(self._begin, prepend=True),
            self._model.register_forward_hook(self._end),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            # Any other error (a text that cannot be decoded) concerns this rank alone, and the others still sample.
            if kind is None or (issubclass(kind, Exception) and not issubclass(kind, RankError)):
                self._check_complete(error)
                self._wait_for_others()
        finally:
            for hook in self._hooks:
                hook.remove()
            reshard(self._model)

    @torch.no_grad()
    def _wait_for_others(self) -> None:
        ids_11 = torch.zeros(1, 1, dtype=torch.int64, device=self._model.device)
        with eval_mode(self._model):
            while self._agree(_DONE) != _DONE:
                self._agreed = True
                self._model(input_ids=ids_11, use_cache=False)

    def _begin(self, *forward: Any) -> None:
        # The engine tries again with fewer completions after it ran out of memory.
        self._check_complete()
        if not self._agreed:
            self._agree(_SAMPLES)
        self._agreed = False
        self._in_forward = True

    def _end(self, *forward: Any) -> None:
        self._in_forward = False

    def _agree(self, own: int) -> int:
        if self._ranks.leads and stop_pending():
            own = _STOPS
        found = int(self._ranks.max(torch.tensor(own)))
        if found == _STOPS:
            raise Interrupted
        return found

    def _check_complete(self, error: BaseException | None = None) -> None:
        if self._in_forward:
            reason = f" ({(str(error).splitlines() or [type(error).__name__])[0]:.200})" if error else ""
            raise ForwardError(
                f"rank {self._ranks.rank}: a forward pass failed while it sampled{reason}. The other ranks wait for "
                "the rest of it, so it cannot be repeated; if memory ran out, lower rollout.engine_options.slots"
            )
