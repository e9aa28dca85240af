"""Evaluation harnesses that measure a served model: which program, which arguments, and what it found.

In: the address of a model server, and tasks. Out: the command to run, and later the numbers in the files that it wrote.
Invariant: the token of the server is passed in the environment, so no process list and no file has it. A harness is the
user's own installation; nothing of it is imported here.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError, EngineError

CONCURRENT = 64
"""Requests at a time, which the server samples together."""
_PATIENCE_S = 86400
"""How long a harness waits for a response: a round of long completions on a CPU may take hours."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A served model, as a harness needs it."""

    address: str
    """The base URL of OpenAI's API."""
    token: str
    name: str
    """The model's name in requests."""
    tokenizer: str
    """What transformers loads its tokenizer from."""
    positions: int | None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A number that a harness found."""

    task: str
    metric: str
    value: float
    stderr: float | None = None


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What the files of a harness say."""

    version: str
    measurements: tuple[Measurement, ...]


@dataclass(frozen=True, kw_only=True)
class Harness:
    """An evaluation harness."""

    program: str
    install: str
    """How to install it."""
    arguments: Callable[[Endpoint, Sequence[str], int | None, Path], list[str]]
    """Its arguments, from the endpoint, the tasks, the limit on problems and the folder for its files."""
    environment: Callable[[Endpoint], dict[str, str]]
    read: Callable[[Path], Findings]
    """Reads what it has written into that folder."""

    def find(self, name: str, given: str | None) -> str:
        """The path of its program: the one that was given, the one in this environment, or the one on PATH."""
        installed = Path(sys.executable).parent / self.program
        own = str(installed) if installed.is_file() else shutil.which(self.program)
        found = shutil.which(given) if given else own
        if found:
            return found
        if given:
            raise ConfigError(f"--harness-command: {given}: no such program")
        raise ConfigError(
            f"--harness: {name} is not installed here (no program {self.program!r}); install it with {self.install}, "
            "here or in an environment of its own, which --harness-command then names"
        )


def _lm_eval_arguments(endpoint: Endpoint, tasks: Sequence[str], limit: int | None, folder: Path) -> list[str]:
    model = {
        "model": endpoint.name,
        "base_url": f"{endpoint.address}/completions",
        # Texts become tokens on its side, so that it knows where a choice begins.
        "tokenizer_backend": "huggingface",
        "tokenizer": endpoint.tokenizer,
        "num_concurrent": CONCURRENT,
        "timeout": _PATIENCE_S,
        "max_length": endpoint.positions or 2**15,
    }
    for key, value in model.items():
        if "," in str(value) or "=" in str(value):
            raise ConfigError(f"--harness: lm-eval cannot read {key} = {value!r}; use a path without ',' and '='")
    given = ",".join(f"{key}={value}" for key, value in model.items())
    found = ["--model", "local-completions", "--model_args", given, "--tasks", ",".join(tasks)]
    found += ["--output_path", str(folder), "--log_samples"]
    return found if limit is None else [*found, "--limit", str(limit)]


def _read_lm_eval(folder: Path) -> Findings:
    """The newest `results_TIME.json`."""
    files = sorted(folder.rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    data = _json(files[-1]) if files else {}
    found = []
    for task, metrics in data.get("results", {}).items():
        for name, value in metrics.items():
            metric, _, variant = name.partition(",")
            if metric.endswith("_stderr") or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            stderr = metrics.get(f"{metric}_stderr,{variant}")
            shown = metric if variant in ("", "none") else f"{metric} ({variant})"
            found.append(Measurement(task=task, metric=shown, value=float(value), stderr=_number(stderr)))
    found = [one for one in found if one.metric not in ("sample_len", "alias")]
    return Findings(version=str(data.get("lm_eval_version", "")), measurements=tuple(found))


def _inspect_arguments(endpoint: Endpoint, tasks: Sequence[str], limit: int | None, folder: Path) -> list[str]:
    found = ["eval", *tasks, "--model", f"openai-api/gspo/{endpoint.name}", "--log-dir", str(folder)]
    found += ["--log-format", "json", "--display", "plain", "--max-connections", str(CONCURRENT)]
    found += ["--timeout", str(_PATIENCE_S)]
    return found if limit is None else [*found, "--limit", str(limit)]


def _read_inspect(folder: Path) -> Findings:
    """Its logs, one for each task."""
    version, found = "", []
    for file in sorted(folder.glob("*.json")):
        data = _json(file)
        header = data.get("eval", {})
        if not header:
            continue
        version = str(header.get("packages", {}).get("inspect_ai", version))
        if data.get("status") != "success":
            message = str((data.get("error") or {}).get("message", ""))
            raise EngineError(f"inspect: task {header.get('task')} ended with {data.get('status')}: {message:.300}")
        for score in (data.get("results") or {}).get("scores", []):
            metrics = {name: _number(metric.get("value")) for name, metric in score.get("metrics", {}).items()}
            for name, value in metrics.items():
                if value is not None and name not in ("stderr", "std", "var"):
                    shown = f"{score['name']} {name}"
                    stderr = metrics.get("stderr")
                    found.append(Measurement(task=header["task"], metric=shown, value=value, stderr=stderr))
    return Findings(version=version, measurements=tuple(found))


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


HARNESSES: Mapping[str, Harness] = {
    "lm-eval": Harness(
        program="lm_eval",
        install="pip install 'lm-eval[api]' transformers",
        arguments=_lm_eval_arguments,
        environment=lambda endpoint: {"OPENAI_API_KEY": endpoint.token},
        read=_read_lm_eval,
    ),
    "inspect": Harness(
        program="inspect",
        install="pip install inspect-ai openai",
        arguments=_inspect_arguments,
        # The names follow from that of the provider in `openai-api/gspo/...`.
        environment=lambda endpoint: {"GSPO_API_KEY": endpoint.token, "GSPO_BASE_URL": endpoint.address},
        read=_read_inspect,
    ),
}
