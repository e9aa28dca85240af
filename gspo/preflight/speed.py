"""The time of a step, phase by phase, from operations, bytes and launches.

In: a `Workload`, and the data sheet of a GPU. Out: the amounts of work of each phase on a rank, and its seconds.
Invariant: a time is a sum of amounts, each at the peak of the data sheet, times the constant of `calibration.py`. So
the constants are fitted by linear regression, and a plan and its fit share all of the code.

Work overlaps in reality: a product reads weights while it computes. The sum is the better model where neither part
dominates, and the constants absorb the rest. Communication between ranks is assumed to overlap with the computation of
the same phase, so the longer of the two counts. The time of rewards, evaluations, logging and checkpoints is not
included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from gspo.learner.weight_states import MOMENT_BYTES
from gspo.preflight.calibration import TIMES
from gspo.preflight.gpus import Gpu
from gspo.preflight.memory import PREFILL_TOKENS, compiled_layer_bytes, concurrent, layer_bytes
from gspo.preflight.workload import Workload
from gspo.rollout.local.paged import BATCH_SIZES

Amounts = dict[str, float]
OPERATIONS = {"products", "experts", "attention", "head"}
COUNTS = {"launches", "adapter launches", "captures", "tokens", "updates"}
"""Everything else is bytes."""
SEGMENTS = 48
"""Parts into which the end of sampling is divided, where rows become fewer and longer."""
UPDATE_BYTES = 98
"""Per trained weight: AdamW in PyTorch's `foreach` version reads and writes each tensor several times; the gradient
norm, clipping, and the copy to weights of 16 bits."""
UPDATE_BYTES_8BIT = 36
"""The same with 8-bit moments, where one kernel does the update. Counted, never measured."""
ACCUMULATE_BYTES = 12
"""Per trained weight and micro-batch: a gradient in 16 bits is written, read, and added to one in float32."""
BACKWARD_ATTENTION = 2.5
"""Operations of the backward pass of attention, relative to its forward pass: it computes the scores again."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How often a phase passes over the layers."""

    forward: float
    """Forward passes, recomputation included."""
    backward: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The phases of a step on one rank."""

    amounts: dict[str, Amounts]
    """Of each phase: operations, bytes and counts."""
    parts: dict[str, dict[str, float]]
    """Of each phase: seconds by amount."""
    communication: dict[str, float]
    """Of each phase: seconds that communication takes."""

    @cached_property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase."""
        return {
            name: sum(parts.values()) + self.communication[name]
            if name in WAITING
            else max(sum(parts.values()), self.communication[name])
            for name, parts in self.parts.items()
        }

    @property
    def total(self) -> float:
        return sum(self.phases.values())

    @property
    def bottleneck(self) -> tuple[str, str]:
        """The longest phase, and what takes most of its time."""
        phase = max(self.phases, key=lambda name: self.phases[name])
        parts = self.parts[phase]
        if self.communication[phase] > sum(parts.values()):
            return phase, "communication"
        return phase, max(parts, key=lambda name: parts[name])


WAITING = ("weight gather",)
"""Phases with nothing to overlap with."""


def step_time(workload: Workload, gpu: Gpu, *, per_node: int = 8) -> StepTime:
    """The time of a step. `per_node`: ranks of a node, which have fast links among them."""
    amounts = {
        "sampling": sampling_amounts(workload),
        "log-probs": logprob_amounts(workload),
        "training": training_amounts(workload),
        "optimizer": optimizer_amounts(workload),
        "weight gather": {},
    }
    return StepTime(
        amounts=amounts,
        parts={name: seconds(kind_of(name), work, gpu) for name, work in amounts.items()},
        communication=_communication(workload, gpu, per_node),
    )


def kind_of(phase: str) -> str:
    """The constants of a phase. Old and reference log-probs are the forward pass of training."""
    return "training" if phase == "log-probs" else phase


def seconds(kind: str, amounts: Mapping[str, float], gpu: Gpu) -> dict[str, float]:
    """Seconds of each amount."""
    return {name: ideal_seconds(name, amount, gpu) * TIMES[kind][name] for name, amount in amounts.items() if amount}


def ideal_seconds(name: str, amount: float, gpu: Gpu) -> float:
    """The time of an amount at the peak of the data sheet; a count as it is."""
    if name in COUNTS:
        return amount
    rates = {"host traffic": gpu.host_link} | dict.fromkeys(OPERATIONS, gpu.flops)
    return amount / rates.get(name, gpu.bandwidth)


# --- Sampling ---


@dataclass(frozen=True, kw_only=True)
class _Stretch:
    """Decoding steps with equally many rows."""

    steps: float
    rows: float
    context: float
    """Tokens before a row, on average."""


