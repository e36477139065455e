"""How values of the script's own classes, and values with a name, are taken apart and rebuilt: members of an Enum, functions and classes,
named tuples, objects of plain attributes. `type_adapters.py` does the same for types of libraries.

A class or function is stored as its module and name. A restore looks it up in modules that the script has imported, and imports nothing.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from ....resilience.errors import UsageError
from . import ctypes_values, type_adapters
from .kind import Kind, constant, fill_list, fill_ordered, fill_pairs, never_deleted, slot_values, slots_of

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, np.ufunc, type(np.mean))
_HARMLESS = frozenset(("math", "cmath", "_operator", "abs", "all", "any", "len", "max", "min", "pow", "round", "sum"))
"""Modules and functions of Python's standard library that only compute."""
_CHANGELESS = (int, float, complex, str, bytes, tuple, frozenset)
OBJECT, _FROZEN = "object", "frozen dataclass"
_ITSELF = "itself"
TYPED = "__orig_class__"
"""The attribute that `typing` sets on `Buffer[int]()`. This attribute is not training state."""
_LIST = Kind("list", (list,), list.copy, lambda c: [], fill_list)
_MAPPING = Kind("dict", (dict, Counter), dict, lambda c: {}, fill_pairs)
_ORDERED = Kind("OrderedDict", (OrderedDict,), dict, lambda c: OrderedDict(), fill_ordered)
_HELD: set[str] = set()
"""Functions and classes that this process's state has contained. A restore accepts a function of Python's library that may do more than
compute only from this set: a snapshot could otherwise replace a function by os.system."""


class NotFound(Exception):
    """A class or function does not exist under its recorded name."""


def _named(thing: Any) -> str:
    module, name, short = (str(getattr(thing, key, None)) for key in ("__module__", "__qualname__", "__name__"))
    # torch.tanh gives its own name as _VariableFunctionsClass.tanh
    direct = getattr(sys.modules.get(module), short, None) is thing
    where = f"{module}:{short if direct else name}"
    _HELD.add(where)
    if find(where) is not thing:
        raise NotFound(
            f"{where} names another object. A restart finds it by its name: define it in a module, under that name"
        )
    return where


def has_a_name(thing: Any) -> bool:
    """Return whether any process with the same imports finds this function or class by its name."""
    with suppress(NotFound):
        return not _is_guarded(_named(thing)) or isinstance(thing, type)
    return False


def _is_guarded(where: str) -> bool:
    """Return whether the name stands for a function of Python's standard library that may do more than compute."""
    module, _, name = where.partition(":")
    harmless = (name if module == "builtins" else module) in _HARMLESS
    return module.partition(".")[0] in sys.stdlib_module_names and not harmless


def find(where: str) -> Any:
    """Return the object that `module:name` names. Raises NotFound if the script has not imported it."""
    module, _, name = where.partition(":")
    found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if module not in sys.modules:
        raise NotFound(
            f"{where} is not found: import {module} before the Session is created, because a restart looks for it there"
        )
    if not isinstance(found, (type, *_FUNCTIONS)):
        raise NotFound(f"{where} is not found: it needs a name in a module, because a restart finds it by that name")
    if not isinstance(found, type) and where not in _HELD and _is_guarded(where):
        raise NotFound(
            f"{where} is a function of Python's own library, and this script's own state has never contained it"
        )
    return found


def _class(where: str, base: type) -> Any:
    found = find(where)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise NotFound(f"{where} is not a {base.__name__}")
    return found


def _member(content: Any) -> Any:
    where, member = content
    kind = _class(where, enum.Enum)
    return kind(member) if issubclass(kind, enum.Flag) else kind[member]


GLOBAL = constant("function or class", (), _named, find)
ENUM = constant("Enum", (), lambda v: (_named(type(v)), v.value if isinstance(v, enum.Flag) else v.name), _member)


def _base(kind: type) -> type:
    return next((base for base in _CHANGELESS if issubclass(kind, base)), object)


def _save_value(value: Any) -> Any:
    base: Any = _base(type(value))
    return (
        _named(type(value)),
        base(value) if base is not str else str.__str__(value),
        tuple(getattr(value, "__dict__", {}).items()),
    )


def _make_value(content: Any) -> Any:
    where, plain, attributes = content
    base: Any = type(plain)
    value = base.__new__(_class(where, base), plain)
    if attributes:  # a named tuple has no attributes
        vars(value).update(attributes)
    return value


VALUE = constant("named tuple", (), _save_value, _make_value)


def kind_of(kind: Any) -> Kind | None:
    """Return the adapter that takes values of this type apart; None if the type is not known."""
    if kind not in _BY_TYPE:
        _BY_TYPE[kind] = _found(kind)
    return _BY_TYPE[kind]


def _found(kind: type) -> Kind | None:
    if found := ctypes_values.type_of(kind):
        return found
    if issubclass(kind, enum.Enum):
        return ENUM
    if issubclass(kind, (type, *_FUNCTIONS)):
        return GLOBAL
    if issubclass(kind, np.dtype):
        return type_adapters.DTYPE
    if issubclass(kind, np.generic):
        return type_adapters.NUMPY_SCALAR
    if kind.__module__ == "torch.return_types":
        return type_adapters.RETURNED
    if _base(kind) is not object:
        return VALUE if _ordinary(kind, object) else None
    return _of_class(kind)


