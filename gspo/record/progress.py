"""Progress of a run on the terminal.

In: the metrics and timings of a step. Out: a live panel on a terminal, plain lines anywhere else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gspo.record.metric_definitions import heading
from gspo.safe_output import printed, terminal


class Display(Protocol):
    """Shows the progress of a run."""

    def message(self, text: str) -> None:
        """Show a message that stays visible."""
        ...

    def cold_start(self, step: int, steps: int, loss: float, accuracy: float) -> None:
        """Show the progress of the cold start."""
        ...

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        """Take held-out metrics from before the first step of this process."""
        ...

    def step(self, step: int, steps: int, metrics: Mapping[str, Any], timings: Mapping[str, float]) -> None:
        """Show a finished training step."""
        ...

    def close(self) -> None:
        """Restore the terminal."""
        ...


def make_display() -> Display:
    """A live panel on a terminal or in a notebook, plain lines elsewhere."""
    from gspo.record.notebook import NotebookDisplay, in_notebook

    if in_notebook():
        return NotebookDisplay()
    # In a log file, a live display would leave escape sequences.
    return LiveDisplay() if sys.stdout.isatty() else PlainDisplay()


class RecentValues:
    """The values to show: those of the last step, plus the last evaluation and the pace of the run."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.first: float | None = None
        """The first held-out accuracy."""
        self._started: float | None = None
        self._first_step = 0
        self._last_step = 0

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        found = {k: v for k, v in metrics.items() if k.startswith("eval/") and v is not None}
        self.values |= found
        if self.first is None:
            self.first = found.get("eval/accuracy")

    def update(self, step: int, metrics: Mapping[str, Any], timings: Mapping[str, float]) -> None:
        # After a rollback the pace is measured from there.
        if self._started is None or step <= self._last_step:
            # The first step is already over when it arrives here, so the clock starts before it.
            self._started = time.monotonic() - timings.get("time/step_s", 0.0)
            self._first_step = step - 1
        self._last_step = step
        # An evaluation stays on display until the next one; everything else is of the last step.
        evaluation = {k: v for k, v in self.values.items() if k.startswith("eval/")}
        self.values = evaluation | {k: v for k, v in metrics.items() if v is not None}
        self.evaluated(metrics)
        # With `rollout.max_lag`, the batch was sampled next to training. A step that was resumed may have no such time.
        seconds = timings.get("time/rollout_s") or timings.get("lag/rollout_s")
        self.values["tokens/s"] = metrics.get("tokens/generated", 0) / seconds if seconds else None

    def left(self, step: int, steps: int) -> float:
        """Remaining seconds at the average pace so far."""
        if self._started is None or step <= self._first_step:
            return 0.0
        return (time.monotonic() - self._started) / (step - self._first_step) * max(0, steps - step)

    def _sets(self) -> list[tuple[str, str]]:
        """The accuracy on each evaluation set, and on each source of a mixture."""
        names = [k.split("/")[1] for k in self.values if k.startswith("eval/") and k.count("/") == 2]
        found = {name: self.values.get(f"eval/{name}/accuracy") for name in names}
        return [(name, _share(value)) for name, value in found.items() if value is not None]

    def cells(self) -> list[tuple[str, str]]:
        """Title and text of each value."""
        v = self.values
        held_out = _share(v.get("eval/accuracy"))
        if self.first is not None and self.first != v.get("eval/accuracy"):
            held_out = f"{_share(self.first)} → {held_out}"
        if v.get("eval/accuracy_greedy") is not None:
            held_out += f" (greedy {_share(v['eval/accuracy_greedy'])})"
        unscored = [(heading("samples/unscored"), str(v["samples/unscored"]))] if v.get("samples/unscored") else []
        clipped = (heading("clip/fraction_tokens"), _share(v.get("clip/fraction_tokens")))
        if v.get("samples/trained") == 0:
            clipped = ("trained on", "nothing")
        return [
            (heading("reward/mean"), _number(v.get("reward/mean"), ".3f")),
            (heading("eval/accuracy"), held_out),
            *self._sets(),
            clipped,
            (heading("length/mean"), _number(v.get("length/mean"), ".1f")),
            ("tokens/s", _number(v.get("tokens/s"), ",.0f")),
            *unscored,
        ]


class PlainDisplay:
    """One line per step."""

    def __init__(self) -> None:
        self._recent = RecentValues()

    def message(self, text: str) -> None:
        print(printed(text), flush=True)

    def cold_start(self, step: int, steps: int, loss: float, accuracy: float) -> None:
        print(f"cold start {step}: loss {loss:.3f}, sampled accuracy {accuracy:.0%}", flush=True)

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        self._recent.evaluated(metrics)

    def step(self, step: int, steps: int, metrics: Mapping[str, Any], timings: Mapping[str, float]) -> None:
        self._recent.update(step, metrics, timings)
        cells = "  ".join(f"{name} {text}" for name, text in self._recent.cells())
        print(f"step {step}/{steps}  {cells}  left {duration(self._recent.left(step, steps))}", flush=True)

    def close(self) -> None:
        pass


class LiveDisplay:
    """A progress bar above a table of metrics."""

    def __init__(self) -> None:
        self._console = Console(file=terminal())
        self._recent = RecentValues()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            expand=True,
        )
        self._task: Any = None
        # Not transient: the last numbers stay on the screen when the run ends.
        self._live = Live(console=self._console, refresh_per_second=4, transient=False)

    def message(self, text: str) -> None:
        # Without markup: rich would interpret brackets in a path or an error message as a style.
        self._console.print(printed(text), highlight=False, markup=False)

    def cold_start(self, step: int, steps: int, loss: float, accuracy: float) -> None:
        self._show(
            "cold start",
            step,
            steps,
            f"accuracy {accuracy:.0%}",
            [("loss", f"{loss:.3f}"), ("sampled accuracy", f"{accuracy:.0%}")],
        )

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        self._recent.evaluated(metrics)

    def step(self, step: int, steps: int, metrics: Mapping[str, Any], timings: Mapping[str, float]) -> None:
        self._recent.update(step, metrics, timings)
        self._show("training", step, steps, f"{duration(self._recent.left(step, steps))} left", self._recent.cells())

    def close(self) -> None:
        if self._live.is_started:
            self._live.stop()

    def _show(self, name: str, step: int, steps: int, left: str, cells: list[tuple[str, str]]) -> None:
        # The cold start and training each have a bar of their own, and only one is shown at a time.
        if self._task is None or self._bar.tasks[-1].description != name:
            for task in list(self._bar.task_ids):
                self._bar.remove_task(task)
            self._task = self._bar.add_task(name, total=steps, left="")
        self._bar.update(self._task, completed=step, total=steps, left=left)
        table = Table.grid(padding=(0, 3))
        for _ in cells:
            table.add_column(no_wrap=True)
        table.add_row(*(f"[dim]{title}[/dim]" for title, _ in cells))
        table.add_row(*(f"[bold]{text}[/bold]" for _, text in cells))
        self._live.update(Group(self._bar, table))
        if not self._live.is_started:
            self._live.start()


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def duration(seconds: float) -> str:
    """Minutes and seconds, with hours if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
