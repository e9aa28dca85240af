"""One rank of a learner, as a program: `learning_rank.py RANK RANKS CONTEXT FOLDER CASE ...`. With one rank nothing is
sharded. With CONTEXT > 1, so many ranks compute each micro-batch together.

Each case calls `learn` with the same groups of uneven length, and writes the gradients of its optimizer steps and what
`learn` returned to `FOLDER/CASE-RANKS-CONTEXT-RANK.pt`.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from gspo import config as settings
from gspo.build import policy_for, run_objective, tokenizer_for
from gspo.config import Config
from gspo.context import LearnContext
from gspo.learner.optimizer import Update
from gspo.learner.result import LearnResult
from gspo.model.context_parallel import check_context_parallel
from gspo.model.routing import Routers
from gspo.model.sharding import full, shard
from gspo.objectives.table import objective_names
from gspo.ranks.context import join_context
from gspo.ranks.group import Ranks
from gspo.step import learn
from gspo.types import (
    Branch,
    Completion,
    Conversation,
    ConversationEnd,
    Group,
    Prompt,
    Score,
    Status,
    StopReason,
    Turn,
)

MOE = {"model.build": "tiny_moe"}
LORA = {"model.build": "", "model.path": "dense", "model.lora.rank": "4"}
LORA_MOE = LORA | {"model.path": "moe", "model.lora.experts": "true"}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"attn_logit_softcapping": 1.0},
}
"""Families with sliding windows: with sinks, and with soft caps of attention scores and of logits."""
WIDE = {"objective.select_fraction": "0.2"}
"""With so few tokens the usual fraction would select none."""
RUN_OBJECTIVES = [name for name in objective_names() if name != "ppo_clip"]


@dataclass(frozen=True)
class Case:
    objective: str = "gspo"
    settings: Mapping[str, str] = field(default_factory=dict)
    uniform: bool = False
    """Whether most groups have equal rewards, so that ranks have little or nothing to compute."""
    padded: bool = False
    drift: bool = False
    """Whether weights also move in an update without a gradient, as they do by the momentum of AdamW."""
    broken: bool = False
    """Whether the sampler's log-prob of a single token is NaN, and with it the loss of a single rank."""
    turns: bool = False
    """Whether completions are conversations of up to three turns, each of which has a reward."""
    branches: bool = False
    """Whether the last turn of some conversations begins another branch."""


def _selecting(name: str) -> dict[str, str]:
    return {"clip_cov": WIDE | {"objective.cov_low": "0.0"}, "kl_cov": WIDE}.get(name, {})


CASES = {
    **{name: Case(name, _selecting(name)) for name in RUN_OBJECTIVES},
    "kl": Case("grpo", {"objective.kl": "0.1"}),
    "kl in reward": Case("grpo", {"objective.kl": "0.1", "objective.kl_in": "reward"}),
    "entropy": Case("gspo", {"objective.entropy": "0.1"}),
    "uniform": Case("gspo", uniform=True),
    "drift": Case("gspo", {"learner.mini_batches": "6"}, uniform=True, drift=True),
    "padded": Case("gspo", padded=True),
    "sampler": Case("gspo", {"learner.old_logp": "sampler", "learner.allow_mismatch": "true"}),
    "checkpointing": Case("gspo", {"model.gradient_checkpointing": "true"}),
    "minimum": Case("gspo", {"rollout.min_tokens": "3"}),
    "unscaled": Case("grpo", {"objective.advantage_scale": "none"}),
    "corrections": Case("grpo", {"objective.mismatch": "token_tis", "objective.off_policy_mask": "0.1"}),
    "turns": Case("gspo_turn", turns=True),
    "steps": Case("gspo_token", turns=True),
    "branches": Case("gspo_turn", turns=True, branches=True),
    "padded branches": Case("gspo_turn", turns=True, branches=True, padded=True),
    "moe lora kl branches": Case(
        "gspo_turn", LORA_MOE | {"routing.replay": "sampler", "objective.kl": "0.1"}, turns=True, branches=True
    ),
    "lora": Case("gspo", LORA),
    "qlora": Case("gspo", LORA | {"model.quantize": "nf4"}),
    "lora kl": Case("grpo", LORA | {"objective.kl": "0.1"}),
    "moe": Case("gspo", MOE),
    "moe one update": Case("gspo", MOE | {"learner.mini_batches": "1"}),
    "moe replay": Case("grpo", MOE | {"routing.replay": "old"}),
    "moe sampler replay": Case("gspo", MOE | {"routing.replay": "sampler"}),
    "moe balance": Case("gspo", MOE | {"routing.balance_loss": "0.1"}),
    "moe lora": Case("gspo", LORA_MOE),
    **{name: Case("gspo", {"model.build": name}) for name in SHAPES},
}
CONTEXT_CASES = (
    "gspo",
    "minpro",  # a minimum over earlier tokens of the sequence
    "clip_cov",  # selects tokens
    "kl",
    "entropy",
    "padded",
    "checkpointing",
    "minimum",
    "turns",
    "branches",
    "padded branches",
    "lora",
    "moe one update",
    "moe lora kl branches",
    "moe sampler replay",
    "moe balance",
    *SHAPES,
)
"""What may differ if the tokens of a micro-batch are divided among ranks."""
BROKEN = {"broken": Case("dppo_tv", broken=True)}


