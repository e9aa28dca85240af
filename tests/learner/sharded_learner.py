"""One rank of a tiny learner, as a program: `sharded_learner.py RANK RANKS FOLDER CASE ...`.

It updates the weights twice, on its part of the micro-batches with the loss weights of the whole optimizer step. Then
it resumes from what one rank had written after its two updates, and updates once more. With one rank nothing is
sharded.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from gspo.config import LearnerConfig
from gspo.learner.forward import completion_logprobs
from gspo.learner.optimizer import Optimizer, Update
from gspo.learner.plan import Plan, make_plan
from gspo.model.micro_batch import TokenSequence
from gspo.model.sharding import full, sharded_like
from gspo.objectives.loss import loss_of
from gspo.objectives.sequences import Sequences, Tokens
from gspo.objectives.table import objective

SIZES = {"hidden_size": 20, "intermediate_size": 36, "num_hidden_layers": 2, "vocab_size": 61, "head_dim": 8}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


@dataclass(frozen=True)
class Case:
    tied: bool = True
    dtype: torch.dtype = torch.float32
    experts: bool = False
    own_head: bool = False
    """Whether the LM head is sharded by itself, so that its weight is sharded again right after the forward pass."""


CASES = {
    "tied": Case(),
    "head": Case(tied=False, own_head=True),
    "moe": Case(experts=True),
    "bfloat16": Case(dtype=torch.bfloat16),
    "float16": Case(dtype=torch.float16),
}
# AdamW turns rounding of a gradient near 0 into a visible step of that one weight. A small learning rate keeps the
# difference between one and two ranks small on every CPU.
SETTINGS = LearnerConfig(learning_rate=1e-3, max_grad_norm=0.5, weight_decay=0.1, spike=0.0, ess_scaling="sqrt")


def build(case: Case, seed: int) -> Any:
    """The same weights on every rank. Most sizes do not divide by two, so shards are uneven."""
    kind, extra = ("qwen3_moe", EXPERTS) if case.experts else ("qwen3", {})
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **SIZES, **HEADS, **extra, tie_word_embeddings=case.tied)
    return AutoModelForCausalLM.from_config(config, dtype=case.dtype)


def shard(model: Any, case: Case, ranks: int) -> None:
    options = {
        "mesh": init_device_mesh("cpu", (ranks,)),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    }
    units = [*model.model.layers, *([model.lm_head] if case.own_head else []), model]
    for unit in units:
        fully_shard(unit, **options)
        # Token weights belong to the whole optimizer step, so gradients of ranks add up. FSDP's default averages.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no other


def plan() -> Plan:
    """Three optimizer steps of eight completions of uneven length, one per micro-batch."""
    rng = random.Random(0)
    tokens = lambda least, most: tuple(rng.randrange(61) for _ in range(rng.randint(least, most)))  # noqa: E731
    rows = [TokenSequence(prompt_ids=tokens(1, 4), completion_ids=tokens(1, 9)) for _ in range(24)]
    return make_plan(rows, range(24), mini_batches=3, token_budget=1, pad_id=0, seed="")


@dataclass(frozen=True)
class Rank:
    rank: int
    ranks: int
    folder: Path

    def run(self, name: str) -> None:
        """Write what this rank sees of a case to `FOLDER/CASE-RANKS-RANK.pt`."""
        case = CASES[name]
        model, optimizer = self._build(case)
        updates = [self._update(model, optimizer, index) for index in range(2)]
        self._save(f"{name}-{self.ranks}", model, optimizer, updates=updates)
        resumed, optimizer = self._build(case, seed=1)
        self._load(f"{name}-1", resumed, optimizer)
        self._save(f"{name}-{self.ranks}-loaded", resumed, optimizer)
        last = self._update(resumed, optimizer, 2)
        self._save(f"{name}-{self.ranks}-resumed", resumed, optimizer, updates=[last])

    def _build(self, case: Case, seed: int = 0) -> tuple[Any, Optimizer]:
        model = build(case, seed)
        if self.ranks > 1:
            shard(model, case, self.ranks)
        optimizer = Optimizer(model, SETTINGS, 4)
        if case.dtype == torch.float16:  # a loss scale so large that the first gradients overflow
            optimizer.load({"loss_scale": torch.tensor([2.0**24, 0.0], dtype=torch.float64)}, 0)
        return model, optimizer

    def _update(self, model: Any, optimizer: Optimizer, index: int) -> tuple[Update, dict[str, Tensor]]:
        """One optimizer step, and its gradient."""
        self._accumulate_gradients(model, optimizer, index)
        while optimizer.retry_after_overflow(loss_finite=True):
            self._accumulate_gradients(model, optimizer, index)
        gradient = {name: full(weight.grad) / optimizer.loss_scale for name, weight in model.named_parameters()}
        # Importance weights of the completions of all ranks.
        log_weight_B = 2 * torch.randn(8, generator=torch.Generator().manual_seed(index + 100))
        return optimizer.step(loss_finite=True, log_weight_B=log_weight_B), gradient

    def _accumulate_gradients(self, model: Any, optimizer: Optimizer, index: int) -> None:
        """The micro-batches of this rank, with the token weights of all."""
        work, rule = plan(), objective("dapo")
        length_B = torch.bincount(work.sequence_N)
        members = torch.cat([work.sequence_N[micro.at_N] for micro in work.updates[index]]).unique()
        weight_B = torch.zeros(len(length_B))
        weight_B[members] = rule.aggregate(length_B[members].double()).float()
        generator = torch.Generator().manual_seed(index)
        advantage_B = torch.randn(len(length_B), generator=generator)
        noise_N = 0.1 * torch.randn(len(work.sequence_N), generator=generator)
        for micro in work.updates[index][self.rank :: self.ranks]:
            sequence_N = work.sequence_N[micro.at_N]
            with torch.no_grad():
                old_N, _ = completion_logprobs(model, micro, 0.7)
            logp_N, _ = completion_logprobs(model, micro, 0.7)
            tokens = Tokens(
                logp_N=logp_N,
                logp_old_N=old_N + noise_N[micro.at_N],
                advantage_N=advantage_B[sequence_N],
                sequences=Sequences(sequence_N, len(length_B)),
            )
            optimizer.scale_loss(loss_of(rule, tokens, weight_B[sequence_N]).total).backward()

    def _save(self, name: str, model: Any, optimizer: Optimizer, **more: Any) -> None:
        """As a checkpoint does: whole tensors."""
        weights = {key: full(weight.detach()) for key, weight in model.named_parameters()}
        state = {key: full(tensor).contiguous() for key, tensor in optimizer.state().items()}
        torch.save({"weights": weights, "state": state, "updates": [], **more}, self.folder / f"{name}-{self.rank}.pt")
        save_file(state, self.folder / f"{name}-{self.rank}.safetensors")

    def _load(self, name: str, model: Any, optimizer: Optimizer) -> None:
        saved = torch.load(self.folder / f"{name}-0.pt", weights_only=False)
        with torch.no_grad():
            for key, weight in model.named_parameters():
                weight.copy_(sharded_like(saved["weights"][key], weight))
        optimizer.adopt_weights()
        optimizer.load(load_file(self.folder / f"{name}-0.safetensors"), updates=2)


if __name__ == "__main__":
    me = Rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{me.folder}/store", rank=me.rank, world_size=me.ranks)
    for name in sys.argv[4:]:
        me.run(name)
    dist.barrier()
    dist.destroy_process_group()
