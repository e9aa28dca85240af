"""Peak memory of a step on one rank, line by line: what the doctor compares with its device, and `gspo plan` with the
data sheet of a GPU.

In: a `Workload`. Out: an `Estimate` in bytes. Invariant: it is for the largest possible micro-batch. b is the size of
a weight, n the number of weights.

Held for the whole run: weights b n, optimizer 8 n (two float32 moments) or 2.03 n (in 8 bits), masters 4 n for weights
in lower precision than float32, and a second copy of the weights with a KL penalty. With `learner.optimizer_offload`,
moments and masters are in host memory. With `rollout.max_lag`, the sampling process has
another copy, and samples during training. With LoRA all but the first count the adapters' weights only, there is no
second copy, and weights in NF4 take 4.127 bits each. Of N ranks, each holds one part in N. On top of that comes the
largest of

- training, on the largest possible micro-batch: gradients 4 n (always float32), activations, LM head;
- the optimizer step: gradients 4 n, and on a GPU with float32 moments 4 n for temporaries, or what is on its way from
  and to host memory;
- sampling: the KV cache, and the logits of one decoding step; of several ranks, each also has the whole weights.

Activations are what autograd keeps of each layer for the backward pass. Per token, with sdpa attention, for hidden
size H, feed-forward I, queries Q, keys and values K, and E experts of width F per token, they take

    b (5 H + 4 I + 4 Q + 4 K + E (2 H + 4 F)) + 8 H

in layers that are not compiled; the tests compare it with the allocator. Compiled layers recompute what is cheap; how
much they keep was fitted (`calibration.py`). If a batch could be measured, the measurement is used. The LM head
processes as many entries of the vocabulary at a time as fit into its limit. If the logits of a model are not a plain
matrix product, it processes all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gspo.config import LearnerConfig
from gspo.learner.host_states import LANES, PART
from gspo.learner.weight_states import MOMENT_BYTES
from gspo.model.kernels.fused_linear_logprobs import HELD, HELD_CPU
from gspo.preflight.calibration import ACTIVATIONS
from gspo.preflight.machine import human
from gspo.preflight.model_size import Shape
from gspo.preflight.workload import MicroBatchSize, Workload
from gspo.rollout.engine import engine_traits
from gspo.rollout.local.blocks import BLOCK_SIZE, blocks_for

LOGIT_BYTES = 20
"""Per completion token and vocabulary entry in training: five float32 copies for softmax, entropy and gradient."""
FUSED_LOGIT_BYTES = 2
"""The same in the kernel for 16 bits on a GPU, which stores only the gradient of the logits."""
SAMPLE_BYTES = 24
"""Per slot and vocabulary entry in sampling: logits, log-probs, and cumulative sums in float64."""
PAGED_SAMPLE_BYTES = 8
"""The same in the kernels for a GPU, without `top_p` and `top_k`."""
SORTED_SAMPLE_BYTES = 40
"""The same with them."""
PREFILL_TOKENS = 8192
"""Default of the engine option of this name."""
MEMORY_SHARE = 0.8
"""Share of the free memory that the paged KV cache may take (`rollout/local/paged.py`)."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """One use of memory."""

    name: str
    bytes: float
    how: str
    """How it was computed."""

    def __str__(self) -> str:
        return f"{self.name:<24} {human(self.bytes):>8}   {self.how}"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a run holds all the time, and the phases, of which one at a time comes on top."""

    held: tuple[MemoryUse, ...]
    phases: dict[str, tuple[MemoryUse, ...]]
    """By name; the first line of training is its gradients."""
    host: tuple[MemoryUse, ...] = ()
    """What it holds in host memory all the time."""

    @property
    def worst(self) -> str:
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda name: total(self.phases[name]))

    @property
    def peak(self) -> float:
        return self.peak_of(self.worst)

    def peak_of(self, phase: str) -> float:
        return total(self.held) + total(self.phases[phase])


def _millions(count: int) -> str:
    return f"{count / 1e6:,.0f}M" if count >= 1e9 else f"{count / 1e6:,.4g}M"


def total(lines: Sequence[MemoryUse]) -> float:
    return sum(line.bytes for line in lines)


def layer_bytes(shape: Shape, size: int, width: int) -> float:
    """What autograd keeps of one layer that is not compiled, per token of a row of `width` tokens."""
    elements = 5 * shape.hidden + 4 * shape.inner + 4 * shape.queries + 4 * shape.keys
    elements += shape.chosen * (2 * shape.hidden + 4 * shape.expert)
    # sdpa recomputes the attention weights in the backward pass; eager attention stores them.
    scores = 3 * shape.heads * width if shape.eager else 0
    return size * (elements + scores) + 8 * shape.hidden


