"""Untrusted run directories: code they name is not run, link targets are not written, their state is validated.

Every payload would create a folder (the canary) if it were imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import py_compile
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ends import run_of
from tiny_runs import REWARD

from gspo import trust
from gspo.cli import main
from gspo.config import Config, ModelConfig, from_tree, read_toml
from gspo.errors import CheckpointError, ConfigError, DataError, GspoError, RunLockedError, TrustError
from gspo.learner import checkpoint
from gspo.record.run_dir import RunDir
from gspo.trainer import resume, train

_trained_runs: list[Path] = []


@pytest.fixture
def started(tiny: Callable[..., Config], display: Any) -> Path:
    """A run of two steps that was started here."""
    config = tiny("steps=2", "eval.every=0")
    train(config, display)
    return run_of(config)


@pytest.fixture
def untrusted(
    tiny: Callable[..., Config], display: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same run unpacked from an archive, with a reward file that this user never trusted."""
    if not _trained_runs:
        config = tiny("steps=2", "eval.every=0")
        train(config, display)
        _trained_runs.append(shutil.copytree(run_of(config), tmp_path_factory.mktemp("trained") / "run"))
        shutil.rmtree(run_of(config))
    run = shutil.copytree(_trained_runs[0], tmp_path / "unpacked")
    (run / "reward.py").write_text(f"import os\nos.makedirs({str(tmp_path / 'canary')!r}, exist_ok=True)\n{REWARD}")
    settings = (run / "config.toml").read_text().splitlines()
    settings = [f'functions = ["{run}/reward.py:shorter"]' if s.startswith("functions =") else s for s in settings]
    (run / "config.toml").write_text("\n".join(settings) + "\n")
    for path in checkpoint.saved(run / "checkpoints"):
        change(path, lambda state: state["settings"].update({"reward.functions": [f"{run}/reward.py:shorter"]}))
    return run


@pytest.fixture
def trusted(untrusted: Path) -> Path:
    """The same run after the user trusted it."""
    config = from_tree(read_toml(untrusted / "config.toml"), where="test")
    trust.check(untrusted, trust.all_code(config, []), trust=True)
    return untrusted


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


def change(path: Path, how: Callable[[dict[str, Any]], Any]) -> None:
    """Change a checkpoint's trainer.json, and update its manifest."""
    state = json.loads((path / "trainer.json").read_text())
    how(state)
    (path / "trainer.json").write_text(json.dumps(state))
    update_manifest(path)


def update_manifest(path: Path) -> None:
    """Make a checkpoint's manifest match its files."""
    files = [p for p in path.iterdir() if p.name != "manifest.json"]
    entries = {p.name: {"size": p.stat().st_size, "sha256": checkpoint._digest(p)} for p in files}
    (path / "manifest.json").write_text(json.dumps(entries))


def with_model_code(run: Path, canary: Path) -> None:
    """Enable `trust_remote_code` in the settings and put code next to the model."""
    text = (run / "config.toml").read_text().replace("trust_remote_code = false", "trust_remote_code = true")
    (run / "config.toml").write_text(text)
    for path in checkpoint.saved(run / "checkpoints"):
        (path / "modeling_mine.py").write_text(f"import os\nos.makedirs({str(canary)!r})\nclass Mine: pass\n")
        config = json.loads((path / "config.json").read_text())
        config |= {
            "model_type": "mine",
            "auto_map": {"AutoConfig": "modeling_mine.Mine", "AutoModelForCausalLM": "modeling_mine.Mine"},
        }
        (path / "config.json").write_text(json.dumps(config))
        change(path, lambda state: state["settings"].update({"model.trust_remote_code": True}))


# ------------------------------------------------------------------------------------------------- code


