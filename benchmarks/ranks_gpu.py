"""Several ranks against one process: gradients, a few steps, sampling, time and memory. A script for `torchrun`.

In: a model. Out: ratios of N ranks to one process, printed by rank 0; exit code 1 if a gradient differs by more than
`--tolerance`. Rank 0 first does everything alone, with the whole model, while the others wait. Then all ranks do the
same with a sharded model. All of them make the same groups from the same seed, so the two differ in rounding alone.

    GSPO_UNTESTED_NCCL=1 torchrun --nproc-per-node 2 benchmarks/ranks_gpu.py --model Qwen/Qwen3-0.6B
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/ranks_gpu.py --device cpu

It has never been run with NCCL, because no machine with several GPUs was available. With bfloat16, expect gradients
that differ by about 1e-2: run it with float32 first. `--cpu-offload` keeps shards, masters and moments in the memory of
the CPU, which `gspo train` does not offer; on a CPU it changes nothing.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from gspo import config as settings
from gspo.build import engine_for, optimizer_for, policy_for, run_objective, tokenizer_for
from gspo.config import Config
from gspo.context import LearnContext
from gspo.model import sharding
from gspo.model.load import Policy, device_of
from gspo.model.partial import whole
from gspo.model.sharding import full, gathered, shard
from gspo.ranks.group import ONE, Ranks
from gspo.ranks.start import check_device, join_ranks
from gspo.ranks.usage import peak_memory
from gspo.rollout.engine import GenerateOptions
from gspo.step import learn
from gspo.types import Completion, Group, Prompt, Sampling, Score, Status, StopReason

DEADLINE_S = 1800.0
"""The others wait this long for rank 0."""


@dataclass
class Result:
    """What one process, or all ranks together, computed."""

    gradient_error: float = math.nan
    """Of the first optimizer step, relative to one process."""
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of each training step."""
    sampling_s: float = 0.0
    completions: list[list[tuple[int, ...]]] = field(default_factory=list)
    """By prompt; on several ranks, those of rank 0."""
    memory_bytes: int = 0


def main() -> int:
    options = _arguments()
    config = _config(options)
    if options.device == "cpu":
        torch.set_num_threads(1)
    with ExitStack() as stack, join_ranks(DEADLINE_S) as ranks:
        if not ranks.several:
            print("start it with torchrun, for example: torchrun --nproc-per-node 2 benchmarks/ranks_gpu.py")
            return 2
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        one = measure(config, ONE, options, folder) if ranks.leads else None
        # The others wait here, so that they do not slow down the one process.
        ranks.sum(torch.zeros(1))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        several = measure(config, ranks, options, folder)
        # The resident set of rank 0 has seen the whole model, so on a CPU the other ranks are the ones to compare.
        own = 0 if ranks.leads and options.device == "cpu" else several.memory_bytes
        several.memory_bytes = int(ranks.max(torch.tensor([own])))
        different = report(one, several, ranks.count, options.tolerance) if one is not None else False
        failed = int(ranks.max(torch.tensor([int(different)])))
        if not ranks.leads:
            ranks.receive()  # the command to end, which the leader sends when it leaves
        return failed


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare several ranks with one process.")
    parser.add_argument("--model", default="", help="a model directory or hub name; a tiny MoE model by default")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cpu-offload", action="store_true", help="keep what is sharded in the memory of the CPU")
    parser.add_argument("--steps", type=int, default=5, help="training steps")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="the most tokens of a completion")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--tolerance", type=float, default=1e-5, help="relative difference of gradients that fails")
    return parser.parse_args()


def _config(options: argparse.Namespace) -> Config:
    model = {"path": options.model} if options.model else {"build": "tiny_moe"}
    tree: dict[str, Any] = {
        "name": "ranks",
        "steps": options.steps,
        "model": {**model, "device": options.device, "dtype": options.dtype},
        "data": {"task": "sorting", "held_out": 0},
        "rollout": {"prompts": options.prompts, "group_size": options.group_size, "max_tokens": options.tokens},
        "learner": {"mini_batches": 2, "learning_rate": 1e-5, "micro_batch_tokens": options.micro_batch_tokens},
        "eval": {"every": 0},
    }
    config = settings.from_tree(tree, where="benchmark")
    settings.check(config)
    return config


def measure(config: Config, ranks: Ranks, options: argparse.Namespace, folder: Path) -> Result:
    """Sample, then train, with a fresh model. One process leaves its first gradients in the folder."""
    check_device(device_of(config.model.device), ranks)
    policy = policy_for(config, tokenizer_for(config), ranks=ranks)
    with whole(policy.model):
        engine = engine_for(config, policy)
    if ranks.several:
        with offloaded(policy.device) if options.cpu_offload else nullcontext():
            shard(policy.model, ranks.count)
    result = Result()
    groups = make_groups(config, policy)
    _sample(result, engine, policy, ranks, groups, options.tokens)
    optimizer = optimizer_for(config, policy)
    _use_gradients(optimizer, policy.model, ranks, result, folder)
    context = LearnContext(
        config=config,
        objective=run_objective(config),
        policy=policy,
        reference=None,
        optimizer=optimizer,
        ranks=ranks,
    )
    for step in range(1, options.steps + 1):
        started = time.monotonic()
        learned = learn(context, groups, step=step)
        _synchronize(policy)
        result.seconds.append(time.monotonic() - started)
        assert learned is not None
        result.norms += [update.grad_norm for update in learned.updates]
        result.losses += [float(loss.total) for loss in learned.losses]
    result.memory_bytes = peak_memory(policy.device)
    engine.close()
    return result


