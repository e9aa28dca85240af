"""M1 to M4: files from others. Nothing in a data file, model directory or checkpoint is run, followed or believed.

Every payload, were it unpickled or imported, would make a file (the canary).
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import resource
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from ends import run_of

import gspo
from gspo.config import Config
from gspo.data.sources import read_file
from gspo.errors import CheckpointError, DataError, GspoError
from gspo.learner import checkpoint
from gspo.trainer import resume, train


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


def test_the_payload_works_where_it_is_let_in(canary: Path) -> None:
    pickle.loads(pickle.dumps(Payload(canary)))
    assert canary.exists()


# ------------------------------------------------------------------------------------------------- M1: code in files


@pytest.mark.parametrize("name", ["data.pkl", "data.pt", "data.metadata", "data.jsonl", "data.parquet", "data.json"])
def test_m1_a_pickle_is_no_data(name: str, canary: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Payload(canary)))
    try:
        rows = read_file(str(tmp_path / name))
    except DataError:
        rows = []
    assert all(row.fault for row in rows)
    assert not canary.exists()


_trained: list[Path] = []


@pytest.fixture
def saved(tiny: Callable[..., Config], display: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run, which is also a model directory: a copy of one that is trained once."""
    config = tiny("steps=1", "eval.every=0")
    if not _trained:
        train(config, display)
        _trained.append(shutil.copytree(run_of(config), tmp_path_factory.mktemp("trained") / "run"))
    shutil.copytree(_trained[0], run_of(config), dirs_exist_ok=True)
    return checkpoint.saved(run_of(config) / "checkpoints")[-1]


def start(tiny: Callable[..., Config], display: Any, model: Path) -> None:
    train(tiny("steps=1", "eval.every=0", "model.build=", f"model.path={model}", run_dir="other"), display)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "pytorch_model.pt"])
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_m1_a_model_that_is_a_pickle_is_refused(
    name: str, kind: str, saved: Path, canary: Path, tiny: Callable[..., Config], display: Any
) -> None:
    (saved / "model.safetensors").unlink()
    if kind == "torch":
        torch.save({"weight": Payload(canary)}, saved / name)
    else:
        (saved / name).write_bytes(pickle.dumps(Payload(canary)))
    with pytest.raises(GspoError):
        start(tiny, display, saved)
    assert not canary.exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_m1_code_that_comes_with_a_model_or_tokenizer_is_not_run(
    file: str, saved: Path, canary: Path, tiny: Callable[..., Config], display: Any
) -> None:
    (saved / "modeling_mine.py").write_text(f"import os\nos.mkdir({str(canary)!r})\nclass Mine: pass\n")
    settings = json.loads((saved / file).read_text())
    names = ("AutoConfig", "AutoModelForCausalLM") if file == "config.json" else ("AutoTokenizer",)
    settings["auto_map"] = {
        name: ["modeling_mine.Mine", None] if name == "AutoTokenizer" else "modeling_mine.Mine" for name in names
    }
    settings |= {"model_type": "mine"} if file == "config.json" else {"tokenizer_class": "Mine"}
    (saved / file).write_text(json.dumps(settings))
    if file == "config.json":
        with pytest.raises(GspoError, match="custom code"):
            start(tiny, display, saved)
    else:  # the class is unknown; the plain files are enough, or it is refused
        with suppress(GspoError):
            start(tiny, display, saved)
    assert not canary.exists()


# ------------------------------------------------------------------------------------------------- M2: bad tensors


def tensors(header: dict[str, Any], data: bytes, length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end]}


BAD = {
    "a header of 2 GB": tensors({"a": entry(0, 8)}, b"x" * 8, length=2**31),
    "a header beyond all": tensors({"a": entry(0, 8)}, b"x" * 8, length=2**63),
    "overlapping": tensors({"a": entry(0, 8), "b": entry(4, 12)}, b"x" * 12),
    "a hole": tensors({"a": entry(0, 8), "b": entry(16, 24)}, b"x" * 24),
    "cut short": tensors({"a": entry(0, 2**20)}, b"x" * 100),
    "a shape beyond all": tensors({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}, b"x" * 8),
    "no header": b"",
}


