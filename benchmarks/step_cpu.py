"""One GSPO step of the demo, by gspo and by TRL's GRPOTrainer: same model, problems, sampling and settings.

In: the Python of an environment with TRL (`make bench-cpu` creates `.venv-trl` and runs this). Out: seconds per step of
both, everything included, by wall clock between the ends of steps and by CPU time of all processes (reward workers,
too), which says more if other processes share the cores. Both train from the same cold-started checkpoint with one
thread. A step is 32 prompts x 8 completions, then four optimizer steps. The two alternate, so that other load slows
both equally. Invariant: both compute the same loss for one batch with made-up old log-probs, or the script fails.

    python benchmarks/step_cpu.py --trl .venv-trl/bin/python [--rounds 12] [--repeats 2]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import gspo
from gspo.data.tasks.addition import build

SETTINGS: dict[str, Any] = {
    "prompts": 32,
    "completions": 8,
    "batch": 256,
    "max_tokens": 48,
    "clip_low": 3e-3,
    "clip_high": 4e-3,
    "learning_rate": 5e-4,
}
WARM_UP = 2
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}


def recipe(folder: Path) -> str:
    """The demo's recipe without cold start and evaluations, from the prepared model."""
    s = SETTINGS
    return f"""
name = "bench"
steps = 1000
[model]
path = "{folder}/model"
threads = 1
[data]
task = "addition"
task_options = {{digits = 3}}
held_out = 1
[rollout]
prompts = {s["prompts"]}
group_size = {s["completions"]}
max_tokens = {s["max_tokens"]}
[objective]
name = "gspo"
clip_low = {s["clip_low"]}
clip_high = {s["clip_high"]}
[learner]
mini_batches = 4
learning_rate = {s["learning_rate"]}
[eval]
every = 0
[checkpoint]
every = 1000
"""


def prepare(folder: Path) -> float:
    """Write a cold-started model, the prompts, and a batch to check the loss on. Returns the loss of gspo on it."""
    run = folder / "start"
    command = [sys.executable, "-m", "gspo.cli", "demo", f"--run-dir={run}", "--steps=1", "--eval.every=0"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=ONE_THREAD)
    (run / "checkpoints" / "000000").rename(folder / "model")
    (folder / "bench.toml").write_text(recipe(folder))
    records = [json.loads(line) for line in (run / "rollouts" / "000001.jsonl").read_text().splitlines()]
    task, rng = build(digits=3), random.Random(0)
    with (folder / "prompts.jsonl").open("w") as out:
        for problem in (task.generate(rng) for _ in range(4000)):
            row = {"prompt": f"<user>{problem.prompt}<assistant>", "answer": problem.answer}
            out.write(json.dumps(row) + "\n")
    return check(folder, records[:64])


