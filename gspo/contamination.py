"""The problems a model was trained on, as recorded in its checkpoint.

In: the path of a model. Out: the `identities` of the problems that the run which saved it may have trained on,
including its cold start and the runs whose checkpoints it started from; empty for a model that no run saved. Invariant:
the set may be too large but never too small, so an evaluation that excludes these problems is not contaminated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from gspo.cold_start import CHECKED
from gspo.config import Config, from_flat
from gspo.data.problems import TEXT, all_demonstrations, identities, load_problems
from gspo.data.task import same_text
from gspo.errors import DataError

GRAM = 8
"""Words of a sequence that counts as seen."""
OVERLAP = 0.7
"""Share of a problem's sequences that training data must contain for the problem to count as contaminated. The rule of
PaLM (arXiv:2204.02311, section 8)."""
_WORD = re.compile(r"\w+")

_DATA_SETTINGS = ("seed", "data.", "eval.sets.", "cold_start.", "model.path")
"""Prefixes of the settings that determine the training data."""


def trained_on(model: str, tokenizer: Any) -> frozenset[str]:
    """The `identities` of the training problems. Propagates errors from loading them, such as a missing data file."""
    keys: set[str] = set()
    visited: set[Path] = set()
    # `visited` ends a cycle: a checkpoint may name itself as its start.
    while (settings := _settings(model)) and Path(model).absolute() not in visited:
        visited.add(Path(model).absolute())
        # Only the data settings are parsed, so a checkpoint stays readable when other settings change.
        data_settings = {k: v for k, v in settings.items() if k.startswith(_DATA_SETTINGS)}
        config = from_flat(data_settings, where=f"{model}/trainer.json")
        keys |= _keys(config, tokenizer)
        model = config.model.path
    return frozenset(keys)


def _settings(model: str) -> Mapping[str, Any]:
    """The settings of the run that saved a model; empty if no run did."""
    file = Path(model).expanduser() / "trainer.json"
    if not model or not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8")).get("settings")
    except (ValueError, AttributeError):
        return {}
    return settings if isinstance(settings, Mapping) else {}


def _keys(config: Config, tokenizer: Any) -> set[str]:
    try:
        problems = load_problems(config.data, tokenizer, config.seed, config.eval.sets)
    except DataError:
        # The file of an evaluation set may be gone. Without the sets, their duplicates count as trained on.
        problems = load_problems(config.data, tokenizer, config.seed)
    keys = set().union(*map(identities, problems.train))
    start = config.cold_start
    # The demonstrations of a file belong to its training problems.
    if start.steps and config.data.task:
        # An upper bound: the cold start stops early once its accuracy checks pass.
        checks = start.steps // start.check_every + 1
        limit = start.steps * start.batch + checks * CHECKED
        evaluated = set().union(*map(identities, problems.evaluated))
        candidates = all_demonstrations(config.data, config.seed, exclude=evaluated)
        keys = keys.union(*(identities(problem) for _, _, problem in islice(candidates, limit)))
    return keys


def texts_of(keys: Collection[str]) -> list[str]:
    """The texts of problems among their identities."""
    return [key.removeprefix(TEXT) for key in keys if key.startswith(TEXT)]


def contaminated(problems: Sequence[str], training: Iterable[str]) -> list[int]:
    """The problems, by position, whose text the training texts contain, perhaps within other text.

    Unlike `identities`, this finds problems that were trained on with another instruction or small changes."""
    grams = [_grams(_words(problem)) for problem in problems]
    wanted = set().union(*grams)
    # Only what some problem asks for is kept: all sequences of a large data set would not fit into memory.
    lengths = sorted({len(gram) for gram in wanted})
    seen: set[tuple[str, ...]] = set()
    for text in training:
        words = _words(text)
        for length in lengths:
            # A problem of a few words is contaminated only by a text that says nothing else.
            found = _windows(words, length) if length == GRAM else [tuple(words)]
            seen.update(gram for gram in found if gram in wanted)
    return [i for i, own in enumerate(grams) if own and len(own & seen) >= OVERLAP * len(own)]


def _words(text: str) -> list[str]:
    return _WORD.findall(same_text(text))


def _grams(words: Sequence[str]) -> set[tuple[str, ...]]:
    return set(_windows(words, GRAM)) if len(words) >= GRAM else {tuple(words)} if words else set()


def _windows(words: Sequence[str], length: int) -> Iterable[tuple[str, ...]]:
    return (tuple(words[i : i + length]) for i in range(len(words) - length + 1))
