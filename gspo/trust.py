"""Code that a run directory's settings would execute, and whether the user has approved it.

In: a run directory, its settings, and the folders its models would be loaded from. Out: nothing, or a `TrustError` that
lists what would run. Invariant: code named by a run directory runs only after the user approved it on the command line,
by starting the run on this machine or with `--trust-run`. Approvals are stored outside the run directory, in the user's
state directory, keyed by the run's path and each file's content, so a change of either requires a new approval. For a
reward file's imports, this covers what `reward/local_imports.py` finds; installed packages are not covered.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.config import Config, ModelConfig
from gspo.errors import ConfigError, RewardError, TrustError
from gspo.model.adapter import base_of
from gspo.objectives.custom import custom_file, is_custom
from gspo.reward.function import Source, find_sources
from gspo.reward.local_imports import local_imports
from gspo.reward.traits import reward_traits
from gspo.rollout.engine import engine_traits
from gspo.serving.verifiers_env import NAME as VERIFIERS


@dataclass(frozen=True, kw_only=True)
class Code:
    """Code that the settings would execute, or a server they would send a secret to."""

    what: str
    """Description for the user: which setting, which file, which function."""
    key: str
    """Identifies the code independently of the checkpoint it is in."""
    digest: str = ""
    """SHA-256 of the file; empty if its content cannot be read locally."""


def all_code(config: Config, models: Sequence[Path | str]) -> list[Code]:
    """All code that sampling and scoring with these settings would execute if the models were loaded from `models`."""
    return [*reward_code(config), *environment_code(config), *engine_code(config), *model_code(config.model, models)]


def objective_code(config: Config) -> list[Code]:
    """The file of a custom objective, which runs where a run is trained or replayed, and not where it is evaluated."""
    name = config.objective.name
    if not is_custom(name):
        return []
    try:
        file = custom_file(name)
    except ConfigError:  # a name without a file cannot run; building the objective reports it
        return []
    what = f"objective.name runs {file}"
    return [Code(what=what, key=f"objective {file}", digest=_digest(file)), *_imported_code(file, [Path.cwd()])]


def reward_code(config: Config) -> list[Code]:
    """Reward files, and options that let a built-in reward start programs outside a sandbox."""
    # One at a time, so that one missing file does not hide the others.
    sources: list[Source] = []
    for spec in config.reward_functions:
        with suppress(ConfigError, RewardError):  # a missing file cannot run; building the reward reports it later
            options = {spec: config.reward.options[spec]} if spec in config.reward.options else {}
            sources += find_sources((spec,), options, None)
    found = []
    # The worker can import from the folder of every reward file, wherever the importing file is.
    folders = list(dict.fromkeys([*(Path(s.file).parent for s in sources if s.file), Path.cwd()]))
    for source in sources:
        if source.file:
            what = f"reward.functions imports {source.file} and calls {source.function}()"
            found.append(Code(what=what, key=f"{source.file}:{source.function}", digest=_digest(Path(source.file))))
            found += _imported_code(Path(source.file), folders)
        elif source.options:  # without options a built-in reward runs only its own code, and is not imported for this
            for code in reward_traits(source.spec).foreign_code(source.options):
                found.append(Code(what=code.what, key=code.key, digest=_digest(Path(code.file)) if code.file else ""))
    return found


def environment_code(config: Config) -> list[Code]:
    """The file of an environment, or the taskset of another package."""
    if config.environment.name == VERIFIERS:
        options = config.environment.options
        named = f"{options.get('taskset')} of verifiers with {options.get('python') or 'this Python'}"
        return [Code(what=f"environment.options runs taskset {named}", key=f"taskset {named}")]
    file, colon, cls = config.environment.name.rpartition(":")
    if not colon:
        return []
    code = Code(what=f"environment.name imports {file} and uses {cls}", key=f"{file}:{cls}", digest=_digest(Path(file)))
    return [code, *_imported_code(Path(file), [Path(file).parent, Path.cwd()])]


def _imported_code(file: Path, folders: Sequence[Path]) -> Iterator[Code]:
    """Modules in these folders that a user's file imports, directly or transitively."""
    for module in local_imports(file, folders):
        yield Code(what=f"{file} imports {module}", key=f"module {module}", digest=_digest(module))


