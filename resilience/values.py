"""What lies under the job's keys, as records, each parsed once: whoever looks at thousands of nodes several times a second finds nearly all
as it was. `Mirror.changed` → `Values` → `world.world_of`."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from .wire import loads

T = TypeVar("T")

_LAST = chr(sys.maxunicode)
"""Behind all that a key may go on with."""


class _Group:
    """The records under one prefix, by the rest of the key, in its order."""

    def __init__(self, cls: type, names: Iterable[str]) -> None:
        self.cls = cls
        self.found: dict[str, Any] = {}
        self.stale = set(names)
        self.asked = True


class Values:
    def __init__(self, values: Mapping[str, bytes] | None = None) -> None:
        """values: by key."""
        self._values: dict[str, bytes] = dict(values or {})
        self._groups: dict[str, _Group] = {}

    def update(self, changed: Mapping[str, bytes | None]) -> None:
        """changed: by key; None: not there any more."""
        # Nobody asked for it since the last time: acknowledgements of an older generation.
        self._groups = {prefix: group for prefix, group in self._groups.items() if group.asked}
        for group in self._groups.values():
            group.asked = False
        for key, value in changed.items():
            if value is None:
                self._values.pop(key, None)
            else:
                self._values[key] = value
        keys = sorted(changed)
        for prefix, group in self._groups.items():
            under = slice(bisect_left(keys, prefix), bisect_left(keys, prefix + _LAST))
            group.stale.update(key[len(prefix) :] for key in keys[under])

    def under(self, prefix: str, cls: type[T]) -> dict[str, T]:
        """The records under `prefix` by the rest of the key, in its order; the caller's own. Raises InternalError for what is no such
        record."""
        group = self._groups.get(prefix)
        if group is None:
            size = len(prefix)
            group = self._groups[prefix] = _Group(cls, (key[size:] for key in self._values if key.startswith(prefix)))
        group.asked = True
        if group.stale:
            self._parse(prefix, group)
        return dict(group.found)

    def one(self, key: str, cls: type[T]) -> T | None:
        """The record at `key`. Raises InternalError."""
        return self.under(key, cls).get("")

    def _parse(self, prefix: str, group: _Group) -> None:
        further = False
        for name in group.stale:
            value = self._values.get(prefix + name)
            if value is None:
                group.found.pop(name, None)
            else:
                record: Any = loads(group.cls, value)
                further = further or name not in group.found
                group.found[name] = record
        if further:
            group.found = dict(sorted(group.found.items()))
        group.stale.clear()
