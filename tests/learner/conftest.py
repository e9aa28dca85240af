"""Fixtures of the learner tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from replay_cases import GradientRecorder

from gspo.config import Config
from gspo.step import RunContext


@pytest.fixture
def double_parts(parts_of: Any) -> Callable[[Config], RunContext]:
    """Components in float64 with an optimizer that records gradients and changes nothing."""

    def build(config: Config) -> RunContext:
        parts = parts_of(config)
        parts.policy.model.double()
        parts.policy.model.set_experts_implementation("eager")
        return replace(parts, optimizer=GradientRecorder(parts.policy.model))

    return build
