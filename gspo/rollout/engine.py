"""The sampling engine protocol, where completions end, and the lookup of an engine by its name.

In: prompts and a `Sampling`. Out: the completions of each prompt in sample order. Invariant: a completion depends on
the weights, the prompt, the sampling settings and its own random stream `(seed, stream, prompt id, sample)`, never on
the other completions of the batch or the order in which they finish.

An engine is one file in `engines/` with a function `build(context, **options) -> Engine` and its `TRAITS`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import compress
from types import ModuleType
from typing import Any, Protocol

from gspo.errors import ConfigError, DataError, EngineError, is_panic
from gspo.model.routing import Routers
from gspo.ranks.group import ONE, Ranks
from gspo.types import Completion, Prompt, Sampling, StopReason


@dataclass(frozen=True, kw_only=True)
class DecodeStats:
    """The cost of decoding."""

    steps: int = 0
    """Forward passes of one token per row."""
    rows: int = 0
    """Rows of all these passes, idle ones included."""
    prefilled: int = 0
    """Prompt tokens that were computed by prefill, padding not included."""
    reused: int = 0
    """Prompt tokens that were not, because an earlier turn of the conversation had computed them."""

    def __add__(self, other: DecodeStats) -> DecodeStats:
        return self._combined(other, 1)

    def __sub__(self, other: DecodeStats) -> DecodeStats:
        return self._combined(other, -1)

    def _combined(self, other: DecodeStats, sign: int) -> DecodeStats:
        return DecodeStats(**{f.name: getattr(self, f.name) + sign * getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """What is known of an engine before it is built: `TRAITS` in its file."""

    shares_weights: bool = False
    """Whether it samples in this process with the learner's own weights, so that only rounding separates the two."""
    data_parallel: bool = False
    """Whether each of several ranks can have one, for some of the prompts."""
    on_leader: bool = False
    """Whether the leader of several ranks can have one that samples all completions. The other ranks take part when it
    needs the weights."""
    extends: bool = False
    """Whether it is an `ExtendingEngine`: it can cut completions and continue them with other weights."""
    accepts_quantized: bool = False
    """Whether it can sample from 4-bit weights."""
    memory_options: tuple[str, ...] = ()
    """Settings to lower if this process runs out of memory."""
    foreign_code: Callable[[Mapping[str, Any]], list[tuple[str, str]]] = lambda options: []
    """The options that make it run or contact what somebody else wrote, as (what happens, key to remember)."""


@dataclass(frozen=True, kw_only=True)
class ExtendOptions:
    """How an engine continues completions."""

    sampling: Sampling
    seed: int
    version: int
    """The version of the learner's current weights, which is stored in every completion."""
    routes: bool = False
    """Whether the experts are wanted, if the engine reports them."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ExtendOptions):
    """How an engine samples the completions of prompts."""

    samples: int
    """Completions per prompt."""
    stream: str
    """The occasion (`train/12`, `eval/20`), so that a prompt that occurs again gets fresh samples."""


class Engine(Protocol):
    """Samples completions from the current policy."""

    @property
    def about(self) -> str:
        """A sentence for the log at the start of a run; empty if there is nothing to say."""
        ...

    @property
    def decoded(self) -> DecodeStats | None:
        """The decoding cost since the engine was built; None if unknown."""
        ...

    @property
    def reports_routes(self) -> bool:
        """Whether completions can carry the experts that computed them."""
        ...

    def generate(self, prompts: Sequence[Prompt], options: GenerateOptions) -> list[list[Completion]]:
        """Sample `options.samples` completions of each prompt from the learner's current weights."""
        ...

    def sync(self, version: int) -> None:
        """Sample the next tokens from the learner's current weights, also those of completions in progress.

        `version` is the version of these weights. `generate` starts with the current weights by itself; this is for
        another thread that has changed them since. An engine that shares the learner's weights has nothing to do."""
        ...

    def end_conversations(self, conversations: Sequence[str]) -> None:
        """Free what is kept of these conversations (`Prompt.conversation`). They may be unknown."""
        ...

    def close(self) -> None:
        """Free all resources. May be called twice."""
        ...


