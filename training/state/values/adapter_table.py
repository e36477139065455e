"""Build the table of docs/state.md from the adapters themselves: what a Session can be given, and how it is saved."""

from __future__ import annotations

from collections.abc import Iterator

from . import ctypes_values, type_adapters
from .kind import Kind

_SAME = "if all ranks hold the same"
_TENSOR = "a tensor"
_VALUE = "a value"
_BOTH, _CONTENTS = f"{_TENSOR}, {_VALUE}", f"its contents, {_VALUE}"


def table() -> str:
    """Return the table in Markdown."""
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
    yield _names((*type_adapters.CHANGING, *ctypes_values.KINDS)), "in place", _SAME, _CONTENTS
    constants = (*type_adapters.CHANGELESS, type_adapters.DTYPE, type_adapters.NUMPY_SCALAR)
    yield _names(constants), "an equal one", _SAME, _CONTENTS
    named = (
        "members of an `Enum`, functions, classes, frozen dataclasses, named tuples, subclasses of `int` and the like"
    )
    yield named, "an equal one, found by its name", _SAME, _CONTENTS
    yield "objects of attributes, dataclasses, subclasses of containers", "in place", _SAME, _CONTENTS
    yield "objects of classes registered by `mt_resilient.register`", "in place, by its `restore`", _SAME, _CONTENTS


def _names(known: tuple[Kind, ...]) -> str:
    return ", ".join(f"`{kind.name}`" for kind in known)
