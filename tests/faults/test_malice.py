"""M1 to M4: malicious files. Nothing in a data file, model directory or checkpoint is executed, followed or trusted.

Every payload would create a folder (the canary) if it were unpickled or imported.
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


def test_the_payload_creates_the_canary_when_unpickled(canary: Path) -> None:
    pickle.loads(pickle.dumps(Payload(canary)))
    assert canary.exists()


# ------------------------------------------------------------------------------------------------- M1: code in files


@pytest.mark.parametrize("name", ["data.pkl", "data.pt", "data.metadata", "data.jsonl", "data.parquet", "data.json"])
def test_m1_a_pickle_is_not_read_as_data(name: str, canary: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Payload(canary)))
    try:
        rows = read_file(str(tmp_path / name))
    except DataError:
        rows = []
    assert all(row.fault for row in rows)
    assert not canary.exists()


_trained_runs: list[Path] = []


@pytest.fixture
def saved(tiny: Callable[..., Config], display: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run, which is also a model directory. All tests copy one trained run."""
    config = tiny("steps=1", "eval.every=0")
    if not _trained_runs:
        train(config, display)
        _trained_runs.append(shutil.copytree(run_of(config), tmp_path_factory.mktemp("trained") / "run"))
    shutil.copytree(_trained_runs[0], run_of(config), dirs_exist_ok=True)
    return checkpoint.saved(run_of(config) / "checkpoints")[-1]


def train_from(tiny: Callable[..., Config], display: Any, model: Path) -> None:
    train(tiny("steps=1", "eval.every=0", "model.build=", f"model.path={model}", run_dir="other"), display)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "pytorch_model.pt"])
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_m1_a_pickled_model_is_refused(
    name: str, kind: str, saved: Path, canary: Path, tiny: Callable[..., Config], display: Any
) -> None:
    (saved / "model.safetensors").unlink()
    if kind == "torch":
        torch.save({"weight": Payload(canary)}, saved / name)
    else:
        (saved / name).write_bytes(pickle.dumps(Payload(canary)))
    with pytest.raises(GspoError):
        train_from(tiny, display, saved)
    assert not canary.exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_m1_custom_code_of_a_model_or_tokenizer_is_not_run(
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
            train_from(tiny, display, saved)
    else:  # the class is unknown: either the plain files suffice or the tokenizer is refused
        with suppress(GspoError):
            train_from(tiny, display, saved)
    assert not canary.exists()


# ------------------------------------------------------------------------------------------------- M2: bad tensors


def tensors(header: dict[str, Any], data: bytes, length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end]}


BAD = {
    "a header of 2 GB": tensors({"a": entry(0, 8)}, b"x" * 8, length=2**31),
    "a header of 2^63 bytes": tensors({"a": entry(0, 8)}, b"x" * 8, length=2**63),
    "overlapping": tensors({"a": entry(0, 8), "b": entry(4, 12)}, b"x" * 12),
    "a hole": tensors({"a": entry(0, 8), "b": entry(16, 24)}, b"x" * 24),
    "truncated data": tensors({"a": entry(0, 2**20)}, b"x" * 100),
    "a shape of 2^40": tensors({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}, b"x" * 8),
    "no header": b"",
}


@pytest.mark.parametrize("where", ["model.safetensors", "trainer.tensors"])
def test_m2_invalid_tensor_files_are_an_error_and_allocate_little_memory(
    where: str, saved: Path, tiny: Callable[..., Config], display: Any
) -> None:
    """The manifest matches the bad file, so the tensor reader must detect the fault."""
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


def manifest_entry(name: str) -> Callable[[Path, Path], None]:
    def change(saved: Path, outside: Path) -> None:
        (outside / "secret").write_text("s")
        manifest = json.loads((saved / "manifest.json").read_text())
        manifest[name.format(outside=outside)] = {"size": 1, "sha256": checkpoint._digest(outside / "secret")}
        (saved / "manifest.json").write_text(json.dumps(manifest))

    return change


ESCAPES = {
    "link": link,
    "folder link": folder_link,
    "pipe": pipe,
    "name with ..": manifest_entry("../../../outside/secret"),
    "absolute name": manifest_entry("{outside}/secret"),
    "..": manifest_entry(".."),
    "empty name": manifest_entry(""),
}


@pytest.mark.parametrize("how", ESCAPES)
def test_m3_a_checkpoint_that_points_outside_is_skipped(
    how: str, saved: Path, tiny: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    ESCAPES[how](saved, outside)
    assert checkpoint.damage(saved) is not None
    newest, complaints = checkpoint.newest(saved.parent)
    assert newest.name == "000000"
    assert len(complaints) == 1
    newest.rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        checkpoint.newest(saved.parent)


# -------------------------------------------------------------------------------- M4: the package itself

ALLOWED = {
    # Inside the sandbox, whose purpose this is: the model's program and the tests of the problem.
    "reward/sandbox/inside/candidate.py": {"exec", "compile", "__import__"},
    "reward/sandbox/inside/judge.py": {"exec", "compile", "__import__"},
    # Replaces `eval` in the tests of a problem: of a program's text it evaluates arithmetic only.
    "reward/sandbox/inside/evaluate.py": {"eval", "exec", "compile", "__import__"},
}
NAMES = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    "pickle": {"load", "loads", "Unpickler"},
    "marshal": {"load", "loads"},
    "yaml": {"load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all"},
    "torch": {"load"},
    "os": {"system", "popen"},
    "shelve": {"open"},
    "dill": {"load", "loads"},
    "joblib": {"load"},
}
KEYWORDS = {"shell": True, "trust_remote_code": True, "weights_only": False, "allow_pickle": True}


def dangerous_calls(tree: ast.AST) -> set[str]:
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


def test_m4_the_search_finds_dangerous_calls() -> None:
    text = (
        "eval(x); pickle.load(f); torch.load(f, weights_only=False); run(c, shell=True); yaml.load(t); "
        "g(trust_remote_code=True)"
    )
    assert dangerous_calls(ast.parse(text)) == {
        "eval",
        "pickle.load",
        "torch.load",
        "weights_only=False",
        "shell=True",
        "yaml.load",
        "trust_remote_code=True",
    }


def test_m4_the_package_evaluates_no_text_and_reads_no_pickle() -> None:
    package = Path(gspo.__file__).parent
    found = {str(p.relative_to(package)): dangerous_calls(ast.parse(p.read_text())) for p in package.rglob("*.py")}
    assert len(found) > 100
    not_allowed = {name: what - ALLOWED.get(name, set()) for name, what in found.items()}
    assert {name: what for name, what in not_allowed.items() if what} == {}
    imported = {
        alias.name.partition(".")[0]
        for p in package.rglob("*.py")
        for node in ast.walk(ast.parse(p.read_text()))
        for alias in (node.names if isinstance(node, ast.Import) else [])
    }
    assert not imported & {"pickle", "shelve", "dill", "cloudpickle"}
