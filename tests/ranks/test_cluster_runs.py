"""Runs on a Ray cluster of two raylets on this machine, one of which is killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import unusable
from placed_server import FAKE
from processes import is_running
from tiny_runs import tiny_config

from gspo.config import to_toml
from gspo.learner import checkpoint
from gspo.ranks.environment import CLUSTER
from gspo.record.run_dir import read_events, read_jsonl

pytestmark = pytest.mark.slow
LIMIT_S = 240.0
SETTINGS = ("steps=6", "ranks.timeout_s=60", "reward.workers=2", "reward.timeout_s=60", "model.threads=2")
CPUS = 3
"""Of each raylet. A rank takes 2, so each raylet has room for one rank and a reward worker."""

REWARD = """
import os, time, zlib
from pathlib import Path

def shorter(prompts, completions, **columns):
    here = Path(__file__).parent
    with open(here / "raylets", "a") as file:
        print(os.environ.get("RAY_RAYLET_PID"), file=file)
    while (here / "wait").exists():
        time.sleep(0.05)
    ties = [0.1 * zlib.crc32(c.encode()) / 2**32 for c in completions]
    return [len(c) % 3 + 0.5 * c.count(' ') + tie for c, tie in zip(completions, ties)]
"""
POOL, SERVER = (Path(__file__).with_name(name) for name in ("placed_pool.py", "placed_server.py"))


class Raylets:
    """Two raylets. The first has the cluster's own services, the second may be killed."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        node = {"num_cpus": CPUS, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
        # A raylet that was killed is noticed after 2 s instead of 15 s.
        noticed = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
        self._cluster = Cluster(initialize_head=True, head_node_args=node | {"_system_config": noticed})
        self._options = node
        self.address: str = self._cluster.address
        self.pids = [self._pid(self._cluster.head_node)]
        self._second: Any = None

    def start_second(self) -> None:
        """Start the second raylet, unless it is running."""
        if self._second is None:
            self._second = self._cluster.add_node(**self._options)
            self.pids = [self.pids[0], self._pid(self._second)]

    def kill_second(self) -> None:
        self._cluster.remove_node(self._second, allow_graceful=False)
        self._second = None

    def close(self) -> None:
        self._cluster.shutdown()

    def _pid(self, node: Any) -> int:
        return int(node.all_processes["raylet"][0].process.pid)


@pytest.fixture(scope="module")
def raylets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raylets]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", "of-these-tests-alone-0123456789")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Ray replaces loopback addresses otherwise.
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        # Instead of vLLM, the processes of these raylets find a server of a few lines.
        fake = tmp_path_factory.mktemp("packages")
        (fake / "vllm/entrypoints/cli").mkdir(parents=True)
        (fake / "vllm/entrypoints/cli/main.py").write_text(FAKE)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(fake), os.environ.get("PYTHONPATH", "")])))
        try:
            import ray  # noqa: F401
        except ImportError:
            unusable("ray", "not installed")
        found = Raylets()
        yield found
        found.close()


class Training:
    """`gspo train` with these options, in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gspo", "train", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout
        self._lines.extend(self._process.stdout)

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def wait_for(self, what: Callable[[], object]) -> None:
        until = time.monotonic() + LIMIT_S
        while not what():
            assert self._process.poll() is None, self.output
            assert time.monotonic() < until, self.output
            time.sleep(0.02)

    def finish(self) -> str:
        try:
            assert self._process.wait(LIMIT_S) == 0, self.output
        finally:
            self._process.kill()
        self._reader.join(10)
        return self.output


def recipe(folder: Path, run: str) -> Path:
    config = tiny_config(folder, *SETTINGS, run_dir=run)
    (folder / "lengths.py").write_text(REWARD)
    file = folder / f"{run}.toml"
    file.write_text(to_toml(config))
    return file


def steps(run: Path) -> int:
    file = run / "timings.jsonl"
    return len(read_jsonl(file)) if file.exists() else 0


def rank_processes(address: str) -> dict[int, int]:
    """The process of each rank of a run on this cluster, by its rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            arguments = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        values = dict(entry.decode(errors="replace").partition("=")[::2] for entry in environment)
        if address in values.get(CLUSTER, "") and b"gspo\0train" in arguments:
            found[int(values["RANK"])] = int(folder.name)
    return found


def sampled(run: Path) -> dict[str, list[Any]]:
    """The problem and the number of each completion, in the order of a step, for every step."""
    return {
        file.name: [(row["prompt_id"], row["sample"]) for row in read_jsonl(file)]
        for file in sorted((run / "rollouts").iterdir())
    }


