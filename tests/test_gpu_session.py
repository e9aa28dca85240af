"""benchmarks/gpu_session.py: its commands exist, and a session survives parts that fail, hang or do not fit."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo.cli import build_parser
from gspo.config import load

ROOT = Path(__file__).parent.parent
HELPERS = ("gpu_session", "gpu", "memory_gpu", "gpu_decode", "gpu_learn", "gpu_measure", "gpu_peers", "gpu_step")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("gpu_session")
    for name in HELPERS:
        sys.modules.pop(name, None)


def records(out: Path) -> dict[str, dict[str, Any]]:
    return {record["part"]: record for record in map(json.loads, (out / "session.jsonl").read_text().splitlines())}


def test_parts_are_commands_that_exist(session: Any) -> None:
    parts_of = {"benchmarks/gpu.py": importlib.import_module("gpu").PARTS}
    parts_of["benchmarks/memory_gpu.py"] = importlib.import_module("memory_gpu").SECTIONS
    for name, part in session.PARTS.items():
        assert 0 < part.limit_s < session.MOST_S, name
        script = part.words[0]
        if script.startswith("benchmarks/"):
            assert (ROOT / script).is_file(), name
        if script in parts_of:
            given = [word for word in part.words[1:] if not word.startswith(("-", "{")) and not word.isdigit()]
            assert given, name
            assert set(given) <= set(parts_of[script]), name


def test_training_parts_are_valid_recipes(session: Any) -> None:
    for seed in range(3):
        command, *words = session.PARTS[f"float32-{seed}"].words[2:]
        assert command == "train"
        at = words.index("--model.path")
        words[at : at + 2] = ["--model.path=model.gguf"]
        options, overrides = build_parser().parse_known_args(["train", *words])
        config = load(str(ROOT / options.recipe), [*overrides, f"--seed={options.seed}"])
        assert (config.model.dtype, config.tokens, config.seed) == ("float32", 400_000, seed)


def test_every_test_file_of_the_gpu_is_found(session: Any) -> None:
    found = session.cuda_tests()
    assert "tests/rollout/test_paged.py" in found
    assert "tests/model/test_packed_attention.py" in found
    assert "tests/test_config.py" not in found


def test_a_session_survives_its_parts(session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def part(code: str, limit_s: int) -> Any:
        return session.Part(about="", words=("-c", code), limit_s=limit_s)

    parts = {
        "fails": part("raise SystemExit(7)", 60),
        "hangs": part("import time; print('begun', flush=True); time.sleep(600)", 5),
        "long": part("print('never')", 10_000),
        "works": part("import sys; print('done by', sys.executable)", 60),
    }
    monkeypatch.setattr(session, "PARTS", parts)
    assert session.main(["run", *parts, "--out", str(tmp_path), "--seconds", "3600"]) == 1
    found = records(tmp_path)
    assert [found[name]["code"] for name in parts] == [7, session.TIMED_OUT, session.NOT_RUN, 0]
    assert not (tmp_path / "long.log").exists()
    assert (tmp_path / "works.log").read_text() == f"done by {sys.executable}\n"


def test_parts_see_the_carried_packages(session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "carried.py").write_text("WORD = 'from the archive'\n")
    (tmp_path / ".carry").mkdir()
    with tarfile.open(tmp_path / ".carry" / session.ARCHIVE, "w:xz") as archive:
        archive.add(tmp_path / "carried.py", "carried.py")
    monkeypatch.setattr(session, "ROOT", tmp_path)
    monkeypatch.setattr(session.tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "carried.py").unlink()
    parts = {"one": session.Part(about="", words=("-c", "import carried; print(carried.WORD)"), limit_s=60)}
    monkeypatch.setattr(session, "PARTS", parts)
    for number in range(2):  # the second time, they are unpacked already
        out = tmp_path / f"out{number}"
        assert session.main(["run", "one", "--out", str(out)]) == 0
        assert (out / "one.log").read_text() == "from the archive\n"
    assert len(list(tmp_path.glob("gspo-packages-*"))) == 1


def test_a_part_that_needs_a_model_is_refused_without(session: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        session.main(["run", "step", "rounding", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_what_travels_is_counted(session: Any, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("ignored\n")
    (tmp_path / "ignored").write_bytes(bytes(1000))
    (tmp_path / "tracked").write_bytes(bytes(10))
    (tmp_path / "new file").write_bytes(bytes(5))
    subprocess.run(["git", "-C", str(tmp_path), "add", "tracked"], check=True)
    assert session.bytes_of_tree(tmp_path) == 10 + 5 + len("ignored\n")
