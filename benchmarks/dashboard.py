"""The cost of the dashboard: opening a run of 100,000 steps, and its effect on training.

In: a Chromium. Out: for a synthetic run with the metrics of a real one, the seconds until the browser shows every
curve, the seconds of a poll and of zooming, and the server's memory; then the step times of a real run without the
dashboard and with a page open. Invariant: the two kinds of training run alternate, so that other load affects both
equally.

    make bench-dashboard
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 100_000
FRAME_TIMES = """async () => {
    const svg = document.querySelector('.chart svg'), box = svg.getBoundingClientRect(), times = [];
    for (let i = 0; i < 120; i++) {
        const at = {clientX: box.left + 60 + 2 * i, clientY: box.top + 50};
        svg.dispatchEvent(new PointerEvent('pointermove', at));
        const start = performance.now();
        await new Promise(requestAnimationFrame);
        times.push(performance.now() - start);
    }
    return times;
}"""
"""JavaScript that moves the cursor over a chart. Returns the milliseconds of each frame."""


def write_long_run(run: Path, like: Path, steps: int) -> None:
    """Write a long run directory by repeating the records of a short run with new step numbers."""
    run.mkdir(parents=True)
    for name in ("config.toml", "environment.json", "events.jsonl"):
        shutil.copy(like / name, run / name)
    for name in ("metrics.jsonl", "timings.jsonl"):
        rows = [json.loads(line) for line in (like / name).read_text().splitlines()]
        rows = [row for row in rows if row["step"]]
        with (run / name).open("w") as out:
            for step in range(1, steps + 1):
                row = rows[step % len(rows)]
                out.write(json.dumps({**row, "step": step}) + "\n")


def start_server(*runs: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a dashboard server process. Returns the process and its link."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gspo.cli", "watch", *map(str, runs)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    found = re.search(r"http://\S+", process.stdout.readline())
    assert found
    return process, found[0]


def memory_mb(pid: int) -> float:
    """Resident memory of a process in MiB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    # The command name may contain spaces and parentheses: fields count from the last ")".
    parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def measure_page(run: Path) -> dict[str, float]:
    """Seconds until a browser shows the run, of a poll, and of zooming by a drag; frame times; server memory."""
    from playwright.sync_api import sync_playwright

    process, link = start_server(run)
    try:
        with sync_playwright() as p:
            browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            page.goto("about:blank")
            start = time.perf_counter()
            page.goto(link)
            page.locator(".chart svg path.line").nth(15).wait_for(state="attached")
            open_s = time.perf_counter() - start
            start = time.perf_counter()
            page.evaluate("refresh(true)")
            poll_s = time.perf_counter() - start
            box = page.locator(".chart svg").first.bounding_box()
            assert box
            page.mouse.move(box["x"] + 100, box["y"] + 50)
            page.mouse.down()
            page.mouse.move(box["x"] + 200, box["y"] + 50, steps=5)
            start = time.perf_counter()
            page.mouse.up()
            page.wait_for_selector("text=show all steps")
            zoom_s = time.perf_counter() - start
            frames = page.evaluate(FRAME_TIMES)
            size = memory_mb(process.pid)
            browser.close()
    finally:
        process.terminate()
        process.wait()
    return {
        "open_s": open_s,
        "poll_s": poll_s,
        "zoom_s": zoom_s,
        "frame_ms": statistics.median(frames),
        "slow_frame_ms": sorted(frames)[-3],
        "server_mb": size,
    }


def step_times(watched: bool, steps: int, folder: Path) -> tuple[list[float], float]:
    """Seconds of each step of a real run, with or without an open page, and the server's share of a core."""
    from playwright.sync_api import sync_playwright

    run = folder / ("watched" if watched else "alone")
    shutil.rmtree(run, ignore_errors=True)
    trainer = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "gspo.cli",
            "demo",
            f"--run-dir={run}",
            f"--steps={steps}",
            "--cold_start.steps=0",
            "--eval.every=0",
            "--model.threads=1",
        ],
        stdout=subprocess.DEVNULL,
    )
    while not (run / "config.toml").exists():
        time.sleep(0.05)
    share = 0.0
    if watched:
        process, link = start_server(run)
        start = time.perf_counter()
        with sync_playwright() as p:
            browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            browser.new_page().goto(link)
            trainer.wait()
            browser.close()
        share = cpu_s(process.pid) / (time.perf_counter() - start)
        process.terminate()
        process.wait()
    trainer.wait()
    rows = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    # The first steps include warm-up.
    return [row["time/step_s"] for row in rows][5:], share


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--train-steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        step_times(False, 10, folder)
        write_long_run(folder / "long", folder / "alone", options.steps)
        size = (folder / "long" / "metrics.jsonl").stat().st_size / 2**20
        for _ in range(options.rounds):
            found = measure_page(folder / "long")
            print(f"{options.steps:,} steps, {size:.0f} MiB: " + ", ".join(f"{k} {v:.3g}" for k, v in found.items()))
        times: dict[bool, list[float]] = {False: [], True: []}
        shares = []
        for _ in range(options.rounds):
            for watched in (False, True):
                seconds, share = step_times(watched, options.train_steps, folder)
                times[watched] += seconds
                shares += [share] if watched else []
        alone, with_page = (statistics.median(times[w]) for w in (False, True))
        print(
            f"training step: {alone:.3f} s alone, {with_page:.3f} s with a page open "
            f"({100 * (with_page / alone - 1):+.1f} %); "
            f"the server takes {100 * statistics.mean(shares):.1f} % of a core"
        )


if __name__ == "__main__":
    main()
