"""`gspo eval`: pass@k and avg@k of a model, a checkpoint or a run.

In: a model and problems. Out: accuracies with intervals, and files if asked for. Invariant: a model is never evaluated
on problems that it was trained on, nor on duplicates of them. `measure_model` and `measure_suite` print and write
nothing, because `gspo.evaluate` calls them too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo import aliases
from gspo import config as settings
from gspo.commands.arguments import add_checkpoint, add_trust_run, checkpoint_of
from gspo.commands.command import Command, quiet_libraries
from gspo.commands.harness import add_harness_arguments, check_no_harness, run_harness
from gspo.config import Config
from gspo.data.sources import check_file
from gspo.errors import ConfigError, GspoError
from gspo.record import run_format
from gspo.record.progress import life_signs
from gspo.record.run_dir import json_line, replace_text, writing
from gspo.suites import suite_names
from gspo.types import Prompt

# At run time torch is imported only once a command needs it: `gspo --help` and `gspo watch` start without it.
if TYPE_CHECKING:
    from gspo.evaluation import Estimate, Evaluation, MeanEstimate
    from gspo.rollout.engine import Engine
    from gspo.rollout.gather import Scorer

FRESH = 1000
"""How many problems of a generated task `gspo eval` uses without `--limit`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalReport:
    """The result of an evaluation."""

    lines: Sequence[str]
    """The numbers as text."""
    numbers: Mapping[str, Estimate | MeanEstimate]
    record: Mapping[str, Any]
    """The numbers, and what was evaluated, in JSON's types."""
    evaluation: Evaluation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="model directory, hub name, .gguf file, or a run directory (its newest checkpoint)")
    add(
        "--suite",
        metavar="NAME[=FILE]",
        help=f"evaluate on a published benchmark with its protocol: {', '.join(suite_names())}; problems come from "
        "FILE, or from the hub (docs/evaluation.md)",
    )
    add("--data", help="problems to evaluate on: a data file, or the name of a generated task")
    add(
        "--recipe",
        help="recipe with the data, reward and sampling settings and the held-out problems "
        "(default for a run: its own)",
    )
    add_checkpoint(parser)
    add("--set", metavar="NAME", help="evaluate on this set of the run's or recipe's eval.sets")
    add_trust_run(parser)
    add("--k", help="values of k for pass@k and avg@k, separated by commas, for example 1,8 (default: 1)")
    add("--samples", type=int, help="completions per problem (default: the largest k)")
    add("--limit", type=int, help="use at most this many problems")
    add("--greedy", action="store_true", help="also measure greedy accuracy")
    add("--seed", type=int, default=0, help="random seed for sampling (default: 0)")
    add("--json", metavar="FILE", help="write the numbers to this file")
    add("--completions", metavar="FILE", help="write every completion to this file (JSONL)")
    add(*aliases.EVAL_OPTIONS, dest="old_completions", help=argparse.SUPPRESS)
    add_harness_arguments(parser)


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    if options.harness:
        names = ("suite", "data", "recipe", "set", "k", "samples", "completions", "old_completions")
        return run_harness(options, overrides, unused=dict.fromkeys(names) | {"greedy": False, "seed": 0})
    check_no_harness(options)
    quiet_libraries()
    completions = _completions_path(options)
    _check_paths(options.json, completions)
    measured = _measure(options, overrides)
    print("\n".join(measured.lines))
    if options.json:
        replace_text(Path(options.json), json.dumps(_finite(measured.record), indent=2) + "\n")
    if completions:
        _write_completions(Path(completions), measured.evaluation)
    return 0


def _measure(options: argparse.Namespace, overrides: list[str]) -> EvalReport:
    if options.suite is not None:
        for option in ("data", "set", "k", "greedy"):
            if getattr(options, option):
                raise ConfigError(
                    f"--{option}: has no effect with --suite, whose protocol decides it; leave one of them out"
                )
        return measure_suite(
            options.model,
            options.suite,
            checkpoint=options.checkpoint,
            recipe=options.recipe,
            samples=options.samples,
            limit=options.limit,
            seed=options.seed,
            overrides=overrides,
            trust_run=options.trust_run,
        )
    ks = _ks(options.k or "1")
    return measure_model(
        options.model,
        checkpoint=options.checkpoint,
        data=options.data,
        recipe=options.recipe,
        set_name=options.set,
        ks=ks,
        samples=max(ks) if options.samples is None else options.samples,
        limit=options.limit,
        greedy=options.greedy,
        seed=options.seed,
        overrides=overrides,
        trust_run=options.trust_run,
    )


