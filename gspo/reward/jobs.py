"""One batch of completions in the worker pool: pending calls, retries and the batch deadline.

In: groups, and the outcome of each call. Out: one `Part` per function and completion. Invariant: each part is recorded
exactly once, wherever and however often calls are retried. For user functions, the batch ends soon after `timeout_s`,
plus the time spent in answered calls and in loading a spare worker. Completions without a result by then are unscored,
each with its reason. For built-in rewards every call is made, each with its own deadline, because a hang there is a
score; only after `LONGEST` times `timeout_s` are the remaining completions unscored.

A call covers one function and all completions of one prompt. If it fails, each completion is retried alone, so only
those that cause the failure stay unscored. A call that has used half of its time is likely to hang: its completions are
scored alone while it is still running, so the others get their scores in time. If the group call answers after all, its
answer wins and the individual results are discarded, so a score never depends on which call was faster. (Functions that
limit the time per completion themselves are exempt.) Group calls that have not started by then are made one completion
at a time, until a group call is answered again.

`Batch.parts` assigns blame for failures. If a built-in reward hangs, dies or exceeds its memory limit on one completion
alone, and the reference answer can be scored (another completion of the prompt was, or an empty one is), the completion
caused the failure and scores 0. A hang that used little CPU time is first retried next to a busy-looping process
(`second_try.py`): if the machine starved it, the completion is unscored. Every other failure is unscored as well, and
so is every failure of a service (a model or an endpoint that a reward asks).
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo.reward.traits import Service
from gspo.types import Completion, Prompt

ANSWER_S = 1.0
"""Minimum time between a program's or a service's own limit and its worker's deadline, so the worker can answer."""
PATIENCE = 2
"""Calls per worker that a function may lose before its first answer in a batch: group calls first, then single ones."""
SPARE_S = 0.8
"""Seconds that a batch may take beyond `timeout_s`."""
SUSPECT = 0.5
"""Fraction of `timeout_s` after which a call is likely to hang."""
IDLE = 0.5
"""A call that used less CPU time than this fraction of its deadline was waiting, not computing."""
LONGEST = 30
"""Multiple of `timeout_s` after which a batch ends even if completions make built-in rewards hang."""
SLOW = 4.0
"""A single completion is likely to hang when it takes this many times as long as the slowest answered one."""
MOST_MOVES = 3
"""How often a call is repeated whose machine was lost."""
QUICK_S = 0.1
"""Calls shorter than this are never suspected of hanging."""

