"""Pretrained models, trained by recipes at equal sampled tokens and measured before and after, with a report.

In: a plan (TOML) that lists the runs. Out: one JSON file per run in DIR, and a page with figures made from them.
Invariant: a run whose JSON file exists is skipped and an interrupted run resumes, so a plan can be repeated until it is
complete. Nothing is downloaded.

    python benchmarks/real_model.py run PLAN.toml --out DIR [--parallel 3] [--seconds 500] [--only smollm2]
                                                            [--models DIR] [--data DIR]
    python benchmarks/real_model.py report DIR --page benchmarks/real-model.md
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.types import Completion, StopReason

HERE = Path(__file__).resolve().parent
STORED_COMPLETIONS = 24
"""Completions per problem set that a run's JSON file stores, for the first problems."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a plan."""

    name: str
    recipe: str
    settings: Sequence[str]
    """Overrides of the recipe, including the objective and the seed."""
    seed: int
    arm: str
    """The configuration that the run is one seed of."""
    train: bool
    """If false, only measure the base model."""
    sets: Mapping[str, Sequence[str]]
    """Problem sets to measure after training, each with the settings to load it."""
    limit: int
    plain: bool
    """Also measure the checkpoint with plain transformers (`generate`)."""


def runs_of(plan: Mapping[str, Any], *, models: str, data: str, only: str) -> Iterator[Run]:
    """Every run of a plan: each arm with each of its seeds, and the base model once."""
    places = {"models": models, "data": data}
    for group, table in plan.items():
        common = [text.format(**places) for text in table.get("settings", [])]
        sets = {name: [t.format(**places) for t in texts] for name, texts in table.get("sets", {}).items()}
        shared: dict[str, Any] = {"recipe": table["recipe"], "sets": sets, "limit": table.get("limit", 10**9)}
        yield from (
            run
            for run in _arms(group, table, common, shared)
            if not only or any(part in run.name for part in only.split(","))
        )


def _arms(group: str, table: Mapping[str, Any], common: list[str], shared: Mapping[str, Any]) -> Iterator[Run]:
    yield Run(name=f"{group}-base", arm="base", seed=0, train=False, plain=False, settings=common, **shared)
    for arm, own in table["arms"].items():
        for seed in own.get("seeds", [0]):
            settings = [*common, *own.get("settings", []), f"seed={seed}"]
            plain = bool(own.get("plain", False)) and seed == own.get("seeds", [0])[0]
            yield Run(
                name=f"{group}-{arm}-{seed}", arm=arm, seed=seed, train=True, plain=plain, settings=settings, **shared
            )


# ------------------------------------------------------------------------------------------------- one run


