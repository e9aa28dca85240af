"""The trainer's side of the sampling process, which samples while the learner trains (`rollout.max_lag`).

In: weights under the number of the training step after which they were taken; calls of `generate` that name one of
them. Out: completions, or an `EngineError` with the last lines that the process has printed. Invariant: completions
come from the weights that the call names, whatever the learner has done since: an answer that names others is a
`WeightSyncError`. Weights travel as a safetensors file in memory, everything else as JSON over pipes, so nothing is
unpickled. Every wait has a deadline. The process ends when its input does, so it never outlives the trainer.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gspo.activity import activity
from gspo.errors import DiskError, EngineError, WeightSyncError
from gspo.ranks.codec import convert, encode
from gspo.ranks.environment import without_launcher
from gspo.rollout.engine import DecodeStats, ExtendOptions, Extension, GenerateOptions
from gspo.types import Completion, Prompt, StopReason

LAST_LINES = 5
"""Lines of the log that an error quotes."""
_SHARED_MEMORY = Path("/dev/shm")
_CURRENT = "current"
"""Name of the weights that `generate` sends by itself."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The answer to a call of `generate`."""

    weights: str
    """Name of the weights that the process held."""
    completions: tuple[tuple[Completion, ...], ...]
    decoded: DecodeStats = field(default_factory=DecodeStats)


