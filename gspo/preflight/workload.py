"""What a step computes, as far as the settings decide it: the input of the models of memory and time.

In: settings, a model without weights, the lengths of prompts and completions, the number of ranks. Out: a `Workload`,
and the micro-batches of an update. Invariant: it describes the rank with the most work, and all completions as equally
long.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gspo.config import Config
from gspo.model.compiled_layers import SMALL_PARAMETERS
from gspo.preflight.model_size import Shape, Weights, shape_of, weights_of


@dataclass(frozen=True, kw_only=True)
class MicroBatchSize:
    """What a micro-batch has."""

    prompts: int
    """Prompts that are computed: each once for its completions if the batch is packed."""
    completions: int

    def tokens(self, prompt: float, completion: float) -> float:
        return self.prompts * prompt + self.completions * completion


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A step of a run."""

    config: Config
    skeleton: Any
    """The model; on the meta device, unless there is a real one."""
    prompt_tokens: int
    """Of the longest prompt."""
    completion_tokens: float
    """On average."""
    kl: bool
    """Whether the objective has a KL penalty."""
    gpu: bool
    packed: bool
    """Whether micro-batches are packed rows."""
    ranks: int = 1
    whole_logits: bool = False
    """Whether the logits of a model are no plain matrix product, so that all of them are in memory at a time."""
    memory: float | None = None
    """Bytes that the device has for the run; None if unknown."""
    activation_bytes: float | None = None
    """Measured bytes per token of a micro-batch; None if not measured."""

    @cached_property
    def shape(self) -> Shape:
        return shape_of(self.skeleton)

    @cached_property
    def weights(self) -> Weights:
        return weights_of(self.skeleton, self.config.model.quantize)

    @property
    def completions(self) -> int:
        """Completions of a step, without refills."""
        return self.config.rollout.prompts * self.config.rollout.group_size

    @property
    def own_completions(self) -> int:
        """Completions that a rank samples: those of whole groups."""
        return -(-self.config.rollout.prompts // self.ranks) * self.config.rollout.group_size

    @property
    def slots(self) -> int:
        """Completions that a rank samples at a time, if its KV cache has room for them."""
        return min(int(self.config.rollout.engine_options.get("slots", 256)), self.own_completions)

    @property
    def context(self) -> int:
        """Ranks that compute a micro-batch together."""
        return self.config.learner.context_parallel

    @property
    def compiled(self) -> bool:
        """Whether decoder layers are compiled."""
        when = self.config.model.compile
        wanted = when == "on" or (when == "auto" and self.gpu and self.weights.total >= SMALL_PARAMETERS)
        return wanted and self.context == 1

    @property
    def lora(self) -> bool:
        return self.weights.trained < self.weights.total

    @cached_property
    def largest_micro_batches(self) -> list[MicroBatchSize]:
        """The micro-batches of an update on a rank, if all completions are as long as they can be."""
        return micro_batches(self, float(self.config.rollout.max_tokens))

    @cached_property
    def mean_micro_batches(self) -> list[MicroBatchSize]:
        """The micro-batches of an update on a rank, if all completions have the mean length."""
        return micro_batches(self, self.completion_tokens)


def micro_batches(workload: Workload, completion: float) -> list[MicroBatchSize]:
    """The micro-batches of an update on a rank, as `learner/plan.py` makes them of completions with so many tokens."""
    learner, group = workload.config.learner, workload.config.rollout.group_size
    of_update = -(-workload.completions // learner.mini_batches)
    share = -(-of_update // (workload.ranks // workload.context))
    prompt, budget = workload.prompt_tokens, learner.micro_batch_tokens
    if not workload.packed:
        # At least one row: a sequence that is longer than the budget is still trained on.
        rows = min(share, max(1, int(budget // (prompt + completion))))
        counts = [rows] * (share // rows) + [share % rows] * bool(share % rows)
        return [MicroBatchSize(prompts=n, completions=n) for n in counts]
    parts: list[MicroBatchSize] = []
    used, prompts, count = 0.0, 0, 0
    for i in range(share):
        new = prompt if i % group == 0 else 0
        if count and used + new + completion > budget:
            parts.append(MicroBatchSize(prompts=prompts, completions=count))
            used, prompts, count = 0.0, 0, 0
        new = new if count else prompt  # a group that is divided has its prompt in both
        used, prompts, count = used + new + completion, prompts + bool(new), count + 1
    return [*parts, MicroBatchSize(prompts=prompts, completions=count)]
