"""Safe `eval`, `exec` and `compile` for the tests, which may apply them to text from the program.

In: a text. Out: its value. Invariant: no code of the program runs in the judge. Text that is a literal in the tests is
trusted and runs as usual. Any other text comes from the program. It may only be an expression of numbers, strings,
containers, operators and calls of the functions below or of names that the test passes to `eval`, and it cannot access
the tests' own names. `import builtins` in the tests gives a module with these functions, so `builtins.eval` does not
bypass them.
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
_NODE_NAMES = """Expression Constant BinOp UnaryOp BoolOp Compare IfExp Tuple List Set Dict Subscript Index Slice Name
Load Call keyword Starred Attribute Add Sub Mult Div FloorDiv Mod Pow MatMult BitAnd BitOr BitXor LShift RShift UAdd
USub Invert Not And Or Eq NotEq Lt LtE Gt GtE Is IsNot In NotIn"""
_FUNCTIONS, _NODES = frozenset(_FUNCTION_NAMES.split()), frozenset(_NODE_NAMES.split())


def guarded(codes: list[CodeType], names: dict[str, Any]) -> dict[str, Any]:
    """The built-ins for the tests' namespace."""
    module = type(sys)("builtins")
    module.__dict__.update(builtins.__dict__)
    own = {text for code in codes for text in _texts(code)}

    def is_own(source: Any) -> bool:
        # A code object is the tests' own: the program's answers never contain one.
        return type(source) is type(guarded.__code__) or (type(source) is str and source in own)

    def evaluate(source: Any, *scopes: Any) -> Any:
        if is_own(source):
            return eval(source, *(scopes or _callers()))
        # Without the tests' own namespace: an expression of the program could read the expected values there.
        given = {
            name: value for scope in reversed(scopes) if scope and scope is not names for name, value in scope.items()
        }
        _check(compile(source, "<answer>", "eval", _ONLY_PARSE), given)
        return eval(source, {"__builtins__": {name: getattr(builtins, name) for name in _FUNCTIONS}, **given})

    def execute(source: Any, *scopes: Any) -> None:
        if not is_own(source):
            raise TypeError("a text that the tests did not write is not executed")
        exec(source, *(scopes or _callers()))

    def compile_own(source: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_own(source):
            raise TypeError("a text that the tests did not write is not compiled")
        return compile(source, *args, **kwargs)

    def import_guarded(name: str, *args: Any, **kwargs: Any) -> Any:
        found = __import__(name, *args, **kwargs)
        return module if found is builtins else found

    replacements = {"eval": evaluate, "exec": execute, "compile": compile_own, "__import__": import_guarded}
    module.__dict__.update(replacements)
    return module.__dict__


def _callers() -> tuple[dict[str, Any], Any]:
    """The globals and locals of the code that called the built-in."""
    # 0 is this function, 1 the replacement of the built-in, 2 the test that called it.
    frame = sys._getframe(2)
    return frame.f_globals, frame.f_locals


def _texts(code: CodeType) -> list[str]:
    """The string literals in code."""
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
    """Reject anything beyond an expression of values. Only public attributes of given names are allowed."""
    # A stack instead of recursion, because an answer may be nested deeply.
    pending = [tree]
    while pending:
        node = pending.pop()
        kind = type(node).__name__
        if kind not in _NODES:
            raise SyntaxError(f"no {kind} in an expression that the tests evaluate")
        if kind == "Name" and (node.id.startswith("_") or not (node.id in _FUNCTIONS or node.id in given)):
            raise NameError(f"name '{node.id}' is not defined")
        # `().__class__.__subclasses__()` and its relatives start with an underscore, or with a value instead of a name.
        if kind == "Attribute" and (node.attr.startswith("_") or type(node.value).__name__ != "Name"):
            raise AttributeError(node.attr)
        for field in node._fields:
            value = getattr(node, field, None)
            pending += [item for item in (value if type(value) is list else [value]) if hasattr(item, "_fields")]
