"""Arms and seeds of a comparison, parsed from the command line.

In: `grpo,grpo+replay,gspo+kl=0` and `0,1,2` or `0-4`. Out: `Arm`s and seeds, or a one-line `ConfigError`.
Invariant: an arm's slug depends only on its label, is a safe file name, and is unique per label.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from gspo.errors import ConfigError

# Another start or other problems would be another experiment.
_SHARED = ("objective.name", "model.path", "model.build", "cold_start.", "data.")
"""Prefixes of settings that all arms share: the initial model and the problems used for training and evaluation."""

MOST_SEEDS = 1000
_SLUG_LENGTH = 80


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One arm of the comparison: an objective with changed settings."""

    label: str
    """As written on the command line."""
    objective: str
    options: tuple[str, ...] = ()
    """The changed settings as overrides, for example `objective.kl=0`."""

    @property
    def overrides(self) -> list[str]:
        """All of the arm's settings as overrides of a recipe."""
        return [f"objective.name={self.objective}", *self.options]

    @property
    def slug(self) -> str:
        """The label as a file name."""
        return slug(self.label)


def parse_arms(text: str) -> list[Arm]:
    """Parse `NAME[+OPTION...],...`. Whether objectives and settings exist is checked later, with the recipe."""
    # Not at the commas of a list: `dapo+shape=["overlong_filter","soft_overlong"]`.
    arms = [parse_arm(part.strip()) for part in re.split(r",(?![^\[\]]*\])", text)]
    for number, arm in enumerate(arms):
        if arm.label in [a.label for a in arms[:number]]:
            raise ConfigError(f"--objectives: {arm.label!r} is given twice; give each arm once")
    return arms


def parse_arm(label: str) -> Arm:
    """Parse one arm. A `+` starts an option only before a letter, so `kl=1e+3` and `kl_estimator=k3+` are values."""
    if not label.isprintable():
        raise ConfigError(f"--objectives: {label!r} contains unprintable characters; write plain text")
    objective, *options = re.split(r"\+(?=[A-Za-z_])", label)
    if not objective:
        raise ConfigError(f"--objectives: an arm without a name in {label!r}; write for example grpo,grpo+replay,gspo")
    return Arm(label=label, objective=objective, options=tuple(_option(label, option) for option in options))


def _option(label: str, text: str) -> str:
    key, sign, value = text.partition("=")
    key = key.strip().replace("-", "_")
    if key == "replay":
        return f"routing.replay={value if sign else 'old'}"
    if not sign:
        raise ConfigError(
            f"--objectives: {label!r}: {text!r} is not an option; write replay, KEY=VALUE for a setting of the "
            "objective, or SECTION.KEY=VALUE"
        )
    key = key if "." in key else f"objective.{key}"
    if key.startswith(_SHARED):
        raise ConfigError(
            f"--objectives: {label!r}: {key} is the same for all arms, which start from one model and are evaluated "
            "on the same problems; leave it out"
        )
    return f"{key}={value}"


def parse_seeds(text: str) -> list[int]:
    """Parse seeds from `0,1,2`, `0-4` or a mixture of both."""
    seeds: list[int] = []
    for part in text.split(","):
        # At most 19 digits, those of the largest seed.
        match = re.fullmatch(r"\s*(\d{1,19})\s*(?:-\s*(\d{1,19})\s*)?", part, re.ASCII)
        if not match:
            raise ConfigError(f"--seeds: {part.strip()!r} is not a seed; write for example 0,1,2 or 0-4")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MOST_SEEDS:
            raise ConfigError(
                f"--seeds: {part.strip()!r} is not a range of at most {MOST_SEEDS} seeds; write for example 0-4"
            )
        seeds += range(first, last + 1)
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds: a seed appears twice in {text!r}; give each seed once")
    return seeds


def slug(label: str) -> str:
    """The label as a file name. A label that had to be changed gets a digest, so that two labels never collide."""
    plain = re.sub(r"[^A-Za-z0-9._+=-]", "_", label)
    # A leading dot would hide the run directory, and `..` would lead out of the comparison.
    if plain == label and len(label) <= _SLUG_LENGTH and not label.startswith("."):
        return label
    return f"{plain[: _SLUG_LENGTH - 9].lstrip('.')}-{hashlib.blake2b(label.encode(), digest_size=4).hexdigest()}"