class SamplingProcess:
    """Owns the process and the files of its weights. One call at a time uses the process; others wait for it.

    As an `Engine`, it samples from the learner's current weights, which it sends with every call."""

    def __init__(
        self,
        *,
        config: str,
        checkpoint: str,
        log: Path,
        timeout_s: float,
        weights: Callable[[], Mapping[str, Tensor]],
        room: int,
    ) -> None:
        """`config`: the settings of the run as TOML. `checkpoint`: where its model is loaded from; empty for the given
        model. `weights`: the learner's current weights. `room`: bytes of all the weights that are kept at once."""
        self.about = "Sampling runs in a process of its own, at the same time as training."
        self.decoded = DecodeStats()
        self._reports_routes: bool | None = None
        self._log = log
        self._timeout_s = timeout_s
        self._weights = weights
        self._room = room
        self._busy = threading.Lock()
        self._loaded = ""
        self._start = {"command": "build", "config": config, "checkpoint": checkpoint}
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._buffer = b""

    def start(self) -> None:
        """Start the process unless it runs. It loads the model on its own; the first call waits for it."""
        if self._process is not None:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="gspo-weights-", dir=_weights_parent(self._room)))
        self._loaded = ""
        self._buffer = b""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gspo.collection.sampler", str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the trainer, which decides when sampling stops
                env=without_launcher(),  # it is not one of the ranks of the run, if there are several
            )
        for descriptor in _pipes(self._process):
            os.set_blocking(descriptor, False)
        self._send(self._start)

    @property
    def reports_routes(self) -> bool:
        """Known once the process has built its engine."""
        with self._busy:
            self.start()
            while self._reports_routes is None:
                self._answer()
            return self._reports_routes

    @property
    def pid(self) -> int | None:
        """The id of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    # ---- weights

    def publish(self, step: int) -> None:
        """Keep the learner's current weights as those after `step`, for calls that name them."""
        self.keep(step, self._weights())

    def keep(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Keep these weights as those after `step`."""
        self._write(str(step), weights)

    def forget(self, step: int) -> None:
        """Delete the weights after `step`."""
        self._file(str(step)).unlink(missing_ok=True)

    def kept_weights(self, step: int) -> dict[str, Tensor]:
        """The weights after `step`, for a checkpoint."""
        return load_file(self._file(str(step)))

    def _write(self, name: str, weights: Mapping[str, Tensor]) -> None:
        file = self._file(name)
        try:
            save_file({key: tensor.detach().cpu().contiguous() for key, tensor in weights.items()}, file)
        except (OSError, SafetensorError) as error:
            raise DiskError(
                f"{file}: cannot be written: {error}; the sampling process gets its weights there: give it more room "
                "(TMPDIR, or the size of /dev/shm), or lower rollout.max_lag"
            ) from error

    def _file(self, name: str) -> Path:
        if self._folder is None:
            raise EngineError("the sampling process was closed")
        return self._folder / f"{name}.tensors"

    # ---- sampling

    def generate(self, prompts: Sequence[Prompt], options: GenerateOptions) -> list[list[Completion]]:
        """Sample from the learner's current weights, once a call in progress has finished."""
        with self._busy:
            self.start()
            self._write(_CURRENT, self._weights())
            self._loaded = ""
            return self._sample(_CURRENT, _generate(prompts, options), options.samples * len(prompts))

    def after_step(self, step: int) -> WeightsEngine:
        """An engine that samples from the weights after `step`, which must have been published."""
        return WeightsEngine(self, str(step))

    def sample_from(self, name: str, command: Mapping[str, Any], count: int) -> list[list[Completion]]:
        """Sample `count` completions, or a part of them, from the weights of this name."""
        with self._busy:
            return self._sample(name, command, count)

    def _sample(self, name: str, command: Mapping[str, Any], count: int) -> list[list[Completion]]:
        if self._loaded != name:
            self._send({"command": "load", "name": name, "path": str(self._file(name))})
            self._loaded = name
        with activity(f"sampling {count:,} completions in the sampling process"):
            self._send(command)
            while "weights" not in (answer := self._answer()):
                pass  # the answers to `build`, `load` and `end_conversations`
        sampled: Sampled = convert(Sampled, answer)
        if sampled.weights != name:
            raise WeightSyncError(
                f"the sampling process holds the weights of step {sampled.weights}, not those of step {name}"
            )
        self.decoded += sampled.decoded
        return [list(group) for group in sampled.completions]

    # ---- messages

    def _send(self, message: Mapping[str, Any]) -> None:
        pending = memoryview(encode(message) + b"\n")
        until = time.monotonic() + self._timeout_s
        while pending:
            requests, _ = self._open_pipes()
            _, ready, _ = select.select([], [requests], [], min(1.0, self._timeout_s))
            try:
                pending = pending[os.write(requests, pending) :] if ready else pending
            except BrokenPipeError:
                raise self._ended() from None
            self._check_time(until)

    def _answer(self) -> dict[str, Any]:
        until = time.monotonic() + self._timeout_s
        while b"\n" not in self._buffer:
            _, answers = self._open_pipes()
            ready, _, _ = select.select([answers], [], [], min(1.0, self._timeout_s))
            if ready:
                part = os.read(answers, 1 << 20)
                if not part:
                    raise self._ended()
                self._buffer += part
            else:
                self._check_time(until)
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = orjson.loads(line)
        if "error" in answer:
            raise EngineError(f"the sampling process failed: {answer['error']}")
        if "reports_routes" in answer:
            self._reports_routes = answer["reports_routes"]
        return answer

    def _open_pipes(self) -> tuple[int, int]:
        if self._process is None:
            raise EngineError("the sampling process was closed")
        return _pipes(self._process)

    def _check_time(self, until: float) -> None:
        if time.monotonic() > until:
            raise EngineError(
                f"the sampling process has not answered for {self._timeout_s:g} s (rollout.sampler_timeout_s)"
                f"{self._last_lines()}"
            )

    def _ended(self) -> EngineError:
        process = self._process
        if process is None:
            return EngineError("the sampling process was closed")
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=10)
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
        return EngineError(f"the sampling process {how}{self._last_lines()}")

    def _last_lines(self) -> str:
        try:
            text = self._log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        lines = [line for line in text.splitlines() if line.strip()][-LAST_LINES:]
        return (
            f"; its last lines ({self._log}): {' | '.join(lines)}" if lines else f"; it printed nothing ({self._log})"
        )

    # ---- end

    def sync(self, version: int) -> None:
        """Nothing to do: every call sends its weights."""

    def end_conversations(self, conversations: Sequence[str]) -> None:
        with self._busy:
            if self._process is not None:
                self._send({"command": "end_conversations", "conversations": list(conversations)})

    def stop(self) -> None:
        """Kill the process and delete its weights. A call in progress raises. `start` may start another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(timeout=60)
            with self._busy:  # a call in progress reads from the pipes, and ends now
                for pipe in (process.stdin, process.stdout):
                    assert pipe is not None
                    with suppress(OSError):
                        pipe.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        self.stop()


def _pipes(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """The descriptors of its input and output."""
    assert process.stdin
    assert process.stdout
    return process.stdin.fileno(), process.stdout.fileno()


class WeightsEngine:
    """The engine of one batch: samples from the weights after one step. Its version is the caller's to know."""

    def __init__(self, process: SamplingProcess, name: str) -> None:
        self.about = process.about
        self._process = process
        self._name = name

    @property
    def decoded(self) -> DecodeStats:
        return self._process.decoded

    @property
    def reports_routes(self) -> bool:
        return self._process.reports_routes

    def generate(self, prompts: Sequence[Prompt], options: GenerateOptions) -> list[list[Completion]]:
        return self._process.sample_from(self._name, _generate(prompts, options), options.samples * len(prompts))

    def extend(self, extensions: Sequence[Extension], options: ExtendOptions) -> list[list[Completion]]:
        plain = [replace(extension, prompt=extension.prompt.without_columns()) for extension in extensions]
        cut = sum(c.stop is StopReason.CUT for extension in extensions for c in extension.completions)
        command = {"command": "extend", "extensions": plain, "options": options}
        return self._process.sample_from(self._name, command, cut)

    def sync(self, version: int) -> None:
        """Nothing to do: every call names its weights."""

    def end_conversations(self, conversations: Sequence[str]) -> None:
        self._process.end_conversations(conversations)

    def close(self) -> None:
        """The process is not this engine's own."""


def _weights_parent(room: int) -> Path | None:
    """Shared memory if it has that much room, otherwise the directory for temporary files."""
    try:
        free = shutil.disk_usage(_SHARED_MEMORY).free if os.access(_SHARED_MEMORY, os.W_OK) else 0
    except OSError:  # systems other than Linux have no such directory
        free = 0
    return _SHARED_MEMORY if free > 2 * room else None


def _generate(prompts: Sequence[Prompt], options: GenerateOptions) -> dict[str, Any]:
    """The message that asks for completions."""
    plain = [prompt.without_columns() for prompt in prompts]
    return {"command": "generate", "prompts": plain, "options": options}
