"""The training, held-out and evaluation sets, from files, the hub or generated tasks, ready to sample from.

In: the data settings, a tokenizer and the run's seed. Out: `Problems`. Invariants: the same settings, data and seed
give the same problems. No training problem duplicates a problem that is evaluated, whichever source either is from. An
error names the source, and a bad row by file and line, before anything expensive starts.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gspo.config import DataConfig, EvalSetConfig, MixConfig, ProblemsConfig, SourceConfig
from gspo.data.chat import check_template, render_all, uses_template
from gspo.data.order import Mixture
from gspo.data.sources import Row, read_file, read_hub
from gspo.data.task import Problem, Task, build_task, same_text
from gspo.errors import ConfigError, DataError
from gspo.types import Messages, Prompt

TEXT = "text: "
"""What precedes the text of a problem among its identities."""
_BAD_ROWS_SHOWN = 5
_LONGEST_TOKEN = 1000
"""Characters. A prompt that could only fit with longer tokens than this is refused without tokenizing it."""
_FIELD = re.compile(r"\{([^{}]+)\}")
_KEY = re.compile(rf"\bdata\.({'|'.join(f.name for f in (*fields(MixConfig), *fields(EvalSetConfig)))})\b")
_SET_SIZE = 256
"""Problems of an evaluation set that a task generates, unless the set has a size."""


@dataclass(frozen=True, kw_only=True)
class Problems:
    train: Sequence[Prompt]
    """The training problems, grouped by source."""
    held_out: Sequence[Prompt]
    sets: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)
    """The problems of `eval.sets`, by name."""
    skipped: int = 0
    """Number of bad rows that were skipped."""
    overlapping: int = 0
    """Number of training problems that were dropped because they duplicate one that is evaluated."""
    replaced: int = 0
    """How many of them a generated task replaced with other problems, so that none is missing."""

    @property
    def evaluated(self) -> tuple[Prompt, ...]:
        """The problems that are never trained on: held out, or in an evaluation set."""
        return (*self.held_out, *(prompt for prompts in self.sets.values() for prompt in prompts))

    @property
    def everything(self) -> tuple[Prompt, ...]:
        """All problems of the run."""
        return (*self.train, *self.evaluated)

    @property
    def crowded(self) -> str:
        """A warning if most training problems were dropped as duplicates of held-out ones; else empty."""
        found = self.overlapping + len(self.train)
        if self.overlapping <= found / 2:
            return ""
        return (
            f"{self.overlapping} of {found} training problems duplicate a held-out one and are dropped, so the "
            "training set differs in its mix from the held-out set; lower data.held_out, or use a task or file with "
            "more problems"
        )


def load_problems(
    config: DataConfig, tokenizer: Any, seed: int, sets: Mapping[str, EvalSetConfig] | None = None
) -> Problems:
    """All problems of a run: those of `[data]`, or of every source in `data.mix`, and those of `eval.sets`."""
    loaded = []
    for name, source in config.sources.items():
        with _errors_of(f"data.mix.{name}" if name else "data"):
            loaded.append(_load_source(source, tokenizer, name, f"{seed}/{name}" if name else seed))
    evaluated: dict[str, list[Prompt]] = {}
    skipped = sum(one.skipped for one in loaded)
    for name, one in (sets or {}).items():
        evaluated[name], bad = load_set(name, one, tokenizer, seed)
        skipped += bad
    problems = Problems(
        train=[p for one in loaded for p in one.train],
        held_out=[p for one in loaded for p in one.held_out],
        sets=evaluated,
        skipped=skipped,
        overlapping=sum(one.overlapping for one in loaded),
        replaced=sum(one.replaced for one in loaded),
    )
    # A single source has already removed the duplicates of its own held-out problems.
    return _without_duplicates(problems, list(config.sources)) if len(loaded) > 1 or evaluated else problems


def load_set(name: str, config: EvalSetConfig, tokenizer: Any, seed: int) -> tuple[list[Prompt], int]:
    """The problems of an evaluation set, and the number of bad rows."""
    with _errors_of(f"eval.sets.{name}"):
        _check_settings(config, tokenizer)
        if config.task:
            count = config.size or _SET_SIZE
            task = build_task(config.task, config.task_options)
            found = _distinct(task, random.Random(f"{seed}/task/eval/{name}"), count, frozenset())
            if found.too_few:
                raise DataError(
                    f"{_name(config)} has hardly more than {len(found.problems)} different problems, but the set has "
                    f"{count}; lower data.size"
                )
            return _from_task(found.problems, config, tokenizer, prefix=name, source=name)
        prompts, bad = _read(config, tokenizer, prefix=name, source=name)
        # Shuffled, because a file may be sorted by topic or difficulty.
        return _shuffled(prompts, f"{seed}/{name}")[: config.size] if config.size else prompts, bad


def identities(problem: Prompt | Problem) -> set[str]:
    """Two problems ask the same if they share one of these. Keys of different sources may never agree, so problems are
    compared by their texts, too."""
    content = problem.content if isinstance(problem, Prompt) else problem.prompt
    return {problem.key, f"{TEXT}{_text_key(content)}"}


def _without_duplicates(problems: Problems, names: Sequence[str]) -> Problems:
    """The problems of these sources, without training problems that another source or a set evaluates."""
    evaluated = set().union(*map(identities, problems.evaluated))
    kept = [p for p in problems.train if evaluated.isdisjoint(identities(p))]
    for name in names:
        if not any(p.source == name for p in kept):
            key = f"data.mix.{name}" if name else "data"
            raise DataError(
                f"{key}: every training problem is held out, or is in an evaluation set or the held-out problems of "
                "another source; lower data.held_out, or use other files"
            )
    return replace(problems, train=kept, overlapping=problems.overlapping + len(problems.train) - len(kept))


@contextmanager
def _errors_of(section: str) -> Iterator[None]:
    """Make errors name the keys of this section instead of those of `[data]`."""
    try:
        yield
    except (ConfigError, DataError) as error:
        if section == "data":
            raise
        text = _KEY.sub(rf"{section}.\1", str(error))
        raise type(error)(text if section in text else f"{section}: {text}") from None


def _read(config: ProblemsConfig, tokenizer: Any, *, prefix: str, source: str) -> tuple[list[Prompt], int]:
    """The prompts of a file or hub dataset, and the number of bad rows."""
    rows = read_file(config.path) if config.path else read_hub(config.hub, config=config.hub_config, split=config.split)
    name = config.path or f"data.hub={config.hub}"
    return _prompts(_parse_all(rows, config), config, tokenizer, name=name, prefix=prefix, source=source)


def _load_source(config: SourceConfig, tokenizer: Any, source: str, seed: int | str) -> Problems:
    """The problems of one source."""
    _check_settings(config, tokenizer)
    _check_held_out(config)
    if config.task:
        return _generated(config, tokenizer, source, seed)
    inside = f"{source}/" if source else ""
    name = config.path or f"data.hub={config.hub}"
    train, skipped = _read(config, tokenizer, prefix=f"{inside}train", source=source)
    if config.held_out_path:
        rows = read_file(config.held_out_path)
        held_out, more = _prompts(
            _parse_all(rows, config),
            config,
            tokenizer,
            name=config.held_out_path,
            prefix=f"{inside}held_out",
            source=source,
        )
        # Shuffled, because a file may be sorted by topic or difficulty.
        held_out = _shuffled(held_out, seed)[: config.held_out]
        return _split(train, held_out, skipped + more, name=name)
    if config.held_out >= len(train):
        raise DataError(
            f"{name}: data.held_out={config.held_out} leaves nothing to train on, there are {len(train)} usable rows; "
            "lower data.held_out or set data.held_out_path to a file of held-out problems"
        )
    return _split(train, _shuffled(train, seed)[: config.held_out], skipped, name=name)


def fresh_problems(
    config: ProblemsConfig, tokenizer: Any, seed: int, *, count: int, exclude: Collection[str] = ()
) -> list[Prompt]:
    """Problems of a generated task from a random stream that training does not use. None has one of the `identities` in
    `exclude`."""
    task = build_task(config.task, config.task_options)
    generated = _distinct(task, random.Random(f"{seed}/task/fresh"), count, frozenset(exclude))
    if generated.too_few:
        others = " other than those that the model was trained on and their duplicates" if exclude else ""
        raise DataError(
            f"{_name(config)} has hardly more than {len(generated.problems)} different problems{others}, fewer than "
            f"{count}; ask for fewer (--limit), or evaluate on other problems (--data)"
        )
    return _from_task(generated.problems, config, tokenizer, prefix="fresh", source="")[0]


def all_demonstrations(
    config: DataConfig, seed: int, *, exclude: Collection[str] = ()
) -> Iterator[tuple[str, SourceConfig, Problem]]:
    """Endless seeded stream of (source, its settings, problem) for a supervised cold start. Sources with demonstrations
    take turns by their weights. `exclude` holds the `identities` of the problems that are evaluated."""
    if not config.mix:
        yield from (("", config, problem) for problem in demonstrations(config, seed, exclude=exclude))
        return
    able = {
        name: source
        for name, source in config.mix.items()
        if source.task and build_task(source.task, source.task_options).has_demonstrations
    }
    if not able:
        raise ConfigError("cold_start.steps: no source in data.mix has demonstrations; set cold_start.steps=0")
    streams = [demonstrations(source, f"{seed}/{name}", exclude=exclude) for name, source in able.items()]
    mixture = Mixture([source.weight for source in able.values()])
    sources = list(able.items())
    for number in itertools.count():
        (turn,) = mixture.take(number, 1)
        yield (*sources[turn], next(streams[turn]))


def demonstrations(config: ProblemsConfig, seed: int | str, *, exclude: Collection[str] = ()) -> Iterator[Problem]:
    """Endless seeded stream of a task's problems. `exclude` holds the `identities` of the problems that are evaluated.
    Render a problem as in training: `render(with_instructions(problem.prompt, config), ...)`."""
    task = build_task(config.task, config.task_options)
    if not task.has_demonstrations:
        raise ConfigError(f"cold_start.steps: data.task={config.task} has no demonstrations; set cold_start.steps=0")
    return _demonstrations(task, config.task, seed, frozenset(exclude))


def with_instructions(content: str | Messages, config: ProblemsConfig) -> str | Messages:
    """A problem as the model sees it: with the system message before it and the instruction after it."""
    if config.instruction:
        content = _instructed(content, config.instruction)
    if not config.system:
        return content
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if messages[0]["role"] == "system":
        raise DataError("already begins with a system message; leave data.system empty")
    return [{"role": "system", "content": config.system}, *messages]


def _instructed(content: str | Messages, instruction: str) -> str | Messages:
    if isinstance(content, str):
        return f"{content}\n{instruction}"
    last = max((i for i, message in enumerate(content) if message["role"] == "user"), default=None)
    if last is None:
        raise DataError("no user message to put data.instruction after; leave data.instruction empty")
    message = {**content[last], "content": f"{content[last]['content']}\n{instruction}"}
    return [*content[:last], message, *content[last + 1 :]]


def _check_held_out(config: SourceConfig) -> None:
    if config.task and config.held_out_path:
        raise ConfigError("data.held_out_path: has no effect with data.task, which makes its own held-out problems")
    if config.held_out_path and not config.held_out:
        raise ConfigError("data.held_out_path: has no effect with data.held_out=0; raise data.held_out")


def _check_settings(config: ProblemsConfig, tokenizer: Any) -> None:
    if config.answer_after and (config.task or not config.answer_field):
        cause = "data.task" if config.task else "an empty data.answer_field"
        raise ConfigError(f"data.answer_after: has no effect with {cause}; leave it empty")
    if config.prompt_template:
        _check_template(config)
    solution = _solution_field(config)
    if solution == config.prompt_field and not config.prompt_template:
        raise ConfigError(f"data.solution_field: {solution!r} is data.prompt_field too; set one of them")
    if config.prompt_field == config.answer_field:
        raise ConfigError(f"data.answer_field: {config.answer_field!r} is data.prompt_field too; set one of them")
    if config.system and not uses_template(tokenizer, chat=config.chat):
        cause = "data.chat=no disables it" if config.chat == "no" else "the tokenizer has none"
        raise ConfigError(f"data.system: needs a chat template, but {cause}; leave data.system empty")
    check_template(tokenizer, chat=config.chat)


def _check_template(config: ProblemsConfig) -> None:
    if config.prompt_field != ProblemsConfig().prompt_field:
        raise ConfigError("data.prompt_field: has no effect with data.prompt_template; set one of them")
    names = _FIELD.findall(config.prompt_template)
    if not names:
        raise ConfigError("data.prompt_template: names no field; write fields in braces, for example {Body} {Question}")
    if config.answer_field in names:
        raise ConfigError(
            f"data.prompt_template: shows the model {{{config.answer_field}}}, which is data.answer_field; remove it"
        )
    if (solution := _solution_field(config)) in names:
        raise ConfigError(
            f"data.prompt_template: shows the model {{{solution}}}, which is data.solution_field; remove it"
        )


def _solution_field(config: ProblemsConfig) -> str:
    """The field with demonstrations; empty for an evaluation set, which nothing is trained on."""
    return config.solution_field if isinstance(config, SourceConfig) else ""


# ------------------------------------------------------------------------------------------------- rows to prompts


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A parsed row. With a fault it never becomes a prompt, but it keeps its index."""

    index: int
    where: str
    content: str | Messages = ""
    seen: str | Messages = ""
    """The content with instructions, as the model sees it."""
    key: str = ""
    columns: Mapping[str, Any]
    demonstration: str = ""
    fault: str = ""


