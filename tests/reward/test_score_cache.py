"""The file with scores that were paid for: several processes, killed processes, its limit, and foreign files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gspo.reward.score_cache import CachedScore, ScoreCache, cache_key

WRITER = """
import sys
from gspo.reward.score_cache import CachedScore, ScoreCache
cache = ScoreCache(sys.argv[1], "judge", most_bytes=1 << 20)
for i in range(int(sys.argv[3])):
    cache.put(f"{sys.argv[2]}-{i}", CachedScore(value=i / 7))
    print(i, flush=True)
"""


def opened(folder: Path, most_bytes: int = 1 << 20) -> ScoreCache:
    return ScoreCache(str(folder), "judge", most_bytes=most_bytes)


def writer(folder: Path, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(folder), name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_values_are_exact_and_the_first_one_counts(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    assert first.put("a", CachedScore(value=1 / 3)).value == 1 / 3
    assert second.put("a", CachedScore(value=0.9)).value == 0.9  # it had read the file before
    first.put("b", CachedScore(kind="unparsable"))
    again = opened(tmp_path)
    assert again.get("a") == CachedScore(value=1 / 3)
    assert again.get("b") == CachedScore(kind="unparsable")
    assert again.get("c") is None


def test_several_processes_write_whole_lines(tmp_path: Path) -> None:
    writers = [writer(tmp_path, name, 200) for name in ("x", "y", "z")]
    assert [w.communicate()[0].count("\n") for w in writers] == [200, 200, 200]
    lines = (tmp_path / "judge.jsonl").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 600
    assert opened(tmp_path).get("y-199") == CachedScore(value=199 / 7)


def test_what_a_killed_process_wrote_is_there(tmp_path: Path) -> None:
    process = writer(tmp_path, "k", 100_000)
    assert process.stdout is not None
    done = [int(process.stdout.readline()) for _ in range(50)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    cache = opened(tmp_path)
    assert all(cache.get(f"k-{i}") == CachedScore(value=i / 7) for i in done)


def test_a_partial_line_is_skipped_and_ended(tmp_path: Path) -> None:
    opened(tmp_path).put("a", CachedScore(value=0.5))
    with (tmp_path / "judge.jsonl").open("a") as file:
        file.write('{"key": "b", "kind": "sco')
    cache = opened(tmp_path)
    cache.put("c", CachedScore(value=0.25))
    again = opened(tmp_path)
    assert (again.get("a"), again.get("b"), again.get("c")) == (CachedScore(value=0.5), None, CachedScore(value=0.25))


@pytest.mark.parametrize("line", ["[]", "1", '{"key": 1, "kind": "score", "value": 1}', "[" * 100_000, "\x00\xff"])
def test_invalid_lines_are_skipped(tmp_path: Path, line: str) -> None:
    entry = {"key": "a", "kind": "score", "value": 1}
    bad = [{**entry, "value": v} for v in ("1", None, True, float("nan"), float("inf"))] + [{**entry, "kind": "x"}]
    lines = [line, *map(json.dumps, bad), json.dumps({**entry, "value": 0.5})]
    (tmp_path / "judge.jsonl").write_text("\n".join(lines) + "\n")
    assert opened(tmp_path).get("a") == CachedScore(value=0.5)


def test_the_file_stays_below_its_limit_and_keeps_the_newest(tmp_path: Path) -> None:
    cache = opened(tmp_path, most_bytes=10_000)
    for i in range(1000):
        cache.put(cache_key(i), CachedScore(value=i / 1000))
        assert (tmp_path / "judge.jsonl").stat().st_size <= 10_000
    for reader in (cache, opened(tmp_path, most_bytes=10_000)):
        assert reader.get(cache_key(0)) is None
        assert reader.get(cache_key(999)) == CachedScore(value=0.999)


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine\n")
    (tmp_path / "judge.jsonl").symlink_to(target)
    cache = opened(tmp_path)
    assert cache.put("a", CachedScore(value=0.5)).value == 0.5
    assert cache.failure
    assert target.read_text() == "mine\n"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "judge.jsonl")
    began = time.monotonic()
    assert opened(tmp_path).get("a") is None
    assert time.monotonic() - began < 30


def test_without_a_directory_scores_are_kept_in_memory() -> None:
    cache = ScoreCache("", "judge", most_bytes=1000)
    cache.put("a", CachedScore(value=0.5))
    assert cache.get("a") == CachedScore(value=0.5)
    assert not cache.failure
