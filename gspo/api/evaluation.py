"""`gspo.evaluate`: pass@k and avg@k of a run or a model, from Python.

In: a run or a model, and problems. Out: an `EvaluationResult`. Invariant: it is `gspo eval`, so a model is never
evaluated on problems that it was trained on, nor on duplicates of them.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gspo.api import inputs
from gspo.api.rewards import Rewards, locate
from gspo.api.run import Run
from gspo.api.settings import pairs_of
from gspo.commands.command import quiet_libraries
from gspo.commands.eval import measure_model, measure_suite
from gspo.config import toml_value, type_of
from gspo.errors import ConfigError
from gspo.evaluation import Estimate, MeanEstimate
from gspo.reward import in_process

WHERE = "gspo.evaluate"


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The numbers of an evaluation, and every completion."""

    model: str
    """The model or checkpoint that was evaluated."""
    problems: int
    samples: int
    """Completions per problem."""
    unscored: int
    """Completions without a verdict, which are excluded."""
    accuracy: Estimate
    """Mean correctness of one sampled completion."""
    numbers: Mapping[str, Estimate | MeanEstimate]
    """`avg@k`, `pass@k`, `reward` and `greedy`, each with its 95 % interval; of a suite also `maj@n`."""
    completions: Sequence[Mapping[str, Any]]
    """Every completion with its prompt, reward and verdict."""
    text: str
    """The numbers as `gspo eval` prints them."""

    def __getitem__(self, name: str) -> Estimate | MeanEstimate:
        return self.numbers[name]

    def __repr__(self) -> str:
        return self.text


def evaluate(
    model: str | os.PathLike[str] | Run,
    data: Any = None,
    *,
    suite: str | None = None,
    rewards: Any = None,
    k: int | Sequence[int] = 1,
    samples: int | None = None,
    limit: int | None = None,
    greedy: bool = False,
    set: str | None = None,
    recipe: str | os.PathLike[str] | None = None,
    checkpoint: str | int = "newest",
    seed: int = 0,
    trust_run: bool = False,
    **settings: Any,
) -> EvaluationResult:
    """pass@k and avg@k of a run or a model, with 95 % intervals.

    - `model`: a run (its newest `checkpoint`, or `best`, or a step), a model directory or a hub name.
    - `data`: rows, a file or the name of a generated task; by default the held-out problems of the run or `recipe`, or
      one `set` of its `eval.sets`.
    - `suite`: instead of `data`, a published benchmark with its protocol: `NAME` or `NAME=FILE`, as for `gspo eval`.
    - `rewards`: reward functions as in `gspo.train`; by default those of the run or recipe.
    - `k`: one k or several. `samples`: completions per problem (default: the largest k). `limit`: most problems.
    - `greedy`: also measure greedy decoding. `settings`: as in `gspo.train`."""
    if suite is not None:
        others = {"data": data is not None, "rewards": rewards is not None, "set": set is not None}
        others |= {"k": k != 1, "greedy": greedy}
        if wrong := [name for name, given in others.items() if given]:
            raise ConfigError(
                f"{WHERE}: {wrong[0]} has no effect with suite, whose protocol decides it; leave one of them out"
            )
    ks = sorted({k} if isinstance(k, int) else {*k})
    pairs = pairs_of(settings, where=WHERE)
    located = Rewards(specs=(), own={}, notes=())
    if rewards is not None:
        located = locate(rewards, where=WHERE)
        pairs["reward.functions"] = list(located.specs)
    quiet_libraries()
    from gspo.record.metrics import evaluation_records

    common: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "recipe": None if recipe is None else os.fspath(recipe),
        "limit": limit,
        "seed": seed,
        "overrides": [as_override(key, value) for key, value in pairs.items()],
        "trust_run": trust_run,
    }
    name = str(model.path) if isinstance(model, Run) else os.fspath(model)
    with TemporaryDirectory(prefix="gspo-") as folder, in_process.given(located.own):
        if suite is not None:
            measured = measure_suite(name, suite, samples=samples, **common)
        else:
            measured = measure_model(
                name,
                data=None if data is None else _data(data, Path(folder)),
                set_name=set,
                ks=ks,
                samples=max(ks) if samples is None else samples,
                greedy=greedy,
                **common,
            )
    return EvaluationResult(
        model=measured.record["model"],
        problems=measured.record["problems"],
        samples=measured.record["samples"],
        unscored=measured.record["unscored"],
        accuracy=measured.evaluation.accuracy,
        numbers=measured.numbers,
        completions=tuple(evaluation_records(measured.evaluation)),
        text="\n".join(measured.lines),
    )


def _data(given: Any, folder: Path) -> str:
    """A file or a task that `gspo eval --data` reads."""
    file = folder / "data.jsonl"
    data = inputs.data_of(given, file, where=WHERE, name="data")
    if data.text:
        file.write_text(data.text, encoding="utf-8")
    return str(next(iter(data.settings.values())))


def as_override(key: str, value: Any) -> str:
    """A setting as on the command line."""
    kind = type_of(key)
    raw = isinstance(value, str) and (kind is str or typing.get_origin(kind) is typing.Literal)
    return f"--{key}={value if raw else toml_value(value)}"
