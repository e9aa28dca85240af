"""An unrecoverable engine error ends the run with the reason and a checkpoint, and the run resumes exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo.config import Config
from gspo.errors import EngineError, WeightSyncError
from gspo.record.run_dir import read_jsonl
from gspo.rollout.engine import GenerateOptions
from gspo.rollout.engines.local import LocalEngine
from gspo.trainer import resume, train


@pytest.mark.parametrize("kind", [EngineError, WeightSyncError])
@pytest.mark.parametrize("occasion", ["train/3", "eval"])
def test_an_engine_error_saves_the_run_and_it_resumes_exactly(
    kind: type[EngineError],
    occasion: str,
    tiny: Callable[..., Config],
    display: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generate = LocalEngine.generate

    def failing(self: Any, prompts: Any, options: GenerateOptions) -> Any:
        if options.stream.startswith(occasion) and options.version >= 4:
            raise kind("the servers are gone")
        return generate(self, prompts, options)

    uninterrupted = train(tiny("checkpoint.every=10", run_dir="whole"), display)
    with monkeypatch.context() as patched:
        patched.setattr(LocalEngine, "generate", failing)
        with pytest.raises(kind, match=r"the servers are gone\. The run is saved: gspo train --resume"):
            train(tiny("checkpoint.every=10"), display)
    assert (tmp_path / "run" / "checkpoints" / "000002").is_dir()
    events = [e for e in read_jsonl(tmp_path / "run" / "events.jsonl") if e["event"] == "error"]
    assert [e["error"] for e in events] == [kind.__name__]
    outcome = resume(tmp_path / "run", display)
    assert outcome.step == uninterrupted.step == 3
    resumed, whole = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("run", "whole"))
    assert resumed == whole


@pytest.mark.parametrize("off", [0.0, 0.2])
def test_f15_log_probs_far_from_the_learners_raise_an_alarm_within_one_step(
    off: float, tiny: Callable[..., Config], display: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line of defense, for an engine that passes the digest and the canary."""
    generate = LocalEngine.generate

    def shifted(self: Any, prompts: Any, options: GenerateOptions) -> Any:
        groups = generate(self, prompts, options)
        if not options.stream.startswith("train/5"):
            return groups
        return [[replace(c, logp_sampler=tuple(v - off for v in c.logp_sampler)) for c in group] for group in groups]

    monkeypatch.setattr(LocalEngine, "generate", shifted)
    train(tiny("steps=5", "alarms.steps=3", "eval.every=0"), display)
    found = [
        e
        for e in read_jsonl(tmp_path / "run" / "events.jsonl")
        if e["event"] == "alarm" and e["name"] == "engine mismatch"
    ]
    assert [e["step"] for e in found] == ([5] if off else [])
    assert all("resume" in e["message"] for e in found)
