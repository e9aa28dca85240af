"""Validation of a saved `TrainerState`, the files `trainer.json` and `difficulty.tensors`: a manifest shows that they
are intact, not that a run wrote them.

In: a checkpoint. Out: the fields of its `trainer.json`, or what is wrong with them. Invariant: every field has the type
and the range that a run writes, and the step is the one the checkpoint is named after.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from gspo.data.difficulty import Difficulty
from gspo.objectives.adaptive_clip import LIMITS

DIFFICULTY = "difficulty.tensors"
"""In safetensors format, but without that suffix, because vLLM would load it as weights."""
LARGEST = 16 << 20
"""Bytes that are read at most. A real file has a few thousand."""
MOST = 2**62
"""Upper bound of every counter, beyond what any run reaches."""


def _count(value: Any) -> bool:
    # Not isinstance: JSON's `true` is a bool, which is a subclass of int.
    return type(value) is int and 0 <= value <= MOST


def _scale(value: Any) -> bool:
    # Comparisons alone refuse NaN and infinity too. `math.isfinite` would raise for an integer beyond any float.
    return type(value) in (int, float) and LIMITS[0] <= value <= LIMITS[1]


def _factor(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= 1


def _counts(value: Any) -> bool:
    files = {"metrics.jsonl", "timings.jsonl"}
    return isinstance(value, Mapping) and set(value) <= files and all(map(_count, value.values()))


def _rollout(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) == {"batch", "cursor"} and all(map(_count, value.values()))


def _settings(value: Any) -> bool:
    return isinstance(value, Mapping) and "learner.mini_batches" in value and _count(value["learner.mini_batches"])


FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "step": (_count, "a count"),
    "rollout": (_rollout, "the counts batch and cursor"),
    "updates": (_count, "a count"),
    "skipped_in_row": (_count, "a count"),
    "tokens": (_count, "a count"),
    "clip_scale": (_scale, f"a number from {LIMITS[0]:g} to {LIMITS[1]:g}"),
    "rollbacks": (_count, "a count"),
    "rate_factor": (_factor, "a number above 0, at most 1"),
    "clip_factor": (_factor, "a number above 0, at most 1"),
    "offsets": (_counts, "lengths of metrics.jsonl and timings.jsonl"),
    "problems": (lambda value: isinstance(value, str), "a text"),
    "model": (lambda value: isinstance(value, str), "a text"),
    "objective": (lambda value: isinstance(value, str), "a text"),
    "settings": (_settings, "the settings of the run"),
    "pending": (lambda value: value is None or isinstance(value, Mapping), "the metrics of a step, or null"),
}


def fault_in(path: Path) -> str | None:
    """Why the `trainer.json` of a checkpoint is not valid, or None."""
    file = path / "trainer.json"
    try:
        # Before it is read: the file may be anything, and a huge one would fill the memory.
        if file.stat().st_size > LARGEST:
            return f"{file}: too large"
        values = saved_fields(path)
    except (OSError, ValueError, RecursionError) as error:
        return f"{file}: cannot be read ({type(error).__name__})"
    if not isinstance(values, dict) or set(values) != set(FIELDS):
        return f"{file}: must contain exactly {', '.join(FIELDS)}"
    for name, (right, what) in FIELDS.items():
        if not right(values[name]):
            return f"{file}: {name} is not {what}"
    return _contradiction(file, values) or _difficulty_fault(path, values)


def _difficulty_fault(path: Path, values: Mapping[str, Any]) -> str | None:
    file = path / DIFFICULTY
    if file.is_file() != (values["settings"].get("data.sampling") == "difficulty"):
        state = "must not exist" if file.is_file() else "missing"
        return f"{file}: {state} with data.sampling = {values['settings'].get('data.sampling')!r}"
    try:
        saved_difficulty(path)
    except (OSError, ValueError, SafetensorError) as error:
        return f"{file}: cannot be read ({type(error).__name__}: {error})"
    return None


def save_difficulty(difficulty: Difficulty | None, path: Path) -> None:
    """Write the measured pass rates into a checkpoint; nothing if sampling is uniform."""
    if difficulty is not None:
        skipped = np.array(difficulty.skipped, dtype=np.int64)
        save_file({"correct": difficulty.correct, "judged": difficulty.judged, "skipped": skipped}, path / DIFFICULTY)


def saved_difficulty(path: Path) -> Difficulty | None:
    """The measured pass rates of a checkpoint; None if it has none. Raises `ValueError` for what no run writes."""
    if not (path / DIFFICULTY).is_file():
        return None
    tensors = load_file(path / DIFFICULTY)
    if {name: str(t.dtype) for name, t in tensors.items()} != {
        "correct": "float64",
        "judged": "float64",
        "skipped": "int64",
    }:
        raise ValueError("must contain exactly correct, judged and skipped")
    correct, judged, skipped = tensors["correct"], tensors["judged"], tensors["skipped"]
    # Comparisons alone refuse NaN, too.
    plausible = correct.shape == judged.shape and bool(np.all((correct >= 0) & (correct <= judged) & (judged <= MOST)))
    if not plausible or correct.ndim != 1 or skipped.ndim != 1 or not np.all((skipped >= 0) & (skipped <= MOST)):
        raise ValueError("is not a list of counts")
    return Difficulty(correct=correct, judged=judged, skipped=tuple(skipped.tolist()))


def saved_fields(path: Path) -> Any:
    """What the `trainer.json` of a checkpoint contains, which may be anything. Fields of earlier versions are
    translated."""
    values = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
    if isinstance(values, dict) and "cursor" in values and "rollout" not in values:
        # Before batches had their own number, it was the number of the step that trained on them.
        values["rollout"] = {"batch": values.get("step"), "cursor": values.pop("cursor")}
    if isinstance(values, dict) and "clip_scale" in values:
        # Before runs could roll back.
        values = {"rollbacks": 0, "rate_factor": 1.0, "clip_factor": 1.0} | values
    if isinstance(values, dict):
        values.setdefault("objective", "")  # custom objectives came later
    return values


def _contradiction(file: Path, values: Mapping[str, Any]) -> str | None:
    """How the fields contradict each other or the name of the checkpoint, or None."""
    step, batch, pending = values["step"], values["rollout"]["batch"], values["pending"]
    if step != int(file.parent.name):
        return f"{file}: step is {step}, but the checkpoint is named {file.parent.name}"
    if batch < step:
        return f"{file}: {step} steps cannot have trained on {batch} batches"
    most = step * values["settings"]["learner.mini_batches"]
    if values["updates"] > most:
        return f"{file}: {values['updates']} updates are more than the {most} that {step} steps allow"
    if pending is not None and pending.get("step") != step:
        return f"{file}: step is {step}, but the step whose evaluation is pending is {pending.get('step')}"
    return None