class _BadRow(Exception):
    """Carries `field 'x': what; remedy`."""


def _parse_all(rows: Sequence[Row], config: ProblemsConfig) -> list[_Candidate]:
    return [_parse(row, config) for row in rows]


def _parse(row: Row, config: ProblemsConfig) -> _Candidate:
    try:
        if row.fault:
            raise _BadRow(row.fault)
        content = _filled(row.fields, config) if config.prompt_template else _content(row.fields, config.prompt_field)
        # Rewards receive a problem in a field called `prompt` as `prompts`, a parameter of every reward function.
        duplicate = "" if config.prompt_template or config.prompt_field != "prompt" else "prompt"
        columns = {k: v for k, v in row.fields.items() if k != duplicate}
        if config.answer_field:
            columns["answer"] = _answer(row.fields, config)
        candidate = _candidate(row.index, row.where, content, columns, config, key=_text_key(content))
        return replace(candidate, demonstration=_demonstration(row.fields, _solution_field(config)))
    except _BadRow as error:
        return _Candidate(index=row.index, where=row.where, columns={}, fault=str(error))


def _candidate(
    index: int, where: str, content: str | Messages, columns: Mapping[str, Any], config: ProblemsConfig, *, key: str
) -> _Candidate:
    try:
        seen = with_instructions(content, config)
    except DataError as error:
        raise _BadRow(f"field {config.prompt_field!r}: {error}") from None
    length = len(content) if isinstance(content, str) else sum(len(message["content"]) for message in content)
    # Tokenizing a text of many megabytes takes minutes, only to find that it does not fit.
    if length > _LONGEST_TOKEN * config.max_prompt_tokens:
        raise _BadRow(
            f"field {config.prompt_field!r}: {length} characters, which cannot be data.max_prompt_tokens="
            f"{config.max_prompt_tokens} tokens or fewer; raise that or shorten the prompt"
        )
    return _Candidate(index=index, where=where, content=content, seen=seen, key=key, columns=columns)


