"""The rows that are being decoded, as tensors that stay where they are: a captured graph reads and writes them in place.

Shape suffixes beside those of `engines/local.py`: `S` slots, `W` pages that a row can have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INPUT, POSITION, DRAWN, KEY, LIVE = range(5)


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Everything a step knows of its rows. A row that is not live is read by nobody and writes nothing that is kept."""

    state: Tensor
    """[5, S]: input token, its position, tokens drawn so far, random stream, whether the row is live."""
    table_SW: Tensor
    """Page of every `PAGE` tokens of a row."""
    token_ST: Tensor
    """What was drawn; one column more than a reply has, for rows that have ended."""
    logp_ST: Tensor
    routes_STLK: Tensor | None
    """Experts of every input token, where they are noted."""

    @property
    def count(self) -> int:
        return self.state.shape[1]

    def first(self, rows: int) -> Slots:
        """The first rows of all, the same memory."""
        return Slots(
            state=self.state[:, :rows],
            table_SW=self.table_SW[:rows],
            token_ST=self.token_ST[:rows],
            logp_ST=self.logp_ST[:rows],
            routes_STLK=None if self.routes_STLK is None else self.routes_STLK[:rows],
        )

    def move(self, source: Tensor, target: Tensor) -> None:
        """Rows `target` become copies of rows `source`; their pages stay where they are."""
        self.state[:, target] = self.state[:, source]
        for rows in (self.table_SW, self.token_ST, self.logp_ST, self.routes_STLK):
            if rows is not None:
                rows[target] = rows[source]


def make_slots(
    count: int, width: int, tokens: int, device: torch.device, routed: tuple[int, int, torch.dtype] | None
) -> Slots:
    """`count` empty rows of up to `width` pages and `tokens` tokens to draw; `routed`: layers, experts per token, type."""
    routes = None if routed is None else torch.zeros(count, tokens + 1, *routed[:2], dtype=routed[2], device=device)
    return Slots(
        state=torch.zeros(5, count, dtype=torch.int64, device=device),
        table_SW=torch.zeros(count, width, dtype=torch.int32, device=device),
        token_ST=torch.zeros(count, tokens + 1, dtype=torch.int32, device=device),
        logp_ST=torch.zeros(count, tokens + 1, dtype=torch.float32, device=device),
        routes_STLK=routes,
    )
