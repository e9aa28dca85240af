"""One decoding step of a model: the forward pass of one token per row over a paged KV cache.

In: an unmodified transformers causal language model. Out: logits, in float32 where the LM head is a plain matrix.
Invariant: during decoding, attention, norms and gated MLPs of the instance run as the kernels of `kernels.py`. Linear
layers are applied by `projections.py`, which leaves any replaced layer to its own module. `obstacle_to_paging` runs a
trial before the decoder is used.

Attention runs in one of two ways. *Fused*: for the classes in `FUSED`, norms, rotary embedding, KV cache and softmax
are two kernels. *Generic*: in all other families, the attention layer is the model's own code up to the call of the
attention function, which is replaced (`attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear, pad

from gspo.model.kernels.experts import is_gated_experts
from gspo.model.kernels.packed_attention import attention_kinds
from gspo.model.lm_head import bypass_head, lm_head
from gspo.model.micro_batch import padded
from gspo.model.patching import patched_forward
from gspo.model.routing import Routers, report_topk
from gspo.rollout.local import kernels
from gspo.rollout.local.attention import (
    AttentionLayer,
    OwnAttention,
    PositionsOnly,
    UnsupportedAttention,
    attention_layers,
    check_attention,
    constant_rope,
    length_dependent_ropes,
    make_cache,
    replaced_attention,
)
from gspo.rollout.local.blocks import BLOCK_SIZE, blocks_for
from gspo.rollout.local.kernels import kernels_for
from gspo.rollout.local.prefixes import KeptPrefix, Pairs
from gspo.rollout.local.projections import (
    DOWN,
    GATE_UP,
    OUTPUT,
    QKV,
    Group,
    Projections,
    bytes_of_copies,
    is_plain_layer,
)
from gspo.rollout.local.slots import INPUT, LIVE, POSITION, Slots, make_slots
from gspo.rollout.local.states import (
    Prefixes,
    PromptRest,
    RouteRecorder,
    additive_mask,
    forward_options,
    obstacle_in_trial,
    prefill_options,
    rest_of,
    trial_starts,
)

FUSED = (
    "GraniteAttention",
    "GraniteMoeAttention",
    "LlamaAttention",
    "MistralAttention",
    "MixtralAttention",
    "Qwen2Attention",
    "Qwen2MoeAttention",
    "Qwen3Attention",
    "Qwen3MoeAttention",
)
"""Attention classes of transformers that consist of projections, an optional norm per head, rotary embedding in halves
and softmax, possibly over a window. Others run as their own code: layers without rotary embedding or
position-dependent scaling may not show in the few tokens of a trial."""
FEW_TOKENS = 32
"""Tokens per expert, on average, up to which the products of experts are limited by reading the weights."""
MOST_EXPERTS = 1024
"""Experts up to which a router's scores fit into the registers of one program."""
CACHE = tuple[Tensor, Tensor]
"""Keys and values of a layer, [blocks, heads, BLOCK_SIZE, head_dim]."""


