"""A benchmark: where its problems come from, how a model is asked, and how its answers are scored.

In: rows in the published schema. Out: problems. Invariant: a suite is one file in `published/` that defines `SUITE`;
nothing else names it. Every part of a protocol that changes a score is a field of `Suite`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo.data.chat import render_all, uses_template
from gspo.data.sources import Row, check_file, read_file, read_hub
from gspo.data.task import same_text
from gspo.errors import ConfigError, DataError
from gspo.suites import suite_names
from gspo.suites.fields import Fields
from gspo.suites.scorers import Scorer
from gspo.types import Messages, Prompt


@dataclass(frozen=True, kw_only=True)
class SuiteProblem:
    """One problem of a benchmark."""

    problem: str
    """Its own text, without the instructions of the protocol."""
    prompt: str
    """What the user message says."""
    columns: Mapping[str, Any]
    """What the reward function reads."""
    breakdown: Mapping[str, str] = field(default_factory=dict)
    """Columns by which results are broken down, such as the level."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A benchmark with its protocol."""

    title: str
    schema: str
    """The fields of a row."""
    count: int
    """Problems in the published benchmark; `0` if it grows with each release."""
    hub: str = ""
    """Dataset on the hub; empty if it can only be given as a file."""
    hub_config: str = ""
    split: str = "test"
    system: str = ""
    """System message. A model without a chat template reads it before the problem."""
    samples: int
    """Completions per problem."""
    temperature: float
    """`0` is greedy decoding."""
    top_p: float = 1.0
    max_tokens: int
    ks: tuple[int, ...] = (1,)
    """Values of k for pass@k."""
    scorer: Scorer
    read: Callable[[Fields], SuiteProblem | None]
    """The problem of a row; None if the row is not part of the benchmark."""
    source: str
    """Where the protocol was published."""


def find_suite(name: str) -> Suite:
    """The suite in `published/NAME.py`."""
    if name not in suite_names():
        raise ConfigError(f"--suite: no suite {name!r}; there are: {', '.join(suite_names())}")
    found: Suite = importlib.import_module(f"gspo.suites.published.{name}").SUITE
    return found


@dataclass(frozen=True, kw_only=True)
class SuiteSource:
    """A suite and where its problems come from, as the command line names them: `NAME` or `NAME=FILE`."""

    name: str
    file: str
    suite: Suite

    @classmethod
    def parse(cls, text: str) -> SuiteSource:
        name, _, file = text.partition("=")
        suite = find_suite(name)
        if not file and not suite.hub:
            raise ConfigError(
                f"--suite: {name} is not a plain dataset on the hub; download its file, then: --suite {name}=FILE"
            )
        if "=" in text and not file:
            raise ConfigError(f"--suite: no file after {text!r}; write --suite {name}=FILE")
        if file:
            check_file(file)  # before a model is loaded, or other checks are made
        return cls(name=name, file=file, suite=suite)

    def data_settings(self) -> dict[str, Any]:
        """The `[data]` table that names the same problems."""
        if self.file:
            return {"path": self.file}
        suite = self.suite
        return {"hub": suite.hub, "split": suite.split} | ({"hub_config": suite.hub_config} if suite.hub_config else {})

    def problems(self) -> list[SuiteProblem]:
        """All problems, in order."""
        suite = self.suite
        rows = read_file(self.file) if self.file else self._from_hub()
        found = [problem for row in rows if (problem := suite.read(Fields(row, suite.schema))) is not None]
        if not found:
            raise DataError(f"{self.file or suite.hub}: has no problem of {suite.title}; give the whole benchmark")
        return found

    def _from_hub(self) -> list[Row]:
        suite = self.suite
        try:
            return read_hub(suite.hub, config=suite.hub_config, split=suite.split)
        except DataError as error:
            reason = str(error).removeprefix(f"data.hub={suite.hub}: ").partition("; check data.hub")[0]
            raise DataError(
                f"--suite {self.name}: {suite.hub}: {reason}; download the file, then: --suite {self.name}=FILE"
            ) from None


def prompts_of(source: SuiteSource, problems: Sequence[SuiteProblem], tokenizer: Any) -> list[Prompt]:
    """The problems as the model sees them."""
    contents = [_content(source.suite.system, problem, tokenizer) for problem in problems]
    prompts = []
    for number, (problem, content, rendered) in enumerate(
        zip(problems, contents, render_all(contents, tokenizer, chat="auto"), strict=True)
    ):
        if isinstance(rendered, DataError):
            raise DataError(f"--suite {source.name}: problem {number + 1}: {rendered}")
        text, token_ids = rendered
        prompts.append(
            Prompt(
                id=f"{source.name}/{number}",
                content=content,
                text=text,
                token_ids=token_ids,
                key=same_text(problem.problem),
                columns=problem.columns,
            )
        )
    return prompts


def _content(system: str, problem: SuiteProblem, tokenizer: Any) -> str | Messages:
    if not system:
        return problem.prompt
    if not uses_template(tokenizer, chat="auto"):
        return f"{system}\n\n{problem.prompt}"
    return [{"role": "system", "content": system}, {"role": "user", "content": problem.prompt}]
