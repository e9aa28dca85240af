"""Build a `Config` from a TOML recipe and `--section.key=value` overrides.

In: a recipe path and override strings. Out: a `Config`, or a one-line `ConfigError` that names the key and the fix.
Invariant: files and overrides go through the same conversion and checks. An unknown key is an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
import types
import typing
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gspo import aliases
from gspo.config.checks import check
from gspo.config.schema import TINY_MODELS, Config, ObjectiveConfig, help_texts, named_section
from gspo.equivalents.explain import explain
from gspo.errors import ConfigError
from gspo.field_types import field_types


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe and apply `a.b=c` overrides (a leading `--` is allowed)."""
    path = find_recipe(path)
    config = override(read_toml(path), overrides, where=str(path))
    check(config)
    return config


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file. A byte-order mark is allowed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    except (ValueError, RecursionError) as error:
        # Beyond TOMLDecodeError, an integer with too many digits is a ValueError, and deep nesting a RecursionError.
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def override(tree: Mapping[str, Any], overrides: Sequence[str], *, where: str, report_old_names: bool = True) -> Config:
    """Build a `Config` from tables and overrides. An error says which of the two caused it.

    Old names of settings are reported, unless the tables are those of a run, which nobody is going to edit."""
    pairs = _override_pairs(overrides)
    return with_settings(tree, pairs, where=where, given_where="command line", report_old_names=report_old_names)


def with_settings(
    tree: Mapping[str, Any],
    pairs: Sequence[tuple[str, Any]],
    *,
    where: str,
    given_where: str,
    report_old_names: bool = True,
) -> Config:
    """Build a `Config` from tables and (dotted key, value) pairs that take precedence over them."""
    tree, renamed = aliases.tables(tree, where=where)
    if report_old_names:
        _report_old_names(renamed, where)
    config = from_tree(tree, where=where)
    if not pairs:
        return config
    given = dict(pairs)
    if given.get("objective.name", config.objective.name) != config.objective.name:
        # Objectives have different settings: those of the recipe's objective do not carry over to another one.
        tree["objective"] = {}
    if given.get("eval.patience") == 0 and config.eval.patience:
        # A setting without effect is an error, so a resume could not turn early stopping off otherwise.
        for name in ("min_gain",) if config.checkpoint.keep_best else ("min_gain", "metric"):
            tree["eval"].pop(name, None)
    for key, value in pairs:
        _set(tree, key, value, where=given_where)
    return from_tree(tree, where=given_where)


def _override_pairs(overrides: Sequence[str]) -> list[tuple[str, Any]]:
    """(key, value) of each override, with today's names."""
    split = [_split_override(text) for text in overrides]
    given = [(key, _parse(raw, aliases.setting(key))) for key, raw in split]
    tree: dict[str, Any] = {}
    for key, value in given:
        _set(tree, key, value, where="command line")
    _report_old_names(aliases.tables(tree, where="command line")[1], "command line")
    return [(aliases.setting(key), value) for key, value in given]


def _report_old_names(renamed: Mapping[str, str], where: str) -> None:
    for old, new in renamed.items():
        warnings.warn(f"{where}: {aliases.renamed_note(old, new)}", FutureWarning, stacklevel=2)


def find_recipe(path: str | Path) -> Path:
    """Find a recipe by its path, or by the bare name of a built-in one (`demo`)."""
    given = Path(path)
    name = given.name.removesuffix(".toml")
    shipped = recipe_dir() / f"{aliases.RECIPES.get(name, name)}.toml"
    if given.is_file():
        return given
    # After the user's own file, so that a shipped recipe never shadows it.
    if given.parent in (Path("."), Path("recipes")) and shipped.is_file():
        _report_old_names({name: shipped.stem} if name in aliases.RECIPES else {}, "recipe")
        return shipped
    names = ", ".join(sorted(p.stem for p in recipe_dir().glob("*.toml")))
    raise ConfigError(
        f"{given}: no such recipe; give the path of a .toml file or the name of a built-in recipe: {names}"
    )


def recipe_dir() -> Path:
    """Directory of the built-in recipes: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).parent.parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def from_tree(tree: Mapping[str, Any], *, where: str) -> Config:
    """Build a `Config` from nested tables, naming `where` and the key in every error."""
    return _build(Config, _with_defaults(aliases.tables(tree, where=where)[0]), where=where, prefix="")


_PRESENTATION = ("instruction", "system", "chat", "max_prompt_tokens", "on_bad_row")
_FIELDS = ("prompt_field", "prompt_template", "answer_field", "answer_after")
"""Keys of `[data]` that say how rows are read. A generated task has no rows."""


def _with_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with the defaults that sources and evaluation sets take from `[data]` and `[eval]` filled in."""
    data, evaluation = (tree.get(name) for name in ("data", "eval"))
    data = data if isinstance(data, Mapping) else {}
    evaluation = evaluation if isinstance(evaluation, Mapping) else {}
    schedule = {k: evaluation[k] for k in ("every", "samples", "greedy") if k in evaluation}
    full = dict(tree)
    if isinstance(data.get("mix"), Mapping):
        held_out = {"held_out": data["held_out"]} if "held_out" in data else {}
        fields = (*_FIELDS, "solution_field")
        full["data"] = {**data, "mix": {k: _source(v, data, held_out, fields) for k, v in data["mix"].items()}}
    if isinstance(evaluation.get("sets"), Mapping):
        full["eval"] = {**evaluation, "sets": {k: _source(v, data, schedule) for k, v in evaluation["sets"].items()}}
    return full


