"""A cache of the values under the job's keys as parsed records. The leader reads thousands of nodes' values several times a second. Nearly
all are unchanged, and each is parsed once. `Mirror.changed` → `Values` → `state_reader.world_of`."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ..errors import InternalError
from .codec import loads

T = TypeVar("T")

_LAST = chr(sys.maxunicode)
"""Sorts after every character that a key may contain."""


class _Group:
    """The records under one prefix. The rest of each key is the record's name, and the records are sorted by name."""

    def __init__(self, prefix: str, cls: type) -> None:
        self.prefix, self.cls = prefix, cls
        self._found: dict[str, Any] = {}
        self._sorted = True

    def update(self, changed: Iterable[tuple[str, bytes | None]]) -> None:
        """Parse changed values. changed: by whole key; None: deleted. Raises InternalError for a value that is no record of the group's
        class."""
        size, found = len(self.prefix), self._found
        for key, value in changed:
            name = key[size:]
            if value is None:
                found.pop(name, None)
            else:
                self._sorted = self._sorted and name in found
                try:
                    found[name] = loads(self.cls, value)
                except InternalError as error:
                    raise InternalError(f"{key}: {error}") from error

    def copy(self) -> dict[str, Any]:
        if not self._sorted:
            self._found, self._sorted = dict(sorted(self._found.items())), True
        return dict(self._found)


class Values:
    def __init__(self, values: Mapping[str, bytes] | None = None) -> None:
        """values: the stored bytes, by key."""
        self._values: dict[str, bytes] = dict(values or {})
        self._groups: dict[type, _Group] = {}

    def update(self, changed: Mapping[str, bytes | None]) -> None:
        """Store changed values, and parse those under a known prefix. changed: by key; None: deleted. Raises InternalError for a value that
        is no record of the class that was asked for there."""
        for key, value in changed.items():
            if value is None:
                self._values.pop(key, None)
            else:
                self._values[key] = value
        keys = sorted(changed)
        for group in self._groups.values():
            under = slice(bisect_left(keys, group.prefix), bisect_left(keys, group.prefix + _LAST))
            group.update((key, changed[key]) for key in keys[under])

    def under(self, prefix: str, cls: type[T]) -> dict[str, T]:
        """Return the records under `prefix` in a new dict, by the rest of the key and sorted by it. Only one prefix of each class is
        cached: of acknowledgements, the newest generation's. Raises InternalError for a value that is no record of `cls`."""
        group = self._groups.get(cls)
        if group is None or group.prefix != prefix:
            group = _Group(prefix, cls)
            group.update((key, value) for key, value in self._values.items() if key.startswith(prefix))
            self._groups[cls] = group
        return group.copy()

    def text(self, key: str) -> str:
        """Return the plain text at `key`; empty: the key does not exist."""
        return self._values.get(key, b"").decode()

    def one(self, key: str, cls: type[T]) -> T | None:
        """Return the record at `key`; None: the key does not exist. Raises InternalError."""
        return self.under(key, cls).get("")
