"""Context parallelism (Ulysses): the ranks of a group compute different tokens of the same micro-batch.

In: a micro-batch that all ranks of a `ContextGroup` have. Out: the part of it that this rank computes, and the
attention between the parts. Invariant: only attention looks at other tokens, and around it the ranks exchange tokens
for heads by all-to-all. So each rank attends with some of the heads over whole sequences, by the same kernels as
without context parallelism, and computes everything else for some of the tokens.

Rank r of C has the tokens r, r + C, r + 2C, ... Prompt and completions are divided evenly, and with them the work of
the LM head, which only computes sampled tokens. The row is filled up to a multiple of C. The tokens that fill it up do
not take part in attention.

Padded micro-batches become one packed row, in which every sequence has its own copy of the prompt and its padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gspo.errors import ConfigError, RankError
from gspo.model.attention_blocks import attention_blocks
from gspo.model.micro_batch import ExcludedTokens, MicroBatch, Packing, micro_batch
from gspo.model.packed_forward import obstacle_to_packing, run_forward, supports_packing, trial_sequences
from gspo.ranks.context import ContextGroup

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attention over a packed row: query, key and value [1, heads, I, size] and sinks in, [1, I, heads, size] out."""


@dataclass(frozen=True, kw_only=True)
class HeadExchange:
    """Attention over a packed row of which each rank of a group has some of the tokens."""

    context: ContextGroup
    tokens: int
    """Tokens of the row, without those that fill it up."""

    def __call__(self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> Tensor:
        """[1, heads, S, size] of the S tokens of this rank in, [1, S, heads, size] out."""
        size = self.context.size
        # A rank needs at least one key-value head, and all query heads that share it.
        copies = size // math.gcd(size, key.shape[1])
        if copies > 1:
            key, value = (t.repeat_interleave(copies, dim=1) for t in (key, value))
        # By receiver: the heads of each rank. One exchange for all three, because each has a latency.
        parts = [t[0].unflatten(0, (size, -1)).transpose(1, 2) for t in (query, key, value)]
        received = self.context.exchange(torch.cat([part.flatten(2) for part in parts], dim=-1))
        # By sender, and the sender with the first token comes first.
        row = received.transpose(0, 1).flatten(0, 1)[: self.tokens]
        whole = row.split([part.shape[2] * part.shape[3] for part in parts], dim=-1)
        heads = [t.unflatten(1, p.shape[2:]).transpose(0, 1).unsqueeze(0) for t, p in zip(whole, parts, strict=True)]
        own_sink = None if sink is None else sink.unflatten(0, (size, -1))[self.context.rank]
        output = attend(heads[0], heads[1], heads[2], own_sink)[0]
        filled = torch.nn.functional.pad(output.flatten(1), (0, 0, 0, query.shape[2] * size - self.tokens))
        back = self.context.exchange(filled.unflatten(0, (-1, size)).transpose(0, 1))
        return back.transpose(0, 1).unflatten(-1, output.shape[1:]).flatten(1, 2).unsqueeze(0)


def with_part(micro: MicroBatch, context: ContextGroup) -> MicroBatch:
    """The micro-batch with the part of it that this rank computes."""
    tokens = micro.input_ids.numel()
    packing = _as_packing(*micro.input_ids.shape) if micro.packing is None else micro.packing
    position_ids = micro.position_ids
    if position_ids is None:
        position_ids = torch.arange(micro.input_ids.shape[1]).expand(micro.input_ids.shape)
    own_N = own_tokens(micro, context)
    part = replace(
        micro,
        input_ids=_own(micro.input_ids, context, fill=0),
        position_ids=_own(position_ids, context, fill=0),
        input_at=_own(micro.input_at, context, fill=-1),
        times=_own(micro.times, context, fill=0),
        sequence_N=micro.sequence_N[own_N],
        output_N=micro.output_N[own_N] // context.size,
        target_N=micro.target_N[own_N],
        at_N=micro.at_N[own_N],
        packing=replace(packing, exchange=HeadExchange(context=context, tokens=tokens)),
        excluded=_own_excluded(micro.excluded, own_N),
    )
    return replace(micro, part=part)


def own_tokens(micro: MicroBatch, context: ContextGroup) -> Tensor:
    """Which of the sampled tokens of a micro-batch this rank computes."""
    return (micro.output_N % context.size == context.rank).nonzero().squeeze(-1)


def _own(values: Tensor, context: ContextGroup, fill: int) -> Tensor:
    """[1, S]: every C-th of the values of a row or of several, filled up to a multiple of C."""
    missing = -values.numel() % context.size
    filled = torch.nn.functional.pad(values.flatten(), (0, missing), value=fill)
    return filled[context.rank :: context.size].unsqueeze(0)


def _as_packing(rows: int, width: int) -> Packing:
    """Padded rows, one after the other."""
    place_I = torch.arange(rows * width)
    return Packing(rows_RT=place_I.view(rows, width), place_I=place_I, blocks=attention_blocks([(width, [])] * rows))


def _own_excluded(excluded: ExcludedTokens | None, own_N: Tensor) -> ExcludedTokens | None:
    if excluded is None:
        return None
    rows = torch.isin(own_N, excluded.rows).nonzero().squeeze(-1)
    return replace(excluded, rows=rows) if len(rows) else None


def gather_logprobs(
    micro: MicroBatch, context: ContextGroup, logp_N: Tensor, entropy_N: Tensor
) -> tuple[Tensor, Tensor]:
    """The log-probs and entropies of all tokens of a micro-batch, from those that each rank of the group has computed.

    An objective may need whole sequences, so all ranks of the group compute the loss of the whole micro-batch. Each
    gets the gradient of its own tokens."""
    own_N, count = own_tokens(micro, context), len(micro.at_N)
    return context.gather(logp_N, own_N, count), context.gather(entropy_N, own_N, count)


# ---- which models support it


def check_context_parallel(model: Any, context: ContextGroup) -> None:
    """Refuse a model whose tokens cannot be divided, by a trial against a forward of all tokens. Every rank of the
    group must call this, with whole weights."""
    obstacle = _obstacle(model, context)
    if obstacle is not None:
        raise ConfigError(f"learner.context_parallel: {obstacle}; set it to 1")


def _obstacle(model: Any, context: ContextGroup) -> str | None:
    name = type(model).__name__
    obstacle = None if supports_packing(model) else obstacle_to_packing(model)
    if obstacle is not None:
        return f"it replaces the attention of the model, and {obstacle}"
    heads = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", 0)
    if heads % context.size:
        return f"the {heads} attention heads of {name} cannot be divided among {context.size} ranks"
    try:
        error = _trial(model, context)
    except RankError:
        raise
    except Exception as problem:  # for example layers with other numbers of heads; on all ranks, at the same point
        return f"the tokens of {name} cannot be divided ({type(problem).__name__}: {problem})".splitlines()[0]
    if not error <= (1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1):  # `not <=`: NaN must fail
        return f"{name} gives other logits if its tokens are divided among ranks (off by {error:.2g} of their spread)"
    return None


@torch.no_grad()
def _trial(model: Any, context: ContextGroup) -> float:
    """The root-mean-square difference of logits, relative to their spread, as the third quartile over tokens."""
    rows = trial_sequences(model)
    micro = with_part(micro_batch(rows, range(len(rows)), 0, packed=True), context).to(model.device)
    expected_NV = run_forward(model, micro).flatten(0, 1)[micro.output_N].float()
    own_NV = run_forward(model, micro.own).flatten(0, 1)[micro.own.output_N].float()
    own_N = own_tokens(micro, context)
    error_N = (own_NV - expected_NV[own_N]).square().mean(-1).sqrt() / expected_NV[own_N].std(-1)
    # All ranks must come to the same conclusion.
    return float(context.gather(error_N, own_N, len(micro.at_N)).quantile(0.75))
