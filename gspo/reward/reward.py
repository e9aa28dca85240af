"""Score completions with reward functions in worker processes.

In: prompts with their completions. Out: a `Score` per completion, in the same order. Invariant: a reward function that
raises, hangs, dies or returns an invalid value leaves exactly the completions it failed on UNSCORED, with the reason.
It never turns them into a 0 (except completions that make a built-in reward fail, see `jobs.py`), never changes
another completion's score, and never crashes the run. A function that abstains (returns None) is neither a failure nor
a 0: it counts as the mean of its values for the other completions of the group. Functions run in worker processes,
except those that only this process has (`in_process.py`): they run here, before the others.

Calls that hang do not block the others: the pool starts spare workers, which end with the batch. A function that asks a
model or an endpoint (`traits.Service`) has one worker of its own.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from gspo.activity import Activity, activity
from gspo.config import RewardConfig
from gspo.errors import ConfigError, GspoError, RewardError
from gspo.reward.function import RunFacts, Source, lacking, load_in_process, one_line
from gspo.reward.jobs import ANSWER_S, Batch, Groups, Job, Part
from gspo.reward.places import PlacedWorker, RewardPlaces
from gspo.reward.process import ScoringCancelled, WorkerDied, WorkerHung, WorkerLost, WorkerOverMemory, WorkerProcess
from gspo.reward.process_usage import memory_bytes
from gspo.reward.second_try import SecondTry
from gspo.reward.source_rewards import ScoringRule, SourceRewards, locate
from gspo.reward.traits import Service
from gspo.signals import shielded
from gspo.types import Prompt, Score, Status

PROGRAM_S = 5.0
"""Default time limit of a program."""
PROGRAM_MB = 512
"""Default memory limit of a program."""
MOST_SPARES = 32
"""Maximum number of worker processes beyond `reward.workers` while calls hang."""
MOST_MERGED = 4096
"""Maximum number of completions in one call of a service."""
MOST_FAULTS = 20
"""Maximum number of distinct reward function faults that are kept."""
# How often a waiting batch looks for calls that hang.
_TICK_S = 0.05
_PLACE = re.compile(r"\(([^()]+:[0-9]+)\)$")


Worker = WorkerProcess | PlacedWorker


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The first failure of a function at one source location, with the details needed to debug it."""

    function: str
    failure: str
    """The reason in one line, as in `Score.failure`."""
    trace: str
    """The traceback; empty if nothing was raised."""
    printed: str
    """The tail of the function's output."""
    prompt: str
    completion: str

    def __str__(self) -> str:
        parts = {"traceback": self.trace, "printed": self.printed, "prompt": self.prompt, "completion": self.completion}
        return "\n".join(
            [self.failure, *(f"\n---- {name}\n{text.rstrip()}" for name, text in parts.items() if text), ""]
        )


