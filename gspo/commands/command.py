"""What a sub-command is, and what several of them do before they start."""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from gspo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Command:
    """A sub-command."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, list[str]], int]
    """Takes the parsed options and the `--section.key=value` overrides, and returns the exit code."""
    epilog: str = ""
    single_process: bool = False
    """Whether the command refuses to run as one of several processes of a launcher."""


def no_overrides(overrides: list[str]) -> None:
    """Refuse overrides in a command that has no settings."""
    if overrides:
        raise ConfigError(f"unknown option {overrides[0]}")


def quiet_libraries() -> None:
    """Hide the progress bars and informational messages of transformers, but not its errors and warnings."""
    # Read when the libraries are imported.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # torch.distributed would print C++ stack traces when another rank has ended.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    # tqdm in a notebook without ipywidgets. The progress of a run is an output of its own.
    warnings.filterwarnings("ignore", message="IProgress not found")
    import transformers

    transformers.utils.logging.disable_progress_bar()
