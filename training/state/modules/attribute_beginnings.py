"""How modules and parameters were when they were seen first: what a restart makes again, and by which names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ...warm.side_effects import is_scripts
from ..values.borrowed_memory import Lenders, Loans
from . import attribute_rules
from .attribute_rules import Owner, is_constant, is_fixed, is_scripts_object, is_value, looked_at
from .attribute_sources import borrows
from .foreign_objects import Foreigners, is_foreign


class Began(NamedTuple):
    """One module or parameter, as it was seen first."""

    thing: Any
    made: Mapping[str, Any]
    """What is fixed, what borrows memory, and objects of other people's: the script makes it so again."""
    names: frozenset[str]
    """Of all attributes,"""
    kept: frozenset[str]
    """and of those that may be kept."""


NEW = Began(None, {}, frozenset(), frozenset())


class Beginnings:
    def __init__(self, lenders: Lenders, foreign: Foreigners) -> None:
        self._lenders, self._foreign = lenders, foreign
        self._began: dict[int, Began] = {}
        """By id."""

    def __contains__(self, thing: Any) -> bool:
        return id(thing) in self._began

    def of(self, thing: Any) -> Began:
        return self._began.get(id(thing), NEW)

    def add(self, thing: Any, owner: Owner, loans: Loans) -> None:
        if id(thing) in self._began:
            return
        own, kind = dict(looked_at(thing, owner)), type(thing)
        others = {name for name, value in own.items() if self.is_foreign(value, kind) or self._is_closed(value, kind)}
        for name in others:
            self._foreign.begin(own[name], name)
        made = {
            name: value
            for name, value in own.items()
            if name in others
            or is_fixed(value)
            or _is_sparse(value)
            or (owner is not Owner.LAYER and borrows(value, loans))
        }
        kept = {name for name, value in own.items() if name in others or _may_be_kept(value, kind)}
        self._began[id(thing)] = Began(thing, made, frozenset(own), frozenset(kept))

    def add_new(self, thing: Any) -> None:
        """It has no attributes yet."""
        self._began.setdefault(id(thing), NEW)

    def gone(self, thing: Any) -> list[str]:
        """Names of attributes that are deleted."""
        kept = self.of(thing).kept
        return sorted(kept - attribute_rules.every(thing).keys()) if kept else []

    def is_foreign(self, value: Any, of: type) -> bool:
        """Whether it is an object of other people's that a restart makes again, and that may change."""
        kind: Any = type(value)
        if is_constant(value) or not is_foreign(kind) or id(value) in self._lenders.names:
            return False
        return not (is_value(kind, of) or is_scripts(kind.__module__))

    def _is_closed(self, value: Any, of: type) -> bool:
        """Whether it is an object of the installed package that its module is of, and cannot be saved. Mostly it never changes."""
        kind: Any = type(value)
        if is_constant(value) or not is_foreign(kind) or id(value) in self._lenders.names:
            return False
        return is_value(kind, of) and not is_scripts(kind.__module__) and not self._foreign.packs(value)


def _is_sparse(value: Any) -> bool:
    """Whether it is a tensor that no snapshot holds. Mostly it is a graph's, and never changes."""
    return isinstance(value, torch.Tensor) and value.layout is not torch.strided


def _may_be_kept(value: Any, of: type) -> bool:
    return is_fixed(value) or is_value(type(value), of) or is_scripts_object(value)
