"""The dashboard under faults: slow and many clients, long files, runs that change or are deleted."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from shown_runs import make_run, metrics, write_lines


def memory_mb(pid: int) -> float:
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024  # type: ignore[index]


def steps_shown(served: Any, run: str = "made") -> list[float]:
    return list(served.get(f"/api/runs/{run}?points=2000").json["curves"]["reward/mean"]["x"])


def test_clients_that_never_read_use_little_memory_and_block_nobody(tmp_path: Path, serve: Callable[..., Any]) -> None:
    run = make_run(tmp_path / "made")
    write_lines(run / "metrics.jsonl", [metrics(s) for s in range(1, 3001)])
    served = serve(run)
    served.get("/api/runs/made")
    before = memory_mb(served.process.pid)
    headers = f"Host: {served.host}\r\nAuthorization: Bearer {served.token}\r\n\r\n"
    request = f"GET /api/runs/made?points=2000 HTTP/1.1\r\n{headers}".encode()
    clients = []
    for _ in range(60):
        client = socket.create_connection(("127.0.0.1", served.port))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(request)
        clients.append(client)
    began = time.monotonic()
    assert served.get("/api/runs").status == 200
    assert time.monotonic() - began < 60
    assert memory_mb(served.process.pid) - before < 200
    for client in clients:
        client.close()


def test_200_requests_are_served(tmp_path: Path, serve: Callable[..., Any]) -> None:
    served = serve(make_run(tmp_path / "made"))
    served.get("/")
    with ThreadPoolExecutor(50) as pool:
        paths = ["/api/runs", "/api/runs/made"] * 100
        statuses = list(pool.map(lambda path: served.get(path).status, paths))
    assert statuses == [200] * 200


def test_a_restarted_dashboard_shows_every_step_once(tmp_path: Path, serve: Callable[..., Any]) -> None:
    run = make_run(tmp_path / "made", steps=20)
    first = serve(run)
    assert steps_shown(first) == list(range(1, 21))
    first.process.kill()
    with (run / "metrics.jsonl").open("a") as out:
        out.write('{"step": 21, "reward/mean": 0.5}\n{"step": 22, "rew')
    second = serve(run)
    assert steps_shown(second) == list(range(1, 22))


def test_metrics_truncated_by_a_resume_are_read_again(tmp_path: Path, serve: Callable[..., Any]) -> None:
    run = make_run(tmp_path / "made", steps=30)
    served = serve(run)
    assert len(steps_shown(served)) == 30
    write_lines(run / "metrics.jsonl", [metrics(s) for s in range(1, 11)])
    time.sleep(0.6)
    assert steps_shown(served) == list(range(1, 11))


def test_a_deleted_run_is_shown_as_gone(tmp_path: Path, serve: Callable[..., Any]) -> None:
    run = make_run(tmp_path / "runs" / "made")
    make_run(tmp_path / "runs" / "other")
    served = serve(tmp_path / "runs")
    assert len(steps_shown(served)) == 12
    run.rename(tmp_path / "away")
    time.sleep(0.6)
    states = {r["name"]: r["state"] for r in served.get("/api/runs").json["runs"]}
    assert states == {"made": "gone", "other": "finished"}
    assert served.get("/api/runs/made").json["curves"] == {}
    assert served.get("/api/runs/made/steps/5").status == 404
    assert len(steps_shown(served, "other")) == 12


def test_an_unchanged_run_gives_304(tmp_path: Path, serve: Callable[..., Any]) -> None:
    served = serve(make_run(tmp_path / "made"))
    tag = served.get("/api/runs/made").headers["etag"]
    assert served.get("/api/runs/made", **{"If-None-Match": tag}).status == 304


@pytest.mark.slow
def test_a_metrics_file_of_a_gigabyte_uses_bounded_memory(tmp_path: Path, serve: Callable[..., Any]) -> None:
    run = make_run(tmp_path / "made")
    line = json.dumps(metrics(1) | {"padding": "x" * 400}).replace('"step": 1,', '"step": %d,')
    with (run / "metrics.jsonl").open("w") as out:
        out.writelines(line % step + "\n" for step in range(1, 1_050_001))
    assert (run / "metrics.jsonl").stat().st_size > 1e9
    served = serve(run)
    began = time.monotonic()
    found = served.get("/api/runs/made").json
    assert time.monotonic() - began < 30
    assert found["partial"]
    assert found["step"] == 1_050_000
    while found["partial"] and time.monotonic() - began < 240:
        time.sleep(1)
        found = served.get("/api/runs/made").json
    assert not found["partial"]
    assert len(found["curves"]["reward/mean"]["x"]) == 400
    assert memory_mb(served.process.pid) < 700
