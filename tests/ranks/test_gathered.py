"""A sharded model after a forward that was interrupted, and tensors that are gathered from all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import in_forks
from transformers import Qwen3Config, Qwen3ForCausalLM

from gspo.model.sharding import gathered, is_sharded, shard
from gspo.ranks.group import Ranks
from gspo.signals import Interrupted


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Any]:
    """A model that is sharded over one rank, which is enough to see what is a shard."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))
        shard(model, 1)
        yield model
    finally:
        dist.destroy_process_group()


def test_weights_are_sharded_again_after_an_interrupted_forward(model: Any) -> None:
    def interrupt(*arguments: Any) -> None:
        raise Interrupted

    hook = model.model.layers[1].mlp.register_forward_hook(interrupt)
    with pytest.raises(Interrupted), gathered(model):
        model(torch.tensor([[1, 2, 3]]))
    assert all(map(is_sharded, model.parameters()))
    hook.remove()
    # It still samples and trains.
    with gathered(model):
        model(torch.tensor([[1, 2, 3]]))
    assert all(map(is_sharded, model.parameters()))
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_gathering_tensors_of_all_ranks_warns_of_nothing(tmp_path: Path) -> None:
    """A warning would reach the terminal of every user."""

    def gather(ranks: Ranks) -> None:
        warnings.simplefilter("error")
        assert ranks.gather(torch.tensor([ranks.rank, 5])).tolist() == [0, 5, 1, 5]

    in_forks(2, gather, tmp_path)