@pytest.mark.parametrize("where", ["model.safetensors", "trainer.tensors"])
def test_m2_bad_tensors_are_an_error_with_little_memory(
    where: str, saved: Path, tiny: Callable[..., Config], display: Any
) -> None:
    """The manifest is made to fit, so that it is the reading that must notice."""
    manifest = json.loads((saved / "manifest.json").read_text())
    run = saved.parent.parent
    for other in checkpoint.saved(saved.parent)[:-1]:
        other.rename(run / f"away-{other.name}")
    for name, data in BAD.items():
        (saved / where).write_bytes(data)
        manifest[where] = {"size": len(data), "sha256": checkpoint._digest(saved / where)}
        (saved / "manifest.json").write_text(json.dumps(manifest))
        assert checkpoint.damage(saved) is None
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(GspoError):
            resume(run, display, steps=2, trust_run=True)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024, name


# ------------------------------------------------------------------------------------------------- M3: links and names


def link(saved: Path, outside: Path) -> None:
    (saved / "tokenizer.json").rename(outside / "tokenizer.json")
    (saved / "tokenizer.json").symlink_to(outside / "tokenizer.json")


def folder_link(saved: Path, outside: Path) -> None:
    saved.rename(outside / "moved")
    saved.symlink_to(outside / "moved")


def pipe(saved: Path, outside: Path) -> None:
    os.mkfifo(saved / "more.json")


def named(name: str) -> Callable[[Path, Path], None]:
    def change(saved: Path, outside: Path) -> None:
        (outside / "secret").write_text("s")
        manifest = json.loads((saved / "manifest.json").read_text())
        manifest[name.format(outside=outside)] = {"size": 1, "sha256": checkpoint._digest(outside / "secret")}
        (saved / "manifest.json").write_text(json.dumps(manifest))

    return change


STRANGE = {
    "link": link,
    "folder link": folder_link,
    "pipe": pipe,
    "name with ..": named("../../../outside/secret"),
    "absolute name": named("{outside}/secret"),
    "..": named(".."),
    "empty name": named(""),
}


@pytest.mark.parametrize("how", STRANGE)
def test_m3_a_checkpoint_that_leads_elsewhere_is_passed_over(
    how: str, saved: Path, tiny: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    STRANGE[how](saved, outside)
    assert checkpoint.damage(saved) is not None
    newest, complaints = checkpoint.newest(saved.parent)
    assert newest.name == "000000"
    assert len(complaints) == 1
    newest.rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        checkpoint.newest(saved.parent)


# ------------------------------------------------------------------------------------------------- M4: the package itself

ALLOWED = {
    # in the sandbox, which is there for that: the program, and the row's tests
    "reward/sandbox/inside/candidate.py": {"exec", "compile", "__import__"},
    "reward/sandbox/inside/judge.py": {"exec", "compile", "__import__"},
    # stands for the tests' own `eval`: of a program's text it evaluates arithmetic only
    "reward/sandbox/inside/evaluate.py": {"eval", "exec", "compile", "__import__"},
}
NAMES = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    "pickle": {"load", "loads", "Unpickler"},
    "marshal": {"load", "loads"},
    "yaml": {"load", "unsafe_load", "full_load"},
    "torch": {"load"},
    "os": {"system", "popen"},
    "shelve": {"open"},
    "dill": {"load", "loads"},
    "joblib": {"load"},
}
KEYWORDS = {"shell": True, "trust_remote_code": True, "weights_only": False, "allow_pickle": True}


def dangers(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and function.id in NAMES:
            found.add(function.id)
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            module = function.value.id
            found |= {f"{module}.{name}" for name in ATTRIBUTES.get(module, set()) & {function.attr}}
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if keyword.arg in KEYWORDS and value is KEYWORDS[keyword.arg]:
                found.add(f"{keyword.arg}={value}")
    return found


def test_m4_the_search_finds_what_it_is_for() -> None:
    text = "eval(x); pickle.load(f); torch.load(f, weights_only=False); run(c, shell=True); yaml.load(t); g(trust_remote_code=True)"
    assert dangers(ast.parse(text)) == {
        "eval",
        "pickle.load",
        "torch.load",
        "weights_only=False",
        "shell=True",
        "yaml.load",
        "trust_remote_code=True",
    }


def test_m4_the_package_runs_no_text_and_reads_no_pickle() -> None:
    package = Path(gspo.__file__).parent
    found = {str(p.relative_to(package)): dangers(ast.parse(p.read_text())) for p in package.rglob("*.py")}
    assert len(found) > 100
    too_much = {name: what - ALLOWED.get(name, set()) for name, what in found.items()}
    assert {name: what for name, what in too_much.items() if what} == {}
    imported = {
        alias.name.partition(".")[0]
        for p in package.rglob("*.py")
        for node in ast.walk(ast.parse(p.read_text()))
        for alias in (node.names if isinstance(node, ast.Import) else [])
    }
    assert not imported & {"pickle", "shelve", "dill", "cloudpickle", "yaml"}
