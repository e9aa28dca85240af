"""Conversations side by side: an engine whose completions are conversations with an environment.

In: the calls of the training loop, and another engine for the turns. Out: one `Completion` per conversation. Invariant:
a conversation depends on the weights, its row, the sampling settings and its own random streams `(seed, stream, prompt,
sample, turn)`, never on the other conversations or on how fast the environment answers. Which conversations share a
round of sampling affects speed and rounding, nothing else.

A round samples the next turn of every conversation that has its observation. It starts when no call of the environment
is left that has taken less than `environment.patience_s`; the conversations of slower calls join a later round.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gspo.activity import activity
from gspo.config import EnvironmentConfig
from gspo.environment.conversation import Transcript
from gspo.environment.host import Answer, EnvironmentHost
from gspo.environment.template import ObservationTemplate
from gspo.errors import DataError
from gspo.rollout.engine import DecodeStats, Engine, EngineContext, GenerateOptions
from gspo.types import Completion, ConversationEnd, Messages, Prompt, StopReason

ROWS = 64
"""Rows in one call of the environment, where it is asked about many."""
_TICK_S = 0.05
"""Between two looks at whether only slow calls are left."""
_DEMONSTRATION = "demonstration"
_UNLIMITED = 2**31
Openings = Mapping[str, str]
"""The fingerprint of the first messages of each row that was opened, by the row's fingerprint."""


