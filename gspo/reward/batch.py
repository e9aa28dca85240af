"""One batch of replies on its way through the workers: what is left to do, what to do again, and when enough is
enough.

In: groups, and what became of each call. Out: one `Part` per function and reply. Invariant: each of them is recorded
exactly once, wherever and however often calls are repeated. For functions of the user the batch is over soon after
`timeout_s`, beyond the time that answered calls and the loading of a spare worker took: replies that have no answer
then are unscored, each with what became of it. Calls of built-in rewards are all made, each with its own deadline,
because a hang is a score there; only after `LONGEST` times `timeout_s` the rest is unscored.

A call holds one function and all replies of one prompt. When it fails, each reply is tried alone, so that only the
guilty ones stay without a score. A call that has used half of its time is likely to hang: its replies are tried alone
while it goes on, so that innocent ones have their scores in time. If the call answers after all, its answer counts
and theirs are forgotten (a function that limits the time of each reply itself is left alone); so what a reply scores
does not depend on which was quicker. Calls of whole groups that have not begun by then are made reply by reply, until
one of a whole group is answered.

Whose fault a failure is, is decided here, in `Batch.parts`: where a built-in reward hangs, dies or takes too much
memory on one completion alone, and its reference can be scored (another completion of the prompt was, or an empty one
is), the completion has caused it and scores 0. A hang that used little processor time is tried once more first, next
to a process that only runs (`second_try.py`): if the machine kept it waiting, the completion is unscored. Everything
else stays unscored, too.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo.types import Completion, Prompt

PATIENCE = 2
"""Calls per worker, of groups and then of single replies, that a function may lose before its first answer in a batch."""
SPARE_S = 0.8
"""What a batch may take beyond `timeout_s`."""
SUSPECT = 0.5
"""Share of `timeout_s` after which a call is likely to hang."""
IDLE = 0.5
"""Share of the time of a call below which the processor time that it used says that it did not get to work."""
LONGEST = 30
"""Times `timeout_s` that a batch may take in which completions make built-in rewards hang."""
SLOW, QUICK_S = 4.0, 0.1
"""A single reply is likely to hang when it takes this many times as long as any answered before it, and this long at least."""

Groups = Sequence[tuple[Prompt, Sequence[Completion]]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One function's word on one reply."""

    value: float | None = None
    """None: it abstained, or failed."""
    failure: str | None = None
    notes: Sequence[str] = ()
    """Words on how it came about."""
    cause: str = ""
    """What the worker did on this completion alone: `timeout`, `died` or `memory`; empty if nothing of that kind."""
    trace: str = ""
    """Where a function raised, as Python prints it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """One call. No replies at all: only make sure that the worker can load the functions."""

    batch: Batch
    group: int = 0
    function: int = 0
    replies: tuple[int, ...] = ()
    again: bool = False
    last: bool = False
    """Its second try, after the first got little processor time."""
    probe: bool = False
    """With an empty completion instead: can the reference be scored at all?"""

    @property
    def call(self) -> tuple[int, int]:
        """Which call of a whole group this is, or is a part of."""
        return self.group, self.function

    def key(self, reply: int) -> tuple[int, int, int]:
        """Which word is meant: this function's on one of the replies."""
        return self.group, self.function, reply

    def request(self) -> dict[str, Any]:
        """What the worker needs to know."""
        prompt, completions = self.batch.groups[self.group]
        chosen = [completions[i] for i in self.replies]
        return {
            "function": self.function,
            "prompt": prompt.content,
            "completions": [""] if self.probe else [c.text for c in chosen],
            "completion_ids": [()] if self.probe else [c.token_ids for c in chosen],
            "columns": dict(prompt.columns),
        }

    def alone(self) -> list[Job]:
        """The same, reply by reply."""
        return [
            Job(batch=self.batch, group=self.group, function=self.function, replies=(i,), again=True)
            for i in self.replies
        ]


