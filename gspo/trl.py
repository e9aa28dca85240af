"""TRL's `GRPOConfig` and `GRPOTrainer`, so that a script trains with gspo after its import lines were changed.

    from gspo.trl import GRPOConfig, GRPOTrainer

In: the arguments of TRL's classes. Out: a run of `gspo.train`. Invariant: an argument either has its effect, or is
refused by name. What a setting becomes is in the table of equivalents, and nowhere else.
"""

from __future__ import annotations

import difflib
import importlib
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gspo.api.evaluation import EvaluationResult, evaluate
from gspo.api.rewards import why_here
from gspo.api.run import Run
from gspo.api.training import train
from gspo.callbacks import Callback, Training
from gspo.equivalents.equivalent import Conversion
from gspo.equivalents.sources import LORA_NAMES
from gspo.equivalents.trl import TABLE, convert
from gspo.errors import ConfigError

WHERE = "gspo.trl"
_UNAVAILABLE = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments of TRL's reward functions that gspo does not pass."""


class GRPOConfig:
    """TRL's GRPOConfig: its settings by name, with its defaults.

    `settings` are settings of gspo by dotted key, for what TRL has no name for. They take precedence."""

    def __init__(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> None:
        self.__dict__["_given"] = {}
        self.__dict__["settings"] = dict(settings or {})
        if output_dir is not None:
            given = {"output_dir": os.fspath(output_dir), **given}
        for name, value in given.items():
            setattr(self, name, value)
        # Now, and not only when training starts, because loading a model may take minutes.
        _check(convert(self.given, rows=1))

    @property
    def given(self) -> dict[str, Any]:
        """The settings that were given."""
        return dict(self._given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in TABLE:
            raise AttributeError(f"GRPOConfig has no {name!r}")
        return self._given.get(name, TABLE[name].default)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in TABLE:
            close = difflib.get_close_matches(name, TABLE, n=1)
            hint = f"did you mean {close[0]}?" if close else "settings of gspo go into settings={...}"
            raise ConfigError(f"{WHERE}.GRPOConfig: TRL has no setting {name!r}; {hint}")
        self._given[name] = value

    def __repr__(self) -> str:
        return f"GRPOConfig({', '.join(f'{name}={value!r}' for name, value in self._given.items())})"


class TrainOutput(NamedTuple):
    """What `GRPOTrainer.train` returns, as transformers' trainers do."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class TrainerState:
    """The progress of a run, as far as scripts read it from `trainer.state`."""

    def __init__(self) -> None:
        self.global_step = 0
        """Optimizer steps."""
        self.max_steps = 0
        self.log_history: list[dict[str, Any]] = []
        """The metrics of every rollout batch, with TRL's names for those that TRL has, too."""


class GRPOTrainer:
    """TRL's GRPOTrainer. `train` runs `gspo.train`; `run` is then the `gspo.Run`."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: Any = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        self.args = GRPOConfig() if args is None else args
        if not isinstance(self.args, GRPOConfig):
            raise ConfigError(
                f"{WHERE}.GRPOTrainer: args is {type(args).__module__}.{type(args).__name__}; import GRPOConfig from "
                "gspo.trl, too"
            )
        self._rewards = _rewards(reward_funcs)
        self._model = model
        self.processing_class = _tokenizer(model, processing_class)
        self._train_rows = _rows(train_dataset, "train_dataset")
        self._eval_rows = None if eval_dataset is None else _evaluation_rows(eval_dataset)
        self._callbacks = list(callbacks or ())
        self._values = {
            **self.args.given,
            "reward_processing_classes": reward_processing_classes,
            "optimizers": tuple(optimizers),
            "rollout_func": rollout_func,
            "tools": _code(tools, "tools"),
            "environment_factory": _code(environment_factory, "environment_factory"),
            **_adapters(model, peft_config),
            **_quantization(quantization_config),
        }
        self._conversion = convert(self._values, rows=len(self._train_rows))
        _check(self._conversion)
        self.state = TrainerState()
        self.run: Run | None = None

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train. `True` resumes the run in `output_dir`; the path of a run resumes that one."""
        settings = self._settings()
        resume: bool | str = resume_from_checkpoint or False
        if isinstance(resume, str):
            settings["run_dir"] = str(_run_of(Path(resume)))
        elif (
            not resume and (Path(str(settings.get("run_dir", ""))) / "config.toml").is_file() and "run_dir" in settings
        ):
            raise ConfigError(
                f"{WHERE}: output_dir {settings['run_dir']!r} already holds a run; call "
                "train(resume_from_checkpoint=True), or choose another output_dir"
            )
        for line in self._conversion.differences:
            print(f"{WHERE}: {line}")
        self.run = train(
            self._model,
            self._train_rows,
            self._rewards,
            eval_dataset=self._eval_rows if self._evaluates else None,
            tokenizer=self.processing_class,
            callbacks=[_State(self.state, self._updates), *map(self._adapted, self._callbacks)],
            resume=bool(resume),
            progress=not self.args.disable_tqdm,
            **settings,
        )
        outcome = self.run.outcome
        if outcome is not None and outcome.stopped_by is not None and not self.args.disable_tqdm:
            print(f"{WHERE}: in this script, train(resume_from_checkpoint=True) continues the run")
        return self._output(self.run)

    def evaluate(self, eval_dataset: Any = None, **options: Any) -> EvaluationResult:
        """Evaluate the trained model, or the given one before training, on the evaluation rows. `options` are those of
        `gspo.evaluate`."""
        rows = self._eval_rows if eval_dataset is None else _evaluation_rows(eval_dataset)
        if rows is None:
            raise ConfigError(f"{WHERE}: evaluate needs an eval_dataset")
        if self.run is None and not isinstance(self._model, str | os.PathLike):
            raise ConfigError(f"{WHERE}: evaluate before train needs a model by name; call train first")
        settings = {k: v for k, v in self._settings().items() if k.startswith(("rollout.", "data.chat", "data.answer"))}
        return evaluate(
            self.run or self._model,
            rows,
            rewards=self._rewards,
            samples=int(self.args.num_generations_eval or self.args.num_generations),
            **({} if self.run else settings),
            **options,
        )

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Write the model into a directory, by default `output_dir`, where it joins the files of the run."""
        run = self._trained("save_model")
        target = run.path if output_dir is None else Path(output_dir)
        with tempfile.TemporaryDirectory(prefix="gspo-") as folder:
            saved = run.save(Path(folder) / "model")
            target.mkdir(parents=True, exist_ok=True)
            for file in sorted(saved.iterdir()):
                shutil.move(file, target / file.name)

    @property
    def model(self) -> Any:
        """The trained model; before `train`, what was given."""
        return self._model if self.run is None else self.run.load()[0]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{WHERE}.GRPOTrainer has no {name!r}; after train(), trainer.run is the gspo.Run, with push, "
            "save, evaluate and metrics (docs/from-trl.md)"
        )

    # ---- arguments as settings

    @property
    def _updates(self) -> int:
        return int(self._conversion.settings["learner.mini_batches"])

    @property
    def _evaluates(self) -> bool:
        return bool(self._conversion.settings["eval.every"]) and self._eval_rows is not None

    def _settings(self) -> dict[str, Any]:
        settings = dict(self._conversion.settings)
        if self._evaluates:
            del settings["data.held_out"]
        else:
            settings["eval.every"] = 0
        # TRL wraps messages in the chat template, and leaves texts as they are.
        text = isinstance(self._train_rows[0].get("prompt"), str)
        settings["data.chat"] = "no" if text else "auto"
        plain = all(
            isinstance(row.get("answer"), str | int | float) and row["answer"] != "" for row in self._train_rows
        )
        settings["data.answer_field"] = "answer" if plain else ""
        return settings | self.args.settings

    def _adapted(self, callback: Any) -> Callback:
        built = callback() if isinstance(callback, type) else callback
        return built if isinstance(built, Callback) else _TrainerCallback(built, self.args, self.state, self._updates)

    def _trained(self, name: str) -> Run:
        if self.run is None:
            raise ConfigError(f"{WHERE}: {name}: call train() first")
        return self.run

    def _output(self, run: Run) -> TrainOutput:
        losses = [row["loss/policy"] for row in run.rows if row.get("loss/policy") is not None]
        loss = sum(losses) / len(losses) if losses else math.nan
        return TrainOutput(self.state.global_step, loss, {"train_loss": loss})


def _tokenizer(model: Any, given: Any) -> Any:
    """The tokenizer of a model object, by default that of its name. A model by name has its own."""
    if not hasattr(model, "save_pretrained"):
        return None
    if hasattr(model, "peft_config"):
        raise ConfigError(f"{WHERE}.GRPOTrainer: model has adapters already; pass the base model and peft_config")
    if given is not None:
        return given
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model.config._name_or_path)


def _check(done: Conversion) -> None:
    """Refuse what has no equivalent, all of it at once."""
    if done.lost:
        raise ConfigError(f"{WHERE}: no equivalent of " + "; ".join(done.lost.values()))


def _rows(given: Any, name: str) -> list[Mapping[str, Any]]:
    if given is None:
        raise ConfigError(f"{WHERE}.GRPOTrainer: {name} is required")
    if not hasattr(given, "__len__"):
        raise ConfigError(f"{WHERE}.GRPOTrainer: {name}: rows are read once, before training; pass a Dataset or a list")
    rows = list(given)
    if not rows or not isinstance(rows[0], Mapping):
        raise ConfigError(f"{WHERE}.GRPOTrainer: {name} must be rows with a prompt, such as a datasets.Dataset")
    if any(name in rows[0] for name in ("image", "images")):
        raise ConfigError(f"{WHERE}.GRPOTrainer: {name} has images; gspo trains on text")
    return rows


def _evaluation_rows(given: Any) -> Any:
    if isinstance(given, Mapping):
        return {str(name): _rows(rows, "eval_dataset") for name, rows in given.items()}
    return _rows(given, "eval_dataset")


def _rewards(given: Any) -> list[Any]:
    """The reward functions. Objects with `__call__`, partials and `async` functions are functions, too."""
    functions = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    for function in functions:
        if isinstance(function, str) or hasattr(function, "forward"):
            raise ConfigError(
                f"{WHERE}.GRPOTrainer: reward_funcs: a reward model is a reward function of gspo "
                "(docs/rewards.md#reward-models); it has no equivalent in GRPOTrainer's arguments"
            )
        code = getattr(function, "__code__", None)
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()
        wanted = [name for name in _UNAVAILABLE if name in names]
        if wanted:
            name = getattr(function, "__name__", function)
            raise ConfigError(
                f"{WHERE}.GRPOTrainer: reward_funcs: {name} asks for {wanted[0]}, which gspo does not pass"
            )
    return functions


def _code(given: Any, name: str) -> Any:
    """Tools or a class as `file.py:name,name`, which the processes of environments import."""
    if not given:
        return None
    if isinstance(given, Mapping):
        raise ConfigError(f"{WHERE}.GRPOTrainer: {name}: one environment class per run, not a dict of them")
    items = list(given) if isinstance(given, list | tuple) else [given]
    places = []
    for item in items:
        module = importlib.import_module(item.__module__)
        file = getattr(module, "__file__", None) or ""
        importable = why_here(item) == "" if not isinstance(item, type) else item.__module__ != "__main__"
        if not importable:
            raise ConfigError(
                f"{WHERE}.GRPOTrainer: {name}: {item.__name__} must be at the top of a file of its own, because every "
                "conversation has a process that imports it"
            )
        places.append((file, item.__name__))
    if len({file for file, _ in places}) > 1:
        raise ConfigError(f"{WHERE}.GRPOTrainer: {name}: put them into one file")
    return f"{places[0][0]}:{','.join(function for _, function in places)}"


def _adapters(model: Any, given: Any) -> dict[str, Any]:
    """peft's LoraConfig as the settings of TRL's command-line scripts."""
    if given is None:
        return {}
    if type(given).__name__ != "LoraConfig":
        raise ConfigError(
            f"{WHERE}.GRPOTrainer: peft_config: only LoraConfig has an equivalent, not {type(given).__name__}"
        )
    plain = type(given)()
    changed = {k: v for k, v in vars(given).items() if v != getattr(plain, k, None) and k in _fields(given)}
    unknown = [name for name in changed if name not in LORA_NAMES and name not in _LORA_UNNEEDED]
    if unknown:
        raise ConfigError(f"{WHERE}.GRPOTrainer: peft_config: LoraConfig({unknown[0]}=...) has no equivalent")
    values = {theirs: getattr(given, ours) for ours, theirs in LORA_NAMES.items()}
    values["lora_target_modules"] = _target_modules(model, given)
    return {"use_peft": True, **values}


_LORA_UNNEEDED = ("base_model_name_or_path", "peft_type", "inference_mode", "revision", "auto_mapping")


def _fields(given: Any) -> Mapping[str, Any]:
    return dict(getattr(given, "__dataclass_fields__", {}))


def _target_modules(model: Any, given: Any) -> list[str] | None:
    """The layers that peft would adapt: those that are named, or those that it knows for the type of the model."""
    named = given.target_modules
    if isinstance(named, str):
        return [named]
    if named:
        return sorted(named)
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as known
    from transformers import AutoConfig

    config = getattr(model, "config", None) or AutoConfig.from_pretrained(os.fspath(model))
    return sorted(known.get(config.model_type, ())) or None


def _quantization(given: Any) -> dict[str, Any]:
    """transformers' BitsAndBytesConfig as the settings of TRL's command-line scripts."""
    if given is None:
        return {}
    names = {
        "load_in_4bit": "load_in_4bit",
        "load_in_8bit": "load_in_8bit",
        "bnb_4bit_quant_type": "bnb_4bit_quant_type",
        "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
    }
    return {theirs: getattr(given, ours, None) for ours, theirs in names.items()}


def _run_of(path: Path) -> Path:
    """The run of a checkpoint directory, or the run itself."""
    return path.parent.parent if path.parent.name == "checkpoints" else path


# ------------------------------------------------------------------------------------------------- callbacks

LOGGED = {
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "loss/policy": "loss",
    "grad/norm": "grad_norm",
    "entropy/mean": "entropy",
    "kl/ref": "kl",
    "length/mean": "completions/mean_length",
    "length/truncated_fraction": "completions/clipped_ratio",
    "groups/uniform_fraction": "frac_reward_zero_std",
}
"""TRL's names of metrics."""


class _State(Callback):
    """Keeps `trainer.state`."""

    def __init__(self, state: TrainerState, updates: int) -> None:
        self._state, self._updates = state, updates

    def on_start(self, training: Training) -> None:
        self._state.max_steps = training.steps * self._updates
        self._state.global_step = training.step * self._updates

    def on_step(self, training: Training, step: int, metrics: Mapping[str, Any]) -> None:
        self._state.global_step = step * self._updates
        self._state.log_history.append(_logs(metrics, self._state.global_step))


def _logs(metrics: Mapping[str, Any], step: int) -> dict[str, Any]:
    return {**metrics, **{theirs: metrics[ours] for ours, theirs in LOGGED.items() if ours in metrics}, "step": step}


class _Control:
    """What a callback may ask for."""

    should_training_stop = False


class _TrainerCallback(Callback):
    """A TrainerCallback of transformers. Its methods for the start, the end, steps, logs and evaluations are called."""

    CALLED = ("on_init_end", "on_train_begin", "on_train_end", "on_step_begin", "on_step_end", "on_log", "on_evaluate")

    def __init__(self, built: Any, args: GRPOConfig, state: TrainerState, updates: int) -> None:
        self._built, self._args, self._state, self._updates = built, args, state, updates
        self._control = _Control()
        base = next((c for c in type(built).__mro__ if c.__name__ == "TrainerCallback"), object)
        own = [
            n for n in dir(built) if n.startswith("on_") and getattr(type(built), n, None) is not getattr(base, n, None)
        ]
        never = [name for name in own if name not in self.CALLED]
        if base is object or never:
            why = f"its {never[0]} would never be called" if never else "it is no TrainerCallback"
            raise ConfigError(f"{WHERE}.GRPOTrainer: callbacks: {type(built).__name__}: {why}; see gspo.Callback")

    def _call(self, name: str, training: Training, **given: Any) -> None:
        method = getattr(self._built, name)
        found = method(self._args, self._state, self._control, model=training.model, **given)
        if (found or self._control).should_training_stop:
            training.stop(f"{type(self._built).__name__} stopped the run")

    def on_start(self, training: Training) -> None:
        self._call("on_init_end", training)
        self._call("on_train_begin", training)

    def on_step(self, training: Training, step: int, metrics: Mapping[str, Any]) -> None:
        self._call("on_step_begin", training)
        self._call("on_step_end", training)
        self._call("on_log", training, logs=_logs(metrics, self._state.global_step))

    def on_evaluation(self, training: Training, step: int, metrics: Mapping[str, Any]) -> None:
        self._call("on_evaluate", training, metrics=dict(metrics))

    def on_end(self, training: Training) -> None:
        self._call("on_train_end", training)
