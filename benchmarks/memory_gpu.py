"""What fits on one GPU: all weights of an 8B model with each optimizer, exact resume, and long completions.

In: a device. Out, printed as it goes: peak memory next to what `gspo plan` predicts, seconds of forward and backward
and of the update, whether a restored optimizer continues bitwise identically, and memory and time against length.
Invariant: weights are random, and each section builds its own model, so that it can run alone in a process.

    python benchmarks/memory_gpu.py SECTION [SECTION ...] [--device cuda] [--tiny] [--updates 3]

    full-default full-8bit full-offload full-both   8B shape, all weights, checkpointing; the first must not fit
    same                                            0.6B shape: offload gives the weights of the default
    resume-8bit resume-offload resume-both          1.5B shape: saved, restored and continued
    long-0.6b long-8b                               a completion of 2k to 32k tokens; all weights, and LoRA

`--tiny` runs the same code with models of a few thousand weights, also on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import transformers
from gpu_decode import DENSE, LARGE
from safetensors.torch import load_file, save_file

from gspo.config import Config, LearnerConfig, LoraConfig, ModelConfig, RolloutConfig
from gspo.learner.forward import completion_logprobs
from gspo.learner.optimizer import Optimizer
from gspo.learner.plan import Plan, make_plan
from gspo.model.adapter import attach
from gspo.model.compiled_layers import request_compilation
from gspo.model.gradient_checkpointing import recompute_activations
from gspo.model.micro_batch import TokenSequence
from gspo.model.out_of_memory import out_of_memory, release_memory
from gspo.model.packed_forward import supports_packing
from gspo.preflight.memory import estimate, total
from gspo.preflight.workload import Workload

T = TypeVar("T")
Way = Literal["default", "8bit", "offload", "both"]
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "0.6B": DENSE,
    "1.5B": {
        **DENSE,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "8B": LARGE["dense, Qwen3-8B shape"][1],
}
TINY = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
POSITIONS = 40960


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where and how large."""

    device: torch.device
    tiny: bool
    updates: int

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    def model(self, shape: str, *, lora: int = 0, checkpointing: bool = False, compile: bool = False) -> Any:
        torch.manual_seed(0)
        fields = {**SHAPES[shape], **(TINY if self.tiny else {}), "max_position_embeddings": POSITIONS}
        with self.device:
            config = transformers.AutoConfig.for_model("qwen3", **fields)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        if lora:
            attach(model, LoraConfig(rank=lora), base="", seed=0)
            model.to(self.device)
        if checkpointing:
            recompute_activations(model)
        assert supports_packing(model)
        if compile and self.gpu:
            request_compilation(model, "auto")
        return model

    def plan(self, model: Any, lengths: list[int], prompt: int, budget: int) -> Plan:
        """One update of completions with these lengths, of one prompt."""
        rng, vocabulary = random.Random(0), model.config.vocab_size

        def ids(count: int) -> tuple[int, ...]:
            return tuple(rng.randrange(vocabulary) for _ in range(count))

        shared = ids(prompt)
        rows = [TokenSequence(prompt_ids=shared, completion_ids=ids(length)) for length in lengths]
        return make_plan(rows, [0] * len(rows), mini_batches=1, token_budget=budget, pad_id=0, seed="", packed=True)

    def synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def timed(self, work: Callable[[], T]) -> tuple[T, float]:
        """The result of some work, and its seconds."""
        self.synchronize()
        start = time.perf_counter()
        result = work()
        self.synchronize()
        return result, time.perf_counter() - start

    def seconds(self, work: Callable[[], Any]) -> float:
        return self.timed(work)[1]

    def reset_peak(self) -> None:
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float:
        """Peak of allocated GPU memory in GB; 0 on a CPU, where it is not counted."""
        return torch.cuda.max_memory_allocated() / 1e9 if self.gpu else 0.0