class RewardPool:
    """Owns the worker processes. The constructor raises a one-line error if a function cannot be loaded, or if the
    model or endpoint that it asks cannot be used. `cache_dir` keeps scores that were paid for."""

    def __init__(
        self,
        config: RewardConfig,
        task: tuple[str, Mapping[str, Any]] | None = None,
        *,
        sources: Mapping[str, SourceRewards] | None = None,
        cache_dir: str = "",
        cluster: Mapping[str, Any] | None = None,
    ) -> None:
        """`sources` has the functions of each data source, if there are several; otherwise those of `config` score
        every problem. `cluster` says where the workers run (`cluster/connect.py`), if not on this machine."""
        self._config = config
        self._facts = RunFacts(timeout_s=config.timeout_s, cache_dir=cache_dir)
        only = SourceRewards(functions=config.functions, weights=config.weights, task=task)
        rewards = {"": only} if sources is None else sources
        self._sources, self._rules = locate(rewards, config.options)
        self._own = {f: load_in_process(source) for f, source in enumerate(self._sources) if source.in_process}
        """The functions that run in this process."""
        for name, reward in rewards.items():
            _check_weights(reward.weights_key, reward.weights, len(self._rules[name].functions))
        _check_limits(config, self._sources)
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._scoring = threading.Lock()
        """Held by the thread whose batch is being scored: a batch's time limit is for the whole pool."""
        self._alone = threading.Lock()
        """Held by the call that is making its second try."""
        self._closing = False
        self._faults: dict[str, Fault] = {}
        self._new_faults: list[Fault] = []
        self._places = (
            RewardPlaces(cluster, self._sources, facts=self._facts, memory_mb=config.memory_mb) if cluster else None
        )
        self._workers = [self._worker() for _ in range(config.workers)]
        self._services: dict[int, Service] = {}
        """By function. Each has a worker and a thread of its own, in which its model is loaded."""
        self._hosts: list[WorkerProcess] = []
        self._usage: dict[str, dict[str, float]] = {}
        self._spares: dict[Worker, Batch] = {}
        self._threads = [
            threading.Thread(target=self._serve, args=(worker, number > 0), name=f"reward-{number}", daemon=True)
            for number, worker in enumerate(self._workers)
        ]
        try:
            # One worker loads the functions first, so that a file that cannot be imported is reported once.
            self._threads[0].start()
            self._load_once(0)
            self._start_services()
            if len(self._services) < len(self._sources):
                for thread in self._threads[1 : len(self._workers)]:
                    thread.start()
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The functions' short names, in order: the keys of `Score.parts`."""
        return tuple(source.name for source in self._sources)

    @property
    def about(self) -> dict[str, str]:
        """Descriptions that functions give of themselves, by name, for example which sandbox is used."""
        return {name: text for name, text in zip(self.names, self._workers[0].about, strict=True) if text}

    def new_faults(self) -> list[Fault]:
        """Faults since the last call. Each failing source location is reported once."""
        with self._changed:
            faults, self._new_faults = self._new_faults, []
            return faults

    def take_usage(self) -> dict[str, dict[str, float]]:
        """What each service did since the last call (`service_usage.py`), by the name of its function."""
        with self._changed:
            usage, self._usage = self._usage, {}
            return usage

    def pids(self) -> list[int]:
        """The live worker processes."""
        workers = (*self._workers, *self._hosts, *self._spares)
        return [pid for worker in workers if (pid := worker.pid) is not None]

    @property
    def services(self) -> dict[str, Service]:
        """The functions that ask a model or an endpoint, by name."""
        return {self.names[function]: service for function, service in self._services.items()}

    def service_memory(self, name: str) -> int:
        """Bytes of main memory that the worker of a service uses."""
        pid = self._hosts[list(self._services).index(self.names.index(name))].pid
        return memory_bytes(pid) if pid is not None else 0

    def functions_of(self, source: str) -> list[Source]:
        """The functions that score the problems of a data source."""
        return [self._sources[f] for f in self._rules[source].functions]

    def check_columns(self, prompts: Iterable[Prompt]) -> None:
        """Raise `RewardError` if the problems of a source lack a column that one of its functions requires."""
        found: dict[str, set[str]] = {}
        for prompt in prompts:
            found.setdefault(prompt.source, set()).update(prompt.columns)
        for source, columns in found.items():
            for f in self._rules[source].functions:
                missing = set(self._workers[0].needs[f]) - columns
                if missing:
                    where = f"reward.functions: {f'problems of {source}: ' if source else ''}"
                    what = lacking(self._sources[f].name, missing, columns)
                    foreign = bool(self._sources[f].file) or f in self._own
                    fix = "rename its parameter, or give it a default" if foreign else "correct its options or the data"
                    raise RewardError(f"{where}{what}; {fix}")

    def score(self, groups: Groups, functions: Collection[str] | None = None) -> list[list[Score]]:
        """Score every completion of every group, with all functions or only those of these names."""
        rules = [self._rule(prompt.source, functions) for prompt, _ in groups]
        total = sum(len(completions) for _, completions in groups)
        with self._scoring, activity("scoring", total=total, unit="completions") as doing:
            batch = self._batch(groups, rules)
            jobs = batch.jobs()
            for job in jobs:
                if job.function in self._own:
                    self._call_here(job)
                    doing.done = int(batch.share * total)
            self._run(batch, [job for job in jobs if job.function not in self._own], doing)
        return [
            self._combine_group(rule, [batch.parts(g, i) for i in range(len(completions))])
            for g, (rule, (_, completions)) in enumerate(zip(rules, groups, strict=True))
        ]

    def close(self) -> None:
        """End the workers. May be called twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout=30)
        with self._changed:
            self._changed.wait_for(lambda: not self._spares, timeout=30)
        if self._places:
            self._places.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --------------------------------------------------------------------------------------- the caller's thread

    def _worker(self) -> Worker:
        if self._places:
            return self._places.worker(lambda: self._closing)
        return WorkerProcess(self._sources, lambda: self._closing, facts=self._facts, memory_mb=self._config.memory_mb)

    def _start_services(self) -> None:
        """Start the worker of each function that asks a model or an endpoint, and wait until it is ready."""
        for function, service in enumerate(self._workers[0].services):
            if service is None:
                continue
            host = WorkerProcess(self._sources, lambda: self._closing, facts=self._facts, service=function)
            thread = threading.Thread(
                target=self._serve, args=(host, False, function), name=f"reward-service-{function}", daemon=True
            )
            self._services[function] = service
            self._hosts.append(host)
            self._threads.append(thread)
            thread.start()
            self._load_once(function)

    def _batch(self, groups: Groups, rules: Sequence[ScoringRule]) -> Batch:
        return Batch(
            groups,
            functions=[rule.functions for rule in rules],
            workers=len(self._workers),
            timeout_s=self._config.timeout_s,
            bounded_s={i: seconds for i, seconds in enumerate(self._workers[0].bounded_s) if seconds},
            built_in={i for i, source in enumerate(self._sources) if not source.file and not source.in_process},
            services=self._services,
        )

    def _call_here(self, job: Job) -> None:
        """Call a function of this process: for the completions of a prompt, and for each alone if that fails."""
        # A stop request inside the function would otherwise be taken for an error of the function.
        with shielded() if threading.current_thread() is threading.main_thread() else nullcontext():
            (answer,) = self._own[job.function]([_request(job)])
        if isinstance(answer, list):
            parts = [Part(**result) for result in answer]
            for sample, part in zip(job.samples, parts, strict=True):
                self._remember(job, sample, part, "")
            job.batch.answer(job, parts)
        elif len(job.samples) > 1 and not answer["failure"].startswith("invalid"):
            for alone in job.batch.split(job):
                self._call_here(alone)
        else:
            self._fail(job, Part(**answer))

    def _load_once(self, function: int) -> None:
        batch = self._batch((), ())
        batch.done.clear()
        self._run(batch, [Job(batch=batch, function=function)])

    def _run(self, batch: Batch, jobs: Sequence[Job], doing: Activity | None = None) -> None:
        if self._closing:
            raise RewardError("the reward pool is closed; build a new one")
        self._add(jobs)
        try:
            while not batch.done.wait(timeout=_TICK_S):
                if not any(thread.is_alive() for thread in self._threads):
                    raise RewardError("the reward pool was closed while it was scoring")
                self._watch(batch)
                if doing:
                    doing.done = int(batch.share * doing.total)
        finally:
            batch.done.set()  # after Ctrl-C: pending calls are dropped and running calls are cancelled
        self._make_whole(batch)
        if batch.error is not None:
            raise batch.error

    def _watch(self, batch: Batch) -> None:
        """Handle calls that hang: score their completions alone, start spare workers, and end the batch on time."""
        hanging = batch.likely_to_hang()
        self._add([alone for job in hanging if len(job.samples) > 1 for alone in batch.split(job)], first=True)
        self._add([probe for job in hanging for probe in batch.probe(job)], first=True)
        with self._changed:
            mine = [spare for spare, its in self._spares.items() if its is batch]
            waiting = sum(job.batch is batch and job.function not in self._services for job in self._jobs)
            wanted = min(self._most_spares(hanging), 2 * len(hanging)) - len(mine)
            spares = [self._worker() for _ in range(min(wanted, waiting))]
            self._spares |= dict.fromkeys(spares, batch)
        for spare in spares:
            threading.Thread(target=self._lend, args=(batch, spare), name="reward-spare", daemon=True).start()
        batch.close_if_late(lambda function: self._sources[function].name)

    def _most_spares(self, hanging: Sequence[Job]) -> int:
        """Built-in rewards are CPU-bound, so more processes than cores would only slow each other down."""
        users = any(self._sources[job.function].file for job in hanging)
        return MOST_SPARES if users else min(MOST_SPARES, os.cpu_count() or 1)

    def _make_whole(self, batch: Batch) -> None:
        """Wait until hanging workers are replaced and spare workers are gone, which is quick."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or not (batch.busy or batch in self._spares.values()), timeout=5.0
            )

    def _add(self, jobs: Sequence[Job], *, first: bool = False) -> None:
        with self._changed:
            (self._jobs.extendleft if first else self._jobs.extend)(reversed(jobs) if first else jobs)
            self._changed.notify_all()

    # --------------------------------------------------------------------------------------- a worker's thread

    def _serve(self, worker: Worker, warm: bool, service: int | None = None) -> None:
        """Process jobs until the pool closes. The worker process never outlives this thread."""
        try:
            if warm:
                self._warm(worker)
            while jobs := self._take(service):
                if self._do(worker, jobs):
                    self._warm(worker)
        finally:
            worker.kill()

    def _lend(self, batch: Batch, worker: Worker) -> None:
        """Run a spare worker: process this batch's jobs while there are any."""
        try:
            batch.note_spare(ready=False)
            worker.prepare()
            batch.note_spare(ready=True)
            while not batch.done.is_set() and (job := self._take_of(batch)) is not None:
                self._do(worker, [job])
        except (GspoError, OSError, ScoringCancelled):
            pass  # the batch continues with the workers it has
        finally:
            worker.kill()
            with self._changed:
                del self._spares[worker]
                self._changed.notify_all()

    def _take(self, service: int | None) -> list[Job]:
        """Wait for the next call of a service, or of the functions that are no service. Empty once the pool closes.

        If the service allows it, this takes all its calls that are waiting, to make them as one."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._next(service) is not None)
            job = self._next(service)
            if self._closing or job is None:
                return []
            merged = [job]
            if service is not None and self._services[service].merge and job.samples:
                others = [j for j in self._jobs if j is not job and j.batch is job.batch and j.function == service]
                merged += others[: MOST_MERGED // max(1, len(job.samples))]
            for taken in merged:
                self._jobs.remove(taken)
            return merged

    def _next(self, service: int | None) -> Job | None:
        """The first waiting call of a service, or of the functions that are no service."""
        # The first worker also loads a service's functions, before it is known to be one.
        owners = ((job, job.function if job.function in self._services else None) for job in self._jobs)
        return next((job for job, owner in owners if owner == service), None)

    def _take_of(self, batch: Batch) -> Job | None:
        with self._changed:
            waiting = (job for job in self._jobs if job.batch is batch and job.function not in self._services)
            job = next(waiting, None)
            if job is not None:
                self._jobs.remove(job)
            return None if self._closing else job

    def _warm(self, worker: Worker) -> None:
        """Load the functions while the worker is idle. An error recurs, and is reported, with the next job."""
        try:
            worker.prepare()
        except (GspoError, OSError, ScoringCancelled):
            worker.kill()

    def _do(self, worker: Worker, jobs: Sequence[Job]) -> bool:
        """Process jobs of one batch. False if that failed, in which case the batch has been given up."""
        batch = jobs[0].batch
        try:
            if not batch.done.is_set():
                worker.prepare()
                ready = [job for job in jobs if self._is_ready(job)]
                if ready and ready[0].last:
                    with self._alone, worker.second_try(batch.timeout_s(ready[0].function, 1)) as second:
                        self._attempt(worker, ready, second)
                elif ready:
                    self._attempt(worker, ready, None)
            return True
        except ScoringCancelled:
            batch.give_up(RewardError("the reward pool was closed while it was scoring"))
        except BaseException as error:  # the caller must get any error; otherwise it would wait forever
            batch.give_up(error)
        return False

    def _is_ready(self, job: Job) -> bool:
        """Whether a call is to be made now. If not, this has dealt with it."""
        batch = job.batch
        if not job.samples:
            batch.done.set()
        elif batch.unwanted(job):
            pass
        elif job.probe:
            return True
        elif batch.suspicious(job) or (batch.hopeless(job) and not job.again):
            self._add(batch.split(job), first=True)
        elif batch.hopeless(job):
            self._fail(job, Part(failure=f"not_run: {self._name(job)}: every earlier call of this batch hung or died"))
        else:
            return True
        return False

    def _attempt(self, worker: Worker, jobs: Sequence[Job], second: SecondTry | None) -> None:
        """Make calls of one function as one request. Only a service is ever sent more than one call at a time."""
        first = jobs[0]
        batch = first.batch
        request = {"function": first.function, "calls": [_request(job) for job in jobs]}
        timeout_s = batch.timeout_s(first.function, sum(len(job.samples) for job in jobs))
        hung = False
        for job in jobs:
            batch.begin(job)
        try:
            answers = worker.call(request, timeout_s, lambda: all(map(batch.unwanted, jobs)), second)
        except ScoringCancelled:
            hung = True
            worker.start()  # a new process, so the pool is complete when the batch is done
            if self._closing:
                raise
        except WorkerHung as error:
            hung = True
            reason = f"timeout: {self._name(first)}: no result after {timeout_s:g} s"
            kept_waiting = second is not None and second.kept_waiting
            hangs = [batch.hung(job, error.processor_s, kept_waiting=kept_waiting) for job in jobs]
            worker.kill()
            printed = worker.printed()
            worker.start()
            for job, (again, cause) in zip(jobs, hangs, strict=True):
                slow = "" if cause else "; the machine was too slow: use fewer reward.workers"
                self._lost(job, reason + slow, printed, cause, again, guilty=len(job.samples) == 1)
        except WorkerDied as error:
            # Something else, such as the OOM killer, may have killed it: even a single completion gets a second try.
            kind = "memory" if isinstance(error, WorkerOverMemory) else "died"
            printed = worker.printed()
            self._warm(worker)  # counts as part of this call, so a batch with many deaths gets more time
            worker.start()
            reason = f"{kind}: {self._name(first)}: {one_line(error)}"
            for job in jobs:
                self._lost(job, reason, printed, kind, [], guilty=job.again)
        except WorkerLost as error:
            for job in jobs:
                self._moved(job, f"machine: {self._name(first)}: {one_line(error)}")
            self._warm(worker)  # on another node; counts as part of this call
        else:
            self._count(first, worker.usage)
            for job, answer in zip(jobs, answers, strict=True):
                self._take_answer(job, answer, worker)
        finally:
            for job in jobs:
                batch.end(job, hung=hung)
            with self._changed:
                self._changed.notify_all()

    def _count(self, job: Job, usage: Mapping[str, float]) -> None:
        with self._changed:
            sums = self._usage.setdefault(self._name(job), {}) if usage else {}
            for name, count in usage.items():
                sums[name] = sums.get(name, 0.0) + count

    def _take_answer(self, job: Job, answer: Mapping[str, Any], worker: Worker) -> None:
        if job.probe:
            job.batch.probed(job, scored=any(r.get("value") is not None for r in answer.get("results", ())))
        elif "results" in answer:
            parts = [Part(**result) for result in answer["results"]]
            for sample, part in zip(job.samples, parts, strict=True):
                self._remember(job, sample, part, worker.printed() if part.failure else "")
            job.batch.answer(job, parts)
        elif len(job.samples) > 1 and not answer["failure"].startswith("invalid"):
            self._add(job.batch.failed(job))
        else:
            self._fail(job, Part(**answer), worker.printed())

    def _lost(self, job: Job, reason: str, printed: str, cause: str, again: Sequence[Job], *, guilty: bool) -> None:
        """Handle a call that hung or killed its worker. The caller has already started a new process."""
        if job.probe:
            job.batch.probed(job, scored=False)
            return
        job.batch.lost(job)
        if again:
            self._add(again)  # at the end of the queue: second tries run one at a time
        elif guilty:
            self._fail(job, Part(failure=reason, cause=cause), printed)
        else:
            self._add(job.batch.failed(job))

    def _moved(self, job: Job, reason: str) -> None:
        """Handle a call whose machine was lost: repeat it. Nobody is to blame."""
        again = job.batch.moved(job)
        if again is not None:
            self._add(again, first=True)
        elif job.probe:
            job.batch.probed(job, scored=False)
        else:
            self._fail(job, Part(failure=reason))

    def _fail(self, job: Job, part: Part, printed: str = "") -> None:
        self._remember(job, job.samples[0], part, printed)
        # The probe is requested before the part is recorded: recording the last part would end the batch.
        self._add(job.batch.probe(job) if part.cause else [], first=True)
        job.batch.record(job, [part] * len(job.samples))

    def _remember(self, job: Job, sample: int, part: Part, printed: str) -> None:
        """Keep the first failure at each source location for `new_faults`.

        A completion that makes a built-in reward fail is not a fault of that reward.
        """
        source = self._sources[job.function]
        own = not source.file and not source.in_process and job.function not in self._services
        if not part.failure or (part.cause and own):
            return
        place = _PLACE.search(part.failure)
        # Kind, function and place: the message may differ for each completion, and one report is enough.
        key = " ".join([*part.failure.split(": ")[: 3 if place or part.cause else 2], place[1] if place else ""])
        prompt, completions = job.batch.groups[job.group]
        fault = Fault(
            function=self._name(job),
            failure=part.failure,
            trace=part.trace,
            printed=printed,
            prompt=f"{prompt.id}\n{prompt.content if isinstance(prompt.content, str) else json.dumps(prompt.content)}",
            completion=completions[sample].text,
        )
        with self._changed:
            if key not in self._faults and len(self._faults) < MOST_FAULTS:
                self._faults[key] = fault
                self._new_faults.append(fault)

    def _name(self, job: Job) -> str:
        return self._sources[job.function].name

    # --------------------------------------------------------------------------------------- parts to a score

    def _rule(self, source: str, functions: Collection[str] | None) -> ScoringRule:
        """How the problems of a data source are scored, with all functions or only those of these names."""
        rule = self._rules[source]
        if functions is None:
            return rule
        chosen = [i for i, f in enumerate(rule.functions) if self._sources[f].name in functions]
        return replace(
            rule, functions=tuple(rule.functions[i] for i in chosen), weights=tuple(rule.weights[i] for i in chosen)
        )

    def _combine_group(self, rule: ScoringRule, parts_G: Sequence[Sequence[Part]]) -> list[Score]:
        neutral = _neutral_values(parts_G)
        return [self._combine(rule, parts, neutral) for parts in parts_G]

    def _combine(self, rule: ScoringRule, parts: Sequence[Part], neutral: Sequence[float]) -> Score:
        names = [self._sources[f].name for f in rule.functions]
        named = {name: part.value for name, part in zip(names, parts, strict=True)}
        notes = {name: tuple(part.notes) for name, part in zip(names, parts, strict=True) if part.notes}
        failure = next((part.failure for part in parts if part.failure), None)
        given = list(zip(rule.weights, parts, neutral, strict=True))
        terms = [w * (usual if p.value is None else p.value) for w, p, usual in given]
        if failure is None and not any(w and p.value is not None for w, p, _ in given):
            weighted = "" if all(p.value is None for p in parts) else " with a weight"
            failure = f"abstained: every reward{weighted} returned None"
        if failure is None and not math.isfinite(sum(terms)):
            failure = "invalid: the weighted sum is not finite"
        # One function that failed makes the whole reward unknown: a sum without its term would be another reward.
        if failure is not None:
            return Score(status=Status.UNSCORED, parts=named, notes=notes, failure=failure)
        # The first function decides about correctness; the others may measure anything, for example the format.
        first = next((p.value for f, p in zip(rule.functions, parts, strict=True) if f == rule.decisive), None)
        correct = None if first is None else first > self._config.correct_above
        reward = sum(terms)
        steps = _step_rewards(rule.weights, parts, reward)
        return Score(status=Status.SCORED, reward=reward, correct=correct, parts=named, notes=notes, step_rewards=steps)


def _step_rewards(weights: Sequence[float], parts: Sequence[Part], reward: float) -> tuple[tuple[int, float], ...]:
    """The weighted sum of all functions' step rewards. What judges the whole completion belongs to the last step."""
    total: dict[int, float] = {}
    for weight, part in zip(weights, parts, strict=True):
        for at, value in part.steps:
            total[at] = total.get(at, 0.0) + weight * value
    if not total:
        return ()
    steps = sorted(total.items())
    last, value = steps[-1]
    return (*steps[:-1], (last, value + reward - sum(total.values())))


