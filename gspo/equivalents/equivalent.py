"""A line of a table of equivalents, and the result of converting a config.

In: the values of another trainer's settings. Out: a `Conversion`. Invariant: every given setting ends up in exactly one
of its lists, so nothing is dropped without being said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

SINKS = ("tensorboard", "wandb", "trackio", "mlflow")
"""Loggers with the same name here."""
_NAME = 64
"""Characters of a run's name."""


class Kind(Enum):
    """What becomes of a setting."""

    SAME = "same"
    """The value is taken as it is."""
    CONVERTED = "converted"
    """The value is computed, often together with others."""
    UNNEEDED = "not needed"
    """It changes nothing here that matters for the result."""
    MISSING = "no equivalent"


@dataclass(frozen=True, kw_only=True)
class Equivalent:
    """A setting of another trainer."""

    name: str
    kind: Kind
    keys: tuple[str, ...] = ()
    """Our settings that have its effect."""
    default: Any = None
    """Its default there; None if it is unset, or of no importance."""
    note: str = ""
    """Where the meaning differs, or what to do instead."""
    neutral: tuple[Any, ...] = ()
    """Of a setting without an equivalent: values besides the default that change nothing."""
    carry: bool = True
    """Whether the default there is taken over."""

    def loses(self, value: Any) -> bool:
        """Whether a config with this value needs what does not exist here."""
        return self.kind is Kind.MISSING and value not in (None, self.default, *self.neutral)

    @property
    def sentence(self) -> str:
        """What it is here, after its name."""
        if self.kind is Kind.MISSING:
            return f"has no equivalent here; {self.note}" if self.note else "has no equivalent here"
        if self.kind is Kind.UNNEEDED:
            return f"is not needed here: {self.note}"
        text = f"is {' and '.join(self.keys)} here"
        return f"{text} ({self.note})" if self.note else text


def same(name: str, key: str, default: Any = None, note: str = "", *, carry: bool = True) -> Equivalent:
    return Equivalent(name=name, kind=Kind.SAME, keys=(key,), default=default, note=note, carry=carry)


def converted(name: str, keys: str, default: Any = None, note: str = "") -> Equivalent:
    return Equivalent(name=name, kind=Kind.CONVERTED, keys=tuple(keys.split()), default=default, note=note)


def unneeded(names: str, note: str) -> list[Equivalent]:
    return [Equivalent(name=name, kind=Kind.UNNEEDED, note=note) for name in names.split()]


def missing(name: str, default: Any = None, note: str = "", neutral: Sequence[Any] = ()) -> Equivalent:
    return Equivalent(name=name, kind=Kind.MISSING, default=default, note=note, neutral=tuple(neutral))


@dataclass(kw_only=True)
class Conversion:
    """A config of another trainer as our settings."""

    trainer: str
    table: Mapping[str, Equivalent]
    given: Mapping[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    """Our settings by dotted key."""
    origin: dict[str, str] = field(default_factory=dict)
    """Of each key: what it was made from."""
    explicit: set[str] = field(default_factory=set)
    """The keys that a given setting decides. The others come from the other trainer's defaults."""
    differences: list[str] = field(default_factory=list)
    """Where the meaning differs, one sentence each."""
    lost: dict[str, str] = field(default_factory=dict)
    """Given settings without an equivalent, and the sentence about each."""
    unneeded: list[str] = field(default_factory=list)
    todo: list[str] = field(default_factory=list)
    """What the recipe still needs."""

    def value(self, name: str) -> Any:
        """The given value, or the other trainer's default."""
        found = self.given.get(name)
        return self.table[name].default if found is None and name in self.table else found

    def has(self, *names: str) -> bool:
        """Whether one of these settings is given."""
        return any(self.given.get(name) is not None for name in names)

    def put(self, key: str, value: Any, *names: str) -> None:
        """Set our `key`, which these settings decide."""
        self.settings[key] = value
        named = [name for name in names if self.value(name) is not None]
        self.origin[key] = ", ".join(f"{name} = {self.value(name)}" for name in dict.fromkeys(named))
        if self.has(*names):
            self.explicit.add(key)

    def lose(self, name: str, why: str) -> None:
        """A given value has no equivalent."""
        self.lost[name] = f"{name} = {self.value(name)!r}: {why}"

    def copy_same(self) -> None:
        """Take over what has the same meaning, and list what is lost or not needed."""
        for name, one in self.table.items():
            value = self.value(name)
            if one.kind is Kind.SAME and value is not None and (one.carry or self.has(name)):
                self.put(one.keys[0], value, name)
            elif self.has(name) and one.kind is Kind.UNNEEDED:
                self.unneeded.append(name)
            elif self.has(name) and one.loses(value):
                self.lose(name, one.note or "has no equivalent")
        for name, value in self.given.items():
            if name not in self.table and value is not None:
                self.lose(name, f"is no setting of {self.trainer} that we know")

    def put_name(self, name: str) -> None:
        """Name the run as this setting does, in the characters that ours may have."""
        if self.has(name):
            plain = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in str(self.value(name)))
            self.put("name", plain[:_NAME], name)

    def put_sinks(self, name: str, *, project: str, ignored: Sequence[str]) -> None:
        """Take over the loggers of this setting, and the project. Those that are `ignored` need none here."""
        given = self.value(name)
        loggers = [given] if isinstance(given, str) else list(given or ())
        if known := [logger for logger in loggers if logger in SINKS]:
            self.put("log.sinks", known, name)
            if self.has(project):
                self.put("log.project", self.value(project), project)
        if unknown := [logger for logger in loggers if logger not in (*SINKS, *ignored)]:
            self.lose(name, f"{', '.join(unknown)}: there are {', '.join(SINKS)}")

    def number(self, name: str, kind: Callable[[Any], Any] = float) -> Any:
        """A value as a number. Configs often write `1e-6`, which YAML reads as text."""
        try:
            return kind(float(self.value(name)))
        except (TypeError, ValueError):
            return None