def engine_code(config: Config) -> list[Code]:
    """What the options of the engine make it run or contact."""
    try:
        traits = engine_traits(config.rollout.engine)
    except ConfigError:  # an engine that does not exist runs nothing; building it says so
        return []
    return [Code(what=what, key=key) for what, key in traits.foreign_code(config.rollout.engine_options)]


def model_code(config: ModelConfig, models: Sequence[Path | str]) -> list[Code]:
    """Python code shipped with the models, if the settings allow it to run."""
    if not config.trust_remote_code:
        return []
    named = dict.fromkeys(str(m) for m in models if str(m))
    waiting = list(named)
    while waiting:  # an adapter's base model may itself be an adapter
        if (base := base_of(waiting.pop())) and base not in named:
            named[base] = None
            waiting.append(base)
    return list(dict.fromkeys(code for model in named for code in _code_in(model)))


def _code_in(model: str) -> Iterator[Code]:
    """The Python files in a model's folder, and those its JSON files name, which may be anywhere, even behind a
    link."""
    path = Path(model).expanduser()
    why = "model.trust_remote_code imports"
    if not path.exists():
        yield Code(what=f"{why} the code of {model} on the hub", key=f"hub {model}")
        return
    folder = path if path.is_dir() else path.parent
    named = {file: _named_in(file) for file in sorted(folder.glob("*.json"))}
    modules = [folder / f"{name}.py" for names in named.values() for name in names if "--" not in name]
    siblings = [file for module in modules for file in module.parent.glob("*.py")]  # a module may import its siblings
    for file in sorted({*(folder.rglob("*.py") if path.is_dir() else ()), *modules, *siblings}):
        inside = file.relative_to(folder) if file.is_relative_to(folder) else file
        yield Code(what=f"{why} {file}", key=f"model {inside}", digest=_digest(file))
    for file, names in named.items():
        for repository in sorted({name.partition("--")[0] for name in names if "--" in name}):
            yield Code(what=f"{why} the code of {repository} on the hub ({file})", key=f"hub {repository}")


def _named_in(file: Path) -> set[str]:
    """The modules named in a model's `auto_map`, without their classes: `module.Class`, `owner/name--module.Class`."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return set()
    found = set()
    # A stack instead of recursion: the file may be nested deeply.
    waiting = [(tree, False)]
    while waiting:
        value, in_map = waiting.pop()
        if isinstance(value, dict):
            waiting += [(v, in_map or k == "auto_map") for k, v in value.items()]
        elif isinstance(value, list):
            waiting += [(v, in_map) for v in value]
        elif in_map and isinstance(value, str):
            found.add(value.rpartition(".")[0])
    return found - {""}


def check(run: Path, code: Sequence[Code], *, trust: bool) -> None:
    """Raise `TrustError` for code that this user has not approved. `trust` approves it now."""
    if trust:
        remember(run, code)
        return
    approved = _approved(run)
    # By content: an approved file that was changed since must be approved again.
    unapproved = [c for c in code if approved.get(c.key) != c.digest]
    if unapproved:
        listing = "; ".join(
            c.what + (" (changed since it last ran here)" if c.key in approved else "") for c in unapproved
        )
        raise TrustError(
            f"{run}: this run directory names code that you have not approved here: {listing}. "
            "If you trust it like your own code, add --trust-run"
        )


def remember(run: Path, code: Sequence[Code]) -> None:
    """Record that this user approved this code in this run."""
    before = _approved(run)
    now = before | {c.key: c.digest for c in code}
    if now == before:
        return
    file = _record(run)
    with suppress(OSError):  # without a writable state directory the user is asked again next time
        # Private: whoever can write here can approve code.
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = file.with_name(f".tmp-{os.getpid()}-{file.name}")
        # The path is for people; the name of the file identifies the run.
        partial.write_text(json.dumps({"run": str(run.resolve()), "code": now}, indent=2) + "\n", encoding="utf-8")
        partial.replace(file)  # atomic: another process never reads half a record


def _approved(run: Path) -> dict[str, str]:
    try:
        found: Any = json.loads(_record(run).read_text(encoding="utf-8"))["code"]
        return {str(key): str(digest) for key, digest in found.items()}
    # A damaged record approves nothing.
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _record(run: Path) -> Path:
    """The file with a run's approvals, in the state directory of the XDG Base Directory Specification."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "gspo" / "trusted" / f"{hashlib.sha256(os.fsencode(run.resolve())).hexdigest()}.json"


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError:
        return ""
