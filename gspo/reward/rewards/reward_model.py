"""The value that a sequence-classification reward model gives the completion. See docs/rewards.md.

The model is a Hugging Face one (`path`), loaded once in a worker of its own, or an endpoint with vLLM's API for pooling
models (`url` and `model`; `api` is `"classify"` or `"pooling"`). It sees the prompt and the completion as a chat. The
reward is `scale * value + shift`, through a sigmoid if `sigmoid` is set. A model with several labels needs `label`.
What the endpoint causes leaves the completion unscored. A chat of more than `max_length` tokens is truncated.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gspo.errors import ConfigError
from gspo.reward.completion_text import completion_text
from gspo.reward.endpoint import Endpoint, EndpointError, Unavailable, ask_once_each, sendable
from gspo.reward.function import NotedFailure, NotedScore, RunFacts
from gspo.reward.judge_prompt import without_control
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
    "columns": {},
    "options": {"url": "http://127.0.0.1:8000", "model": "reward-model"},
}
NAME = "reward_model"
WHERE = f"reward.options.{NAME}"
APIS = ("classify", "pooling")
BATCH = 8
"""Default of the option."""
USAGE = ServiceUsage()
Value = NotedScore | Exception


def _service(options: Mapping[str, Any]) -> Service:
    return Service(at_once=int(options.get("batch", BATCH)), merge=is_remote(options))


TRAITS = RewardTraits(service=_service, foreign_code=lambda options: foreign_code(NAME, options), may_change=MAY_CHANGE)


def score(
    prompts: list[Any],
    completions: list[Any],
    *,
    path: str = "",
    url: str = "",
    model: str = "",
    key_env: str = "",
    api: str = "classify",
    batch: int = BATCH,
    max_length: int = 0,
    label: int = -1,
    scale: float = 1.0,
    shift: float = 0.0,
    sigmoid: bool = False,
    retries: int = 4,
    limit_s: float = 0.0,
    cache: str = "run",
    cache_mb: int = 64,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    **columns: Any,
) -> list[Value]:
    options = {k: v for k, v in locals().items() if k not in ("prompts", "completions", "columns")}
    if not completions:
        return []
    texts = [sendable(completion_text(c)) for c in completions]
    values = _model(options).values(prompts, texts)
    return [v if isinstance(v, Exception) else NotedScore(_scaled(v, options), *v.notes) for v in values]


def check(**given: Any) -> None:
    """Reject invalid options before the run starts."""
    options = with_defaults(score, given)
    checks = OptionChecks(WHERE, options, given)
    checks.backend()
    checks.only("url", "api", "retries", "limit_s", "cache", "cache_mb")
    checks.only("path", "max_length")
    checks.one_of("api", APIS)
    for name, least in (("batch", 1), ("max_length", 0), ("label", -1), ("retries", 0), ("cache_mb", 1)):
        checks.whole(name, least)
    for name in ("scale", "shift"):
        checks.number(name)
    if not options["scale"]:
        raise ConfigError(f"{WHERE}.scale: 0 would give every completion the same reward; set another number")
    checks.number("limit_s", 0.0)
    checks.text("cache")
    checks.flag("sigmoid")


def about(**options: Any) -> str:
    """Which model scores."""
    return f"{options['model']} at {options['url']}" if is_remote(options) else str(options["path"])


def start(facts: RunFacts, **options: Any) -> None:
    """Connect to the endpoint or load the model, in the reward model's own worker."""
    model = _build(with_defaults(score, options), facts)
    model.check()
    _models[_key(with_defaults(score, options))] = model


def _scaled(value: float, options: Mapping[str, Any]) -> float:
    scaled: float = options["scale"] * value + options["shift"]
    if not options["sigmoid"]:
        return scaled
    # In two branches: the exponential of a large number overflows.
    return 1 / (1 + math.exp(-scaled)) if scaled >= 0 else math.exp(scaled) / (1 + math.exp(scaled))


def _labeled(values: Sequence[float], label: int) -> float:
    """The value of the chosen label, or of the only one."""
    if label < 0 and len(values) != 1:
        raise ValueError(f"the model has {len(values)} labels; set label to the index of the one to use")
    if label >= len(values):
        raise ValueError(f"label {label}: the model has {len(values)} labels; their indices begin at 0")
    return float(values[max(label, 0)])


