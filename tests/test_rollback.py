"""Runs that an alarm rolls back: where to, with what, what is kept, and what a kill at any instant leaves."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import gspo.loop
from gspo.checkpoints.rollback import with_rollback
from gspo.config import Config, ModelConfig
from gspo.data.difficulty import Difficulty
from gspo.errors import AlarmError, ConfigError, DiskError, NumericalError
from gspo.learner import checkpoint
from gspo.learner.checkpoint import TrainerState
from gspo.model.load import build_model, char_tokenizer
from gspo.record import rollbacks
from gspo.record.alarms import ALARMS, before_skipped
from gspo.record.metrics import step_metrics
from gspo.record.retention import for_rollback
from gspo.record.rollbacks import Rollback, horizon
from gspo.record.run_dir import RunDir, read_events, read_jsonl, read_metrics
from gspo.reduction import Same
from gspo.rollout.gather import RolloutState
from gspo.trainer import resume, train
from gspo.view.replay.replay import Request, compute

SETTINGS = (
    "steps=7",
    "eval.every=0",
    "checkpoint.every=1",
    "checkpoint.keep=1",
    "alarms.steps=2",
    "alarms.rollback=repetition",
    "objective.name=dapo",
    "objective.keep=all",
    "alarms.rollback_clip=0.8",
)
"""An alarm at step n finds its good weights at step n - 3."""


def run_of(config: Config) -> Path:
    return Path(config.run_dir)


@contextmanager
def repetition_in(batches: Collection[int]) -> Iterator[None]:
    """Metrics say that the completions of these batches repeat a token."""

    def metrics(objective: Any, collected: Any, *rest: Any) -> Mapping[str, Any]:
        found = dict(step_metrics(objective, collected, *rest))
        return found | {"length/repetitive_fraction": Same(float(collected.batch in batches))}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gspo.loop, "step_metrics", metrics)
        yield


def saved_steps(run: Path) -> list[int]:
    return [int(path.name) for path in checkpoint.saved(run / "checkpoints")]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [e for e in read_events(run) if e["event"] == kind]


def same_end(a: Path, b: Path) -> None:
    """Assert identical metrics, completions, abandoned steps and rollbacks, and a bitwise identical last checkpoint."""
    folders = ("rollouts", "evaluations", "abandoned")
    names = [p.relative_to(a) for folder in folders for p in sorted((a / folder).rglob("*.jsonl"))]
    assert {p.relative_to(b) for folder in folders for p in (b / folder).rglob("*")} >= set(names)
    for name in (Path("metrics.jsonl"), Path("rollbacks.json"), *names):
        if name.name != "timings.jsonl":
            assert (a / name).read_bytes() == (b / name).read_bytes(), name
    last = [checkpoint.saved(run / "checkpoints")[-1] for run in (a, b)]
    assert last[0].name == last[1].name
    for name in [p.name for p in last[0].iterdir() if p.suffix in (".safetensors", ".tensors")]:
        one, other = (load_file(path / name) for path in last)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[k], other[k]) for k in one)


@pytest.fixture
def rolled_back(tiny: Callable[..., Config], display: Any) -> Path:
    """A run whose batches 4 and 5 repeat a token: the alarm at step 5 rolls it back to step 2."""
    config = tiny(*SETTINGS, "checkpoint.keep=0")
    with repetition_in({4, 5}):
        train(config, display)
    return run_of(config)


def test_an_alarm_rolls_the_run_back_to_the_last_good_checkpoint(rolled_back: Path, display: Any) -> None:
    record = Rollback(
        number=1,
        alarm="repetition",
        step=5,
        # Batch 4 was sampled with the weights after step 3, so those after step 2 are the last good ones.
        to=2,
        batch=5,
        cursor=20,
        tokens=read_jsonl(rolled_back / "abandoned/001/metrics.jsonl")[-1]["tokens/sampled"],
        rate_factor=0.5,
        clip_factor=0.8,
    )
    assert rollbacks.read(rolled_back) == (record,)
    assert [row["step"] for row in read_metrics(rolled_back)] == list(range(8))
    state = checkpoint.read_state(rolled_back / "checkpoints/000007")
    assert (state.rollbacks, state.rate_factor, state.clip_factor) == (1, 0.5, 0.8)
    # Five more batches after the five of before: sampling does not go back.
    assert (state.step, state.rollout.batch, state.rollout.cursor) == (7, 10, 40)
    message = next(m for m in display.messages if "ollback 1" in m)
    assert "back to the checkpoint of step 2" in message
    assert "0.0005" in message
    assert "steps 3 to 5" in message
    assert saved_steps(rolled_back) == list(range(8))
    [event] = events(rolled_back, "rollback")
    assert (event["step"], event["from_step"], event["name"], event["number"]) == (2, 5, "repetition", 1)
    assert event["learning_rate"] == pytest.approx(5e-4)


def test_after_a_rollback_the_rate_is_lower_and_the_range_narrower(rolled_back: Path) -> None:
    rows = {row["step"]: row for row in read_metrics(rolled_back)}
    before = [rows[2], *read_jsonl(rolled_back / "abandoned/001/metrics.jsonl")]
    assert {row["learning_rate"] for row in before} == {1e-3}
    assert {rows[step]["learning_rate"] for step in range(3, 8)} == {5e-4}
    assert {row["clip/high"] for row in before} == {0.28}
    assert {rows[step]["clip/high"] for step in range(3, 8)} == {0.28 * 0.8}
    assert {rows[step]["clip/low"] for step in range(3, 8)} == {0.2 * 0.8}


def test_abandoned_steps_are_kept_and_their_tokens_stay_spent(rolled_back: Path) -> None:
    abandoned = read_jsonl(rolled_back / "abandoned/001/metrics.jsonl")
    assert [row["step"] for row in abandoned] == [3, 4, 5]
    assert [row["step"] for row in read_jsonl(rolled_back / "abandoned/001/timings.jsonl")] == [3, 4, 5]
    names = sorted(p.name for p in (rolled_back / "abandoned/001/rollouts").iterdir())
    assert names == ["000003.jsonl", "000004.jsonl", "000005.jsonl"]
    # Other prompts, not only other samples of the same.
    assert prompts(rolled_back / "abandoned/001/rollouts/000003.jsonl").isdisjoint(
        prompts(rolled_back / "rollouts/000003.jsonl")
    )
    rows = read_metrics(rolled_back)
    kept = sum(row.get("tokens/generated", 0) for row in rows)
    lost = sum(row["tokens/generated"] for row in abandoned)
    assert lost > 0
    assert rows[-1]["tokens/sampled"] == kept + lost


def test_pass_rates_go_back_and_the_position_in_the_data_does_not(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny(*SETTINGS, "checkpoint.keep=0", "data.sampling=difficulty", "data.task_size=16")
    rolled_back: list[TrainerState] = []
    carry_out = gspo.loop.carry_out

    def observed(*arguments: Any) -> TrainerState:
        rolled_back.append(carry_out(*arguments))
        return rolled_back[-1]

    with repetition_in({4, 5}), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gspo.loop, "carry_out", observed)
        train(config, display)
    run = run_of(config)
    [record] = rollbacks.read(run)
    [after] = [state.rollout for state in rolled_back]
    before = checkpoint.read_state(run / "checkpoints/000002").rollout
    last = checkpoint.read_state(run / "checkpoints/000007").rollout
    assert before.difficulty
    assert after.difficulty
    assert last.difficulty
    assert after.difficulty.judged.tolist() == before.difficulty.judged.tolist()
    assert after.difficulty.skipped == record.skipped != before.difficulty.skipped
    # Measured on from there: 5 batches of 4 prompts, whose groups count half for each later one of the same problem.
    assert last.difficulty.judged.sum() > before.difficulty.judged.sum()


def test_a_rollback_of_another_mixture_is_refused(tmp_path: Path, rolled_back: Path) -> None:
    [record] = rollbacks.read(rolled_back)
    state = TrainerState(rollout=RolloutState(difficulty=Difficulty.unknown(problems=3, sources=2)))
    with pytest.raises(ConfigError, match=r"rollbacks.json: rollback 1 has 0 numbers .* 2 sources"):
        with_rollback(state, record)


def prompts(file: Path) -> set[str]:
    return {record["prompt_id"] for record in read_jsonl(file)}


@pytest.mark.parametrize("last", [5, 2])
def test_a_run_that_rolled_back_resumes_exactly(last: int, rolled_back: Path, tmp_path: Path, display: Any) -> None:
    """From a checkpoint after the rollback, and from the one that it went back to."""
    cut = cut_after(last, rolled_back, tmp_path / "cut")
    resume(cut, display, trust_run=True)
    same_end(rolled_back, cut)
    assert len(events(cut, "rollback")) == 1


def test_a_rollback_ends_further_back_if_its_checkpoint_is_lost(
    rolled_back: Path, tmp_path: Path, display: Any
) -> None:
    cut = cut_after(1, rolled_back, tmp_path / "cut")
    resume(cut, display, trust_run=True)
    [record] = rollbacks.read(cut)
    assert (record.to, record.step) == (1, 5)
    assert [row["step"] for row in read_metrics(cut)] == list(range(8))
    assert {row["learning_rate"] for row in read_metrics(cut)[2:]} == {5e-4}
    assert checkpoint.read_state(cut / "checkpoints/000007").rollout.batch == 5 + 6


def cut_after(last: int, run: Path, target: Path) -> Path:
    """A copy of a run without the checkpoints after a step."""
    shutil.copytree(run, target)
    for path in checkpoint.saved(target / "checkpoints"):
        if int(path.name) > last:
            shutil.rmtree(path)
    return target


@pytest.mark.parametrize("step", [2, 3, 6])
def test_a_replay_is_exact_on_both_sides_of_a_rollback(step: int, rolled_back: Path) -> None:
    """Step 3 starts from the checkpoint that was saved before the rollback; step 6 is replayed over two steps."""
    shutil.rmtree(rolled_back / "checkpoints/000005")
    result = compute(Request(run=str(rolled_back), step=step, trust_run=True))
    assert result.exact


@pytest.mark.slow
def test_a_kill_at_any_instant_of_a_rollback_leaves_a_run_that_resumes_exactly(
    tiny: Callable[..., Config], tmp_path: Path, display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is copied before every operation on it that a rollback makes, and every copy is resumed."""
    config = tiny(*SETTINGS)
    run = run_of(config)
    copies: dict[str, Path] = {}
    numbers = itertools.count()
    active = False

    def copy(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal active
        if not active or not event.startswith(("open", "os.", "shutil.")) or str(run) not in str(arguments):
            return
        active = False  # copying opens files, too
        snapshot = shutil.copytree(run, tmp_path / f"killed-{next(numbers)}")
        copies.setdefault(contents(snapshot), snapshot)
        active = True

    sys.addaudithook(copy)
    roll_back = gspo.loop.Loop._roll_back

    def copied(loop: Any, record: Rollback) -> TrainerState:
        nonlocal active
        active = True
        try:
            return roll_back(loop, record)
        finally:
            active = False

    monkeypatch.setattr(gspo.loop.Loop, "_roll_back", copied)
    with repetition_in({4, 5}):
        train(config, display)
        monkeypatch.undo()
        decided = [(c / "rollbacks.json").exists() for c in copies.values()]
        # Before and after the decision; several states in between.
        assert False in decided
        assert sum(decided) >= 8
        for snapshot in copies.values():
            resume(snapshot, display, trust_run=True)
            same_end(run, snapshot)
            assert len(events(snapshot, "rollback")) == 1
            assert not list(snapshot.rglob(".tmp-*"))


def contents(run: Path) -> str:
    """Names, sizes and times of all files, which differ if a directory does."""
    files = sorted(p for p in run.rglob("*"))
    return json.dumps([(str(p.relative_to(run)), p.stat().st_size if p.is_file() else -1) for p in files])


def test_a_stop_during_a_rollback_is_exact(rolled_back: Path, tiny: Callable[..., Config], display: Any) -> None:
    class StopAtRollback(type(display)):  # type: ignore[misc]
        def message(self, text: str) -> None:
            if text.startswith("Rollback"):
                os.kill(os.getpid(), signal.SIGTERM)

    config = tiny(*SETTINGS, run_dir="stopped")
    with repetition_in({4, 5}):
        stopped = train(config, StopAtRollback())
    assert (stopped.step, stopped.stopped_by) == (2, signal.SIGTERM)
    resume(run_of(config), display)
    same_end(rolled_back, run_of(config))


@pytest.mark.parametrize("kind", ["alarm", "checkpoint_damaged"])
def test_a_full_disk_at_the_alarm_does_not_lose_the_rollback(
    kind: str, rolled_back: Path, tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of the bad weights would still fit, but a resume would not roll back from it."""
    config = tiny(*SETTINGS, "checkpoint.every=2", run_dir="full")
    event = RunDir.event

    def full(run_dir: RunDir, written: str, **values: Any) -> None:
        if written == kind:
            raise DiskError("events.jsonl: cannot be written")
        event(run_dir, written, **values)

    def damaged(*arguments: Any, **options: Any) -> Any:
        return newest(*arguments, **options)[0], ["damaged"]

    newest = checkpoint.newest
    with monkeypatch.context() as patch, repetition_in({4, 5}):
        patch.setattr(RunDir, "event", full)
        patch.setattr(checkpoint, "newest", damaged)
        with pytest.raises(DiskError, match=r"a resume continues from step 4\)"):
            train(config, display)
    assert saved_steps(run_of(config))[-1] == 4
    with repetition_in({4, 5}):
        resume(run_of(config), display)
    same_end(rolled_back, run_of(config))


def test_after_max_rollbacks_the_alarm_stops_the_run(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny(*SETTINGS, "steps=8", "alarms.max_rollbacks=2")
    # Steps 4 and 5; after the first rollback steps 5 and 6; after the second one steps 6 and 7.
    bad = {4, 5, 8, 9, 12, 13}
    with repetition_in(bad), pytest.raises(AlarmError, match=r"step 7: repetition \(alarms.rollback\).*max_rollbacks"):
        train(config, display)
    found = rollbacks.read(run_of(config))
    assert [(r.number, r.step, r.to, r.rate_factor) for r in found] == [(1, 5, 2, 0.5), (2, 6, 3, 0.25)]
    assert [p.name for p in sorted((run_of(config) / "abandoned").iterdir())] == ["001", "002"]
    # The weights of the stop are saved, and a resume trains on, with the factors of both rollbacks.
    with repetition_in(bad):
        assert resume(run_of(config), display).step == 8
    assert read_metrics(run_of(config))[-1]["learning_rate"] == 1e-3 * 0.25


def test_without_a_good_checkpoint_the_alarm_stops_the_run(tiny: Callable[..., Config], display: Any) -> None:
    with repetition_in(range(100)), pytest.raises(AlarmError, match="since the first step"):
        train(tiny(*SETTINGS, run_dir="a"), display)
    config = tiny(*SETTINGS, run_dir="b")
    damage_all = gspo.checkpoints.rollback.checkpoint.newest

    def damaged(folder: Path, *options: Any, **named: Any) -> Any:
        for path in checkpoint.saved(folder):
            (path / "manifest.json").unlink(missing_ok=True)
        return damage_all(folder, *options, **named)

    with pytest.MonkeyPatch.context() as patch, repetition_in({4, 5}):
        patch.setattr(checkpoint, "newest", damaged)
        with pytest.raises(AlarmError, match="no intact checkpoint of step 2 or earlier"):
            train(config, display)
    assert not rollbacks.read(run_of(config))


def test_an_alarm_of_alarms_stop_wins(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny(*SETTINGS, "alarms.rollback=truncation", "alarms.stop=repetition")
    with repetition_in({4, 5}), pytest.raises(AlarmError, match=r"alarms\.stop"):
        train(config, display)
    assert not (run_of(config) / "rollbacks.json").exists()


def test_skipped_updates_roll_back(tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are not finite while the rate is that of the settings, from step 4 on."""
    from gspo.learner.optimizer import Optimizer

    step = Optimizer.step

    def diverging(optimizer: Optimizer, *, loss_finite: bool, **weights: Any) -> Any:
        return step(optimizer, loss_finite=optimizer.updates < 6 or optimizer.config.learning_rate < 1e-3, **weights)

    monkeypatch.setattr(Optimizer, "step", diverging)
    options = ("learner.max_skipped=3", "checkpoint.keep=0")
    with pytest.raises(NumericalError, match="max_skipped"):
        train(tiny(*SETTINGS, *options, run_dir="stops"), display)
    config = tiny(*SETTINGS, *options, "alarms.rollback=skipped updates")
    assert train(config, display).rollbacks == 1
    [record] = rollbacks.read(run_of(config))
    # Two updates of step 4 and one of step 5 were skipped. The weights after step 2 still had finite gradients.
    assert (record.step, record.to, record.alarm, record.batch) == (5, 2, "skipped updates", 5)
    assert read_metrics(run_of(config))[-1]["step"] == 7


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.build=tiny_moe",),
        ("model.dtype=bfloat16",),
        ("model.dtype=float16",),
        ("objective.kl=0.01",),
        ("learner.schedule=cosine",),
        ("data.sampling=difficulty",),
    ],
    ids=[
        "mixture of experts",
        "bfloat16 with float32 master weights",
        "float16 with a loss scale",
        "KL to a reference",
        "schedule",
        "measured difficulty",
    ],
)
def test_a_rollback_in_the_process_equals_one_by_a_resume(
    overrides: tuple[str, ...], tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies right after the decision loads the checkpoint afresh."""
    whole, cut = (tiny(*SETTINGS, *overrides, run_dir=name) for name in ("whole", "cut"))
    with repetition_in({4, 5}):
        train(whole, display)
        with monkeypatch.context() as patch:
            patch.setattr(gspo.loop, "reload_weights", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                train(cut, display)
        resume(run_of(cut), display)
    same_end(run_of(whole), run_of(cut))


def test_a_rollback_of_adapters_equals_one_by_a_resume(
    tiny: Callable[..., Config], tmp_path: Path, display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tokenizer = tmp_path / "base", char_tokenizer("sort 0123456789")
    build_model(ModelConfig(build="tiny_dense"), tokenizer, 3).save_pretrained(base)
    tokenizer.save_pretrained(base)
    lora = ("model.build=", f"model.path={base}", "model.lora.rank=3", "model.dtype=bfloat16")
    test_a_rollback_in_the_process_equals_one_by_a_resume(lora, tiny, display, monkeypatch)


# ------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("alarms.rollback=repetition", "alarms.stop=repetition"), "also in alarms.stop"),
        (("alarms.rollback=engine mismatch",), "alarms.rollback"),
        (("alarms.rollback=held-out drop", "eval.every=0"), r"alarms.rollback: .* never raised without eval.every"),
        (("alarms.stop=held-out drop", "eval.every=0"), r"alarms.stop: .* never raised without eval.every"),
        (("alarms.rollback_rate=0.3",), "no effect without alarms.rollback"),
        (("alarms.rollback=repetition", "alarms.rollback_rate=0"), "must be above 0"),
        (("alarms.rollback=repetition", "alarms.rollback_rate=2"), "between 0 and 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    overrides: tuple[str, ...], message: str, tiny: Callable[..., Config]
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(*overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("objective.name=rloo",), "'rloo' has no clip range"),
        (("objective.clip_low=auto:0.2",), "adaptive clip range"),
    ],
)
def test_a_clip_range_that_cannot_be_narrowed_is_refused(
    overrides: tuple[str, ...], message: str, tiny: Callable[..., Config], display: Any
) -> None:
    config = tiny("alarms.rollback=repetition", "alarms.rollback_clip=0.5", *overrides)
    with pytest.raises(ConfigError, match=message):
        train(config, display)


def test_a_run_without_checkpoints_starts_again_without_its_rollbacks(rolled_back: Path, display: Any) -> None:
    whole = (rolled_back / "metrics.jsonl").read_bytes()
    shutil.rmtree(rolled_back / "checkpoints")
    (rolled_back / "checkpoints").mkdir()
    with repetition_in({4, 5}):
        resume(rolled_back, display)
    assert [r.number for r in rollbacks.read(rolled_back)] == [1]
    assert (rolled_back / "metrics.jsonl").read_bytes() == whole


# ------------------------------------------------------------------------------------------------- which checkpoints


@pytest.mark.parametrize("every", [1, 2, 3, 5, 7, 20])
@pytest.mark.parametrize("reach", [2, 3, 6, 20])
def test_retention_always_leaves_a_checkpoint_that_is_old_enough(every: int, reach: int) -> None:
    """Simulated: at every step, the newest kept checkpoint that is old enough is one, and not much older."""
    kept: set[int] = set()
    for step in range(200):
        if step % every == 0:
            kept = for_rollback({*kept, step}, reach) | {step}
            assert len(kept) <= 3
        good = [s for s in kept if s <= step + 1 - reach]
        if step + 1 >= reach:
            assert good
            assert step + 1 - max(good) <= 2 * reach + 2 * every


def test_the_reach_follows_the_alarms(tiny: Callable[..., Config]) -> None:
    assert horizon(tiny()) == 0
    assert horizon(tiny("alarms.rollback=repetition", "alarms.steps=7")) == 8
    assert horizon(tiny("alarms.rollback=held-out drop", "eval.every=10")) == 20
    assert horizon(tiny("alarms.rollback=skipped updates,repetition", "learner.max_skipped=9")) == 10


def test_the_last_good_step_of_a_drop_is_the_last_evaluation_before_it() -> None:
    alarm = next(a for a in ALARMS if a.name == "held-out drop")
    values = {0: 0.2, 10: 0.6, 20: 0.58, 30: 0.3, 40: 0.3}
    rows = [
        {"step": step, "reward/correct_fraction": step / 50}
        | (
            {"eval/accuracy_low": values[step] - 0.05, "eval/accuracy_high": values[step] + 0.05}
            if step in values
            else {}
        )
        for step in range(41)
    ]
    assert alarm.holds(rows, 5)
    assert alarm.last_good(rows, 5) == 20


@pytest.mark.parametrize(("in_row", "good"), [(0, 8), (1, 7), (2, 7), (3, 5)])
def test_the_last_good_step_of_skipped_updates(in_row: int, good: int) -> None:
    """Of two updates each; step 8 trained on nothing, step 7 applied its first update and skipped its second."""
    skipped: dict[int, int | None] = {5: 0, 6: 1, 7: 1, 8: None, 9: 2}
    rows = [{"step": step, "grad/skipped": count} for step, count in skipped.items()]
    assert before_skipped(rows, 10, in_row) == good


# ------------------------------------------------------------------------------------------------- files of others


@pytest.mark.parametrize(
    "text",
    ["{", "{}", "[1]", '[{"number": 1}]', "[" * 5000, '[{"number": ' + "9" * 5000 + "}]"],
)
def test_a_strange_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "rollbacks.json").write_text(text)
    with pytest.raises(ConfigError, match=r"rollbacks\.json"):
        rollbacks.read(tmp_path)


def test_a_checkpoint_of_a_lost_rollback_is_not_resumed(rolled_back: Path, display: Any) -> None:
    (rolled_back / "rollbacks.json").unlink()
    outcome = resume(rolled_back, display)
    skipped = [m for m in display.messages if "rollbacks.json has 0 rollbacks, the checkpoint 1" in m]
    assert len(skipped) == 5
    assert (outcome.start_step, outcome.rollbacks) == (2, 0)
