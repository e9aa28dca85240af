"""Starting `vllm serve` as the vLLM engine needs it: `gspo serve MODEL`, and the servers that a run starts itself.

In: a model and vLLM's settings. Out: a server. Invariant: a server listens on the loopback interface by default, every
path requires the token, and the token appears in no command line and no log.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from gspo.errors import ConfigError, EngineError
from gspo.network.loopback import access_token
from gspo.ranks.environment import free_port, without_launcher
from gspo.rollout.vllm.guard import PARENT, TOKEN
from gspo.rollout.vllm.http import Client, Fault

EXTENSION = "gspo.rollout.vllm.worker.WorkerExtension"
GUARD = "gspo.rollout.vllm.guard.Guard"


def command(model: str, *, host: str, port: int, experts: bool, more: Sequence[str] = ()) -> list[str]:
    """The command line of a server; with `experts` it can report the experts of a completion."""
    expert_options = ["--enable-return-routed-experts"] if torch.cuda.is_available() else ["--no-enable-prefix-caching"]
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        model,
        "--host",
        host,
        "--port",
        str(port),
        "--enable-scale-out",
        "--logprobs-mode",
        "processed_logprobs",
        "--generation-config",
        "vllm",
        "--skip-tokenizer-init",
        "--weight-transfer-config",
        json.dumps({"backend": "gspo"}),
        "--worker-extension-cls",
        EXTENSION,
        "--middleware",
        GUARD,
        "--disable-uvicorn-access-log",
        *(expert_options if experts else ()),
        *more,
    ]


def environment(token: str, own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a server: the token, and permission to change weights."""
    # vLLM has process groups of its own. It must not take this process for one of their ranks.
    env = without_launcher(own)
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # an in-process engine of this process may have set it
    for name, value in {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}.items():
        env.setdefault(name, value)
    # vLLM offers the paths that change weights and adapters only with these.
    return env | {TOKEN: token, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def as_arguments(settings: Mapping[str, Any]) -> list[str]:
    """vLLM's settings as command-line arguments."""
    arguments: list[str] = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            arguments.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list) and all(isinstance(v, str) for v in value):
            arguments += [flag, *value]
        else:
            arguments += [flag, json.dumps(value) if isinstance(value, Mapping | list) else str(value)]
    return arguments


class Process:
    """A server that the run starts and stops, with all of its children."""

    def __init__(self, model: str, *, log: Path, experts: bool, more: Sequence[str]) -> None:
        self.model = model
        self.log = log
        self.experts = experts
        self.more = more
        self.token = secrets.token_urlsafe(32)
        self.address = ""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start or restart it, on a free port."""
        self.stop()
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        argv = command(self.model, host="127.0.0.1", port=port, experts=self.experts, more=self.more)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                argv,
                env=environment(self.token) | {PARENT: str(os.getpid())},
                stdout=log,
                stderr=log,
                # A group of its own: Ctrl-C must stop the learner first, which saves and then stops its servers.
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def wait_ready(self, limit_s: float) -> None:
        """Wait until it responds; `EngineError` with the end of its log if it does not."""
        client = Client(self.address, self.token)
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            if not self.running:
                break
            with suppress(Fault):
                client.get("/health", timeout_s=5)
                return
            time.sleep(0.3)
        self.stop()
        last = self.log.read_text(errors="replace").strip().splitlines()[-1:] or ["nothing"]
        raise EngineError(
            f"a vLLM server did not start within {limit_s:.0f} s; its log ({self.log}) ends: {last[0][:300]}"
        )

    def stop(self) -> None:
        """Stop it and its children."""
        if self.process is None:
            return
        # SIGTERM first, so that vLLM can clean up.
        for number, wait_s in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(wait_s)
                # The server itself is gone; children that ignored SIGTERM may still run.
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                break
        self.process = None


def _defaults(model: str, given: Sequence[str]) -> list[str]:
    """Dummy weights, because a run sends its own, and the model's own dtype: vLLM would run a float32 model in 16
    bits."""
    found = [] if any(g.startswith("--load-format") for g in given) else ["--load-format", "dummy"]
    with suppress(OSError, ValueError, KeyError):
        config = json.loads((Path(model) / "config.json").read_text())
        dtype = str(config.get("dtype") or config["torch_dtype"])
        found += [] if any(g.startswith("--dtype") for g in given) else ["--dtype", dtype]
    return found


def serve(model: str, *, host: str, port: int, experts: bool, token_file: str | None, more: Sequence[str]) -> NoReturn:
    """Replace this process with a server in the foreground."""
    import importlib.util

    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("serve: vLLM is not installed here; docs/engines.md says how to install it")
    for flag in (
        "--logprobs-mode",
        "--generation-config",
        "--middleware",
        "--worker-extension-cls",
        "--weight-transfer-config",
    ):
        if any(given.replace("_", "-").split("=")[0] == flag for given in more):
            raise ConfigError(f"serve: {flag} is set by gspo, so that a run can trust the server; remove it")
    port = port or free_port(host)
    token, where, _ = access_token(TOKEN, Path(token_file or f"gspo-serve-{port}.token"))
    print(f"vLLM at {host}:{port}; {where}. Put this into the recipe:", flush=True)
    print(f'  rollout.engine = "vllm"\n  rollout.engine_options.servers = ["{host}:{port}"]', flush=True)
    argv = command(model, host=host, port=port, experts=experts, more=[*_defaults(model, more), *more])
    os.execve(argv[0], argv, environment(token))  # replaces this process, so that signals reach vLLM itself
