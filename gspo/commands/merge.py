"""`gspo merge`: a LoRA adapter added to its model, as a model directory of its own.

In: a run, a checkpoint or any folder with an adapter. Out: a directory that transformers and vLLM load as it is. Invariant: the
merged model computes what model and adapter computed together, but for one rounding of each weight to its precision. A
checkpoint of a run with 4-bit weights is merged into just those, written out.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from gspo.commands.common import Command, no_overrides, quiet_libraries
from gspo.config import ModelConfig
from gspo.errors import ConfigError

_PRECISIONS = {"F32": "float32", "BF16": "bfloat16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="RUN", help="a run (its newest checkpoint), a checkpoint, or the folder of an adapter"
    )
    parser.add_argument("out", metavar="OUT", help="the directory to write")


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    no_overrides(overrides)
    quiet_libraries()
    source, out = merge(options.source, options.out)
    print(f"Merged model:  {out}  (from {source})")
    return 0


def merge(source: str, out: str) -> tuple[Path, Path]:
    """Write the merged model to `out`, in the precision of the adapter; the adapter's folder, and `out`."""
    from gspo.learner import checkpoint
    from gspo.model.load import load_policy, load_tokenizer

    folder, target = _adapter_folder(Path(source)), Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{out}: is there already; name a directory that is not")
    model = ModelConfig(path=str(folder), dtype=_precision(folder), device="cpu")  # type: ignore[arg-type]
    policy = load_policy(model, load_tokenizer(model), seed=0)
    partial = target.with_name(f".tmp-{target.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        checkpoint.save_model(policy, partial)
        partial.replace(target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(f"{out}: cannot be written: {error}; make room, or name another directory") from error
    return folder, target


def _adapter_folder(source: Path) -> Path:
    from gspo.learner import checkpoint
    from gspo.model import adapter

    newest = checkpoint.newest_of(source)
    folder = newest or source
    if not folder.is_dir():
        raise ConfigError(f"{source}: no such directory; name a run, a checkpoint or the folder of an adapter")
    if adapter.base_of(str(folder)) is None:
        whole = "it is a whole model already" if (folder / "config.json").is_file() else "it has no adapter_config.json"
        raise ConfigError(f"{folder}: there is nothing to merge, {whole}")
    if newest is None and (folder / "manifest.json").is_file() and (complaint := checkpoint.damage(folder)):
        raise ConfigError(f"{folder}: is damaged: {complaint}; merge another checkpoint")
    return folder


def _precision(folder: Path) -> str:
    from safetensors import SafetensorError, safe_open

    from gspo.model import adapter

    try:
        with safe_open(folder / adapter.WEIGHTS, framework="pt") as file:
            kind = file.get_slice(next(iter(file.keys()))).get_dtype()
    except (OSError, StopIteration, SafetensorError) as error:
        raise ConfigError(f"{folder / adapter.WEIGHTS}: cannot be read ({error}); the adapter is not whole") from None
    return _PRECISIONS.get(kind, "float32")


COMMAND = Command(
    name="merge",
    help="Merge a LoRA adapter into its model: a directory that transformers and vLLM load.",
    add_arguments=add_arguments,
    run=run,
    epilog="See docs/lora.md.",
)
