"""The model card of a run: what was trained, on what, with which result, and how to repeat it.

In: a run directory, the name of the model and the step of its checkpoint. Out: Markdown with the metadata that the
Hugging Face Hub reads. Invariant: numbers are those that the run recorded, with their intervals; paths of this machine
and secrets do not appear.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.config import Config, differing, flat, from_tree, read_toml, toml_value
from gspo.record.run_dir import read_metrics
from gspo.redact import known_secrets, redacted
from gspo.safe_files import read_regular

CURVES = "curves.png"
LARGEST = 1 << 20


def model_card(run: Path, name: str, *, step: int, merged: bool) -> str:
    """The card."""
    file = run / "config.toml"
    config = from_tree(read_toml(file), where=str(file))
    rows = [row for row in read_metrics(run) if row.get("step", 0) <= step]
    adapter = bool(config.model.lora.rank) and not merged
    parts = [
        _metadata(config, adapter=adapter),
        f"# {name.rpartition('/')[2]}\n",
        _summary(config, step, adapter=adapter),
        _evaluation(rows),
        f"## Training\n\n![Training curves]({CURVES})\n",
        _training(config, rows),
        _repeat(config),
        _versions(run),
    ]
    return redacted("\n".join(part for part in parts if part), known_secrets())


def _base(config: Config) -> str:
    """The base model; empty if it was built from scratch or is a directory of this machine, which nobody else has."""
    path = config.model.path
    return "" if not path or os.path.isabs(path) or Path(path).expanduser().exists() else path


def _metadata(config: Config, *, adapter: bool) -> str:
    lines = ["---", f"library_name: {'peft' if adapter else 'transformers'}", "pipeline_tag: text-generation"]
    lines += [f"base_model: {json.dumps(_base(config))}"] if _base(config) else []
    hubs = [source.hub for source in config.data.sources.values() if source.hub]
    lines += ["datasets:", *(f"- {json.dumps(hub)}" for hub in hubs)] if hubs else []
    return "\n".join([*lines, "tags:", "- gspo", "- reinforcement-learning", "---", ""])


def _summary(config: Config, step: int, *, adapter: bool) -> str:
    base = f"`{_base(config)}`" if _base(config) else "a local model"
    if config.model.build:
        base = f"a model built from scratch (`{Path(config.model.build).name}`)"
    what = "A LoRA adapter of" if adapter else "Trained from"
    return (
        f"{what} {base} with reinforcement learning: objective `{_portable(config.objective.name)}`, "
        f"{step} steps of {config.rollout.prompts} prompts with {config.rollout.group_size} completions each.\n"
    )


def _evaluation(rows: Sequence[Mapping[str, Any]]) -> str:
    evaluated = [row for row in rows if row.get("eval/accuracy") is not None]
    if not evaluated:
        return "## Evaluation\n\nThe run was not evaluated.\n"
    first, last = evaluated[0], evaluated[-1]
    lines = [
        "## Evaluation",
        "",
        f"Held-out problems, with 95 % intervals, at step {first['step']} and at step {last['step']}:",
        "",
        f"| metric | step {first['step']} | step {last['step']} |",
        "|---|---|---|",
    ]
    keys = [key for key in last if key.startswith("eval/") and key.endswith(("/accuracy", "/reward"))]
    keys += ["eval/accuracy_greedy"] if last.get("eval/accuracy_greedy") is not None else []
    lines += [f"| `{key}` | {_estimate(first, key)} | {_estimate(last, key)} |" for key in keys]
    return "\n".join([*lines, ""])


def _estimate(row: Mapping[str, Any], key: str) -> str:
    value, low, high = (row.get(key + end) for end in ("", "_low", "_high"))
    if value is None:
        return "-"
    form = ".3f" if key.endswith("/reward") else ".1%"
    interval = "" if low is None or high is None else f" [{low:{form}}, {high:{form}}]"
    return f"{value:{form}}{interval}"


def _training(config: Config, rows: Sequence[Mapping[str, Any]]) -> str:
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    tokens = rows[-1].get("tokens/sampled") if rows else None
    lines = [f"- seed: {config.seed}"]
    lines += [f"- mean reward: {rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in the last"] if rewards else []
    lines += [f"- sampled tokens: {tokens:,}"] if tokens else []
    return "\n".join([*lines, ""])


def _repeat(config: Config) -> str:
    """The settings that differ from the defaults, as a recipe."""
    given, default = flat(config), flat(Config())
    changed = [key for key in differing([given, default]) if key in given and key != "run_dir"]
    recipe = "\n".join(f"{key} = {toml_value(_portable(given[key]))}" for key in changed)
    return (
        "## Recipe\n\nThe settings that differ from the defaults. Save them as `recipe.toml`, give the files that only "
        f"the training machine had, and run `gspo train recipe.toml --seed {config.seed}`.\n\n"
        f"```toml\n{recipe}\n```\n"
    )


def _portable(value: Any) -> Any:
    """A setting without the directories of this machine."""
    if isinstance(value, list):
        return [_portable(one) for one in value]
    return os.path.basename(value) if isinstance(value, str) and os.path.isabs(value) else value


def _versions(run: Path) -> str:
    try:
        found = json.loads(read_regular(run / "environment.json", LARGEST))
        packages = found.get("packages", {})
    except (OSError, ValueError, AttributeError):
        return ""
    rows = [f"| {name} | {version} |" for name, version in packages.items() if version]
    return "\n".join(["## Versions", "", "| package | version |", "|---|---|", *rows, ""])