def execute(run: Run, out: Path) -> None:
    """Train (or resume training), measure, and write the run's JSON file."""
    import torch

    started = time.monotonic()
    folder = out / "runs" / run.name
    record: dict[str, Any] = {"name": run.name, "arm": run.arm, "seed": run.seed, "recipe": run.recipe}
    record |= {"settings": list(run.settings), "torch": torch.__version__, "device": _device()}
    if run.train:
        record |= _train(run, folder)
    record["sets"] = {name: _measure(run, folder, name, out) for name in ("held out", *run.sets)}
    if run.plain:
        record["plain transformers"] = _measure_plain(run, folder)
    record["seconds"] = time.monotonic() - started
    (out / f"{run.name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def _train(run: Run, folder: Path) -> dict[str, Any]:
    import torch

    import gspo.trainer
    from gspo import config
    from gspo.record.progress import make_display
    from gspo.record.run_dir import read_jsonl

    if importlib.util.find_spec("matplotlib") is None:
        gspo.trainer.draw_curves = lambda run: None  # the GPU machine may lack matplotlib; `report` plots elsewhere
    if any((folder / "checkpoints").glob("0*")):
        outcome = gspo.trainer.resume(folder, make_display())
    else:
        shutil.rmtree(folder, ignore_errors=True)
        outcome = gspo.trainer.train(config.load(run.recipe, [*run.settings, f"run_dir={folder}"]), make_display())
    if outcome.stopped_by is not None:
        raise SystemExit(f"stopped after step {outcome.step}; repeat the command to resume from there")
    timings = read_jsonl(folder / "timings.jsonl")
    record: dict[str, Any] = {"curve": read_jsonl(folder / "metrics.jsonl"), "timings": timings}
    record["train_seconds"] = sum(row["time/step_s"] for row in timings)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    record["peak_gib"] = (torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident) / 2**30
    return record


def _measure(run: Run, folder: Path, name: str, out: Path) -> dict[str, Any]:
    """Sampled and greedy accuracy on a problem set by `gspo eval`, with the first completions.

    A trained run is measured on its own held-out problems, the base model on those of seed 0.
    """
    from gspo.commands.eval import measure_model
    from gspo.record.metrics import evaluation_records

    chosen = run.sets.get(name, [])
    overrides = [s for s in chosen if not s.startswith("data.path=")]
    if not run.train:
        overrides = [
            s
            for s in run.settings
            if s.startswith(("model.dtype", "rollout.")) or (not chosen and s.startswith("data."))
        ] + overrides
    measured = measure_model(
        str(folder) if run.train else _value(run.settings, "model.path"),
        data=_value(chosen, "data.path") if chosen else None,
        recipe=None if run.train else run.recipe,
        ks=[1],
        samples=1,
        limit=run.limit,
        greedy=True,
        seed=0,
        overrides=overrides,
    )
    print("\n".join(measured.lines))
    completions = list(evaluation_records(measured.evaluation))[:STORED_COMPLETIONS]
    return {**measured.record, "completions": completions}


def _measure_plain(run: Run, folder: Path) -> dict[str, Any]:
    """Greedy accuracy on the held-out problems with plain transformers: reload the checkpoint, `generate`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gspo import config
    from gspo.data.problems import load_problems
    from gspo.learner.checkpoint import newest
    from gspo.reward.reward import RewardPool

    path = newest(folder / "checkpoints")[0]
    settings = config.load(folder / "config.toml")
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, settings.model.dtype))
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    problems = load_problems(settings.data, tokenizer, settings.seed).held_out[: run.limit]
    completions: list[str] = []
    for at in range(0, len(problems), 128):
        texts = [p.text for p in problems[at : at + 128]]
        inputs = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt").to(model.device)
        output = model.generate(**inputs, max_new_tokens=settings.rollout.max_tokens, do_sample=False)
        completions += tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    task = (settings.data.task, settings.data.task_options) if settings.data.task else None
    rewards = RewardPool(settings.reward, task)
    scores = rewards.score([(p, [_completion(p.id, text)]) for p, text in zip(problems, completions, strict=True)])
    rewards.close()
    return {"greedy": sum(bool(s.correct) for s, *_ in scores) / len(problems), "problems": len(problems)}


def _completion(prompt_id: str, text: str) -> Completion:
    return Completion(
        prompt_id=prompt_id, sample=0, token_ids=(), text=text, logp_sampler=(), stop=StopReason.EOS, version=0
    )


def _value(settings: Sequence[str], key: str) -> str:
    return next(s.removeprefix(f"{key}=") for s in reversed(settings) if s.startswith(f"{key}="))


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


# ------------------------------------------------------------------------------------------------- all runs


def run_plan(options: argparse.Namespace) -> int:
    """Start the runs that are not done yet, several processes at a time. Returns exit code 1 if any failed."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    plan = tomllib.loads(Path(options.plan).read_text())
    runs = list(runs_of(plan, models=options.models, data=options.data, only=options.only))
    if options.one:
        execute(next(run for run in runs if run.name == options.one), out)
        return 0
    waiting = [run for run in runs if not (out / f"{run.name}.json").is_file()]
    running: dict[str, subprocess.Popen[bytes]] = {}
    signal.signal(
        signal.SIGTERM, lambda *_: setattr(options, "seconds", 1e-9)
    )  # end like a reached time limit: runs save a checkpoint
    failed = []
    began = time.monotonic()
    while waiting or running:
        if options.seconds and time.monotonic() - began > options.seconds:
            print(
                f"{time.monotonic() - began:5.0f} s  time limit reached: "
                "runs save a checkpoint; repeat the command to resume",
                flush=True,
            )
            waiting.clear()
            for process in running.values():
                process.send_signal(signal.SIGTERM)
            options.seconds = 0
        while waiting and len(running) < options.parallel:
            run = waiting.pop(0)
            print(f"{time.monotonic() - began:5.0f} s  {run.name}: started", flush=True)
            with (out / f"{run.name}.log").open("wb") as log:
                running[run.name] = subprocess.Popen(
                    [sys.executable, __file__, *sys.argv[1:], "--one", run.name],
                    stdout=log,
                    stderr=log,
                    env=os.environ | {"OMP_NUM_THREADS": "2", "TQDM_DISABLE": "1"},
                )
        for name, process in list(running.items()):
            if process.poll() is not None:
                del running[name]
                failed += [name] if process.returncode else []
                print(f"{time.monotonic() - began:5.0f} s  {name}: {_outcome(out, name)}", flush=True)
        time.sleep(0.2)
    return 1 if failed else 0


def _outcome(out: Path, name: str) -> str:
    path = out / f"{name}.json"
    if not path.is_file():
        return "not finished: " + " | ".join((out / f"{name}.log").read_text(errors="replace").splitlines()[-4:])
    sets = json.loads(path.read_text())["sets"]
    return ", ".join(f"{s} {v['avg@1']['value']:.1%} (greedy {v['greedy']['value']:.1%})" for s, v in sets.items())


# ------------------------------------------------------------------------------------------------- the page


def report(options: argparse.Namespace) -> int:
    """Write tables, curves and sample completions of all runs in a directory between two markers of a page."""
    records = [json.loads(path.read_text()) for path in sorted(Path(options.out).glob("*.json"))]
    page = Path(options.page)
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["name"].split("-")[0], []).append(record)
    lines: list[str] = []
    for group, members in groups.items():
        base = next((r for r in members if r["arm"] == "base"), None)
        trained = [r for r in members if r["arm"] != "base"]
        lines += [f"## {group}", "", *_table(base, trained), "", *_lengths(trained)]
        if trained:
            figure = page.with_suffix("") / f"{group}.png"
            _plot(trained, figure)
            lines += [f"![Held-out accuracy and reward of {group}]({page.stem}/{figure.name})", ""]
            lines += _completions(base, trained)
    text = page.read_text(encoding="utf-8") if page.is_file() else f"{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    page.write_text(before + BEGIN + "\n" + "\n".join(lines) + END + rest.partition(END)[2], encoding="utf-8")
    return 0