def _source(table: Any, data: Mapping[str, Any], defaults: Mapping[str, Any], fields: Sequence[str] = _FIELDS) -> Any:
    if not isinstance(table, Mapping):
        return table  # `_build` reports it
    keys = [*_PRESENTATION, *(() if table.get("task") else fields)]
    # Each of the two replaces the other.
    other = {"prompt_field": "prompt_template", "prompt_template": "prompt_field"}
    shared = {k: data[k] for k in keys if k in data and not table.get(other.get(k, ""))}
    return {**defaults, **shared, **table}


def anchored(config: Config) -> Config:
    """The same settings with absolute paths, so that a run can be resumed and evaluated from another directory.

    Paths of required files are relative to the current directory. `model.path` and the options of rewards and engines
    may also hold a hub name or a URL, so they are treated as paths only if such a file or directory exists."""
    model = config.model
    data = config.data
    reward = config.reward
    specs = {spec: _anchored_function(spec) for spec in config.reward_functions}

    def anchored_section(section: Any) -> Any:
        changes: dict[str, Any] = {"path": _absolute(section.path)}
        if hasattr(section, "held_out_path"):
            changes["held_out_path"] = _absolute(section.held_out_path)
        if hasattr(section, "reward"):
            changes["reward"] = tuple(specs[spec] for spec in section.reward)
        return dataclasses.replace(section, **changes)

    mix = {name: anchored_section(source) for name, source in data.mix.items()}
    sets = {name: anchored_section(one) for name, one in config.eval.sets.items()}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            model,
            path=_absolute_if_exists(model.path),
            build=model.build if model.build in TINY_MODELS else _absolute(model.build),
        ),
        objective=dataclasses.replace(config.objective, name=_anchored_function(config.objective.name)),
        data=dataclasses.replace(anchored_section(data), mix=mix),
        eval=dataclasses.replace(config.eval, sets=sets),
        rollout=dataclasses.replace(config.rollout, engine_options=_anchored_options(config.rollout.engine_options)),
        environment=dataclasses.replace(
            config.environment,
            name=_anchored_function(config.environment.name),
            options=_anchored_options(config.environment.options),
        ),
        reward=dataclasses.replace(
            reward,
            functions=tuple(specs[spec] for spec in reward.functions),
            options={
                specs.get(spec, spec): _anchored_options(options) if isinstance(options, Mapping) else options
                for spec, options in reward.options.items()
            },
        ),
    )


def _anchored_function(spec: str) -> str:
    file, colon, function = spec.rpartition(":")
    return f"{_absolute(file)}:{function}" if colon else spec


def _anchored_options(options: Mapping[str, Any]) -> dict[str, Any]:
    # Only with a separator: an option such as `python = "python3"` names a program, even if such a file exists here.
    paths = {k: v for k, v in options.items() if isinstance(v, str) and os.sep in v}
    return {**options, **{k: _absolute_if_exists(v) for k, v in paths.items()}}


