"""The routers of a mixture-of-experts (MoE) model: record their choices in a forward, or force them.

In: any unmodified Hugging Face model. Out: the experts of every token and MoE layer, as the model itself chose them.
Invariant: only the choice is ever replaced. A router selects experts by a top-k over the scores of all experts. While
it is watched, this one call is recorded. Under replay it returns the given experts with *their current scores*, so
gate weights, normalization and gradient come from the model's own code on the current router logits:

    g_i = I_i exp(s_i) / sum_j I_j exp(s_j),   I the replayed choice, s the logits of this forward.

Shape suffixes, in addition to those of `types.py`: `I` input tokens of a forward or of a plan (prompt and completion;
no padding in a plan), `L` MoE layers (dense layers are not counted), `K` experts per token, `E` experts.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from gspo.clock import Clock
from gspo.errors import ConfigError
from gspo.model.patching import patched_forward
from gspo.types import Routes

# A wide net: a class too many costs one more module to watch, a class too few would hide a router.
MAY_ROUTE = re.compile(r"(Router|Gate|Gating|MoE|Moe|MoeBlock|MoEBlock|MoeMLP|FeedForward)$")
"""Names of classes that may contain a router. Which of them do is found by running the model."""

RANKS = ("DogeCDMoE",)
"""Classes whose top-k returns positions in a sorted list, not experts."""


@dataclass(frozen=True, kw_only=True)
class ForcedExperts:
    """Experts to use instead of the routers' own choice."""

    chosen_ILK: Tensor
    """For every token of the forward, including padding."""
    known_I: Tensor
    """Where `chosen_ILK` is valid. The model routes the other tokens itself."""


@dataclass(kw_only=True)
class RouterTrace:
    """The choices of the routers in one forward. A recomputation in the backward pass is not recorded again."""

    compact: torch.dtype
    used: dict[int, Tensor] = field(default_factory=dict)
    native: dict[int, Tensor] = field(default_factory=dict)
    logits: dict[int, Tensor] = field(default_factory=dict)
    gates: dict[int, Tensor] = field(default_factory=dict)
    """Gate weights of the experts used, if the router returns them."""

    @property
    def used_ILK(self) -> Tensor:
        """The experts that were used, in the order of the model's layers."""
        return self._stack(self.used)

    @property
    def native_ILK(self) -> Tensor:
        """The experts that the routers chose themselves."""
        return self._stack(self.native)

    def _stack(self, chosen: dict[int, Tensor]) -> Tensor:
        return torch.stack([chosen[layer] for layer in sorted(chosen)], dim=1).to(self.compact)


