"""Does a model learn when to call a tool, and is it the tool that helps? Trains and evaluates, for `agents.md`.

    python benchmarks/agents.py recipes/calculator-tool.toml --seeds 0 1 2 --out DIR
    python benchmarks/agents.py recipes/gsm8k-python-tool.toml --seeds 0 1 2 --without-tool --out DIR

Prints, for the model before and after RL: accuracy on the held-out problems with the tool, with the tool disabled, and
with its observations shuffled, and the share of conversations with a call, by the field `kind`. With `--without-tool`,
it also trains the same model without the tool, and compares. Intervals are Wilson intervals over problems, as
everywhere; those of differences between seeds are t intervals over seeds. A run that is there already is not repeated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gspo import config as settings
from gspo.build import engine_for, environment_for, policy_for, reward_pool, saved_model, tokenizer_for
from gspo.config import Config
from gspo.data.problems import load_problems
from gspo.evaluation import Evaluation, evaluate, interval

HERE = Path(__file__).parent
VARIANTS = ("tool", "disabled", "shuffled")
ABLATIONS = {
    "calculator": {"disabled": "Disabled", "shuffled": "Shuffled"},
    "python_tool": {"disabled": "PythonDisabled", "shuffled": "PythonShuffled", "without": "PythonLeftOut"},
}
"""The classes of `agents_ablations.py` for each environment."""
INSTRUCTION = "Think step by step and be brief. End your answer with the number."
"""That of the model without a tool."""
Results = dict[str, dict[str, Any]]
T_97_5 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}


def ablation(environment: str, variant: str) -> str:
    """The setting that names it; empty for the environment itself."""
    if variant == "tool":
        return ""
    found = ABLATIONS.get(environment, {})
    if variant not in found:
        sys.exit(f"agents: environment {environment} has no variant {variant!r}; it has: {', '.join(found) or 'none'}")
    return f"--environment.name={HERE}/agents_ablations.py:{found[variant]}"


def train(recipe: str, run: Path, options: Sequence[str]) -> None:
    """A run in this directory, unless it is there."""
    if not (run / "curves.png").is_file():
        shutil.rmtree(run, ignore_errors=True)  # it was interrupted
        subprocess.run([sys.executable, "-m", "gspo", "train", recipe, f"--run_dir={run}", *options], check=True)


def measured(run: Path, checkpoint: Path | None, override: str, samples: int) -> Evaluation:
    """The held-out problems with a checkpoint, or with the model that the run began with, perhaps with another
    environment."""
    overrides = [override] if override else []
    config: Config = settings.override(settings.read_toml(run / "config.toml"), overrides, where=str(run))
    with ExitStack() as stack:
        opened = environment_for(config, stack)
        assert opened is not None
        rewards = reward_pool(config)
        stack.callback(rewards.close)
        source = config.model if checkpoint is None else saved_model(config.model, checkpoint)
        tokenizer = tokenizer_for(config, source)
        problems = opened.open(load_problems(config.data, tokenizer, config.seed).held_out, tokenizer)
        policy = policy_for(config, tokenizer, source, routers=False)
        engine = opened.engine(engine_for(config, policy), policy)
        return evaluate(
            engine,
            rewards,
            problems,
            samples=samples,
            sampling=config.rollout.sampling,
            seed=config.seed,
            stream=f"agents/{checkpoint.name if checkpoint else 0}",
        )


def summary(done: Evaluation) -> dict[str, object]:
    """Accuracy, and the share of conversations with a call, by kind of problem."""
    kinds = sorted({str(group.prompt.columns.get("kind", "all")) for group in done.groups})
    found: dict[str, object] = {"accuracy": _numbers(done.accuracy)}
    for kind in kinds:
        groups = [g for g in done.groups if str(g.prompt.columns.get("kind", "all")) == kind]
        called = [
            statistics.fmean(any(t.calls for t in c.conversation.turns) for c in g.completions if c.conversation)
            for g in groups
        ]
        found[kind] = {"accuracy": _numbers(Evaluation(groups=groups).accuracy), "calls": _numbers(interval(called))}
    return found


def _numbers(estimate: object) -> list[float]:
    return [round(getattr(estimate, name), 4) for name in ("value", "low", "high")]


def results(run: Path, variants: Sequence[str], samples: int) -> Results:
    """What was measured of a run, by when and variant. Measures what is missing in its `agents.json`."""
    file = run / "agents.json"
    found: Results = json.loads(file.read_text()) if file.is_file() else {}
    environment = settings.read_toml(run / "config.toml")["environment"]["name"]
    checkpoints = sorted((run / "checkpoints").glob("[0-9]*"))
    # A model that was neither built nor cold-started is not saved before the first step.
    first = checkpoints[0] if checkpoints and int(checkpoints[0].name) == 0 else None
    for when, checkpoint in (("before", first), ("after", checkpoints[-1] if checkpoints else None)):
        for variant in variants:
            if f"{when}, {variant}" not in found:
                done = measured(run, checkpoint, ablation(environment, variant), samples)
                found[f"{when}, {variant}"] = summary(done)
                file.write_text(json.dumps(found))
            print(json.dumps({"run": run.name, "when": when, "variant": variant, **found[f"{when}, {variant}"]}))
    sys.stdout.flush()
    return found


def report(name: str, differences: Sequence[float]) -> None:
    """The mean of differences between accuracies, with a t interval over seeds."""
    if len(differences) > 1:
        half = T_97_5[len(differences)] * statistics.stdev(differences) / len(differences) ** 0.5
        print(json.dumps({name: round(statistics.fmean(differences), 4), "half_width_95": round(half, 4)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--without-tool", action="store_true", help="also train the same model without the tool")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of both runs")
    parser.add_argument("--discard", action="store_true", help="delete the checkpoints of a run once it is measured")
    chosen = parser.parse_args()
    gains, alone, advantages = [], [], []
    for seed in chosen.seeds:
        options = [f"--seed={seed}", "--checkpoint.keep=0", *(f"--{one}" for one in chosen.set)]
        kinds = {"": ([], chosen.variants)}
        if chosen.without_tool:
            environment = settings.load(chosen.recipe, [f"--{one}" for one in chosen.set]).environment.name
            without = [ablation(environment, "without"), f"--data.instruction={INSTRUCTION}"]
            kinds["-without-tool"] = (without, ["tool"])
        after = {}
        for suffix, (changes, variants) in kinds.items():
            run = chosen.out / f"seed-{seed}{suffix}"
            train(chosen.recipe, run, [*options, *changes])
            found = results(run, variants, chosen.samples)
            before, after[suffix] = (found[f"{when}, tool"]["accuracy"][0] for when in ("before", "after"))
            (alone if suffix else gains).append(after[suffix] - before)
            if chosen.discard:
                shutil.rmtree(run / "checkpoints", ignore_errors=True)
        if chosen.without_tool:
            advantages.append(after[""] - after["-without-tool"])
    report("gain", gains)
    report("gain without the tool", alone)
    report("with the tool, more than without it", advantages)


if __name__ == "__main__":
    main()
