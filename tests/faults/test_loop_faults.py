"""Faults inside a run: signals in every phase, numerical faults, exhausted memory and full disks.

Every injector counts its shots: a test whose fault did not happen fails. The numbers (F7, ...) are those of
docs/reliability.md.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ends import run_of, same_end
from patched_forward import patch_forward

import gspo.loop
from gspo.config import Config
from gspo.errors import AlarmError, CheckpointError, ConfigError, DiskError, MemoryLimitError, NumericalError
from gspo.learner import checkpoint
from gspo.learner.optimizer import Optimizer
from gspo.record.alarms import ALARMS, active_alarms
from gspo.record.incidents import Incidents
from gspo.record.run_dir import read_jsonl
from gspo.reward.reward import RewardPool
from gspo.rollout.buffer import RolloutBuffer
from gspo.rollout.engines.local import LocalEngine
from gspo.trainer import resume, train


class Injector:
    """Replaces a function by one that also calls `shot` at its n-th call, once."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, shot: Callable[[], None]
    ) -> None:
        self.calls = 0
        self.shots = 0
        original = getattr(owner, name)

        def instead(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == at:
                self.shots += 1
                shot()
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, instead)


@pytest.fixture(scope="module")
def finished_runs() -> dict[tuple[str, ...], Path]:
    return {}


@pytest.fixture
def whole_run(
    finished_runs: dict[tuple[str, ...], Path],
    tiny: Callable[..., Config],
    display: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Path]:
    """The uninterrupted run with these settings, trained once for all tests."""

    def find(*overrides: str) -> Path:
        if overrides not in finished_runs:
            run = tmp_path_factory.mktemp("whole") / "run"
            train(tiny(*overrides, run_dir=str(run)), display)
            finished_runs[overrides] = run
        return finished_runs[overrides]

    return find


def events(config: Config, kind: str) -> list[dict[str, Any]]:
    return [e for e in read_jsonl(run_of(config) / "events.jsonl") if e["event"] == kind]


# ------------------------------------------------------------------------------------------------- F7: signals

