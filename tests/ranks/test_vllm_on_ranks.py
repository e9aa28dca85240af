"""Engine `vllm` on several ranks: the leader has it, and it gets whole weights from shards, one tensor at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_ranks import agree, finished, spawned, train, write_recipe
from needs import needs_vllm
from receiving_vllm import use_receiving_vllm
from tiny_runs import tiny_config

from gspo.config import Config, ModelConfig
from gspo.model.load import build_model, char_tokenizer
from gspo.record.run_dir import read_jsonl, read_metrics

LORA = ("model.build=", "model.path=BASE", "model.lora.rank=4", "learner.learning_rate=3e-2")


def config_of(folder: Path, *settings: str, run_dir: str) -> Config:
    base = folder / "base"
    if LORA[0] in settings and not base.exists():
        tokenizer = char_tokenizer("sort 0123456789")
        build_model(ModelConfig(build="tiny_dense", build_options={"head_dim": 32}), tokenizer, 3).save_pretrained(base)
        tokenizer.save_pretrained(base)
    more = [text.replace("BASE", str(base)) for text in settings]
    return tiny_config(folder, "rollout.engine=vllm", "ranks.timeout_s=120", *more, run_dir=run_dir)


@pytest.mark.parametrize("settings", [("steps=2",), pytest.param(("steps=2", *LORA), marks=pytest.mark.slow)])
def test_a_run_on_two_ranks_is_that_of_one_process(settings: tuple[str, ...], tmp_path: Path) -> None:
    """The engine samples the same completions, and a transfer that fails leaves the ranks in step."""
    one, two = (config_of(tmp_path, *settings, run_dir=name) for name in ("one", "two"))
    for config, count in ((one, 1), (two, 2)):
        (tmp_path / f"sent{count}").mkdir()
        finished(train(config, count, lambda rank, n=count: use_receiving_vllm(rank, tmp_path / f"sent{n}")))
    agree(Path(one.run_dir), Path(two.run_dir))
    for step in (1, 2):
        name = f"rollouts/{step:06d}.jsonl"
        texts = [[row["text"] for row in read_jsonl(Path(c.run_dir) / name)] for c in (one, two)]
        assert texts[0] == texts[1]
    assert max(row["mismatch/abs_max"] for row in read_metrics(Path(two.run_dir)) if row["step"]) < 1e-4
    counts = [read_jsonl(tmp_path / f"sent2/{rank}.jsonl") for rank in range(2)]
    transfers = [row["sizes"] for row in counts[0] if "sizes" in row]
    assert len(transfers) == 3, "the evaluation before training, and a version for each further step"
    largest = max(transfers[0])
    assert sum(transfers[0]) > 8 * largest
    for rows in counts:
        # A tensor is gathered while the one before it is still referred to.
        assert largest <= max(row["peak"] for row in rows if "peak" in row) < 3 * largest


@pytest.mark.vllm
@pytest.mark.parametrize("lora", [False, True], ids=["dense", "lora"])
@pytest.mark.parametrize("start", [0, 1], ids=["in process", "served"])
def test_two_ranks_sample_with_the_real_vllm(start: int, lora: bool, tmp_path: Path) -> None:
    needs_vllm()
    settings = LORA if lora else ("model.build_options={head_dim = 32}", "learner.learning_rate=1e-2")
    config = config_of(
        tmp_path, *settings, f"rollout.engine_options={{start = {start}, check_s = 30.0}}", run_dir="run"
    )
    spawned(["train", str(write_recipe(config)), "--nproc", "2"])
    rows = [row for row in read_metrics(Path(config.run_dir)) if row["step"]]
    assert len(rows) == 3
    assert max(row["mismatch/abs_max"] for row in rows) < 1e-3
    assert rows[0]["kl/old_new"] > 1e-5, "the policy moved, so an engine with old weights would be detected"
