"""`gspo.Run`: a run directory as a Python object.

In: a directory that a run has written, or is writing. Out: its settings, metrics, completions, curves and findings, and
what can be done with its model. Invariant: the directory is only read, by the same readers as those of the commands.
"""

from __future__ import annotations

import html
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo.config import Config, from_tree, read_toml
from gspo.errors import ConfigError
from gspo.record import run_format
from gspo.record.run_dir import read_events, read_jsonl, read_metrics

if TYPE_CHECKING:
    import pandas

    from gspo.api.evaluation import EvaluationResult
    from gspo.api.studies import ReplayResult
    from gspo.trainer import Outcome

SHOWN = ("prompt", "text", "reward", "correct", "advantage", "stop", "status", "failure")
"""Fields of a completion that come first in a table."""


class Run:
    """A run: `gspo.train` returns one, and `gspo.Run(path)` opens an existing one, also while it is training."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        outcome: Outcome | None = None,
        rewards: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.path = Path(path)
        """The run directory."""
        if not (self.path / "config.toml").is_file():
            raise ConfigError(f"{path}: not a run directory (no config.toml); give the directory of a run")
        run_format.read(self.path)
        self.outcome = outcome
        """How `gspo.train` ended; None for a run that was opened."""
        self._rewards = dict(rewards or {})

    # ---- what the run has recorded

    @cached_property
    def config(self) -> Config:
        """All settings of the run."""
        file = self.path / "config.toml"
        return from_tree(read_toml(file), where=str(file))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The metrics and timings of every step as dicts; step 0 is the evaluation before training."""
        timings = {row.get("step"): row for row in read_jsonl(self.path / "timings.jsonl")}
        return [{**row, **timings.get(row.get("step"), {})} for row in read_metrics(self.path)]

    @property
    def metrics(self) -> pandas.DataFrame:
        """The metrics and timings as a pandas table with a line per step (docs/metrics.md)."""
        rows = self.rows
        table = _pandas("run.metrics", "run.rows")
        return table.DataFrame(rows, columns=list(dict.fromkeys(["step", *_columns(rows)]))).set_index("step")

    @property
    def step(self) -> int:
        """The last step in the metrics; 0 before the first."""
        rows = read_metrics(self.path)
        return int(rows[-1].get("step", 0)) if rows else 0

    @property
    def state(self) -> str:
        """`running`, `finished`, `stopped`, `failed`, `ended` (exited unexpectedly) or `gone`."""
        return str(self._reader().state)

    @property
    def events(self) -> list[dict[str, Any]]:
        """What happened: start, resume, warnings, checkpoints, stop."""
        return read_events(self.path)

    @property
    def findings(self) -> list[str]:
        """What the diagnosis of the run page says about the run, one sentence each."""
        return [finding.what for finding in self._reader().findings()]

    @property
    def steps_with_completions(self) -> list[int]:
        """The steps whose completions were recorded (`log.rollouts`)."""
        from gspo.view.completions import Completions

        return Completions(self.path).steps()

    def completions(self, step: int | None = None, *, tokens: bool = False) -> pandas.DataFrame:
        """The completions of a step, by default the last one, as a pandas table with a line per completion. `tokens`
        keeps the lists of token ids and log-probs."""
        from gspo.view.completions import Completions

        reader = Completions(self.path)
        steps = reader.steps()
        chosen = (steps[-1] if steps else 0) if step is None else step
        if chosen not in steps:
            known = f"{steps[0]} to {steps[-1]}" if steps else "none (log.rollouts)"
            raise ConfigError(f"{self.path}: no completions of step {chosen}; recorded are those of steps {known}")
        records = [dict(record) for record in reader.of(chosen)]
        if not tokens:
            lists = {key for record in records for key, value in record.items() if isinstance(value, list)}
            records = [{k: v for k, v in record.items() if k not in lists} for record in records]
        columns = _columns(records)
        first = [name for name in SHOWN if name in columns]
        table = _pandas("run.completions()", "the files in rollouts/").DataFrame(records)
        return table[[*first, *(name for name in columns if name not in first)]]

    def plot(self, *metrics: str) -> Any:
        """The curves as a figure of matplotlib: the panels of the run, or only these metrics."""
        from gspo.api.curves import figure

        return figure(self.path, metrics)

    # ---- what can be done with it

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints, oldest first. Each is a directory that transformers and vLLM load."""
        from gspo.learner import checkpoint

        return list(checkpoint.saved(self.path / "checkpoints"))

    def load(self, checkpoint: str = "newest", **options: Any) -> tuple[Any, Any]:
        """The trained model and its tokenizer, as transformers load them (with peft if the run trained adapters).
        `checkpoint` is `newest`, `best` or a step; `options` go to `from_pretrained`."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = self._checkpoint(checkpoint)
        loader: Any = AutoModelForCausalLM
        if (folder / "adapter_config.json").is_file():
            from peft import AutoPeftModelForCausalLM as loader
        return loader.from_pretrained(folder, **options), AutoTokenizer.from_pretrained(folder)

    def evaluate(self, data: Any = None, **options: Any) -> EvaluationResult:
        """pass@k and avg@k of the newest checkpoint, by default on the held-out problems of the run. The arguments are
        those of `gspo.evaluate`."""
        from gspo.api.evaluation import evaluate

        if options.get("suite") is None:
            options.setdefault("rewards", list(self._rewards.values()) or None)
        return evaluate(self.path, data, **options)

    def replay(self, step: int | None = None, **options: Any) -> ReplayResult:
        """What every objective would have done on a recorded step; see `gspo.replay`."""
        from gspo.api.studies import replay

        return replay(self.path, step, **options)

    def report(self, out: str | os.PathLike[str] = "report.html") -> Path:
        """Write a self-contained HTML report."""
        from gspo.view.report import write_report

        return write_report([self.path], Path(out))

    def save(self, path: str | os.PathLike[str], *, merge: bool = False, checkpoint: str | int = "newest") -> Path:
        """Write the model of a checkpoint to a new directory that transformers and vLLM load. `merge` merges a LoRA
        adapter into its base model."""
        from gspo.commands.command import quiet_libraries
        from gspo.commands.save import save

        quiet_libraries()
        return save(str(self.path), os.fspath(path), which=str(checkpoint), merge=merge)[1]

    def push(
        self,
        name: str,
        *,
        private: bool = True,
        merge: bool = False,
        checkpoint: str | int = "newest",
        revision: str | None = None,
    ) -> str:
        """Upload the model to the Hugging Face Hub as `OWNER/MODEL`, with a model card made from the run. Returns the
        address. A new repository is private by default; an existing one keeps its visibility."""
        from gspo.commands.command import quiet_libraries
        from gspo.commands.push import push

        quiet_libraries()
        return push(str(self.path), name, which=str(checkpoint), merge=merge, private=private, revision=revision)

    # ---- for people

    def __repr__(self) -> str:
        return f"gspo.Run({str(self.path)!r}): {self._summary()}"

    def _repr_html_(self) -> str:
        from gspo.record.notebook import curves_html

        return (
            f"<div><b>{html.escape(str(self.path))}</b>: {html.escape(self._summary())}{curves_html(self.rows)}</div>"
        )

    def _summary(self) -> str:
        rows = read_metrics(self.path)
        parts = [f"{self.state} at step {self.step} of {self.config.steps}", f"objective {self.config.objective.name}"]
        rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
        if rewards:
            parts.append(f"mean reward {rewards[0]:.3f} → {rewards[-1]:.3f}")
        accuracies = [row["eval/accuracy"] for row in rows if row.get("eval/accuracy") is not None]
        if accuracies:
            parts.append(f"held-out accuracy {accuracies[0]:.1%} → {accuracies[-1]:.1%}")
        return ", ".join(parts)

    def _reader(self) -> Any:
        from gspo.view.run_reader import RunReader

        reader = RunReader(self.path)
        reader.refresh()
        return reader

    def _checkpoint(self, which: str) -> Path:
        from gspo.commands.arguments import checkpoint_of

        found = checkpoint_of(self.path, str(which))
        if found is None:
            raise ConfigError(f"{self.path}: the run has no checkpoint yet")
        return found


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every key, in the order in which they first appear."""
    return list(dict.fromkeys(key for row in rows for key in row))


def _pandas(what: str, otherwise: str) -> Any:
    try:
        return importlib.import_module("pandas")
    except ImportError:
        raise ConfigError(f"{what} needs pandas; install it (pip install pandas), or use {otherwise}") from None
