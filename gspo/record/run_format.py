"""`run.json`: the format of a run directory, and what the objective of the run does.

In: a run directory, possibly from someone else. Out: its format and `ObjectiveFacts`, or a `ConfigError` that names the
file and the fix. Invariant: a directory without the file has format 1. A directory of a later version is refused, never
misread. Nothing here imports torch, so tools that only read a run start fast.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo import __version__
from gspo.errors import ConfigError
from gspo.safe_files import read_regular

FORMAT = 2
"""The format that this version writes, and the highest that it reads."""
FILE = "run.json"
LARGEST_FILE = 1 << 16
LONGEST_TEXT = 100
MOST = 10**6
"""A higher number is not a format number."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveFacts:
    """What the tools that read a run need to know about its objective."""

    advantage_scope: str
    """What a completion is compared with: its `group`, or the whole `batch`."""
    clips: str
    """What the clip range acts on: `sequences`, `tokens`, or `none` without a clip range."""
    clips_log_ratio: bool
    """Whether the clip range bounds `log r` instead of `r - 1`."""
    shape: str
    """Length shaping: `none`, or one or more names separated by commas."""
    kl_in: str
    """Where a KL penalty goes: `loss` or `reward`."""
    settings: tuple[str, ...]
    """The settings that the objective takes, of those that a diagnosis may advise."""
    takes_penalties: bool = True
    """Whether penalties may be subtracted from its rewards."""
    ratio: str = ""
    """The name of its ratio; empty if it is not recorded."""


@dataclass(frozen=True, kw_only=True)
class RunFormat:
    """The contents of `run.json`."""

    format: int
    objective: ObjectiveFacts | None
    """`None` for format 1, which does not record it."""


def to_json(objective: Mapping[str, Any]) -> str:
    """The text of `run.json`, from what `objectives/describe.py` says about the objective."""
    return json.dumps({"format": FORMAT, "gspo": __version__, "objective": dict(objective)}, indent=2) + "\n"


def read(run: Path) -> RunFormat:
    """The format of a run directory, checked."""
    file = run / FILE
    try:
        values = json.loads(read_regular(file, LARGEST_FILE))
    except (FileNotFoundError, NotADirectoryError):
        return RunFormat(format=1, objective=None)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}; a run writes it as a plain file") from None
    except (ValueError, RecursionError) as error:
        # Beyond JSONDecodeError, an integer with too many digits is a ValueError, and deep nesting a RecursionError.
        raise ConfigError(f"{file}: not valid JSON ({type(error).__name__}); restore it from a copy") from None
    number = values.get("format") if isinstance(values, dict) else None
    # Not isinstance: JSON's `true` is a bool, which is a subclass of int.
    if type(number) is not int or not 2 <= number <= MOST:
        raise ConfigError(f"{file}: has no valid format number; restore it from a copy")
    if number > FORMAT:
        raise ConfigError(
            f"{file}: the run directory has format {number}, and gspo {__version__} reads formats up to {FORMAT}; "
            "update gspo"
        )
    return RunFormat(format=number, objective=_facts(values.get("objective"), file))


def _facts(values: Any, file: Path) -> ObjectiveFacts:
    found = values if isinstance(values, dict) else {}
    facts = {f.name: found.get(f.name) for f in dataclasses.fields(ObjectiveFacts)}
    settings, penalties, ratio = (facts.pop(name) for name in ("settings", "takes_penalties", "ratio"))
    for name, value in facts.items():
        # Other texts than those of a run match no rule, so they need no check here.
        valid = isinstance(value, bool) if name == "clips_log_ratio" else isinstance(value, str)
        if not valid or len(str(value)) > LONGEST_TEXT:
            raise ConfigError(f"{file}: objective.{name} is missing or not valid; restore it from a copy")
    # Earlier versions did not record these.
    if settings is None:
        settings = _usual_settings(str(found.get("name")), str(facts["clips"]))
    return ObjectiveFacts(
        **facts,  # type: ignore[arg-type]
        settings=tuple(s for s in settings if isinstance(s, str)) if isinstance(settings, list | tuple) else (),
        takes_penalties=penalties is not False,
        ratio=ratio[:LONGEST_TEXT] if isinstance(ratio, str) else "",
    )


def _usual_settings(name: str, clips: str) -> tuple[str, ...]:
    """What the objectives took when runs did not record it."""
    own = ("clip_low", "clip_high") if clips != "none" else ()
    return ("keep", "shape", "entropy", *own, *(() if name in ("vespo", "minirl") else ("mismatch",)))


# The objectives of format 1, which records only their names. Later objectives are never in such a directory.
_CLIPS = {
    **dict.fromkeys(("gspo", "gspo_token", "luspo"), "sequences"),
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "reinforce_pp", "minirl", "clip_cov", "gmpo"), "tokens"),
}
_CLIPS_LOG_RATIO = ("gmpo",)
_SHAPE = {"dapo": "soft_overlong"}
_SCOPE = {"reinforce_pp": "batch"}
_KL_IN = {"reinforce_pp": "reward"}


def format_1_facts(settings: Mapping[str, Any]) -> ObjectiveFacts:
    """The facts of a run of format 1, from the name of its objective and the untrusted tables of its `config.toml`."""
    table = settings.get("objective")
    given = {k: v for k, v in table.items() if isinstance(v, str)} if isinstance(table, Mapping) else {}
    name = given.get("name", "gspo")
    return ObjectiveFacts(
        advantage_scope=_SCOPE.get(name, "group"),
        clips=_CLIPS.get(name, "none"),
        clips_log_ratio=name in _CLIPS_LOG_RATIO,
        shape=given.get("shape", _SHAPE.get(name, "none")),
        kl_in=given.get("kl_in", _KL_IN.get(name, "loss")),
        settings=_usual_settings(name, _CLIPS.get(name, "none")),
    )
