"""Finds the opening of a script: the statements at its top that may run once, ahead of time, for all ranks. Pure.

The opening consists of the script's first imports, and the changes to the environment and to `sys.path` between them. Any other statement
may change the effect of the imports below it: a patch, a default dtype, a parsed argument. So the opening ends before the first other
statement.
"""

from __future__ import annotations

import ast
from itertools import takewhile

_PLACES = {f"os.path.{name}" for name in ("abspath", "dirname", "expanduser", "join", "normpath", "realpath")}
_ENVIRONMENT = {f"os.environ.{name}" for name in ("setdefault", "update", "pop")}


def opening(body: list[ast.stmt]) -> tuple[list[ast.stmt], int]:
    """Return the statements to run ahead of time, and the line of the first statement after the opening (0: none)."""
    ahead = list(takewhile(lambda statement: _runs(statement) is not None, body))
    behind = body[len(ahead)].lineno if len(ahead) < len(body) else 0
    return list(filter(_runs, ahead)), behind


def passed_over(body: list[ast.stmt], end: ast.stmt) -> set[str]:
    """Return the names that the script defines before the statement `end` of its opening, in statements that are not run ahead of time."""
    before = (each for each in body[: body.index(end)] if _runs(each) is False)
    named = (
        getattr(node, "id", getattr(node, "name", "")) for each in before for node in ast.walk(each) if _names(node)
    )
    return set(named)


def _names(node: ast.AST) -> bool:
    stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    return stored or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def _runs(statement: ast.stmt) -> bool | None:
    """Whether to run a statement ahead of time. True: it belongs to the opening. False: no import depends on it, so it is skipped. None:
    the opening ends here."""
    match statement:
        case ast.ImportFrom(module="__future__") | ast.Expr(value=ast.Constant()) | ast.Pass():
            return False
        case ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Call(func=function, args=arguments, keywords=[])):
            if _is(function, _ENVIRONMENT):
                return True if all(map(_is_literal, arguments)) else None
            return (
                True
                if _is(function, {"sys.path.append", "sys.path.insert"}) and all(map(_says_where, arguments))
                else None
            )
        case ast.Assign(targets=[ast.Subscript(value=place, slice=name)], value=value) if _is(place, {"os.environ"}):
            return True if _is_literal(name) and _is_literal(value) else None
        case ast.Assign(targets=[ast.Name()], value=value) | ast.AnnAssign(target=ast.Name(), value=value):
            return False if value is None or _is_literal(value) or _is_name(value) else None
        case (
            ast.FunctionDef(decorator_list=[], args=arguments) | ast.AsyncFunctionDef(decorator_list=[], args=arguments)
        ):
            defaults = [*arguments.defaults, *filter(None, arguments.kw_defaults)]
            return False if all(map(_is_literal, defaults)) else None
        case ast.If(test=test, orelse=[]) if _is(test, {"TYPE_CHECKING", "typing.TYPE_CHECKING"}):
            return False
        case ast.Try(body=tried, handlers=handlers, orelse=[], finalbody=[]):
            inner = [_runs(each) for each in (*tried, *(each for handler in handlers for each in handler.body))]
            return None if None in inner else any(inner)
    return None


def _says_where(node: ast.expr) -> bool:
    """Whether the expression depends only on the script's location and on the working directory."""
    match node:
        case ast.Name(id="__file__"):
            return True
        case ast.Call(func=function, args=arguments, keywords=[]):
            return _is(function, {*_PLACES, "os.getcwd"}) and all(map(_says_where, arguments))
    return _is_literal(node) or _is(node, {"os.pardir", "os.curdir", "os.path.pardir"})


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def _is_name(node: ast.expr) -> bool:
    """Whether the expression is a name, or an attribute of a name. Python only looks up its value."""
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_name(node.value))


def _is(node: ast.expr, names: set[str]) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in names
