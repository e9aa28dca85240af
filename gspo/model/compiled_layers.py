"""Decoder layers that `torch.compile` has compiled, for the learner's forwards and their backward passes.

In: a transformers causal language model. Out: a context inside which its decoder layers run compiled. Invariant: a
trial against the layers as they are decides, once per model; a model that does not compile, or computes something else,
runs as it is, with a warning. Old and new log-probs come from the same compiled graph, so at equal weights they are
equal bitwise. Nothing is chosen by timing, so a resumed run rounds as an uninterrupted one does.

The MoE block of a layer is not compiled: its routers are watched and replaced from one forward to the next, and every
change would compile the layer again. Its experts have kernels of their own (`kernels/experts.py`).
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from gspo.model.gradient_checkpointing import checkpointed, is_checkpointed, without_checkpointing
from gspo.model.kernel_bugs import warn_of_kernel_bug
from gspo.model.kernels.experts import experts_forward, supports_experts
from gspo.model.lm_head import bypass_head, lm_head
from gspo.model.micro_batch import MicroBatch
from gspo.model.out_of_memory import out_of_memory
from gspo.model.packed_forward import run_forward
from gspo.model.patching import patched_forward
from gspo.model.routing import MAY_ROUTE

Forwards = list[tuple[Any, Callable[..., Any]]]
"""Modules, and the forward that each has inside the context."""
SMALL_PARAMETERS = 50_000_000
"""Models below this size train for less time than compilation takes, so `auto` does not compile them."""

_requested: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
_forwards: WeakKeyDictionary[Any, Forwards] = WeakKeyDictionary()


def request_compilation(model: Any, when: str) -> None:
    """Compile the layers of this model in its first training forward. `when` is the setting `model.compile`."""
    large = sum(p.numel() for p in model.parameters()) >= SMALL_PARAMETERS
    _requested[model] = when == "on" or (when == "auto" and model.device.type == "cuda" and large)
    _forwards.pop(model, None)


@contextmanager
def compiled_layers(model: Any, batch: MicroBatch) -> Iterator[None]:
    """Inside, the decoder layers of a model whose compilation was requested run compiled."""
    forwards = prepare_layers(model, batch)
    # With gradient in any case: the graph without one is another one, which rounds differently.
    with _patched(forwards), torch.enable_grad() if forwards else nullcontext():
        yield


def prepare_layers(model: Any, batch: MicroBatch) -> Forwards:
    """The compiled forwards of a model; none if their compilation was not requested or failed.

    The first call runs a trial with this micro-batch, which must not happen while routers are being watched."""
    if batch.own.packing is not None and batch.own.packing.exchange is not None:
        return []  # context parallelism: the compiler does not follow exchanges between ranks
    if model not in _forwards:
        _forwards[model] = []  # until the trial has ended
        if _requested.get(model):
            _forwards[model], obstacle = _try(model, batch)
            if obstacle is not None:
                warnings.warn(f"training runs without compiled layers: {obstacle}", RuntimeWarning, stacklevel=2)
    return _forwards[model]


def _try(model: Any, batch: MicroBatch) -> tuple[Forwards, str | None]:
    """The compiled forwards of a model; none and the reason if they cannot be used."""
    name = type(model).__name__
    try:
        forwards = _compile(model)
        if not forwards:
            return [], f"{name} has no layers of the kind that transformers can checkpoint"
        error = _trial(model, batch, forwards)
    except Exception as problem:  # the compiler may fail in any way
        if out_of_memory(problem):
            _forwards.pop(model)  # tried again with a smaller micro-batch
            raise
        warn_of_kernel_bug(problem, model, "training")
        return [], f"{name} does not compile ({type(problem).__name__}: {problem})".splitlines()[0]
    if not error <= (1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1):  # `not <=`: NaN must fail
        return [], f"{name} gives other results when compiled (off by {error:.2g} of their spread)"
    return forwards, None


def _compile(model: Any) -> Forwards:
    """The forwards of its decoder layers, compiled. The compiler starts with the first call."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    _set_up_compiler()
    embeddings = model.get_input_embeddings()
    first = [(embeddings, _with_gradient(embeddings.forward))] if layers else []
    return first + [(layer, _compiled(layer)) for layer in layers]


