"""Checkpoints of several ranks: the weights of one file at a time are gathered, and what is written is one model."""

from __future__ import annotations

import errno
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ends import tensors_of
from forked_ranks import SETTINGS, finished, patch, resume, train
from tiny_runs import tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from whole_tensors_alive import WholeTensors

from gspo.learner import checkpoint
from gspo.model import save
from gspo.record.run_dir import read_events

MOE = (
    "steps=1",
    "eval.every=1",
    "model.build=tiny_moe",
    "model.build_options={num_hidden_layers = 6, tie_word_embeddings = false}",
    "objective.kl=0.01",  # the reference is a directory of its own
)
LIMIT = 70_000
"""Bytes of a file: less than two layers of either model."""


def in_small_files(rank: int, run: Path) -> None:
    """Saves of this process make small files. `RUN-peak` gets the most bytes that the leader has gathered at once."""
    save.FILE_BYTES = LIMIT
    whole = WholeTensors()
    patch(save, "full", whole.counted)
    if rank:
        return

    def make(original: Any) -> Any:
        def save_model(*args: Any) -> None:
            gc.collect()
            original(*args)
            run.with_name(f"{run.name}-peak").write_text(str(whole.peak))

        return save_model

    patch(checkpoint, "save_model", make)


def weights_of(path: Path) -> dict[str, Tensor]:
    """The weights as transformers reads them, which complains about names that are missing or unknown."""
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values()), report
    return dict(model.state_dict())


def test_a_model_in_several_files_is_the_one_of_one_process(tmp_path: Path) -> None:
    one, two = (tiny_config(tmp_path, *MOE, run_dir=name) for name in ("one", "two"))
    run = Path(two.run_dir)
    finished(train(one, 1))
    finished(train(two, 2, lambda rank: in_small_files(rank, run)))
    for folder in ("checkpoints/000000", "checkpoints/000001", "reference"):
        files = sorted(path.name for path in (run / folder).glob("model*.safetensors"))
        assert len(files) == 7, "the embeddings, and each layer"
        assert files[0] == "model-00001-of-00007.safetensors"
        index = json.loads((run / folder / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == files
        expected, found = weights_of(Path(one.run_dir) / folder), weights_of(run / folder)
        assert expected.keys() == found.keys()
        exact = folder != "checkpoints/000001"  # the ranks have not trained yet
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, **{"rtol": 0, "atol": 0} if exact else {})
        assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in found.values())
    layer = max((run / "checkpoints/000001" / name).stat().st_size for name in files)
    everything = sum(4 * tensor.numel() for tensor in found.values())
    peak = int(run.with_name("two-peak").read_text())
    assert LIMIT < peak <= layer < everything / 5


def test_a_disk_that_is_full_between_two_files_does_not_end_the_run(
    golden: Callable[[int], Path], tmp_path: Path
) -> None:
    """The other ranks gather the rest of the weights, and stay in step."""
    config = tiny_config(tmp_path, *SETTINGS)
    run = Path(config.run_dir)
    saves: list[Path] = []

    def make(original: Any) -> Any:
        def save_pretrained(self: PreTrainedModel, folder: Path, **options: Any) -> None:
            saves.append(folder)
            if "000002" in str(folder) and sum("000002" in str(path) for path in saves) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            original(self, folder, **options)

        return save_pretrained

    def hook(rank: int) -> None:
        in_small_files(rank, run)
        patch(PreTrainedModel, "save_pretrained", make)

    ranks = finished(train(config, hook=hook))
    assert "the checkpoint of step 2 could not be written" in ranks.output()
    assert [event["step"] for event in read_events(run) if event["event"] == "checkpoint_failed"] == [2]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["000000", "000001", "000003", "000004"]
    whole = golden(2)
    assert (run / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    last = "checkpoints/000004"
    saved, expected = weights_of(run / last), weights_of(whole / last)
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_a_run_resumes_from_several_files(golden: Callable[[int], Path], tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "steps=2", SETTINGS[1])
    run = Path(config.run_dir)
    finished(train(config, hook=lambda rank: in_small_files(rank, run)))
    assert len(list((run / "checkpoints/000002").glob("model-*.safetensors"))) > 1
    finished(resume(run, more=["--steps=4"]))
    assert (run / "metrics.jsonl").read_bytes() == (golden(2) / "metrics.jsonl").read_bytes()
    ends = [tensors_of(path / "checkpoints/000004") for path in (run, golden(2))]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
