"""Peak memory of a step, line by line, compared with the memory of the device.

In: the model's shapes and the settings. Out: an `Estimate` in bytes. Invariant: it is an upper estimate for the largest
possible micro-batch. b is the size of a weight, n the number of weights.

Held for the whole run: weights b n, optimizer 8 n (two float32 moments), masters 4 n for weights in lower precision
than float32, and a second copy of the weights with a KL penalty. With `rollout.max_lag`, the sampling process has
another copy, and samples during training. With LoRA all but the first count the adapters'
weights only, there is no second copy, and weights in NF4 take 4.127 bits each. On top of that comes the largest of

- training, on the largest possible micro-batch: gradients 4 n (always float32), activations, logits;
- the optimizer step: gradients 4 n, and on a GPU 4 n for temporaries;
- sampling: the KV cache of every slot at full length, and the logits of one decoding step.

Activations are what autograd keeps of each layer for the backward pass. Per token, with sdpa attention, for hidden
size H, feed-forward I, queries Q, keys and values K, and E experts of width F per token, they take

    b (5 H + 4 I + 4 Q + 4 K + E (2 H + 4 F)) + 8 H

counted on Llama, Qwen2, Qwen3 and Qwen3-MoE; the tests compare it with the allocator. If a batch could be measured,
the measurement is used. The LM head keeps five float32 numbers per completion token and vocabulary entry at its peak,
for as many entries as it processes at a time. If the logits of a model are not a plain matrix product, it processes
all at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.model.kernels.fused_linear_logprobs import HELD, HELD_CPU
from gspo.model.lm_head import lm_head
from gspo.model.quantization import BITS, linear_layers
from gspo.preflight.context import PreflightContext
from gspo.preflight.findings import Finding, fail, ok, warning
from gspo.preflight.machine import human
from gspo.rollout.engine import engine_traits

LOGIT_BYTES = 20
"""Per completion token and vocabulary entry in training: five float32 copies for softmax, entropy and gradient."""
SAMPLE_BYTES = 24
"""Per slot and vocabulary entry in sampling: logits, log-probs, and cumulative sums in float64."""
TIGHT = 0.85
"""Above this fraction of the free memory, the estimate is too close to the limit to be safe."""


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

    @property
    def worst(self) -> str:
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda name: _total(self.phases[name]))

    @property
    def peak(self) -> float:
        return _total(self.held) + _total(self.phases[self.worst])


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a decoder that memory depends on."""

    layers: int
    hidden: int
    inner: int
    """Width of the dense feed-forward; 0 in a layer of experts."""
    queries: int
    keys: int
    heads: int
    vocabulary: int
    chosen: int
    """Experts per token; 0 for a dense model."""
    expert: int
    """Width of an expert."""
    eager: bool
    """Whether attention stores its weights, one per pair of tokens."""


