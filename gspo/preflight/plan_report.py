"""`gspo plan` as text for people and as JSON for programs.

In: the layouts of a plan. Out: a table, the details of the best layout, the settings to write into a recipe. Invariant:
every number is a prediction, and the text says what was measured and what is assumed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gspo.preflight.layouts import UNTESTED, Cluster, LayoutPlan, shared_limits
from gspo.preflight.machine import digits, human
from gspo.preflight.memory import optimizer_settings, total
from gspo.preflight.step_time import duration

SHOWN = 12
"""Layouts in the table, unless all are requested."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer to a request."""

    model: str
    cluster: Cluster
    layouts: Sequence[LayoutPlan]
    not_available: Sequence[tuple[str, str]]


def as_data(plan: Plan) -> dict[str, Any]:
    """The plan in JSON's types."""
    weights = plan.layouts[0].workload.weights
    return {
        "model": plan.model,
        "gpu": plan.cluster.gpu.name,
        "gpus": plan.cluster.gpus,
        "nodes": plan.cluster.nodes,
        "parameters": weights.total - weights.adapters,
        "layouts": [_layout_data(layout) for layout in plan.layouts],
        "not_available": [{"what": what, "why": why} for what, why in plan.not_available],
    }


def _layout_data(layout: LayoutPlan) -> dict[str, Any]:
    workload, time, need = layout.workload, layout.time, layout.need
    phase, part = time.bottleneck
    return {
        "name": layout.name,
        "ranks": workload.ranks,
        "fits": layout.fits,
        "obstacle": layout.obstacle,
        "tested": workload.ranks == 1,
        "trained": workload.weights.trained,
        "memory": {
            "usable_bytes": layout.usable,
            "peak_bytes": need.peak,
            "worst": need.worst,
            "host": [{"name": line.name, "bytes": line.bytes, "how": line.how} for line in need.host],
            "held": [{"name": line.name, "bytes": line.bytes, "how": line.how} for line in need.held],
            "phases": {
                name: [{"name": line.name, "bytes": line.bytes, "how": line.how} for line in lines]
                for name, lines in need.phases.items()
            },
        },
        "seconds": {**time.phases, "step": time.total},
        "seconds_by_cause": time.parts,
        "communication_s": time.communication,
        "tokens_per_second": layout.tokens_per_second,
        "mfu": layout.mfu,
        "bottleneck": {"phase": phase, "cause": part},
        "settings": layout.settings,
    }


def as_text(plan: Plan, *, show_all: bool) -> str:
    """The plan for people."""
    first, cluster = plan.layouts[0], plan.cluster
    count = first.workload.weights.total - first.workload.weights.adapters
    nodes = f" on {cluster.nodes} nodes" if cluster.nodes > 1 else ""
    rollout = first.workload.config.rollout
    lines = [
        f"{plan.model}: {count / 1e9:,.4g}B parameters, on {cluster.gpus} x {cluster.gpu.name}{nodes} "
        f"({human(first.usable)} usable each)",
        f"A step: {rollout.prompts} prompts of {first.workload.prompt_tokens} tokens x {rollout.group_size} "
        f"completions of {digits(first.workload.completion_tokens, 3)} (at most {rollout.max_tokens}), "
        f"{first.workload.config.learner.mini_batches} updates",
        "",
        *_table(plan.layouts if show_all else plan.layouts[:SHOWN]),
    ]
    if not show_all and len(plan.layouts) > SHOWN:
        lines.append(f"{len(plan.layouts) - SHOWN} more layouts with --all.")
    lines += ["", *(_best(first) if first.fits else [f"Nothing fits. {shared_limits(plan.layouts)}"])]
    lines += ["", "Not available"]
    lines += [f"  {what}: {why}" for what, why in plan.not_available]
    lines += ["", *_notes(plan)]
    return "\n".join(lines)


COLUMNS = (
    "layout",
    "fits",
    "peak",
    "sampling",
    "log-probs",
    "training",
    "optimizer",
    "gather",
    "step",
    "tokens/s",
    "MFU",
)


def _table(layouts: Sequence[LayoutPlan]) -> list[str]:
    rows = [_row(layout) for layout in layouts]
    widths = [max(len(row[i]) for row in (COLUMNS, *rows)) for i in range(len(COLUMNS))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in (COLUMNS, *rows)
    ]


def _row(layout: LayoutPlan) -> tuple[str, ...]:
    phases = layout.time.phases
    names = ("sampling", "log-probs", "training", "optimizer", "weight gather")
    return (
        layout.name,
        "yes" if layout.fits else "no",
        human(layout.need.peak),
        *(duration(phases[name]) if phases[name] else "-" for name in names),
        duration(layout.time.total),
        digits(layout.tokens_per_second, 3),
        f"{layout.mfu:.0%}",
    )


def _best(layout: LayoutPlan) -> list[str]:
    phase, part = layout.time.bottleneck
    share = layout.time.phases[phase] / layout.time.total
    lines = [f"Fastest layout: {layout.name}"]
    lines += [f"  bottleneck: {phase} ({share:.0%} of the step), most of it {CAUSES.get(part, part)}"]
    lines += ["  memory held for the whole run", *(f"    {line}" for line in layout.need.held)]
    if layout.need.host:
        lines += ["  held in host memory", *(f"    {line}" for line in layout.need.host)]
    for name, uses in layout.need.phases.items():
        mark = " (the peak)" if name == layout.need.worst else ""
        lines += [f"  in {name}{mark}: {human(total(uses))}", *(f"    {line}" for line in uses if line.bytes)]
    lines += ["  settings", *(f"    {key} = {_toml(value)}" for key, value in layout.settings.items())]
    start = f" --nproc {layout.workload.ranks}" if layout.workload.ranks > 1 else ""
    return [*lines, f"  start: gspo train RECIPE{start}"]


CAUSES = {
    "products": "matrix products",
    "reads": "reading weights and KV cache",
    "launches": "launching kernels",
    "adapter launches": "launching kernels of adapters",
    "captures": "capturing CUDA graphs",
    "head": "the LM head",
    "traffic": "reading and writing activations",
    "plain traffic": "reading and writing activations, in layers that are not compiled",
    "adapter traffic": "reading and writing activations of adapters",
    "gradient traffic": "adding up gradients",
    "host traffic": "copying optimizer states from and to host memory",
}


def _toml(value: Any) -> str:
    return json.dumps(value)


def _notes(plan: Plan) -> list[str]:
    notes = ["All numbers are predictions. The constants were fitted on one H200 (docs/plan.md), without rewards,"]
    notes += ["evaluations and checkpoints. Refills of uniform groups multiply the time of sampling."]
    if plan.cluster.gpu.name != "h200":
        notes.append(
            f"Nothing was measured on {plan.cluster.gpu.name}: it is assumed to reach the same shares of its peaks."
        )
    if any(optimizer_settings(layout.workload.config.learner) for layout in plan.layouts):
        notes.append("8-bit AdamW and offload: their time was never measured on a GPU.")
    if any(layout.workload.ranks > 1 for layout in plan.layouts):
        notes.append(f"More than one GPU: {UNTESTED}.")
    return notes


def printable(plan: Plan) -> str:
    """The plan as JSON."""
    return json.dumps(_finite(as_data(plan)), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    # JSON has neither NaN nor infinity.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
