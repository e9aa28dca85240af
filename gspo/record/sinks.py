"""Log metrics to TensorBoard, Weights & Biases or trackio, in addition to the run directory.

In: the metrics of a step. Out: nothing that training depends on. Invariant: a sink that cannot start is an error before
anything expensive runs. A sink that fails later is disabled with a message, and the run continues.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gspo.errors import ConfigError


class Sink(Protocol):
    """A destination for metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class TensorBoardSink:
    """Event files in `RUN/tensorboard`."""

    def __init__(self, name: str, run: Path, settings: Mapping[str, Any]) -> None:
        del name, settings
        module = _import("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(str(run / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        # A killed run would otherwise lose the last minutes.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class ModuleSink:
    """A module with the Weights & Biases interface, which trackio shares."""

    module = "wandb"

    def __init__(self, name: str, run: Path, settings: Mapping[str, Any]) -> None:
        self._module = _import(self.module, self.module)
        # trackio has no such option.
        options = {"dir": str(run)} if self.module == "wandb" else {}
        self._module.init(project="gspo", name=f"{name}-{run.name}", config=dict(settings), **options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._module.log(dict(values), step=step)

    def close(self) -> None:
        self._module.finish()


class TrackioSink(ModuleSink):
    """trackio, which keeps its own local database."""

    module = "trackio"


SINKS: dict[str, Callable[[str, Path, Mapping[str, Any]], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": ModuleSink,
    "trackio": TrackioSink,
}


class Sinks:
    """All sinks of a run."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        name: str,
        run: Path,
        settings: Mapping[str, Any],
        complain: Callable[[str], None],
    ) -> None:
        self._open: dict[str, Sink] = {sink: SINKS[sink](name, run, settings) for sink in names}
        self._complain = complain

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Send the numeric values to every sink."""
        # A metric that could not be measured is None, which no sink accepts.
        numbers = {k: float(v) for k, v in values.items() if isinstance(v, int | float) and k != "step"}
        # A copy of the names, because a sink that fails is removed while this runs.
        for name in list(self._open):
            self._try(name, lambda sink: sink.log(step, numbers))

    def close(self) -> None:
        """Close every sink."""
        for name in list(self._open):
            self._try(name, lambda sink: sink.close())
        self._open.clear()

    def _try(self, name: str, action: Callable[[Sink], None]) -> None:
        try:
            action(self._open[name])
        # A third-party logger may raise anything (a lost connection, an expired login), and no step may fail for it.
        except Exception as error:
            del self._open[name]
            self._complain(f"log sink {name} failed and is disabled for this run: {error}")


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"log.sinks: {package} is not installed; run: pip install {package}") from None
