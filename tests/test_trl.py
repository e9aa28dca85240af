"""`gspo.trl`: a script of TRL with its import changed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import TrainerCallback

from gspo.errors import ConfigError
from gspo.trl import GRPOConfig, GRPOTrainer

MODEL = {"build": "tiny_dense", "device": "cpu"}
ROWS = [
    {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b), "kind": "sum"}
    for a in range(6)
    for b in range(4)
]


def spaces(prompts: Any, completions: Any, completion_ids: Any, answer: list[str], **kwargs: Any) -> list[float]:
    assert prompts[0][0]["role"] == "user"
    assert set(kwargs["kind"]) == {"sum"}
    assert len(completion_ids) == len(answer) == len(completions)
    return [completion[0]["content"].count(" ") / 8 for completion in completions]


def arguments(tmp_path: Path, **changed: Any) -> dict[str, Any]:
    config = {
        "output_dir": str(tmp_path / "run"), "max_steps": 4, "per_device_train_batch_size": 8, "num_generations": 4,
        "steps_per_generation": 2, "max_completion_length": 8, "learning_rate": 1e-3, "disable_tqdm": True,
        "use_cpu": False, "settings": {"reward.workers": 1}, **changed,
    }  # fmt: skip
    return {"model": MODEL, "reward_funcs": spaces, "args": GRPOConfig(**config), "train_dataset": ROWS}


def test_a_script_trains_and_reads_its_state(tmp_path: Path) -> None:
    class Once(TrainerCallback):
        logs: ClassVar[dict[str, float]] = {}

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            Once.logs = logs
            assert args.num_generations == 4
            control.should_training_stop = True

    trainer = GRPOTrainer(**arguments(tmp_path), callbacks=[Once()])
    result = trainer.train()
    # Two optimizer steps per batch, and a callback that stops after the first batch.
    assert (result.global_step, trainer.state.global_step) == (2, 2)
    assert Once.logs["reward"] == trainer.state.log_history[0]["reward"]
    assert trainer.run is not None
    assert trainer.run.config.rollout.prompts == 4
    assert trainer.run.config.objective.name == "dapo"
    with pytest.raises(ConfigError, match="resume_from_checkpoint"):
        trainer.train()
    again = GRPOTrainer(**arguments(tmp_path))
    assert again.train(resume_from_checkpoint=True).global_step == 4
    again.save_model()
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run").num_parameters() > 0


def test_a_script_that_a_signal_stops_says_how_to_continue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    trainer = GRPOTrainer(**arguments(tmp_path, disable_tqdm=False), callbacks=[Stop()])
    assert trainer.train().global_step == 2
    assert "train(resume_from_checkpoint=True) continues the run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"num_iterations": 2, "repetition_penalty": 1.1}, "num_iterations.*repetition_penalty"),
        ({"num_generation": 2}, "did you mean num_generations"),
        ({"loss_type": "luspo"}, "importance_sampling_level"),
    ],
)
def test_settings_without_an_equivalent_are_refused_by_name(changed: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        GRPOConfig("out", **changed)


def stateful(completions: Any, trainer_state: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"reward_funcs": stateful}, "trainer_state"),
        ({"reward_funcs": "some/reward-model"}, "reward model"),
        ({"rollout_func": print}, "rollout_func"),
        ({"optimizers": ("mine", None)}, "optimizers"),
        ({"train_dataset": None}, "train_dataset"),
        ({"train_dataset": iter(ROWS)}, "train_dataset"),
        ({"args": object()}, "import GRPOConfig"),
        ({"peft_config": object()}, "peft_config"),
    ],
)
def test_arguments_without_an_equivalent_are_refused_by_name(tmp_path: Path, changed: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        GRPOTrainer(**{**arguments(tmp_path), **changed})


def test_adapters_are_those_of_peft() -> None:
    from peft import LoraConfig

    from gspo.trl import _adapters

    class Model:
        config = type("Config", (), {"model_type": "qwen2"})

    found = _adapters(Model, LoraConfig(r=4, lora_alpha=8))
    assert (found["lora_r"], found["lora_alpha"], found["lora_target_modules"]) == (4, 8, ["q_proj", "v_proj"])
    with pytest.raises(ConfigError, match="layers_to_transform"):
        _adapters(Model, LoraConfig(target_modules=["q_proj"], layers_to_transform=[0]))
