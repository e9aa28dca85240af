"""Whole runs with a lag, whose sampling process has the real vLLM: in its process, and on two servers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import needs_vllm
from processes import descendants
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo.config import Config
from gspo.errors import EngineError
from gspo.learner import checkpoint
from gspo.record.run_dir import read_events, read_jsonl
from gspo.trainer import resume, train

pytestmark = pytest.mark.vllm
STEPS = 4
LAG = (
    "rollout.engine=vllm",
    "rollout.max_lag=1",
    "model.build_options={head_dim = 32}",
    "learner.learning_rate=1e-2",
    "eval.every=0",
    f"steps={STEPS}",
)


@torch.no_grad()
def furthest(saved: Path, rollouts: Path, version: int | None = None) -> float:
    """The largest difference between the log-probs of a checkpoint and those that vLLM has reported, of all tokens or
    of those that the weights of this version have sampled."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    worst = 0.0
    for row in read_jsonl(rollouts):
        prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([prompt + row["token_ids"]])
        logp = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        own = logp.gather(1, torch.tensor(row["token_ids"])[:, None])[:, 0]
        apart = (own - torch.tensor(row["logp_sampler"])).abs()
        if version is not None:
            apart = apart[torch.tensor(versions(row)) == version]
        worst = max([worst, *apart.tolist()])
    return worst


def versions(row: dict[str, Any]) -> list[int]:
    """The version of the weights that sampled each token of a completion."""
    spans = row.get("spans") or [[row["version"], 0]]
    return [max((first, version) for version, first in spans if first <= at)[1] for at in range(len(row["token_ids"]))]


def killing(run: Path, step: int, words: bytes) -> Callable[[], None]:
    """A function that kills the first process below this one whose command has these words, once
    `run` has recorded `step`."""
    killed: list[int] = []

    def check() -> None:
        if killed or not any(row["step"] >= step for row in read_jsonl(run / "metrics.jsonl")):
            return
        for pid in descendants(os.getpid()):
            if words in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" "):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                return

    return check


@pytest.mark.parametrize("servers", [0, 2], ids=["in process", "two servers"])
def test_batches_come_from_the_weights_of_the_step_before(
    servers: int, tiny: Callable[..., Config], display: Any
) -> None:
    """vLLM holds the weights that the bound names, although newer ones exist by then."""
    needs_vllm()
    config = tiny(*LAG, f"rollout.engine_options={{start = {servers}, check_s = 30.0}}")
    run = Path(config.run_dir)
    assert train(config, display).step == STEPS
    for step in range(1, STEPS + 1):
        rollouts, weights = run / f"rollouts/{step:06d}.jsonl", max(0, step - 2)
        assert furthest(run / f"checkpoints/{weights:06d}", rollouts) < 1e-4
        if step > 1:
            assert furthest(run / f"checkpoints/{step - 1:06d}", rollouts) > 1e-2, "otherwise any weights would pass"


def test_every_turn_comes_from_the_weights_of_its_step(tiny: Callable[..., Config], display: Any) -> None:
    """Completions of at most 10 tokens in turns of 4 (`rollout.span_tokens`): with the weights of steps t - 4, t - 3
    and t - 2."""
    needs_vllm()
    config = tiny(*LAG, "rollout.max_lag=3", "rollout.span_tokens=4", "steps=5")
    run = Path(config.run_dir)
    assert train(config, display).step == 5
    updates = config.learner.mini_batches
    for step in range(1, 6):
        rollouts = run / f"rollouts/{step:06d}.jsonl"
        steps = sorted({max(0, step - 4), max(0, step - 3), max(0, step - 2)})
        turns = []
        for row in read_jsonl(rollouts):
            turns.append(-(-len(row["token_ids"]) // 4))
            found = [version for version, _ in row.get("spans") or [[row["version"], 0]]]
            assert found == [updates * of for of in steps[: turns[-1]]]
        assert max(turns) == 3
        for turn, of in enumerate(steps):
            assert furthest(run / f"checkpoints/{of:06d}", rollouts, updates * of) < 1e-4
            if turn:
                before = run / f"checkpoints/{steps[turn - 1]:06d}"
                assert furthest(before, rollouts, updates * of) > 1e-3, "otherwise any weights would pass"


def test_a_server_and_the_sampling_process_are_killed(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other server takes over. Without the sampling process the run ends, and its resume has lost nothing."""
    needs_vllm()
    config = tiny(*LAG, "rollout.engine_options={start = 2, check_s = 30.0}", "steps=8")
    run = Path(config.run_dir)
    kills = [killing(run, 2, b"vllm.entrypoints"), killing(run, 4, b"gspo.collection.sampler")]
    record = display.step

    def step(*rest: Any, **options: Any) -> None:
        record(*rest, **options)
        for kill in kills:
            kill()

    monkeypatch.setattr(display, "step", step)
    with pytest.raises(EngineError, match="the sampling process was killed by signal 9"):
        train(config, display)
    kills.clear()
    done = int(checkpoint.saved(run / "checkpoints")[-1].name)
    assert 4 <= done < 8
    assert resume(run, display, trust_run=True).step == 8
    assert [e["event"] for e in read_events(run)].count("resume") == 1
    for number in range(1, 9):
        rollouts = run / f"rollouts/{number:06d}.jsonl"
        assert furthest(run / f"checkpoints/{max(0, number - 2):06d}", rollouts) < 1e-4
