"""`gspo serve`: a vLLM server that training runs can sample from."""

from __future__ import annotations

import argparse

from gspo.commands.command import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="model directory or hub name; only its config is used, because a run sends its own weights")
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1); the connection is not encrypted, "
        "so use another address only in a private network",
    )
    add("--port", type=int, default=0, help="port (default: any free port)")
    add(
        "--experts",
        action="store_true",
        help='report which experts of an MoE model each token used (routing.replay = "sampler"); '
        "disables the prefix cache",
    )
    add(
        "--token-file",
        metavar="FILE",
        help="file for the access token, unless GSPO_SERVE_TOKEN is set (default: gspo-serve-PORT.token)",
    )


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    from gspo.rollout.vllm.launch_server import serve

    return serve(
        options.model,
        host=options.host,
        port=options.port,
        experts=options.experts,
        token_file=options.token_file,
        more=overrides,
    )


COMMAND = Command(
    name="serve",
    help="Start a vLLM server that runs can sample from.",
    add_arguments=add_arguments,
    run=run,
    epilog="Other options are passed to vLLM unchanged, each as --name=value, for example --tensor-parallel-size=2. "
    "See docs/engines.md.",
)
