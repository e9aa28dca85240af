"""The tokens of a conversation as a tree: one path from the root is what the model reads.

In: what follows the current path, or a new path if the chat template has rewritten earlier turns. Out: all tokens once,
and how they follow each other (`types.Branch`). Invariant: a token is stored once for each beginning that it follows,
so branches share their longest common prefix. The tokens of a branch are consecutive.
"""

from __future__ import annotations

from collections.abc import Sequence

from gspo.types import Branch


class TokenTree:
    """Owns the tokens of a conversation after its prompt."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._prompt = len(prompt_ids)
        self._ids = [*prompt_ids]
        self._branches = [Branch(start=0, parent=-1, shared=0)]
        self._paths = [list(range(self._prompt))]
        """Of each branch, as indices into prompt and completion. The last one is current."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens after the prompt."""
        return tuple(self._ids[self._prompt :])

    @property
    def path(self) -> list[int]:
        """The current path, as indices into prompt and completion."""
        return self._paths[-1]

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens of the current path."""
        return tuple(self._ids[i] for i in self.path)

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Empty if there is one."""
        return tuple(self._branches) if len(self._branches) > 1 else ()

    def __len__(self) -> int:
        return len(self._ids) - self._prompt

    def extend(self, ids: Sequence[int]) -> None:
        """Add tokens to the current path."""
        self.path.extend(range(len(self._ids), len(self._ids) + len(ids)))
        self._ids += ids

    def new_tokens(self, ids: Sequence[int]) -> int:
        """How many tokens `fork` would add."""
        return len(ids) - self._longest(ids)[1]

    def fork(self, ids: Sequence[int]) -> int:
        """Make these tokens the current path; how many of them are new. A path that only continues is no branch."""
        parent, shared = self._longest(ids)
        if parent < len(self._paths) - 1 or shared < len(self.path):
            self._branches.append(Branch(start=len(self), parent=parent, shared=shared))
            self._paths.append(self._paths[parent][:shared])
        self.extend(ids[shared:])
        return len(ids) - shared

    def _longest(self, ids: Sequence[int]) -> tuple[int, int]:
        """The branch with the longest common prefix, and the length of that; the latest of equals."""
        lengths: list[int] = []
        for branch, path in zip(self._branches, self._paths, strict=True):
            before = lengths[branch.parent] if branch.parent >= 0 else 0
            # What differs from the parent before the branch begins differs from the branch, too, at the same place. So
            # each token is compared about once, however many branches share it.
            lengths.append(before if before < branch.shared else self._common(path, ids, branch.shared))
        parent = max(range(len(lengths)), key=lambda i: (lengths[i], i))
        return parent, lengths[parent]

    def _common(self, path: Sequence[int], ids: Sequence[int], start: int) -> int:
        """The length of the common prefix, of which the first `start` tokens are known to be equal."""
        most = min(len(path), len(ids))
        return next((i for i in range(start, most) if self._ids[path[i]] != ids[i]), most)
