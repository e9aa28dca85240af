"""What the dashboard costs: opening a run of 100,000 steps, and training beside it. `make bench-dashboard` runs this.

Prints, for a synthetic run with the metrics of a real one: seconds until the server's first answer and until the browser
shows every curve, the same for a later poll and for zooming, and the server's memory. Then the step times of a real run with
nobody watching and with a page open, in turn.
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


def synthetic(run: Path, like: Path, steps: int) -> None:
    """A long run made of a short one's lines, with other numbers."""
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


def served(*runs: Path) -> tuple[subprocess.Popen[str], str]:
    """A server of its own, and the link to it."""
    process = subprocess.Popen([sys.executable, "-m", "gspo.cli", "watch", *map(str, runs)], stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdout
    found = re.search(r"http://\S+", process.stdout.readline())
    assert found
    return process, found[0]


def memory_mb(pid: int) -> float:
    """Resident memory of a process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has used."""
    parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def opening(run: Path) -> dict[str, float]:
    """Seconds until a browser shows the run, and until it shows part of it after a drag."""
    from playwright.sync_api import sync_playwright

    process, link = served(run)
    try:
        with sync_playwright() as p:
            browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            page.goto("about:blank")
            begun = time.perf_counter()
            page.goto(link)
            page.locator(".chart svg path.line").nth(15).wait_for(state="attached")
            opened = time.perf_counter() - begun
            begun = time.perf_counter()
            page.evaluate("refresh(true)")
            again = time.perf_counter() - begun
            box = page.locator(".chart svg").first.bounding_box()
            assert box
            page.mouse.move(box["x"] + 100, box["y"] + 50)
            page.mouse.down()
            page.mouse.move(box["x"] + 200, box["y"] + 50, steps=5)
            begun = time.perf_counter()
            page.mouse.up()
            page.wait_for_selector("text=show all steps")
            zoomed = time.perf_counter() - begun
            frames = page.evaluate(
                """async () => { const svg = document.querySelector('.chart svg'), box = svg.getBoundingClientRect(); const t = [];
                for (let i = 0; i < 120; i++) { svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + 60 + 2 * i, clientY: box.top + 50}));
                const a = performance.now(); await new Promise(requestAnimationFrame); t.push(performance.now() - a); } return t; }"""
            )
            size = memory_mb(process.pid)
            browser.close()
    finally:
        process.terminate()
        process.wait()
    return {"open_s": opened, "poll_s": again, "zoom_s": zoomed, "frame_ms": statistics.median(frames), "slow_frame_ms": sorted(frames)[-3], "server_mb": size}  # fmt: skip


def training(watched: bool, steps: int, folder: Path) -> tuple[list[float], float]:
    """Seconds of each step of a real run, alone or with a page that is open on it; and the server's share of a core."""
    from playwright.sync_api import sync_playwright

    run = folder / ("watched" if watched else "alone")
    shutil.rmtree(run, ignore_errors=True)
    trainer = subprocess.Popen(
        [sys.executable, "-m", "gspo.cli", "demo", f"--run-dir={run}", f"--steps={steps}", "--cold_start.steps=0", "--eval.every=0", "--model.threads=1"],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    while not (run / "config.toml").exists():
        time.sleep(0.05)
    share = 0.0
    if watched:
        process, link = served(run)
        began = time.perf_counter()
        with sync_playwright() as p:
            browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            browser.new_page().goto(link)
            trainer.wait()
            browser.close()
        share = cpu_s(process.pid) / (time.perf_counter() - began)
        process.terminate()
        process.wait()
    trainer.wait()
    rows = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
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
        training(False, 10, folder)
        synthetic(folder / "long", folder / "alone", options.steps)
        size = (folder / "long" / "metrics.jsonl").stat().st_size / 2**20
        for _ in range(options.rounds):
            found = opening(folder / "long")
            print(f"{options.steps:,} steps, {size:.0f} MiB: " + ", ".join(f"{k} {v:.3g}" for k, v in found.items()))
        times: dict[bool, list[float]] = {False: [], True: []}
        shares = []
        for _ in range(options.rounds):
            for watched in (False, True):
                seconds, share = training(watched, options.train_steps, folder)
                times[watched] += seconds
                shares += [share] if watched else []
        alone, beside = (statistics.median(times[w]) for w in (False, True))
        print(f"a training step: {alone:.3f} s alone, {beside:.3f} s with a page open ({100 * (beside / alone - 1):+.1f} %); the server takes {100 * statistics.mean(shares):.1f} % of a core")  # fmt: skip


if __name__ == "__main__":
    main()
