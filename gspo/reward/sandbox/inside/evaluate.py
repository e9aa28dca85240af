"""`eval`, `exec` and `compile` for the tests, whose text may come from the program.

In: a text. Out: its value. Invariant: no code of the program runs in the judge. A text that stands in the tests is theirs
and is run as always. Any other text is an answer: it is read as an expression of numbers, texts, containers, operators and
calls of the functions below or of names that the test hands to `eval`, and nothing of it reaches the tests' own names.
`import builtins` in the tests gives a module with these functions: `builtins.eval` is no way around them.
"""

from __future__ import annotations

import builtins
import sys

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

_ONLY_PARSE = 0x400  # ast.PyCF_ONLY_AST; importing `ast` is slow
_FUNCTION_NAMES = "abs divmod float int len list max min pow round set sorted str sum tuple"
_NODE_NAMES = """Expression Constant BinOp UnaryOp BoolOp Compare IfExp Tuple List Set Dict Subscript Index Slice Name Load
Call keyword Starred Attribute Add Sub Mult Div FloorDiv Mod Pow MatMult BitAnd BitOr BitXor LShift RShift UAdd USub Invert
Not And Or Eq NotEq Lt LtE Gt GtE Is IsNot In NotIn"""
_FUNCTIONS, _NODES = frozenset(_FUNCTION_NAMES.split()), frozenset(_NODE_NAMES.split())


def guarded(codes: list[CodeType], names: dict[str, Any]) -> dict[str, Any]:
    """The built-ins of the tests' namespace."""
    module = type(sys)("builtins")
    module.__dict__.update(builtins.__dict__)
    own = {text for code in codes for text in _texts(code)}

    def is_own(source: Any) -> bool:
        return type(source) is type(guarded.__code__) or (type(source) is str and source in own)

    def evaluate(source: Any, *scopes: Any) -> Any:
        if is_own(source):
            return eval(source, *(scopes or _callers()))
        given = {
            name: value for scope in reversed(scopes) if scope and scope is not names for name, value in scope.items()
        }
        _check(compile(source, "<answer>", "eval", _ONLY_PARSE), given)
        return eval(source, {"__builtins__": {name: getattr(builtins, name) for name in _FUNCTIONS}, **given})

    def execute(source: Any, *scopes: Any) -> None:
        if not is_own(source):
            raise TypeError("a text that the tests did not write is not executed")
        exec(source, *(scopes or _callers()))

    def compiled(source: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_own(source):
            raise TypeError("a text that the tests did not write is not compiled")
        return compile(source, *args, **kwargs)

    def imported(name: str, *args: Any, **kwargs: Any) -> Any:
        found = __import__(name, *args, **kwargs)
        return module if found is builtins else found

    module.__dict__.update({"eval": evaluate, "exec": execute, "compile": compiled, "__import__": imported})
    return module.__dict__


def _callers() -> tuple[dict[str, Any], Any]:
    """The names where the built-in was called."""
    frame = sys._getframe(2)
    return frame.f_globals, frame.f_locals


def _texts(code: CodeType) -> list[str]:
    """The texts that are written in code."""
    found = []
    for constant in code.co_consts:
        if type(constant) is str:
            found.append(constant)
        elif type(constant) is tuple:
            found += [item for item in constant if type(item) is str]
        elif type(constant) is type(code):
            found += _texts(constant)
    return found


def _check(tree: Any, given: dict[str, Any]) -> None:
    """Refuse what is more than an expression of values. Attributes are those of a name that was given, and public."""
    pending = [tree]
    while pending:
        node = pending.pop()
        kind = type(node).__name__
        if kind not in _NODES:
            raise SyntaxError(f"no {kind} in an expression that the tests evaluate")
        if kind == "Name" and (node.id.startswith("_") or not (node.id in _FUNCTIONS or node.id in given)):
            raise NameError(f"name '{node.id}' is not defined")
        if kind == "Attribute" and (node.attr.startswith("_") or type(node.value).__name__ != "Name"):
            raise AttributeError(node.attr)
        for field in node._fields:
            value = getattr(node, field, None)
            pending += [item for item in (value if type(value) is list else [value]) if hasattr(item, "_fields")]