def _neutral_values(parts_G: Sequence[Sequence[Part]]) -> list[float]:
    """What an abstention counts as, by function: the mean of the function's other values in the group.

    It changes nothing in a comparison within the group, whereas a 0 would be a verdict. If a function abstains on the
    whole group, any constant will do."""
    scored = [parts for parts in parts_G if not any(part.failure for part in parts)]
    functions = len(parts_G[0]) if parts_G else 0
    given = [[v for parts in scored if (v := parts[k].value) is not None] for k in range(functions)]
    return [statistics.fmean(values) if values else 0.0 for values in given]


def _request(job: Job) -> dict[str, Any]:
    request = job.request()
    for name, value in request["columns"].items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            prompt = job.batch.groups[job.group][0].id
            shown = one_line(repr(value), 80)
            raise RewardError(f"prompt {prompt}: column {name} must hold JSON values, not {shown}") from None
    return request


def _check_limits(config: RewardConfig, sources: Sequence[Source]) -> None:
    """A program that uses up its time or memory limit must end and score 0 before its worker is killed."""
    for source in sources:
        if source.spec != "code_tests":
            continue
        limit = source.options.get("limit_s", PROGRAM_S)
        memory_mb = source.options.get("memory_mb", PROGRAM_MB)
        if isinstance(memory_mb, int | float) and 0 < config.memory_mb < 2 * memory_mb:
            raise ConfigError(
                f"reward.memory_mb: {config.memory_mb}, but code_tests gives a program and its tests "
                f"{memory_mb:g} each (memory_mb); "
                f"set reward.memory_mb to at least {2 * memory_mb:g}"
            )
        if isinstance(limit, int | float) and config.timeout_s < limit + ANSWER_S:
            raise ConfigError(
                f"reward.timeout_s: {config.timeout_s:g} s, but code_tests gives one program {limit:g} s (limit_s) "
                "and needs some more to answer; "
                f"set reward.timeout_s to at least {limit + ANSWER_S:g}"
            )


def _check_weights(key: str, weights: Sequence[float], functions: int) -> None:
    if weights and len(weights) != functions:
        raise ConfigError(f"{key}: {len(weights)} weights for {functions} functions; give one for each")
    if not all(map(math.isfinite, weights)):
        raise ConfigError(f"{key}: {list(weights)}: must be finite numbers")
