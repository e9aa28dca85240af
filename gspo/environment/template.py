"""Observations as tokens: what the chat template writes between two turns of the model.

In: the messages of an observation. Out: the tokens that follow what the model sampled, up to the start of its next
turn. Invariant: what was sampled is never tokenized again. The template writes a short conversation with a placeholder
for the model's turn, and what follows the placeholder is added to the tokens so far. So it is the same for every
conversation, whatever the template would make of earlier turns.

A template that changes earlier turns when it writes the next one (drops the model's thinking, drops old messages) is
found by a trial before the run starts. For such a template, `rewritten` gives the whole conversation as the template
writes it, and the tokens after the first change become another branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gspo.config import EnvironmentConfig
from gspo.data.chat import Chat, render_all, uses_template
from gspo.environment.tool_calls import detect
from gspo.errors import ConfigError, DataError
from gspo.types import Messages

_ASKED = {"role": "user", "content": "A question."}
_TURN = "1f4c9a7e placeholder"
_CALL_ID = "a1b2c3d4e"
_THINKING = "<think>\n5b0d2c thoughts\n</think>\n\n"
"""Thinking as most models write it, for the trial."""
MOST_TRIED = 32
"""Maximum number of turns in the trial, which finds templates that drop old messages."""
_REWRITTEN = (
    "the chat template drops or changes what was written in earlier turns before a message of role {role}; set it to "
    '"branch" to train on what the template shows in each turn, or to "verbatim" to continue conversations with what '
    "was sampled"
)


class TemplateTokens:
    """The tokens by which a chat template tells turns apart."""

    def __init__(self, tokenizer: Any) -> None:
        added = list(getattr(tokenizer, "added_tokens_decoder", {}).values())
        special = {*map(str, tokenizer.all_special_tokens), *(t.content for t in added if t.special)} - {""}
        self.special = sorted(special, key=lambda text: (-len(text), text))
        # Some templates mark a tool's result or a call by tokens that are not special, such as </tool_response>.
        written = str(getattr(tokenizer, "chat_template", None) or "")
        marks = {t.content for t in added if t.content.strip() and t.content in written}
        self._forbidden = sorted({*special, *marks, _TURN}, key=lambda text: (-len(text), text))
        """What no message of an environment may contain."""

    def neutral(self, text: str) -> str:
        """Text in which no token of the template is left: what a tool returns must not look like a turn of somebody
        else."""
        for token in self._forbidden:
            if token in text:
                text = text.replace(token, f"{token[:1]} {token[1:]}")
        return text

    def harmless(self, messages: Messages) -> Messages:
        """Messages in which every text is neutral. A template may write any field."""
        return [{k: v if k == "role" else self._harmless(v) for k, v in message.items()} for message in messages]

    def _harmless(self, value: Any) -> Any:
        """A JSON value in which every text is neutral."""
        if isinstance(value, str):
            return self.neutral(value)
        if isinstance(value, Mapping):
            return {self.neutral(str(key)): self._harmless(one) for key, one in value.items()}
        return list(map(self._harmless, value)) if isinstance(value, list | tuple) else value


class ObservationTemplate:
    """Writes observations for one tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: Sequence[int],
        tools: Sequence[dict[str, Any]],
        *,
        answers_calls: bool = False,
        chat: Chat = "auto",
        rewritten: str = "branch",
        turns: int = 8,
    ) -> None:
        """`tools`: the schemas that the template gets. `answers_calls`: whether there are tools without them, too."""
        self.tokenizer = tokenizer
        self.end_id = stop_ids[0]
        """The token that ends a turn in a demonstration."""
        self._tools = list(tools)
        self._answers_calls = answers_calls
        self._chat = chat
        self._tokens = TemplateTokens(tokenizer)
        self._changed_before: set[str] = set()
        """Roles of observations before which the template changes earlier turns."""
        self._refuses = rewritten == "refuse"
        self.templated = uses_template(tokenizer, chat=chat)
        if self.templated:
            self._try(rewritten, min(turns, MOST_TRIED))

    def token_ids(self, messages: Messages, *, ended: bool, call: str = "") -> tuple[int, ...]:
        """The tokens of an observation and of the start of the next turn.

        `ended` says whether the turn before it ended with an end token, which the template writes, too. `call` is the
        name of the tool whose result is the first message."""
        end, after = self.written(self.harmless(messages), call=call)
        return self.tokenize(after if ended else end + after)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The tokens of a text of the template."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def written(self, messages: Messages, *, call: str = "") -> tuple[str, str]:
        """The end of the model's turn, and what the template writes after it for harmless messages."""
        changed = sorted(self._changed_before.intersection(m["role"] for m in messages))
        if changed and self._refuses:
            raise DataError(f"environment.rewritten_history: {_REWRITTEN.format(role=changed[0])}")
        if not self.templated:
            return "", "".join(m["content"] for m in messages)
        return self._after_turn(messages, self._tokens.neutral(call))

    def rewritten(self, messages: Messages, so_far: str, after: str) -> str | None:
        """The text of a whole conversation up to the next turn of the model, if the template writes it otherwise than
        `so_far`, the text of the tokens that were sampled and given, with the last observation `after` it. None if it
        does not: white space at the ends of turns is no difference."""
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        if not self._changed_before.intersection(m["role"] for m in messages[last + 1 :]):
            return None
        try:
            whole = self._apply([_identified(m) for m in messages])
        except Exception:  # a template may refuse what a model wrote, which must not end the run
            return None
        squeezed = _squeezed(whole)
        if not squeezed.endswith(_squeezed(after)) or squeezed == _squeezed(so_far + after):
            return None
        return whole

    def harmless(self, messages: Messages) -> Messages:
        """Messages of an environment as a template may write them. The name of a tool is what the model wrote."""
        return self._tokens.harmless(messages)

    def _after_turn(self, messages: Messages, call: str) -> tuple[str, str]:
        """The end token of the model's turn, and the text after it."""
        whole = self._whole(messages, call)
        after = whole[whole.rindex(_TURN) + len(_TURN) :]
        found = [(at, -len(token), token) for token in self._tokens.special if (at := after.find(token)) >= 0]
        if not found:
            raise ConfigError(
                "environment.name: the chat template ends the model's turns without an end token, so observations "
                "cannot follow them; use a chat model"
            )
        at, _, end = min(found)
        return end, after[at + len(end) :]

    def _whole(self, messages: Messages, call: str) -> str:
        """A conversation with a placeholder as the model's turn, and the observation after it."""
        results = [m for m in messages if m["role"] == "tool"]
        chats: list[Messages] = []
        if results and self._tools:
            # Some templates write a tool's result only after a call, and with its name. A malformed call has none.
            call = call or self._tools[0]["function"]["name"]
            called = {"name": call, "arguments": {"placeholder": _TURN}}
            calls = [{"id": _CALL_ID, "type": "function", "function": called}]
            named = [{"name": call, "tool_call_id": _CALL_ID, **m} if m["role"] == "tool" else m for m in messages]
            chats.append([_ASKED, {"role": "assistant", "content": "", "tool_calls": calls}, *named])
        chats.append([_ASKED, {"role": "assistant", "content": _TURN}, *messages])
        failure = ""
        for chat in chats:
            try:
                text = self._apply(chat)
            except Exception as error:  # a template is a program that may raise anything
                failure = str(error).splitlines()[0] if str(error) else type(error).__name__
                continue
            if _TURN in text:
                return text
        roles = sorted({m["role"] for m in messages})
        raise DataError(
            f"the chat template does not write messages of role {', '.join(roles)} after a turn of the model"
            f"{f': {failure}' if failure else ''}; use another role for observations, or another model"
        )

    def _apply(self, chat: Messages) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat, tools=self._tools or None, tokenize=False, add_generation_prompt=True
            )
        )

    def _try(self, rewritten: str, turns: int) -> None:
        """Raise before the run starts if observations cannot be written, or if the template rewrites earlier turns and
        may not."""
        roles = ["tool", "user"] if self._tools or self._answers_calls else ["user"]
        turn = {"role": "assistant", "content": f"{_THINKING}A remark."}
        observed = {role: _identified({"role": role, "content": "So.", **self._named(role)}) for role in roles}
        begun: list[str | Messages] = [[_ASKED]]
        histories: list[str | Messages] = [[_ASKED, *[turn, observed[role]] * turns] for role in roles]
        # In a child process with limits: nothing else has run the template yet.
        beginning, *rendered = render_all([*begun, *histories], self.tokenizer, chat=self._chat, tools=self._tools)
        if rewritten != "verbatim" and not isinstance(beginning, DataError):
            self._changed_before = {
                role
                for role, one in zip(roles, rendered, strict=True)
                # A template may write a tool's result only after a call of its own form. Then this says nothing.
                if not isinstance(one, DataError) and self._changes(observed[role], beginning[0], one[0], turns)
            }
        if self._refuses and roles[0] in self._changed_before:
            raise ConfigError(f"environment.rewritten_history: {_REWRITTEN.format(role=roles[0])}")
        self._after_turn([observed[roles[0]]], "")

    def _named(self, role: str) -> dict[str, str]:
        return {"name": self._tools[0]["function"]["name"]} if role == "tool" and self._tools else {}

    def _changes(self, observed: dict[str, Any], beginning: str, whole: str, turns: int) -> bool:
        """Whether a conversation differs from its turns and observations, written one after the other."""
        try:
            end, after = self._after_turn([observed], observed.get("name", ""))
        except DataError:
            return False
        so_far = beginning + turns * f"{_THINKING}A remark.{end}{after}"
        # If not even the last observation is the same, the two cannot be compared.
        return _squeezed(whole).endswith(_squeezed(after)) and _squeezed(whole) != _squeezed(so_far)


def _identified(message: dict[str, Any]) -> dict[str, Any]:
    """The message as templates expect it: some write a tool's result with the identity of its call."""
    return {"tool_call_id": _CALL_ID, **message} if message["role"] == "tool" else message


def _squeezed(text: str) -> str:
    return "".join(text.split())


def tool_format(config: EnvironmentConfig, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> str:
    """How the model writes tool calls."""
    if config.tool_format != "auto" or not tools:
        return "call" if config.tool_format == "auto" else config.tool_format
    found = detect(str(getattr(tokenizer, "chat_template", None) or ""))
    if found is None:
        raise ConfigError(
            "environment.tool_format: the chat template shows no known form of tool calls; set hermes, llama, "
            "json_block, code_block, gpt_oss or call, and teach it with data.system or a cold start"
        )
    return found
