"""A model that two ranks read in parts: the same bits as a whole one, and never a whole copy on a rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from forked_ranks import in_forks
from loading_rank import CASES, load_all, save_models
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks and one process have written about the models that they have loaded."""
    place = tmp_path_factory.mktemp("loading")
    save_models(place)
    for count in (1, 2):
        (place / str(count)).mkdir()
        in_forks(count, lambda ranks: load_all(ranks, place), place / str(count))
    return place


@pytest.mark.parametrize("name", CASES)
def test_the_weights_are_those_of_one_process(folder: Path, name: str) -> None:
    one, *several = (load_file(folder / f"{name}-{part}.safetensors") for part in ("1-0", "2-0", "2-1"))
    assert len(one) > 10
    for two in several:
        assert two.keys() == one.keys()
        for key, weight in one.items():
            assert torch.equal(two[key].view(torch.uint8), weight.view(torch.uint8)), key


@pytest.mark.parametrize("name", CASES)
def test_no_rank_holds_a_whole_copy(folder: Path, name: str) -> None:
    """While it reads, tries out and shards the model."""
    for rank in range(2):
        sizes = torch.load(folder / f"{name}-2-{rank}.pt", weights_only=True)
        assert sizes["all"] > 6 * sizes["layer"], "otherwise a whole layer would be most of the model"
        # Half of it, what is outside of the layers, and two layers: one while it is read, sharded or gathered, and what
        # it is read from.
        assert sizes["all"] / 2 < sizes["peak"] < sizes["all"] / 2 + sizes["outside"] + 2 * sizes["layer"]