def config_of(case: Case) -> Config:
    tree: dict[str, Any] = {
        "name": "ranks",
        "steps": 2,
        "model": {"build": "tiny_dense", "device": "cpu"},
        "data": {"task": "sorting", "held_out": 0},
        "rollout": {"prompts": 6, "group_size": 4, "max_tokens": 12},
        "learner": {"learning_rate": 1e-3, "mini_batches": 2, "micro_batch_tokens": 40},
        "eval": {"every": 0},
    }
    overrides = [f"objective.name={case.objective}", *(f"{key}={value}" for key, value in case.settings.items())]
    config = settings.override(tree, overrides, where="test")
    settings.check(config)
    return config


def groups_of(case: Case, config: Config, vocabulary: int, stop: int, routers: Routers | None) -> list[Group]:
    """Groups of completions of uneven length, with random rewards and log-probs of the sampler."""
    rng = random.Random(0)
    ids = [i for i in range(vocabulary) if i != stop]
    groups = []
    for g in range(config.rollout.prompts):
        prompt = tuple(rng.choices(ids, k=rng.randint(2, 9)))
        completions, scores = [], []
        for sample in range(config.rollout.group_size):
            tokens = tuple(rng.choices(ids, k=rng.randint(3, 11)))
            routes = None
            if routers is not None:
                # The prompt has the same experts in all completions of a group.
                spans = (_experts(routers, len(prompt), g), _experts(routers, len(tokens) - 1, 100 * g + sample + 50))
                routes = routers.pack(torch.cat(spans))
            turns = _turns(len(tokens)) if case.turns else ()
            sampled = tuple(any(turn.start <= i < turn.end for turn in turns) for i in range(len(tokens) * bool(turns)))
            logp = [-rng.random() - 3 for _ in range(sum(sampled) if turns else len(tokens))]
            if case.broken and not completions and not groups:
                logp[0] = math.nan
            completions.append(
                Completion(
                    prompt_id=str(g),
                    sample=sample,
                    token_ids=tokens,
                    text="",
                    logp_sampler=tuple(logp),
                    stop=StopReason.LENGTH,
                    version=0,
                    routes=routes,
                    sampled=sampled,
                    conversation=Conversation(turns=turns, end=ConversationEnd.DONE) if turns else None,
                    branches=_branches(len(prompt), turns) if case.branches and sample % 2 else (),
                )
            )
            reward = 1.0 if case.uniform and g else rng.random()
            steps = ()
            if turns:
                ends = accumulate(turn.end - turn.start for turn in turns)
                steps = tuple((end - 1, rng.random()) for end in ends)
                reward = sum(value for _, value in steps)
            scores.append(Score(status=Status.SCORED, reward=reward, correct=reward > 0.5, step_rewards=steps))
        prompts = Prompt(id=str(g), content="", text="", token_ids=prompt)
        groups.append(Group(prompt=prompts, completions=completions, scores=scores))
    return groups


def _turns(tokens: int) -> tuple[Turn, ...]:
    """What the model has sampled of a conversation: all but a token in every four, and the last one."""
    given = [i for i in range(1, tokens - 1) if i % 4 == 2]
    starts, ends = [0, *(i + 1 for i in given)], [*given, tokens]
    return tuple(Turn(start=start, end=end) for start, end in zip(starts, ends, strict=True))


def _branches(prompt: int, turns: Sequence[Turn]) -> tuple[Branch, ...]:
    """The last turn, and the token that was given before it, follow the first turn."""
    if len(turns) < 3:
        return ()
    shared = prompt + turns[0].end
    return (Branch(start=0, parent=-1, shared=0), Branch(start=turns[-1].start - 1, parent=0, shared=shared))


def _experts(routers: Routers, tokens: int, seed: int) -> Tensor:
    scores = torch.rand(tokens, routers.layers, routers.experts, generator=torch.Generator().manual_seed(seed))
    return scores.topk(routers.top_k)[1].to(routers.compact)


