"""The tokens of the branches of a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from gspo.types import Completion, branch_paths


def branch_ids(prompt_ids: Sequence[int], completion: Completion) -> list[tuple[int, ...]]:
    """What the model reads in each branch of a completion, from the prompt on."""
    ids = (*prompt_ids, *completion.token_ids)
    paths = branch_paths(len(prompt_ids), len(completion.token_ids), completion.branches)
    return [tuple(ids[i] for i in path) for path in paths]