def shape_of(model: Any) -> Shape:
    """Read the shape from the config. Its attribute names differ slightly between model families."""
    config = model.config.get_text_config(decoder=True)

    def first(*names: str, default: int = 0) -> int:
        return next((int(v) for n in names if isinstance(v := getattr(config, n, None), int) and v), default)

    hidden, heads = first("hidden_size"), first("num_attention_heads", default=1)
    head = first("head_dim", default=hidden // heads)
    chosen = first("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
    inner = first("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
    expert = first("moe_intermediate_size", default=inner)
    shared = first("shared_expert_intermediate_size") or first("n_shared_experts") * expert
    return Shape(
        layers=first("num_hidden_layers"),
        hidden=hidden,
        inner=shared if chosen else inner,
        queries=heads * head,
        keys=first("num_key_value_heads", default=heads) * head,
        heads=heads,
        vocabulary=model.get_input_embeddings().num_embeddings,
        chosen=chosen,
        expert=expert,
        eager=getattr(config, "_attn_implementation", "sdpa") == "eager",
    )


def layer_bytes(shape: Shape, size: int, width: int) -> float:
    """What autograd keeps of one layer, per token of a row of `width` tokens."""
    elements = 5 * shape.hidden + 4 * shape.inner + 4 * shape.queries + 4 * shape.keys
    elements += shape.chosen * (2 * shape.hidden + 4 * shape.expert)
    # sdpa recomputes the attention weights in the backward pass; eager attention stores them.
    scores = 3 * shape.heads * width if shape.eager else 0
    return size * (elements + scores) + 8 * shape.hidden


def activation_bytes(shape: Shape, size: int, width: int, *, checkpointing: bool) -> float:
    """What autograd keeps of all layers, per token; with gradient checkpointing their inputs and all of one layer."""
    layer = layer_bytes(shape, size, width)
    # One layer at a time is recomputed, with some of its temporary tensors.
    return shape.layers * shape.hidden * size + 1.2 * layer if checkpointing else shape.layers * layer


def largest_micro_batch(context: PreflightContext) -> tuple[int, int]:
    """(rows, width) of the largest micro-batch: the longest prompt, completions at their token limit."""
    learner, rollout = context.config.learner, context.config.rollout
    width = context.longest_prompt + rollout.max_tokens
    rows = -(-context.completions // learner.mini_batches)
    # At least one row: a sequence that is longer than the budget is still trained on.
    return min(rows, max(1, learner.micro_batch_tokens // width)), width


def weight_bytes(skeleton: Any, quantize: str) -> float:
    """Bytes of the weights; quantized weights count with their 4-bit size."""
    whole = sum(p.numel() * p.element_size() for p in skeleton.parameters())
    small = [m.weight for _, m in linear_layers(skeleton) if not m.weight.requires_grad] if quantize else []
    return whole - sum(w.numel() * (w.element_size() - BITS / 8) for w in small)


def estimate(context: PreflightContext, *, gpu: bool) -> Estimate:
    """The peak memory of a step."""
    parameters = list(context.skeleton.parameters())
    config = context.config.model
    n = sum(p.numel() for p in parameters)
    t = sum(p.numel() for p in parameters if p.requires_grad)
    weights = weight_bytes(context.skeleton, config.quantize)
    each = "per trained weight" if t < n else "per weight"
    held = [MemoryUse(name="weights", bytes=weights, how=f"{n / 1e6:,.4g}M x {weights / n:.4g} bytes")]
    # Always float32, whatever the precision of the weights.
    held += [MemoryUse(name="optimizer moments", bytes=8 * t, how=f"2 x 4 bytes {each}")]
    if any(p.element_size() < 4 for p in parameters):
        held.append(MemoryUse(name="float32 masters", bytes=4 * t, how=f"4 bytes {each}"))
    if context.objective is not None and context.objective.kl and not config.lora.rank:
        held.append(
            MemoryUse(name="reference model", bytes=weights, how="a second copy of the weights, for objective.kl")
        )
    rollout = context.config.rollout
    if rollout.max_lag and rollout.sampler_device in ("", config.device):
        copy = MemoryUse(name="sampling process", bytes=weights, how="its copy of the weights, for rollout.max_lag")
        held += [copy, *_sampling(context)]  # at the same time as training
    gradients = MemoryUse(name="gradients", bytes=4 * t, how=f"4 bytes {each}")
    temporary = MemoryUse(name="temporaries", bytes=4 * t, how=f"4 bytes {each}")
    return Estimate(
        held=tuple(held),
        phases={
            "training": (gradients, *_training(context)),
            "the optimizer step": (gradients, *((temporary,) if gpu else ())),
            "sampling": _sampling(context),
        },
    )


def _training(context: PreflightContext) -> tuple[MemoryUse, ...]:
    shape = shape_of(context.skeleton)
    size = next(context.skeleton.parameters()).element_size()
    rows, width = largest_micro_batch(context)
    checkpointing = context.config.model.gradient_checkpointing
    per_token = context.activation_bytes or activation_bytes(shape, size, width, checkpointing=checkpointing)
    completion = context.config.rollout.max_tokens
    origin = "measured" if context.activation_bytes else "estimated"
    # Completion tokens only: no loss needs the logits of a prompt.
    entries = logits_held(context, rows * completion, shape.vocabulary)
    logits = f"{entries / 1e6:,.4g}M of {rows} x {completion} completion tokens x {shape.vocabulary}"
    return (
        MemoryUse(
            name="activations",
            bytes=rows * width * per_token,
            how=f"{rows} rows x {width} tokens x {human(per_token)}, {origin}",
        ),
        MemoryUse(name="logits", bytes=entries * LOGIT_BYTES, how=f"{logits}, {LOGIT_BYTES} bytes each"),
    )


def logits_held(context: PreflightContext, tokens: int, vocabulary: int) -> int:
    """How many logits of these completion tokens are in memory at a time."""
    if context.policy is not None and lm_head(context.policy.model) is None:
        return tokens * vocabulary
    held = HELD if context.device is not None and context.device.type == "cuda" else HELD_CPU
    # A chunk is never narrower than 256 entries.
    return min(tokens * vocabulary, max(held, 256 * tokens))


def _sampling(context: PreflightContext) -> tuple[MemoryUse, ...]:
    if not engine_traits(context.config.rollout.engine).shares_weights:
        return ()
    shape = shape_of(context.skeleton)
    size = next(context.skeleton.parameters()).element_size()
    slots = min(int(context.config.rollout.engine_options.get("slots", 256)), context.completions)
    columns = context.longest_prompt + context.config.rollout.max_tokens
    return (
        MemoryUse(
            name="KV cache",
            bytes=slots * columns * shape.layers * 2 * shape.keys * size,
            how=f"{slots} slots x {columns} tokens x {shape.layers} layers x 2 x {shape.keys} x {size} bytes",
        ),
        MemoryUse(
            name="logits of a step",
            bytes=slots * shape.vocabulary * SAMPLE_BYTES,
            how=f"{slots} x {shape.vocabulary} x {SAMPLE_BYTES} bytes",
        ),
    )


# ------------------------------------------------------------------------------------------------- the check


def check_memory(context: PreflightContext) -> Iterator[Finding]:
    assert context.free is not None
    free, total = context.free
    gpu = context.device is not None and context.device.type == "cuda"
    need = estimate(context, gpu=gpu)
    place = "GPU memory" if gpu else "memory"
    detail = _table(need)
    sentence = (
        f"The peak of a step is about {human(need.peak)}, in {need.worst}; "
        f"{human(free)} of {human(total)} {place} are free."
    )
    numbers = {"need": round(need.peak), "free": free, "total": total, "worst": need.worst}
    if need.peak <= TIGHT * free:
        yield ok(sentence, detail=detail, **numbers)
        return
    # On a CPU there is no error to recover from: the kernel kills the process.
    level = fail if need.peak > free and not (gpu and _one_row_fits(context, need, free)) else warning
    yield level(sentence, _remedy(context, need, TIGHT * free), detail=detail, **numbers)


def _one_row_fits(context: PreflightContext, need: Estimate, free: float) -> bool:
    """Whether a run on a GPU would still work: it splits micro-batches that do not fit, down to single rows."""
    gradients, *rest = need.phases["training"]
    one = gradients.bytes + _total(rest) / largest_micro_batch(context)[0]
    others = [_total(phase) for name, phase in need.phases.items() if name != "training"]
    return _total(need.held) + max(one, *others) <= free


def _table(need: Estimate) -> list[str]:
    lines = ["held for the whole run", *(f"  {line}" for line in need.held)]
    for name, phase in need.phases.items():
        if phase:
            mark = " (the peak)" if name == need.worst else ""
            lines += [f"in {name}{mark}", *(f"  {line}" for line in phase)]
    return lines


def _remedy(context: PreflightContext, need: Estimate, room: float) -> str:
    """What to lower, and to which value if it can be computed."""
    gradients, *rest = need.phases["training"]
    fixed = _total(need.held) + gradients.bytes
    rows, width = largest_micro_batch(context)
    # Both lines of training grow linearly with the tokens of a micro-batch.
    fitting = int((room - fixed) / (_total(rest) / (rows * width)))
    if fixed > room:
        model = context.config.model
        ways = {
            ", model.dtype = bfloat16 or float16": model.dtype == "float32",
            ", adapters (model.lora.rank = 16)": not model.lora.rank,
        }
        kept = "".join(way for way, open_ in ways.items() if open_) + ", a smaller model"
        return f"Weights, gradients and optimizer alone take {human(fixed)}: use more memory{kept}."
    if need.worst == "sampling":
        options = (*engine_traits(context.config.rollout.engine).memory_options, "rollout.max_tokens")
        return f"Lower {' or '.join(options)}."
    if fitting >= width:
        return f"Set learner.micro_batch_tokens = {_round(fitting)}; the gradient stays the same."
    more = "" if context.config.model.gradient_checkpointing else "Set model.gradient_checkpointing = true, "
    return f"{more or 'Set '}rollout.max_tokens lower, or use more memory: even one row of {width} tokens is too much."


def _total(lines: Sequence[MemoryUse]) -> float:
    return sum(line.bytes for line in lines)


def _round(tokens: int) -> int:
    """Round down to a round number: three leading binary digits."""
    step = 1 << max(0, tokens.bit_length() - 3)
    return tokens // step * step
