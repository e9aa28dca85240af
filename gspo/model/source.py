"""Where a model lies: a directory, a .gguf file, the hub; of an adapter, the model it belongs to.

In: `ModelConfig`. Out: what transformers is to load. Invariant: what is not there is said at once, in one line that names the
setting.
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

from gspo.config import ModelConfig
from gspo.errors import ConfigError
from gspo.hub import unreachable_host
from gspo.model import adapter

_BLOCK, _BLOCKS = 1 << 20, 1 << 10


def location(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Where transformers finds the model (of an adapter: the one it belongs to), and the option that names a .gguf file there."""
    named = _named(config)
    path = os.path.expanduser(named)
    if named != config.path and not Path(path).exists() and _looks_local(path):
        raise ConfigError(
            f"model.path: {named}: is not there, and the adapter in {config.path} was trained beside it; put it back, or a link to it"
        )
    if not path.endswith(".gguf"):
        _check_local(path)
        return (path if Path(path).is_dir() else _from_hub(path)), {}
    if not Path(path).is_file():
        raise ConfigError(f"model.path: {path}: no such file; give a directory, a hub name or a .gguf file")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"model.path: {path}: reading it needs the gguf package; run: pip install gguf")
    return os.path.dirname(path) or ".", {"gguf_file": os.path.basename(path)}


@contextmanager
def load_errors(config: ModelConfig) -> Iterator[None]:
    """What transformers says of a model it cannot load, as one line."""
    try:
        yield
    except Exception as error:
        if config.trust_remote_code and not isinstance(error, OSError | ValueError | ImportError | SafetensorError):
            raise  # code of the model's author, who needs the traceback
        pickled = type(error).__name__ == "UnpicklingError"
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if not isinstance(error, OSError | ValueError | ImportError | SafetensorError):
            reason = f"its files are damaged or contradict each other ({type(error).__name__}: {reason})"
        reason = "its weights are a pickle that would run code; take the model in safetensors" if pickled else reason
        path = _named(config)
        local = "" if Path(path).expanduser().exists() else " (and there is no such file or directory here)"
        of = f", the model of the adapter in {config.path}" if path != config.path else ""
        raise ConfigError(f"model.path: cannot load {path!r}{of}{local}: {reason}") from error


def _named(config: ModelConfig) -> str:
    """What the setting names; of an adapter, the model it belongs to."""
    return adapter.base_of(config.path) or config.path


def _check_local(path: str) -> None:
    """A path that looks local must exist: the hub's error for it would mislead."""
    local = Path(path)
    if _looks_local(path) and not local.is_dir():
        raise ConfigError(f"model.path: {path}: no such directory; give a directory, a hub name or a .gguf file")
    if local.is_dir() and not (local / "config.json").is_file():
        hint = "; a run keeps its models in checkpoints/" if (local / "checkpoints").is_dir() else ""
        raise ConfigError(f"model.path: {path}: has no config.json, so it is not a model directory{hint}")


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith(".gguf")


def _from_hub(name: str) -> str:
    """A hub name; without a network the copy that was fetched before, or an error at once instead of a minute of retries."""
    from huggingface_hub import try_to_load_from_cache

    host = unreachable_host()
    if not host:
        return name
    try:
        kept = try_to_load_from_cache(name, "config.json")
    except ValueError:
        kept = None  # no hub name at all
    if isinstance(kept, str):
        return os.path.dirname(kept)
    raise ConfigError(
        f"model.path: {name!r} is not here, neither as a directory nor among the models fetched before, and {host} cannot be reached; give a directory or a .gguf file"
    )


def weights_fingerprint(config: ModelConfig) -> str:
    """Of the files that hold the given model's weights; empty if they are not here, but on the hub. Of a large file, blocks
    at even distances are read."""
    if config.build or not Path(_named(config)).expanduser().exists():
        return ""
    place, options = location(config)
    folder = Path(place)
    files = (
        [folder / options["gguf_file"]] if options else sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin")))
    )
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(_BLOCK, size // _BLOCKS)):
                file.seek(start)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest() if files else ""
