"""Requests of OpenAI's API, and of the one with tokens in and out, as typed records.

In: the JSON of a request. Out: a record. Invariant: a field that would change the completions and is not supported is
an error that names it. Fields that change nothing, such as `user`, are ignored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gspo.types import Messages, Sampling

MOST_COMPLETIONS = 1024
"""Completions of one request."""
MOST_TOP = 20
"""Most likely tokens of one position."""
_LARGEST = 2**31
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"}
    | {"prompt_cache_key", "prompt_cache_retention"}
)
"""Fields that change nothing here."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "suffix": ("",),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "add_generation_prompt": (True,),
    "skip_special_tokens": (True,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "modalities": (["text"],),
}
"""Fields that are accepted only with the value that changes nothing."""
NO_VARIABLES = frozenset(
    {"conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize", "return_dict"}
)
"""Arguments that look like variables of the chat template. A template of the client could keep the server busy."""


class ApiError(Exception):
    """A request that cannot be served."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def as_data(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every request says about its completions."""

    n: int
    max_tokens: int | None
    """The limit on the tokens of a completion; None if the request has none."""
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    min_tokens: int
    seed: int | None

    def sampling(self, max_tokens: int) -> Sampling:
        """The settings for the engine."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop,
            min_tokens=min(self.min_tokens, max_tokens),
        )


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """`/v1/completions`."""

    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    options: Options
    echo: bool
    logprobs: int | None
    """How many of the most likely tokens are wanted; None if no log-probs are."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """`/v1/chat/completions`."""

    model: str
    messages: Messages
    tools: list[dict[str, Any]]
    template_options: Mapping[str, Any]
    """Variables for the chat template, such as `enable_thinking`."""
    options: Options
    logprobs: int | None


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """`/inference/v1/generate`."""

    model: str
    token_ids: tuple[int, ...]
    options: Options
    stop_ids: frozenset[int]


class _Fields:
    """The fields of a JSON object, each taken once."""

    def __init__(self, data: Any, place: str = "") -> None:
        if not isinstance(data, dict):
            raise ApiError(f"{place.rstrip('.') or 'the request'} must be a JSON object")
        self._left = dict(data)
        self._place = place

    def take(self, name: str) -> Any:
        """The value of a field; None if it is missing."""
        return self._left.pop(name, None)

    def error(self, name: str, message: str) -> ApiError:
        return ApiError(f"{self._place}{name}: {message}", param=f"{self._place}{name}")

    def integer(self, name: str, default: Any, *, low: int, high: int = _LARGEST) -> Any:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"must be an integer from {low} to {high}")
        return value

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(name, "must be a number")
        if not low <= value <= high:
            raise self.error(name, f"must be from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return bool(value)

    def check_stream(self) -> None:
        """Raise for wrong values of the fields that say how the response is sent, which are for the server."""
        options = self.take("stream_options")
        if options is not None and not isinstance(options, dict):
            raise self.error("stream_options", "must be an object")
        self.flag("stream")

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str) or not value:
            raise self.error(name, "must be text")
        return value

    def end(self) -> None:
        """Raise for a field that nobody took and that may change the completions."""
        for name, value in self._left.items():
            if name not in IGNORED and value is not None and value not in NEUTRAL.get(name, ()):
                raise ApiError(
                    f"{self._place}{name}: not supported here"
                    + (f" with this value: {value!r:.80}" * (name in NEUTRAL)),
                    param=f"{self._place}{name}",
                    code="unsupported_parameter",
                )


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a request."""
    try:
        text = body.decode()
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise ApiError("the request is not valid JSON") from None
    if _SURROGATE.search(text):
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ApiError("the request contains half of a surrogate pair, which is no character") from None
    if not isinstance(data, dict):
        raise ApiError("the request must be a JSON object")
    return data


def completion_request(data: Mapping[str, Any]) -> CompletionRequest:
    """Read a request to `/v1/completions`."""
    fields = _Fields(data)
    logprobs = fields.integer("logprobs", None, low=0, high=MOST_TOP)
    echo = fields.flag("echo")
    best_of = fields.integer("best_of", None, low=1)
    request = CompletionRequest(
        model=fields.text("model"),
        prompts=_prompts(fields),
        options=_options(fields, default_tokens=16, least_tokens=0 if echo else 1),
        echo=echo,
        logprobs=logprobs,
    )
    fields.check_stream()
    if best_of not in (None, request.options.n):
        raise fields.error("best_of", "not supported here; leave it out, and choose among n yourself")
    if len(request.prompts) * request.options.n > MOST_COMPLETIONS:
        raise fields.error("n", f"a request may ask for {MOST_COMPLETIONS} completions; split it")
    fields.end()
    return request


def chat_request(data: Mapping[str, Any]) -> ChatRequest:
    """Read a request to `/v1/chat/completions`."""
    fields = _Fields(data)
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", None, low=0, high=MOST_TOP)
    if top is not None and not wanted:
        raise fields.error("top_logprobs", "needs logprobs = true")
    tools = _tools(fields)
    options = fields.take("chat_template_kwargs") or {}
    if not isinstance(options, dict) or options.keys() & NO_VARIABLES:
        raise fields.error("chat_template_kwargs", "must be an object with variables of the chat template")
    request = ChatRequest(
        model=fields.text("model"),
        messages=_messages(fields),
        tools=tools,
        template_options=options,
        options=_options(fields, default_tokens=None, least_tokens=1),
        logprobs=(top or 0) if wanted else None,
    )
    fields.check_stream()
    fields.end()
    return request


