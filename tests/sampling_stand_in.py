"""A sampling process that is a few objects in this process, with a seeded schedule of delays.

Everything but the pipes is that of the real one: the files with weights, the JSON of every message, and the code that
builds the model and samples. Tests that use it start in a second, and `test_asynchronous.py` compares it with the real
process.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import orjson
import pytest
from torch import Tensor

from gspo.collection.sampler import Sampler
from gspo.errors import EngineError
from gspo.ranks.codec import convert, encode
from gspo.rollout.sampling_process import Sampled, SamplingProcess
from gspo.step import learn
from gspo.types import Completion


class StandIn(SamplingProcess):
    """`SamplingProcess` without a process."""

    delays = random.Random(0)
    longest_s = 0.0
    loaded: ClassVar[list[tuple[str, dict[str, Tensor]]]] = []
    """For every call, its random stream and the weights that it sampled from."""
    _sampler: Sampler | None = None

    @property
    def reports_routes(self) -> bool:
        self.start()
        assert self._sampler is not None
        return self._sampler.engine.reports_routes

    def start(self) -> None:
        if self._sampler is None:
            self._sampler = Sampler()
            self._folder = Path(tempfile.mkdtemp(prefix="gspo-test-weights-"))
            self._sampler.build(**{key: value for key, value in self._start.items() if key != "command"})

    def _sample(self, name: str, command: Mapping[str, Any], count: int) -> list[list[Completion]]:
        sampler = self._sampler
        if sampler is None:
            raise EngineError("the sampling process was closed")
        sampler.load(name, str(self._file(name)))
        extensions = command.get("extensions")
        streams = {command["options"].stream} if extensions is None else {e.stream for e in extensions}
        weights = {k: w.clone() for k, w in sampler.policy.model.named_parameters()}
        self.loaded += [(stream, weights) for stream in sorted(streams)]
        time.sleep(self.delays.uniform(0, self.longest_s))
        sent = orjson.loads(encode(command))
        called = getattr(sampler, sent.pop("command"))
        answer: Sampled = convert(Sampled, orjson.loads(encode(called(**sent))))
        assert answer.weights == name
        self.decoded += answer.decoded
        return [list(group) for group in answer.completions]

    def end_conversations(self, conversations: Sequence[str]) -> None:
        if self._sampler is not None:
            self._sampler.end_conversations(list(conversations))

    def stop(self) -> None:
        self._sampler = None
        super().stop()


def stand_in(patch: pytest.MonkeyPatch, *, seed: int = 0, longest_s: float = 0.0) -> None:
    """Sample in this process, with random delays of at most `longest_s` before sampling and before training."""
    delays = random.Random(seed)

    def delayed(*arguments: Any, **options: Any) -> Any:
        time.sleep(delays.uniform(0, longest_s))
        return learn(*arguments, **options)

    patch.setattr(StandIn, "delays", random.Random(-seed))
    patch.setattr(StandIn, "longest_s", longest_s)
    patch.setattr(StandIn, "loaded", [])
    patch.setattr("gspo.build.SamplingProcess", StandIn)
    patch.setattr("gspo.loop.learn", delayed)
