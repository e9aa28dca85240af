"""Comparison of how two runs ended."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from gspo.config import Config
from gspo.learner import checkpoint


def run_of(config: Config) -> Path:
    return Path(config.run_dir)


def same_end(a: Path, b: Path) -> None:
    """Assert byte-identical metrics and completions, and a bitwise identical last checkpoint."""
    assert (a / "metrics.jsonl").read_bytes() == (b / "metrics.jsonl").read_bytes()
    for file in (file for folder in ("rollouts", "evaluations") for file in sorted((a / folder).glob("*"))):
        assert file.read_bytes() == (b / file.parent.name / file.name).read_bytes()
    last = [checkpoint.saved(run / "checkpoints")[-1] for run in (a, b)]
    assert last[0].name == last[1].name
    one, other = map(tensors_of, last)
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def tensors_of(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint: of its model, and of its optimizer, which several ranks may have written."""
    files = [file for file in path.iterdir() if file.suffix in (".safetensors", ".tensors")]
    tensors = {f"{file.name}: {name}": tensor for file in files for name, tensor in load_file(file).items()}
    if (path / checkpoint.SHARDS).is_dir():
        reader = dcp.HuggingFaceStorageReader(str(path / checkpoint.SHARDS))
        saved = reader.read_metadata().state_dict_metadata
        state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in saved.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is a single process
            dcp.load(state, storage_reader=reader, no_dist=True)
        tensors |= {f"{checkpoint.TRAINER}: {name}": tensor for name, tensor in state.items()}
    assert len({name.partition(":")[0] for name in tensors}) >= 2
    return tensors
