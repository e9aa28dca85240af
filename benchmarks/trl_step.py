"""The TRL side of `step_cpu.py`, run in its own environment: GSPO with GRPOTrainer on the given model and prompts.

In: a folder with `model/`, `prompts.jsonl` and `check.safetensors`. Out: one JSON line with the loss on the check batch
and wall-clock and CPU time at the end of every round of four optimizer steps. Invariant: the settings are gspo's.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def correct(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The demo's reward."""
    marks = [completion.partition("|") for completion in completions]
    return [float(bool(mark) and text.strip() == wanted) for (_, mark, text), wanted in zip(marks, answer, strict=True)]


class RoundTimer(TrainerCallback):
    """Records when each round ends."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.cpu: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the time after every fourth optimizer step."""
        if state.global_step % 4 == 0:
            self.times.append(time.perf_counter())
            self.cpu.append(time.process_time())


def main(folder: Path, rounds: int, settings: dict[str, Any]) -> None:
    """Check the loss, then train."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    config = GRPOConfig(
        output_dir=str(folder / "out"),
        max_steps=4 * rounds,
        per_device_train_batch_size=settings["batch"] // 4,
        steps_per_generation=4,
        gradient_accumulation_steps=1,
        num_generations=settings["completions"],
        max_completion_length=settings["max_tokens"],
        temperature=1.0,
        top_k=0,
        beta=0.0,
        importance_sampling_level="sequence",
        loss_type="grpo",
        scale_rewards="group",
        epsilon=settings["clip_low"],
        epsilon_high=settings["clip_high"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        bf16=False,
        use_cpu=True,
        report_to=[],
        logging_steps=4,
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        gradient_checkpointing=False,
        router_aux_loss_coef=0.0,
    )
    timer = RoundTimer()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=correct,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[timer],
    )
    # Dropout would make the loss differ from the one that gspo computes on the same batch.
    trainer.model.eval()
    with torch.no_grad():
        loss = float(trainer._compute_loss(trainer.model, load_file(folder / "check.safetensors")))
    trainer.model.train()
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    found = {"version": trl.__version__, "loss": loss, "ends": timer.times, "cpu": timer.cpu, "rewards": rewards}
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