def compiled_layer_bytes(shape: Shape, size: int, *, lora: bool) -> float:
    """What autograd keeps of one compiled layer, per token."""
    kept = ACTIVATIONS
    elements = kept["hidden"] * shape.hidden + kept["attention"] * (shape.queries + shape.keys)
    elements += kept["feed-forward"] * shape.inner
    if lora:
        elements *= kept["adapters"]
    # Experts are not compiled. Without a gradient of their weights, their inputs are not kept.
    width = shape.hidden + 2 * shape.expert if lora else 2 * shape.hidden + 3 * shape.expert
    return size * (elements + shape.chosen * width)


def activation_bytes(
    shape: Shape, size: int, width: int, *, checkpointing: bool, compiled: bool = False, lora: bool = False
) -> float:
    """What autograd keeps of all layers, per token; with gradient checkpointing their inputs and all of one layer."""
    layer = compiled_layer_bytes(shape, size, lora=lora) if compiled else layer_bytes(shape, size, width)
    # One layer at a time is recomputed, with some of its temporary tensors.
    recomputed = ACTIVATIONS["recomputed layer"] if compiled else 1.2
    return shape.layers * shape.hidden * size + recomputed * layer if checkpointing else shape.layers * layer


def logits_held(workload: Workload, tokens: int) -> int:
    """How many logits of these completion tokens are in memory at a time."""
    vocabulary = workload.shape.vocabulary
    if workload.whole_logits:
        return tokens * vocabulary
    # A chunk is never narrower than 256 entries.
    return min(tokens * vocabulary, max(HELD if workload.gpu else HELD_CPU, 256 * tokens))


def estimate(workload: Workload) -> Estimate:
    """The peak memory of a step on a rank."""
    weights, ranks = workload.weights, workload.ranks
    n, t = weights.total, weights.trained
    each = "per trained weight" if workload.lora else "per weight"
    part = f" on each of {ranks} ranks" if ranks > 1 else ""

    def own(name: str, bytes_: float, how: str) -> MemoryUse:
        return MemoryUse(name=name, bytes=bytes_ / ranks, how=how + part)

    held = [own("weights", weights.bytes, f"{_millions(n)} x {weights.bytes / n:.4g} bytes")]
    if weights.quantized_bytes and ranks > 1:
        # 4-bit weights are not sharded.
        whole, rest = weights.quantized_bytes, weights.bytes - weights.quantized_bytes
        held = [
            MemoryUse(name="4-bit weights", bytes=whole, how="whole on every rank"),
            own("weights", rest, "in 16 bits"),
        ]
    states = _optimizer_states(workload, own, each)
    offload = workload.config.learner.optimizer_offload
    held += [] if offload else states
    if workload.kl and not workload.config.model.lora.rank:
        held.append(own("reference model", weights.bytes, "a second copy of the weights, for objective.kl"))
    rollout = workload.config.rollout
    if rollout.max_lag and rollout.sampler_device in ("", workload.config.model.device):
        how = "its copy of the weights, for rollout.max_lag"
        held.append(MemoryUse(name="sampling process", bytes=weights.bytes, how=how))
        held += _sampling(workload, total(held))  # at the same time as training
    return Estimate(
        held=tuple(held),
        phases={
            "training": _training(workload, each),
            "the optimizer step": (
                own("gradients", 4 * t, f"4 bytes {each}"),
                *_update_temporaries(workload, own, each),
            ),
            "sampling": _sampling(workload, total(held)),
        },
        host=tuple(states) if offload else (),
    )


def _optimizer_states(workload: Workload, own: Callable[[str, float, str], MemoryUse], each: str) -> list[MemoryUse]:
    """Moments and masters, wherever they are. Masters are float32 whatever the precision of the weights."""
    weights, optimizer = workload.weights, workload.config.learner.optimizer
    size = MOMENT_BYTES[optimizer]
    lines = [own("optimizer moments", size * weights.trained, f"2 x {size / 2:.3g} bytes {each}")]
    if weights.size < 4:
        lines.append(own("float32 masters", 4 * weights.trained, f"4 bytes {each}"))
    return lines