class Routers:
    """The routers of one model, by MoE layer."""

    def __init__(self, modules: Sequence[Any], *, experts: int, top_k: int) -> None:
        self.modules = tuple(modules)
        self.experts = experts
        self.top_k = top_k
        self._watched = False
        self._logits_at: int | None = None

    @property
    def layers(self) -> int:
        return len(self.modules)

    @property
    def compact(self) -> torch.dtype:
        """The dtype of stored choices: one byte if that is enough, else two."""
        return torch.uint8 if self.experts <= 256 else torch.int16

    @contextmanager
    def watch(
        self,
        forced: ForcedExperts | None = None,
        *,
        logits: bool = False,
        gates: bool = False,
        clock: Clock | None = None,
    ) -> Iterator[RouterTrace]:
        """Record the choices of the one forward inside, or force them. The clock measures that as `routing`.

        With gradient checkpointing the backward pass must be inside too, because it runs the routers again. `logits`
        keeps the router logits with their graph, `gates` the gate weights of the experts."""
        # A nested watch would record into two traces and force experts twice.
        assert not self._watched, "the routers are already being watched"
        trace = RouterTrace(compact=self.compact)
        with ExitStack() as stack:
            self._watched = True
            stack.callback(setattr, self, "_watched", False)
            for layer, module in enumerate(self.modules):
                stack.enter_context(
                    patched_forward(
                        module, self._wrap(layer, module.forward, trace, forced, logits, gates, clock or Clock())
                    )
                )
            yield trace
        missing = self.layers - len(trace.used)
        assert not missing, f"{missing} of {self.layers} routers were not called in the forward"

    def _wrap(
        self,
        layer: int,
        forward: Callable[..., Any],
        trace: RouterTrace,
        forced: ForcedExperts | None,
        logits: bool,
        gates: bool,
        clock: Clock,
    ) -> Callable[..., Any]:
        def choose(score_IE: Tensor, native: Any) -> Any:
            with clock.measure("routing"):
                return chosen(score_IE, native)

        def chosen(score_IE: Tensor, native: Any) -> Any:
            # Not the choice of experts: some routers also select groups of experts by top-k.
            if tuple(score_IE.shape[1:]) != (self.experts,) or native.indices.shape[1] != self.top_k:
                return native
            used = native if forced is None else _force(score_IE, native, forced, layer)
            # setdefault: with gradient checkpointing the backward pass calls the router again, and the first call
            # counts.
            trace.native.setdefault(layer, native.indices.detach())
            trace.used.setdefault(layer, used.indices.detach())
            return used

        def routed(*args: Any, **kwargs: Any) -> Any:
            with _TopK(choose):
                output = forward(*args, **kwargs)
            if logits:
                trace.logits.setdefault(layer, self._logits(output))
            if gates and (weights := _float_outputs(output, self.top_k)):
                trace.gates.setdefault(layer, weights[0].detach())
            return output

        return routed

    def _logits(self, output: Any) -> Tensor:
        """The router logits among the outputs of a router. Their index is determined once, at the first forward: scores
        that are 0 for unselected experts are not logits, but later a logit may be 0 by chance."""
        found = _float_outputs(output, self.experts)
        if self._logits_at is None:
            self._logits_at = next((i for i, t in enumerate(found) if not bool((t == 0).any())), None)
        if self._logits_at is None:
            raise ConfigError("routing.balance_loss: this model's routers do not return their logits; remove it")
        return found[self._logits_at].reshape(-1, self.experts)

    def unpack(self, routes: Routes) -> Tensor:
        """The routes that an engine reported, as [tokens, L, K]."""
        # A bytearray, because torch warns about memory that it may not write to.
        flat = torch.frombuffer(bytearray(routes.experts), dtype=torch.uint8 if routes.width == 1 else torch.int16)
        return flat.view(-1, routes.layers, routes.top_k).to(self.compact)

    def pack(self, chosen_ILK: Tensor) -> Routes:
        """The inverse of `unpack`: routes without torch."""
        assert chosen_ILK.dtype == self.compact
        return Routes(
            experts=chosen_ILK.cpu().contiguous().numpy().tobytes(),
            layers=self.layers,
            top_k=self.top_k,
            width=self.compact.itemsize,
        )


def _float_outputs(output: Any, width: int) -> list[Tensor]:
    """The floating-point matrices of this width among the outputs of a router."""
    parts = output if isinstance(output, tuple) else (output,)
    return [
        t for t in parts if isinstance(t, Tensor) and t.is_floating_point() and t.dim() > 1 and t.shape[-1] == width
    ]


def count_expert_changes(a_NLK: Tensor, b_NLK: Tensor) -> Tensor:
    """The number of choices of each token that are in `a` but not in `b`, over all layers, in any order."""
    shared = (a_NLK.unsqueeze(-1) == b_NLK.unsqueeze(-2)).any(-1)
    return (~shared).sum((-1, -2))


def _force(score_IE: Tensor, native: Any, forced: ForcedExperts, layer: int) -> Any:
    assert len(score_IE) == len(forced.known_I), f"{len(score_IE)} tokens, but experts for {len(forced.known_I)}"
    # Padding has no recorded experts. It keeps the model's own choice, whose result nobody reads.
    chosen_IK = torch.where(forced.known_I.unsqueeze(-1), forced.chosen_ILK[:, layer].long(), native.indices)
    # The same type as torch.topk returns: models read it as a tuple or by its fields.
    return torch.return_types.topk((score_IE.gather(-1, chosen_IK), chosen_IK))


class _TopK(TorchFunctionMode):
    """Passes every top-k over a matrix, and its result, to `choose` and returns what that returns instead."""

    def __init__(self, choose: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.choose = choose

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk, report_topk):
            return result
        score = args[0] if args else kwargs["input"]
        return self.choose(score, result) if score.dim() == 2 else result


def report_topk(score_IE: Tensor, native: Any) -> Any:
    """Report the top-k that a kernel has computed, so that `Routers.watch` records it like a call of `torch.topk`."""
    if has_torch_function((score_IE,)):
        return handle_torch_function(report_topk, (score_IE,), score_IE, native)
    return native


