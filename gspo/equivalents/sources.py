"""Configs of other trainers in the forms that people have them: YAML, JSON, a Python script, a shell script, overrides.

In: a file, or `key=value` texts. Out: the trainer's name, its settings by name, and what could not be read. Invariant:
a script is parsed and never run.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gspo.errors import ConfigError

Trainer = Literal["TRL", "verl"]
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(kw_only=True)
class Source:
    """A config as it was found."""

    trainer: Trainer
    values: dict[str, Any]
    unread: list[str] = field(default_factory=list)
    """What only running the script could tell, one sentence each."""


def read_source(given: Sequence[str], trainer: Trainer | None) -> Source:
    """A config from a file, or from overrides such as `actor_rollout_ref.rollout.n=8`, or from both."""
    # Hydra's `~key` and `~key=value` remove a setting.
    removed = [text for text in given if text.startswith("~") and not Path(text).exists()]
    overrides = [text for text in given if "=" in text and text not in removed]
    files = [text for text in given if "=" not in text and text not in removed]
    if len(files) > 1:
        raise ConfigError(f"import-config: give one file, not {len(files)}: {', '.join(files)}")
    if not given:
        raise ConfigError("import-config: give a file (.yaml, .json, .py or .sh), or overrides such as key=value")
    found = _read_file(Path(files[0]), trainer) if files else Source(trainer=trainer or "verl", values={})
    if overrides:
        found.values |= _overrides(overrides)
    for text in removed:
        name = text[1:].partition("=")[0]
        found.values = {k: v for k, v in found.values.items() if k != name and not k.startswith(f"{name}.")}
        found.unread.append(f"{text}: removes a setting of verl; here, it has its default")
    return found


def _read_file(file: Path, trainer: Trainer | None) -> Source:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: cannot be read as text: {error}") from None
    if file.suffix == ".py":
        return _script(text, file)
    if file.suffix in (".sh", ".bash", ".slurm", ".sbatch"):
        return Source(trainer="verl", values=_shell(text, file))
    tables = _json(text, file) if file.suffix == ".json" else _yaml(text, file)
    if not isinstance(tables, Mapping):
        raise ConfigError(f"{file}: must be a table of settings")
    if trainer is None:
        trainer = "verl" if any(isinstance(v, Mapping) and k in _VERL_SECTIONS for k, v in tables.items()) else "TRL"
    values = _flat(tables) if trainer == "verl" else dict(tables)
    return Source(trainer=trainer, values={k: _value(v) for k, v in values.items()})


_VERL_SECTIONS = ("actor_rollout_ref", "algorithm", "trainer", "data")


def _json(text: str, file: Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from None


def _yaml(text: str, file: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from None


def _value(value: Any) -> Any:
    """A value with numbers in place of their texts: YAML reads `1e-6` as text."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value)
    return [_value(v) for v in value] if isinstance(value, list) else value


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{key}.")
        elif not (isinstance(value, str) and "${" in value):  # an interpolation of another setting
            found[f"{prefix}{key}"] = value
    return found


# ------------------------------------------------------------------------------------------------- overrides


def _overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Overrides as hydra reads them: `key=value`, with values as in YAML."""
    import yaml

    values: dict[str, Any] = {}
    for text in texts:
        key, _, raw = text.partition("=")
        try:
            value = yaml.safe_load(raw)
        except yaml.YAMLError:
            value = raw
        # Hydra's `+key` adds a key and `++key` may replace one; both mean the key.
        values[key.lstrip("+-").strip("'\"")] = _value(value)
    return values


def _shell(text: str, file: Path) -> dict[str, Any]:
    """The overrides in a shell script that starts verl, with its own variables filled in."""
    variables: dict[str, str] = {}
    overrides: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        own = [word for word in words if re.fullmatch(r"(export )?[A-Za-z_]\w*=.*", word)]
        if words and len(own) == len([w for w in words if w != "export"]):
            variables |= {k: _filled(v, variables) for k, _, v in (word.partition("=") for word in own)}
        else:
            overrides += [_filled(word, variables) for word in words if re.match(r"\+*[A-Za-z_][\w.]*\.\w+=", word)]
    if not overrides:
        raise ConfigError(f"{file}: has no overrides such as actor_rollout_ref.rollout.n=8")
    return _overrides(overrides)


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """Text with `$NAME`, `${NAME}` and `${NAME:-default}` replaced by the variables of the script. `$HOME` becomes `~`,
    which recipes know."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name) or match[2] or ("~" if name == "HOME" else match[0])

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)", value, text)


# ------------------------------------------------------------------------------------------------- scripts


