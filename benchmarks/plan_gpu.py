"""Memory and time of training steps on one GPU, next to what `gspo plan` predicts for them.

In: a CUDA device, or a CPU for a test of the script. Out: one line of JSON per case, a table of predictions and
measurements, and all of it in `plan.json` under $OUT if that is set. Invariant: a case that fails, or crashes its
process, is reported and does not stop the others. Compilation, warm-ups and loading are not timed.

    python benchmarks/plan_gpu.py                                # on one GPU, about 5 minutes
    python benchmarks/plan_gpu.py --device cpu --tiny            # tests the script, not the numbers

Each model has a process of its own. All start together and compile the layers of a model with two layers, so that
compiling, which needs CPU cores, happens at the same time. Then they measure one after the other.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plan_cases import CASES, MODELS, TINY, Case

Line = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
SAMPLING, LOGPROBS, TRAINING, OPTIMIZER = PHASES = ("sampling", "log-probs", "training", "optimizer")
WARM_TOKENS = 64
"""Tokens of the completions of a warm-up."""
LONG_S = 15.0
"""A case whose first step takes longer is not repeated."""


# --- One process per model ---


class Clock:
    """Seconds and peak memory of each phase of a step."""

    def __init__(self, device: Any) -> None:
        self.cuda = device.type == "cuda"
        self.phases: dict[str, dict[str, float]] = {}
        self.restart()

    def restart(self) -> None:
        import torch

        from gspo.model.compiled_layers import compile_seconds

        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.compiled = compile_seconds()
        self.start = time.perf_counter()

    def note(self, phase: str) -> None:
        """Add the time since the last note to this phase, without what was spent on compiling."""
        import torch

        from gspo.model.compiled_layers import compile_seconds

        if self.cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.start - (compile_seconds() - self.compiled)
        peak = torch.cuda.max_memory_allocated() if self.cuda else 0
        entry = self.phases.setdefault(phase, {"seconds": 0.0, "peak_bytes": 0})
        entry["seconds"] += seconds
        entry["peak_bytes"] = max(entry["peak_bytes"], peak)
        self.restart()


def config_of(case: Case, folder: Path, device: str = "cpu") -> Any:
    """The settings of a run that takes this step. `folder` has the model's config.json."""
    from gspo import config as settings

    tree = {
        "name": "plan",
        "steps": 100,
        "model": {
            "build": str(folder),
            "dtype": "bfloat16",
            "device": device,
            "gradient_checkpointing": case.checkpointing,
            # Not "auto", which does not compile the small models of the warm-up.
            "compile": "on" if case.compiled and device == "cuda" else "off",
        },
        "data": {"task": "sorting", "held_out": 0},
        "rollout": {"prompts": case.prompts, "group_size": case.group_size, "max_tokens": case.max_tokens},
        "objective": {"name": "gspo", "kl": case.kl},
        "learner": {"mini_batches": case.mini_batches, "micro_batch_tokens": case.micro_batch_tokens},
        "eval": {"every": 0},
    }
    if case.lora_rank:
        tree["model"]["lora"] = {"rank": case.lora_rank}
    config = settings.from_tree(tree, where=case.name)
    settings.check(config)
    return config


@contextmanager
def shape_folder(case: Case, layers: int | None = None) -> Iterator[Path]:
    """A folder with the model's config.json."""
    fields = MODELS[case.model] | ({"num_hidden_layers": layers} if layers else {})
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(fields))
        yield Path(folder)