def check(folder: Path, records: list[dict[str, Any]]) -> float:
    """The GSPO loss of a padded batch. Noise on the old log-probs makes some completions clip."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    prompt = torch.tensor([tokenizer(r["prompt"], add_special_tokens=False)["input_ids"] for r in records])
    width = max(len(r["token_ids"]) for r in records)
    completion = torch.tensor(
        [r["token_ids"] + [tokenizer.pad_token_id] * (width - len(r["token_ids"])) for r in records]
    )
    mask = torch.tensor([[i < len(r["token_ids"]) for i in range(width)] for r in records])
    advantage = torch.tensor([r["advantage"] for r in records])
    with torch.no_grad():
        input_ids = torch.cat([prompt, completion], 1)
        attention_mask = torch.cat([torch.ones_like(prompt), mask.long()], 1)
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, prompt.shape[1] - 1 : -1]
        logp = torch.log_softmax(logits.float(), -1).gather(-1, completion.unsqueeze(-1)).squeeze(-1)
    generator = torch.Generator().manual_seed(0)
    old = logp + 0.02 * torch.randn(logp.shape, generator=generator)
    save_file(
        {
            "prompt_ids": prompt,
            "prompt_mask": torch.ones_like(prompt),
            "completion_ids": completion,
            "completion_mask": mask.long(),
            "advantages": advantage,
            "old_per_token_logps": old.contiguous(),
        },
        folder / "check.safetensors",
    )
    objective = gspo.objective("gspo", clip_low=SETTINGS["clip_low"], clip_high=SETTINGS["clip_high"])
    out = gspo.policy_loss(objective, logp, old, advantage, mask)
    assert out.stats["clip_fraction_sequences"] > 0
    return float(out.loss)


def run_gspo(folder: Path, rounds: int, number: int) -> dict[str, Any]:
    """Train with gspo. A step ends when its line appears on stdout."""
    run = folder / f"run{number}"
    command = [
        sys.executable,
        "-m",
        "gspo.cli",
        "train",
        str(folder / "bench.toml"),
        f"--steps={rounds}",
        f"--run-dir={run}",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ONE_THREAD) as process:
        assert process.stdout
        steps = (line for line in process.stdout if re.match(r"step \d+/", line))
        ends, cpu = zip(*((time.perf_counter(), cpu_seconds(process.pid)) for _ in steps), strict=True)
    assert len(ends) == rounds
    rewards = [json.loads(line).get("reward/mean") for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {"ends": ends, "cpu": cpu, "rewards": [r for r in rewards if r is not None]}


def cpu_seconds(process: int) -> float:
    """CPU time of a process and those that it has started, so far."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            # The second field is a name in parentheses, which may contain anything.
            fields = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(fields[1])
            ticks[int(file.parent.name)] = sum(map(int, fields[11:15]))  # of ended children, too
    tree = {process}
    while found := {child for child, parent in parents.items() if parent in tree} - tree:
        tree |= found
    return sum(ticks[p] for p in tree) / os.sysconf("SC_CLK_TCK")


def run_trl(folder: Path, rounds: int, python: str) -> dict[str, Any]:
    """Train with TRL, in its own environment."""
    script = Path(__file__).with_name("trl_step.py")
    done = subprocess.run(
        [python, str(script), str(folder), str(rounds), json.dumps(SETTINGS)],
        capture_output=True,
        text=True,
        env=ONE_THREAD,
        check=False,
    )
    found = re.search(r"^RESULT (.*)$", done.stdout, re.M)
    if not found:
        raise SystemExit(f"TRL failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(found[1]))


def seconds(side: dict[str, Any]) -> list[float]:
    """Seconds between the ends of steps, without the warm-up steps."""
    ends = side["ends"][WARM_UP:]
    return [b - a for a, b in itertools.pairwise(ends)]


def cpu_per_step(side: dict[str, Any]) -> float:
    """Seconds of CPU time per step, without the warm-up steps."""
    return statistics.median(b - a for a, b in itertools.pairwise(side["cpu"][WARM_UP:]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl", required=True, help="Python executable of an environment with TRL")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loss = prepare(folder)
        ours: list[float] = []
        theirs: list[float] = []
        cpu: list[tuple[float, float]] = []
        for number in range(options.repeats):
            mine = run_gspo(folder, options.rounds, number)
            other = run_trl(folder, options.rounds, options.trl)
            ours += seconds(mine)
            theirs += seconds(other)
            cpu.append((cpu_per_step(mine), cpu_per_step(other)))
            print(
                f"rewards, first to last round: gspo {mine['rewards'][0]:.2f} to {mine['rewards'][-1]:.2f}, "
                f"TRL {other['rewards'][0]:.2f} to {other['rewards'][-1]:.2f}",
                flush=True,
            )
    difference = abs(loss - other["loss"])
    print(
        f"loss of the same batch: gspo {loss:.8f}, TRL {other['version']} {other['loss']:.8f} "
        f"(difference {difference:.1e})"
    )
    ratio = statistics.median(theirs) / statistics.median(ours)
    print(
        f"seconds per step: gspo {statistics.median(ours):.3f}, TRL {statistics.median(theirs):.3f}: "
        f"{ratio:.1f} times as fast"
    )
    for mine_cpu, other_cpu in cpu:
        print(
            f"seconds of CPU time per step: gspo {mine_cpu:.3f}, TRL {other_cpu:.3f}: "
            f"{other_cpu / mine_cpu:.2f} times as fast"
        )
    if difference > 1e-7:
        raise SystemExit("the losses of gspo and TRL differ: the two do not run the same objective")


if __name__ == "__main__":
    main()
