"""The documentation matches the code."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gspo import config as settings
from gspo.build import run_objective
from gspo.cli import main
from gspo.errors import GspoError
from gspo.record.progress import PlainDisplay
from gspo.record.run_dir import read_jsonl
from gspo.site import PAGE, SITE, linked
from gspo.trainer import train

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
RECIPES = sorted([*(ROOT / "recipes").glob("*.toml"), *(ROOT / "benchmarks").glob("*.toml")])

REWARDS = '''
from gspo.reward.function import Noted
def spaces(prompts, completions, **columns):
    """Varies between completions of a random model, and fails on some of them."""
    return [ValueError("ouch") if len(c) % 4 == 3 else Noted(c.count(" ") + len(c) % 2, "fine") for c in completions]
'''


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very small run that writes every key.

    An MoE model in float16 with routing replay and balance loss, KL penalty, length shaping, two rewards, unscored
    completions, evaluation, a source and an evaluation set with names, sampling by difficulty.
    """
    folder = tmp_path_factory.mktemp("docs")
    (folder / "rewards.py").write_text(REWARDS)
    tree = {
        "run_dir": str(folder / "run"),
        "steps": 2,
        "model": {"build": "tiny_moe", "dtype": "float16"},
        "routing": {"replay": "sampler", "balance_loss": 0.01},
        "data": {
            "sampling": "difficulty",
            "held_out": 4,
            "mix": {"lists": {"task": "sorting", "task_options": {"min_items": 1, "max_items": 2}, "task_size": 40}},
        },
        "rollout": {"engine": "local", "prompts": 4, "group_size": 4, "max_tokens": 8},
        "reward": {
            "functions": [f"{folder}/rewards.py:spaces", "completion_format"],
            "options": {"completion_format": {"pattern": ".*"}},
            "workers": 1,
            "max_unscored_fraction": 1.0,
        },
        "objective": {"name": "grpo", "shape": "soft_overlong"},
        "learner": {"mini_batches": 2, "learning_rate": 1e-3},
        "eval": {"every": 2, "sets": {"few": {"task": "sorting", "task_options": {"min_items": 3}, "size": 4}}},
    }
    return train(settings.from_tree(tree, where="test"), PlainDisplay()).run


def documented_names(section: str) -> set[str]:
    """The names in the first column of a section's table in docs/metrics.md."""
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    (body,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"^\| `([^`]+)` \|", body, re.MULTILINE))


def keys(rows: list[dict[str, Any]]) -> set[str]:
    placeholders = (
        (r"^reward/part/.*", "reward/part/NAME"),
        (r"^reward/note/.*", "reward/note/FUNCTION/WORD"),
        (r"^samples/unscored/.*", "samples/unscored/KIND"),
        (r"^samples/dropped/.*", "samples/dropped/KIND"),
        (r"^(routing/load_\w+)/\d+$", r"\1/L"),
        (r"^source/lists/", "source/NAME/"),
        (r"^eval/(lists|few)/", "eval/NAME/"),
    )
    found = {key for row in rows for key in row}
    for pattern, name in placeholders:
        found = {re.sub(pattern, name, key) for key in found}
    return found


@pytest.mark.parametrize("file", ["metrics.jsonl", "timings.jsonl"])
def test_metric_keys_and_their_definitions_match(run: Path, file: str) -> None:
    # Present with settings that this run does not have. Other tests have such runs.
    documented = documented_names(file)
    others = {name for name in documented if name.startswith(("service/", "rank/", "ranks/"))}
    others |= documented & {"length/stop_string_fraction", "length/thinking_cut_fraction", "time/compile_s"}
    others |= documented & {"memory/mean_gb", "time/wait_s"}
    # tests/environment/test_runs.py checks those of conversations.
    others |= {name for name in documented if name.startswith(("lag/", "conversation/"))}
    assert keys(read_jsonl(run / file)) | others == documented


def test_rollout_fields_and_their_definitions_match(run: Path) -> None:
    rows = [row for file in sorted((run / "rollouts").iterdir()) for row in read_jsonl(file)]
    assert {row["trained"] for row in rows} == {True, False}
    # No engine of this run inserts tokens or changes weights during a completion, all completions are computed, and the
    # rows have an answer only. Other tests have such completions.
    others = {"sampled", "spans", "thinking_cut", "computed", "columns"}
    assert keys(rows) | others == documented_names("rollouts/STEP.jsonl")


