"""Rounding of each precision against the clip range of a recipe.

In: a recipe and its overrides. Out: for each `model.dtype`, the rounding noise of the ratio that the objective clips,
before any update. Invariant: the completions are sampled and their log-probs computed as in the first step of a run.
Nothing is trained.

    python benchmarks/rounding.py recipes/smollm2-arithmetic.toml --model.path=FILE.gguf --rollout.prompts=4
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from gspo import config as settings
from gspo.build import build_run, run_objective
from gspo.clock import Clock
from gspo.learner.batch import prepare_batch
from gspo.objectives.rounding import rounding_noise
from gspo.objectives.samples import train_samples
from gspo.rollout.gather import RolloutState
from gspo.step import collect

DTYPES = ("float32", "bfloat16", "float16")


def measure(recipe: str, overrides: list[str]) -> str:
    """One line of the table."""
    config = settings.load(recipe, overrides)
    objective = run_objective(config)
    started = time.monotonic()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        context = build_run(config, objective, run=Path(folder), checkpoint=None, stack=stack)
        groups = collect(context, RolloutState(), clock=Clock()).rollouts.groups
        samples = train_samples(groups, objective, max_tokens=config.rollout.max_tokens)
        batch = prepare_batch(context, samples, step=1, complete=True)
        assert batch.only_rounding, "the engine must share the learner's weights, without top-p or top-k"
        rounding_N = batch.old.log_rho_M  # of all tokens, because the batch is complete
        noise = rounding_noise(objective, batch.tokens.sequences, rounding_N)
    assert noise is not None, f"{objective.name} has no clip range"
    length = len(rounding_N) / len(samples)
    return (
        f"{config.model.dtype:<9} {len(samples):>5} completions of {length:.0f} tokens   per token "
        f"{float(rounding_N.abs().mean()):.1e}   log-ratio {noise.log_ratio:.1e}   "
        f"beyond the clip range {noise.beyond_clip:.0%}   {time.monotonic() - started:.0f} s"
    )


if __name__ == "__main__":
    for dtype in DTYPES:
        print(measure(sys.argv[1], [*sys.argv[2:], f"--model.dtype={dtype}"]), flush=True)
