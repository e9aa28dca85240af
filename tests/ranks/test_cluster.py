"""Runs on a Ray cluster, as far as they need no Ray: what is refused, what is placed where, how a process is run."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny_config

from gspo.cli import main
from gspo.cluster import host as process_host
from gspo.cluster.connect import membership, process_environment, reason
from gspo.cluster.host import ProcessHost
from gspo.cluster.plan import check_fits, plan, shrunk
from gspo.config import Config, to_toml
from gspo.errors import ConfigError
from gspo.ranks.environment import CLUSTER, RANK_LOST
from gspo.ranks.launch import without_options
from gspo.record.run_dir import is_idle, lock
from gspo.reward.jobs import MOST_MOVES, Batch, Part

LIMIT_S = 120.0


def recipe(folder: Path, *overrides: str) -> str:
    file = folder / "recipe.toml"
    file.write_text(to_toml(tiny_config(folder, *overrides)))
    return str(file)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--cluster", "ray://head:10001"], "--cluster: 'ray://head:10001' is neither auto nor an address"),
        (["--cluster", "head"], "--cluster: 'head' is neither auto nor an address"),
        (["--cluster", "auto", "--nproc", "0"], "--nproc: must be at least 1"),
        (["--cluster", "auto", "--restarts", "-1"], "--restarts: must be at least 0"),
        (["--restarts", "1"], "--restarts: has no effect without --cluster"),
        (["--cluster", "auto", "--trust-run"], "--trust-run: has no effect without --resume"),
        (["--cluster", "auto", "--learner.typo=1"], "learner.typo"),
        (["--cluster", "auto", "--nproc", "2", "--learner.context_parallel=3"], "2 ranks cannot form groups of 3"),
    ],
)
def test_mistakes_are_reported_before_ray_starts(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe(tmp_path), *arguments]) == 1
    assert expected in capsys.readouterr().err


def test_a_cluster_without_authentication_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert main(["train", recipe(tmp_path), "--cluster", "auto"]) == 1
    assert "RAY_AUTH_MODE: without Ray's token authentication" in capsys.readouterr().err


def test_an_address_at_which_nothing_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", recipe(tmp_path), "--cluster", "127.0.0.1:1"]) == 1
    assert "--cluster: nothing answers at 127.0.0.1:1" in capsys.readouterr().err


def test_a_missing_ray_is_named_with_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "unused")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["train", recipe(tmp_path), "--cluster", "auto"]) == 1
    assert "install it (pip install 'gspo[ray]')" in capsys.readouterr().err


def test_each_rank_gets_its_threads_and_a_gpu_if_there_is_one(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "model.threads=4", "model.device=auto", "reward.workers=3")
    placement = plan(config, 2, [{"CPU": 8.0}])
    assert (placement.ranks, placement.rank, placement.workers) == (2, {"CPU": 4.0}, 3)
    assert plan(config, 2, [{"CPU": 8.0}, {"CPU": 8.0, "GPU": 2.0}]).rank == {"CPU": 4.0, "GPU": 1.0}
    assert plan(tiny_config(tmp_path), 1, [{"GPU": 8.0}]).rank == {"CPU": 1.0}, "model.device = cpu"


def test_servers_of_the_engine_reserve_their_gpus(tmp_path: Path) -> None:
    options = ("rollout.engine=vllm", "rollout.engine_options.start=2", "model.device=auto")
    config = tiny_config(tmp_path, *options, "rollout.engine_options.settings={tensor_parallel_size = 4}")
    assert plan(config, 1, [{"CPU": 8.0}]).server == {"CPU": 1.0}
    nodes = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 4.0}]
    wanted = plan(config, 1, nodes)
    assert (wanted.servers, wanted.server) == (2, {"CPU": 1.0, "GPU": 4.0})
    with pytest.raises(ConfigError, match=r"no room for 2 servers with 1 CPU, 4 GPU each, 1 rank with 1 CPU, 1 GPU"):
        check_fits(wanted, nodes)
    check_fits(wanted, [*nodes, {"GPU": 1.0, "CPU": 1.0}])
    found = shrunk(wanted, nodes, 1)
    assert found
    assert (found.ranks, found.servers, found.workers) == (1, 1, wanted.workers)


def config_of(folder: Path) -> Config:
    return tiny_config(folder, "model.threads=2", "reward.workers=2")


@pytest.mark.parametrize(
    ("nodes", "fits"),
    [
        ([{"CPU": 3.0}, {"CPU": 3.0}], True),
        ([{"CPU": 6.0}], True),
        ([{"CPU": 2.0}, {"CPU": 2.0}, {"CPU": 1.0}, {"CPU": 1.0}], True),
        ([{"CPU": 1.0}] * 8, False),
        ([{"CPU": 3.0}], False),
        ([], False),
    ],
)
def test_a_run_that_does_not_fit_says_what_is_missing(nodes: Any, fits: bool, tmp_path: Path) -> None:
    wanted = plan(config_of(tmp_path), 2, nodes)
    if fits:
        check_fits(wanted, nodes)
        return
    with pytest.raises(ConfigError, match=r"no room for 2 ranks with 2 CPU each, 2 reward workers with 1 CPU each"):
        check_fits(wanted, nodes)


def test_a_resumed_run_takes_what_is_left(tmp_path: Path) -> None:
    wanted = plan(config_of(tmp_path), 4, [])

    def left(nodes: Sequence[dict[str, float]], multiple: int = 1) -> tuple[int, int] | None:
        found = shrunk(wanted, nodes, multiple)
        return (found.ranks, found.workers) if found else None

    assert left([{"CPU": 5.0}, {"CPU": 5.0}]) == (4, 2)
    assert left([{"CPU": 5.0}, {"CPU": 4.0}]) == (4, 1), "ranks come first"
    assert left([{"CPU": 7.0}]) == (3, 1)
    assert left([{"CPU": 7.0}], multiple=2) == (2, 2), "whole context groups"
    assert left([{"CPU": 3.0}], multiple=2) is None
    assert left([{"CPU": 2.0}]) is None, "no place for a reward worker"


def test_options_of_the_launcher_are_not_passed_on() -> None:
    given = ["train", "a.toml", "--nproc", "2", "--cluster=auto", "--steps", "3", "--restarts", "1", "--nproc.x=1"]
    kept = ["train", "a.toml", "--steps", "3", "--nproc.x=1"]
    assert without_options(given, ("--nproc", "--cluster", "--restarts")) == kept


def test_a_process_gets_the_environment_of_its_node_without_that_of_rays_own_process() -> None:
    own = {"PATH": "/bin", "RAY_JOB_ID": "1", "RAY_RAYLET_PID": "2", "RAY_AUTH_TOKEN": "secret", "RANK": "7"}
    assert process_environment({"RANK": "0"}, own) == {"PATH": "/bin", "RAY_AUTH_TOKEN": "secret", "RANK": "0"}
    assert membership({}) is None
    assert membership({CLUSTER: '{"places": 2}'}) == {"places": 2}


def test_the_reason_of_a_lost_actor_is_one_line() -> None:
    error = RuntimeError(
        "The actor died unexpectedly before finishing this task.\n\tclass_name: ProcessHost\n\tip: 10.0.0.2\n"
        "The actor died because its node has died. Node Id: 1234\n\tthe node ran out of memory"
    )
    assert reason(error) == "The actor died because its node has died. Node Id: 1234 the node ran out of memory"
    assert reason(RuntimeError("gone")) == "gone"
    assert reason(RuntimeError()) == "RuntimeError"


# ---- the host of a process


def run_to_end(host: ProcessHost) -> tuple[str, str, int]:
    """(stdout, stderr, exit code)."""
    texts = {"out": b"", "err": b""}
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        report = json.loads(host.poll())
        for stream, data in report["output"]:
            texts[stream] += base64.b64decode(data)
        if report["code"] is not None and not report["output"]:
            return texts["out"].decode(), texts["err"].decode(), report["code"]
    raise AssertionError("it has not ended")


def command(folder: Path, *arguments: str, **environment: str) -> str:
    return json.dumps({"arguments": ["-m", "gspo", *arguments], "environment": environment, "folder": str(folder)})


def test_a_process_reports_its_output_and_its_exit_code(tmp_path: Path) -> None:
    host = ProcessHost()
    assert host.start(command(tmp_path, "train", "no-such-recipe.toml")) == ""
    out, err, code = run_to_end(host)
    assert (out, code) == ("", 1)
    assert err.startswith("gspo: no-such-recipe.toml")
    assert ProcessHost().start(command(tmp_path / "missing", "--version")).endswith("/missing")


def test_a_process_is_killed_with_its_host(tmp_path: Path) -> None:
    script = (
        "import sys, time; from gspo.cluster.host import ProcessHost; host = ProcessHost(); host.start(sys.argv[1]);"
        "print(host._process.pid, flush=True); time.sleep(600)"
    )
    serve = command(tmp_path, "watch", str(tmp_path), "--port", "0")
    owner = subprocess.Popen([sys.executable, "-c", script, serve], stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    pid = int(owner.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until = time.monotonic() + LIMIT_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_a_process_that_nobody_polls_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_host, "LEASE_S", 0.5)
    host = ProcessHost()
    assert host.start(command(tmp_path, "watch", str(tmp_path), "--port", "0")) == ""
    assert host._process
    until = time.monotonic() + LIMIT_S
    while host._process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    assert host._process.poll() == -signal.SIGKILL


def test_a_run_directory_is_idle_once_its_trainer_is_gone(tmp_path: Path) -> None:
    held = lock(tmp_path, busy="held", option="--run-dir")
    assert not is_idle(tmp_path)
    held.close()
    assert is_idle(tmp_path)


# ---- calls of reward workers whose node is lost


def test_a_call_is_repeated_a_few_times_after_its_machine_was_lost(group: Any) -> None:
    batch = Batch([group(["a", "b"])], functions=[[0]], workers=1, timeout_s=10.0)
    (job,) = batch.jobs()
    for _ in range(MOST_MOVES):
        batch.begin(job)
        again = batch.moved(job)
        batch.end(job, hung=False)
        assert again is not None
        (job,) = again
        assert job.samples == (0, 1), "a group stays whole: its function may compare the completions"
    assert batch.moved(job) is None


def test_results_of_single_completions_count_if_the_machine_of_the_group_is_lost(group: Any) -> None:
    batch = Batch([group(["a", "b"])], functions=[[0]], workers=1, timeout_s=10.0)
    (job,) = batch.jobs()
    batch.begin(job)
    alone = batch.split(job)
    batch.record(alone[0], [Part(value=1.0)])
    assert not batch.done.is_set()
    assert batch.moved(job) == [], "the single calls are still to come"
    batch.end(job, hung=False)
    batch.record(alone[1], [Part(value=0.5)])
    assert batch.done.is_set()
    assert [batch.parts(0, i)[0].value for i in range(2)] == [1.0, 0.5]


def test_the_leader_tells_its_launcher_that_a_rank_is_lost(tmp_path: Path) -> None:
    # No peer ever joins, so the rendezvous fails with the error of a lost rank.
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", CLUSTER: "{}"}
    ended = subprocess.run(
        [sys.executable, "-m", "gspo", "train", recipe(tmp_path), "--ranks.timeout_s=1"],
        env=os.environ | launched,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert "gspo: rank 0: the 2 ranks did not find each other within 1 s" in ended.stderr
    assert ended.returncode == RANK_LOST
