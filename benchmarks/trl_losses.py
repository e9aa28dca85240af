"""The loss and the gradient of converted GRPOConfigs compared with those of TRL, on the same batch.

In: the directory of a small model. Out: a line per config: both losses, and the difference of the gradients relative to
their norm. Invariant: both sides get the same log-probs, masks and advantages.

    PYTHONPATH=. python benchmarks/trl_losses.py MODEL      in an environment with TRL
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

import gspo
from gspo.equivalents.trl import convert

GROUPS, SIZE, PROMPT, COMPLETION = 4, 4, 6, 12
SEQUENCE = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02}
CONFIGS: list[dict[str, Any]] = [
    {"loss_type": "grpo"},
    {"loss_type": "grpo", "scale_rewards": "none"},
    {"loss_type": "grpo", "beta": 0.05},
    {"loss_type": "grpo", "beta": 0.05, "use_bias_correction_kl": False},
    {"loss_type": "grpo", "delta": 1.5},
    {"loss_type": "dapo"},
    {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.28},
    {"loss_type": "dapo", "beta": 0.05},
    {"loss_type": "dapo", "off_policy_mask_threshold": 0.01},
    {"loss_type": "dapo", "entropy_coef": 0.1},
    {"loss_type": "bnpo"},
    {"loss_type": "dr_grpo"},
    {"loss_type": "dr_grpo", "scale_rewards": "none"},
    {"loss_type": "cispo", "epsilon_high": 1.2},
    {"loss_type": "sapo"},
    {"loss_type": "vespo"},
    {"loss_type": "vespo", "scale_rewards": "none"},
    SEQUENCE,
    {**SEQUENCE, "loss_type": "luspo"},
    {**SEQUENCE, "beta": 0.05},
    {**SEQUENCE, "beta": 0.05, "use_bias_correction_kl": False},
]


class Batch:
    """Random tokens, with noise on the old and the reference log-probs so that some tokens clip."""

    def __init__(self, model: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        vocabulary, rows = model.config.vocab_size, GROUPS * SIZE
        self.prompt = torch.randint(0, vocabulary, (GROUPS, PROMPT), generator=generator).repeat_interleave(SIZE, 0)
        self.completion = torch.randint(0, vocabulary, (rows, COMPLETION), generator=generator)
        length = torch.randint(3, COMPLETION + 1, (rows,), generator=generator)
        self.mask = torch.arange(COMPLETION)[None] < length[:, None]
        self.reward = torch.rand(rows, generator=generator)
        with torch.no_grad():
            logp = self.forward(model)[0]
        self.old = logp + 0.25 * torch.randn(logp.shape, generator=generator)
        self.ref = logp + 0.3 * torch.randn(logp.shape, generator=generator)

    def forward(self, model: Any) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the completions."""
        logits = model(input_ids=torch.cat([self.prompt, self.completion], 1)).logits[:, PROMPT - 1 : -1]
        every = torch.log_softmax(logits.float(), -1)
        return every.gather(-1, self.completion.unsqueeze(-1)).squeeze(-1), -(every.exp() * every).sum(-1)


def of_gspo(model: Any, batch: Batch, given: dict[str, Any], advantage: Tensor) -> float:
    """The loss of the converted config."""
    objective = converted(given)
    logp, entropy = batch.forward(model)
    out = gspo.policy_loss(
        objective,
        logp,
        batch.old,
        advantage,
        batch.mask,
        logp_ref=batch.ref if objective.kl else None,
        # Without an engine of its own, the old policy is the sampler.
        logp_sampler=batch.old if objective.off_policy_mask is not None else None,
        entropy=entropy if objective.entropy else None,
    )
    out.loss.backward()
    return float(out.loss)


def of_trl(folder: str, path: str, batch: Batch, given: dict[str, Any], advantage: Tensor) -> tuple[float, Tensor]:
    """The loss of TRL and its gradient."""
    config = GRPOConfig(
        output_dir=folder,
        max_completion_length=COMPLETION,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        router_aux_loss_coef=0.0,
        **given,
    )
    rows = Dataset.from_list([{"prompt": "a"}])
    trainer = GRPOTrainer(model=path, reward_funcs=lambda **_: [], args=config, train_dataset=rows)
    inputs = {
        "prompt_ids": batch.prompt,
        "prompt_mask": torch.ones_like(batch.prompt),
        "completion_ids": batch.completion,
        "completion_mask": batch.mask.long(),
        "advantages": advantage,
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.ref,
        "num_items_in_batch": batch.mask.sum(),
    }
    loss = trainer._compute_loss(trainer.model.eval(), inputs)
    loss.backward()
    return float(loss), gradient(trainer.model)


def converted(given: dict[str, Any]) -> gspo.Objective:
    """The objective of a config."""
    done = convert({**given, "max_completion_length": COMPLETION})
    assert not done.lost, done.lost
    settings = {k.removeprefix("objective."): v for k, v in done.settings.items() if k.startswith("objective.")}
    return gspo.objective(settings.pop("name"), **settings)


def gradient(model: Any) -> Tensor:
    """The gradient of all parameters, which is cleared."""
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def main(path: str) -> None:
    """Compare every config."""
    warnings.simplefilter("ignore")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    batch = Batch(model)
    with tempfile.TemporaryDirectory() as folder:
        for given in CONFIGS:
            groups = [i // SIZE for i in range(GROUPS * SIZE)]
            advantage = gspo.group_advantage(converted(given), batch.reward, groups)
            loss = of_gspo(model, batch, given, advantage)
            ours = gradient(model)
            other, theirs = of_trl(folder, path, batch, given, advantage)
            apart = float((ours - theirs).norm() / theirs.norm())
            print(f"gspo {loss:+.6f}  TRL {other:+.6f}  gradients {apart:.1e}  {given}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