HOW = ("sampled", "greedy")
BEGIN, END = "<!-- Generated by benchmarks/real_model.py report. -->", "<!-- end -->"


def _table(base: Mapping[str, Any] | None, trained: Sequence[Mapping[str, Any]]) -> list[str]:
    """One table of the runs, then one of the arms over their seeds."""
    from gspo.view.compare.intervals import over_seeds

    names = list((base or trained[0])["sets"])
    head = ["run", *(f"{n}, {how}" for n in names for how in HOW), "tokens", "minutes", "peak GiB"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for record in ([base] if base else []) + list(trained):
        first = _before(record)
        cells = [record["name"] + ("" if base is record else f" (before: {first})")]
        for name in names:
            cells += [_estimate(record["sets"][name][key]) for key in ("avg@1", "greedy")]
        curve = record.get("curve") or [{}]
        cells += [
            f"{curve[-1].get('tokens/sampled', 0):,}",
            f"{record.get('train_seconds', 0) / 60:.1f}",
            f"{record.get('peak_gib', 0):.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "| " + " | ".join(["arm", "seeds", *(f"{n}, gain in points, {how}" for n in names for how in HOW)]) + " |",
        "|---|---" + "|---|---" * len(names) + "|",
    ]
    for arm in dict.fromkeys(r["arm"] for r in trained):
        mine = [r for r in trained if r["arm"] == arm]
        cells = [arm, str(len(mine))]
        for name in names:
            for key, before in (("avg@1", "eval/accuracy"), ("greedy", "eval/accuracy_greedy")):
                gains = [100 * (r["sets"][name][key]["value"] - _start(r, base, name, key, before)) for r in mine]
                number = over_seeds(gains)
                assert number is not None
                spread = f" [{number.low:+.1f}, {number.high:+.1f}]" if number.low is not None else ""
                cells.append(f"{number.value:+.1f}{spread}")
        lines.append("| " + " | ".join(cells) + " |")
    plain = [
        f"{r['name']} {r['plain transformers']['greedy']:.1%} "
        f"(`gspo eval`: {r['sets']['held out']['greedy']['value']:.1%})"
        for r in trained
        if "plain transformers" in r
    ]
    if plain:
        lines += ["", f"Greedy accuracy on the held-out problems with transformers alone: {', '.join(plain)}."]
    return lines


def _lengths(trained: Sequence[Mapping[str, Any]]) -> list[str]:
    """Completion lengths and their cost over the first and the last three steps, for runs that recorded them."""
    keys = {
        "length/p10": "",
        "length/median": "",
        "length/p90": "",
        "length/max": "",
        "length/truncated_fraction": "%",
        "sampler/idle_fraction": "%",
        "padding/learner": "%",
        "padding/saved": "%",
    }
    recorded = [r for r in trained if "padding/saved" in r["curve"][-1]]
    if not recorded:
        return []
    head = ["run", "steps", *(f"`{key}`" for key in keys), "tokens/s sampled", "tokens/s trained"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for record in recorded:
        steps = [r for r in record["curve"] if r["step"]]
        times = {r["step"]: r for r in record["timings"]}
        for name, some in (("first 3", steps[:3]), ("last 3", steps[-3:])):
            cells = [record["name"], name]
            for key, unit in keys.items():
                found = [r[key] for r in some if r.get(key) is not None]
                mean = sum(found) / len(found) if found else None
                cells.append("?" if mean is None else f"{mean:.1%}" if unit else f"{mean:.0f}")
            for key, phase in (("tokens/generated", "time/rollout_s"), ("tokens/trained", "time/learn_s")):
                cells.append(f"{sum(r[key] for r in some) / sum(times[r['step']][phase] for r in some):,.0f}")
            lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _start(record: Mapping[str, Any], base: Mapping[str, Any] | None, name: str, key: str, metric: str) -> float:
    """Accuracy before training: a run's own evaluation on its held-out problems, the base model on other sets."""
    if name == "held out" and record["curve"][0].get(metric) is not None:
        return float(record["curve"][0][metric])
    return float(base["sets"][name][key]["value"]) if base else float("nan")


def _before(record: Mapping[str, Any]) -> str:
    first = (record.get("curve") or [{}])[0]
    return (
        f"{first['eval/accuracy']:.1%}, greedy {first['eval/accuracy_greedy']:.1%}"
        if "eval/accuracy_greedy" in first
        else "?"
    )


def _estimate(value: Mapping[str, float]) -> str:
    return f"{value['value']:.1%} [{value['low']:.1%}, {value['high']:.1%}]"


def _plot(trained: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Held-out accuracy and reward over sampled tokens, one color per arm."""
    from matplotlib.figure import Figure

    from gspo.view.compare.figures import style

    arms = list(dict.fromkeys(r["arm"] for r in trained))
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    keys = {
        "eval/accuracy": "held-out accuracy, sampled",
        "eval/accuracy_greedy": "held-out accuracy, greedy",
        "reward/mean": "mean reward",
    }
    for axis, (key, label) in zip(axes, keys.items(), strict=True):
        for record in trained:
            points = [(r["tokens/sampled"], r[key]) for r in record["curve"] if r.get(key) is not None]
            first = next(r for r in trained if r["arm"] == record["arm"]) is record
            axis.plot(
                *zip(*points, strict=True),
                **style(arms.index(record["arm"])),
                alpha=0.8,
                linewidth=1.2,
                label=record["arm"] if first else None,
            )
        axis.set(xlabel="completion tokens sampled", title=label, ylim=(0, None))
    axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _completions(base: Mapping[str, Any] | None, trained: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sampled completions of seed 0 before and after training, for the first problems of each set."""
    after = trained[0]
    lines = [
        f"Sampled completions before and after ({after['name']}), for the first problems of each set, not selected:",
        "",
    ]
    for name, found in after["sets"].items():
        old = {r["prompt_id"]: r for r in (base or after)["sets"][name]["completions"]}
        for new in found["completions"][:4]:
            lines += [f"- {name}: {_quoted(new['prompt'][-400:])}"]
            pairs = [("before", old.get(new["prompt_id"]) if base else None), ("after", new)]
            lines += [
                f"  - {when} ({'correct' if r['correct'] else 'wrong'}): {_quoted(r['text'])}" for when, r in pairs if r
            ]
    return [*lines, ""]


def _quoted(text: str) -> str:
    shown = " ".join(text.split())
    return "`" + (shown[:300] + " …" if len(shown) > 300 else shown).replace("`", "'") + "`"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    sub = commands.add_parser("run")
    sub.set_defaults(do=run_plan)
    sub.add_argument("plan", help="a TOML file of runs, such as benchmarks/real_model.toml")
    sub.add_argument("--out", required=True, help="directory for the results")
    sub.add_argument("--models", default="models", help="directory that replaces {models} in the plan")
    sub.add_argument("--data", default="data", help="directory that replaces {data} in the plan")
    sub.add_argument("--parallel", type=int, default=1, help="number of concurrent runs")
    sub.add_argument(
        "--seconds",
        type=float,
        default=0,
        help="stop all runs after this many seconds, to resume later; 0 disables the limit",
    )
    sub.add_argument("--only", default="", help="run only names that contain one of these comma-separated parts")
    sub.add_argument("--one", default="", help=argparse.SUPPRESS)
    sub = commands.add_parser("report")
    sub.set_defaults(do=report)
    sub.add_argument("out", help="directory for the results")
    sub.add_argument("--page", default=str(HERE / "real-model.md"))
    options = parser.parse_args()
    return int(options.do(options))


if __name__ == "__main__":
    sys.exit(main())
