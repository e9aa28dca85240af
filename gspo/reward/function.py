"""Reward functions: located by name in the trainer, loaded and called in a worker.

In: the names and options of `RewardConfig`. Out: a `Source` per function (plain text and values, so it can be sent as
JSON), and in the worker a `RewardFunction` that returns one result per completion of a prompt, or of several.

A reward function has TRL's signature and is called with keyword arguments:

    fn(prompts, completions, **columns) -> list[float | None]

In place of a number, a completion may get one per token as a list, or some by the index of their token as a dict: the
rewards of its steps, whose sum is its reward.

Every list has one entry per completion; `columns` are the row's fields as lists, and `completion_ids`. A chat prompt
gives `completions = [[{"role": "assistant", "content": text}], ...]` and lists of messages as prompts; a text prompt
gives strings. `None` abstains. An exception object in the list fails that completion alone, without a second call for
the others.

Invariant: only `load` imports user code, and it runs in a worker. A user's file is read once, when the run starts, so
editing it during the run does not change the reward. A function that only the trainer's process has is called there
(`in_process.py`); a worker knows its name and columns.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import importlib.abc
import importlib.util
import inspect
import math
import numbers
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder, SourceFileLoader
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from gspo.errors import ConfigError, GspoError, RewardError
from gspo.reward import in_process, rewards

RESERVED = ("prompts", "completions", "completion_ids")
"""Arguments that every function may receive in addition to the row's columns."""

TASK_REWARD = "task_answer"
"""The reward that scores with a generated task's own score."""

TRACE = 20_000
"""Maximum length of a traceback in characters."""
# A word becomes part of a metric's key.
_WORD = re.compile(r"[a-z0-9_]{1,32}")


class RewardWarning(UserWarning):
    """A warning raised in a worker while it loads the functions. The trainer shows it to the user."""


Result = dict[str, Any]
"""`{"value": number or None}`, with `"notes": [words]` or `"steps": [(token, number)]` if there are any, or
`{"failure": "kind: why"}`, with `"trace"` if there is one."""


class NotedScore(float):
    """A score with up to 8 keywords that explain it: `NotedScore(0.5, "half")`.

    Keywords consist of lowercase letters, digits and underscores. Each is counted as `reward/note/FUNCTION/WORD`.
    """

    notes: tuple[str, ...]

    def __new__(cls, value: float, *notes: str) -> NotedScore:
        score = super().__new__(cls, value)
        score.notes = notes
        return score


class NotedFailure(Exception):
    """In the list of a function's values: this completion failed, for a reason that its notes count."""

    def __init__(self, message: str, *notes: str) -> None:
        super().__init__(message)
        self.notes = notes


Noted = NotedScore  # the name in reward files of earlier runs, which must still resume


@dataclass(frozen=True, kw_only=True)
class Source:
    """The location of a reward function."""

    spec: str
    """As written in `reward.functions`. Errors use it."""
    name: str
    """Short name, unique among the run's functions. The key of its part of the reward."""
    file: str
    """The user's file; empty for a built-in."""
    text: str
    """Contents of the user's file."""
    function: str
    options: Mapping[str, Any]
    in_process: bool = False
    """Whether the trainer's process calls it."""
    needs: Sequence[str] = ()
    """The arguments of such a function that have no default."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a service must know about the run (`start` in the file of its reward)."""

    timeout_s: float
    """`reward.timeout_s`: the time for one completion, including retries."""
    cache_dir: str = ""
    """The run's directory for scores that were paid for; empty without a run directory."""


# ------------------------------------------------------------------------------------------- in the trainer


