"""Values as records, each parsed once: who looks at the whole World several times a second finds nearly all of it as it was."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from .wire import loads

T = TypeVar("T")


class Parsed:
    """(class, key, value) → record, which is the last one's as long as `value` is the same object."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[bytes, Any]] = {}

    def __call__(self, cls: type[T], key: str, value: bytes) -> T:
        """Raises InternalError for what is no such record."""
        known = self._known.get(key)
        if known is None or known[0] is not value:
            known = self._known[key] = value, loads(cls, value)
        return known[1]  # type: ignore[no-any-return]

    def keep(self, keys: Collection[str]) -> None:
        """Forget what is under no key of these any more."""
        if len(self._known) > 1000 + 2 * len(keys):
            self._known = {key: known for key, known in self._known.items() if key in keys}
