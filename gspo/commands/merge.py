"""`gspo merge`: merge a LoRA adapter into its base model.

In: a run, a checkpoint or any directory with an adapter. Out: a model directory that transformers and vLLM load.
Invariant: the merged model computes what base model and adapter compute together, up to one rounding of each weight to
its precision. For a run with 4-bit weights the base is the dequantized 4-bit weights, the ones it was trained with.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from gspo.commands.arguments import add_checkpoint, checkpoint_of
from gspo.commands.command import Command, no_overrides, quiet_libraries
from gspo.config import ModelConfig
from gspo.errors import ConfigError

_PRECISIONS = {"F32": "float32", "BF16": "bfloat16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="RUN", help="a run (its newest checkpoint), a checkpoint, or an adapter directory"
    )
    parser.add_argument("out", metavar="OUT", help="directory for the merged model")
    add_checkpoint(parser)


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    no_overrides(overrides)
    quiet_libraries()
    source, out = merge(options.source, options.out, which=options.checkpoint)
    print(f"Merged model:  {out}  (from {source})")
    return 0


def merge(source: str, out: str, *, which: str = "newest") -> tuple[Path, Path]:
    """Write the merged model to `out`, in the precision of the adapter. Returns the adapter's directory and `out`.

    Of a run it takes the checkpoint `which`: newest, best or a step."""
    from gspo.model.load import load_policy, load_tokenizer
    from gspo.model.save import save_model

    directory = _adapter_dir(Path(source), which)
    target = Path(out)
    # An empty directory may be replaced; anything else may be somebody's model.
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{out}: already exists; choose a new directory")
    # On the CPU: merging is a few sums, and the model need not fit a GPU.
    model = ModelConfig(path=str(directory), dtype=_precision(directory), device="cpu")  # type: ignore[arg-type]
    policy = load_policy(model, load_tokenizer(model), seed=0)
    # A rename makes the directory appear complete or not at all.
    partial = target.with_name(f".tmp-{target.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_model(policy, partial)
        partial.replace(target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(f"{out}: cannot be written: {error}; free disk space, or choose another directory") from error
    return directory, target


def _adapter_dir(source: Path, which: str) -> Path:
    from gspo.learner import checkpoint
    from gspo.model import adapter

    of_run = checkpoint_of(source, which)
    directory = of_run or source
    if not directory.is_dir():
        raise ConfigError(f"{source}: no such directory; give a run, a checkpoint or an adapter directory")
    if adapter.base_of(str(directory)) is None:
        full = (directory / "config.json").is_file()
        reason = "it is already a full model" if full else "it has no adapter_config.json"
        raise ConfigError(f"{directory}: nothing to merge: {reason}")
    # A checkpoint of a run is verified already, and an adapter from elsewhere has no manifest.
    if of_run is None and (directory / "manifest.json").is_file() and (complaint := checkpoint.damage(directory)):
        raise ConfigError(f"{directory}: is damaged: {complaint}; merge another checkpoint")
    return directory


def _precision(directory: Path) -> str:
    from safetensors import SafetensorError, safe_open

    from gspo.model import adapter

    try:
        with safe_open(directory / adapter.WEIGHTS, framework="pt") as file:
            kind = file.get_slice(next(iter(file.keys()))).get_dtype()
    except (OSError, StopIteration, SafetensorError) as error:
        raise ConfigError(
            f"{directory / adapter.WEIGHTS}: cannot be read ({error}); the adapter is incomplete"
        ) from None
    # The base model of a run was float16 too.
    if kind == "F16" and (directory / "trainer.json").is_file():
        return "float16"
    # float32 represents the values of the other precisions exactly. The base model of a float16 adapter from elsewhere
    # may have weights that float16 does not hold.
    return _PRECISIONS.get(kind, "float32")


COMMAND = Command(
    name="merge",
    help="Merge a LoRA adapter into its base model and write a model directory that transformers and vLLM can load.",
    add_arguments=add_arguments,
    run=run,
    epilog="See docs/lora.md.",
)