def test_a_killed_leader_and_a_killed_raylet_lose_nothing(raylets: Raylets, tmp_path: Path) -> None:
    raylets.start_second()
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    Training(str(recipe(tmp_path, "whole")), "--nproc", "2").finish()
    assert set((tmp_path / "raylets").read_text().split()) == {"None"}
    (tmp_path / "raylets").unlink()

    training = Training(str(recipe(tmp_path, "cut")), "--cluster", raylets.address, "--nproc", "2")
    training.wait_for(lambda: steps(cut) >= 1)
    used = set((tmp_path / "raylets").read_text().split())
    assert used == {str(pid) for pid in raylets.pids}, "rewards are scored on both raylets"
    os.kill(rank_processes(raylets.address)[0], signal.SIGKILL)
    training.wait_for(lambda: "restart 1 of 2" in training.output)
    training.wait_for(lambda: steps(cut) >= 3)
    (tmp_path / "wait").touch()
    done = steps(cut)
    raylets.kill_second()
    (tmp_path / "wait").unlink()
    output = training.finish()

    killed = "was killed by signal 9 (SIGKILL; the system sends it if memory runs out)"
    assert f"rank 0 on 127.0.0.1 {killed}; its last lines:\n  " in output
    assert "restart 2 of 2" in output
    assert "no longer fit (the cluster has 1 node (3 CPU)); the run continues with 1 rank" in output
    assert f"Run directory:  {cut}" in output
    # On two ranks, a resumed run is byte-identical to one that was never interrupted.
    rows = [(run / "metrics.jsonl").read_bytes().splitlines() for run in (whole, cut)]
    assert len(rows[0]) == len(rows[1]) == 7
    resumed = [event["step"] for event in read_events(cut) if event["event"] == "resume"]
    assert len(resumed) == 2
    assert resumed[1] >= done - 1
    assert rows[0][: resumed[1] + 1] == rows[1][: resumed[1] + 1]
    # On one rank it is equal up to rounding, and every problem has its turn once.
    assert sampled(cut) == sampled(whole)
    assert all(json.loads(row).get("samples/unscored", 0) == 0 for row in rows[1])
    last = [checkpoint.saved(run / "checkpoints")[-1] for run in (whole, cut)]
    assert last[0].name == last[1].name == "000006"
    assert (cut / "ranks/0.log").read_text().count("step 1/6") >= 1
    assert not [pid for pid in rank_processes(raylets.address).values() if is_running(pid)]


def test_a_cluster_that_is_too_small_says_what_is_missing(raylets: Raylets, tmp_path: Path) -> None:
    command = ["train", str(recipe(tmp_path, "run")), "--cluster", raylets.address, "--nproc", "9"]
    ended = subprocess.run(
        [sys.executable, "-m", "gspo", *command], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ended.returncode == 1
    assert "--cluster: there is no room for 9 ranks with 2 CPU each, 2 reward workers with 1 CPU each" in ended.stderr
    assert not (tmp_path / "run").exists()


def test_placed_workers_score_and_blame_as_local_ones(raylets: Raylets, tmp_path: Path) -> None:
    raylets.start_second()
    pool = subprocess.Popen(
        [sys.executable, str(POOL), raylets.address, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert pool.stdout
    found = json.loads(pool.stdout.readline())
    assert found["placed"] == found["local"]
    assert len(set(found["raylets"])) == 2
    time.sleep(1)  # so that calls are in progress on both
    raylets.kill_second()
    (tmp_path / "go").touch()
    after = json.loads(pool.stdout.readline())
    assert pool.wait(LIMIT_S) == 0
    assert after == [["scored", 1.0]] * 12, "the calls that were lost are made again, on the other raylet"


def test_a_server_is_started_again_and_noticed_when_its_raylet_is_gone(raylets: Raylets, tmp_path: Path) -> None:
    raylets.start_second()
    script = [sys.executable, str(SERVER), raylets.address, str(tmp_path)]
    process = subprocess.Popen(script, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    report = json.loads(process.stdout.readline())
    first, second = report["found"]
    assert first["config"] == second["config"] == {"model_type": "any"}
    assert first["pid"] != second["pid"]
    assert report["log"].count("a line of the server") == 3
    raylets.kill_second()
    assert json.loads(process.stdout.readline()) is False
    assert process.wait(LIMIT_S) == 0