def host_peak() -> float:
    """Peak of this process's memory in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def settings_of(way: Way) -> LearnerConfig:
    return LearnerConfig(
        learning_rate=1e-5,
        mini_batches=1,
        spike=0.0,
        optimizer="adamw_8bit" if way in ("8bit", "both") else "adamw",
        optimizer_offload=way in ("offload", "both"),
    )


def gradients(model: Any, plan: Plan, device: torch.device) -> None:
    """Accumulate the gradient of a loss with both signs, as advantages have."""
    sign_B = torch.tensor([1.0 if s % 2 else -1.0 for s in range(len(plan.sequences))])
    gain_N = (sign_B[plan.sequence_N] / plan.tokens).to(device)
    for cpu_batch in plan.updates[0]:
        micro = cpu_batch.to(device)
        (gain_N[micro.at_N] * completion_logprobs(model, micro, 1.0)[0]).sum().backward()


def predicted(bench: Bench, model: Any, settings: LearnerConfig, plan: Plan, *, checkpointing: bool, lora: int) -> Any:
    """What the model of memory of `gspo plan` says of these updates."""
    longest = max(len(row.completion_ids) for row in plan.sequences)
    prompt = len(plan.sequences[0].prompt_ids)
    budget = max(micro.input_ids.numel() for micro in plan.updates[0])
    config = Config(
        model=ModelConfig(path="x", gradient_checkpointing=checkpointing, lora=LoraConfig(rank=lora)),
        rollout=RolloutConfig(prompts=1, group_size=len(plan.sequences), max_tokens=longest),
        learner=replace(settings, micro_batch_tokens=budget),
    )
    work = Workload(
        config=config,
        skeleton=model,
        prompt_tokens=prompt,
        completion_tokens=longest,
        kl=False,
        gpu=bench.gpu,
        packed=True,
    )
    return estimate(work)


def full(bench: Bench, way: Way) -> None:
    model = bench.model("8B", checkpointing=True, compile=True)
    length = 16 if bench.tiny else 512
    plan = bench.plan(model, [length] * 32, length, 17 * length)
    settings = settings_of(way)
    need = predicted(bench, model, settings, plan, checkpointing=True, lora=0)
    count = sum(p.numel() for p in model.parameters())
    print(
        f"\n8B shape, all {count / 1e9:.3g}B weights in bfloat16, gradient checkpointing, optimizer {way}: 32 "
        f"completions of {length} tokens; predicted: training {need.peak_of('training') / 1e9:.1f} GB, update "
        f"{need.peak_of('the optimizer step') / 1e9:.1f} GB, host {total(need.host) / 1e9:.1f} GB",
        flush=True,
    )
    try:
        optimizer, spent = bench.timed(lambda: Optimizer(model, settings, 100))
        print(f"masters made in {spent:.1f} s")
        for update in range(bench.updates):
            bench.reset_peak()
            forward = bench.seconds(lambda: gradients(model, plan, bench.device))
            training = bench.peak()
            bench.reset_peak()
            result, step = bench.timed(lambda: optimizer.step(loss_finite=True))
            print(
                f"update {update + 1}: forward + backward {forward:.2f} s, peak {training:.1f} GB; "
                f"update {step:.2f} s, peak {bench.peak():.1f} GB; host peak {host_peak():.1f} GB; "
                f"gradient norm {result.grad_norm:.3g}, applied {result.applied}",
                flush=True,
            )
    except Exception as error:
        if not out_of_memory(error):
            raise
        print(f"out of memory: {str(error).splitlines()[0]:.200}", flush=True)


def same(bench: Bench) -> None:
    """Weights and states after some updates, with and without offload."""
    for one, other in (("default", "offload"), ("8bit", "both")):
        states = []
        for way in (one, other):
            model = bench.model("0.6B")
            plan = bench.plan(model, [16, 48] * 4 if bench.tiny else [256, 768] * 4, 16, 4096)
            optimizer = Optimizer(model, settings_of(way), 100)  # type: ignore[arg-type]
            for _ in range(bench.updates):
                gradients(model, plan, bench.device)
                optimizer.step(loss_finite=True)
            states.append({key: t.cpu().clone() for key, t in (model.state_dict() | optimizer.state()).items()})
            del model, optimizer
            release_memory()
        print(f"0.6B shape, {bench.updates} updates, {one} and {other}: {difference(*states)}", flush=True)


def difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str:
    if one.keys() != other.keys():
        return f"DIFFERENT NAMES: {sorted(one.keys() ^ other.keys())[:5]}"
    unequal = {}
    for key, expected in one.items():
        found = other[key].cpu()
        if not torch.equal(expected, found):
            unequal[key] = float((expected.double() - found.double()).abs().max())
    if not unequal:
        return f"{len(one)} tensors bitwise identical"
    worst = max(unequal, key=lambda key: unequal[key])
    return f"{len(unequal)} of {len(one)} TENSORS DIFFER, most {worst} by {unequal[worst]:.2g}"


def resume(bench: Bench, way: Way) -> None:
    """Two updates, save, a third; and the third again from what was saved."""
    settings = settings_of(way)
    model = bench.model("1.5B")
    plan = bench.plan(model, [16, 48] * 4 if bench.tiny else [256, 768] * 4, 16, 4096)
    optimizer = Optimizer(model, settings, 100)
    for _ in range(2):
        gradients(model, plan, bench.device)
        optimizer.step(loss_finite=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trainer.tensors")
        weights = {key: t.cpu().clone() for key, t in model.state_dict().items()}
        spent = bench.seconds(lambda: save_file({k: t.contiguous() for k, t in optimizer.state().items()}, file))
        size = file.stat().st_size / 1e9
        gradients(model, plan, bench.device)
        optimizer.step(loss_finite=True)
        whole = {key: t.cpu().clone() for key, t in (model.state_dict() | optimizer.state()).items()}
        del optimizer
        release_memory()
        model.load_state_dict(weights)
        optimizer = Optimizer(model, settings, 100)
        loading = bench.seconds(lambda: optimizer.load(load_file(file), 2))
    gradients(model, plan, bench.device)
    optimizer.step(loss_finite=True)
    resumed = model.state_dict() | optimizer.state()
    print(
        f"1.5B shape, optimizer {way}: state of {size:.2f} GB saved in {spent:.1f} s, loaded in {loading:.1f} s; third "
        f"update continued and resumed: {difference(whole, resumed)}; host peak {host_peak():.1f} GB",
        flush=True,
    )


def long(bench: Bench, shape: str, lora: int) -> None:
    """One completion per update, the longest first."""
    model = bench.model(shape, lora=lora, checkpointing=True, compile=True)
    optimizer = Optimizer(model, settings_of("default"), 100)
    lengths = (64, 32) if bench.tiny else (32256, 16384, 8192, 4096, 2048)
    prompt = 8 if bench.tiny else 512
    print(f"\n{shape} shape, {f'LoRA rank {lora}' if lora else 'all weights'}, gradient checkpointing, prompt {prompt}")
    print(f"{'completion':>10} {'first s':>8} {'s':>8} {'update s':>8} {'peak GB':>8} {'predicted':>9}")
    for length in lengths:
        plan = bench.plan(model, [length], prompt, prompt + length)
        need = predicted(bench, model, settings_of("default"), plan, checkpointing=True, lora=lora)
        try:
            first = bench.seconds(lambda plan=plan: gradients(model, plan, bench.device))
            optimizer.step(loss_finite=True)
            bench.reset_peak()
            spent = bench.seconds(lambda plan=plan: gradients(model, plan, bench.device))
            peak = bench.peak()
            step = bench.seconds(lambda: optimizer.step(loss_finite=True))
        except Exception as error:
            if not out_of_memory(error):
                raise
            model.zero_grad(set_to_none=True)
            release_memory()
            print(f"{length:>10} out of memory", flush=True)
            continue
        wanted = need.peak_of("training") / 1e9
        print(f"{length:>10} {first:>8.2f} {spent:>8.2f} {step:>8.3f} {peak:>8.1f} {wanted:>9.1f}", flush=True)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "full-default": lambda bench: full(bench, "default"),
    "full-8bit": lambda bench: full(bench, "8bit"),
    "full-offload": lambda bench: full(bench, "offload"),
    "full-both": lambda bench: full(bench, "both"),
    "same": same,
    "resume-8bit": lambda bench: resume(bench, "8bit"),
    "resume-offload": lambda bench: resume(bench, "offload"),
    "resume-both": lambda bench: resume(bench, "both"),
    "long-0.6b": lambda bench: long(bench, "0.6B", 0),
    "long-8b": lambda bench: long(bench, "8B", 16),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", choices=SECTIONS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--updates", type=int, default=3)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("this benchmark needs a CUDA device, and this machine has none; try --device cpu --tiny")
        return 1
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}; torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    bench = Bench(device=device, tiny=options.tiny, updates=options.updates)
    for section in options.sections:
        start = time.monotonic()
        SECTIONS[section](bench)
        gc.collect()
        release_memory()
        print(f"{section} took {time.monotonic() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