def _with_gradient(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Embeddings that require a gradient even if they are frozen, as with LoRA: the first layer would otherwise have a
    graph of its own, which takes as long to compile as that of all others."""

    def embed(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return output if output.requires_grad else output.requires_grad_()

    return embed


def _compiled(layer: Any) -> Callable[..., Any]:
    """The forward of a layer, compiled but for its MoE blocks."""
    plain = without_checkpointing(layer.forward)
    inside: Forwards = [(block, torch.compiler.disable(block.forward)) for block in layer.children() if _routes(block)]
    inside += [(module, partial(experts_forward, module)) for module in layer.modules() if supports_experts(module)]
    compiled = torch.compile(plain, dynamic=True)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _patched(inside):
            return compiled(*args, **kwargs)

    # Recomputation repeats all of it.
    return checkpointed(forward) if is_checkpointed(layer.forward) else forward


@contextmanager
def _patched(forwards: Forwards) -> Iterator[None]:
    with ExitStack() as stack:
        for module, forward in forwards:
            stack.enter_context(patched_forward(module, forward))
        yield


def _routes(block: Any) -> bool:
    return any(MAY_ROUTE.search(type(module).__name__) for module in block.modules())


def _set_up_compiler() -> None:
    import torch._dynamo
    import torch._inductor.config

    global _stopwatch
    _stopwatch = _stopwatch or _Stopwatch()
    # All layers share one function, and its graphs count together: a model with several kinds of layers, with and
    # without gradient, in training and for the reference, must not exceed the limit.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    # Otherwise kernels are chosen by timing, and two processes may round differently.
    torch._inductor.config.deterministic = True
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_cache_dir()))


def _cache_dir() -> Path:
    """Where compiled code is kept for later runs. The default of torch is a folder under /tmp that others could
    create."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gspo" / "torchinductor"


def _trial(model: Any, batch: MicroBatch, forwards: Forwards) -> float:
    """The error of compiled outputs: their root-mean-square difference from plain ones, relative to their spread,
    as the third quartile over tokens. The gradient must be finite too.

    The batch is that of the first training forward: a graph that was compiled for a few tokens would be compiled again
    for thousands."""
    head = lm_head(model)
    trained = next((p for p in model.parameters() if p.requires_grad), None)
    with bypass_head(head) if head is not None else nullcontext():
        with torch.no_grad():
            plain_NH = run_forward(model, batch).flatten(0, -2)[batch.output_N].float()
        with _patched(forwards), torch.enable_grad():
            outputs_NH = run_forward(model, batch).flatten(0, -2)[batch.output_N].float()
            # The mean, because the gradient of a sum would overflow float16.
            if trained is not None and not _finite(torch.autograd.grad(outputs_NH.square().mean(), trained)[0]):
                raise ArithmeticError("the gradient is not finite")
    difference_N = (outputs_NH.detach() - plain_NH).square().mean(-1).sqrt()
    return float((difference_N / plain_NH.std(-1)).quantile(0.75))


def _finite(gradient: torch.Tensor) -> bool:
    return bool(gradient.isfinite().all())


class _Stopwatch:
    """Measures how long the compiler works, in forward and backward passes."""

    def __init__(self) -> None:
        from torch._dynamo.callback import on_compile_end, on_compile_start

        self.seconds = 0.0
        self._since = 0.0
        on_compile_start(self._start)
        on_compile_end(self._end)

    def _start(self, *args: Any) -> None:
        self._since = time.monotonic()

    def _end(self, *args: Any) -> None:
        self.seconds += time.monotonic() - self._since


_stopwatch: _Stopwatch | None = None


def compile_seconds() -> float:
    """Seconds that compiling layers has taken in this process so far."""
    return _stopwatch.seconds if _stopwatch else 0.0
