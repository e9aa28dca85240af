"""Batches that are sampled in turns with newer weights (`rollout.span_tokens`)."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
import pytest
from ends import run_of, same_end
from sampling_stand_in import stand_in
from simulated_vllm import SimulatedVllm
from test_asynchronous import Silent, StopAfter, no_room_for
from test_rollback import SETTINGS as ROLLBACK
from test_rollback import repetition_in
from tiny_runs import tiny_config

from gspo.config import Config
from gspo.errors import CheckpointError, ConfigError, DiskError
from gspo.learner import checkpoint
from gspo.record.ledger import read_ledger
from gspo.record.metric_definitions import METRICS, TIMINGS, Metric
from gspo.record.run_dir import read_events, read_jsonl
from gspo.rollout.in_flight import Ticket
from gspo.rollout.spans import Schedule
from gspo.trainer import resume, train
from gspo.view.replay.replay import Request, compute
from gspo.view.run_reader import RunReader

LAG = 3
STEPS = 6
SPAN = 4
SETTING = (f"rollout.max_lag={LAG}", f"rollout.span_tokens={SPAN}", "rollout.min_tokens=3", f"steps={STEPS}")
UPDATES = 2
"""Optimizer steps per training step of the tiny run."""


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without delays."""
    folder = tmp_path_factory.mktemp("golden")
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        train(tiny_config(folder, *SETTING), Silent())
    return folder / "run"


def check_schedule(run: Path) -> None:
    """Every token is sampled from the weights that the schedule names."""
    # Three turns: 4 tokens with the weights of step t - 4, 4 with those of t - 3, the last 2 with those of t - 2.
    for step in range(1, STEPS + 1):
        # The first batches have fewer turns, because there are no older weights.
        expected = sorted({max(0, step - 4), max(0, step - 3), max(0, step - 2)})
        lengths = set()
        for record in read_jsonl(run / f"rollouts/{step:06d}.jsonl"):
            count = len(record["token_ids"])
            lengths.add(count)
            spans: dict[int, int] = {}
            for turn, weights in enumerate(expected):
                if turn * SPAN < count:
                    spans.setdefault(UPDATES * weights, turn * SPAN)
            found = record.get("spans") or [[record["version"], 0]]
            assert found == [[version, first] for version, first in spans.items()]
            assert record["stop"] in ("eos", "length")
        assert max(lengths) == 10


def test_every_token_is_sampled_from_the_weights_that_the_schedule_names(golden: Path) -> None:
    check_schedule(golden)
    rows = {row["step"]: row for row in read_jsonl(golden / "metrics.jsonl")}
    assert [rows[step]["lag/steps"] for step in range(1, STEPS + 1)] == [0, 1, 2, 3, 3, 3]
    assert rows[6]["lag/token_updates"] < rows[6]["lag/updates"] == 6
    assert 1 < rows[6]["lag/spans"] <= 3
    assert all(0 <= rows[step]["sampler/idle_fraction"] < 1 for step in rows if "sampler/idle_fraction" in rows[step])
    assert "sampler/idle_fraction" in rows[6]
    assert {"lag/2/ess", "lag/4/ess", "lag/6/ess"} <= rows[6].keys()


def test_the_ledger_has_every_cut(golden: Path) -> None:
    assert [history.trained for history in read_ledger(golden)] == [[step] for step in range(1, STEPS + 1)]
    lines = [line for line in read_jsonl(golden / "ledger.jsonl") if line["batch"] == STEPS]
    states = [line["state"] for line in lines]
    assert states == ["issued", "cut", "cut", "sampled", "scored", "collected", "trained"]
    cuts = [line for line in lines if line["state"] == "cut"]
    assert [cut["weights"] for cut in cuts] == [2, 3]
    records = read_jsonl(golden / f"rollouts/{STEPS:06d}.jsonl")
    lengths = [len(record["token_ids"]) for record in records]
    ended = [min(n, SPAN) if r["stop"] == "eos" and n <= SPAN else SPAN for n, r in zip(lengths, records, strict=True)]
    assert cuts[0]["tokens"] == sum(ended)
    assert cuts[0]["completions"] >= cuts[1]["completions"] > 0


