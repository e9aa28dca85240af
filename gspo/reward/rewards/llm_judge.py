"""A language model grades the completion, from 0 (worst) to 1 (best). See docs/rewards.md.

The judge is an OpenAI-compatible endpoint (`url` and `model`, with the key in the environment variable that `key_env`
names) or a Hugging Face causal model (`path`). It gets `template` with the row's `{prompt}`, `{answer}` and other
fields and the fenced `{completion}`, at temperature 0, and ends its reply with "Score: N" on `scale`, or with "Verdict:
yes". A judge that cannot decide abstains. A reply without a grade is asked for once more and then leaves the completion
unscored, and so does everything that the endpoint causes. A completion of more than `max_chars` characters gets 0.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.errors import ConfigError
from gspo.reward.completion_text import completion_text
from gspo.reward.endpoint import Endpoint, EndpointError, Unavailable, ask_once_each, sendable
from gspo.reward.function import NotedFailure, NotedScore, RunFacts
from gspo.reward.judge_prompt import (
    REMINDER,
    Scale,
    Unparsable,
    check_template,
    fields_of,
    prompt_text,
    question,
    read_scale,
    verdict,
)
from gspo.reward.score_cache import CachedScore, ScoreCache, cache_key
from gspo.reward.service_options import (
    MAY_CHANGE,
    OptionChecks,
    cache_directory,
    foreign_code,
    is_remote,
    with_defaults,
)
from gspo.reward.service_usage import ServiceUsage
from gspo.reward.traits import RewardTraits, Service

EXAMPLE: dict[str, Any] = {
    "completion": "Paris is the capital of France.",
    "columns": {"answer": "Paris"},
    "options": {"url": "http://127.0.0.1:8000/v1", "model": "judge"},
}
NAME = "llm_judge"
WHERE = f"reward.options.{NAME}"
CONCURRENCY = 8
"""Default of the option."""
USAGE = ServiceUsage()
Value = NotedScore | None | Exception


def _service(options: Mapping[str, Any]) -> Service:
    return Service(at_once=int(options.get("concurrency", CONCURRENCY)), merge=is_remote(options))


TRAITS = RewardTraits(service=_service, foreign_code=lambda options: foreign_code(NAME, options), may_change=MAY_CHANGE)


def score(
    prompts: list[Any],
    completions: list[Any],
    *,
    url: str = "",
    model: str = "",
    key_env: str = "",
    path: str = "",
    template: str = "",
    scale: Sequence[float] | str = (0, 10),
    max_tokens: int = 512,
    max_chars: int = 100_000,
    concurrency: int = CONCURRENCY,
    retries: int = 4,
    limit_s: float = 0.0,
    cache: str = "run",
    cache_mb: int = 64,
    extra: Mapping[str, Any] | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    **columns: Any,
) -> list[Value]:
    options = {k: v for k, v in locals().items() if k not in ("prompts", "completions", "columns")}
    if not completions:
        return []
    rows = [
        _Row(
            prompt=prompt_text(prompts[i]),
            completion=sendable(completion_text(completions[i])),
            columns={name: values[i] for name, values in columns.items()},
        )
        for i in range(len(completions))
    ]
    return _judge(options).grade(rows)


def check(**given: Any) -> None:
    """Reject invalid options before the run starts."""
    options = with_defaults(score, given)
    checks = OptionChecks(WHERE, options, given)
    checks.backend()
    checks.only("url", "extra", "retries", "limit_s")
    for name, least in (("max_tokens", 1), ("max_chars", 1), ("concurrency", 1), ("retries", 0), ("cache_mb", 1)):
        checks.whole(name, least)
    checks.number("limit_s", 0.0)
    checks.text("cache")
    check_template(options["template"], WHERE)
    read_scale(options["scale"], WHERE)
    extra = options["extra"]
    if extra is not None and (not isinstance(extra, Mapping) or {"messages", "model", "stream", "n"} & set(extra)):
        raise ConfigError(f"{WHERE}.extra: must be a table of further fields of a request, none of messages, model, n")


def about(**options: Any) -> str:
    """Who judges."""
    return f"judge {options['model']} at {options['url']}" if is_remote(options) else f"judge {options['path']}"


def columns_read(template: str = "", **options: Any) -> frozenset[str]:
    """The columns of the data that the template names."""
    return fields_of(template)


def start(facts: RunFacts, **options: Any) -> None:
    """Connect to the endpoint or load the model, in the judge's own worker."""
    judge = _build(with_defaults(score, options), facts)
    judge.check()
    _judges[_key(with_defaults(score, options))] = judge


@dataclass(frozen=True, kw_only=True)
class _Row:
    """What is graded."""

    prompt: str
    completion: str
    columns: Mapping[str, Any]


