"""Sampling ahead of learning (`rollout.max_lag`): the bound, exact resume, the ledger, and the sampling process."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from ends import run_of, same_end
from safetensors.torch import load_file, save_file
from sampling_stand_in import StandIn, stand_in
from simulated_vllm import SimulatedVllm
from test_rollback import SETTINGS as ROLLBACK
from test_rollback import repetition_in
from tiny_runs import tiny_config

from gspo.build import sampler_for
from gspo.config import Config
from gspo.errors import CheckpointError, ConfigError, DiskError, EngineError, LagError
from gspo.learner import checkpoint
from gspo.ranks.codec import encode
from gspo.record import run_dir
from gspo.record.ledger import read_ledger
from gspo.record.metric_definitions import METRICS, TIMINGS, Metric
from gspo.record.run_dir import json_line, read_events, read_jsonl
from gspo.rollout import in_flight
from gspo.rollout.engine import GenerateOptions
from gspo.rollout.sampling_process import SamplingProcess
from gspo.trainer import resume, train
from gspo.types import Sampling
from gspo.view.replay.replay import Request, compute
from gspo.view.run_reader import RunReader

LAG = 2
STEPS = 5
SETTING = (f"rollout.max_lag={LAG}", f"steps={STEPS}")
UPDATES = 2
"""Optimizer steps per training step of the tiny run."""


def weights_of(step: int, lag: int = LAG) -> int:
    """The step after which the weights that sample the batch of a step are taken."""
    return max(0, step - 1 - lag)


class Silent:
    """A display for a fixture of the whole module."""

    def __getattr__(self, name: str) -> Any:
        return lambda *values: None


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without delays."""
    folder = tmp_path_factory.mktemp("golden")
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        train(tiny_config(folder, *SETTING), Silent())
    return folder / "run"


def test_every_batch_is_sampled_from_the_weights_that_the_bound_names(golden: Path) -> None:
    for step in range(1, STEPS + 1):
        records = read_jsonl(golden / f"rollouts/{step:06d}.jsonl")
        assert {r["version"] for r in records} == {UPDATES * weights_of(step)}
    rows = {row["step"]: row for row in read_jsonl(golden / "metrics.jsonl")}
    assert [rows[step]["lag/steps"] for step in range(1, STEPS + 1)] == [0, 1, 2, 2, 2]
    assert [rows[step]["lag/updates"] for step in range(1, STEPS + 1)] == [0, 2, 4, 4, 4]


def test_the_ledger_has_every_batch_and_every_prompt_once(golden: Path) -> None:
    ledger = read_ledger(golden)
    assert [history.trained for history in ledger] == [[step] for step in range(1, STEPS + 1)]
    for step, history in enumerate(ledger, start=1):
        (issued,) = history.issued
        assert (issued["step"], issued["weights"]) == (step, weights_of(step))
        prompts = dict.fromkeys(r["prompt_id"] for r in read_jsonl(golden / f"rollouts/{step:06d}.jsonl"))
        assert history.prompts == list(prompts)
    states = [line["state"] for line in read_jsonl(golden / "ledger.jsonl") if line["batch"] == STEPS]
    assert states == ["issued", "sampled", "scored", "collected", "trained"]


@pytest.mark.parametrize(("file", "definitions"), [("metrics.jsonl", METRICS), ("timings.jsonl", TIMINGS)])
def test_metrics_of_age_and_their_definitions_match(golden: Path, file: str, definitions: tuple[Metric, ...]) -> None:
    found = {key for row in read_jsonl(golden / file) for key in row if key.startswith(("lag/", "time/wait"))}
    found = {re.sub(r"/\d+/", "/NAME/", key) for key in found}
    defined = {m.key for m in definitions if not re.search("span_tokens|over_lag", m.present)}
    assert found == {key for key in defined if key.startswith(("lag/", "time/wait"))}


def test_the_page_has_a_timeline(golden: Path) -> None:
    reader = RunReader(golden)
    reader.refresh()
    rows = reader.curves(100)["timeline"]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert 0 <= row["sample_start"] < row["sample_end"] <= row["learn_start"] < row["learn_end"]
    assert "lag/0/ess" in reader.curves(100)["curves"]