@pytest.mark.parametrize(("file", "definitions"), [("metrics.jsonl", METRICS), ("timings.jsonl", TIMINGS)])
def test_metrics_of_spans_and_their_definitions_match(golden: Path, file: str, definitions: tuple[Metric, ...]) -> None:
    found = {key for row in read_jsonl(golden / file) for key in row if key.startswith("lag/")}
    found = {re.sub(r"/\d+/", "/NAME/", key) for key in found}
    assert found == {m.key for m in definitions if m.key.startswith("lag/") and "over_lag" not in m.present}


def test_the_timeline_has_the_turns(golden: Path) -> None:
    reader = RunReader(golden)
    reader.refresh()
    rows = reader.curves(100)["timeline"]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [[weights for weights, *_ in row["turns"]] for row in rows] == [
        [0],
        [0],
        [0, 1],
        [0, 1, 2],
        [1, 2, 3],
        [2, 3, 4],
    ]
    for row in rows:
        times = [time for _, *turn in row["turns"] for time in turn]
        assert times == sorted(times)
        assert row["sample_start"] <= times[0]
        assert times[-1] == row["sample_end"]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_delays_do_not_change_a_run(
    seed: int, golden: Path, tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(*SETTING)
    stand_in(monkeypatch, seed=seed, longest_s=0.1)
    train(config, display)
    same_end(golden, run_of(config))


def test_a_rollback_abandons_the_batches_in_flight(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch)
    config = tiny(*ROLLBACK, "checkpoint.keep=0", *SETTING, "steps=7")
    with repetition_in({4, 5}):
        train(config, display)
    ledger = read_ledger(run_of(config))
    trained = {history.batch: history.trained for history in ledger if history.trained}
    # Steps 3 to 5 were abandoned, and so were the batches that had begun then.
    assert sorted(chain(*trained.values())) == [1, 2, 3, 3, 4, 4, 5, 5, 6, 7]
    again = {steps[0]: batch for batch, steps in trained.items()}
    assert list(range(again[3], again[3] + 5)) == [again[step] for step in range(3, 8)]
    cut = tmp_path / "cut"
    shutil.copytree(run_of(config), cut)
    for step in (5, 6, 7):
        shutil.rmtree(cut / f"checkpoints/{step:06d}")
    resume(cut, display, trust_run=True)  # from a checkpoint after the rollback, with cut completions
    same_end(run_of(config), cut)


@pytest.mark.parametrize("at", [1, *(pytest.param(at, marks=pytest.mark.slow) for at in (0, 3, 4))])
def test_a_resumed_run_is_byte_identical(
    at: int, golden: Path, tmp_path: Path, display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(golden, cut)
    for later in checkpoint.saved(cut / "checkpoints"):
        if int(later.name) > at:
            shutil.rmtree(later)
    stand_in(monkeypatch)
    resume(cut, display, trust_run=True)
    same_end(golden, cut)
    assert [history.trained for history in read_ledger(cut)] == [[step] for step in range(1, STEPS + 1)]


def test_a_stopped_run_keeps_completions_that_were_cut(
    golden: Path, tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(*SETTING, "checkpoint.every=100")
    with monkeypatch.context() as patch:
        stand_in(patch)
        assert train(config, StopAfter(display, 3)).step == 3
    saved = run_of(config) / "checkpoints/000003"
    entries = orjson.loads((saved / "in_flight.json").read_bytes())["entries"]
    assert [entry["ticket"]["step"] for entry in entries] == [4, 5, 6, 7]
    parts = [entry["part"] for entry in entries if entry["part"]]
    assert parts
    for part in parts:
        stops = {completion["stop"] for group in part["completions"] for completion in group}
        assert "cut" in stops
    kept = {int(file.stem.partition("-")[2]) for file in saved.glob("weights-*.tensors")}
    unfinished = [e for e in entries if e["batch"] is None]
    needed = {w for e in unfinished for w in range((e["part"] or e["ticket"])["weights"], e["last"] + 1)}
    assert kept == {weights for weights in needed if weights < 3}
    stand_in(monkeypatch)
    resume(run_of(config), display, trust_run=True)
    assert (run_of(config) / "metrics.jsonl").read_bytes() == (golden / "metrics.jsonl").read_bytes()
    for step in range(1, STEPS + 1):
        name = f"rollouts/{step:06d}.jsonl"
        assert (run_of(config) / name).read_bytes() == (golden / name).read_bytes()


def test_a_full_disk_loses_no_completion(
    golden: Path, tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn that begins batch 6 continues batch 5 and finishes batch 4, whose first weights are gone by then."""
    config = tiny(*SETTING, "checkpoint.every=100")
    with monkeypatch.context() as patch:
        stand_in(patch)
        no_room_for("cut", 6, patch)
        with pytest.raises(DiskError, match="No space left on device"):
            train(config, display)
    assert int(checkpoint.saved(run_of(config) / "checkpoints")[-1].name) >= 2, "otherwise the run begins again"
    stand_in(monkeypatch)
    resume(run_of(config), display, trust_run=True)
    same_end(golden, run_of(config))
    assert [history.trained for history in read_ledger(run_of(config))] == [[step] for step in range(1, STEPS + 1)]


def test_a_strange_open_batch_is_no_checkpoint(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tiny(*SETTING, "checkpoint.every=100")
    stand_in(monkeypatch)
    train(config, StopAfter(display, 3))
    saved = run_of(config) / "checkpoints/000003"
    text = (saved / "in_flight.json").read_bytes()
    assert checkpoint.in_flight_fault(saved) is None
    for change in ({"weights": 9}, {"weights": -1}, {"completions": [[{}]]}, {"batch": None, "more": 1}):
        tree = orjson.loads(text)
        entry = next(entry for entry in tree["entries"] if entry["part"])
        entry["part"] |= change
        (saved / "in_flight.json").write_bytes(orjson.dumps(tree))
        with pytest.raises(CheckpointError):
            checkpoint.read_in_flight(saved)


def test_a_recorded_step_is_replayed_with_the_same_updates(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    config = tiny(*SETTING, "learner.old_logp=interpolate", "learner.learning_rate=1e-2")
    train(config, display)
    result = compute(Request(run=str(run_of(config)), start=0, objectives="gspo", trust_run=True))
    assert [(a.step, a.exact, a.ledger, a.weights) for a in result.agreements] == [
        (step, True, True, True) for step in range(1, STEPS + 1)
    ]


def test_the_engine_scripted_continues_completions(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    config = tiny(*SETTING, "rollout.engine=scripted", 'rollout.engine_options={default="1 2 3 4 5"}', "steps=4")
    train(config, display)
    (found,) = {tuple(map(tuple, r["spans"])) for r in read_jsonl(run_of(config) / "rollouts/000004.jsonl")}
    assert found == ((0, 0), (2, 4), (4, 8))


def test_vllm_continues_completions(tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo.rollout.vllm.in_process.InProcessHost", lambda model, **options: SimulatedVllm(model))
    monkeypatch.setattr("gspo.rollout.vllm.connect.check", lambda options: None)
    monkeypatch.setattr("gspo.rollout.vllm.in_process.settings_for", lambda model, **options: {})
    stand_in(monkeypatch)
    config = tiny(*SETTING, "rollout.engine=vllm", "eval.every=0")
    train(config, display)
    check_schedule(run_of(config))


@pytest.mark.parametrize(
    ("max_lag", "span", "turns", "of_step_9"),
    [(2, 4, 2, (6, 7)), (3, 4, 3, (5, 7)), (4, 5, 2, (4, 5)), (5, 9, 2, (3, 4))],
)
def test_a_batch_has_as_many_turns_as_its_longest_completion_needs(
    max_lag: int, span: int, turns: int, of_step_9: tuple[int, int]
) -> None:
    schedule = Schedule(max_lag=max_lag, span_tokens=span, max_tokens=10)
    assert schedule.turns == turns
    ticket = Ticket(step=9, weights=9 - 1 - max_lag, version=0)
    assert (ticket.weights, schedule.last(ticket)) == of_step_9
    # At the start of a run, turns that would need older weights are skipped.
    assert schedule.last(Ticket(step=1, weights=0, version=0)) == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("rollout.max_lag=1",), "set rollout.max_lag to at least 2"),
        (("rollout.span_tokens=10",), "not less than rollout.max_tokens"),
        (("data.sampling=difficulty",), "chooses problems by the batch before"),
        (("rollout.max_lag=0",), "has no effect"),
        (("rollout.over_lag=drop",), "3 turns of 4 tokens are enough for rollout.max_tokens = 10"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    overrides: tuple[str, ...], message: str, tiny: Callable[..., Config]
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(*SETTING, *overrides)


def test_refills_are_refused(tiny: Callable[..., Config], display: Any) -> None:
    with pytest.raises(ConfigError, match=r"rollout.refill_budget: with rollout.span_tokens"):
        train(tiny(*SETTING, "objective.keep=mixed"), display)


DROP = ("rollout.over_lag=drop", "rollout.span_tokens=3", "rollout.max_lag=2")


def test_completions_that_are_too_long_are_dropped(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch)
    config = tiny(*SETTING, *DROP)
    train(config, display)
    waits = tiny(*SETTING, *DROP, "rollout.over_lag=wait", "steps=1", run_dir="waits")
    train(waits, display)
    run = run_of(config)

    def completions(run: Path, step: int) -> dict[tuple[str, int], list[int]]:
        records = read_jsonl(run / f"rollouts/{step:06d}.jsonl")
        return {(r["prompt_id"], r["sample"]): r["token_ids"] for r in records}

    every = completions(run_of(waits), 1)
    assert completions(run, 1) == {key: ids for key, ids in every.items() if len(ids) <= 6}
    dropped = {line["batch"]: line for line in read_jsonl(run / "ledger.jsonl") if line["state"] == "dropped"}
    assert {(prompt, sample) for prompt, sample, _ in dropped[1]["completions"]} == {
        key for key, ids in every.items() if len(ids) > 6
    }
    rows = {row["step"]: row for row in read_jsonl(run / "metrics.jsonl")}
    total = 0
    ledger = read_ledger(run)
    for step in range(1, STEPS + 1):
        found = dropped[step]["completions"]
        assert {tokens for *_, tokens in found} == {6}
        left = completions(run, step)
        assert len(left) + len(found) == 16
        assert rows[step]["lag/dropped"] == len(found)
        assert rows[step]["lag/dropped_fraction"] == pytest.approx(len(found) / 16)
        assert rows[step]["lag/dropped_tokens"] == 6 * len(found)
        lost = {prompt for prompt, *_ in found} - {prompt for prompt, _ in left}
        assert rows[step]["lag/dropped_prompts"] == len(lost)
        # Dropped or not, a prompt has had its turn: the order continues after it.
        assert len(ledger[step - 1].prompts or ()) == 4
        total += sum(map(len, left.values())) + 6 * len(found)
    assert rows[STEPS]["tokens/sampled"] == total
    cut = tmp_path / "cut"
    shutil.copytree(run, cut)
    for later in checkpoint.saved(cut / "checkpoints")[3:]:
        shutil.rmtree(later)
    resume(cut, display, trust_run=True)
    same_end(run, cut)


def test_a_run_whose_completions_are_all_dropped_says_why(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither waits nor trains on nothing without a word."""
    stand_in(monkeypatch)
    config = tiny(*SETTING, *DROP, "rollout.span_tokens=1", "steps=4")
    train(config, display)
    events = read_events(run_of(config))
    idle = [event for event in events if event["event"] == "no_trainable_samples"]
    assert [(event["step"], event["reasons"]) for event in idle] == [(step, {"over_lag": 16}) for step in range(1, 5)]
    assert [history.trained for history in read_ledger(run_of(config))] == [[step] for step in range(1, 5)]
    reader = RunReader(run_of(config))
    reader.refresh()
    (finding,) = (finding for finding in reader.findings() if finding.name == "no trainable samples")
    assert "rollout.over_lag" in finding.what


@pytest.mark.slow
def test_a_whole_run_with_a_sampling_process(golden: Path, tiny: Callable[..., Config], display: Any) -> None:
    config = tiny(*SETTING)
    train(config, display)
    same_end(golden, run_of(config))