def measure_suite(
    model: str,
    suite: str,
    *,
    checkpoint: str,
    recipe: str | None,
    samples: int | None,
    limit: int | None,
    seed: int,
    overrides: list[str],
    trust_run: bool,
) -> EvalReport:
    """Evaluate on a suite, `NAME` or `NAME=FILE`."""
    from gspo.suites.evaluate import check_overrides, evaluate_on_suite, suite_settings
    from gspo.suites.suite import SuiteSource

    for option, value in (("samples", samples), ("limit", limit)):
        if value is not None and value < 1:
            raise ConfigError(f"--{option}: must be at least 1, not {value}")
    check_overrides(overrides)
    source = SuiteSource.parse(suite)
    tree, _, where = _model_settings(model, checkpoint, recipe, required=False)
    tree = suite_settings(tree, source) | {"seed": seed}
    config = settings.override(tree, overrides, where=where or "eval", report_old_names=recipe is not None)
    settings.check(config)
    _check_trust(model, config, recipe, trust_run)
    with life_signs():
        result = evaluate_on_suite(config, source, samples=samples, limit=limit, seed=seed)
    return EvalReport(
        lines=list(result.lines()), numbers=result.numbers, record=result.as_data(), evaluation=result.evaluation
    )


def _check_paths(json_path: str | None, completions_path: str | None) -> None:
    """Now, because sampling may take hours, and its result would be lost if the directory does not exist."""
    for option, path in (("--json", json_path), ("--completions", completions_path)):
        if path and not Path(path).parent.is_dir():
            raise ConfigError(f"{option}: {Path(path).parent}: no such directory")


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _completions_path(options: argparse.Namespace) -> str | None:
    """The file of `--completions`, which may be given under its old name."""
    path: str | None = options.completions
    if options.old_completions is not None:
        ((old, new),) = aliases.EVAL_OPTIONS.items()
        if path is not None:
            raise ConfigError(aliases.duplicate_name_error(old, new))
        warnings.warn(aliases.renamed_note(old, new), FutureWarning, stacklevel=2)
        path = options.old_completions
    return path


def _ks(text: str) -> list[int]:
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ks = []
    if not ks or ks[0] < 1:
        raise ConfigError(f"--k: {text!r} is not a list of positive numbers; write for example --k 1,8")
    return ks


def measure_model(
    model: str,
    *,
    checkpoint: str = "newest",
    data: str | None,
    recipe: str | None,
    set_name: str | None = None,
    ks: Sequence[int],
    samples: int,
    limit: int | None,
    greedy: bool,
    seed: int,
    overrides: Sequence[str],
    trust_run: bool = False,
) -> EvalReport:
    """Evaluate a model on problems."""
    from gspo.evaluation import evaluate

    # pass@k is estimated from subsets of k completions, so there must be at least k.
    if samples < max(ks):
        raise ConfigError(
            f"--samples: {samples} completions per problem are too few for pass@{max(ks)}; give at least {max(ks)}"
        )
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit: must be at least 1, not {limit}")
    if data and set_name:
        raise ConfigError("--set: names problems, and so does --data; leave one of them out")
    config = _eval_config(model, checkpoint, data, recipe, seed, overrides)
    if set_name is not None and set_name not in config.eval.sets:
        known = ", ".join(config.eval.sets) or "none"
        raise ConfigError(f"--set: the settings have no eval.sets.{set_name}; there are: {known}")
    _check_trust(model, config, recipe, trust_run)
    with life_signs(), ExitStack() as stack:
        problems, engine, rewards = _eval_components(config, stack, _Wanted(data is None, set_name, limit))
        sampling = config.rollout.sampling
        # The random streams of the evaluations during a run.
        stream = f"eval/{set_name}" if set_name else "eval"
        evaluation = evaluate(
            engine,
            rewards,
            problems.prompts,
            samples=samples,
            greedy=greedy,
            sampling=sampling,
            seed=seed,
            stream=stream,
        )
    numbers: dict[str, Estimate | MeanEstimate] = {f"avg@{k}": evaluation.avg_at(k) for k in ks}
    numbers |= {f"pass@{k}": evaluation.pass_at(k) for k in ks}
    if evaluation.greedy is not None:
        numbers["greedy"] = evaluation.greedy
    numbers["reward"] = evaluation.reward
    return EvalReport(
        lines=[*problems.notes, *_lines(config, evaluation, numbers, samples)],
        numbers=numbers,
        record={
            "model": config.model.path,
            "problems": len(evaluation.groups),
            "samples": samples,
            "unscored": evaluation.unscored,
            **{name: dataclasses.asdict(estimate) for name, estimate in numbers.items()},
        },
        evaluation=evaluation,
    )


