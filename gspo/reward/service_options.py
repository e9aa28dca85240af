"""Options that rewards with a model or an endpoint share.

In: a table of options. Out: the same with defaults, or a `ConfigError` that names the option and the fix. Invariant:
either an endpoint (`url`, `model`) or a model (`path`) is named, and no option without effect is accepted.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError
from gspo.reward.endpoint import check_key_env, checked_url
from gspo.reward.function import RunFacts
from gspo.reward.traits import ForeignCode

DTYPES = ("auto", "float32", "bfloat16", "float16")
RUN = "run"
"""The value of `cache` for the run directory."""
MAY_CHANGE = ("url", "key_env", "retries", "limit_s", "cache", "cache_mb", "device")
"""Options that may change on resume. A server moves; the model that it serves must stay the same."""
_REMOTE_ONLY = ("model", "key_env")
_LOCAL_ONLY = ("dtype", "device", "trust_remote_code")


def with_defaults(score: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a reward: those given, and the defaults in its signature."""
    parameters = inspect.signature(score).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} | dict(options)


def is_remote(options: Mapping[str, Any]) -> bool:
    """Whether an endpoint is asked, and not a model in the worker itself."""
    return bool(options.get("url"))


def cache_directory(cache: str, facts: RunFacts) -> str:
    """The directory for scores: the run's, the one given, or none."""
    return facts.cache_dir if cache == RUN else os.path.expanduser(cache)


def foreign_code(name: str, options: Mapping[str, Any]) -> list[ForeignCode]:
    """The server that would receive the data and the key, the model's own code, and the directory of the cache."""
    where = f"reward.options.{name}"
    found = []
    url, key_env, path, cache = (str(options.get(key) or "") for key in ("url", "key_env", "path", "cache"))
    if url:
        key = f", with the secret in ${key_env}" if key_env else ""
        found.append(
            ForeignCode(
                what=f"{where}.url sends prompts and completions to {url}{key}", key=f"endpoint {url} {key_env}"
            )
        )
    if path and options.get("trust_remote_code"):
        folder = Path(path).expanduser()
        files = sorted(folder.rglob("*.py")) if folder.is_dir() else []
        found.append(
            ForeignCode(what=f"{where}.trust_remote_code imports the code of {path}", key=f"reward model {path}")
        )
        found += [
            ForeignCode(what=f"{where}.trust_remote_code imports {file}", key=f"reward code {file}", file=str(file))
            for file in files
        ]
    if cache and cache != RUN:
        found.append(ForeignCode(what=f"{where}.cache writes scores to {cache}", key=f"score cache {cache}"))
    return found


class OptionChecks:
    """Checks of single options. `where` names their table in messages."""

    def __init__(self, where: str, options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """`options`: all of them. `given`: those that the user set."""
        self._where = where
        self._options = options
        self._given = given

    def backend(self) -> None:
        """Exactly one of an endpoint and a model, with the options of that one only."""
        options, where = self._options, self._where
        for name in ("url", "model", "key_env", "path", "device"):
            self.text(name)
        if bool(options["url"]) == bool(options["path"]):
            raise ConfigError(
                f"{where}: set either url and model (an endpoint) or path (a Hugging Face model), and not both"
            )
        if options["url"]:
            checked_url(options["url"], where)
            if not options["model"]:
                raise ConfigError(f"{where}.model: is required with url; give the name under which it is served")
            if options["key_env"]:
                check_key_env(options["key_env"], where)
        self.only("path", *_LOCAL_ONLY)
        self.only("url", *_REMOTE_ONLY)
        self.one_of("dtype", DTYPES)
        self.flag("trust_remote_code")

    def only(self, backend: str, *names: str) -> None:
        """Reject options that were set and have no effect with the other backend."""
        for name in names:
            if name in self._given and not self._options[backend]:
                raise ConfigError(f"{self._where}.{name}: has no effect without {backend}; leave it out")

    def whole(self, name: str, least: int) -> None:
        value = self._options[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{self._where}.{name}: {value!r}: must be a whole number, at least {least}")

    def number(self, name: str, least: float = -math.inf) -> None:
        value = self._options[name]
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if not plain or not math.isfinite(value) or value < least:
            bound = f", at least {least:g}" if math.isfinite(least) else ""
            raise ConfigError(f"{self._where}.{name}: {value!r}: must be a number{bound}")

    def text(self, name: str) -> None:
        if not isinstance(self._options[name], str):
            raise ConfigError(f"{self._where}.{name}: must be text")

    def flag(self, name: str) -> None:
        if not isinstance(self._options[name], bool):
            raise ConfigError(f"{self._where}.{name}: {self._options[name]!r}: must be true or false")

    def one_of(self, name: str, known: tuple[str, ...]) -> None:
        if self._options[name] not in known:
            raise ConfigError(f"{self._where}.{name}: {self._options[name]!r}: must be one of {', '.join(known)}")
