"""The hooks of modules and optimizers: the objects in them, and the hooks that the script removes while it trains. A restart registers
removed hooks again, so a snapshot records which hooks are gone.

A hook's position among all hooks when the loop begins identifies it, as in `hook_objects.py`. Frameworks manage their own hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch.nn import Module

from .hook_objects import Held, Hook, is_scripts_hook, objects_in

_BESIDE = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
"""Further tables of a module that describe its hooks, under the same keys."""


class _Hook(NamedTuple):
    hooks: MutableMapping[Any, Any]
    key: Any
    hook: Any
    beside: Sequence[tuple[MutableMapping[Any, Any], Any]]
    """The further tables that list the hook, each with its entry for the hook."""


class Hooks:
    """The hooks of modules and their parameters, or of one optimizer, that exist when the loop begins."""

    def __init__(self, found: Iterable[Hook] = ()) -> None:
        self._held: dict[str, Held] = {}
        """The objects inside the hooks, by the names that `hook_objects.py` gives."""
        self._began: dict[str, _Hook] = {}
        """The script's hooks, by name."""
        self.add(found)

    def add(self, found: Iterable[Hook]) -> None:
        """Record the hooks of new modules."""
        found = [*found]
        for place, held in objects_in(found):
            self._held.setdefault(place, held)
        for place, thing, hooks, key in found:
            if is_scripts_hook(hooks[key]) and place not in self._began:
                tables = (vars(thing).get(name, {}) for name in _BESIDE) if isinstance(thing, Module) else ()
                beside = [(table, table[key]) for table in tables if key in table]
                self._began[place] = _Hook(hooks, key, hooks[key], beside)

    def objects(self) -> dict[str, Any]:
        """Return the object in each hook, by the hook's name. It is None if the hook was removed."""
        return {place: held() for place, held in self._held.items()}

    def gone(self) -> dict[str, str]:
        """Return the name of the function or class that each removed hook calls, by the hook's name."""
        return {place: _called(each.hook) for place, each in self._began.items() if each.key not in each.hooks}

    def restore(self, gone: Mapping[str, str]) -> None:
        """Remove the hooks listed in `gone`, and register all other recorded hooks again."""
        for place, each in self._began.items():
            if place in gone and gone[place] == _called(each.hook):
                for table in (each.hooks, *(table for table, _ in each.beside)):
                    table.pop(each.key, None)
            elif each.key not in each.hooks:
                _put_back(each)


def _put_back(hook: _Hook) -> None:
    """Register a hook again at its old position. Hooks that were registered later have greater keys."""
    later = {key: hook.hooks.pop(key) for key in [*hook.hooks] if key > hook.key}
    hook.hooks[hook.key] = hook.hook
    hook.hooks.update(later)
    for table, value in hook.beside:
        table[hook.key] = value


def _called(hook: Any) -> str:
    """Return the name of the function or class that a hook calls. If a restart registers other hooks, the names differ and no hook is
    removed."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