class Step:
    """The components of a run for one case, and its steps."""

    def __init__(self, case: Case, folder: Path, device: str) -> None:
        from gspo.build import policy_for, run_objective, tokenizer_for
        from gspo.context import LearnContext
        from gspo.learner.optimizer import Optimizer
        from gspo.rollout.engine import EngineContext, build_engine

        self.case = case
        self.config = config_of(case, folder, device)
        self.policy = policy = policy_for(self.config, tokenizer_for(self.config))
        vocabulary = policy.model.get_input_embeddings().num_embeddings
        # No token ends a completion, or one in `mean_tokens` does.
        stop_ids = tuple(range(0, vocabulary, case.mean_tokens)) if case.mean_tokens else ()
        engine_context = EngineContext(
            model=policy.model, tokenizer=policy.tokenizer, stop_ids=stop_ids, routers=policy.routers
        )
        self.engine = build_engine(self.config.rollout.engine, engine_context, self.config.rollout.engine_options)
        self.vocabulary = vocabulary
        step = self

        class TimedOptimizer(Optimizer):
            def step(self, **arguments: Any) -> Any:
                step.clock.note(TRAINING)
                update = super().step(**arguments)
                step.clock.note(OPTIMIZER)
                return update

        objective = run_objective(self.config)
        self.learner = LearnContext(
            config=self.config,
            objective=objective,
            policy=policy,
            reference=policy.model if objective.kl else None,  # only cases with adapters have a reference
            optimizer=TimedOptimizer(policy.model, self.config.learner, 100),
        )
        self.clock = Clock(policy.device)

    def run(self, number: int, *, max_tokens: int) -> Line:
        """Take a step with completions of up to `max_tokens`."""
        import torch

        from gspo.learner.batch import TrainBatch
        from gspo.rollout.engine import GenerateOptions
        from gspo.step import learn
        from gspo.types import Group, Prompt, Sampling, Score, Status

        case, cuda = self.case, self.policy.device.type == "cuda"
        rng = random.Random(number)
        ids = [tuple(rng.randrange(self.vocabulary) for _ in range(case.prompt_tokens)) for _ in range(case.prompts)]
        prompts = [Prompt(id=f"{number}/{i}", content="", text="", token_ids=row) for i, row in enumerate(ids)]
        half = case.group_size // 2
        held = torch.cuda.memory_allocated() if cuda else 0
        decoded = self.engine.decoded
        self.clock = Clock(self.policy.device)
        completions_P = self.engine.generate(
            prompts,
            GenerateOptions(
                samples=case.group_size,
                sampling=Sampling(max_tokens=max_tokens),
                seed=0,
                stream=f"{number}",
                version=number,
                routes=True,
            ),
        )
        self.clock.note(SAMPLING)
        # Half of each group is right, so every completion has an advantage and is computed.
        groups = [
            Group(
                prompt=prompt,
                completions=completions,
                scores=[
                    Score(status=Status.SCORED, reward=float(i < half), correct=i < half)
                    for i in rng.sample(range(case.group_size), case.group_size)
                ],
            )
            for prompt, completions in zip(prompts, completions_P, strict=True)
        ]
        plans: list[Any] = []

        def before(batch: TrainBatch, index: int) -> None:
            if not index:
                plans.append(batch.plan)
                self.clock.note(LOGPROBS)

        self.clock.restart()
        learned = learn(self.learner, groups, step=number, before_update=before)
        assert learned is not None
        counted = self.engine.decoded
        return {
            "phases": self.clock.phases,
            "held_bytes": held,
            "tokens": sum(len(c.token_ids) for row in completions_P for c in row),
            "decode_steps": counted.steps - decoded.steps if counted and decoded else None,
            "decode_rows": counted.rows - decoded.rows if counted and decoded else None,
            "computed_tokens": plans[0].positions.computed,
            "micro_batches": [len(update) for update in plans[0].updates],
            "applied": [update.applied for update in learned.updates],
        }


def measure(case: Case, device: str, repeats: int, *, layers: int | None = None) -> Line:
    """A warm-up and `repeats` steps of a case. With `layers`, of a model with so many layers."""
    import torch

    from gspo.model.packed_forward import supports_packing

    with shape_folder(case, layers) as folder:
        step = Step(case, folder, device)
        parameters = list(step.policy.model.parameters())
        began = time.perf_counter()
        step.run(0, max_tokens=min(WARM_TOKENS, case.max_tokens))
        warm_s = time.perf_counter() - began
        cuda = step.policy.device.type == "cuda"
        if cuda:
            torch.cuda.empty_cache()
        runs: list[Line] = []
        began = time.perf_counter()
        while len(runs) < repeats and (not runs or time.perf_counter() - began < LONG_S):
            runs.append(step.run(1 + len(runs), max_tokens=case.max_tokens))
        step.engine.close()
        return heading(case) | {
            "parameters": sum(p.numel() for p in parameters),
            "trained": sum(p.numel() for p in parameters if p.requires_grad),
            "packed": supports_packing(step.policy.model),
            "paged": getattr(step.engine, "paged", None),
            "warm_s": warm_s,
            "reserved_bytes": torch.cuda.max_memory_reserved() if cuda else 0,
            "runs": runs,
        }


def heading(case: Case) -> Line:
    """What every line about a case begins with."""
    return {"case": asdict(case), "name": case.name, "fitted": case.fitted}


def device_facts(device: str) -> Line:
    """What one process finds on its device."""
    import torch
    import transformers

    facts = {"torch": torch.__version__, "transformers": transformers.__version__, "name": device}
    if device == "cpu":
        return facts
    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    return facts | {"name": torch.cuda.get_device_name(), "total_bytes": total, "free_bytes": free}


def probes(device: str) -> Line:
    """What the device reaches: a matrix product in bfloat16, and copies."""
    import torch

    if device == "cpu":
        return {}
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    flops = 2 * 8192**3 / _seconds(lambda: a @ a, 20)
    x = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return {"product_flops": flops, "copy_bytes_s": 2 * x.numel() / _seconds(lambda: y.copy_(x), 10)}


