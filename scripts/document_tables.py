"""Prints the parts of the documents that are made from the code: `document_tables.py configuration`, `kinds` or `diagram`.

The first paragraph of a field's docstring is for users, and appears in the table of the configuration. Further paragraphs are for
developers.
"""

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping

from mt_resilient.agent.policies import SECTIONS
from mt_resilient.resilience.config import user_part
from mt_resilient.resilience.model.state_machine import TABLE, Move
from mt_resilient.simulator.scenario.costs import Costs
from mt_resilient.training.state.values import ctypes_values, type_adapters
from mt_resilient.training.state.values.kind import Kind

_SAME = "if all ranks hold the same"
_TENSOR = "a tensor"
_VALUE = "a value"
_BOTH, _CONTENTS = f"{_TENSOR}, {_VALUE}", f"its contents, {_VALUE}"


def tables(sections: Mapping[str, type]) -> str:
    """Return one Markdown table for each section, in the sequence of `sections`. Raises KeyError for a field without a docstring."""
    return "\n\n".join(_table(name, policy) for name, policy in sections.items())


def _table(name: str, policy: type) -> str:
    said = field_docstrings(policy)
    rows = [
        f"| `{name}.{field.name}` | {_shown(field.default)} | {said[field.name]} |"
        for field in dataclasses.fields(policy)
    ]
    return "\n".join(
        (f"## `[{name}]`", "", user_part(policy.__doc__ or ""), "", "| key | default | what |", "|---|---|---|", *rows)
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
                yield name, user_part(text)


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


def kinds() -> str:
    """Return the table of docs/state.md: what a Session can be given, and how it is saved."""
    lines = [
        "| what | restored | on another number of ranks | exported as |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in _rows()),
    ]
    return "\n".join(lines)


def _rows() -> Iterator[tuple[str, str, str, str]]:
    yield "`torch.nn.Module`, anywhere", "in place", "yes, if its positions in global tensors are known", _TENSOR
    yield "`torch.optim.Optimizer`, anywhere", "in place", "yes, by parameter", _BOTH
    yield "an object with `state_dict`, `load_state_dict`, anywhere", "by `load_state_dict`", _SAME, _BOTH
    yield "`torch.Tensor`, `torch.nn.Parameter`; any strides, views of one memory", "in place", _SAME, _TENSOR
    yield "`DTensor`, each rank its own part", "in place", "no", _TENSOR
    yield "`numpy.ndarray`; any strides, views, byte order, structure, text", "in place", _SAME, _TENSOR
    yield "`list`, `dict`, `OrderedDict`, `Counter`; keys of any immutable type", "in place", _SAME, _VALUE
    yield "`None`, `bool`, `int`, `float`, `str`, `bytes`, `tuple`", "an equal one", _SAME, _VALUE
    filled, moving = (tuple(each for each in type_adapters.CHANGING if each.moves is moves) for moves in (False, True))
    yield _names((*filled, *ctypes_values.KINDS)), "in place", _SAME, _CONTENTS
    constants = (*type_adapters.CHANGELESS, *moving, type_adapters.DTYPE, type_adapters.NUMPY_SCALAR)
    yield _names(constants), "an equal one", _SAME, _CONTENTS
    named = (
        "members of an `Enum`, functions, classes, frozen dataclasses, named tuples, subclasses of `int` and the like"
    )
    yield named, "an equal one, found by its name", _SAME, _CONTENTS
    yield "objects of attributes, dataclasses, subclasses of containers", "in place", _SAME, _CONTENTS
    yield "objects of classes registered by `mt_resilient.register`", "in place, by its `restore`", _SAME, _CONTENTS


def _names(known: tuple[Kind, ...]) -> str:
    return ", ".join(f"`{kind.name}`" for kind in known)


def diagram() -> str:
    """Return the table as a Mermaid state diagram. `docs/architecture.md` holds it, and a test compares the two."""
    lines = ["stateDiagram-v2", "    [*] --> gather"]
    for (phase, event), (move, target) in TABLE.items():
        if move is not Move.IGNORE:
            note = f"{event.name.lower()} (next generation)" if move is Move.REOPEN else event.name.lower()
            lines.append(f"    {phase} --> {target}: {note}")
    return "\n".join([*lines, "    ended --> [*]"])


def configuration() -> str:
    return tables({**SECTIONS, "costs": Costs})


if __name__ == "__main__":
    print({"configuration": configuration, "kinds": kinds, "diagram": diagram}[sys.argv[1]]())