def find_sources(
    functions: Sequence[str], options: Mapping[str, Any], task: tuple[str, Mapping[str, Any]] | None
) -> list[Source]:
    """Locate every function without importing it."""
    functions = chosen_functions(functions, task is not None)
    if not functions:
        raise ConfigError('reward.functions: name at least one, for example ["math_answer"] or ["my.py:score"]')
    for spec in functions:
        if functions.count(spec) > 1:
            raise ConfigError(f"reward.functions: {spec} is named twice; name it once and set its weight")
    for key, value in options.items():
        if key not in functions:
            raise ConfigError(f"reward.options.{key}: not among reward.functions {list(functions)}")
        if not isinstance(value, Mapping):
            raise ConfigError(f"reward.options.{key}: must be a table of options, not {value!r}")
    given = {spec: dict(options.get(spec, {})) for spec in functions}
    if task and TASK_REWARD in given:
        given[TASK_REWARD] = {"task": task[0], "task_options": dict(task[1]), **given[TASK_REWARD]}
    if TASK_REWARD in given and "task" not in given[TASK_REWARD]:
        raise ConfigError(
            f"reward.functions: {TASK_REWARD} needs a generated task; set data.task or use another reward"
        )
    short = [spec.rpartition(":")[2] for spec in functions]
    names = [name if short.count(name) == 1 else spec for name, spec in zip(short, functions, strict=True)]
    return [_find(spec, name, given[spec]) for spec, name in zip(functions, names, strict=True)]


def chosen_functions(functions: Sequence[str], has_task: bool) -> tuple[str, ...]:
    """`reward.functions`, or the task's own score if none is named."""
    return tuple(functions) or ((TASK_REWARD,) if has_task else ())


def built_in_names() -> list[str]:
    """Names of the files in `gspo/reward/rewards`."""
    return sorted(module.name for module in pkgutil.iter_modules(rewards.__path__))


def _find(spec: str, name: str, options: Mapping[str, Any]) -> Source:
    if (own := in_process.name_of(spec)) is not None:
        return _find_in_process(spec, own, options)
    file, colon, function = spec.rpartition(":")
    if colon:
        return _find_file(spec, file, name, function, options)
    if spec.endswith(".py"):
        raise ConfigError(f"reward.functions: {spec}: name the function in the file, for example {spec}:score")
    if spec not in built_in_names():
        close = difflib.get_close_matches(spec, built_in_names(), n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(built_in_names())}, or write file.py:name"
        raise ConfigError(f"reward.functions: no built-in reward {spec!r}; {hint}")
    return Source(spec=spec, name=name, file="", text="", function="score", options=options)


def _find_file(spec: str, file: str, name: str, function: str, options: Mapping[str, Any]) -> Source:
    if not file.endswith(".py") or not function.isidentifier():
        raise ConfigError(f"reward.functions: {spec!r}: write a built-in name or file.py:function")
    path = Path(file).expanduser().absolute()
    if not path.is_file():
        raise ConfigError(f"reward.functions: {spec}: no file {path}; give its path from the current directory")
    try:
        text = importlib.util.decode_source(path.read_bytes())
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise RewardError(
            f"reward.functions: {spec}: cannot read {path}: {one_line(error)}; save it as UTF-8"
        ) from None
    return Source(spec=spec, name=name, file=str(path), text=text, function=function, options=options)


def _find_in_process(spec: str, name: str, options: Mapping[str, Any]) -> Source:
    if in_process.function(name) is None:
        raise ConfigError(
            f"reward.functions: {name} is a Python function of the process that started this run, and this process "
            f"does not have it; pass it again: rewards=[{name}], or put it into a file and name it as FILE.py:{name}"
        )
    source = Source(spec=spec, name=name, file="", text="", function=name, options=options, in_process=True)
    return replace(source, needs=sorted(load_in_process(source).needs))