@pytest.mark.parametrize("seed", [1, 2])
def test_delays_do_not_change_a_run(
    seed: int, golden: Path, tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(*SETTING)
    stand_in(monkeypatch, seed=seed, longest_s=0.1)
    train(config, display)
    same_end(golden, run_of(config))


def test_a_sampling_process_without_a_lag_changes_nothing(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lag of 0 needs no sampling process. With one, the run is byte-identical, but for the metrics of its age."""
    config, through = tiny(run_dir="in-turn"), tiny(run_dir="process")
    train(config, display)
    assert not (run_of(config) / "ledger.jsonl").exists()

    def sampler(settings: Config, *rest: Any) -> SamplingProcess | None:
        return sampler_for(replace(settings, rollout=replace(settings.rollout, max_lag=1)), *rest)

    stand_in(monkeypatch)
    monkeypatch.setattr("gspo.build.sampler_for", sampler)
    train(through, display)
    rows = read_jsonl(run_of(through) / "metrics.jsonl")
    assert [row["lag/steps"] for row in rows if row["step"]] == [0, 0, 0]
    assert {row["time/wait_s"] > 0 for row in read_jsonl(run_of(through) / "timings.jsonl")} == {True}
    plain = [{key: value for key, value in row.items() if not key.startswith("lag/")} for row in rows]
    lines = "".join(json_line(row) for row in plain)
    (run_of(through) / "metrics.jsonl").write_text(lines)
    same_end(run_of(config), run_of(through))


def test_data_that_is_shorter_than_the_batches_in_flight_is_started_again(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass over the data trains on every prompt once, and the run does not wait for more of them."""
    stand_in(monkeypatch)
    config = tiny(*SETTING, "data.task_size=10", "rollout.prompts=5", "steps=6")
    train(config, display)
    ledger = read_ledger(run_of(config))
    prompts = [prompt.partition("#")[0] for history in ledger for prompt in history.prompts]
    assert len(prompts) == 30
    for start in (0, 10, 20):
        assert len(set(prompts[start : start + 10])) == 10


def test_a_recorded_step_is_replayed_with_the_same_updates(
    golden: Path, tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only: dict[str, Any] = {"objectives": "gspo", "trust_run": True}
    stand_in(monkeypatch)
    config = tiny("rollout.max_lag=1", "learner.old_logp=interpolate", "learner.learning_rate=1e-2", run_dir="between")
    train(config, display)
    assert compute(Request(run=str(run_of(config)), step=3, **only)).exact


def test_a_recorded_run_is_replayed_from_its_ledger_with_the_same_updates(golden: Path, tmp_path: Path) -> None:
    """Without sampling: from the recorded completions, in the order of the ledger."""
    only: dict[str, Any] = {"objectives": "gspo", "trust_run": True, "start": 0}
    replayed = compute(Request(run=str(golden), **only))
    found = [(a.step, a.exact, a.ledger, a.weights) for a in replayed.agreements]
    assert found == [(step, True, True, True) for step in range(1, STEPS + 1)]

    swapped = tmp_path / "swapped"
    shutil.copytree(golden, swapped)
    lines = read_jsonl(swapped / "ledger.jsonl")
    for line in lines:
        if line["state"] == "trained" and line["step"] in (3, 4):
            line["step"] = 7 - line["step"]
    (swapped / "ledger.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    agreements = compute(Request(run=str(swapped), **only)).agreements
    assert [a.ledger for a in agreements] == [True, True, False, False, True]
    assert [a.exact for a in agreements] == [True, True, False, False, True]


@pytest.mark.parametrize("at", [0, 1, 3])
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


def test_a_longer_run_continues_where_a_shorter_one_has_ended(
    golden: Path, tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    config = tiny(*SETTING, "steps=4", "eval.every=2")
    train(config, display)
    assert len(read_ledger(run_of(config))) == 4, "no batch is sampled that no step trains on"
    resume(run_of(config), display, steps=STEPS)
    name = f"rollouts/{STEPS:06d}.jsonl"
    assert (run_of(config) / name).read_bytes() == (golden / name).read_bytes()


def weights_0(entry: dict[str, Any]) -> None:
    assert entry["batch"]["weights"] == 1
    entry["batch"]["weights"] = 0


def version_0(entry: dict[str, Any]) -> None:
    completion = entry["batch"]["rollouts"]["groups"][-1]["completions"][-1]
    assert completion["version"] == UPDATES
    completion["version"] = 0


def weights_9(entry: dict[str, Any]) -> None:
    entry["ticket"]["weights"] = 9
    entry["batch"] = None


@pytest.mark.parametrize(
    ("change", "at", "error", "message"),
    [
        (weights_0, 0, LagError, r"step 4: .*from the weights of step 0, 3 steps ago, and rollout.max_lag is 2"),
        (version_0, 0, LagError, r"step 4: a completion of .* version 0 of the weights, .* allows version 2 and later"),
        (weights_9, -1, EngineError, "step 6: its batch waits for weights that no step has left"),
    ],
)
def test_a_plan_that_breaks_the_bound_or_cannot_be_carried_out_is_an_error(
    change: Callable[[dict[str, Any]], None],
    at: int,
    error: type[Exception],
    message: str,
    golden: Path,
    tmp_path: Path,
    display: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing that samples writes such a plan, so a checkpoint is changed by hand."""
    cut = tmp_path / "cut"
    shutil.copytree(golden, cut)
    for later in checkpoint.saved(cut / "checkpoints"):
        if int(later.name) > 3:
            shutil.rmtree(later)
    saved = cut / "checkpoints/000003"
    plan, manifest = (orjson.loads((saved / name).read_bytes()) for name in ("in_flight.json", "manifest.json"))
    change(plan["entries"][at])
    (saved / "in_flight.json").write_bytes(orjson.dumps(plan))
    del manifest["in_flight.json"]
    (saved / "manifest.json").write_bytes(orjson.dumps(manifest))
    stand_in(monkeypatch)
    with pytest.raises(error, match=message):
        resume(cut, display, trust_run=True, steps=STEPS + 1)


class StopAfter:
    """Asks the run to stop after a step."""

    def __init__(self, display: Any, step: int) -> None:
        self._display = display
        self._step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._display, name)

    def step(self, step: int, *rest: Any) -> None:
        if step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_stopped_run_keeps_older_weights_and_collected_batches(
    golden: Path, tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(*SETTING, "checkpoint.every=100")
    with monkeypatch.context() as patch:
        stand_in(patch, seed=3, longest_s=1.0)
        assert train(config, StopAfter(display, 2)).step == 2
    saved = run_of(config) / "checkpoints/000002"
    entries = orjson.loads((saved / "in_flight.json").read_bytes())["entries"]
    assert [(e["ticket"]["step"], e["ticket"]["weights"]) for e in entries] == [(3, 0), (4, 1), (5, 2)]
    missing = [e["ticket"]["weights"] for e in entries if e["batch"] is None]
    kept = {int(file.stem.partition("-")[2]) for file in saved.glob("weights-*.tensors")}
    assert kept == {weights for weights in missing if weights < 2}
    stand_in(monkeypatch)
    resume(run_of(config), display, trust_run=True)
    for step in range(1, STEPS + 1):
        name = f"rollouts/{step:06d}.jsonl"
        assert (run_of(config) / name).read_bytes() == (golden / name).read_bytes()
    assert (run_of(config) / "metrics.jsonl").read_bytes() == (golden / "metrics.jsonl").read_bytes()


def no_room_for(what: str, number: int, patch: pytest.MonkeyPatch) -> None:
    """The disk is full when the `weights` of a step, or this line of the ledger about a batch, are written."""
    full = OSError(errno.ENOSPC, "No space left on device")

    def save(weights: Any, file: Path) -> None:
        if what == "weights" and file.stem == str(number):
            raise full
        save_file(weights, file)

    def append(path: Path, data: bytes) -> None:
        line = orjson.loads(data)
        if path.name == "ledger.jsonl" and (line["batch"], line["state"]) == (number, what):
            raise full
        append_whole(path, data)

    append_whole = run_dir._append_whole
    patch.setattr("gspo.rollout.sampling_process.save_file", save)
    patch.setattr("gspo.record.run_dir._append_whole", append)


@pytest.mark.parametrize("what", ["weights", "collected", "trained"])
def test_a_full_disk_loses_no_batch(
    what: str, golden: Path, tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something cannot be written in the middle of a run, but its checkpoint can."""
    config = tiny(*SETTING, "checkpoint.every=100")
    with monkeypatch.context() as patch:
        stand_in(patch)
        no_room_for(what, 2, patch)
        with pytest.raises(DiskError, match="No space left on device"):
            train(config, display)
    stand_in(monkeypatch)
    resume(run_of(config), display, trust_run=True)
    same_end(golden, run_of(config))
    ledger = read_ledger(run_of(config))
    assert [history.trained for history in ledger] == [[step] for step in range(1, STEPS + 1)]
    assert all(history.prompts for history in ledger)


def test_a_rollback_abandons_the_batches_in_flight(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch)
    config = tiny(*ROLLBACK, "checkpoint.keep=0", "rollout.max_lag=1")
    with repetition_in({4, 5}):
        train(config, display)
    # Steps 3 to 5 trained on batches 3 to 5 and were abandoned. Batch 6, which was in flight, is sampled again.
    trained = {history.batch: history.trained for history in read_ledger(run_of(config))}
    assert trained == {1: [1], 2: [2], 3: [3], 4: [4], 5: [5], 6: [3], 7: [4], 8: [5], 9: [6], 10: [7]}
    issued = {history.batch: history.issued[-1]["weights"] for history in read_ledger(run_of(config))}
    assert [issued[batch] for batch in range(6, 11)] == [2, 2, 3, 4, 5]
    cut = tmp_path / "cut"
    shutil.copytree(run_of(config), cut)
    for step in (3, 4, 5, 6, 7):
        shutil.rmtree(cut / f"checkpoints/{step:06d}")
    resume(cut, display, trust_run=True)  # from the checkpoint of before the rollback
    same_end(run_of(config), cut)


def test_a_strange_plan_of_batches_is_no_checkpoint(golden: Path, tmp_path: Path) -> None:
    saved = tmp_path / "000003"
    shutil.copytree(golden / "checkpoints/000003", saved)
    for text in ("[]", '{"entries": [{"ticket": 1}]}', '{"entries": [{"batch": null, "difficulty": null, "ticket": '):
        (saved / "in_flight.json").write_text(text)
        assert checkpoint.in_flight_fault(saved), text
    entries = orjson.loads((golden / "checkpoints/000003/in_flight.json").read_bytes())["entries"]
    completion = entries[0]["batch"]["rollouts"]["groups"][0]["completions"][0]
    for key, value in (("token_ids", [-1]), ("token_ids", ["a"]), ("logp_sampler", [0.5]), ("logp_sampler", [])):
        kept, completion[key] = completion[key], value
        (saved / "in_flight.json").write_bytes(orjson.dumps({"entries": entries}))
        assert "invalid" in str(checkpoint.in_flight_fault(saved)), (key, value)
        completion[key] = kept
    (saved / "in_flight.json").write_bytes(orjson.dumps({"entries": entries[1:]}))
    with pytest.raises(CheckpointError, match="not about the steps after 3"):
        checkpoint.read_in_flight(saved)


def test_fields_of_rows_may_be_any_json(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Neither is in the JSON of messages between processes.
    columns, message = {"seed": 2**70, "name": "\ud800"}, {"role": "user", "content": "sort 2 1", "number": 2**70}
    plans = ((folder, in_flight.read(folder, int(folder.name))) for folder in golden.glob("checkpoints/*"))
    kept, plan = next((folder, plan) for folder, plan in plans if plan and plan.entries[0].batch)
    assert plan.entries[0].batch is not None
    row = {"content": [message], "columns": columns}
    groups = [replace(g, prompt=replace(g.prompt, **row)) for g in plan.entries[0].batch.rollouts.groups]
    discarded = [replace(g, prompt=replace(g.prompt, **row)) for g in plan.entries[0].batch.rollouts.discarded]
    rollouts = replace(plan.entries[0].batch.rollouts, groups=tuple(groups), discarded=tuple(discarded))
    entry = replace(plan.entries[0], batch=replace(plan.entries[0].batch, rollouts=rollouts))
    in_flight.save(tmp_path, replace(plan, entries=(entry, *plan.entries[1:])))
    again = in_flight.read(tmp_path, int(kept.name))
    assert again is not None
    assert again.entries[0].batch is not None
    restored = in_flight.with_columns(again.entries[0].batch, [group.prompt for group in groups + discarded])
    assert restored == entry.batch
    assert again.entries[1:] == plan.entries[1:]

    process = SamplingProcess(config="", checkpoint="", log=tmp_path / "log", timeout_s=60.0, weights=dict, room=0)
    sent: list[bytes] = []
    monkeypatch.setattr(process, "_send", lambda message: sent.append(encode(message)))
    monkeypatch.setattr(process, "_answer", lambda: {"weights": "0", "completions": [], "decoded": {}})
    monkeypatch.setattr(process, "_file", lambda name: tmp_path / name)
    options = GenerateOptions(samples=1, sampling=Sampling(max_tokens=1), seed=0, stream="", version=0)
    process.after_step(0).generate([groups[0].prompt], options)
    assert len(sent) == 2


def test_settings_of_the_sampling_process_need_a_lag(tiny: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match="sampler_device: has no effect"):
        tiny("rollout.sampler_device=cpu")
    with pytest.raises(ConfigError, match="max_lag"):
        tiny("rollout.max_lag=-1")


class KillSampler:
    """Sends a signal to the sampling process after a step."""

    def __init__(self, display: Any, number: int, step: int = 1) -> None:
        self._display = display
        self._number = number
        self._step = step
        self.pids: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._display, name)

    def step(self, step: int, *rest: Any) -> None:
        if step == self._step:
            self.pids = sampler_pids()
            for pid in self.pids:
                os.kill(pid, self._number)


def sampler_pids() -> list[int]:
    """The sampling processes that this process has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"gspo.collection.sampler" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_a_killed_sampling_process_ends_the_run_with_a_checkpoint(
    golden: Path, tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(*SETTING, "checkpoint.every=100")
    killer = KillSampler(display, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"was killed by signal 9.*The run is saved"):
        train(config, killer)
    assert len(killer.pids) == 1
    assert not Path(f"/proc/{killer.pids[0]}").exists()
    assert read_events(run_of(config))[-1]["error"] == "EngineError"
    assert int(checkpoint.saved(run_of(config) / "checkpoints")[-1].name) >= 1
    # The rest is sampled in this process: the real one has sampled what the stand-in samples.
    stand_in(monkeypatch)
    resume(run_of(config), display, trust_run=True)
    assert (run_of(config) / "metrics.jsonl").read_bytes() == (golden / "metrics.jsonl").read_bytes()
    assert [history.trained for history in read_ledger(run_of(config))] == [[step] for step in range(1, STEPS + 1)]


def test_an_engine_with_weights_of_its_own_runs_in_the_sampling_process(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine `vllm`, with a simulated vLLM: batches come from older weights, evaluations from the current ones."""
    monkeypatch.setattr("gspo.rollout.vllm.in_process.InProcessHost", lambda model, **options: SimulatedVllm(model))
    monkeypatch.setattr("gspo.rollout.vllm.connect.check", lambda options: None)
    monkeypatch.setattr("gspo.rollout.vllm.in_process.settings_for", lambda model, **options: {})
    stand_in(monkeypatch)
    config = tiny("rollout.engine=vllm", "rollout.max_lag=1", "eval.greedy=false", "steps=4")
    train(config, display)
    saved = {
        int(path.name): load_file(path / "model.safetensors")
        for path in checkpoint.saved(run_of(config) / "checkpoints")
    }
    found: dict[str, list[int]] = {}
    for stream, weights in StandIn.loaded:
        steps = [step for step, tensors in saved.items() if all(torch.equal(tensors[k], weights[k]) for k in tensors)]
        found.setdefault(stream, []).extend(steps)
    assert found.pop("eval") == [0, 2, 4]
    assert found == {f"train/{step}/{4 * (step - 1)}": [weights_of(step, lag=1)] for step in range(1, 5)}
    rows = [row for row in read_jsonl(run_of(config) / "metrics.jsonl") if row["step"]]
    assert rows[0]["mismatch/abs_max"] < 1e-4 < rows[-1]["mismatch/abs_max"]


@pytest.mark.slow
def test_a_frozen_sampling_process_ends_the_run_in_time(tiny: Callable[..., Config], display: Any) -> None:
    # On a busy machine, the process may need most of this time to load its model.
    config = tiny(*SETTING, "rollout.sampler_timeout_s=60", "steps=50")
    killer = KillSampler(display, signal.SIGSTOP)
    with pytest.raises(EngineError, match=r"has not answered for 60 s \(rollout.sampler_timeout_s\)"):
        train(config, killer)
    assert not Path(f"/proc/{killer.pids[0]}").exists()


@pytest.mark.slow
def test_a_whole_run_with_a_sampling_process(
    golden: Path, tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr("gspo.rollout.sampling_process._SHARED_MEMORY", shared)
    found: list[Path] = []
    record = display.step
    monkeypatch.setattr(display, "step", lambda *rest: (record(*rest), found.extend(shared.rglob("*.tensors"))))
    config = tiny(*SETTING)
    train(config, display)
    same_end(golden, run_of(config))
    assert not sampler_pids()
    assert found, "otherwise it proves nothing that they are gone"
    assert not list(shared.iterdir())
