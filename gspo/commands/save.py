"""`gspo save`: the model of a run as a directory of its own, with adapters merged into their base model if asked.

In: a run, a checkpoint or any directory with an adapter. Out: a model directory that transformers and vLLM load (peft,
for an adapter that is not merged). Invariant: the directory has no state of the trainer, and appears complete or not at
all. A merged model computes what base model and adapter compute together, up to one rounding of each weight to its
precision. For a run with 4-bit weights the base is the dequantized 4-bit weights, the ones it was trained with.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
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
    parser.add_argument("out", metavar="PATH", help="directory for the model")
    parser.add_argument("--merge", action="store_true", help="merge a LoRA adapter into its base model")
    add_checkpoint(parser)


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    no_overrides(overrides)
    quiet_libraries()
    source, out = save(options.source, options.out, which=options.checkpoint, merge=options.merge)
    what = "Merged model" if options.merge else "Model"
    print(f"{what}:  {out}  (from {source})")
    return 0


def save(source: str, out: str, *, which: str = "newest", merge: bool = False) -> tuple[Path, Path]:
    """Write the model to `out`. Returns the directory that it is from, and `out`.

    Of a run it takes the checkpoint `which`: newest, best or a step. `merge` merges an adapter into its base model, in
    the precision of the adapter."""
    from gspo.model import adapter

    directory = _model_dir(Path(source), which)
    target = Path(out)
    # An empty directory may be replaced; anything else may be somebody's model.
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{out}: already exists; choose a new directory")
    if merge and adapter.base_of(str(directory)) is None:
        raise ConfigError(f"{directory}: nothing to merge: it is already a full model; leave --merge out")
    _write(target, lambda folder: _merge(directory, folder) if merge else _copy(directory, folder))
    return directory, target


def _write(target: Path, fill: Callable[[Path], None]) -> None:
    """Fill a directory that appears complete or not at all."""
    partial = target.with_name(f".tmp-{target.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        fill(partial)
        partial.replace(target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(
            f"{target}: cannot be written: {error}; free disk space, or choose another directory"
        ) from error


def _copy(directory: Path, folder: Path) -> None:
    """Copy the files of the model, without the state of the trainer."""
    for file in sorted(directory.iterdir()):
        if file.is_file() and file.suffix != ".tensors" and file.name not in TRAINER_FILES:
            shutil.copyfile(file, folder / file.name)


TRAINER_FILES = ("manifest.json", "trainer.json", "in_flight.json")
"""Files of a checkpoint that are not part of the model, besides `*.tensors` (learner/checkpoint.py)."""


def _merge(directory: Path, folder: Path) -> None:
    from gspo.model.load import load_policy, load_tokenizer
    from gspo.model.save import save_model

    # On the CPU: merging is a few sums, and the model need not fit a GPU.
    model = ModelConfig(path=str(directory), dtype=_precision(directory), device="cpu")  # type: ignore[arg-type]
    save_model(load_policy(model, load_tokenizer(model), seed=0), folder)


def _model_dir(source: Path, which: str) -> Path:
    from gspo.learner import checkpoint
    from gspo.model import adapter

    of_run = checkpoint_of(source, which)
    directory = of_run or source
    if not directory.is_dir():
        raise ConfigError(f"{source}: no such directory; give a run, a checkpoint or an adapter directory")
    if adapter.base_of(str(directory)) is None and not (directory / "config.json").is_file():
        raise ConfigError(f"{directory}: has no model: neither config.json nor adapter_config.json")
    # A checkpoint of a run is verified already, and an adapter from elsewhere has no manifest.
    if of_run is None and (directory / "manifest.json").is_file() and (complaint := checkpoint.damage(directory)):
        raise ConfigError(f"{directory}: is damaged: {complaint}; save another checkpoint")
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
    name="save",
    help="Save the model of a run as a directory that transformers and vLLM can load, with adapters merged if asked.",
    add_arguments=add_arguments,
    run=run,
    epilog="See docs/runs.md and docs/lora.md.",
)