class Batch:
    """What a call of `RewardPool.score` waits for. Shared between threads."""

    def __init__(
        self,
        groups: Groups,
        *,
        functions: int,
        workers: int,
        timeout_s: float,
        bounded_s: Mapping[int, float] | None = None,
        built_in: Collection[int] = (),
    ) -> None:
        self.groups = groups
        self.functions = functions
        self.done = threading.Event()
        self.error: BaseException | None = None
        self._lock = threading.RLock()
        self._timeout_s, self._bounded_s = timeout_s, dict(bounded_s or {})
        self._built_in = frozenset(built_in)
        self._reference: dict[tuple[int, int], bool | None] = {}
        """Whether the empty completion of a prompt could be scored; None while that is asked."""
        self._slow = False
        """Whether the machine was too slow for a second try."""
        self._parts: dict[tuple[int, int, int], Part] = {}
        self._meanwhile: dict[tuple[int, int, int], Part] = {}
        """Words on replies that were tried alone while the call of their group goes on."""
        self._left = functions * sum(len(completions) for _, completions in groups)
        self._patience = PATIENCE * workers
        self._lost: dict[tuple[int, bool], float] = defaultdict(float)
        self._out: dict[Job, float] = {}
        """Calls under way, and since when."""
        self._whole: set[tuple[int, int]] = set()
        """Those of whole groups that may still be answered."""
        self._split: set[tuple[int, int]] = set()
        self._suspects: set[int] = set()
        self._began: float | None = None
        self._answered_s = 0.0
        self._lent: list[float] = []
        """When the first spare worker was started, and when one was ready."""
        self._longest_alone_s: float | None = None
        if not self._left:
            self.done.set()

    def jobs(self) -> list[Job]:
        """The calls to begin with."""
        return [
            Job(batch=self, group=g, function=f, replies=tuple(range(len(completions))))
            for g, (_, completions) in enumerate(self.groups)
            for f in range(self.functions)
            if completions
        ]

    # ---- calls

    def begin(self, job: Job) -> None:
        """A call is made."""
        with self._lock:
            self._out[job] = time.monotonic()
            self._began = self._began or self._out[job]
            if not job.again:
                self._whole.add(job.call)

    def end(self, job: Job, *, hung: bool) -> None:
        """It is over. The time of calls that end by themselves is the batch's to use; that of hanging ones is not."""
        with self._lock:
            took = time.monotonic() - self._out.pop(job)
            if not job.again:
                self._whole.discard(job.call)
            self._answered_s += 0 if hung else took
            if not hung and job.again:
                self._longest_alone_s = max(took, self._longest_alone_s or 0.0)

    def lent(self, *, ready: bool) -> None:
        """A spare worker is being started, or is ready. The time that the first one takes for it is the batch's to use."""
        with self._lock:
            self._lent += [time.monotonic()] if len(self._lent) == int(ready) else []

    def unwanted(self, job: Job) -> bool:
        """Whether nobody waits for a call any more."""
        return self.done.is_set() or (not job.probe and job.key(job.replies[0]) in self._parts)

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return bool(self._out)

    # ---- results

    def answer(self, job: Job, parts: Sequence[Part]) -> None:
        """Set down a call's results."""
        with self._lock:
            self._lost[job.function, False] = self._lost[job.function, True] = -math.inf
            if not job.again:
                self._suspects.discard(job.function)
            self.record(job, parts)

    def record(self, job: Job, parts: Sequence[Part]) -> None:
        """Set down what there is to say of a call's replies. The word of a whole group's call comes before any other."""
        with self._lock:
            waiting = job.again and job.call in self._whole
            into = self._meanwhile if waiting else self._parts
            for reply, part in zip(job.replies, parts, strict=True):
                key = job.key(reply)
                if key in self._parts:
                    continue
                into[key] = part
                self._left -= 0 if waiting else 1
            if not self._left:
                self.done.set()

    def split(self, job: Job) -> list[Job]:
        """The replies of a call that failed, or is likely to, one by one; nothing if they are under way already."""
        with self._lock:
            if job.call in self._split:
                return []
            self._split.add(job.call)
            return job.alone()

    def failed(self, job: Job) -> list[Job]:
        """A call of a group has failed: what its replies scored alone counts. What is left to do."""
        with self._lock:
            self._whole.discard(job.call)
            for alone in job.alone():
                part = self._meanwhile.pop(alone.key(*alone.replies), None)
                if part is not None:
                    self.record(alone, [part])
            return self.split(job)

    def give_up(self, error: BaseException) -> None:
        """Let the waiting call of `score` raise this."""
        self.error = self.error or error
        self.done.set()

    def parts(self, group: int, reply: int) -> list[Part]:
        """Every function's word on a reply, in the order of the functions."""
        return [self._judged(group, f, self._parts[group, f, reply]) for f in range(self.functions)]

    # ---- whose fault it is

    def _judged(self, group: int, function: int, part: Part) -> Part:
        """What the completion causes is a 0; what the function, the reference or the machine causes is unscored."""
        if part.cause and function in self._built_in and self._reference_scored(group, function):
            return Part(value=0.0, notes=(part.cause,))
        return part

    def _reference_scored(self, group: int, function: int) -> bool:
        replies = range(len(self.groups[group][1]))
        answered = (self._parts.get((group, function, reply)) for reply in replies)
        return bool(self._reference.get((group, function))) or any(p and p.value is not None for p in answered)

    def probe(self, job: Job) -> list[Job]:
        """A call that shows whether a prompt's reference can be scored, if that may matter and nobody has asked."""
        with self._lock:
            asked = job.probe or job.call in self._reference or self.done.is_set()
            if asked or job.function not in self._built_in or self._reference_scored(*job.call):
                return []
            self._reference[job.call] = None
            self._left += 1
            return [Job(batch=self, group=job.group, function=job.function, replies=(0,), again=True, probe=True)]

    def probed(self, job: Job, *, scored: bool) -> None:
        """What came of it."""
        with self._lock:
            self._reference[job.call] = scored
            if scored:  # the function works, and completions are why its calls were lost
                self._lost[job.function, False] = self._lost[job.function, True] = -math.inf
            self._left -= 1
            if not self._left:
                self.done.set()

    def hung(self, job: Job, processor_s: float, *, kept_waiting: bool) -> tuple[list[Job], str]:
        """The call once more, if it hung without getting the processor; otherwise the cause, empty if it is the machine."""
        with self._lock:
            self._slow |= kept_waiting
            worked = processor_s >= IDLE * self._timeout_s or (job.last and not kept_waiting)
            if worked or len(job.replies) > 1 or job.function not in self._built_in:
                return [], "timeout"
            if self._slow:  # one slow second try is enough: each may take many times `timeout_s`
                return [], ""
            self._whole.discard(job.call)
            return [replace(job, again=True, last=True)], ""

    # ---- functions that keep failing

    def lost(self, job: Job) -> None:
        """Count a call that hung or killed its worker."""
        with self._lock:
            self._lost[job.function, job.again] += 1

    def hopeless(self, job: Job) -> bool:
        """Whether calls like this one (of a group, or of a single reply) were all lost so far, and enough of them."""
        with self._lock:
            return self._lost[job.function, job.again] >= self._patience

    def suspicious(self, job: Job) -> bool:
        """Whether a group of several replies had better not be tried as a whole."""
        with self._lock:
            return len(job.replies) > 1 and job.function in self._suspects

    # ---- time

    def timeout_s(self, job: Job) -> float:
        """The deadline of a call. A function that limits the time of each completion itself may take all of it for each:
        a completion that is slow on purpose must come to its score and not to the worker's end."""
        bounded_s = self._bounded_s.get(job.function, 0.0)
        return max(self._timeout_s, bounded_s) * len(job.replies) if bounded_s else self._timeout_s

    def likely_to_hang(self) -> list[Job]:
        """The calls that have taken too long already. Their functions are under suspicion from now on."""
        with self._lock:
            now, group_s, alone_s = time.monotonic(), SUSPECT * self._timeout_s, self._usual_s()
            out = [(job, since) for job, since in self._out.items() if job.function not in self._bounded_s]
            found = [job for job, since in out if now - since > (alone_s if job.again else group_s)]
            self._suspects |= {job.function for job in found if not job.again}
            return found

    def _usual_s(self) -> float:
        if self._longest_alone_s is None:
            return SUSPECT * self._timeout_s / 4
        return min(max(SLOW * self._longest_alone_s, QUICK_S), SUSPECT * self._timeout_s)

    def close_if_late(self, name: Callable[[int], str]) -> None:
        """When the time is up, leave every reply that has no word unscored, with what became of it."""
        with self._lock:
            if any(job.function in self._bounded_s for job in self._out):
                return
            late = self._late_functions()
            for job in [job for job in self._out if not job.again and job.function in late]:
                self.failed(job)
            trying = {
                job.key(reply): since for job, since in self._out.items() for reply in job.replies if not job.probe
            }
            for alone in [alone for job in self.jobs() if job.function in late for alone in job.alone()]:
                since = trying.get(alone.key(*alone.replies))
                self.record(alone, [Part(failure=_late(name(alone.function), since))])
            if len(late) == self.functions:
                self.done.set()  # whatever the probes say, if they are still out

    def _late_functions(self) -> set[int]:
        """Those whose time is up."""
        if self._began is None:
            return set()
        now = time.monotonic()
        loading_s = (self._lent[1] if len(self._lent) > 1 else now) - self._lent[0] if self._lent else 0.0
        late_s = now - self._began - SPARE_S - self._answered_s - loading_s
        return {
            function
            for function in range(self.functions)
            if late_s >= self._timeout_s * (LONGEST if function in self._built_in else 1)
        }


def _late(name: str, since: float | None) -> str:
    if since is None:
        return f"untried: {name}: every worker was busy with a call that hung, until the batch's time was up (reward.timeout_s)"
    return f"timeout: {name}: no result after {time.monotonic() - since:.2g} s, when the batch's time was up (reward.timeout_s)"