def _absolute_if_exists(path: str) -> str:
    try:
        return _absolute(path) if path and Path(path).expanduser().exists() else path
    except (OSError, RuntimeError):  # A name that is too long for a path, or `~user` without such a user.
        return path


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def from_flat(values: Mapping[str, Any], *, where: str) -> Config:
    """Build a `Config` from settings by dotted key, as `flat` returns them. Missing ones get their defaults."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        _set(tree, key, value, where=where)
    return from_tree(tree, where=where)


def _build(cls: type, tree: Mapping[str, Any], *, where: str, prefix: str) -> Any:
    hints = field_types(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    values: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for key, value in tree.items():
        # Each objective has settings of its own, so [objective] accepts any key. The objective table checks them later.
        if cls is ObjectiveConfig and key != "name":
            settings.update(value if key == "settings" and isinstance(value, Mapping) else {key: value})
        elif key not in names:
            raise ConfigError(f"{where}: unknown setting {prefix}{key}{_hint(key, prefix, names, value)}")
        elif item := named_section(hints[key]):
            values[key] = _build_named(item, value, where=where, key=prefix + key)
        elif dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                example = _example(hints[key], prefix + key)
                raise ConfigError(f"{where}: {prefix}{key} is a section; set one of its keys, e.g. {example}")
            values[key] = _build(hints[key], value, where=where, prefix=f"{prefix}{key}.")
        else:
            values[key] = _convert(value, hints[key], where=where, key=prefix + key)
    if settings:
        values["settings"] = settings
    return cls(**values)


def _build_named(cls: type, tables: Any, *, where: str, key: str) -> dict[str, Any]:
    """Sections that a recipe names itself, such as `[data.mix.NAME]`."""
    if not isinstance(tables, Mapping) or not all(isinstance(table, Mapping) for table in tables.values()):
        raise ConfigError(f"{where}: {key} holds named tables; write each as [{key}.NAME]")
    for name in tables:
        # The name becomes part of metric keys, of prompt ids and of overrides, where a dash is an underscore.
        if not re.fullmatch("[A-Za-z0-9_]{1,40}", name):
            raise ConfigError(f"{where}: {key}: a name has 1 to 40 letters, digits and '_', not {name!r}")
    return {name: _build(cls, table, where=where, prefix=f"{key}.{name}.") for name, table in tables.items()}


def _example(cls: type, key: str) -> str:
    return f"{key}.{dataclasses.fields(cls)[0].name}"


_SHARDED = "several ranks share the weights instead (gspo train --nproc N)"
_NOT_AVAILABLE = {
    "expert_parallel": "not available, because gradients were wrong in one layout of transformers; " + _SHARDED,
    "tensor_parallel": "not implemented; " + _SHARDED,
    "pipeline_parallel": "not implemented; " + _SHARDED,
    "cpu_offload": "not available; learner.optimizer_offload works in a single process",
}
"""How other systems distribute a model, and why this one does not (docs/scale.md)."""


def _hint(key: str, prefix: str, names: Sequence[str], value: Any) -> str:
    everywhere = [k for k, *_ in help_texts()]
    # A right key in the wrong section is the most helpful suggestion.
    elsewhere = [k for k in everywhere if k.rsplit(".", 1)[-1] == key]
    if not elsewhere and (about := explain(prefix + key, value)):
        return f"; {about}"
    if refused := next((why for name, why in _NOT_AVAILABLE.items() if key.startswith(name)), ""):
        return f"; {refused} (docs/scale.md)"
    close = elsewhere or [prefix + n for n in difflib.get_close_matches(key, names, n=1)]
    close = close or difflib.get_close_matches(prefix + key, everywhere, n=1, cutoff=0.8)
    return f"; did you mean {' or '.join(close)}?" if close else f"; known here: {', '.join(names)}"


def _convert(value: Any, hint: Any, *, where: str, key: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value in args:
            return value
        raise ConfigError(f"{where}: {key} must be one of {', '.join(map(repr, args))}, not {value!r}")
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_convert(v, args[0], where=where, key=key) for v in items)
    if origin in (types.UnionType, typing.Union):
        return _convert_union(value, args, where=where, key=key)
    # In Python a bool is an int, but `learning_rate = true` is a mistake.
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint in (str, bool) and isinstance(value, hint):
        return value
    if getattr(origin, "__name__", "") == "Mapping" and isinstance(value, Mapping):
        return dict(value)
    wanted = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(hint, "a table")
    raise ConfigError(f"{where}: {key} must be {wanted}, not {value!r}")


def _convert_union(value: Any, kinds: Sequence[Any], *, where: str, key: str) -> Any:
    """The value as the first of the kinds that accepts it."""
    expected = []
    for kind in kinds:
        try:
            return _convert(value, kind, where=where, key=key)
        except ConfigError as error:
            expected.append(str(error).partition(" must be ")[2].rpartition(", not ")[0])
    raise ConfigError(f"{where}: {key} must be {', or '.join(expected)}, not {value!r}")


def _split_override(text: str) -> tuple[str, str]:
    key, sign, raw = text.removeprefix("--").partition("=")
    if not sign or not key:
        raise ConfigError(f"command line: {text!r} is not an override; write --section.key=value")
    return key.replace("-", "_"), raw


def _parse(raw: str, key: str) -> Any:
    hint = type_of(key)
    # Text is taken as it is: `--model.path=1e3` names a directory, not a number.
    if hint is str or typing.get_origin(hint) is Literal:
        return raw
    is_list = typing.get_origin(hint) is tuple
    # A list may be written without brackets (`1,2`), and its strings without quotes (`a.py:f,b.py:g`).
    for text in (raw, f"[{raw}]") if is_list else (raw,):
        try:
            return tomllib.loads(f"x = {text}")["x"]
        except tomllib.TOMLDecodeError:
            continue
    return [part.strip() for part in raw.split(",")] if is_list else raw


def type_of(key: str) -> Any:
    """The type of a setting by its dotted key: a dataclass for a section; None if it is unknown."""
    cls: Any = Config
    for part in key.split("."):
        if item := named_section(cls):
            cls = item
            continue
        if not dataclasses.is_dataclass(cls):
            return None
        cls = field_types(cls).get(part)
    return cls


def _set(tree: dict[str, Any], key: str, value: Any, *, where: str) -> None:
    *parents, last = key.split(".")
    for part in parents:
        child = tree.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{where}: {key}: {part} is not a section")
        tree = child
    tree[last] = value
