"""Fixtures that build reward pools and completions, for the reward and fault tests (imported by conftest files)."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from processes import children_of

from gspo.config import RewardConfig
from gspo.reward.reward import RewardPool
from gspo.types import Completion, Prompt, StopReason

Group = tuple[Prompt, list[Completion]]


def _group(completions: Sequence[str], content: Any = "What?", id: str = "train/0", **columns: Any) -> Group:
    prompt = Prompt(id=id, content=content, text=str(content), token_ids=(1, 2), columns=columns)
    return prompt, [
        Completion(
            prompt_id=id,
            sample=i,
            token_ids=(i, i + 1),
            text=text,
            logp_sampler=(-1.0, -1.0),
            stop=StopReason.EOS,
            version=0,
        )
        for i, text in enumerate(completions)
    ]


@pytest.fixture(scope="session")
def group() -> Callable[..., Group]:
    return _group


@pytest.fixture
def reward_file(tmp_path: Path) -> Callable[..., str]:
    """Write a file with a reward function and return its `file.py:score`."""

    def write(code: str, name: str = "mine.py", function: str = "score") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(code), encoding="utf-8")
        return f"{path}:{function}"

    return write


@pytest.fixture
def make_pool() -> Iterator[Callable[..., RewardPool]]:
    """Pools that are closed at the end of the test."""
    pools: list[RewardPool] = []

    def make(*functions: str, task: Any = None, **settings: Any) -> RewardPool:
        settings = {"timeout_s": 20.0, "workers": 1, **settings}
        pools.append(RewardPool(RewardConfig(functions=functions, **settings), task))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(scope="session")
def children() -> Callable[[], set[int]]:
    """This process's children, including zombies."""

    return lambda: children_of(os.getpid())