Groups = Sequence[tuple[Prompt, Sequence[Completion]]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One function's result for one completion."""

    value: float | None = None
    """`None` if it abstained or failed."""
    failure: str | None = None
    notes: Sequence[str] = ()
    """Keywords that explain the value."""
    steps: Sequence[tuple[int, float]] = ()
    """The values of single tokens or steps that make up the value."""
    cause: str = ""
    """How the worker failed on this completion alone: `timeout`, `died` or `memory`; otherwise empty."""
    trace: str = ""
    """The traceback of an exception in the function."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """One call of a function. Without samples, it only checks that the worker can load the functions."""

    batch: Batch
    group: int = 0
    function: int = 0
    samples: tuple[int, ...] = ()
    """Indices of the completions within the group."""
    again: bool = False
    """Whether it scores one completion alone, after or during a call of its whole group."""
    last: bool = False
    """Whether it is the second try, after the first got little CPU time."""
    probe: bool = False
    """Whether it scores an empty completion instead, to find out if the reference answer can be scored at all."""

    @property
    def call(self) -> tuple[int, int]:
        """Identifies the group call that this job is, or is a part of."""
        return self.group, self.function

    def key(self, sample: int) -> tuple[int, int, int]:
        """Identifies this function's result for one completion."""
        return self.group, self.function, sample

    def request(self) -> dict[str, Any]:
        """The call as it is sent to the worker."""
        prompt, completions = self.batch.groups[self.group]
        chosen = [completions[i] for i in self.samples]
        return {
            "prompt": prompt.content,
            "completions": [""] if self.probe else [c.text for c in chosen],
            "completion_ids": [()] if self.probe else [c.token_ids for c in chosen],
            "columns": dict(prompt.columns),
        }

    def alone(self) -> list[Job]:
        """The same call, one completion at a time."""
        return [
            Job(batch=self.batch, group=self.group, function=self.function, samples=(i,), again=True)
            for i in self.samples
        ]


class Batch:
    """The state that one call of `RewardPool.score` waits for. Thread-safe."""

    def __init__(
        self,
        groups: Groups,
        *,
        functions: Sequence[Sequence[int]],
        workers: int,
        timeout_s: float,
        bounded_s: Mapping[int, float] | None = None,
        built_in: Collection[int] = (),
        services: Mapping[int, Service] | None = None,
    ) -> None:
        self.groups = groups
        self.functions = functions
        """The functions that score each group."""
        self._used = {function for own in functions for function in own}
        self.done = threading.Event()
        self.error: BaseException | None = None
        self._lock = threading.RLock()
        self._timeout_s = timeout_s
        self._bounded_s = dict(bounded_s or {})
        self._services = dict(services or {})
        self._patient = frozenset(built_in)
        """Functions all of whose calls are made, however many hang."""
        self._blaming = self._patient - set(self._services)
        """Functions that give a completion 0 if it makes them fail."""
        self._reference: dict[tuple[int, int], bool | None] = {}
        """Whether the empty completion of a prompt could be scored; `None` while the probe is running."""
        self._slow = False
        """Whether the machine was too slow for a second try."""
        # By (group, function, completion).
        self._parts: dict[tuple[int, int, int], Part] = {}
        self._provisional: dict[tuple[int, int, int], Part] = {}
        """Results of completions scored alone while their group's call is still running."""
        self._remaining = sum(len(own) * len(group[1]) for own, group in zip(functions, groups, strict=True))
        self._patience = PATIENCE * workers
        self._lost: dict[tuple[int, bool], float] = defaultdict(float)
        self._running: dict[Job, float] = {}
        """Calls in progress and their start times."""
        self._whole: set[tuple[int, int]] = set()
        """Group calls that may still be answered."""
        self._split: set[tuple[int, int]] = set()
        self._suspects: set[int] = set()
        self._moves: dict[tuple[int, int, int], int] = defaultdict(int)
        """How often the machine of a call was lost, by its first completion."""
        self._began: float | None = None
        self._answered_s = 0.0
        self._spare_times: list[float] = []
        """When the first spare worker was started, and when the first one was ready."""
        self._longest_alone_s: float | None = None
        if not self._remaining:
            self.done.set()

    def jobs(self) -> list[Job]:
        """The initial calls: one per group and function."""
        return [
            Job(batch=self, group=g, function=f, samples=tuple(range(len(completions))))
            for g, (_, completions) in enumerate(self.groups)
            for f in self.functions[g]
            if completions
        ]

    # ---- calls

    def begin(self, job: Job) -> None:
        """Record that a call starts."""
        with self._lock:
            self._running[job] = time.monotonic()
            # From the first call: the time that a batch waits for a worker does not count.
            self._began = self._began or self._running[job]
            if not job.again:
                self._whole.add(job.call)

    def end(self, job: Job, *, hung: bool) -> None:
        """Record that a call ended. The time of answered calls extends the batch deadline; that of hangs does not."""
        with self._lock:
            took = time.monotonic() - self._running.pop(job)
            if not job.again:
                self._whole.discard(job.call)
            self._answered_s += 0 if hung else took
            if not hung and job.again:
                self._longest_alone_s = max(took, self._longest_alone_s or 0.0)

    def note_spare(self, *, ready: bool) -> None:
        """A spare worker is starting, or is ready. The first one's loading time extends the batch deadline."""
        with self._lock:
            self._spare_times += [time.monotonic()] if len(self._spare_times) == int(ready) else []

    def unwanted(self, job: Job) -> bool:
        """Whether the result of a call is no longer needed."""
        return self.done.is_set() or (not job.probe and job.key(job.samples[0]) in self._parts)

    @property
    def share(self) -> float:
        """The share of the calls' results that are there."""
        results = len(self._parts)
        return results / max(1, results + self._remaining)

    @property
    def busy(self) -> bool:
        """Whether a call is in progress."""
        return bool(self._running)

    # ---- results

    def answer(self, job: Job, parts: Sequence[Part]) -> None:
        """Record the results of a call that was answered."""
        with self._lock:
            # The function works, so earlier losses no longer suggest that it is hopeless.
            self._lost[job.function, False] = self._lost[job.function, True] = -math.inf
            if not job.again:
                self._suspects.discard(job.function)
            self.record(job, parts)

    def record(self, job: Job, parts: Sequence[Part]) -> None:
        """Record the parts of a call's completions. The result of a group call takes precedence over any other."""
        with self._lock:
            # While the group call may still answer, results of single completions are only provisional. Otherwise
            # a score would depend on which of the two calls was faster.
            provisional = job.again and job.call in self._whole
            into = self._provisional if provisional else self._parts
            for sample, part in zip(job.samples, parts, strict=True):
                key = job.key(sample)
                if key in self._parts:
                    continue
                into[key] = part
                self._remaining -= 0 if provisional else 1
            if not self._remaining:
                self.done.set()

    def split(self, job: Job) -> list[Job]:
        """One call per completion of a call that failed or is likely to; empty if it was split before."""
        with self._lock:
            if job.call in self._split:
                return []
            self._split.add(job.call)
            return job.alone()

    def failed(self, job: Job) -> list[Job]:
        """A group call failed, so its provisional results become final. Returns the calls that are still to be made."""
        with self._lock:
            self._whole.discard(job.call)
            for alone in job.alone():
                part = self._provisional.pop(alone.key(*alone.samples), None)
                if part is not None:
                    self.record(alone, [part])
            return self.split(job)

    def give_up(self, error: BaseException) -> None:
        """Make the waiting call of `score` raise this error."""
        self.error = self.error or error
        self.done.set()

    def parts(self, group: int, sample: int) -> list[Part]:
        """The result of each of its functions for a completion, in their order."""
        return [self._assign_blame(group, f, self._parts[group, f, sample]) for f in self.functions[group]]

    # ---- blame

    def _assign_blame(self, group: int, function: int, part: Part) -> Part:
        """A failure caused by the completion scores 0. One caused by function, reference or machine is unscored."""
        if part.cause and function in self._blaming and self._reference_scored(group, function):
            return Part(value=0.0, notes=(part.cause,))
        return part

    def _reference_scored(self, group: int, function: int) -> bool:
        samples = range(len(self.groups[group][1]))
        answered = (self._parts.get((group, function, sample)) for sample in samples)
        return bool(self._reference.get((group, function))) or any(p and p.value is not None for p in answered)

    def probe(self, job: Job) -> list[Job]:
        """A call that tests whether a prompt's reference can be scored; empty if not needed or already made."""
        with self._lock:
            asked = job.probe or job.call in self._reference or self.done.is_set()
            if asked or job.function not in self._blaming or self._reference_scored(*job.call):
                return []
            self._reference[job.call] = None
            self._remaining += 1  # the batch must wait for the probe: its result decides between 0 and unscored
            return [Job(batch=self, group=job.group, function=job.function, samples=(0,), again=True, probe=True)]

    def probed(self, job: Job, *, scored: bool) -> None:
        """Record the result of a probe."""
        with self._lock:
            self._reference[job.call] = scored
            if scored:  # the function works, so the completions caused its lost calls
                self._lost[job.function, False] = self._lost[job.function, True] = -math.inf
            self._remaining -= 1
            if not self._remaining:
                self.done.set()

    def hung(self, job: Job, processor_s: float, *, kept_waiting: bool) -> tuple[list[Job], str]:
        """A retry of the call if it hung without getting CPU time; otherwise the cause, empty if it is the machine."""
        with self._lock:
            self._slow |= kept_waiting
            worked = processor_s >= IDLE * self._timeout_s or (job.last and not kept_waiting)
            if worked or len(job.samples) > 1 or job.function not in self._blaming:
                return [], "timeout"
            if self._slow:  # one slow second try is enough: each may take many times `timeout_s`
                return [], ""
            self._whole.discard(job.call)
            return [replace(job, again=True, last=True)], ""

    def moved(self, job: Job) -> list[Job] | None:
        """The calls to make instead of one whose machine was lost; None if that has happened too often."""
        with self._lock:
            self._moves[job.key(job.samples[0])] += 1
            if self._moves[job.key(job.samples[0])] > MOST_MOVES:
                return None
            # If its completions have been scored alone meanwhile, those results count now.
            return self.failed(job) if job.call in self._split and not job.again else [replace(job)]

    # ---- functions that keep failing

    def lost(self, job: Job) -> None:
        """Count a call that hung or killed its worker."""
        with self._lock:
            self._lost[job.function, job.again] += 1

    def hopeless(self, job: Job) -> bool:
        """Whether enough calls like this one (of a group or of a single completion) were made, and all were lost."""
        with self._lock:
            return self._lost[job.function, job.again] >= self._patience

    def suspicious(self, job: Job) -> bool:
        """Whether a group should be scored one completion at a time because its function is likely to hang."""
        with self._lock:
            return len(job.samples) > 1 and job.function in self._suspects

    # ---- time

    def timeout_s(self, function: int, completions: int) -> float:
        """The time limit of a call with this many completions.

        A function that limits the time of each completion itself may use that limit for every one of them: a
        deliberately slow completion must get its score and must not kill the worker. A service works on several at a
        time, and has a moment more, to report that its own deadline has passed.
        """
        if service := self._services.get(function):
            return self._timeout_s * math.ceil(completions / service.at_once) + ANSWER_S
        bounded_s = self._bounded_s.get(function, 0.0)
        return max(self._timeout_s, bounded_s) * completions if bounded_s else self._timeout_s

    def likely_to_hang(self) -> list[Job]:
        """The calls that are taking too long. Their functions are suspects from now on."""
        with self._lock:
            now = time.monotonic()
            group_s = SUSPECT * self._timeout_s
            alone_s = self._usual_s()
            running = [(job, since) for job, since in self._running.items() if not self._is_bounded(job.function)]
            found = [job for job, since in running if now - since > (alone_s if job.again else group_s)]
            self._suspects |= {job.function for job in found if not job.again}
            return found

    def _is_bounded(self, function: int) -> bool:
        """Whether it limits its time itself, so that a slow call is no sign of a hang."""
        return function in self._bounded_s or function in self._services

    def _usual_s(self) -> float:
        if self._longest_alone_s is None:
            return SUSPECT * self._timeout_s / 4
        return min(max(SLOW * self._longest_alone_s, QUICK_S), SUSPECT * self._timeout_s)

    def close_if_late(self, name: Callable[[int], str]) -> None:
        """Once the batch deadline has passed, mark every completion without a result as unscored, with the reason."""
        with self._lock:
            # A function with its own limits will answer; ending the batch would lose scores.
            if any(self._is_bounded(job.function) for job in self._running):
                return
            late = self._late_functions()
            # First make provisional results final, so that only completions without any result are marked.
            for job in [job for job in self._running if not job.again and job.function in late]:
                self.failed(job)
            trying = {
                job.key(sample): since
                for job, since in self._running.items()
                for sample in job.samples
                if not job.probe
            }
            for alone in [alone for job in self.jobs() if job.function in late for alone in job.alone()]:
                since = trying.get(alone.key(*alone.samples))
                self.record(alone, [Part(failure=_late_failure(name(alone.function), since))])
            if self._used and late >= self._used:  # a batch that only loads the functions has none
                self.done.set()  # even if probes are still running

    def _late_functions(self) -> set[int]:
        """Functions past the batch deadline."""
        if self._began is None:
            return set()
        now = time.monotonic()
        loading_s = 0.0
        if self._spare_times:
            loading_s = (self._spare_times[1] if len(self._spare_times) > 1 else now) - self._spare_times[0]
        late_s = now - self._began - SPARE_S - self._answered_s - loading_s
        return {
            function
            for function in self._used
            if late_s >= self._timeout_s * (LONGEST if function in self._patient else 1)
        }


def _late_failure(name: str, since: float | None) -> str:
    if since is None:
        return (
            f"not_run: {name}: every worker was busy with a call that hung until the batch's time was up "
            "(reward.timeout_s)"
        )
    took_s = time.monotonic() - since
    return f"timeout: {name}: no result after {took_s:.2g} s, when the batch's time was up (reward.timeout_s)"
