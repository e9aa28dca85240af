"""`gspo serve`: a model for other programs (`--openai`), or a vLLM server that training runs can sample from."""

from __future__ import annotations

import argparse
import signal
from contextlib import ExitStack
from pathlib import Path

from gspo.commands.arguments import add_checkpoint, add_trust_run
from gspo.commands.command import Command, quiet_libraries
from gspo.errors import ConfigError

TOKEN = "GSPO_SERVE_TOKEN"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        help="model directory or hub name. With --openai also a run directory or a .gguf file. Without it, only the "
        "model's config is used, because a run sends its own weights",
    )
    add(
        "--openai",
        action="store_true",
        help="serve this model's own weights to any program: OpenAI's API and /inference/v1/generate, sampled by the "
        "local engine (without --openai: a vLLM server without weights, for training runs)",
    )
    add("--port", type=int, default=0, help="port (default: any free port)")
    add(
        "--token-file",
        metavar="FILE",
        help="file for the access token, unless GSPO_SERVE_TOKEN is set (default: gspo-serve-PORT.token)",
    )
    served = parser.add_argument_group("with --openai")
    served.add_argument("--served-name", metavar="NAME", help="the model's name in requests (default: MODEL)")
    add_checkpoint(served)
    add_trust_run(served)
    vllm = parser.add_argument_group("without --openai")
    vllm.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1); the connection is not encrypted, "
        "so use another address only in a private network",
    )
    vllm.add_argument(
        "--experts",
        action="store_true",
        help='report which experts of an MoE model each token used (routing.replay = "sampler"); '
        "disables the prefix cache",
    )


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    if options.openai:
        return _serve_model(options, overrides)
    for name in ("served_name", "trust_run"):
        if getattr(options, name):
            raise ConfigError(f"--{name.replace('_', '-')}: has no effect without --openai; leave it out")
    if options.checkpoint != "newest":
        raise ConfigError("--checkpoint: has no effect without --openai; leave it out")
    from gspo.rollout.vllm.launch_server import serve

    return serve(
        options.model,
        host=options.host,
        port=options.port,
        experts=options.experts,
        token_file=options.token_file,
        more=overrides,
    )


def _serve_model(options: argparse.Namespace, overrides: list[str]) -> int:
    """Serve a model until Ctrl-C."""
    for name, default in (("host", "127.0.0.1"), ("experts", False)):
        if getattr(options, name) != default:
            raise ConfigError(f"--{name}: has no effect with --openai, which listens on 127.0.0.1 only; leave it out")
    quiet_libraries()
    from gspo.commands.served_model import open_model
    from gspo.network.loopback import access_token
    from gspo.ranks.environment import free_port
    from gspo.serving.server import ModelServer
    from gspo.signals import exit_process

    signal.signal(signal.SIGTERM, exit_process)
    with ExitStack() as stack:
        served = open_model(
            options.model,
            checkpoint=options.checkpoint,
            overrides=overrides,
            trust_run=options.trust_run,
            stack=stack,
        )
        name = options.served_name or options.model
        port = options.port or free_port()
        token, where, written = access_token(TOKEN, Path(options.token_file or f"gspo-serve-{port}.token"))
        limit = served.config.rollout.max_tokens
        server = ModelServer(served.engine, served.policy, name=name, max_tokens=limit, token=token, port=port)
        if written:
            stack.callback(written.unlink, missing_ok=True)
        with server:
            print(f"{served.config.model.path} at {server.address}; {where}, for use as the API key", flush=True)
            print(f"The model's name in requests: {name}. Ctrl-C stops the server.", flush=True)
            server.work(until=lambda: False)
    return 0


COMMAND = Command(
    name="serve",
    help="Serve a model through OpenAI's API (--openai), or start a vLLM server that runs can sample from.",
    add_arguments=add_arguments,
    run=run,
    epilog="With --openai, settings of [model], rollout.engine, rollout.engine_options and rollout.max_tokens work as "
    "--section.key=value;\nrollout.max_tokens limits the completions of requests without a limit. "
    "See docs/serving.md.\n\n"
    "Without it, other options are passed to vLLM unchanged, each as --name=value, for example "
    "--tensor-parallel-size=2.\nSee docs/engines.md.",
)
