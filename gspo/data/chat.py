"""From a problem to the model's input: the only code that applies chat templates.

In: prompts as text or chat messages, and a tokenizer. Out: for each, the text the model sees and its token ids.
Invariant: special tokens are added exactly once (by the template, or by the tokenizer for raw text). A prompt never
ends with the end token, because the completion follows. A template is a program that comes with the model:
`render_all` runs it in a child process with limits on CPU time and memory, so that an endless template is an error.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateSyntaxError

from gspo.errors import ConfigError, DataError, panics_as_errors
from gspo.types import Messages

Chat = Literal["auto", "yes", "no"]
Rendered = tuple[str, tuple[int, ...]]
Templated = list[str | DataError]

MOST_SECONDS = 20
"""Limit on the CPU time of a chat template for one prompt."""
MOST_MEMORY = 1 << 30
"""Limit on the bytes that rendering may allocate."""
LONGEST = 1 << 24
"""Limit on the characters of a rendered prompt."""
_BROKEN = "the chat template cannot be read"


def render(
    content: str | Messages,
    tokenizer: Any,
    *,
    chat: Chat,
    tools: Sequence[dict[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> Rendered:
    """The text the model sees and its token ids. Raises `DataError` if the chat template refuses the messages.
    `variables` are passed to the template."""
    options = dict(variables or {}) | ({"tools": list(tools)} if tools else {})
    rendered = _render([content], tokenizer, chat, partial(_templated, options=options))[0]
    if isinstance(rendered, DataError):
        raise rendered
    return rendered


def render_all(
    contents: Sequence[str | Messages], tokenizer: Any, *, chat: Chat, tools: Sequence[dict[str, Any]] = ()
) -> list[Rendered | DataError]:
    """`render` for many prompts in a few tokenizer calls. If the template refuses a prompt, its result is the error.
    `tools` are the schemas of what the model may call.

    A run calls this before any other code that runs the model's template, so the limits apply here."""
    return _render(contents, tokenizer, chat, partial(_templated_in_child, tools=tools))


def check_template(tokenizer: Any, *, chat: Chat) -> None:
    """Refuse a template with a syntax error once, before any row is read. Other faults depend on the row."""
    if uses_template(tokenizer, chat=chat):
        render_all([""], tokenizer, chat=chat)


def _render(
    contents: Sequence[str | Messages],
    tokenizer: Any,
    chat: Chat,
    templated: Callable[[list[Messages], Any], Templated],
) -> list[Rendered | DataError]:
    template = uses_template(tokenizer, chat=chat)
    chats = {i: _messages(c) for i, c in enumerate(contents) if template or not isinstance(c, str)}
    if chats and not template:
        raise ConfigError(_no_template(tokenizer, chat))
    results: dict[int, Rendered | DataError] = {}
    texts = dict(zip(chats, templated(list(chats.values()), tokenizer), strict=True))
    results.update({i: text for i, text in texts.items() if isinstance(text, DataError)})
    if broken := next((text for text in map(str, results.values()) if text.startswith(_BROKEN)), ""):
        raise ConfigError(_unreadable(tokenizer, broken))
    good = {i: text for i, text in texts.items() if isinstance(text, str)}
    results.update(_tokenized(good, tokenizer, special=False))
    raw = {i: c for i, c in enumerate(contents) if i not in chats and isinstance(c, str)}
    results.update(_tokenized(raw, tokenizer, special=True))
    return [results[i] for i in range(len(contents))]


def token_ids_of(texts: Sequence[str], tokenizer: Any, *, chat: Chat) -> list[tuple[int, ...]]:
    """The token ids of texts returned by `render`, by the same rule."""
    special = not uses_template(tokenizer, chat=chat)
    done = _tokenized(dict(enumerate(texts)), tokenizer, special=special)
    return [done[i][1] for i in range(len(texts))]


def follows_template(prompt: str, content: str | Messages, answer: str, tokenizer: Any, *, chat: Chat) -> bool:
    """Whether the template writes an assistant's answer right after the rendered prompt of `content`, unchanged up to
    white space. True without a template, and if the template refuses to write an answer at all."""
    if not uses_template(tokenizer, chat=chat):
        return True
    messages = [*_messages(content), {"role": "assistant", "content": answer}]
    try:
        whole = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # a template is a program that may raise anything
        return True
    return whole.startswith(prompt) and whole[len(prompt) :].lstrip().startswith(answer.strip())


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


def _templated(chats: list[Messages], tokenizer: Any, options: Mapping[str, Any]) -> Templated:
    return [_one(chat, tokenizer, options) for chat in chats]