def _eval_config(
    model: str, checkpoint: str, data: str | None, recipe: str | None, seed: int, overrides: Sequence[str]
) -> Config:
    """The settings of the recipe, or of the run that the model comes from, with this model and data."""
    given = recipe is not None
    if not recipe and not data and not Path(model).exists():
        raise ConfigError(
            f"{model}: no such run or model here; give a run directory, or a model with --data, --suite or --recipe"
        )
    tree, model, recipe = _model_settings(model, checkpoint, recipe, required=not data)
    if data:
        _replace_data(tree, data)
        # Problems that are not evaluated need not be read.
        tree["eval"] = {k: v for k, v in tree.get("eval", {}).items() if k != "sets"}
    # The recipe's seed decides which problems are held out.
    tree["seed"] = seed if data else tree.get("seed", seed)
    # Old names are not reported for the settings of a run, which nobody is going to edit.
    config = settings.override(tree, overrides, where=recipe or "eval", report_old_names=given)
    if data:
        config = _without_unused_options(config, tree)
    settings.check(config)
    return config


def _model_settings(
    model: str, checkpoint: str, recipe: str | None, *, required: bool
) -> tuple[dict[str, Any], str, str | None]:
    """The settings of the recipe, or of the run that the model comes from, with the path of the model in them; that
    path; and the recipe."""
    from gspo.model.adapter import base_of

    run = Path(model)
    if (of_run := checkpoint_of(run, checkpoint)) is not None:
        # Refuses a run directory of a later format before its settings are misread.
        run_format.read(run)
        recipe = recipe or str(run / "config.toml")
        model = str(of_run)
    if not recipe and required:
        raise ConfigError(
            "eval: no problems; give --suite NAME, --data FILE, --data TASK, or --recipe RECIPE for its held-out "
            "problems"
        )
    tree: dict[str, Any] = settings.read_toml(settings.find_recipe(recipe)) if recipe else {}
    dropped = {"build", "build_options", "path"}
    if base_of(model) is None:
        dropped |= {"lora", "quantize"}  # a full model has no adapters, even if the recipe trains some
    tree["model"] = {k: v for k, v in tree.get("model", {}).items() if k not in dropped} | {"path": model}
    # The model was already trained by the cold start of its run; a second one would change what is evaluated.
    tree["cold_start"] = {}
    return tree, model, recipe


def _without_unused_options(config: Config, tree: Mapping[str, Any]) -> Config:
    """The config without options in `tree`, the recipe, of reward functions that only the recipe's problems used."""
    unused = tree.get("reward", {}).get("options", {}).keys() - set(config.reward_functions)
    options = {name: table for name, table in config.reward.options.items() if name not in unused}
    return dataclasses.replace(config, reward=dataclasses.replace(config.reward, options=options))


def _check_trust(model: str, config: Config, recipe: str | None, trust_run: bool) -> None:
    """Code that only the run directory names needs `--trust-run`. A recipe or override names its code explicitly."""
    from gspo import trust

    own = Path(model) / "config.toml"
    if recipe or config.model.path == model:
        if trust_run:
            raise ConfigError(
                "--trust-run: has no effect here, because no settings come from a run directory; leave it out"
            )
        return
    named = set(trust.all_code(settings.from_tree(settings.read_toml(own), where=str(own)), [config.model.path]))
    # What an override on the command line names was typed by the user, who trusts it.
    code = [c for c in trust.all_code(config, [config.model.path]) if c in named]
    trust.check(Path(model), code, trust=trust_run)


def _replace_data(tree: dict[str, Any], data: str) -> None:
    """Replace the recipe's problems, but keep the settings that say how problems are read and presented."""
    old = tree.get("data", {})
    presentation = {"instruction", "system", "chat", "max_prompt_tokens", "on_bad_row"}
    if Path(data).suffix:
        check_file(data)  # a missing file must be reported before a missing reward for its problems
        kept = presentation | {"prompt_field", "prompt_template", "answer_field", "answer_after"}
        # Nothing is trained on here, so no problem needs to be held out: all of them are evaluated.
        tree["data"] = {k: v for k, v in old.items() if k in kept} | {"path": data, "held_out": 0}
    else:
        kept = presentation | ({"task_options"} if old.get("task") == data else set())
        tree["data"] = {k: v for k, v in old.items() if k in kept} | {"task": data, "held_out": 0}
        if not old.get("task"):
            tree["reward"] = {}  # a task has its own verifier


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """The problems to evaluate on."""

    held_out: bool
    """Whether they are the held-out problems, unless `set_name` says otherwise."""
    set_name: str | None
    limit: int | None