def _update_temporaries(
    workload: Workload, own: Callable[[str, float, str], MemoryUse], each: str
) -> tuple[MemoryUse, ...]:
    """What an update on a GPU adds to gradients. In 8 bits it is one kernel per weight, without temporaries."""
    weights, learner = workload.weights, workload.config.learner
    if not workload.gpu:
        return ()
    if learner.optimizer_offload:
        entries = min(weights.trained, LANES * PART)
        size = MOMENT_BYTES[learner.optimizer] + (4 if weights.size < 4 else 0)
        return (own("streamed states", size * entries, f"{LANES} parts of {PART / 1e6:.3g}M, {size:.3g} bytes {each}"),)
    if learner.optimizer == "adamw_8bit":
        return ()
    return (own("temporaries", 4 * weights.trained, f"4 bytes {each}"),)


def cheaper_optimizers(workload: Workload) -> Iterator[Workload]:
    """The workload with optimizers that need less GPU memory, the fastest first. They work on one rank."""
    if workload.ranks > 1:
        return
    config = workload.config
    kinds: list[tuple[Literal["adamw", "adamw_8bit"], bool]] = [("adamw_8bit", False)]
    if workload.gpu:
        kinds += [("adamw", True), ("adamw_8bit", True)]
    for optimizer, offload in kinds:
        learner = replace(config.learner, optimizer=optimizer, optimizer_offload=offload)
        if learner != config.learner:
            yield replace(workload, config=replace(config, learner=learner))


def optimizer_settings(learner: LearnerConfig) -> dict[str, Any]:
    """The settings of an optimizer that differ from the defaults."""
    found = {"learner.optimizer": learner.optimizer, "learner.optimizer_offload": learner.optimizer_offload}
    return {key: value for key, value in found.items() if value not in ("adamw", False)}


def _training(workload: Workload, each: str) -> tuple[MemoryUse, ...]:
    """What the micro-batch with the highest peak adds."""
    count = len(workload.largest_micro_batches)
    parts = [_micro_batch(workload, m, each, i, count) for i, m in enumerate(workload.largest_micro_batches)]
    return max(parts, key=total)


