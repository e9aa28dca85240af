"""From a problem to what the model reads: the only code that touches chat templates.

In: prompts as text or chat messages, and a tokenizer. Out: for each, the text the model sees and its token ids.
Invariant: special tokens are added exactly once (by the template, or by the tokenizer for raw text), and a prompt never
ends in the end token, because the reply has yet to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from gspo.errors import ConfigError, DataError
from gspo.types import Messages

Chat = Literal["auto", "yes", "no"]
Rendered = tuple[str, tuple[int, ...]]


def render(content: str | Messages, tokenizer: Any, *, chat: Chat) -> Rendered:
    """The text the model sees and its token ids. Raises `DataError` if the chat template refuses the messages."""
    rendered = render_all([content], tokenizer, chat=chat)[0]
    if isinstance(rendered, DataError):
        raise rendered
    return rendered


def render_all(contents: Sequence[str | Messages], tokenizer: Any, *, chat: Chat) -> list[Rendered | DataError]:
    """`render` for many prompts in a few tokenizer calls; what the template refuses comes back as its error."""
    template = uses_template(tokenizer, chat=chat)
    chats = {i: _messages(c) for i, c in enumerate(contents) if template or not isinstance(c, str)}
    if chats and not template:
        raise ConfigError(_no_template(tokenizer, chat))
    results: dict[int, Rendered | DataError] = {}
    texts = dict(zip(chats, _templated(list(chats.values()), tokenizer), strict=True))
    results.update({i: text for i, text in texts.items() if isinstance(text, DataError)})
    good = {i: text for i, text in texts.items() if isinstance(text, str)}
    results.update(_tokenized(good, tokenizer, special=False))
    raw = {i: c for i, c in enumerate(contents) if i not in chats and isinstance(c, str)}
    results.update(_tokenized(raw, tokenizer, special=True))
    return [results[i] for i in range(len(contents))]


def token_ids_of(texts: Sequence[str], tokenizer: Any, *, chat: Chat) -> list[tuple[int, ...]]:
    """The token ids of texts that `render` gave, by the same rule."""
    special = not uses_template(tokenizer, chat=chat)
    done = _tokenized(dict(enumerate(texts)), tokenizer, special=special)
    return [done[i][1] for i in range(len(texts))]


def uses_template(tokenizer: Any, *, chat: Chat) -> bool:
    """Whether text prompts are wrapped in the tokenizer's chat template."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat == "yes" and not has_template:
        raise ConfigError("data.chat=yes: the tokenizer has no chat template; set data.chat=auto or use a chat model")
    return has_template and chat != "no"


def _messages(content: str | Messages) -> Messages:
    return [{"role": "user", "content": content}] if isinstance(content, str) else content


def _no_template(tokenizer: Any, chat: Chat) -> str:
    if chat == "no" and getattr(tokenizer, "chat_template", None):
        return "data.chat=no: the prompts are chat messages, which need the chat template; set data.chat=auto"
    return (
        "the prompts are chat messages, but the tokenizer has no chat template; "
        "use a chat model, or a data.prompt_field that holds plain text"
    )


def _templated(chats: list[Messages], tokenizer: Any) -> list[str | DataError]:
    if not chats:
        return []
    try:
        return list(tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True))
    except Exception as error:
        # A template is a program that may raise anything; render one by one to learn which chats it refuses.
        if len(chats) == 1:
            refusal = (str(error).splitlines() or [""])[0] or type(error).__name__
            return [DataError(f"the chat template refuses it: {refusal}")]
        return [_templated([one], tokenizer)[0] for one in chats]


def _tokenized(texts: dict[int, str], tokenizer: Any, *, special: bool) -> dict[int, Rendered]:
    if not texts:
        return {}
    ids = tokenizer(list(texts.values()), add_special_tokens=special, verbose=False)["input_ids"]
    if special and _appends_eos(tokenizer):
        ids = [row[:-1] for row in ids]
    return {i: (text, tuple(row)) for (i, text), row in zip(texts.items(), ids, strict=True)}


def _appends_eos(tokenizer: Any) -> bool:
    eos = tokenizer.eos_token_id
    marked = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    return eos is not None and marked[-1:] == [eos] and plain[-1:] != [eos]
