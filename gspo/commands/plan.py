"""`gspo plan`: predicted memory and time of a run on given GPUs, without weights and without a GPU."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo.commands.arguments import positive
from gspo.commands.command import Command, quiet_libraries
from gspo.errors import ConfigError
from gspo.site import linked

if TYPE_CHECKING:
    from gspo.config import Config

OVERRIDES = {
    "prompts": "rollout.prompts",
    "group_size": "rollout.group_size",
    "max_tokens": "rollout.max_tokens",
    "mini_batches": "learner.mini_batches",
    "micro_batch_tokens": "learner.micro_batch_tokens",
    "dtype": "model.dtype",
}
"""Options that are short forms of settings."""
LORA_RANK = 16
"""Of the layouts with adapters, unless the recipe or an option has another."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", help="hub name, directory or config.json; only the config is read (default: the recipe's)")
    add("--recipe", help="a .toml recipe, or the name of a built-in recipe, for all settings that are not given")
    add("--gpus", type=positive, default=1, help="GPUs of all nodes (default: 1)")
    add("--gpu", default="h200", help="kind of GPU: a100, h100, h200, b200, l40s or rtx4090 (default: h200)")
    add("--nodes", type=positive, default=1, help="nodes that the GPUs are in (default: 1)")
    add("--prompts", type=positive, help="prompts per step")
    add("--group-size", type=positive, help="completions per prompt")
    add("--prompt-tokens", type=positive, help="tokens of a prompt (default: data.max_prompt_tokens)")
    add("--max-tokens", type=positive, help="most tokens of a completion")
    add("--mean-tokens", type=positive, help="mean tokens of a completion (default: the most)")
    add("--mini-batches", type=positive, help="optimizer steps per batch")
    add("--micro-batch-tokens", type=positive, help="most tokens of a forward and backward pass; halved to fit")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="precision of the weights (default: bfloat16)")
    add("--lora-rank", type=positive, help=f"rank of the layouts with adapters (default: {LORA_RANK})")
    add("--all", action="store_true", help="show every layout")
    add("--json", action="store_true", help="print the plan as JSON")


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    from gspo.preflight.gpus import gpu_named

    gpu = gpu_named(options.gpu)  # before the libraries, which take seconds
    if options.gpus % options.nodes:
        raise ConfigError(f"--nodes: {options.gpus} GPUs cannot be divided among {options.nodes} nodes equally")
    if options.model is None and options.recipe is None:
        raise ConfigError("give a model, or a recipe with one: gspo plan MODEL, or gspo plan --recipe RECIPE")
    quiet_libraries()
    from gspo.preflight.layouts import Cluster
    from gspo.preflight.plan_report import as_text, printable

    plan = _plan(options, overrides, Cluster(gpu=gpu, gpus=options.gpus, nodes=options.nodes))
    print(printable(plan) if options.json else linked(as_text(plan, show_all=options.all)))
    return 0 if plan.layouts[0].fits else 1


def _plan(options: argparse.Namespace, overrides: list[str], cluster: Any) -> Any:
    from gspo.build import run_objective, tokenizer_for
    from gspo.config import RolloutConfig
    from gspo.preflight.layouts import Request, not_available, plan_layouts
    from gspo.preflight.model import skeleton_of
    from gspo.preflight.plan_report import Plan
    from gspo.rollout.engine import engine_traits

    config = _config(options, overrides)
    if not engine_traits(config.rollout.engine).shares_weights:
        raise ConfigError(
            f"rollout.engine: only engines with the learner's own weights are planned for, not "
            f"{config.rollout.engine!r}; give --rollout.engine={RolloutConfig().engine}"
        )
    if config.ranks.sampling_weights == "layers":
        raise ConfigError(
            'ranks.sampling_weights: "layers" is not planned for, because it was never tried on a GPU; leave it out'
        )
    if config.rollout.max_lag:
        raise ConfigError(
            "rollout.max_lag: sampling during training is not modeled, so it cannot be planned for; give "
            "--rollout.max_lag=0"
        )
    longest = max(section.max_prompt_tokens for section in config.problem_sections.values())
    if options.mean_tokens and options.mean_tokens > config.rollout.max_tokens:
        raise ConfigError(
            f"--mean-tokens: {options.mean_tokens} is more than a completion can have ({config.rollout.max_tokens}); "
            "raise --max-tokens, or lower it"
        )
    request = Request(
        config=config,
        cluster=cluster,
        prompt_tokens=options.prompt_tokens or longest,
        completion_tokens=options.mean_tokens or config.rollout.max_tokens,
        kl=bool(run_objective(config).kl),
        lora_rank=options.lora_rank or config.model.lora.rank or LORA_RANK,
    )
    tokenizer = tokenizer_for(config) if config.model.build else None
    layouts = plan_layouts(request, lambda variant: skeleton_of(variant.model, tokenizer))
    model = config.model.path or config.model.build
    return Plan(
        model=model,
        cluster=cluster,
        layouts=layouts,
        not_available=not_available(layouts[0].workload.skeleton, cluster),
    )


def _config(options: argparse.Namespace, overrides: list[str]) -> Config:
    from gspo.config import find_recipe, override, read_toml

    given = {key: getattr(options, name) for name, key in OVERRIDES.items() if getattr(options, name) is not None}
    if options.model is not None:
        given |= {"model.path": _model_path(options.model), "model.build": ""}
    if options.recipe is None:
        given = {"model.dtype": "bfloat16", "data.task": "addition", "eval.every": 0, "data.held_out": 0} | given
        tree: dict[str, Any] = {}
        where = "gspo plan"
    else:
        path = find_recipe(options.recipe)
        tree, where = read_toml(path), str(path)
    config = override(tree, [f"{key}={value}" for key, value in given.items()] + overrides, where=where)
    # The layouts decide these.
    learner = replace(config.learner, context_parallel=1, optimizer="adamw", optimizer_offload=False)
    return replace(config, learner=learner)


def _model_path(text: str) -> str:
    """A model for `model.path`: the directory of a config.json."""
    path = Path(text).expanduser()
    if not path.is_file():
        return text
    if path.name != "config.json":
        raise ConfigError(f"{text}: is a file; give a hub name, a directory with a config.json, or a config.json")
    return str(path.parent)


COMMAND = Command(
    name="plan",
    help="Predict memory and time of a run on given GPUs, for each layout. The exit code is 1 if none fits.",
    add_arguments=add_arguments,
    run=run,
    epilog="All settings of 'gspo train --help' work here. See docs/plan.md.",
    single_process=True,
)
