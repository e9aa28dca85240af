"""The panels with their metrics, as the dashboard, the report and the terminal take them.

In: `record/metric_definitions.py`, which says what is on a panel and how it is called. Out: panels, phases and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.record import metric_definitions as definitions
from gspo.record.metric_definitions import Metric, Panel


@dataclass(frozen=True, kw_only=True)
class PanelCurves:
    """A panel with the metrics that it shows."""

    panel: Panel
    metrics: Sequence[Metric]

    def as_data(self) -> dict[str, Any]:
        """The panel as the page's script takes it."""
        panel = self.panel
        return {
            "id": panel.id,
            "section": panel.section,
            "title": panel.title,
            "what": panel.what,
            "form": panel.form,
            "log": panel.log,
            "hide_zero": panel.hide_zero,
            "curves": [
                {"key": m.key, "label": m.label, "band": m.band, "every_step": m.every_step} for m in self.metrics
            ],
        }


def panels() -> list[PanelCurves]:
    """All panels of curves, in order."""
    # Computed at each call, so that a definition that is added later is shown, too.
    return [PanelCurves(panel=p, metrics=tuple(definitions.metrics_of(p))) for p in definitions.PANELS]


def phases() -> PanelCurves:
    """The panel with the phases of a step."""
    return PanelCurves(panel=definitions.PHASES, metrics=tuple(definitions.metrics_of(definitions.PHASES)))


def panel_keys(columns: Collection[str], equal: Callable[[str, str], bool] = lambda *_: False) -> list[str]:
    """Those of the columns that appear on a panel of curves, without those that are `equal` to what they repeat."""
    found = [m for shown in panels() for one in shown.metrics for m in definitions.named(one, columns)]
    metrics = [m for m in found if not {m.key, m.same_as} <= set(columns) or not equal(m.key, m.same_as)]
    return [key for key in dict.fromkeys(k for m in metrics for k in (m.key, *(m.band or ()))) if key in columns]


def step_headings() -> list[dict[str, Any]]:
    """What the page's line about one step shows."""
    hidden = {p.id for p in definitions.PANELS if p.hide_zero}
    return [
        {"key": m.key, "label": m.heading, "form": m.form, "hide_zero": bool(m.panels) and set(m.panels) <= hidden}
        for m in definitions.headed()
    ]
