"""A model that reads one token of every row, with its keys and values in pages.

In: a transformers causal language model, unmodified. Out: logits, in float32 where the head is a plain matrix. Invariant:
while it decodes, attention, norms and gated layers of the instance run as the kernels of `kernels.py`; every weight is
applied by the model's own modules, so adapters and other replaced layers take part. `obstacle_to_pages` tries before it is
used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm
from transformers.cache_utils import Cache

from gspo.model.attention import attention_kinds
from gspo.model.lm_head import bypass_head, lm_head
from gspo.model.patching import patched_forward
from gspo.model.routing import Routers
from gspo.rollout.local.blocks import PAGE, pages_for
from gspo.rollout.local.kernels import kernels_for
from gspo.rollout.local.slots import INPUT, LIVE, POSITION, Slots, make_slots
from gspo.rollout.local.states import RouteRecorder, difference_in_trial, forward_options, padded, prefill_options

KNOWN = (
    "LlamaAttention",
    "MistralAttention",
    "Qwen2Attention",
    "Qwen2MoeAttention",
    "Qwen3Attention",
    "Qwen3MoeAttention",
)
"""Attention of transformers that is projections, maybe a norm per head, rotary embedding in halves, and softmax. What others do
besides (caps, sinks, layers without rotary embedding, scaling by position) need not show in the few tokens of a trial."""
CACHE = tuple[Tensor, Tensor]
"""Keys and values of a layer, [pages, heads, PAGE, size]."""


class Decoder:
    """The model's forward over `Slots`, and the pages that it reads and writes."""

    def __init__(self, model: Any, slots: Slots, pages: int, routers: Routers | None = None) -> None:
        self.model, self.slots = model, slots
        self.attention = attention_modules(model)
        assert self.attention is not None
        self.kernels = kernels_for(model.device)
        self.cache = [_cache(module, pages, model) for module in self.attention]
        self.noted = RouteRecorder(routers)
        self.head = lm_head(model)
        self.options = {**forward_options(model), "use_cache": False}
        # Nobody reads it, but a mask that is there already is not made again.
        self.mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)

    def prefill(self, prompt_U: Sequence[tuple[int, ...]], page_U: Sequence[Sequence[int]]) -> Tensor | None:
        """Read prompts, all together, into their pages. Gives the experts of each token, [U, T, L, K], if noted."""
        if not len(prompt_U[0]):
            return None
        ids_UT = padded(list(prompt_U), self.model.device)
        width = pages_for(ids_UT.shape[1])
        table_UW = torch.tensor([[*pages, *[0] * (width - len(pages))] for pages in page_U], device=self.model.device)
        column_T = torch.arange(ids_UT.shape[1], device=self.model.device)
        written = _Written(self.cache, table_UW[:, column_T // PAGE], column_T % PAGE)
        _, routes_ILK = self.noted(
            lambda: self.model(
                input_ids=ids_UT, **{**prefill_options(self.model), "past_key_values": written, "use_cache": True}
            )
        )
        return None if routes_ILK is None else routes_ILK.unflatten(0, ids_UT.shape)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Pages `target` become copies of pages `source`."""
        for pair in self.cache:
            for store in pair:
                store[target] = store[source]

    def logits(self, rows: int) -> tuple[Tensor, Tensor | None]:
        """Read the input of the first `rows` slots; logits after it, [R, V], and its experts, [R, L, K], if noted."""
        slots = self.slots.first(rows)
        with self._replaced(slots), ExitStack() as stack:
            if self.head is not None:
                stack.enter_context(bypass_head(self.head))
            output, routes_RLK = self.noted(
                lambda: self.model(
                    input_ids=slots.state[INPUT][:, None],
                    position_ids=slots.state[POSITION][:, None],
                    attention_mask=self.mask,
                    **self.options,
                )
            )
        made = output.logits[:, -1]
        return (made.float() if self.head is None else float32_logits(made, self.head.weight)), routes_RLK

    @contextmanager
    def _replaced(self, slots: Slots) -> Iterator[None]:
        """The model's own small operations as kernels, for one forward."""
        assert self.attention is not None
        inside = (
            {id(part) for module in self.attention for part in (module.q_norm, module.k_norm) if part}
            if self._normed
            else set()
        )
        with ExitStack() as stack:
            for module, cache in zip(self.attention, self.cache, strict=True):
                stack.enter_context(patched_forward(module, self._attend(module, cache, slots)))
            for module in self.model.modules():
                if _is_norm(module) and id(module) not in inside:
                    stack.enter_context(patched_forward(module, self._norm(module)))
                elif _is_gated(module):
                    stack.enter_context(patched_forward(module, self._gate(module)))
                elif _is_experts(module) and grouped_products(self.model):
                    stack.enter_context(patched_forward(module, self._experts(module)))
            yield

    @property
    def _normed(self) -> bool:
        assert self.attention is not None
        return hasattr(self.attention[0], "q_norm")

    def _attend(self, module: Any, cache: CACHE, slots: Slots) -> Callable[..., Any]:
        normed = (module.q_norm.weight, module.k_norm.weight) if self._normed else None
        eps = module.q_norm.variance_epsilon if self._normed else 0.0

        def forward(
            hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *args: Any, **kwargs: Any
        ) -> Any:
            made = (part(hidden_states).flatten(0, 1) for part in (module.q_proj, module.k_proj, module.v_proj))
            turn = (position_embeddings[0].flatten(0, 1), position_embeddings[1].flatten(0, 1))
            query_RHD = self.kernels.stored(slots, *made, turn, normed, eps, cache)
            answer = self.kernels.attended(slots, query_RHD, cache, module.scaling)
            return module.o_proj(answer[:, None]), None

        return forward

    def _norm(self, module: Any) -> Callable[..., Tensor]:
        return lambda hidden_states: self.kernels.normed(hidden_states, module.weight, module.variance_epsilon)

    def _gate(self, module: Any) -> Callable[..., Tensor]:
        return lambda x: module.down_proj(self.kernels.gated(module.gate_proj(x), module.up_proj(x)))

    def _experts(self, module: Any) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            row_I, place_RK, ends_E = self.kernels.arranged(top_k_index, module.num_experts)
            opened = grouped_mm(hidden_states[row_I], module.gate_up_proj.transpose(1, 2), offs=ends_E)
            closed = grouped_mm(self.kernels.halves_gated(opened), module.down_proj.transpose(1, 2), offs=ends_E)
            return self.kernels.summed(closed, place_RK, top_k_weights)  # type: ignore[no-any-return]

        return forward


class _Written(Cache):
    """Takes the keys and values of prompts as the model makes them, and puts them into pages."""

    def __init__(self, cache: Sequence[CACHE], page_UT: Tensor, column_T: Tensor) -> None:
        super().__init__(layers=[])
        self.cache, self.page_UT, self.column_T = cache, page_UT, column_T

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        for store, new in zip(self.cache[layer_idx], (key_states, value_states), strict=True):
            store[self.page_UT, :, self.column_T] = new.transpose(1, 2)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1


def float32_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden weight^T without rounding the sums to the weight's precision, as the learner has them."""
    if hidden.dtype == torch.float32 or not hidden.is_cuda:
        return hidden.float() @ weight.float().T
    return torch.mm(hidden, weight.T, out_dtype=torch.float32)


def _cache(module: Any, pages: int, model: Any) -> CACHE:
    heads, size = kv_heads(module), module.head_dim
    # Zeros: a page is read whole, and what was never written must not be NaN.
    keys, values = (torch.zeros(pages, heads, PAGE, size, dtype=model.dtype, device=model.device) for _ in range(2))
    return keys, values


def kv_heads(module: Any) -> int:
    """Heads of keys and values of an attention layer."""
    heads: int = module.k_proj.out_features // module.head_dim
    return heads


def bytes_per_page(model: Any) -> int:
    """What one page takes in all layers together."""
    modules = attention_modules(model) or []
    return sum(2 * kv_heads(m) * m.head_dim * PAGE * model.dtype.itemsize for m in modules)


# --- Which models this is right for ---


def attention_modules(model: Any) -> list[Any] | None:
    """The attention layers, if all are of a known kind."""
    found = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
    if not found or not all(
        type(m).__name__ in KNOWN and type(m).__module__.startswith("transformers.") for m in found
    ):
        return None
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if [m.layer_idx for m in found] != list(range(layers)):
        return None
    norms = {hasattr(m, "q_norm") and m.q_norm is not None for m in found}
    plain = [
        _is_norm(n) and n.weight.numel() == m.head_dim for m in found if True in norms for n in (m.q_norm, m.k_norm)
    ]
    return found if len(norms) == 1 and all(plain) else None


def _is_norm(module: Any) -> bool:
    return (
        type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon") and hasattr(module, "weight")
    )


def _is_gated(module: Any) -> bool:
    parts = ("gate_proj", "up_proj", "down_proj")
    return _has_silu(module) and all(isinstance(getattr(module, part, None), torch.nn.Module) for part in parts)


def _is_experts(module: Any) -> bool:
    """Experts whose weights stand in two blocks, as Qwen's; without biases and clamps."""
    parts = [getattr(module, part, None) for part in ("gate_up_proj", "down_proj")]
    plain = not any(getattr(module, extra, False) for extra in ("has_bias", "is_transposed", "limit"))
    return _has_silu(module) and plain and all(isinstance(part, Tensor) and part.dim() == 3 for part in parts)


def grouped_products(model: Any) -> bool:
    """Whether one product per expert can be one launch: that is there for bfloat16 alone."""
    return bool(model.dtype == torch.bfloat16)


def _has_silu(module: Any) -> bool:
    return type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")


def obstacle_to_pages(model: Any) -> str | None:
    """Why `Decoder` would be wrong for this model, or None. Declared properties first, then a trial."""
    name = type(model).__name__
    kinds = attention_kinds(model.config)
    if kinds is None or any(window is not None for window in kinds.values()):
        return f"{name} has layers other than full attention"
    if attention_modules(model) is None:
        return f"the attention layers of {name} are not of the kind that Llama and Qwen have"
    if model.device.type == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            return "Triton is not installed"
    return difference_in_trial(model, lambda prompts, steps: _opened(model, prompts, steps))


def _opened(model: Any, prompts: list[tuple[int, ...]], steps: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Pages that hold these prompts, and the step that reads one more token of each."""
    rows, width = len(prompts), pages_for(max(map(len, prompts)) + steps)
    slots = make_slots(rows, width, steps, model.device, None)
    decoder = Decoder(model, slots, 1 + rows * width)
    pages = [list(range(1 + r * width, 1 + (r + 1) * width)) for r in range(rows)]
    decoder.prefill(prompts, pages)
    slots.table_SW.copy_(torch.tensor(pages, dtype=torch.int32))
    slots.state[LIVE] = 1

    def step(token_R: Tensor, position_R: Tensor) -> Tensor:
        slots.state[INPUT], slots.state[POSITION] = token_R, position_R
        return decoder.logits(rows)[0]

    return step
