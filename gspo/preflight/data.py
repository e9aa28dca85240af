"""The data: files, fields, counts, bad rows, overlap, prompt lengths.

In: the context. Out: findings, and the problems of the run. Invariant: rows and fields are checked even without a
tokenizer (a model that does not load); a placeholder tokenizer takes its place.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from gspo.config import ProblemsConfig
from gspo.contamination import contaminated, texts_of
from gspo.data.problems import Problems, identities, load_problems
from gspo.errors import DataError
from gspo.model.load import position_limit
from gspo.preflight.context import PreflightContext
from gspo.preflight.findings import Finding, fail, note, ok, warning
from gspo.preflight.machine import pluralize
from gspo.types import Prompt

SHOWN = 5
"""Contaminated problems that are shown."""
EXCERPT = 80
MANY = 0.05
"""Above this fraction, skipped rows are a warning."""


class RowTokenizer:
    """Placeholder where only rows and fields are checked: any prompt is one token."""

    chat_template = "any"
    eos_token_id = None

    def apply_chat_template(self, chat: Sequence[Any], **options: Any) -> str:
        return "\n".join(
            message["content"] if isinstance(message["content"], str) else json.dumps(message["content"])
            for message in chat
        )

    def __call__(self, texts: str | Sequence[str], **options: Any) -> dict[str, Any]:
        # One token, so that no prompt is empty and none is too long.
        return {"input_ids": [0] if isinstance(texts, str) else [[0] for _ in texts]}


def check_data(context: PreflightContext) -> Iterator[Finding]:
    config = context.config
    tokenizer = context.tokenizer or RowTokenizer()
    context.problems = problems = load_problems(config.data, tokenizer, config.seed, config.eval.sets)
    for name, section in config.data.sources.items():
        train = [p for p in problems.train if p.source == name]
        held_out = sum(p.source == name for p in problems.held_out)
        yield ok(
            f"{f'{name}: ' if name else ''}{_place(section)}: {pluralize(len(train), 'training problem')}, {held_out} "
            f"held out; rewards receive the fields {_fields(train)}.",
            **({"source": name} if name else {}),
            train=len(train),
            held_out=held_out,
            answers=sum("answer" in p.columns for p in train),
            skipped=problems.skipped,
            overlapping=problems.overlapping,
        )
    for name, prompts in problems.sets.items():
        yield ok(
            f"Evaluation set {name}: {_place(config.eval.sets[name])}: {pluralize(len(prompts), 'problem')}; rewards "
            f"receive the fields {_fields(prompts)}.",
            set=name,
            problems=len(prompts),
        )
    yield from _dropped(context, problems, tokenizer)
    for name in config.data.sources:
        yield from _repeated(context, problems, name)
    yield from _held_out(context, problems)


def check_contamination(context: PreflightContext) -> Iterator[Finding]:
    """Whether the training problems contain those of the benchmarks that were named."""
    assert context.problems is not None
    if not context.suites:
        yield ok("Not compared with benchmarks; --suite names those to compare with.")
        return
    training = texts_of(set().union(*map(identities, context.problems.train)))
    for source in context.suites:
        problems = source.problems()
        found = contaminated([p.problem for p in problems], training)
        of = f"{len(found)} of the {pluralize(len(problems), 'problem')} of {source.suite.title}"
        numbers: dict[str, Any] = {"suite": source.name, "contaminated": len(found), "problems": len(problems)}
        if not found:
            yield ok(
                f"The training data contains none of the {len(problems)} problems of {source.suite.title}.", **numbers
            )
            continue
        shown = [f"{source.name}/{i}: {problems[i].problem[:EXCERPT]}" for i in found[:SHOWN]]
        yield warning(
            f"The training data contains {of}.",
            f"Remove them from the training data. 'gspo eval --suite {source.name}' excludes them for its models.",
            detail=[" ".join(line.split()) for line in shown],
            **numbers,
        )


def _place(section: ProblemsConfig) -> str:
    return section.path or (f"hub data set {section.hub}" if section.hub else f"task {section.task}")


def _fields(prompts: Sequence[Prompt]) -> str:
    return ", ".join(sorted(set().union(*(p.columns for p in prompts)))) or "none"


def _dropped(context: PreflightContext, problems: Problems, tokenizer: Any) -> Iterator[Finding]:
    rows = len(problems.everything) + problems.skipped
    if problems.skipped:
        level = warning if problems.skipped > MANY * rows else note
        yield level(
            f"{problems.skipped} of {rows} rows are bad and will be skipped (data.on_bad_row = skip).",
            "Look at the first of them below: the cause may be a wrong field name or limit, which is easy to fix.",
            detail=_first_errors(context, tokenizer),
            skipped=problems.skipped,
        )
    if problems.crowded:
        what, _, do = problems.crowded.partition("; ")
        yield warning(f"{what}.", f"{do.capitalize()}.", overlapping=problems.overlapping)
    elif removed := problems.overlapping - problems.replaced:
        yield note(
            f"{removed} training problems duplicate a held-out problem"
            f"{' or one of an evaluation set' if problems.sets else ''} and will be dropped.",
            overlapping=problems.overlapping,
        )


def _first_errors(context: PreflightContext, tokenizer: Any) -> list[str]:
    # Loading again, strictly, is the simplest way to get the messages.
    data = context.config.data
    mix = {name: dataclasses.replace(source, on_bad_row="error") for name, source in data.mix.items()}
    sets = {name: dataclasses.replace(one, on_bad_row="error") for name, one in context.config.eval.sets.items()}
    try:
        load_problems(dataclasses.replace(data, on_bad_row="error", mix=mix), tokenizer, context.config.seed, sets)
    except DataError as error:
        return str(error).splitlines()[1:4]
    return []


def _repeated(context: PreflightContext, problems: Problems, source: str) -> Iterator[Finding]:
    config = context.config
    texts = [p.text for p in problems.train if p.source == source]
    count = len(texts)
    where = f"{source}: " if source else ""
    # By text: rows may differ in their answers and still be the same question.
    text, times = Counter(texts).most_common(1)[0]
    if times > 1:
        copies = count - len(set(texts))
        yield note(
            f"{where}{pluralize(copies, 'training row')} {'repeats' if copies == 1 else 'repeat'} the prompt of "
            f"another row; the most common one occurs {times} times.",
            detail=[excerpt(text)],
            repeated=copies,
        )
    mix = config.data.mix
    share = mix[source].weight / sum(s.weight for s in mix.values()) if source else 1.0
    prompts = config.rollout.prompts * share
    if prompts > count:
        yield warning(
            f"{where}A step samples {prompts:g} prompts, but there are only {count}: a step contains the same "
            "prompt several times.",
            f"Set rollout.prompts to at most {int(count / share)}, or add problems.",
        )
    elif config.steps:
        visits = config.steps * prompts / count
        yield ok(f"{where}{config.steps} steps of {prompts:.4g} prompts visit each problem {visits:.2g} times.")


def _held_out(context: PreflightContext, problems: Problems) -> Iterator[Finding]:
    held_out = [("held-out problems", "data.held_out", len(problems.held_out))] if context.config.eval.every else []
    sets = [(f"problems of {name}", f"eval.sets.{name}.size", len(found)) for name, found in problems.sets.items()]
    for what, key, count in (*held_out, *sets):
        if 0 < count < 100:
            # Half-width of the 95 % interval of a proportion, which is widest at 50 %.
            points = 100 * 1.96 * math.sqrt(0.25 / count)
            yield note(
                f"With {count} {what}, an accuracy of 50 % is known only to ±{points:.0f} points.",
                f"Raise {key} to detect smaller gains.",
            )


def check_lengths(context: PreflightContext) -> Iterator[Finding]:
    assert context.problems is not None
    prompts = context.problems.everything
    lengths = sorted(len(p.token_ids) for p in prompts)
    limit = max(section.max_prompt_tokens for section in context.config.problem_sections.values())
    completion = context.config.rollout.max_tokens
    longest = max(prompts, key=lambda p: len(p.token_ids))
    yield ok(
        f"The median prompt has {statistics.median(lengths):g} tokens and the longest {lengths[-1]} "
        f"(data.max_prompt_tokens = {limit}).",
        median=statistics.median(lengths),
        longest=lengths[-1],
    )
    yield from _unknown(context, prompts)
    positions = position_limit(context.skeleton) if context.skeleton is not None else None
    if positions is not None and lengths[-1] + completion > positions:
        yield fail(
            f"Prompt {longest.id} has {lengths[-1]} tokens; with rollout.max_tokens = {completion} it exceeds the "
            f"model's {positions} positions.",
            f"Set rollout.max_tokens to at most {positions - lengths[-1]}, or data.max_prompt_tokens = "
            f"{max(1, positions - completion)} with data.on_bad_row = skip.",
            positions=positions,
        )
    elif positions is not None:
        yield ok(
            f"The longest prompt and a completion of {completion} tokens fit the model's {positions} positions.",
            positions=positions,
        )


def _unknown(context: PreflightContext, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Prompts with characters that the tokenizer has no token for."""
    unknown = getattr(context.tokenizer, "unk_token_id", None)
    # Byte-level tokenizers have no unknown token, and lose nothing.
    lost = [p for p in prompts if unknown is not None and unknown in p.token_ids]
    if lost:
        yield warning(
            f"{len(lost)} of {len(prompts)} prompts contain characters that are not in the tokenizer's vocabulary; the "
            "model cannot see them.",
            "Use a tokenizer that covers them, or clean the data.",
            detail=[excerpt(lost[0].text)],
            unknown=len(lost),
        )


def excerpt(text: str, limit: int = 400) -> str:
    """Text on one line; the middle of a long text is omitted."""
    line = text.replace("\n", "⏎")
    return line if len(line) <= limit else f"{line[: limit // 2]} … {line[-limit // 2 :]}"
