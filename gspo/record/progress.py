"""Progress of a run on the terminal.

In: the metrics and timings of a step, and what the process is doing meanwhile (`activity.py`). Out: a live panel on a
terminal, plain lines anywhere else. Invariant: nothing that is shown changes what a run computes or writes.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from gspo.activity import Activity, current
from gspo.record.metric_definitions import heading
from gspo.safe_output import printed, terminal

QUIET_S = 30.0
"""Seconds without output after which a line says what the process is doing, if the output is not a terminal."""


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
    return LiveDisplay().start() if sys.stdout.isatty() else PlainDisplay(quiet_s=QUIET_S)


@contextmanager
def life_signs(quiet_s: float = QUIET_S) -> Iterator[TextIO]:
    """Show on standard error what this process is doing. For commands that print a result, on the stream that this
    gives them."""
    if sys.stderr.isatty():
        # What is printed on the same terminal appears above the line.
        together = sys.stdout.isatty()
        console = Console(file=terminal(sys.stderr))
        with Live(_Doing(), console=console, refresh_per_second=4, transient=True, redirect_stdout=together):
            yield sys.stdout if together else terminal()
        return
    heartbeat = _Heartbeat(quiet_s, lambda text: print(text, file=sys.stderr, flush=True))
    try:
        yield terminal()
    finally:
        heartbeat.stop()


def doing() -> list[str]:
    """What this process is doing, with a line for each thread that says so."""
    return [f"{': '.join(map(_state, path))} ({duration(path[-1].seconds)})" for path in current()]


def _state(one: Activity) -> str:
    """An activity and how far it has come: `sampling, 120/256 completions, 34,112 tokens at 760/s`."""
    parts = [one.name]
    if one.total:
        parts.append(f"{one.done:,}/{one.total:,} {one.unit}".rstrip())
    if one.tokens:
        rate = f" at {one.tokens / one.seconds:,.0f}/s" if one.seconds >= 1 else ""
        parts.append(f"{one.tokens:,} tokens{rate}")
    return ", ".join(parts)


class _Doing:
    """What this process is doing, for a live display that is drawn several times per second."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in doing():
            yield Text(line, style="dim", no_wrap=True, overflow="ellipsis")


class _Heartbeat:
    """A thread that says what the process is doing whenever nothing was printed for a while."""

    def __init__(self, quiet_s: float, say: Callable[[str], None]) -> None:
        self._quiet_s = quiet_s
        self._say = say
        self._printed = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def printed(self) -> None:
        """Something was printed just now."""
        self._printed = time.monotonic()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stopped.wait(max(0.01, self._printed + self._quiet_s - time.monotonic())):
            if time.monotonic() - self._printed >= self._quiet_s:
                self._printed = time.monotonic()
                for line in doing():
                    self._say(f"... {line}")