@dataclasses.dataclass(frozen=True)
class _UnseenProblems:
    """The problems that the model was not trained on."""

    prompts: Sequence[Prompt]
    notes: Sequence[str] = ()
    """What was excluded."""


def _eval_components(config: Config, stack: ExitStack, wanted: _Wanted) -> tuple[_UnseenProblems, Engine, Scorer]:
    from gspo.build import engine_for, environment_for, policy_for, reward_pool, tokenizer_for

    # Before the model, so that a reward that cannot be loaded is found early.
    rewards = reward_pool(config)
    stack.callback(rewards.close)
    tokenizer = tokenizer_for(config)
    problems = _unseen_problems(config, tokenizer, wanted)
    environment = environment_for(config, stack)
    if environment:
        problems = dataclasses.replace(problems, prompts=environment.open(problems.prompts, tokenizer))
    policy = policy_for(config, tokenizer, routers=False)
    engine = engine_for(config, policy)
    stack.callback(engine.close)
    if environment:
        engine = environment.engine(engine, policy)
    return problems, engine, rewards


def _unseen_problems(config: Config, tokenizer: Any, wanted: _Wanted) -> _UnseenProblems:
    """The problems to evaluate on, without those that the model was trained on and their duplicates."""
    from gspo.contamination import trained_on
    from gspo.data.problems import fresh_problems, identities, load_problems, load_set

    try:
        seen = trained_on(config.model.path, tokenizer)
    except GspoError as error:
        effect = "the problems it was trained on cannot be read, so they are not excluded from this evaluation"
        warnings.warn(f"{config.model.path}: {effect}: {error}", stacklevel=2)
        seen = frozenset()
    if config.data.task and not wanted.held_out:
        return _UnseenProblems(
            fresh_problems(config.data, tokenizer, config.seed, count=wanted.limit or FRESH, exclude=seen)
        )
    found: Sequence[Prompt]
    if wanted.set_name is not None:
        found, _ = load_set(wanted.set_name, config.eval.sets[wanted.set_name], tokenizer, config.seed)
    else:
        problems = load_problems(config.data, tokenizer, config.seed)
        found = problems.held_out if wanted.held_out else problems.train
    if not found:
        raise ConfigError("eval: the recipe has no held-out problems (data.held_out = 0); give problems with --data")
    unseen = [p for p in found if seen.isdisjoint(identities(p))]
    if not unseen:
        raise ConfigError(
            f"eval: {config.model.path} was trained on every one of these {len(found)} problems, or on others that ask "
            "the same; give unseen problems with --data"
        )
    excluded = len(found) - len(unseen)
    note = (
        f"excluded {excluded} of {len(found)} problems, because the model was trained on them or on duplicates of them"
    )
    return _UnseenProblems(unseen[: wanted.limit], [note] if excluded else [])


def _lines(
    config: Config, evaluation: Evaluation, numbers: Mapping[str, Estimate | MeanEstimate], samples: int
) -> Iterator[str]:
    """The numbers as text."""
    each = f"{samples} completion{'s' * (samples != 1)} each at temperature {config.rollout.temperature:g}"
    yield f"{config.model.path}: {len(evaluation.groups)} problems, {each}"
    yield from (f"  {name:<8} {estimate}" for name, estimate in numbers.items())
    if samples > 1:
        yield f"  avg@k uses the first k completions of a problem; pass@k is estimated from all {samples}"
    if evaluation.unscored:
        why = next((f"; the first failure: {s.failure}" for s in evaluation.scores if s.failure), "")
        yield f"  {evaluation.unscored} completions have no verdict (unscored) and are excluded{why}"


def _write_completions(path: Path, evaluation: Evaluation) -> None:
    from gspo.record.metrics import evaluation_records

    with (
        writing(path, "free disk space there, or choose another --completions"),
        path.open("w", encoding="utf-8") as out,
    ):
        out.writelines(json_line(record) for record in evaluation_records(evaluation))


COMMAND = Command(
    name="eval",
    help="Measure pass@k and avg@k of a model, with confidence intervals.",
    add_arguments=add_arguments,
    run=run,
    epilog="All settings of 'gspo train --help' work here, for example --data.prompt_field=question "
    "--reward.functions=math_answer",
    single_process=True,
)
