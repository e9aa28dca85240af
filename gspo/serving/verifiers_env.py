"""Environments of the package `verifiers` (0.4), brought unchanged: `environment.name = "verifiers"`.

In: problems that name tasks of a taskset, and an engine. Out: conversations as completions. Invariant: every token is
what the engine sampled or what `verifiers` rendered, and log-probs are the engine's. A trace whose renderer rewrites
earlier turns has several branches; all of them are one completion, in which each token occurs once.

The taskset runs in a process of its own (`verifiers_worker.py`), with the Python of `environment.options.python`. It
samples from the run's engine through a server on loopback.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gspo.config import Config, EnvironmentConfig
from gspo.environment.branches import TokenTree
from gspo.environment.engine import ConversationEngine
from gspo.environment.setup import RunEnvironment
from gspo.environment.variables import check_declared, keeps
from gspo.errors import ConfigError, DataError, EngineError
from gspo.model.load import Policy
from gspo.rollout.engine import DecodeStats, Engine, EngineContext, GenerateOptions, stream_key
from gspo.serving import verifiers_worker
from gspo.serving.server import ModelServer
from gspo.types import Completion, Conversation, ConversationEnd, Prompt, Sampling, StopReason, Turn

NAME = "verifiers"
OPTIONS = ("taskset", "python", "renderer", "settings")
UNUSED = ("tool_format", "rewritten_history", "processes", "timeout_s", "patience_s", "memory_mb")
"""Settings of other environments."""
COLUMN = "verifiers"
_MODEL = "policy"
_START_S = 300.0
_GRACE_S = 30.0
"""How much longer than `environment.max_seconds` the process may be silent before it is killed."""
_LIMITS = {
    "max_turns": ConversationEnd.TURNS,
    "max_total_tokens": ConversationEnd.TOKENS,
    "max_output_tokens": ConversationEnd.TOKENS,
    "max_input_tokens": ConversationEnd.TOKENS,
    "agent_timeout": ConversationEnd.TIME,
}
"""Ends of a trace that are limits on the model."""


class _Process:
    """The process of the taskset."""

    def __init__(self, python: str, variables: Collection[str], load: Mapping[str, Any]) -> None:
        self._python = python
        self._variables = variables
        self._load = load
        """The taskset, as `verifiers_worker.py` loads it."""
        self._start()

    def _start(self) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        python, variables = self._python, self._variables
        command = [python, str(Path(verifiers_worker.__file__).absolute())]
        path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                env={name: value for name, value in os.environ.items() if keeps(name, variables)}
                | {"PYTHONPATH": path},
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"environment.options.python: cannot run {python}: {error.strerror}") from None
        self.answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def load(self) -> None:
        """Load the taskset."""
        self.ask(load=self._load)

    def restart(self) -> None:
        """Start again, without what the process was doing."""
        self.close()
        self._start()
        self.load()

    def send(self, **message: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has died, which its answers will say

    def ask(self, limit_s: float = _START_S, **message: Any) -> Any:
        """The answer to a command."""
        self.send(**message)
        try:
            answer = self.answers.get(timeout=limit_s)
        except queue.Empty:
            answer = {"error": f"no answer after {limit_s:g} s"}
        if "error" in answer:
            raise ConfigError(f"environment.options.taskset: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        if self._process.returncode is None:
            # What the taskset has started, too. Before waiting: afterwards the id may be reused.
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=10)
        self.log.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.answers.put(json.loads(line))
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines() or ["nothing"]
        self.answers.put(
            {"ended": True, "error": f"its process ended; the last line that it printed: {lines[-1][:300]}"}
        )


class VerifiersEnvironment(RunEnvironment):
    """Owns the process of the taskset, and the tokenizer that it reads."""

    def __init__(self, config: Config) -> None:
        self._config = config
        options, settings = config.environment.options, config.environment
        self._process: _Process | None = None
        for name in options:
            if name not in OPTIONS:
                raise ConfigError(
                    f"environment.options.{name}: not an option of verifiers; it has {', '.join(OPTIONS)}"
                )
        _check_effects(config)
        check_declared(settings.variables)
        if not isinstance(options.get("taskset"), str):
            raise ConfigError('environment.options.taskset: name the taskset, for example "reverse_text"')
        self._tokenizer = tempfile.TemporaryDirectory(prefix="gspo-tokenizer-")
        agent = {"max_turns": settings.max_turns, "timeout": {"rollout": settings.max_seconds}}
        taskset = {**options.get("settings", {}), "id": options["taskset"]}
        self._process = _Process(
            str(options.get("python") or sys.executable), settings.variables, {"taskset": taskset, "agent": agent}
        )
        try:
            self._process.load()
        except ConfigError as error:
            self.close()
            if "No module named 'verifiers'" in str(error):
                raise ConfigError(
                    "environment.name: verifiers is not installed; pip install 'verifiers>=0.4,<0.5', here or in an "
                    "environment whose Python environment.options.python names"
                ) from None
            raise

    def check_rewards(self) -> None:
        """A taskset has its own."""

    def open(self, prompts: Sequence[Prompt], tokenizer: Any) -> list[Prompt]:
        """The problems, with what their tasks begin with as their prompts."""
        assert self._process is not None
        tokenizer.save_pretrained(self._tokenizer.name)
        for prompt in prompts:
            if not isinstance(prompt.columns.get(COLUMN), Mapping):
                raise DataError(
                    f"problem {prompt.id}: has no field {COLUMN!r}, which names a task; export the taskset with "
                    "python -m gspo.serving.verifiers_worker --export NAME FILE"
                )
        named = [prompt.columns[COLUMN] for prompt in prompts]
        opened = self._process.ask(begin={"tasks": named, **self._rendering})
        return [
            replace(prompt, text=one["text"], token_ids=tuple(one["token_ids"]))
            for prompt, one in zip(prompts, opened, strict=True)
        ]

    def engine(self, engine: Engine, policy: Policy) -> ConversationEngine:
        assert self._process is not None
        return VerifiersEngine(engine, policy, self._process, self._config, self._rendering)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
        self._tokenizer.cleanup()

    @property
    def _rendering(self) -> dict[str, Any]:
        return {"tokenizer": self._tokenizer.name, "renderer": self._config.environment.options.get("renderer")}


def _check_effects(config: Config) -> None:
    """Refuse settings that the taskset would not see."""
    defaults = EnvironmentConfig()
    unused = {f"environment.{name}": getattr(config.environment, name) != getattr(defaults, name) for name in UNUSED}
    unused |= {f"data.{name}": bool(getattr(config.data, name)) for name in ("instruction", "system")}
    for key, given in unused.items():
        if given:
            raise ConfigError(f'{key}: has no effect with environment.name = "verifiers"; leave it out')
    if config.rollout.max_lag:
        raise ConfigError(
            'rollout.max_lag: not supported with environment.name = "verifiers", whose process serves one engine at a '
            "time; set it to 0"
        )
    if config.routing.replay == "sampler":
        raise ConfigError('routing.replay: verifiers does not pass on the experts of a completion; use "old" or "off"')


class VerifiersEngine(ConversationEngine):
    """Samples conversations by running the taskset against a server."""

    def __init__(
        self, engine: Engine, policy: Policy, process: _Process, config: Config, rendering: Mapping[str, Any]
    ) -> None:
        self._engine = engine
        self._policy = policy
        self._process = process
        self._config = config.environment
        self._rendering = rendering
        self._calls = 0
        self._texts = EngineContext(model=None, tokenizer=policy.tokenizer, stop_ids=policy.stop_ids).texts

    @property
    def about(self) -> str:
        taskset = self._config.options["taskset"]
        return " ".join(filter(None, [self._engine.about, f"taskset {taskset} of verifiers answers the model."]))

    @property
    def decoded(self) -> DecodeStats | None:
        return self._engine.decoded

    @property
    def reports_routes(self) -> bool:
        return False

    def play(self, prompts: Sequence[Prompt]) -> list[Completion | None]:
        """A taskset demonstrates nothing."""
        return [None] * len(prompts)

    def generate(self, prompts: Sequence[Prompt], options: GenerateOptions) -> list[list[Completion]]:
        rollouts: list[dict[str, Any]] = []
        self._calls += 1
        sampling = options.sampling
        for prompt in prompts:
            for sample in range(options.samples):
                limited = sampling.greedy if sampling.greedy_last and sample == options.samples - 1 else sampling
                key = stream_key(options.seed, options.stream, prompt.id, sample)
                wanted = {"task": prompt.columns[COLUMN], "sampling": self._wanted(limited, key)}
                rollouts.append({"id": [self._calls, len(rollouts)], **wanted})
        found: dict[int, dict[str, Any]] = {}
        with ModelServer(self._engine, self._policy, name=_MODEL, max_tokens=sampling.max_tokens) as server:
            server.batcher.version = options.version
            access = {"address": server.address, "token": server.token, "model": _MODEL}
            self._process.send(run={"rollouts": rollouts, **access, **self._rendering})
            watch = _Watch(self._config.max_seconds + _GRACE_S)

            def over() -> bool:
                if self._collected(found, len(rollouts)):
                    return True
                if watch.silent((len(found), server.batcher.completions)):
                    self._give_up(found, len(rollouts), f"timeout: it did nothing for {watch.limit_s:g} s")
                return len(found) == len(rollouts)

            server.work(until=over)
        return [
            [self._completion(p, s, found[i * options.samples + s], options) for s in range(options.samples)]
            for i, p in enumerate(prompts)
        ]

    def _wanted(self, sampling: Sampling, key: int) -> dict[str, Any]:
        turn = min(self._config.turn_tokens or sampling.max_tokens, sampling.max_tokens)
        wanted: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": turn}
        wanted |= {"top_k": sampling.top_k, "seed": key}
        return wanted | ({"stop": list(sampling.stop)} if sampling.stop else {})

    def _collected(self, found: dict[int, dict[str, Any]], wanted: int) -> bool:
        """Take the outcomes that have arrived; whether that is all of them."""
        while not self._process.answers.empty():
            answer = self._process.answers.get()
            if answer.get("ended"):
                self._give_up(found, wanted, f"died: {answer['error']}")
            elif "error" in answer:
                raise EngineError(f"environment verifiers: {answer['error']}")
            else:
                call, number = answer["id"]
                if call == self._calls:  # a call that was interrupted may have left some behind
                    found[number] = answer
        return len(found) == wanted

    def _give_up(self, found: dict[int, dict[str, Any]], wanted: int, failure: str) -> None:
        """The rollouts without an outcome have failed, and the next ones get a new process."""
        found |= {number: {"failure": failure} for number in range(wanted) if number not in found}
        self._process.restart()

    def _completion(
        self, prompt: Prompt, sample: int, found: Mapping[str, Any], options: GenerateOptions
    ) -> Completion:
        """An outcome as a completion."""
        most = options.sampling.max_tokens
        failure = found.get("failure")
        tree = TokenTree(prompt.token_ids)
        sampled: list[bool] = []
        logp: list[float] = []
        for branch in found.get("branches", ()):
            ids = branch["token_ids"]
            if tuple(ids[: len(prompt.token_ids)]) != prompt.token_ids:
                failure = "the renderer wrote the beginning of the task otherwise than before"
                break
            new = tree.fork(ids)
            start = len(ids) - new
            sampled += branch["sampled"][start:]
            logp += [value for value, own in zip(branch["logp"][start:], branch["sampled"][start:], strict=True) if own]
        end = _LIMITS.get(found.get("stop", ""), ConversationEnd.DONE)
        ids = tree.token_ids
        if len(ids) > most and failure is None:
            # The last turn may have begun below the limit.
            if tree.branches:
                failure = "its branches together exceed rollout.max_tokens"
            else:
                ids, sampled, end = ids[:most], sampled[:most], ConversationEnd.TOKENS
                logp = logp[: sum(sampled)]
        ended = bool(ids) and ids[-1] in self._policy.stop_ids
        truncated = not ended and (found.get("truncated", True) or len(ids) == most)
        if truncated and end is ConversationEnd.DONE:
            end = ConversationEnd.TOKENS if len(ids) == most else ConversationEnd.TURN_TOKENS
        turns = _turns(sampled, None if failure else found["reward"])
        text = self._texts([ids])[0]
        turns = [replace(turn, text=self._texts([ids[turn.start : turn.end]])[0]) for turn in turns]
        return Completion(
            prompt_id=prompt.id,
            sample=sample,
            token_ids=ids,
            text=text,
            logp_sampler=tuple(logp),
            stop=StopReason.EOS if ended else StopReason.LENGTH if truncated else StopReason.STOP,
            version=options.version,
            sampled=() if all(sampled) else tuple(sampled),
            branches=tree.branches,
            conversation=Conversation(
                turns=tuple(turns),
                end=ConversationEnd.FAILED if failure else end,
                failure=_named(failure) if failure else None,
            ),
        )


class _Watch:
    """Whether nothing has happened for too long. `verifiers` ends a rollout after `environment.max_seconds` itself, but
    not one whose code blocks the process."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._seen: object = None
        self._since = time.monotonic()

    def silent(self, progress: object) -> bool:
        """`progress` differs whenever something has happened."""
        if progress != self._seen:
            self._seen, self._since = progress, time.monotonic()
        return time.monotonic() - self._since > self.limit_s


def _turns(sampled: Sequence[bool], reward: float | None) -> list[Turn]:
    """The runs of sampled tokens. The reward belongs to the last one."""
    bounds = [i for i in range(len(sampled) + 1) if _at(sampled, i) != _at(sampled, i - 1)]
    turns = [Turn(start=start, end=end) for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
    return [*turns[:-1], replace(turns[-1], reward=reward)] if turns else []


def _named(failure: str) -> str:
    """A failure, with its kind in front: the process died, did not answer, or its code raised something."""
    kind, _, what = failure.partition(": ")
    return f"{kind}: environment: {what}" if kind in ("died", "timeout") else f"raised: environment: {failure}"


def _at(sampled: Sequence[bool], i: int) -> bool:
    return 0 <= i < len(sampled) and sampled[i]
