"""`gspo serve`: a vLLM server that training runs can sample from."""

from __future__ import annotations

import argparse

from gspo.commands.common import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="model directory or hub name; only its config is used: a run sends its own weights")
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1; another only in a private network: the connection is not encrypted)",
    )
    add("--port", type=int, default=0, help="(default: a free one)")
    add(
        "--experts",
        action="store_true",
        help='report the experts that computed each token (routing.replay = "sampler"); disables the prefix cache',
    )
    add(
        "--token-file",
        metavar="FILE",
        help="where to write the token unless GSPO_SERVE_TOKEN has one (default: gspo-serve-PORT.token)",
    )


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    from gspo.rollout.vllm.serve import serve

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
    help="Start a vLLM server that training runs can sample from; see docs/engines.md.",
    add_arguments=add_arguments,
    run=run,
    epilog="Other options are handed to vLLM as they are, each as --name=value: --tensor-parallel-size=2",
)
