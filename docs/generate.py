"""Write `docs/objectives.md`, `docs/settings.md` and the tables of `docs/metrics.md`, or check them.

In: the table of objectives, the settings with their help texts, the registry of metrics. Out: the pages. Invariant:
nothing generated is written by hand, so it cannot contradict the code.

    python docs/generate.py            write the pages
    python docs/generate.py --check    exit 1 if a page differs from what would be written
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from gspo.config import help_texts
from gspo.errors import ConfigError
from gspo.objectives import describe
from gspo.objectives.kl import KL_ESTIMATORS
from gspo.objectives.mismatch import MISMATCH_BOUNDS, mismatch_weight
from gspo.objectives.objective import OPTIONS
from gspo.objectives.table import objective as build
from gspo.record.registry import METRICS, TIMINGS, Metric, Reduction

HERE = Path(__file__).parent
PAGE_OF_METRICS = HERE / "metrics.md"
NOTE = "<!-- Made by docs/generate.py (`make docs-generate`). Edit the code, not this page. -->"


def main(arguments: Sequence[str]) -> int:
    """Write or check; the exit code is 1 when `--check` finds a page that is not up to date."""
    pages = {
        HERE / "objectives.md": objectives_page(),
        HERE / "settings.md": settings_page(),
        HERE / "metrics.md": metrics_page(),
    }
    if "--check" not in arguments:
        for path, text in pages.items():
            path.write_text(text, encoding="utf-8")
        return 0
    outdated = [p.name for p, text in pages.items() if not p.is_file() or p.read_text(encoding="utf-8") != text]
    for name in outdated:
        print(f"docs/{name} is out of date; run: make docs-generate", file=sys.stderr)
    return 1 if outdated else 0


# ------------------------------------------------------------------------------------------------- metrics


def metrics_page() -> str:
    """The page, with its tables generated from the registry."""
    text = PAGE_OF_METRICS.read_text(encoding="utf-8")
    step = Metric("step", "Number of the training step.", present="step ≥ 1", unit="count", reduction=Reduction.SAME)
    for name, metrics in (("metrics", METRICS), ("timings", (step, *TIMINGS))):
        start, end = f"<!-- {name}: made from gspo/record/registry.py -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        text = before + start + "\n" + _metrics_table(metrics) + "\n" + end + rest.partition(end)[2]
    return text


def _metrics_table(metrics: Sequence[Metric]) -> str:
    rows = [
        f"| `{m.key}` | {_cell(m.definition)} | {_cell(m.present)} | {m.unit} | {m.reduction.value} |\n"
        for m in metrics
    ]
    return "| key | definition | present | unit | across ranks |\n|---|---|---|---|---|\n" + "".join(rows)


# ------------------------------------------------------------------------------------------------- objectives


def objectives_page() -> str:
    records = describe.as_data()
    lines = [
        "# Objectives",
        "",
        NOTE,
        "",
        "An objective is one row of this table. The *advantage* compares each completion with its group. The *ratio*",
        "measures how far the policy has moved. The *trust region* limits that move. The *aggregate* weights the "
        "tokens.",
        "",
        "`gspo objectives` prints the same table, `gspo objectives --json` as JSON. In a recipe, settings go next to "
        "the",
        'name (`[objective]`, `name = "gspo"`, `clip_low = 3e-3`). In Python: `gspo.objective("gspo", clip_low=3e-3)`.',
        "[choosing.md](choosing.md) helps to choose one.",
        "",
        "| objective | paper | advantage | ratio | trust region | aggregate | own settings, with defaults |",
        "|---|---|---|---|---|---|---|",
        *(_row(record) for record in records),
        "",
        "In the formulas `pi` is the policy that is trained, `pi_old` the learner's policy at the start of the batch, "
        "`mu`",
        "what the engine sampled with, `R` the reward, `A` the advantage, `sg[...]` a value without gradient. They "
        "give the",
        "objective to maximize; the loss is its negative.",
        "",
        "## Objectives in detail",
        "",
    ]
    for record in records:
        lines += _section(record)
    return "\n".join([*lines, *_options(records)]).rstrip() + "\n"


def _row(record: dict[str, Any]) -> str:
    parts = [f"`{record[key]}`" for key in ("advantage", "ratio", "trust_region", "aggregate")]
    cells = [f"[`{record['name']}`](#{record['name']})", _link(record["paper"]), *parts, _own(record)]
    return f"| {' | '.join(cells)} |"


def _link(paper: str) -> str:
    return f"[{paper}](https://arxiv.org/abs/{paper.removeprefix('arXiv:')})"


def _own(record: dict[str, Any]) -> str:
    own = {key: value for key, value in record["settings"].items() if key not in OPTIONS}
    return ", ".join(f"`{key} = {_value(value)}`" for key, value in own.items()) or "none"


def _section(record: dict[str, Any]) -> list[str]:
    lines = [f"### {record['name']}", "", f"{_link(record['paper'])}. Advantages: {_per(record)}.", ""]
    lines += [f"- {part.replace('_', ' ')} `{record[part]}`: {text}" for part, text in record["formula"].items()]
    if record["options"]:
        changed = ", ".join(f"`{key} = {_value(value)}`" for key, value in record["options"].items())
        lines.append(f"- options that differ from their neutral value: {changed}")
    return [*lines, ""]


def _per(record: dict[str, Any]) -> str:
    return "one per completion" if record["advantage_per"] == "sequence" else "one per completion, or one per token"


def _options(records: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "## Options of every objective",
        "",
        "An objective refuses an option that makes no sense for it, and one that only acts together with another that "
        "is",
        "not set.",
        "",
        *(f"- `{name}`: {text}" for name, text in describe.option_help().items()),
        "",
        "`dual_clip` belongs to the trust regions that have it: see the settings of each objective.",
        "",
        "### KL estimators",
        "",
        *(f"- `{name}`: {inspect.getdoc(rule)}" for name, rule in KL_ESTIMATORS.items()),
        "",
        "### Mismatch corrections",
        "",
        *(inspect.getdoc(mismatch_weight) or "").splitlines(),
        "",
        "| mismatch | default mismatch_low | default mismatch_high |",
        "|---|---|---|",
        *(f"| `{n}` | {_bound(low)} | {_bound(high)} |" for n, (low, high) in MISMATCH_BOUNDS.items() if n != "none"),
        "",
        "### Refused options",
        "",
        "| option | refused by | because |",
        "|---|---|---|",
    ]
    refusals = [(o, _refusal(r["name"], o), r["name"]) for o in ("dual_clip", *OPTIONS) for r in records]
    refused = sorted({(option, why) for option, why, _ in refusals if why})
    for option, why in refused:
        rows = ", ".join(f"`{name}`" for o, w, name in refusals if (o, w) == (option, why))
        lines.append(f"| `{option}` | {rows} | {why} |")
    return lines


def _refusal(name: str, option: str) -> str:
    """Why the objective refuses the option, as the error message says it; empty if it accepts the option."""
    try:
        build(name, **{option: None})
    except ConfigError as error:
        return str(error).partition("makes no sense here: ")[2]
    return ""


def _bound(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


# ------------------------------------------------------------------------------------------------- settings


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        NOTE,
        "",
        "Every key of a recipe. On the command line, give the same keys as `--section.key=value`. `gspo train --help` "
        "prints",
        "this list. [runs.md](runs.md#recipes) describes recipes.",
        "",
    ]
    for section, entries in groupby(help_texts(), key=lambda entry: entry[0].rpartition(".")[0]):
        lines += [
            f"## {f'[{section}]' if section else 'Top level'}",
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for key, kind, default, text in entries:
            lines.append(f"| `{key}` | {_cell(kind)} | `{_value(default)}` | {_cell(text)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _value(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