def test_fields_of_evaluations_and_their_definitions_match(run: Path) -> None:
    rows = [row for file in sorted((run / "evaluations").iterdir()) for row in read_jsonl(file)]
    own = documented_names("evaluations/STEP.jsonl")
    assert own <= keys(rows) <= own | documented_names("rollouts/STEP.jsonl")


def test_events_and_their_definitions_match(run: Path) -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "gspo").rglob("*.py"))
    assert set(re.findall(r'\.event\(\s*"([^"]+)"', text)) == documented_names("events.jsonl")
    assert {row["event"] for row in read_jsonl(run / "events.jsonl")} <= documented_names("events.jsonl")


def test_generated_pages_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert generator().main(["--check"]) == 0, capsys.readouterr().err


def test_the_check_detects_an_outdated_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = generator()
    monkeypatch.setattr(module, "HERE", tmp_path)
    assert module.main(["--check"]) == 1
    assert module.main([]) == 0
    assert module.main(["--check"]) == 0
    page = tmp_path / "settings.md"
    page.write_text(page.read_text(encoding="utf-8") + "by hand\n", encoding="utf-8")
    assert module.main(["--check"]) == 1


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_link_check_covers_every_page() -> None:
    names = {page.relative_to(ROOT).as_posix() for page in PAGES}
    assert names >= {"README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/reference/api.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_resolve(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = (page.parent / path) if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_files_named_in_recipe_comments_exist(recipe: Path) -> None:
    comments = "\n".join(re.findall(r"^#.*", recipe.read_text(encoding="utf-8"), re.MULTILINE))
    for name in re.findall(r"\b(?:docs|recipes|benchmarks)/[\w./-]+\.\w+", comments):
        assert (ROOT / name).exists(), f"{recipe.name}: {name}"


def test_messages_name_pages_that_exist() -> None:
    pages = {page.stem: anchors(page) for page in DOCS.glob("*.md")}
    for file in (ROOT / "gspo").rglob("*.py"):
        for name, anchor in PAGE.findall(file.read_text(encoding="utf-8")):
            assert name in pages, f"{file}: docs/{name}.md"
            assert not anchor or anchor[1:] in pages[name], f"{file}: docs/{name}.md{anchor}"


def test_the_user_sees_addresses_of_pages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert linked("see docs/lora.md, docs/engines.md#lora-adapters") == f"see {SITE}lora/, {SITE}engines/#lora-adapters"
    assert SITE in (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    assert f"{SITE}compare/" in help_text(capsys, "compare")
    assert f"{SITE}evaluation/" in help_text(capsys, "doctor")
    assert str(GspoError("not here (docs/scale.md)")) == f"not here ({SITE}scale/)"
    for command in ([], *([name] for name in commands(capsys))):
        assert not PAGE.search(help_text(capsys, *command)), command
    recipe = tmp_path / "mine.toml"
    (tmp_path / "data.jsonl").write_text(json.dumps({"question": "1+1", "answer": "2"}) + "\n")
    assert main(["init", str(recipe), "--model", "m", "--data", str(tmp_path / "data.jsonl"), "--yes"]) == 0
    assert SITE in recipe.read_text()
    assert not PAGE.search(recipe.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub generates for the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def examples() -> list[Any]:
    text = (DOCS / "library.md").read_text(encoding="utf-8")
    blocks = re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [pytest.param(b[1], id=f"line {text.count(chr(10), 0, b.start()) + 2}") for b in blocks]


@pytest.mark.parametrize("source", examples())
def test_examples_of_the_library_run(source: str) -> None:
    exec(compile(source, "docs/library.md", "exec", dont_inherit=True), {"__name__": "example"})


def commands(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The commands that `gspo --help` lists."""
    return re.findall(r"^    ([\w-]+)(?:  |$)", help_text(capsys), re.MULTILINE)


def help_text(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    return capsys.readouterr().out


def test_the_command_line_page_has_every_command_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## gspo ([\w-]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert set(sections) == set(commands(capsys))
    for command, section in sections.items():
        options = set(re.findall(r"^  (?:-\w[^,]*, )?(--[a-z-]+)", help_text(capsys, command), re.MULTILINE))
        assert options - {"--help"} == set(re.findall(r"(--[a-z][a-z-]*)(?=[\s\]`])", section)), command


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_recipes_load(recipe: Path) -> None:
    config = settings.load(recipe)
    assert config.name == recipe.stem
    assert run_objective(config).name == config.objective.name


def test_every_recipe_is_in_the_table_of_recipes() -> None:
    rows = re.findall(r"^\| `([\w.-]+)` \|", (DOCS / "recipes.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(path.stem for path in (ROOT / "recipes").glob("*.toml"))