class RecentValues:
    """The values to show: those of the last step, plus the last evaluation and the pace of the run."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.first: float | None = None
        """The first held-out accuracy."""
        self.first_reward: float | None = None
        self._started: float | None = None
        self._first_step = 0
        self._last_step = 0

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        found = {k: v for k, v in metrics.items() if k.startswith("eval/") and v is not None}
        self.values |= found
        if self.first is None:
            self.first = found.get("eval/accuracy")
            self.first_reward = found.get("eval/reward")

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
        """The accuracy and reward on each evaluation set, and on each source of a mixture."""
        names = [k.split("/")[1] for k in self.values if k.startswith("eval/") and k.count("/") == 2]
        found = {name: self.values.get(f"eval/{name}/accuracy") for name in names}
        rewards = {name: self._reward(f"eval/{name}") for name in found}
        return [
            cell
            for name, value in found.items()
            for cell in ((name, _share(value)), (f"{name} reward", rewards[name]))
            if cell[1] and value is not None
        ]

    def _reward(self, family: str) -> str:
        """The held-out reward with half the width of its interval; empty if it says no more than the accuracy."""
        reward, accuracy = self.values.get(f"{family}/reward"), self.values.get(f"{family}/accuracy")
        if reward is None or reward == accuracy:
            return ""
        low, high = self.values.get(f"{family}/reward_low"), self.values.get(f"{family}/reward_high")
        interval = "" if low is None or high is None else f" ±{(high - low) / 2:.3f}"
        return f"{reward:.3f}{interval}"

    def cells(self) -> list[tuple[str, str]]:
        """Title and text of each value."""
        v = self.values
        held_out = _share(v.get("eval/accuracy"))
        if self.first is not None and self.first != v.get("eval/accuracy"):
            held_out = f"{_share(self.first)} → {held_out}"
        if v.get("eval/accuracy_greedy") is not None:
            held_out += f" (greedy {_share(v['eval/accuracy_greedy'])})"
        held_out_reward = self._reward("eval")
        if held_out_reward and self.first_reward is not None and self.first_reward != v["eval/reward"]:
            held_out_reward = f"{self.first_reward:.3f} → {held_out_reward}"
        unscored = [(heading("samples/unscored"), str(v["samples/unscored"]))] if v.get("samples/unscored") else []
        clipped = (heading("clip/fraction_tokens"), _share(v.get("clip/fraction_tokens")))
        if v.get("samples/trained") == 0:
            clipped = ("trained on", "nothing")
        return [
            (heading("reward/mean"), _number(v.get("reward/mean"), ".3f")),
            (heading("eval/accuracy"), held_out),
            *([(heading("eval/reward"), held_out_reward)] if held_out_reward else []),
            *self._sets(),
            clipped,
            (heading("length/mean"), _number(v.get("length/mean"), ".1f")),
            ("tokens/s", _number(v.get("tokens/s"), ",.0f")),
            *unscored,
        ]


class PlainDisplay:
    """One line per step and, with `quiet_s`, one about the work in progress when nothing was printed for that long."""

    def __init__(self, quiet_s: float | None = None) -> None:
        self._recent = RecentValues()
        self._heartbeat = _Heartbeat(quiet_s, self._print) if quiet_s else None

    def message(self, text: str) -> None:
        self._print(printed(text))

    def cold_start(self, step: int, steps: int, loss: float, accuracy: float) -> None:
        self._print(f"cold start {step}: loss {loss:.3f}, sampled accuracy {accuracy:.0%}")

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        self._recent.evaluated(metrics)

    def step(self, step: int, steps: int, metrics: Mapping[str, Any], timings: Mapping[str, float]) -> None:
        self._recent.update(step, metrics, timings)
        cells = "  ".join(f"{name} {text}" for name, text in self._recent.cells())
        self._print(f"step {step}/{steps}  {cells}  left {duration(self._recent.left(step, steps))}")

    def close(self) -> None:
        if self._heartbeat:
            self._heartbeat.stop()

    def _print(self, text: str) -> None:
        print(text, flush=True)
        if self._heartbeat:
            self._heartbeat.printed()


class LiveDisplay:
    """A progress bar above a table of metrics, and below them what the process is doing."""

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
        self._table: Any = None
        # Not transient: the last numbers stay on the screen when the run ends.
        self._live = Live(self, console=self._console, refresh_per_second=4, transient=False)

    def start(self) -> LiveDisplay:
        """Show the panel before the first step, too: loading a model may take minutes."""
        self._live.start()
        return self

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
        # Without a step there are no numbers to keep, and a panel that stays would leave an empty line.
        self._live.transient = self._table is None
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._table is not None:
            yield Group(self._bar, self._table)
        yield _Doing()

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
        # Not as markup: a message is printed without it, and so is what is live at that moment.
        table.add_row(*(Text(title, style="dim") for title, _ in cells))
        table.add_row(*(Text(text, style="bold") for _, text in cells))
        self._table = table
        self._live.start(refresh=True)
        self._live.refresh()


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def duration(seconds: float) -> str:
    """Minutes and seconds, with hours if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
