"""The sequences being decoded, as tensors at fixed addresses: a CUDA graph reads and writes them in place.

In: the number of slots, and the sizes of a row. Out: `Slots`. Invariant: no tensor is ever reallocated, because a
captured graph keeps its address. Shape suffixes, in addition to those of `engines/local.py`: `S` slots, `W` KV cache
blocks per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Rows of `Slots.state`.
INPUT, POSITION, SAMPLED, KEY, LIVE, FORCED = FIELDS = range(6)


@dataclass(frozen=True, kw_only=True)
class Slots:
    """All inputs and outputs of a decoding step. The results of a row that is not live are never read."""

    state: Tensor
    """[6, S]: input token, its position, number of tokens sampled, random stream, whether the row is live, whether it
    gets the end of its thinking (`sampling.DeviceControls`)."""
    table_SW: Tensor
    """The block table: the KV cache block of each `BLOCK_SIZE` tokens of a row."""
    token_ST: Tensor
    """Sampled tokens. One column more than a completion has: rows that have finished write there."""
    logp_ST: Tensor
    routes_STLK: Tensor | None
    """Experts of every input token; None if routing is not recorded."""

    @property
    def count(self) -> int:
        return self.state.shape[1]

    def first(self, rows: int) -> Slots:
        """The first `rows` rows, as views of the same memory."""
        return Slots(
            state=self.state[:, :rows],
            table_SW=self.table_SW[:rows],
            token_ST=self.token_ST[:rows],
            logp_ST=self.logp_ST[:rows],
            routes_STLK=None if self.routes_STLK is None else self.routes_STLK[:rows],
        )

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy rows `source` to rows `target`. KV cache blocks are not copied: the block table moves with the row."""
        self.state[:, target] = self.state[:, source]
        for rows in (self.table_SW, self.token_ST, self.logp_ST, self.routes_STLK):
            if rows is not None:
                rows[target] = rows[source]


def make_slots(
    count: int, width: int, tokens: int, device: torch.device, routed: tuple[int, int, torch.dtype] | None
) -> Slots:
    """`count` empty rows with up to `width` blocks and `tokens` sampled tokens; `routed`: layers, experts per token,
    dtype."""
    routes = None if routed is None else torch.zeros(count, tokens + 1, *routed[:2], dtype=routed[2], device=device)
    return Slots(
        # int64 for all, because the random stream needs 63 bits and one tensor is written in one launch.
        state=torch.zeros(len(FIELDS), count, dtype=torch.int64, device=device),
        table_SW=torch.zeros(count, width, dtype=torch.int32, device=device),
        token_ST=torch.zeros(count, tokens + 1, dtype=torch.int32, device=device),
        logp_ST=torch.zeros(count, tokens + 1, dtype=torch.float32, device=device),
        routes_STLK=routes,
    )
