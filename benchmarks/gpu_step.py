"""One GSPO step of a 0.6B model on one GPU.

In: a CUDA device. Out: seconds and peak memory of sampling and of training, for 32 prompts x 8 completions x 256 tokens
and 4 optimizer steps of 64 completions: the settings that TRL was measured with. Invariant: both run as in a training
run, with compiled layers, and without timing inside of `learn`, which would disable the reuse of forwards.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace

import torch
from gpu_decode import CUDA, DENSE, NEW, NoText, build_model, prompts_of

from gspo.config import Config, LearnerConfig, RolloutConfig
from gspo.context import LearnContext
from gspo.learner.optimizer import Optimizer
from gspo.model.compiled_layers import request_compilation
from gspo.model.load import Policy
from gspo.objectives.table import objective as build_objective
from gspo.rollout.engine import EngineContext, GenerateOptions
from gspo.rollout.engines.local import build as build_engine
from gspo.step import learn
from gspo.types import Group, Sampling, Score, Status

PROMPTS, COMPLETIONS, UPDATES = 32, 8, 4
PEER = 28.0 + 4 * 0.43
"""Seconds that TRL 1.16 took on the same kind of machine: sampling with `generate`, then four optimizer steps."""


class SpecialTokens(NoText):
    """Adds the two token ids that a policy reads."""

    pad_token_id, eos_token_id = 0, 1


class Clock:
    """Seconds and peak memory of each phase."""

    def __init__(self) -> None:
        self.phases: dict[str, tuple[float, float]] = {}
        self.restart()

    def restart(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.start = time.perf_counter()

    def note(self, phase: str) -> None:
        torch.cuda.synchronize()
        before = self.phases.get(phase, (0.0, 0.0))
        spent, peak = time.perf_counter() - self.start, torch.cuda.max_memory_allocated()
        self.phases[phase] = (before[0] + spent, max(before[1], peak))
        self.restart()


def bench_step(repeats: int) -> None:
    model = build_model("qwen3", DENSE)
    request_compilation(model, "auto")
    policy = Policy(model=model, tokenizer=SpecialTokens(), device=CUDA)
    config = Config(
        rollout=RolloutConfig(prompts=PROMPTS, group_size=COMPLETIONS, max_tokens=NEW),
        learner=LearnerConfig(mini_batches=UPDATES, micro_batch_tokens=32768, learning_rate=1e-6),
    )
    learner = LearnContext(
        config=config,
        objective=build_objective("gspo"),
        policy=policy,
        reference=None,
        optimizer=Optimizer(model, config.learner, 100),
    )
    engine = build_engine(
        EngineContext(model=model, tokenizer=SpecialTokens(), stop_ids=()), slots=PROMPTS * COMPLETIONS
    )
    runs: list[dict[str, tuple[float, float]]] = []
    rng = random.Random(0)
    for step in range(repeats + 1):
        clock = Clock()
        prompts = [replace(p, id=f"{step}/{p.id}") for p in prompts_of(PROMPTS)]
        options = GenerateOptions(
            samples=COMPLETIONS, sampling=Sampling(max_tokens=NEW), seed=0, stream=f"{step}", version=step
        )
        completions_P = engine.generate(prompts, options)
        clock.note("sampling")
        groups = [
            Group(
                prompt=p,
                completions=c,
                scores=[
                    Score(status=Status.SCORED, reward=float(i < COMPLETIONS // 2), correct=i < COMPLETIONS // 2)
                    for i in rng.sample(range(COMPLETIONS), COMPLETIONS)
                ],
            )
            for p, c in zip(prompts, completions_P, strict=True)
        ]
        clock.restart()
        learn(learner, groups, step=step)
        clock.note("training: old log-probs and updates")
        runs.append(clock.phases)
    best = min(runs[1:], key=lambda phases: sum(seconds for seconds, _ in phases.values()))
    total = sum(seconds for seconds, _ in best.values())
    print(
        f"\nA GSPO step: Qwen3-0.6B shape, bf16 with float32 master weights, {PROMPTS} prompts of 64 x {COMPLETIONS} "
        f"completions of {NEW}, {UPDATES} optimizer steps; the first training, which compiles, took "
        f"{runs[0]['training: old log-probs and updates'][0]:.1f} s"
    )
    print(f"{'phase':<66} {'seconds':>8} {'peak GiB':>10}")
    for phase, (seconds, peak) in best.items():
        print(f"{phase:<66} {seconds:>8.2f} {peak / 2**30:>10.1f}  {seconds / total:.0%}")
    print(
        f"{'the step':<66} {total:>8.2f}             "
        f"{PEER / total:.0f} x TRL's {PEER:.1f} s on the same kind of machine",
        flush=True,
    )
