"""The final numbers as rows of text. In: the arms' numbers. Out: cells for the page and lines for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gspo.view.compare.table import ArmNumbers, SeedNumbers
from gspo.view.compare.wording import NONE, aligned, number, plain, points, share, whole


def table_rows(arms: Sequence[ArmNumbers], seeds: int) -> list[tuple[str, list[str]]]:
    """The main table: a measure, and its text for each arm. Measures that no arm has are left out."""
    first = arms[0].label if arms else ""
    rows: list[tuple[str, Callable[[ArmNumbers], str]]] = [
        ("seeds finished", lambda a: f"{len(a.finished)} of {seeds}"),
        ("sampled tokens per run", lambda a: number(a.tokens, whole, interval=False)),
        ("steps", lambda a: number(a.steps, plain, interval=False)),
        ("held-out accuracy before", lambda a: number(a.before, share)),
        ("held-out accuracy after", lambda a: number(a.after, share)),
        (f"after, against {first} (points, by seed)", lambda a: number(a.difference, points)),
        ("greedy before", lambda a: number(a.greedy_before, share)),
        ("greedy after", lambda a: number(a.greedy_after, share)),
        ("lowest held-out accuracy seen", lambda a: number(a.lowest, share)),
        ("seeds that ended below their start", lambda a: str(a.worse_than_start) if a.after else NONE),
        ("reward, last tenth", lambda a: number(a.reward, plain)),
        ("steps that trained on nothing", lambda a: number(a.idle, share) if a.idle and a.idle.value else NONE),
        ("tokens clipped", lambda a: number(a.clip_tokens, share)),
        (f"tokens clipped, times {first}", lambda a: number(a.clip_ratio, plain)),
        ("replies clipped", lambda a: number(a.clip_sequences, share)),
        ("experts flipped by a step's updates", lambda a: number(a.flips, share)),
        ("experts that would flip without replay", lambda a: number(a.flips_native, share)),
        ("experts flipped, sampler to learner", lambda a: number(a.flips_sampler, share)),
        ("gradient norm", lambda a: number(a.grad_norm, plain)),
        ("entropy, lowest", lambda a: number(a.entropy_lowest, plain)),
        ("entropy at the end", lambda a: number(a.entropy_last, plain)),
        ("minutes of training per run", lambda a: number(a.minutes, plain, interval=False)),
    ]  # fmt: skip
    shown = [(title, [of(arm) for arm in arms]) for title, of in rows]
    return [(title, cells) for title, cells in shown if any(cell != NONE for cell in cells)]


def seed_rows(arm: ArmNumbers) -> list[list[str]]:
    """The table of single runs."""

    def row(s: SeedNumbers) -> list[str]:
        shares = (s.before, s.after, s.greedy_after, s.lowest)
        rest = [number(s.reward, plain), number(s.clip_tokens, share), number(s.clip_sequences, share), number(s.flips, share), number(s.grad_norm, plain), number(s.entropy_last, plain), plain(s.minutes)]  # fmt: skip
        return [arm.label, f"{s.seed}{'' if s.finished else ' (not finished)'}", whole(s.tokens), str(s.steps), *(number(v, share) for v in shares), *rest]  # fmt: skip

    return [row(s) for s in arm.runs]


SEED_TITLES = ("arm", "seed", "tokens", "steps", "before", "after", "greedy after", "lowest", "reward", "tokens clipped", "replies clipped", "flips", "gradient norm", "entropy at the end", "minutes")  # fmt: skip


def as_text(arms: Sequence[ArmNumbers], seeds: int) -> str:
    """The main numbers for a terminal, one line per arm."""
    first = arms[0].label if arms else ""
    titles = ["", "seeds", "tokens", "held-out before", "after, 95 % interval", f"points to {first}", "reward", "tokens clipped", "flips", "minutes"]  # fmt: skip
    rows = [
        [a.label, f"{len(a.finished)} of {seeds}", number(a.tokens, whole, interval=False), number(a.before, share, interval=False), number(a.after, share),
         number(a.difference, points), number(a.reward, plain, interval=False), number(a.clip_tokens, share, interval=False), number(a.flips, share, interval=False), number(a.minutes, plain, interval=False)]
        for a in arms
    ]  # fmt: skip
    return aligned([titles, *rows])
