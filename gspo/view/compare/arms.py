"""What is compared: arms and seeds, from the command line.

In: `grpo,grpo+replay,gspo+kl=0` and `0,1,2` or `0-4`. Out: `Arm`s and seeds, or a `ConfigError` of one line.
Invariant: an arm's slug depends on its label alone, is safe as a file name, and differs between labels.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from gspo.errors import ConfigError

_SHARED = ("objective.name", "model.path", "model.build", "cold_start.", "data.")
"""How settings begin that all arms have in common: the model they start from and the problems they are measured on."""

MOST_SEEDS = 1000
_SLUG = 80


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One thing that is compared: a row of the table with changed settings."""

    label: str
    """As written on the command line."""
    row: str
    options: tuple[str, ...] = ()
    """The changes as overrides, `objective.kl=0`."""

    @property
    def overrides(self) -> list[str]:
        """The whole arm as overrides of a recipe."""
        return [f"objective.name={self.row}", *self.options]

    @property
    def slug(self) -> str:
        """The label as a file name."""
        return slug(self.label)


def parse_arms(text: str) -> list[Arm]:
    """Arms from `NAME[+OPTION...],...`; whether rows and settings exist is checked with the recipe."""
    arms = [parse_arm(part.strip()) for part in text.split(",")]
    for number, arm in enumerate(arms):
        if arm.label in [a.label for a in arms[:number]]:
            raise ConfigError(f"--objectives: {arm.label!r} is there twice; give each arm once")
    return arms


def parse_arm(label: str) -> Arm:
    """One arm. A `+` begins an option only before a letter, so that `kl=1e+3` and `kl_estimator=k3+` are values."""
    if not label.isprintable():
        raise ConfigError(f"--objectives: {label!r} holds characters that cannot be shown; write plain text")
    row, *options = re.split(r"\+(?=[A-Za-z_])", label)
    if not row:
        raise ConfigError(f"--objectives: an arm without a name in {label!r}; write for example grpo,grpo+replay,gspo")
    return Arm(label=label, row=row, options=tuple(_option(label, option) for option in options))


def _option(label: str, text: str) -> str:
    key, sign, value = text.partition("=")
    key = key.strip().replace("-", "_")
    if key == "replay":
        return f"routing.replay={value if sign else 'old'}"
    if not sign:
        raise ConfigError(f"--objectives: {label!r}: {text!r} is not an option; write replay, KEY=VALUE for a setting of the objective, or SECTION.KEY=VALUE")  # fmt: skip
    key = key if "." in key else f"objective.{key}"
    if key.startswith(_SHARED):
        raise ConfigError(f"--objectives: {label!r}: {key} is the same for all arms, which start from one model and are measured on the same problems; leave it out")  # fmt: skip
    return f"{key}={value}"


def parse_seeds(text: str) -> list[int]:
    """Seeds from `0,1,2`, `0-4` or a mixture."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,19})\s*(?:-\s*(\d{1,19})\s*)?", part, re.ASCII)
        if not match:
            raise ConfigError(f"--seeds: {part.strip()!r} is no seed; write for example 0,1,2 or 0-4")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MOST_SEEDS:
            raise ConfigError(f"--seeds: {part.strip()!r} is no range of at most {MOST_SEEDS} seeds; write for example 0-4")  # fmt: skip
        seeds += range(first, last + 1)
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds: a seed is there twice in {text!r}; give each once")
    return seeds


def slug(label: str) -> str:
    """The label as a file name: a label that cannot be one as it is gets a digest, so that two never meet."""
    plain = re.sub(r"[^A-Za-z0-9._+=-]", "_", label)
    if plain == label and len(label) <= _SLUG and not label.startswith("."):
        return label
    return f"{plain[: _SLUG - 9].lstrip('.')}-{hashlib.blake2b(label.encode(), digest_size=4).hexdigest()}"
