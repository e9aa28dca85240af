"""Fixtures of the pre-flight tests: run some checks on a tiny recipe."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from examination import Examination, FixedRewards

from gspo import config as settings
from gspo.config import Config
from gspo.preflight.context import PreflightContext
from gspo.preflight.examine import CHECKS, run_checks


@pytest.fixture(autouse=True, scope="package")
def help_texts_are_parsed_once() -> Iterator[None]:
    """Every check of the settings parses the help texts from the source, which takes longer than most checks here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "field_docs", functools.cache(settings.field_docs))
        yield


@pytest.fixture
def examined() -> Any:
    """`examined(config, "data", ...)` runs these checks, in their usual order."""
    with ExitStack() as stack:

        def run(
            config: Config, *names: str, value: Callable[[int, int], float] | None = None, **parts: Any
        ) -> Examination:
            assert set(names) <= {c.name for c in CHECKS}
            context = PreflightContext(config=config, stack=stack, **parts)
            if value:
                context.rewards = FixedRewards(value)  # type: ignore[assignment]
            chosen = [c for c in CHECKS if c.name in names]
            return Examination(context, run_checks(context, chosen, show=lambda finding: None))

        yield run