class Decoder:
    """The model's forward over `Slots`, and the KV cache that it reads and writes."""

    def __init__(
        self, model: Any, slots: Slots, blocks: int, routers: Routers | None = None, *, copies: bool = True
    ) -> None:
        """`copies`: whether weights may be copied for fused projections (`linear_groups`)."""
        self.model = model
        self.slots = slots
        self.projections = Projections(model, linear_groups(model) if copies else (), slots.count)
        self.layers = {layer.index: layer for layer in attention_layers(model)}
        self.fused = fused_modules(model)
        self.own = OwnAttention(model)
        self.kernels = kernels_for(model.device)
        # A layer that reads the keys and values of another one has no cache of its own.
        self.cache = {i: make_cache(a, blocks, model.device) for i, a in self.layers.items() if a.source == i}
        self.ropes = [(rope, constant_rope(rope)) for rope in length_dependent_ropes(model)]
        self._ahead: tuple[Tensor, Tensor] | None = None
        """The output of the layer before, and its norm."""
        self.recorder = RouteRecorder(routers)
        self.head = lm_head(model)
        self.options = forward_options(model)
        # The kernels do not read the mask. It is passed so that the model does not build one.
        self.mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)

    def prefill(self, prompt_U: Sequence[tuple[int, ...]], block_U: Sequence[Sequence[int]]) -> Tensor | None:
        """Prefill prompts together into their blocks; the experts of each token, [U, T, L, K], if recorded."""
        if not len(prompt_U[0]):
            return None
        ids_UT = padded(prompt_U, self.model.device)
        width = blocks_for(ids_UT.shape[1])
        # Padding goes to block 0, which nobody reads.
        table = [[*blocks, *[0] * (width - len(blocks))] for blocks in block_U]
        table_UW = torch.tensor(table, device=self.model.device)
        column_T = torch.arange(ids_UT.shape[1], device=self.model.device)
        attention = _PrefillAttention(self, table_UW[:, column_T // BLOCK_SIZE], column_T % BLOCK_SIZE)
        options = {**prefill_options(self.model), "use_cache": False}
        with replaced_attention(self.model, attention):
            _, routes_ILK = self.recorder(lambda: self.model(input_ids=ids_UT, **options))
        return None if routes_ILK is None else routes_ILK.unflatten(0, ids_UT.shape)

    def prefill_rest(
        self, prompt_U: Sequence[tuple[int, ...]], block_U: Sequence[Sequence[int]], prefix_U: Prefixes
    ) -> Tensor | None:
        """The same for prompts whose first tokens were computed before; the experts of the others."""
        for blocks, prefix in zip(block_U, prefix_U, strict=True):
            if prefix is not None:
                self._write(blocks, prefix.pairs)
        rest = rest_of(prompt_U, prefix_U, self.model.device)
        if not rest.ids_UT.numel():
            return None
        width = blocks_for(rest.columns)
        table = [[*blocks, *[0] * (width - len(blocks))] for blocks in block_U]
        table_UW = torch.tensor(table, device=self.model.device)
        options = {**prefill_options(self.model), "use_cache": False}
        with replaced_attention(self.model, _RestAttention(self, table_UW, rest)):
            _, routes_ILK = self.recorder(
                lambda: self.model(
                    input_ids=rest.ids_UT, position_ids=rest.position_UT, attention_mask=self.mask, **options
                )
            )
        return None if routes_ILK is None else routes_ILK.unflatten(0, rest.ids_UT.shape)

    def read(self, blocks: Sequence[int], tokens: int) -> Pairs:
        """A copy of the keys and values of the first tokens of a row."""
        block_W = torch.tensor(blocks[: blocks_for(tokens)], dtype=torch.int64, device=self.model.device)

        def copied(store: Tensor) -> Tensor:
            return store[block_W].transpose(0, 1).flatten(1, 2)[:, :tokens].clone()

        return {layer: (copied(keys), copied(values)) for layer, (keys, values) in self.cache.items()}

    def _write(self, blocks: Sequence[int], pairs: Pairs) -> None:
        """Write the keys and values of the first tokens of a row into its blocks."""
        for layer, pair in pairs.items():
            tokens = pair[0].shape[1]
            width = blocks_for(tokens)
            block_W = torch.tensor(blocks[:width], dtype=torch.int64, device=self.model.device)
            for store, new in zip(self.cache[layer], pair, strict=True):
                filled = pad(new, (0, 0, 0, width * BLOCK_SIZE - tokens))
                store[block_W] = filled.unflatten(1, (width, BLOCK_SIZE)).transpose(0, 1).to(store.dtype)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy blocks `source` to blocks `target`."""
        for pair in self.cache.values():
            for store in pair:
                store[target] = store[source]

    def logits(self, rows: int) -> tuple[Tensor, Tensor | None]:
        """Run the input tokens of the first `rows` slots; logits, [R, V], and experts, [R, L, K], if recorded."""
        slots = self.slots.first(rows)
        with self._patched(slots), ExitStack() as stack:
            if self.head is not None:
                stack.enter_context(bypass_head(self.head))
            output, routes_RLK = self.recorder(
                lambda: self.model(
                    input_ids=slots.state[INPUT][:, None],
                    position_ids=slots.state[POSITION][:, None],
                    attention_mask=self.mask,
                    past_key_values=PositionsOnly(),
                    use_cache=True,
                    **self.options,
                )
            )
        # With the LM head bypassed, the model's "logits" are the last hidden states.
        last = output.logits[:, -1]
        return (last.float() if self.head is None else float32_logits(last, self.head.weight)), routes_RLK

    @contextmanager
    def _patched(self, slots: Slots) -> Iterator[None]:
        """Run the model's small operations as kernels, for one forward."""
        # The fused attention applies the norms per head itself.
        fused = self.fused or {}
        head_norms = {id(part) for module in fused.values() for part in _head_norms(module)}
        with ExitStack() as stack:
            for index, module in fused.items():
                stack.enter_context(patched_forward(module, self._attend(module, self.layers[index], slots)))
            if not fused:
                stack.enter_context(replaced_attention(self.model, _DecodeAttention(self, slots)))
            for rope, forward in self.ropes:
                stack.enter_context(patched_forward(rope, forward))
            for layer, norm in self._plain_layers():
                stack.enter_context(patched_forward(layer, self._layer(layer, norm)))
            for module in self.model.modules():
                if _is_norm(module) and id(module) not in head_norms:
                    stack.enter_context(patched_forward(module, self._norm(module)))
                elif _is_gated_mlp(module):
                    stack.enter_context(patched_forward(module, self._gate(module)))
                elif is_gated_experts(module) and grouped_products(self.model):
                    stack.enter_context(patched_forward(module, self._experts(module)))
                elif _is_router(module) and fused_routing(self.model):
                    stack.enter_context(patched_forward(module, self._route(module)))
            # A failed forward may leave one behind.
            stack.callback(setattr, self, "_ahead", None)
            yield

    def _plain_layers(self) -> list[tuple[Any, Any]]:
        """The decoder layers, each with the norm that reads its output; empty if one is of another kind."""
        base = getattr(self.model, "model", None)
        layers, last = list(getattr(base, "layers", ())), getattr(base, "norm", None)
        if not all(map(is_plain_layer, layers)) or not _is_norm(last):
            return []
        norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        return list(zip(layers, [*norms[2::2], last], strict=True)) if all(map(_is_norm, norms)) else []

    def _layer(self, layer: Any, following: Any) -> Callable[..., Tensor]:
        """A decoder layer whose sums and the norms after them are one kernel each."""

        def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
            attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
            total, normed = self._add_norm(hidden_states, attended, layer.post_attention_layernorm)
            total, normed = self._add_norm(total, layer.mlp(normed), following)
            # The next layer, or the norm after the last one, calls the norm with this sum.
            self._ahead = (total, normed)
            return total

        return forward

    def _add_norm(self, x: Tensor, y: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        out = self.projections.input_after(norm, len(x))
        out = None if out is None else out[:, None]
        result: tuple[Tensor, Tensor] = self.kernels.add_rms_norm(x, y, norm.weight, norm.variance_epsilon, out=out)
        return result

    def _attend(self, module: Any, layer: AttentionLayer, slots: Slots) -> Callable[..., Any]:
        normed = _head_norms(module)
        norms = (normed[0].weight, normed[1].weight) if normed else None
        eps = normed[0].variance_epsilon if normed else 0.0
        cache = self.cache[layer.index]

        def forward(
            hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *args: Any, **kwargs: Any
        ) -> Any:
            projected = self.projections(module, QKV, hidden_states)
            rope = (position_embeddings[0].flatten(0, 1), position_embeddings[1].flatten(0, 1))
            query_RHD = self.kernels.rope_and_store(slots, *projected, rope, norms, eps, cache)
            output = layer.attend(self.kernels, slots, query_RHD, cache, None)
            return self.projections(module, OUTPUT, output[:, None])[0][:, None], None

        return forward

    def _norm(self, module: Any) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor) -> Tensor:
            ahead, self._ahead = self._ahead, None
            if ahead is not None and ahead[0] is hidden_states:
                return ahead[1]
            out = self.projections.input_after(module, len(hidden_states))
            out = None if out is None else out[:, None]
            return self.kernels.rms_norm(hidden_states, module.weight, module.variance_epsilon, out=out)  # type: ignore[no-any-return]

        return forward

    def _gate(self, module: Any) -> Callable[..., Tensor]:
        gate_up, down = self.projections.get(module, GATE_UP), self.projections.get(module, DOWN)

        def forward(x: Tensor) -> Tensor:
            rows = x.numel() // x.shape[-1]
            if gate_up is None:
                hidden = self.kernels.silu_mul(module.gate_proj(x), module.up_proj(x))
            else:
                out = None if down is None else down.input(rows)
                hidden = self.kernels.silu_mul_halves(gate_up(x.view(rows, -1)), out=out)
            if down is None:
                return module.down_proj(hidden.view(*x.shape[:-1], -1))  # type: ignore[no-any-return]
            return down(hidden.view(rows, -1)).view(*x.shape[:-1], -1)

        return forward

    def _experts(self, module: Any) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            row_I, place_RK, ends_E = self.kernels.group_by_expert(top_k_index, module.num_experts)
            if streams_experts(hidden_states, len(row_I), module.num_experts):
                from gspo.rollout.local.kernels_experts_triton import expert_mlp

                down = expert_mlp(hidden_states, row_I, ends_E, module.gate_up_proj, module.down_proj)
                return self.kernels.combine_experts(down, place_RK, top_k_weights)  # type: ignore[no-any-return]
            gate_up = grouped_mm(hidden_states[row_I], module.gate_up_proj.transpose(1, 2), offs=ends_E)
            down = grouped_mm(self.kernels.silu_mul_halves(gate_up), module.down_proj.transpose(1, 2), offs=ends_E)
            return self.kernels.combine_experts(down, place_RK, top_k_weights)  # type: ignore[no-any-return]

        return forward

    def _route(self, module: Any) -> Callable[..., Any]:
        from gspo.rollout.local.kernels_experts_triton import choose_experts

        def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits_RE = linear(hidden_states.reshape(-1, module.hidden_dim), module.weight)
            chosen = choose_experts(logits_RE, module.top_k, normalize=module.norm_topk_prob)
            used = report_topk(logits_RE, torch.return_types.topk(chosen))
            return logits_RE, used.values, used.indices

        return forward


class _PagedAttention:
    """The attention function of one forward pass. A layer may read the keys and values of an earlier one."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.stored: dict[int, Tensor] = {}
        """The keys of each layer that has stored its own in this forward."""

    def _layer(self, module: Any, key: Tensor, value: Tensor) -> AttentionLayer:
        """The layer of this call. Stores its keys and values, unless it reads those of another."""
        layer = self.decoder.layers[module.layer_idx]
        if layer.source != layer.index:
            if self.stored.get(layer.source) is not key:
                raise UnsupportedAttention(f"layer {layer.index} does not read the keys of layer {layer.source}")
        else:
            self.stored[layer.index] = key
            self._store(self.decoder.cache[layer.index], key, value)
        return layer

    def _store(self, cache: CACHE, key: Tensor, value: Tensor) -> None:
        raise NotImplementedError


class _PrefillAttention(_PagedAttention):
    """Attention of prompts to themselves by the model's own function. Writes keys and values into KV cache blocks."""

    def __init__(self, decoder: Decoder, block_UT: Tensor, column_T: Tensor) -> None:
        super().__init__(decoder)
        self.block_UT = block_UT
        self.column_T = column_T

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        self._layer(module, key, value)
        return self.decoder.own(module, query, key, value, mask, options)

    def mask(self, *args: Any, **kwargs: Any) -> Tensor | None:
        return self.decoder.own.mask(*args, **kwargs)

    def _store(self, cache: CACHE, key: Tensor, value: Tensor) -> None:
        for blocks, new in zip(cache, (key, value), strict=True):
            # Indices around a slice move to the front: [U, T, heads, size].
            blocks[self.block_UT, :, self.column_T] = new.transpose(1, 2)


class _RestAttention(_PagedAttention):
    """Attention of the last tokens of prompts to all tokens before them, by the model's own function. Their keys and
    values are in KV cache blocks, and new ones are written there first."""

    def __init__(self, decoder: Decoder, table_UW: Tensor, rest: PromptRest) -> None:
        super().__init__(decoder)
        self.table_UW = table_UW
        block_UT = table_UW.gather(1, rest.position_UT // BLOCK_SIZE)
        self.block_UT = block_UT.where(rest.real_UT, 0)  # padding goes to block 0, which nobody reads
        self.column_UT = rest.position_UT % BLOCK_SIZE
        column_C = torch.arange(table_UW.shape[1] * BLOCK_SIZE, device=table_UW.device)
        self.back_UTC = rest.position_UT[..., None] - column_C
        self.masks: dict[int | None, Tensor] = {}
        """By window."""

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        layer = self._layer(module, key, value)
        keys, values = (
            blocks[self.table_UW].transpose(1, 2).flatten(2, 3) for blocks in self.decoder.cache[layer.source]
        )
        if layer.window not in self.masks:
            self.masks[layer.window] = additive_mask(self.back_UTC, layer.window, query.dtype)
        return self.decoder.own(module, query, keys, values, self.masks[layer.window], options)

    def mask(self, *args: Any, **kwargs: Any) -> Tensor | None:
        return self.decoder.mask

    def _store(self, cache: CACHE, key: Tensor, value: Tensor) -> None:
        for blocks, new in zip(cache, (key, value), strict=True):
            blocks[self.block_UT, :, self.column_UT] = new.transpose(1, 2)


class _DecodeAttention(_PagedAttention):
    """Attention of one token per row to the KV cache blocks of the row."""

    def __init__(self, decoder: Decoder, slots: Slots) -> None:
        super().__init__(decoder)
        self.slots = slots

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        layer = self._layer(module, key, value)
        cache = self.decoder.cache[layer.source]
        output = layer.attend(self.decoder.kernels, self.slots, query[:, :, 0], cache, options.get("s_aux"))
        return output.unflatten(-1, (query.shape[1], -1))[:, None]

    def mask(self, *args: Any, **kwargs: Any) -> Tensor | None:
        return self.decoder.mask

    def _store(self, cache: CACHE, key: Tensor, value: Tensor) -> None:
        self.decoder.kernels.store(self.slots, key[:, :, 0], value[:, :, 0], cache)


def float32_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden @ weight.T with float32 results instead of the weight's precision, as the learner computes them."""
    if hidden.dtype == torch.float32 or not hidden.is_cuda:
        return hidden.float() @ weight.float().T
    # The learner's kernel keeps its logits in float32, too. Rounding them to 16 bits here would make the two disagree.
    return torch.mm(hidden, weight.T, out_dtype=torch.float32)


def bytes_per_block(model: Any) -> int:
    """Memory of one KV cache block in all layers together."""
    return sum(layer.bytes_per_block for layer in attention_layers(model))


def linear_groups(model: Any) -> list[Group]:
    """The linear layers that `Projections` may fuse."""
    attention = [(m, names) for m in (fused_modules(model) or {}).values() for names in (QKV, OUTPUT)]
    mlp = [(m, names) for m in model.modules() if _is_gated_mlp(m) for names in (GATE_UP, DOWN)]
    return attention + mlp


def _room_for_copies(model: Any) -> bool:
    """Whether the copies of weights take at most half of the free memory."""
    if model.device.type != "cuda":
        return True
    return bytes_of_copies(linear_groups(model)) <= torch.cuda.mem_get_info(model.device)[0] // 2


# --- Which models the decoder supports ---


def fused_modules(model: Any) -> dict[int, Any] | None:
    """The attention modules by layer, if all of them can run as fused kernels; None if not."""
    modules = {m.layer_idx: m for m in model.modules() if _is_fused(m)}
    layers = attention_layers(model)
    plain = all(a.softcap is None and not a.has_sinks and a.source == a.index for a in layers)
    return modules if plain and modules.keys() == {layer.index for layer in layers} else None


def _is_fused(module: Any) -> bool:
    known = type(module).__name__ in FUSED and type(module).__module__.startswith("transformers.")
    norms = _head_norms(module)
    plain = all(_is_norm(norm) and norm.weight.numel() == module.head_dim for norm in norms)
    return known and plain and len(norms) in (0, 2)


def _head_norms(module: Any) -> list[Any]:
    """The norms of queries and keys, if the attention has them."""
    return [n for n in (getattr(module, "q_norm", None), getattr(module, "k_norm", None)) if n is not None]


def _is_norm(module: Any) -> bool:
    """Whether a module is the RMSNorm of Llama."""
    named = type(module).__name__.endswith("RMSNorm")
    if not named or not hasattr(module, "variance_epsilon") or getattr(module, "weight", None) is None:
        return False
    kind = (type(module), module.weight.dtype)
    if kind not in _norm_kinds:
        _norm_kinds[kind] = _rounds_like_llama(module)
    return _norm_kinds[kind]


_norm_kinds: dict[tuple[type, torch.dtype], bool] = {}


@torch.no_grad()
def _rounds_like_llama(module: Any) -> bool:
    """Whether a norm gives the bits of our kernel for random weights. Some families add 1 to the weight, or round only
    after the multiplication."""
    generator = torch.Generator().manual_seed(0)
    norm = deepcopy(module).cpu()
    norm.weight.copy_(torch.randn(norm.weight.shape, generator=generator))
    x = torch.randn(4, norm.weight.numel(), generator=generator).to(norm.weight.dtype)
    return torch.equal(norm(x), kernels.rms_norm(x, norm.weight, norm.variance_epsilon))


def _is_gated_mlp(module: Any) -> bool:
    parts = ("gate_proj", "up_proj", "down_proj")
    return _has_silu(module) and all(isinstance(getattr(module, part, None), torch.nn.Module) for part in parts)


def _is_router(module: Any) -> bool:
    """Whether a module is Qwen's router: softmax over all experts, top-k, optional normalization."""
    kind = type(module)
    known = kind.__name__ in ("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter")
    return known and kind.__module__.startswith("transformers.") and module.num_experts <= MOST_EXPERTS


def grouped_products(model: Any) -> bool:
    """Whether the matrix products of all experts can be one launch. `grouped_mm` supports bfloat16 only, the Triton
    kernel 16 bits on a GPU."""
    return bool(model.dtype == torch.bfloat16 or (model.dtype == torch.float16 and model.device.type == "cuda"))


def streams_experts(x: Tensor, choices: int, experts: int) -> bool:
    """Whether the Triton kernel for few tokens per expert is used. With more tokens, `grouped_mm` is faster."""
    return x.is_cuda and (x.dtype == torch.float16 or choices <= FEW_TOKENS * experts)


def fused_routing(model: Any) -> bool:
    """Whether routers run as one kernel after their product."""
    return bool(model.device.type == "cuda" and model.dtype != torch.float64)


def _has_silu(module: Any) -> bool:
    return type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")


def obstacle_to_paging(model: Any) -> str | None:
    """Why `Decoder` cannot be used for this model; None if it can. Checks declared properties first, then its attention
    layers, then runs a trial."""
    if attention_kinds(model.config) is None:
        return f"{type(model).__name__} has layers other than full and sliding-window attention"
    if model.device.type == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            return "Triton is not installed"

    def open_trial(prompts: list[tuple[int, ...]], steps: int) -> Callable[[Tensor, Tensor], Tensor]:
        check_attention(model)
        return _open_trial(model, prompts, steps)

    return obstacle_in_trial(model, open_trial)


def obstacle_to_keeping(model: Any) -> str | None:
    """Why a model that `obstacle_to_paging` accepts cannot continue from keys and values of an earlier call; None if it
    can."""
    return obstacle_in_trial(model, lambda prompts, steps: _open_trial(model, prompts, steps, continued=True))


def _open_trial(
    model: Any, prompts: list[tuple[int, ...]], steps: int, *, continued: bool = False
) -> Callable[[Tensor, Tensor], Tensor]:
    """Prefill these prompts; the function that decodes one more token of each. `continued`: the first tokens of the
    prompts were computed by an earlier call."""
    rows = len(prompts)
    width = blocks_for(max(map(len, prompts)) + steps)
    slots = make_slots(rows, width, steps, model.device, None)
    decoder = Decoder(model, slots, 1 + rows * width, copies=_room_for_copies(model))
    blocks = [list(range(1 + r * width, 1 + (r + 1) * width)) for r in range(rows)]
    if continued:
        starts = trial_starts(prompts)
        decoder.prefill(starts, blocks)
        kept = [
            KeptPrefix(token_ids=ids, pairs=decoder.read(own, len(ids)))
            for own, ids in zip(blocks, starts, strict=True)
        ]
        for store in (store for pair in decoder.cache.values() for store in pair):
            store.zero_()
        decoder.prefill_rest(prompts, blocks, [prefix if prefix.token_ids else None for prefix in kept])
    else:
        decoder.prefill(prompts, blocks)
    slots.table_SW.copy_(torch.tensor(blocks, dtype=torch.int32))
    slots.state[LIVE] = 1

    def step(token_R: Tensor, position_R: Tensor) -> Tensor:
        slots.state[INPUT] = token_R
        slots.state[POSITION] = position_R
        return decoder.logits(rows)[0]

    return step