def _seconds(function: Any, times: int) -> float:
    import torch

    function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def work(index: int, arguments: argparse.Namespace) -> int:
    """Measure the cases of one model. Prints JSON lines: ready, then one per case."""
    cases = workers_of(arguments)[index]
    device = arguments.device

    def say(line: Line) -> None:
        print(json.dumps(line), flush=True)

    began = time.perf_counter()
    ready: Line = {"ready": index, "device": device_facts(device)}
    variants = {(c.lora_rank, c.checkpointing, c.kl, c.compiled): c for c in cases}
    for case in variants.values():
        try:
            measure(case, device, 0, layers=2)
        except Exception as error:
            ready["error"] = describe(error)  # the full model may still work
        release()
    say(ready | {"seconds": time.perf_counter() - began})
    sys.stdin.readline()
    if index == 0:
        say({"probes": probes(device)})
        release()
    for case in cases:
        try:
            say(measure(case, device, arguments.repeats))
        except Exception as error:
            say(heading(case) | {"error": describe(error)})
        release()
    return 0


def release() -> None:
    """Free the memory of the last model."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def describe(error: Exception) -> str:
    import traceback

    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error}"[:600] + f" ({last.filename}:{last.lineno})"


# --- The processes ---


class Worker:
    """The process of one model. Its lines are read as they come."""

    def __init__(self, index: int, cases: Sequence[Case], arguments: argparse.Namespace) -> None:
        self.cases = cases
        command = [sys.executable, __file__, "--worker", str(index), "--device", arguments.device]
        command += ["--repeats", str(arguments.repeats), *(["--tiny"] if arguments.tiny else [])]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": "4", **os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment
        )
        self.lines: queue.Queue[Line | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if line.startswith("{"):
                self.lines.put(json.loads(line))
        self.lines.put(None)

    def next(self, deadline: float) -> Line | None:
        """The next line; None if the process ended, or takes longer than until the deadline."""
        try:
            return self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def go(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it has ended, and `next` says so

    def end(self) -> str:
        """Stop the process; the last lines that it wrote to stderr."""
        self.process.kill()
        self.process.wait()
        self.errors.seek(0)
        tail = self.errors.read()[-1500:]
        self.errors.close()
        return tail


def workers_of(arguments: argparse.Namespace) -> list[list[Case]]:
    """The cases of each process."""
    grouped: dict[tuple[str, bool], list[Case]] = {}
    for case in TINY if arguments.tiny else CASES:
        grouped.setdefault(case.worker, []).append(case)
    return list(grouped.values())


def measure_all(arguments: argparse.Namespace) -> Line:
    began = time.monotonic()
    deadline = began + arguments.seconds
    workers = [Worker(i, cases, arguments) for i, cases in enumerate(workers_of(arguments))]
    result: Line = {"device": {}, "probes": {}, "cases": []}
    waiting = []
    for worker in workers:
        # Those that are not ready in time compile on their own, later.
        line = worker.next(began + 0.4 * arguments.seconds)
        if line is not None:
            result["device"] = result["device"] or line["device"]
            note = f": {line['error']}" if "error" in line else ""
            print(f"ready after {line['seconds']:.0f} s: {worker.cases[0].model}{note}", flush=True)
        waiting.append(line is None)
    for worker, late in zip(workers, waiting, strict=True):
        pending = list(worker.cases)
        worker.go()
        while pending:
            line = worker.next(deadline)
            if line is None:
                break
            if "ready" in line and late:
                continue
            if "probes" in line:
                result["probes"] = line["probes"]
                continue
            pending.pop(0)
            keep(result, line)
        printed = worker.end()
        for case in pending:
            reason = "not measured in time" if time.monotonic() >= deadline else f"its process ended: {printed}"
            keep(result, heading(case) | {"error": reason})
        result["seconds"] = time.monotonic() - began
    return result


def keep(result: Line, line: Line) -> None:
    """Print a case, and save all so far: whoever started this may stop it at any time."""
    result["cases"].append(line)
    print(json.dumps(line), flush=True)
    if out := os.environ.get("OUT"):
        Path(out, "plan.json").write_text(json.dumps(result))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="measure tiny models, to test the script")
    parser.add_argument("--repeats", type=int, default=2, help="steps per case after the warm-up")
    parser.add_argument("--seconds", type=float, default=450.0, help="end after this time, with the cases measured")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        return work(arguments.worker, arguments)
    result = measure_all(arguments)
    sys.path.insert(0, str(ROOT))
    from plan_fit import from_file, gpu_of_result, report  # it imports torch, which this process does not need before

    report(from_file(result), gpu_of_result(result))
    return int(any("error" in line for line in result["cases"]))


if __name__ == "__main__":
    sys.exit(main())
