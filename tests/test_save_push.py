"""`gspo save` and `gspo push`: the files of a model, its card, and what is uploaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

import gspo
import gspo.network.hub
from gspo.cli import main
from gspo.config import Config
from gspo.trainer import train

MODEL_FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
TOKEN = "hf_" + "abcdefghijABCDEFGHIJ0123456789"


@pytest.fixture
def run(tiny: Callable[..., Config], display: Any) -> gspo.Run:
    config = tiny("steps=2", "name=shorter", "learner.learning_rate=2e-3")
    train(config, display)
    return gspo.Run(config.run_dir)


def test_a_saved_model_has_no_state_of_the_trainer(run: gspo.Run, tmp_path: Path, capsys: Any) -> None:
    assert main(["save", str(run.path), str(tmp_path / "model"), "--checkpoint", "1"]) == 0
    assert "000001" in capsys.readouterr().out
    names = {file.name for file in (tmp_path / "model").iterdir()}
    assert names >= MODEL_FILES
    assert not {"trainer.json", "trainer.tensors", "manifest.json"} & names
    ours, _ = run.load("1")
    saved = type(ours).from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in ours.state_dict().items())
    assert main(["save", str(run.path), str(tmp_path / "model")]) == 1
    assert "already exists" in capsys.readouterr().err
    assert main(["save", str(run.path), str(tmp_path / "other"), "--merge"]) == 1
    assert "nothing to merge: it is already a full model" in capsys.readouterr().err
    assert run.save(tmp_path / "again") == tmp_path / "again"


class Hub:
    """Stands in for `huggingface_hub.HfApi`."""

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        self.uploaded: dict[str, bytes] = {}
        self.error: Exception | None = None

    def create_repo(self, repo_id: str, *, private: bool | None = None, exist_ok: bool = False) -> Any:
        if self.error:
            raise self.error
        self.created.append({"repo_id": repo_id, "private": private, "exist_ok": exist_ok})
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str, revision: str | None) -> None:
        self.uploaded = {file.name: file.read_bytes() for file in Path(folder_path).iterdir()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: found)
    monkeypatch.setattr(gspo.network.hub, "unreachable_host", lambda: "")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return found


def test_push_uploads_the_model_and_its_card_privately(run: gspo.Run, hub: Hub, capsys: Any) -> None:
    assert main(["push", str(run.path), "someone/shorter"]) == 0
    assert hub.created == [{"repo_id": "someone/shorter", "private": True, "exist_ok": True}]
    assert hub.uploaded.keys() >= MODEL_FILES | {"README.md", "curves.png"}
    assert not {"trainer.json", "trainer.tensors", "manifest.json", "config.toml"} & hub.uploaded.keys()
    assert hub.uploaded["curves.png"].startswith(b"\x89PNG")
    card = hub.uploaded["README.md"].decode()
    last = [row for row in run.rows if "eval/accuracy" in row][-1]
    assert "library_name: transformers" in card
    assert "objective `gspo`, 2 steps of 4 prompts with 4 completions each" in card
    assert f"{last['eval/reward']:.3f} [{last['eval/reward_low']:.3f}, {last['eval/reward_high']:.3f}]" in card
    assert "learner.learning_rate = 0.002" in card
    assert 'reward.functions = ["lengths.py:shorter"]' in card
    assert "gspo train recipe.toml --seed 0" in card
    assert f"| torch | {torch.__version__} |" in card
    assert str(run.path.parent) not in card
    assert "https://huggingface.co/someone/shorter" in capsys.readouterr().out
    assert run.push("someone/open", private=False).endswith("someone/open")
    assert hub.created[-1]["private"] is False


def test_a_failed_push_names_the_cause_without_the_token(run: gspo.Run, hub: Hub, capsys: Any) -> None:
    hub.error = PermissionError(f"403 Forbidden: the token {TOKEN} may not write")
    assert main(["push", str(run.path), "someone/shorter"]) == 1
    error = capsys.readouterr().err
    assert "someone/shorter: cannot be uploaded: 403 Forbidden" in error
    assert TOKEN not in error
    assert all(TOKEN not in file.read_text(errors="replace") for file in run.path.rglob("*") if file.is_file())
    assert main(["push", str(run.path), "not a name"]) == 1
    assert "is not the name of a repository; write OWNER/MODEL" in capsys.readouterr().err


def test_a_dry_run_uploads_nothing(run: gspo.Run, hub: Hub, tmp_path: Path) -> None:
    assert main(["push", str(run.path), "someone/shorter", "--dry-run", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "README.md").is_file()
    assert not hub.created


def test_an_adapter_of_a_local_model_is_uploaded_merged(
    tiny: Callable[..., Config], display: Any, hub: Hub, tmp_path: Path, capsys: Any
) -> None:
    base = tiny("steps=1", run_dir="base")
    train(base, display)
    assert main(["save", base.run_dir, str(tmp_path / "model")]) == 0
    config = tiny("steps=1", "model.build=", f"model.path={tmp_path / 'model'}", "model.lora.rank=4", run_dir="lora")
    train(config, display)
    assert main(["push", config.run_dir, "someone/adapter"]) == 1
    assert "which nobody else has; upload the merged model with --merge" in capsys.readouterr().err
    assert main(["push", config.run_dir, "someone/merged", "--merge"]) == 0
    assert "adapter_config.json" not in hub.uploaded
    assert json.loads(hub.uploaded["config.json"])["architectures"] == ["Qwen3ForCausalLM"]
    assert main(["save", config.run_dir, str(tmp_path / "adapter")]) == 0
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_the_old_name_of_save_still_works(run: gspo.Run, tmp_path: Path, capsys: Any) -> None:
    assert main(["merge", str(run.path), str(tmp_path / "merged")]) == 1
    error = capsys.readouterr().err
    assert "gspo merge is now called gspo save --merge" in error
    assert "nothing to merge" in error