def test_the_reward_file_of_an_unpacked_run_is_imported_only_when_trusted(
    untrusted: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = (["train", "--resume", str(untrusted), "--steps=3"], ["eval", str(untrusted)])
    for command in commands:
        assert main(command) == 1
        message = capsys.readouterr().err
        assert f"imports {untrusted}/reward.py and calls shorter()" in message
        assert "--trust-run" in message
        assert not canary.exists()
    assert main([*commands[1], "--trust-run"]) == 0
    assert canary.exists()


def test_model_code_of_an_unpacked_run_is_imported_only_when_trusted(
    untrusted: Path, canary: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with_model_code(untrusted, canary)
    commands = (
        ["train", "--resume", str(untrusted), "--steps=3"],
        ["eval", str(untrusted), "--reward.functions=exact_answer"],
        ["replay", str(untrusted), "-o", str(tmp_path / "replay")],
        ["merge", str(untrusted), str(tmp_path / "merged")],
        ["report", str(untrusted), "-o", str(tmp_path / "report.html")],
    )
    for command in commands:
        main(command)
        message = capsys.readouterr().err
        assert not canary.exists()
        if command[0] in ("train", "eval", "replay"):
            assert "modeling_mine.py" in message
            assert "--trust-run" in message
            assert ("reward.py" in message) == (command[0] == "train")
    assert main([*commands[2], "--trust-run"]) == 1  # the code is imported, but defines no model
    assert "Mine" in capsys.readouterr().err
    assert canary.exists()


@pytest.mark.parametrize(
    "place", ["an absolute path", "behind a link", "the model of an adapter's adapter", "next to a .gguf file"]
)
def test_model_code_outside_the_models_folder_is_named(place: str, tmp_path: Path) -> None:
    model, code = tmp_path / "model", tmp_path / "elsewhere"
    model.mkdir()
    code.mkdir()
    for name in ("modeling_mine.py", "imported_by_it.py"):
        (code / name).write_text("class Mine: pass\n")
    module = code / "modeling_mine" if place == "an absolute path" else "modeling_mine"
    path = model
    if place == "behind a link":
        (model / "inside").symlink_to(code)
        module = "inside/modeling_mine"
    elif place == "the model of an adapter's adapter":
        for adapter, base in ((model, tmp_path / "between"), (tmp_path / "between", code)):
            adapter.mkdir(exist_ok=True)
            (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
        model = code
    elif place == "next to a .gguf file":
        path, model = code / "model.gguf", code
        path.touch()
    (model / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": [None, f"{module}.Mine"]}}))
    named = [c.what for c in trust.model_code(ModelConfig(path=str(path), trust_remote_code=True), [path])]
    assert [text.rpartition("/")[2] for text in named] == ["imported_by_it.py", "modeling_mine.py"]


def test_a_module_named_by_an_absolute_path_is_imported_only_when_trusted(
    untrusted: Path, canary: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with_model_code(untrusted, canary)
    for path in checkpoint.saved(untrusted / "checkpoints"):
        (path / "modeling_mine.py").replace(tmp_path / "elsewhere.py")
        text = (path / "config.json").read_text().replace("modeling_mine.Mine", f"{tmp_path}/elsewhere.Mine")
        (path / "config.json").write_text(text)
        update_manifest(path)
    assert main(["eval", str(untrusted), "--reward.functions=exact_answer"]) == 1
    assert f"imports {tmp_path}/elsewhere.py" in capsys.readouterr().err
    assert not canary.exists()


def test_a_run_started_here_resumes_until_its_code_changes(started: Path, display: Any, tmp_path: Path) -> None:
    assert resume(started, display, steps=3).step == 3
    with (tmp_path / "lengths.py").open("a") as file:
        file.write("# another line\n")
    with pytest.raises(TrustError, match=r"lengths\.py and calls shorter\(\) \(changed since it last ran here\)"):
        resume(started, display, steps=4)
    assert resume(started, display, steps=4, trust_run=True).step == 4
    assert resume(started, display, steps=5).step == 5


def test_a_moved_run_is_not_trusted_and_a_link_to_it_is(started: Path, display: Any, tmp_path: Path) -> None:
    moved = started.rename(tmp_path / "moved")
    with pytest.raises(TrustError, match=r"lengths\.py"):
        resume(moved, display, steps=3)
    moved.rename(started)
    (tmp_path / "link").symlink_to(started)
    assert resume(tmp_path / "link", display, steps=3).step == 3


def test_without_a_state_directory_trust_is_needed_each_time(
    trusted: Path, display: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert resume(trusted, display, steps=3, trust_run=True).step == 3
    with pytest.raises(TrustError):
        resume(trusted, display, steps=4)


def test_a_forged_trust_record_in_the_run_directory_is_ignored(
    untrusted: Path, canary: Path, display: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = trust.reward_code(from_tree(read_toml(untrusted / "config.toml"), where="test"))
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(untrusted / ".local" / "state"))
        trust.remember(untrusted, code)
    with pytest.raises(TrustError):
        resume(untrusted, display, steps=3)
    assert not canary.exists()


@pytest.mark.parametrize("changed", ["helper.py", "package/__init__.py", "package/inner.py", "package/deep.py"])
def test_a_changed_module_that_a_reward_file_imports_needs_new_trust(
    changed: str, tiny: Callable[..., Config], tmp_path: Path
) -> None:
    folder = tmp_path / "rewards"
    (folder / "package").mkdir(parents=True)
    (folder / "mine.py").write_text(
        "import json, helper\ndef score(completions, **_):\n    return helper.all(completions)"
    )
    (folder / "helper.py").write_text("def all(completions):\n    from package import inner\n    return inner.all()")
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "inner.py").write_text("from .deep import *")
    (folder / "package" / "deep.py").write_text("import helper, missing, package.inner")
    (folder / "json.py").write_text("shadowed by the standard library, and not valid Python")
    (folder / "unused.py").touch()
    config, run = tiny(f"reward.functions={folder / 'mine.py'}:score"), tmp_path / "run"
    trust.check(run, trust.reward_code(config), trust=True)
    (folder / "unused.py").write_text("changed = 1")
    (folder / "json.py").write_text("changed = 1")
    trust.check(run, trust.reward_code(config), trust=False)
    (folder / changed).write_text((folder / changed).read_text() + "\nchanged = 1\n")
    with pytest.raises(TrustError, match=f"mine.py imports {folder / changed} .changed since it last ran here."):
        trust.check(run, trust.reward_code(config), trust=False)


@pytest.mark.parametrize(
    ("text", "imported"),
    [
        ("import winreg", "winreg.py"),  # of the standard library, but not on this system
        ("from package import *", "package/listed.py"),  # named in `__all__`
        ("import beside_the_other", "../other/beside_the_other.py"),
        ("import sympy", "mpmath.py"),  # sympy would import it instead of the installed mpmath
    ],
)
def test_less_obvious_imports_of_a_reward_file_are_named(
    text: str, imported: str, tiny: Callable[..., Config], tmp_path: Path
) -> None:
    folder, other = tmp_path / "rewards", tmp_path / "other"
    for file in (folder / imported, folder / "package" / "__init__.py", other / "theirs.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (folder / "mine.py").write_text(f"{text}\ndef score(completions, **_): ...")
    config = tiny(f'reward.functions=["{folder}/mine.py:score", "{other}/theirs.py:score"]')
    named = [code.what for code in trust.reward_code(config)]
    assert f"{folder}/mine.py imports {(folder / imported).resolve()}" in named


@pytest.mark.parametrize("kind", ["cached", "without source"])
def test_bytecode_never_replaces_the_source_that_was_approved(
    kind: str, tiny: Callable[..., Config], display: Any, tmp_path: Path, canary: Path
) -> None:
    helper = tmp_path / "helper.py"
    payload = tmp_path / "payload.py"
    payload.write_text(f"import os\nos.makedirs({str(canary)!r}, exist_ok=True)\nvalue = 0.0\n")
    place = importlib.util.cache_from_source(str(helper)) if kind == "cached" else f"{helper}c"
    py_compile.compile(str(payload), place, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    if kind == "cached":
        helper.write_text("value = 0.0")
    (tmp_path / "mine.py").write_text(
        "try:\n    from helper import value\nexcept ImportError:\n    value = 0.0\n"
        "def score(completions, **_):\n    return [value + len(c) for c in completions]"
    )
    train(tiny("steps=1", "eval.every=0", f"reward.functions={tmp_path}/mine.py:score"), display)
    assert not canary.exists()


def test_all_code_that_settings_can_run_is_named(tiny: Callable[..., Config], tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "someone/theirs--code.Config"}}))
    config = tiny(
        "reward.functions=code_tests",
        'reward.options={code_tests = {python = "/x/python", allow_unsafe = true}}',
        "rollout.engine=vllm",
        'rollout.engine_options={settings = {worker_cls = "evil"}, servers = ["there:1"]}',
        "model.build=",
        f"model.path={model}",
        "model.trust_remote_code=true",
    )
    message = " ".join(code.what for code in trust.all_code(config, [model]))
    for words in ("starts /x/python", "without a sandbox", "worker_cls", "there:1", "the code of someone/theirs"):
        assert words in message
    assert trust.all_code(tiny("reward.functions=exact_answer"), [model]) == []


@pytest.mark.parametrize("command", [["train", "demo"], ["eval", "nowhere", "--data", "addition"]])
def test_trust_run_is_refused_where_it_has_no_effect(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--trust-run"]) == 1
    assert "--trust-run: has no effect" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- links


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


FILES = (".lock", "config.toml", "environment.json", "metrics.jsonl", "timings.jsonl", "events.jsonl", "curves.png")
FOLDERS = ("rollouts", "evaluations", "tokenizer", "checkpoints", "reference", "reward_errors", "tensorboard", "wandb")
INSIDE = (
    "rollouts/000003.tmp",
    "rollouts/000002.jsonl",
    "evaluations/000003.tmp",
    "tokenizer/tokenizer.json",
    "checkpoints/.tmp-000003",
    "checkpoints/000003",
    "checkpoints/000001",
    "reward_errors/02.txt",
    "tensorboard/events",
)


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
@pytest.mark.parametrize("name", [*FILES, *FOLDERS, *INSIDE])
def test_a_resume_writes_and_deletes_nothing_outside(
    name: str, kind: str, untrusted: Path, display: Any, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    path = untrusted / name
    outside.mkdir()
    path.parent.mkdir(exist_ok=True)
    target = outside / path.name
    if path.exists() or path.is_symlink():
        path.rename(target)
    elif name in FOLDERS or path.parent.name == "checkpoints":
        target.mkdir()
        (target / "precious").write_text("precious")
    else:
        target.write_text("precious")
    if kind == "hard link" and target.is_dir():
        return  # directories cannot be hard-linked
    {"link": path.symlink_to, "hard link": path.hardlink_to, "pipe": lambda _: os.mkfifo(path)}[kind](target)
    before = contents(outside)
    if kind == "hard link" and name.startswith(
        ("rollouts/", "evaluations/", "checkpoints/")
    ):  # these are replaced by renaming, never written in place
        assert resume(untrusted, display, steps=3, trust_run=True).step == 3
    else:
        with pytest.raises(ConfigError, match=re.escape(str(untrusted if name in (".lock", "config.toml") else path))):
            resume(untrusted, display, steps=3, trust_run=True)
    assert contents(outside) == before


@pytest.mark.parametrize("link", [True, False])
def test_files_replaced_by_renaming_are_not_written_through_links(
    link: bool, untrusted: Path, display: Any, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_text("precious")
    for path in (untrusted / ".tmp-config.toml", untrusted / ".tmp-environment.json"):
        make = path.symlink_to if link else path.hardlink_to
        make(tmp_path / "precious")
    resume(untrusted, display, steps=3, trust_run=True)
    assert (tmp_path / "precious").read_text() == "precious"
    assert "steps = 3" in (untrusted / "config.toml").read_text()


# ------------------------------------------------------------------------------------------------- deletion


def test_only_checkpoints_are_deleted(trusted: Path, display: Any) -> None:
    settings = (trusted / "config.toml").read_text()
    (trusted / "config.toml").write_text(settings.replace("keep = 0", "keep = 1"))
    kept = ("000000-best", "20240101", "123456", "mine", ".tmp-mine", ".tmp-123")
    for name in kept:
        (trusted / "checkpoints" / name).mkdir()
        (trusted / "checkpoints" / name / "data").write_text(name)
    (trusted / "checkpoints" / "123456" / "manifest.json").write_text("{}")
    resume(trusted, display, steps=4)
    for name in kept:
        assert (trusted / "checkpoints" / name / "data").read_text() == name
    assert [p.name for p in checkpoint.saved(trusted / "checkpoints") if p.name not in kept] == ["000004"]


def test_a_skipped_later_checkpoint_does_not_displace_the_new_one(trusted: Path, display: Any) -> None:
    settings = (trusted / "config.toml").read_text()
    (trusted / "config.toml").write_text(settings.replace("keep = 0", "keep = 1"))
    (trusted / "checkpoints/000002").rename(trusted / "checkpoints/000009")
    resume(trusted, display)
    assert checkpoint.newest(trusted / "checkpoints")[0].name == "000002"


def test_a_folder_with_the_name_of_a_checkpoint_is_not_replaced(trusted: Path, display: Any) -> None:
    (trusted / "checkpoints/000003").mkdir()
    (trusted / "checkpoints/000003/data").write_text("mine")
    with pytest.raises(CheckpointError, match="000003 exists and is not a checkpoint"):
        resume(trusted, display, steps=3)
    assert (trusted / "checkpoints/000003/data").read_text() == "mine"


def test_a_leftover_that_cannot_be_deleted_is_not_written_to(
    trusted: Path, display: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a read-only directory with writable files."""
    partial, unlink = trusted / "checkpoints/.tmp-000003", os.unlink
    partial.mkdir()
    (tmp_path / "precious").write_text("mine")
    os.link(tmp_path / "precious", partial / "trainer.json")

    def refuse(path: Any, **options: Any) -> None:
        if os.path.lexists(partial / "trainer.json") and os.path.basename(path) == "trainer.json":
            raise PermissionError(13, "Permission denied", path)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(CheckpointError, match=f"{partial} is in the way and cannot be deleted"):
        resume(trusted, display, steps=3)
    assert (tmp_path / "precious").read_text() == "mine"


# ------------------------------------------------------------------------------------------------- forged state

FORGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another step": lambda s: s.update(step=7),
    "a step that is a string": lambda s: s.update(step="2"),
    "a step that is true": lambda s: s.update(step=True),
    "a negative cursor": lambda s: s["rollout"].update(cursor=-1),
    "a fractional cursor": lambda s: s["rollout"].update(cursor=0.5),
    "a huge cursor": lambda s: s["rollout"].update(cursor=10**400),
    "fewer batches than steps": lambda s: s["rollout"].update(batch=1),
    "a batch that is true": lambda s: s["rollout"].update(batch=True),
    "no batch": lambda s: s["rollout"].pop("batch"),
    "an extra field of the rollout": lambda s: s["rollout"].update(more=1),
    "a rollout that is a list": lambda s: s.update(rollout=[2, 8]),
    "a rollout that is null": lambda s: s.update(rollout=None),
    "two cursors": lambda s: s.update(cursor=8),
    "no cursor": lambda s: s.pop("rollout"),
    "a negative plain cursor": lambda s: (s.pop("rollout"), s.update(cursor=-1)),
    "a huge plain cursor": lambda s: (s.pop("rollout"), s.update(cursor=10**400)),
    "a plain cursor that is a list": lambda s: (s.pop("rollout"), s.update(cursor=[8])),
    "a plain cursor and a step that is true": lambda s: (s.pop("rollout"), s.update(cursor=8, step=True)),
    "more updates than steps": lambda s: s.update(updates=1000),
    "a scale of 0": lambda s: s.update(clip_scale=0),
    "a scale that is NaN": lambda s: s.update(clip_scale=float("nan")),
    "a scale beyond any float": lambda s: s.update(clip_scale=10**400),
    "a rollback that was never made": lambda s: s.update(rollbacks=1),
    "a negative number of rollbacks": lambda s: s.update(rollbacks=-1),
    "a rate factor above 1": lambda s: s.update(rate_factor=1.5),
    "a clip factor that is NaN": lambda s: s.update(clip_factor=float("nan")),
    "offsets of a file outside": lambda s: s["offsets"].update({"../../x": 1}),
    "a negative offset": lambda s: s["offsets"].update({"metrics.jsonl": -1}),
    "an offset within a line": lambda s: s["offsets"].update({"metrics.jsonl": s["offsets"]["metrics.jsonl"] - 5}),
    "an offset of an earlier step": lambda s: s["offsets"].update({"metrics.jsonl": 0}),
    "no settings": lambda s: s.update(settings={}),
    "settings that are a list": lambda s: s.update(settings=[1]),
    "fewer tokens than the log": lambda s: s.update(tokens=s["tokens"] - 1),
    "a pending step of the past": lambda s: s.update(pending={"step": 1}),
    "a pending step that is already logged": lambda s: s.update(pending={"step": 2}),
    "an extra field": lambda s: s.update(more=1),
    "a missing field": lambda s: s.pop("tokens"),
}


@pytest.mark.parametrize("how", FORGED)
def test_a_forged_state_is_skipped(how: str, trusted: Path, display: Any) -> None:
    for path in checkpoint.saved(trusted / "checkpoints")[:-1]:
        shutil.rmtree(path)
    newest = checkpoint.saved(trusted / "checkpoints")[-1]
    change(newest, FORGED[how])
    assert checkpoint.damage(newest) is None
    before = (trusted / "metrics.jsonl").read_bytes()
    with pytest.raises(
        CheckpointError, match=r"no intact checkpoint to resume from: 000002: .*(trainer|metrics|rollbacks)\.json"
    ):
        resume(trusted, display, steps=3)
    assert (trusted / "metrics.jsonl").read_bytes() == before


def test_a_deeply_nested_state_is_skipped(trusted: Path, display: Any) -> None:
    newest = checkpoint.saved(trusted / "checkpoints")[-1]
    (newest / "trainer.json").write_text("[" * 100_000)
    update_manifest(newest)
    assert resume(trusted, display, steps=3).step == 3
    assert any("000002" in m and "cannot be read" in m for m in display.messages)


@pytest.mark.parametrize("line", ["no json", "[1]", "[" * 100_000])
def test_an_invalid_log_is_named(line: str, trusted: Path, display: Any) -> None:
    text = (trusted / "metrics.jsonl").read_text().splitlines(keepends=True)
    text[0] = line[: len(text[0]) - 1].ljust(len(text[0]) - 1) + "\n"
    (trusted / "metrics.jsonl").write_text("".join(text))
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        resume(trusted, display, steps=3)


# ------------------------------------------------------------------------------------------------- two trainers


def test_f9_a_deleted_lock_file_admits_no_second_trainer(trusted: Path, display: Any) -> None:
    first, _ = RunDir.open(trusted)
    (trusted / ".lock").unlink()
    with pytest.raises(RunLockedError, match="another trainer"):
        resume(trusted, display, steps=3)
    first.check_held()
    first.close()
    assert resume(trusted, display, steps=3).step == 3


def test_f9_a_trainer_stops_when_its_directory_is_replaced(
    tiny: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    config = tiny("steps=3", "eval.every=0")

    class MovingDisplay(type(display)):  # type: ignore[misc]
        def step(self, step: int, *rest: Any) -> None:
            if step == 1:
                run_of(config).rename(tmp_path / "moved")
                run_of(config).mkdir()

    with pytest.raises(GspoError, match="was moved, deleted, or taken over"):
        train(config, MovingDisplay())
    assert list(run_of(config).iterdir()) == []