def _micro_batch(workload: Workload, micro: MicroBatchSize, each: str, index: int, count: int) -> tuple[MemoryUse, ...]:
    shape, weights = workload.shape, workload.weights
    completion = workload.config.rollout.max_tokens
    tokens = micro.tokens(workload.prompt_tokens, completion) / workload.context
    per_token = workload.activation_bytes or activation_bytes(
        shape,
        weights.size,
        workload.prompt_tokens + completion,
        checkpointing=workload.config.model.gradient_checkpointing,
        compiled=workload.compiled,
        lora=workload.lora,
    )
    origin = "measured" if workload.activation_bytes else "estimated"
    # Completion tokens only: no loss needs the logits of a prompt.
    outputs = -(-micro.completions * completion // workload.context)
    entries = logits_held(workload, outputs)
    fused = workload.gpu and weights.size == 2 and not workload.whole_logits
    # The gradient of the hidden states is float32, and the hidden states themselves are copied.
    states = 8 * outputs * shape.hidden if fused else 0
    each_entry = FUSED_LOGIT_BYTES if fused else LOGIT_BYTES
    activations = MemoryUse(
        name="activations",
        bytes=tokens * per_token,
        how=f"{tokens:,.0f} tokens x {human(per_token)}, {origin}",
    )
    logits = MemoryUse(
        name="LM head",
        bytes=entries * each_entry + states,
        how=f"{entries / 1e6:,.4g}M of {outputs} completion tokens x {shape.vocabulary}, {each_entry} bytes each",
    )
    return (_gradients(workload, each, activations.bytes, index, count), activations, logits, *_gathered(workload))


def _gradients(workload: Workload, each: str, activations: float, index: int, count: int) -> MemoryUse:
    """Gradients at the peak of a micro-batch: those of the micro-batches before, or what the first has computed."""
    weights = workload.weights
    whole = 4.0 * weights.trained
    head = 4.0 * weights.head if weights.head_trained else 0.0
    # Gradients of layers grow while their activations are freed.
    bytes_ = whole if index else max(head, whole - activations)
    how = f"4 bytes {each}" + ("" if index else ", as layers finish")
    if workload.ranks > 1:
        # Ranks add up gradients in the last micro-batch, layer by layer. Before that, each has whole ones.
        bytes_ = whole / workload.ranks + (bytes_ if count > 1 else head)
        how += ", whole until the last micro-batch" if count > 1 else ", divided among ranks"
    return MemoryUse(name="gradients", bytes=bytes_, how=how)


def _gathered(workload: Workload) -> tuple[MemoryUse, ...]:
    """Weights that FSDP gathers for an update: two layers, and those outside of the layers."""
    weights, shape = workload.weights, workload.shape
    if workload.ranks == 1:
        return ()
    root = weights.size * weights.root
    size = root + 2 * (weights.bytes - weights.quantized_bytes - root) / shape.layers
    return (MemoryUse(name="gathered weights", bytes=size, how="two layers, embeddings and LM head"),)


def _sampling(workload: Workload, held: float) -> tuple[MemoryUse, ...]:
    config = workload.config.rollout
    if not engine_traits(config.engine).shares_weights:
        return ()
    shape, weights, slots = workload.shape, workload.weights, workload.slots
    columns = workload.prompt_tokens + config.max_tokens
    filtered = config.top_p < 1 or config.top_k > 0
    sorted_bytes = SORTED_SAMPLE_BYTES if filtered else PAGED_SAMPLE_BYTES
    each = sorted_bytes if workload.gpu else SAMPLE_BYTES
    logits = MemoryUse(
        name="logits of a step",
        bytes=slots * shape.vocabulary * each,
        how=f"{slots} x {shape.vocabulary} x {each} bytes",
    )
    token = shape.layers * 2 * shape.keys * weights.size
    if not workload.gpu:
        cache = MemoryUse(
            name="KV cache",
            bytes=slots * columns * token,
            how=f"{slots} slots x {columns} tokens x {shape.layers} layers x 2 x {shape.keys} x {weights.size} bytes",
        )
        return cache, logits
    gathered: tuple[MemoryUse, ...] = ()
    if workload.ranks > 1:
        whole = weights.bytes - weights.quantized_bytes
        gathered = (MemoryUse(name="gathered weights", bytes=whole, how="all that are sharded, on every rank"),)
    copies = _copies(workload)
    wanted = cache_blocks(workload)
    block = BLOCK_SIZE * token
    fitting = wanted
    if workload.memory is not None:
        room = MEMORY_SHARE * (workload.memory - held - total(gathered) - logits.bytes)
        # The engine rounds to sixteenths. It needs two completions at full length.
        fitting = max(2 + 2 * blocks_for(columns), wanted * max(0, min(16, int(16 * room / (block * wanted)))) // 16)
        if room < wanted * block + copies.bytes:
            copies = MemoryUse(name=copies.name, bytes=0.0, how="none, because the KV cache needs the memory")
    limit = "" if fitting == wanted else f", of {wanted} that would hold all of them"
    cache = MemoryUse(
        name="KV cache",
        bytes=fitting * block,
        how=f"{fitting} blocks of {BLOCK_SIZE} tokens for {slots} slots{limit}, {human(block)} each",
    )
    return cache, copies, logits, *gathered


def cache_blocks(workload: Workload) -> int:
    """Blocks of the paged KV cache that hold every slot at full length, and prefilled prompts."""
    config = workload.config.rollout
    width = blocks_for(workload.prompt_tokens + config.max_tokens)
    prefill = int(config.engine_options.get("prefill_tokens", PREFILL_TOKENS))
    return 2 + workload.slots * width + 2 * (blocks_for(prefill) + width)


def concurrent(workload: Workload) -> int:
    """Completions of full length that a rank samples at a time, with the KV cache that fits on a GPU."""
    lines = _sampling(workload, total(estimate(workload).held))
    if not workload.gpu or not lines:
        return workload.slots
    block = BLOCK_SIZE * workload.shape.layers * 2 * workload.shape.keys * workload.weights.size
    return max(1, min(workload.slots, round(workload.slots * lines[0].bytes / block / cache_blocks(workload))))


def _copies(workload: Workload) -> MemoryUse:
    """Weights that the engine copies, so that the projections of one input are one product."""
    shape, weights = workload.shape, workload.weights
    elements = shape.hidden * (shape.queries + 2 * shape.keys)
    elements += 2 * shape.hidden * shape.inner if not shape.experts else 0
    if workload.lora:
        elements += shape.hidden * shape.queries + (shape.hidden * shape.inner if not shape.experts else 0)
    # 4-bit layers run as their own modules.
    layers = 0 if workload.config.model.quantize else shape.layers
    return MemoryUse(
        name="copied projections",
        bytes=layers * elements * weights.size,
        how=f"{layers} layers x {elements / 1e6:,.4g}M x {weights.size} bytes",
    )