@dataclass(frozen=True, kw_only=True)
class Extension:
    """Completions of a prompt to continue."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    """Those that were cut are continued, the others stay as they are."""
    stream: str
    """The occasion, as in `GenerateOptions`. A completion has the same one in every call."""
    tokens: int
    """Each is continued by at most this many tokens, and then cut again."""


class ExtendingEngine(Engine, Protocol):
    """An engine that continues completions which were cut.

    Sampling in parts gives the same distribution as sampling in one call. Engines whose random numbers depend on the
    position in a completion (`local`) give the same completion, up to rounding, if the weights have not changed in
    between."""

    def extend(self, extensions: Sequence[Extension], options: ExtendOptions) -> list[list[Completion]]:
        """Continue completions with the learner's current weights.

        The prompt and the tokens so far are prefilled with these weights. Tokens that exist keep their log-probs and
        their experts. `Completion.spans` says which weights sampled which tokens. A completion without tokens (`begun`)
        starts here."""
        ...


def begun(prompt: Prompt, samples: int, version: int) -> tuple[Completion, ...]:
    """Completions of a prompt that have no tokens yet."""
    return tuple(
        Completion(
            prompt_id=prompt.id,
            sample=sample,
            token_ids=(),
            text="",
            logp_sampler=(),
            stop=StopReason.CUT,
            version=version,
        )
        for sample in range(samples)
    )


def continued(before: Completion, spans: Sequence[tuple[int, int]], fields: Mapping[str, Any]) -> Completion:
    """A completion that was cut, with the tokens that were added. `spans`: the versions of the weights that sampled
    those, each with its first token. `fields` describe all tokens: `Controls.fields`, text and experts; numbers in
    `logp_sampler` for the tokens before the cut are ignored."""
    count, routes = len(before.token_ids), fields.get("routes")
    assert before.stop is StopReason.CUT
    assert fields["token_ids"][:count] == before.token_ids
    if before.routes is not None and routes is not None:
        # The forward pass that sampled a token chose its experts. The later prefill may have chosen others.
        routes = replace(routes, experts=before.routes.experts + routes.experts[len(before.routes.experts) :])
    all_spans = [(s.version, s.start) for s in before.segments] if count else []
    for version, first in spans:
        if first < len(fields["token_ids"]) and (not all_spans or all_spans[-1][0] != version):
            all_spans.append((version, first))
    return replace(
        before,
        **{
            **fields,
            "logp_sampler": before.logp_sampler + fields["logp_sampler"][before.sampled_count :],
            "routes": routes,
            "version": all_spans[0][0],
            "spans": tuple(all_spans) if len(all_spans) > 1 else (),
        },
    )


@dataclass(frozen=True, kw_only=True)
class EngineContext:
    """What an engine is built from: the learner's own model and tokenizer."""

    model: Any
    tokenizer: Any
    stop_ids: tuple[int, ...]
    """Token ids that end a completion."""
    routers: Routers | None = None
    """The model's routers; None for a dense model, or if routing is not recorded."""
    ranks: Ranks = ONE
    """The processes that share the model."""

    @property
    def whole_weights(self) -> bool:
        """Whether the weights are whole between two forwards of an engine, so that it may read or copy them."""
        return not self.ranks.by_layer

    def texts(self, ids_B: Sequence[Sequence[int]], *, special: bool = False) -> list[str]:
        """Completions as text; with `special`, all of their tokens, as they are. A damaged tokenizer may load and
        encode, and raise or panic only here."""
        # A cleanup removes spaces, so the text of a part would not be part of the text.
        options = {"clean_up_tokenization_spaces": False} if special else {}
        try:
            return list(self.tokenizer.batch_decode(ids_B, skip_special_tokens=not special, **options))
        except BaseException as error:
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            name = getattr(self.tokenizer, "name_or_path", "") or "the model"
            reason = (str(error).splitlines() or [""])[0] or type(error).__name__
            raise EngineError(
                f"{name}: its tokenizer cannot decode a completion: {reason:.200}; tokenizer.json is damaged or of "
                "another version: download the tokenizer's files again"
            ) from error


# --- Where completions end ---


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The last tokens of a completion."""

    ids: Sequence[int]
    start: int = 0
    """Position of the first of them in the completion."""
    first: int = 0
    """Index of the first that may end the completion. Those before it are its context."""
    cut: bool = False
    """Whether the completion's thinking was cut."""


@dataclass(frozen=True, kw_only=True)
class End:
    """Where a completion ends, and why."""

    length: int
    stop: StopReason
    cut: bool
    """Whether the end of its thinking was inserted before that."""


class Controls:
    """Where completions end: with an end token, or at the token limit. `controls.py` adds what depends on text."""

    window = 0
    """Tokens in which a stop string can be found."""
    forced_ids: tuple[int, ...] = ()
    """The tokens that end thinking."""

    def __init__(self, context: EngineContext, sampling: Sampling) -> None:
        self.sampling = sampling
        self.stop_ids = context.stop_ids

    def stop_indices(self, tails: Sequence[Tail]) -> list[int | None]:
        """For each tail, the index of the first token that ends the completion with a stop string; None if none
        does."""
        return [None] * len(tails)

    def unclosed(self, ids_B: Sequence[Sequence[int]]) -> list[bool]:
        """Whether the thinking of completions has not ended within their budget."""
        return [False] * len(ids_B)

    def ends(self, ids_B: Sequence[Sequence[int]], cut_B: Sequence[bool]) -> list[End]:
        """The ends of completions that have been sampled to an end token, to the limit, or to a stop string or some
        tokens after it. Those with fewer tokens and neither of them were cut."""
        tails = [Tail(ids=ids, cut=cut) for ids, cut in zip(ids_B, cut_B, strict=True)]
        return [self._end(tail, index) for tail, index in zip(tails, self.stop_indices(tails), strict=True)]

    def _end(self, tail: Tail, index: int | None) -> End:
        length = len(tail.ids) if index is None else index + 1
        stop = StopReason.LENGTH if index is None else StopReason.STOP
        if tail.ids[length - 1] in self.stop_ids:
            stop = StopReason.EOS
        elif index is None and length < self.sampling.max_tokens:
            stop = StopReason.CUT
        return End(length=length, stop=stop, cut=tail.cut and length > self.sampling.thinking_budget)

    def fields(self, ids: Sequence[int], logp: Sequence[float], end: End) -> dict[str, Any]:
        """The fields of a `Completion`, from its tokens and a number for each: its log-prob, or any if it was
        inserted."""
        budget, length = self.sampling.thinking_budget, end.length
        inserted = range(budget, budget + len(self.forced_ids))
        sampled = tuple(i not in inserted for i in range(length)) if end.cut else ()
        return {
            "token_ids": tuple(ids[:length]),
            "logp_sampler": tuple(compress(logp, sampled) if sampled else logp[:length]),
            "stop": end.stop,
            "sampled": sampled,
            "thinking_cut": end.cut,
        }


