"""Does a model learn when to call a tool, and is it the tool that helps? Trains and evaluates, for `agents.md`.

    python benchmarks/agents.py recipes/calculator-tool.toml --seeds 0 1 2 --out DIR

Prints, for the model before and after RL: accuracy on the held-out problems with the tool, with the tool disabled, and
with its observations shuffled, and the share of conversations with a call, by the field `kind`. Intervals are Wilson
intervals over problems, as everywhere; those of differences between seeds are t intervals over seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from gspo import config as settings
from gspo.build import engine_for, environment_for, policy_for, reward_pool, saved_model, tokenizer_for
from gspo.config import Config
from gspo.data.problems import load_problems
from gspo.evaluation import Evaluation, evaluate, interval

HERE = Path(__file__).parent
VARIANTS = {
    "tool": "",
    "disabled": f"{HERE}/agents_ablations.py:Disabled",
    "shuffled": f"{HERE}/agents_ablations.py:Shuffled",
}
T_97_5 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}


def train(recipe: str, seed: int, out: Path) -> Path:
    """A run with this seed; its directory."""
    run = out / f"seed-{seed}"
    if not (run / "curves.png").is_file():
        options = [f"--run_dir={run}", f"--seed={seed}", "--checkpoint.keep=0"]
        subprocess.run([sys.executable, "-m", "gspo", "train", recipe, *options], check=True)
    return run


def measured(run: Path, checkpoint: Path, environment: str, samples: int) -> Evaluation:
    """The held-out problems with a checkpoint, perhaps with another environment."""
    override = [f"--environment.name={environment}"] if environment else []
    config: Config = settings.override(settings.read_toml(run / "config.toml"), override, where=str(run))
    with ExitStack() as stack:
        opened = environment_for(config, stack)
        assert opened is not None
        rewards = reward_pool(config)
        stack.callback(rewards.close)
        model = saved_model(config.model, checkpoint)
        tokenizer = tokenizer_for(config, model)
        problems = opened.open(load_problems(config.data, tokenizer, config.seed).held_out, tokenizer)
        policy = policy_for(config, tokenizer, model, routers=False)
        engine = opened.engine(engine_for(config, policy), policy)
        return evaluate(
            engine,
            rewards,
            problems,
            samples=samples,
            sampling=config.rollout.sampling,
            seed=config.seed,
            stream=f"agents/{checkpoint.name}",
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    chosen = parser.parse_args()
    gains = []
    for seed in chosen.seeds:
        run = train(chosen.recipe, seed, chosen.out)
        checkpoints = sorted((run / "checkpoints").glob("[0-9]*"))
        rows: dict[str, dict[str, object]] = {}
        for when, checkpoint in (("before", checkpoints[0]), ("after", checkpoints[-1])):
            for name in chosen.variants:
                done = summary(measured(run, checkpoint, VARIANTS[name], chosen.samples))
                rows[f"{when}, {name}"] = done
                print(json.dumps({"seed": seed, "when": when, "variant": name, **done}), flush=True)
        before, after = (rows[f"{when}, tool"]["accuracy"] for when in ("before", "after"))
        gains.append(after[0] - before[0])  # type: ignore[index]
    if len(gains) > 1:
        half = T_97_5[len(gains)] * statistics.stdev(gains) / len(gains) ** 0.5
        print(json.dumps({"gain": round(statistics.fmean(gains), 4), "half_width_95": round(half, 4)}))


if __name__ == "__main__":
    main()