class GradientDescent:
    """Plain gradient descent. AdamW would turn the rounding of a gradient near 0 into a visible step of that weight."""

    updates = 0
    loss_scale = 1.0

    def __init__(self, model: Any, *, drift: bool) -> None:
        self.model = model
        self.drift = drift
        self.parts = list(model.parameters())
        """Of several ranks, this rank's parts of the weights, also while the model holds whole ones."""
        self.gradients: list[Tensor] = []
        self.finite: list[bool] = []

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss

    def retry_after_overflow(self, *, loss_finite: bool) -> bool:
        return False

    def step(self, *, loss_finite: bool, log_weight_B: Tensor) -> Update:
        self.finite.append(loss_finite)
        trained = [p for p in self.model.parameters() if p.grad is not None]
        self.gradients.append(torch.cat([torch.zeros(1), *(full(p.grad).flatten() for p in trained)]))
        for p in trained:
            if loss_finite:
                p.data.add_(p.grad, alpha=-0.05)
            p.grad = None
        if self.drift:
            for p in self.parts:
                p.data.mul_(1.1)
        # The sum shows that every rank has the weights of all completions.
        norm = float(self.gradients[-1].norm())
        return Update(applied=True, grad_norm=norm, learning_rate=0.0, ess=float(log_weight_B.sum()))


def save_bases(folder: Path) -> None:
    """Models to attach adapters to, and shapes of models to build."""
    size = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "sliding_window": 6}
    for kind, fields in SHAPES.items():
        AutoConfig.for_model(kind, **size, **heads, **fields).save_pretrained(folder / kind)
    for name, settings_of_model in {"dense": {}, "moe": MOE}.items():
        config = config_of(Case(settings=settings_of_model))
        policy = policy_for(config, tokenizer_for(config))
        policy.model.save_pretrained(folder / name)
        policy.tokenizer.save_pretrained(folder / name)


def run(case: Case, ranks: Ranks, folder: Path) -> dict[str, Any]:
    config = config_of(case)
    if config.model.path:
        config = replace(config, model=replace(config.model, path=str(folder / config.model.path)))
    if config.model.build in SHAPES:
        config = replace(config, model=replace(config.model, build=str(folder / config.model.build)))
    policy = policy_for(config, tokenizer_for(config), ranks=ranks)
    objective = run_objective(config)
    reference = None
    if objective.kl:
        other = replace(config, seed=5)
        reference = (
            policy.model if config.model.lora.rank else policy_for(other, tokenizer_for(config), ranks=ranks).model
        )
    if config.model.lora.rank:
        # Fresh adapters have a factor of 0, which would hide the gradient of the other one.
        for p in policy.model.parameters():
            if p.requires_grad:
                torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(p.numel()))
    if ranks.context is not None:
        check_context_parallel(policy.model, ranks.context)
    if case.padded:
        from gspo.model import packed_forward

        packed_forward._supported[policy.model] = False
    if ranks.several:
        shard(policy.model, ranks.count)
        if reference is not None and reference is not policy.model:
            shard(reference, ranks.count)
    optimizer = GradientDescent(policy.model, drift=case.drift)
    context = LearnContext(
        config=config, objective=objective, policy=policy, reference=reference, optimizer=optimizer, ranks=ranks
    )
    vocabulary = policy.model.get_input_embeddings().num_embeddings
    groups = groups_of(case, config, vocabulary, policy.stop_ids[0], policy.routers)
    learned = learn(context, groups, step=1)
    assert learned is not None
    return {"gradients": optimizer.gradients, "finite": torch.tensor(optimizer.finite), **_values(learned)}


def _values(learned: LearnResult) -> dict[str, Any]:
    tokens = {k: v for k, v in vars(learned.tokens).items() if isinstance(v, Tensor)}
    parts = {"logp_ratio": learned.ratio_N, "clipped": learned.clipped_N, "computed": learned.computed_N}
    own = {"advantage_B": learned.advantage_B, "entropy_M": learned.entropy_M, "log_rho_M": learned.log_rho_M}
    terms = ("total", "policy", "kl", "entropy")
    losses = torch.tensor([[float(getattr(loss, term)) for term in terms] for loss in learned.losses])
    values = tokens | parts | own | {"losses": losses, "weights": torch.tensor([u.ess for u in learned.updates])}
    if learned.routed is not None:
        names = ("flipped_N", "native_N", "sampler_N", "update_N", "load_LE")
        values |= {f"routing {name}": getattr(learned.routed, name) for name in names}
        values["routing balance"] = torch.tensor(learned.routed.balance_losses)
    return values


def main() -> None:
    rank, count, context, folder = *map(int, sys.argv[1:4]), Path(sys.argv[4])
    ranks = Ranks(rank=rank, count=count)
    torch.set_num_threads(1)
    if count == 1:
        save_bases(folder)
    else:
        store = f"file://{folder}/store-{count}-{context}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    if context > 1:
        ranks = replace(ranks, context=join_context(ranks, context, deadline_s=300))
    for name in sys.argv[5:]:
        torch.save(run((CASES | BROKEN)[name], ranks, folder), folder / f"{name}-{count}-{context}-{rank}.pt")
    if count > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
