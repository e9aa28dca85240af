"""Where a model is: a directory, a .gguf file, the hub; for an adapter, its base model.

In: `ModelConfig`. Out: the path and options for transformers. Invariant: a missing model is reported immediately, in
one line that names the setting.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from gspo.config import TINY_MODELS, ModelConfig
from gspo.errors import ConfigError
from gspo.model import adapter
from gspo.network.hub import unreachable_host

_BLOCK = 1 << 20
"""Bytes that are read at a time."""
_BLOCKS = 1 << 10
"""Blocks that are read of a large file, at most."""


def resolve_model_source(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The path of the model (for an adapter, of its base model) for transformers, and the option that names a .gguf
    file."""
    named = _model_name(config)
    path = os.path.expanduser(named)
    if named != config.path and not Path(path).exists() and _looks_local(path):
        raise ConfigError(
            f"model.path: {named}: does not exist, and it is the base model of the adapter in {config.path}; restore "
            "it, or put a link to it there"
        )
    if not path.endswith(".gguf"):
        _check_local(path)
        return (path if Path(path).is_dir() else _from_hub(path)), {}
    if not Path(path).is_file():
        raise ConfigError(f"model.path: {path}: no such file; give a directory, a hub name or a .gguf file")
    if lacking := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        needed = f"the package{'s' * (len(lacking) > 1)} {' and '.join(lacking)}"
        raise ConfigError(f"model.path: {path}: reading it needs {needed}; run: pip install 'gspo[gguf]'")
    return os.path.dirname(path) or ".", {"gguf_file": os.path.basename(path)}


def shape_dir(config: ModelConfig) -> Path | None:
    """The directory whose `config.json` gives the shape of a model that is built from scratch; None for the others."""
    if not config.build or config.build in TINY_MODELS:
        return None
    folder = Path(config.build).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.build: {config.build}: no such directory with a config.json; "
            f"give one, or {' or '.join(TINY_MODELS)}"
        )
    return folder.absolute()


@contextmanager
def load_errors(config: ModelConfig) -> Iterator[None]:
    """Turn the errors of transformers for a model that cannot be loaded into one line."""
    try:
        yield
    except Exception as error:
        if config.trust_remote_code and not isinstance(error, OSError | ValueError | ImportError | SafetensorError):
            raise  # remote code of the model failed: its author needs the traceback
        pickled = type(error).__name__ == "UnpicklingError"
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if not isinstance(error, OSError | ValueError | ImportError | SafetensorError):
            reason = f"its files are damaged or contradict each other ({type(error).__name__}: {reason})"
        if pickled:
            reason = "its weights are a pickle that would execute code; use the model in safetensors format"
        path = _model_name(config)
        local = "" if Path(path).expanduser().exists() else " (and there is no such file or directory here)"
        owner = f", the base model of the adapter in {config.path}" if path != config.path else ""
        raise ConfigError(f"model.path: cannot load {path!r}{owner}{local}: {reason}") from error


def _model_name(config: ModelConfig) -> str:
    """The model that the setting names; for an adapter, its base model."""
    return adapter.base_of(config.path) or config.path


def _check_local(path: str) -> None:
    """A path that looks local must exist: the hub's error for it would be misleading."""
    local = Path(path)
    if _looks_local(path) and not local.is_dir():
        raise ConfigError(f"model.path: {path}: no such directory; give a directory, a hub name or a .gguf file")
    if local.is_dir() and not (local / "config.json").is_file():
        hint = "; a run keeps its models in checkpoints/" if (local / "checkpoints").is_dir() else ""
        raise ConfigError(f"model.path: {path}: has no config.json, so it is not a model directory{hint}")


def _looks_local(path: str) -> bool:
    # A hub name is NAME or OWNER/NAME.
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith(".gguf")


def _from_hub(name: str) -> str:
    """A hub name, or without a network the cached copy. Without either, an error at once instead of a minute of
    retries."""
    from huggingface_hub import try_to_load_from_cache

    host = unreachable_host()
    if not host:
        return name
    try:
        cached = try_to_load_from_cache(name, "config.json")
    except ValueError:
        cached = None  # not a valid hub name
    if isinstance(cached, str):
        return os.path.dirname(cached)
    raise ConfigError(
        f"model.path: {name!r} is neither a directory nor in the local cache, and {host} cannot be reached; give a "
        "directory or a .gguf file"
    )


def weights_fingerprint(config: ModelConfig) -> str:
    """A fingerprint of the files with the model's weights; empty if they are on the hub. In a large file, only blocks
    at regular intervals are read."""
    if (shape := shape_dir(config)) is not None:
        # The weights follow from the shape and the seed.
        return hashlib.sha256((shape / "config.json").read_bytes()).hexdigest()
    if config.build or not Path(_model_name(config)).expanduser().exists():
        return ""
    place, options = resolve_model_source(config)
    folder = Path(place)
    files = (
        [folder / options["gguf_file"]] if options else sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin")))
    )
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        # Name and size are included, so that blocks cannot move between files unnoticed.
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            # A training step changes every weight, so a sample of blocks is enough to notice another file.
            for start in range(0, size, max(_BLOCK, size // _BLOCKS)):
                file.seek(start)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest() if files else ""
