"""What `gspo plan` predicts for measurements on a GPU, and the fit of its constants.

In: the measurements of `plan_measured.py`, or `plan.json` of `plan_gpu.py`. Out: a table of predicted and measured
seconds and bytes; with `--fit`, new values for `TIMES` in `gspo/preflight/calibration.py`, to be copied there by hand.
Invariant: only measurements marked as fitted decide the constants.

    python benchmarks/plan_fit.py [plan.json] [--fit]

A constant that few measurements determine stays near its present value: the sum of squares has a term for its relative
change. `ACTIVATIONS` is fitted by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from plan_cases import Case
from plan_gpu import PHASES, config_of, shape_folder
from plan_measured import GIB, MEASURED, Measurement

from gspo.build import tokenizer_for
from gspo.preflight.calibration import TIMES
from gspo.preflight.gpus import GPUS, Gpu, gpu_of_device
from gspo.preflight.memory import Estimate, estimate, total
from gspo.preflight.model import skeleton_of
from gspo.preflight.speed import StepTime, ideal_seconds, kind_of, step_time
from gspo.preflight.workload import Workload

PULL = 0.1
"""Weight of a relative change of a constant, against a relative error of a measured time."""
UNCOMPUTED = ("log-probs", "training")
"""Phases that skip groups with equal rewards."""


def workload_of(case: Case, mean: float, memory: float | None = None) -> Workload:
    """What `plan` knows of a case."""
    with shape_folder(case) as folder:
        config = config_of(case, folder, "cuda")
        skeleton = skeleton_of(config.model, tokenizer_for(config))
    return Workload(
        config=config,
        skeleton=skeleton,
        prompt_tokens=case.prompt_tokens,
        completion_tokens=mean,
        kl=bool(case.kl),
        gpu=True,
        packed=True,
        memory=memory,
    )


def predict(measured: Measurement, gpu: Gpu) -> tuple[Estimate, StepTime]:
    """Memory and time of a measurement's case. Its peak decides how much memory there was for the KV cache."""
    workload = workload_of(measured.case, measured.mean, gpu.memory if measured.peak else None)
    return estimate(workload), step_time(workload, gpu)


def from_file(result: Mapping[str, Any]) -> list[Measurement]:
    """The measurements in `plan.json`: the faster of the steps, phase by phase."""
    found = []
    for line in result["cases"]:
        if "error" in line:
            print(f"{line['name']}: {line['error'][:200]}")
            continue
        case, runs = Case(**line["case"]), line["runs"]
        mean = case.mean_tokens * -math.expm1(-case.max_tokens / case.mean_tokens) if case.mean_tokens else None
        found.append(
            Measurement(
                name=line["name"],
                case=case,
                mean=mean or case.max_tokens,
                seconds={
                    phase: min(run["phases"][phase]["seconds"] for run in runs)
                    for phase in PHASES
                    if phase in runs[0]["phases"]
                },
                peak=max(phase["peak_bytes"] for run in runs for phase in run["phases"].values()),
                fitted=line["fitted"],
            )
        )
    return found


def gpu_of_result(result: Mapping[str, Any]) -> Gpu:
    """The GPU of `plan.json`; an H200 for a test on a CPU."""
    return gpu_of_device(result["device"].get("name", "")) or GPUS["h200"]


def predicted_seconds(measured: Measurement, time: StepTime, phases: str) -> float:
    """The time of phases that were measured together."""
    return sum(time.phases[phase] * (measured.computed if phase in UNCOMPUTED else 1) for phase in phases.split("+"))


def report(measurements: Iterable[Measurement], gpu: Gpu) -> None:
    """Print predicted and measured numbers, and the errors of each set."""
    errors: dict[tuple[bool, str], list[float]] = {}

    def compared(fitted: bool, what: str, said: float, real: float) -> str:
        off = said / real - 1
        errors.setdefault((fitted, what), []).append(off)
        return f"{said:8.2f} / {real:<8.2f}{off:>+5.0%}"

    print(f"\npredicted / measured, {gpu.name}; * was not used for the fit")
    for measured in measurements:
        need, time = predict(measured, gpu)
        mark = "  " if measured.fitted else "* "
        for phases, real in measured.seconds.items():
            said = predicted_seconds(measured, time, phases)
            print(f"{mark}{measured.name:<58} {phases + ', s':<34}{compared(measured.fitted, 'time', said, real)}")
        for phase, size in measured.extra.items():
            text = compared(measured.fitted, "memory", total(need.phases[phase]) / GIB, size / GIB)
            print(f"{mark}{measured.name:<58} {phase + ', extra GiB':<34}{text}")
        if measured.peak:
            text = compared(measured.fitted, "memory", need.peak / GIB, measured.peak / GIB)
            print(f"{mark}{measured.name:<58} {f'peak GiB, {need.worst}':<34}{text}")
    for fitted, title in ((True, "fitted"), (False, "not used for the fit")):
        for what, limit in (("time", 0.30), ("memory", 0.15)):
            found = np.abs(errors.get((fitted, what), []))
            if len(found):
                print(
                    f"{title}, {what}: mean |error| {found.mean():.0%}, largest {found.max():.0%}, "
                    f"{(found <= limit).sum()} of {len(found)} within {limit:.0%}"
                )


def fit(measurements: Iterable[Measurement], gpu: Gpu) -> dict[str, dict[str, float]]:
    """Constants with the smallest sum of squared relative errors over the fitted measurements."""
    names = [(kind, name) for kind, constants in TIMES.items() for name in constants]
    rows = []
    for measured in measurements:
        if not measured.fitted:
            continue
        _, time = predict(measured, gpu)
        for phases, real in measured.seconds.items():
            row = dict.fromkeys(names, 0.0)
            for phase in phases.split("+"):
                share = measured.computed if phase in UNCOMPUTED else 1
                for name, amount in time.amounts[phase].items():
                    constant = TIMES[kind_of(phase)][name]
                    row[kind_of(phase), name] += share * ideal_seconds(name, amount, gpu) * constant / real
            rows.append([row[name] for name in names])
    found = _solve(rows)
    return {
        kind: {name: float(f"{constants[name] * found[names.index((kind, name))]:.3g}") for name in constants}
        for kind, constants in TIMES.items()
    }


def _solve(rows: Sequence[Sequence[float]]) -> Any:
    """Factors of the constants: none negative, and close to 1 where the rows do not decide."""
    count = len(rows[0])
    matrix = np.vstack([np.array(rows), PULL * np.eye(count)])
    target = np.concatenate([np.ones(len(rows)), np.full(count, PULL)])
    free = np.ones(count, dtype=bool)
    while True:
        found = np.zeros(count)
        found[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        if (found >= 0).all():
            return found
        free &= found > 0  # nothing takes negative time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="plan.json of plan_gpu.py (default: plan_measured.py)")
    parser.add_argument("--fit", action="store_true", help="print constants fitted to the measurements")
    arguments = parser.parse_args()
    gpu, measurements = GPUS["h200"], list(MEASURED)
    if arguments.file:
        result = json.loads(arguments.file.read_text())
        gpu, measurements = gpu_of_result(result), from_file(result)
    report(measurements, gpu)
    if arguments.fit:
        print(json.dumps(fit(measurements, gpu), indent=4))
    return 0


if __name__ == "__main__":
    sys.exit(main())
