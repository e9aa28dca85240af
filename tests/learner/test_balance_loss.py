"""The load-balancing loss and the load of the experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import blocks_of, router_of
from replay_cases import (
    MOE,
    REPLAYS,
    GradientRecorder,
    rows_learned,
    stepped,
    unpacked,
    with_altered_routes,
)
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo.config import Config
from gspo.model.micro_batch import TokenSequence
from gspo.model.routing import ForcedExperts, find_routers


def balance_by_hand(
    model: Any, rows: Sequence[TokenSequence], chosen: Sequence[Tensor | None], coefficient: float
) -> Tensor:
    """coefficient x E sum_e f_e P_e, mean over layers, over all tokens of the rows; each row by itself.

    `chosen`: experts to compute with. f is what the routers would have chosen, P the mean of their probabilities."""
    routers = find_routers(model)
    assert routers is not None
    logits: list[list[Tensor]] = [[] for _ in range(routers.layers)]
    blocks = blocks_of(model)
    handles = [
        router_of(b).register_forward_hook(lambda m, i, o, layer=layer: logits[layer].append(o[0]))
        for layer, b in enumerate(blocks)
    ]
    for row, experts in zip(rows, chosen, strict=True):
        ids = torch.tensor([row.prompt_ids + row.completion_ids])
        if experts is None:
            model(input_ids=ids, use_cache=False)
            continue
        padded = torch.cat([experts, torch.zeros(1, routers.layers, routers.top_k, dtype=torch.long)])
        forced = ForcedExperts(chosen_ILK=padded, known_I=torch.arange(row.length) < row.length - 1)
        with routers.watch(forced):
            model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    terms = []
    for layer in logits:
        logits_IE = torch.cat(layer)
        native = logits_IE.detach().argsort(-1, descending=True)[:, : routers.top_k]
        share = torch.stack([(native == e).double().mean() for e in range(routers.experts)])
        terms.append(routers.experts * (share * logits_IE.softmax(-1).mean(0)).sum())
    return coefficient * torch.stack(terms).mean()


@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("replay", REPLAYS)
def test_the_balancing_loss_is_switch_on_native_routing(
    replay: str, checkpointing: str, tiny: Callable[..., Config], double_parts: Any
) -> None:
    """Value and gradient. The sampler's routes are altered, so replay of them is far from what the routers choose."""
    options = (*REPLAYS[replay], "routing.balance_loss=0.5", "learner.micro_batch_tokens=70")
    parts = double_parts(tiny(*MOE, *options, f"model.gradient_checkpointing={checkpointing}"))
    model, config = parts.policy.model, parts.config
    learned, metrics = stepped(parts, with_altered_routes)
    routing = replace(config.routing, balance_loss=0.0)
    without = replace(parts, optimizer=GradientRecorder(model), config=replace(config, routing=routing))
    plain, plain_metrics = stepped(without, with_altered_routes)
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            vars(module).pop("forward", None)  # what follows is by hand, with every activation stored
    assert learned.routed is not None
    assert plain.routed is not None
    assert plain.routed.balance_losses == ()
    assert "loss/balance" not in plain_metrics
    rows = rows_learned(learned)
    lengths = [len(row.completion_ids) for row in rows]
    step_of = [int(u[0]) for u in learned.routed.update_N.split(lengths)]
    for step in (0, 1):
        mine = [i for i, s in enumerate(step_of) if s == step]
        routes = [learned.samples[i].completion.routes for i in mine]
        forced = [unpacked(r) if replay == "sampler" and r else None for r in routes]
        loss = balance_by_hand(model, [rows[i] for i in mine], forced, 0.5)
        assert loss.item() > 0.5  # 0.5 would be even
        assert learned.routed.balance_losses[step] == pytest.approx(loss.item(), rel=1e-5)
        model.zero_grad()
        loss.backward()
        expected = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
        )
        model.zero_grad()
        added = parts.optimizer.gradients[step] - without.optimizer.gradients[step]  # type: ignore[attr-defined]
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(added, expected, rtol=1e-3, atol=2e-6)
        router = torch.cat([torch.full((p.numel(),), n.endswith("gate.weight")) for n, p in model.named_parameters()])
        assert added[router].abs().max() > 1e-3
    assert metrics["loss/balance"] == pytest.approx(sum(learned.routed.balance_losses) / 2)


def test_the_load_of_the_experts_is_summed_up_per_layer(tiny: Callable[..., Config], parts_of: Any) -> None:
    learned, metrics = stepped(parts_of(tiny(*MOE)))
    assert learned.routed is not None
    entropies, busiest = [], []
    for layer, counts in enumerate(learned.routed.load_LE.tolist()):
        shares = [n / sum(counts) for n in counts]
        entropies.append(-sum(p * math.log(p) for p in shares if p) / math.log(8))
        busiest.append(8 * max(shares))
        assert metrics[f"routing/load_entropy/{layer}"] == pytest.approx(entropies[-1])
        assert metrics[f"routing/load_max/{layer}"] == pytest.approx(busiest[-1])
    assert len(entropies) == 2
    assert metrics["routing/load_entropy"] == pytest.approx(sum(entropies) / 2)
    assert metrics["routing/load_max"] == pytest.approx(max(busiest))
    assert sum(learned.routed.load_LE[0].tolist()) == 2 * sum(row.length for row in rows_learned(learned))
