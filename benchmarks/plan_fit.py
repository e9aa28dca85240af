"""What `gspo plan` predicts for the measurements of `plan_gpu.py`, and the fit of its constants.

In: `plan.json` of `plan_gpu.py`. Out: a table of predicted and measured seconds and bytes; with `--fit`, new values for
`TIMES` in `gspo/preflight/calibration.py`, to be copied there by hand. Invariant: only cases marked as fitted decide
the constants.

    python benchmarks/plan_fit.py plan.json [--fit]

A constant that few cases determine stays near its present value: the sum of squares has a term for its relative change.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from plan_cases import Case
from plan_gpu import LOGPROBS, OPTIMIZER, PHASES, SAMPLING, TRAINING, config_of, shape_folder

from gspo.build import tokenizer_for
from gspo.preflight.calibration import TIMES
from gspo.preflight.gpus import GPUS, Gpu, gpu_of_device
from gspo.preflight.memory import Estimate, estimate
from gspo.preflight.model import skeleton_of
from gspo.preflight.speed import StepTime, ideal_seconds, kind_of, step_time
from gspo.preflight.workload import Workload

PULL = 0.1
"""Weight of a relative change of a constant, against a relative error of a measured time."""
PEAK_OF = {TRAINING: "training", OPTIMIZER: "the optimizer step", SAMPLING: "sampling"}


def workload_of(case: Case, memory: float | None = None) -> Workload:
    """What `plan` knows of a case."""
    with shape_folder(case) as folder:
        config = config_of(case, folder, "cuda")
        skeleton = skeleton_of(config.model, tokenizer_for(config))
    mean = case.mean_tokens
    return Workload(
        config=config,
        skeleton=skeleton,
        prompt_tokens=case.prompt_tokens,
        # Lengths are geometric, cut off at the limit.
        completion_tokens=mean * -math.expm1(-case.max_tokens / mean) if mean else case.max_tokens,
        kl=bool(case.kl),
        gpu=True,
        packed=True,
        memory=memory,
    )


def predict(case: Case, gpu: Gpu, memory: float | None = None) -> tuple[Estimate, StepTime]:
    workload = workload_of(case, memory)
    return estimate(workload), step_time(workload, gpu)


def measured_seconds(line: dict[str, Any]) -> dict[str, float]:
    """The faster of the steps, phase by phase."""
    return {
        p: min(run["phases"][p]["seconds"] for run in line["runs"]) for p in PHASES if p in line["runs"][0]["phases"]
    }


def measured_peaks(line: dict[str, Any]) -> dict[str, float]:
    return {p: max(run["phases"][p]["peak_bytes"] for run in line["runs"]) for p in line["runs"][0]["phases"]}


def report(result: dict[str, Any]) -> None:
    """Print predicted and measured numbers, and the errors of each set of cases."""
    gpu = gpu_of_device(result["device"].get("name", "")) or GPUS["h200"]
    memory = result["device"].get("free_bytes")
    errors: dict[tuple[bool, str], list[float]] = {}
    print(f"\npredicted / measured on {result['device'].get('name')}; * is not used for fitting")
    print(f"{'case':<66}" + "".join(f"{name:>22}" for name in ("step s", *PHASES, "peak GiB")))
    for line in result["cases"]:
        if "error" in line:
            print(f"{line['name']:<66} {line['error'][:200]}")
            continue
        need, time = predict(Case(**line["case"]), gpu, memory)
        found, peak = measured_seconds(line), max(measured_peaks(line).values())
        pairs = {"step s": (sum(time.phases.values()), sum(found.values()))}
        pairs |= {p: (time.phases[p], found.get(p, 0.0)) for p in PHASES}
        pairs["peak GiB"] = (need.peak / 2**30, peak / 2**30)
        text = f"{('' if line['fitted'] else '* ') + line['name']:<66}"
        for name, (said, real) in pairs.items():
            off = said / real - 1 if real else math.nan
            text += f"{said:>7.2f} /{real:>6.2f} {off:>+6.0%}"
            if real:
                errors.setdefault((line["fitted"], name), []).append(abs(off))
        print(text)
    for fitted, title in ((True, "fitted"), (False, "not fitted")):
        parts = [
            f"{name} {np.mean(errors[fitted, name]):.0%} (worst {max(errors[fitted, name]):.0%})"
            for name in ("step s", *PHASES, "peak GiB")
            if (fitted, name) in errors
        ]
        print(f"mean |error|, {title}: " + ", ".join(parts))


def show_memory(result: dict[str, Any]) -> None:
    """Print the peak of every phase."""
    gpu = gpu_of_device(result["device"].get("name", "")) or GPUS["h200"]
    print("\npeak GiB of each phase, predicted / measured")
    for line in result["cases"]:
        if "error" in line:
            continue
        need, _ = predict(Case(**line["case"]), gpu, result["device"].get("free_bytes"))
        found = measured_peaks(line)
        held = line["runs"][-1]["held_bytes"]
        text = f"{line['name']:<66} held {sum(x.bytes for x in need.held) / 2**30:.2f} / {held / 2**30:.2f}"
        for phase, name in PEAK_OF.items():
            text += f"  {phase} {need.peak_of(name) / 2**30:.2f} / {found.get(phase, 0) / 2**30:.2f}"
        print(f"{text}  log-probs - / {found.get(LOGPROBS, 0) / 2**30:.2f}")


def fit(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Constants with the smallest sum of squared relative errors over the fitted cases."""
    gpu = gpu_of_device(result["device"].get("name", "")) or GPUS["h200"]
    rows: dict[str, list[tuple[dict[str, float], float]]] = {kind: [] for kind in TIMES}
    for line in result["cases"]:
        if "error" in line or not line["fitted"]:
            continue
        _, time = predict(Case(**line["case"]), gpu, result["device"].get("free_bytes"))
        for phase, seconds in measured_seconds(line).items():
            ideal = {name: ideal_seconds(name, amount, gpu) for name, amount in time.amounts[phase].items()}
            if any(ideal.values()) and seconds > 0:
                rows[kind_of(phase)].append((ideal, seconds))
    return {kind: _solve(found, TIMES[kind]) if found else TIMES[kind] for kind, found in rows.items()}


def _solve(rows: list[tuple[dict[str, float], float]], before: dict[str, float]) -> dict[str, float]:
    names = list(before)
    matrix = np.array([[ideal.get(name, 0.0) * before[name] / seconds for name in names] for ideal, seconds in rows])
    # Unknowns are relative to the present constants, which they are pulled toward.
    matrix = np.vstack([matrix, PULL * np.eye(len(names))])
    target = np.concatenate([np.ones(len(rows)), np.full(len(names), PULL)])
    free = np.ones(len(names), dtype=bool)
    while True:
        found = np.zeros(len(names))
        found[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        if (found >= 0).all():
            return {name: float(f"{x * before[name]:.3g}") for name, x in zip(names, found, strict=True)}
        free &= found > 0  # nothing takes negative time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--fit", action="store_true", help="print constants fitted to the measurements")
    arguments = parser.parse_args()
    result = json.loads(arguments.measurements.read_text())
    report(result)
    show_memory(result)
    if arguments.fit:
        print(json.dumps(fit(result), indent=4))
    return 0


if __name__ == "__main__":
    sys.exit(main())