def _text_key(content: str | Messages) -> str:
    """Problems of a file are duplicates if their texts are the same."""
    return same_text(content if isinstance(content, str) else "\n".join(m["content"] for m in content))


def _content(fields: Mapping[str, Any], name: str) -> str | Messages:
    if name not in fields:
        raise _BadRow(f"field {name!r}: missing, the row has: {_names(fields)}; set data.prompt_field to the right one")
    content = fields[name]
    texts = [content] if isinstance(content, str) else _message_texts(content, name)
    if not any(text.strip() for text in texts):
        raise _BadRow(f"field {name!r}: empty; write the problem there or remove the row")
    _check_unicode("".join(texts), name)
    return content


def _check_unicode(text: str, name: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _BadRow(
            f"field {name!r}: half of a surrogate pair, which is not a character; fix its \\u escapes"
        ) from None


def _filled(fields: Mapping[str, Any], config: ProblemsConfig) -> str:
    """The template filled with the row's fields. Numbers become text; a row with any other type is bad."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in fields:
            raise _BadRow(f"field {name!r}: missing, the row has: {_names(fields)}; change data.prompt_template")
        if isinstance(fields[name], bool) or not isinstance(fields[name], str | int | float):
            raise _BadRow(f"field {name!r}: must be text or a number to fill data.prompt_template; fix it")
        return str(fields[name])

    text = _FIELD.sub(value, config.prompt_template)
    return str(_content({"data.prompt_template": text}, "data.prompt_template"))


def _message_texts(content: Any, name: str) -> list[str]:
    expected = "a list of {role, content} messages with text in both"
    if not isinstance(content, list):
        kind = "null" if content is None else f"{type(content).__name__} {content!r:.40}"
        raise _BadRow(f"field {name!r}: must be text or {expected}, not {kind}; fix it or set data.prompt_field")
    for number, message in enumerate(content, start=1):
        roles = [message.get("role"), message.get("content")] if isinstance(message, dict) else [None]
        if not all(isinstance(part, str) for part in roles):
            raise _BadRow(f"field {name!r}: message {number} is wrong, it must be {expected}; fix it")
    if content and content[-1]["role"] == "assistant":
        raise _BadRow(f"field {name!r}: ends with an assistant message; remove what the model is supposed to write")
    return [message["content"] for message in content]


def _answer(fields: Mapping[str, Any], config: ProblemsConfig) -> Any:
    name = config.answer_field
    mark = config.answer_after
    answer = fields.get(name)
    if answer is None:
        state = "null" if name in fields else f"missing, the row has: {_names(fields)}"
        raise _BadRow(f"field {name!r}: {state}; set data.answer_field to the right one, or to '' if there is none")
    if mark:
        if not isinstance(answer, str) or mark not in answer:
            raise _BadRow(f"field {name!r}: does not contain {mark!r}; fix it or set data.answer_after")
        answer = answer.rpartition(mark)[2].strip()
    if isinstance(answer, str) and not answer.strip():
        raise _BadRow(f"field {name!r}: empty{f' after {mark!r}' if mark else ''}; write the answer or remove the row")
    return answer


def _demonstration(fields: Mapping[str, Any], name: str) -> str:
    """The text of a demonstration; empty if the row has none."""
    value = fields.get(name) if name else None
    if (
        isinstance(value, list)
        and len(value) == 1
        and isinstance(value[0], dict)
        and value[0].get("role") == "assistant"
    ):
        value = value[0].get("content")
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _BadRow(
            f"field {name!r}: must be text, or a list with one assistant message, not {type(value).__name__} "
            f"{value!r:.40}; fix it or set data.solution_field"
        )
    _check_unicode(value, name)
    return value if value.strip() else ""


def _names(fields: Mapping[str, Any]) -> str:
    return ", ".join(fields) or "no fields"


def _prompts(
    candidates: Sequence[_Candidate], config: ProblemsConfig, tokenizer: Any, *, name: str, prefix: str, source: str
) -> tuple[list[Prompt], int]:
    """Prompts of the good rows, and the number of bad rows. Bad rows are an error unless `on_bad_row` is `skip`."""
    usable = [c for c in candidates if not c.fault]
    rendered = iter(render_all([c.seen for c in usable], tokenizer, chat=config.chat))
    prompts: list[Prompt] = []
    faults: list[str] = []
    for c in candidates:
        outcome = c.fault or _prompt(c, next(rendered), config, prefix, source)
        if isinstance(outcome, Prompt):
            prompts.append(outcome)
        else:
            faults.append(f"{c.where}: {outcome}")
    if not prompts:
        raise DataError(f"{name}: no usable row, all {len(faults)} are bad; the first: {faults[0]}")
    if faults and config.on_bad_row == "error":
        raise DataError(_bad_rows(faults))
    return prompts, len(faults)


def _prompt(
    c: _Candidate, rendered: tuple[str, tuple[int, ...]] | DataError, config: ProblemsConfig, prefix: str, source: str
) -> Prompt | str:
    field = f"field {config.prompt_field!r}"
    if isinstance(rendered, DataError):
        return f"{field}: {rendered}; fix the messages or the model's chat template, or change data.system or data.chat"
    text, token_ids = rendered
    if not token_ids:
        return f"{field}: the tokenizer produces no tokens for it; use another tokenizer or remove the row"
    if len(token_ids) > config.max_prompt_tokens:
        return (
            f"{field}: {len(token_ids)} tokens, more than data.max_prompt_tokens={config.max_prompt_tokens}; "
            "raise that or shorten the prompt"
        )
    # The row's number in its file, so ids do not change if other rows are skipped.
    id_ = f"{prefix}/{c.index}"
    return Prompt(
        id=id_,
        content=c.content,
        text=text,
        token_ids=token_ids,
        key=c.key,
        source=source,
        columns=c.columns,
        demonstration=c.demonstration,
    )


def _bad_rows(faults: list[str]) -> str:
    shown_faults = faults[:_BAD_ROWS_SHOWN]
    more = len(faults) - len(shown_faults)
    remedy = "set data.on_bad_row=skip to skip them"
    last = f"and {more} more bad rows; {remedy}" if more else remedy
    return "\n".join([f"{len(faults)} bad row{'s' if len(faults) > 1 else ''}:", *shown_faults, last])


# ------------------------------------------------------------------------------------------------- held out


def _shuffled(prompts: Sequence[Prompt], seed: int | str) -> list[Prompt]:
    """A seeded shuffle. A larger held-out set contains every smaller one."""
    order = list(prompts)
    random.Random(f"{seed}/held_out").shuffle(order)
    return order


def _split(train: list[Prompt], held_out: list[Prompt], skipped: int, *, name: str) -> Problems:
    """Remove the held-out prompts and their duplicates from the training rows."""
    ids = {p.id for p in held_out}
    keys = {p.key for p in held_out}
    remaining = [p for p in train if p.id not in ids]
    kept = [p for p in remaining if p.key not in keys]
    if not kept:
        raise DataError(
            f"{name}: every training prompt is also held out; lower data.held_out, use other files, or set "
            "data.prompt_template if fields other than the prompt tell the problems apart"
        )
    return Problems(train=kept, held_out=held_out, skipped=skipped, overlapping=len(remaining) - len(kept))


# ------------------------------------------------------------------------------------------------- generated


@dataclass(frozen=True, kw_only=True)
class _GeneratedProblems:
    """Problems from a random stream."""

    problems: list[Problem]
    excluded: int
    """Number of problems that were dropped because their keys are excluded."""
    too_few: bool
    """Whether the task has hardly any other problems."""


def _generated(config: SourceConfig, tokenizer: Any, source: str, seed: int | str) -> Problems:
    task = build_task(config.task, config.task_options)
    if task.unique_problems is not None and config.task_size + config.held_out > task.unique_problems:
        raise DataError(_too_few(config, f"at most {task.unique_problems} different problems"))
    # Held-out problems are generated first and from their own stream, so that they do not change with data.task_size.
    held_out = _distinct(task, random.Random(f"{seed}/task/held_out"), config.held_out, frozenset())
    if held_out.too_few:
        raise DataError(_too_few(config, f"hardly more than {len(held_out.problems)} different problems"))
    keys = frozenset(problem.key for problem in held_out.problems)
    train = _distinct(task, random.Random(f"{seed}/task/train"), config.task_size, keys)
    if train.too_few:
        others = " other than duplicates of held-out ones" if keys else ""
        raise DataError(_too_few(config, f"hardly more than {len(train.problems)} different problems{others}"))
    inside = f"{source}/" if source else ""
    evaluated, bad = (
        _from_task(held_out.problems, config, tokenizer, prefix=f"{inside}held_out", source=source) if keys else ([], 0)
    )
    trained, more = _from_task(train.problems, config, tokenizer, prefix=f"{inside}train", source=source)
    return Problems(
        train=trained,
        held_out=evaluated,
        skipped=bad + more,
        overlapping=train.excluded,
        replaced=train.excluded,
    )


def _distinct(task: Task, rng: random.Random, size: int, exclude: frozenset[str]) -> _GeneratedProblems:
    """`size` different problems, none with a key in `exclude`."""
    problems: list[Problem] = []
    seen: set[str] = set()
    excluded = misses = 0
    while len(problems) < size:
        problem = task.generate(rng)
        # Problems with different prompts may share a key, and may all be trained on.
        new = problem.prompt not in seen
        seen.add(problem.prompt)
        if new and exclude.isdisjoint(identities(problem)):
            problems.append(problem)
            misses = 0
            continue
        excluded += new
        misses += 1
        # With uniform sampling even the last unseen problem turns up within this many attempts (all but e^-20).
        if misses > 1000 + 20 * len(seen):
            return _GeneratedProblems(problems=problems, excluded=excluded, too_few=True)
    return _GeneratedProblems(problems=problems, excluded=excluded, too_few=False)


def _name(config: ProblemsConfig) -> str:
    options = ", ".join(f"{k}={v}" for k, v in config.task_options.items())
    return f"data.task={config.task}{f' with {options}' if options else ''}"


def _too_few(config: SourceConfig, limit: str) -> str:
    return (
        f"{_name(config)} has {limit}, but data.task_size={config.task_size} and data.held_out={config.held_out} "
        "ask for more; lower them, or change data.task_options"
    )


def _from_task(
    problems: Sequence[Problem], config: ProblemsConfig, tokenizer: Any, *, prefix: str, source: str
) -> tuple[list[Prompt], int]:
    candidates = [
        _candidate(i, f"{config.task}: row {i + 1}", p.prompt, {**p.columns, "answer": p.answer}, config, key=p.key)
        for i, p in enumerate(problems)
    ]
    return _prompts(candidates, config, tokenizer, name=f"data.task={config.task}", prefix=prefix, source=source)


def _demonstrations(task: Task, name: str, seed: int | str, exclude: frozenset[str]) -> Iterator[Problem]:
    rng = random.Random(f"{seed}/task/demonstrations")
    seen: set[str] = set()
    misses = 0
    while misses <= 1000 + 20 * len(seen):
        problem = task.generate(rng)
        if not exclude.isdisjoint(identities(problem)):
            seen.add(problem.prompt)
            misses += 1
            continue
        misses = 0
        yield problem
    raise DataError(f"data.task={name}: every problem is held out, so there are no demonstrations; lower data.held_out")
