"""Change a module right after its import, whichever code imports it.

    @after_import("megatron.core.jit")
    def change(module): ...

`watch()` starts the hook. Other import hooks on the same modules keep working, in either order. This file imports none of the changed
modules itself.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

Change = Callable[[Any], None]

CHANGES: dict[str, list[Change]] = {}
"""Functions that change a module, by the module's name."""


def after_import(module: str) -> Callable[[Change], Change]:
    """Return a decorator: the decorated function is called with `module` right after the module's import."""

    return into(CHANGES.setdefault(module, []))


def into(changes: list[Change]) -> Callable[[Change], Change]:
    """Return a decorator that adds a function to the list `changes`."""

    def add(change: Change) -> Change:
        changes.append(change)
        return change

    return add


def wanted(change: Change) -> bool:
    """Return False if MCORE_CPU_SHIM_SKIP=name,name lists the change."""
    return change.__name__ not in os.environ.get("MCORE_CPU_SHIM_SKIP", "").split(",")


def apply(name: str, module: ModuleType) -> None:
    for change in filter(wanted, CHANGES[name]):
        change(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds no module itself, but asks all *other* finders, and extends the loader that they return."""

    def __init__(self) -> None:
        self._asking: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name not in CHANGES or name in self._asking:
            return None
        self._asking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.discard(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            apply(name, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def watch() -> None:
    """Start to watch imports. A second call does no harm. Modules that are already imported stay unchanged."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