def _script(text: str, file: Path) -> Source:
    """The calls of GRPOConfig, GRPOTrainer, LoraConfig and load_dataset in a script."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{file}: not valid Python: {error}") from None
    return _Script(tree, file).read()


class _Script:
    def __init__(self, tree: ast.Module, file: Path) -> None:
        self._tree, self._file = tree, file
        self._names = self._assigned()
        self._functions = {
            n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        self._found = Source(trainer="TRL", values={})

    def read(self) -> Source:
        config, trainer = self._call("GRPOConfig"), self._call("GRPOTrainer")
        if config is None:
            raise ConfigError(f"{self._file}: has no call of GRPOConfig(...)")
        if config.args:
            self._put("output_dir", config.args[0])
        self._keywords(config, lambda name: name)
        if trainer is not None:
            self._trainer(trainer)
        return self._found

    def _trainer(self, call: ast.Call) -> None:
        arguments: dict[str, ast.expr] = {k.arg: k.value for k in call.keywords if k.arg}
        arguments |= dict(zip(("model", "reward_funcs"), call.args, strict=False))
        if (model := arguments.get("model")) is not None:
            self._put("model_name_or_path", self._model(model))
        if (rewards := arguments.get("reward_funcs")) is not None:
            self._found.values["reward_funcs"] = [text for item in _items(rewards) if (text := self._function(item))]
        for name in ("tools", "environment_factory"):
            if name in arguments:
                texts = [text for item in _items(arguments[name]) if (text := self._function(item))]
                if texts:
                    self._found.values[name] = ",".join([texts[0], *(t.rpartition(":")[2] for t in texts[1:])])
        for name in ("rollout_func", "reward_processing_classes", "optimizers"):
            if name in arguments:
                self._found.values[name] = ast.unparse(arguments[name])
        if "peft_config" in arguments and (lora := self._call("LoraConfig")) is not None:
            self._found.values["use_peft"] = True
            self._found.values |= {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
            self._keywords(lora, LORA_NAMES.get)
        self._dataset(arguments.get("train_dataset"))

    def _model(self, given: ast.expr) -> ast.expr:
        """The name in `AutoModel.from_pretrained(name)`, also through a variable."""
        if isinstance(given, ast.Name) and isinstance(self._names.get(given.id), ast.Call):
            given = self._names[given.id]
        if isinstance(given, ast.Call) and ast.unparse(given.func).endswith("from_pretrained") and given.args:
            return given.args[0]
        return given

    def _dataset(self, given: ast.expr | None) -> None:
        call = self._call("load_dataset")
        if call is None:
            if given is not None:
                self._found.unread.append("data: the script makes its rows; write them to a file, named in data.path")
            return
        for name, value in zip(("dataset_name", "dataset_config"), call.args, strict=False):
            self._put(name, value)
        for keyword in call.keywords:
            if keyword.arg in ("split", "name", "path"):
                names = {"split": "dataset_train_split", "name": "dataset_config", "path": "dataset_name"}
                self._put(names[keyword.arg], keyword.value)
        if any(isinstance(n, ast.Attribute) and n.attr in ("map", "filter", "select") for n in ast.walk(self._tree)):
            self._found.unread.append(
                "data: the script changes the rows of the dataset; write them to a file (dataset.to_json), named in "
                "data.path"
            )

    def _keywords(self, call: ast.Call, named: Callable[[str], str | None]) -> None:
        for keyword in call.keywords:
            if keyword.arg is None:
                self._found.unread.append(f"**{ast.unparse(keyword.value)}: only the script knows what is in it")
            elif (name := named(keyword.arg)) is None:
                self._found.unread.append(f"LoraConfig({ast.unparse(keyword)}): has no equivalent here")
            elif name:
                self._put(name, keyword.value)

    def _put(self, name: str, given: ast.expr) -> None:
        try:
            self._found.values[name] = self._literal(given)
        except ValueError:
            self._found.unread.append(f"{name} = {ast.unparse(given)}: only the script knows its value")

    def _literal(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name) and node.id in self._names:
            return self._literal(self._names[node.id])
        if isinstance(node, ast.BinOp):
            left, right = self._literal(node.left), self._literal(node.right)
            operations: dict[type, Callable[[], Any]] = {
                ast.Mult: lambda: left * right,
                ast.Add: lambda: left + right,
                ast.Sub: lambda: left - right,
                ast.FloorDiv: lambda: left // right,
                ast.Div: lambda: left / right,
            }
            numbers = all(isinstance(v, int | float) for v in (left, right))
            if numbers and type(node.op) in operations:
                return operations[type(node.op)]()
            raise ValueError(node)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            return node.attr
        if isinstance(node, ast.Dict) and all(isinstance(k, ast.Constant) for k in node.keys):
            keys = [k.value for k in node.keys if isinstance(k, ast.Constant)]
            return dict(zip(keys, map(self._literal, node.values), strict=True))
        if isinstance(node, ast.List | ast.Tuple):
            return [self._literal(item) for item in node.elts]
        return ast.literal_eval(node)

    def _function(self, node: ast.expr) -> str | None:
        """A reward function as `file.py:name`."""
        if isinstance(node, ast.Name) and node.id in self._functions:
            return f"{self._file}:{node.id}"
        if isinstance(node, ast.Name):
            for found in ast.walk(self._tree):
                if isinstance(found, ast.ImportFrom) and any((a.asname or a.name) == node.id for a in found.names):
                    if (found.module or "").partition(".")[0] == "trl":
                        return next(a.name for a in found.names if (a.asname or a.name) == node.id)
                    path = self._file.parent / f"{(found.module or '').replace('.', '/')}.py"
                    if path.is_file():
                        original = next(a.name for a in found.names if (a.asname or a.name) == node.id)
                        return f"{path}:{original}"
        self._found.unread.append(f"{ast.unparse(node)}: write it as a function in a file (file.py:function)")
        return None

    def _call(self, name: str) -> ast.Call | None:
        calls = (n for n in ast.walk(self._tree) if isinstance(n, ast.Call))
        return next((c for c in calls if ast.unparse(c.func).rpartition(".")[2] == name), None)

    def _assigned(self) -> dict[str, ast.expr]:
        """Names that the script assigns once."""
        found: dict[str, list[ast.expr]] = {}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                found.setdefault(node.targets[0].id, []).append(node.value)
        return {name: values[0] for name, values in found.items() if len(values) == 1}


def _items(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.List | ast.Tuple) else [node]


LORA_NAMES: Mapping[str, str] = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "target_modules": "lora_target_modules",
    "lora_dropout": "lora_dropout",
    "modules_to_save": "lora_modules_to_save",
    "target_parameters": "lora_target_parameters",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "task_type": "lora_task_type",
}
"""Fields of peft's LoraConfig, as TRL's command-line scripts call them."""
