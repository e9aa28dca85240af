"""The experiments of evidence.md that need a GPU, in pieces that fit into short sessions.

    python benchmarks/evidence_gpu.py --list                                  # questions, budgets and commands
    python benchmarks/evidence_gpu.py tune --out DIR --smollm2 FILE.gguf --minutes 8
    python benchmarks/evidence_gpu.py gsm8k --out DIR --data FOLDER --qwen MODEL --seeds 0

In: models and data files on this machine. Out: per question a comparison (`gspo compare`) or runs and evaluations, in
DIR. Further settings (`--steps=2`) go to the training commands. Invariants: what has finished is not run again, so a
question that `--minutes` has stopped continues with the same command; a rate is chosen on the tuning seed, which
reports nothing else. `--pack` writes finished runs without their weights, to continue on another machine:
unpack it in DIR.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compared import ends, finished
from evidence import DAPO, GRPO, GSPO, PARTS, SAMPLING, TOKEN_MEAN, TUNING_SEED

from gspo.view.compare.arms import parse_seeds
from gspo.view.compare.curves import read_run

ROOT = Path(__file__).parent.parent
UNFINISHED = 3
"""Exit code if the time was over."""
STOP_S = 60
"""How long a command may take to save what it has."""

WIDE = "+clip_low=3e-2+clip_high=4e-2"
AUTO = "+clip_low=auto:0.15+clip_high=auto:0.15"
TUNED = {
    GRPO: ("+learner.learning_rate=5e-6", "", "+learner.learning_rate=2e-5", "+learner.learning_rate=4e-5"),
    DAPO: ("+learner.learning_rate=5e-6", "", "+learner.learning_rate=2e-5", "+learner.learning_rate=4e-5"),
    GSPO: ("", "+learner.learning_rate=2e-5", WIDE, AUTO),
    GSPO + SAMPLING: ("", "+learner.learning_rate=2e-5", WIDE, AUTO),
}
"""Four configurations of each objective."""
MOE_GRPO = f"{GRPO}+clip_high=0.27"
COLLAPSE = (
    MOE_GRPO,
    f"{MOE_GRPO}+replay",
    f"{MOE_GRPO}+learner.warmup_updates=80",
    GSPO,
    "sapo",
    "vespo",
    "gmpo",
    "maspo",
    "dapo+keep=all+shape=none",
    "dppo_tv",
)
UPCYCLED = (MOE_GRPO, f"{MOE_GRPO}+replay", GSPO)
UPCYCLED_RATES = ("1e-5", "3e-5", "1e-4")
LOSS = 0.1
"""Accuracy that GRPO loses at a rate that is too high for it."""
LENGTHS = (GRPO, TOKEN_MEAN, "dr_grpo+advantage_scale=std+max_length=400", GSPO, "luspo")
GROUPS = {size: f"{GSPO}+rollout.prompts={512 // size}+rollout.group_size={size}" for size in (4, 8, 16, 32)}


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where things are."""

    out: Path
    data: Path
    smollm2: str
    qwen: str
    seeds: str
    settings: tuple[str, ...] = ()

    @property
    def each_seed(self) -> list[int]:
        return parse_seeds(self.seeds)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command, and what it leaves behind when it is complete; None if it skips what is complete itself."""

    words: tuple[str, ...]
    leaves: Path | None = None

    @property
    def done(self) -> bool:
        """Whether it need not run again."""
        if self.leaves is None or not self.leaves.exists():
            return False
        run = read_run(self.leaves) if (self.leaves / "config.toml").is_file() else None
        return run is None or run.finished


@dataclass(frozen=True, kw_only=True)
class Question:
    """A part of evidence.md."""

    budget: str
    commands: Callable[[Places], Sequence[Command]]
    after: Callable[[Places], bool] = lambda places: True
    """Whether the runs that it chooses by are complete."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("question", nargs="?", choices=QUESTIONS)
    add("--out", type=Path, default=Path("evidence"))
    add("--data", type=Path, default=Path(), help="folder with the files of GSM8K, MBPP, HumanEval and AIME 2024")
    add("--smollm2", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    add("--qwen", default="Qwen/Qwen2.5-Coder-1.5B-Instruct")
    add("--seeds", default="0-2", help="of questions other than the choice of rates")
    add("--minutes", type=float, help="stop after this time; the same command continues")
    add("--pack", type=Path, metavar="FILE.tar.gz", help="afterwards write the finished runs without their weights")
    add("--list", action="store_true", help="show questions and commands, run nothing")
    options, settings = parser.parse_known_args()
    places = Places(
        out=options.out,
        data=options.data,
        smollm2=options.smollm2,
        qwen=options.qwen,
        seeds=options.seeds,
        settings=tuple(settings),
    )
    if options.list or options.question is None:
        for name in [options.question] if options.question else QUESTIONS:
            print(f"{name}: {QUESTIONS[name].budget}")
            for command in QUESTIONS[name].commands(places):
                print(f"    {shlex.join(command.words)}")
        return 0
    if not QUESTIONS[options.question].after(places):
        parser.error(f"{options.question}: the runs that choose its settings are not complete; run the question before")
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else None
    code = run(QUESTIONS[options.question].commands(places), deadline)
    if options.pack:
        pack(options.out, options.pack)
    return code


def run(commands: Sequence[Command], deadline: float | None) -> int:
    """Run what is missing, until the deadline. The first failure ends it, because later commands need earlier ones."""
    for command in commands:
        if command.done:
            continue
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return UNFINISHED
        print(f"$ {shlex.join(command.words)}", flush=True)
        process = subprocess.Popen([sys.executable, *command.words], cwd=ROOT)
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            print("The time is over; repeat the command to continue.", flush=True)
            return UNFINISHED
        if code:
            return code
    return 0


def pack(out: Path, file: Path) -> None:
    """The finished runs without their weights, and what describes the comparisons."""
    with tarfile.open(file, "w:gz") as archive:
        for found in sorted([*out.rglob("compare.toml"), *out.glob("*.json"), *out.glob("*.jsonl")]):
            archive.add(found, found.relative_to(out))
        for config in sorted(out.rglob("config.toml")):
            run_dir = config.parent
            # A cold start is of no use without its weights.
            if run_dir.parent.name == "start" or (found_run := read_run(run_dir)) is None or not found_run.finished:
                continue
            for part in sorted(run_dir.iterdir()):
                if part.name not in ("checkpoints", "rollouts", "tokenizer", ".lock"):
                    archive.add(part, part.relative_to(out))


# ---- the questions


def compare(
    places: Places, name: str, recipe: str, arms: Sequence[str], seeds: str, jobs: int, *settings: str
) -> Command:
    words = ("-m", "gspo", "compare", f"recipes/{recipe}.toml", "--objectives", ",".join(arms), "--seeds", seeds)
    own = (f"--jobs={jobs}", f"--out={(places.out / name).absolute()}")
    return Command(words=(*words, *own, *settings, *places.settings))


def smollm2(places: Places, name: str, arms: Sequence[str], seeds: str) -> Command:
    settings = (f"--model.path={places.smollm2}", "--model.dtype=float16", "--tokens=400000")
    return compare(places, name, "smollm2-arithmetic", arms, seeds, 9, *settings)


TUNING_ARMS = [label + option for label, configurations in TUNED.items() for option in configurations]


def tune(places: Places) -> list[Command]:
    return [smollm2(places, "smollm2", TUNING_ARMS, str(TUNING_SEED))]


def tuned(places: Places) -> list[Command]:
    return [smollm2(places, "smollm2", [chosen(places, label) for label in TUNED], places.seeds)]


def chosen(places: Places, label: str) -> str:
    """The configuration that is most accurate on the tuning seed; the recipe's own until it has been run."""
    accuracy = tuning_ends(places.out / "smollm2", [label + option for option in TUNED[label]])
    return max(accuracy, key=lambda arm: accuracy[arm], default=label)


def tuning_ends(out: Path, arms: Sequence[str]) -> Mapping[str, float]:
    found = {arm: ends(finished(out, arm, [TUNING_SEED])) for arm in arms}
    return {arm: accuracy[TUNING_SEED] for arm, accuracy in found.items() if accuracy}


def parts(places: Places) -> list[Command]:
    return [smollm2(places, "smollm2", list(PARTS), places.seeds)]


def groups(places: Places) -> list[Command]:
    return [smollm2(places, "smollm2", list(GROUPS.values()), places.seeds)]


def collapse(places: Places) -> list[Command]:
    settings = ("--learner.learning_rate=1.4e-4", "--steps=60")
    return [compare(places, "moe", "moe", COLLAPSE, places.seeds, 20, *settings)]


UPCYCLED_ARMS = [f"{arm}+learner.learning_rate={rate}" for rate in UPCYCLED_RATES for arm in UPCYCLED]


def upcycle(places: Places) -> list[Command]:
    return upcycled_runs(places, UPCYCLED_ARMS, str(TUNING_SEED))


def upcycled(places: Places) -> list[Command]:
    """At the lowest rate at which GRPO loses accuracy on the tuning seed."""
    rate = next((rate for rate in UPCYCLED_RATES if loses(places, rate)), UPCYCLED_RATES[-1])
    return upcycled_runs(places, [f"{arm}+learner.learning_rate={rate}" for arm in UPCYCLED], places.seeds)


def loses(places: Places, rate: str) -> bool:
    runs = finished(places.out / "upcycled", f"{MOE_GRPO}+learner.learning_rate={rate}", [TUNING_SEED])
    return any((values := run.values("eval/accuracy"))[-1] < values[0] - LOSS for run in runs.values())


def upcycled_runs(places: Places, arms: Sequence[str], seeds: str) -> list[Command]:
    model = (places.out / "smollm2-moe").absolute()
    words = ("benchmarks/upcycle.py", places.smollm2, str(model), "--experts=8", "--top-k=2", "--noise=0.1")
    settings = (f"--model.path={model}", "--model.build=", "--model.build_options={}", "--model.dtype=float16")
    # The working of 24 digits takes 186 to 221 tokens of SmolLM2.
    settings += ("--data.task_options.digits=24", "--rollout.max_tokens=256", "--rollout.prompts=32", "--steps=30")
    settings += ("--cold_start.learning_rate=1e-4", "--cold_start.batch=64", "--learner.micro_batch_tokens=32768")
    return [
        Command(words=words, leaves=model),
        compare(places, "upcycled", "moe", arms, seeds, 4, *settings),
    ]


def length(places: Places) -> list[Command]:
    return [compare(places, "length", "qwen-gsm8k", LENGTHS, places.seeds, 1, "--tokens=1000000", *gsm8k_files(places))]


def gsm8k_files(places: Places) -> tuple[str, ...]:
    files = {"path": "gsm8k_train.jsonl", "held_out_path": "gsm8k_test.jsonl"}
    own = (f"--data.{key}={(places.data / name).absolute()}" for key, name in files.items())
    return (f"--model.path={places.qwen}", *own)


def replay(places: Places) -> list[Command]:
    arms = (GRPO, f"{GRPO}+replay", f"{GRPO}+replay=sampler")
    return [compare(places, "replay", "moe", arms, places.seeds, 1, "--steps=10", "--rollout.engine=vllm")]


def evaluate(places: Places, model: str, name: str, suite: str, file: str, *options: str) -> Command:
    result = (places.out / f"{name}-{suite}.json").absolute()
    words = ("-m", "gspo", "eval", model, "--suite", f"{suite}={(places.data / file).absolute()}")
    return Command(words=(*words, "--json", str(result), *options), leaves=result)


def train(places: Places, name: str, *words: str) -> Command:
    run_dir = (places.out / name).absolute()
    if (run_dir / "config.toml").is_file():
        return Command(words=("-m", "gspo", "train", "--resume", str(run_dir)), leaves=run_dir)
    return Command(words=("-m", "gspo", "train", *words, f"--run-dir={run_dir}", *places.settings), leaves=run_dir)


FILES = {"gsm8k": "gsm8k_test.jsonl", "humaneval": "HumanEval.jsonl.gz"}


def before(places: Places) -> list[Command]:
    return [evaluate(places, places.qwen, "before", suite, file) for suite, file in FILES.items()]


def trained_on(places: Places, name: str, recipe: str, suites: Sequence[str], *settings: str) -> list[Command]:
    commands = []
    for seed in places.each_seed:
        run_dir = f"{name}-seed-{seed}"
        commands.append(train(places, run_dir, f"recipes/{recipe}.toml", f"--seed={seed}", *settings))
        trained = str((places.out / run_dir).absolute())
        commands += [evaluate(places, trained, run_dir, suite, FILES[suite]) for suite in suites]
    return commands


def gsm8k(places: Places) -> list[Command]:
    return trained_on(places, "gsm8k", "qwen-gsm8k", ("gsm8k", "humaneval"), *gsm8k_files(places))


def mbpp(places: Places) -> list[Command]:
    data = f"--data.path={(places.data / 'mbpp.jsonl').absolute()}"
    return trained_on(
        places, "mbpp", "mbpp-code-gspo", ("humaneval",), f"--model.path={places.qwen}", data, "--steps=20"
    )


def aime24(places: Places) -> list[Command]:
    return [evaluate(places, places.qwen, "before", "aime24", "aime24_test.jsonl", "--samples", "32")]


QUESTIONS = {
    "tune": Question(
        budget="question 1: 4 configurations of 4 arms on seed 10; 16 runs of 400,000 tokens, 9 at a time, 6 minutes",
        commands=tune,
    ),
    "tuned": Question(
        budget="question 1: the best configuration of each arm; 12 runs on 3 seeds, 9 at a time, 6 minutes",
        commands=tuned,
        after=lambda places: len(tuning_ends(places.out / "smollm2", TUNING_ARMS)) == len(TUNING_ARMS),
    ),
    "parts": Question(budget="questions 2 and 6: 7 arms; 21 runs on 3 seeds, 9 at a time, 8 minutes", commands=parts),
    "groups": Question(
        budget="question 5: groups of 4 to 32; 12 runs on 3 seeds, 9 at a time, 5 minutes", commands=groups
    ),
    "collapse": Question(
        budget="question 3: 10 arms at 1.4e-4; 30 runs of 60 steps on 3 seeds, 20 at a time, 23 minutes",
        commands=collapse,
    ),
    "upcycle": Question(
        budget="question 3: 3 arms at 3 rates on seed 10, completions of 200 tokens; 9 runs, 4 at a time. Never timed: "
        "an estimate is 30 minutes",
        commands=upcycle,
    ),
    "upcycled": Question(
        budget="question 3: 3 arms at the lowest rate at which GRPO lost 10 points; 9 runs on 3 seeds, an estimated 30 "
        "minutes",
        commands=upcycled,
        after=lambda places: len(tuning_ends(places.out / "upcycled", UPCYCLED_ARMS)) == len(UPCYCLED_ARMS),
    ),
    "length": Question(
        budget="question 4: 5 arms; 15 runs of 1,000,000 tokens on 3 seeds, one at a time, 45 minutes", commands=length
    ),
    "replay": Question(
        budget="question 8: 3 arms with vLLM; 9 runs of 10 steps on 3 seeds, one at a time, 5 minutes", commands=replay
    ),
    "before": Question(budget="question 9: GSM8K and HumanEval before training, 2 minutes", commands=before),
    "gsm8k": Question(
        budget="question 9: training on GSM8K takes 5.6 minutes per seed, its evaluations about one; 3 seeds, 20 "
        "minutes",
        commands=gsm8k,
    ),
    "mbpp": Question(
        budget="question 9: 20 steps of MBPP in the sandbox and HumanEval afterwards; 3 seeds. Never timed: start with "
        "--seeds 0",
        commands=mbpp,
    ),
    "aime24": Question(
        budget="question 9: 960 completions of up to 32,768 tokens. Never timed: an estimate is 10 minutes",
        commands=aime24,
    ),
}


if __name__ == "__main__":
    sys.exit(main())
