"""The `gspo` command: one thin function per sub-command.

Any setting can be given as `--section.key=value`; errors that are the user's to mend are printed as one line.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

# Idle OpenMP threads must sleep, not spin: on small models spinning is many times slower. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from gspo import __version__, config
from gspo.errors import ConfigError, GspoError
from gspo.safe_output import safe_output

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command; the exit code is 0, 1 for an error, 2 for a misuse, 128 + signal when stopped by one."""
    with safe_output():
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    options, overrides = parser.parse_known_args(arguments)
    stray = [o for o in overrides if not o.startswith("--")]
    if stray:
        parser.error(f"unexpected argument {stray[0]!r}; settings are given as --section.key=value")
    warnings.showwarning = _show_warning
    try:
        if options.run in (train, demo, evaluate, compare, replay, doctor):
            config.check_single_process()
        return int(options.run(options, overrides))
    except GspoError as error:
        print(f"gspo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("gspo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in FULL:
            traceback.print_exc()
            return 1
        where = f"{error.filename}: " if error.filename else ""
        print(f"gspo: {where}{error.strerror}; make room on the disk, then repeat the command", file=sys.stderr)
        return 1
    except Exception:
        # A bug. Printed here, where secrets and control characters in its message are taken out.
        traceback.print_exc()
        return 1


def train(options: argparse.Namespace, overrides: list[str]) -> int:
    """Train by a recipe, or continue a run."""
    if options.resume:
        return _resume(options, overrides)
    if options.trust_run:
        raise ConfigError("--trust-run: has no effect without --resume: a recipe that you name is run as it is; leave it out")  # fmt: skip
    if not options.recipe:
        raise ConfigError("train: name a recipe (a .toml file), or --resume RUN")
    return _train(options.recipe, options, overrides)


def demo(options: argparse.Namespace, overrides: list[str]) -> int:
    """The built-in example: a small mixture-of-experts model learns addition."""
    return _train(str(config.recipe_dir() / "demo.toml"), options, overrides)


def evaluate(options: argparse.Namespace, overrides: list[str]) -> int:
    """Measure a model on problems."""
    _quiet_libraries()
    from gspo.evaluation import evaluate_model

    ks = _ks(options.k)
    return evaluate_model(
        options.model, data=options.data, recipe=options.recipe, ks=ks, samples=options.samples or max(ks), limit=options.limit,
        greedy=options.greedy, json_path=options.json, replies_path=options.replies, seed=options.seed, overrides=overrides,
        trust_run=options.trust_run,
    )  # fmt: skip


def objectives(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print the table of objectives."""
    _no_overrides(overrides)
    from gspo.objectives import describe

    print(json.dumps(describe.as_data(), indent=2) if options.json else describe.as_text())
    return 0


def compare(options: argparse.Namespace, overrides: list[str]) -> int:
    """Train several objectives at equal sampled tokens from the same cold start, and report."""
    from gspo.view.compare.comparison import Request, report
    from gspo.view.compare.comparison import compare as run

    if options.report:
        _no_overrides([*overrides, *filter(None, (options.recipe, options.objectives))])
        return report(options.report)
    if not options.recipe or not options.objectives:
        raise ConfigError(
            "compare: name a recipe and --objectives, for example gspo compare demo --objectives grpo,gspo"
        )
    steps = [f"--steps={options.steps}"] if options.steps is not None else []
    return run(
        Request(
            recipe=options.recipe, objectives=options.objectives, seeds=options.seeds, tokens=options.tokens,
            out=options.out, jobs=options.jobs, overrides=steps + overrides, trust_run=options.trust_run,
        )
    )  # fmt: skip


def replay(options: argparse.Namespace, overrides: list[str]) -> int:
    """What every objective would have done with a step that a run has taken."""
    _no_overrides(overrides)
    _quiet_libraries()
    from gspo.view.replay.replay import Request
    from gspo.view.replay.replay import replay as run

    return run(
        Request(
            run=options.run_dir, step=options.step, objectives=options.objectives, sweeps=options.sweep,
            mini_batch=options.mini_batch, out=options.out, device=options.device, trust_run=options.trust_run,
        )
    )  # fmt: skip


def doctor(options: argparse.Namespace, overrides: list[str]) -> int:
    """Look a recipe over before it costs anything."""
    _quiet_libraries()
    from gspo.preflight.report import doctor as run

    overrides = _given(options) + overrides
    return run(options.recipe, overrides, quick=options.quick, as_json=options.json, prompts=options.prompts)


def merge(options: argparse.Namespace, overrides: list[str]) -> int:
    """Add a LoRA adapter to its model."""
    _no_overrides(overrides)
    _quiet_libraries()
    from gspo.merge import merge as run

    source, out = run(options.source, options.out)
    print(f"Merged model:  {out}  (from {source})")
    return 0


def watch(options: argparse.Namespace, overrides: list[str]) -> int:
    """Show runs while they train, or afterwards."""
    _no_overrides(overrides)
    if options.text:
        from gspo.view.terminal import watch_text

        return watch_text(options.runs)
    from gspo.view.dashboard.server import watch as serve

    return serve(options.runs, port=options.port, ready=lambda text: print(text, flush=True))


def report(options: argparse.Namespace, overrides: list[str]) -> int:
    """Write runs as one HTML file."""
    _no_overrides(overrides)
    from gspo.view.report import write_report

    print(f"Report:  {write_report(options.runs, Path(options.out))}")
    return 0


def serve(options: argparse.Namespace, overrides: list[str]) -> int:
    """Run a vLLM server that a training run can sample from."""
    from gspo.rollout.vllm.serve import serve as run

    return run(
        options.model, host=options.host, port=options.port, experts=options.experts, token_file=options.token_file, more=overrides
    )  # fmt: skip


def _train(recipe: str, options: argparse.Namespace, overrides: list[str]) -> int:
    settings = config.load(recipe, _given(options) + overrides)
    _quiet_libraries()
    from gspo.record.progress import make_display
    from gspo.trainer import train as run

    return _report(run(settings, make_display()))


def _given(options: argparse.Namespace) -> list[str]:
    """The settings that have an option of their own, as overrides."""
    common = {
        "run_dir": options.run_dir,
        "seed": options.seed,
        "steps": options.steps,
        "model.path": options.model_path,
    }
    return [f"{key}={value}" for key, value in common.items() if value is not None]


def _resume(options: argparse.Namespace, overrides: list[str]) -> int:
    if options.recipe or options.run_dir or options.model_path or options.seed is not None:
        raise ConfigError(
            "train --resume: a run continues with its own model, seed and directory; leave out all but --steps and settings"
        )
    _quiet_libraries()
    from gspo.record.progress import make_display
    from gspo.trainer import resume

    return _report(
        resume(options.resume, make_display(), steps=options.steps, overrides=overrides, trust_run=options.trust_run)
    )


def _report(outcome: object) -> int:
    from gspo.trainer import Outcome

    assert isinstance(outcome, Outcome)
    print()
    if outcome.stopped_by is not None:
        where = f"after step {outcome.step} of {outcome.steps}" if outcome.step else "before the first step"
        print(f"Stopped {where}. Continue with:  {_program()} train --resume {outcome.run}")
    else:
        taken = outcome.step - outcome.began
        total = f" ({outcome.step} in all)" if outcome.began else ""
        print(f"Finished {taken} step{'s' * (taken != 1)}{total} in {outcome.seconds / 60:.1f} minutes.")
    if outcome.before and not outcome.evaluated_at:
        print(f"Held-out accuracy, sampled, with its 95 % interval, before the first step: {outcome.before}")
    elif outcome.before and outcome.after:
        gain = 100 * (outcome.after.value - outcome.before.value)
        print(f"Held-out accuracy, sampled, with 95 % intervals, before and after {outcome.evaluated_at} steps:")
        print(f"  before  {outcome.before}")
        print(f"  after   {outcome.after}   ({gain:+.1f} points)")
        if outcome.greedy:
            print(f"  greedy  {outcome.greedy[0]:.1%} before, {outcome.greedy[1]:.1%} after")
    if outcome.idle:
        taken = outcome.step - outcome.began
        print(
            f"{outcome.idle} of {taken} steps trained on nothing and left the policy as it was; events.jsonl says why."
        )
    if outcome.unscored:
        print(f"{outcome.unscored} replies could not be scored and were left out; rollouts/ says why.")
    if outcome.picture:
        print(f"Picture:        {outcome.picture}")
    print(f"Run directory:  {outcome.run}")
    return 0 if outcome.stopped_by is None else 128 + outcome.stopped_by


def _program() -> str:
    """How this program can be called again: by name where it is on the path."""
    if sys.argv[0].endswith(".py"):
        return "python -m gspo.cli"
    return "gspo" if shutil.which("gspo") else os.path.relpath(sys.argv[0])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gspo", description="Critic-free reinforcement learning of language models.")
    parser.add_argument("--version", action="version", version=f"gspo {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object, text: str, epilog: str | None = None) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=text, description=text, epilog=epilog, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        sub.set_defaults(run=run)
        return sub

    epilog = "settings, given as --section.key=value:\n" + _settings_help()
    sub = command("train", train, "Train by a recipe, or continue a run.", epilog)
    sub.add_argument("recipe", nargs="?", help="a .toml recipe, or the name of a shipped one")
    sub.add_argument("--resume", metavar="RUN", help="continue the run in this directory")
    _trust_run(sub)
    _common(sub)
    _common(command("demo", demo, "A small mixture-of-experts model learns addition on this machine, offline.", "Any setting of 'gspo train --help' can be overridden."))  # fmt: skip
    sub = command("eval", evaluate, "pass@k and avg@k with intervals.", "Settings of 'gspo train --help' apply, e.g. --data.prompt_field=question --reward.functions=math_answer")  # fmt: skip
    sub.add_argument("model", help="model directory, hub name, .gguf file, or a run directory (its newest checkpoint)")
    sub.add_argument("--data", help="problems: a data file, or a generated task by name")
    sub.add_argument(
        "--recipe",
        help="take data, reward and sampling settings from this recipe (a run: its own), and its held-out problems",
    )
    _trust_run(sub)
    sub.add_argument("--k", default="1", help="comma-separated, for example 1,8")
    sub.add_argument("--samples", type=int, help="replies per problem (default: the largest k)")
    sub.add_argument("--limit", type=int, help="use at most this many problems")
    sub.add_argument("--greedy", action="store_true", help="also measure greedy accuracy")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--json", metavar="FILE", help="write the numbers to this file")
    sub.add_argument("--replies", metavar="FILE", help="write every reply to this file (JSONL)")
    sub = command("compare", compare, "Objectives side by side: equal sampled tokens, the same cold start, one report.", "Repeating a command goes on where it stopped. Settings of 'gspo train --help' apply to all arms; docs/compare.md has more.")  # fmt: skip
    sub.add_argument("recipe", nargs="?", help="a .toml recipe, or the name of a shipped one")
    sub.add_argument("--objectives", metavar="ARMS", help="comma-separated: NAME[+replay][+KEY=VALUE][+SECTION.KEY=VALUE], for example grpo,grpo+replay,gspo")  # fmt: skip
    sub.add_argument("--seeds", default="0,1,2", help="for example 0,1,2 or 0-4 (default: 0,1,2)")
    sub.add_argument("--tokens", type=int, help="reply tokens that each run samples (default: what the recipe's steps take at the reply length after the cold start)")  # fmt: skip
    sub.add_argument("--steps", type=int, help="training steps that set the schedule and, without --tokens, the budget")
    sub.add_argument("--out", metavar="DIR", help="directory of the comparison (default: runs/compare-NAME)")
    sub.add_argument(
        "--jobs", type=int, help="runs at the same time (default: as many as the cores allow; one on a GPU)"
    )
    _trust_run(sub)
    sub.add_argument("--report", metavar="DIR", help="only write the report of this comparison anew")
    sub = command("replay", replay, "What every objective would have done with a step that a run has taken.", "The run directory is only read, also while the run goes on; docs/replay.md has more.")  # fmt: skip
    sub.add_argument("run_dir", metavar="RUN", help="the directory of the run")
    sub.add_argument("--step", type=_positive, help="which step (default: the last that can be replayed)")
    sub.add_argument("--objectives", default="all", metavar="ROWS", help="comma-separated: NAME[+KEY=VALUE...], for example grpo,gspo+clip_high=1e-3 (default: all)")  # fmt: skip
    sub.add_argument("--sweep", action="append", default=[], metavar="SETTING=LOW..HIGH[:COUNT]", help="move a setting of the run's objective, for example clip_high=1e-4..1e-1; may be repeated")  # fmt: skip
    sub.add_argument("--mini-batch", type=_positive, metavar="K", help="look at the weights of optimiser step K of the step, from 1 (default: the last)")  # fmt: skip
    sub.add_argument("-o", "--out", metavar="DIR", help="directory to write to (default: runs/replay-NAME-STEP)")
    sub.add_argument("--device", help="auto, cpu, cuda or cuda:N (default: the run's)")
    _trust_run(sub)
    sub = command("doctor", doctor, "Look a recipe over before it costs anything; exit code 1 if something would fail.", "Settings are given as to 'gspo train'; docs/doctor.md has every check.")  # fmt: skip
    sub.add_argument("recipe", help="a .toml recipe, or the name of a shipped one")
    sub.add_argument("--quick", action="store_true", help="load no weights: only what files and settings can tell")
    sub.add_argument(
        "--prompts", type=_positive, help="groups of replies to sample (default: up to 16, as time allows)"
    )
    sub.add_argument("--json", action="store_true", help="for programs")
    _common(sub)
    sub = command("merge", merge, "Add a LoRA adapter to its model: a directory that transformers and vLLM load.", "docs/lora.md has more.")  # fmt: skip
    sub.add_argument("source", metavar="RUN", help="a run (its newest checkpoint), a checkpoint, or the folder of an adapter")  # fmt: skip
    sub.add_argument("out", metavar="OUT", help="the directory to write")
    sub = command("watch", watch, "A page on this machine that shows runs while they train, down to the token.", "docs/watch.md says what it shows.")  # fmt: skip
    sub.add_argument("runs", nargs="*", default=["runs"], metavar="RUN", help="run directories, or directories of runs (default: runs)")  # fmt: skip
    sub.add_argument("--text", action="store_true", help="sparklines in this terminal instead of a page")
    sub.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: a free one)")
    sub = command("report", report, "Runs as one self-contained HTML file: figures, findings, telling replies.")
    sub.add_argument("runs", nargs="+", metavar="RUN", help="run directories, or directories of runs")
    sub.add_argument("-o", "--out", default="report.html", metavar="FILE", help="the file to write (default: report.html)")  # fmt: skip
    sub = command("serve", serve, "A vLLM server that training runs can sample from; docs/engines.md has more.", "Other options are handed to vLLM as they are, each as --name=value: --tensor-parallel-size=2")  # fmt: skip
    sub.add_argument("model", help="model directory or hub name; only its config is used: a run sends its own weights")
    sub.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1; another only in a private network: the connection is not encrypted)")  # fmt: skip
    sub.add_argument("--port", type=int, default=0, help="(default: a free one)")
    sub.add_argument("--experts", action="store_true", help='tell which experts of a mixture drew each token (routing.replay = "sampler"); turns the prefix cache off')  # fmt: skip
    sub.add_argument("--token-file", metavar="FILE", help="where to write the token unless GSPO_SERVE_TOKEN has one (default: gspo-serve-PORT.token)")  # fmt: skip
    sub = command("objectives", objectives, "The table of objectives, with papers and defaults.")
    sub.add_argument("--json", action="store_true", help="for programs")
    return parser


def _trust_run(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--trust-run", action="store_true", help="run the reward file and the model code that the run directory names; not needed for runs started here")  # fmt: skip


def _common(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--run-dir", help="directory of the run (default: runs/NAME-DATE-TIME)")
    sub.add_argument("--seed", type=int, help="seed of everything random")
    sub.add_argument("--steps", type=int, help="training steps")
    sub.add_argument("--model", dest="model_path", metavar="MODEL", help="model directory, hub name or .gguf file (model.path)")  # fmt: skip


def _settings_help() -> str:
    lines = []
    for key, kind, default, text in config.help_texts():
        shown = json.dumps(default) if isinstance(default, str | bool | int | float) else str(default or "none")
        lines.append(f"  {key} ({kind}, default {shown})\n      {text}")
    return "\n".join(lines).replace("%", "%%")


def _ks(text: str) -> list[int]:
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ks = []
    if not ks or ks[0] < 1:
        raise ConfigError(f"--k: {text!r} is not a list of positive numbers; write for example --k 1,8")
    return ks


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _no_overrides(overrides: list[str]) -> None:
    if overrides:
        raise ConfigError(f"unknown option {overrides[0]}")


def _quiet_libraries() -> None:
    """Errors and warnings of transformers still show; its progress bars and notes do not."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    import transformers

    transformers.utils.logging.disable_progress_bar()


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
