"""`gspo.train`: train a model from Python, or resume a run.

In: a model, rows, reward functions and settings. Out: a `Run`. Invariant: the run directory is that of `gspo train`
with a recipe of the same settings, so every command works on it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gspo import config as settings_of
from gspo.activity import activity
from gspo.api import inputs
from gspo.api.inputs import Inputs
from gspo.api.rewards import Rewards, locate
from gspo.api.run import Run
from gspo.api.settings import Pairs, config_of, pairs_of
from gspo.callbacks import Callback
from gspo.commands.command import quiet_libraries
from gspo.config import Config
from gspo.errors import ConfigError
from gspo.objectives.objective import Objective
from gspo.record.progress import Display, make_display
from gspo.record.run_dir import run_path
from gspo.reward import in_process

WHERE = "gspo.train"


def train(
    model: Any = None,
    dataset: Any = None,
    rewards: Any = None,
    *,
    objective: Any = None,
    eval_dataset: Any = None,
    tokenizer: Any = None,
    recipe: str | os.PathLike[str] | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    resume: bool | str | os.PathLike[str] = False,
    progress: bool = True,
    trust_run: bool = False,
    **settings: Any,
) -> Run:
    """Train a model and return its run.

    - `model`: a directory, a hub name or a `.gguf` file; a transformers model, with its `tokenizer`; or a dict of
      settings (`{"build": "tiny_dense"}`).
    - `dataset`: rows with a `prompt` and, if the rewards need one, an `answer`: a `datasets.Dataset`, a list of dicts,
      a pandas table, a file or a list of files; or the name of a generated task or of a hub dataset.
    - `rewards`: functions `fn(prompts, completions, **columns) -> list[float | None]`, names of built-in rewards, or
      `file.py:function`. A function that can be imported runs in worker processes, any other one in this process.
    - `objective`: a name (default: `gspo`), a dict with `name` and its settings, or the result of `gspo.objective`.
    - `eval_dataset`: held-out rows, or a dict of several evaluation sets. Without it, one row in ten is held out, at
      most 256.
    - `recipe`: a recipe to start from; all other arguments take precedence over it.
    - `callbacks`: instances of `gspo.Callback`.
    - `resume`: `True` resumes the run in `run_dir` if there is one and starts it otherwise; or the directory of a run.
    - `progress`: whether to show the progress. `trust_run`: run code that only the directory of a resumed run names.
    - `settings`: any setting: sections as dicts (`learner={"learning_rate": 1e-6}`) or by dotted key
      (`**{"learner.learning_rate": 1e-6}`), and `steps`, `seed`, `name`, `run_dir`, `tokens`.

    Ctrl-C saves a checkpoint and returns the run so far; a second one interrupts immediately. The model object that you
    pass is not changed: `run.load()` returns the trained one."""
    arguments = Arguments(
        model=model,
        dataset=dataset,
        rewards=rewards,
        objective=objective,
        eval_dataset=eval_dataset,
        tokenizer=tokenizer,
        recipe=recipe,
        settings=settings,
    )
    listeners = _checked_callbacks(callbacks)
    if resume is not False and resume is not True:
        if "run_dir" in settings:
            raise ConfigError(f"{WHERE}: resume names a run, and so does run_dir; keep one")
        path = Path(resume)
        arguments = replace(arguments, settings={**settings, "run_dir": str(path)})
        return _resume(path, arguments, listeners, progress=progress, trust_run=trust_run)
    if resume:
        if not settings.get("run_dir"):
            raise ConfigError(f'{WHERE}: resume=True needs run_dir="...", the directory of the run')
        path = Path(settings["run_dir"])
        if (path / "config.toml").is_file():
            return _resume(path, arguments, listeners, progress=progress, trust_run=trust_run)
    if trust_run:
        raise ConfigError(f"{WHERE}: trust_run has no effect unless a run is resumed; leave it out")
    return _start(arguments, listeners, progress=progress)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What describes a run: the arguments that `train`, `doctor` and `compare` share."""

    model: Any = None
    dataset: Any = None
    rewards: Any = None
    objective: Any = None
    eval_dataset: Any = None
    tokenizer: Any = None
    recipe: str | os.PathLike[str] | None = None
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Arguments as a config, and what is still to be written."""

    config: Config
    given: Pairs
    """The settings that the arguments give, by dotted key."""
    inputs: Inputs
    rewards: Rewards


def prepare(arguments: Arguments, folder: Callable[[Config], Path], *, where: str) -> PreparedRun:
    """The config of these arguments. `folder` says where its inputs will be."""
    own = pairs_of(arguments.settings, where=where)
    located = Rewards(specs=(), own={}, notes=())
    if arguments.rewards is not None:
        located = locate(arguments.rewards, where=where)
        _add(own, {"reward.functions": list(located.specs)}, "rewards", where)
    # Without the objects: their names depend on the run directory, and that is a setting.
    path = folder(config_of(arguments.recipe, own, where=where))
    _add(own, _objective(arguments.objective, where), "objective", where)
    found, model, tokenizer = _model(arguments, path, where)
    _add(own, found, "model", where)
    found, files = _data(arguments, path, own, where)
    _add(own, found, "dataset", where)
    config = config_of(arguments.recipe, own, where=where)
    given = Inputs(files=files, model=model, tokenizer=tokenizer)
    return PreparedRun(config=config, given=own, inputs=given, rewards=located)


def _add(pairs: Pairs, found: Mapping[str, Any], argument: str, where: str) -> None:
    for key, value in found.items():
        if key in pairs:
            raise ConfigError(f"{where}: {argument} sets {key}, which is given as well; keep one")
        pairs[key] = value


# ------------------------------------------------------------------------------------------------- arguments


def _objective(given: Any, where: str) -> Pairs:
    if given is None:
        return {}
    if isinstance(given, str | os.PathLike):
        return {"objective.name": os.fspath(given)}
    if isinstance(given, Mapping):
        return pairs_of({"objective": given}, where=where)
    if isinstance(given, Objective):
        return {f"objective.{key}": value for key, value in _settings_of_objective(given, where).items()}
    raise ConfigError(f"{where}: objective must be a name, a dict or the result of gspo.objective, not {given!r:.80}")


def _settings_of_objective(given: Objective, where: str) -> Pairs:
    """An objective of the table by its name and settings."""
    from gspo.objectives.objective import change, settings_of
    from gspo.objectives.table import base_objective, objective_names

    if given.name in objective_names():
        base = base_objective(given.name)
        before, after = settings_of(base), settings_of(given)
        changed = {k: v for k, v in after.items() if k not in before or before[k] != v}
        if change(base, changed) == given:
            return {"name": given.name, **changed}
    raise ConfigError(
        f"{where}: objective: {given.name!r} is not an objective of the table with other settings, so a run could not "
        'name it; write it into a file and pass "file.py:name"'
    )


def _model(arguments: Arguments, folder: Path, where: str) -> tuple[Pairs, Any, Any]:
    """The settings of the model and, if it is an object, the model and its tokenizer."""
    given, tokenizer = arguments.model, arguments.tokenizer
    saves = hasattr(given, "save_pretrained")
    if tokenizer is not None and not saves:
        raise ConfigError(
            f"{where}: tokenizer has no effect unless model is a model object; a directory or hub name has its own"
        )
    if given is None:
        return {}, None, None
    if isinstance(given, str | os.PathLike):
        return {"model.path": os.fspath(given)}, None, None
    if isinstance(given, Mapping):
        return pairs_of({"model": given}, where=where), None, None
    if not saves:
        raise ConfigError(
            f"{where}: model must be a directory, a hub name, a transformers model or a dict of settings, not "
            f"{type(given).__name__}"
        )
    if not hasattr(tokenizer, "save_pretrained"):
        raise ConfigError(f"{where}: a model object needs its tokenizer; pass tokenizer=...")
    return {"model.path": str((folder / "model").absolute())}, given, tokenizer


def _data(arguments: Arguments, folder: Path, pairs: Pairs, where: str) -> tuple[Pairs, dict[str, str]]:
    """The settings of the data, and the files to write."""
    found: Pairs = {}
    files: dict[str, str] = {}
    if arguments.dataset is not None:
        file = (folder / "dataset.jsonl").absolute()
        data = inputs.data_of(arguments.dataset, file, where=where, name="dataset")
        found |= {f"data.{key}": value for key, value in data.settings.items()}
        if data.text:
            files[file.name] = data.text
            found |= _defaults_of_rows(data, arguments, pairs)
    given = arguments.eval_dataset
    sets = given if isinstance(given, Mapping) else {} if given is None else {"": given}
    for name, rows in sets.items():
        file = (folder / f"{f'eval_{name}' if name else 'held_out'}.jsonl").absolute()
        data = inputs.data_of(rows, file, where=where, name=f"eval_dataset[{name!r}]" if name else "eval_dataset")
        if data.text:
            files[file.name] = data.text
        if name:
            found |= {f"eval.sets.{name}.{key}": value for key, value in data.settings.items()}
        elif "path" in data.settings:
            found["data.held_out_path"] = data.settings["path"]
        else:
            raise ConfigError(f"{where}: eval_dataset must be rows or a file; name others in eval.sets")
    return found, files


def _defaults_of_rows(data: inputs.Data, arguments: Arguments, pairs: Pairs) -> Pairs:
    """Settings that follow from the rows, unless they are given: whether they have answers, and how many are held
    out."""
    found: Pairs = {}
    if arguments.recipe is not None:
        return found
    if "data.answer_field" not in pairs and "answer" not in data.columns:
        found["data.answer_field"] = ""
    if arguments.eval_dataset is None and not {"data.held_out", "data.held_out_path"} & pairs.keys():
        found["data.held_out"] = inputs.held_out_share(data.rows)
    held_out = {**found, **pairs}.get("data.held_out")
    one_set = isinstance(arguments.eval_dataset, Mapping) or any(key.startswith("eval.sets.") for key in pairs)
    if held_out == 0 and not one_set and arguments.eval_dataset is None and "eval.every" not in pairs:
        found["eval.every"] = 0
    if isinstance(arguments.eval_dataset, Mapping) and not {"data.held_out", "data.held_out_path"} & pairs.keys():
        found["data.held_out"] = 0
    return found


def _checked_callbacks(callbacks: Callback | Sequence[Callback]) -> list[Callback]:
    found = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    for callback in found:
        if not isinstance(callback, Callback):
            hint = " (write it with parentheses)" if isinstance(callback, type) else ""
            raise ConfigError(
                f"{WHERE}: callbacks: {callback!r:.80} is no instance of a class that is derived from "
                f"gspo.Callback{hint}"
            )
    return found


# ------------------------------------------------------------------------------------------------- runs


def _start(arguments: Arguments, callbacks: Sequence[Callback], *, progress: bool) -> Run:
    settings_of.check_single_process()
    path: list[Path] = []

    def folder(config: Config) -> Path:
        path.append(run_path(config))
        return path[0] / inputs.FOLDER

    prepared = prepare(arguments, folder, where=WHERE)
    run = path[0]
    # The default name has the time in it, and the inputs are already named.
    config = replace(prepared.config, run_dir=str(run))
    settings_of.check(config)
    if (run / "config.toml").exists():
        raise ConfigError(
            f"{WHERE}: {run} already holds a run; continue it with resume=True, or choose another run_dir"
        )
    try:
        with _display(progress) as display, in_process.given(prepared.rewards.own):
            from gspo.trainer import train as train_run

            for note in prepared.rewards.notes:
                display.message(note)
            prepared.inputs.write(run / inputs.FOLDER)
            outcome = train_run(config, display, callbacks=callbacks)
    finally:
        if not (run / "config.toml").exists():
            inputs.remove(run)
    return _finished(Run(run, outcome=outcome, rewards=prepared.rewards.own), progress)


def _resume(path: Path, arguments: Arguments, callbacks: Sequence[Callback], *, progress: bool, trust_run: bool) -> Run:
    settings_of.check_single_process()
    stored = Run(path).config
    if arguments.model is not None and not isinstance(arguments.model, str | os.PathLike | Mapping):
        # The run has it in `inputs/`, and it may have been trained since.
        arguments = replace(arguments, model=None, tokenizer=None)
    prepared = prepare(arguments, lambda config: path / inputs.FOLDER, where=WHERE)
    prepared.inputs.check_same(path / inputs.FOLDER, where=WHERE)
    changed = _changed(prepared, stored)
    steps = changed.pop("steps", None)
    with _display(progress) as display, in_process.given(prepared.rewards.own):
        from gspo.trainer import resume as resume_run

        for note in prepared.rewards.notes:
            display.message(note)
        outcome = resume_run(path, display, steps=steps, settings=changed, trust_run=trust_run, callbacks=callbacks)
    return _finished(Run(path, outcome=outcome, rewards=prepared.rewards.own), progress)


def _changed(prepared: PreparedRun, stored: Config) -> Pairs:
    """The settings that are given and differ from those of the run. Resuming refuses those that may not change."""
    from gspo.build import with_dtype

    now = settings_of.flat(with_dtype(settings_of.anchored(prepared.config)))
    before = settings_of.flat(stored)
    given = {k: v for k, v in now.items() if any(k == key or k.startswith(f"{key}.") for key in prepared.given)}
    return {k: v for k, v in given.items() if k != "run_dir" and (k not in before or before[k] != v)}


@contextmanager
def _display(progress: bool) -> Iterator[Display]:
    """Show the progress, also while the libraries are imported."""
    with closing(make_display() if progress else Silent()) as display:
        with activity("importing torch and transformers"):
            quiet_libraries()
        yield display


def _finished(run: Run, progress: bool) -> Run:
    """Say how to continue a run that was stopped."""
    outcome = run.outcome
    assert outcome is not None
    if not progress:
        return run
    if outcome.stopped_by is not None or outcome.stop_reason is not None:
        why = f" ({outcome.stop_reason})" if outcome.stop_reason else ""
        print(
            f"Stopped after step {outcome.step} of {outcome.steps}{why}. Continue with: "
            f"gspo.train(resume={str(run.path)!r}, ...)"
        )
    return run


class Silent:
    """A display that shows nothing but warnings of Python."""

    def message(self, text: str) -> None:
        pass

    def cold_start(self, step: int, steps: int, loss: float, accuracy: float) -> None:
        pass

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        pass

    def step(self, step: int, steps: int, metrics: Mapping[str, Any], timings: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass
