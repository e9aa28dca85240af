"""Whole runs on two ranks agree with the run of one process and resume bitwise: precisions, LoRA, conversations, ..."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ends import same_end
from forked_ranks import agree, finished, patch, resume, spawned, train, write_recipe
from tiny_runs import tiny_config

from gspo.config import Config, ModelConfig
from gspo.learner import checkpoint
from gspo.model.load import build_model, char_tokenizer
from gspo.record.rollbacks import read as read_rollbacks
from gspo.reduction import Same

LORA = ("model.build=", "model.path=BASE", "model.lora.rank=3", "learner.learning_rate=1e-2")
GAME = """
from gspo.environment import Environment

class Game(Environment):
    "Random models never solve anything, so the reward is for what varies."
    def reset(self, row):
        self.steps = 0

    def step(self, message):
        self.steps += 1
        size = len(message["content"]) + 0.01 * self.rng.random()
        return f"{self.rng.randint(0, 9)}", float(size), self.steps == 1 + len(message["content"]) % 2
"""
ROUGH = ("reward/mean", "entropy/mean", "grad/norm", "ratio/ess", "length/mean", "eval/accuracy")


@dataclass(frozen=True)
class Case:
    settings: tuple[str, ...] = ()
    rough: bool = False
    """Whether only the first step is compared, and not to every digit: in 16 bits the order in which gradients are
    added up rounds weights to other values."""
    rolled_back: bool = False
    spawned: bool = False
    """Whether its processes are new ones."""


CASES = {
    "KL to a stored reference": Case(("objective.name=grpo",)),
    "LoRA": Case(LORA),
    "LoRA with a KL reference": Case((*LORA, "objective.name=grpo")),
    "QLoRA": Case((*LORA, "model.quantize=nf4", "model.dtype=bfloat16"), rough=True, spawned=True),
    "bfloat16": Case(("model.dtype=bfloat16",), rough=True),
    "float16": Case(("model.dtype=float16",), rough=True),
    "mixture of experts": Case(("model.build=tiny_moe",)),
    "replay of the old experts": Case(("model.build=tiny_moe", "routing.replay=old", "objective.name=grpo")),
    "replay of the sampler's experts": Case(("model.build=tiny_moe", "routing.replay=sampler")),
    "cold start": Case(("cold_start.steps=4", "cold_start.check_every=2", "objective.name=grpo")),
    "adaptive clip range": Case(("objective.name=grpo", "objective.clip_high=auto:0.1")),
    "conversations with an environment": Case(
        (
            "environment.name=FOLDER/game.py:Game",
            "environment.turn_tokens=8",
            "environment.max_turns=3",
            "environment.patience_s=600",
            "reward.functions=",
            "objective.name=gspo_turn",
            "rollout.max_tokens=40",
        )
    ),
    "rollback": Case(
        (
            "steps=6",
            "alarms.steps=2",
            "alarms.rollback=repetition",
            "objective.name=dapo",
            "objective.keep=all",
            "alarms.rollback_clip=0.8",
        ),
        rolled_back=True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_agree_with_one_process_and_resume(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    hook = repetitive_batches if case.rolled_back else lambda rank: None
    one, two = (config_of(case, tmp_path, run_dir) for run_dir in ("one", "two"))
    for config, count in ((one, 1), (two, 2)):
        if case.spawned:
            spawned(["train", str(write_recipe(config)), "--nproc", str(count)])
        else:
            finished(train(config, count, hook))
    agree(Path(one.run_dir), Path(two.run_dir), **({"tolerance": 5e-3, "only": ROUGH, "last": 1} if case.rough else {}))
    assert len(read_rollbacks(Path(two.run_dir))) == case.rolled_back
    cut = tmp_path / "cut"
    shutil.copytree(two.run_dir, cut)
    last = checkpoint.saved(cut / "checkpoints")[-1]
    shutil.rmtree(last)
    if case.spawned:
        spawned(["train", "--resume", str(cut), "--trust-run", "--nproc", "2"])
    else:
        finished(resume(cut, 2, hook, more=["--trust-run"]))
    same_end(cut, Path(two.run_dir))


def config_of(case: Case, folder: Path, run_dir: str) -> Config:
    base = folder / "base"
    if LORA[0] in case.settings and not base.exists():
        tokenizer = char_tokenizer("sort 0123456789")
        build_model(ModelConfig(build="tiny_dense"), tokenizer, 3).save_pretrained(base)
        tokenizer.save_pretrained(base)
    (folder / "game.py").write_text(GAME)
    settings = [text.replace("BASE", str(base)).replace("FOLDER", str(folder)) for text in case.settings]
    return tiny_config(folder, "steps=3", "ranks.timeout_s=60", *settings, run_dir=run_dir)


def repetitive_batches(rank: int) -> None:
    """Metrics say that the completions of batches 3 and 4 repeat a token, which raises an alarm."""
    import gspo.loop

    def make(original: Any) -> Callable[..., Any]:
        def metrics(objective: Any, collected: Any, *rest: Any) -> Any:
            found = dict(original(objective, collected, *rest))
            return found | {"length/repetitive_fraction": Same(float(collected.batch in (3, 4)))}

        return metrics

    patch(gspo.loop, "step_metrics", make)