class _Judge:
    """Grades completions; what asks the model is in the subclasses."""

    control: frozenset[str] = frozenset()

    def __init__(self, facts: RunFacts, options: Mapping[str, Any]) -> None:
        self._timeout_s = facts.timeout_s
        self._template: str = options["template"]
        self._scale: Scale = read_scale(options["scale"], WHERE)
        self._max_tokens: int = options["max_tokens"]
        self._max_chars: int = options["max_chars"]
        self._at_once: int = options["concurrency"]
        directory = cache_directory(options["cache"], facts)
        self._cache = ScoreCache(directory, NAME, most_bytes=options["cache_mb"] << 20)

    def check(self) -> None:
        """Raise an error if the model cannot be asked."""

    def grade(self, rows: Sequence[_Row]) -> list[Value]:
        raise NotImplementedError

    def _chat(self, row: _Row) -> list[dict[str, str]]:
        asked = question(
            self._template,
            self._scale,
            prompt=row.prompt,
            completion=row.completion,
            columns=row.columns,
            control=self.control,
        )
        return [{"role": "user", "content": sendable(asked)}]

    def _again(self, chat: Sequence[dict[str, str]], reply: str) -> list[dict[str, str]]:
        """The chat that asks for a reply with a grade."""
        return [
            *chat,
            {"role": "assistant", "content": sendable(reply) or "(nothing)"},
            {"role": "user", "content": REMINDER.replace("{form}", self._scale.form)},
        ]

    def _read(self, reply: str, *, truncated: bool) -> CachedScore:
        """The meaning of a reply. The last line of a truncated one may lack its last digit."""
        if truncated:
            return CachedScore(kind="unparsable")
        try:
            value = verdict(reply, self._scale)
        except Unparsable:
            return CachedScore(kind="unparsable")
        return CachedScore(kind="abstained") if value is None else CachedScore(value=value)

    def _value(self, found: CachedScore) -> Value:
        if found.kind == "abstained":
            return None
        if found.kind == "unparsable":
            return NotedFailure(
                f"two replies of the judge did not end with {self._scale.form}, within {self._max_tokens} tokens "
                "(max_tokens)",
                "unparsable",
            )
        return NotedScore(found.value)


class _RemoteJudge(_Judge):
    """Asks an endpoint, several requests at a time."""

    def __init__(self, facts: RunFacts, options: Mapping[str, Any]) -> None:
        super().__init__(facts, options)
        self._url: str = options["url"].rstrip("/")
        # Half of the time, so that a request that hangs is retried once.
        self._limit_s = options["limit_s"] or facts.timeout_s / 2
        self._body = {"model": options["model"], "temperature": 0, **dict(options["extra"] or {})}
        if "max_completion_tokens" not in self._body:
            self._body["max_tokens"] = self._max_tokens
        self._endpoint = Endpoint(options["url"], where=WHERE, key_env=options["key_env"], retries=options["retries"])

    def check(self) -> None:
        self._endpoint.check(self._body["model"])

    def grade(self, rows: Sequence[_Row]) -> list[Value]:
        chats = [self._chat(row) for row in rows]
        scale = [self._scale.low, self._scale.high, self._scale.yes_no]
        keys = [cache_key(NAME, self._url, self._body, chat, scale) for chat in chats]
        # Completions of a group are often the same. One request grades all of them.
        items = {key: (key, row, chat) for key, row, chat in zip(keys, rows, chats, strict=True)}
        USAGE.add(cached=len(rows) - len(items))
        return [
            NotedFailure(str(value), "unavailable" if isinstance(value, Unavailable) else "refused")
            if isinstance(value, EndpointError)
            else value
            for value in ask_once_each(items, keys, self._grade_one, concurrency=self._at_once)
        ]

    def _grade_one(self, item: tuple[str, _Row, list[dict[str, str]]]) -> Value:
        key, row, chat = item
        if len(row.completion) > self._max_chars:
            return NotedScore(0.0, "too_long")
        until = time.monotonic() + self._timeout_s
        if found := self._cache.get(key):
            USAGE.add(cached=1)
            return self._value(found)
        began = time.monotonic()
        reply, truncated = self._ask(chat, until)
        found = self._read(reply, truncated=truncated)
        if found.kind == "unparsable":
            USAGE.add(retries=1)
            reply, truncated = self._ask(self._again(chat, reply), until)
            found = self._read(reply, truncated=truncated)
        found = self._cache.put(key, found)
        USAGE.add(requests=1, seconds=time.monotonic() - began, not_cached=bool(self._cache.failure))
        return self._value(found)

    def _ask(self, chat: Sequence[dict[str, str]], until: float) -> tuple[str, bool]:
        body = {**self._body, "messages": list(chat)}
        answered = self._endpoint.post("/chat/completions", body, until=until, limit_s=self._limit_s)
        USAGE.add(retries=answered.retries)
        try:
            choice = answered.value["choices"][0]
            reply = choice["message"]["content"] or ""
            if not isinstance(reply, str):
                raise TypeError
        except (KeyError, IndexError, TypeError):
            shape = "its answer is not a chat completion (choices[0].message.content)"
            raise EndpointError(f"{self._url}/chat/completions: {shape}") from None
        return reply, choice.get("finish_reason") == "length"


