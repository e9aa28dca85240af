"""Run directories with known contents, for tests of everything that displays them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HOSTILE = (
    "<script>window.hacked = 1</script>",
    '<img src=x onerror="window.hacked = 1">',
    '"><svg onload="window.hacked = 1">',
    "[click](javascript:window.hacked=1) javascript:window.hacked=1",
    "</script><script>window.hacked = 1</script><!--",
    "\u202eevil\u202c \x1b[2J\x1b]0;title\x07 \x00 \u2028",
    "$\\href{javascript:window.hacked=1}{x}$ `code` **bold** {{7*7}} ${window.hacked=1}",
)
CONFIG = """\
name = "made"
steps = 40
seed = 3
[objective]
name = "gspo"
[learner]
mini_batches = 4
[rollout]
max_tokens = 64
"""


def metrics(step: int, **changed: Any) -> dict[str, Any]:
    """The metrics of a healthy step."""
    row = {
        "step": step,
        "tokens/sampled": 1000 * step,
        "reward/mean": 0.3 + 0.01 * step,
        "reward/correct_fraction": 0.3 + 0.01 * step,
        "groups/uniform_fraction": 0.2,
        "groups/discarded": 0,
        "samples/unscored": 0,
        "length/mean": 30.0 + math.sin(step),
        "length/max": 50,
        "length/truncated_fraction": 0.01,
        "grad/norm": 1.0,
        "grad/skipped": 0,
        "clip/fraction_tokens": 0.15,
        "clip/fraction_sequences": 0.15,
        "clip/low": 3e-3,
        "clip/high": 4e-3,
        "ratio/token_log_std": 0.05,
        "ratio/sequence_log_std": 3e-3,
        "kl/old_new": 1e-4,
        "mismatch/k3": 1e-8,
        "entropy/mean": 0.5,
        "routing/flip_fraction": 0.01,
        "routing/load_max": 2.0,
    }
    return row | {key.replace("__", "/"): value for key, value in changed.items()}


def timings(step: int, **changed: float) -> dict[str, Any]:
    """The timings of a step that samples about as long as it trains."""
    row = {
        "step": step,
        "time/rollout_s": 0.5,
        "time/reward_s": 0.05,
        "time/learn_s": 0.4,
        "time/eval_s": 0.0,
        "time/step_s": 1.0,
    }
    return row | {f"time/{key}_s": value for key, value in changed.items()}


def completion(prompt: str, number: int, text: str, **changed: Any) -> dict[str, Any]:
    """The record of a completion, as a run writes it."""
    ids = list(text.encode())[:40] or [0]
    length = len(ids)
    record = {
        "prompt_id": prompt,
        "sample": number,
        "prompt": f"what is {prompt}?",
        "text": text,
        "token_ids": ids,
        "stop": "eos",
        "version": 7,
        "status": "scored",
        "reward": float(number % 2),
        "correct": bool(number % 2),
        "parts": {"exact_answer": float(number % 2)},
        "failure": None,
        "logp_sampler": [-0.5] * length,
        "trained": True,
        "shaped_reward": float(number % 2),
        "advantage": 1.0 if number % 2 else -1.0,
        "sequence_ratio": 1.001,
        "clipped_fraction": 0.0,
        "clipped_tokens": [0] * length,
        "logp_old": [-0.5] * length,
        "logp_new": [-0.5 + 0.01 * (i % 3 - 1) for i in range(length)],
    }
    return record | changed


def uncomputed(prompt_id: str, number: int, text: str) -> dict[str, Any]:
    """The record of a completion with advantage 0, which is not computed."""
    record = completion(prompt_id, number, text, advantage=0.0, computed=False)
    absent = ("sequence_ratio", "clipped_fraction", "clipped_tokens", "logp_old", "logp_new")
    return {key: value for key, value in record.items() if key not in absent}


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_run(path: Path, *, steps: int = 12, completions: Sequence[Mapping[str, Any]] | None = None) -> Path:
    """A finished run. By default, the completions of step 5 contain markup and control characters."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(CONFIG)
    environment = {"device": "cpu", "packages": {"torch": "2.13.0"}, "commit": "abc"}
    (path / "environment.json").write_text(json.dumps(environment))
    first = {
        "step": 0,
        "tokens/sampled": 0,
        "eval/accuracy": 0.3,
        "eval/accuracy_low": 0.25,
        "eval/accuracy_high": 0.35,
    }
    events = [
        {"time": "2026-01-01T00:00:00", "event": "start", "steps": steps},
        {"time": "2026-01-01T00:00:05", "event": "alarm", "step": 6, "name": "repetition", "message": HOSTILE[0]},
        {"time": "2026-01-01T00:00:09", "event": "stop", "step": steps, "signal": None},
    ]
    write_lines(path / "metrics.jsonl", [first, *(metrics(s) for s in range(1, steps + 1))])
    write_lines(path / "timings.jsonl", [timings(s) for s in range(1, steps + 1)])
    write_lines(path / "events.jsonl", events)
    hostile = [completion("train/1", i, text) for i, text in enumerate(HOSTILE)]
    write_lines(path / "rollouts" / "000005.jsonl", hostile if completions is None else completions)
    write_lines(path / "rollouts" / "000006.jsonl", [completion("train/2", i, f"answer {i}") for i in range(4)])
    for step in (0, 10):
        write_lines(path / "evaluations" / f"{step:06d}.jsonl", evaluated(step))
    return path


def evaluated(step: int) -> list[dict[str, Any]]:
    """The records of an evaluation. Of its problems, the second is correct at the end, the third at the start."""
    right = {"held_out/0": True, "held_out/1": step > 0, "held_out/2": step == 0}
    absent = ("trained", "shaped_reward", "advantage", "sequence_ratio", "clipped_fraction", "clipped_tokens")
    absent += ("logp_old", "logp_new")
    records = []
    for prompt, correct in right.items():
        for number, text in enumerate((f"{prompt} at {step}", HOSTILE[0])):
            verdict = {"reward": float(correct), "correct": correct, "answer": "forty-two", "greedy": bool(number)}
            record = completion(prompt, number, text, **verdict)
            records.append({key: value for key, value in record.items() if key not in absent})
    return records
