"""Responses in the form of OpenAI's API.

In: completions and log-probs. Out: JSON values. Invariant: a log-prob of a response is always the model's own, at
temperature 1, except in `generated`, which has those that the tokens were sampled with.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any

from gspo.environment.tool_calls import ToolCall
from gspo.serving.token_logprobs import TokenLogprobs
from gspo.types import Completion, StopReason

Texts = Callable[[Sequence[int]], list[str]]
"""The text of each token."""
EMPTY = Completion(prompt_id="", sample=0, token_ids=(), text="", logp_sampler=(), stop=StopReason.LENGTH, version=0)
"""The completion of a request for no tokens."""


def finish_reason(stop: StopReason) -> str:
    """OpenAI's name of a stop reason."""
    return "length" if stop is StopReason.LENGTH else "stop"


def before_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string."""
    return text[: min((at for s in stop if (at := text.find(s)) >= 0), default=len(text))]


def usage(prompts: Sequence[Sequence[int]], done: Sequence[Sequence[Completion]]) -> dict[str, int]:
    """The numbers of tokens."""
    prompt = sum(map(len, prompts))
    sampled = sum(len(c.token_ids) for group in done for c in group)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def completion_choice(index: int, text: str, stop: StopReason, logprobs: Any) -> dict[str, Any]:
    """A choice of `/v1/completions`."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason(stop)}


def completion(model: str, choices: list[dict[str, Any]], used: dict[str, int]) -> dict[str, Any]:
    """The response of `/v1/completions`."""
    return _response("cmpl", "text_completion", model, choices, used)


def chat(model: str, choices: list[dict[str, Any]], used: dict[str, int]) -> dict[str, Any]:
    """The response of `/v1/chat/completions`."""
    return _response("chatcmpl", "chat.completion", model, choices, used)


def _response(
    prefix: str, kind: str, model: str, choices: list[dict[str, Any]], used: dict[str, int]
) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(datetime.now().timestamp()),
        "model": model,
        "choices": choices,
        "usage": used,
    }


def calling_message(content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """A message that calls tools."""
    made = [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            # As ASCII: a model can write half of a surrogate pair, which no response can contain.
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in calls
    ]
    return {"role": "assistant", "content": content or None, "refusal": None, "tool_calls": made}


def completion_logprobs(shown: Sequence[int], scored: TokenLogprobs, texts: Texts, *, top: int) -> dict[str, Any]:
    """The log-probs of the last `shown` tokens of a sequence, as `/v1/completions` has them."""
    first = len(scored.logp) + 1 - len(shown)
    text_of = _texts_of(shown, scored, max(0, first - 1), texts)
    logp: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for at, token in enumerate(shown, first):
        if at == 0:  # no token comes before the first one
            logp.append(None)
            tops.append(None)
            continue
        own = scored.logp[at - 1]
        logp.append(own)
        found: dict[str, float] = {}
        # Several tokens may have the same text. The most likely one counts.
        for other, value in scored.top[at - 1]:
            found.setdefault(text_of[other], value)
        found.setdefault(text_of[token], own)
        tops.append(found)
    tokens = [text_of[token] for token in shown]
    return {
        "tokens": tokens,
        "token_logprobs": logp,
        "top_logprobs": tops if top else None,
        "text_offset": [0, *accumulate(map(len, tokens))][:-1],
    }


def chat_logprobs(ids: Sequence[int], scored: TokenLogprobs, texts: Texts) -> dict[str, Any]:
    """The log-probs of a completion, as `/v1/chat/completions` has them."""
    first = len(scored.logp) - len(ids)
    text_of = _texts_of(ids, scored, first, texts)
    content = []
    for token, own, best in zip(ids, scored.logp[first:], scored.top[first:], strict=True):
        tops = [_entry(text_of[other], value) for other, value in best]
        content.append({**_entry(text_of[token], own), "top_logprobs": tops})
    return {"content": content, "refusal": None}


def _texts_of(ids: Sequence[int], scored: TokenLogprobs, first: int, texts: Texts) -> dict[int, str]:
    """The text of every token that a response names."""
    used = sorted({*ids, *(token for best in scored.top[first:] for token, _ in best)})
    return dict(zip(used, texts(used), strict=True))


def _entry(text: str, logp: float) -> dict[str, Any]:
    return {"token": text, "logprob": logp, "bytes": list(text.encode("utf-8", "replace"))}


def generated(completions: Sequence[Completion]) -> dict[str, Any]:
    """The response of `/inference/v1/generate`, in the form of vLLM."""
    choices = []
    for i, one in enumerate(completions):
        content = [
            {"token": f"token_id:{token}", "logprob": value, "top_logprobs": []}
            for token, value in zip(one.token_ids, one.logp_sampler, strict=True)
        ]
        choices.append(
            {
                "index": i,
                "token_ids": list(one.token_ids),
                "logprobs": {"content": content},
                "finish_reason": finish_reason(one.stop),
            }
        )
    return {"request_id": secrets.token_hex(16), "choices": choices}


def chunks(body: dict[str, Any], *, usage: bool) -> Iterator[dict[str, Any]]:
    """A response as the chunks of a stream: one with all of a choice, and one with the reason why it ended."""
    chat = body["object"] == "chat.completion"
    shared = {key: body[key] for key in ("id", "created", "model")}
    shared["object"] = "chat.completion.chunk" if chat else "text_completion"
    for choice in body["choices"]:
        part = {"index": choice["index"], "logprobs": choice["logprobs"], "finish_reason": None}
        end = {"index": choice["index"], "logprobs": None, "finish_reason": choice["finish_reason"]}
        if chat:
            delta = {key: value for key, value in choice["message"].items() if value is not None}
            for i, call in enumerate(delta.get("tool_calls", ())):
                call["index"] = i
            part["delta"], end["delta"] = delta, {}
        else:
            part["text"], end["text"] = choice["text"], ""
        yield {**shared, "choices": [part]}
        yield {**shared, "choices": [end]}
    if usage:
        yield {**shared, "choices": [], "usage": body["usage"]}