def load_in_process(source: Source) -> RewardFunction:
    """A function of this process, ready to be called."""
    call = in_process.function(source.function)
    assert call is not None
    parameters = _parameters(source, call)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if source.options and not open_ended:
        unknown = next((key for key in source.options if key not in named or key in RESERVED), None)
        if unknown is not None:
            raise ConfigError(
                f"reward.options.{source.spec}: unknown option {unknown!r}; {source.name} does not take it"
            )
    return RewardFunction(
        name=source.name,
        call=call,
        takes=None if open_ended else frozenset(named),
        needs=frozenset(name for name, p in named.items() if p.default is p.empty),
        settings=frozenset(),
        options=source.options,
        file=_file_of(call),
    )


def _file_of(call: Callable[..., Any]) -> str:
    """The file of a function, whose lines its errors name; empty if it has none, as in a notebook."""
    code = getattr(call, "__code__", None)
    return getattr(code, "co_filename", "")


# ------------------------------------------------------------------------------------------- in a worker


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A loaded function, ready to be called."""

    name: str
    call: Callable[..., Any]
    takes: frozenset[str] | None
    """The keyword arguments it names; `None` if it takes any."""
    needs: frozenset[str]
    """The keyword arguments without a default."""
    settings: frozenset[str]
    """Keyword arguments of a built-in that are options. A data column of the same name is not passed."""
    options: Mapping[str, Any]
    about: str = ""
    """A description of itself, shown when a run starts."""
    file: str = ""
    """The user's file; empty for a built-in."""
    bounded_s: float = 0.0
    """Upper bound in seconds on scoring one completion (`longest_s` of a built-in), so a slow call is no sign of a
    hang. `0` if it does not limit the time itself."""
    service: Mapping[str, Any] | None = None
    """The fields of `traits.Service`, if it asks a model or an endpoint."""
    start: Callable[[RunFacts], None] = lambda facts: None
    """Connects to the endpoint or loads the model, in the service's own worker."""
    usage: Callable[[], dict[str, float]] = dict
    """What the service did since the last call (`service_usage.py`)."""

    @property
    def columns_needed(self) -> frozenset[str]:
        """The data columns that it requires."""
        return self.needs - set(RESERVED) - set(self.options)

    def __call__(self, calls: Sequence[Mapping[str, Any]]) -> list[list[Result] | Result]:
        """For each call, one result per completion, or the failure of the call as a whole.

        A call has the completions of one prompt. Several calls are made as one (`traits.Service`)."""
        missing = [self.columns_needed - set(call["columns"]) for call in calls]
        answers = iter(self._called([c for c, lacks in zip(calls, missing, strict=True) if not lacks]))
        return [
            {"failure": f"raised: {lacking(self.name, lacks, call['columns'])}"} if lacks else next(answers)
            for lacks, call in zip(missing, calls, strict=True)
        ]

    def _called(self, calls: Sequence[Mapping[str, Any]]) -> list[list[Result] | Result]:
        if not calls:
            return []
        results: list[Result] | Result
        try:
            values = self.call(**self._arguments(calls))
            values = _awaited(values) if inspect.iscoroutine(values) else values
            results = self._results(values, [len(ids) for call in calls for ids in call["completion_ids"]])
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: a function must not end the run
            results = self._failure(error)
        if isinstance(results, dict):
            return [results] * len(calls)
        remaining = iter(results)
        return [list(islice(remaining, len(call["completions"]))) for call in calls]

    def _failure(self, error: BaseException) -> Result:
        kind = "timeout" if isinstance(error, TimeoutError) else "raised"
        failure = {"failure": f"{kind}: {self.name}: {describe(error, self.file)}", "trace": traced(error)}
        return failure | {"notes": list(error.notes)} if isinstance(error, NotedFailure) else failure

    def _arguments(self, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        names = dict.fromkeys(name for call in calls for name in call["columns"] if name not in self.settings)
        arguments: dict[str, Any] = {name: [] for name in (*names, *RESERVED)}
        for call in calls:
            prompt, texts = call["prompt"], call["completions"]
            chat = not isinstance(prompt, str)
            # Copies, so a function that modifies its arguments cannot affect other completions or later calls.
            for name in names:
                arguments[name] += [copy.deepcopy(call["columns"].get(name)) for _ in texts]
            arguments["prompts"] += [copy.deepcopy(prompt) for _ in texts]
            arguments["completions"] += [[{"role": "assistant", "content": t}] if chat else t for t in texts]
            arguments["completion_ids"] += [list(i) for i in call["completion_ids"]]
        arguments.update(copy.deepcopy(dict(self.options)))
        return arguments if self.takes is None else {k: v for k, v in arguments.items() if k in self.takes}

    def _results(self, values: Any, tokens: Sequence[int]) -> list[Result] | Result:
        """The result of each completion, whose numbers of tokens these are."""
        count = len(tokens)
        if isinstance(values, str | bytes | Mapping | set | frozenset) or not hasattr(values, "__iter__"):
            return {"failure": f"invalid: {self.name}: returned {_shown(values)} instead of a list"}
        items = list(islice(values, count + 1))  # the iterator may be infinite
        if len(items) != count:
            returned = f"{len(values)}" if hasattr(values, "__len__") else "a different number of"
            completions = "completion" if count == 1 else "completions"
            return {"failure": f"invalid: {self.name}: returned {returned} values for {count} {completions}"}
        return [
            self._steps(item, length) if isinstance(item, list | tuple | Mapping) else self._result(item)
            for item, length in zip(items, tokens, strict=True)
        ]

    def _steps(self, value: Sequence[Any] | Mapping[Any, Any], tokens: int) -> Result:
        """Rewards of steps: a number for each token of the completion, or for some of them by their index."""
        numbered = value.items() if isinstance(value, Mapping) else enumerate(value)
        steps: list[tuple[int, float]] = []
        for at, one in islice(numbered, tokens + 1):
            result = self._result(one)
            if type(at) is not int or not 0 <= at < tokens or not isinstance(result.get("value"), float):
                why = "a step reward must be a finite number at the index of a token"
                return {"failure": f"invalid: {self.name}: {why}, not {_shown(one)} at {_shown(at)}"}
            steps.append((at, result["value"]))
        if not steps and (tokens or isinstance(value, Mapping)):
            return {"failure": f"invalid: {self.name}: returned {_shown(value)}: no step rewards"}
        if not isinstance(value, Mapping) and len(steps) != tokens:
            return {"failure": f"invalid: {self.name}: {len(steps)} step rewards, not one for each of {tokens} tokens"}
        return {"value": math.fsum(one for _, one in steps), "steps": sorted(steps)}

    def _result(self, value: Any) -> Result:
        if isinstance(value, BaseException):
            return self._failure(value)
        # By attributes, so that neither numpy nor torch is imported for it.
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            value = value.item()  # numpy and torch scalars
        if value is None:
            return {"value": None}
        if not isinstance(value, numbers.Real):
            return {"failure": f"invalid: {self.name}: returned {_shown(value)}, not a number"}
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            return {"failure": f"invalid: {self.name}: returned {number}, not a finite number"}
        return self._noted(number, value.notes) if isinstance(value, NotedScore) else {"value": number}

    def _noted(self, number: float, words: tuple[str, ...]) -> Result:
        if len(words) > 8 or not all(isinstance(word, str) and _WORD.fullmatch(word) for word in words):
            return {
                "failure": f"invalid: {self.name}: noted {_shown(words)}, not up to 8 words of lowercase letters, "
                "digits and underscores"
            }
        return {"value": number, "notes": list(words)}


def _awaited(values: Coroutine[Any, Any, Any]) -> Any:
    import asyncio  # as slow as all other imports of a worker together, and few functions need it

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(values)
    # A notebook runs its cells inside a loop, and a thread can run only one.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, values).result()


def lacking(name: str, missing: Collection[str], row: Collection[str]) -> str:
    """The message for a function whose columns the data does not have."""
    return f"{name}: needs {_listed(missing)}, but the data's columns are {_listed(row)}"


def load(source: Source) -> RewardFunction:
    """Import a function and check that it can be called with its options."""
    if source.in_process:
        return _placeholder(source)
    module = _import(source)
    call = getattr(module, source.function, None)
    if call is None:
        raise ConfigError(f"reward.functions: {source.spec}: {source.file} has no {source.function}; {_has(module)}")
    if not callable(call):
        raise RewardError(
            f"reward.functions: {source.spec}: {source.function} is not a function; name one; {_has(module)}"
        )
    parameters = _parameters(source, call)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    _check_options(source, named, open_ended)
    if not source.file and hasattr(module, "check"):
        _check_values(source, module)
    service = None if source.file else module.TRAITS.service
    read = module.columns_read(**source.options) if not source.file and hasattr(module, "columns_read") else ()
    return RewardFunction(
        name=source.name,
        call=call,
        takes=None if open_ended else frozenset(named),
        needs=frozenset(name for name, p in named.items() if p.default is p.empty).union(read),
        settings=frozenset(n for n, p in named.items() if not source.file and p.kind is p.KEYWORD_ONLY),
        options=source.options,
        file=source.file,
        bounded_s=module.longest_s(**source.options) if not source.file and hasattr(module, "longest_s") else 0.0,
        about=str(module.about(**source.options)) if not source.file and hasattr(module, "about") else "",
        service=asdict(service(source.options)) if service else None,
        start=partial(_start, source, module) if service else lambda facts: None,
        usage=module.USAGE.take if service else dict,
    )


def _placeholder(source: Source) -> RewardFunction:
    """Stands in a worker for a function of the trainer's process, which the worker is never asked to call."""
    return RewardFunction(
        name=source.name,
        call=lambda **arguments: [],
        takes=None,
        needs=frozenset(source.needs),
        settings=frozenset(),
        options=source.options,
    )


def _import(source: Source) -> ModuleType:
    try:
        if not source.file:
            return importlib.import_module(f"{rewards.__name__}.{source.spec}")
        return import_text(source.file, source.text)
    except BaseException as error:  # a module may call sys.exit at import
        raise RewardError(
            f"reward.functions: {source.spec}: cannot import {source.file or source.spec}: "
            f"{describe(error, source.file)}; "
            "fix it so that Python can import it on its own"
        ) from None


class _TextLoader(importlib.abc.ExecutionLoader):
    """Imports a module from source text that was read earlier."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text = file, text

    def get_filename(self, fullname: str) -> str:
        return self.file

    def get_source(self, fullname: str) -> str:
        return self.text


def import_text(file: str, text: str) -> ModuleType:
    """The module of a user's file, from its text."""
    name = "reward_file_" + "".join(c if c.isalnum() else "_" for c in file)
    if name in sys.modules:
        return sys.modules[name]
    _make_importable(os.path.dirname(file), os.getcwd())
    spec = importlib.util.spec_from_file_location(name, file, loader=_TextLoader(file, text))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before executing it: dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _UncachedLoader(SourceFileLoader):
    """Compiles a module's source on every import. A `.pyc` file may hold other code than the approved source."""

    def path_stats(self, path: Any) -> Any:
        raise OSError("cached bytecode is not used")


def _make_importable(*folders: str) -> None:
    """Add folders after the standard library, so a user's `random.py` shadows nothing, and before installed
    packages. Only source and extension modules can be imported from them, not bytecode."""
    at = next((i for i, p in enumerate(sys.path) if p.endswith(("site-packages", "dist-packages"))), len(sys.path))
    sys.path[at:at] = [folder for folder in dict.fromkeys(folders) if folder not in sys.path]
    find = FileFinder.path_hook((ExtensionFileLoader, EXTENSION_SUFFIXES), (_UncachedLoader, SOURCE_SUFFIXES))

    def is_local(path: str) -> bool:
        """Whether a path is in one of the folders, and not in a deeper entry of `sys.path` (site-packages)."""
        return max((p for p in sys.path if p and Path(path).is_relative_to(p)), key=len, default="") in folders

    def find_local(path: str) -> Any:
        if not is_local(path):
            raise ImportError(path)
        return find(path)

    sys.path_hooks.insert(0, find_local)
    for path in filter(is_local, list(sys.path_importer_cache)):
        del sys.path_importer_cache[path]


def _parameters(source: Source, call: Callable[..., Any]) -> list[inspect.Parameter]:
    fix = f"; write it as def {source.function}(prompts, completions, **columns)"
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        raise RewardError(f"reward.functions: {source.spec}: its signature cannot be read{fix}") from None
    by_keyword = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    by_keyword |= {"completions" for p in parameters if p.kind is p.VAR_KEYWORD}
    only_by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if "completions" not in by_keyword or only_by_place:
        raise RewardError(f"reward.functions: {source.spec}: cannot be called with (prompts, completions){fix}")
    return parameters


def _check_options(source: Source, named: Mapping[str, inspect.Parameter], open_ended: bool) -> None:
    allowed = [n for n, p in named.items() if source.file or p.kind is p.KEYWORD_ONLY]
    allowed = [n for n in allowed if n not in RESERVED]
    for key in source.options:
        if key in RESERVED or (key not in allowed and not (source.file and open_ended)):
            close = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {close[0]}?" if close else f"its options: {', '.join(allowed) or 'none'}"
            raise ConfigError(f"reward.options.{source.spec}: unknown option {key!r}; {hint}")
    for name, parameter in named.items():
        must = not source.file and parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if must and name not in source.options:
            raise ConfigError(
                f"reward.options.{source.spec}: {name} is required; set reward.options.{source.spec}.{name}"
            )


def _check_values(source: Source, module: ModuleType) -> None:
    with _option_errors(source):
        module.check(**source.options)


def _start(source: Source, module: ModuleType, facts: RunFacts) -> None:
    with _option_errors(source):
        module.start(facts, **source.options)


@contextmanager
def _option_errors(source: Source) -> Iterator[None]:
    try:
        yield
    except GspoError:
        raise
    except Exception as error:
        raise RewardError(f"reward.options.{source.spec}: {describe(error)}; change the options") from None


# ------------------------------------------------------------------------------------------- messages


def one_line(text: object, limit: int = 300) -> str:
    """Text for one line of a log: truncated, without control characters or lone surrogates."""
    try:
        line = " ".join(str(text)[: 4 * limit].split())
    except BaseException:  # a hostile __str__
        line = f"unprintable {type(text).__name__}"
    line = "".join(c if c.isprintable() else "?" for c in line)
    return line if len(line) <= limit else line[: limit - 3] + "..."


def describe(error: BaseException, file: str = "") -> str:
    """An exception's type, message and location in one line. The location is the last frame in the user's file."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename[0] != "<" and f.filename != __file__]
    own = [f for f in frames if f.filename == file] or frames
    place = f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else ""
    message = one_line(error)
    return f"{type(error).__name__}{': ' if message else ''}{message}{place}"


def traced(error: BaseException) -> str:
    """The traceback as Python prints it, without frames of this module, truncated to its end."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    lines = [*traceback.format_list(frames), *_last_line(error)]
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in "".join(lines)[-TRACE:])


def _last_line(error: BaseException) -> list[str]:
    try:
        return traceback.format_exception_only(error)
    except BaseException:  # a hostile __str__
        return [f"unprintable {type(error).__name__}\n"]


def _shown(value: Any) -> str:
    try:
        return f"{one_line(repr(value), 60)} ({type(value).__name__})"
    except BaseException:  # a hostile __repr__
        return f"an unprintable {type(value).__name__}"


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "none"


def _has(module: ModuleType) -> str:
    own = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
    return f"its functions: {', '.join(own[:10]) or 'none'}"
