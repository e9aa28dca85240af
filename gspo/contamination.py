"""Which problems a model has been trained on, as far as its checkpoint can tell.

In: the path of a model. Out: the keys of the problems that the run which saved it could have trained on, of its cold start, and
of the runs whose checkpoints it began from; nothing for a model that no run saved. Invariant: rather too many than too few, so
that an evaluation that leaves these keys out is honest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from gspo.cold_start import CHECKED
from gspo.config import Config, from_flat
from gspo.data.problems import demonstrations, load_problems

_TOLD = ("seed", "data.", "cold_start.", "model.path")
"""How settings begin that say what was trained on."""


def trained_on(model: str, tokenizer: Any) -> frozenset[str]:
    """The keys; raises what reading the problems raises, for example because a data file is no longer there."""
    keys: set[str] = set()
    visited: set[Path] = set()
    while (settings := _settings(model)) and Path(model).absolute() not in visited:
        visited.add(Path(model).absolute())
        config = from_flat({k: v for k, v in settings.items() if k.startswith(_TOLD)}, where=f"{model}/trainer.json")
        keys |= _keys(config, tokenizer)
        model = config.model.path
    return frozenset(keys)


def _settings(model: str) -> Mapping[str, Any]:
    """The settings of the run that saved a model; empty: no run did."""
    file = Path(model).expanduser() / "trainer.json"
    if not model or not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8")).get("settings")
    except (ValueError, AttributeError):
        return {}
    return settings if isinstance(settings, Mapping) else {}


def _keys(config: Config, tokenizer: Any) -> set[str]:
    problems = load_problems(config.data, tokenizer, config.seed)
    keys, start = {p.key for p in problems.train}, config.cold_start
    if start.steps:
        checks = start.steps // start.check_every + 1
        most = start.steps * start.batch + checks * CHECKED
        shown = demonstrations(config.data, config.seed, exclude={p.key for p in problems.held_out})
        keys |= {problem.key for problem in islice(shown, most)}
    return keys
