"""What goes wrong during a run: it is recorded as an event, shown as a message, and may stop the run.

In: the results of a step. Out: events, messages and, if the run must stop, an error that says how to continue.
Invariant: nothing here changes what is trained. A check returns its error where the loop must save something before it
stops; it raises where nothing is to be saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo import trust
from gspo.config import Config
from gspo.environment.rewards import ConversationRewards
from gspo.errors import AlarmError, DataError, NumericalError, RewardError
from gspo.evaluation import Evaluation
from gspo.learner.optimizer import Update
from gspo.learner.result import LearnResult
from gspo.objectives.objective import Objective
from gspo.ranks.environment import resume_command
from gspo.record.alarms import HISTORY, Alarm, active_alarms, before_skipped
from gspo.record.held_out import HeldOutScores
from gspo.record.metrics import drop_reasons
from gspo.record.progress import Display
from gspo.record.run_dir import RunDir
from gspo.reward.reward import RewardPool
from gspo.rollout.gather import CollectResult
from gspo.types import Status

DROP_REASONS = {
    "unscored": "could not be scored",
    "overlong": "were truncated at rollout.max_tokens (objective.shape = overlong_filter drops them)",
    "empty": "were empty",
    "alone": "had no other usable completion in their group to compare with",
    "uniform": "were in groups whose completions all have the same reward (objective.keep = mixed)",
    "over_lag": "were too long for their turns (rollout.over_lag = drop gives them up)",
}
"""Drop reason -> how a message states it, with the dropped completions as the subject."""


def _reasons(reasons: Mapping[str, int]) -> str:
    """Drop reasons in words."""
    return ", ".join(f"{count} {DROP_REASONS[reason]}" for reason, count in reasons.items())


def _remedy(reason: str, verdicts: Sequence[bool]) -> str:
    """What to do if nothing can be trained on, by the most frequent drop reason."""
    if reason == "overlong":
        return "Raise rollout.max_tokens, or ask for shorter answers (data.instruction)"
    if reason == "unscored":
        return "Fix the reward, or the answers of the problems"
    remedy = "Train the last checkpoint on other problems in a new run (model.path)"
    if verdicts and not any(verdicts):
        remedy = "Use easier problems, or start with demonstrations (cold_start.steps)"
    return f"{remedy}, or use a reward with partial credit"


def skipped_in_row(learned: LearnResult | None, in_row: int) -> int:
    """The number of skipped updates in a row after a step, which was `in_row` before it."""
    if learned is None:
        # No update was tried, so nothing is known about the numerics: the count neither grows nor restarts.
        return in_row
    for update in learned.updates:
        in_row = 0 if update.applied else in_row + 1
    return in_row


class Incidents:
    """The incidents of one run in this process."""

    def __init__(self, *, run_dir: RunDir, display: Display, config: Config) -> None:
        self.unscored = 0
        """Unscored completions in this process."""
        self.idle = 0
        """Steps of this process without any completion to train on."""
        self._run_dir = run_dir
        self._display = display
        self._config = config
        self._few_updates_shown = False
        """Whether the message about fewer updates than mini-batches was shown."""
        self._excess_shown = False
        """Whether the message about a mismatch beyond the clip range was shown."""
        self._short_shown = False
        """Whether the message about a short batch was shown."""
        self._fault_file: Path | None = None
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=HISTORY)
        self._active_alarms: set[str] = set()

    def warn(self, text: str) -> None:
        """Record and show a warning."""
        self._run_dir.event("warning", message=text)
        self._display.message(f"warning: {text}")

    # ---- rewards

    def report_faults(self, step: int, rewards: RewardPool | ConversationRewards) -> None:
        """Report each new failure of a reward function. The run continues if the details cannot be written."""
        for fault in rewards.new_faults():
            try:
                self._fault_file = self._run_dir.reward_error(f"step {step}: {fault}")
                where = f"; details: {self._fault_file}"
            except OSError as error:
                where = f" (the details could not be written: {error})"
            self._run_dir.event("reward_failed", step=step, function=fault.function, message=fault.failure)
            self._display.message(f"step {step}: {fault.failure}{where}")

    def check_scores(self, step: int, collected: CollectResult) -> RewardError | None:
        """Count unscored completions. The error, if there are too many: the reward is broken, and the scored rest is a
        biased sample."""
        scores = [s for g in collected.rollouts.sampled for s in g.scores]
        failed = [s.failure for s in scores if s.status is Status.UNSCORED]
        # Only the first time in a process: a reward that fails now and then would print a message at every step.
        if failed and not self.unscored:
            self._display.message(
                f"step {step}: {len(failed)} of {len(scores)} completions could not be scored and are not "
                f"trained on. The first: {failed[0]}"
            )
        self.unscored += len(failed)
        limit = self._config.reward.max_unscored_fraction
        if len(failed) <= limit * len(scores):
            return None
        self._run_dir.event("unscored", step=step, unscored=len(failed), completions=len(scores), first=failed[0])
        return RewardError(
            f"step {step}: {len(failed)} of {len(scores)} completions could not be scored "
            f"(reward.max_unscored_fraction = {limit:g}); "
            f"the first: {failed[0]}.{self._fault_details()} Fix the reward, then: {self._resume_command()}"
        )

    def check_groups(self, step: int, objective: Objective, collected: CollectResult) -> DataError | None:
        """The error, if a whole pass over the data gave no group to train on: another one would hardly help."""
        if self._config.rollout.refill_budget != "full" or collected.rollouts.groups:
            return None
        sampled = len(collected.rollouts.sampled)
        verdicts = [s.correct for g in collected.rollouts.sampled for s in g.scores if s.correct is not None]
        correct = f" {sum(verdicts)} of {len(verdicts)} completions were correct." if verdicts else ""
        reasons = drop_reasons(objective, collected, None)
        return DataError(
            f"step {step}: none of {sampled} groups, a whole pass over the training problems, can be trained on "
            f'(objective.keep = "mixed", rollout.refill_budget = "full"): of their completions, {_reasons(reasons)}.'
            f"{correct} {_remedy(next(iter(reasons)), verdicts)}"
        )

    def check_first_evaluation(self, evaluation: Evaluation) -> None:
        """Stop before the first step if the reward cannot score a single completion."""
        failed = [s.failure for s in evaluation.scores if s.status is Status.UNSCORED]
        if failed and len(failed) == len(evaluation.scores):
            raise RewardError(
                f"the first evaluation: none of {len(failed)} completions could be scored; the first: {failed[0]}."
                f"{self._fault_details()} Fix the reward or the answers of the held-out problems, "
                f"then: {self._resume_command()}"
            )

    def _fault_details(self) -> str:
        return f" Details: {self._fault_file}." if self._fault_file else ""

    def _resume_command(self) -> str:
        """The command that resumes after a fix of the reward. A changed reward file needs `--trust-run`."""
        flag = " --trust-run" if trust.reward_code(self._config) else ""
        return resume_command(self._run_dir.path) + flag

    # ---- updates

    def check_updates(
        self, step: int, objective: Objective, collected: CollectResult, learned: LearnResult | None, in_row: int
    ) -> NumericalError | None:
        """Report skipped updates and steps without data to train on.

        Returns the error if too many updates in a row were skipped; there were `in_row` before this step."""
        if collected.missing:
            self._report_short(step, collected, idle=learned is None)
        if learned is None:
            self._report_idle(step, drop_reasons(objective, collected, None))
            return None
        if len(learned.updates) < self._config.learner.mini_batches:
            self._report_few_updates(step, learned)
        if learned.excess and not self._excess_shown:
            # Once per process: the metric noise/beyond_clip has every step.
            self._excess_shown = True
            self.warn(f"step {step}: {learned.excess} (learner.allow_mismatch accepts it)")
        for index, update in enumerate(learned.updates):
            if update.overflows:
                self._report_overflow(step, index, update)
            in_row = 0 if update.applied else in_row + 1
            if not update.applied:
                self._report_skipped(step, index, learned)
            # A single skip is harmless, but a policy whose weights have diverged is skipped forever and never recovers.
            if in_row >= self._config.learner.max_skipped:
                lower = self._config.learner.learning_rate / 3
                return NumericalError(
                    f"step {step}: {in_row} updates in a row were skipped, the last because of {update.skipped} "
                    "(learner.max_skipped); resume from the last checkpoint with a lower learning rate: "
                    f"{resume_command(self._run_dir.path)} --learner.learning_rate={lower:.1g}"
                )
        return None

    def last_good_before_skipped(self, step: int, in_row: int) -> int:
        """The last step whose weights were good, when a step has skipped updates after `in_row` in a row before it."""
        return before_skipped(list(self._recent), step, in_row)

    def _report_overflow(self, step: int, index: int, update: Update) -> None:
        """Report that gradients overflowed float16. Nothing was lost, so it does not count as a skipped update."""
        scale = update.loss_scale
        self._run_dir.event(
            "gradient_overflow", step=step, mini_batch=index, overflows=update.overflows, loss_scale=scale
        )
        self._display.message(
            f"step {step}: the gradients of update {index} overflowed float16 and were computed again with a loss "
            f"scale of {scale:g}"
        )

    def _report_skipped(self, step: int, index: int, learned: LearnResult) -> None:
        update = learned.updates[index]
        loss = float(learned.losses[index].total)
        norm = update.grad_norm
        self._run_dir.event(
            "update_skipped", step=step, mini_batch=index, loss=loss, grad_norm=norm, reason=update.skipped
        )
        self._display.message(
            f"step {step}: update {index} skipped, loss {loss:g}, gradient norm {norm:g}: {update.skipped}"
        )

    def _report_idle(self, step: int, reasons: Mapping[str, int]) -> None:
        """Report a step without any completion to train on."""
        self.idle += 1
        self._run_dir.event("no_trainable_samples", step=step, reasons=reasons)
        self._display.message(
            f"step {step}: no group to train on (of its completions, {_reasons(reasons)}); the policy is unchanged"
        )

    def _report_few_updates(self, step: int, learned: LearnResult) -> None:
        """Record a step with fewer updates than mini-batches. Only the first such step of a process shows a message."""
        updates, completions = len(learned.updates), len(learned.samples)
        self._run_dir.event("fewer_updates", step=step, updates=updates, completions=completions)
        if not self._few_updates_shown:
            self._few_updates_shown = True
            rollout = self._config.rollout
            self._display.message(
                f"warning: step {step}: only {completions} of {rollout.prompts * rollout.group_size} completions could "
                f"be trained on, so the step had {updates} optimizer step{'' if updates == 1 else 's'} instead of "
                f"{self._config.learner.mini_batches} (learner.mini_batches)"
            )

    def _report_short(self, step: int, collected: CollectResult, *, idle: bool) -> None:
        """Record a batch with fewer groups than wanted. Only the first such step of a process shows a message, and a
        step that trains on nothing has a message of its own."""
        groups, sampled = len(collected.rollouts.groups), len(collected.rollouts.sampled)
        self._run_dir.event("short_batch", step=step, groups=groups, wanted=collected.wanted, sampled=sampled)
        if idle or self._short_shown:
            return
        self._short_shown = True
        budget = self._config.rollout.refill_budget
        more = "" if budget == "full" else 'raise rollout.refill_budget or set it to "full", or '
        self._display.message(
            f"warning: step {step}: the batch is short: of {sampled} sampled groups only {groups} "
            f"{'has' if groups == 1 else 'have'} different rewards among completions that can be trained on, so the "
            f"step trains on {groups} instead of "
            f"{collected.wanted} (rollout.refill_budget = {budget}); {more}use "
            "problems that are neither too easy nor too hard. Later short batches are counted by groups/missing"
        )

    def report_smaller_micro_batches(self, step: int, tokens: int) -> None:
        """Report that a step ran out of memory and was repeated with micro-batches of `tokens` tokens."""
        self._run_dir.event("out_of_memory", step=step, micro_batch_tokens=tokens)
        self._display.message(
            f"step {step}: out of memory; the same gradient was computed with micro-batches of {tokens} tokens, "
            "and later steps use that size"
        )

    def report_clip_limit(self, step: int, limit: str) -> None:
        """Report that the adaptive clip range has reached a limit."""
        self._run_dir.event("clip_range_limit", step=step, message=limit)
        self._display.message(f"step {step}: the clip range stops adapting: {limit}")

    # ---- alarms

    def remember_alarms(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take over the metrics of a restored run. Its active alarms are not reported again, and do not stop it."""
        self._recent.clear()
        self._recent.extend(rows)
        self._active_alarms = {alarm.name for alarm in active_alarms(rows, self._config.alarms.steps)}

    def new_alarms(self, metrics: Mapping[str, Any]) -> list[Alarm]:
        """The alarms that the metrics of a step raise newly."""
        now = active_alarms([*self._recent, metrics], self._config.alarms.steps)
        return [alarm for alarm in now if alarm.name not in self._active_alarms]

    def check_alarms(self, step: int, metrics: Mapping[str, Any]) -> Alarm | None:
        """Report alarms that are newly raised. Returns the one that stops the run or rolls it back, if any."""
        new = self.new_alarms(metrics)
        self._recent.append(metrics)
        now = active_alarms(list(self._recent), self._config.alarms.steps)
        for alarm in new:
            text = alarm.message(self._config)
            self._run_dir.event("alarm", step=step, name=alarm.name, message=text)
            self._display.message(f"ALARM at step {step}, {alarm.name}: {text}")
        self._active_alarms = {alarm.name for alarm in now}
        for names in (self._config.alarms.stop, self._config.alarms.rollback):
            for alarm in new:
                if alarm.name in names:
                    return alarm
        return None

    def last_good(self, alarm: Alarm) -> int:
        """The last step whose weights were good, when an alarm has just been raised."""
        return alarm.last_good(list(self._recent), self._config.alarms.steps)

    def alarm_error(self, step: int, alarm: Alarm) -> AlarmError:
        """The error of an alarm that stops the run."""
        key = "alarms.stop" if alarm.name in self._config.alarms.stop else "alarms.rollback"
        return AlarmError(
            f"step {step}: {alarm.name} ({key}): {alarm.message(self._config)}. "
            f"The run is saved: {resume_command(self._run_dir.path)}"
        )

    # ---- early stopping

    def report_early_stop(self, step: int, held_out: HeldOutScores) -> None:
        """Report that the evaluations end the run."""
        settings, best = held_out.settings, held_out.best()
        text = f"no gain of eval/{settings.metric} in {held_out.without_gain} evaluations (eval.patience)"
        if best is not None:
            value = format(best.value, ".3f" if settings.metric == "reward" else ".1%")
            text += f"; the best was {value} at step {best.step}"
        self._run_dir.event("early_stop", step=step, best_step=best and best.step, message=text)
        self._display.message(f"step {step}: the run ends early: {text}")