class _OwnJudge(_Judge):
    """Asks a Hugging Face model in this process, in batches that depend on the prompt's completions alone."""

    def __init__(self, facts: RunFacts, options: Mapping[str, Any]) -> None:
        from gspo.reward.local_model import LocalJudge, identity

        super().__init__(facts, options)
        self._identity = [*identity(options["path"]), options["dtype"]]
        self._model = LocalJudge(
            options["path"],
            max_tokens=self._max_tokens,
            where=WHERE,
            dtype=options["dtype"],
            device=options["device"],
            trust_remote_code=options["trust_remote_code"],
        )
        self.control = self._model.control

    def grade(self, rows: Sequence[_Row]) -> list[Value]:
        chats = [self._chat(row) for row in rows]
        values: list[Value] = [self._unfit(row, chat) for row, chat in zip(rows, chats, strict=True)]
        fit = [i for i, value in enumerate(values) if value is None]
        for at in range(0, len(fit), self._at_once):
            batch = fit[at : at + self._at_once]
            try:
                graded: Sequence[Value] = self._grade_batch([chats[i] for i in batch])
            except TimeoutError as error:
                graded = [error] * len(batch)
            for i, value in zip(batch, graded, strict=True):
                values[i] = value
        return values

    def _unfit(self, row: _Row, chat: Sequence[dict[str, str]]) -> Value:
        """0 for a completion that is too long for the judge; a failure if the rest of the question is."""
        if len(row.completion) <= self._max_chars and self._fits(chat):
            return None
        empty = _Row(prompt=row.prompt, completion="", columns=row.columns)
        if self._fits(self._chat(empty)):
            return NotedScore(0.0, "too_long")
        return ValueError(
            f"the question is longer than the judge's {self._model.limit} positions, even without completion"
        )

    def _fits(self, chat: Sequence[dict[str, str]]) -> bool:
        return self._model.fits(self._model.ids(chat))

    def _grade_batch(self, chats: Sequence[list[dict[str, str]]]) -> list[Value]:
        keys = [cache_key(NAME, self._identity, self._max_tokens, chat, self._scale.form) for chat in chats]
        found = [score for key in keys if (score := self._cache.get(key))]
        if len(found) == len(keys):
            USAGE.add(cached=len(keys))
        else:
            began = time.monotonic()
            # The whole batch, because the rounding of a reply may depend on the others in its batch.
            graded = self._ask(chats)
            found = [self._cache.put(key, score) for key, score in zip(keys, graded, strict=True)]
            seconds = time.monotonic() - began
            USAGE.add(requests=len(keys), seconds=seconds, not_cached=len(keys) * bool(self._cache.failure))
        return [self._value(score) for score in found]

    def _ask(self, chats: Sequence[list[dict[str, str]]]) -> list[CachedScore]:
        until = time.monotonic() + self._timeout_s
        replies = self._model.replies([self._model.ids(chat) for chat in chats], until=until)
        graded = [self._read(reply.text, truncated=reply.truncated) for reply in replies]
        unclear = [i for i, found in enumerate(graded) if found.kind == "unparsable"]
        again = {i: self._model.ids(self._again(chats[i], replies[i].text)) for i in unclear}
        again = {i: ids for i, ids in again.items() if self._model.fits(ids)}
        USAGE.add(retries=len(again))
        if again:
            for i, reply in zip(again, self._model.replies(list(again.values()), until=until), strict=True):
                graded[i] = self._read(reply.text, truncated=reply.truncated)
        return graded


_judges: dict[str, _Judge] = {}
"""By their options: built when the judge's worker starts."""


def _judge(options: Mapping[str, Any]) -> _Judge:
    if _key(options) not in _judges:  # called without a worker
        _judges[_key(options)] = _build(options, RunFacts(timeout_s=60.0))
    return _judges[_key(options)]


def _build(options: Mapping[str, Any], facts: RunFacts) -> _Judge:
    return (_RemoteJudge if is_remote(options) else _OwnJudge)(facts, options)


def _key(options: Mapping[str, Any]) -> str:
    return json.dumps(dict(options), sort_keys=True)