def _one(chat: Messages, tokenizer: Any, options: Mapping[str, Any]) -> str | DataError:
    try:
        text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options))
    except MemoryError:
        return DataError(f"the chat template takes more than {MOST_MEMORY >> 20} MB of memory for it")
    except TemplateSyntaxError as error:
        return DataError(f"{_BROKEN}: line {error.lineno}: {_first_line(error)}")
    except Exception as error:  # a template is a program that may raise anything
        return DataError(f"the chat template refuses it: {_first_line(error)}")
    return text if len(text) <= LONGEST else DataError(f"the chat template makes {len(text)} characters of it")


def _templated_in_child(chats: list[Messages], tokenizer: Any, tools: Sequence[dict[str, Any]]) -> Templated:
    """The same in a child process, which the kernel kills if one chat exceeds a limit."""
    if not chats:
        return []
    read, write = os.pipe()
    # A fork, not a new interpreter, so that the tokenizer need not be loaded again.
    child = os.fork()
    if not child:
        os.close(read)
        _render_as_child(chats, tokenizer, tools, write)
    # Otherwise reading the lines would never end: this process would hold a writing end itself.
    os.close(write)
    try:
        with open(read, encoding="ascii") as lines:
            rendered = [json.loads(line) for line in lines]
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    if len(rendered) < len(chats):
        raise ConfigError(_killed(tokenizer, len(rendered) + 1, os.waitstatus_to_exitcode(status)))
    return [DataError(text) if failed else text for failed, text in rendered]


def _render_as_child(chats: list[Messages], tokenizer: Any, tools: Sequence[dict[str, Any]], write: int) -> None:
    """Write a line for each chat as soon as it is rendered; never returns."""
    try:
        # The trainer's handlers only set a flag; the child must end at once.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        _limit(resource.RLIMIT_CORE, 0)
        # On top of what the process has mapped: torch and CUDA reserve far more than the limit.
        _limit(resource.RLIMIT_AS, _address_space() + MOST_MEMORY)
        with open(write, "w", encoding="ascii") as out:
            for chat in chats:
                # The limit counts the whole process, so it is raised before each chat.
                _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + MOST_SECONDS)
                done = _one(chat, tokenizer, {"tools": list(tools)} if tools else {})
                out.write(json.dumps([isinstance(done, DataError), str(done)]) + "\n")
                out.flush()
    finally:
        # Not sys.exit: a fork must not run the parent's cleanup.
        os._exit(0)


def _limit(what: int, most: int) -> None:
    """Set a soft limit of this process, within its hard limit."""
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _killed(tokenizer: Any, number: int, code: int) -> str:
    source = f"{name}: " if (name := getattr(tokenizer, "name_or_path", "")) else ""
    slow = f"takes more than {MOST_SECONDS} s of CPU time"
    what = slow if code == -signal.SIGXCPU else f"ends its process (exit code {code})"
    return (
        f"{source}the chat template {what} for prompt {number}; fix chat_template.jinja (or chat_template in "
        "tokenizer_config.json), use another model, or set data.chat=no"
    )


def _unreadable(tokenizer: Any, why: str) -> str:
    folder = Path(getattr(tokenizer, "name_or_path", ""))
    file = folder / "chat_template.jinja"
    named = file if file.is_file() else f"{folder / 'tokenizer_config.json'} (chat_template)"
    return f"{named}: {why}; fix it, use another model, or set data.chat=no"


def _tokenized(texts: dict[int, str], tokenizer: Any, *, special: bool) -> dict[int, Rendered]:
    if not texts:
        return {}
    ids = _ids(list(texts.values()), tokenizer, special)
    if special and _appends_eos(tokenizer):
        ids = [row[:-1] for row in ids]
    return {i: (text, tuple(row)) for (i, text), row in zip(texts.items(), ids, strict=True)}


def _ids(texts: list[str], tokenizer: Any, special: bool) -> list[list[int]]:
    try:
        with panics_as_errors():
            return list(tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"])
    except Exception as error:  # a damaged tokenizer file fails at its first use
        name = getattr(tokenizer, "name_or_path", "") or "the model"
        raise ConfigError(
            f"{name}: its tokenizer cannot read a prompt: {_first_line(error)}; tokenizer.json is damaged "
            "or of another version; download the tokenizer's files again"
        ) from error


def _first_line(error: Exception) -> str:
    return ((str(error).splitlines() or [""])[0] or type(error).__name__)[:300]


def _appends_eos(tokenizer: Any) -> bool:
    # Tried, because no attribute of a tokenizer says it reliably.
    eos = tokenizer.eos_token_id
    marked = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    return eos is not None and marked[-1:] == [eos] and plain[-1:] != [eos]
