"""What every rank but the leader does: wait for a command, run it with the leader, wait for the next one.

In: the commands of the leader (`Ranks.together`). Out: nothing; the leader has all results. Invariant: a command is a
method of `Follower`, and its body is what the leader runs inside `together`. A follower decides nothing: it has no
data, no rewards and no run directory to write to, except for its own log, `RUN/ranks/RANK.log`. It ignores stop
requests, because the leader decides when the run stops, and ends when the leader does.
"""

from __future__ import annotations

import signal
import time
import tomllib
import typing
from dataclasses import replace
from pathlib import Path

import orjson

from gspo.build import build_learner, load_reference, run_adaptive_clip, run_objective, run_tokenizer, saved_model
from gspo.config import from_tree
from gspo.context import LearnContext
from gspo.errors import GspoError, MemoryLimitError, RankError
from gspo.learner import checkpoint
from gspo.learner.sft import FineTuner
from gspo.model.load import reload_weights
from gspo.model.micro_batch import TokenSequence
from gspo.model.out_of_memory import out_of_memory
from gspo.model.save import whole_weights
from gspo.objectives.adaptive_clip import ClipRange
from gspo.ranks.codec import convert
from gspo.ranks.group import Ranks
from gspo.ranks.output import FollowerOutput
from gspo.ranks.usage import exchange_usage
from gspo.rollout.data_parallel import sample_share
from gspo.rollout.engine import Engine, GenerateOptions
from gspo.rollout.vllm.policy import logprobs, whole_tensors
from gspo.rollout.vllm.weights import Part
from gspo.step import learn
from gspo.types import Group, Prompt


def follow(ranks: Ranks, output: FollowerOutput) -> None:
    """Run the commands of the leader until it ends the run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    follower = Follower(ranks, output)
    while follower.run_command():
        pass


class Follower:
    """A rank that does what the leader does, with its own part of the weights."""

    context: LearnContext
    engine: Engine | None

    def __init__(self, ranks: Ranks, output: FollowerOutput) -> None:
        self._ranks = ranks
        self._output = output
        self._run = Path()
        self._failed = False

    def run_command(self) -> bool:
        """Run the next command of the leader; False if it has ended the run."""
        message = orjson.loads(self._ranks.receive())
        if self._failed:
            self._ranks.watch.forget_failure()
            self._failed = False
        if message["command"] == "end":
            return False
        command = getattr(self, message["command"])
        hints = typing.get_type_hints(command)
        arguments = {name: convert(hints[name], value) for name, value in message["arguments"].items()}
        try:
            with self._ranks.peers_answer():
                command(**arguments)
        except RankError:
            raise
        except GspoError as error:
            # The leader has the same error at the same point, and decides what follows.
            self._output.note(f"{type(error).__name__}: {error}")
            self._ranks.watch.report_failure(error)
            self._failed = True
        except Exception as error:
            if not out_of_memory(error):
                raise
            # The leader waits for the rest of a collective, and reports this as the reason.
            raise MemoryLimitError(f"{str(error).splitlines()[0]}; lower learner.micro_batch_tokens") from error
        return True

    # ---- commands

    def build(self, config: str, run: str, checkpoint: str) -> None:
        settings = from_tree(tomllib.loads(config), where="the leader's config")
        self._run = Path(run)
        self._ranks.watch.run = self._run
        self._output.log_to(self._run / "ranks" / f"{self._ranks.rank}.log")
        self._output.note(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} rank {self._ranks.rank} of {self._ranks.count}")
        begin = Path(checkpoint) if checkpoint else None
        self._adaptive_clip = run_adaptive_clip(settings)[0]
        self.context, self.engine = build_learner(
            settings,
            run_objective(settings),
            run_tokenizer(settings, begin),
            run=self._run,
            checkpoint=begin,
            ranks=self._ranks,
        )

    def generate(self, call: int, prompts: list[Prompt], options: GenerateOptions) -> None:
        assert self.engine is not None
        ranks = self.context.ranks
        sample_share(self.engine, self.context.policy.model, ranks, call=call, prompts=prompts, options=options)

    def send_weights(self, part: Part) -> None:
        for _ in whole_tensors(self.context.policy.model, part):
            pass

    def score(self, sequences: list[TokenSequence], temperature: float) -> None:
        logprobs(self.context.policy.model, sequences, temperature)

    def learn(self, groups: list[Group], step: int, clip: ClipRange) -> None:
        objective = clip.apply(self.context.objective, self._adaptive_clip)
        with self._ranks.clock.measure("learn"):
            learn(replace(self.context, objective=objective), groups, step=step)

    def exchange_usage(self) -> None:
        exchange_usage(self._ranks, self.context.policy.device)

    def fine_tune(self, sequences: list[TokenSequence], first: bool) -> None:
        if first:
            config = self.context.config
            self._tuner = FineTuner(self.context.policy, config.cold_start, config.learner, self.context.ranks)
        self._tuner.step(sequences)

    def adopt_weights(self) -> None:
        self.context.optimizer.adopt_weights()

    def load_reference(self) -> None:
        context = self.context
        reference = load_reference(self._run, context.config, context.objective, context.policy, self._ranks)
        self.context = replace(context, reference=reference)

    def gather_weights(self) -> None:
        for _ in whole_weights(self.context.policy, self._ranks):
            pass

    def write_shards(self, path: str) -> None:
        checkpoint.write_shards(Path(path), self.context.optimizer)

    def restore(self, path: str, updates: int) -> None:
        checkpoint.restore(Path(path), self.context.optimizer, updates)

    def set_rate_factor(self, factor: float) -> None:
        learner = self.context.config.learner
        self.context.optimizer.config = replace(learner, learning_rate=learner.learning_rate * factor)

    def reload_weights(self, path: str) -> None:
        reload_weights(self.context.policy, saved_model(self.context.config.model, Path(path)), self._ranks)
