"""Sampling on several ranks: each samples the completions of some of the prompts, with an engine of its own.

In: the calls of the training loop, on the leader. Out: the completions of all prompts. Invariant: a completion depends
on the weights, its prompt and its own random stream, so it is the one that a single rank would sample, up to rounding.
A sharded model is gathered first, so that every rank holds all weights while it samples, or layer by layer in each
forward (`lockstep.py`). A rank that fails to sample is an `EngineError` on the leader, and all ranks stay in step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from gspo.errors import EngineError, RankError
from gspo.model.sharding import gathered
from gspo.ranks.codec import decode, encode
from gspo.ranks.group import Ranks
from gspo.rollout.engine import DecodeStats, Engine, GenerateOptions
from gspo.rollout.lockstep import Lockstep
from gspo.signals import Interrupted, shielded
from gspo.types import Completion, Prompt


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a follower has sampled."""

    completions: tuple[tuple[Completion, ...], ...] = ()
    decoded: DecodeStats = field(default_factory=DecodeStats)
    error: str = ""
    """Why there are no completions; empty if there are."""


class DataParallelEngine:
    """The engine of the leader."""

    def __init__(self, own: Engine, model: Any, ranks: Ranks) -> None:
        self._own = own
        self._model = model
        self._ranks = ranks
        self._others = DecodeStats()

    @property
    def about(self) -> str:
        how = "gather the weights layer by layer in each forward pass" if self._ranks.by_layer else "hold all weights"
        ranks = f"{self._ranks.count} ranks sample completions, and {how} meanwhile."
        return " ".join(filter(None, [self._own.about, ranks]))

    @property
    def decoded(self) -> DecodeStats | None:
        return None if self._own.decoded is None else self._own.decoded + self._others

    @property
    def reports_routes(self) -> bool:
        return self._own.reports_routes

    def generate(self, prompts: Sequence[Prompt], options: GenerateOptions) -> list[list[Completion]]:
        # The turns of a conversation may be sampled by different ranks, so nothing is kept for the next one.
        prompts = [replace(prompt, conversation="") for prompt in prompts]
        with self._ranks.peers_answer(), ExitStack() as stack:
            try:
                with shielded():  # a stop request in between would leave the followers waiting
                    plain = [prompt.without_columns() for prompt in prompts]
                    self._ranks.call("generate", prompts=plain, options=options)
                    if not self._ranks.by_layer:
                        stack.enter_context(gathered(self._model))
                with _sampling(self._model, self._ranks), self._ranks.clock.measure(_purpose(options)):
                    own = self._own.generate(prompts[:: self._ranks.count], options)
                replies: list[Reply] = [decode(Reply, data) for data in self._ranks.replies()]
            except BaseException:
                # The followers reply all the same. The next command drops their replies.
                self._ranks.cancel()
                raise
        return self._combined(own, replies)

    def _combined(self, own: list[list[Completion]], replies: Sequence[Reply]) -> list[list[Completion]]:
        for rank, reply in enumerate(replies, start=1):
            if reply.error:
                raise EngineError(f"rank {rank}: {reply.error}")
            self._others += reply.decoded
        shares = [own, *([list(group) for group in reply.completions] for reply in replies)]
        return [shares[i % len(shares)][i // len(shares)] for i in range(sum(map(len, shares)))]

    def sync(self, version: int) -> None:
        self._own.sync(version)

    def end_conversations(self, conversations: Sequence[str]) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        self._own.close()


def sample_share(
    engine: Engine, model: Any, ranks: Ranks, *, call: int, prompts: Sequence[Prompt], options: GenerateOptions
) -> None:
    """What a follower does while the leader is in `generate`."""
    before = engine.decoded or DecodeStats()
    # In lockstep, a stop request comes with the forwards.
    stoppable = nullcontext() if ranks.by_layer else ranks.watch.cancellable(call)
    with nullcontext() if ranks.by_layer else gathered(model):
        try:
            with stoppable, _sampling(model, ranks), ranks.clock.measure(_purpose(options)):
                completions = engine.generate(prompts[ranks.rank :: ranks.count], options)
            spent = (engine.decoded or DecodeStats()) - before
            reply = Reply(completions=tuple(map(tuple, completions)), decoded=spent)
        except Interrupted:
            reply = Reply(error="sampling was canceled")
        except RankError:
            raise
        except Exception as error:
            # The ranks are still in step, and the leader decides what follows.
            reply = Reply(error=f"{type(error).__name__}: {error}")
    ranks.reply(encode(reply))


@contextmanager
def _sampling(model: Any, ranks: Ranks) -> Iterator[None]:
    """The context in which a rank samples its share."""
    if not ranks.by_layer:
        yield
        return
    # The forwards of the ranks belong together, so the leader checks between two of them whether it must stop.
    # A forward that fails because a peer is gone is the error of that peer, so it must not reach `Lockstep` as it is.
    with shielded(), Lockstep(model, ranks), ranks.peers_answer():
        yield


def _purpose(options: GenerateOptions) -> str:
    """What completions are sampled for: the random streams of training batches are `train/...`."""
    return options.stream.partition("/")[0]
