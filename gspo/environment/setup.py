"""The environment of a run: its process, the beginnings of its conversations, and its engine.

In: the settings, and later the problems, the tokenizer and an engine. Out: problems whose prompts are what the
environment begins with, and an engine that samples conversations. Invariant: an environment, a chat template or a
combination of settings that cannot work is an error that names the key, before anything expensive starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gspo.config import Config
from gspo.data.chat import render_all
from gspo.data.problems import Problems, with_instructions
from gspo.environment.engine import ROWS, ConversationEngine, fingerprint, row_of
from gspo.environment.environment import find
from gspo.environment.host import EnvironmentHost
from gspo.environment.template import ObservationTemplate, TemplateTokens, tool_format
from gspo.errors import ConfigError, DataError
from gspo.model.load import Policy
from gspo.rollout.engine import Engine
from gspo.types import Messages, Prompt


class RunEnvironment:
    """Owns the process that environments run in."""

    def __init__(self, config: Config) -> None:
        self._config = config
        settings = config.environment
        self.host = EnvironmentHost(find(settings.name, settings.options), settings)
        self.host.start()
        self._openings: dict[str, str] = {}
        self._tokens: TemplateTokens | None = None

    def check_rewards(self) -> None:
        """Raise if nothing gives a conversation a reward."""
        if not self.host.gives_rewards and not self._config.reward.functions:
            raise ConfigError(
                f"environment.name: {self._config.environment.name} gives no rewards, and there are no reward "
                "functions; set reward.functions, or write a method score (get_reward for a class in TRL's form)"
            )

    def open_problems(self, problems: Problems, tokenizer: Any) -> Problems:
        """The problems, with what the environment begins with as their prompts."""
        return replace(
            problems,
            train=self.open(problems.train, tokenizer),
            held_out=self.open(problems.held_out, tokenizer),
            sets={name: self.open(prompts, tokenizer) for name, prompts in problems.sets.items()},
        )

    def open(self, prompts: Sequence[Prompt], tokenizer: Any) -> list[Prompt]:
        """The same for some problems."""
        self._tokens = self._tokens or TemplateTokens(tokenizer)
        opened: list[Prompt] = []
        for start in range(0, len(prompts), ROWS):
            chunk = prompts[start : start + ROWS]
            contents = self._first_messages(chunk)
            seen: list[str | Messages] = []
            for prompt, content in zip(chunk, contents, strict=True):
                self._openings[fingerprint(row_of(prompt))] = fingerprint(content)
                try:
                    seen.append(self._instructed(prompt, content))
                except DataError as error:
                    raise DataError(f"problem {prompt.id}: {error}") from None
            rendered = render_all(seen, tokenizer, chat=self._config.data.chat, tools=self._shown_tools)
            for prompt, one in zip(chunk, rendered, strict=True):
                if isinstance(one, DataError):
                    raise DataError(f"problem {prompt.id}: {one}")
                text, ids = one
                limit = self._section(prompt).max_prompt_tokens
                if len(ids) > limit:
                    raise DataError(
                        f"problem {prompt.id}: the environment begins with {len(ids)} tokens, more than "
                        f"data.max_prompt_tokens = {limit}; raise it, or shorten the beginning"
                    )
                opened.append(replace(prompt, text=text, token_ids=ids))
        return opened

    def engine(self, engine: Engine, policy: Policy) -> ConversationEngine:
        """An engine that samples conversations with another one."""
        settings = self._config.environment
        template = ObservationTemplate(
            policy.tokenizer,
            policy.stop_ids,
            self._shown_tools,
            answers_calls=bool(self.host.tools),
            chat=self._config.data.chat,
            rewritten=settings.rewritten_history,
            turns=settings.max_turns,
        )
        return ConversationEngine(
            engine,
            self.host,
            template,
            config=settings,
            tool_format=tool_format(settings, policy.tokenizer, self.host.tools),
            openings=self._openings,
            instruct=self._instructed,
            positions=policy.position_limit,
        )

    @property
    def _shown_tools(self) -> list[dict[str, Any]]:
        """The schemas that the chat template gets. It would teach calls of another form than blocks of code."""
        return [] if self._config.environment.tool_format == "code_block" else self.host.tools

    def close(self) -> None:
        """End the process."""
        self.host.close()

    def _instructed(self, prompt: Prompt, content: str | Messages) -> str | Messages:
        """What a row begins with, as the model sees it. What the environment has written must not look like a turn of
        somebody else. The row's own prompt is left as it is."""
        if content != prompt.content and self._tokens is not None:
            neutral, harmless = self._tokens.neutral, self._tokens.harmless
            content = neutral(content) if isinstance(content, str) else harmless(content)
        return with_instructions(content, self._section(prompt))

    def _section(self, prompt: Prompt) -> Any:
        return self._config.problem_sections.get(prompt.source, self._config.data)

    def _first_messages(self, prompts: Sequence[Prompt]) -> list[str | Messages]:
        rows = [{"row": row_of(prompt), "row_key": fingerprint(row_of(prompt))} for prompt in prompts]
        answer = self.host.ask("open", rows=rows)
        if answer.failure:
            raise ConfigError(
                f"environment.name: {self._config.environment.name}: reset failed for one of the problems "
                f"{prompts[0].id} to {prompts[-1].id}: {answer.failure}; fix the environment or the data"
            )
        return list(answer.result)