PHASES: dict[str, tuple[Any, str, int, int]] = {
    # owner, function, which call, the step whose state must be saved
    "generate": (LocalEngine, "_decode", 4, 1),
    "reward": (RewardPool, "score", 4, 1),
    "between collect and learn": (RolloutBuffer, "take", 2, 2),
    "learn": (gspo.loop, "learn", 2, 2),
    "save": (checkpoint, "save", 2, 1),
    "evaluate": (gspo.loop, "evaluate", 3, 2),
    "first evaluation": (gspo.loop, "evaluate", 1, 0),
}


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        *((phase, signal.SIGTERM) for phase in PHASES),
        *(pytest.param(phase, signal.SIGINT, marks=pytest.mark.slow) for phase in PHASES),
        ("reward", signal.SIGUSR1),
    ],
)
def test_f7_a_signal_in_any_phase_saves_and_exits_soon_and_the_run_resumes_bitwise(
    phase: str,
    number: int,
    whole_run: Callable[..., Path],
    tiny: Callable[..., Config],
    display: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, name, at, step = PHASES[phase]
    whole, cut = whole_run("steps=3", "eval.every=1"), tiny("steps=3", "eval.every=1", run_dir="cut")
    signal_times: list[float] = []

    def send_signal() -> None:
        signal_times.append(time.process_time())
        os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        injector = Injector(patch, owner, name, at, send_signal)
        stopped = train(cut, display)
    assert injector.shots == 1
    assert stopped.stopped_by == number
    assert time.process_time() - signal_times[0] < 5, "CPU seconds, independent of other load"
    newest = checkpoint.newest(run_of(cut) / "checkpoints")[0]
    assert int(newest.name) == step
    resume(run_of(cut), display)
    same_end(whole, run_of(cut))


def test_f7_an_interrupted_evaluation_leaves_its_step_pending(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("steps=3", "eval.every=1")
    with monkeypatch.context() as patch:
        Injector(patch, gspo.loop, "evaluate", 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        train(config, display)
    state = checkpoint.read_state(run_of(config) / "checkpoints/000002")
    assert state.pending is not None
    assert state.pending["step"] == 2
    assert [r["step"] for r in read_jsonl(run_of(config) / "metrics.jsonl")] == [0, 1]


def test_f7_a_stop_during_the_cold_start_restarts_it(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ("steps=2", "cold_start.steps=4", "cold_start.check_every=2", "cold_start.stop_accuracy=0.9")
    whole, cut = tiny(*start, run_dir="whole"), tiny(*start, run_dir="cut")
    train(whole, display)
    with monkeypatch.context() as patch:
        injector = Injector(patch, LocalEngine, "_decode", 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train(cut, display).stopped_by == signal.SIGTERM
    assert injector.shots == 1
    assert not checkpoint.saved(run_of(cut) / "checkpoints")
    resume(run_of(cut), display)
    same_end(run_of(whole), run_of(cut))


# -------------------------------------------------------------------------------- F10: changed settings


def edit(config: Config, old: str, new: str) -> None:
    file = run_of(config) / "config.toml"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("mini_batches = 2", "mini_batches = 1", "learner.mini_batches"),
        ("group_size = 4", "group_size = 3", "rollout.group_size"),
        ('name = "gspo"', 'name = "grpo"', "objective.name"),
    ],
)
def test_f10_a_resume_refuses_and_names_a_change_that_affects_results(
    old: str, new: str, key: str, tiny: Callable[..., Config], display: Any
) -> None:
    config = tiny("steps=2")
    train(config, display)
    before = (run_of(config) / "metrics.jsonl").read_bytes()
    edit(config, old, new)
    with pytest.raises(ConfigError, match=key):
        resume(run_of(config), display, steps=4)
    assert (run_of(config) / "metrics.jsonl").read_bytes() == before


def test_f10_a_harmless_change_is_reported_and_allowed(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny("steps=2")
    train(config, display)
    edit(config, "micro_batch_tokens = 16384", "micro_batch_tokens = 100")
    edit(config, "rollouts = true", "rollouts = false")
    resume(run_of(config), display, steps=3)
    messages = "".join(display.messages)
    assert "learner.micro_batch_tokens: 16384 then, 100 now" in messages
    assert "log.rollouts: True then, False now" in messages
    assert read_jsonl(run_of(config) / "metrics.jsonl")[-1]["step"] == 3


# ------------------------------------------------------------------------------------------------- F16, F17: numbers


def test_f16_non_finite_weights_are_never_saved(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("steps=4", "eval.every=0")
    original = gspo.loop.learn
    shots = []

    def poisoned(parts: Any, groups: Any, *, step: int) -> Any:
        result = original(parts, groups, step=step)
        if step == 2:
            shots.append(step)
            next(parts.policy.model.parameters()).data[0, 0] = torch.nan
        return result

    with monkeypatch.context() as patch:
        patch.setattr(gspo.loop, "learn", poisoned)
        with pytest.raises(NumericalError, match="not finite"):
            train(config, display)
    assert shots == [2]
    assert checkpoint.newest(run_of(config) / "checkpoints")[0].name == "000001"
    assert events(config, "error")[0]["error"] == "NumericalError"
    assert resume(run_of(config), display).step == 4


def scale_gradient(monkeypatch: pytest.MonkeyPatch, at: int, factor: float) -> list[int]:
    """Multiply the gradient of the n-th optimizer step."""
    original = Optimizer.step
    calls = [0]
    shots: list[int] = []

    def step(self: Optimizer, *, loss_finite: bool, **weights: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            shots.append(at)
            for weight in self._weights.values():
                if weight.grad is not None:
                    weight.grad *= factor
        return original(self, loss_finite=loss_finite, **weights)

    monkeypatch.setattr(Optimizer, "step", step)
    return shots


def test_f17_a_gradient_spike_is_skipped_and_a_healthy_run_has_none(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = ("steps=12", "eval.every=0", "checkpoint.every=1")
    golden, spiked = tiny(*setting, run_dir="golden"), tiny(*setting, run_dir="spiked")
    train(golden, display)
    assert not events(golden, "update_skipped")
    shots = scale_gradient(monkeypatch, 21, 1000.0)
    train(spiked, display)
    assert shots == [21]
    (event,) = events(spiked, "update_skipped")
    assert (event["step"], event["mini_batch"]) == (11, 0)
    assert "spike" in event["reason"]
    states = [checkpoint.read_state(run_of(spiked) / f"checkpoints/{n:06d}") for n in (10, 11, 12)]
    assert [s.updates for s in states] == [20, 21, 23]  # the skipped update does not advance the schedule


def test_f17_a_resume_restores_the_gradient_norm_history(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("steps=10", "eval.every=0")
    train(config, display)
    shots = scale_gradient(monkeypatch, 1, 1000.0)
    resume(run_of(config), display, steps=11)
    assert shots == [1]
    assert "spike" in events(config, "update_skipped")[0]["reason"]


# ------------------------------------------------------------------------------------------------- F18: alarms

HEALTHY = {
    "groups/uniform_fraction": 0.4,
    "entropy/mean": 0.3,
    "reward/correct_fraction": 0.5,
    "length/truncated_fraction": 0.1,
    "length/repetitive_fraction": 0.0,
    "noise/beyond_clip": 0.1,
}
FAULTY = {
    "no trainable samples": {"samples/trained": 0},
    "uniform rewards": {"groups/uniform_fraction": 1.0},
    "entropy collapse": {"entropy/mean": 1e-5},
    "truncation": {"length/truncated_fraction": 1.0},
    "repetition": {"length/repetitive_fraction": 0.9},
    "tricks in programs": {"reward/note/code_tests/trick": 0.6},
    "rounding noise": {"noise/beyond_clip": 0.4},
}
OTHERS = {"reward jump", "held-out drop", "engine mismatch"}
"""Alarms that compare steps with earlier ones."""


def test_f18_every_alarm_is_covered_here() -> None:
    assert set(FAULTY) | OTHERS == {alarm.name for alarm in ALARMS}


@pytest.mark.parametrize("name", FAULTY)
def test_f18_an_alarm_needs_its_symptom_in_every_step(name: str) -> None:
    healthy = [{"step": 0}] + [{"step": i, **HEALTHY} for i in range(1, 6)]
    faulty = [{"step": i, **HEALTHY, **FAULTY[name]} for i in range(6, 11)]
    assert active_alarms(healthy, 5) == []
    assert [alarm.name for alarm in active_alarms(healthy + faulty, 5)] == [name]
    assert active_alarms(healthy + faulty[:4], 5) == []
    assert active_alarms([*healthy, *faulty[:4], healthy[-1], faulty[4]], 5) == []


def healthy_metrics(steps: int, seed: int) -> list[dict[str, Any]]:
    """Metrics of a healthy run.

    Accuracy climbs from 0.2 to 0.8 with the noise of 64 completions, and held-out accuracy with it. Engine and learner
    differ by the rounding noise of bfloat16, within a factor of 3.
    """
    rng = random.Random(seed)
    noise_rng = random.Random(seed + 1000)
    rows = []
    for step in range(steps + 1):
        p = 0.2 + 0.6 * step / steps
        share = sum(rng.random() < p for _ in range(64)) / 64
        row = {
            "step": step,
            **HEALTHY,
            "reward/mean": share,
            "reward/std": (p * (1 - p)) ** 0.5,
            "reward/correct_fraction": share,
            "mismatch/abs_mean": 0.015 * 3 ** noise_rng.uniform(-1, 1),
        }
        if step % 10 == 0:
            row |= {"eval/accuracy": p, "eval/accuracy_low": p - 0.06, "eval/accuracy_high": p + 0.06}
        rows.append(row)
    return rows


def test_f18_a_healthy_climb_raises_no_alarm() -> None:
    for seed in range(20):
        for steps in (60, 200):
            rows = healthy_metrics(steps, seed)
            for end in range(1, len(rows) + 1):
                assert active_alarms(rows[:end], 5) == [], (seed, steps, end)


def test_f18_a_reward_jump_is_an_alarm() -> None:
    rows = healthy_metrics(200, seed=1)[:60]
    jump = [{**rows[-1], "step": 60 + i, "reward/mean": 0.98} for i in range(5)]
    assert active_alarms(rows + jump[:4], 5) == []
    assert [alarm.name for alarm in active_alarms(rows + jump, 5)] == ["reward jump"]
    without_reward = [{**row, "reward/mean": 0.0, "reward/std": 0.0} for row in rows]
    first_successes = [{**row, "reward/mean": 0.02, "reward/std": 0.14} for row in jump]
    assert active_alarms(without_reward + first_successes, 5) == []


def test_f18_held_out_accuracy_that_falls_while_reward_rises_is_an_alarm() -> None:
    rows = healthy_metrics(100, seed=2)
    for row in rows:
        if row["step"] > 60 and "eval/accuracy" in row:
            row |= {"eval/accuracy": 0.3, "eval/accuracy_low": 0.24, "eval/accuracy_high": 0.36}
    assert active_alarms(rows[:71], 5) == []  # a single drop may be noise
    assert [alarm.name for alarm in active_alarms(rows[:81], 5)] == ["held-out drop"]
    for row in rows[60:]:
        row |= {"reward/correct_fraction": 0.1, "reward/mean": 0.1}
    assert active_alarms(rows[:81], 5) == []  # both fall: not reward hacking


def test_f15_an_engine_that_diverges_from_the_learner_is_an_immediate_alarm() -> None:
    rows = healthy_metrics(60, seed=3)
    for row in rows:
        row["mismatch/abs_mean"] = 0.015
    for value, expected in ((0.201, ["engine mismatch"]), (0.12, [])):
        diverged = {**rows[-1], "step": 61, "mismatch/abs_mean": value}
        assert [alarm.name for alarm in active_alarms([*rows, diverged], 5)] == expected
    faulty = [{**rows[-1], "step": 61 + i, "mismatch/abs_mean": 0.201} for i in range(20)]
    assert [alarm.name for alarm in active_alarms(rows + faulty, 5)] == ["engine mismatch"], (
        "a persistent fault does not become the baseline"
    )
    assert active_alarms([*rows, *faulty[:1], rows[-1]], 5) == []
    assert active_alarms([*rows[:4], faulty[0]], 5) == [], "too few steps for a baseline"


def test_f15_growing_rounding_noise_within_float32_is_no_alarm() -> None:
    rows = [{"step": i, **HEALTHY, "mismatch/abs_mean": 1e-7 if i < 30 else 5e-6} for i in range(1, 31)]
    assert active_alarms(rows, 5) == []
    assert [alarm.name for alarm in active_alarms([*rows, {**rows[-1], "mismatch/abs_mean": 1e-3}], 5)] == [
        "engine mismatch"
    ]


def test_f18_low_entropy_on_a_solved_task_is_no_alarm() -> None:
    rows = [{"step": i, **HEALTHY, "entropy/mean": 1e-6, "reward/correct_fraction": 1.0} for i in range(1, 6)]
    assert active_alarms(rows, 5) == []


@pytest.fixture
def constant(tmp_path: Path) -> str:
    """A reward function that gives every completion the same reward."""
    (tmp_path / "same.py").write_text(
        "def same(prompts, completions, **columns):\n    return [1.0] * len(completions)\n"
    )
    return f"reward.functions={tmp_path}/same.py:same"


def test_f18_uniform_rewards_are_one_event_with_a_fix(constant: str, tiny: Callable[..., Config], display: Any) -> None:
    config = tiny("steps=6", "alarms.steps=3", "eval.every=0", constant)
    train(config, display)
    found = [e for e in events(config, "alarm") if e["name"] == "uniform rewards"]
    assert [e["step"] for e in found] == [3]
    assert "problems that are sometimes solved" in found[0]["message"]


def test_f18_uniform_rewards_with_a_length_penalty_are_no_alarm(
    constant: str, tiny: Callable[..., Config], display: Any
) -> None:
    config = tiny(
        "steps=4",
        "alarms.steps=2",
        "eval.every=0",
        "objective.shape=soft_overlong",
        "objective.overlong_cache=10",
        constant,
    )
    train(config, display)
    rows = read_jsonl(run_of(config) / "metrics.jsonl")[1:]
    assert all(row["groups/uniform_fraction"] == 1 and row["advantage/std"] > 0.1 for row in rows)
    assert "uniform rewards" not in [e["name"] for e in events(config, "alarm")]


def test_f18_the_truncation_alarm_suggests_max_tokens_and_not_length_shaping() -> None:
    what = next(alarm.what for alarm in ALARMS if alarm.name == "truncation")
    assert "rollout.max_tokens" in what
    assert "objective.shape" not in what


def test_f18_an_alarm_can_stop_the_run_with_a_checkpoint(
    constant: str, tiny: Callable[..., Config], display: Any
) -> None:
    config = tiny(
        "steps=6", "alarms.steps=2", "eval.every=0", 'alarms.stop=["uniform rewards"]', "checkpoint.every=50", constant
    )
    with pytest.raises(AlarmError, match=r"uniform rewards.*--resume"):
        train(config, display)
    assert checkpoint.newest(run_of(config) / "checkpoints")[0].name == "000002"


def test_f18_an_unknown_alarm_is_refused(tiny: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"alarms\.stop must be one of .*'repetition'.*not 'boredom'"):
        tiny("alarms.stop=boredom")


# ------------------------------------------------------------------------------------------------- F22: memory


def starve(
    monkeypatch: pytest.MonkeyPatch, most_rows: int, error: type[Exception], *, training: bool = True
) -> list[int]:
    """Make every forward pass of more than `most_rows` sequences run out of memory."""
    shots: list[int] = []

    def limited(plain: Any) -> Any:
        def instead(model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if len(batch.sequence_ids) > most_rows:
                shots.append(len(batch.sequence_ids))
                raise error("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
            return plain(model, batch, *args, **kwargs)

        return instead

    patch_forward(monkeypatch, limited, training=training)
    return shots


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, pytest.param(RuntimeError, marks=pytest.mark.slow)])
@pytest.mark.parametrize("training", [True, False], ids=["training", "old log-probs"])
def test_f22_a_micro_batch_that_does_not_fit_is_halved_with_the_same_result(
    training: bool,
    error: type[Exception],
    whole_run: Callable[..., Path],
    tiny: Callable[..., Config],
    display: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = ("steps=2", "eval.every=0", "model.build=tiny_moe", "routing.balance_loss=0.01")
    plenty, scarce = whole_run(*setting), tiny(*setting, run_dir="scarce")
    with monkeypatch.context() as patch:
        shots = starve(patch, 3, error, training=training)
        train(scarce, display)
    assert shots
    for a, b in zip(*(read_jsonl(run / "metrics.jsonl")[1:] for run in (plenty, run_of(scarce))), strict=True):
        assert a["grad/norm"] == pytest.approx(b["grad/norm"], rel=1e-4)
        assert a["loss/balance"] == pytest.approx(b["loss/balance"], rel=1e-4)
        assert a["reward/mean"] == b["reward/mean"]
    if training:
        first = events(scarce, "out_of_memory")[0]
        assert first["step"] == 1
        assert first["micro_batch_tokens"] < 16384


def test_f22_a_single_sequence_that_does_not_fit_stops_the_run_with_a_checkpoint(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("steps=2", "eval.every=0")
    with monkeypatch.context() as patch:
        shots = starve(patch, 0, torch.OutOfMemoryError)
        with pytest.raises(MemoryLimitError, match=r"micro_batch_tokens or rollout.engine_options.slots.*--resume"):
            train(config, display)
    assert shots[-1] == 1
    assert checkpoint.newest(run_of(config) / "checkpoints")[0].name == "000000"
    assert resume(run_of(config), display).step == 2


def test_f22_a_model_that_does_not_fit_leaves_no_directory_behind(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("steps=1", "eval.every=0")

    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("gspo.trainer.build_run", full)
        with pytest.raises(MemoryLimitError, match="the model does not fit"):
            train(config, display)
    assert not run_of(config).exists()
    assert train(config, display).step == 1


# ------------------------------------------------------------------------------------------------- F4, F5: disks


def fail_once(monkeypatch: pytest.MonkeyPatch, at: int, error: OSError) -> Injector:
    def shot() -> None:
        raise error

    return Injector(monkeypatch, checkpoint, "save_file", at, shot)


def fail_always(monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
    """Make every save after the first `after` fail."""
    save = checkpoint.save_file
    calls = [0]

    def instead(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(*arguments)

    monkeypatch.setattr(checkpoint, "save_file", instead)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(5, "Input/output error")])
def test_f4_f5_a_failed_save_keeps_the_last_checkpoint_and_training_continues(
    error: OSError,
    whole_run: Callable[..., Path],
    tiny: Callable[..., Config],
    display: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, cut = whole_run("steps=4"), tiny("steps=4", run_dir="cut")
    with monkeypatch.context() as patch:
        injector = fail_once(patch, 3, error)
        train(cut, display)
    assert injector.shots == 1
    assert [e["step"] for e in events(cut, "checkpoint_failed")] == [2]
    assert [p.name for p in checkpoint.saved(run_of(cut) / "checkpoints")] == ["000000", "000001", "000003", "000004"]
    assert not list((run_of(cut) / "checkpoints").glob(".tmp-*"))
    same_end(whole, run_of(cut))


def test_f4_a_failed_last_save_is_an_error_and_a_resume_fixes_it(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny("steps=3", "checkpoint.every=2", run_dir="whole")
    cut = tiny("steps=3", "checkpoint.every=2", run_dir="cut")
    train(whole, display)
    with monkeypatch.context() as patch:
        injector = fail_once(patch, 3, OSError(28, "No space left on device"))
        with pytest.raises(CheckpointError, match=r"No space left.*--resume"):
            train(cut, display)
    assert injector.shots == 1
    resume(run_of(cut), display)
    same_end(run_of(whole), run_of(cut))


class FullDisk:
    """A disk that is full from the `at`-th write to files of this name on. That write is partial, later ones fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, at: int) -> None:
        self.name = name
        self.at = at
        self.writes = 0
        self.write = os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, file: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{file}").endswith(self.name):
            self.writes += 1
            if self.writes == self.at:
                return self.write(file, data[:7])
            if self.writes > self.at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.write(file, data)


@pytest.mark.parametrize(
    ("name", "at", "room"),
    [("metrics.jsonl", 1, True), ("metrics.jsonl", 3, False), ("timings.jsonl", 2, True), ("events.jsonl", 3, True)],
)
def test_f4_a_full_disk_at_a_log_is_reported_and_the_run_resumes_exactly(
    name: str,
    at: int,
    room: bool,
    whole_run: Callable[..., Path],
    tiny: Callable[..., Config],
    display: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`room` leaves space for the checkpoint. Every file has only complete lines, even before the resume."""
    whole, cut = whole_run("steps=2"), tiny("steps=2", run_dir="cut")
    with monkeypatch.context() as patch:
        disk = FullDisk(patch, name, at)
        if not room:
            fail_always(patch, after=at - 1)
        with pytest.raises(DiskError, match=r"No space left on device.*--resume") as stopped:
            train(cut, display)
    assert disk.writes > at
    assert f"{run_of(cut)}/{name}: cannot be written" in str(stopped.value)
    assert ("no room for a checkpoint of step 2" in str(stopped.value)) is not room
    for file in run_of(cut).glob("*.jsonl"):
        assert file.read_bytes().endswith(b"\n") or not file.stat().st_size
        assert all(json.loads(line) for line in file.read_text().splitlines())
    assert not list(run_of(cut).rglob(".tmp-*"))
    resume(run_of(cut), display)
    same_end(whole, run_of(cut))


def test_f4_a_full_disk_at_a_report_right_after_an_update_leaves_a_state_that_fits_the_weights(
    whole_run: Callable[..., Path], tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of skipped updates, for example. The checkpoint that still fits must not hold the earlier step."""
    options = ("steps=3", "checkpoint.every=5")
    whole, cut = whole_run(*options), tiny(*options, run_dir="cut")

    def full(incidents: Incidents, step: int, *arguments: Any) -> None:
        if step == 2:
            raise DiskError("events.jsonl: cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(Incidents, "check_updates", full)
        with pytest.raises(DiskError, match=r"a resume continues from step 2"):
            train(cut, display)
    resume(run_of(cut), display)
    same_end(whole, run_of(cut))


@pytest.mark.parametrize("method", ["write_rollouts", "write_evaluations"])
def test_f23_completions_that_cannot_be_written_do_not_stop_a_run(
    method: str,
    whole_run: Callable[..., Path],
    tiny: Callable[..., Config],
    display: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gspo.record.run_dir import RunDir

    def full() -> None:
        raise OSError(28, "No space left on device")

    whole, cut = whole_run("steps=3"), tiny("steps=3", run_dir="cut")
    with monkeypatch.context() as patch:
        injector = Injector(patch, RunDir, method, 2, full)
        train(cut, display)
    assert injector.shots == 1
    assert (whole / "metrics.jsonl").read_bytes() == (run_of(cut) / "metrics.jsonl").read_bytes()
    assert any("could not be written" in m for m in display.messages)


def test_f25_a_jumping_wall_clock_changes_nothing(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = tiny(run_dir="whole"), tiny(run_dir="cut")
    train(whole, display)
    jumps = [0]
    real = time.time

    def jumping() -> float:
        jumps[0] += 1
        return real() + (3600 if jumps[0] % 2 else -3600)

    with monkeypatch.context() as patch:
        patch.setattr(time, "time", jumping)
        train(cut, display)
        count = jumps[0]
        assert abs(time.time() - real()) > 3000  # the clock did jump
    assert jumps[0] == count + 1
    assert not [f for f in Path(gspo.__file__).parent.rglob("*.py") if "time.time(" in f.read_text()]
    same_end(run_of(whole), run_of(cut))
    assert all(v >= 0 for t in read_jsonl(run_of(cut) / "timings.jsonl") for k, v in t.items() if k.startswith("time/"))


def test_events_are_valid_json(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny()
    train(config, display)
    for line in (run_of(config) / "events.jsonl").read_text().splitlines():
        assert "event" in json.loads(line)


def test_f4_too_little_disk_space_is_reported_before_the_first_step(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free, shots = 1000, 0

    def usage(path: Any) -> Usage:
        Usage.shots += 1
        return Usage()

    monkeypatch.setattr("shutil.disk_usage", usage)
    config = tiny("steps=1", "eval.every=0")
    train(config, display)
    assert Usage.shots == 1
    kinds = [e["event"] for e in read_jsonl(run_of(config) / "events.jsonl")]
    assert kinds.index("warning") < kinds.index("checkpoint")
    assert "checkpoints will need" in events(config, "warning")[0]["message"]


def test_enough_disk_space_raises_no_warning(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny("steps=1", "eval.every=0")
    train(config, display)
    assert not events(config, "warning")
    folder = checkpoint.saved(run_of(config) / "checkpoints")[-1]
    written = sum(p.stat().st_size for p in folder.glob("*.*tensors"))
    from gspo.model.load import load_policy, load_tokenizer

    policy = load_policy(config.model, load_tokenizer(config.model), seed=0)
    assert 0.8 < checkpoint.size_of(policy.model, "adamw") / written < 1.3
