"""The model: first its config alone, on the meta device, then its weights, as the run would load them.

In: the context. Out: findings, and the model and the engine of the run. Invariant: the run's own code loads the
weights, once, and not at all if they alone do not fit the memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from gspo.build import check_routes, engine_for, policy_for
from gspo.config import ModelConfig
from gspo.errors import GspoError
from gspo.learner.optimizer import check_optimizer
from gspo.model import adapter
from gspo.model.free_memory import free_memory
from gspo.model.load import build_model, device_of, dtype_name
from gspo.model.routing import check_replay, says_it_routes
from gspo.model.source import load_errors, resolve_model_source
from gspo.preflight.context import PreflightContext
from gspo.preflight.findings import Finding, fail, note, ok, warning
from gspo.preflight.machine import human
from gspo.preflight.model_size import weight_bytes


def check_files(context: PreflightContext) -> Iterator[Finding]:
    config = context.config.model
    context.device = device = device_of(config.device)
    context.skeleton = skeleton = skeleton_of(config, context.tokenizer)
    check_optimizer(context.config.learner, device)
    # Before the model is loaded: the estimate counts its weights.
    context.free = free_memory(device)
    count = sum(p.numel() for p in skeleton.parameters())
    trained = sum(p.numel() for p in skeleton.parameters() if p.requires_grad)
    size = weight_bytes(skeleton, config.quantize)
    share = f", {trained / 1e6:,.4g}M of them trained, in adapters" if config.lora.rank else ""
    kind = "built from scratch" if config.build else config.path
    yield ok(
        f"{type(skeleton).__name__} ({kind}): {count / 1e6:,.4g}M parameters{share}, {human(size)} in "
        f"{config.quantize or dtype_name(config)}, on {device}.",
        parameters=count,
        trained=trained,
        bytes=size,
        device=str(device),
    )


def skeleton_of(config: ModelConfig, tokenizer: Any) -> Any:
    """The model on the meta device: all shapes, no memory."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    if config.build:
        with torch.device("meta"):
            model = build_model(config, tokenizer, seed=0)
            if config.lora.rank:
                adapter.attach(model, config.lora, base=config.build, seed=0)
            return model
    path, options = resolve_model_source(config)
    remote = config.trust_remote_code
    with load_errors(config):
        shape = AutoConfig.from_pretrained(path, trust_remote_code=remote, **options)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                shape, dtype=getattr(torch, dtype_name(config)), trust_remote_code=remote
            )
            if config.lora.rank:
                adapter.attach(model, config.lora, base=config.path, seed=0)
    with suppress(OSError):  # many models have none; then the stop tokens are those of the config
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def check_model(context: PreflightContext) -> Iterator[Finding]:
    assert context.free is not None
    size = weight_bytes(context.skeleton, context.config.model.quantize)
    # On a CPU the kernel would kill the doctor without a message.
    if size > context.free[0]:
        yield fail(
            f"The weights alone need {human(size)}, and only {human(context.free[0])} of memory are free, so the model "
            "was not loaded.",
            "Use a smaller model, model.dtype = bfloat16 or float16, or a larger machine.",
        )
        return
    config = context.config
    started = time.monotonic()
    context.policy = policy = policy_for(config, context.tokenizer)
    yield ok(f"Loaded in {time.monotonic() - started:.1f} s.")
    engine = engine_for(config, policy)
    context.stack.callback(engine.close)
    # Set at the end: without its environment, an engine samples what the rewards cannot score.
    context.engine = engine if context.environment is None else context.environment.engine(engine, policy)
    check_routes(config, context.engine)


def check_experts(context: PreflightContext) -> Iterator[Finding]:
    assert context.policy is not None
    model, routers, config = context.policy.model, context.policy.routers, context.config.routing
    if routers is None and not says_it_routes(model):
        yield ok("A dense model: there is no routing that could change.")
    elif routers is None and not config.record:
        yield note(
            "An MoE model whose routing is not recorded (routing.record = false): changes of experts will not be "
            "visible."
        )
    elif routers is None:
        yield warning(
            "The config mentions experts, but no top-k router was found: changes of experts will not be visible and "
            "cannot be replayed."
        )
    else:
        yield _replay(model, routers, config.replay)


def _replay(model: Any, routers: Any, replay: str) -> Finding:
    found = f"{routers.layers} routers, each choosing {routers.top_k} of {routers.experts} experts"
    try:
        check_replay(model, routers)
    except GspoError:
        return note(f"{found}; replay is not possible with this model, only statistics are.")
    disabled = "replay is possible (routing.replay = old or sampler) and disabled"
    state = f"routing.replay = {replay}" if replay != "off" else disabled
    return ok(f"{found}; {state}.", layers=routers.layers, experts=routers.experts, top_k=routers.top_k)
