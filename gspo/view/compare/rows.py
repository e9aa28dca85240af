"""The final numbers as text.

In: the arms' numbers. Out: cells for the page and lines for a terminal. Invariant: a number that was not measured is a
dash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gspo.view.compare.table import ArmNumbers, SeedNumbers
from gspo.view.compare.wording import NONE, aligned, number, plain, points, share, whole


def table_rows(arms: Sequence[ArmNumbers], seeds: int) -> list[tuple[str, list[str]]]:
    """The main table: a title and one cell per arm. Rows without a number in any arm are omitted."""
    first = arms[0].label if arms else ""
    sets = dict.fromkeys(name for arm in arms for name in arm.sets)
    rows: list[tuple[str, Callable[[ArmNumbers], str]]] = [
        ("seeds finished", lambda a: f"{len(a.finished)} of {seeds}"),
        ("sampled tokens per run", lambda a: number(a.tokens, whole, interval=False)),
        ("steps", lambda a: number(a.steps, plain, interval=False)),
        ("held-out accuracy before", lambda a: number(a.before, share)),
        ("held-out accuracy after", lambda a: number(a.after, share)),
        (f"difference from {first} (points, paired by seed)", lambda a: number(a.difference, points)),
        ("greedy accuracy before", lambda a: number(a.greedy_before, share)),
        ("greedy accuracy after", lambda a: number(a.greedy_after, share)),
        ("held-out reward before", lambda a: number(a.held_out_before, plain)),
        ("held-out reward after", lambda a: number(a.held_out_after, plain)),
        (f"difference in reward from {first} (paired by seed)", lambda a: number(a.held_out_difference, plain)),
        *((f"accuracy on {name} after", partial(_set, name)) for name in sets),
        ("lowest held-out accuracy", lambda a: number(a.lowest, share)),
        ("seeds that ended below their initial accuracy", lambda a: str(a.worse_than_start) if a.after else NONE),
        ("mean reward, last 10 % of tokens", lambda a: number(a.reward, plain)),
        ("steps without a trainable sample", lambda a: number(a.idle, share) if a.idle and a.idle.value else NONE),
        ("clip fraction, tokens", lambda a: number(a.clip_tokens, share)),
        (f"clip fraction, tokens, relative to {first}", lambda a: number(a.clip_ratio, plain)),
        ("clip fraction, completions", lambda a: number(a.clip_sequences, share)),
        ("flipped experts, during a step's updates", lambda a: number(a.flips, share)),
        ("flipped experts, without replay (hypothetical)", lambda a: number(a.flips_native, share)),
        ("flipped experts, sampler vs. learner", lambda a: number(a.flips_sampler, share)),
        ("gradient norm", lambda a: number(a.grad_norm, plain)),
        ("lowest entropy", lambda a: number(a.entropy_lowest, plain)),
        ("final entropy", lambda a: number(a.entropy_last, plain)),
        ("training minutes per run", lambda a: number(a.minutes, plain, interval=False)),
    ]
    cells_by_title = [(title, [cell(arm) for arm in arms]) for title, cell in rows]
    return [(title, cells) for title, cells in cells_by_title if any(cell != NONE for cell in cells)]


def _set(name: str, arm: ArmNumbers) -> str:
    return number(arm.sets.get(name), share)


def seed_rows(arm: ArmNumbers) -> list[list[str]]:
    """The rows of an arm in the table of single runs, one per seed."""
    return [[cell(arm, run) for cell in _SEED_COLUMNS.values()] for run in arm.runs]


_SEED_COLUMNS: dict[str, Callable[[ArmNumbers, SeedNumbers], str]] = {
    "arm": lambda arm, s: arm.label,
    "seed": lambda arm, s: f"{s.seed}{'' if s.finished else ' (not finished)'}",
    "tokens": lambda arm, s: whole(s.tokens),
    "steps": lambda arm, s: str(s.steps),
    "before": lambda arm, s: number(s.before, share),
    "after": lambda arm, s: number(s.after, share),
    "greedy after": lambda arm, s: number(s.greedy_after, share),
    "held-out reward after": lambda arm, s: number(s.held_out_after, plain),
    "lowest": lambda arm, s: number(s.lowest, share),
    "reward": lambda arm, s: number(s.reward, plain),
    "clip fraction, tokens": lambda arm, s: number(s.clip_tokens, share),
    "clip fraction, completions": lambda arm, s: number(s.clip_sequences, share),
    "flipped experts": lambda arm, s: number(s.flips, share),
    "gradient norm": lambda arm, s: number(s.grad_norm, plain),
    "final entropy": lambda arm, s: number(s.entropy_last, plain),
    "minutes": lambda arm, s: plain(s.minutes),
}
"""Columns of the table of single runs: title and cell."""
SEED_TITLES = tuple(_SEED_COLUMNS)


def as_text(arms: Sequence[ArmNumbers], seeds: int) -> str:
    """The main numbers for a terminal, one line per arm."""
    first = arms[0].label if arms else ""
    columns: dict[str, Callable[[ArmNumbers], str]] = {
        "": lambda a: a.label,
        "seeds": lambda a: f"{len(a.finished)} of {seeds}",
        "tokens": lambda a: number(a.tokens, whole, interval=False),
        "held-out before": lambda a: number(a.before, share, interval=False),
        "after, 95 % interval": lambda a: number(a.after, share),
        f"points vs. {first}": lambda a: number(a.difference, points),
        **(
            {"held-out reward": lambda a: number(a.held_out_after, plain)}
            if any(a.held_out_after for a in arms)
            else {}
        ),
        "reward": lambda a: number(a.reward, plain, interval=False),
        "clip fraction": lambda a: number(a.clip_tokens, share, interval=False),
        "flips": lambda a: number(a.flips, share, interval=False),
        "minutes": lambda a: number(a.minutes, plain, interval=False),
    }
    return aligned([[*columns], *([cell(arm) for cell in columns.values()] for arm in arms)])
