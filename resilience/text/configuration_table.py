"""Makes the tables of docs/configuration.md from the docstrings and defaults of the policies (the dataclasses of the configuration).

The first paragraph of a field's docstring is for users, and appears in the table. Further paragraphs are for developers.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator, Mapping


def tables(sections: Mapping[str, type]) -> str:
    """Return one Markdown table for each section, in the sequence of `sections`. Raises KeyError for a field without a docstring."""
    return "\n\n".join(_table(name, policy) for name, policy in sections.items())


def overview(sections: Mapping[str, type]) -> str:
    """Return one line for each section, in the sequence of `sections`: its name, and the first sentence about it."""
    wide = max(map(len, sections))
    return "".join(
        f"  {name:<{wide}}  {_user_part(policy.__doc__ or '').partition('. ')[0].rstrip('.')}\n"
        for name, policy in sections.items()
    )


def _table(name: str, policy: type) -> str:
    said = field_docstrings(policy)
    rows = [
        f"| `{name}.{field.name}` | {_shown(field.default)} | {said[field.name]} |"
        for field in dataclasses.fields(policy)
    ]
    return "\n".join(
        (f"## `[{name}]`", "", _user_part(policy.__doc__ or ""), "", "| key | default | what |", "|---|---|---|", *rows)
    )


def field_docstrings(policy: type) -> dict[str, str]:
    """Return, by field, the part of its docstring that is for users. Inherited fields are included."""
    found: dict[str, str] = {}
    for owner in reversed(policy.__mro__):
        if dataclasses.is_dataclass(owner):
            found |= _own(owner)
    return found


def _own(policy: type) -> Iterator[tuple[str, str]]:
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(policy))).body
    assert isinstance(definition, ast.ClassDef)
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, _user_part(text)


def _user_part(docstring: str) -> str:
    """Return the first paragraph of `docstring` as one line."""
    return " ".join(inspect.cleandoc(docstring).partition("\n\n")[0].split())


def _shown(default: object) -> str:
    match default:
        case bool():
            return str(default).lower()
        case float():
            return f"{default:g}"
        case "":
            return "empty"
        case _:
            return str(default)
