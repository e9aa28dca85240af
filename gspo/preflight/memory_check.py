"""Whether a run fits the memory of its device, and what to lower if it does not.

In: the context. Out: a finding with the estimate of `memory.py`. Invariant: on a CPU, which has no error to recover
from, an estimate above what is free is a failure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch

from gspo.model.free_memory import free_memory
from gspo.preflight.context import PreflightContext
from gspo.preflight.findings import Finding, fail, ok, warning
from gspo.preflight.machine import human
from gspo.preflight.memory import Estimate, cheaper_optimizers, estimate, optimizer_settings, total
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
    if need.host:
        yield _host_memory(context, total(need.host))
    if need.peak <= TIGHT * free:
        yield ok(sentence, detail=detail, **numbers)
        return
    # On a CPU there is no error to recover from: the kernel kills the process.
    level = fail if need.peak > free and not (gpu and _one_row_fits(workload, need, free)) else warning
    yield level(sentence, _remedy(context, need, TIGHT * free), detail=detail, **numbers)


def _host_memory(context: PreflightContext, need: float) -> Finding:
    """Whether optimizer states that are held in host memory fit there."""
    free, available = free_memory(torch.device("cpu"))
    sentence = (
        f"learner.optimizer_offload holds {human(need)} in host memory; {human(free)} of {human(available)} are free."
    )
    if need <= TIGHT * free:
        return ok(sentence, host_need=round(need), host_free=free)
    level = fail if need > free else warning
    smaller = "" if context.config.learner.optimizer == "adamw_8bit" else ', or learner.optimizer = "adamw_8bit"'
    remedy = f"Use a machine with more memory{smaller}."
    return level(sentence, remedy, host_need=round(need), host_free=free)


def _one_row_fits(workload: Workload, need: Estimate, free: float) -> bool:
    """Whether a run on a GPU would still work: it splits micro-batches that do not fit, down to single rows."""
    gradients, *rest = need.phases["training"]
    one = gradients.bytes + total(rest) / max(m.completions for m in workload.largest_micro_batches)
    others = [total(phase) for name, phase in need.phases.items() if name != "training"]
    return total(need.held) + max(one, *others) <= free


def _table(need: Estimate) -> list[str]:
    lines = ["held for the whole run", *(f"  {line}" for line in need.held)]
    if need.host:
        lines += ["held in host memory", *(f"  {line}" for line in need.host)]
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
    # Gradients, and what the optimizer step adds: no size of micro-batches changes it.
    alone = total(need.held) + max(gradients.bytes, total(need.phases["the optimizer step"]))
    if alone > room:
        model = context.config.model
        ways = {
            ", model.dtype = bfloat16 or float16": model.dtype == "float32",
            ", adapters (model.lora.rank = 16)": not model.lora.rank,
        }
        kept = "".join(way for way, open_ in ways.items() if open_) + ", a smaller model"
        cheaper = _optimizers(workload, room)
        return f"Weights, gradients and optimizer alone take {human(alone)}: use {cheaper}more memory{kept}."
    if need.worst == "sampling":
        options = (*engine_traits(context.config.rollout.engine).memory_options, "rollout.max_tokens")
        return f"Lower {' or '.join(options)}."
    if fitting >= width:
        return f"Set learner.micro_batch_tokens = {_round(fitting)}; the gradient stays the same."
    more = "" if context.config.model.gradient_checkpointing else "Set model.gradient_checkpointing = true, "
    return f"{more or 'Set '}rollout.max_tokens lower, or use more memory: even one row of {width} tokens is too much."


def _optimizers(workload: Workload, room: float) -> str:
    """Optimizers with which a step fits, or with which its fixed part does."""
    needs = {_setting(other): estimate(other) for other in cheaper_optimizers(workload)}
    fitting = {how: need for how, need in needs.items() if need.peak <= room} or {
        how: need for how, need in needs.items() if total(need.held) + need.phases["training"][0].bytes <= room
    }
    host = {how: f", and {human(total(need.host))} of host memory" if need.host else "" for how, need in needs.items()}
    return "".join(f"{how} (needs {human(need.peak)}{host[how]}), " for how, need in fitting.items())


def _setting(workload: Workload) -> str:
    settings = optimizer_settings(workload.config.learner)
    return " with ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())


def _round(tokens: int) -> int:
    """Round down to a round number: three leading binary digits."""
    step = 1 << max(0, tokens.bit_length() - 3)
    return tokens // step * step
