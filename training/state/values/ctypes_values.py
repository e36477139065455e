"""C values that Python changes in place: `ctypes` values, and `multiprocessing` values that several processes share.

value → (its type, its bytes) → the live value, which is filled in place, so that shared values stay shared.
"""

from __future__ import annotations

import ctypes
from multiprocessing import sharedctypes
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

from .kind import Kind

_DATA: Any = ctypes._SimpleCData.__mro__[1]
"""The base class of all types of ctypes."""
_NUMBERS = frozenset("cbBhHiIlLqQfdg?u")
"""Codes of types that are numbers or letters. All other types contain addresses, which mean nothing in another process."""


def type_of(kind: Any) -> Kind | None:
    """Return the adapter that takes values of this type apart; None if it is no C type, or contains addresses."""
    if issubclass(kind, SynchronizedBase):
        return SHARED
    return C if issubclass(kind, _DATA) and _holds_numbers(kind) else None


def raw_of(value: Any) -> Any:
    """Return the ctypes value inside a shared one. The call takes no lock, because a killed worker may hold the lock forever."""
    return value.get_obj() if isinstance(value, SynchronizedBase) else value


def bytes_of(value: Any) -> bytes:
    raw = raw_of(value)
    return ctypes.string_at(ctypes.addressof(raw), ctypes.sizeof(raw))


def size_of(value: Any) -> int:
    """Return the size of the value in bytes."""
    return ctypes.sizeof(raw_of(value))


def is_c(kind: type) -> bool:
    return issubclass(kind, (SynchronizedBase, _DATA))


def _holds_numbers(kind: Any) -> bool:
    if issubclass(kind, ctypes.Array):
        return _holds_numbers(kind._type_)
    if issubclass(kind, (ctypes.Structure, ctypes.Union)):
        return all(_holds_numbers(field[1]) for field in _fields(kind))
    return issubclass(kind, ctypes._SimpleCData) and kind._type_ in _NUMBERS


def _fields(kind: Any) -> list[Any]:
    return [field for each in kind.__mro__ for field in vars(each).get("_fields_", ())]


def _said(kind: Any) -> Any:
    """Return a description of the type, from which `_type` finds the type again."""
    return (_said(kind._type_), kind._length_) if issubclass(kind, ctypes.Array) else kind.__name__


def _type(said: Any) -> Any:
    if isinstance(said, tuple):
        return _type(said[0]) * said[1]
    found = getattr(ctypes, said, None)
    if not (isinstance(found, type) and issubclass(found, ctypes._SimpleCData)):
        raise ValueError(f"a {said} can be restored only into one that the script has created")
    return found


def _save(value: Any) -> Any:
    raw = raw_of(value)
    if not _holds_numbers(type(raw)):
        raise ValueError(f"a {type(raw).__name__} holds addresses")
    return _said(type(raw)), bytes_of(raw)


def _make(content: Any) -> Any:
    return _type(content[0])()


def _make_shared(content: Any) -> Any:
    return sharedctypes.synchronized(sharedctypes.copy(_make(content)))


def _fits(live: Any, content: Any) -> bool:
    return bool(_said(type(raw_of(live))) == content[0])


def _fill(live: Any, content: Any) -> None:
    raw, found = raw_of(live), content[1]
    if len(found) != ctypes.sizeof(raw):
        raise ValueError(f"a {type(raw).__name__} has {ctypes.sizeof(raw)} bytes, but had {len(found)} in the snapshot")
    ctypes.memmove(ctypes.addressof(raw), found, len(found))


C = Kind("ctypes", (), _save, _make, _fill, _fits)
SHARED = Kind("multiprocessing.Value", (), _save, _make_shared, _fill, _fits)
KINDS = (C, SHARED)
