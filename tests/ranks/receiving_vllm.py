"""A simulated vLLM that samples with its own copy of the weights, as it was sent to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from forked_ranks import patch
from simulated_vllm import SimulatedVllm
from torch import Tensor
from transformers import AutoModelForCausalLM
from whole_tensors_alive import WholeTensors

import gspo.follower
import gspo.loop
from gspo.rollout.engine import EngineContext
from gspo.rollout.engines import vllm
from gspo.rollout.vllm import weights
from gspo.rollout.vllm.host import Check
from gspo.rollout.vllm.http import Fault
from gspo.rollout.vllm.policy import LearnerPolicy
from gspo.rollout.vllm.weights import Part


class ReceivingVllm(SimulatedVllm):
    """Before every transfer that works, one fails after its first tensor. Sizes of what it receives are in a file."""

    def __init__(self, context: EngineContext, file: Path) -> None:
        config = context.model.config
        super().__init__(AutoModelForCausalLM.from_config(config, dtype=context.model.dtype).eval())
        self.file = file

    @torch.no_grad()
    def sync(self, policy: LearnerPolicy, label: str, check: Check) -> None:
        with suppress(Fault):
            policy.send(Part.MERGED, fail)
        own = self.model.state_dict()
        received = []

        def take(pairs: Iterator[tuple[str, Tensor]]) -> None:
            for name, tensor in pairs:
                own[name].copy_(tensor)
                received.append(tensor.numel() * tensor.element_size())

        policy.send(Part.MERGED, take)
        append(self.file, {"sizes": received})
        super().sync(policy, label, check)


def fail(pairs: Iterator[tuple[str, Tensor]]) -> None:
    next(pairs)
    raise Fault("out of luck")


def append(file: Path, values: Any) -> None:
    with file.open("a") as out:
        out.write(json.dumps(values) + "\n")


def use_receiving_vllm(rank: int, folder: Path) -> None:
    """Engine `vllm` of this process is a simulated one. `FOLDER/RANK.jsonl` has the bytes of whole tensors that a rank
    has held at the same time."""
    file = folder / f"{rank}.jsonl"
    whole = WholeTensors()
    patch(weights, "full", whole.counted)
    patch(
        vllm,
        "build",
        lambda original: lambda context, **options: vllm.VllmEngine(context, ReceivingVllm(context, file)),
    )

    def counted(original: Any) -> Any:
        def exchange_usage(*args: Any) -> Any:
            append(file, {"peak": whole.peak})
            return original(*args)

        return exchange_usage

    patch(gspo.loop if rank == 0 else gspo.follower, "exchange_usage", counted)