@contextmanager
def offloaded(device: torch.device) -> Iterator[None]:
    """Inside, models are sharded with CPU offload."""
    policy = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    sharding.fully_shard = partial(fully_shard, offload_policy=policy)
    try:
        yield
    finally:
        sharding.fully_shard = fully_shard


def make_groups(config: Config, policy: Policy) -> list[Group]:
    """Groups of random tokens with uneven lengths and random rewards, the same on every rank."""
    rng = random.Random(0)
    vocabulary = policy.model.get_input_embeddings().num_embeddings
    ids = [token for token in range(min(vocabulary, len(policy.tokenizer))) if token not in policy.stop_ids]
    longest = config.rollout.max_tokens
    groups = []
    for number in range(config.rollout.prompts):
        prompt = Prompt(id=str(number), content="", text="", token_ids=tuple(rng.choices(ids, k=rng.randint(4, 32))))
        completions = []
        for sample in range(config.rollout.group_size):
            tokens = tuple(rng.choices(ids, k=rng.randint(2, longest)))
            completions.append(
                Completion(
                    prompt_id=prompt.id,
                    sample=sample,
                    token_ids=tokens,
                    text="",
                    logp_sampler=tuple(-rng.random() - 3 for _ in tokens),
                    stop=StopReason.LENGTH,
                    version=0,
                )
            )
        scores = [Score(status=Status.SCORED, reward=rng.random(), correct=None) for _ in completions]
        groups.append(Group(prompt=prompt, completions=completions, scores=scores))
    return groups


def _sample(
    result: Result, engine: Any, policy: Policy, ranks: Ranks, groups: Sequence[Group], most_tokens: int
) -> None:
    """Every rank samples its share of the prompts with gathered weights. Only rank 0's share is compared."""
    prompts = [group.prompt for group in groups]
    sampling = Sampling(max_tokens=most_tokens)
    options = GenerateOptions(samples=4, sampling=sampling, seed=0, stream="train/1/0", version=0)
    started = time.monotonic()
    with gathered(policy.model):
        own = engine.generate(prompts[ranks.rank :: ranks.count], options)
    _synchronize(policy)
    # Until the last rank is done.
    result.sampling_s = float(ranks.max(torch.tensor([time.monotonic() - started], dtype=torch.float64)))
    result.completions = [[completion.token_ids for completion in group] for group in own]


def _use_gradients(optimizer: Any, model: Any, ranks: Ranks, result: Result, folder: Path) -> None:
    """Write the gradients of the first optimizer step to files, or compare them with those in the files.

    One parameter at a time, so that the comparison does not change the peak of memory much."""
    step = optimizer.step
    done = False

    def with_gradients(**arguments: Any) -> Any:
        nonlocal done
        if not done:
            done = True
            squares = [0.0, 0.0]
            trained = [p for p in model.parameters() if p.requires_grad and p.grad is not None]
            for number, parameter in enumerate(trained):
                found = full(parameter.grad).detach().float().cpu()  # a collective, so on all ranks
                file = folder / f"{number}.pt"
                if not ranks.several:
                    torch.save(found.clone(), file)
                elif ranks.leads:
                    expected = torch.load(file, weights_only=True)
                    squares[0] += float((found - expected).square().sum())
                    squares[1] += float(expected.square().sum())
            if ranks.several and ranks.leads:
                result.gradient_error = math.sqrt(squares[0] / squares[1])
        return step(**arguments)

    optimizer.step = with_gradients


def _synchronize(policy: Policy) -> None:
    if policy.device.type == "cuda":
        torch.cuda.synchronize(policy.device)


def report(one: Result, several: Result, count: int, tolerance: float) -> bool:
    """Print the ratios; whether a gradient differs too much."""
    gradient = several.gradient_error
    mine, theirs = (list(chain.from_iterable(c)) for c in (one.completions[::count], several.completions))
    equal = sum(a == b for a, b in zip(mine, theirs, strict=True))
    after_warm_up = slice(1, None) if len(one.seconds) > 1 else slice(None)
    seconds = [statistics.median(r.seconds[after_warm_up]) for r in (one, several)]
    print(f"gradient of the first optimizer step: relative difference {gradient:.2e} (limit {tolerance:.0e})")
    print(f"gradient norms, relative difference:  {_relative(one.norms, several.norms)}")
    print(f"losses, difference:                   {_absolute(one.losses, several.losses)}")
    print(f"completions of rank 0 that are equal: {equal} of {len(mine)}")
    print(f"seconds per training step:            {_ratio(*seconds, count, 's')}")
    print(f"sampling, until the last rank:        {_ratio(one.sampling_s, several.sampling_s, count, 's')}")
    memory = [r.memory_bytes / 1e9 for r in (one, several)]
    print(f"peak memory of a rank:                {_ratio(memory[0], memory[1], count, 'GB')}", flush=True)
    return not gradient <= tolerance


def _ratio(one: float, several: float, count: int, unit: str) -> str:
    return f"{one:.3g} {unit} in one process, {several:.3g} {unit} on {count} ranks, ratio {several / one:.2f}"


def _relative(one: Sequence[float], several: Sequence[float]) -> str:
    return " ".join(f"{abs(b - a) / abs(a):.1e}" if a else "-" for a, b in zip(one, several, strict=True))


def _absolute(one: Sequence[float], several: Sequence[float]) -> str:
    return " ".join(f"{abs(b - a):.1e}" for a, b in zip(one, several, strict=True))


if __name__ == "__main__":
    sys.exit(main())
