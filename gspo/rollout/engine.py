"""What a sampling engine is, and how one is found by its name.

In: prompts and a `Sampling`. Out: for each prompt, its replies in sample order. Invariant: a reply depends on the
weights, the prompt, the sampling settings and its own random stream `(seed, stream, prompt id, sample)`, never on which
other replies happened to be in the batch or in which order they finished.

An engine is one file in `engines/` with a function `build(context, **options) -> Engine`.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gspo.errors import ConfigError, EngineError, panics_as_errors
from gspo.model.routing import Routers
from gspo.types import Completion, Prompt, Sampling


@dataclass(frozen=True, kw_only=True)
class DecodeStats:
    """What drawing replies has cost."""

    steps: int = 0
    """Forwards of one token per row."""
    rows: int = 0
    """Rows of all of them, idle ones included."""

    def __add__(self, other: DecodeStats) -> DecodeStats:
        return DecodeStats(steps=self.steps + other.steps, rows=self.rows + other.rows)

    def __sub__(self, other: DecodeStats) -> DecodeStats:
        return DecodeStats(steps=self.steps - other.steps, rows=self.rows - other.rows)


class Engine(Protocol):
    """Draws replies from the current policy."""

    @property
    def decoded(self) -> DecodeStats | None:
        """What all replies since the engine was built have cost; None: it does not know."""
        ...

    @property
    def reports_routes(self) -> bool:
        """Whether replies can carry the experts that computed them."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int,
        sampling: Sampling,
        seed: int,
        stream: str,
        version: int,
        routes: bool = False,
    ) -> list[list[Completion]]:
        """`samples` replies for each prompt. `stream` names the occasion (`train/12`, `eval/20`), so that meeting a
        prompt again draws anew; `version` is stamped on every reply; `routes` asks for the experts, where the engine
        reports them."""
        ...

    def close(self) -> None:
        """Free what the engine holds; calling it twice is fine."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineContext:
    """What an engine may be built from: the learner's own model and tokenizer."""

    model: Any
    tokenizer: Any
    stop_ids: tuple[int, ...]
    """Token ids that end a reply."""
    routers: Routers | None = None
    """The model's routers; None: a dense model, or nobody asks for its experts."""

    def texts(self, ids_B: Sequence[Sequence[int]]) -> list[str]:
        """Completions as text. A damaged tokenizer may load and encode, and fail only here: it raises anything, and panics."""
        try:
            with panics_as_errors():
                return list(self.tokenizer.batch_decode(ids_B, skip_special_tokens=True))
        except Exception as error:
            name = getattr(self.tokenizer, "name_or_path", "") or "the model"
            reason = (str(error).splitlines() or [""])[0] or type(error).__name__
            raise EngineError(
                f"{name}: its tokenizer cannot decode a completion: {reason:.200}; tokenizer.json is damaged, or of another "
                "version: fetch the tokenizer's files again"
            ) from error


def build_engine(name: str, context: EngineContext, options: Mapping[str, Any]) -> Engine:
    """The engine in `engines/NAME.py`."""
    if name not in engine_names():
        raise ConfigError(f"rollout.engine: no engine {name!r}; there are: {', '.join(engine_names())}")
    build: Callable[..., Engine] = importlib.import_module(f"gspo.rollout.engines.{name}").build
    known = [p for p in inspect.signature(build).parameters if p != "context"]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"rollout.engine_options.{option}: engine {name!r} has no such option; it has: {', '.join(known) or 'none'}"
            )
    return build(context, **options)


def engine_names() -> list[str]:
    """Every engine there is, by file name."""
    from gspo.rollout import engines

    return sorted(m.name for m in pkgutil.iter_modules(engines.__path__))


def stream_key(seed: int, stream: str, prompt_id: str, sample: int) -> int:
    """A 63-bit key of a reply's own random stream."""
    text = f"{seed}\x1f{stream}\x1f{prompt_id}\x1f{sample}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
