"""What a model answered in an evaluation, problem by problem, and what changed since the evaluation before.

In: `evaluations/STEP.jsonl`. Out: problems with their completions. Invariant: problems of two evaluations are compared
only if they have the same id in the same set; as everything in a run directory, the records are data from others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.view.completions import EXCERPT, Completions, Record, grouped, summary, truncate

MOST_PROBLEMS = 500
"""Listed problems of an evaluation."""
MOST_EARLIER = 20
"""Earlier files in which the evaluation before is looked for: an evaluation set may be evaluated less often."""
EXCERPT_START, EXCERPT_END = 200, 400
"""Displayed characters of a completion in a list. The answer is at its end."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the sampled completions of a problem were scored."""

    correct: int
    judged: int
    reward: float | None
    """Mean over the scored ones."""

    @classmethod
    def of(cls, records: Sequence[Record]) -> Outcome:
        # As in the metrics, the greedy completion is not one of them.
        sampled = [r for r in records if not r.get("greedy")]
        verdicts = [bool(r["correct"]) for r in sampled if r.get("correct") is not None]
        rewards = [float(r["reward"]) for r in sampled if r.get("reward") is not None]
        reward = sum(rewards) / len(rewards) if rewards else None
        return cls(correct=sum(verdicts), judged=len(verdicts), reward=reward)

    def change_from(self, before: Outcome) -> str:
        """`better`, `worse` or `same`: by the share of correct completions, then by the reward, which also shows
        partial credit. Empty if the two cannot be compared."""
        if not (self.judged and before.judged):
            ours, theirs = (self.reward, before.reward)
            return "" if ours is None or theirs is None else _change(ours, theirs)
        change = _change(self.correct / self.judged, before.correct / before.judged)
        if change == "same" and self.reward is not None and before.reward is not None:
            return _change(self.reward, before.reward)
        return change


def _change(ours: float, theirs: float) -> str:
    return "same" if abs(ours - theirs) <= 1e-9 else "better" if ours > theirs else "worse"


PROBLEM_FILTERS: Mapping[str, tuple[str, Callable[[Sequence[Record], str], bool]]] = {
    "wrong": ("with a wrong completion", lambda records, _: any(r.get("correct") is False for r in records)),
    "right": (
        "all completions correct",
        lambda records, _: all(r.get("correct") is True for r in records),
    ),
    "better": ("better than before", lambda _, change: change == "better"),
    "worse": ("worse than before", lambda _, change: change == "worse"),
    "truncated": ("with a truncated completion", lambda records, _: any(r.get("stop") == "length" for r in records)),
    "unscored": ("with an unscored completion", lambda records, _: any(r.get("status") == "unscored" for r in records)),
}
"""Selections of problems by name: label, and whether it holds for a problem's records and its change."""


class Evaluations:
    """The recorded evaluations of a run."""

    def __init__(self, run: Path) -> None:
        self.completions = Completions(run, "evaluations")

    def steps(self) -> list[int]:
        """Steps with recorded evaluations."""
        return self.completions.steps()

    def sets(self, step: int) -> list[str]:
        """The sets that were evaluated after the step; the held-out problems are the empty name."""
        return list(dict.fromkeys(r.get("set") or "" for r in self.completions.of(step)))

    def problems(self, step: int, name: str = "", *, text: str = "") -> dict[str, Any]:
        """The problems of a set with their completions. `text` selects those whose prompt or completions contain it."""
        before_step, before = self._before(step, name)
        listed = []
        counts = {"total": 0, "better": 0, "worse": 0}
        wanted = text.casefold()
        for number, records in enumerate(grouped(self.completions.of(step))):
            if (records[0].get("set") or "") != name:
                continue
            problem = _problem(number, records, before.get(_id(records)))
            counts["total"] += 1
            if problem["change"] in counts:
                counts[problem["change"]] += 1
            texts = [records[0].get("prompt"), *(r.get("text") for r in records)]
            if not wanted or any(wanted in str(t).casefold() for t in texts):
                listed.append(problem)
        return {
            "step": step,
            "set": name,
            "before_step": before_step,
            **counts,
            "found": len(listed),
            "problems": listed[:MOST_PROBLEMS],
        }

    def completion(self, step: int, group: int, number: int) -> dict[str, Any] | None:
        """One completion with its tokens, and those of the same problem in the evaluation before; `None` if it does not
        exist."""
        found = self.completions.completion(step, group, number)
        if found is None:
            return None
        records = grouped(self.completions.of(step))[group]
        name = records[0].get("set") or ""
        before_step, before = self._before(step, name)
        earlier = before.get(_id(records), (0, ()))
        return {
            **found,
            "evaluation": True,
            "set": name,
            "before": [
                {"step": before_step, "group": earlier[0], "number": n, **_shown(r)} for n, r in enumerate(earlier[1])
            ],
        }

    def _before(self, step: int, name: str) -> tuple[int | None, dict[str, tuple[int, Sequence[Record]]]]:
        """The step of the set's evaluation before this one, and its groups by problem; `None` if there is none."""
        earlier = [s for s in self.steps() if s < step][-MOST_EARLIER:]
        for candidate in reversed(earlier):
            groups = enumerate(grouped(self.completions.of(candidate)))
            found: dict[str, tuple[int, Sequence[Record]]] = {
                _id(records): (g, records) for g, records in groups if (records[0].get("set") or "") == name
            }
            if found:
                return candidate, found
        return None, {}


def _id(records: Sequence[Record]) -> str:
    return str(records[0].get("prompt_id"))


def _problem(number: int, records: Sequence[Record], before: tuple[int, Sequence[Record]] | None) -> dict[str, Any]:
    outcome = Outcome.of(records)
    earlier = None if before is None else Outcome.of(before[1])
    change = "" if earlier is None else outcome.change_from(earlier)
    answer = records[0]["answer"]
    return {
        "group": number,
        "prompt_id": records[0].get("prompt_id"),
        "prompt": truncate(records[0].get("prompt"), EXCERPT),
        "answer": None if answer is None else truncate(answer, EXCERPT),
        "correct": outcome.correct,
        "judged": outcome.judged,
        "reward": outcome.reward,
        "before": None if earlier is None else {"correct": earlier.correct, "judged": earlier.judged},
        "change": change,
        "kinds": [kind for kind, (_, holds) in PROBLEM_FILTERS.items() if holds(records, change)],
        "completions": [_shown(r) for r in records],
    }


def _shown(record: Record) -> dict[str, Any]:
    """A completion in a list, with the beginning and the end of its text."""
    text = str(record.get("text") or "")
    if len(text) > EXCERPT_START + EXCERPT_END:
        text = f"{text[:EXCERPT_START]} … {text[-EXCERPT_END:]}"
    return {**summary(record), "excerpt": text}