class _RemoteModel:
    """Asks an endpoint, several requests at a time."""

    def __init__(self, facts: RunFacts, options: Mapping[str, Any]) -> None:
        self._timeout_s = facts.timeout_s
        # Half of the time, so that a request that hangs is retried once.
        self._limit_s = options["limit_s"] or facts.timeout_s / 2
        self._options = options
        self._url: str = options["url"].rstrip("/")
        # Activations are off: a softmax over a single label would always give 1.
        self._body = {"model": options["model"], "add_generation_prompt": False, "use_activation": False}
        self._endpoint = Endpoint(options["url"], where=WHERE, key_env=options["key_env"], retries=options["retries"])
        directory = cache_directory(options["cache"], facts)
        self._cache = ScoreCache(directory, NAME, most_bytes=options["cache_mb"] << 20)

    def check(self) -> None:
        self._endpoint.check(self._body["model"], "/v1/models")

    def values(self, prompts: Sequence[Any], texts: Sequence[str]) -> list[Value]:
        bodies = [
            {**self._body, "messages": _chat(prompt, without_control(text))}
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        keys = [cache_key(NAME, self._url, self._options["api"], self._options["label"], body) for body in bodies]
        # Completions of a group are often the same. One request scores all of them.
        items = {key: (key, body) for key, body in zip(keys, bodies, strict=True)}
        USAGE.add(cached=len(texts) - len(items))
        return [
            NotedFailure(str(value), "unavailable" if isinstance(value, Unavailable) else "refused")
            if isinstance(value, EndpointError)
            else value
            for value in ask_once_each(items, keys, self._one, concurrency=self._options["batch"])
        ]

    def _one(self, item: tuple[str, dict[str, Any]]) -> NotedScore:
        key, body = item
        if found := self._cache.get(key):
            USAGE.add(cached=1)
            return NotedScore(found.value)
        began = time.monotonic()
        answered = self._endpoint.post(
            f"/{self._options['api']}",
            body,
            until=began + self._timeout_s,
            limit_s=self._limit_s,
        )
        found = self._cache.put(key, CachedScore(value=self._read(answered.value)))
        seconds = time.monotonic() - began
        USAGE.add(requests=1, retries=answered.retries, seconds=seconds, not_cached=bool(self._cache.failure))
        return NotedScore(found.value)

    def _read(self, answer: Any) -> float:
        """The value in a response of vLLM: `probs` of /classify, `data` of /pooling, which may be one per token."""
        try:
            entry = answer["data"][0]
            values = entry["probs"] if self._options["api"] == "classify" else entry["data"]
            # A model that scores each token: the last one counts.
            values = values[-1] if isinstance(values[-1], list) else values
            numbers = [float(v) for v in values]
        except (KeyError, IndexError, TypeError, ValueError):
            raise EndpointError(f"{self._url}/{self._options['api']}: its answer holds no value of the model") from None
        value = _labeled(numbers, self._options["label"])
        if not math.isfinite(value):
            raise EndpointError(f"{self._url}/{self._options['api']}: its value is not a finite number")
        return value


class _OwnModel:
    """A Hugging Face model in this process. Batches depend on the prompt's completions alone."""

    def __init__(self, facts: RunFacts, options: Mapping[str, Any]) -> None:
        from gspo.reward.local_model import LocalClassifier

        self._options = options
        self._model = LocalClassifier(
            options["path"],
            max_length=options["max_length"],
            where=WHERE,
            dtype=options["dtype"],
            device=options["device"],
            trust_remote_code=options["trust_remote_code"],
        )

    def check(self) -> None:
        try:
            _labeled([0.0] * self._model.labels, self._options["label"])
        except ValueError as error:
            raise ConfigError(f"{WHERE}.label: {error}") from None

    def values(self, prompts: Sequence[Any], texts: Sequence[str]) -> list[Value]:
        control = self._model.control
        rows = [self._model.ids(p, without_control(t, control)) for p, t in zip(prompts, texts, strict=True)]
        size = self._options["batch"]
        began = time.monotonic()
        found = [
            logits
            for at in range(0, len(rows), size)
            for logits in self._model.logits([ids for ids, _ in rows[at : at + size]])
        ]
        USAGE.add(requests=len(rows), seconds=time.monotonic() - began)
        return [
            NotedScore(_labeled(logits, self._options["label"]), *(("truncated",) if truncated else ()))
            for logits, (_, truncated) in zip(found, rows, strict=True)
        ]


def _chat(prompt: Any, completion: str) -> list[dict[str, Any]]:
    chat = [{"role": "user", "content": sendable(prompt)}] if isinstance(prompt, str) else list(prompt)
    return [*chat, {"role": "assistant", "content": completion}]


_models: dict[str, _RemoteModel | _OwnModel] = {}
"""By their options: built when the worker starts."""


def _model(options: Mapping[str, Any]) -> _RemoteModel | _OwnModel:
    if _key(options) not in _models:  # called without a worker
        _models[_key(options)] = _build(options, RunFacts(timeout_s=60.0))
    return _models[_key(options)]


def _build(options: Mapping[str, Any], facts: RunFacts) -> _RemoteModel | _OwnModel:
    return (_RemoteModel if is_remote(options) else _OwnModel)(facts, options)


def _key(options: Mapping[str, Any]) -> str:
    return json.dumps(dict(options), sort_keys=True)
