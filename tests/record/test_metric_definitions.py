"""A metric is defined once: everything that shows one follows its definition."""

from __future__ import annotations

import importlib.util
import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from shown_runs import make_run, metrics, write_lines

from gspo.record import metric_definitions as definitions
from gspo.record.metric_definitions import METRICS, PANELS, PHASES, TIMINGS, Metric, Panel, Reduction, Section
from gspo.view.report import write_report
from gspo.view.terminal import watch_text

DOCS = Path(__file__).parent.parent.parent / "docs"
NEW_PANEL = Panel(id="surprise", section=Section.REWARD, title="Surprise of the reader", what="Made for a test.")
NEW_METRIC = Metric(
    "surprise/mean",
    "Mean surprise, defined in a test.",
    present="step ≥ 1",
    unit="number",
    reduction=Reduction.SUM,
    panels=(NEW_PANEL.id, "signal"),
    label="surprised readers",
    heading="surprise",
)


def report_data(run: Path, folder: Path) -> dict[str, Any]:
    page = write_report([run], folder / "report.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    return dict(json.loads(found[1]))


def generated_page() -> str:
    """docs/metrics.md as `make docs-generate` would write it."""
    spec = importlib.util.spec_from_file_location("generate_docs", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.metrics_page())


def test_a_defined_metric_is_shown_and_documented_without_another_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(definitions, "METRICS", (*METRICS, NEW_METRIC))
    monkeypatch.setattr(definitions, "PANELS", (*PANELS, NEW_PANEL))
    run = make_run(tmp_path / "run")
    write_lines(run / "metrics.jsonl", [metrics(step, surprise__mean=0.25 * step) for step in range(1, 5)])

    data = report_data(run, tmp_path)
    shown = {p["id"]: [c["label"] for c in p["curves"]] for p in data["setup"]["panels"]}
    assert shown[NEW_PANEL.id] == ["surprised readers"]
    assert shown["signal"][-1] == "surprised readers"
    assert data["runs"][0]["curves"]["surprise/mean"]["y"] == [0.25, 0.5, 0.75, 1.0]
    assert {"key": "surprise/mean", "label": "surprise", "form": "number", "hide_zero": False} in (
        data["setup"]["headings"]
    )

    terminal = io.StringIO()
    watch_text([run], Console(file=terminal, width=100, force_terminal=False))
    assert "surprise/mean" in terminal.getvalue()

    row = next(line for line in generated_page().splitlines() if line.startswith("| `surprise/mean` |"))
    assert "Mean surprise, defined in a test." in row
    assert "Training signal; Surprise of the reader: surprised readers" in row


def test_every_panel_and_label_is_in_the_data_of_the_page(tmp_path: Path) -> None:
    setup = report_data(make_run(tmp_path / "run"), tmp_path)["setup"]
    pages = {p["id"]: p for p in (*setup["panels"], setup["phases"])}
    for panel in (*PANELS, PHASES):
        assert pages[panel.id]["title"] == panel.title
        labels = {curve["label"] for curve in pages[panel.id]["curves"]}
        assert labels - {"other"} == {m.label for m in (*METRICS, *TIMINGS) if panel.id in m.panels} != set()
    assert {h["label"] for h in setup["headings"]} == {m.heading for m in (*METRICS, *TIMINGS) if m.heading}


def test_definitions_are_consistent() -> None:
    panels = {panel.id for panel in (*PANELS, PHASES)}
    assert len(panels) == len(PANELS) + 1
    every = (*METRICS, *TIMINGS)
    assert not [key for key, count in Counter(m.key for m in every).items() if count > 1]
    for metric in every:
        assert set(metric.panels) <= panels, f"{metric.key}: panels names one that does not exist"
        assert bool(metric.label) == bool(metric.panels), f"{metric.key}: a label needs a panel, and a panel a label"
        assert set(metric.band or ()) <= {m.key for m in every}, f"{metric.key}: band names an unknown metric"
    for panel in PANELS:
        labels = [m.label for m in METRICS if panel.id in m.panels]
        assert len(labels) == len(set(labels)), f"{panel.title}: two curves with one label"