def generate_request(data: Mapping[str, Any]) -> GenerateRequest:
    """Read a request to `/inference/v1/generate`."""
    fields = _Fields(data)
    inner = _Fields(fields.take("sampling_params") or {}, "sampling_params.")
    stop_ids = inner.take("stop_token_ids") or []
    if not _is_tokens(stop_ids):
        raise inner.error("stop_token_ids", "must be a list of token ids")
    inner.integer("logprobs", None, low=0, high=MOST_TOP)
    # Text is not part of the response, so it does not matter which of its tokens would be in it.
    inner.take("skip_special_tokens")
    # The experts are reported for no token.
    inner.take("routed_experts_prompt_start")
    token_ids = fields.take("token_ids")
    if not _is_tokens(token_ids) or not token_ids:
        raise fields.error("token_ids", "must be a list of at least one token id")
    for name in ("cache_salt", "priority", "request_id"):
        fields.take(name)
    request = GenerateRequest(
        model=fields.text("model"),
        token_ids=tuple(token_ids),
        options=_options(inner, default_tokens=None, least_tokens=1),
        stop_ids=frozenset(stop_ids),
    )
    inner.end()
    fields.end()
    return request


def _options(fields: _Fields, *, default_tokens: int | None, least_tokens: int) -> Options:
    """The options that all requests share."""
    limit = fields.integer("max_tokens", default_tokens, low=least_tokens)
    limit = fields.integer("max_completion_tokens", limit, low=least_tokens)
    top_k = fields.integer("top_k", 0, low=-1)
    stop = fields.take("stop")
    stop = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stop, list) or len(stop) > 16 or not all(isinstance(s, str) for s in stop):
        raise fields.error("stop", "must be text, or a list of at most 16 texts")
    # An empty text is in every text; no client means that.
    texts = tuple(dict.fromkeys(s for s in stop if s))
    if any("\ufffd" in text for text in texts):
        raise fields.error("stop", "contains U+FFFD, which stands for invalid bytes")
    return Options(
        n=fields.integer("n", 1, low=1, high=MOST_COMPLETIONS),
        max_tokens=limit,
        temperature=fields.number("temperature", 1.0, low=0, high=100),
        top_p=fields.number("top_p", 1.0, low=0, high=1),
        top_k=max(0, top_k),
        stop=texts,
        min_tokens=fields.integer("min_tokens", 0, low=0),
        seed=fields.integer("seed", None, low=-(2**63), high=2**63),
    )


def _prompts(fields: _Fields) -> tuple[str | tuple[int, ...], ...]:
    """A text, tokens, or a list of either."""
    prompt = fields.take("prompt")
    if isinstance(prompt, str):
        return (prompt,)
    if _is_tokens(prompt) and prompt:
        return (tuple(prompt),)
    if isinstance(prompt, list) and prompt and all(isinstance(p, str) or (_is_tokens(p) and p) for p in prompt):
        return tuple(p if isinstance(p, str) else tuple(p) for p in prompt)
    raise fields.error("prompt", "must be text, a list of token ids, or a list of either")


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(t) is int and 0 <= t < _LARGEST for t in value)


def _messages(fields: _Fields) -> Messages:
    """Messages with their content as text, as chat templates expect it."""
    messages = fields.take("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.error("messages", "must be a list of at least one message")
    return [_message(fields, i, message) for i, message in enumerate(messages)]


def _message(fields: _Fields, i: int, message: Any) -> dict[str, Any]:
    place = f"messages[{i}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise fields.error(place, "must be an object with a role")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise fields.error(f"{place}.content", "only parts of type text are supported")
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise fields.error(f"{place}.content", "must be text")
    read = {key: value for key, value in message.items() if value is not None} | {"content": content or ""}
    # Chat templates know the roles of before; this one has the same meaning.
    read["role"] = "system" if message["role"] == "developer" else message["role"]
    if "tool_calls" in read:
        if not isinstance(read["tool_calls"], list):
            raise fields.error(f"{place}.tool_calls", "must be a list")
        read["tool_calls"] = [_call(fields, f"{place}.tool_calls", call) for call in read["tool_calls"]]
    return read


def _call(fields: _Fields, place: str, call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object. Chat templates write that as the model would."""
    try:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        if not isinstance(function["name"], str) or not isinstance(arguments, dict):
            raise ValueError
    except (KeyError, TypeError, ValueError, RecursionError):
        raise fields.error(place, "must be calls of functions, with a JSON object as arguments") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(fields: _Fields) -> list[dict[str, Any]]:
    tools = fields.take("tools") or []
    if not isinstance(tools, list) or not all(isinstance(t, dict) and t.get("type") == "function" for t in tools):
        raise fields.error("tools", "must be a list of functions")
    if not all(isinstance(t.get("function"), dict) and isinstance(t["function"].get("name"), str) for t in tools):
        raise fields.error("tools", "every function needs a name")
    choice = fields.take("tool_choice")
    if choice not in (None, "auto", "none"):
        raise fields.error("tool_choice", 'only "auto" and "none" are supported')
    return [] if choice == "none" else tools