class ConversationEngine:
    """Samples conversations. Owns neither the engine nor the host."""

    def __init__(
        self,
        engine: Engine,
        host: EnvironmentHost,
        template: ObservationTemplate,
        *,
        config: EnvironmentConfig,
        tool_format: str,
        openings: Openings,
        instruct: Callable[[Prompt, str | Messages], str | Messages],
        positions: int | None,
    ) -> None:
        self._engine = engine
        self._host = host
        self._template = template
        self._config = config
        self._format = tool_format
        self._openings = openings
        self._instruct = instruct
        self._positions = positions
        self._texts = EngineContext(model=None, tokenizer=template.tokenizer, stop_ids=()).texts

    @property
    def about(self) -> str:
        return " ".join(filter(None, [self._engine.about, f"environment {self._config.name} answers the model."]))

    @property
    def decoded(self) -> DecodeStats | None:
        return self._engine.decoded

    @property
    def reports_routes(self) -> bool:
        return self._engine.reports_routes

    def sync(self, version: int) -> None:
        self._engine.sync(version)

    def end_conversations(self, conversations: Sequence[str]) -> None:
        self._engine.end_conversations(conversations)

    def close(self) -> None:
        self._engine.close()

    def over(self, engine: Engine) -> ConversationEngine:
        """The same conversations, with another engine for the turns. Two threads may use both: their calls take turns,
        because the process of the environments runs those of one call at a time."""
        other = copy.copy(self)
        other._engine = engine
        return other

    def generate(self, prompts: Sequence[Prompt], options: GenerateOptions) -> list[list[Completion]]:
        transcripts = [
            Transcript(prompt, sample, max_tokens=options.sampling.max_tokens, version=options.version)
            for prompt in prompts
            for sample in range(options.samples)
        ]
        # What the engine may keep of a conversation between its turns, by its name.
        kept = {_name(t, options): t for t in transcripts}
        with activity("conversations", total=len(transcripts)) as doing:

            def sample_counted(ready: Sequence[Transcript]) -> list[Completion]:
                doing.done = sum(t.end is not None for t in transcripts)
                if ended := [name for name, t in kept.items() if t.end is not None]:
                    self._engine.end_conversations(ended)
                    for name in ended:
                        del kept[name]
                return self._sample_turns(ready, options)

            try:
                self._converse(transcripts, f"{options.seed}/{options.stream}", sample_counted)
            finally:
                self._engine.end_conversations(list(kept))
        texts = self._texts([t.token_ids for t in transcripts])
        done = [t.completion(text) for t, text in zip(transcripts, texts, strict=True)]
        samples = options.samples
        return [done[i : i + samples] for i in range(0, len(done), samples)] if samples else [[] for _ in prompts]

    def play(self, prompts: Sequence[Prompt]) -> list[Completion | None]:
        """The environment's demonstration for each row, as if the model had sampled it; None if there is none."""
        transcripts = [Transcript(prompt, 0, max_tokens=_UNLIMITED, version=0) for prompt in prompts]
        turns: dict[int, Iterator[str]] = {}
        for start in range(0, len(transcripts), ROWS):
            chunk = transcripts[start : start + ROWS]
            requests = [self._reset_request(t, _DEMONSTRATION) for t in chunk]
            answer = self._host.ask("demonstrate", rows=requests, format=self._format)
            if answer.failure:
                raise DataError(f"cold_start.steps: a demonstration of the environment failed: {answer.failure}")
            turns |= {id(t): iter(texts) for t, texts in zip(chunk, answer.result, strict=True) if texts}
        shown = [t for t in transcripts if id(t) in turns]
        self._converse(shown, _DEMONSTRATION, lambda ready: [self._written(next(turns[id(t)], "")) for t in ready])
        texts = self._texts([t.token_ids for t in transcripts])
        return [t.completion(s) if id(t) in turns else None for t, s in zip(transcripts, texts, strict=True)]

    def _written(self, text: str) -> Completion:
        ids = (*self._template.tokenizer(text, add_special_tokens=False)["input_ids"], self._template.end_id)
        return Completion(
            prompt_id="",
            sample=0,
            token_ids=ids,
            text=text,
            logp_sampler=(0.0,) * len(ids),
            stop=StopReason.EOS,
            version=0,
        )

    # ---- the conversations

    def _converse(
        self,
        transcripts: Sequence[Transcript],
        key: str,
        sample_turns: Callable[[Sequence[Transcript]], list[Completion]],
    ) -> None:
        """Go on with all conversations until each has ended."""
        with self._host.alone:
            self._converse_alone(transcripts, key, sample_turns)

    def _converse_alone(
        self,
        transcripts: Sequence[Transcript],
        key: str,
        sample_turns: Callable[[Sequence[Transcript]], list[Completion]],
    ) -> None:
        numbers = {self._host.open(): t for t in transcripts}
        number_of = {id(t): number for number, t in numbers.items()}
        waiting = set(numbers)
        try:
            for number, transcript in numbers.items():
                self._host.submit(number, "reset", **self._reset_request(transcript, key))
            while waiting:
                ready = self._answered(numbers, waiting)
                if not ready:
                    continue
                completions = sample_turns(ready)
                texts = self._turn_texts(completions)
                for transcript, completion, text in zip(ready, completions, texts, strict=True):
                    number = number_of[id(transcript)]
                    transcript.add_turn(completion, text)
                    if transcript.end is None:
                        waiting.add(number)
                        self._host.submit(number, "step", text=text, format=self._format)
                    else:
                        self._host.end(number)
        finally:
            for number, transcript in numbers.items():
                if transcript.end is None or number in waiting:
                    self._host.end(number)

    def _answered(self, numbers: Mapping[int, Transcript], waiting: set[int]) -> list[Transcript]:
        """The conversations that the model continues, in their order: all of them, or those that have an observation
        while only slow calls are left."""
        ready: list[int] = []
        while waiting and not (ready and self._host.only_slow(self._config.patience_s)):
            for answer in self._host.poll(_TICK_S if ready else 1.0):
                waiting.discard(answer.conversation)
                transcript = numbers[answer.conversation]
                self._take(transcript, answer)
                if transcript.end is None:
                    ready.append(answer.conversation)
                else:
                    self._host.end(answer.conversation)
        # Not in the order of the answers, which is that of chance.
        return [numbers[number] for number in sorted(ready)]

    def _take(self, transcript: Transcript, answer: Answer) -> None:
        """What an answer of the environment means for its conversation."""
        transcript.seconds += answer.seconds
        if answer.failure:
            transcript.fail(f"{answer.failure.partition(': ')[0]}: environment: {answer.failure.partition(': ')[2]}")
        elif not transcript.turns:
            self._check_opening(transcript, answer.result)
        else:
            self._observe(transcript, answer.result)

    def _observe(self, transcript: Transcript, result: Mapping[str, Any]) -> None:
        transcript.settle_turn(
            reward=result["reward"],
            calls=result["calls"],
            failed_calls=result["failed"],
            other_format=result["other_format"],
        )
        if result["done"]:
            transcript.end = ConversationEnd.DONE
        elif len(transcript.turns) >= self._config.max_turns:
            transcript.end = ConversationEnd.TURNS
        elif transcript.seconds > self._config.max_seconds:
            transcript.end = ConversationEnd.TIME
        else:
            try:
                self._continue(transcript, result["messages"], call=result["calls"][0] if result["calls"] else "")
            except DataError as error:  # the template does not write these messages
                transcript.fail(f"invalid: environment: {error}")

    def _continue(self, transcript: Transcript, messages: Messages, *, call: str) -> None:
        """Add an observation, and if the template then writes earlier turns otherwise, continue with what it writes."""
        messages = self._template.harmless(messages)
        end, after = self._template.written(messages, call=call)
        if transcript.ended:
            transcript.end_turn(end)
        else:
            after = end + after
        transcript.messages += messages
        rewritten = self._template.rewritten(transcript.messages, transcript.text, after)
        if rewritten is None:
            transcript.observe(after, self._template.tokenize)
        else:
            transcript.rewrite(rewritten, self._template.tokenize)

    # ---- one round of sampling

    def _sample_turns(self, ready: Sequence[Transcript], options: GenerateOptions) -> list[Completion]:
        """The next turn of each conversation."""
        sampling = options.sampling
        limits = [min(self._config.turn_tokens or t.room, t.room) for t in ready]
        calls: dict[tuple[int, bool], list[int]] = {}
        for i, transcript in enumerate(ready):
            greedy = sampling.greedy_last and transcript.sample == options.samples - 1
            limit = max(limits)
            if self._positions is not None and len(transcript.context) + limit > self._positions:
                limit = limits[i]
            calls.setdefault((limit, greedy), []).append(i)
        done: dict[int, Completion] = {}
        for (limit, greedy), members in calls.items():
            limited = replace(sampling.greedy if greedy else sampling, max_tokens=limit, greedy_last=False)
            turns = [_turn_prompt(ready[i], _name(ready[i], options)) for i in members]
            completions = self._engine.generate(turns, replace(options, samples=1, sampling=limited))
            for i, (completion,) in zip(members, completions, strict=True):
                # Sampled with the longest limit of the round. What exceeds its own was sampled in vain.
                done[i] = _cut(completion, limits[i])
        return [done[i] for i in range(len(ready))]

    def _turn_texts(self, completions: Sequence[Completion]) -> list[str]:
        """What the environment reads: with special tokens by their names, but without the end token."""
        ends = [c.token_ids[:-1] if c.stop is StopReason.EOS else c.token_ids for c in completions]
        return self._texts(ends, special=True)

    # ---- the beginning

    def _reset_request(self, transcript: Transcript, key: str) -> dict[str, Any]:
        row = row_of(transcript.prompt)
        keys = {"row_key": fingerprint(row), "key": f"{key}/{transcript.prompt.id}/{transcript.sample}"}
        return {"row": row, **keys}

    def _check_opening(self, transcript: Transcript, content: str | Messages) -> None:
        """The learner has one prompt for all conversations of a row, the one from the start of the run."""
        if self._openings.get(fingerprint(row_of(transcript.prompt))) != fingerprint(content):
            transcript.fail(
                "invalid: environment: reset began the same row differently than before; take randomness from self.rng"
            )
            return
        begun = self._instruct(transcript.prompt, content)
        transcript.messages = [{"role": "user", "content": begun}] if isinstance(begun, str) else list(begun)