# --- Finding routers ---


def find_routers(model: Any) -> Routers | None:
    """The routers of a model, found by watching a forward of a few tokens; None if there are none."""
    candidates = _candidates(model)
    if not candidates:
        return None
    shapes: dict[int, tuple[int, int]] = {}

    def record(index: int) -> Callable[[Tensor, Any], Any]:
        def choose(score: Tensor, native: Any) -> Any:
            # The last top-k counts: some models select groups of experts first.
            shapes[index] = (score.shape[1], native.indices.shape[1])
            return native

        return choose

    with ExitStack() as stack:
        for index, module in enumerate(candidates):
            stack.enter_context(patched_forward(module, _with_mode(_TopK(record(index)), module.forward)))
        _run(model)
    if not shapes:
        return None
    found = [candidates[i] for i in sorted(shapes)]
    # A block that contains its router also sees the router's top-k: keep the innermost module.
    found = [m for m in found if not any(child is not m and child in found for child in m.modules())]
    kinds = {shapes[candidates.index(m)] for m in found}
    if len(kinds) > 1:
        warnings.warn(
            f"the layers of {type(model).__name__} differ in how many experts they have or select ({sorted(kinds)}): "
            "their routing cannot be recorded",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    experts, top_k = kinds.pop()
    return Routers(found, experts=experts, top_k=top_k)


def _with_mode(mode: TorchFunctionMode, forward: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    return watched


def _candidates(model: Any) -> list[Any]:
    # transformers declares here which class returns router logits.
    recorded = getattr(model, "_can_record_outputs", None) or {}
    named = getattr(recorded.get("router_logits"), "target_class", None)
    return [
        m
        for m in model.modules()
        if type(m).__name__ not in RANKS
        and (MAY_ROUTE.search(type(m).__name__) or (isinstance(named, type) and isinstance(m, named)))
    ]


def says_it_routes(model: Any) -> bool:
    """Whether the model's config declares several experts."""
    config = model.config.get_text_config(decoder=True)
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(config, name, None) or 0) > 1 for name in names)


def check_replay(model: Any, routers: Routers) -> None:
    """Check that replay takes effect: replaying a forward's own choices changes nothing (except for rounding on a GPU),
    and other choices are used, have an effect and get a nonzero gate weight."""
    plain = _run(model)
    with routers.watch() as trace:
        _run(model)
    own_ILK = trace.used_ILK
    # Relative to the spread of the logits: replay may only change their rounding.
    if not torch.allclose(_replay(model, routers, own_ILK)[0], plain, atol=1e-2 * float(plain.std()), rtol=0):
        raise ConfigError(_replay_error(model, "replaying a forward's own experts changes it"))
    # Near and far experts, because some routers select within groups of experts.
    for shift in {1, routers.experts // 2} if routers.experts > routers.top_k else ():
        other_ILK = ((own_ILK.long() + shift) % routers.experts).to(own_ILK.dtype)
        logits, forced = _replay(model, routers, other_ILK)
        if not torch.equal(forced.used_ILK, other_ILK) or torch.equal(logits, plain):
            raise ConfigError(_replay_error(model, "other experts change nothing"))
        if any(bool((gate == 0).any()) for gate in forced.gates.values()):
            raise ConfigError(_replay_error(model, "its routers give no weight to experts that they did not select"))


def check_balance(model: Any, routers: Routers) -> None:
    """Check that the routers return their logits, which the balance loss needs."""
    with routers.watch(logits=True):
        _run(model)


def _replay(model: Any, routers: Routers, chosen_ILK: Tensor) -> tuple[Tensor, RouterTrace]:
    known_I = torch.ones(len(chosen_ILK), dtype=torch.bool, device=chosen_ILK.device)
    with routers.watch(ForcedExperts(chosen_ILK=chosen_ILK, known_I=known_I), gates=True) as trace:
        return _run(model), trace


def _replay_error(model: Any, why: str) -> str:
    return (
        f"routing.replay: replaying experts has no exact effect in {type(model).__name__}: {why}; set "
        'routing.replay = "off"'
    )


@torch.no_grad()
def _run(model: Any) -> Tensor:
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.arange(1, 9, device=model.device).view(2, 4) % vocabulary
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits
