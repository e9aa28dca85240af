"""`gspo train --nproc` and torchrun: what they print, their exit codes, signals, and processes that are left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ends import same_end
from forked_ranks import LIMIT_S, SETTINGS, ForkedRanks, write_recipe
from processes import descendants, is_running
from tiny_runs import tiny_config

from gspo.cli import main
from gspo.errors import ConfigError
from gspo.ranks import launch
from gspo.ranks.group import Ranks
from gspo.ranks.start import check_device
from gspo.record.run_dir import read_jsonl

Golden = Callable[[int], Path]


class Launched:
    """A launcher in a process of its own, and its ranks."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.output = folder / "launcher.out"
        with self.output.open("w") as out:
            command = [sys.executable, "-m", *arguments]
            self.process = subprocess.Popen(command, stdout=out, stderr=out, cwd=folder)

    def wait(self) -> int:
        """The exit code. No process is left behind."""
        ranks = descendants(self.process.pid)
        code = self.process.wait(timeout=LIMIT_S)
        until = time.monotonic() + 10
        while any(map(is_running, ranks)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not [pid for pid in ranks if is_running(pid)]
        return code

    def rank(self, number: int) -> int:
        """The process id of a rank."""
        for pid in descendants(self.process.pid):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={number}".encode() in variables and b"gspo" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        raise AssertionError(f"no rank {number}")

    def reach(self, run: Path, step: int) -> None:
        """Wait until the run has recorded a step."""
        until = time.monotonic() + LIMIT_S
        while not [row for row in read_jsonl(run / "metrics.jsonl") if row["step"] >= step]:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < until, self.text
            time.sleep(0.05)

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def errors(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith("gspo: ")]


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(*arguments: str) -> Launched:
        started.append(Launched(tmp_path, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--nproc", "0"], {}, "--nproc: must be at least 1, is 0"),
        (["--nproc=-2"], {}, "--nproc: must be at least 1, is -2"),
        (["--nproc", "2"], {"WORLD_SIZE": "2", "RANK": "0"}, "--nproc: this process is already one of 2"),
        ([], {"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1"}, "WORLD_SIZE is 2, but MASTER_ADDR is not set"),
        ([], {"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK, MASTER_ADDR, MASTER_PORT is not set"),
        (
            [],
            {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "RANK: must be less than WORLD_SIZE, which is 2; is 2",
        ),
    ],
)
def test_a_wrong_launch_is_a_clear_error(
    arguments: list[str],
    environment: dict[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(write_recipe(tiny_config(tmp_path))), *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"gspo: {message}")


def test_several_ranks_on_gpus_are_refused_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GSPO_UNTESTED_NCCL", raising=False)
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    check_device(gpu, Ranks())
    check_device(cpu, Ranks(count=2))
    with pytest.raises(ConfigError, match=r"2 ranks on cuda have never been tried.*benchmarks/ranks_gpu\.py"):
        check_device(gpu, Ranks(count=2))
    monkeypatch.setenv("GSPO_UNTESTED_NCCL", "1")
    check_device(gpu, Ranks(count=2))


def test_a_number_of_ranks_that_is_no_number_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", "recipe.toml", "--nproc", "x"])
    assert "argument --nproc: invalid int value: 'x'" in capsys.readouterr().err


def test_a_wrong_setting_is_printed_once(launched: Callable[..., Launched]) -> None:
    started = time.monotonic()
    ranks = launched("gspo", "train", "no-such-recipe.toml", "--nproc", "2")
    assert ranks.wait() == 1
    assert len(ranks.text.splitlines()) == len(ranks.errors) == 1, ranks.text
    assert time.monotonic() - started < 60


def test_a_wrong_model_is_printed_once_and_leaves_no_directory(tmp_path: Path) -> None:
    """Only the leader knows the prompts, and only after all ranks have loaded the model."""
    config = tiny_config(tmp_path, *SETTINGS, "rollout.max_tokens=100000")
    ranks = ForkedRanks(tmp_path / "out", ["train", str(write_recipe(config))])
    assert ranks.wait() == [1, 1]
    assert ranks.output().startswith("gspo: rollout.max_tokens: ")
    assert len(ranks.output().splitlines()) == 1
    assert not ranks.output(1)
    assert not Path(config.run_dir).exists()


def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *SETTINGS)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ranks = ForkedRanks(tmp_path / "out", ["train", str(write_recipe(config))], port=port)
        try:
            assert ranks.wait([0]) == [1]
        finally:
            ranks.kill()
    assert f"gspo: MASTER_PORT: 127.0.0.1:{port} is in use by another process" in ranks.output()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_saves_and_the_run_resumes(
    number: int, golden: Golden, tmp_path: Path, launched: Callable[..., Launched]
) -> None:
    config = tiny_config(tmp_path, *SETTINGS)
    run = Path(config.run_dir)
    ranks = launched("gspo", "train", str(write_recipe(config)), "--nproc", "2")
    ranks.reach(run, 1)
    ranks.process.send_signal(number)
    assert ranks.wait() == 128 + number, ranks.text
    assert f"train --resume {run} --nproc 2" in ranks.text
    assert "Traceback" not in ranks.text
    resumed = launched("gspo", "train", "--resume", str(run), "--nproc", "2")
    assert resumed.wait() == 0, resumed.text
    same_end(run, golden(2))


@pytest.mark.parametrize(
    "settings",
    [
        (["--learner.context_parallel=3"], "learner.context_parallel: 2 ranks cannot form groups of 3"),
        (["--learner.optimizer=adamw_8bit"], "learner.optimizer: works in a single process only"),
        (["--learner.optimizer_offload=true"], "learner.optimizer_offload: works in a single process only"),
        (["--learner.learning_rate=-1"], "learner.learning_rate: must be at least 0"),
        (["--resume", "RUN"], "train --resume: a run continues with its own model"),
    ],
)
def test_the_launcher_refuses_settings_before_ranks_start(
    settings: tuple[list[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = settings
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(launch.subprocess, "Popen", lambda *args, **options: pytest.fail("a rank was started"))
    assert main(["train", str(write_recipe(tiny_config(tmp_path))), "--nproc", "2", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"gspo: {message}")


@pytest.mark.slow
def test_a_killed_rank_is_reported_with_its_signal(tmp_path: Path, launched: Callable[..., Launched]) -> None:
    config = tiny_config(tmp_path, "steps=1000", "eval.every=0", "checkpoint.every=1000")
    run = Path(config.run_dir)
    ranks = launched("gspo", "train", str(write_recipe(config)), "--nproc=2")
    ranks.reach(run, 1)
    os.kill(ranks.rank(1), signal.SIGKILL)
    assert ranks.wait() == 1, ranks.text
    (error,) = ranks.errors
    assert error.startswith("gspo: rank 1 was killed by signal 9 (SIGKILL; the system sends it if memory runs out)")
    assert f"continue with: gspo train --resume {run} --nproc 2" in ranks.text
    assert "Traceback" not in ranks.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGKILL, 137, "rank 0, which leads the run, was killed by signal 9 (SIGKILL; "),
        (signal.SIGSTOP, 1, "rank 0, which leads the run, does not respond"),
    ],
)
def test_the_launcher_reports_a_leader_that_is_gone(
    number: int, code: int, message: str, golden: Golden, tmp_path: Path, launched: Callable[..., Launched]
) -> None:
    config = tiny_config(tmp_path, *SETTINGS)
    run = Path(config.run_dir)
    ranks = launched("gspo", "train", str(write_recipe(config)), "--nproc=2")
    ranks.reach(run, 1)
    os.kill(ranks.rank(0), number)
    assert ranks.wait() == code, ranks.text
    (error,) = ranks.errors
    assert message in error
    assert error.endswith("continue with: gspo train --resume RUN --nproc 2")
    resumed = launched("gspo", "train", "--resume", str(run), "--nproc", "2")
    assert resumed.wait() == 0, resumed.text
    same_end(run, golden(2))


@pytest.mark.slow
def test_ranks_end_if_the_launcher_is_killed(tmp_path: Path, launched: Callable[..., Launched]) -> None:
    config = tiny_config(tmp_path, "steps=1000", "eval.every=0", "checkpoint.every=1000")
    run = Path(config.run_dir)
    ranks = launched("gspo", "train", str(write_recipe(config)), "--nproc=2")
    ranks.reach(run, 1)
    pids = descendants(ranks.process.pid)
    ranks.process.kill()
    until = time.monotonic() + LIMIT_S
    while any(map(is_running, pids)):
        assert time.monotonic() < until, ranks.text
        time.sleep(0.05)
    assert "Continue with" in ranks.text


@pytest.mark.slow
def test_torchrun_starts_stops_and_resumes_a_run(
    golden: Golden, tmp_path: Path, launched: Callable[..., Launched]
) -> None:
    config = tiny_config(tmp_path, *SETTINGS)
    run = Path(config.run_dir)
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gspo", "train")
    wrong = launched(*torchrun, "no-such-recipe.toml")
    assert wrong.wait() == 1
    assert len(wrong.errors) == 1, wrong.text
    ranks = launched(*torchrun, str(write_recipe(config)))
    ranks.reach(run, 1)
    ranks.process.send_signal(signal.SIGTERM)  # torchrun sends it to all ranks
    assert ranks.wait() != 0
    assert f"train --resume {run}" in ranks.text
    resumed = launched(*torchrun, "--resume", str(run))
    assert resumed.wait() == 0, resumed.text
    same_end(run, golden(2))


def test_a_rank_that_fails_before_it_joins_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The leader would wait for it until `ranks.timeout_s` is over."""
    monkeypatch.setattr(launch, "UNJOINED_S", 0.2)
    program = "import os, sys, time; time.sleep(600) if os.environ['RANK'] == '0' else sys.exit(3)"
    popen = subprocess.Popen
    monkeypatch.setattr(
        launch.subprocess, "Popen", lambda command, **options: popen([command[0], "-c", program], **options)
    )
    assert launch.launch(2, ["train"]) == 1
    assert "gspo: rank 1 failed, and rank 0 still waits for it; start the command again" in capfd.readouterr().err