def fingerprint(value: Any) -> str:
    """A short text that differs for different JSON values."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def row_of(prompt: Prompt) -> dict[str, Any]:
    """What the environment sees of a row."""
    return {**prompt.columns, "prompt": prompt.content}


def _name(transcript: Transcript, options: GenerateOptions) -> str:
    """The name of a conversation for the engine."""
    return f"{options.seed}/{options.stream}/{transcript.prompt.id}/{transcript.sample}"


def _turn_prompt(transcript: Transcript, conversation: str) -> Prompt:
    """The context of the next turn. Its id is a random stream of its own."""
    prompt, turn = transcript.prompt, len(transcript.turns)
    content = transcript.turns[-1].text if turn else prompt.content
    ids = transcript.context
    id_ = f"{prompt.id}\x1f{transcript.sample}\x1f{turn}"
    return Prompt(id=id_, content=content, text="", token_ids=ids, conversation=conversation)


def _cut(completion: Completion, limit: int) -> Completion:
    """The completion as it would be with a lower token limit."""
    if len(completion.token_ids) <= limit:
        return completion
    routes = completion.routes
    if routes is not None:
        dropped = (len(completion.token_ids) - limit) * routes.layers * routes.top_k * routes.width
        routes = replace(routes, experts=routes.experts[:-dropped])
    return replace(
        completion,
        token_ids=completion.token_ids[:limit],
        logp_sampler=completion.logp_sampler[:limit],
        stop=StopReason.LENGTH,
        routes=routes,
    )
