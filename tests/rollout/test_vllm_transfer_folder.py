"""Files that are sent to a vLLM are always removed, even if a process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gspo.rollout.vllm import transfer_folder as module
from gspo.rollout.vllm.transfer_folder import transfer_folder

CHILD = """
import sys
from pathlib import Path
from gspo.rollout.vllm import transfer_folder as module
module.SHARED = Path(sys.argv[1])
folder = Path(module.transfer_folder(10))
(folder / "weights").write_bytes(b"x" * 10)
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "SHARED", tmp_path)
    return tmp_path


@pytest.fixture
def another(place: Path) -> Iterator[Callable[[], tuple[subprocess.Popen[str], Path]]]:
    """Starts a process that holds a folder."""
    processes: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], Path]:
        command = [sys.executable, "-c", CHILD, str(place)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout
        return processes[-1], Path(processes[-1].stdout.readline().strip())

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_the_folder_of_a_killed_process_is_removed_and_others_stay(
    place: Path, another: Callable[[], tuple[subprocess.Popen[str], Path]]
) -> None:
    (killed, left), (_, kept) = another(), another()
    assert (left / "weights").exists(), "a live process keeps its folder while others ask for one"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert (left / "weights").exists()
    mine = Path(transfer_folder(10))
    assert not left.parent.exists()
    assert (kept / "weights").exists()
    assert mine.is_dir()
    assert mine.parent.parent == place
    assert Path(transfer_folder(10)) != mine


def test_a_process_removes_its_folder_on_exit(
    place: Path, another: Callable[[], tuple[subprocess.Popen[str], Path]]
) -> None:
    process, _ = another()
    process.communicate("")
    assert list(place.iterdir()) == []


def test_a_folder_that_was_removed_is_created_again(place: Path) -> None:
    first = Path(transfer_folder(10))
    (first.parent / module.LOCK).unlink()
    os.rmdir(first)
    os.rmdir(first.parent)
    assert Path(transfer_folder(10)).is_dir()


def test_without_room_in_shared_memory_the_disk_is_used(
    place: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path_factory.mktemp("disk")
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    assert Path(transfer_folder(1 << 60)).parent.parent == disk