def _ordinary(kind: type, base: type) -> bool:
    """Return whether a value of this class is only its attributes and the contents of `base`: the class has no `__reduce__` of its own."""
    return kind.__reduce_ex__ is base.__reduce_ex__ and kind.__reduce__ is base.__reduce__


def _of_class(kind: type) -> Kind | None:
    held = next((_BY_BASE[base] for base in kind.__mro__ if base in _BY_BASE), None)
    base: Any = object if held is None else held.types[0]
    reduced = Counter if issubclass(kind, Counter) else object if base in (list, dict) else base
    if kind is object or not _ordinary(kind, reduced) or (held is None and not _plain(kind)):
        return None

    def save(value: Any) -> Any:
        return _named(kind), None if held is None else held.save(value), _attributes(value)

    def make(content: Any) -> Any:
        value = base.__new__(_class(content[0], base))
        if hasattr(base, "maxlen"):
            base.__init__(value, (), content[1][0])
        return value

    def fill(live: Any, content: Any) -> None:
        if held is not None and held.fill is not None:
            held.fill(live, content[1])
        _set_attributes(live, content[2])

    def fields(value: Any) -> Any:
        held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        more = {name: each for name, each in getattr(value, "__dict__", {}).items() if name != TYPED}
        return _named(kind), tuple({**held, **more}.items())

    frozen = held is None and getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
    if frozen and kind.__hash__ is not object.__hash__:
        return constant(_FROZEN, kind, fields, _frozen)
    return Kind(OBJECT, (kind,), save, make, fill, hidden=2)


def _frozen(content: Any) -> Any:
    where, fields = content
    value = object.__new__(_class(where, object))
    for name, field in fields:
        object.__setattr__(value, name, field)
    return value


def _plain(kind: type) -> bool:
    """Return whether such an object is only its attributes, or only what its `__getstate__` returns."""
    try:
        made: Any = object.__new__(kind)
        never_deleted(made)
        states = kind.__getstate__ is not object.__getstate__  # type: ignore[attr-defined]
        return states or object.__reduce_ex__(made, 2)[0] is copyreg.__newobj__  # type: ignore[attr-defined]
    except Exception:  # raised by `__new__` of a type written in C, or by a `__getnewargs__`
        return False


def _attributes(value: Any) -> Any:
    kind: Any = type(value)
    if kind.__getstate__ is not object.__getstate__:
        return "state", value.__getstate__()
    if getattr(value, "__dict__", None) is value:  # `self.__dict__ = self`, as in a dict whose keys are attributes
        return _ITSELF, None, {}
    slots = slot_values(value)
    attributes = getattr(value, "__dict__", None)
    if attributes and TYPED in attributes:
        attributes = {name: each for name, each in attributes.items() if name != TYPED}
    return "attributes", attributes, slots


def _set_attributes(live: Any, content: Any) -> None:
    how, attributes, *slots = content
    if how == _ITSELF:
        object.__setattr__(live, "__dict__", live)
    if how == "state" and hasattr(live, "__setstate__"):
        live.__setstate__(attributes)
        return
    if attributes is not None and attributes is not vars(live):
        typed = {name: each for name, each in vars(live).items() if name == TYPED}
        fill_pairs(vars(live), attributes | typed)
    kind: Any = type(live)
    for names in slots:
        for name in slots_of(kind):
            if name in names:
                object.__setattr__(live, name, names[name])
            elif hasattr(live, name):
                object.__delattr__(live, name)


_BY_TYPE: dict[type, Kind | None] = {
    each: kind for kind in (*type_adapters.CHANGELESS, *type_adapters.CHANGING) for each in kind.types
}
_BY_BASE = {
    each: kind
    for kind in (*type_adapters.CHANGING, _LIST, _MAPPING, _ORDERED)
    for each in kind.types
    if kind.name in ("set", "deque", "defaultdict", "bytearray", "array.array", "list", "dict", "OrderedDict")
}
_REGISTERED: set[type] = set()
_BY_NAME = {
    kind.name: kind
    for kind in (
        *type_adapters.CHANGELESS,
        *type_adapters.CHANGING,
        *ctypes_values.KINDS,
        type_adapters.DTYPE,
        type_adapters.NUMPY_SCALAR,
        type_adapters.RETURNED,
        GLOBAL,
        ENUM,
        VALUE,
    )
}


def tagged(tag: str, content: Any) -> Kind:
    """Return the adapter whose tag the value has. Raises NotFound if there is none."""
    if tag in _BY_NAME:
        return _BY_NAME[tag]
    by_class = content[0] if tag in (OBJECT, _FROZEN) else tag
    found = find(by_class)
    kind = kind_of(found) if isinstance(found, type) else None
    if kind is None or kind.name != tag:
        raise NotFound(f"{by_class} is not a class of the same kind any more")
    return kind


def is_registered(kind: type) -> bool:
    return kind in _REGISTERED


def register(
    kind: type, save: Callable[[Any], Any], restore: Callable[[Any, Any], Any], make: Callable[[], Any] | None = None
) -> None:
    """Register how objects of exactly this class are saved. `save(thing)` returns its state, made of values that a snapshot can hold.
    `restore(thing, state)` restores it in place. make: returns a new object; by default it calls the class without arguments."""
    if not isinstance(kind, type):
        raise UsageError(f"mt_resilient.register: {kind!r} is no class")
    build = make or kind
    _BY_TYPE[kind] = Kind(_named(kind), (kind,), save, lambda content: build(), restore)
    _REGISTERED.add(kind)