def sampling_amounts(workload: Workload) -> Amounts:
    """Prefill and decoding of the completions of a rank by the engine `local`."""
    shape, weights = workload.shape, workload.weights
    stretches = list(_stretches(workload))
    steps = sum(s.steps for s in stretches)
    token = shape.layers * 2 * shape.keys * weights.size
    always: float = (weights.dense + weights.adapters + weights.head) * weights.size
    if workload.config.model.quantize:
        # Weights are expanded to 16 bits for every product: 4 bits read, 16 written and read.
        always = 2.25 * weights.dense * 2 + (weights.adapters + weights.head) * weights.size
    read = written = flops = 0.0
    for stretch in stretches:
        share = 1 - (1 - shape.chosen / shape.experts) ** stretch.rows if shape.experts else 0.0
        read += stretch.steps * (always + share * weights.experts * weights.size)
        read += stretch.steps * stretch.rows * stretch.context * token
        # Logits in float32 are written and read.
        written += stretch.steps * stretch.rows * shape.vocabulary * 8
        flops += stretch.steps * stretch.rows * 2 * (weights.active(shape) + weights.head)
    prompts = -(-workload.config.rollout.prompts // workload.ranks)
    prefill = prompts * workload.prompt_tokens * 2 * weights.active(shape)
    buckets = {_bucket(s.rows, workload.slots) for s in stretches}
    prefill_tokens = int(workload.config.rollout.engine_options.get("prefill_tokens", PREFILL_TOKENS))
    calls = math.ceil(prompts * workload.prompt_tokens / prefill_tokens)
    return {
        "products": flops + prefill,
        "reads": read + written,
        "launches": steps * shape.layers,
        "adapter launches": steps * shape.layers if workload.lora else 0.0,
        # Every call captures its CUDA graphs, and prefills without them.
        "captures": (len(buckets) + calls) * shape.layers,
        "tokens": workload.own_completions * workload.completion_tokens,
    }


def _stretches(workload: Workload) -> Iterator[_Stretch]:
    """The decoding steps: first all slots are full, then no request waits, and rows become fewer."""
    rows, longest = min(concurrent(workload), workload.own_completions), workload.config.rollout.max_tokens
    rate = _end_rate(workload.completion_tokens, longest)
    prompt, mean = workload.prompt_tokens, min(workload.completion_tokens, longest)
    ages = [longest * (i + 0.5) / SEGMENTS for i in range(SEGMENTS)]
    alive = [math.exp(-rate * age) for age in ages]
    # Of a row in the middle of sampling, where each age is as likely as a completion is to reach it.
    age = sum(a * s for a, s in zip(ages, alive, strict=True)) / sum(alive)
    waiting = workload.own_completions - rows
    if waiting:
        yield _Stretch(steps=waiting * mean / rows, rows=_bucket(rows, workload.slots), context=prompt + age)
    for a, s in zip(ages, alive, strict=True):
        if rows * s < 0.5:
            return
        yield _Stretch(steps=longest / SEGMENTS, rows=_bucket(rows * s, workload.slots), context=prompt + a)


def _end_rate(mean: float, longest: int) -> float:
    """The rate at which completions end, if their lengths are geometric, cut off at the longest: 0 if all are."""
    if mean >= longest:
        return 0.0
    low, high = 1e-9, 10.0
    for _ in range(80):
        rate = math.sqrt(low * high)
        # The mean of min(X, longest).
        low, high = (rate, high) if -math.expm1(-rate * longest) / rate > mean else (low, rate)
    return low


def _bucket(rows: float, slots: int) -> int:
    """The batch size that decodes so many rows."""
    return min([size for size in BATCH_SIZES if rows <= size < slots], default=slots)


# --- Training ---


def _layers(workload: Workload, passes: Passes, prompts: float, completions: float, parts: float) -> Amounts:
    """Passes over so many prompts and completions in so many micro-batches, on one rank."""
    shape, weights = workload.shape, workload.weights
    prompt, completion = workload.prompt_tokens, workload.completion_tokens
    tokens = (prompts * prompt + completions * completion) / workload.context
    outputs = completions * completion / workload.context
    pairs = (prompts * prompt**2 / 2 + completions * completion * (prompt + completion / 2)) / workload.context
    share = shape.chosen / shape.experts if shape.experts else 0.0
    per_pass = passes.forward + passes.backward
    attention = 4 * shape.layers * shape.queries * pairs
    # A backward pass reads what was kept, and writes as much: twice a forward pass.
    sweeps = passes.forward + 2 * passes.backward
    compiled = compiled_layer_bytes(shape, weights.size, lora=False)
    traffic = shape.layers * (compiled if workload.compiled else layer_bytes(shape, weights.size, 0)) * tokens
    gradient_parts = parts if passes.backward else 0
    head_passes = 1 + (2 + weights.head_trained) * passes.backward
    return {
        "products": 2 * tokens * _weights_passed(weights.dense + weights.adapters, weights.dense_trained, passes),
        "experts": 2 * tokens * share * _weights_passed(weights.experts, weights.experts_trained, passes),
        "attention": attention * (passes.forward + BACKWARD_ATTENTION * passes.backward),
        "head": 2 * outputs * weights.head * head_passes,
        "traffic" if workload.compiled else "plain traffic": traffic * sweeps,
        "adapter traffic": tokens * 2 * weights.adapter_widths * weights.size * sweeps,
        "launches": parts * shape.layers * per_pass,
        "gradient traffic": gradient_parts * ACCUMULATE_BYTES * weights.trained,
    }


def _weights_passed(count: float, trained: float, passes: Passes) -> float:
    """Weights that a token is multiplied with: in forward passes, for the gradient of the input, and for its own."""
    return count * (passes.forward + passes.backward) + trained * passes.backward


def training_amounts(workload: Workload) -> Amounts:
    """Forward and backward passes of all updates on a rank, the LM head included."""
    forward = 2.0 if workload.config.model.gradient_checkpointing else 1.0
    return _of_updates(workload, Passes(forward=forward, backward=1.0), workload.config.learner.mini_batches)


def logprob_amounts(workload: Workload) -> Amounts:
    """Forward passes before the first update: old log-probs, and those of the reference."""
    learner = workload.config.learner
    # The training forwards of the first update give its old log-probs.
    old = learner.mini_batches - 1 if learner.old_logp == "recompute" else 1
    reference = learner.mini_batches if workload.kl else 0
    return _of_updates(workload, Passes(forward=1.0), old + reference)


def _of_updates(workload: Workload, passes: Passes, updates: float) -> Amounts:
    parts = workload.mean_micro_batches
    return _layers(
        workload,
        passes,
        prompts=updates * sum(m.prompts for m in parts),
        completions=updates * sum(m.completions for m in parts),
        parts=updates * len(parts),
    )


def optimizer_amounts(workload: Workload) -> Amounts:
    """The optimizer steps of a rank, each for its part of the weights."""
    learner, weights = workload.config.learner, workload.weights
    updates, count = learner.mini_batches, workload.weights.trained / workload.ranks
    of_update = UPDATE_BYTES_8BIT if learner.optimizer == "adamw_8bit" else UPDATE_BYTES
    amounts: dict[str, float] = {"traffic": updates * of_update * count, "updates": updates}
    if learner.optimizer_offload:
        # Copies in both directions overlap.
        moved = MOMENT_BYTES[learner.optimizer] + (4 if weights.size < 4 else 0)
        amounts["host traffic"] = updates * moved * count
    return amounts


def useful_operations(workload: Workload) -> float:
    """Operations that training one step needs, on all ranks: recomputation does not count."""
    work = _of_updates(workload, Passes(forward=1.0, backward=1.0), workload.config.learner.mini_batches)
    # Attention as in the papers: a backward pass is twice a forward pass.
    work["attention"] *= 3 / (1 + BACKWARD_ATTENTION)
    return workload.ranks * sum(amount for name, amount in work.items() if name in OPERATIONS)


# --- Communication ---


def _communication(workload: Workload, gpu: Gpu, per_node: int) -> dict[str, float]:
    """Seconds of the collectives of each phase."""
    ranks, weights, shape = workload.ranks, workload.weights, workload.shape
    if ranks == 1:
        return dict.fromkeys(("sampling", "log-probs", "training", "optimizer", "weight gather"), 0.0)
    rate = (gpu.link if ranks <= per_node else gpu.network) / TIMES["communication"]["bytes"]
    context_rate = (gpu.link if workload.context <= per_node else gpu.network) / TIMES["communication"]["bytes"]
    others = (ranks - 1) / ranks
    gather = (weights.bytes - weights.quantized_bytes) * others / rate
    updates = workload.config.learner.mini_batches
    parts = len(workload.mean_micro_batches)
    reduce = 4 * weights.trained * others / rate
    old = updates - 1 if workload.config.learner.old_logp == "recompute" else 1
    forwards = (old + updates * workload.kl) * parts
    # Ulysses: queries, keys, values and outputs of every layer move between the ranks of a group, and back.
    exchanged = 0.0
    if workload.context > 1:
        tokens = sum(m.tokens(workload.prompt_tokens, workload.completion_tokens) for m in workload.mean_micro_batches)
        of_layer = 2 * (shape.queries + shape.keys) * weights.size * tokens / workload.context
        exchanged = shape.layers * of_layer * (workload.context - 1) / workload.context / context_rate
    sweeps = 3 if workload.config.model.gradient_checkpointing else 2
    return {
        "sampling": 0.0,
        "log-probs": forwards * gather + (old + updates * workload.kl) * exchanged,
        "training": updates * (parts * 2 * gather + reduce + sweeps * exchanged),
        "optimizer": 0.0,
        "weight gather": gather,
    }
