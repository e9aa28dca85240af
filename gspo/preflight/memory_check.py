"""Whether a run fits the memory of its device, and what to lower if it does not.

In: the context. Out: a finding with the estimate of `memory.py`. Invariant: on a CPU, which has no error to recover
from, an estimate above what is free is a failure.
"""

from __future__ import annotations

from collections.abc import Iterator

from gspo.preflight.context import PreflightContext
from gspo.preflight.findings import Finding, fail, ok, warning
from gspo.preflight.machine import human
from gspo.preflight.memory import Estimate, estimate, total
from gspo.preflight.workload import Workload
from gspo.rollout.engine import engine_traits

TIGHT = 0.85
"""Above this fraction of the free memory, the estimate is too close to the limit to be safe."""


def check_memory(context: PreflightContext) -> Iterator[Finding]:
    assert context.free is not None
    free, available = context.free
    workload = context.workload
    gpu = workload.gpu
    need = estimate(workload)
    place = "GPU memory" if gpu else "memory"
    detail = _table(need)
    sentence = (
        f"The peak of a step is about {human(need.peak)}, in {need.worst}; "
        f"{human(free)} of {human(available)} {place} are free."
    )
    numbers = {"need": round(need.peak), "free": free, "total": available, "worst": need.worst}
    if need.peak <= TIGHT * free:
        yield ok(sentence, detail=detail, **numbers)
        return
    # On a CPU there is no error to recover from: the kernel kills the process.
    level = fail if need.peak > free and not (gpu and _one_row_fits(workload, need, free)) else warning
    yield level(sentence, _remedy(context, need, TIGHT * free), detail=detail, **numbers)


def _one_row_fits(workload: Workload, need: Estimate, free: float) -> bool:
    """Whether a run on a GPU would still work: it splits micro-batches that do not fit, down to single rows."""
    gradients, *rest = need.phases["training"]
    one = gradients.bytes + total(rest) / max(m.completions for m in workload.largest_micro_batches)
    others = [total(phase) for name, phase in need.phases.items() if name != "training"]
    return total(need.held) + max(one, *others) <= free


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
    fixed = total(need.held) + gradients.bytes
    workload, longest = context.workload, context.config.rollout.max_tokens
    width = workload.prompt_tokens + longest
    largest = max(m.tokens(workload.prompt_tokens, longest) for m in workload.largest_micro_batches)
    # Both lines of training grow linearly with the tokens of a micro-batch.
    fitting = int((room - fixed) / (total(rest) / largest))
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


def _round(tokens: int) -> int:
    """Round down to a round number: three leading binary digits."""
    step = 1 << max(0, tokens.bit_length() - 3)
    return tokens // step * step
