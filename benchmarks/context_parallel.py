"""Activation memory per rank against `learner.context_parallel`, for one long sequence.

    python benchmarks/context_parallel.py --context 1 2 4
    python benchmarks/context_parallel.py --context 1 2 4 --device cuda --tokens 16384    # the shape of Qwen3-0.6B

In: the number of tokens, half of them prompt. Out: one line per number of ranks: its tokens, what autograd keeps on a
rank between forward and backward pass, on a GPU also the peak of both passes, and the relative error of the gradient.
Invariant: all ranks run on this machine as one context group, connected by gloo. On a GPU they share it, and what they
exchange goes through the memory of the host, so times mean nothing. Every rank has whole weights, which are not
counted: in training FSDP shards them over all ranks, with or without context parallelism.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from gspo.config import ModelConfig
from gspo.learner.forward import completion_logprobs
from gspo.learner.plan import make_plan
from gspo.model.load import load_policy, load_tokenizer
from gspo.model.micro_batch import TokenSequence
from gspo.ranks.context import ContextGroup, join_context
from gspo.ranks.group import Ranks

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 256, "num_hidden_layers": 4}
QWEN3_06B = {
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 1024},
    **{"intermediate_size": 3072, "num_hidden_layers": 28, "max_position_embeddings": 2**17, "initializer_range": 0.02},
}


class HostGroup(ContextGroup):
    """A context group whose exchanges go through the memory of the host: gloo has none for GPUs."""

    def exchange(self, parts: Tensor) -> Tensor:
        return super().exchange(parts.cpu()).to(parts.device)


class SavedTensors:
    """The bytes that autograd keeps for the backward pass, each storage counted once."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        # Leaves are parameters and indices.
        if not (tensor if tensor._base is None else tensor._base).is_leaf:
            storage = tensor.untyped_storage()
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def bytes(self) -> int:
        return sum(self._sizes.values())


def measure(rank: int, size: int, given: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    cuda = given.device == "cuda"
    config = ModelConfig(
        build="tiny_dense",
        build_options=QWEN3_06B if cuda else HEADS,
        device=given.device,
        dtype=given.dtype,
        gradient_checkpointing=given.checkpointing,
        compile="off",
    )
    policy = load_policy(config, load_tokenizer(config), seed=0)
    ranks = Ranks(rank=rank, count=size)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store-{size}", rank=rank, world_size=size)
        group = join_context(ranks, size, deadline_s=600).group
        ranks = Ranks(rank=rank, count=size, context=HostGroup(size=size, rank=rank, group=group))
    ids = (torch.arange(given.tokens) * 7 % 90).tolist()
    row = TokenSequence(prompt_ids=tuple(ids[: len(ids) // 2]), completion_ids=tuple(ids[len(ids) // 2 :]))
    plan = make_plan([row], [0], mini_batches=1, token_budget=len(ids), pad_id=0, seed="", packed=True, ranks=ranks)
    (micro,) = (m.own.to(policy.device) for m in plan.updates[0])
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    for p in parameters:
        p.grad = torch.zeros_like(p)  # not activations
    before = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    saved = SavedTensors()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        logp_N, _ = completion_logprobs(policy.model, micro, 1.0)
    logp_N.mul(1 / plan.tokens).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before if cuda else 0
    gradient = torch.cat([p.grad.float().flatten().cpu() for p in parameters if p.grad is not None])
    if size > 1:
        dist.all_reduce(gradient)
        dist.destroy_process_group()
    torch.save((micro.input_ids.numel(), saved.bytes, peak, gradient), Path(folder) / f"{size}-{rank}.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--context", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--checkpointing", action="store_true", help="with model.gradient_checkpointing")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        expected = None
        for size in given.context:
            torch.multiprocessing.spawn(measure, args=(size, given, folder), nprocs=size)
            ranks = [torch.load(Path(folder) / f"{size}-{rank}.pt") for rank in range(size)]
            tokens, saved, peak, gradient = max(ranks, key=lambda r: r[1])
            expected = gradient if expected is None else expected
            error = float((gradient - expected).norm() / expected.norm())
            memory = f"{saved / 2**20:.1f} MiB saved" + f", {peak / 2**20:.1f} MiB at the peak" * bool(peak)
            print(f"context_parallel {size}: {tokens} tokens, {memory}, gradient off by {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
