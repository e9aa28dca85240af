"""`gspo eval --harness`: a harness of somebody else measures a model or run through a server on loopback.

In: a model, and what the harness is to do. Out: its numbers, printed and in files. Invariant: the model is served while
the harness runs and no longer. The harness ends with this process, except if it is killed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from gspo.commands.command import quiet_libraries
from gspo.errors import ConfigError, EngineError
from gspo.record.run_dir import replace_text
from gspo.redact import known_secrets, redacted, redacted_values
from gspo.serving.harness import HARNESSES, Endpoint, Findings, Harness
from gspo.signals import exit_process

_LOG = "output.log"
_RESULT = "result.json"


def add_harness_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `--harness`."""
    group = parser.add_argument_group("evaluation harnesses")
    group.add_argument(
        "--harness",
        choices=sorted(HARNESSES),
        help="serve the model on loopback, and let this harness measure it; it must be installed",
    )
    group.add_argument("--tasks", help="the harness's tasks, separated by commas (with --harness)")
    group.add_argument(
        "--harness-args",
        metavar="ARGS",
        default="",
        help='further arguments for the harness, in one text: --harness-args="--num_fewshot 5"',
    )
    group.add_argument(
        "--harness-command", metavar="PATH", help="the harness's program, if it is in another environment"
    )
    group.add_argument(
        "--harness-dir",
        metavar="DIR",
        help="directory for the harness's files (default for a run: RUN/harness/NAME-TIME; for a model: not kept)",
    )


def check_no_harness(options: argparse.Namespace) -> None:
    """Refuse options that only a harness uses."""
    for name in ("tasks", "harness_args", "harness_command", "harness_dir"):
        if getattr(options, name):
            raise ConfigError(f"--{name.replace('_', '-')}: has no effect without --harness; leave it out")


def run_harness(options: argparse.Namespace, overrides: list[str], *, unused: dict[str, Any]) -> int:
    """Measure a model with a harness. `unused` are options that do not apply, with their defaults."""
    _check_unused(options, unused)
    harness = HARNESSES[options.harness]
    program = harness.find(options.harness, options.harness_command)
    tasks = [task for task in (options.tasks or "").split(",") if task]
    if not tasks:
        raise ConfigError(f"--tasks: name the tasks of {options.harness}, separated by commas")
    if options.json and not Path(options.json).parent.is_dir():
        raise ConfigError(f"--json: {Path(options.json).parent}: no such directory")
    more = shlex.split(options.harness_args)
    quiet_libraries()
    from gspo.commands.served_model import open_model
    from gspo.serving.server import ModelServer

    with ExitStack() as stack:
        served = open_model(
            options.model,
            checkpoint=options.checkpoint,
            overrides=overrides,
            trust_run=options.trust_run,
            stack=stack,
        )
        folder = _folder(options, stack)
        path = served.config.model.path
        name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(options.model).name) or "model"
        limit = served.config.rollout.max_tokens
        server = stack.enter_context(ModelServer(served.engine, served.policy, name=name, max_tokens=limit))
        endpoint = Endpoint(
            address=server.address,
            token=server.token,
            name=name,
            tokenizer=str(Path(path).resolve()) if Path(path).exists() else path,
            positions=served.policy.position_limit,
        )
        arguments = [*harness.arguments(endpoint, tasks, options.limit, folder), *more]
        print(f"{path}: {options.harness} measures {', '.join(tasks)}", flush=True)
        started, since = datetime.now().astimezone(), time.monotonic()
        code = _run([program, *arguments], harness.environment(endpoint), server, folder / _LOG)
        if code:
            raise EngineError(_failure(options.harness, code, folder / _LOG, kept=_is_kept(options)))
        findings = _findings(harness, options.harness, folder)
        result = {
            "harness": options.harness,
            "version": findings.version,
            "model": path,
            "tasks": tasks,
            "limit": options.limit,
            "arguments": more,
            "settings": [override.removeprefix("--") for override in overrides],
            "started": started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - since, 1),
            "completions": server.batcher.completions,
            "results": [asdict(one) for one in findings.measurements],
        }
        # What was given as an argument may hold a key, such as that of a model that grades.
        text = json.dumps(redacted_values(result, known_secrets(), by_name=False), indent=2) + "\n"
        replace_text(folder / _RESULT, text)
        if options.json:
            replace_text(Path(options.json), text)
    _print_measurements(findings)
    if _is_kept(options):
        print(f"Files: {folder}")
    return 0


def _check_unused(options: argparse.Namespace, unused: dict[str, Any]) -> None:
    for name, default in unused.items():
        if getattr(options, name) != default:
            raise ConfigError(
                f"--{name.replace('_', '-')}: has no effect with --harness, whose tasks have their own problems and "
                "settings; leave it out, or use --harness-args"
            )


def _print_measurements(findings: Findings) -> None:
    for one in findings.measurements:
        error = "" if one.stderr is None else f" ± {one.stderr:.4f}"
        print(f"  {one.task:<24} {one.metric:<32} {one.value:.4f}{error}")


def _is_run(options: argparse.Namespace) -> bool:
    return (Path(options.model) / "config.toml").is_file()


def _is_kept(options: argparse.Namespace) -> bool:
    return bool(options.harness_dir) or _is_run(options)


def _folder(options: argparse.Namespace, stack: ExitStack) -> Path:
    """The directory for the harness's files."""
    if options.harness_dir:
        folder = Path(options.harness_dir)
    elif _is_run(options):
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = Path(options.model) / "harness" / f"{options.harness}-{stamp}"
    else:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gspo-harness-")))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"--harness-dir: {folder} is not empty; choose another")
    return folder.resolve()


def _run(command: list[str], more: dict[str, str], server: Any, log: Path) -> int:
    """Run the harness while this thread samples for it; its exit code."""
    secrets = [server.token, *known_secrets()]
    before = signal.signal(signal.SIGTERM, exit_process)
    process = subprocess.Popen(
        command,
        env=dict(os.environ) | {"PYTHONUNBUFFERED": "1"} | more,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    copier = threading.Thread(target=_copy, args=(process.stdout, log, secrets), daemon=True)
    copier.start()
    try:
        server.work(until=lambda: process.poll() is not None)
        copier.join(timeout=10)  # a process that it left behind may hold the pipe
        return process.returncode
    finally:
        signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def _copy(out: IO[bytes] | None, log: Path, secrets: Sequence[str]) -> None:
    """Show what the harness prints, and keep it, without secrets."""
    assert out is not None
    with log.open("w", encoding="utf-8", newline="") as kept:
        for line in iter(out.readline, b""):
            text = redacted(line.decode(errors="replace"), secrets)
            kept.write(text)
            kept.flush()
            # A progress bar draws the same line many times.
            print(text.rstrip("\r\n").rpartition("\r")[2], file=sys.stderr, flush=True)


def _findings(harness: Harness, name: str, folder: Path) -> Findings:
    findings = harness.read(folder)
    if not findings.measurements:
        raise EngineError(f"{name} has ended without results; see {folder / _LOG}")
    return findings


def _failure(name: str, code: int, log: Path, *, kept: bool) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1][:300] if lines else "nothing"
    return f"{name} ended with exit code {code}; its last line: {last}" + (f" (all of it: {log})" if kept else "")
