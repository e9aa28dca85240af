"""`gspo merge`: a LoRA adapter added to its model, as a model directory of its own.

In: a run, a checkpoint or any folder with an adapter. Out: a directory that transformers and vLLM load as it is. Invariant: the
merged model computes what model and adapter computed together, but for one rounding of each weight to its precision.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open

from gspo.config import ModelConfig
from gspo.errors import ConfigError
from gspo.policy import adapter, checkpoint
from gspo.policy.model import load_policy, load_tokenizer

_PRECISIONS = {"F32": "float32", "BF16": "bfloat16"}


def merge(source: str, out: str) -> Path:
    """Write the merged model to `out`, in the precision of the adapter."""
    folder, target = _adapter_folder(Path(source)), Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{out}: is there already; name a directory that is not")
    model = ModelConfig(path=str(folder), dtype=_precision(folder), device="cpu")  # type: ignore[arg-type]
    policy = load_policy(model, load_tokenizer(model), seed=0)
    checkpoint.save_model(policy, target)
    return target


def _adapter_folder(source: Path) -> Path:
    folder = source
    if (source / "config.toml").is_file() and (source / "checkpoints").is_dir():
        folder = checkpoint.newest(source / "checkpoints")[0]
    if not folder.is_dir():
        raise ConfigError(f"{source}: no such directory; name a run, a checkpoint or the folder of an adapter")
    if adapter.base_of(str(folder)) is None:
        whole = "it is a whole model already" if (folder / "config.json").is_file() else "it has no adapter_config.json"
        raise ConfigError(f"{folder}: there is nothing to merge, {whole}")
    return folder


def _precision(folder: Path) -> str:
    try:
        with safe_open(folder / adapter.WEIGHTS, framework="pt") as file:
            kind = file.get_slice(next(iter(file.keys()))).get_dtype()
    except (OSError, StopIteration) as error:
        raise ConfigError(f"{folder / adapter.WEIGHTS}: cannot be read ({error}); the adapter is not whole") from None
    return _PRECISIONS.get(kind, "float32")
