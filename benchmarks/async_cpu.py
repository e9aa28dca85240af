"""Asynchronous sampling on CPU cores: seconds per step and held-out gain of the demo, lag k against lag 0.

    python benchmarks/async_cpu.py --out /tmp/async --seeds 5 --lags 0 1

In: a recipe. Out: a table, and one JSON object per run in `OUT/runs.jsonl`, with the load of the machine before and
after each run. The lags of a seed take turns, so that a load that drifts meets all of them. A step's time is that of
steps 2..N without evaluation. Invariant: a run that is already in the file is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""97.5 % quantile of Student's t by the number of values."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default=str(ROOT / "recipes" / "demo.toml"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1])
    parser.add_argument("overrides", nargs="*", help="more settings, such as --steps=20 (after --)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "runs.jsonl"
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for seed in range(options.seeds):
        for lag in options.lags if seed % 2 == 0 else options.lags[::-1]:
            if any((r["seed"], r["lag"]) == (seed, lag) for r in done):
                continue
            result = measure(options, seed, lag)
            done.append(result)
            with file.open("a") as out:
                out.write(json.dumps(result) + "\n")
            print(json.dumps(result), flush=True)
    show(done, options.lags)
    return 0


def measure(options: argparse.Namespace, seed: int, lag: int) -> dict[str, Any]:
    """Run one lag with one seed."""
    run = options.out / f"lag-{lag}-seed-{seed}"
    before = os.getloadavg()[0]
    settings = [f"--seed={seed}", f"--rollout.max_lag={lag}", f"--run-dir={run}", *options.overrides]
    command = [sys.executable, "-m", "gspo", "train", options.recipe, *settings]
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(ROOT), **os.environ}
    cpu = run_and_watch(command, environment, run)
    timings = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()][1:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    accuracy = [row["eval/accuracy"] for row in rows if row.get("eval/accuracy") is not None]
    steps = [row["time/step_s"] - row.get("time/eval_s", 0.0) for row in timings]
    return {
        "seed": seed,
        "lag": lag,
        "steps": len(steps),
        "step_s": statistics.fmean(steps),
        "median_step_s": statistics.median(steps),
        **cpu,
        "before": accuracy[0],
        "after": accuracy[-1],
        "cores": len(os.sched_getaffinity(0)),
        "load_before": before,
        "load_after": os.getloadavg()[0],
    }


def run_and_watch(command: list[str], environment: dict[str, str], run: Path) -> dict[str, float]:
    """Run to the end. CPU seconds per step of the trainer and of its sampling process, from step 2 on: other load on
    the machine does not count in them, so the larger one bounds the seconds per step of two idle cores."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    seen: list[tuple[int, dict[str, float]]] = []
    while process.poll() is None:
        time.sleep(0.2)
        file = run / "timings.jsonl"
        steps = len(file.read_text().splitlines()) if file.exists() else 0
        now = {"trainer_cpu_s": cpu_seconds(process.pid)}
        for pid in filter(is_sampler, children(process.pid)):
            now["sampler_cpu_s"] = cpu_seconds(pid)
        if steps >= 1 and all(now.values()):
            seen.append((steps, now))
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}")
    first, before = seen[0]
    last, after = [found for found in seen if found[1].keys() == before.keys()][-1]  # the sampling process ends first
    return {name: round((after[name] - before[name]) / max(1, last - first), 4) for name in before}


def cpu_seconds(pid: int) -> float:
    """CPU time of a process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def is_sampler(pid: int) -> bool:
    """Whether a process is the sampling process of a run."""
    try:
        return b"gspo.collection.sampler" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def show(done: list[dict[str, Any]], lags: list[int]) -> None:
    """Print the table."""
    base = {r["seed"]: r for r in done if r["lag"] == lags[0]}
    print(
        "\n| lag | seeds | seconds per step | speed against the first lag | CPU seconds per step: trainer | sampling "
        "process | gain in points | load |"
    )
    print(f"|{' --- |' * 8}")
    for lag in lags:
        own = [r for r in done if r["lag"] == lag and r["seed"] in base]
        ratios = [base[r["seed"]]["step_s"] / r["step_s"] for r in own]
        gains = [100 * (r["after"] - r["before"]) for r in own]
        loads = [x for r in own for x in (r["load_before"], r["load_after"])]
        cells = [
            str(lag),
            str(len(own)),
            interval([r["step_s"] for r in own]),
            interval(ratios),
            interval([r["trainer_cpu_s"] for r in own]),
            interval([r["sampler_cpu_s"] for r in own if "sampler_cpu_s" in r]),
            interval(gains),
            f"{min(loads):.1f} to {max(loads):.1f}",
        ]
        print(f"| {' | '.join(cells)} |")


def interval(values: list[float]) -> str:
    """Mean with its 95 % interval over seeds."""
    if not values:
        return "-"
    mean = statistics.fmean(values)
    if len(values) not in T_95:
        return f"{mean:.3g}"
    half = T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.3g} ± {half:.2g}"


if __name__ == "__main__":
    sys.exit(main())