def controls_for(context: EngineContext, sampling: Sampling) -> Controls:
    """The controls of a call. Raises `ConfigError` if the tokenizer cannot write the end of thinking."""
    if not sampling.stop and not sampling.thinking_budget:
        return Controls(context, sampling)
    from gspo.rollout.controls import TextControls

    return TextControls(context, sampling)


def ends_thinking(controls: Controls, completion: Completion) -> bool:
    """Whether a completion that was cut gets the end of its thinking, or has got it."""
    budget, count = controls.sampling.thinking_budget, len(completion.token_ids)
    if not budget or count < budget:
        return False
    return completion.thinking_cut if count > budget else controls.unclosed([completion.token_ids])[0]


# --- Engines by name ---


def build_engine(name: str, context: EngineContext, options: Mapping[str, Any]) -> Engine:
    """Build the engine of `engines/NAME.py`."""
    build: Callable[..., Engine] = _engine_module(name).build
    known = [p for p in inspect.signature(build).parameters if p != "context"]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"rollout.engine_options.{option}: engine {name!r} has no such option; it has: "
                f"{', '.join(known) or 'none'}"
            )
    engine = build(context, **options)
    _check_methods(name, engine)
    return engine


def _check_methods(name: str, engine: Any) -> None:
    """Raise before the run if methods of an engine cannot be called as the protocol says."""
    called = {"generate": "prompts, options: GenerateOptions"}
    if engine_traits(name).extends:
        called["extend"] = "extensions, options: ExtendOptions"
    for method, parameters in called.items():
        signature = inspect.signature(getattr(engine, method))
        try:
            signature.bind((), None)
        except TypeError:
            raise ConfigError(
                f"rollout.engine: engine {name!r} declares {method}{signature}, but is called with two arguments; "
                f"declare {method}(self, {parameters}), and read the settings of the call from options "
                "(docs/engines.md#writing-an-engine)"
            ) from None


def engine_traits(name: str) -> EngineTraits:
    """The traits of the engine in `engines/NAME.py`."""
    traits: EngineTraits = _engine_module(name).TRAITS
    return traits


@functools.cache
def _engine_module(name: str) -> ModuleType:
    if name not in engine_names():
        raise ConfigError(f"rollout.engine: no engine {name!r}; there are: {', '.join(engine_names())}")
    return importlib.import_module(f"gspo.rollout.engines.{name}")


def engine_names() -> list[str]:
    """The names of all engines: their file names."""
    from gspo.rollout import engines

    return sorted(m.name for m in pkgutil.iter_modules(engines.__path__))


def check_fits(positions: int | None, prompts: Sequence[Prompt], sampling: Sampling) -> None:
    """Raise before sampling if a completion could exceed the model's number of positions; `None` if unlimited."""
    if sampling.max_tokens < 1:
        raise ConfigError(f"rollout.max_tokens: must be at least 1, is {sampling.max_tokens}")
    empty = next((prompt for prompt in prompts if not prompt.token_ids), None)
    if empty is not None:
        raise DataError(f"prompt {empty.id}: has no tokens; a completion needs at least one to start from")
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if positions is not None and longest + sampling.max_tokens > positions:
        raise ConfigError(
            f"rollout.max_tokens: the longest prompt has {longest} tokens, and with {sampling.max_tokens} more it "
            f"exceeds the model's {positions} positions; set it to at most {positions - longest}, or use shorter "
            "prompts"
        )


def stream_key(seed: int, stream: str, prompt_id: str, sample: int) -> int:
    """The 63-bit key of a completion's own random stream."""
    # A separator that ids do not contain, so that ("1", "23") and ("12", "3") differ.
    text = f"{seed}\x1f{stream}\x1f{prompt_id}\x1f{sample}"
    # 63 bits: torch has no unsigned 64-bit arithmetic, and negative keys have a meaning of their own.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Put every module into eval mode, and restore the mode of each afterwards.

    In train mode, models apply dropout, and with gradient checkpointing they also ignore the KV cache."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        # Not model.eval(): that would lose which modules were in training mode.
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
