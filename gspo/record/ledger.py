"""The ledger of asynchronous sampling: what has become of every batch (`ledger.jsonl`).

    issued -> sampled -> scored -> collected -> trained     `sampled` and `scored` once per round of prompts
    issued -> cut -> ... -> sampled -> ...                  `cut` after every turn but the last (`rollout.span_tokens`)
    ... -> scored -> dropped -> collected -> ...            `dropped` if completions were dropped (`rollout.over_lag`)
    resumed                                                 voids the lines of later batches that come before it

In: events of the collector. Out: lines, only ever appended, in the order in which things happened; `read_ledger`
applies `resumed`. Invariant: a batch is trained on exactly once, however often the run was killed: its line `trained`
is written when the weights have changed, and a resume voids the line together with those weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo.record.run_dir import RunDir, read_jsonl
from gspo.rollout.gather import CollectResult
from gspo.rollout.in_flight import OpenBatch, Ticket
from gspo.rollout.spans import cut_count, sampled_tokens


class Ledger:
    """Appends what happens to the batches of a run."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def issued(self, batch: int, ticket: Ticket) -> None:
        """Sampling of a batch begins."""
        self._write(batch=batch, state="issued", step=ticket.step, weights=ticket.weights, version=ticket.version)

    def cut(self, batch: OpenBatch, weights: int) -> None:
        """A turn with the weights after the step `weights` has sampled a part of a batch."""
        self._write(
            batch=batch.batch,
            state="cut",
            weights=weights,
            completions=cut_count(batch),
            tokens=sampled_tokens(batch),
        )

    def reached(self, batch: int, state: str) -> None:
        """A round of prompts of a batch was sampled, or scored."""
        self._write(batch=batch, state=state)

    def collected(self, result: CollectResult, *, restored: bool = False) -> None:
        """A batch waits to be trained on. `restored`: a checkpoint has kept it."""
        if result.dropped and not restored:
            dropped = [[c.prompt_id, c.sample, c.tokens] for c in result.dropped]
            self._write(batch=result.batch, state="dropped", completions=dropped)
        self._write(
            batch=result.batch,
            state="collected",
            prompts=result.prompts,
            cursor=result.after.cursor,
            **({"restored": True} if restored else {}),
        )

    def trained(self, batch: int, step: int) -> None:
        """A step has trained on a batch."""
        self._write(batch=batch, state="trained", step=step)

    def resumed(self, batch: int, step: int) -> None:
        """The run continues after `step`, which trained on `batch`, or starts."""
        self._write(batch=batch, state="resumed", step=step)

    def _write(self, **values: Any) -> None:
        self._run_dir.write_ledger(values)


@dataclass(kw_only=True)
class BatchHistory:
    """What has become of a batch, without what a resume has made void."""

    batch: int
    issued: list[dict[str, Any]] = field(default_factory=list)
    prompts: Sequence[str] | None = None
    """The prompts that were sampled for it, in order; None before it is collected."""
    trained: list[int] = field(default_factory=list)
    """The steps that trained on it."""


def read_ledger(run: Path) -> list[BatchHistory]:
    """The batches of a run, in order."""
    found: dict[int, BatchHistory] = {}
    for line in read_jsonl(run / "ledger.jsonl"):
        batch, state = line["batch"], line["state"]
        if state == "resumed":
            found = {number: history for number, history in found.items() if number <= batch}
            # Its line `trained` may be missing, if the disk was full. The checkpoint says that the step was done.
            if batch in found and not found[batch].trained:
                found[batch].trained = [line["step"]]
            continue
        history = found.setdefault(batch, BatchHistory(batch=batch))
        if state == "issued":
            history.issued.append(line)
        elif state == "collected":
            history.prompts = line["prompts"]
        elif state == "trained":
            history.trained.append(line["step"])
    return [found[batch] for batch in sorted(found)]
